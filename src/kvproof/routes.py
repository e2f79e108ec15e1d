"""The nine routes of the public dispatch test, through the entry points that users run.

Keys are encoded by the cache's own append, attention is asked of the cache (or of the function that
transformers calls), and a witness tells which kernels really ran. An operator of scores is read as
attention weights: the values are unit vectors in f16, so the output of token t's vector is its
weight.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.backends import Backend, Step
from kvproof.cache import KVCache, LayerCache
from kvproof.cases import Case, Floats
from kvproof.conditioner import Conditioner, LayerCondition, rope
from kvproof.errors import Refused
from kvproof.formats import Format
from kvproof.formats import get as format_named
from kvproof.geometry import Geometry, LayerGeometry, Source
from kvproof.rules import (
    KERNEL_ERRORS,
    REFERENCE,
    TRUTH,
    Examination,
    Reference,
    attend,
    compare,
    limit_of,
    nmse,
    true_scores,
    within,
)

HEADS, KV_HEADS, TOKENS = 4, 2, 8
WIDTHS = (128, 256, 512)
ENTRIES = ("LayerCache", "transformers")
# These keys are slow waves, which an unsigned Hadamard transform gathers in few values: up to 0.11
# observed (q4_polar), where N(0,1) promises 0.04. A query that is not turned gives above 0.5.
SMOOTH = 0.25
# What sinks in f16, means in f16 and float32 sums add to the error of the format.
CONDITION_ROUNDING = 1e-5


@dataclass(frozen=True)
class Route:
    """A public operator: its formats, and the bytes of 128 stored values as its documents say."""

    name: str
    key: str
    key_bytes: int
    value: str = "f16"
    value_bytes: int = 256
    by_decoding: bool = False  # keys are decoded and multiplied by the query as given

    @property
    def title(self) -> str:
        """The formats, for a person."""
        return self.key if self.value == "f16" else f"{self.key}/{self.value}"


ROUTES = (
    Route("attn_score_qjl", "qjl1_256", 34),
    Route("attn_score_tbq turbo3", "tbq3_0", 4 * 14),
    Route("attn_score_tbq turbo4", "tbq4_0", 4 * 18),
    Route("attn_score_tbq turbo3_tcq", "tbq3_tcq", 52),
    Route("attn_score_polar", "q4_polar", 82, by_decoding=True),
    Route("attn_score_polar residual", "q4_polar_res", 82, by_decoding=True),
    Route("attn_score_polar_preht", "q4_polar", 82),
    Route("attn_score_polar_preht residual", "q4_polar_res", 82),
    Route("fused_attn_qjl_tbq", "qjl1_256", 34, "tbq3_0", 4 * 14),
)


def lacking(entry: str) -> str | None:
    """Why an entry point cannot be tried here, or None."""
    if entry != "transformers":
        return None
    missing = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
    if missing:
        return (
            f"needs {' and '.join(missing)}, not installed here: pip install "
            "'kvproof[transformers]'"
        )
    try:
        import kvproof.engines.packed  # noqa: F401
    except Refused as refused:
        return str(refused)
    return None


def refused(route: Route, n: int, backend: Backend) -> str | None:
    """Why a backend cannot run a route, or None."""
    for name in (route.key, route.value):
        for op in ("encode", "attention"):
            reason = backend.refuses(op, format_named(name), n)
            if reason:
                return reason
    return None


def inputs(route: Route, n: int) -> tuple[Floats, Floats, Floats]:
    """Deterministic q `[1, 4, n]`, k and v `[8, 2, n]` (gate.md section 3, with n for its 128)."""
    i = np.arange(n)
    row = (np.arange(KV_HEADS) * TOKENS + np.arange(TOKENS)[:, None])[..., None]
    k = 0.6 * np.sin(0.017 * (row * n + i)) + 0.2 * np.cos(0.071 * (i + 3 * row))
    h = np.arange(HEADS)[:, None]
    q = np.cos(0.031 * (h * n + i)) - 0.3 * np.sin(0.047 * i)
    if route.value == "f16":
        v = np.broadcast_to(np.eye(TOKENS, n)[:, None], (TOKENS, KV_HEADS, n))
    else:
        v = 0.5 * np.cos(0.013 * (row * n + i)) - 0.3 * np.sin(0.059 * (i + 5 * row))
    return q[None].astype(np.float32), k.astype(np.float32), v.astype(np.float32)


class Recording:
    """A backend that notes which operations were asked of it, on which formats."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, fmt: Format, x: Any, scale: Any = None, **more: Any) -> NDArray[np.uint8]:
        """As the inner backend."""
        self.asked[f"encode {fmt.name}"] += 1
        return self._inner.encode(fmt, x, scale, **more)

    def decode(self, fmt: Format, blocks: Any, scale: Any = None) -> NDArray[np.float32]:
        """As the inner backend."""
        self.asked[f"decode {fmt.name}"] += 1
        return self._inner.decode(fmt, blocks, scale)

    def attention(self, q: Any, k: Any, v: Any, **given: Any) -> Any:
        """As the inner backend."""
        names = [format_named(given[side]).name for side in ("key", "value")]
        self.asked[f"attention {'/'.join(names)} on {len(k)}"] += 1
        return self._inner.attention(q, k, v, **given)

    def step(self, key: Format, value: Format, *shape: Any, **given: Any) -> Any:
        """As the inner backend; its calls are noted as those that they take the place of."""
        inner = self._inner.step(key, value, *shape, **given)
        return None if inner is None else _RecordingStep(inner, key, value, self.asked)


class _RecordingStep:
    def __init__(self, inner: Step, key: Format, value: Format, asked: Counter[str]) -> None:
        self._inner, self._key, self._value, self._asked = inner, key, value, asked

    def append(self, *arrays: Any) -> bool:
        self._asked[f"encode {self._key.name}"] += 1
        self._asked[f"encode {self._value.name}"] += 1
        return self._inner.append(*arrays)

    def attend(self, threads: int | None, q: Any, keys: Any, values: Any, at: int, n: int,
               *rest: Any) -> bool:  # fmt: skip
        self._asked[f"attention {self._key.name}/{self._value.name} on {n}"] += 1
        return self._inner.attend(threads, q, keys, values, at, n, *rest)


def _cache(case: Case, backend: Any, **options: Any) -> KVCache:
    """The cache of a model of one layer, of the shape and formats of a case.

    A backend that brings `make_cache` (mutants.py) has it make the cache.
    """
    layer = LayerGeometry(
        0, case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim_v or case.head_dim,
        case.window, None,
    )  # fmt: skip
    source = Source(Path("gate"), "config", {}, {})
    geometry = Geometry("gate", (layer,), None, None, None, None, source)
    make = getattr(backend, "make_cache", KVCache)
    cache: KVCache = make(geometry, case.key, case.value or case.key, backend, **options)
    return cache


def _by_layer(cache: KVCache, q: Floats, k: Floats, v: Floats) -> Any:
    cache.layer(0).append(k, v)
    return cache.layer(0).attention(q)


def _by_transformers(cache: KVCache, q: Floats, k: Floats, v: Floats) -> Any:
    """What a model of transformers does with attention "kvproof": update, then the function
    registered under that name."""
    import torch
    from transformers import AttentionInterface

    from kvproof.engines import packed

    packed.register()
    function = AttentionInterface()[packed.ATTENTION]
    held = packed.PackedCache(cache)
    keys, values = (torch.from_numpy(x.transpose(1, 0, 2)[None].copy()) for x in (k, v))
    keys, values = held.update(keys, values, 0)
    query = torch.from_numpy(q.transpose(1, 0, 2)[None].copy())
    module = torch.nn.Module().eval()
    out, _ = function(module, query, keys, values, None, scaling=q.shape[-1] ** -0.5)
    return out[0].numpy()


def examine(route: Route, n: int, entry: str, backend: Backend) -> Examination:
    """Row sizes, witness, parity and truth of a route at head_dim n through an entry point."""
    case = Case(
        "attention", route.key, route.value, head_dim=n, num_heads=HEADS, num_kv_heads=KV_HEADS,
        n_kv=TOKENS,
    )  # fmt: skip
    exam = Examination(case)
    exam.expected = HEADS * n
    q, k, v = inputs(route, n)
    recording = Recording(backend)
    cache = _cache(case, recording)
    layer = cache.layer(0)
    for side, blocks, size in (
        ("key", layer.k_blocks, route.key_bytes), ("value", layer.v_blocks, route.value_bytes),
    ):  # fmt: skip
        want = size * n // 128
        found = blocks.shape[-1]
        exam.note("sizes", found == want, f"{side} rows of {found} bytes, expected {want}")
    if exam.rules_failed:
        return exam
    try:
        reach = _by_layer if entry == "LayerCache" else _by_transformers
        got = np.asarray(reach(cache, q, k, v))
        rows = _decoded(route, layer, recording) if route.by_decoding else None
    except KERNEL_ERRORS as error:
        exam.note("crash", False, f"{type(error).__name__}: {error}")
        return exam
    _witness(exam, route, n, layer, recording, backend)
    if not exam.note("shape", got.shape == q.shape, f"output {got.shape}, expected {q.shape}"):
        return exam
    key, value = format_named(route.key), format_named(route.value)
    stored = REFERENCE.scores(key, q, layer.k_blocks, None)
    want_out = attend(case, stored, REFERENCE.rows(value, layer.v_blocks, None))
    parity = compare(exam, "parity", got, want_out, limit_of(case))
    if rows is not None:
        plain_out = attend(case, true_scores(q, rows), REFERENCE.rows(value, layer.v_blocks, None))
        exam.expected += plain_out.size
        compare(exam, "parity", plain_out, want_out, limit_of(case))
        wrong, limit = nmse(got, plain_out), 2 * limit_of(case)
        text = f"cache against decode-then-dot: NMSE {wrong:.1e}, bound {limit:.0e}"
        exam.note("equal", within(wrong, limit), text)
    promised = TRUTH[key.name][1] + TRUTH[value.name][1]
    if parity and promised < 0.2:  # a sketch of one bit says too little of eight tokens
        truth = attend(case, true_scores(q, k), v)
        wrong, limit = nmse(got, truth), max(4.0 * promised, SMOOTH)
        exam.most("output_error", wrong)
        exam.note("truth", within(wrong, limit), f"output error {wrong:.2e}, bound {limit:.1e}")
    return exam


def _decoded(route: Route, layer: LayerCache, recording: Recording) -> NDArray[np.float32]:
    return np.asarray(recording.decode(format_named(route.key), layer.k_blocks))


def _witness(
    exam: Examination,
    route: Route,
    n: int,
    layer: LayerCache,
    recording: Recording,
    backend: Backend,
) -> None:
    """The kernels that the layer counted, and the calls that reached the backend, are exactly the
    route's: neither another format nor another path."""
    key, value = format_named(route.key), format_named(route.value)
    ops = ("encode", _attention_of(backend, key, value, n, n))
    kernels = Counter(backend.kernel(op, fmt, n) for op in ops for fmt in (key, value))
    ran = dict(layer.calls)
    exam.note("witness", ran == dict(kernels), f"kernels counted {ran}, expected {dict(kernels)}")
    calls = Counter({f"attention {key.name}/{value.name} on {TOKENS}": 1})
    calls.update(f"encode {fmt.name}" for fmt in (key, value))
    if route.by_decoding:
        calls[f"decode {key.name}"] += 1
    asked = dict(recording.asked)
    exam.note("witness", asked == dict(calls), f"calls {asked}, expected {dict(calls)}")


def _attention_of(backend: Backend, key: Format, value: Format, dim_k: int, dim_v: int) -> str:
    """Name of the operation by which a cache of this pair attends."""
    return "attention_tiles" if backend.arranges(key, value, dim_k, dim_v) else "attention"


# ---- a cache over its life -----------------------------------------------------------------------

CUTS = (0, 5, 6, 7, 30)  # tokens after which a chunk ends: single tokens and longer ones
LATE_CUT = 131  # and in a cache of more than one tile, after which a window moves
CROPPED = 10  # tokens taken back at the end and written again, other ones


def examine_cache(case: Case, backend: Backend, reference: Reference = REFERENCE) -> Examination:
    """A cache filled in chunks, with attention after each, and cropped and filled again.

    Parity with attention on rows encoded at once; the bytes held; the kernels that ran. The case
    gives formats, shape, window and number of tokens.
    """
    case = replace(case, n_q=case.n_kv)
    exam = Examination(case)
    arrays = case.arrays()
    q, k, v = arrays.q, arrays.k, arrays.v
    n = case.n_kv
    ends = [*CUTS, *([LATE_CUT] if n > LATE_CUT else []), n]
    recording = Recording(backend)
    try:
        cache = _cache(case, recording)
        layer = cache.layer(0)
        exam.expected += n * case.num_heads * v.shape[-1]
        outs = []
        for a, b in itertools.pairwise(ends):
            layer.append(k[a:b], v[a:b])
            outs.append(np.asarray(layer.attention(q[a:b])))
            layer.evict()
        _held(exam, case, layer)
        _ran(exam, case, layer, recording, len(ends) - 1, backend)
        got = np.concatenate(outs)
        _as_encoded_at_once(exam, case, layer, q, k, v, got, backend, reference)
        if case.window is None:
            k, v = k.copy(), v.copy()
            k[-CROPPED:], v[-CROPPED:] = -k[:CROPPED], -v[:CROPPED]
            layer.crop(n - CROPPED)
            layer.append(k[-CROPPED:], v[-CROPPED:])
            got = np.concatenate([got[:-CROPPED], np.asarray(layer.attention(q[-CROPPED:]))])
            exam.expected += got.size
            _as_encoded_at_once(exam, case, layer, q, k, v, got, backend, reference)
    except KERNEL_ERRORS as error:
        exam.note("crash", False, f"{type(error).__name__}: {error}")
    return exam


def _as_encoded_at_once(
    exam: Examination,
    case: Case,
    layer: LayerCache,
    q: Floats,
    k: Floats,
    v: Floats,
    got: NDArray[np.float32],
    backend: Backend,
    reference: Reference,
) -> None:
    key, value = format_named(case.key), format_named(case.value or case.key)
    if not exam.note("shape", got.shape == (*q.shape[:2], v.shape[-1]), f"output {got.shape}"):
        return
    stored = reference.scores(key, q, backend.encode(key, k, layer.k_scale), layer.k_scale)
    rows = reference.rows(value, backend.encode(value, v, layer.v_scale), layer.v_scale)
    compare(exam, "parity", got, attend(case, stored, rows), limit_of(case))


def _held(exam: Examination, case: Case, layer: LayerCache) -> None:
    """The bytes of the rows in use are those of the formats asked for, and buffers hold little
    more."""
    rows = case.n_kv if case.window is None else min(case.n_kv, case.window - 1)
    row = sum(
        format_named(name).row_bytes(n)
        for name, n in (
            (case.key, case.head_dim), (case.value or case.key, case.head_dim_v or case.head_dim),
        )
    )  # fmt: skip
    want = rows * case.num_kv_heads * row
    used, room = layer.used_bytes, layer.nbytes
    exam.note("sizes", used == want, f"{used} bytes in use, expected {want}")
    most = 2 * want + 128 * case.num_kv_heads * row
    exam.note("sizes", used <= room <= most, f"{room} bytes of buffers, at most {most}")


def _ran(
    exam: Examination,
    case: Case,
    layer: LayerCache,
    recording: Recording,
    chunks: int,
    backend: Backend,
) -> None:
    key, value = format_named(case.key), format_named(case.value or case.key)
    wide = case.head_dim_v or case.head_dim
    kernels: Counter[str] = Counter()
    for op in ("encode", _attention_of(backend, key, value, case.head_dim, wide)):
        kernels[backend.kernel(op, key, case.head_dim)] += chunks
        kernels[backend.kernel(op, value, wide)] += chunks
    ran = dict(layer.calls)
    exam.note("witness", ran == dict(kernels), f"kernels counted {ran}, expected {dict(kernels)}")
    asked = sum(
        count
        for call, count in recording.asked.items()
        if call.startswith(f"attention {key.name}/{value.name} ")
    )
    exam.note("witness", asked == chunks, f"{asked} attention calls, expected {chunks}")


# ---- a cache with conditioned keys and sinks -----------------------------------------------------

CONDITION_PAGE, CONDITION_SINKS = 16, 4


def _offset_keys(case: Case, kind: str) -> tuple[Floats, Floats, Floats, LayerCondition]:
    """q, k, v and the condition of keys with large means, and spreads over four decades.

    Some channels are dead: one mean, no spread. Queries are as large as the spreads are small, as
    models have them. Rotary keys turn with their position; their large means are in slow pairs.
    """
    rng = np.random.default_rng([case.seed, case.head_dim, case.n_kv, len(kind)])
    n, heads, d = case.n_kv, case.num_kv_heads, case.head_dim
    m = d // 2
    spread = np.tile(10.0 ** rng.uniform(-2, 2, (heads, m)), 2)
    turns = 10000.0 ** (-np.arange(m) / m) if kind == "rope" else np.empty(0)
    mean = 10.0 * spread * rng.standard_normal((heads, d))
    if kind == "rope":
        mean *= np.tile(turns * CONDITION_PAGE < 0.1, 2)
    dead = rng.permutation(m)[:3]
    noise = spread * rng.standard_normal((n, heads, d))
    noise[..., dead] = noise[..., dead + m] = 0
    k = rope(mean + noise, np.arange(n), turns) if kind == "rope" else mean + noise
    group = case.num_heads // heads
    q = rng.standard_normal((n, case.num_heads, d)) / np.repeat(spread, group, axis=0)
    v = rng.standard_normal((n, heads, case.head_dim_v or d))
    condition = LayerCondition(mean.astype(np.float32), spread.astype(np.float32), turns)
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), condition


def examine_conditioned(
    case: Case, backend: Backend, reference: Reference = REFERENCE, *, kind: str
) -> Examination:
    """A cache with conditioned keys and sinks against attention on the float rows.

    The error is bounded by what the format promises on N(0,1): without the condition every code is
    spent on the means. One pass and chunks agree; the bytes held are those of the formats.
    """
    case = replace(case, n_q=case.n_kv)
    exam = Examination(case)
    q, k, v, condition = _offset_keys(case, kind)
    key, value = format_named(case.key), format_named(case.value or case.key)
    conditioner = Conditioner(kind, CONDITION_PAGE, {0: condition}, tokens=1)
    want = attend(case, true_scores(q, k), v)
    promised = TRUTH[key.name][1] + TRUTH[value.name][1]
    # A scale fixed by the first rows is a poor one for those that follow: up to 5 times observed.
    limit = (10.0 if key.scaled else 1.0) * promised + CONDITION_ROUNDING
    outs = []
    for ends in ((0, case.n_kv), (*CUTS, case.n_kv)):
        exam.expected += want.size
        try:
            cache = _cache(case, backend, conditioner=conditioner, sinks=CONDITION_SINKS)
            layer, parts = cache.layer(0), []
            for a, b in itertools.pairwise(ends):
                layer.append(k[a:b], v[a:b])
                parts.append(np.asarray(layer.attention(q[a:b])))
                layer.evict()
            out = np.concatenate(parts)
        except KERNEL_ERRORS as error:
            exam.note("crash", False, f"{type(error).__name__}: {error}")
            return exam
        if not exam.note("shape", out.shape == want.shape, f"output {out.shape}"):
            return exam
        compare(exam, "truth", out, want, limit)
        outs.append(out.astype(np.float64))
    row = key.row_bytes(case.head_dim) + value.row_bytes(case.head_dim_v or case.head_dim)
    held, most = layer.k_blocks.shape[-1] + layer.v_blocks.shape[-1], CONDITION_SINKS
    exam.note("sizes", held == row, f"rows of {held} bytes, expected {row}")
    exam.note("sizes", layer.sinks_held == most, f"{layer.sinks_held} sinks, expected {most}")
    if key.scaled:  # another first chunk, another scale
        return exam
    wrong, bound = nmse(outs[1], outs[0]), 8 * limit_of(replace(case, inputs="sharp"))
    text = f"chunks against one pass: NMSE {wrong:.1e}, bound {bound:.0e}"
    exam.note("chunks", within(wrong, bound), text)
    return exam
