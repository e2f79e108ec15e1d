"""Reading files that a user names."""

from __future__ import annotations

import errno
from pathlib import Path


def contents(path: Path, limit: int) -> bytes:
    """All bytes of a file of at most `limit` bytes; OSError if it cannot be read or is longer.

    A device has no size and no end, so the size is not asked for.
    """
    with path.open("rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit >> 20} MiB", str(path))
    return raw
