"""The CUDA backend: kernels compiled at first use for the device at hand.

torch brings the device's memory and streams, `cuda-bindings` the driver and NVRTC; both are
imported only here and only when a backend is made. CUDA tensors are taken without copies and give
CUDA tensors, on torch's current stream; arrays of the host are copied to the device and give arrays
of the host. Queries may be float32, bfloat16 or float16; results are float32.

Pairs whose rows lie in tiles (layout.py) are attended to by attention.cu, in their codes. All
others are decoded first (plain.cu): correct, and no faster than that.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy as np

from kvproof.backends import tiles
from kvproof.backends.cuda import codes, launch, layout, program, rows
from kvproof.backends.cuda.device import (
    LARGEST,
    Device,
    host_array,
    is_tensor,
    on_host,
    same_device,
    torch_with_cuda,
)
from kvproof.backends.reference import (
    check_attention,
    check_offsets,
    check_shapes,
    head_scales,
    row_scales,
    source_digest,
    spans,
    whole,
)
from kvproof.errors import RequestError
from kvproof.formats import Counters, Format
from kvproof.formats import get as format_of
from kvproof.rotation import Rotation

TASKS = 65535  # of a launch of attention.cu: blockIdx.y
WIDEST = 2048  # values of a row of plain.cu
LONGEST_PAGE = 2**30
THREADS = 256  # of a block of pack.cu and plain.cu
NONE = 2**31 - 1  # pack.cu: no bad row
_Call = TypeVar("_Call", bound=Callable[..., Any])


class _Pack(ctypes.Structure):
    _fields_ = [
        ("table", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("of_token", ctypes.c_int64),
        ("of_head", ctypes.c_int64),
        ("buffer", ctypes.c_void_p),
        ("of_heads", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("bad", ctypes.c_void_p),
        ("at", ctypes.c_int),
        ("n", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("row_bytes", ctypes.c_int),
        ("n_scales", ctypes.c_int),
    ]


class _Plain(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("n_q", ctypes.c_int),
        ("n_kv", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("dim_k", ctypes.c_int),
        ("dim_v", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("page", ctypes.c_int),
        ("phase", ctypes.c_int),
        ("n_pages", ctypes.c_int),
    ]


@dataclass(frozen=True)
class _Asked:
    """Queries, and what is to be done with them, as both ways of attention take it."""

    q: Any  # float32 [n_q, heads, dim_k]
    span: tuple[int, int]  # of reference.spans
    factor: float
    offsets: Any  # float32 [n_q, heads, pages], or None
    page: int
    phase: int
    out: Any  # float32 [n_q, heads, dim_v]
    lse: Any  # float32 [n_q, heads], or None


def _within_memory(call: _Call) -> _Call:
    """A device without memory left is one clear line; what was given stays as it was."""

    @functools.wraps(call)
    def guarded(self: CudaBackend, *args: Any, **given: Any) -> Any:
        try:
            with self.device.current():
                return call(self, *args, **given)
        except self.torch.cuda.OutOfMemoryError as error:
            free, total = self.device.memory()
            raise RequestError(
                f"backend cuda: {call.__name__} needs more memory than is left on "
                f"{self.device.properties.name} ({free >> 20} of {total >> 20} MiB free): give "
                "fewer tokens at once or a smaller cache"
            ) from error

    return cast(_Call, guarded)


class CudaBackend:
    """Kernels on one CUDA device (see docs/architecture.md for shapes and dtypes)."""

    name = "cuda"
    arrangement: ModuleType = layout

    def __init__(self, device: Device | int | None = None, *, check: bool = True) -> None:
        """Use a device, by default torch's current one. `check`: whether calls look at the numbers
        of tensors (NaN, stored scales), for which they wait for the device; what is being captured
        into a graph is never waited for. Refused, with the reason, without a device."""
        if not isinstance(device, Device):
            device = Device(torch_with_cuda().cuda.current_device() if device is None else device)
        self.device, self.torch = device, device.torch
        self.check = check
        self._settings: dict[Any, launch.Setting | None] = {}

    def environment(self) -> dict[str, Any]:
        """Device, compute capability, driver and versions."""
        d = self.device
        return {
            "device": d.properties.name,
            "isa": d.architecture,
            "threads": 0,
            "is_software": False,
            "driver": f"CUDA {d.driver // 1000}.{d.driver % 1000 // 10}",
            "memory": int(d.properties.total_memory),
            "processors": d.processors,
            "versions": {
                "torch": str(self.torch.__version__), "nvrtc": d.nvrtc,
                "torch_cuda": str(self.torch.version.cuda),
            },
        }  # fmt: skip

    def refuses(self, op: str, fmt: str | Format, head_dim: int) -> str | None:
        """What the format refuses, and what has no kernel."""
        f = format_of(fmt)
        if op not in ("encode", "decode", "scores", "attention"):
            return f"backend cuda: no operation {op!r}"
        side = "key" if op == "scores" or "key" in f.sides else "value"
        if side not in f.sides:
            return f"{f.name}: not a format of cached rows"
        reason = f.refuses(head_dim, side)
        if reason is None and op == "attention" and layout.fits(f, head_dim):
            return None
        if reason is None and head_dim > WIDEST:
            return f"{f.name}: head_dim {head_dim} is above {WIDEST}, the widest CUDA row"
        return reason or rows.takes(f, "encode" if op == "encode" else "decode", head_dim)

    def kernel(self, op: str, fmt: str | Format, head_dim: int) -> str:
        """`<op>_<format>_<architecture>`; attention without tiles is `attention_plain_...`."""
        f = format_of(fmt)
        plain = op.startswith("attention") and not layout.fits(f, head_dim)
        return f"{'attention_plain' if plain else op}_{f.name}_{self.device.architecture}"

    def digest(self) -> str:
        """SHA-256 over the kernels as shipped and the sources of the formats."""
        return _shipped_digest()

    # ---- rows ------------------------------------------------------------------------------------

    def encode(self, fmt: str | Format, x: Any, scale: Any = None) -> Any:
        """Float32 `[..., n]` to uint8 `[..., row_bytes(n)]`, byte-equal to the format's encode."""
        return self.encode_counted(fmt, x, scale)[0]

    @_within_memory
    def encode_counted(self, fmt: str | Format, x: Any, scale: Any = None) -> tuple[Any, Counters]:
        """`encode`, and how many scales or elements were saturated or flushed to zero."""
        f = format_of(fmt)
        what = f"{f.name}: encode"
        values = self._floats(x, what)
        if values.ndim == 0:
            raise RequestError(f"{what} needs an array of at least one axis")
        n = int(values.shape[-1])
        self._refuse("encode", f, n)
        width = f.row_bytes(n)
        flat = values.reshape(-1, n).contiguous()
        column = self._column(f, scale, tuple(values.shape[:-1]))
        if column is not None and len(flat):
            self._refuse_infinite(flat, f)
            flat = (flat.float() / column).clamp(-_MOST, _MOST)
        if not len(flat):
            out = self.device.empty((*values.shape[:-1], width), "uint8")
            return self._like(x, out), Counters()
        blocks, bad, saturated, flushed = rows.encode(f, flat)
        if bad >= 0:
            raise RequestError(f"{f.name}: row {bad}: non-finite input")
        out = blocks.reshape(*values.shape[:-1], width)
        return self._like(x, out), Counters(saturated, flushed)

    @_within_memory
    def decode(self, fmt: str | Format, blocks: Any, scale: Any = None) -> Any:
        """Uint8 `[..., row_bytes]` to float32 `[..., n]` in the plain basis."""
        f = format_of(fmt)
        raw = self._bytes(blocks, f"{f.name}: decode")
        if raw.ndim == 0:
            raise RequestError(f"{f.name}: decode needs an array of at least one axis")
        return self._like(blocks, self._decoded(f, raw, scale))

    def _decoded(self, f: Format, raw: Any, scale: Any, side: str = "") -> Any:
        n = f.row_values(int(raw.shape[-1]))
        self._refuse("decode", f, n)
        lead = tuple(raw.shape[:-1])
        column = self._column(f, scale, lead)
        flat = raw.reshape(-1, raw.shape[-1]).contiguous()
        if not len(flat):
            return self.device.empty((*lead, n), "float32")
        out, bad = rows.decode(f, flat, n)
        if bad >= 0:
            where = f"row {bad} of the {side}s" if side else f"row {bad}"
            raise RequestError(f"{f.name}: {where}: stored scale or element is not finite")
        if column is not None:
            out = out * column
        return out.reshape(*lead, n)

    # ---- tiles -----------------------------------------------------------------------------------

    def arranges(
        self, key: str | Format, value: str | Format, head_dim_k: int, head_dim_v: int
    ) -> bool:
        """Wherever there are tiles for both."""
        return layout.fit(format_of(key), format_of(value), head_dim_k, head_dim_v)

    @_within_memory
    def pack(self, fmt: str | Format, side: str, rows: Any, buffer: Any, at: int) -> None:
        """Write rows to the slots from `at` on (see `Backend.pack`), to the bytes of `layout.pack`.

        Where rows and buffer are CUDA tensors, a row whose scale is not finite leaves the buffer as
        it was, and is told where `check` says so.
        """
        f = format_of(fmt)
        same_device(rows=rows, buffer=buffer)
        host = on_host(buffer)
        target = host_array(buffer, "pack: buffer") if host else buffer
        blocks = self._bytes(rows, "pack: rows")
        if host and not target.flags.writeable:
            raise RequestError("pack: buffer must be writable")
        self._check_slots(f, side, blocks, target, at, "pack")
        if not len(blocks):
            return
        if not host:
            self._packed(f, side, blocks, self._aligned(target, "pack: buffer"), at, self._looks())
            return
        held, slot = self._brought(target, at, len(blocks))
        self._packed(f, side, blocks, held, slot, True)
        start = at // tiles.TOKENS
        target[:, start : start + held.shape[1]] = held.cpu().numpy()

    def _packed(self, f: Format, side: str, blocks: Any, buffer: Any, at: int, looks: bool) -> None:
        """Launch: rows `[n, heads, row_bytes]` to a buffer of the device."""
        n, heads, size = blocks.shape
        bad = self.torch.full((1,), NONE, dtype=self.torch.int32, device=self.device.torch_device)
        places = self._scale_places(f, f.row_values(size))
        if blocks.stride(2) != 1:
            blocks = blocks.contiguous()
        table = self._table(f, side, size, "pack")
        argument = _Pack(
            table.data_ptr(), blocks.data_ptr(), blocks.stride(0), blocks.stride(1),
            buffer.data_ptr(), buffer.stride(0), places.data_ptr(), bad.data_ptr(), at, n, heads,
            size, len(places),
        )  # fmt: skip
        stream = self.device.stream()
        check = self.device.kernel("pack.cu", "check", {}, THREADS)
        check((-(-n * heads // THREADS), 1, 1), stream, argument)
        pack = self.device.kernel("pack.cu", "pack", {}, THREADS)
        words = tiles.TOKENS * size // 4
        count = -(-(at % tiles.TOKENS + n) // tiles.TOKENS)
        pack((-(-words // THREADS), count, heads), stream, argument)
        if looks:
            found = int(bad)
            if found != NONE:
                raise tiles.bad_row(f, side, found)

    @_within_memory
    def unpack(self, fmt: str | Format, side: str, buffer: Any, first: int, n: int) -> Any:
        """The n rows from slot `first` on, `[n, num_kv_heads, row_bytes]`."""
        f = format_of(fmt)
        host = on_host(buffer)
        source = host_array(buffer, "unpack: buffer") if host else buffer
        shape = tiles.rows_shape(source, n)
        out = self.device.empty(shape, "uint8")
        self._check_slots(f, side, out, source, first, "unpack")
        if host:
            source, first = self._brought(source, first, n)
        if n:
            source = self._aligned(source, "unpack: buffer")
            table = self._table(f, side, shape[2], "unpack")
            argument = _Pack(
                table.data_ptr(), out.data_ptr(), 0, 0, source.data_ptr(), source.stride(0), None,
                None, first, *shape, 0,
            )  # fmt: skip
            kernel = self.device.kernel("pack.cu", "unpack", {}, THREADS)
            kernel((-(-out.numel() // THREADS), 1, 1), self.device.stream(), argument)
        return self._like(buffer, out)

    def _brought(self, buffer: Any, first: int, n: int) -> tuple[Any, int]:
        """(copy on the device of the tiles of the host that hold the n slots from `first` on, the
        slot there that `first` is)."""
        start, end = first // tiles.TOKENS, -(-(first + n) // tiles.TOKENS)
        held = self.device.tensor(np.ascontiguousarray(buffer[:, start:end]))
        return held, first - start * tiles.TOKENS

    def _table(self, f: Format, side: str, size: int, op: str) -> Any:
        """Where the bits of a tile lie, as pack.cu takes it."""
        head_dim = f.row_values(size)

        def made() -> Any:
            slot, bit = layout.tile_bits(f, side, head_dim)
            if op == "pack":
                return (slot << 16 | bit).astype(np.int32).reshape(-1, 32).T
            place = np.empty((tiles.TOKENS, 8 * size), np.int32)
            place[slot, bit] = np.arange(len(slot))
            return place.reshape(tiles.TOKENS, size, 8).swapaxes(1, 2)

        return self.device.table((f.name, side, head_dim, op), made)

    def _scale_places(self, f: Format, head_dim: int) -> Any:
        """The byte of a row where each scale begins."""
        return self.device.table(
            (f.name, head_dim, "scales"),
            lambda: (layout.row_bits(f, head_dim)[1][:, 0] // 8).astype(np.int32),
        )

    def _check_slots(
        self, f: Format, side: str, blocks: Any, buffer: Any, at: Any, what: str
    ) -> None:
        """RequestError for what does not fit; without a look at the numbers."""
        if str(buffer.dtype) not in ("uint8", "torch.uint8"):
            raise RequestError(f"{what}: buffer must be uint8 of three axes, got {buffer.dtype}")
        if not whole(at):
            raise RequestError(f"{what}: slot {at!r} is not a whole number")
        given, held = (np.broadcast_to(np.uint8(0), tuple(x.shape)) for x in (blocks, buffer))
        tiles.check(f, side, given, held, int(at), what)
        if not layout.fits(f, f.row_values(int(blocks.shape[2]))):
            raise RequestError(
                f"{f.name}: head_dim {f.row_values(int(blocks.shape[2]))} is not held in tiles of "
                "the CUDA backend"
            )

    def _aligned(self, buffer: Any, what: str) -> Any:
        """The buffer; RequestError if kernels cannot copy its tiles by 16 bytes."""
        size = int(buffer.shape[2])
        if buffer.stride(2) != 1 or (buffer.shape[1] > 1 and buffer.stride(1) != size):
            raise RequestError(
                f"{what} has strides {tuple(buffer.stride())}; the tiles of a head must lie one "
                "after the other"
            )
        if buffer.data_ptr() % 16 or (buffer.shape[0] > 1 and buffer.stride(0) % 16):
            raise RequestError(f"{what} must begin, and its heads too, at a multiple of 16 bytes")
        return buffer

    def step(self, *_: Any, **__: Any) -> None:
        """None: there are only the separate calls."""

    # ---- scores and attention --------------------------------------------------------------------

    @_within_memory
    def scores(self, fmt: str | Format, q: Any, blocks: Any, scale: Any = None) -> Any:
        """Plain dot products `[n_q, num_heads, n_kv]` (or `[n_q, n_kv]` from two-dimensional
        input), by decoded keys."""
        f = format_of(fmt)
        same_device(q=q, blocks=blocks)
        queries, keys = self._floats(q, "scores: q"), self._bytes(blocks, "scores: blocks")
        flat = queries.ndim == 2 and keys.ndim == 2
        if flat:
            queries, keys = queries[:, None], keys[:, None]
        check_shapes(queries, keys, f.row_values(int(keys.shape[-1])))
        self._refuse("scores", f, int(queries.shape[2]))
        self._refuse_nan(queries, "scores: q")
        n_q, heads, dim = queries.shape
        n_kv, kv_heads = keys.shape[:2]
        self._count(n_q * heads * n_kv, "scores: the result")
        out = self.device.empty((n_q, heads, n_kv), "float32")
        if out.numel():
            factor = head_scales(f, _scale(scale), kv_heads, "scale")
            decoded = self._decoded(f, keys, factor, "key")
            queries = queries.float().contiguous()
            argument = _Plain(
                q=queries.data_ptr(), k=decoded.data_ptr(),
                out=out.data_ptr(), n_q=n_q, n_kv=n_kv, heads=heads, kv_heads=kv_heads, dim_k=dim,
            )  # fmt: skip
            kernel = self.device.kernel("plain.cu", "scores", {}, THREADS)
            warps = THREADS // 32
            kernel((-(-out.numel() // warps), 1, 1), self.device.stream(), argument)
        return self._like(q, out[:, 0] if flat else out)

    @_within_memory
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
        """Softmax attention over the cached rows, `[n_q, num_heads, head_dim_v]` (see
        `Backend.attention`); `threads` has no meaning here."""
        fk, fv = format_of(key), format_of(value)
        tiled = tiles.check_pair(k_blocks, v_blocks, fk, fv)
        held = [x.buffer if tiled else x for x in (k_blocks, v_blocks)]
        same_device(q=q, keys=held[0], values=held[1], offsets=offsets)
        queries = self._floats(q, "attention: q")
        keys, values = k_blocks, v_blocks
        if not tiled:
            keys, values = (
                self._bytes(x, f"attention: {side}s")
                for side, x in zip(tiles.SIDES, held, strict=True)
            )
        dim_k = fk.row_values(int(keys.shape[-1]))
        check_attention(queries, keys, values, dim_k, window, scale, position)
        dim_v = fv.row_values(int(values.shape[-1]))
        n_q, heads, _ = (int(x) for x in queries.shape)
        n_kv, kv_heads = int(keys.shape[0]), int(keys.shape[1])
        added = None if offsets is None else self._floats(offsets, "attention: offsets")
        page, phase = check_offsets(
            queries, n_kv, None if added is None else _shape_of(added), page, phase
        )
        for f, dim, side in ((fk, dim_k, "key"), (fv, dim_v, "value")):
            self._refuse("attention", f, dim)
            reason = f.refuses(dim, side)
            if reason:
                raise RequestError(reason)
        self._count(n_q * heads * max(dim_k, dim_v), "attention: q")
        factors = (
            head_scales(fk, _scale(k_scale), kv_heads, "k_scale"),
            head_scales(fv, _scale(v_scale), kv_heads, "v_scale"),
        )
        self._refuse_nan(queries, "attention: q")
        if added is not None:
            self._refuse_nan(added, "attention: offsets")
        out = self.device.empty((n_q, heads, dim_v), "float32")
        lse = self.device.empty((n_q, heads), "float32") if return_lse else None
        if n_kv == 0:
            out.zero_()
            if lse is not None:
                lse.fill_(-np.inf)
        elif out.numel():
            span = spans(n_q, n_kv, causal, window, position)
            factor = dim_k**-0.5 if scale is None else float(scale)
            queries = queries.float().contiguous()
            pages = None
            if added is not None:
                pages, page, phase = _near(added, n_kv, page, phase)
            asked = _Asked(queries, span, factor, pages, page, phase, out, lse)
            crowded = n_q * kv_heads > self.device.processors
            found = self._setting(
                fk, fv, (dim_k, dim_v), heads // kv_heads, pages is not None, crowded
            )
            if found is not None:
                sides, first = self._tiles_of(fk, fv, keys, values)
                self._attend(found, (fk, fv), sides, first, n_kv, asked)
            else:
                if tiled:
                    keys, values = (
                        self._bytes(self.unpack(t.format, t.side, t.buffer, t.first, t.n), "tiles")
                        for t in (keys, values)
                    )
                decoded = [
                    self._decoded(f, x, s, side)
                    for f, x, s, side in zip(
                        (fk, fv), (keys, values), factors, tiles.SIDES, strict=True
                    )
                ]
                self._attend_plain(decoded, asked)
        results = (self._like(q, out), None if lse is None else self._like(q, lse))
        return results if return_lse else results[0]

    def _setting(
        self,
        key: Format,
        value: Format,
        dims: tuple[int, int],
        group: int,
        offsets: bool,
        crowded: bool,
    ) -> launch.Setting | None:
        """How attention.cu takes such a pair; None if it does not."""
        name = (key.name, value.name, dims, group, offsets, crowded)
        if name not in self._settings:
            found = None
            if layout.fit(key, value, *dims):
                made = (key, value, dims, group, offsets, self.device.room)
                found = (launch.setting(*made, 2) if crowded else None) or launch.setting(*made)
            self._settings[name] = found
        return self._settings[name]

    def _tiles_of(
        self, key: Format, value: Format, keys: Any, values: Any
    ) -> tuple[list[Any], int]:
        """(buffers of the device that hold both sides, slot of the first row)."""
        sides, first = [], 0
        for f, side, x in zip((key, value), tiles.SIDES, (keys, values), strict=True):
            if not isinstance(x, tiles.Tiles):
                n, heads, size = x.shape
                count = -(-n // tiles.TOKENS)
                buffer = self.torch.zeros(
                    (heads, count, tiles.TOKENS * size),
                    dtype=self.torch.uint8, device=self.device.torch_device,
                )  # fmt: skip
                self._packed(f, side, x, buffer, 0, self._looks())
            else:
                buffer, first = x.buffer, x.first
                if on_host(buffer):
                    buffer, first = self._brought(host_array(buffer, "tiles"), first, x.n)
                buffer = self._aligned(buffer, f"attention: buffer of {side}s")
            sides.append(buffer)
        return sides, first

    def _attend(
        self,
        found: launch.Setting,
        pair: tuple[Format, Format],
        buffers: list[Any],
        first: int,
        n_kv: int,
        asked: _Asked,
    ) -> None:
        """Launch attention.cu; every query is a sequence of its own over the same tiles."""
        q, out, lse, offsets = asked.q, asked.out, asked.lse, asked.offsets
        n_q, heads, _ = q.shape
        kv_heads = int(buffers[0].shape[0])
        group = heads // kv_heads
        of_query = kv_heads * -(-group // found.heads)
        kernel = self.device.kernel(
            "attention.cu", "attend", found.macros, found.threads, found.shared
        )
        blocks = kernel.blocks_at_once * self.device.processors
        start, length, bounds = 0, 0, None
        if n_q == 1:  # told without work for the device
            start, length = (first + min(max(s, 0), n_kv) for s in asked.span)
            length = max(start, length)
        else:
            bounds = self._seen(n_q, n_kv, asked.span) + first
        side = [
            self._side(f, name, buffer)
            for f, name, buffer in zip(pair, tiles.SIDES, buffers, strict=True)
        ]
        for at in range(0, n_q, TASKS // of_query):
            tasks = (min(n_q, at + TASKS // of_query) - at) * of_query
            parts = launch.splits(blocks, tasks, -(-n_kv // tiles.TOKENS) + 1, found.teams)
            floats = tasks * parts * found.heads * (found.dims[1] + 2) if parts > 1 else 1
            scratch, counters = self.device.scratch(floats, tasks)
            argument = launch.Args(
                q[at:].data_ptr(), out[at:].data_ptr(),
                None if lse is None else lse[at:].data_ptr(), *side, None, 0,
                None if bounds is None else bounds[0, at:].data_ptr(),
                None if bounds is None else bounds[1, at:].data_ptr(), start, length, kv_heads,
                group, parts, asked.factor * _LOG2_E,
                None if offsets is None else offsets[at:].data_ptr(), asked.page,
                asked.phase - first,
                0 if offsets is None else offsets.shape[2], scratch.data_ptr(),
                counters.data_ptr(),
            )  # fmt: skip
            kernel((parts, tasks, 1), self.device.stream(), argument)

    def _side(self, f: Format, side: str, buffer: Any) -> launch.Side:
        code = codes.code(f, side)
        size = int(buffer.shape[2]) // tiles.TOKENS
        head_dim = f.row_values(size)
        signs = None
        if isinstance(f.spin, Rotation):
            spin = f.spin
            signs = self.device.table(
                (spin.name, head_dim, "signs"), lambda: np.array(spin.signs(head_dim), np.float32)
            ).data_ptr()
        return launch.Side(
            buffer.data_ptr(), 0, buffer.stride(0), code.table, code.fine_table, code.scale, signs
        )

    def _attend_plain(self, decoded: list[Any], asked: _Asked) -> None:
        keys, values = (x.contiguous() for x in decoded)
        offsets, lse = asked.offsets, asked.lse
        n_q, heads, dim_k = asked.q.shape
        seen = self._seen(n_q, keys.shape[0], asked.span)
        argument = _Plain(
            asked.q.data_ptr(), keys.data_ptr(), values.data_ptr(), asked.out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            None if offsets is None else offsets.data_ptr(), seen[0].data_ptr(),
            seen[1].data_ptr(), n_q, keys.shape[0], heads, keys.shape[1], dim_k, values.shape[2],
            asked.factor, asked.page, asked.phase, 0 if offsets is None else offsets.shape[2],
        )  # fmt: skip
        kernel = self.device.kernel("plain.cu", "attend", {}, THREADS)
        kernel((n_q * heads, 1, 1), self.device.stream(), argument)

    def _seen(self, n_q: int, n_kv: int, span: tuple[int, int]) -> Any:
        """int32 `[2, n_q]`: (first, end) of the rows that each query sees, equal for none."""
        ramp = self.torch.arange(n_q, dtype=self.torch.int32, device=self.device.torch_device)
        first, end = ((ramp + s).clamp(0, n_kv) for s in span)
        return self.torch.stack((first, self.torch.maximum(first, end)))

    # ---- arguments -------------------------------------------------------------------------------

    def _looks(self) -> bool:
        """Whether numbers are looked at before a launch."""
        return self.check and not self.device.capturing()

    def _refuse(self, op: str, f: Format, head_dim: int) -> None:
        reason = self.refuses(op, f, head_dim)
        if reason:
            raise RequestError(reason)

    def _count(self, elements: int, what: str) -> None:
        if elements > LARGEST:
            raise RequestError(
                f"{what} has {elements} elements, more than {LARGEST}: give fewer at once"
            )

    def _tensor(self, x: Any, what: str) -> Any:
        """x as a tensor of this device: itself, or a copy of what lies on the host."""
        if not on_host(x):
            if x.device.index != self.device.index or str(x.layout) != "torch.strided":
                raise RequestError(
                    f"{what} is {x.layout} on {x.device}; needs a dense tensor on "
                    f"{self.device.torch_device}"
                )
            self._count(x.numel(), what)
            return x.detach()
        values = host_array(x, what)
        self._count(values.size, what)
        if values.dtype.kind not in "fiu":
            raise RequestError(f"{what} must be an array of real numbers, got {values.dtype}")
        if values.dtype == np.float64 or (values.dtype.kind in "iu" and values.dtype != np.uint8):
            with np.errstate(over="ignore"):  # beyond float32 is infinite, and refused as that
                values = values.astype(np.float32)
        return self.device.tensor(np.ascontiguousarray(values))

    def _floats(self, x: Any, what: str) -> Any:
        """A tensor of float32, bfloat16 or float16."""
        t = self._tensor(x, what)
        if str(t.dtype) in ("torch.float32", "torch.bfloat16", "torch.float16"):
            return t
        if on_host(x):
            return t.float()
        raise RequestError(f"{what} is {t.dtype}; needs float32, bfloat16 or float16")

    def _bytes(self, x: Any, what: str) -> Any:
        dtype = x.dtype if is_tensor(x) else host_array(x, what).dtype
        if str(dtype) not in ("uint8", "torch.uint8"):
            raise RequestError(f"{what} must be a uint8 array of encoded rows, got {dtype}")
        return self._tensor(x, what)

    def _refuse_nan(self, x: Any, what: str) -> None:
        if self._looks() and not bool(self.torch.isfinite(x).all()):
            raise RequestError(f"{what} has a NaN or infinity")

    def _refuse_infinite(self, rows: Any, f: Format) -> None:
        good = self.torch.isfinite(rows).all(dim=-1)
        if self._looks() and not bool(good.all()):
            row = int(self.torch.nonzero(~good)[0])
            raise RequestError(f"{f.name}: row {row}: non-finite input")

    def _column(self, f: Format, scale: Any, lead: tuple[int, ...]) -> Any:
        """The scale of every row, float32 `[rows, 1]` on the device; None if there is none."""
        of_rows = row_scales(f, _scale(scale), lead)
        return None if of_rows is None else self.device.tensor(of_rows).reshape(-1, 1)

    def _like(self, given: Any, out: Any) -> Any:
        """A result where the argument lay."""
        if not on_host(given):
            return out
        return out.cpu() if is_tensor(given) else out.cpu().numpy()


_MOST = float(np.finfo(np.float32).max)
_LOG2_E = float(np.log2(np.e))


def _shape_of(x: Any) -> Any:
    """An array of x's shape without its numbers, for checks of shapes alone."""
    return np.broadcast_to(np.float32(0), tuple(x.shape))


def _near(offsets: Any, n_kv: int, page: int, phase: int) -> tuple[Any, int, int]:
    """Offsets, page and phase that mean the same, in numbers that 32 bits hold: without pages that
    no row lies in."""
    start, phase = phase // page, phase % page
    pages = offsets[:, :, start : start + -(-(phase + n_kv) // page)]
    if page > LONGEST_PAGE:  # of at most two pages
        phase = max(0, LONGEST_PAGE - (page - phase))
        page = LONGEST_PAGE
    return pages.float().contiguous(), page, phase


def _scale(scale: Any) -> Any:
    """Scales where the host can look at them."""
    return scale.detach().cpu().numpy() if is_tensor(scale) else scale


@functools.lru_cache(maxsize=1)
def _shipped_digest() -> str:
    return hashlib.sha256((program.digest() + source_digest()).encode()).hexdigest()
