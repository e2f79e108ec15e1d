"""The CPU backend: native kernels, one set per instruction set, chosen once.

`KVPROOF_CPU_ISA` (scalar, neon, avx2, avx2vnni, avx512 or amx) forces a set, `KVPROOF_THREADS` the
default number of threads. Cached rows are read in place: any strides in the first two axes, no
repacking. NumPy arrays and torch CPU tensors are taken without copies where they are float32
(queries, inputs) or uint8 (blocks) and contiguous along the last axis.
"""

from __future__ import annotations

import hashlib
import os
import platform
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof import rotation
from kvproof.backends import tiles
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
from kvproof.errors import Refused, RequestError
from kvproof.formats import Counters, Format
from kvproof.formats import get as format_of
from kvproof.formats.base import cuts_below
from kvproof.formats.polar import CENTROIDS, CUTS, RESIDUAL_SIGNS
from kvproof.formats.row import EFFORTS, STARTS, search_of
from kvproof.formats.tcq import CODES, UNIT_CUTS, UNITS
from kvproof.machine import cpu_model, usable_cpus

try:
    import kvproof._kernels as _kernels
except ModuleNotFoundError as missing:
    raise Refused(
        "backend cpu: the compiled kernels (kvproof._kernels) are missing; build them with "
        "`make setup` or install a wheel"
    ) from missing

# Sets with kernels that read tiles, and those whose caches are held so by themselves.
TILED = frozenset(_kernels.tiled_isas())
TILE_ISAS = TILED - {"scalar"}  # by lanes they win nothing

_VARIANTS = ("tbq3_tcq", "qjl1_256")  # with a codebook or projection of their own


def _hand_over_constants() -> None:
    """Give the native kernels the codebooks and sign vectors, which exist only in Python."""
    s32, *s128 = (
        rotation.signs_from_hex(h) for h in (rotation.S32_HEX, rotation.W1_HEX, rotation.W2_HEX)
    )
    head = np.array(rotation.head_signs(_kernels.MAX_DIM))
    _kernels.set_signs(s32, head, np.stack(s128), RESIDUAL_SIGNS)
    for name in _kernels.FORMATS:
        if name in _VARIANTS:
            continue
        f = format_of(name)
        if name in ("q4_polar", "q4_polar_res"):
            # The native rule is cut < z, these formats have cut <= z.
            cuts = [float(c) for c in np.nextafter(CUTS, np.float32(-np.inf))]
            _kernels.set_book(name, [float(c) for c in CENTROIDS], cuts, 0.0)
        elif f.codebook is not None:
            cuts = [float(c) for c in cuts_below(f.codebook)]
            start = float(CODES[name].start if name in CODES else STARTS.get(name, 0))
            _kernels.set_book(name, list(f.codebook), cuts, start)
    for name in ("q4_0", "q4_0_rot"):  # decode by table too: code - 8
        _kernels.set_book(name, [float(c - 8) for c in range(16)], [0.0] * 15, 0.0)
    for name in EFFORTS:
        search = search_of(name)
        grid, beyond = float(search.grid), search.beyond.tolist()
        _kernels.set_search(name, grid, search.cost, search.entry, beyond)
    _kernels.set_units(UNITS, UNIT_CUTS)
    for name, code in CODES.items():
        _kernels.set_trellis(name, code.states, code.taps0, code.taps1, list(code.offsets))


_hand_over_constants()


_handed_over: set[str] = set()


def _handle(f: Format) -> str:
    """What the kernels know a format by: its identity, its table having been handed over."""
    if f.name not in _VARIANTS:
        return f.name
    identity = f.identity
    if identity not in _handed_over:
        table = f.spin.table if isinstance(f.spin, rotation.Projection) else f.codebook
        _kernels.add_variant(f.name, identity, np.ascontiguousarray(table, np.float32))
        _handed_over.add(identity)
    return identity


MAX_THREADS = 1024


def isas() -> dict[str, bool]:
    """Instruction sets that there are kernels for, best last -> whether this machine runs them."""
    return dict(_kernels.isas())


def missing_for(isa: str) -> str:
    """What an instruction set of `isas()` needs that is not here: "AVX-VNNI"; "" if it can run."""
    missing: str = _kernels.missing_for(isa)
    return missing


def chosen_isa() -> str:
    """The set in use: the one `KVPROOF_CPU_ISA` names, or the best available."""
    known = isas()
    forced = os.environ.get("KVPROOF_CPU_ISA", "")
    if not forced:
        return [name for name, available in known.items() if available][-1]
    if forced not in known:
        raise RequestError(f"KVPROOF_CPU_ISA={forced}: unknown, choose one of {', '.join(known)}")
    if not known[forced]:
        here = ", ".join(name for name, available in known.items() if available)
        raise Refused(
            f"KVPROOF_CPU_ISA={forced}: this machine cannot run it, it lacks "
            f"{missing_for(forced)}; choose one of {here}"
        )
    return forced


def default_threads() -> int:
    """`KVPROOF_THREADS`, or the CPUs this process may use."""
    text = os.environ.get("KVPROOF_THREADS", "")
    if not text:
        return usable_cpus()
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:5]) <= MAX_THREADS):
        raise RequestError(
            f"KVPROOF_THREADS: expected a number from 1 to {MAX_THREADS}, found {text[:20]!r}"
        )
    return int(text)


# Fewer bytes to be packed are not worth a second thread, and so many rows are one thread's task.
_SERIAL_BYTES, _SERIAL_ROWS = 1 << 16, 64


class CpuBackend:
    """Native kernels on the CPU (see docs/architecture.md for shapes and dtypes)."""

    name = "cpu"
    arrangement: ModuleType = tiles

    def __init__(self, isa: str | None = None, *, tiles: bool | None = None) -> None:
        """Use `isa`, or what `chosen_isa` says. `tiles`: whether caches hold rows in tiles where
        they can; None: where that is faster (sets without kernels for them unpack them again)."""
        self.isa = isa or chosen_isa()
        self._tiles = self.isa in TILE_ISAS if tiles is None else tiles
        if not isas().get(self.isa, False):
            raise Refused(f"backend cpu: instruction set {self.isa} is not available here")

    def environment(self) -> dict[str, Any]:
        """Processor, instruction sets and default threads."""
        return {
            "device": cpu_model(),
            "isa": self.isa,
            "isas": [name for name, available in isas().items() if available],
            "threads": default_threads(),
            "is_software": False,
            "machine": platform.machine(),
        }

    def refuses(self, op: str, fmt: str | Format, head_dim: int) -> str | None:
        """What the format refuses, what has no kernel, and rows wider than the kernels take."""
        f = format_of(fmt)
        if op not in ("encode", "decode", "scores", "attention"):
            return f"backend cpu: no operation {op!r}"
        if f.name not in _kernels.FORMATS:
            return f"{f.name}: backend cpu has no {op} kernel for it"
        side = "key" if op == "scores" or "key" in f.sides else "value"
        if op != "scores" and side not in f.sides:
            return f"{f.name}: not a format of cached rows"
        reason = f.refuses(head_dim, side)
        if reason is None and f.stored_values(head_dim) > _kernels.MAX_DIM:
            widest = _kernels.MAX_DIM * head_dim // f.stored_values(head_dim)
            return f"{f.name}: head_dim {head_dim} is above {widest}, the widest CPU row"
        return reason

    def kernel(self, op: str, fmt: str | Format, head_dim: int) -> str:
        """`<op>_<format>_<isa>`; the kernels are the same for every head_dim."""
        return f"{op}_{format_of(fmt).name}_{self.isa}"

    def digest(self) -> str:
        """SHA-256 over the compiled kernels and the sources of the formats."""
        return _shipped_digest()

    def encode(
        self,
        fmt: str | Format,
        x: Any,
        scale: Any = None,
        *,
        out: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        """Float32 `[..., n]` to uint8 `[..., row_bytes(n)]`, byte-equal to the format's encode.

        As everywhere here, `out` takes the result: a contiguous NumPy array of its shape and dtype,
        in memory that is not read.
        """
        return self._encode(fmt, x, scale, out)[0]

    def encode_counted(
        self,
        fmt: str | Format,
        x: Any,
        scale: Any = None,
        *,
        out: NDArray[np.uint8] | None = None,
    ) -> tuple[NDArray[np.uint8], Counters]:
        """`encode`, and how many scales or elements were saturated or flushed to zero."""
        result, *counts = self._encode(fmt, x, scale, out)
        return result, Counters(*counts)

    def _encode(
        self, fmt: str | Format, x: Any, scale: Any, out: NDArray[np.uint8] | None
    ) -> tuple[NDArray[np.uint8], int, int]:
        f = format_of(fmt)
        values = _floats(x, f"{f.name}: encode")
        if values.ndim == 0:
            raise RequestError(f"{f.name}: encode needs an array of at least one axis")
        n = values.shape[-1]
        self._check("encode", f, n)
        rows = np.ascontiguousarray(values).reshape(-1, n)
        row_scale = row_scales(f, _scale(f, scale), values.shape[:-1])
        width = f.row_bytes(n)
        result = _output(out, (*values.shape[:-1], width), np.uint8, f"{f.name}: encode", values)
        threads = 1 if len(rows) <= _SERIAL_ROWS else default_threads()
        bad, saturated, flushed = _kernels.encode(
            self.isa, threads, _handle(f), rows, row_scale, result.reshape(-1, width)
        )
        if bad >= 0:
            raise RequestError(f"{f.name}: row {bad}: non-finite input")
        return result, saturated, flushed

    def decode(
        self,
        fmt: str | Format,
        blocks: Any,
        scale: Any = None,
        *,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Uint8 `[..., row_bytes]` to float32 `[..., n]` in the plain basis."""
        f = format_of(fmt)
        raw = _bytes(blocks, f"{f.name}: decode")
        if raw.ndim == 0:
            raise RequestError(f"{f.name}: decode needs an array of at least one axis")
        n = f.row_values(raw.shape[-1])
        self._check("decode", f, n)
        rows = np.ascontiguousarray(raw).reshape(-1, raw.shape[-1])
        row_scale = row_scales(f, _scale(f, scale), raw.shape[:-1])
        result = _output(out, (*raw.shape[:-1], n), np.float32, f"{f.name}: decode", raw)
        bad = _kernels.decode(
            self.isa, default_threads(), _handle(f), rows, n, row_scale, result.reshape(-1, n)
        )
        if bad >= 0:
            raise RequestError(f"{f.name}: row {bad}: stored scale or element is not finite")
        return result

    def scores(
        self,
        fmt: str | Format,
        q: Any,
        blocks: Any,
        scale: Any = None,
        threads: int | None = None,
        *,
        out: NDArray[np.float32] | None = None,
    ) -> Any:
        """Plain dot products `[n_q, num_heads, n_kv]` (or `[n_q, n_kv]` from two-dimensional
        input)."""
        f = format_of(fmt)
        queries, keys = _floats(q, "scores: q"), _bytes(blocks, "scores: blocks")
        if queries.ndim == 2 and keys.ndim == 2:
            shape = (len(queries), len(keys))
            flat = _output(out, shape, np.float32, "scores", queries, keys)
            self.scores(f, queries[:, None], keys[:, None], scale, threads, out=flat[:, None])
            return _like(q, flat)
        check_shapes(queries, keys, f.row_values(keys.shape[-1]))
        self._check("scores", f, queries.shape[2])
        if not np.isfinite(queries).all():
            raise RequestError("scores: q has a NaN or infinity")
        shape = (*queries.shape[:2], keys.shape[0])
        result = _output(out, shape, np.float32, "scores", queries, keys)
        if result.size:
            bad = _kernels.scores(
                self.isa, _threads(threads), _last_contiguous(queries), _last_contiguous(keys),
                _handle(f), head_scales(f, _scale(f, scale), keys.shape[1], "scale"), result,
            )  # fmt: skip
            _refuse_bad_row(bad, f, "keys")
        return _like(q, result)

    def arranges(
        self, key: str | Format, value: str | Format, head_dim_k: int, head_dim_v: int
    ) -> bool:
        """Whether this instance holds such caches in tiles."""
        fk, fv = format_of(key), format_of(value)
        return self._tiles and tiles.fit(fk, fv, head_dim_k, head_dim_v)

    def pack(
        self, fmt: str | Format, side: str, rows: Any, buffer: NDArray[np.uint8], at: int
    ) -> None:
        """Write rows to the slots from `at` on (see `Backend.pack`)."""
        f, blocks = format_of(fmt), _last_contiguous(_bytes(rows, "pack: rows"))
        threads = 1 if blocks.size <= _SERIAL_BYTES else default_threads()
        try:
            bad = _kernels.pack(threads, f.name, side, blocks, buffer, at)
        except (TypeError, ValueError):
            tiles.check(f, side, blocks, buffer, at, "pack")  # says what does not fit
            raise
        if bad >= 0:
            raise tiles.bad_row(f, side, bad)

    def unpack(
        self,
        fmt: str | Format,
        side: str,
        buffer: NDArray[np.uint8],
        first: int,
        n: int,
        *,
        out: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        """The n rows from slot `first` on, `[n, num_kv_heads, row_bytes]`."""
        f = format_of(fmt)
        rows = _output(out, tiles.rows_shape(buffer, n), np.uint8, "unpack", buffer)
        tiles.check(f, side, rows, buffer, first, "unpack")
        _kernels.unpack(default_threads(), f.name, side, buffer, first, rows)
        return rows

    def step(
        self,
        key: str | Format,
        value: str | Format,
        heads: tuple[int, int],
        dims: tuple[int, int],
        *,
        tiled: bool,
        scale: NDArray[np.float32] | None = None,
        mean: NDArray[np.float32] | None = None,
        pairs: int = -1,
    ) -> CpuStep | None:
        """The native calls for one token (see `Backend.step`); None for tiles that this set has to
        unpack."""
        if tiled and self.isa not in TILE_ISAS:
            return None
        handles = (_handle(format_of(key)), _handle(format_of(value)))
        arrays = (None if x is None else np.ascontiguousarray(x) for x in (scale, mean))
        return CpuStep(_kernels.Step(self.isa, tiled, *handles, *heads, *dims, *arrays, pairs))

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
        out: NDArray[np.float32] | None = None,
    ) -> Any:
        """Softmax attention over the cached rows, `[n_q, num_heads, head_dim_v]` (see
        `Backend.attention`); the same bytes for any number of threads."""
        fk, fv = format_of(key), format_of(value)
        queries = _floats(q, "attention: q")
        tiled = tiles.check_pair(k_blocks, v_blocks, fk, fv)
        if tiled and self.isa not in TILED:
            k_blocks, v_blocks, tiled = self._rows_of(k_blocks), self._rows_of(v_blocks), False
        keys, values = k_blocks, v_blocks
        if not tiled:
            keys, values = _bytes(keys, "attention: keys"), _bytes(values, "attention: values")
        head_dim_k = fk.row_values(keys.shape[-1])
        check_attention(queries, keys, values, head_dim_k, window, scale, position)
        added = None if offsets is None else _floats(offsets, "attention: offsets")
        page, phase = check_offsets(queries, len(keys), added, page, phase)
        dim_v = fv.row_values(values.shape[-1])
        self._check("attention", fk, queries.shape[2])
        self._check("attention", fv, dim_v)
        for f, head_dim, side in ((fk, queries.shape[2], "key"), (fv, dim_v, "value")):
            reason = f.refuses(head_dim, side)
            if reason:
                raise RequestError(reason)
        n_q, n_kv = queries.shape[0], keys.shape[0]
        held = (keys.buffer, values.buffer) if tiled else (keys, values)
        shape = (n_q, queries.shape[1], dim_v)
        result = _output(out, shape, np.float32, "attention", queries, *held, added)
        # NaN shows what a kernel does not write.
        lse = np.full((n_q, queries.shape[1]), np.nan, np.float32) if return_lse else None
        if not np.isfinite(queries).all():
            raise RequestError("attention: q has a NaN or infinity")
        if n_kv == 0:  # nothing is seen; kernels take no empty blocks
            result[...] = 0
            if lse is not None:
                lse[...] = -np.inf
        elif result.size:
            first, end = spans(n_q, n_kv, causal, window, position)
            factor = queries.shape[2] ** -0.5 if scale is None else float(scale)
            pages = None if added is None else _last_contiguous(added)
            of_heads = (
                head_scales(fk, _scale(fk, k_scale), keys.shape[1], "k_scale"),
                head_scales(fv, _scale(fv, v_scale), keys.shape[1], "v_scale"),
            )
            if tiled:
                side, bad = _kernels.attention_tiles(
                    self.isa, _threads(threads), _last_contiguous(queries), keys.buffer,
                    values.buffer, fk.name, fv.name, head_dim_k, dim_v, keys.first, n_kv, first,
                    end, factor, pages, page, phase, result, lse,
                )  # fmt: skip
            else:
                side, bad = _kernels.attention(
                    self.isa, _threads(threads), _last_contiguous(queries), _last_contiguous(keys),
                    _last_contiguous(values), _handle(fk), _handle(fv), dim_v, first, end, factor,
                    *of_heads, pages, page, phase, result, lse,
                )  # fmt: skip
            _refuse_bad_row(bad, fv if side else fk, "values" if side else "keys")
        return _like(q, result) if lse is None else (_like(q, result), _like(q, lse))

    def _rows_of(self, t: tiles.Tiles) -> NDArray[np.uint8]:
        return self.unpack(t.format, t.side, t.buffer, t.first, t.n)

    def _check(self, op: str, f: Format, head_dim: int) -> None:
        reason = self.refuses(op, f, head_dim)
        if reason:
            raise RequestError(reason)


class CpuStep:
    """`backends.Step` in native code: it holds what a layer is, nothing of a text."""

    def __init__(self, native: Any) -> None:
        self._append, self._attend = native.append, native.attend

    def __deepcopy__(self, memo: Any) -> CpuStep:
        return self  # copies of a cache are how transformers reuses a prompt

    def append(self, *arrays: Any) -> bool:
        """See `backends.Step`."""
        done: bool = self._append(*arrays)
        return done

    def attend(self, threads: int | None, *arrays: Any) -> bool:
        """See `backends.Step`."""
        done: bool = self._attend(_threads(threads), *arrays)
        return done


def _is_torch(x: Any) -> bool:
    return type(x).__module__.split(".")[0] == "torch"


def _array(x: Any, what: str) -> NDArray[Any]:
    """The array behind x, sharing its memory; torch tensors must be on the CPU."""
    if not _is_torch(x):
        try:
            return np.asarray(x)
        except ValueError as error:  # rows of unequal length
            raise RequestError(f"{what}: {error}") from error
    if x.device.type != "cpu" or str(x.layout) != "torch.strided":
        raise RequestError(f"{what} is {x.layout} on {x.device}; needs a dense CPU tensor")
    tensor = x.detach().resolve_neg()
    if tensor.is_floating_point():
        tensor = tensor.float()  # NumPy has no bfloat16; float32 is not copied
    try:
        return tensor.numpy()  # type: ignore[no-any-return]
    except (TypeError, RuntimeError) as error:  # a quantized tensor, or a conjugate
        raise RequestError(f"{what}: {tensor.dtype} does not become an array: {error}") from error


def _floats(x: Any, what: str) -> NDArray[np.float32]:
    values = _array(x, what)
    if values.dtype == np.float32:
        return values
    if values.dtype.kind not in "fiu":
        raise RequestError(f"{what} must be an array of real numbers, got {values.dtype}")
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and refused as that
        return values.astype(np.float32, copy=False)


def _bytes(x: Any, what: str) -> NDArray[np.uint8]:
    values = _array(x, what)
    if values.dtype != np.uint8:
        raise RequestError(f"{what} must be a uint8 array of encoded rows, got {values.dtype}")
    return values


def _output(
    out: NDArray[Any] | None,
    shape: tuple[int, ...],
    dtype: type[np.generic],
    what: str,
    *read: NDArray[Any] | None,
) -> NDArray[Any]:
    """`out` if the kernels can write the result into it while they read arrays, or a new array."""
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray):
        raise RequestError(f"{what}: out is a {type(out).__name__}, needs a NumPy array")
    if out.shape != shape or out.dtype != dtype:
        raise RequestError(
            f"{what}: out is {out.dtype} {out.shape}, needs {np.dtype(dtype)} {shape}"
        )
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise RequestError(f"{what}: out must be contiguous and writable")
    if any(x is not None and np.may_share_memory(out, x) for x in read):
        raise RequestError(f"{what}: out overlaps what is read; give it memory of its own")
    return out


def _last_contiguous(x: NDArray[Any]) -> NDArray[Any]:
    """x itself if the kernels can read it in place, otherwise a contiguous copy."""
    in_place = x.strides[-1] == x.itemsize and all(s % x.itemsize == 0 for s in x.strides)
    return x if in_place else np.ascontiguousarray(x)


def _like(q: Any, out: NDArray[np.float32]) -> Any:
    """`out` as a torch tensor if the query was one."""
    if not _is_torch(q):
        return out
    import torch

    return torch.from_numpy(out)


def _threads(threads: int | None) -> int:
    if threads is None:
        return default_threads()
    if not whole(threads) or not 1 <= threads <= MAX_THREADS:
        raise RequestError(
            f"attention: threads {threads!r} is not a whole number from 1 to {MAX_THREADS}"
        )
    return int(threads)


def _scale(f: Format, scale: Any) -> NDArray[Any] | None:
    return None if scale is None else _array(scale, f"{f.name}: scale")


def _refuse_bad_row(row: int, f: Format, side: str) -> None:
    if row >= 0:
        raise RequestError(f"{f.name}: row {row} of the {side}: stored scale is not finite")


@lru_cache(maxsize=1)
def _shipped_digest() -> str:
    binary = Path(_kernels.__file__).read_bytes()
    return hashlib.sha256(binary + source_digest().encode()).hexdigest()
