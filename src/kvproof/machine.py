"""The processor this process runs on, as the system tells it."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path


@functools.cache
def cpu_model() -> str:
    """Marketing name of the processor, or the machine type where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def usable_cpus() -> int:
    """Logical processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
