"""Kernels broken on purpose. The gate is trusted only while each one fails by the rule it names.

A mutant wraps a working backend and spoils one thing: an input, an output or the bytes. Where a
defect is shared by kernel and reference, so that parity cannot see it, the mutant brings the
spoiled reference too and only truth may catch it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvproof.formats as formats
from kvproof import routes
from kvproof.backends import Backend, tiles
from kvproof.backends.reference import ReferenceBackend
from kvproof.cache import KVCache, LayerCache
from kvproof.cases import Case, Floats
from kvproof.conditioner import KINDS
from kvproof.formats import Format, tcq
from kvproof.formats import get as format_named
from kvproof.rotation import Rotation, projection
from kvproof.rules import (
    REFERENCE,
    TRUTH_KEYS,
    TRUTH_QUERIES,
    Examination,
    Float64,
    Reference,
    decode_turbo3,
    examine,
    rotate128,
    scale_at,
    true_scores,
)

Bytes = NDArray[np.uint8]


class Broken:
    """A backend with some methods replaced; everything else is the inner backend's."""

    def __init__(self, inner: Backend, **methods: Callable[..., Any]) -> None:
        self._inner = inner
        if methods.keys() - {"make_cache"}:  # the calls for one token would go past what is broken
            self.step = lambda *_, **__: None
        for name, method in methods.items():
            setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


Build = Callable[[Backend], Any]


@dataclass(frozen=True)
class Mutant:
    """A broken backend, the case it is shown to, and the rules that all must catch it."""

    name: str
    case: Case
    rules: frozenset[str]
    build: Build
    reference: Reference = REFERENCE
    passes: frozenset[str] = frozenset()  # rules that must not see it: why the others exist
    look: Callable[[Case, Any, Reference], Examination] = examine

    def examine(self, backend: Backend) -> Examination:
        """The gate's examination of the broken backend. It holds caches as rows unless the mutant
        says tiles: what is spoiled must not depend on the machine."""
        in_rows = Broken(backend, arranges=lambda *_: False)
        return self.look(self.case, self.build(in_rows), self.reference)

    def caught(self, exam: Examination) -> bool:
        """Whether every rule named caught it, and none that must not see it did."""
        return self.rules <= exam.rules_failed and not self.passes & exam.rules_failed


# ---- ways to spoil: each returns a function from a backend to a broken one -----------------------


def outputs(spoil: Callable[[Floats], Floats]) -> Build:
    """Spoil what scores and attention return."""

    def build(inner: Backend) -> Broken:
        def scores(fmt: Format, q: Floats, blocks: Bytes, scale: Any = None) -> Floats:
            return spoil(np.array(inner.scores(fmt, q, blocks, scale=scale)))

        def attention(q: Floats, k: Bytes, v: Bytes, **options: Any) -> Floats:
            return spoil(np.array(inner.attention(q, k, v, **options)))

        return Broken(inner, scores=scores, attention=attention)

    return build


def queries(spoil: Callable[[Format, Floats], Floats]) -> Build:
    """Spoil the query on its way in."""

    def build(inner: Backend) -> Broken:
        def scores(fmt: Format, q: Floats, blocks: Bytes, scale: Any = None) -> Any:
            return inner.scores(fmt, spoil(fmt, q), blocks, scale=scale)

        def attention(q: Floats, k: Bytes, v: Bytes, **options: Any) -> Any:
            return inner.attention(spoil(format_named(options["key"]), q), k, v, **options)

        return Broken(inner, scores=scores, attention=attention)

    return build


def key_blocks(spoil: Callable[[Format, Bytes], Bytes]) -> Build:
    """Spoil how stored keys are read."""

    def build(inner: Backend) -> Broken:
        def scores(fmt: Format, q: Floats, blocks: Bytes, scale: Any = None) -> Any:
            return inner.scores(fmt, q, spoil(fmt, blocks), scale=scale)

        def attention(q: Floats, k: Bytes, v: Bytes, **options: Any) -> Any:
            return inner.attention(q, spoil(format_named(options["key"]), k), v, **options)

        return Broken(inner, scores=scores, attention=attention)

    return build


def options(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Build:
    """Spoil the options of attention."""

    def build(inner: Backend) -> Broken:
        def attention(q: Floats, k: Bytes, v: Bytes, **given: Any) -> Any:
            return inner.attention(q, k, v, **change(given))

        return Broken(inner, attention=attention)

    return build


def encoder(spoil: Callable[[Backend, Format, Floats, Any], Bytes]) -> Build:
    """Replace the storage encoder."""

    def build(inner: Backend) -> Broken:
        def encode(fmt: Format, x: Floats, scale: Any = None) -> Bytes:
            return spoil(inner, fmt, x, scale)

        return Broken(inner, encode=encode)

    return build


# ---- outputs -----------------------------------------------------------------------------------


def _one_nan(out: Floats) -> Floats:
    out.flat[out.size // 2] = np.nan
    return out


def _stale(inner: Backend) -> Broken:
    """Every call returns what the call before it computed."""
    held: dict[tuple[int, ...], Floats] = {}

    def scores(fmt: Format, q: Floats, blocks: Bytes, scale: Any = None) -> Floats:
        fresh = np.array(inner.scores(fmt, q, blocks, scale=scale))
        old = held.get(fresh.shape, fresh)
        held[fresh.shape] = fresh
        return old

    return Broken(inner, scores=scores)


def _nan_lane(out: Floats) -> Floats:
    out[..., 3::8] = np.nan
    return out


def _into(write: Callable[[Floats, Floats], None]) -> Build:
    """Attention into a caller's buffer, written by `write(buffer, result)`."""

    def build(inner: Backend) -> Broken:
        def attention(q: Floats, k: Bytes, v: Bytes, *, out: Floats, **given: Any) -> Floats:
            write(out, np.asarray(inner.attention(q, k, v, **given)))
            return out

        return Broken(inner, attention=attention)

    return build


def _all_but_last(out: Floats, result: Floats) -> None:
    out[:-1] = result[:-1]


def _all_but_last_value(out: Floats, result: Floats) -> None:
    out.reshape(-1)[:-1] = result.reshape(-1)[:-1]


def _all_but_last_head(out: Floats, result: Floats) -> None:
    out[:, :-1] = result[:, :-1]


def _one_past(out: Floats, result: Floats) -> None:
    out[...] = result
    np.lib.stride_tricks.as_strided(out, (out.size + 1,), (4,))[-1] = result.flat[-1]


def _one_before(out: Floats, result: Floats) -> None:
    out[...] = result
    assert isinstance(out.base, np.ndarray)
    whole = out.base if out.base.base is None else out.base.base
    start = (out.ctypes.data - whole.ctypes.data) // whole.itemsize
    whole.reshape(-1)[start - 1] = 0


# ---- layouts -----------------------------------------------------------------------------------


def _code_bytes(fmt: Format, blocks: Bytes) -> tuple[Bytes, slice]:
    """Blocks as `[..., blocks, bytes]` (a copy) and where their codes lie."""
    size = fmt.block_bytes or blocks.shape[-1]
    b = np.array(blocks).reshape(*blocks.shape[:-1], -1, size)
    scale = _scale_bytes(fmt)
    return b, slice(2, None) if scale.start == 0 else slice(0, scale.start)


def _scale_bytes(fmt: Format) -> slice:
    """Where a block's scale lies: two bytes, or the one byte of a logarithmic unit."""
    return scale_at(fmt) or slice(-1, None)


def _swap_nibbles(fmt: Format, blocks: Bytes) -> Bytes:
    b, codes = _code_bytes(fmt, blocks)
    b[..., codes] = b[..., codes] << 4 | b[..., codes] >> 4
    return b.reshape(blocks.shape)


def _shift_stream(fmt: Format, blocks: Bytes) -> Bytes:
    b, codes = _code_bytes(fmt, blocks)
    bits = np.unpackbits(b[..., codes], axis=-1, bitorder="little")
    b[..., codes] = np.packbits(np.roll(bits, 1, axis=-1), axis=-1, bitorder="little")
    return b.reshape(blocks.shape)


def _big_endian_scale(fmt: Format, blocks: Bytes) -> Bytes:
    b, _ = _code_bytes(fmt, blocks)
    at = _scale_bytes(fmt)
    swapped = b[..., at][..., ::-1].copy()
    if fmt.name == "qjl1_256":
        swapped[..., 1] &= 0x3F  # a bf16 of a large exponent would only overflow
    else:
        swapped[(swapped[..., 1] & 0x7C) == 0x7C] = 0  # not the NaNs: those the kernel refuses
    b[..., at] = swapped
    return b.reshape(blocks.shape)


def _two_bits(fmt: Format, blocks: Bytes) -> Bytes:
    """4-bit codes through a mask of two bits."""
    b, codes = _code_bytes(fmt, blocks)
    b[..., codes] &= 0x33
    return b.reshape(blocks.shape)


def _rolled_bits(first: int, last: int, by: int) -> Callable[[Format, Bytes], Bytes]:
    """Bits [first, last) of every block moved on by some."""

    def spoil(fmt: Format, blocks: Bytes) -> Bytes:
        whole = blocks.reshape(*blocks.shape[:-1], -1, fmt.block_bytes or blocks.shape[-1])
        bits = np.unpackbits(whole, axis=-1, bitorder="little")
        bits[..., first:last] = np.roll(bits[..., first:last], by, axis=-1)
        return np.packbits(bits, axis=-1, bitorder="little").reshape(blocks.shape)

    return spoil


def _shift_path(fmt: Format, blocks: Bytes) -> Bytes:
    """tcq's path bits read one step late."""
    n = fmt.row_values(blocks.shape[-1])
    bits = np.unpackbits(blocks, axis=-1, bitorder="little")
    end = bits.shape[-1] - 8 * (fmt.unit_bytes + fmt.start_bytes)
    path = slice(end - n, end)
    bits[..., path] = np.roll(bits[..., path], 1, axis=-1)
    return np.packbits(bits, axis=-1, bitorder="little")


def _exchange_signs_and_norm(fmt: Format, blocks: Bytes) -> Bytes:
    """qjl blocks read with the norm first."""
    b = blocks.reshape(*blocks.shape[:-1], -1, 34)
    out = np.concatenate([b[..., 2:], b[..., :2]], axis=-1)
    out[..., 33] &= 0x3F  # a norm below 2: garbage, but finite
    return out.reshape(blocks.shape)


def _scale_of_the_next(fmt: Format, blocks: Bytes) -> Bytes:
    """Every block with the scale of the one before it in its row, or of the row before."""
    b, _ = _code_bytes(fmt, blocks)
    at = _scale_bytes(fmt)
    b[..., at] = np.roll(b[..., at], 1, axis=-2 if fmt.block_size else 0)
    return b.reshape(blocks.shape)


def _next_unit(fmt: Format, blocks: Bytes) -> Bytes:
    """tcq's unit one step of its logarithmic table too large."""
    b = np.array(blocks)
    b[..., -1] += (b[..., -1] > 0) & (b[..., -1] < 255)
    return b


def _path_from_zero(fmt: Format, blocks: Bytes) -> Bytes:
    """tcq's stored start of the path read as 0."""
    b = np.array(blocks)
    b[..., -2] = 0
    return b


def _no_start(fmt: Format, blocks: Bytes) -> Bytes:
    """tbq3_tcq's six bits of start state read as 0."""
    b = np.array(blocks).reshape(*blocks.shape[:-1], -1, 52)
    b[..., 2] &= 0xC0
    return b.reshape(blocks.shape)


def _started_at_ones(inner: Backend) -> Broken:
    """tcq decoded as if the path bits before a row were 1.

    The subset is an XOR of path bits, so it changes only where taps reach before the row: at step
    t by the parity of the taps beyond t.
    """

    def scores(fmt: Format, q: Floats, blocks: Bytes, scale: Any = None) -> Floats:
        code = tcq.CODES[fmt.name]
        book = np.asarray(code.book)
        rows = fmt.decode_rotated(blocks)
        order = tcq.time_order(rows.shape[-1])[: code.memory]
        unit = tcq.UNITS[blocks[..., -1:]].astype(np.float64)
        index = np.abs(rows[..., order] / unit - book[:, None, None, None]).argmin(axis=0)
        steps = range(len(order))
        taps = [(code.taps1 >> t + 1, code.taps0 >> t + 1) for t in steps]
        flips = np.array([2 * (a.bit_count() & 1) + (b.bit_count() & 1) for a, b in taps])
        rows[..., order] = book[index ^ flips] * unit
        return true_scores(fmt.rotate(q), rows).astype(np.float32)

    return Broken(inner, scores=scores)


def _as_format(other: Callable[[Format], Format]) -> Build:
    """Bytes read as those of another format of the same size."""

    def build(inner: Backend) -> Broken:
        def scores(fmt: Format, q: Floats, blocks: Bytes, scale: Any = None) -> Any:
            return inner.scores(other(fmt), q, blocks, scale=scale)

        return Broken(inner, scores=scores)

    return build


def _other_codebook(fmt: Format) -> Format:
    """tbq3_tcq with the halves of its codebook exchanged: another digest, the same bytes."""
    assert fmt.codebook is not None
    make: Callable[[Floats], Format] = vars(formats)["tbq3_tcq"]
    return make(np.roll(np.asarray(fmt.codebook, np.float32), 256))


def _no_scale(fmt: Format, blocks: Bytes) -> Bytes:
    b, _ = _code_bytes(fmt, blocks)
    b[..., _scale_bytes(fmt)] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    return b.reshape(blocks.shape)


def _swap_planes(fmt: Format, blocks: Bytes) -> Bytes:
    """tq3 with its high plane read before its low plane."""
    b = np.array(blocks)
    n = fmt.row_values(b.shape[-1])
    return np.concatenate([b[..., n // 4 : -2], b[..., : n // 4], b[..., -2:]], axis=-1)


def _turbo3_layout(inner: Backend) -> Broken:
    """tbq3_0 bytes read as legacy turbo3 blocks, with the query that layout wants."""

    def scores(fmt: Format, q: Floats, blocks: Bytes, scale: Any = None) -> Floats:
        return true_scores(rotate128(q), decode_turbo3(blocks)).astype(np.float32)

    return Broken(inner, scores=scores)


# ---- rotations ---------------------------------------------------------------------------------


def _unturned(fmt: Format, q: Floats) -> Floats:
    """A query that the kernel's own rotation turns back into q: the rotation is dropped."""
    return fmt.unrotate(q)


def _unsigned(fmt: Format, q: Floats) -> Floats:
    """A query that the kernel's rotation turns into H q / sqrt(n), without the signs."""
    assert isinstance(fmt.spin, Rotation)
    return (q * fmt.spin.signs(q.shape[-1])).astype(np.float32)


def _unscaled(fmt: Format, q: Floats) -> Floats:
    assert isinstance(fmt.spin, Rotation)
    return (q * np.float32(np.sqrt(fmt.spin.parts(q.shape[-1])[0]))).astype(np.float32)


def _skips_last_block(fmt: Format, q: Floats) -> Floats:
    """A query without its last 32 (or, of a sketch, 64) stored values: their block is skipped."""
    y = np.array(fmt.rotate(q))
    y[..., -32 * y.shape[-1] // q.shape[-1] :] = 0
    if fmt.spin is None or y.shape[-1] == q.shape[-1]:
        return fmt.unrotate(y)
    turned: Floats = (y @ np.linalg.pinv(fmt.spin.matrix(q.shape[-1]).T)).astype(np.float32)
    return turned


def _respun(first: int, last: int) -> Callable[[Format, Floats], Floats]:
    """A query (or row) that R128 turns into what it gives with signs vectors exchanged or left
    out: 1 is W1, 2 is W2, 0 none."""

    def spoil(fmt: Format, x: Floats) -> Floats:
        assert isinstance(fmt.spin, Rotation) and fmt.spin.signs_after is not None
        n = x.shape[-1]
        signs = (np.ones(n, np.float32), fmt.spin.signs(n), fmt.spin.signs_after(n))
        turned = replace(fmt.spin, signs=lambda _: signs[first], signs_after=lambda _: signs[last])
        with np.errstate(invalid="ignore"):  # rows with infinities come here to be refused
            return fmt.unrotate(turned.forward(x))

    return spoil


def _by_projection(id_: str) -> Build:
    """A query sketched by another projection than the keys were."""

    def build(inner: Backend) -> Broken:
        def scores(fmt: Format, q: Floats, blocks: Bytes, scale: Any = None) -> Floats:
            sketch = projection(id_).forward(q)
            return true_scores(sketch, fmt.decode_rotated(blocks)).astype(np.float32)

        return Broken(inner, scores=scores)

    return build


@dataclass(frozen=True)
class ProjectionReference(Reference):
    """A reference that sketches the query by the same wrong projection as the kernel."""

    id: str = "fixture"

    def scores(self, fmt: Format, q: Floats, blocks: Bytes, scale: Floats | None) -> Float64:
        """Scores of the wrong sketch."""
        return true_scores(projection(self.id).sketch(q), fmt.decode_rotated(blocks))


@dataclass(frozen=True)
class BlockReference(Reference):
    """A reference that reads stored bytes as wrongly as the kernel."""

    spoil: Callable[[Format, Bytes], Bytes] = _next_unit

    def rows(self, fmt: Format, blocks: Bytes, scale: Floats | None) -> Float64:
        """Rows of the spoiled bytes."""
        return super().rows(fmt, self.spoil(fmt, blocks), scale)


@dataclass(frozen=True)
class QueryReference(Reference):
    """A reference that makes the same mistake with the query as the kernel."""

    spoil: Callable[[Format, Floats], Floats] = _unturned

    def scores(self, fmt: Format, q: Floats, blocks: Bytes, scale: Floats | None) -> Float64:
        """Scores of the spoiled query."""
        return super().scores(fmt, self.spoil(fmt, q), blocks, scale)


def _unsigned_encoder(inner: Backend, fmt: Format, x: Floats, scale: Any) -> Bytes:
    assert isinstance(fmt.spin, Rotation)
    return inner.encode(fmt, x * fmt.spin.signs(x.shape[-1]), scale=scale)


def _output_not_unrotated(inner: Backend) -> Broken:
    def attention(q: Floats, k: Bytes, v: Bytes, **given: Any) -> Floats:
        return format_named(given["value"]).rotate(inner.attention(q, k, v, **given))

    return Broken(inner, attention=attention)


# ---- encoders ----------------------------------------------------------------------------------


def _rounded_scale(inner: Backend, fmt: Format, x: Floats, scale: Any) -> Bytes:
    """Codes from the fp16 copy of the scale instead of the float32 scale."""
    good = np.array(inner.encode(fmt, x, scale=scale))
    b = good.reshape(-1, fmt.block_bytes or good.shape[-1])
    stored = b[:, _scale_bytes(fmt)].copy().view(np.float16).astype(np.float32)
    block = fmt.block_size or x.shape[-1]
    y = fmt.rotate(x).reshape(-1, block)
    # One exactly representable block a row: a scale that fp16 holds gives these codes.
    codes = _codes_for(fmt, y, stored[:, 0])
    return codes.reshape(good.shape)


def _codes_for(fmt: Format, y: Floats, d: Floats) -> Bytes:
    """Blocks of q8_0 or tbq4_0 with codes of y / d for a given scale d `[m]`."""
    z = y * (np.float32(1) / d)[:, None]
    head = d.astype(np.float16)[:, None].view(np.uint8)
    if fmt.name == "q8_0":
        whole = np.copysign(np.floor(np.abs(z) + np.float32(0.5)), z)
        return np.concatenate([head, whole.clip(-127, 127).astype(np.int8).view(np.uint8)], axis=-1)
    book = np.asarray(fmt.codebook, np.float32)
    codes = np.abs(z[..., None] - book).argmin(axis=-1).astype(np.uint8)
    return np.concatenate([head, codes[:, :16] | codes[:, 16:] << 4], axis=-1)


def _single_row_differs(inner: Backend, fmt: Format, x: Floats, scale: Any) -> Bytes:
    out = np.array(inner.encode(fmt, x, scale=scale))
    if len(x) == 1:
        out[..., out.shape[-1] // 2] ^= 1
    return out


def _accepts_nan(inner: Backend, fmt: Format, x: Floats, scale: Any) -> Bytes:
    return np.asarray(inner.encode(fmt, np.nan_to_num(x, posinf=1, neginf=-1), scale=scale))


def _turned_encoder(spoil: Callable[[Format, Floats], Floats]) -> Build:
    """An encoder whose rotation is another one."""
    return encoder(lambda inner, fmt, x, scale: inner.encode(fmt, spoil(fmt, x), scale=scale))


def _scale_of_the_next_row(inner: Backend, fmt: Format, x: Floats, scale: Any) -> Bytes:
    return _scale_of_the_next(fmt, np.asarray(inner.encode(fmt, x, scale=scale)))


def _last_row_empty(inner: Backend, fmt: Format, x: Floats, scale: Any) -> Bytes:
    out = np.array(inner.encode(fmt, x, scale=scale))
    out[-1] = 0
    return out


class ShadowReference(Reference):
    """Reads the float rows that a shadow copy kept, as the kernel does."""

    def __init__(self) -> None:
        self.kept: Floats | None = None

    def rows(self, fmt: Format, blocks: Bytes, scale: Floats | None) -> Float64:
        """The rows as they were before they were encoded."""
        assert self.kept is not None
        return self.kept.astype(np.float64)


_SHADOW = ShadowReference()


def _shadow_copy(inner: Backend) -> Broken:
    """A cache that keeps the float rows and reads those: nothing tests the format."""

    def encode(fmt: Format, x: Floats, scale: Any = None) -> Any:
        _SHADOW.kept = np.array(x)
        return inner.encode(fmt, x, scale=scale)

    def decode(fmt: Format, blocks: Bytes, scale: Any = None) -> Any:
        assert _SHADOW.kept is not None
        return _SHADOW.kept.copy()

    return Broken(inner, encode=encode, decode=decode)


def _decodes_nan_scale(inner: Backend) -> Broken:
    def decode(fmt: Format, blocks: Bytes, scale: Any = None) -> Any:
        b, _ = _code_bytes(fmt, blocks)
        at = _scale_bytes(fmt)
        bad = (b[..., at][..., 1] & 0x7C) == 0x7C
        b[bad, at] = 0
        return inner.decode(fmt, b.reshape(blocks.shape), scale=scale)

    return Broken(inner, decode=decode)


def _zero_is_tiny(inner: Backend) -> Broken:
    def decode(fmt: Format, blocks: Bytes, scale: Any = None) -> Floats:
        out: Floats = np.asarray(inner.decode(fmt, blocks, scale=scale)) + np.float32(1e-30)
        return out

    return Broken(inner, decode=decode)


# ---- attention ---------------------------------------------------------------------------------


def _wrong_gqa(inner: Backend) -> Broken:
    """Query head h reads KV head h mod num_kv_heads."""

    def pick(blocks: Bytes, heads: int) -> Bytes:
        return blocks[:, np.arange(heads) % blocks.shape[1]]

    def scores(fmt: Format, q: Floats, blocks: Bytes, scale: Any = None) -> Any:
        return inner.scores(fmt, q, pick(blocks, q.shape[1]), scale=scale)

    def attention(q: Floats, k: Bytes, v: Bytes, **given: Any) -> Any:
        return inner.attention(q, pick(k, q.shape[1]), pick(v, q.shape[1]), **given)

    return Broken(inner, scores=scores, attention=attention)


def _sees(shift: int) -> Build:
    """The causal mask is off: query i sees `shift` tokens more (or fewer) than it may."""

    def build(inner: Backend) -> Broken:
        def attention(q: Floats, k: Bytes, v: Bytes, **given: Any) -> Floats:
            parts = []
            for i in range(len(q)):
                limit = min(len(k), max(1, len(k) - len(q) + i + 1 + shift))
                one = inner.attention(q[i : i + 1], k[:limit], v[:limit], **given)
                parts.append(np.asarray(one))
            return np.concatenate(parts)

        return Broken(inner, attention=attention)

    return build


def _decoded(fmt: Format, q: Floats, blocks: Bytes, scale: Any) -> tuple[Floats, Floats]:
    """Float32 rotated queries and stored rows, one row per query head."""
    rows = fmt.decode_rotated(blocks, 1.0 if scale is None else scale).astype(np.float32)
    return fmt.rotate(q), np.repeat(rows, q.shape[1] // blocks.shape[1], axis=1)


def _no_max(inner: Backend) -> Broken:
    """Softmax without subtracting the maximum: overflows where scores are large."""

    def attention(q: Floats, k: Bytes, v: Bytes, **given: Any) -> Floats:
        fk, fv = format_named(given["key"]), format_named(given["value"])
        turned, keys = _decoded(fk, q, k, given["k_scale"])
        _, values = _decoded(fv, q, v, given["v_scale"])
        s = np.einsum("qhd,thd->qht", turned, keys) / np.float32(np.sqrt(q.shape[-1]))
        late = np.arange(len(k))[None] > np.arange(len(k) - len(q), len(k))[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            w = np.where(late[:, None], np.float32(0), np.exp(s.astype(np.float32)))
            out = np.einsum("qht,thd->qhd", w, values) / w.sum(axis=-1)[..., None]
        return fv.unrotate(out.astype(np.float32))

    return Broken(inner, attention=attention)


def _merge_without_rescaling(inner: Backend) -> Broken:
    """Halves are added as if their softmax sums were equal."""

    def attention(q: Floats, k: Bytes, v: Bytes, **given: Any) -> Any:
        if len(k) < 64 or len(q) > 1:
            return inner.attention(q, k, v, **given)
        halves = (slice(0, len(k) // 2), slice(len(k) // 2, None))
        parts = [np.asarray(inner.attention(q, k[h], v[h], **given)) for h in halves]
        return ((parts[0] + parts[1]) / np.float32(2)).astype(np.float32)

    return Broken(inner, attention=attention)


def _half_sums(inner: Backend) -> Broken:
    """Scores accumulated in half precision."""

    def scores(fmt: Format, q: Floats, blocks: Bytes, scale: Any = None) -> Floats:
        turned, keys = _decoded(fmt, q, blocks, scale)
        total = np.zeros((len(q), q.shape[1], len(blocks)), np.float16)
        for i in range(q.shape[-1]):
            total += (turned[:, :, None, i] * keys[:, :, i].T).astype(np.float16)
        return total.astype(np.float32)

    return Broken(inner, scores=scores)


def _noise_with_threads(inner: Backend) -> Broken:
    """A sum whose order, and so whose last bit, depends on the number of threads."""

    def attention(q: Floats, k: Bytes, v: Bytes, *, threads: Any = None, **given: Any) -> Floats:
        out = np.array(inner.attention(q, k, v, **given))
        if threads == 2:
            out.flat[0] = np.nextafter(out.flat[0], np.float32(np.inf))
        return out

    return Broken(inner, attention=attention)


def _stale_scratch(inner: Backend) -> Broken:
    """The last value of the call before leaks into one head of a call on fewer tokens."""
    held = [0, 0.0]

    def attention(q: Floats, k: Bytes, v: Bytes, **given: Any) -> Floats:
        out = np.array(inner.attention(q, k, v, **given))
        before, leak = held
        held[:] = len(k), float(out.flat[-1])
        if len(k) < before:
            out[:, 0, 0] += np.float32(leak)
        return out

    return Broken(inner, attention=attention)


def _ignores_strides(inner: Backend) -> Broken:
    """Reads any buffer as if it were token-major."""

    def flat(b: Bytes) -> Bytes:
        return b if b.flags.c_contiguous else np.swapaxes(b, 0, 1).reshape(b.shape)

    def attention(q: Floats, k: Bytes, v: Bytes, **given: Any) -> Any:
        return inner.attention(q, flat(k), flat(v), **given)

    return Broken(inner, attention=attention)


def _k_as_v(inner: Backend) -> Broken:
    def attention(q: Floats, k: Bytes, v: Bytes, **given: Any) -> Any:
        return inner.attention(q, k, k, **given)

    return Broken(inner, attention=attention)


def _next_row(fmt: Format, blocks: Bytes) -> Bytes:
    return np.roll(blocks, 1, axis=0)


def _wider(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"window": given["window"] + 1}


def _narrower(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"window": max(1, given["window"] - 1)}


def _scale_of_one(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"v_scale": np.ones_like(given["v_scale"])}


def _key_scale_of_one(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"k_scale": np.ones_like(given["k_scale"])}


def _position_plus_one(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"position": given["position"] + 1} if "position" in given else given


def _offsets(spoil: Callable[[Floats], Floats]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        return given | {"offsets": spoil(given["offsets"])} if "offsets" in given else given

    return change


def _without_maximum(inner: Backend) -> Broken:
    """A log-sum-exp that is the log of the sum relative to the largest score."""

    def attention(q: Floats, k: Bytes, v: Bytes, *, return_lse: bool = False, **given: Any) -> Any:
        if not return_lse or not len(k):
            return inner.attention(q, k, v, return_lse=return_lse, **given)
        out, lse = inner.attention(q, k, v, return_lse=True, **given)
        scores = inner.scores(format_named(given["key"]), q, k, scale=given["k_scale"])
        return out, lse - scores.max(axis=-1) / np.float32(np.sqrt(q.shape[-1]))

    return Broken(inner, attention=attention)


def _lse_of_powers_of_two(inner: Backend) -> Broken:
    """A log-sum-exp in the base that kernels compute in."""

    def attention(q: Floats, k: Bytes, v: Bytes, *, return_lse: bool = False, **given: Any) -> Any:
        got = inner.attention(q, k, v, return_lse=return_lse, **given)
        return (got[0], got[1] / np.float32(np.log(2))) if return_lse else got

    return Broken(inner, attention=attention)


# ---- tiles -------------------------------------------------------------------------------------


def packing(spoil: Callable[[Format, Bytes], Bytes]) -> Build:
    """Spoil rows on their way into tiles."""

    def build(inner: Backend) -> Broken:
        def pack(fmt: Format, side: str, rows: Bytes, buffer: Bytes, at: int) -> None:
            inner.pack(fmt, side, spoil(fmt, rows), buffer, at)

        return Broken(inner, pack=pack)

    return build


def _sides_exchanged(inner: Backend) -> Broken:
    """Keys laid out as values are and values as keys, there and back."""
    other = {"key": "value", "value": "key"}

    def pack(fmt: Format, side: str, rows: Bytes, buffer: Bytes, at: int) -> None:
        inner.pack(fmt, other[side], rows, buffer, at)

    def unpack(fmt: Format, side: str, buffer: Bytes, first: int, n: int) -> Bytes:
        return inner.unpack(fmt, other[side], buffer, first, n)

    return Broken(inner, pack=pack, unpack=unpack)


def _neighbouring_slots(inner: Backend) -> Broken:
    """Every token in the slot of its neighbour, there and back."""

    def pack(fmt: Format, side: str, rows: Bytes, buffer: Bytes, at: int) -> None:
        for t in range(len(rows)):
            inner.pack(fmt, side, rows[t : t + 1], buffer, (at + t) ^ 1)

    def unpack(fmt: Format, side: str, buffer: Bytes, first: int, n: int) -> Bytes:
        slots = [first + t ^ 1 for t in range(n)]
        return np.concatenate([inner.unpack(fmt, side, buffer, slot, 1) for slot in slots])

    return Broken(inner, pack=pack, unpack=unpack)


def _clears_the_tile(inner: Backend) -> Broken:
    """Writing a row takes the other tokens of its tile along."""

    def pack(fmt: Format, side: str, rows: Bytes, buffer: Bytes, at: int) -> None:
        buffer[:, at // tiles.TOKENS] = 0
        inner.pack(fmt, side, rows, buffer, at)

    return Broken(inner, pack=pack)


def _leaves_out_the_last(inner: Backend) -> Broken:
    """The last of several rows is not written."""

    def pack(fmt: Format, side: str, rows: Bytes, buffer: Bytes, at: int) -> None:
        inner.pack(fmt, side, rows[:-1] if len(rows) > 1 else rows, buffer, at)

    return Broken(inner, pack=pack)


def _packs_past_the_end(inner: Backend) -> Broken:
    def pack(fmt: Format, side: str, rows: Bytes, buffer: Bytes, at: int) -> None:
        inner.pack(fmt, side, rows, buffer, at)
        size = buffer[0].size
        np.lib.stride_tricks.as_strided(buffer[-1], (size + 1,), (1,))[-1] = 0

    return Broken(inner, pack=pack)


def _packs_nan(inner: Backend) -> Broken:
    """Rows with a stored scale that is not finite are taken, with a scale of 0."""

    def pack(fmt: Format, side: str, rows: Bytes, buffer: Bytes, at: int) -> None:
        b, _ = _code_bytes(fmt, rows)
        where = _scale_bytes(fmt)
        b[(b[..., where][..., 1] & 0x7C) == 0x7C, where] = 0
        inner.pack(fmt, side, b.reshape(rows.shape), buffer, at)

    return Broken(inner, pack=pack)


def over_tiles(spoil: Callable[[tiles.Tiles], tiles.Tiles]) -> Build:
    """A backend that holds caches in tiles, and spoils what attention over them reads."""

    def build(inner: Backend) -> Broken:
        def attention(q: Floats, k: Any, v: Any, **given: Any) -> Any:
            k, v = (spoil(x) if isinstance(x, tiles.Tiles) else x for x in (k, v))
            return inner.attention(q, k, v, **given)

        return Broken(inner, attention=attention, arranges=inner.arrangement.fit)

    return build


def _codes_and_scales(held: tiles.Tiles) -> tuple[tiles.Tiles, Bytes, Bytes]:
    """A copy of tiles, and views of its codes `[heads, tiles, bytes]` and scales `[heads, tiles,
    scales of a row, 64, bytes of a scale]`."""
    copied = replace(held, buffer=held.buffer.copy())
    width = held.format.row_values(held.shape[2])
    end = tiles.TOKENS * width * sum(tiles.PLANES[held.format.name]) // 8
    heads, count, _ = held.buffer.shape
    size = 1 if held.format.name in tcq.CODES else 2
    scales = copied.buffer[..., end:].reshape(heads, count, -1, tiles.TOKENS, size)
    return copied, copied.buffer[..., :end], scales


def _first_slot_ignored(held: tiles.Tiles) -> tiles.Tiles:
    return replace(held, first=0)


def _scales_of_the_next_token(held: tiles.Tiles) -> tiles.Tiles:
    copied, _, scales = _codes_and_scales(held)
    scales[:] = np.roll(scales, 1, axis=-2)
    return copied


def _scales_of_the_next_group(held: tiles.Tiles) -> tiles.Tiles:
    copied, _, scales = _codes_and_scales(held)
    scales[:] = np.roll(scales, 1, axis=-3)
    return copied


def _next_line(held: tiles.Tiles) -> tiles.Tiles:
    """Codes read from the line before: of another quad row, or of another plane."""
    copied, codes, _ = _codes_and_scales(held)
    codes[:] = np.roll(codes, 64, axis=-1)
    return copied


def _tokens_in_order(held: tiles.Tiles) -> tiles.Tiles:
    """The bytes of a word of values read as tokens r, r + 16, r + 32, r + 48."""
    copied, codes, _ = _codes_and_scales(held)
    if held.side == "value":
        words = codes.reshape(*codes.shape[:2], -1, 4)
        codes[:] = words[..., [0, 2, 1, 3]].reshape(codes.shape)
    return copied


def _quads_reversed(held: tiles.Tiles) -> tiles.Tiles:
    """The quad rows of a line of half bytes read from the high bits on."""
    copied, codes, _ = _codes_and_scales(held)
    codes[:] = codes << 4 | codes >> 4
    return copied


def _highest_bits_in_order(held: tiles.Tiles) -> tiles.Tiles:
    """The plane of tcq4's highest bits read as if quad rows lay in it one after the other."""
    copied, codes, _ = _codes_and_scales(held)
    planes = codes.reshape(*codes.shape[:2], -1, 8, 64)  # lines: four, then two, then the path
    bits = planes[..., 4:6, :]
    bits[:] = bits & 0x99 | (bits & 0x22) << 1 | (bits & 0x44) >> 1
    return copied


# Codebook entries, in time order, of a code's m and u on one side of a cache.
Read = Callable[[tcq.Trellis, str, Bytes, Bytes], NDArray[np.float64]]


def over_paths(read: Read) -> Build:
    """A backend that holds caches in tiles and reads trellis formats there in a way of its own."""

    def broken(held: tiles.Tiles) -> Format:
        code, side = tcq.CODES[held.format.name], held.side

        def decode(b: Bytes) -> NDArray[np.float64]:
            m, u, _ = tcq.steps_of(code, b)
            return tcq.rows_of(read(code, side, m, u), b)

        return replace(held.format, decode_blocks=decode)

    def build(inner: Backend) -> Broken:
        def attention(q: Floats, k: Any, v: Any, **given: Any) -> Any:
            if not isinstance(k, tiles.Tiles):
                return inner.attention(q, k, v, **given)
            given |= {"key": broken(k), "value": broken(v)}
            rows = [tiles.unpack(x.format, x.side, x.buffer, x.first, x.n) for x in (k, v)]
            return ReferenceBackend().attention(q, *rows, **given)

        return Broken(inner, attention=attention, arranges=tiles.fit)

    return build


def _path_as_stored(code: tcq.Trellis, side: str, m: Bytes, u: Bytes) -> NDArray[np.float64]:
    return code.values(m, u, np.zeros(len(u), np.uint8))


def _tap_off_by_one(code: tcq.Trellis, side: str, m: Bytes, u: Bytes) -> NDArray[np.float64]:
    """Bit 0 of the subset from path bits one step later."""
    return _path_as_stored(replace(code, taps0=code.taps0 >> 1), side, m, u)


def _path_cut_at_blocks(code: tcq.Trellis, side: str, m: Bytes, u: Bytes) -> NDArray[np.float64]:
    """Every block of keys begins as a row does."""
    if side == "value":
        return _path_as_stored(code, side, m, u)
    starts = range(0, u.shape[-1], 64)
    blocks = [_path_as_stored(code, side, m[:, s : s + 64], u[:, s : s + 64]) for s in starts]
    return np.concatenate(blocks, axis=-1)


def _path_from_other_lanes(code: tcq.Trellis, side: str, m: Bytes, u: Bytes) -> NDArray[np.float64]:
    """The steps before a row of values taken from what lies there."""
    before = 0xFF if side == "value" else 0
    return code.values(m, u, np.full(len(u), before, np.uint8))


def _reads_a_stale_slot(inner: Backend) -> Broken:
    """Attention over tiles sees one slot more than there are rows."""

    def attention(q: Floats, k: Any, v: Any, **given: Any) -> Any:
        if isinstance(k, tiles.Tiles):
            k, v = (replace(x, n=x.n + 1) for x in (k, v))
            given["position"] = len(k) - 1 - len(q)
        return inner.attention(q, k, v, **given)

    return Broken(inner, attention=attention, arranges=inner.arrangement.fit)


# ---- caches ------------------------------------------------------------------------------------


def caches(spoil: Callable[[LayerCache], None], *, tiled: bool = False) -> Build:
    """Spoil the layers of a cache that runs on the backend; `tiled`: one that is held in tiles."""

    def build(inner: Backend) -> Broken:
        held = {"arranges": inner.arrangement.fit} if tiled else {}

        def make_cache(*args: Any, **options: Any) -> KVCache:
            cache = KVCache(*args, **options)
            for layer in cache.owners:
                spoil(layer)
            return cache

        return Broken(inner, make_cache=make_cache, **held)

    return build


def _replace(layer: Any, name: str, method: Callable[..., Any]) -> None:
    setattr(layer, name, method)


def _evicts_one_too_many(layer: LayerCache) -> None:
    def drop() -> None:
        assert layer.window is not None
        layer._start = max(layer._start, layer._end - (layer.window - 2))

    _replace(layer, "_drop_unseen", drop)


def _first_row_lost(layer: LayerCache) -> None:
    append = layer.append

    def spoiled(k: Any, v: Any) -> None:
        append(k, v)
        layer._k.write(0, np.zeros_like(layer._k.read(0, 1)))

    _replace(layer, "append", spoiled)


def _forgets_where_tiles_begin(layer: LayerCache) -> None:
    """After tiles were moved the first row is taken for the first slot's."""
    move = layer._k.move

    def spoiled(first: int, n: int, capacity: int) -> int:
        move(first, n, capacity)
        return 0

    _replace(layer._k, "move", spoiled)


def _keys_for_values(layer: LayerCache) -> None:
    append = layer.append
    _replace(layer, "append", lambda k, v: append(v, k))


def _crops_one_too_few(layer: LayerCache) -> None:
    crop = layer.crop

    def spoiled(length: int) -> None:
        crop(min(length + 1, layer.length))
        layer.length = length

    _replace(layer, "crop", spoiled)


def _scale_of_every_chunk(layer: LayerCache) -> None:
    append = layer.append

    def spoiled(k: Any, v: Any) -> None:
        layer.k_scale = layer.v_scale = None
        append(k, v)

    _replace(layer, "append", spoiled)


def _heads_reversed(layer: LayerCache) -> None:
    attention = layer.attention
    _replace(layer, "attention", lambda q, **given: attention(q[:, ::-1], **given))


def _attends_to_decoded_rows(layer: LayerCache) -> None:
    """The right numbers without the kernel: what a silent fallback does."""

    def attention(q: Any, **given: Any) -> Floats:
        f16 = format_named("f16")
        rows = [
            f16.encode(fmt.decode(np.ascontiguousarray(blocks)))
            for fmt, blocks in ((layer.key, layer.k_blocks), (layer.value, layer.v_blocks))
        ]
        out: Floats = np.asarray(
            layer.backend.attention(q, *rows, key="f16", value="f16", window=layer.window)
        )
        return out

    _replace(layer, "attention", attention)


def _query_not_folded(layer: LayerCache) -> None:
    assert layer._means is not None
    _replace(layer._means, "fold", lambda q: q)


def _page_offsets_of_the_next(layer: LayerCache) -> None:
    assert layer._means is not None
    offsets = layer._means.offsets
    shift = functools.partial(np.roll, shift=1, axis=-1)
    _replace(layer._means, "offsets", lambda q, scale: shift(offsets(q, scale)))


def _page_offsets_dropped(layer: LayerCache) -> None:
    assert layer._means is not None
    offsets = layer._means.offsets
    _replace(layer._means, "offsets", lambda q, scale: 0 * offsets(q, scale))


def _sinks_dropped(layer: LayerCache) -> None:
    attend = layer._attend_sinks

    def spoiled(*args: Any) -> tuple[Any, Any]:
        out, lse = attend(*args)
        return out, np.full_like(lse, -np.inf)

    _replace(layer, "_attend_sinks", spoiled)


def _scale_not_divided(layer: LayerCache) -> None:
    assert layer._means is not None
    condition, scale = layer._means.condition, layer._means.layer.scale
    _replace(layer._means, "condition", lambda keys, row: condition(keys, row) * scale)


def _f16_cache(inner: Backend) -> Broken:
    """A cache that holds f16 whatever it was asked for."""

    def make_cache(geometry: Any, key: str, value: str, backend: Any, **more: Any) -> KVCache:
        return KVCache(geometry, "f16", "f16", backend, **more)

    return Broken(inner, make_cache=make_cache)


def _conditioned(kind: str, case: Case, backend: Any, reference: Reference) -> Examination:
    return routes.examine_conditioned(case, backend, reference, kind=kind)


def _route(number: int) -> Callable[[Case, Any, Reference], Examination]:
    def look(case: Case, backend: Any, reference: Reference) -> Examination:
        return routes.examine(routes.ROUTES[number], case.head_dim, "LayerCache", backend)

    return look


# ---- the list ----------------------------------------------------------------------------------


def _scores(name: str, **shape: Any) -> Case:
    return Case(
        "scores", name, **({"n_kv": 33, "n_q": 5, "num_heads": 4, "num_kv_heads": 2} | shape)
    )


def _truth(name: str) -> Case:
    return Case("scores", name, n_kv=TRUTH_KEYS, n_q=TRUTH_QUERIES)


def _fused(name: str, value: str = "", **shape: Any) -> Case:
    whole = {"n_kv": 70, "n_q": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64} | shape
    return Case("attention", name, value or name, **whole)


def _mutants() -> tuple[Mutant, ...]:
    found: list[Mutant] = []

    def add(
        name: str, rules: str, build: Build, *cases: Case, passes: str = "",
        reference: Reference = REFERENCE,
        look: Callable[[Case, Any, Reference], Examination] = examine,
    ) -> None:  # fmt: skip
        for case in cases:
            found.append(
                Mutant(
                    name,
                    case,
                    frozenset(rules.split()),
                    build,
                    reference,
                    frozenset(passes.split()),
                    look,
                )
            )

    four_bit, both = ("q4_0", "tbq4_0", "tq4"), (_scores("tq4"), _fused("tq4"))
    tcqs, stored_start = ("tcq4", "tcq3", "tcq2_64"), ("tcq3_64", "tcq2", "tcq2_64")
    rotated = ("tbq4_0", "tbq3_0", "tq4", "tq3", "tcq3", "tbq3_tcq", "q4_polar")
    signed = tuple(name for name in rotated if name != "q4_polar")
    add("nan_in_one", "finite", outputs(_one_nan), *both, _fused("f16"))
    add("nan_in_all", "finite", outputs(lambda out: out * np.float32(np.nan)), *both)
    add("nan_on_one_lane", "finite", outputs(_nan_lane), *both)
    add("zeros", "parity", outputs(np.zeros_like), *both, _fused("q8_0"))
    add("wrong_dtype", "shape", outputs(lambda out: out.astype(np.float64)), *both)
    add("wrong_shape", "shape", outputs(lambda out: out[:-1]), *both)
    add("no_output", "shape", outputs(lambda out: out[:0]), *both)
    add("stale_output", "parity", _stale, _scores("tq4"), _scores("f16"))
    add("last_row_unwritten", "finite", _into(_all_but_last), _fused("tq4"))
    add("last_value_unwritten", "finite", _into(_all_but_last_value), _fused("tq4"))
    add("last_head_unwritten", "finite", _into(_all_but_last_head), _fused("tq4"))
    add("writes_past_the_end", "guard", _into(_one_past), _fused("tq4"))
    add("writes_before_the_start", "guard", _into(_one_before), _fused("tq4"))

    add("nibbles_swapped", "parity truth", key_blocks(_swap_nibbles), *map(_truth, four_bit))
    add("stream_shifted", "parity truth", key_blocks(_shift_stream), _truth("tbq3_0"))
    add("planes_swapped", "parity truth", key_blocks(_swap_planes), _truth("tq3"))
    add("turbo3_layout", "parity truth", _turbo3_layout, _truth("tbq3_0"))
    add("two_bit_mask", "parity truth", key_blocks(_two_bits), *map(_truth, four_bit))
    add("residual_always_on", "parity", _as_format(lambda _: format_named("q4_polar_res")),
        _scores("q4_polar"))  # fmt: skip
    add("residual_never", "parity", _as_format(lambda _: format_named("q4_polar")),
        _scores("q4_polar_res"))  # fmt: skip
    add("sign_plane_shifted", "parity truth", key_blocks(_rolled_bits(0, 256, 1)),
        _truth("qjl1_256"))  # fmt: skip
    add("signs_and_norm_exchanged", "parity truth", key_blocks(_exchange_signs_and_norm),
        _truth("qjl1_256"))  # fmt: skip
    add("path_shifted", "parity truth", key_blocks(_shift_path), *map(_truth, tcqs))
    add("start_state_ignored", "parity", _started_at_ones, *map(_scores, tcqs))
    add("start_state_ignored", "parity", key_blocks(_no_start), _scores("tbq3_tcq"))
    add("start_state_ignored", "parity", key_blocks(_path_from_zero), *map(_scores, stored_start))
    add("trellis_state_shifted", "parity truth", key_blocks(_rolled_bits(16, 408, 3)),
        _truth("tbq3_tcq"))  # fmt: skip
    add("codebook_of_another_digest", "parity truth", _as_format(_other_codebook),
        _truth("tbq3_tcq"))  # fmt: skip
    add("log_unit_off_by_one", "parity slope", key_blocks(_next_unit), *map(_truth, tcqs))
    add("log_unit_off_by_one_in_reference_too", "slope", key_blocks(_next_unit),
        *map(_truth, tcqs), passes="parity truth", reference=BlockReference())  # fmt: skip
    add("wrong_projection", "parity truth", _by_projection("fixture"), _truth("qjl1_256"))
    add("wrong_projection_in_reference_too", "truth slope", _by_projection("fixture"),
        _truth("qjl1_256"), passes="parity", reference=ProjectionReference())  # fmt: skip
    for label, first, last in (("w1_omitted", 0, 2), ("w2_omitted", 1, 0), ("w1_w2_swapped", 2, 1)):
        spoil = _respun(first, last)
        add(label, "parity truth", queries(spoil), _truth("tbq3_tcq"))
        add(f"{label}_in_reference_too", "truth", queries(spoil), _truth("tbq3_tcq"),
            passes="parity", reference=QueryReference(spoil))  # fmt: skip
        add(f"{label}_in_encoder", "bytes", _turned_encoder(spoil), Case("encode", "tbq3_tcq"))
    several = (("q8_0", 128), ("tbq4_0", 128), ("q4_polar", 256), ("tbq3_tcq", 256),
               ("qjl1_256", 256), ("tq4", 128), ("tcq3", 128))  # fmt: skip
    for name, n in several:
        add("norm_of_another_block", "parity", key_blocks(_scale_of_the_next),
            _scores(name, head_dim=n))  # fmt: skip
        add("norm_stored_for_another_block", "bytes", encoder(_scale_of_the_next_row),
            Case("encode", name, head_dim=n))  # fmt: skip
    for name in ("q8_0", "tbq3_0", "q4_polar", "qjl1_256", "tq4", "tcq3"):
        add("last_block_skipped", "parity truth", queries(_skips_last_block), _truth(name))
    scaled = ("q8_0", "q4_0", "tbq4_0", "tbq3_0", "tq4", "tq3", "q4_polar", "tbq3_tcq", "qjl1_256")
    add("scale_big_endian", "parity", key_blocks(_big_endian_scale), *map(_scores, scaled))
    add("scale_dropped", "parity", key_blocks(_no_scale), *map(_scores, scaled))
    add("row_off_by_one", "parity", key_blocks(_next_row), *both, _scores("f16"))

    for name in rotated:
        add("query_not_rotated", "parity truth", queries(_unturned), _truth(name))
        add(
            "query_not_rotated_in_reference_too", "truth", queries(_unturned), _truth(name),
            passes="parity", reference=QueryReference(),
        )  # fmt: skip
        if name in signed:
            add("signs_omitted", "parity truth", queries(_unsigned), _truth(name))
            add(
                "signs_omitted_in_reference_too", "truth", queries(_unsigned), _truth(name),
                passes="parity", reference=QueryReference(_unsigned),
            )  # fmt: skip
            add("signs_omitted_in_encoder", "bytes", encoder(_unsigned_encoder),
                Case("encode", name))  # fmt: skip
        add("root_n_factor", "parity slope", queries(_unscaled), _truth(name))
        add(
            "root_n_factor_in_reference_too", "slope", queries(_unscaled), _truth(name),
            passes="parity truth", reference=QueryReference(_unscaled),
        )  # fmt: skip
        add("output_not_unrotated", "parity", _output_not_unrotated,
            _fused(name, head_dim=128))  # fmt: skip

    many: dict[str, Any] = {"n_kv": 800, "num_kv_heads": 1}  # 102 400 values: few codes change
    add("encoder_uses_rounded_scale", "bytes", encoder(_rounded_scale),
        Case("encode", "q8_0", **many), Case("encode", "tbq4_0", **many))  # fmt: skip
    add("last_row_not_encoded", "bytes", encoder(_last_row_empty), Case("encode", "tq4"))
    add("append_differs_from_bulk", "append", encoder(_single_row_differs),
        Case("encode", "tq4"), Case("encode", "f16"), passes="bytes")  # fmt: skip
    add(
        "nan_encoded",
        "refusal",
        encoder(_accepts_nan),
        Case("encode", "tq4"),
        Case("encode", "f16"),
    )
    add("stored_nan_decoded", "refusal", _decodes_nan_scale, Case("decode", "q8_0"),
        Case("decode", "tq4"))  # fmt: skip
    add("zero_row_not_zero", "zero", _zero_is_tiny, Case("decode", "tq4", inputs="some_zero"))
    add("shadow_copy_read", "floor truth", _shadow_copy, Case("decode", "tq4", n_kv=TRUTH_KEYS),
        passes="parity", reference=_SHADOW)  # fmt: skip

    add("wrong_kv_head", "parity", _wrong_gqa, *both, _fused("f16", num_heads=9, num_kv_heads=3),
        _scores("qjl1_256", num_heads=8, num_kv_heads=2),
        _fused("qjl1_256", "tbq3_0", head_dim=128))  # fmt: skip
    add("no_causal_mask", "parity", options(lambda g: g | {"causal": False}), _fused("tq4"))
    add("causal_one_too_many", "parity", _sees(1), _fused("tq4"), _fused("f16"))
    add("causal_one_too_few", "parity", _sees(-1), _fused("tq4"), _fused("f16"))
    windowed = (_fused("tq4", window=16), _fused("f16", window=16, n_q=1))
    add("window_ignored", "parity", options(lambda g: g | {"window": None}), *windowed)
    add("window_one_too_wide", "parity", options(_wider), *windowed)
    add("window_one_too_narrow", "parity", options(_narrower), *windowed)
    add("softmax_without_max", "finite", _no_max, _fused("tq4", inputs="sharp"),
        _fused("f16", inputs="sharp"))  # fmt: skip
    add("merge_without_rescaling", "parity", _merge_without_rescaling,
        *(_fused(name, n_q=1, n_kv=600, inputs="ramp") for name in ("tq4", "f16")))  # fmt: skip
    add(
        "half_precision_sums", "parity", _half_sums, *map(_scores, ("f16", "q8_0", "tbq4_0", "tq4"))
    )
    add("threads_change_the_sum", "threads", _noise_with_threads, _fused("tq4", threads=3))
    add("scratch_left_by_other_calls", "state", _stale_scratch, _fused("tq4"), _fused("q8_0"))
    add("strides_ignored", "strides", _ignores_strides, _fused("tq4"), _fused("q8_0"))
    add("keys_read_as_values", "parity", _k_as_v, _fused("tq4"), _fused("f16"))
    add("fp8_value_scale_dropped", "parity", options(_scale_of_one), _fused("fp8_e4m3"))
    add("fp8_key_scale_dropped", "parity", options(_key_scale_of_one), _fused("fp8_e4m3"))

    sizes: tuple[dict[str, Any], ...] = ({}, {"n_q": 1, "n_kv": 600})
    paged = [
        replace(_fused(name, page=24, phase=37, lse=True), **size)
        for name in ("tq4", "f16")
        for size in sizes
    ]
    placed = [replace(case, position=case.n_kv - 12) for case in paged]
    add("position_off_by_one", "parity", options(_position_plus_one), *placed)
    add("position_ignored", "parity", options(lambda g: g | {"position": None}), *placed)
    add("offset_of_the_next_page", "parity",
        options(_offsets(lambda x: np.roll(x, -1, axis=-1))), *paged)  # fmt: skip
    add("offset_of_the_next_head", "parity",
        options(_offsets(lambda x: np.roll(x, 1, axis=1))), *paged)  # fmt: skip
    add("offsets_in_powers_of_two", "parity",
        options(_offsets(lambda x: x * np.float32(np.log(2)))), *paged)  # fmt: skip
    add("phase_ignored", "parity", options(lambda g: g | {"phase": 0}), *paged)
    add("lse_without_the_maximum", "lse", _without_maximum, *paged, passes="parity")
    add("lse_in_powers_of_two", "lse", _lse_of_powers_of_two, *paged, passes="parity")

    *arranged, two_planes = (
        Case("pack", name, n_kv=70, num_kv_heads=2, head_dim=96)
        for name in ("tcq4", "tq4", "tbq4_0", "tq3")
    )
    add("tiles_neighbouring_slots", "bytes", _neighbouring_slots, *arranged,
        passes="round_trip append")  # fmt: skip
    add("tiles_sides_exchanged", "bytes", _sides_exchanged, *arranged,
        passes="round_trip append")  # fmt: skip
    add("tiles_scale_of_the_next", "bytes round_trip", packing(_scale_of_the_next), *arranged)
    add("tiles_planes_swapped", "bytes round_trip", packing(_swap_planes), two_planes)
    add("tiles_clear_their_neighbours", "bytes append", _clears_the_tile, *arranged)
    add("tiles_lack_the_last_row", "bytes append round_trip", _leaves_out_the_last, *arranged)
    add("tiles_written_past_the_end", "guard", _packs_past_the_end, *arranged)
    add("tiles_hold_nan", "refusal", _packs_nan, *arranged[1:], passes="bytes")
    held = [_fused(name, n_q=n_q, n_kv=n) for name in ("tq4", "tbq4_0") for n_q, n in
            ((5, 70), (1, 150))]  # fmt: skip
    add("tiles_first_slot_ignored", "tiles", over_tiles(_first_slot_ignored), *held,
        passes="parity")  # fmt: skip
    add("tiles_scales_of_the_next_token", "tiles", over_tiles(_scales_of_the_next_token), *held,
        passes="parity")  # fmt: skip
    add("tiles_scales_of_the_next_group", "tiles", over_tiles(_scales_of_the_next_group),
        *held[2:], passes="parity")  # fmt: skip
    add("tiles_line_off_by_one", "tiles", over_tiles(_next_line), *held, _fused("tq3"),
        passes="parity")  # fmt: skip
    add("tiles_tokens_in_order", "tiles", over_tiles(_tokens_in_order), *held, passes="parity")
    add("tiles_quads_reversed", "tiles", over_tiles(_quads_reversed), *held, passes="parity")
    paths = [_fused(name, head_dim=128) for name in ("tcq4", "tcq4_64", "tcq3")]
    add("tiles_highest_bits_in_order", "tiles", over_tiles(_highest_bits_in_order), *paths[:2],
        passes="parity")  # fmt: skip
    for label, read in (
        ("tiles_tap_off_by_one", _tap_off_by_one),
        ("tiles_path_cut_at_blocks", _path_cut_at_blocks),
        ("tiles_path_from_other_lanes", _path_from_other_lanes),
    ):
        add(label, "tiles", over_paths(read), *paths, passes="parity")
    add("tiles_stale_slot_seen", "tiles", _reads_a_stale_slot,
        *(replace(case, causal=False) for case in held), passes="parity")  # fmt: skip

    whole = _fused("tq4", "q8_0", n_q=1)
    same = _fused("tq4", n_q=1)
    short = _fused("tq4", "q8_0", n_q=1, window=16)
    look = routes.examine_cache
    add("cache_evicts_one_too_many", "parity sizes", caches(_evicts_one_too_many), short, look=look)
    add("cache_loses_the_first_row", "parity", caches(_first_row_lost), whole, look=look)
    long, wide = replace(whole, n_kv=150), replace(whole, n_kv=150, window=40)
    add("cache_loses_the_first_row_of_tiles", "parity", caches(_first_row_lost, tiled=True), long,
        look=look)  # fmt: skip
    add("cache_crops_one_too_few_in_tiles", "parity", caches(_crops_one_too_few, tiled=True), long,
        look=look)  # fmt: skip
    add("cache_forgets_where_tiles_begin", "parity",
        caches(_forgets_where_tiles_begin, tiled=True), wide, look=look)  # fmt: skip
    add("cache_keeps_keys_as_values", "parity", caches(_keys_for_values), same, look=look)
    add("cache_crops_one_too_few", "parity", caches(_crops_one_too_few), whole, look=look)
    add("cache_scales_by_chunk", "parity", caches(_scale_of_every_chunk),
        _fused("fp8_e4m3", n_q=1), look=look)  # fmt: skip
    add("cache_reverses_heads", "parity", caches(_heads_reversed), whole, look=look)
    add("cache_attends_to_decoded_rows", "witness", caches(_attends_to_decoded_rows), whole,
        look=look)  # fmt: skip
    add("cache_holds_f16", "sizes witness", _f16_cache, whole, look=look)
    treated = _fused("tq4", "f16", n_q=1)
    for kind in KINDS:
        look = functools.partial(_conditioned, kind)
        add("condition_scale_not_folded_into_query", "truth", caches(_query_not_folded), treated,
            look=look)  # fmt: skip
        add("condition_scale_not_divided_out", "truth", caches(_scale_not_divided), treated,
            look=look)  # fmt: skip
        add("sinks_dropped", "truth", caches(_sinks_dropped), treated, look=look)
        if kind != "static":  # one mean is common to all keys and cancels in the softmax
            add("page_offsets_dropped", "truth", caches(_page_offsets_dropped), treated, look=look)
            add("page_offsets_of_the_next", "truth", caches(_page_offsets_of_the_next), treated,
                look=look)  # fmt: skip
    for number in (1, 7):
        route = routes.ROUTES[number]
        shown = Case("attention", route.key, route.value, num_heads=4, num_kv_heads=2, n_kv=8)
        add("route_attends_to_decoded_rows", "witness", caches(_attends_to_decoded_rows), shown,
            look=_route(number))  # fmt: skip
        add("route_holds_f16", "sizes", _f16_cache, shown, look=_route(number))
    return tuple(found)


MUTANTS = _mutants()
