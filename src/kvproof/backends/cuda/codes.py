"""What attention.cu is told of a format: the int8 entries of its codes, and its rotation.

Integer codebooks are taken as they are. Those of reals are brought to 127 and held as the nearest
integer and a second one (fine), a 128th of it for keys and a 256th for values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.backends import tiles
from kvproof.formats import Format

LARGEST = 127  # of an int8 entry
PARTS = {"key": 128, "value": 256}  # of an entry: what its fine part counts
_ROTATIONS = {"none": 0, "head": 1, "hadamard": 1, "r32": 32}  # ROTATE_K, ROTATE_V


class Table(ctypes.Structure):
    """`Table` of codes.cuh."""

    _fields_ = [
        ("even", ctypes.c_uint32 * 4),
        ("odd", ctypes.c_uint32 * 4),
        ("minus_one", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class Code:
    """One side of attention.cu: its macros' values, its tables, and what an entry is worth."""

    bits: int
    blocks: bool  # a scale per 32 values
    fine: bool
    rotation: int
    table: Table
    fine_table: Table
    scale: float


def known(fmt: Format) -> bool:
    """Whether attention.cu knows the codes of a format."""
    if fmt.name not in tiles.PLANES or fmt.rotation not in _ROTATIONS:
        return False
    bits = sum(tiles.PLANES[fmt.name])
    return fmt.codebook is None or len(fmt.codebook) == 1 << bits  # no trellis


@cache
def code(fmt: Format, side: str) -> Code:
    """What attention.cu needs of a side ("key" or "value") whose format is `known`."""
    bits = sum(tiles.PLANES[fmt.name])
    book = _book(fmt, bits)
    blocks, rotation = fmt.block_size is not None, _ROTATIONS[fmt.rotation]
    if bits == 8:
        return Code(bits, blocks, False, rotation, Table(), Table(), 1.0)
    if (book == np.rint(book)).all():
        return Code(bits, blocks, False, rotation, table(book, bits), Table(), 1.0)
    largest = float(np.abs(book).max())
    entries = book * (LARGEST / largest)
    coarse = np.rint(entries)
    rest = np.clip(np.rint((entries - coarse) * PARTS[side]), -LARGEST, LARGEST)
    return Code(
        bits, blocks, True, rotation, table(coarse, bits), table_of_any_sign(rest, bits),
        largest / LARGEST,
    )  # fmt: skip


def _book(fmt: Format, bits: int) -> NDArray[np.float64]:
    """Value of every code, in units of the scale, as the format decodes it."""
    n = max(32, 1 << bits)
    codes = (np.arange(n) % (1 << bits)).astype(np.uint8).reshape(1, 1, n)
    scales = np.ones((1, 1, n // 32 if fmt.block_size else 1), np.float16)
    rows = tiles._joined(fmt, codes, scales).reshape(-1, fmt.block_bytes or fmt.row_bytes(n))
    return fmt.decode_blocks(rows).reshape(-1)[: 1 << bits]


def table(entries: NDArray[np.float64], bits: int) -> Table:
    """The table of `Group::entries` (codes.cuh) for integers from -128 to 127.

    Entries of 4 and 5 bits come in pairs of one sign, as in any ascending codebook of which half is
    negative.
    """
    whole = entries.astype(np.int64)
    if bits < 4:
        return _of_words(_words(np.resize(whole, 8) if bits == 3 else whole), [])
    even, odd = [], []
    for half in whole.reshape(-1, 16):
        first, second = half[0::2], half[1::2]
        if not ((first < 0) == (second < 0)).all():
            raise ValueError(f"entries {half.tolist()} have a pair of both signs")
        even += _words(first)
        odd += _words(np.where(second < 0, ~second, second)[::-1])
    return _of_words(even, odd)


def table_of_any_sign(entries: NDArray[np.float64], bits: int) -> Table:
    """The table of `Group::entries_of_any_sign` for the same."""
    whole = entries.astype(np.int64)
    if bits != 4:
        return table(entries, bits)
    return _of_words(_words(whole[0::2]), _words(whole[1::2]))


def _words(entries: Any) -> list[int]:
    """Four int8 a word."""
    return [int(word) for word in np.asarray(entries, np.int8).view("<u4")]


def _of_words(even: Sequence[int], odd: Sequence[int]) -> Table:
    words = ctypes.c_uint32 * 4
    return Table(words(*even), words(*odd), 0xFFFFFFFF)
