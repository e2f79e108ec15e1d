"""How the CUDA kernels hold cached rows. A layout, not a format: the same codes, other places.

A tile is 64 tokens of one KV head and one side, in exactly the bytes of their rows: the codes, then
the fp16 scales, 64 of the rows or for each 32 values of a row. Codes lie in units of eight for each
of 32 lanes, as an int8 matrix product of 16 x 32 by 32 x 8 takes its right side. Lane l is r = l //
4 and c = l % 4, and of its eight codes number i is

- keys: unit u is tokens 8 (u // S) to + 7 and the 32 dims from 32 (u % S) on, S = head_dim / 32. A
  lane has token r of them and the dims 16 (i // 4) + 4c + i % 4.
- values: unit u is dims 8 (u % E) to + 7 and the 32 tokens from 32 (u // E) on, E = head_dim / 8.
  A lane has dim r and the tokens 16 (i // 4) + 8 (i % 4 // 2) + 2c + i % 2, those whose scores the
  same lane holds after the product with the keys.

Four units are a group; codes.cuh says how a group is packed. A buffer of one side is uint8
`[num_kv_heads, tiles, 64 * row_bytes]`, as that of backends/tiles.py, and `pack` and `unpack` here
are the statement that the kernels of pack.cu are held to.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvproof.backends import tiles
from kvproof.backends.cuda import codes
from kvproof.backends.tiles import MULTIPLE, PLANES, TOKENS
from kvproof.formats import Format
from kvproof.formats.base import Bytes

WIDEST = 512  # values of a row that four warps of attention.cu take
Indices = NDArray[np.int64]


def warps(head_dim: int) -> int:
    """Warps that share a tile's values, 32 or a multiple each and as few as 128 where that goes;
    0 if none of 1, 2 and 4 can."""
    can = [n for n in (1, 2, 4) if head_dim % (n * MULTIPLE) == 0 and head_dim <= 256 * n]
    return next((n for n in can if head_dim <= 128 * n), can[-1] if can else 0)


def fits(fmt: Format, head_dim: int) -> bool:
    """Whether rows of head_dim values of a format can be held in these tiles."""
    return codes.known(fmt) and 0 < head_dim <= WIDEST and warps(head_dim) > 0


def fit(key: Format, value: Format, head_dim_k: int, head_dim_v: int) -> bool:
    """Whether both sides of such a cache can be."""
    return fits(key, head_dim_k) and fits(value, head_dim_v)


def pack(fmt: Format, side: str, rows: Bytes, buffer: Bytes, at: int) -> None:
    """Write rows uint8 `[n, num_kv_heads, row_bytes]` to the slots `at`, at + 1, ... of a buffer.

    RequestError naming the first row whose stored scale is not finite; nothing is written then.
    """
    tiles.check(fmt, side, rows, buffer, at)
    if not len(rows):
        return
    _, scales = tiles.split(fmt, rows)
    tiles.refuse_infinite(fmt, side, scales)
    token, bit = tile_bits(fmt, side, fmt.row_values(rows.shape[2]))
    own = np.unpackbits(np.ascontiguousarray(rows), axis=-1, bitorder="little")
    for tile, slots, these in tiles.by_tile(at, len(rows)):
        held = np.unpackbits(buffer[:, tile], axis=-1, bitorder="little")
        new = np.flatnonzero((token >= slots.start) & (token < slots.stop))
        held[:, new] = own[token[new] - slots.start + these.start, :, bit[new]].T
        buffer[:, tile] = np.packbits(held, axis=-1, bitorder="little")


def unpack(fmt: Format, side: str, buffer: Bytes, first: int, n: int) -> Bytes:
    """The n rows from slot `first` on, uint8 `[n, num_kv_heads, row_bytes]`: inverse of `pack`."""
    rows: Bytes = np.empty(tiles.rows_shape(buffer, n), np.uint8)
    tiles.check(fmt, side, rows, buffer, first)
    token, bit = tile_bits(fmt, side, fmt.row_values(rows.shape[2]))
    place = np.empty((TOKENS, 8 * rows.shape[2]), np.int64)
    place[token, bit] = np.arange(len(token))
    for tile, slots, these in tiles.by_tile(first, n):
        held = np.unpackbits(buffer[:, tile], axis=-1, bitorder="little")[:, place[slots]]
        rows[these] = np.packbits(held, axis=-1, bitorder="little").swapaxes(0, 1)
    return rows


@cache
def tile_bits(fmt: Format, side: str, head_dim: int) -> tuple[Indices, Indices]:
    """(slot, bit of the row) of every bit of a tile: both `[64 * row_bytes * 8]`."""
    of_codes, of_scales = row_bits(fmt, head_dim)
    bits = of_codes.shape[1]
    slot = np.empty(TOKENS * 8 * fmt.row_bytes(head_dim), np.int64)
    bit = np.empty_like(slot)
    places = code_bits(side, bits, head_dim)
    slot[places] = np.arange(TOKENS)[:, None, None]
    bit[places] = of_codes
    places = TOKENS * head_dim * bits + np.arange(of_scales.size * TOKENS)
    scale, token, at = np.indices((len(of_scales), TOKENS, 16)).reshape(3, -1)
    slot[places], bit[places] = token, of_scales[scale, at]
    return slot, bit


def row_bits(fmt: Format, head_dim: int) -> tuple[Indices, Indices]:
    """The bits of a row that hold each bit of each code, `[head_dim, bits]`, and of each scale,
    `[scales, 16]`: rows of a single bit are asked what they hold."""
    size = fmt.row_bytes(head_dim)
    single = np.packbits(np.eye(8 * size, dtype=np.uint8), axis=-1, bitorder="little")
    found_codes, found_scales = tiles.split(fmt, single[:, None])
    bits = sum(PLANES[fmt.name])
    of_codes: Indices = np.full((head_dim, bits), -1, np.int64)
    row, dim = np.nonzero(found_codes[:, 0])
    of_codes[dim, np.log2(found_codes[row, 0, dim]).astype(np.int64)] = row
    scales = np.ascontiguousarray(found_scales[:, 0]).view(np.uint16)
    of_scales: Indices = np.full((scales.shape[1], 16), -1, np.int64)
    row, scale = np.nonzero(scales)
    of_scales[scale, np.log2(scales[row, scale]).astype(np.int64)] = row
    return of_codes, of_scales


@cache
def code_bits(side: str, bits: int, head_dim: int) -> Indices:
    """The bit of a tile that holds each bit of each code, `[64 tokens, head_dim, bits]`."""
    token, dim = _items(side, head_dim)
    places = _places(bits, len(token))
    out = np.empty((TOKENS, head_dim, bits), np.int64)
    for bit in range(bits):
        out[token, dim, bit] = places[bit]
    return out


def _items(side: str, head_dim: int) -> tuple[Indices, Indices]:
    """(token, dim) of every code, `[units, 32 lanes, 8]`."""
    unit, lane, i = np.indices((head_dim * TOKENS // 256, 32, 8))
    r, c = lane // 4, lane % 4
    if side == "key":
        steps = head_dim // 32
        return 8 * (unit // steps) + r, 32 * (unit % steps) + 16 * (i // 4) + 4 * c + i % 4
    sets = head_dim // 8
    token = 32 * (unit // sets) + 16 * (i // 4) + 8 * (i % 4 // 2) + 2 * c + i % 2
    return token, 8 * (unit % sets) + r


def _places(bits: int, units: int) -> Indices:
    """The bit of the tile for every bit of every code, `[bits, units, 32 lanes, 8]`."""
    unit, lane, i = np.indices((units, 32, 8))
    group, k = unit // 4, unit % 4
    out = np.empty((bits, *unit.shape), np.int64)
    for bit in range(bits):
        if bits == 8:
            word = 2 * k + i // 4
            at = 8 * (word // 4 * 512 + lane * 16 + word % 4 * 4 + i % 4) + bit
        elif bits in (4, 5) and bit < 4:  # nibbles, rotated: the lowest bit on top
            at = 8 * (lane * 16 + k * 4) + 4 * i + (bit + 3) % 4
        elif bits == 5:
            at = 8 * (512 + lane * 4) + 4 * i + k
        elif bits == 3:
            own, spread = 8 * (k * 128 + lane * 4) + 4 * i + bit, 8 * (bit * 128 + lane * 4)
            at = np.where(k < 3, own, spread + 4 * i + 3)
        else:
            at = 8 * (lane * 8 + k // 2 * 4) + 4 * i + 2 * (k % 2) + bit
        out[bit] = 1024 * bits * group + at
    return out
