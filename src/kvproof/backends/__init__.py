"""Backends by name.

Each is one module, imported on first use, so that a broken one leaves the others working. What a
backend can do follows from the kernels that it has (`refuses`), never from a second list.
"""

from __future__ import annotations

import importlib
from types import ModuleType
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
    "cuda": "kvproof.backends.cuda:CudaBackend",
    "vulkan": None,
    "metal": None,
}
_loaded: dict[str, Backend] = {}


class Step(Protocol):
    """One new token of one layer, in a call for its rows and a call for its query (LayerCache).

    Both do what encode, decode, scores, attention and segments.merge do one after the other. False
    where a number is not finite: nothing that was written may then be used, and the separate calls
    say what is wrong.
    """

    def append(
        self,
        k: NDArray[np.float32],
        v: NDArray[np.float32],
        k_scale: NDArray[np.float32] | None,
        v_scale: NDArray[np.float32] | None,
        page: NDArray[np.uint8] | None,
        keys: NDArray[np.uint8],
        values: NDArray[np.uint8],
        at: int,
    ) -> bool:
        """Encode k, v float32 `[1, num_kv_heads, head_dim]` into slot `at` of a layer's buffers
        (store.py). `page`: the float16 row of the key's page, uint8 `[num_kv_heads or 1, 2 *
        head_dim]`, where keys are conditioned. The bytes are those of `Backend.encode`."""

    def attend(
        self,
        threads: int | None,
        q: NDArray[np.float32],
        keys: NDArray[np.uint8],
        values: NDArray[np.uint8],
        at: int,
        n: int,
        first: int,
        scale: float,
        k_scale: NDArray[np.float32] | None,
        v_scale: NDArray[np.float32] | None,
        sink_k: NDArray[np.uint8] | None,
        sink_v: NDArray[np.uint8] | None,
        sinks_from: int,
        pages: NDArray[np.uint8] | None,
        page: int,
        phase: int,
        out: NDArray[np.float32],
    ) -> bool:
        """Attention of q `[1, num_heads, head_dim_k]` over rows `first` to n - 1 of the n that
        begin in slot `at`, to `out` `[1, num_heads, head_dim_v]`.

        Sinks from `sinks_from` on (f16 rows, `[num_kv_heads, sinks, bytes]`) are joined to it. Row
        t is of page (phase + t) // page; `pages` uint8 `[n_pages, num_kv_heads or 1, bytes]` are
        what the conditioner adds, page 0 where one of them serves all rows.
        """


class Backend(Protocol):
    """What every backend offers; docs/architecture.md states shapes and dtypes."""

    name: str
    # `pack`, `unpack`, `fits` and `fit` in NumPy: what its tiles are held to (backends/tiles.py is
    # one).
    arrangement: ModuleType

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
        """Whether caches of such keys and values are held in tiles (`arrangement`)."""

    def pack(self, fmt: Format, side: str, rows: Any, buffer: NDArray[np.uint8], at: int) -> None:
        """Write rows uint8 `[n, num_kv_heads, row_bytes]` to the slots from `at` on of a buffer
        `[num_kv_heads, tiles, 64 * row_bytes]`; RequestError (nothing is written) for one whose
        stored scale is not finite."""

    def unpack(
        self, fmt: Format, side: str, buffer: NDArray[np.uint8], first: int, n: int
    ) -> NDArray[np.uint8]:
        """The n rows from slot `first` on, as they were packed."""

    def step(
        self,
        key: Format,
        value: Format,
        heads: tuple[int, int],
        dims: tuple[int, int],
        *,
        tiled: bool,
        scale: NDArray[np.float32] | None = None,
        mean: NDArray[np.float32] | None = None,
        pairs: int = -1,
    ) -> Step | None:
        """The calls for one token of a layer of (num_heads, num_kv_heads) and (head_dim_k,
        head_dim_v); None where there are only the separate ones.

        `tiled`: its buffers are tiles. `scale` float32 `[num_kv_heads, head_dim_k]`: its keys are
        conditioned, by page rows that are means, or (`mean`, of that shape, and `pairs` of
        channels) turns of a mean.
        """

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
