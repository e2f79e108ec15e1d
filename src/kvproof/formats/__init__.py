"""Storage formats.

One row per format; its NumPy encode and decode are the reference. A format fixes the numbers: how
a row of values (one head of one token) becomes bytes. To add one, write two functions
(`encode_blocks`, `decode_blocks`) and one `Format(...)` row, and add the row to `_ROWS` below.
docs/formats.md states every layout bit by bit.
"""

from __future__ import annotations

import difflib
import sys
from types import ModuleType

from kvproof.errors import RequestError
from kvproof.formats.base import Counters, Format
from kvproof.formats.polar import Q4_POLAR, Q4_POLAR_RES
from kvproof.formats.qjl import QJL1_256, qjl1_256
from kvproof.formats.row import TQ2, TQ3, TQ4, TQ5, TQ8
from kvproof.formats.stock import BF16, F16, FP8_E4M3, Q4_0, Q4_0_ROT, Q8_0
from kvproof.formats.tcq import TCQ2, TCQ2_64, TCQ3, TCQ3_64, TCQ4, TCQ4_64
from kvproof.formats.trellis512 import TBQ3_TCQ, tbq3_tcq
from kvproof.formats.turbo import TBQ3_0, TBQ4_0

_ROWS: dict[str, Format] = {
    f.name: f
    for f in (
        F16,
        BF16,
        Q8_0,
        TQ8,
        FP8_E4M3,
        Q4_POLAR,
        Q4_POLAR_RES,
        TQ5,
        Q4_0,
        Q4_0_ROT,
        TBQ4_0,
        TQ4,
        TCQ4,
        TCQ4_64,
        TBQ3_0,
        TBQ3_TCQ,
        TQ3,
        TCQ3,
        TCQ3_64,
        TQ2,
        TCQ2,
        TCQ2_64,
        QJL1_256,
    )
}


def all_formats() -> tuple[Format, ...]:
    """Every format, from most to fewest bits as registered."""
    return tuple(_ROWS.values())


def get(name: str | Format) -> Format:
    """The format called `name`; RequestError with a suggestion if there is none."""
    if isinstance(name, Format):
        return name
    row = _ROWS.get(name) if isinstance(name, str) else None
    if row is None:
        asked = str(name).lower()
        near = [n for n in _ROWS if asked and n.startswith(asked)]
        near = near or difflib.get_close_matches(asked, _ROWS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(f"unknown format {name!r}{hint} (known: {', '.join(_ROWS)})")
    return row


class _CallableModule(ModuleType):
    """Lets `kvproof.formats()` list the formats (see kvproof/__init__.py)."""

    def __call__(self) -> tuple[Format, ...]:
        return all_formats()


sys.modules[__name__].__class__ = _CallableModule

__all__ = ["Counters", "Format", "all_formats", "get", "qjl1_256", "tbq3_tcq"]
