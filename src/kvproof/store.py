"""Where a layer's cache keeps the encoded rows of one side: as rows, or in tiles.

Rows lie in slots 0, 1, ... of a buffer; which slots are in use is the cache's business. `RowStore`
keeps them as the format stores them, `TileStore` in the arrangement of backends/tiles.py, where a
backend has kernels for it. Both take and give rows; the bytes a row costs are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvproof.backends.tiles import TOKENS, Tiles
from kvproof.formats import Format

if TYPE_CHECKING:
    from kvproof.backends import Backend

Blocks = NDArray[np.uint8]
LINE = 64  # bytes of a cache line, which tiles begin on


class Store(Protocol):
    """One side of a layer's cache."""

    granule: int  # rows move by multiples of it
    capacity: int  # slots

    @property
    def buffer(self) -> Blocks:
        """The live buffer, `[num_kv_heads, ...]`."""

    @property
    def nbytes(self) -> int:
        """Bytes as allocated."""

    def write(self, at: int, rows: Blocks) -> None:
        """Put rows uint8 `[n, num_kv_heads, row_bytes]` into the slots from `at` on."""

    def read(self, first: int, n: int) -> Blocks:
        """The rows of the slots from `first` on, `[n, num_kv_heads, row_bytes]`."""

    def view(self, first: int, n: int) -> Any:
        """The same as attention takes them, without a copy."""

    def move(self, first: int, n: int, capacity: int) -> int:
        """Bring rows to the front of a buffer of at least `capacity` slots; returns the slot of the
        first, which is less than `granule`."""


class RowStore:
    """Rows as their format stores them: `[num_kv_heads, capacity, row_bytes]`."""

    granule = 1

    def __init__(self, heads: int, row_bytes: int) -> None:
        self._rows: Blocks = np.empty((heads, 0, row_bytes), np.uint8)
        self.capacity = 0

    @property
    def buffer(self) -> Blocks:
        """`[num_kv_heads, capacity, row_bytes]`."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes as allocated."""
        return self._rows.nbytes

    def write(self, at: int, rows: Blocks) -> None:
        """See Store."""
        self._rows[:, at : at + len(rows)] = rows.transpose(1, 0, 2)

    def read(self, first: int, n: int) -> Blocks:
        """See Store; a view of the live buffer."""
        return self._rows[:, first : first + n].transpose(1, 0, 2)

    view = read

    def move(self, first: int, n: int, capacity: int) -> int:
        """See Store."""
        old = self._rows
        if capacity != self.capacity:
            self._rows = np.empty((old.shape[0], capacity, old.shape[2]), np.uint8)
            self.capacity = capacity
        self._rows[:, :n] = old[:, first : first + n]
        return 0


class TileStore:
    """Rows in tiles of 64 tokens, `[num_kv_heads, tiles, 64 * row_bytes]` from a cache line on.

    Tiles move as wholes, so the first row in use may be any of the first tile.
    """

    granule = TOKENS

    def __init__(
        self, fmt: Format, side: str, heads: int, row_bytes: int, backend: Backend
    ) -> None:
        self.format, self.side, self.backend = fmt, side, backend
        self._shape = (heads, TOKENS * row_bytes)
        self.capacity = 0
        self._memory, self._tiles = self._zeros(0)

    @property
    def buffer(self) -> Blocks:
        """`[num_kv_heads, tiles, 64 * row_bytes]`."""
        return self._tiles

    def _zeros(self, tiles: int) -> tuple[Blocks, Blocks]:
        """(memory, tiles in it that begin on a cache line): slots never written to hold zeros."""
        heads, size = self._shape
        memory: Blocks = np.zeros(heads * tiles * size + LINE - 1, np.uint8)
        skip = -memory.ctypes.data % LINE
        used = memory[skip : skip + heads * tiles * size]
        return memory, used.reshape(heads, tiles, size)

    @property
    def nbytes(self) -> int:
        """Bytes as allocated, those before the first cache line included."""
        return self._memory.nbytes if self.capacity else 0

    def write(self, at: int, rows: Blocks) -> None:
        """See Store."""
        self.backend.pack(self.format, self.side, rows, self._tiles, at)

    def read(self, first: int, n: int) -> Blocks:
        """See Store; a copy, and read-only, so that nobody takes it for the live buffer."""
        rows = self.backend.unpack(self.format, self.side, self._tiles, first, n)
        rows.flags.writeable = False
        return rows

    def view(self, first: int, n: int) -> Tiles:
        """See Store."""
        return Tiles(self.format, self.side, self._tiles, first, n)

    def move(self, first: int, n: int, capacity: int) -> int:
        """See Store."""
        old, tiles = self._tiles, -(-capacity // TOKENS)
        start, end = first // TOKENS, -(-(first + n) // TOKENS)
        if tiles * TOKENS != self.capacity:
            self._memory, self._tiles = self._zeros(tiles)
            self.capacity = tiles * TOKENS
        self._tiles[:, : end - start] = old[:, start:end]
        return first % TOKENS
