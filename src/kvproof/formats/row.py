"""kvproof's row-scaled TurboQuant: tq4 and tq3, one fp16 unit a row and integer codebooks.

A row (one head of one token) is rotated across the whole head, and every value is stored as the
index of an integer in a small codebook; value = unit * codebook[code]. The integers are Lloyd-Max
centroids of N(0,1) rounded to int8, so integer dot products are exact and every backend computes
the same numbers. The unit is searched for the least squared error of the row; all of it is
float32 in one fixed order, so that every backend writes the same bytes. docs/formats.md gives the
byte layout.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvproof.formats.base import (
    Bytes,
    Counters,
    Floats,
    Format,
    cuts_below,
    nearest_code,
    pack_nibbles,
    reciprocal,
    store_fp16,
    unpack_nibbles,
)
from kvproof.rotation import HEAD

KV = frozenset({"key", "value"})

_HALF4 = (5, 15, 25, 36, 48, 62, 79, 105)
_HALF3 = (10, 31, 55, 88)
CODEBOOK4 = tuple(float(-v) for v in reversed(_HALF4)) + tuple(float(v) for v in _HALF4)
CODEBOOK3 = tuple(float(-v) for v in reversed(_HALF3)) + tuple(float(v) for v in _HALF3)
# Unit of a unit-variance row: the Lloyd-Max step, in units of the integer codebook.
START4, START3 = np.float32(0.0258), np.float32(0.0245)
# Multiples of it that are tried. The error has several minima over the unit, so a search finds
# better ones than refining a single start; at d = 128 these seven win 13 % of the error.
TRIES = tuple(np.float32(m) for m in (0.85, 0.90, 0.95, 1.00, 1.05, 1.10, 1.15))


def groups(n: int) -> list[tuple[int, int]]:
    """(start, size) of the code groups of a row: 32 values each, and 16 where that remains."""
    return [(s, min(32, n - s)) for s in range(0, n, 32)]


def lane_sum(terms: Floats) -> Floats:
    """Sum of float32 `[m, n]` (n a multiple of 16) along n in one fixed order.

    Sixteen running sums (term i goes to sum i mod 16, in order of i), then sum i += sum i + 8, 4,
    2, 1. Vector units of any width repeat this exactly, so every backend makes the same bytes.
    """
    lanes = terms.reshape(len(terms), -1, 16)
    total = lanes[:, 0].copy()
    for i in range(1, lanes.shape[1]):
        total += lanes[:, i]
    for half in (8, 4, 2, 1):
        total = total[:, :half] + total[:, half : 2 * half]
    out: Floats = total[:, 0]
    return out


def fit_unit(
    y: Floats, book: tuple[float, ...], start: np.float32
) -> tuple[NDArray[np.uint8], Floats]:
    """Codes uint8 `[m, n]` and unit float32 `[m]` of rotated rows y `[m, n]`.

    All in float32, sums by `lane_sum`. For each multiple in TRIES: codes = nearest(y * (1 / u)) for
    u = start * RMS(y) * multiple, and unit = <y, c> / <c, c>, the least-squares unit of the codes;
    the try with the largest <y, c> * unit (the energy that is explained; the first on a tie) wins.
    Then once more codes = nearest(y * (1 / unit)) and their least-squares unit. Rows whose
    1 / u is not finite get code 0 and their u.
    """
    cuts, values = cuts_below(book), np.asarray(book, np.float32)

    def fitted(unit: Floats) -> tuple[NDArray[np.uint8], Floats, Floats]:
        codes = nearest_code(y * reciprocal(unit)[:, None], cuts)
        c = values[codes]
        correlation = lane_sum(y * c)
        best = correlation / lane_sum(c * c)
        return codes, best, correlation * best

    base = np.sqrt(lane_sum(y * y) / np.float32(y.shape[-1])) * start
    unit, gain = base.copy(), np.full(len(y), -np.inf, np.float32)
    for multiple in TRIES:
        _, candidate, explained = fitted(base * multiple)
        better = explained > gain
        unit, gain = np.where(better, candidate, unit), np.where(better, explained, gain)
    codes, final, _ = fitted(unit)
    live = (reciprocal(base) != 0) & (reciprocal(unit) != 0)
    codes[~live] = 0
    return codes, np.where(live, final, base)


def _finish(planes: list[Bytes], unit: Floats, y: Floats) -> tuple[Bytes, Counters]:
    half, saturated, _ = store_fp16(unit)
    flushed = (half == 0) & y.any(
        axis=-1
    )  # squares of tiny rows vanish, so their unit is 0 already
    out = np.concatenate([*planes, half[:, None].view(np.uint8)], axis=-1)
    return out, Counters(saturated, int(flushed.sum()))


def _encode_tq4(y: Floats) -> tuple[Bytes, Counters]:
    codes, unit = fit_unit(y, CODEBOOK4, START4)
    return _finish([pack_nibbles(codes[:, s : s + n]) for s, n in groups(y.shape[-1])], unit, y)


def _encode_tq3(y: Floats) -> tuple[Bytes, Counters]:
    codes, unit = fit_unit(y, CODEBOOK3, START3)
    low = []
    for s, n in groups(y.shape[-1]):
        quarter = (codes[:, s : s + n] & 3).reshape(len(y), 4, n // 4)
        packed = quarter[:, 0] | quarter[:, 1] << 2 | quarter[:, 2] << 4 | quarter[:, 3] << 6
        low.append(packed.astype(np.uint8))
    high = np.packbits(codes >> 2, axis=-1, bitorder="little")
    return _finish([*low, high], unit, y)


def _unit(b: Bytes) -> NDArray[np.float64]:
    return b[:, -2:].copy().view(np.float16).astype(np.float64)


def _decode_tq4(b: Bytes) -> NDArray[np.float64]:
    n = (b.shape[-1] - 2) * 2
    codes = np.concatenate(
        [unpack_nibbles(b[:, s // 2 : (s + size) // 2]) for s, size in groups(n)], axis=-1
    )
    unit = _unit(b)
    return np.where(unit == 0, 0.0, np.asarray(CODEBOOK4)[codes] * unit)


def _decode_tq3(b: Bytes) -> NDArray[np.float64]:
    n = (b.shape[-1] - 2) * 8 // 3
    low = []
    for s, size in groups(n):
        plane = b[:, s // 4 : (s + size) // 4]
        low.append(np.concatenate([plane >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1))
    high = np.unpackbits(b[:, n // 4 : n // 4 + n // 8], axis=-1, bitorder="little")
    codes = np.concatenate(low, axis=-1) | high << 2
    unit = _unit(b)
    return np.where(unit == 0, 0.0, np.asarray(CODEBOOK3)[codes] * unit)


TQ4 = Format(
    "tq4", None, None, 16, KV, _encode_tq4, _decode_tq4, spin=HEAD, bits_per_code=4,
    codebook=CODEBOOK4, source="kvproof: row-scaled TurboQuant",
)  # fmt: skip
TQ3 = Format(
    "tq3", None, None, 16, KV, _encode_tq3, _decode_tq3, spin=HEAD, bits_per_code=3,
    codebook=CODEBOOK3, source="kvproof: row-scaled TurboQuant",
)  # fmt: skip
