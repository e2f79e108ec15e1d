"""kvproof's row-scaled TurboQuant: tq8, tq5, tq4, tq3, tq2, one fp16 unit a row and integer codes.

A row (one head of one token) is rotated across the whole head, and every value is stored as the
index of an integer in a small codebook; value = unit * codebook[code]. The integers are Lloyd-Max
centroids of N(0,1) rounded to int8 (tq5: trained through its encoder; tq8: the code itself), so
integer dot products are exact and every backend computes the same numbers. The unit is searched for
the least squared error of the row, by tables of integers, whose sums are the same in any order, so
that every backend writes the same bytes. docs/formats.md gives the byte layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.formats.base import (
    Bytes,
    Counters,
    Floats,
    Format,
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
# Multiples of it that are tried, in 1/250: from 0.82 to 1.24. The error has several minima over the
# unit, so a search finds better ones than refining a single start.
LOWEST, HIGHEST, WHOLE = 205, 310, 250
# Tries and levels by format. Entries that lie closer together need finer ones.
EFFORTS = {"tq5": (16, 128), "tq4": (8, 64), "tq3": (8, 64), "tq2": (8, 64)}


@dataclass(frozen=True)
class Search:
    """Tables by which `fit_unit` chooses among T units, over L levels of magnitude.

    Level j is j steps of magnitude; the last one starts where the largest entry is nearest in every
    try. A position is a magnitude in sixteenths of a step.
    """

    grid: np.float32  # width of a position in a row whose root mean square is 1
    cost: NDArray[np.uint8]  # [T, L]: squared error at a level, less that of the best try there
    beyond: NDArray[np.int32]  # [T]: 16 times the cost of each position beyond the last level
    entry: NDArray[np.uint8]  # [T, L]: positive codebook entry nearest to a level


def search_tables(half: tuple[int, ...], start: np.float32, tries: int, levels: int) -> Search:
    """The tables of the codebook whose positive entries are `half`; integers throughout, so that
    they are the same on every machine."""
    samples = 4  # of a level, whose squared errors are added
    units = np.linspace(LOWEST, HIGHEST, tries).round().astype(np.int64)[:, None, None]
    values = np.asarray(half, np.int64)
    cuts = values[1:] + values[:-1]  # doubled
    # Everything below is in units of codebook / (WHOLE * fine * 2 * samples).
    fine = 2 * levels - 3
    offsets = np.arange(samples) * 2 + 1 - samples
    places = np.abs(2 * samples * np.arange(levels)[:, None] + offsets)
    places[-1] = 2 * samples * (levels - 1)  # what lies above is counted by `beyond`
    step = int(cuts[-1]) * HIGHEST
    magnitude, centre = step * places, step * 2 * samples * np.arange(levels)[:, None]

    def nearest(at: NDArray[np.int64]) -> NDArray[np.int64]:
        below = (at[..., None] > units[..., None] * cuts * (fine * samples)).sum(axis=-1)
        found: NDArray[np.int64] = values[below]
        return found

    miss = magnitude - units * nearest(magnitude) * (fine * 2 * samples)
    error = np.square(miss).sum(axis=-1)
    error -= error.min(axis=0)
    slope = miss[:, -1].sum(axis=-1) * 2 * (step * 2 * samples)  # 16 times that of a position
    slope -= slope.min()
    top = error.max()
    return Search(
        np.float32(float(start) * int(cuts[-1]) * HIGHEST / (WHOLE * fine * 16)),
        ((2 * 255 * error + top) // (2 * top)).astype(np.uint8),
        ((2 * 255 * slope + top) // (2 * top)).astype(np.int32),
        nearest(centre)[..., 0].astype(np.uint8),
    )


@cache
def search_of(name: str) -> Search:
    """The tables of tq5, tq4, tq3 or tq2."""
    half = {"tq5": _HALF5, "tq4": _HALF4, "tq3": _HALF3, "tq2": _HALF2}[name]
    return search_tables(half, STARTS[name], *EFFORTS[name])


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
    y: Floats, book: tuple[float, ...], start: np.float32, search: Search
) -> tuple[NDArray[np.uint8], Floats]:
    """Codes uint8 `[m, n]` and unit float32 `[m]` of rotated rows y `[m, n]`.

    The try of least cost wins, the first on a tie; the least-squares unit of its entries is refined
    once: codes = nearest(y / unit), and their least-squares unit. Rows so small that 1 / unit is
    not finite get code 0 and unit = start * RMS(y).
    """
    half = np.asarray(book, np.float32)[len(book) // 2 :].astype(np.int64)
    last = search.cost.shape[1] - 1
    size = np.sqrt(lane_sum(y * y) / np.float32(y.shape[-1]))
    grid = size * search.grid
    scaled = np.rint(np.abs(y) * reciprocal(grid)[:, None])
    position = np.minimum(scaled, np.float32(32767)).astype(np.int64)
    level = np.minimum((position + 8) >> 4, last)
    beyond = np.maximum(position - 16 * last, 0).sum(axis=-1)
    cost = np.stack([16 * table[level].sum(axis=-1, dtype=np.int64) for table in search.cost])
    best = np.argmin(cost + search.beyond[:, None] * beyond, axis=0)
    entry = search.entry[best[:, None], level].astype(np.int64)
    product = 16 * (level * entry).sum(axis=-1) + half[-1] * beyond
    unit = _quotient(grid, product, (entry * entry).sum(axis=-1))

    eighth = unit * np.float32(0.125)
    inverse = reciprocal(eighth)
    z = np.clip(np.rint(y * inverse[:, None]), -32767, 32767).astype(np.int64)
    index = np.searchsorted((half[1:] + half[:-1]) * 4, np.abs(z), side="left")
    entry = half[index]
    unit = _quotient(eighth, (np.abs(z) * entry).sum(axis=-1), (entry * entry).sum(axis=-1))
    codes = np.where(z < 0, len(half) - 1 - index, len(half) + index).astype(np.uint8)
    live = (reciprocal(grid) != 0) & (inverse != 0)
    codes[~live] = 0
    return codes, np.where(live, unit, size * start)


def _quotient(unit: Floats, numerator: NDArray[np.int64], denominator: NDArray[np.int64]) -> Floats:
    """`unit * numerator / denominator` in float32, in that order."""
    product = np.multiply(unit, numerator.astype(np.float32), dtype=np.float32)
    out: Floats = np.divide(product, denominator.astype(np.float32), dtype=np.float32)
    return out


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
    codes, unit = fit_unit(y, CODEBOOK5, STARTS["tq5"], search_of("tq5"))
    return _finish([pack_grouped_nibbles(codes & 15), pack_bits(codes >> 4)], unit, y)


def _decode_tq5(b: Bytes) -> NDArray[np.float64]:
    half = (b.shape[-1] - 2) * 8 // 5 // 2
    codes = unpack_grouped_nibbles(b[:, :half]) | unpack_bits(b[:, half:-2]) << 4
    return _times_unit(np.asarray(CODEBOOK5)[codes], b)


def _encode_tq4(y: Floats) -> tuple[Bytes, Counters]:
    codes, unit = fit_unit(y, CODEBOOK4, STARTS["tq4"], search_of("tq4"))
    return _finish([pack_grouped_nibbles(codes)], unit, y)


def _decode_tq4(b: Bytes) -> NDArray[np.float64]:
    return _times_unit(np.asarray(CODEBOOK4)[unpack_grouped_nibbles(b[:, :-2])], b)


def _encode_tq3(y: Floats) -> tuple[Bytes, Counters]:
    codes, unit = fit_unit(y, CODEBOOK3, STARTS["tq3"], search_of("tq3"))
    return _finish([pack_crumbs(codes & 3), pack_bits(codes >> 2)], unit, y)


def _decode_tq3(b: Bytes) -> NDArray[np.float64]:
    quarter = (b.shape[-1] - 2) * 8 // 3 // 4
    codes = unpack_crumbs(b[:, :quarter]) | unpack_bits(b[:, quarter:-2]) << 2
    return _times_unit(np.asarray(CODEBOOK3)[codes], b)


def _encode_tq2(y: Floats) -> tuple[Bytes, Counters]:
    codes, unit = fit_unit(y, CODEBOOK2, STARTS["tq2"], search_of("tq2"))
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
