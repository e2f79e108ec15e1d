"""Tiles: how fast kernels hold cached rows. A layout, not a format: the same codes, other places.

A tile is 64 tokens of one KV head and one side, in exactly the bytes of their rows. First come the
codes, in planes of 8, 4, 2 or 1 bits that divide a byte; a code of 8 bits is the byte as stored.

- Keys: for each block of 64 dimensions (the last may have 32), for each of four groups of 16
  tokens, for each plane: lines of 64 bytes. Quad row r is dimensions 4r to 4r + 3 of 16 tokens, 64
  codes; that of token i and dimension 4r + j is in byte 4i + j.
- Values: for each group of 16 dimensions, for each plane: lines of 64 bytes. Quad row r is tokens
  r, r + 32, r + 16, r + 48 of 16 dimensions; that of dimension i and the j-th of them is in byte
  4i + j.

With m = 8 / bits, line l of a plane holds the quad rows m l to m l + m - 1, row m l + k from bit
`bits * k` on. Then come the scales: 64 fp16 for the rows, or for each 32 values of a row.

The codes of trellis formats are m and above it the path bit u, in time order (formats/tcq.py), and
their places are chosen so that all bits of the path that a subset is the XOR of can be had together
by few operations. A plane of one bit holds the quad row 8 h + 4 l + k

- of u at bit 2 k + l of line h,
- of m's highest bit (tcq4) at bit 4 l + 2 (k mod 2) + k / 2.

With n quad rows in a block, dimension 4 (8 h + 4 l + k) + j of a block of keys is its step
n j + 8 h + 2 k + l: the bits of a line of u are steps in order. Dimension 16 g + i of values is the
step g + i * head_dim / 16: the bits of the step before are those of the group before. The scales
are the 64 bytes that name the units.

A buffer of one side is uint8 `[num_kv_heads, tiles, 64 * row_bytes]`. Slots that no row was written
to hold zeros, slots of rows that were let go of the old codes: no scale in it is ever NaN or
infinite. This module is the statement that the kernels of `pack` and `unpack` are held to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.errors import RequestError
from kvproof.formats import Format
from kvproof.formats.base import Bytes
from kvproof.formats.row import (
    pack_bits,
    pack_crumbs,
    pack_grouped_nibbles,
    unpack_bits,
    unpack_crumbs,
    unpack_grouped_nibbles,
)
from kvproof.formats.tcq import CODES, pack_pairs, unpack_pairs
from kvproof.formats.turbo import pack_stream3, unpack_stream3

TOKENS = 64
MULTIPLE, WIDEST = 32, 1024  # of head_dim
SIDES = ("key", "value")
# Format -> bits of the planes of its codes, the lowest bits first.
PLANES: dict[str, tuple[int, ...]] = {
    "tq8": (8,), "tq5": (4, 1), "tq4": (4,), "tq3": (2, 1), "tq2": (2,),
    "q8_0": (8,), "q4_0": (4,), "q4_0_rot": (4,), "tbq4_0": (4,), "tbq3_0": (2, 1),
    "tcq4": (2, 1, 1), "tcq4_64": (2, 1, 1), "tcq3": (2, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """Cached rows of one side as attention takes them: rows `first` to `first + n - 1` of a buffer
    of tiles. `len` and `shape` are those of the same rows as an array `[n, num_kv_heads,
    row_bytes]`."""

    format: Format
    side: str
    buffer: Bytes  # [num_kv_heads, tiles, 64 * row_bytes], or a tensor of a backend's device
    first: int
    n: int

    ndim = 3

    def __post_init__(self) -> None:
        buffer = self.buffer
        if str(buffer.dtype) not in ("uint8", "torch.uint8") or buffer.ndim != 3:
            raise RequestError(
                f"tiles: buffer must be uint8 of three axes, got {buffer.dtype} {buffer.shape}"
            )
        slots = buffer.shape[1] * TOKENS
        if not 0 <= self.first <= self.first + self.n <= slots:
            raise RequestError(
                f"tiles: rows {self.first} to {self.first + self.n} of {slots} do not exist"
            )

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, rows: slice) -> Tiles:
        """Some of the rows, by a slice without a step."""
        start, end, step = rows.indices(self.n)
        if step != 1:
            raise RequestError(f"tiles: rows come in steps of 1, not {step}")
        return replace(self, first=self.first + start, n=max(0, end - start))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n, num_kv_heads, row_bytes)."""
        return self.n, self.buffer.shape[0], self.buffer.shape[2] // TOKENS


def check_pair(keys: object, values: object, key: Format, value: Format) -> bool:
    """Whether two sides of attention are tiles; RequestError if one alone is, or they are not the
    keys and values that the call names."""
    if not isinstance(keys, Tiles) or not isinstance(values, Tiles):
        if isinstance(keys, Tiles) or isinstance(values, Tiles):
            raise RequestError("attention: keys and values must both be tiles, or both rows")
        return False
    for side, tiles, fmt in (("key", keys, key), ("value", values, value)):
        if (tiles.side, tiles.format.name) != (side, fmt.name):
            raise RequestError(
                f"attention: the {side}s are tiles of {tiles.format.name} {tiles.side}s, not of "
                f"{fmt.name}"
            )
        head_dim = fmt.row_values(tiles.shape[2])
        if not fits(fmt, head_dim):
            raise RequestError(f"{fmt.name}: head_dim {head_dim} is not held in tiles")
    if keys.first != values.first:
        raise RequestError(
            f"attention: keys begin in slot {keys.first} and values in {values.first}"
        )
    return True


def fits(fmt: Format, head_dim: int) -> bool:
    """Whether rows of head_dim values of a format can be held in tiles."""
    return fmt.name in PLANES and head_dim % MULTIPLE == 0 and 0 < head_dim <= WIDEST


def fit(key: Format, value: Format, head_dim_k: int, head_dim_v: int) -> bool:
    """Whether both sides of such a cache can be."""
    return fits(key, head_dim_k) and fits(value, head_dim_v)


def check(fmt: Format, side: str, rows: Bytes, buffer: Bytes, at: int, what: str = "tiles") -> None:
    """RequestError naming what does not fit: rows `[n, num_kv_heads, row_bytes]`, a buffer `[
    num_kv_heads, tiles, 64 * row_bytes]` and the slots from `at` on."""
    if side not in SIDES:
        raise RequestError(f"{what}: side {side!r} is none of {', '.join(SIDES)}")
    for name, array in (("rows", rows), ("buffer", buffer)):
        if array.dtype != np.uint8 or array.ndim != 3:
            raise RequestError(
                f"{what}: {name} must be uint8 of three axes, got {array.dtype} {array.shape}"
            )
    head_dim = fmt.row_values(rows.shape[2])
    if not fits(fmt, head_dim):
        raise RequestError(f"{fmt.name}: head_dim {head_dim} is not held in tiles")
    heads, count, size = buffer.shape
    if rows.shape[1] != heads or size != TOKENS * rows.shape[2]:
        raise RequestError(f"{what}: rows {rows.shape} do not fit a buffer {buffer.shape}")
    if not 0 <= at <= at + len(rows) <= count * TOKENS:
        raise RequestError(
            f"{what}: slots {at} to {at + len(rows)} of {count * TOKENS}: make the buffer larger"
        )


def pack(fmt: Format, side: str, rows: Bytes, buffer: Bytes, at: int) -> None:
    """Write rows uint8 `[n, num_kv_heads, row_bytes]` to the slots `at`, at + 1, ... of a buffer.

    RequestError naming the first row whose stored scale is not finite; nothing is written then.
    """
    check(fmt, side, rows, buffer, at)
    if not len(rows):
        return
    codes, scales = split(fmt, rows)
    refuse_infinite(fmt, side, scales)
    for tile, slots, these in by_tile(at, len(rows)):
        for bits, low, byte, shift in _places(fmt, side, codes.shape[-1]):
            mask = (1 << bits) - 1
            for up in range(0, 8, bits):  # codes of one shift have bytes of their own
                chosen = shift[slots] == up
                at_byte = byte[slots][chosen]
                kept = buffer[:, tile, at_byte] & ~np.uint8(mask << up)
                new = codes[these].swapaxes(0, 1)[:, chosen] >> low & mask
                buffer[:, tile, at_byte] = kept | new << up
        held = _scales(fmt, buffer[:, tile], codes.shape[-1])
        held[..., slots] = scales[these].transpose(1, 2, 0)


def unpack(fmt: Format, side: str, buffer: Bytes, first: int, n: int) -> Bytes:
    """The n rows from slot `first` on, uint8 `[n, num_kv_heads, row_bytes]`: inverse of `pack`."""
    rows: Bytes = np.empty(rows_shape(buffer, n), np.uint8)
    check(fmt, side, rows, buffer, first)
    for tile, slots, these in by_tile(first, n):
        head_dim = fmt.row_values(rows.shape[2])
        codes: Bytes = np.zeros((rows.shape[1], slots.stop - slots.start, head_dim), np.uint8)
        for bits, low, byte, shift in _places(fmt, side, head_dim):
            mask = (1 << bits) - 1
            codes |= (buffer[:, tile, byte[slots]] >> shift[slots] & mask) << low
        scales = _scales(fmt, buffer[:, tile], head_dim)[..., slots]
        rows[these] = _joined(fmt, np.swapaxes(codes, 0, 1), scales.transpose(2, 0, 1))
    return rows


def rows_shape(buffer: Bytes, n: int) -> tuple[int, int, int]:
    """Shape of n rows of a buffer of tiles."""
    if buffer.ndim != 3 or n < 0:
        raise RequestError(f"unpack: {n} rows of a buffer {buffer.shape}, needs three axes")
    return n, buffer.shape[0], buffer.shape[2] // TOKENS


def refuse_infinite(fmt: Format, side: str, scales: Scales) -> None:
    """RequestError naming the first row of which a scale is not finite; `split` gives scales."""
    bad = ~np.isfinite(scales).all(axis=-1).reshape(-1)
    if bad.any():
        raise bad_row(fmt, side, int(np.argmax(bad)))


def bad_row(fmt: Format, side: str, row: int) -> RequestError:
    """What `pack` raises about a row, counted in tokens times KV heads."""
    return RequestError(f"{fmt.name}: row {row} of the {side}s: stored scale is not finite")


def by_tile(at: int, n: int) -> Iterator[tuple[int, slice, slice]]:
    """(tile, its slots, the rows that go there) for rows 0 to n - 1 in the slots from `at` on."""
    for tile in range(at // TOKENS, -(-(at + n) // TOKENS)):
        start, end = max(at, tile * TOKENS), min(at + n, (tile + 1) * TOKENS)
        base = tile * TOKENS
        yield tile, slice(start - base, end - base), slice(start - at, end - at)


Scales = NDArray[Any]  # float16, or uint8 where a byte names a unit
Plane = tuple[int, int, NDArray[np.intp], NDArray[np.uint8]]


def dimension_of(side: str, head_dim: int) -> NDArray[np.intp]:
    """Dimension of the tile that holds every step of a trellis row, `[head_dim]`."""
    step = np.arange(head_dim)
    if side == "value":
        return 16 * (step % (head_dim // 16)) + step // (head_dim // 16)
    block = step // 64 * 64
    quads = np.minimum(64, head_dim - block) // 4
    j, rest = (step - block) // quads, (step - block) % quads
    h, k, line = rest // 8, rest % 8 // 2, rest % 2
    found: NDArray[np.intp] = block + 4 * (8 * h + 4 * line + k) + j
    return found


def _places(fmt: Format, side: str, head_dim: int) -> tuple[Plane, ...]:
    """Of each plane: bits, lowest bit of the code, and byte and lowest bit in the tile of every
    token's codes, `[64, head_dim]`."""
    return _places_of(side, PLANES[fmt.name], fmt.name in CODES, head_dim)


@cache
def _places_of(
    side: str, planes: tuple[int, ...], trellis: bool, head_dim: int
) -> tuple[Plane, ...]:
    t, d = np.indices((TOKENS, head_dim))
    if trellis:
        d = dimension_of(side, head_dim)[d]
    all_bits = sum(planes)
    found: list[Plane] = []
    low = 0
    for bits in planes:
        if side == "key":
            block = d // 64 * 64
            width = np.minimum(64, head_dim - block)
            start = (64 * block + 16 * width * (t // 16)) * all_bits // 8 + 16 * width * low // 8
            row, item, j = (d - block) // 4, t % 16, d % 4
        else:
            start = 64 * 16 * (d // 16) * all_bits // 8 + 64 * 16 * low // 8
            row, item, j = t % 16, d % 16, np.array([0, 2, 1, 3])[t // 16]
        rows_a_line = 8 // bits
        at = row % rows_a_line
        if trellis and bits == 1:
            line, k = at // 4, at % 4
            path = low + 1 == all_bits
            at = 2 * k + line if path else 4 * line + 2 * (k % 2) + k // 2
        byte = start + 64 * (row // rows_a_line) + 4 * item + j
        found.append((bits, low, byte, (bits * at).astype(np.uint8)))
        low += bits
    return tuple(found)


def _scales(fmt: Format, tile: Bytes, head_dim: int) -> Scales:
    """The scales of tiles uint8 `[heads, bytes]`, a view `[heads, scales of a row, 64]`."""
    codes = TOKENS * head_dim * sum(PLANES[fmt.name]) // 8
    return tile[:, codes:].view(_scale_type(fmt)).reshape(len(tile), -1, TOKENS)


def _scale_type(fmt: Format) -> type[np.float16] | type[np.uint8]:
    """Of what is stored for a scale: fp16, or the byte that names a unit."""
    return np.uint8 if fmt.name in CODES else np.float16


def _same(codes: Bytes) -> Bytes:
    return codes


# Bits of a plane, whether in time order -> how a row packs the plane, and the inverse.
_PACKING: dict[tuple[int, bool], tuple[Callable[[Bytes], Bytes], Callable[[Bytes], Bytes]]] = {
    (8, False): (_same, _same),
    (4, False): (pack_grouped_nibbles, unpack_grouped_nibbles),
    (2, False): (pack_crumbs, unpack_crumbs),
    (1, False): (pack_bits, unpack_bits),
    (2, True): (pack_pairs, unpack_pairs),
    (1, True): (pack_bits, unpack_bits),
}


def split(fmt: Format, rows: Bytes) -> tuple[Bytes, Scales]:
    """Codes uint8 `[n, heads, head_dim]`, those of a trellis in time order, and what is stored for
    scales `[n, heads, scales of a row]`."""
    blocks = np.ascontiguousarray(rows).reshape(-1, fmt.block_bytes or rows.shape[-1])
    size = np.dtype(_scale_type(fmt)).itemsize
    at_end = fmt.block_size is None
    scales, packed = (
        (blocks[:, -size:], blocks[:, :-size]) if at_end else (blocks[:, :size], blocks[:, size:])
    )
    if fmt.name == "tbq3_0":
        codes = unpack_stream3(packed)
    else:
        planes = PLANES[fmt.name]
        n, at, low = packed.shape[1] * 8 // sum(planes), 0, 0
        codes = np.zeros((len(packed), n), np.uint8)
        for bits in planes:
            unpack_plane = _PACKING[bits, fmt.name in CODES][1]
            codes |= unpack_plane(packed[:, at : at + n * bits // 8]) << low
            at, low = at + n * bits // 8, low + bits
    lead = rows.shape[:-1]
    return codes.reshape(*lead, -1), scales.copy().view(_scale_type(fmt)).reshape(*lead, -1)


def _joined(fmt: Format, codes: Bytes, scales: Scales) -> Bytes:
    """Rows of codes and scales: inverse of `split`."""
    flat = codes.reshape(-1, fmt.block_size or codes.shape[-1])
    if fmt.name == "tbq3_0":
        parts = [pack_stream3(flat)]
    else:
        parts, low = [], 0
        for bits in PLANES[fmt.name]:
            pack_plane = _PACKING[bits, fmt.name in CODES][0]
            parts.append(pack_plane((flat >> low & (1 << bits) - 1).astype(np.uint8)))
            low += bits
    stored = np.ascontiguousarray(scales).reshape(-1, 1).view(np.uint8)
    parts = [*parts, stored] if fmt.block_size is None else [stored, *parts]
    return np.concatenate(parts, axis=-1).reshape(*codes.shape[:-1], -1)
