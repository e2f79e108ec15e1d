"""KV caches that hold nothing but codes.

A layer's cache is two buffers of encoded rows (store.py): rows as their formats store them, or in
tiles where the backend has kernels for those. Every appended row is encoded at once and attention
reads codes only, the step's own tokens included, so one pass, chunks and single tokens give the
same numbers up to the rounding of prompt and token kernels, and a quality measurement cannot miss
the quantized cache.

Two things may be done for quality. The first tokens of a text ("sinks"), which nearly all queries
look at, can be kept apart in f16, keys and values. Keys can be conditioned (see conditioner.py):
what is encoded is (k - mean of the row's page) / scale, queries are multiplied by the scale, and
q . mean of the page is added to scores. Means are held in float16, one row a page and KV head. What
a later row is encoded with depends on codes that are held already and on its position, never on
how the text was cut.

Growth: buffers start empty and grow by a quarter (at least 64 rows), so at most about a fifth of a
long cache is spare. A windowed layer keeps the W - 1 rows that the next query can still see, plus
room for a quarter of a window, so that rows move once in W / 4 steps; a larger chunk borrows room
until `evict`. Tiles are moved, let go of and allocated whole: up to 63 rows in front of a window
and 63 behind any rows are held with them. `nbytes` is the size of the buffers as allocated,
`used_bytes` of the rows in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvproof import backends, segments
from kvproof.conditioner import Conditioner, as_half, page_turn, turned
from kvproof.errors import RequestError
from kvproof.formats import Format
from kvproof.formats import get as get_format
from kvproof.formats.base import as_float32
from kvproof.geometry import MAX_TOKENS, index_ranges
from kvproof.store import Blocks, RowStore, Store, TileStore

if TYPE_CHECKING:
    from kvproof.backends import Backend, Step
    from kvproof.geometry import Geometry, LayerGeometry

_FP8_MAX = 448.0
_FLAGS = {"key": "--cache-type-k", "value": "--cache-type-v"}
_NO_PAGE = 1 << 62  # tokens of a page that never ends
_F32_MAX = float(np.finfo(np.float32).max)
MAX_SINKS = 4096


class LayerCache:
    """The packed keys and values of one layer, for one sequence.

    `k_scale`, `v_scale`: float32 `[num_kv_heads]`, only for formats held with a scale per KV head.
    They are fixed by the first append (largest magnitude / 448) unless set before it; later values
    beyond them saturate.

    `sinks`: how many of the first tokens are kept in f16, apart from the coded rows.
    `first_position`: position in the text of the first token, for means that turn with it;
    `turns`: where layers with such means find each other's, by frequencies.
    """

    def __init__(
        self,
        layer: LayerGeometry,
        key: Format,
        value: Format,
        backend: Backend,
        *,
        conditioner: Conditioner | None = None,
        sinks: int = 0,
        first_position: int = 0,
        turns: dict[bytes, PageTurns] | None = None,
    ) -> None:
        self.geometry = layer
        self.index = layer.index
        self.key, self.value = key, value
        self.backend = backend
        self.window: int | None = layer.window
        self.k_scale: NDArray[np.float32] | None = None
        self.v_scale: NDArray[np.float32] | None = None
        self.calls: Counter[str] = Counter()  # kernel -> times it ran
        tiled = backend.arranges(key, value, layer.head_dim_k, layer.head_dim_v)
        attention = "attention_tiles" if tiled else "attention"
        self._kernels = {
            "k": backend.kernel("encode", key, layer.head_dim_k),
            "v": backend.kernel("encode", value, layer.head_dim_v),
            "attention_k": backend.kernel(attention, key, layer.head_dim_k),
            "attention_v": backend.kernel(attention, value, layer.head_dim_v),
        }
        heads = layer.num_kv_heads
        self._k, self._v = (
            TileStore(fmt, side, heads, fmt.row_bytes(dim), backend)
            if tiled
            else RowStore(heads, fmt.row_bytes(dim))
            for fmt, side, dim in (
                (key, "key", layer.head_dim_k), (value, "value", layer.head_dim_v),
            )
        )  # fmt: skip
        self._row_bytes = heads * (
            key.row_bytes(layer.head_dim_k) + value.row_bytes(layer.head_dim_v)
        )
        self._start = self._end = 0  # rows in use of both buffers
        self._dropped = 0  # coded rows let go of before them
        self.length = 0
        self.sinks = sinks
        self._sinks: tuple[Blocks, ...] = ()  # keys and values of the first tokens
        if sinks:
            f16, dims = get_format("f16"), (layer.head_dim_k, layer.head_dim_v)
            self._sinks = tuple(np.empty((heads, sinks, f16.row_bytes(d)), np.uint8) for d in dims)
            self._kernels["sinks"] = backend.kernel("encode", f16, layer.head_dim_k)
            self._kernels["attention_sinks"] = backend.kernel("attention", f16, layer.head_dim_k)
        self._means: PageMeans | None = None
        if conditioner is not None:
            self._means = PageMeans(
                conditioner,
                layer,
                backend,
                first_position + sinks,
                {} if turns is None else turns,
            )
        self._step = backend.step(
            key,
            value,
            (layer.num_heads, heads),
            (layer.head_dim_k, layer.head_dim_v),
            tiled=isinstance(self._k, TileStore),
            **({} if self._means is None else self._means.arrays),
        )

    @property
    def cached(self) -> int:
        """Coded rows held; sinks are apart."""
        return self._end - self._start

    @property
    def sinks_held(self) -> int:
        """First tokens held in f16."""
        return min(self.length, self.sinks)

    @property
    def k_blocks(self) -> Blocks:
        """The held keys `[cached, num_kv_heads, bytes]`: a view of the live buffer, or of tiles a
        read-only copy. Rows of that shape that are assigned take their place."""
        return self._k.read(self._start, self.cached)

    @k_blocks.setter
    def k_blocks(self, rows: Blocks) -> None:
        self._overwrite(self._k, rows)

    @property
    def v_blocks(self) -> Blocks:
        """The held values, as `k_blocks`."""
        return self._v.read(self._start, self.cached)

    @v_blocks.setter
    def v_blocks(self, rows: Blocks) -> None:
        self._overwrite(self._v, rows)

    def _overwrite(self, store: Store, rows: Blocks) -> None:
        held = store.read(self._start, self.cached)
        if rows.shape != held.shape or rows.dtype != np.uint8:
            raise RequestError(
                f"layer {self.index}: blocks must be uint8 {list(held.shape)}, got {rows.dtype} "
                f"{list(rows.shape)}"
            )
        store.write(self._start, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the live buffers as allocated, scales, means and sinks included; turns that
        layers share are counted by KVCache."""
        scales = sum(s.nbytes for s in (self.k_scale, self.v_scale) if s is not None)
        rows = self._k.nbytes + self._v.nbytes + sum(x.nbytes for x in self._sinks)
        return rows + scales + (self._means.nbytes if self._means else 0)

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows in use, with their sinks and means."""
        sinks = sum(x[:, : self.sinks_held].nbytes for x in self._sinks)
        means = self._means.used_bytes if self._means else 0
        return self.cached * self._row_bytes + sinks + means

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
        if n == 1 and self._append_token(keys, values):
            return
        first = min(n, self.sinks - self.sinks_held)
        sunk = [
            self._encode(side, get_format("f16"), rows[:first], None)
            for side, rows in (("key", keys), ("value", values))
            if first
        ]
        keys, values = keys[first:], values[first:]
        v_scale = self._scale(self.value, self.v_scale, values)
        v_codes = self._encode("value", self.value, values, v_scale)
        if self._means is None:
            k_scale = self._scale(self.key, self.k_scale, keys)
            k_codes = self._encode("key", self.key, keys, k_scale)
        else:  # their mean may be that of rows held just before: nothing may go wrong later
            self._check_finite(keys)
        self.v_scale = v_scale
        self._drop_unseen()
        self._make_room(n - first)
        for buffer, rows in zip(self._sinks, sunk, strict=False):
            buffer[:, self.sinks_held : self.sinks_held + first] = rows.transpose(1, 0, 2)
        self._v.write(self._end, v_codes)
        if self._means is None:
            self.k_scale = k_scale
            self._hold_keys(k_codes)
        else:
            self._condition_keys(keys, self._means)
        self.length += n
        if first:
            self.calls[self._kernels["sinks"]] += 2
        if n > first:
            self.calls[self._kernels["k"]] += 1
            self.calls[self._kernels["v"]] += 1

    def _append_token(self, keys: NDArray[np.float32], values: NDArray[np.float32]) -> bool:
        """`append` of one token in a single call: the same bytes. False, and the cache as before,
        where it takes more than that (a sink, new room, a page that begins or is learned from), or
        a number is not finite."""
        step, means, page = self._step, self._means, None
        if step is None or self.length < self.sinks or self._end == self._k.capacity:
            return False
        if not keys.strides[2] == values.strides[2] == keys.itemsize:
            return False
        k_scale, v_scale = self.k_scale, self.v_scale
        if (self.key.scaled and k_scale is None) or (self.value.scaled and v_scale is None):
            return False
        if means is not None:
            page = means.known(self._dropped + self.cached)
            if page is None:
                return False
        # The slot is not in use yet.
        buffers = self._k.buffer, self._v.buffer
        if not step.append(keys, values, k_scale, v_scale, page, *buffers, self._end):
            return False
        self._drop_unseen()
        self._end += 1
        self.length += 1
        self.calls[self._kernels["k"]] += 1
        self.calls[self._kernels["v"]] += 1
        return True

    def _hold_keys(self, codes: Blocks) -> None:
        self._k.write(self._end, codes)
        self._end += len(codes)

    def _condition_keys(self, keys: NDArray[np.float32], means: PageMeans) -> None:
        """Encode and hold finite keys, page by page where a page's mean is that of the one
        before."""
        while len(keys):
            row = self._dropped + self.cached
            n = means.room(row) if means.follows else len(keys)
            ready = means.condition(keys[:n], row)
            self.k_scale = self._scale(self.key, self.k_scale, ready)
            self._hold_keys(self._encode("key", self.key, ready, self.k_scale))
            if means.follows and means.room(row) == len(ready):
                page = means.room(0)
                held = self._k.read(self._end - page, page)
                means.follow(self.backend.decode(self.key, held, self.k_scale), row)
            keys = keys[n:]

    def _check_finite(self, keys: NDArray[np.float32]) -> None:
        finite = np.isfinite(keys).all(axis=-1).reshape(-1)
        if not finite.all():
            raise RequestError(
                f"layer {self.index}: keys: {self.key.name}: row {int(np.argmin(finite))}: "
                "non-finite input"
            )

    def attention(self, q: Any, *, scale: float | None = None, threads: int | None = None) -> Any:
        """Attention of the last n_q tokens over the cache: q float32 `[n_q, num_heads, head_dim_k]`
        gives `[n_q, num_heads, head_dim_v]`. `scale` None is 1 / sqrt(head_dim_k)."""
        heads, dim = self.geometry.num_heads, self.geometry.head_dim_k
        shape = list(getattr(q, "shape", []))
        if shape[1:] != [heads, dim]:
            raise RequestError(
                f"layer {self.index}: queries must be [tokens, {heads}, {dim}], got {shape}"
            )
        plain = scale.item() if isinstance(scale, np.generic) else scale  # in no narrower type
        number = isinstance(plain, (int, float, np.longdouble))
        if scale is not None and not (number and abs(plain) <= _F32_MAX):  # type: ignore[arg-type]
            raise RequestError(f"layer {self.index}: scale {scale!r} is not finite")
        n_q = q.shape[0]
        position = self.length - n_q
        if position < 0 or self._first_held > self._first_needed(position):
            raise RequestError(
                f"layer {self.index}: {n_q} queries need keys that are no longer held "
                f"({self.cached} of {self.length} tokens); attend to each chunk as it is appended"
            )
        sinks_seen = self._first_needed(position) < self.sinks_held
        if n_q == 1 and self._step is not None and self.cached:
            out = self._attend_token(self._step, q, sinks_seen, scale, threads)
            if out is not None:
                return out
        if self._means is None and not sinks_seen:
            return self._attend(q, position - self._dropped - self.sinks, scale, threads)
        torch_like = hasattr(q, "detach")
        # NumPy has no bfloat16.
        single = q.float() if torch_like and q.is_floating_point() else q
        queries = as_float32(single, f"layer {self.index}: queries")
        scale = dim**-0.5 if scale is None else scale
        parts = []
        if sinks_seen:
            parts.append(self._attend_sinks(queries, position, scale, threads))
        if self.cached or not parts:
            at = position - self._dropped - self.sinks
            parts.append(self._attend_conditioned(queries, at, scale, threads, bool(parts)))
        out = segments.merge(parts)[0]
        if not torch_like:
            return out
        import torch

        return torch.from_numpy(out)

    def _attend_token(
        self, step: Step, q: Any, sinks_seen: bool, scale: float | None, threads: int | None
    ) -> Any:
        """`attention` of the last token in a single call; None where the separate calls have to
        say what is wrong, or make float32 of it."""
        torch_like = hasattr(q, "detach")
        try:
            query = q.detach().numpy() if torch_like else np.asarray(q)
        except TypeError:  # bfloat16, or another device
            return None
        if query.dtype != np.float32 or query.strides[2] != query.itemsize:
            return None
        layer, means, n = self.geometry, self._means, self.cached
        first, sinks_from = -1, -1
        sink_k = sink_v = None
        if self.window is not None:
            first = max(-1, n - self.window)
        if sinks_seen:
            sink_k, sink_v = self._sinks
            sinks_from = self._first_needed(self.length - 1)
        rows, page, phase = None, 0, 0
        if means is not None:
            rows = means.rows
            if means.page is not None:
                page, phase = means.page, self._dropped - means.first * means.page
        out = np.empty((1, layer.num_heads, layer.head_dim_v), np.float32)
        done = step.attend(
            threads, query, self._k.buffer, self._v.buffer, self._start, n, first,
            layer.head_dim_k**-0.5 if scale is None else float(scale), self.k_scale, self.v_scale,
            sink_k, sink_v, sinks_from, rows, page, phase, out,
        )  # fmt: skip
        if not done:
            return None
        if sinks_seen:
            self.calls[self._kernels["attention_sinks"]] += 2
        self.calls[self._kernels["attention_k"]] += 1
        self.calls[self._kernels["attention_v"]] += 1
        if not torch_like:
            return out
        import torch

        return torch.from_numpy(out)

    def _attend(
        self, q: Any, position: int, scale: float | None, threads: int | None, **more: Any
    ) -> Any:
        """Attention over the coded rows; `position` counts from the first that is held."""
        out = self.backend.attention(
            q,
            self._k.view(self._start, self.cached),
            self._v.view(self._start, self.cached),
            key=self.key,
            value=self.value,
            causal=True,
            window=self.window,
            scale=scale,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            threads=threads,
            position=position,
            **more,
        )
        self.calls[self._kernels["attention_k"]] += 1
        self.calls[self._kernels["attention_v"]] += 1
        return out

    def _attend_sinks(
        self, q: NDArray[np.float32], position: int, scale: float, threads: int | None
    ) -> tuple[Any, Any]:
        k, v = (x[:, : self.sinks_held].transpose(1, 0, 2) for x in self._sinks)
        f16 = get_format("f16")
        part: tuple[Any, Any] = self.backend.attention(
            q, k, v, key=f16, value=f16, causal=True, window=self.window, scale=scale,
            threads=threads, position=position, return_lse=True,
        )  # fmt: skip
        self.calls[self._kernels["attention_sinks"]] += 2
        return part

    def _attend_conditioned(
        self,
        q: NDArray[np.float32],
        position: int,
        scale: float,
        threads: int | None,
        merged: bool,
    ) -> tuple[Any, Any]:
        """(out, lse) over the coded rows, whose keys may be conditioned; lse matters if
        `merged`."""
        means = self._means
        if means is None:
            part: tuple[Any, Any] = self._attend(q, position, scale, threads, return_lse=True)
            return part
        folded = means.fold(q)
        if means.page is None:  # one mean of all rows moves all scores of a query alike
            out, lse = self._attend(folded, position, scale, threads, return_lse=True)
            return out, (lse + means.offsets(q, scale)[..., 0] if merged else lse)
        part = self._attend(
            folded, position, scale, threads, offsets=means.offsets(q, scale), page=means.page,
            phase=self._dropped - means.first * means.page, return_lse=True,
        )  # fmt: skip
        return part

    def evict(self) -> None:
        """Let go of the rows that no later query can see, and of room borrowed for a chunk."""
        self._drop_unseen()
        steady = self._steady_rows
        if steady is not None and self._k.capacity > steady:
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
        rows = max(0, length - self.sinks)  # coded rows ever held
        if rows == 0:
            self._start = self._end = self._dropped = 0
        else:
            self._end = self._start + rows - self._dropped
        self.length = length
        if self._means is not None:
            self._means.crop(rows)

    def reset(self) -> None:
        """Forget everything, scales and counts of kernels included; buffers stay."""
        self.crop(0)
        self.k_scale = self.v_scale = None
        self.calls.clear()

    @property
    def _first_held(self) -> int:
        """First token from which on all are held."""
        return self.sinks + self._dropped if self._dropped else 0

    def _first_needed(self, position: int) -> int:
        """First token that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    @property
    def _steady_rows(self) -> int | None:
        if self.window is None:
            return None
        most_in_front = self._k.granule - 1
        rows = most_in_front + self.window - 1 + max(16, self.window // 4)
        return self._whole(rows)

    def _whole(self, rows: int) -> int:
        """Slots of the buffer that holds so many rows."""
        granule = self._k.granule
        return -(-rows // granule) * granule

    def _drop_unseen(self) -> None:
        if self.window is not None:
            start = max(self._start, self._end - (self.window - 1))
            self._dropped += start - self._start
            self._start = start
            if self._means is not None:
                self._means.drop(self._dropped)

    def _make_room(self, n: int) -> None:
        capacity = self._k.capacity
        if self._end + n <= capacity:
            return
        need = self._whole(self._start % self._k.granule + self.cached + n)
        steady = self._steady_rows
        if need > capacity:
            capacity = max(need, self._whole(capacity + max(64, capacity // 4)))
            if steady is not None:
                capacity = max(need, min(capacity, steady))
        elif steady is not None:  # or rows of a full window would move for every token
            capacity = max(capacity, steady)
        self._move_to(capacity)

    def _move_to(self, capacity: int) -> None:
        """Bring the rows in use to the front of buffers of `capacity` rows."""
        cached = self.cached
        start = [store.move(self._start, cached, capacity) for store in (self._k, self._v)]
        self._start, self._end = start[0], start[0] + cached

    def _rows(self, x: Any, side: str, head_dim: int) -> NDArray[np.float32]:
        heads = self.geometry.num_kv_heads
        try:
            rows = np.asarray(x.detach().numpy() if hasattr(x, "detach") else x)
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


class PageTurns:
    """How far rotary pairs have turned at every page of coded rows, for all heads and layers of the
    same frequencies.

    Held as rows of float16, (cos, sin, 1 ...) of the page's average turn: what turned means add to
    scores is then a score of these rows (`PageMeans.offsets`), and no layer needs means of its own.
    """

    def __init__(self, inv_freq: NDArray[np.float64], dim: int, page: int, position: int) -> None:
        self.inv_freq, self.page, self.position = inv_freq, page, position
        self.first = self._count = 0
        self._rows = np.empty((0, dim), np.float16)
        self._needed: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes as allocated."""
        return self._rows.nbytes

    def rows(self, layer: int, first: int, end: int) -> NDArray[np.float16]:
        """Rows `[end - first, head_dim]` of pages first to end - 1. A layer needs no page before
        the first that it asks for, until it begins anew."""
        self._needed[layer] = first
        if first < self.first:
            self.first = self._count = 0
        least = min(self._needed.values())
        if least - self.first > 64:  # rows move once in so many pages
            self._rows[: self._count - (least - self.first)] = self._rows[
                least - self.first : self._count
            ].copy()
            self._count -= least - self.first
            self.first = least
        m, count = len(self.inv_freq), end - self.first
        if count > len(self._rows):
            room = max(count, len(self._rows) * 5 // 4 + 8)
            grown = np.empty((room, self._rows.shape[1]), np.float16)
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        for i in range(self._count, count):
            at = self.position + (self.first + i) * self.page
            cos, sin = page_turn(self.inv_freq, at, self.page)
            self._rows[i, :m], self._rows[i, m : 2 * m], self._rows[i, 2 * m :] = cos, sin, 1
        self._count = max(self._count, count)
        return self._rows[first - self.first : count]


class PageMeans:
    """The means of one layer's keys by page of coded rows.

    Means that turn with the position follow from `PageTurns`, which layers share. Others are held
    in float16 (`[num_kv_heads, pages, 2 * head_dim]` bytes, the layout of f16 keys: what they add
    to scores is a score).

    `page` is None where one mean serves all rows. `follows`: a page's mean is that of the page
    before, so it is known once that page is complete. `first`: index of the first page held.
    """

    def __init__(
        self,
        conditioner: Conditioner,
        layer: LayerGeometry,
        backend: Backend,
        position: int,
        turns: dict[bytes, PageTurns],
    ) -> None:
        self.kind = conditioner.kind
        self.follows = self.kind == "previous"
        self.page: int | None = None if self.kind == "static" else conditioner.page
        if self.follows and layer.window is not None:
            # A page must still be held when its last row comes.
            self.page = min(conditioner.page, layer.window)
        self.calibrated = conditioner.tokens > 0
        self.index = layer.index
        self.layer = conditioner.layers[layer.index]
        self.backend = backend
        self.position = position  # of the first coded row
        self.first = self._count = 0
        self._f16 = get_format("f16")
        self._held: Blocks = np.empty(
            (layer.num_kv_heads, 0, self._f16.row_bytes(layer.head_dim_k)), np.uint8
        )
        self._turns: PageTurns | None = None
        if self.kind == "rope":
            inv_freq, dim = self.layer.inv_freq, layer.head_dim_k
            self._turns = turns.setdefault(
                inv_freq.tobytes() + dim.to_bytes(4, "little"),
                PageTurns(inv_freq, dim, conditioner.page, position),
            )

    @property
    def nbytes(self) -> int:
        """Bytes as allocated, the layer's own mean and scale included, shared turns not."""
        layer = self.layer
        return self._held.nbytes + layer.mean.nbytes + layer.scale.nbytes + layer.inv_freq.nbytes

    @property
    def used_bytes(self) -> int:
        """The same for the pages in use."""
        held = self._held[:, : 0 if self._turns else self._count]
        return self.nbytes - self._held.nbytes + held.nbytes

    @property
    def arrays(self) -> dict[str, Any]:
        """What `Backend.step` has to know."""
        layer = self.layer
        if self._turns is None:
            return {"scale": layer.scale}
        return {"scale": layer.scale, "mean": layer.mean, "pairs": len(layer.inv_freq)}

    @property
    def rows(self) -> Blocks:
        """The float16 rows of all pages `[pages, num_kv_heads, bytes]`, or of their turns `[pages,
        1, bytes]`: what means add to scores is a score of them (see `offsets`)."""
        if self._turns is None:
            return self._held[:, : self._count].transpose(1, 0, 2)
        return self._turned()[:, None].view(np.uint8)

    def known(self, row: int) -> Blocks | None:
        """The float16 rows `[num_kv_heads or 1, bytes]` of the page of coded row `row`; None if
        they are not held yet, or the page's own mean is to be taken after this row."""
        page = self.page or _NO_PAGE
        at = row // page - self.first
        if at >= self._count or (self.follows and row % page == page - 1):
            return None
        if self._turns is None:
            return self._held[:, at]
        return self._turned()[at : at + 1].view(np.uint8)

    def room(self, row: int) -> int:
        """Rows from `row` on that fit in its page."""
        page = self.page or _NO_PAGE
        return page - row % page

    def condition(self, keys: NDArray[np.float32], row: int) -> NDArray[np.float32]:
        """(key - mean) / scale of keys `[n, num_kv_heads, head_dim]`, the first being coded row
        `row`; values beyond float32 become its largest."""
        page = self.page or _NO_PAGE
        pages = np.arange(row, row + len(keys)) // page - self.first
        if self._turns is None:
            self._learn(keys, int(pages[-1]) + 1)
            held = np.ascontiguousarray(self._held.transpose(1, 0, 2)[pages]).view(np.float16)
            means = held.astype(np.float32)
        else:
            self._count = max(self._count, int(pages[-1]) + 1)
            m = len(self._turns.inv_freq)
            turns = self._turned()[pages[0] :].astype(np.float32)[pages - pages[0], None]
            means = turned(self.layer.mean, turns[..., :m], turns[..., m : 2 * m])
        with np.errstate(over="ignore"):
            ready = (keys - means) / self.layer.scale
        clipped: NDArray[np.float32] = np.clip(ready, -_F32_MAX, _F32_MAX, dtype=np.float32)
        return clipped

    def _learn(self, keys: NDArray[np.float32], count: int) -> None:
        """Have the means of the first `count` pages held."""
        while self._count < count:
            if self.follows and self.first + self._count:
                raise RuntimeError(f"the mean of page {self.first + self._count} is not known yet")
            if self.follows and not self.calibrated:  # the first key is near the mean of the next
                self._add(as_half(keys[0]))
            else:
                at = self.position + (self.first + self._count) * (self.page or _NO_PAGE)
                self._add(as_half(self.layer.page_mean(self.kind, at, self.page or 1)))

    def _turned(self) -> NDArray[np.float16]:
        assert self._turns is not None
        return self._turns.rows(self.index, self.first, self.first + self._count)

    def follow(self, decoded: NDArray[np.float32], row: int) -> None:
        """Learn the mean of the page that ends after `row`, from its decoded rows `[page,
        num_kv_heads, head_dim]`."""
        before = self._held[:, self._count - 1].copy().view(np.float16).astype(np.float64)
        self._add(as_half(before + decoded.mean(axis=0, dtype=np.float64) * self.layer.scale))

    def fold(self, q: NDArray[np.float32]) -> NDArray[np.float32]:
        """Queries `[n, num_heads, head_dim]` for conditioned keys."""
        kv_heads, dim = self.layer.scale.shape
        grouped = q.reshape(len(q), kv_heads, q.shape[1] // kv_heads, dim)
        folded: NDArray[np.float32] = (grouped * self.layer.scale[:, None]).reshape(q.shape)
        return folded

    def offsets(self, q: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
        """What every page's mean adds to the scaled scores, `[n, num_heads, pages]`."""
        if self._turns is not None:
            # q . (mean turned by a) = cos a (q . mean) + sin a (q . mean turned by a quarter), a
            # pair at a time; channels that do not turn have a row value of 1.
            m = len(self._turns.inv_freq)
            mean = np.repeat(self.layer.mean, q.shape[1] // len(self.layer.mean), axis=0)
            a, b = mean[:, :m], mean[:, m : 2 * m]
            qa, qb = q[..., :m], q[..., m : 2 * m]
            rest = q[..., 2 * m :] * mean[:, 2 * m :]
            q = np.concatenate([qa * a + qb * b, qb * a - qa * b, rest], axis=-1)
        scores: NDArray[np.float32] = self.backend.scores(self._f16, q, self.rows)
        scores *= np.float32(scale)
        return scores

    def drop(self, row: int) -> None:
        """Let go of pages that end before coded row `row`."""
        if self.page is None:
            return
        gone = min(row // self.page - self.first, self._count)
        if gone > 0 and self._turns is not None:
            self.first += gone
            self._count -= gone
        elif gone > 0:
            self._held[:, : self._count - gone] = self._held[:, gone : self._count].copy()
            self.first += gone
            self._count -= gone

    def crop(self, rows: int) -> None:
        """Forget pages that begin after coded row `rows`."""
        if rows == 0:
            self.first = self._count = 0
        elif self.page is not None:
            self._count = min(self._count, rows // self.page + 1 - self.first)

    def _add(self, mean: NDArray[np.float32]) -> None:
        heads, capacity, width = self._held.shape
        if self._count == capacity:
            room = 1 if self.page is None else capacity + max(8, capacity // 4)
            grown = np.empty((heads, room, width), np.uint8)
            grown[:, : self._count] = self._held
            self._held = grown
        self._held[:, self._count] = mean.astype(np.float16).view(np.uint8)
        self._count += 1


class KVCache:
    """The caches of all layers of a model, for one sequence.

    `per_layer` maps a layer index to (key, value) formats of its own. Every format is checked
    against every layer that owns a cache before anything is allocated: RequestError names layers,
    format, flag and reason, all problems at once.

    `conditioner` is what to do to keys (conditioner.py), `sinks` the number of first tokens that
    every layer keeps in f16, and `first_position` the position of the first token in a longer text.
    """

    def __init__(
        self,
        geometry: Geometry,
        key: str = "f16",
        value: str = "f16",
        backend: str | Backend = "cpu",
        per_layer: Mapping[int, tuple[str, str]] | None = None,
        *,
        conditioner: Conditioner | None = None,
        sinks: int = 0,
        first_position: int = 0,
    ) -> None:
        for name, number, most in (
            ("sinks", sinks, MAX_SINKS),
            ("first_position", first_position, MAX_TOKENS),
        ):
            if type(number) is not int or not 0 <= number <= most:
                raise RequestError(
                    f"{name}: expected a whole number from 0 to {most}, found {number!r}"
                )
        if conditioner is not None:
            if not isinstance(conditioner, Conditioner):
                raise RequestError(
                    "conditioner: expected a Conditioner (Conditioner.load reads one)"
                )
            conditioner.check(geometry)
        self.conditioner, self.sinks, self.first_position = conditioner, sinks, first_position
        self.geometry = geometry
        self.backend = backends.get(backend) if isinstance(backend, str) else backend
        self.key, self.value = key, value
        chosen = dict(per_layer or {})
        for index, pair in chosen.items():
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise RequestError(f"layer {index}: expected (key, value) formats, found {pair!r}")
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
        self._turns: dict[bytes, PageTurns] = {}
        for layer in owners:
            k, v = pairs[layer.index]
            own[layer.index] = LayerCache(
                layer,
                k,
                v,
                self.backend,
                conditioner=conditioner,
                sinks=sinks,
                first_position=first_position,
                turns=self._turns,
            )
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
        """Bytes of all live buffers as allocated; what layers share counts once."""
        turns = sum(x.nbytes for x in self._turns.values())
        return sum(layer.nbytes for layer in self.owners) + turns

    @property
    def used_bytes(self) -> int:
        """Bytes of all rows in use."""
        turns = sum(x.nbytes for x in self._turns.values())
        return sum(layer.used_bytes for layer in self.owners) + turns

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
