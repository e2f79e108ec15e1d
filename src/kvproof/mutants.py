"""Kernels broken on purpose. The gate is trusted only while each one fails by the rule it names.

A mutant wraps a working backend and spoils one thing: an input, an output or the bytes. Where a
defect is shared by kernel and reference, so that parity cannot see it, the mutant brings the
spoiled reference too and only truth may catch it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.backends import Backend
from kvproof.cases import Case, Floats
from kvproof.formats import Format
from kvproof.formats import get as format_named
from kvproof.rotation import Rotation
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
    true_scores,
)

Bytes = NDArray[np.uint8]


class Broken:
    """A backend with some methods replaced; everything else is the inner backend's."""

    def __init__(self, inner: Backend, **methods: Callable[..., Any]) -> None:
        self._inner = inner
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

    def examine(self, backend: Backend) -> Examination:
        """The gate's examination of the broken backend."""
        return examine(self.case, self.build(backend), self.reference)

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
    return b, slice(2, None) if fmt.block_size else slice(0, -2)


def _scale_bytes(fmt: Format) -> slice:
    return slice(0, 2) if fmt.block_size else slice(-2, None)


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
    swapped[(swapped[..., 1] & 0x7C) == 0x7C] = 0  # not the NaNs: those the kernel refuses
    b[..., at] = swapped
    return b.reshape(blocks.shape)


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


# ---- the list ----------------------------------------------------------------------------------


def _scores(name: str, **shape: Any) -> Case:
    return Case(
        "scores", name, **({"n_kv": 33, "n_q": 5, "num_heads": 4, "num_kv_heads": 2} | shape)
    )


def _truth(name: str) -> Case:
    return Case("scores", name, n_kv=TRUTH_KEYS, n_q=TRUTH_QUERIES)


def _fused(name: str, **shape: Any) -> Case:
    whole = {"n_kv": 70, "n_q": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64} | shape
    return Case("attention", name, name, **whole)


def _mutants() -> tuple[Mutant, ...]:
    found: list[Mutant] = []

    def add(
        name: str, rules: str, build: Build, *cases: Case, passes: str = "",
        reference: Reference = REFERENCE,
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
                )
            )

    four_bit, both = ("q4_0", "tbq4_0", "tq4"), (_scores("tq4"), _fused("tq4"))
    rotated = ("tbq4_0", "tbq3_0", "tq4", "tq3")
    add("nan_in_one", "finite", outputs(_one_nan), *both, _fused("f16"))
    add("nan_in_all", "finite", outputs(lambda out: out * np.float32(np.nan)), *both)
    add("zeros", "parity", outputs(np.zeros_like), *both, _fused("q8_0"))
    add("wrong_dtype", "shape", outputs(lambda out: out.astype(np.float64)), *both)
    add("wrong_shape", "shape", outputs(lambda out: out[:-1]), *both)
    add("no_output", "shape", outputs(lambda out: out[:0]), *both)
    add("stale_output", "parity", _stale, _scores("tq4"), _scores("f16"))
    add("last_row_unwritten", "finite", _into(_all_but_last), _fused("tq4"))
    add("last_head_unwritten", "finite", _into(_all_but_last_head), _fused("tq4"))
    add("writes_past_the_end", "guard", _into(_one_past), _fused("tq4"))
    add("writes_before_the_start", "guard", _into(_one_before), _fused("tq4"))

    add("nibbles_swapped", "parity truth", key_blocks(_swap_nibbles), *map(_truth, four_bit))
    add("stream_shifted", "parity truth", key_blocks(_shift_stream), _truth("tbq3_0"))
    add("planes_swapped", "parity truth", key_blocks(_swap_planes), _truth("tq3"))
    add("turbo3_layout", "parity truth", _turbo3_layout, _truth("tbq3_0"))
    scaled = ("q8_0", "q4_0", "tbq4_0", "tbq3_0", "tq4", "tq3")
    add("scale_big_endian", "parity", key_blocks(_big_endian_scale), *map(_scores, scaled))
    add("scale_dropped", "parity", key_blocks(_no_scale), *map(_scores, scaled))
    add("row_off_by_one", "parity", key_blocks(_next_row), *both, _scores("f16"))

    for name in rotated:
        add("query_not_rotated", "parity truth", queries(_unturned), _truth(name))
        add(
            "query_not_rotated_in_reference_too", "truth", queries(_unturned), _truth(name),
            passes="parity", reference=QueryReference(),
        )  # fmt: skip
        add("signs_omitted", "parity truth", queries(_unsigned), _truth(name))
        add(
            "signs_omitted_in_reference_too", "truth", queries(_unsigned), _truth(name),
            passes="parity", reference=QueryReference(_unsigned),
        )  # fmt: skip
        add("signs_omitted_in_encoder", "bytes", encoder(_unsigned_encoder), Case("encode", name))
        add("root_n_factor", "parity slope", queries(_unscaled), _truth(name))
        add(
            "root_n_factor_in_reference_too", "slope", queries(_unscaled), _truth(name),
            passes="parity truth", reference=QueryReference(_unscaled),
        )  # fmt: skip
        add("output_not_unrotated", "parity", _output_not_unrotated, _fused(name))

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

    add("wrong_kv_head", "parity", _wrong_gqa, *both, _fused("f16", num_heads=9, num_kv_heads=3))
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

    paged = [
        _fused(name, page=24, phase=37, lse=True, **shape)
        for name in ("tq4", "f16")
        for shape in ({}, {"n_q": 1, "n_kv": 600})
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
    return tuple(found)


MUTANTS = _mutants()
