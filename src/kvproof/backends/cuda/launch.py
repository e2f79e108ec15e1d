"""Launches of attention.cu: what a shape needs (`setting`), and the argument of a call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

from kvproof.backends.cuda import codes, layout
from kvproof.backends.tiles import TOKENS
from kvproof.formats import Format

HEADS = 8  # query heads of a KV head that a block takes
WARPS = 12  # of a block, at most
SPLITS = 600  # of a sequence, whose shares a block holds
# Shared memory of a block that is not the launch's to give away.
KEPT = 1472


class Side(ctypes.Structure):
    """`Side` of attention.cu."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("of_batch", ctypes.c_int64),
        ("of_head", ctypes.c_int64),
        ("table", codes.Table),
        ("fine", codes.Table),
        ("scale", ctypes.c_float),
        ("signs", ctypes.c_void_p),
    ]


class Args(ctypes.Structure):
    """`Args` of attention.cu."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("k", Side),
        ("v", Side),
        ("pages", ctypes.c_void_p),
        ("of_pages", ctypes.c_int),
        ("first", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("start", ctypes.c_int),
        ("length", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("group", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("factor", ctypes.c_float),
        ("offsets", ctypes.c_void_p),
        ("page", ctypes.c_int),
        ("phase", ctypes.c_int),
        ("n_pages", ctypes.c_int),
        ("parts", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Setting:
    """How attention.cu is compiled and launched for a pair, its dims and its group."""

    dims: tuple[int, int]
    heads: int
    sides: tuple[codes.Code, codes.Code]
    same_table: bool
    offsets: bool
    team: int
    teams: int
    slots: tuple[int, int]  # of the rings of keys and values
    at_once: int  # blocks on a multiprocessor

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.team * self.teams

    @property
    def macros(self) -> dict[str, int]:
        """Those of attention.cu."""
        key, value = self.sides
        return {
            "DIM_K": self.dims[0], "DIM_V": self.dims[1], "HEADS": self.heads,
            "K_BITS": key.bits, "V_BITS": value.bits,
            "K_BLOCKS": int(key.blocks), "V_BLOCKS": int(value.blocks),
            "K_FINE": int(key.fine), "V_FINE": int(value.fine),
            "ROTATE_K": key.rotation, "ROTATE_V": value.rotation,
            "TEAM": self.team, "TEAMS": self.teams,
            "K_SLOTS": self.slots[0], "V_SLOTS": self.slots[1], "CTAS": self.at_once,
            "OFFSETS": int(self.offsets), "SAME_TABLE": int(self.same_table),
        }  # fmt: skip

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: its rings and queries, or later its sums."""
        dim_k, dim_v = self.dims
        tiles = [
            TOKENS * d * c.bits // 8 + 2 * TOKENS * (d // 32 if c.blocks else 1)
            for d, c in zip(self.dims, self.sides, strict=True)
        ]
        halves, classes = (1, 2) if self.heads <= 4 else (2, 1)
        ring = sum(n * size for n, size in zip(self.slots, tiles, strict=True))
        exchange = 2 * halves * 8 * 128 + self.team * (8 + 128) if self.team > 1 else 0
        scratch = 4 * self.team * dim_k if dim_k & (dim_k - 1) else 0  # to rotate in
        main = self.teams * (ring + 8 * sum(self.slots) + exchange + scratch)
        main += 16 * dim_k + 32
        rows = self.teams * 8 * (dim_v + 4 + self.team + 1)
        shares = self.heads * (self.teams * classes + 2 + dim_v + SPLITS)
        return max(main, 4 * (rows + shares))


def setting(
    key: Format,
    value: Format,
    dims: tuple[int, int],
    group: int,
    offsets: bool,
    room: int,
    at_once: int = 1,
) -> Setting | None:
    """The setting with most warps that `room` bytes of shared memory hold, None if there is none;
    for pairs of which `layout.fit` is true.

    With `at_once` blocks on a multiprocessor, which share the warps and the memory, one begins
    while another joins its sums: better where there are many short sequences.
    """
    team = layout.warps(dims[1])
    least = 1 if team == 1 else 2  # slots of values: a team asks for them one tile late
    same = key == value
    sides = codes.code(key, "key"), codes.code(value, "value")
    teams, slots = max(1, WARPS // team // at_once), (2, least)
    found = Setting(dims, min(HEADS, group), sides, same, offsets, team, teams, slots, at_once)
    while found.shared > room // at_once - KEPT:
        if found.teams > 1:
            found = replace(found, teams=found.teams - 1)
        elif found.slots[0] > 1:
            found = replace(found, slots=(1, least))
        else:
            return None
    return found


def splits(blocks: int, tasks: int, tiles: int, teams: int) -> int:
    """Parts of a sequence of so many tiles, so that `blocks` blocks are busy with all tasks."""
    return max(1, min(blocks // tasks, -(-tiles // teams), SPLITS))
