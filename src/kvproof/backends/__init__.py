"""Backends by name.

Each is one module, imported on first use, so that a broken one leaves the others working. What a
backend can do follows from the kernels that it has (`refuses`), never from a second list.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvproof.errors import Refused, RequestError
from kvproof.formats import Format

OPS = ("encode", "decode", "scores", "attention")

# name -> "module:class"; a name without an entry is unknown, one with None is planned and says so.
_MODULES: dict[str, str | None] = {
    "reference": "kvproof.backends.reference:ReferenceBackend",
    "cpu": "kvproof.backends.cpu:CpuBackend",
    "cuda": None,
    "vulkan": None,
    "metal": None,
}
_loaded: dict[str, Backend] = {}


class Backend(Protocol):
    """What every backend offers; docs/architecture.md states shapes and dtypes."""

    name: str

    def environment(self) -> dict[str, Any]:
        """Device, ISA, threads and versions."""

    def refuses(self, op: str, fmt: Format, head_dim: int) -> str | None:
        """Why `op` cannot run on this format and head_dim, or None."""

    def kernel(self, op: str, fmt: Format, head_dim: int) -> str:
        """Name of the kernel that would run."""

    def digest(self) -> str:
        """SHA-256 over the kernels as shipped and the format rows."""

    def encode(self, fmt: Format, x: Any, scale: Any = None) -> NDArray[np.uint8]:
        """Float32 `[..., n]` to uint8 `[..., row_bytes]`."""

    def decode(self, fmt: Format, blocks: Any, scale: Any = None) -> NDArray[np.float32]:
        """Uint8 `[..., row_bytes]` to float32 `[..., n]`."""

    def scores(self, fmt: Format, q: Any, blocks: Any, scale: Any = None) -> NDArray[np.float32]:
        """Plain dot products of queries with encoded keys, `[n_q, num_heads, n_kv]`."""

    def arranges(self, key: Format, value: Format, head_dim_k: int, head_dim_v: int) -> bool:
        """Whether caches of such keys and values are held in tiles (backends/tiles.py)."""

    def pack(self, fmt: Format, side: str, rows: Any, buffer: NDArray[np.uint8], at: int) -> None:
        """Write rows uint8 `[n, num_kv_heads, row_bytes]` to the slots from `at` on of a buffer
        `[num_kv_heads, tiles, 64 * row_bytes]`; RequestError (nothing is written) for one whose
        stored scale is not finite."""

    def unpack(
        self, fmt: Format, side: str, buffer: NDArray[np.uint8], first: int, n: int
    ) -> NDArray[np.uint8]:
        """The n rows from slot `first` on, as they were packed."""

    def attention(
        self,
        q: Any,
        k_blocks: Any,
        v_blocks: Any,
        *,
        key: str | Format,
        value: str | Format,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        threads: int | None = None,
        position: int | None = None,
        offsets: Any = None,
        page: int | None = None,
        phase: int = 0,
        return_lse: bool = False,
    ) -> Any:
        """Attention of n_q positions over n_kv encoded tokens, `[n_q, num_heads, head_dim_v]`.

        Blocks are uint8 `[n_kv, num_kv_heads, row_bytes]`, or both sides `tiles.Tiles`.

        The queries are the last n_q of the cached tokens, or start at row `position`, which may
        lie before or after the rows given (they are then a segment of a cache). Row t belongs to
        page (phase + t) // page, and `offsets` `[n_q, num_heads, n_pages]` are added to its scaled
        scores. With `return_lse` the result is (out, lse): lse float32 `[n_q, num_heads]` is the
        natural logarithm of the sum of exp(scaled score + offset) over the rows seen, -inf (and
        zero output) where a query sees none; `segments.merge` joins such results.
        """


def names() -> tuple[str, ...]:
    """Names of the backends that exist in this version."""
    return tuple(n for n, module in _MODULES.items() if module)


def known() -> tuple[str, ...]:
    """Names of all backends, those that this version lacks included."""
    return tuple(_MODULES)


def get(name: str) -> Backend:
    """The backend called `name`.

    RequestError if unknown, Refused (with the reason) if it cannot run here.
    """
    if not isinstance(name, str):
        raise RequestError(f"unknown backend {name!r} (known: {', '.join(known())})")
    if name in _loaded:
        return _loaded[name]
    if name not in _MODULES:
        raise RequestError(f"unknown backend {name!r} (known: {', '.join(known())})")
    target = _MODULES[name]
    if target is None:
        raise Refused(
            f"backend {name!r} is not in this version of kvproof; available: {', '.join(names())}"
        )
    module, cls = target.split(":")
    backend: Backend = getattr(importlib.import_module(module), cls)()
    return _loaded.setdefault(name, backend)
