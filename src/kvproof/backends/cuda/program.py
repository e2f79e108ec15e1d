"""CUDA kernels: compiled at first use for the device at hand, kept by digest, launched as they are.

Sources are the .cu and .cuh files beside this module; what depends on formats and shapes is handed
to them as macros. NVRTC compiles them (no toolkit is needed on the machine), and the machine code
is kept in the user's cache under the digest of everything that went into it. Launches go through
the driver onto torch's current stream: nothing is copied, allocated or waited for.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from kvproof import files
from kvproof.errors import Refused, RequestError

HERE = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "([a-z_]+\.cuh)"$', re.MULTILINE)
# What kernels are written for; machines beyond the last compile for it.
ARCHITECTURES = (80, 86, 89, 90, 100, 120)


def source(name: str) -> str:
    """The text of a .cu file with the .cuh files that it includes, each once."""
    seen: set[str] = set()

    def put_in(match: re.Match[str]) -> str:
        header = match.group(1)
        if header in seen:
            return ""
        seen.add(header)
        text = (HERE / header).read_text().replace("#pragma once", "")
        return _INCLUDE.sub(put_in, text)

    return _INCLUDE.sub(put_in, (HERE / name).read_text())


@lru_cache(maxsize=1)
def digest() -> str:
    """SHA-256 of all sources of kernels."""
    hashed = hashlib.sha256()
    for path in sorted([*HERE.glob("*.cu"), *HERE.glob("*.cuh")]):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()


@cache
def compiled(
    name: str, macros: tuple[tuple[str, int], ...], architecture: str, more: tuple[str, ...] = ()
) -> bytes:
    """Machine code of a source for an architecture ("sm_90a"), from the cache or by NVRTC, with
    `more` of its options.

    Refused if there is no compiler; its own message if the source does not compile.
    """
    nvrtc = bindings("nvrtc")
    version = nvrtc_version()
    text = source(name)
    options = [
        "--std=c++17", f"--gpu-architecture={architecture}", "--split-compile=0",
        *(f"-D{key}={value}" for key, value in macros), *more,
    ]  # fmt: skip
    what = "\0".join([version, text, *options])
    path = _cache() / f"{hashlib.sha256(what.encode()).hexdigest()}.cubin"
    if path.is_file():
        return path.read_bytes()
    program = checked(
        nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []), "nvrtcCreateProgram"
    )
    status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(status[0]):
        size = checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        said = log.decode(errors="replace").strip("\0\n ").splitlines()
        first = next((line for line in said if "error" in line), said[0] if said else "no reason")
        raise Refused(f"backend cuda: NVRTC {version} does not compile for {architecture}: {first}")
    code: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    checked(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(program)
    with suppress(OSError):  # without a cache it is compiled again the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as file:
            file.write(code)
    return code


def nvrtc_version() -> str:
    """Version of the compiler, as in "13.0"; Refused where there is none."""
    nvrtc = bindings("nvrtc")
    try:
        version = checked(nvrtc.nvrtcVersion(), "nvrtcVersion")
    except RuntimeError as error:  # the bindings look for the library at the first call
        raise Refused(
            "backend cuda: NVRTC, the compiler of its kernels, is missing; install kvproof[cuda]"
        ) from error
    return ".".join(map(str, version))


def _cache() -> Path:
    """Where machine code is kept: `KVPROOF_CACHE`, or the user's cache."""
    base = os.environ.get("KVPROOF_CACHE")
    if not base:
        import platformdirs

        base = platformdirs.user_cache_dir("kvproof")
    return Path(base) / "cuda"


class Kernel:
    """A kernel in the current context, with its shared memory and threads."""

    def __init__(
        self,
        name: str,
        entry: str,
        macros: dict[str, int],
        architecture: str,
        *,
        threads: int,
        shared: int,
        options: tuple[str, ...] = (),
    ) -> None:
        driver = bindings("driver")
        code = compiled(name, tuple(sorted(macros.items())), architecture, options)
        self._module = checked(driver.cuModuleLoadData(code), "cuModuleLoadData")
        self._function = checked(
            driver.cuModuleGetFunction(self._module, entry.encode()), "cuModuleGetFunction"
        )
        self._launch = driver.cuLaunchKernel
        self.threads, self.shared = threads, shared
        attribute = driver.CUfunction_attribute
        checked(
            driver.cuFuncSetAttribute(
                self._function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared
            ),
            "cuFuncSetAttribute",
        )
        self.blocks_at_once: int = checked(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, shared),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        )

    def __call__(self, grid: tuple[int, int, int], stream: int, argument: ctypes.Structure) -> None:
        """Launch with one argument, passed by value, on a stream (its handle)."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        checked(
            self._launch(
                self._function, *grid, self.threads, 1, 1, self.shared, stream,
                ctypes.addressof(pointers), 0,
            ),
            "cuLaunchKernel",
        )  # fmt: skip


def bindings(part: str) -> Any:
    """`cuda.bindings.driver` or `.nvrtc`; Refused where they are not installed."""
    try:
        import importlib

        return importlib.import_module(f"cuda.bindings.{part}")
    except ImportError as error:
        raise Refused(
            "backend cuda: the package cuda-bindings is missing; install kvproof[cuda]"
        ) from error


def checked(result: tuple[Any, ...], call: str) -> Any:
    """What a call of the bindings returned after its status; RequestError with the status."""
    status, *values = result
    if int(status):
        raise RequestError(f"backend cuda: {call} failed: {getattr(status, 'name', status)}")
    return None if not values else values[0] if len(values) == 1 else tuple(values)
