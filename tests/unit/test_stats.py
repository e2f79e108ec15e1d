"""Estimates: right values, honest intervals, the same every time, bad input refused."""

import numpy as np
import pytest

from kvproof.stats import Estimate, interleaved_ratio, paired_mean, paired_ratio


def test_ratio_is_paired_so_a_slow_minute_cancels():
    rng = np.random.default_rng(1)
    load = np.exp(rng.standard_normal(41))  # the machine's speed wanders by a factor of three
    a = 1.0 * load * (1 + 0.01 * rng.standard_normal(41))
    b = 0.5 * load * (1 + 0.01 * rng.standard_normal(41))
    ratio = interleaved_ratio(a, b)
    assert ratio.low <= 0.5 <= ratio.high
    assert ratio.high - ratio.low < 0.02
    assert ratio.n == 41


def test_three_rounds_give_the_whole_range():
    ratio = interleaved_ratio([1.0, 1.0, 1.0], [0.4, 0.5, 0.9])
    assert ratio == Estimate(0.5, 0.4, 0.9, 3)


def test_same_numbers_same_interval():
    x = np.random.default_rng(2).standard_normal(300)
    assert paired_mean(x) == paired_mean(x.copy())
    assert interleaved_ratio(abs(x) + 1, abs(x) + 2) == interleaved_ratio(abs(x) + 1, abs(x) + 2)


def test_block_bootstrap_covers_the_mean_of_correlated_tokens():
    covered = tokenwise = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal(1024)
        x = np.empty(1024)
        x[0] = noise[0]
        for t in range(1, 1024):
            x[t] = 0.7 * x[t - 1] + noise[t]
        blocks, single = paired_mean(x, block=32), paired_mean(x, block=1)
        covered += blocks.low <= 0.0 <= blocks.high
        tokenwise += single.low <= 0.0 <= single.high
    assert covered >= 0.88 * 60
    assert tokenwise < 0.75 * 60  # why blocks are needed


def test_constant_figures_have_a_point_interval():
    assert paired_mean(np.full(64, 0.25)) == Estimate(0.25, 0.25, 0.25, 64)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: interleaved_ratio([], []), "at least 3"),
        (lambda: interleaved_ratio([1, 2, 3], [1, 2]), "at least 3"),
        (lambda: interleaved_ratio([1, 2, 3], [1, 2, 3, 4]), "in pairs"),
        (lambda: interleaved_ratio([1, 2, 0], [1, 2, 3]), "not positive"),
        (lambda: interleaved_ratio([1, 2, np.nan], [1, 2, 3]), "observation 2 is nan"),
        (lambda: paired_mean([]), "at least 8"),
        (lambda: paired_mean([np.inf] * 9), "observation 0 is inf"),
        (lambda: paired_mean(np.zeros((9, 2))), "one axis"),
        (lambda: paired_mean(np.zeros(9), block=0), "block 0"),
    ],
)
def test_bad_input_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_paired_ratio_knows_what_both_sides_share():
    rng = np.random.default_rng(0)
    hard = rng.gamma(1.0, 1.0, 2000)  # some tokens are hard for both
    b = hard * rng.uniform(0.9, 1.1, 2000)
    a = 0.25 * hard * rng.uniform(0.9, 1.1, 2000)
    e = paired_ratio(a, b)
    assert e.n == 2000 and e.value == pytest.approx(a.mean() / b.mean())
    assert 0.245 < e.low < e.value < e.high < 0.255
    assert paired_ratio(b, b).low == paired_ratio(b, b).high == 1.0


def test_paired_ratio_covers():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        hard = rng.gamma(1.0, 1.0, 256)
        e = paired_ratio(0.5 * hard * rng.gamma(4, 0.25, 256), hard, block=1)
        inside += e.low <= 0.5 <= e.high
    assert 178 <= inside <= 200


@pytest.mark.parametrize(
    ("a", "b"), [(np.ones(9), np.ones(8)), (np.ones(8), np.zeros(8)), (np.ones(3), np.ones(3))]
)
def test_paired_ratio_refuses_what_is_no_ratio(a, b):
    with pytest.raises(ValueError, match=r"figures|positive|observations"):
        paired_ratio(a, b)
