"""Reading files that a user names, and writing files whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def contents(path: Path, limit: int) -> bytes:
    """All bytes of a file of at most `limit` bytes; OSError if it cannot be read or is longer.

    A device has no size and no end, so the size is not asked for.
    """
    with path.open("rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit >> 20} MiB", str(path))
    return raw


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[IO[bytes]]:
    """A file to write that becomes `path` at the end, whole; if anything is raised `path` stays as
    it was and nothing is left behind.

    `mode` are its permissions, None: those of any new file. OSError if it cannot be written,
    ValueError for a path that is no name of a file.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is None:
            umask = os.umask(0)
            os.umask(umask)
            mode = 0o666 & ~umask
        part.chmod(mode)  # temporary files are private to the user
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
