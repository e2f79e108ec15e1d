"""The trellis formats: Viterbi against brute force and greed, layout, unit table."""

import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvproof import formats
from kvproof.formats import row, tcq

GENERATOR = Path(__file__).parents[2] / "tools" / "codebooks.py"
_spec = importlib.util.spec_from_file_location("codebooks", GENERATOR)
assert _spec and _spec.loader
codebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(codebooks)

CODES = [pytest.param(c, id=n) for n, c in tcq.CODES.items()]


def gaussian(rows: int, n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, n)).astype(np.float32)


def along(code: tcq.Trellis, z: np.ndarray, u: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Squared error of each row of z with the best entries along its path u, in float64."""
    book = np.asarray(code.book).reshape(-1, 4)
    entries = book.T[code.subsets(u, before)]  # [rows, n, entries of the subset]
    return np.square(z[..., None] - entries).min(axis=-1).sum(axis=-1)


@pytest.mark.parametrize("code", CODES)
def test_viterbi_equals_brute_force(code: tcq.Trellis) -> None:
    length = 10
    paths = np.array(list(itertools.product((0, 1), repeat=length)), np.uint8)
    starts = [s << (8 - code.memory) for s in range(code.states if code.free_start else 1)]
    for z in gaussian(10, length, seed=3) / code.start:
        every = np.broadcast_to(z, paths.shape)
        best = min(
            along(code, every, paths, np.full(len(paths), s, np.uint8)).min() for s in starts
        )
        _, u, before, error = code.search(z[None])
        assert along(code, z[None], u, before)[0] == pytest.approx(best, rel=1e-5)
        assert error[0] == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("code", CODES)
def test_search_reports_the_error_of_what_it_returns(code: tcq.Trellis) -> None:
    z = gaussian(50, 96, seed=4) / code.start
    m, u, before, error = code.search(z)
    np.testing.assert_allclose(
        np.square(code.values(m, u, before) - z).sum(axis=-1), error, rtol=1e-5
    )
    assert set(np.unique(m)) == set(range(2 ** (code.bits - 1)))


@pytest.mark.parametrize("code", CODES)
def test_viterbi_beats_greed(code: tcq.Trellis) -> None:
    z = gaussian(200, 64, seed=5) / code.start
    u, zero = np.zeros(z.shape, np.uint8), np.zeros(len(z), np.uint8)
    book = np.asarray(code.book).reshape(-1, 4).T
    for t in range(z.shape[-1]):
        errors = []
        for bit in (0, 1):
            u[:, t] = bit
            entries = book[code.subsets(u, zero)[:, t]]
            errors.append(np.square(z[:, t, None] - entries).min(axis=-1))
        u[:, t] = errors[1] < errors[0]
    greedy, best = along(code, z, u, zero), code.search(z)[3]
    assert (best <= greedy * (1 + 1e-6)).all() and (best < 0.9 * greedy).any()


@pytest.mark.parametrize("code", CODES)
def test_every_branch_merges_from_the_lower_predecessor_on_a_tie(code: tcq.Trellis) -> None:
    z = np.zeros((1, 24), np.float32)  # entries come in pairs of equal distance from 0
    _, u, before, error = code.search(z)
    assert error[0] == pytest.approx(along(code, z, u, before)[0])
    again = code.search(np.zeros((3, 24), np.float32))[1]
    np.testing.assert_array_equal(again, np.repeat(u, 3, axis=0))


def test_labels_are_ungerboecks() -> None:
    """From a state the two branches carry subsets 0 and 2, or 1 and 3; into a state likewise."""
    for code in tcq.CODES.values():
        low, high = code._labels()
        for i in range(code.states // 2):
            assert {abs(int(low[i, 0]) - int(low[i, 1])), 2} == {2}
            for u in (0, 1):
                assert {abs(int(low[i, u]) - int(high[i, u])), 2} == {2}


@pytest.mark.parametrize("name", tcq.CODES)
@pytest.mark.parametrize("n", [16, 48, 80, 128])
def test_layout_bit_by_bit(name: str, n: int) -> None:
    """Decode with plain integers, from the words of docs/formats.md."""
    code, f = tcq.CODES[name], formats.get(name)
    row = f.encode(gaussian(1, n, seed=n))[0]
    assert len(row) == n * code.bits // 8 + 1 + code.free_start == f.row_bytes(n)
    bits = [int(byte) >> i & 1 for byte in row[: n * code.bits // 8] for i in range(8)]
    start = [int(row[-2]) >> i & 1 if code.free_start else 0 for i in range(8)]
    expected = np.zeros(n)
    for t in range(n):
        group, p = t // 32 * 32, t % 32
        quarter = min(32, n - group) // 4
        value = group + quarter * (p % 4) + p // 4
        if code.bits == 2:
            m, path = bits[t], bits[n:]
        else:
            m, path = bits[2 * t] + 2 * bits[2 * t + 1], bits[2 * n :]
        if code.bits == 4:
            m, path = m + 4 * path[t], path[n:]
        past = [(start + path)[8 + t - j] for j in range(code.memory + 1)]
        z1 = sum(past[j] for j in range(code.memory + 1) if code.taps1 >> j & 1) % 2
        z0 = sum(past[j] for j in range(code.memory + 1) if code.taps0 >> j & 1) % 2
        expected[value] = code.book[4 * m + 2 * z1 + z0]
    expected *= float(np.float16(2.0 ** (int(row[-1]) / 8 - 20)))
    np.testing.assert_array_equal(f.decode_rotated(row), expected)


def test_units_are_fp16_and_cuts_lie_between() -> None:
    assert tcq.UNITS[0] == 0 and (np.diff(tcq.UNITS) > 0).all()
    np.testing.assert_array_equal(tcq.UNITS.astype(np.float16).astype(np.float32), tcq.UNITS)
    assert (tcq.UNIT_CUTS[:-1] < tcq.UNITS[1:]).all() and (tcq.UNIT_CUTS[1:] > tcq.UNITS[1:]).all()


@pytest.mark.parametrize("name", tcq.CODES)
def test_more_tries_never_do_worse(name: str) -> None:
    code = tcq.CODES[name]
    y = gaussian(300, 128, seed=6)
    errors = []
    for offsets in ((0,), code.offsets):
        b, _ = tcq._encode(replace(code, offsets=offsets), y)
        errors.append(np.square(tcq._decode(code, b) - y).sum(axis=-1))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert errors[1].sum() < 0.99 * errors[0].sum()


@pytest.mark.parametrize("name", tcq.CODES)
def test_rows_out_of_the_tables_range_are_counted(name: str) -> None:
    f = formats.get(name)
    x = gaussian(4, 128)
    x[1] *= np.float32(1e-9)
    x[2] *= np.float32(1e9)
    packed, counters = f.encode_counted(x)
    assert counters == formats.Counters(scale_saturated=1, scale_flushed=1)
    assert not packed[1].any() and packed[2, -1] == 255
    y = f.decode(packed)
    assert not y[1].any() and np.isfinite(y).all()
    large = tcq.CODES[name].book[-1] * tcq.UNITS[255]
    assert np.abs(f.decode_rotated(packed[2])).max() == large


def test_trellis_bytes_are_not_scalar_bytes() -> None:
    x = gaussian(64, 128)
    for trellis, scalar in (("tcq4", "tq4"), ("tcq3", "tq3"), ("tcq2", "tq2")):
        a, b = formats.get(trellis), formats.get(scalar)
        n = 16 * tcq.CODES[trellis].bits
        plain, coded = b.encode(x)[:, :n], a.encode(x)[:, :n]
        assert (plain != coded).mean() > 0.5
        error = [np.square(f.decode(f.encode(x)) - x).sum() for f in (a, b)]
        assert error[0] < error[1] * 10**-0.1


# What the trellis formats are for, at head_dim 128: relative MSE on N(0,1), and bits.
BARS = {
    "tcq4": 0.0066, "tcq4_64": 0.0062, "tcq3": 0.0226, "tcq3_64": 0.0212, "tcq2": 0.082,
    "tcq2_64": 0.0765,
}  # fmt: skip


@pytest.mark.parametrize("name", tcq.CODES)
def test_bars(name: str) -> None:
    f = formats.get(name)
    x = gaussian(4096, 128, seed=11)
    error = np.square(f.decode(f.encode(x)) - x).sum() / np.square(x).sum()
    assert error <= BARS[name]
    assert f.bits(128) <= tcq.CODES[name].bits + 0.16


def test_the_generator_gives_the_shipped_codebook() -> None:
    half, start = codebooks.trained("tcq2")
    code = tcq.CODES["tcq2"]
    assert (row.symmetric(half), np.float32(start)) == (code.book, code.start)


@pytest.mark.parametrize("name", tcq.CODES)
def test_shipped_codebooks_are_stationary(name: str) -> None:
    """One more step of training gains nothing that matters."""
    code = tcq.CODES[name]
    encode = codebooks.trellis_encoder(code)
    book, x = np.asarray(code.book) * float(code.start), gaussian(1024, 128, seed=12)
    before = codebooks.error(encode, book, 1.0, x)
    after = codebooks.error(encode, codebooks.lloyd_step(encode, book, 1.0, x), 1.0, x)
    assert abs(after / before - 1) < 0.005
