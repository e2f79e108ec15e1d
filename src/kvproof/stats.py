"""Estimates with intervals, all deterministic: the same numbers give the same interval.

Intervals are 95 % percentile bootstrap intervals from a fixed seed. Timings are compared in
interleaved rounds, so that a slow minute of the machine hits both sides. Per-token figures are
correlated along the text, so whole blocks of tokens are resampled; single tokens would give
intervals that are too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
_RESAMPLES = 4000
_SEED = 20260129


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval [low, high], from n observations."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


Numbers = Sequence[float] | npt.NDArray[np.floating]


def _observations(name: str, values: Numbers, least: int) -> npt.NDArray[np.float64]:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1:
        raise ValueError(f"{name}: expected one axis of observations, found shape {x.shape}")
    if len(x) < least:
        raise ValueError(f"{name}: {len(x)} observations, an interval needs at least {least}")
    bad = np.flatnonzero(~np.isfinite(x))
    if len(bad):
        raise ValueError(f"{name}: observation {bad[0]} is {x[bad[0]]}, not a finite number")
    return x


def _interval(draws: npt.NDArray[np.float64]) -> tuple[float, float]:
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(draws, [tail, 100.0 - tail])
    return float(low), float(high)


def interleaved_ratio(times_a: Numbers, times_b: Numbers) -> Estimate:
    """Median over rounds of b / a (below 1: b is faster), with its interval.

    Round i must have timed a and b one after the other. At least 3 rounds; below 6 the interval
    spans the whole range of the rounds and covers less than 95 %. ValueError on unequal lengths,
    times <= 0, non-finite times.
    """
    a = _observations("times_a", times_a, 3)
    b = _observations("times_b", times_b, 3)
    if len(a) != len(b):
        raise ValueError(f"{len(a)} rounds of a and {len(b)} of b: they must be timed in pairs")
    if min(a.min(), b.min()) <= 0.0:
        raise ValueError(f"a time of {min(a.min(), b.min())} is not positive")
    ratio = b / a
    picks = np.random.default_rng(_SEED).integers(0, len(ratio), (_RESAMPLES, len(ratio)))
    low, high = _interval(np.median(ratio[picks], axis=1))
    return Estimate(float(np.median(ratio)), low, high, len(ratio))


def paired_mean(x: Numbers, block: int = 32) -> Estimate:
    """Mean of per-token figures (differences, divergences, 0/1 hits) with its interval.

    Circular block bootstrap: blocks of `block` neighbouring tokens, at most n / 8 of them so that
    at least 8 blocks are drawn. ValueError below 8 tokens, on non-finite figures, on block < 1.
    """
    x64 = _observations("x", x, 8)
    value = float(x64.mean())
    low, high = _interval(_block_draws(x64, block))
    return Estimate(value, min(low, value), max(high, value), len(x64))


def _block_draws(x: npt.NDArray[np.float64], block: int) -> npt.NDArray[np.float64]:
    """Means of resampled blocks; the draws are the same blocks for any figures of equal length."""
    if block < 1:
        raise ValueError(f"block {block}: expected at least 1 token")
    n = len(x)
    length = min(block, n // 8)
    count = -(-n // length)
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([x, x[: length - 1]]))])
    starts = np.random.default_rng(_SEED).integers(0, n, (_RESAMPLES, count))
    draws = (sums[starts + length] - sums[starts]).sum(axis=1) / (count * length)
    # m blocks vary less than the law they come from by sqrt((m - 1) / m); widen by that factor.
    widened: npt.NDArray[np.float64]
    widened = x.mean() + (draws - draws.mean()) * np.sqrt(count / (count - 1))
    return widened


def paired_ratio(a: Numbers, b: Numbers, block: int = 32) -> Estimate:
    """Mean of a over mean of b with its interval; a and b are figures of the same tokens.

    Circular block bootstrap as in `paired_mean`: both sides of a draw have the same tokens, so what
    is hard for both does not widen the interval. ValueError on unequal lengths and where the mean
    of b is not positive in every draw.
    """
    x, y = _observations("a", a, 8), _observations("b", b, 8)
    if len(x) != len(y):
        raise ValueError(
            f"{len(x)} figures of a and {len(y)} of b: they must be of the same tokens"
        )
    both = np.stack([_block_draws(v, block) for v in (x, y)])
    if y.mean() <= 0 or both[1].min() <= 0:
        raise ValueError("the mean of b is not positive in every draw")
    value = float(x.mean() / y.mean())
    low, high = _interval(both[0] / both[1])
    return Estimate(value, min(low, value), max(high, value), len(x))
