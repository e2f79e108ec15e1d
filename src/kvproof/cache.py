"""KV caches that hold nothing but codes.

A layer's cache is two uint8 buffers `[num_kv_heads, capacity, row_bytes]`. Every appended row is
encoded at once and attention reads codes only, the step's own tokens included, so one pass, chunks
and single tokens give the same numbers, and a quality measurement cannot miss the quantized cache.

Growth: buffers start empty and grow by a quarter (at least 64 rows), so at most about a fifth of a
long cache is spare. A windowed layer keeps the W - 1 rows that the next query can still see, plus
room for a quarter of a window, so that rows move once in W / 4 steps; a larger chunk borrows room
until `evict`. `nbytes` is the size of the buffers as allocated, `used_bytes` of the rows in use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvproof import backends
from kvproof.errors import RequestError
from kvproof.formats import Format
from kvproof.formats import get as get_format
from kvproof.geometry import index_ranges

if TYPE_CHECKING:
    from kvproof.backends import Backend
    from kvproof.geometry import Geometry, LayerGeometry

Blocks = NDArray[np.uint8]
_FP8_MAX = 448.0
_FLAGS = {"key": "--cache-type-k", "value": "--cache-type-v"}


class LayerCache:
    """The packed keys and values of one layer, for one sequence.

    `k_scale`, `v_scale`: float32 `[num_kv_heads]`, only for formats held with a scale per KV head.
    They are fixed by the first append (largest magnitude / 448) unless set before it; later values
    beyond them saturate.
    """

    def __init__(self, layer: LayerGeometry, key: Format, value: Format, backend: Backend) -> None:
        self.geometry = layer
        self.index = layer.index
        self.key, self.value = key, value
        self.backend = backend
        self.window: int | None = layer.window
        self.k_scale: NDArray[np.float32] | None = None
        self.v_scale: NDArray[np.float32] | None = None
        self.calls: Counter[str] = Counter()  # kernel -> times it ran
        self._kernels = {
            "k": backend.kernel("encode", key, layer.head_dim_k),
            "v": backend.kernel("encode", value, layer.head_dim_v),
            "attention_k": backend.kernel("attention", key, layer.head_dim_k),
            "attention_v": backend.kernel("attention", value, layer.head_dim_v),
        }
        heads = layer.num_kv_heads
        self._k: Blocks = np.empty((heads, 0, key.row_bytes(layer.head_dim_k)), np.uint8)
        self._v: Blocks = np.empty((heads, 0, value.row_bytes(layer.head_dim_v)), np.uint8)
        self._start = self._end = 0  # rows in use of both buffers
        self.length = 0

    @property
    def cached(self) -> int:
        """Tokens held: rows that attention may read."""
        return self._end - self._start

    @property
    def k_blocks(self) -> Blocks:
        """View `[cached, num_kv_heads, bytes]` of the live key buffer."""
        return self._k[:, self._start : self._end].transpose(1, 0, 2)

    @property
    def v_blocks(self) -> Blocks:
        """View `[cached, num_kv_heads, bytes]` of the live value buffer."""
        return self._v[:, self._start : self._end].transpose(1, 0, 2)

    @property
    def nbytes(self) -> int:
        """Bytes of the live buffers as allocated, scales included."""
        scales = sum(s.nbytes for s in (self.k_scale, self.v_scale) if s is not None)
        return self._k.nbytes + self._v.nbytes + scales

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows in use."""
        return self.k_blocks.nbytes + self.v_blocks.nbytes

    def append(self, k: Any, v: Any) -> None:
        """Encode and hold n more tokens: k, v float32 `[n, num_kv_heads, head_dim]`.

        A windowed layer first lets go of what none of them can see. RequestError naming the layer
        (wrong shape, NaN or infinity); the cache is then as before.
        """
        keys = self._rows(k, "key", self.geometry.head_dim_k)
        values = self._rows(v, "value", self.geometry.head_dim_v)
        n = len(keys)
        if len(values) != n:
            raise RequestError(f"layer {self.index}: {n} keys but {len(values)} values")
        k_scale = self._scale(self.key, self.k_scale, keys)
        v_scale = self._scale(self.value, self.v_scale, values)
        k_codes = self._encode("key", self.key, keys, k_scale)
        v_codes = self._encode("value", self.value, values, v_scale)
        self.k_scale, self.v_scale = k_scale, v_scale
        self._drop_unseen()
        self._make_room(n)
        end = self._end + n
        self._k[:, self._end : end] = k_codes.transpose(1, 0, 2)
        self._v[:, self._end : end] = v_codes.transpose(1, 0, 2)
        self._end = end
        self.length += n
        self.calls[self._kernels["k"]] += 1
        self.calls[self._kernels["v"]] += 1

    def attention(self, q: Any, *, scale: float | None = None, threads: int | None = None) -> Any:
        """Attention of the last n_q tokens over the cache: q float32 `[n_q, num_heads, head_dim_k]`
        gives `[n_q, num_heads, head_dim_v]`. `scale` None is 1 / sqrt(head_dim_k)."""
        heads, dim = self.geometry.num_heads, self.geometry.head_dim_k
        if tuple(q.shape[1:]) != (heads, dim):
            raise RequestError(
                f"layer {self.index}: queries must be [tokens, {heads}, {dim}], got {list(q.shape)}"
            )
        if scale is not None and not math.isfinite(scale):
            raise RequestError(f"layer {self.index}: scale {scale} is not finite")
        n_q = q.shape[0]
        if n_q > self.length or self._first_held > self._first_needed(self.length - n_q):
            raise RequestError(
                f"layer {self.index}: {n_q} queries need keys that are no longer held "
                f"({self.cached} of {self.length} tokens); attend to each chunk as it is appended"
            )
        out = self.backend.attention(
            q,
            self.k_blocks,
            self.v_blocks,
            key=self.key,
            value=self.value,
            causal=True,
            window=self.window,
            scale=scale,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            threads=threads,
        )
        self.calls[self._kernels["attention_k"]] += 1
        self.calls[self._kernels["attention_v"]] += 1
        return out

    def evict(self) -> None:
        """Let go of the rows that no later query can see, and of room borrowed for a chunk."""
        self._drop_unseen()
        steady = self._steady_rows
        if steady is not None and self._k.shape[1] > steady:
            self._move_to(steady)

    def check_crop(self, length: int) -> None:
        """RequestError if `crop(length)` would need rows that are gone."""
        if type(length) is not int or not 0 <= length <= self.length:
            raise RequestError(
                f"layer {self.index}: cannot crop to {length} tokens, it has seen {self.length}"
            )
        if length and self._first_held > self._first_needed(length):
            raise RequestError(
                f"layer {self.index}: cannot roll back to {length} tokens: its window of "
                f"{self.window} has let go of tokens before {self._first_held}; reset the cache "
                "and run the text again"
            )

    def crop(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        self.check_crop(length)
        if length == 0:
            self._start = self._end = 0
        else:
            self._end -= self.length - length
        self.length = length

    def reset(self) -> None:
        """Forget everything, scales and counts of kernels included; buffers stay."""
        self.crop(0)
        self.k_scale = self.v_scale = None
        self.calls.clear()

    @property
    def _first_held(self) -> int:
        return self.length - self.cached

    def _first_needed(self, position: int) -> int:
        """First token that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    @property
    def _steady_rows(self) -> int | None:
        return None if self.window is None else self.window - 1 + max(16, self.window // 4)

    def _drop_unseen(self) -> None:
        if self.window is not None:
            self._start = max(self._start, self._end - (self.window - 1))

    def _make_room(self, n: int) -> None:
        capacity = self._k.shape[1]
        if self._end + n <= capacity:
            return
        need, steady = self.cached + n, self._steady_rows
        if need > capacity:
            capacity = max(need, capacity + max(64, capacity // 4))
            if steady is not None:
                capacity = max(need, min(capacity, steady))
        self._move_to(capacity)

    def _move_to(self, capacity: int) -> None:
        """Bring the rows in use to the front of buffers of `capacity` rows."""
        for name in ("_k", "_v"):
            old: Blocks = getattr(self, name)
            same = capacity == old.shape[1]
            new = old if same else np.empty((old.shape[0], capacity, old.shape[2]), np.uint8)
            new[:, : self.cached] = old[:, self._start : self._end]
            setattr(self, name, new)
        self._start, self._end = 0, self.cached

    def _rows(self, x: Any, side: str, head_dim: int) -> NDArray[np.float32]:
        heads = self.geometry.num_kv_heads
        try:
            rows = np.asarray(x.detach() if hasattr(x, "detach") else x)
        except (TypeError, ValueError) as error:  # bfloat16, another device, ragged lists
            raise RequestError(f"layer {self.index}: {side}s: {error}") from error
        if rows.ndim != 3 or rows.shape[1:] != (heads, head_dim) or rows.dtype != np.float32:
            raise RequestError(
                f"layer {self.index}: {side}s must be float32 [tokens, {heads}, {head_dim}], "
                f"got {rows.dtype} {list(rows.shape)}"
            )
        return rows

    def _encode(
        self, side: str, fmt: Format, rows: NDArray[np.float32], scale: NDArray[np.float32] | None
    ) -> Blocks:
        try:
            return self.backend.encode(fmt, rows, scale)
        except RequestError as error:
            raise RequestError(f"layer {self.index}: {side}s: {error}") from None

    @staticmethod
    def _scale(
        fmt: Format, fixed: NDArray[np.float32] | None, rows: NDArray[np.float32]
    ) -> NDArray[np.float32] | None:
        """Scale per KV head `[num_kv_heads]`; None for formats that hold theirs in the rows."""
        if not fmt.scaled or fixed is not None or not len(rows):
            return fixed
        peak = np.abs(rows).max(axis=(0, 2))
        # A head of zeros says nothing about its later values; non-finite rows are refused next.
        usable = np.isfinite(peak) & (peak > 0)
        return np.where(usable, peak / np.float32(_FP8_MAX), 1).astype(np.float32)


class KVCache:
    """The caches of all layers of a model, for one sequence.

    `per_layer` maps a layer index to (key, value) formats of its own. Every format is checked
    against every layer that owns a cache before anything is allocated: RequestError names layers,
    format, flag and reason, all problems at once.
    """

    def __init__(
        self,
        geometry: Geometry,
        key: str = "f16",
        value: str = "f16",
        backend: str | Backend = "cpu",
        per_layer: Mapping[int, tuple[str, str]] | None = None,
    ) -> None:
        self.geometry = geometry
        self.backend = backends.get(backend) if isinstance(backend, str) else backend
        self.key, self.value = key, value
        chosen = dict(per_layer or {})
        owners = [layer for layer in geometry.layers if layer.shares_kv_with is None]
        unknown = sorted(set(chosen) - {layer.index for layer in owners})
        if unknown:
            raise RequestError(f"layers {index_ranges(unknown)}: own no cache, so take no format")
        pairs = {
            layer.index: [get_format(name) for name in chosen.get(layer.index, (key, value))]
            for layer in owners
        }
        problems: dict[str, list[int]] = {}
        for layer in owners:
            dims = (layer.head_dim_k, layer.head_dim_v)
            for side, fmt, dim in zip(("key", "value"), pairs[layer.index], dims, strict=True):
                reason = (
                    fmt.refuses(dim, side)
                    or self.backend.refuses("encode", fmt, dim)
                    or self.backend.refuses("attention", fmt, dim)
                )
                if reason:
                    problem = f"{_FLAGS[side]} {fmt.name}: {reason}"
                    problems.setdefault(problem, []).append(layer.index)
        if problems:
            raise RequestError(
                "; ".join(f"layer {index_ranges(at)}: {what}" for what, at in problems.items())
                + "; choose a format that fits (kvproof formats lists them)"
            )
        own: dict[int, LayerCache] = {}
        for layer in owners:
            k, v = pairs[layer.index]
            own[layer.index] = LayerCache(layer, k, v, self.backend)
        self._layers = [
            own[layer.index if layer.shares_kv_with is None else layer.shares_kv_with]
            for layer in geometry.layers
        ]
        self.owners: tuple[LayerCache, ...] = tuple(own.values())

    def layer(self, index: int) -> LayerCache:
        """The cache that layer `index` reads: its own, or the one of the layer it shares with."""
        return self._layers[index]

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.owners[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of all live buffers as allocated; a shared cache counts once."""
        return sum(layer.nbytes for layer in self.owners)

    @property
    def used_bytes(self) -> int:
        """Bytes of all rows in use."""
        return sum(layer.used_bytes for layer in self.owners)

    def evict(self) -> None:
        """`LayerCache.evict` on every layer."""
        for layer in self.owners:
            layer.evict()

    def crop(self, length: int) -> None:
        """Forget all tokens from position `length` on, in every layer or (RequestError) in none."""
        for layer in self.owners:
            layer.check_crop(length)
        for layer in self.owners:
            layer.crop(length)

    def reset(self) -> None:
        """Forget everything."""
        for layer in self.owners:
            layer.reset()

    def witness(self) -> list[dict[str, int]]:
        """Per layer, the kernels that ran and how often; a sharing layer shows its owner's."""
        return [dict(layer.calls) for layer in self._layers]
