"""kvproof's row-scaled TurboQuant: tq8, tq5, tq4, tq3, tq2, one fp16 unit a row and integer codes.

A row (one head of one token) is rotated across the whole head, and every value is stored as the
index of an integer in a small codebook; value = unit * codebook[code]. The integers are Lloyd-Max
centroids of N(0,1) rounded to int8 (tq5: trained through its encoder; tq8: the code itself), so
integer dot products are exact and every backend computes the same numbers. The unit is searched for
the least squared error of the row; all of it is float32 in one fixed order, so that every backend
writes the same bytes. docs/formats.md gives the byte layout.
"""

from __future__ import annotations

from typing import Any

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

_HALF5 = (2, 7, 12, 17, 22, 27, 32, 38, 44, 50, 57, 65, 73, 83, 96, 115)
_HALF4 = (5, 15, 25, 36, 48, 62, 79, 105)
_HALF3 = (10, 31, 55, 88)
_HALF2 = (15, 50)


def symmetric(half: tuple[int, ...]) -> tuple[float, ...]:
    """The ascending codebook whose positive entries are `half`."""
    return tuple(float(-v) for v in reversed(half)) + tuple(float(v) for v in half)


CODEBOOK5, CODEBOOK4 = symmetric(_HALF5), symmetric(_HALF4)
CODEBOOK3, CODEBOOK2 = symmetric(_HALF3), symmetric(_HALF2)
# Unit of a unit-variance row, by format: the step of the real-valued codebook (Lloyd-Max's; tq5:
# trained by tools/codebooks.py), in units of the integer one.
STARTS = {
    "tq5": np.float32(0.0261),
    "tq4": np.float32(0.0258),
    "tq3": np.float32(0.0245),
    "tq2": np.float32(0.0302),
}
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


def pack_crumbs(codes: NDArray[np.integer[Any]]) -> Bytes:
    """2-bit codes `[m, n]` to bytes `[m, n / 4]`: byte j of a group holds values j, j + n/4, j +
    n/2, j + 3n/4 (n: the group's size) at bits 0, 2, 4, 6."""
    planes = []
    for s, n in groups(codes.shape[-1]):
        quarter = codes[:, s : s + n].reshape(len(codes), 4, n // 4)
        planes.append(quarter[:, 0] | quarter[:, 1] << 2 | quarter[:, 2] << 4 | quarter[:, 3] << 6)
    return np.concatenate(planes, axis=-1).astype(np.uint8)


def unpack_crumbs(packed: Bytes) -> NDArray[np.uint8]:
    """Inverse of pack_crumbs."""
    quarters = []
    for s, n in groups(packed.shape[-1] * 4):
        plane = packed[:, s // 4 : (s + n) // 4]
        quarters += [plane >> shift & 3 for shift in (0, 2, 4, 6)]
    return np.concatenate(quarters, axis=-1)


def pack_bits(bits: NDArray[np.integer[Any]]) -> Bytes:
    """0/1 `[m, n]` to bytes `[m, n / 8]`, least significant bit first."""
    return np.packbits(bits, axis=-1, bitorder="little")


def unpack_bits(packed: Bytes) -> NDArray[np.uint8]:
    """Inverse of pack_bits."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def pack_grouped_nibbles(codes: NDArray[np.integer[Any]]) -> Bytes:
    """4-bit codes `[m, n]` to bytes `[m, n / 2]`: `pack_nibbles` of each group."""
    planes = [
        pack_nibbles(codes[:, s : s + n].astype(np.uint8)) for s, n in groups(codes.shape[-1])
    ]
    return np.concatenate(planes, axis=-1)


def unpack_grouped_nibbles(packed: Bytes) -> NDArray[np.uint8]:
    """Inverse of pack_grouped_nibbles."""
    halves = [(s // 2, n // 2) for s, n in groups(packed.shape[-1] * 2)]
    return np.concatenate([unpack_nibbles(packed[:, s : s + n]) for s, n in halves], axis=-1)


def _times_unit(values: NDArray[np.float64], b: Bytes) -> NDArray[np.float64]:
    unit = b[:, -2:].copy().view(np.float16).astype(np.float64)
    return np.where(unit == 0, 0.0, values * unit)


def _encode_tq8(y: Floats) -> tuple[Bytes, Counters]:
    unit = (np.abs(y).max(axis=-1) / np.float32(127)).astype(np.float32)
    codes = np.rint(y * reciprocal(unit)[:, None]).astype(np.int8)
    return _finish([codes.view(np.uint8)], unit, y)


def _decode_tq8(b: Bytes) -> NDArray[np.float64]:
    return _times_unit(b[:, :-2].view(np.int8).astype(np.float64), b)


def _encode_tq5(y: Floats) -> tuple[Bytes, Counters]:
    codes, unit = fit_unit(y, CODEBOOK5, STARTS["tq5"])
    return _finish([pack_grouped_nibbles(codes & 15), pack_bits(codes >> 4)], unit, y)


def _decode_tq5(b: Bytes) -> NDArray[np.float64]:
    half = (b.shape[-1] - 2) * 8 // 5 // 2
    codes = unpack_grouped_nibbles(b[:, :half]) | unpack_bits(b[:, half:-2]) << 4
    return _times_unit(np.asarray(CODEBOOK5)[codes], b)


def _encode_tq4(y: Floats) -> tuple[Bytes, Counters]:
    codes, unit = fit_unit(y, CODEBOOK4, STARTS["tq4"])
    return _finish([pack_grouped_nibbles(codes)], unit, y)


def _decode_tq4(b: Bytes) -> NDArray[np.float64]:
    return _times_unit(np.asarray(CODEBOOK4)[unpack_grouped_nibbles(b[:, :-2])], b)


def _encode_tq3(y: Floats) -> tuple[Bytes, Counters]:
    codes, unit = fit_unit(y, CODEBOOK3, STARTS["tq3"])
    return _finish([pack_crumbs(codes & 3), pack_bits(codes >> 2)], unit, y)


def _decode_tq3(b: Bytes) -> NDArray[np.float64]:
    quarter = (b.shape[-1] - 2) * 8 // 3 // 4
    codes = unpack_crumbs(b[:, :quarter]) | unpack_bits(b[:, quarter:-2]) << 2
    return _times_unit(np.asarray(CODEBOOK3)[codes], b)


def _encode_tq2(y: Floats) -> tuple[Bytes, Counters]:
    codes, unit = fit_unit(y, CODEBOOK2, STARTS["tq2"])
    return _finish([pack_crumbs(codes)], unit, y)


def _decode_tq2(b: Bytes) -> NDArray[np.float64]:
    return _times_unit(np.asarray(CODEBOOK2)[unpack_crumbs(b[:, :-2])], b)


def _row(name: str, bits: int, encode: Any, decode: Any, book: tuple[float, ...] | None) -> Format:
    return Format(
        name, None, None, 16, KV, encode, decode, spin=HEAD, bits_per_code=bits,
        codebook=book, source="kvproof: row-scaled TurboQuant",
    )  # fmt: skip


TQ8 = _row("tq8", 8, _encode_tq8, _decode_tq8, None)
TQ5 = _row("tq5", 5, _encode_tq5, _decode_tq5, CODEBOOK5)
TQ4 = _row("tq4", 4, _encode_tq4, _decode_tq4, CODEBOOK4)
TQ3 = _row("tq3", 3, _encode_tq3, _decode_tq3, CODEBOOK3)
TQ2 = _row("tq2", 2, _encode_tq2, _decode_tq2, CODEBOOK2)
