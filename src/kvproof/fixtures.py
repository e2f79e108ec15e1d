"""Public fixture files: read strictly, reproduced by the reference and by the kernels.

A file says by its "kernel" what it is; its name says nothing. The turbo files score with the query
as it stands, without the rotation that their bytes want, so they test decoding and not truth. QJL
files hold a query only as its sketch: the kernels, which sketch a query themselves, are given the
query that has this sketch, and the residual of solving for it tells which projection it was.

Where a file's queries occur in the documented generator, its bytes are encoded again from the draws
that follow them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown  # a line stays short, whatever a file holds
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvproof.formats as formats
from kvproof.backends import Backend
from kvproof.backends.reference import ReferenceBackend
from kvproof.cases import Case, Floats
from kvproof.errors import RequestError
from kvproof.files import contents
from kvproof.formats import Format, qjl1_256
from kvproof.formats import get as format_named
from kvproof.rotation import PROJECTIONS, Projection, hadamard, projection, signs_from_hex
from kvproof.rules import (
    PRINTED,
    TOLERANCES,
    Examination,
    Float64,
    compare,
    decode_turbo3,
    encode_turbo3,
    plain,
    rotate128,
    true_scores,
)

Bytes = NDArray[np.uint8]

GROUP = 128  # head_dim of every public fixture
MAX_FIXTURE_BYTES = 1 << 28
LARGEST = 1e30  # of a fixture's numbers: sums of their products still fit float32's range
# NMSE of outputs of softmax against printed ones: 2.9e-13 observed, as far as float32 goes.
PRINTED_OUTPUT = 5e-12

KERNELS = (
    "turbo3",
    "turbo4",
    "turbo3_tcq",
    "qjl",
    "polar",
    "polar_preht",
    "fused_attn_qjl_tbq",
    "fused_attn_qjl_polar",
)
POLAR_SIGNS = signs_from_hex("04cb343a54e8cba3f51079dab1262597").astype(np.float64)
_HALF = (
    0.1317577823, 0.3978971029, 0.6723921169, 0.9626409783, 1.279739752, 1.643041510, 2.093562707,
    2.754354807,
)  # fmt: skip
POLAR_CENTROIDS = np.array([-v for v in reversed(_HALF)] + list(_HALF)).astype(np.float32)
BLOCK_BYTES = {"turbo3": 14, "turbo4": 18, "turbo3_tcq": 52, "qjl": 34, "polar": 82}


@dataclass(frozen=True)
class Part:
    """One operator on the bytes of a fixture, and what was printed for it.

    Scores `[heads, n_kv]` where `v_blocks` is None, otherwise attention `[heads, 128]` over the
    first `visible` tokens. `stored_q` is the query in the domain of the stored keys.
    """

    check: str
    key: Format
    stored_q: Float64  # [heads, stored values]
    q: Floats  # [heads, 128] plain: what a kernel must be given for the same
    k_blocks: Bytes  # [n_kv, kv_heads, bytes]
    expected: Float64
    legacy: bool = False  # bytes of the old turbo3 layout, which no format stores
    by_decoding: bool = False  # a score is also the decoded key times the query
    value: Format | None = None
    v_blocks: Bytes | None = None
    scale: float = 1.0
    visible: int = 0

    @property
    def name(self) -> str:
        """The formats, for a person."""
        if self.legacy:
            return "turbo3"
        return self.key.name if self.value is None else f"{self.key.name}/{self.value.name}"


@dataclass(frozen=True)
class Fixture:
    """A public fixture file: its operators, and the draws that its bytes come from, if known."""

    kernel: str
    path: Path
    sha256: str
    parts: tuple[Part, ...]
    encoded: tuple[tuple[Format | None, Floats, Bytes], ...]  # (None: legacy), rows, their bytes


# ---- the generator (gate.md 9.2) -----------------------------------------------------------------

STREAM = 1_200_000  # normals: more than all public fixtures together draw


@functools.lru_cache(maxsize=2)
def fixture_normals(count: int) -> Floats:
    """First `count` normals of the fixtures' generator: Marsaglia's polar method in float32.

    Logarithms are taken in float64, so that no machine's float32 library changes a draw.
    """
    steps = 1 << (2 * count).bit_length()  # about 1.27 uniforms make a normal
    state = np.array([0x9E3779B97F4A7C15], np.uint64)
    factor, term = 6364136223846793005, 1442695040888963407
    a, c = factor, term
    state = state * np.uint64(a) + np.uint64(c)
    while len(state) < steps:  # the next len(state) states follow from these at once
        state = np.concatenate([state, state * np.uint64(a) + np.uint64(c)])
        a, c = a * a % 2**64, (c * a + c) % 2**64
    bits = (state >> np.uint64(11) & np.uint64(0xFFFFFF)).astype(np.float32)
    pairs = (bits / np.float32(2**24) * np.float32(2) - np.float32(1)).reshape(-1, 2)
    r = pairs[:, 0] * pairs[:, 0] + pairs[:, 1] * pairs[:, 1]
    kept = (r < 1) & (r != 0)
    pairs, r = pairs[kept], r[kept]
    log = np.log(r.astype(np.float64)).astype(np.float32)
    out: Floats = (pairs * np.sqrt(np.float32(-2) * log / r)[:, None]).ravel()[:count]
    assert len(out) == count
    out.flags.writeable = False
    return out


def drawn_after(first: Floats, count: int, heads: int = 1) -> Floats | None:
    """The `count` normals that the generator draws after the queries that begin with `first`.

    None if they are not among its first STREAM normals. `first` `[128]` is one query of `heads`,
    correct to about 1e-4.
    """
    stream = fixture_normals(STREAM)
    for start in np.flatnonzero(np.abs(stream[: -heads * GROUP] - first[0]) < 2e-4):
        if np.abs(stream[start : start + len(first)] - first).max() < 2e-4:
            after = stream[start + heads * GROUP : start + heads * GROUP + count]
            return after if len(after) == count else None
    return None


# ---- reading -------------------------------------------------------------------------------------


class _File:
    """A fixture's document: every field is read with its kind and size, or refused by name."""

    def __init__(self, path: Path, document: Mapping[str, Any], inside: str = "") -> None:
        self.path, self.document, self.inside = path, document, inside

    def error(self, name: str, what: str) -> RequestError:
        return RequestError(
            f"fixture {self.path}: {self.inside}{name} {what}; get the file again from its source"
        )

    def get(self, name: str) -> Any:
        if name not in self.document:
            raise self.error(name, "is missing")
        return self.document[name]

    def whole(self, *names: str) -> int:
        """A positive whole number under the first of `names` that is there."""
        name = next((n for n in names if n in self.document), names[0])
        value = self.get(name)
        if type(value) is not int or not 0 < value <= 1 << 20:
            raise self.error(name, f"is {shown(value)}, expected a positive whole number")
        return value

    def flag(self, name: str, default: int | None = None) -> bool:
        value = self.document.get(name, default)
        if type(value) is not int or value not in (0, 1):
            raise self.error(name, f"is {shown(value)}, expected 0 or 1")
        return bool(value)

    def must_be(self, name: str, value: int) -> None:
        if type(self.get(name)) is not int or self.document[name] != value:
            raise self.error(name, f"is {shown(self.document[name])}, expected {value}")

    def floats(self, name: str, count: int) -> Float64:
        values = self._flat(name, count, (int, float))
        # Whole numbers of JSON have no bound, numpy's do; NaN fails the comparison.
        if not all(abs(v) <= LARGEST for v in values):
            raise self.error(
                name, f"holds a NaN, an infinity or a number beyond {LARGEST:g}, expected less"
            )
        return np.array(values, np.float64)

    def bytes(self, name: str, count: int) -> Bytes:
        values = self._flat(name, count, (int,))
        if not all(0 <= v <= 255 for v in values):
            raise self.error(name, "holds numbers beyond a byte, expected 0 to 255")
        return np.array(values, np.uint8)

    def _flat(self, name: str, count: int, kinds: tuple[type, ...]) -> list[Any]:
        values = self.get(name)
        if not isinstance(values, list) or any(type(v) not in kinds for v in values):
            raise self.error(name, "is not a flat list of numbers")
        if len(values) != count:
            raise self.error(name, f"has {len(values)} entries, expected {count}")
        return values


def read(folder: Path) -> list[Fixture]:
    """Every fixture in a folder of JSON files, in order of their names.

    RequestError naming file and field if one cannot be read, is of no known kind, or does not hold
    together. A codebook of 512 states in the folder is the one of its turbo3_tcq files.
    """
    if not folder.is_dir():
        raise RequestError(f"--fixtures {folder}: not a folder; name one that holds *.json files")
    files, books = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            if not path.is_file():  # a pipe would keep its reader waiting
                raise OSError("not a file")
            raw = contents(path, MAX_FIXTURE_BYTES)
            document = json.loads(raw)
        except (OSError, ValueError, RecursionError) as error:
            raise RequestError(f"fixture {path}: cannot be read as JSON ({error})") from error
        if not isinstance(document, dict):
            raise RequestError(f"fixture {path}: is not an object with a kernel")
        file = _File(path, document)
        if "kernel" not in document and "states" in document:
            books.append(_codebook(file))
        elif file.get("kernel") in KERNELS:
            files.append((file, hashlib.sha256(raw).hexdigest()))
        else:
            kernel = shown(document["kernel"])
            raise file.error("kernel", f"is {kernel}, none of {', '.join(KERNELS)}")
    if len({book.tobytes() for book in books}) > 1:
        raise RequestError(f"--fixtures {folder}: holds several trellis codebooks; leave one")
    found = []
    for file, digest in files:
        kernel = file.document["kernel"]
        parts, encoded = _READERS[kernel](file, books[0] if books else None)
        found.append(Fixture(kernel, file.path, digest, parts, encoded))
    return found


def _codebook(file: _File) -> Floats:
    file.must_be("states", 512)
    book = file.floats("values", 512).astype("<f4")
    digest = hashlib.sha256(book.tobytes()).hexdigest()
    if file.get("sha256_f32_le") != digest:
        raise file.error("values", f"have SHA-256 {digest}, not what sha256_f32_le says")
    return book.astype(np.float32)


Encoded = tuple[tuple[Format | None, Floats, Bytes], ...]
Contents = tuple[tuple[Part, ...], Encoded]


def _head_dim(file: _File) -> None:
    file.must_be("head_dim", GROUP)


def _scores(file: _File, book: Floats | None) -> Contents:
    """turbo3, turbo4, turbo3_tcq: the query as it stands against the stored values."""
    kernel = file.document["kernel"]
    _head_dim(file)
    n, size = file.whole("n_kv", "n_rows", "n_tokens"), BLOCK_BYTES[kernel]
    per_key = 1 if kernel == "turbo3_tcq" else 4
    file.must_be("block_bytes", size)
    file.must_be("blocks_per_kv", per_key)
    q = file.floats("q", GROUP)[None]
    blocks = file.bytes("k_blocks", n * per_key * size).reshape(n, 1, -1)
    expected = file.floats("expected_scores", n)[None]
    if kernel == "turbo3_tcq" and book is None:
        raise RequestError(
            f"fixture {file.path}: kernel turbo3_tcq is read with the codebook that made it; put "
            "tbq3_tcq_codebook.json beside it"
        )
    legacy = kernel == "turbo3"
    key = format_named("tbq4_0" if kernel == "turbo4" else "tbq3_0")
    if kernel == "turbo3_tcq" and book is not None:
        make = getattr(formats, "tbq3_tcq", None)
        if make is None:
            raise file.error("kernel", "is of format tbq3_tcq, which this version lacks")
        key = make(book)
    part = Part(kernel, key, q, key.unrotate(q), blocks, expected, legacy=legacy)
    rows = drawn_after(q[0].astype(np.float32), n * GROUP)
    encoded: Encoded = ()
    if rows is not None:
        encoded = ((None if legacy else key, rows.reshape(n, 1, GROUP), blocks),)
    return (part,), encoded


def _qjl(file: _File, book: Floats | None) -> Contents:
    _head_dim(file)
    file.must_be("proj_dim", 2 * GROUP)
    file.must_be("block_bytes", BLOCK_BYTES["qjl"])
    n, heads, kv = file.whole("n_tokens", "n_kv"), file.whole("n_heads"), file.whole("n_kv_heads")
    if heads % kv:
        raise file.error("n_heads", f"is {heads}, no multiple of n_kv_heads {kv}")
    sketch = file.floats("q_sketch", heads * 2 * GROUP).reshape(heads, -1)
    key, q = _unsketched(file, sketch)
    blocks = file.bytes("k_blocks", kv * n * 34).reshape(kv, n, 34).transpose(1, 0, 2)
    expected = file.floats("expected_scores", heads * n).reshape(heads, n)
    part = Part("qjl", key, sketch, q, blocks, expected)
    rows = drawn_after(q[0], kv * n * GROUP, heads)
    if rows is None:
        return (part,), ()
    return (part,), ((key, _by_token(rows, kv, n), blocks),)


def _by_token(rows: Floats, kv_heads: int, n: int) -> Floats:
    """Draws in order `[kv_head][token]` as rows `[token, kv_head, 128]`."""
    return rows.reshape(kv_heads, n, GROUP).transpose(1, 0, 2)


@functools.cache
def _projection(id_: str) -> tuple[Float64, Float64]:
    """A projection's table `[128, 256]`, and the inverse that brings its sketches back."""
    table = projection(id_).table.astype(np.float64)
    gram = np.einsum("ds,es->de", table, table)
    return table, np.linalg.solve(gram, table).T


def _unsketched(file: _File, sketch: Float64) -> tuple[Format, Floats]:
    """The format whose projection made these sketches, and the queries they are sketches of."""
    for id_ in PROJECTIONS:
        table, inverse = _projection(id_)
        q = np.einsum("hs,sd->hd", sketch, inverse)  # no BLAS, see rules.py
        wrong = np.einsum("hd,ds->hs", q, table) - sketch
        if np.square(wrong).sum() <= 1e-9 * np.square(sketch).sum():
            return qjl1_256(id_), q.astype(np.float32)
    raise file.error("q_sketch", f"is no sketch by the projections {', '.join(PROJECTIONS)}")


def _polar(file: _File, book: Floats | None) -> Contents:
    _head_dim(file)
    file.must_be("block_bytes", BLOCK_BYTES["polar"])
    n = file.whole("n_rows", "n_kv")
    q = file.floats("q", GROUP)[None]
    blocks = file.bytes("k_blocks", n * 82).reshape(n, 1, 82)
    expected = file.floats("expected_scores", n)[None]
    residual = file.flag("use_qjl")
    return _polar_parts(q, None, ((residual, blocks, expected),))


def _polar_preht(file: _File, book: Floats | None) -> Contents:
    """One query, given turned as well, on blocks without and (where given) with the residual."""
    _head_dim(file)
    file.must_be("block_bytes", BLOCK_BYTES["polar"])
    n = file.whole("n_rows", "n_kv")
    q = file.floats("q", GROUP)[None]
    turned = hadamard(q).astype(np.float64)
    hq = file.floats("hq", GROUP)[None] if "hq" in file.document else turned
    if np.abs(hq - turned).max() > 1e-5 * np.abs(hq).max():
        raise file.error("hq", "is not the Hadamard transform of q")
    sets = []
    for suffix, residual in (("", file.flag("use_qjl", 0)), ("_qjl", True)):
        if not suffix or f"k_blocks{suffix}" in file.document:
            blocks = file.bytes(f"k_blocks{suffix}", n * 82).reshape(n, 1, 82)
            expected = file.floats(f"expected_scores{suffix}", n)[None]
            sets.append((residual, blocks, expected))
    return _polar_parts(q, hq, tuple(sets))


def _polar_parts(
    q: Float64, hq: Float64 | None, sets: tuple[tuple[bool, Bytes, Float64], ...]
) -> Contents:
    """Both operators on every set: decode then dot, and the stored values times the turned query
    (computed here where the file has none)."""
    turned = (hadamard(q) if hq is None else hq) / np.sqrt(GROUP)
    parts: list[Part] = []
    encoded: list[tuple[Format | None, Floats, Bytes]] = []
    for residual, blocks, expected in sets:
        key = format_named("q4_polar_res" if residual else "q4_polar")
        end = "_res" if residual else ""
        common = (key, turned, q.astype(np.float32), blocks, expected)
        parts.append(Part(f"polar{end}", *common, by_decoding=True))
        parts.append(Part(f"polar_preht{end}", *common))
        rows = drawn_after(q[0].astype(np.float32), len(blocks) * GROUP)
        if rows is not None:
            encoded.append((key, rows.reshape(-1, 1, GROUP), blocks))
    return tuple(parts), tuple(encoded)


def _fused(file: _File, book: Floats | None) -> Contents:
    """QJL keys with TBQ3 or Polar values, one query a head; causal cases see q_pos_base + 1."""
    _head_dim(file)
    kernel = file.document["kernel"]
    polar = kernel == "fused_attn_qjl_polar"
    value = format_named("tbq3_0")
    if polar:
        value = format_named("q4_polar_res" if file.flag("use_qjl") else "q4_polar")
    size, per_token = (82, 1) if polar else (14, 4)
    for name, number in (
        ("proj_dim", 2 * GROUP), ("k_block_bytes", 34), ("v_block_bytes", size),
        ("v_blocks_per_token", per_token), ("q_is_pre_projected", 1),
    ):  # fmt: skip
        file.must_be(name, number)
    scale = file.get("sm_scale")
    if type(scale) not in (int, float) or not 0 < scale <= LARGEST:
        raise file.error("sm_scale", f"is {shown(scale)}, expected a positive number")
    cases = file.get("cases")
    if not isinstance(cases, list) or not cases or not all(isinstance(c, dict) for c in cases):
        raise file.error("cases", "is not a list of at least one case")
    parts: list[Part] = []
    encoded: list[tuple[Format | None, Floats, Bytes]] = []
    for number, document in enumerate(cases):
        case = _File(file.path, document, f"cases[{number}].")
        n, heads, kv = case.whole("n_kv"), case.whole("n_heads"), case.whole("n_kv_heads")
        if heads % kv:
            raise case.error("n_heads", f"is {heads}, no multiple of n_kv_heads {kv}")
        visible = n
        if case.flag("causal", 0):
            base = case.get("q_pos_base")
            if type(base) is not int or not 0 <= base < n:
                raise case.error("q_pos_base", f"is {shown(base)}, expected 0 to {n - 1}")
            visible = base + 1
        sketch = case.floats("q_sketch", heads * 2 * GROUP).reshape(heads, -1)
        key, q = _unsketched(case, sketch)
        k = case.bytes("k_blocks", kv * n * 34).reshape(kv, n, -1).transpose(1, 0, 2)
        v = case.bytes("v_blocks", kv * n * per_token * size).reshape(kv, n, -1).transpose(1, 0, 2)
        expected = case.floats("expected_out", heads * GROUP).reshape(heads, GROUP)
        parts.append(
            Part(
                kernel, key, sketch, q, k, expected, value=value, v_blocks=v, scale=float(scale),
                visible=visible,
            )
        )  # fmt: skip
        rows = drawn_after(q[0], 2 * kv * n * GROUP, heads)
        if rows is not None:
            keys, values = rows.reshape(2, -1)
            encoded.append((key, _by_token(keys, kv, n), k))
            encoded.append((value, _by_token(values, kv, n), v))
    return tuple(parts), tuple(encoded)


_READERS: dict[str, Callable[[_File, Floats | None], Contents]] = {
    "turbo3": _scores,
    "turbo4": _scores,
    "turbo3_tcq": _scores,
    "qjl": _qjl,
    "polar": _polar,
    "polar_preht": _polar_preht,
    "fused_attn_qjl_tbq": _fused,
    "fused_attn_qjl_polar": _fused,
}


# ---- reproducing ---------------------------------------------------------------------------------


def _weights(scores: Float64) -> Float64:
    """Softmax over the last axis; no entries, or only -inf, give zeros."""
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    out = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = out.sum(axis=-1, keepdims=True)
    weights: Float64 = np.divide(out, total, out=np.zeros_like(out), where=total > 0)
    return weights


def by_reference(part: Part) -> Float64:
    """What was printed, computed in float64 from the file's bytes and its query."""
    decode = decode_turbo3 if part.legacy else part.key.decode_rotated
    rows, turned = decode(part.k_blocks), part.stored_q
    if part.by_decoding:
        rows, turned = plain(part.key, rows), part.q.astype(np.float64)
    group = len(turned) // rows.shape[1]
    out: Float64 = np.einsum("hd,thd->ht", turned, np.repeat(rows, group, axis=1))
    if part.value is None or part.v_blocks is None:
        return out
    values = np.repeat(plain(part.value, part.value.decode_rotated(part.v_blocks)), group, axis=1)
    weights = _weights(out[:, : part.visible] * part.scale)
    mixed: Float64 = np.einsum("ht,thd->hd", weights, values[: part.visible])
    return mixed


def by_kernels(part: Part, backend: Backend) -> NDArray[Any] | None:
    """The same from a backend's kernels; None for the legacy layout, which has none."""
    if part.legacy:
        return None
    if part.value is not None and part.v_blocks is not None:
        seen = slice(0, part.visible)
        out = backend.attention(
            part.q[None], part.k_blocks[seen], part.v_blocks[seen], key=part.key,
            value=part.value, causal=False, scale=part.scale,
        )  # fmt: skip
        first: NDArray[Any] = np.asarray(out)[0]
        return first
    if part.by_decoding:
        rows = np.asarray(backend.decode(part.key, part.k_blocks)).astype(np.float64)
        group = len(part.q) // rows.shape[1]
        dots = np.einsum("hd,thd->ht", part.q.astype(np.float64), np.repeat(rows, group, axis=1))
        by_hand: NDArray[Any] = dots
        return by_hand
    scores: NDArray[Any] = np.asarray(backend.scores(part.key, part.q[None], part.k_blocks))[0]
    return scores


def kernel_limit(part: Part) -> float:
    """Bound on the kernels' NMSE: that of the operation, and for a query that had to be solved for
    the rounding of the printed sketch."""
    if part.value is None:
        return TOLERANCES["scores", part.key.name].limit + PRINTED
    both = (TOLERANCES["attention", f.name].limit for f in (part.key, part.value))
    return 2 * max(both) + PRINTED_OUTPUT


def examine_part(part: Part, backend: Backend | None) -> Examination:
    """A part by the reference (`backend` None) or by a backend's kernels, against the file."""
    exam = Examination(Case("scores", part.key.name))
    exam.expected = 0 if part.legacy and backend is not None else part.expected.size
    got: NDArray[Any] | None
    if backend is None:
        got, limit = by_reference(part), PRINTED if part.value is None else PRINTED_OUTPUT
    else:
        got, limit = by_kernels(part, backend), kernel_limit(part)
    if got is not None:
        compare(exam, "parity", got, part.expected, limit)
    return exam


def examine_bytes(fixture: Fixture, backend: Backend | None) -> Examination | None:
    """Every byte of a fixture encoded again from the generator's draws; None if they are unknown.

    0 mismatching bytes are allowed.
    """
    exam = Examination(Case("encode", "f16"))
    for fmt, rows, blocks in fixture.encoded:
        if fmt is None:
            if backend is not None:
                continue
            got = encode_turbo3(rows)
        else:
            got = fmt.encode(rows) if backend is None else np.asarray(backend.encode(fmt, rows))
        wrong = int((got != blocks).sum()) if got.shape == blocks.shape else blocks.size
        exam.expected += blocks.size
        exam.outputs += blocks.size
        exam.most("wrong_rows", wrong)
        exam.note("bytes", wrong == 0, f"{wrong} of {blocks.size} bytes differ from the file")
    return exam if exam.findings else None


# ---- the reference against itself (gate.md section 4) --------------------------------------------

# Scores of the self-test's one query and key: with the query as it stands and, where the bytes want
# it turned, with it turned. All but the first of the turbo rows estimate the true -1.293642.
PUBLISHED = {
    "turbo3": (-2.501480, -2.070670),
    "turbo4": (-23.721790, -2.360713),
    "turbo3_tcq": (-4.822659, 0.363133),
    "qjl": (3.696591,),
    "polar": (-1.994053,),
    "polar_res": (-1.438744,),
}
TURNED = 1e-9  # NMSE of the published scores with a turned query: 1.6e-10 observed (turbo4)
IDENTITY = 1e-12  # NMSE between two float64 ways to one number (formats.md 6.4)


def self_test(files: Sequence[Fixture] = ()) -> Iterator[tuple[str, str, Examination]]:
    """(variant, format, examination): published scores, then identities of the reference.

    The score of turbo3_tcq needs the public codebook: it is there if `files` hold such a fixture.
    """
    draws = fixture_normals(256)
    q, x = draws[0::2], draws[1::2]
    tcq = next((p.key for f in files for p in f.parts if p.check == "turbo3_tcq"), None)
    for check, want in PUBLISHED.items():
        if check == "turbo3_tcq" and tcq is None:
            continue
        name, got = _self_scores(check, q, x, tcq)
        exam = Examination(Case("scores", "tbq3_0" if check == "turbo3" else name))
        for one, printed, limit in zip(got, want, (PRINTED, TURNED), strict=False):
            exam.expected += 1
            compare(exam, "parity", np.array([one]), np.array([printed]), limit)
        yield check, "turbo3" if check == "turbo3" else name, exam
    for identity in (_polar_identity, _qjl_identity, _tbq_identity, _fused_identity):
        yield from identity()


def _self_scores(
    check: str, q: Floats, x: Floats, tcq: Format | None
) -> tuple[str, tuple[float, ...]]:
    if check == "turbo3":
        stored = decode_turbo3(encode_turbo3(x))
        return "turbo3", (float(q @ stored), float(rotate128(q) @ stored))
    if check == "qjl":
        fmt = qjl1_256("fixture")
    elif check == "turbo3_tcq" and tcq is not None:
        fmt = tcq
    else:
        fmt = format_named({"turbo4": "tbq4_0", "polar": "q4_polar"}.get(check, "q4_polar_res"))
    stored = fmt.decode_rotated(fmt.encode(x))
    turned = float(fmt.rotate(q).astype(np.float64) @ stored)
    return fmt.name, (float(q @ stored), turned) if check.startswith("turbo") else (turned,)


def _identity(fmt: str, got: NDArray[Any], want: NDArray[Any]) -> Examination:
    exam = Examination(Case("scores", fmt))
    exam.expected += got.size
    compare(exam, "parity", got, want.astype(np.float64), IDENTITY)
    return exam


def _own(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _polar_identity() -> Iterator[tuple[str, str, Examination]]:
    """Decode then dot, and the turned query on the stored centroids taken apart by hand."""
    q, x = _own(1, 5, 128), _own(2, 9, 128)
    for name in ("q4_polar", "q4_polar_res"):
        fmt = format_named(name)
        b = fmt.encode(x)
        dots = q.astype(np.float64) @ plain(fmt, fmt.decode_rotated(b)).T
        codes = np.stack([b[:, 2:66] & 15, b[:, 2:66] >> 4], axis=-1).reshape(len(b), -1)
        c = POLAR_CENTROIDS.astype(np.float64)[codes]
        if name == "q4_polar_res":
            sign = (b[:, 66] & 1) * 2.0 - 1.0
            c = c + sign[:, None] * (0.5 / np.sqrt(128)) * POLAR_SIGNS
        d = b[:, :2].copy().view(np.float16).astype(np.float64)
        by_hand = hadamard(q.astype(np.float64)) @ (c * d / 128).T
        yield "polar: decode then dot equals the turned query", name, _identity(name, by_hand, dots)


def _qjl_identity() -> Iterator[tuple[str, str, Examination]]:
    """Score and matrix-vector product; and the integer variant within half a step a value."""
    fmt = format_named("qjl1_256")
    assert isinstance(fmt.spin, Projection)
    q, x = _own(3, 5, 128), _own(4, 9, 128)
    b = fmt.encode(x)
    sketch = q.astype(np.float64) @ fmt.spin.table.astype(np.float64)
    signs = np.unpackbits(b[:, :32], axis=-1, bitorder="little") * 2.0 - 1.0
    norm = (b[:, 32:].copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    factor = np.sqrt(np.pi / 2) / 256
    product = factor * (sketch @ (signs * norm.astype(np.float64)).T)
    dots = q.astype(np.float64) @ plain(fmt, fmt.decode_rotated(b)).T
    yield "qjl: score equals matrix-vector", fmt.name, _identity(fmt.name, product, dots)
    exam = Examination(Case("scores", fmt.name))
    step = np.abs(sketch).max(axis=-1, keepdims=True) / 127
    whole = np.clip(np.rint(sketch / step), -127, 127) * step
    wrong = np.abs(factor * (whole @ (signs * norm.astype(np.float64)).T) - product)
    limit = factor * 256 * step / 2 * norm.ravel().astype(np.float64)
    exam.expected = exam.outputs = wrong.size
    inside = bool((np.isfinite(wrong) & (wrong <= limit)).all() and wrong.any())
    exam.note("parity", inside, f"integer scores within half a step a value: {inside}")
    yield "qjl: integer variant within its bound", fmt.name, exam


def _tbq_identity() -> Iterator[tuple[str, str, Examination]]:
    """Values decode to what codes and scale say, taken apart by hand."""
    x = _own(5, 7, 32)
    for name, bits in (("tbq3_0", 3), ("tbq4_0", 4)):
        fmt = format_named(name)
        b = fmt.encode(x)
        if bits == 3:
            stream = np.unpackbits(b[:, 2:], axis=-1, bitorder="little").reshape(len(b), 32, 3)
            codes = stream @ np.array([1, 2, 4])
        else:
            codes = np.concatenate([b[:, 2:] & 15, b[:, 2:] >> 4], axis=-1)
        d = b[:, :2].copy().view(np.float16).astype(np.float64)
        assert fmt.codebook is not None
        stored = np.asarray(fmt.codebook, np.float32).astype(np.float64)[codes] * d
        assert fmt.spin is not None
        by_hand = stored @ fmt.spin.matrix(32)
        got = plain(fmt, fmt.decode_rotated(b))
        yield "values decode to codes and scale", name, _identity(name, got, by_hand)


def _fused_identity() -> Iterator[tuple[str, str, Examination]]:
    """Fused attention equals score, softmax, values; two halves merged equal the whole."""
    backend = ReferenceBackend()
    for key, value in (("qjl1_256", "tbq3_0"), ("tq4", "q4_0")):
        fk, fv = format_named(key), format_named(value)
        q, k, v = _own(6, 1, 4, 128), _own(7, 24, 2, 128), _own(8, 24, 2, 128)
        kb, vb = fk.encode(k), fv.encode(v)
        keys, values = (plain(f, f.decode_rotated(b)) for f, b in ((fk, kb), (fv, vb)))
        scores = true_scores(q, keys)[0] / np.sqrt(128)
        wide = np.repeat(values, 2, axis=1)
        by_hand = np.einsum("ht,thd->hd", _weights(scores), wide)
        fused = backend.attention64(q, kb, vb, key=fk, value=fv)[0]
        title = f"{key}/{value}"
        yield "fused equals score, softmax, values", title, _identity(key, fused, by_hand)
        parts, sums = [], []
        for half in (slice(0, 10), slice(10, None)):
            parts.append(
                backend.attention64(q, kb[half], vb[half], key=fk, value=fv, causal=False)[0]
            )
            sums.append(np.log(np.exp(scores[:, half]).sum(axis=-1)))
        share = (1 / (1 + np.exp(sums[1] - sums[0])))[:, None]
        merged = parts[0] * share + parts[1] * (1 - share)
        yield "merged halves equal the whole", title, _identity(key, merged, fused)
