"""kvproof's trellis formats: tcq4, tcq3 and tcq2 (8 states), tcq4_64, tcq3_64 and tcq2_64.

Doubled-alphabet trellis-coded quantisation (Ungerboeck 1982; Marcellin and Fischer 1990). A k-bit
code has a codebook of 2^(k+1) integers, dealt in ascending order into the subsets 0, 1, 2, 3, 0, 1,
... Every value spends one bit u on the path through a shift-register trellis, which names the
subset, and k - 1 bits m on an entry of that subset. The subset is two XORs of the path's bits, so
decoding takes shifts, XORs and one table, and knows no states; the encoder searches all paths by
Viterbi's algorithm. A row is rotated across the whole head and ends in one byte, the index of its
unit in a logarithmic table. Everything is float32 in one fixed order, so that every backend writes
the same bytes. docs/formats.md gives the byte layout and the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.formats.base import Bytes, Counters, Floats, Format, cuts_below, nearest_code
from kvproof.formats.row import (
    groups,
    lane_sum,
    pack_bits,
    symmetric,
    unpack_bits,
)
from kvproof.rotation import HEAD

KV = frozenset({"key", "value"})
Codes = NDArray[np.uint8]

UNIT_STEPS = 8  # units per octave
UNIT_OCTAVES_BELOW_ONE = 20


def _units() -> Floats:
    """The unit of every byte: 0, then 2^(b/8 - 20) rounded to fp16."""
    exponents = np.arange(256) / UNIT_STEPS - UNIT_OCTAVES_BELOW_ONE
    table: Floats = np.exp2(exponents).astype(np.float16).astype(np.float32)
    table[0] = 0
    return table


def _unit_cuts() -> Floats:
    """Cut b lies midway (geometrically) between the units b and b + 1, so the nearest byte is the
    number of cuts below a unit; cut 0 lies below unit 1 and cut 255 above unit 255."""
    middle = (np.arange(256) + 0.5) / UNIT_STEPS - UNIT_OCTAVES_BELOW_ONE
    return np.exp2(middle).astype(np.float32)


UNITS, UNIT_CUTS = _units(), _unit_cuts()
_RECIPROCALS = np.concatenate([np.zeros(1, np.float32), np.float32(1) / UNITS[1:]])


_ROWS_AT_ONCE = 256  # the search holds a bit per value and state as a byte


@dataclass(frozen=True)
class Trellis:
    """A doubled-alphabet trellis code.

    `taps1` and `taps0` are the bits of the path (bit j: the value j steps ago) whose XOR is bit 1
    and bit 0 of the subset. The bits before a row are 0, or with `free_start` any: the encoder
    chooses them and a byte of the row keeps them. `book` is ascending and symmetric, entry 4 m +
    subset. The encoder tries the units whose bytes are `offsets` from the nearest to `start` times
    the row's RMS.
    """

    bits: int
    memory: int  # bits of state
    taps1: int
    taps0: int
    book: tuple[float, ...]
    start: np.float32
    offsets: tuple[int, ...]
    free_start: bool = False

    @property
    def states(self) -> int:
        """Number of states of the encoder."""
        return 1 << self.memory

    def subsets(self, u: Codes, before: Codes) -> Codes:
        """Subsets 0..3 along the paths u, 0/1 `[m, n]` in time order, whose last eight bits before
        the row are those of the bytes `before` `[m]`, the latest in the highest bit."""
        n = u.shape[-1]
        history = np.concatenate([unpack_bits(before[:, None])[:, 8 - self.memory :], u], axis=-1)
        out = np.zeros(u.shape, np.uint8)
        for bit, taps in ((0, self.taps0), (1, self.taps1)):
            for j in range(self.memory + 1):
                if taps >> j & 1:
                    out ^= history[:, self.memory - j : self.memory - j + n] << bit
        return out

    def values(self, m: Codes, u: Codes, before: Codes) -> NDArray[np.float64]:
        """Codebook entries of the codes m and the path u, both `[rows, n]` in time order, after the
        bits `before` (see subsets)."""
        index = m.astype(np.intp) << 2 | self.subsets(u, before)
        entries: NDArray[np.float64] = np.asarray(self.book, np.float64)[index]
        return entries

    def search(self, z: Floats) -> tuple[Codes, Codes, Codes, Floats]:
        """Codes m and path u `[rows, n]`, bits before it (see subsets) and squared error `[rows]`
        of the best path through z.

        z is float32 `[rows, n]` in time order. Ties go to the lower entry, the lower predecessor
        and, at the end, the lower state.
        """
        rows, n = z.shape
        nearest, distance = self._nearest(z)
        half = self.states // 2
        low, high = self._labels()
        cost = np.full((2, half, rows), 0 if self.free_start else np.inf, np.float32)
        cost[0, 0] = 0
        from_high = np.empty((n, half, 2, rows), bool)
        for t in range(n):
            a = cost[0][:, None] + distance[t][low]
            b = cost[1][:, None] + distance[t][high]
            np.less(b, a, out=from_high[t])
            cost = np.minimum(a, b).reshape(2, half, rows)
        flat = cost.reshape(self.states, rows)
        state = flat.argmin(axis=0)
        error = flat[state, np.arange(rows)]
        u_path = np.empty((rows, n), np.uint8)
        for t in range(n - 1, -1, -1):
            u_path[:, t] = state & 1
            state = (state >> 1) + half * from_high[t, state >> 1, state & 1, np.arange(rows)]
        before = np.zeros(rows, np.uint8)
        for j in range(self.memory):
            before |= (state >> j & 1).astype(np.uint8) << (7 - j)
        m = np.take_along_axis(nearest, self.subsets(u_path, before)[:, None], axis=1)[:, 0]
        return m, u_path, before, error

    def _nearest(self, z: Floats) -> tuple[Codes, Floats]:
        """Per subset the nearest entry's index `[rows, 4, n]` and squared distance `[n, 4,
        rows]`."""
        book = np.asarray(self.book, np.float32).reshape(-1, 4)
        index = np.empty((len(z), 4, z.shape[-1]), np.uint8)
        distance = np.empty((z.shape[-1], 4, len(z)), np.float32)
        for j in range(4):
            index[:, j] = nearest_code(z, cuts_below(tuple(book[:, j])))
            off = z - book[:, j][index[:, j]]
            distance[:, j] = (off * off).T
        return index, distance

    def _labels(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Subset of the branch into state 2 i + u, `[i, u]`, from state i and from i + states /
        2."""
        return _branch_labels(self.memory, self.taps1, self.taps0)


@lru_cache
def _branch_labels(
    memory: int, taps1: int, taps0: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    half = 1 << (memory - 1)
    out = np.empty((2, half, 2), np.intp)
    for high in (0, 1):
        for i in range(half):
            for u in (0, 1):
                history = (i + half * high) << 1 | u
                z1, z0 = ((history & taps).bit_count() & 1 for taps in (taps1, taps0))
                out[high, i, u] = 2 * z1 + z0
    return out[0], out[1]


def time_order(n: int) -> NDArray[np.intp]:
    """Index of the value at every step of the path: the order of the 2-bit fields of tq3's low
    plane, so that subset bits and codes meet in the same places of memory."""
    pieces = []
    for start, size in groups(n):
        p = np.arange(size)
        pieces.append(start + size // 4 * (p % 4) + p // 4)
    return np.concatenate(pieces)


def quantise(code: Trellis, y: Floats) -> tuple[Codes, Codes, Codes, Codes, NDArray[np.intp]]:
    """Codes m and path u `[rows, n]` in time order, bits before the path, bytes of the units, and
    the bytes nearest to `start` times the RMS `[rows]` of rotated rows y, float32 `[rows, n]`.

    A nearest byte of 0 is below the table (the row is then all zeros) and 256 beyond it.
    """
    if len(y) > _ROWS_AT_ONCE:
        some = range(0, len(y), _ROWS_AT_ONCE)
        parts = [quantise(code, y[at : at + _ROWS_AT_ONCE]) for at in some]
        m, u, before, unit, nearest = (np.concatenate(part) for part in zip(*parts, strict=True))
        return m, u, before, unit, nearest
    n = y.shape[-1]
    base = np.sqrt(lane_sum(y * y) / np.float32(n)) * code.start
    nearest = np.searchsorted(UNIT_CUTS, base, side="left")
    byte = np.clip(nearest + np.array(code.offsets)[:, None], 1, 255).astype(np.uint8)
    tries = y[:, time_order(n)] * _RECIPROCALS[byte][..., None]
    found = code.search(tries.reshape(-1, n))
    error = found[3].reshape(byte.shape) * (UNITS[byte] * UNITS[byte])
    best = error.argmin(axis=0), np.arange(len(y))  # the first on a tie
    m, u, before = (part.reshape(*byte.shape, *part.shape[1:])[best] for part in found[:3])
    unit = byte[best]
    for part in (m, u, before, unit):
        part[nearest == 0] = 0
    return m, u, before, unit, nearest


def _encode(code: Trellis, y: Floats) -> tuple[Bytes, Counters]:
    m, u, before, unit, nearest = quantise(code, y)
    planes = [pack_bits(m)] if code.bits == 2 else [pack_pairs(m & 3)]
    if code.bits == 4:
        planes.append(pack_bits(m >> 2))
    saturated, flushed = nearest == len(UNIT_CUTS), (nearest == 0) & y.any(axis=-1)
    tail = [before[:, None], unit[:, None]] if code.free_start else [unit[:, None]]
    out = np.concatenate([*planes, pack_bits(u), *tail], axis=-1)
    return out, Counters(int(saturated.sum()), int(flushed.sum()))


def steps_of(code: Trellis, b: Bytes) -> tuple[Codes, Codes, Codes]:
    """Codes m and path u `[rows, n]` in time order, and the bits before the path `[rows]`, of
    encoded rows."""
    end = b.shape[-1] - 1 - code.free_start
    n = end * 8 // code.bits
    u = unpack_bits(b[:, end - n // 8 : end])
    before = b[:, -2] if code.free_start else np.zeros(len(b), np.uint8)
    m = unpack_bits(b[:, : n // 8]) if code.bits == 2 else unpack_pairs(b[:, : n // 4])
    if code.bits == 4:
        m = (m | unpack_bits(b[:, n // 4 : n // 4 + n // 8]) << 2).astype(np.uint8)
    return m, u, before


def rows_of(entries: NDArray[np.float64], b: Bytes) -> NDArray[np.float64]:
    """Rotated rows `[rows, n]` of codebook entries in time order, in the units of encoded rows."""
    unit = UNITS[b[:, -1:]].astype(np.float64)
    out = np.empty(entries.shape)
    out[:, time_order(entries.shape[-1])] = np.where(unit == 0, 0.0, entries * unit)
    return out


def _decode(code: Trellis, b: Bytes) -> NDArray[np.float64]:
    return rows_of(code.values(*steps_of(code, b)), b)


def pack_pairs(codes: NDArray[np.integer[Any]]) -> Bytes:
    """2-bit codes `[m, n]` to bytes `[m, n / 4]`, the least significant bits first."""
    four = codes.reshape(len(codes), -1, 4)
    packed: Bytes = (
        four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6
    ).astype(np.uint8)
    return packed


def unpack_pairs(packed: Bytes) -> NDArray[np.uint8]:
    """Inverse of pack_pairs."""
    four = np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return four.reshape(len(packed), -1)


_TAPS8 = (3, 0o13, 0o04)  # memory and taps: Ungerboeck's code of 8 states,
_TAPS64 = (6, 0o127, 0o042)  # and the best of all of 64; Ungerboeck's (103, 024) errs 0.8 % more
_TRIES = (-1, 0, 1)


def _code(bits: int, taps: tuple[int, int, int], half: tuple[int, ...], start: float) -> Trellis:
    free_start = bits == 2 or (bits == 3 and taps is _TAPS64)
    return Trellis(bits, *taps, symmetric(half), np.float32(start), _TRIES, free_start)


CODES = {
    "tcq4": _code(
        4, _TAPS8, (2, 6, 10, 14, 18, 22, 27, 31, 36, 41, 47, 54, 62, 72, 86, 108), 0.0266
    ),
    "tcq4_64": _code(
        4, _TAPS64, (2, 7, 11, 16, 20, 25, 30, 35, 41, 47, 54, 62, 72, 84, 100, 125), 0.0235
    ),
    "tcq3": _code(3, _TAPS8, (5, 15, 26, 37, 50, 66, 88, 123), 0.02),
    "tcq3_64": _code(3, _TAPS64, (5, 14, 24, 35, 47, 63, 85, 119), 0.0207),
    "tcq2": _code(2, _TAPS8, (7, 22, 39, 69), 0.0273),
    "tcq2_64": _code(2, _TAPS64, (12, 37, 69, 123), 0.0154),
}


def _format(name: str, code: Trellis) -> Format:
    return Format(
        name, None, None, 16, KV,
        lambda y: _encode(code, y), lambda b: _decode(code, b),
        spin=HEAD, bits_per_code=code.bits, unit_bytes=1,
        start_bytes=int(code.free_start), codebook=code.book,
        source=f"kvproof: doubled-alphabet trellis, {code.states} states",
    )  # fmt: skip


TCQ4, TCQ4_64, TCQ3, TCQ3_64, TCQ2, TCQ2_64 = (_format(n, c) for n, c in CODES.items())
