"""Rate and distortion: what error a format leaves at its bits, what no scalar code can beat, and
which formats no other one beats.

Errors are relative to the energy of the rows. Scores are dot products times the attention's scale,
so their errors are in nats. Nothing here is timed or decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.backends import Backend
from kvproof.formats import Format, all_formats

Floats = NDArray[np.float32]

VALUES = 2**18  # of a N(0,1) table: relative errors repeat within 1 % from seed to seed
# Where only the NumPy reference can encode: a trellis of 64 states takes minutes a million values.
REFERENCE_VALUES = 2**16
QUERIES = 64
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


@lru_cache(maxsize=256)
def scalar_floor(bits: int, dimension: int | None) -> float:
    """Mean squared error of the best scalar quantiser of 2^bits levels (Lloyd-Max) for a coordinate
    of unit variance of a vector uniform on the sphere of `dimension`, None for a Gaussian.

    No scalar code of rows whose norm is stored exactly goes below it. ValueError below dimension 4.
    """
    if dimension is not None and dimension < 4:
        raise ValueError(f"dimension {dimension}: the density of a coordinate needs at least 4")
    # exp(-72) of the mass lies beyond 12 standard deviations.
    top = 12.0 if dimension is None else min(math.sqrt(dimension), 12.0)

    def density(x: NDArray[np.float64]) -> NDArray[np.float64]:
        if dimension is None:
            return np.exp(-x * x / 2)
        return np.maximum(1 - x * x / dimension, 0) ** ((dimension - 3) / 2)

    if bits == 0:
        return 1.0
    count = 2 ** (bits - 1)  # levels of the positive half; the density is even

    def moments(cuts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Integrals of 1, x and x^2 times the density between neighbouring cuts, [3, count]."""
        half, middle = np.diff(cuts)[:, None] / 2, (cuts[1:, None] + cuts[:-1, None]) / 2
        x = middle + half * _NODES
        mass = density(x) * _WEIGHTS * half
        return np.stack([mass.sum(axis=1), (mass * x).sum(axis=1), (mass * x * x).sum(axis=1)])

    # Levels dense as the cube root of the density are close to the best ones; Lloyd's steps lead
    # into the reach of Newton's method on "every level is the mean of its cell".
    grid = np.linspace(0, top, 20001)
    share = np.cumsum(np.cbrt(density(grid)))
    levels = np.interp((np.arange(count) + 0.5) / count, share / share[-1], grid)
    for step in range(200):
        cuts = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [top]])
        mass, first, _ = moments(cuts)
        means = first / mass
        if np.abs(means - levels).max() < 1e-12:
            break
        if step % 10 < 8:
            levels = means
            continue
        at = density(cuts) * 0.5
        below, above = (levels - cuts[:-1]) * at[:-1], (levels - cuts[1:]) * at[1:]
        below[0] = above[-1] = 0.0  # the outer cuts do not move
        slope = np.diag(mass + above - below)
        slope += np.diag(above[:-1], 1) - np.diag(below[1:], -1)
        moved = levels - np.linalg.solve(slope, levels * mass - first)
        if moved[0] > 0 and moved[-1] < top and (np.diff(moved) > 0).all():
            levels = moved
    else:
        raise ArithmeticError(f"the floor of {bits} bits at dimension {dimension} was not found")
    cuts = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [top]])
    mass, first, second = moments(cuts)
    error = second - 2 * levels * first + levels * levels * mass
    return float(error.sum() / mass.sum())


def code_bits(f: Format, head_dim: int) -> int | None:
    """Bits of a value's code, scales not counted; None where values are not coded one by one."""
    if f.block_size == 1:
        return None
    if f.bits_per_code is not None:
        return f.bits_per_code
    whole = int(f.bits(head_dim))
    if f.codebook is not None and len(f.codebook) <= 2**whole:
        return len(f.codebook).bit_length() - 1
    return whole


def floor_of(f: Format, head_dim: int) -> float | None:
    """The scalar floor at a format's code bits and block; None where no scalar code is its peer."""
    bits = code_bits(f, head_dim)
    return None if bits is None else scalar_floor(bits, f.block_size or head_dim)


def above_bound(error: float, bits: float) -> float | None:
    """Decibels of a relative error above 4^-bits, the bound of a Gaussian source; None without an
    error."""
    return 10 * math.log10(error) + 10 * math.log10(4) * bits if error > 0 else None


def relative_mse(x: Floats, y: Floats) -> float:
    """Energy of y - x over that of x, summed in float64; 0 where both are zero."""
    error = float(np.square(y.astype(np.float64) - x).sum())
    power = float(np.square(x, dtype=np.float64).sum())
    if power == 0:
        return 0.0 if error == 0 else math.inf
    return error / power


@dataclass(frozen=True)
class Gaussian:
    """Figures of one format on rows of N(0,1). `encoder` is the backend that wrote the bytes."""

    values: int
    encoder: str
    relative_mse: float
    score_correlation: float


def encoder_of(f: Format, head_dim: int, backend: Backend | None) -> Backend | None:
    """`backend` if it can encode and decode the format, otherwise None: the NumPy reference."""
    if backend is None or any(backend.refuses(op, f, head_dim) for op in ("encode", "decode")):
        return None
    return backend


def stored(f: Format, x: Floats, backend: Backend | None, scale: Floats | None = None) -> Floats:
    """Rows float32 `[..., n]` after encode and decode, in the plain basis."""
    be = encoder_of(f, x.shape[-1], backend)
    if be is not None:
        return be.decode(f, be.encode(f, x, scale), scale)
    factor = np.float32(1) if scale is None else scale
    return f.decode(f.encode(x, factor), factor)


def on_gaussian(f: Format, head_dim: int, backend: Backend | None) -> Gaussian:
    """The format on rows of N(0,1), the same rows for every format of a width."""
    be = encoder_of(f, head_dim, backend)
    values = VALUES if be is not None else REFERENCE_VALUES
    rows = max(1, values // head_dim)
    # One draw for both sizes, so that a smaller table holds the first rows of the larger one.
    x = np.random.default_rng(0).standard_normal((rows, head_dim), np.float32)
    y = stored(f, x, be)
    q = np.random.default_rng(1).standard_normal((QUERIES, head_dim), np.float32).astype(np.float64)
    a, b = (q @ side.T.astype(np.float64) for side in (x, y))
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    correlation = float((a * b).sum()) / norm if norm > 0 else 0.0
    return Gaussian(
        rows * head_dim, be.name if be else "reference", relative_mse(x, y), correlation
    )


def centred_scores(
    q: Floats, k: Floats, scale: float, window: int | None = None, every: int = 1
) -> float:
    """RMS in nats of causal scores, from each query's scores their mean over its keys taken off.

    q `[n, heads, d]`, k `[n, kv_heads, d]` of the same n positions; every `every`-th query counts.
    Softmax does not see that mean, so for k = stored - exact this is the error that it sees, which
    errors of rows do not know of. The difference of keys, not of scores: nothing cancels.
    """
    n, heads, d = q.shape
    group = heads // k.shape[1]
    position = np.arange(n - 1, -1, -every)[::-1]
    seen = np.arange(n)[None, :] <= position[:, None]
    if window is not None:
        seen &= np.arange(n)[None, :] > position[:, None] - window
    count = seen.sum(axis=1)[:, None, None]
    total = 0.0
    for head in range(k.shape[1]):
        asked = q[position, head * group : (head + 1) * group].reshape(-1, d)
        scores = (asked @ k[:, head].T).astype(np.float64).reshape(len(position), group, n)
        scores *= seen[:, None]
        scores -= scores.sum(axis=2, keepdims=True) / count
        scores *= seen[:, None]
        total += float(np.vdot(scores, scores))
    return scale * math.sqrt(total / (heads * int(count.sum())))


Points = Mapping[str, tuple[float, float]]  # name -> (bits, error)


def dominators(name: str, points: Points) -> list[str]:
    """Names that have no more bits and no more error than `name`, and less of one of them."""
    bits, error = points[name]
    return [
        other
        for other, (b, e) in points.items()
        if b <= bits and e <= error and (b < bits or e < error)
    ]


def frontier(points: Points) -> set[str]:
    """Names that no other one dominates."""
    return {name for name in points if not dominators(name, points)}


def is_own(f: Format) -> bool:
    """Whether the format is kvproof's own rather than a peer's."""
    return f.source.startswith("kvproof")


def gaussian_table(
    head_dim: int, backend: Backend | None, progress: Callable[[str], None] | None = None
) -> list[dict[str, Any]]:
    """One entry a format, ready for JSON: what it is, and its figures on rows of N(0,1).

    An entry has "refused" (None, or why the format does not take this width; then it has no
    figures), and with figures "frontier" and "dominated_by": the formats that are no larger and no
    worse. `backend` encodes what it can, the NumPy reference the rest ("encoder" says which).
    """
    tell = progress or (lambda _: None)
    entries: list[dict[str, Any]] = []
    points: dict[str, tuple[float, float]] = {}
    for f in all_formats():
        reason = f.refuses(head_dim, min(f.sides))
        entry: dict[str, Any] = {
            "name": f.name,
            "sides": sorted(f.sides),
            "rotation": f.rotation,
            "multiple": f.multiple,
            "source": f.source,
            "own": is_own(f),
            "refused": reason,
        }
        if reason is None:
            tell(f"formats: {f.name} on N(0,1)")
            found = on_gaussian(f, head_dim, backend)
            bits, error = f.bits(head_dim), found.relative_mse
            db = above_bound(error, bits)
            entry |= {
                "bits": bits,
                "relative_mse": error,
                "db": db,
                "db_above_bound": db,  # its name before "db"
                "floor": floor_of(f, head_dim),
                "score_correlation": found.score_correlation,
                "values": found.values,
                "encoder": found.encoder,
            }
            points[f.name] = (bits, error)
        entries.append(entry)
    for entry in entries:
        if entry["refused"] is None:
            entry["dominated_by"] = dominators(entry["name"], points)
            entry["frontier"] = not entry["dominated_by"]
    return entries
