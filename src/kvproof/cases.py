"""Cases: operation x format x shape x input, one list for the gate, the tests and the benches.

A case is a value. Its arrays follow from it alone (the seed is a field), so a failure that names
its case can be repeated anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.errors import RequestError
from kvproof.formats import get as format_named

Floats = NDArray[np.float32]

OPS = ("encode", "decode", "scores", "attention")
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512, 576)
GQA = ((8, 8), (8, 2), (9, 3), (7, 1), (28, 4))  # (num_heads, num_kv_heads)
E4M3_MAX = np.float32(448)


@dataclass(frozen=True)
class Arrays:
    """The arrays of a case; scales are None for formats that hold their own."""

    q: Floats  # [n_q, num_heads, head_dim]
    k: Floats  # [n_kv, num_kv_heads, head_dim]
    v: Floats  # [n_kv, num_kv_heads, head_dim_v]
    k_scale: Floats | None  # [num_kv_heads]
    v_scale: Floats | None
    offsets: Floats | None = None  # [n_q, num_heads, n_pages]


@dataclass(frozen=True)
class Case:
    """One operation on one format (attention: a key and a value format), shape and input.

    `inputs` names a row of INPUTS. Queries are the last n_q of the n_kv tokens; `window` is the
    number of keys a query sees, its own included. `threads` is a hint for attention.

    `position` (of query 0), `page` (0: no offsets) and `phase` are those of `Backend.attention`;
    `lse` asks for the log-sum-exp too, and for parts of the tokens merged by it.
    """

    op: str
    key: str
    value: str = ""
    head_dim: int = 128
    head_dim_v: int = 0  # 0: as head_dim
    num_heads: int = 1
    num_kv_heads: int = 1
    n_q: int = 1
    n_kv: int = 64
    causal: bool = True
    window: int | None = None
    inputs: str = "normal"
    seed: int = 0
    threads: int | None = None
    position: int | None = None
    page: int = 0
    phase: int = 0
    lse: bool = False

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise RequestError(f"case: operation {self.op!r} is none of {', '.join(OPS)}")
        if self.inputs not in INPUTS:
            raise RequestError(f"case: inputs {self.inputs!r} is none of {', '.join(INPUTS)}")

    def __str__(self) -> str:
        types = self.key if self.op != "attention" else f"{self.key}/{self.value or self.key}"
        dims = f"{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        mask = ("causal" if self.causal else "full") + (
            f" window {self.window}" * bool(self.window)
        )
        if self.position is not None:
            mask += f" from position {self.position}"
        if self.page:
            mask += f", pages of {self.page} from {self.phase}"
        return (
            f"{self.op} {types} head_dim {dims}, {self.num_heads} heads on {self.num_kv_heads}, "
            f"{self.n_q} queries, {self.n_kv} tokens, {mask}, {self.inputs}, seed {self.seed}"
        )

    def arrays(self) -> Arrays:
        """Queries, keys and values of this case (float32), with fp8 scales calibrated on them."""
        rng = np.random.default_rng([self.seed, self.head_dim, self.n_kv])
        kv = (self.n_kv, self.num_kv_heads)
        draw = INPUTS[self.inputs]
        k = draw(rng, (*kv, self.head_dim))
        v = draw(rng, (*kv, self.head_dim_v or self.head_dim))
        q = rng.standard_normal((self.n_q, self.num_heads, self.head_dim)).astype(np.float32)
        if self.op == "attention":
            q *= _query_factor(q, k, 200.0 if self.inputs == "sharp" else 6.0)
        offsets = None
        if self.page:
            pages = -(-(self.phase + self.n_kv) // self.page)
            offsets = 2 * _normal(rng, (self.n_q, self.num_heads, pages))
        return Arrays(
            q, k, v, _head_scale(self.key, k), _head_scale(self.value or self.key, v), offsets
        )


def _query_factor(q: Floats, k: Floats, top: float) -> np.float32:
    """Factor that makes the largest softmax argument of q on k equal `top` (1 where all are 0)."""
    grouped = q.astype(np.float64).reshape(len(q), k.shape[1], -1, q.shape[-1])
    scores = np.einsum("qhgd,thd->qhgt", grouped, k.astype(np.float64))
    largest = np.abs(scores).max(initial=0.0)
    largest /= np.sqrt(q.shape[-1])
    return np.float32(top / largest) if largest > 0 else np.float32(1)


def _head_scale(name: str, x: Floats) -> Floats | None:
    """Scale per KV head of a format that is held with one: max|x| / 448, or 1 where that is 0."""
    if not format_named(name).scaled:
        return None
    scale = np.abs(x).max(axis=(0, 2), initial=0) / E4M3_MAX
    out: Floats = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    return out


# ---- inputs: a function takes a generator and a shape [..., n] and returns finite float32 --------

Shape = tuple[int, ...]


def _normal(rng: np.random.Generator, shape: Shape) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


def _outlier(rng: np.random.Generator, shape: Shape) -> Floats:
    x = _normal(rng, shape)
    x[..., shape[-1] // 3] *= 20
    return x


def _heavy(rng: np.random.Generator, shape: Shape) -> Floats:
    x = rng.standard_t(2, shape).astype(np.float32)
    return np.clip(x, np.float32(-1e4), np.float32(1e4))


def _one_hot(rng: np.random.Generator, shape: Shape) -> Floats:
    hot = rng.integers(0, shape[-1], shape[:-1])
    sign = rng.choice([-1.0, 1.0], (*shape[:-1], 1))
    out: Floats = ((np.arange(shape[-1]) == hot[..., None]) * sign).astype(np.float32)
    return out


def _constant(rng: np.random.Generator, shape: Shape) -> Floats:
    return np.broadcast_to(_normal(rng, (*shape[:-1], 1)), shape).copy()


def _signs(rng: np.random.Generator, shape: Shape) -> Floats:
    x: Floats = rng.choice([-1.0, 1.0], shape).astype(np.float32)
    return x


def _zero(rng: np.random.Generator, shape: Shape) -> Floats:
    x = np.zeros(shape, np.float32)
    x[rng.random(shape) < 0.5] = np.float32(-0.0)
    return x


def _some_zero(rng: np.random.Generator, shape: Shape) -> Floats:
    x = _normal(rng, shape)
    x[rng.random(shape[:-1]) < 0.3] = 0
    x[..., : min(32, shape[-1] // 2)] *= rng.random((*shape[:-1], 1)) < 0.7
    return x


def _subnormal(rng: np.random.Generator, shape: Shape) -> Floats:
    return (_normal(rng, shape) * np.float32(2e-5)).astype(np.float32)


def _limit(rng: np.random.Generator, shape: Shape) -> Floats:
    return rng.uniform(-6.5e4, 6.5e4, shape).astype(np.float32)


def _mixed(rng: np.random.Generator, shape: Shape) -> Floats:
    size = 10.0 ** rng.uniform(-3, 3, (*shape[:-1], 1))
    return (_normal(rng, shape) * size).astype(np.float32)


def _ramp(rng: np.random.Generator, shape: Shape) -> Floats:
    """Rows that grow along the first axis: the largest score lies in the last part of a split."""
    size = np.linspace(0.1, 3.0, shape[0], dtype=np.float32)
    return _normal(rng, shape) * size.reshape(-1, *[1] * (len(shape) - 1))


def _tiny(rng: np.random.Generator, shape: Shape) -> Floats:
    """Rows of 1e-35, one 1e-40, and ordinary rows between them."""
    x = _normal(rng, shape).reshape(-1, shape[-1])
    x[0::3] = 1e-35
    x[1::3] = 0
    x[1::3, -1] = 1e-40
    return x.reshape(shape)


def _huge(rng: np.random.Generator, shape: Shape) -> Floats:
    """One 7e4, one 1e30, and ordinary rows between them: scales and elements saturate."""
    x = _normal(rng, shape).reshape(-1, shape[-1])
    x[0::3, 0] = 7e4
    x[1::3, -1] = 1e30
    return x.reshape(shape)


INPUTS: dict[str, Callable[[np.random.Generator, Shape], Floats]] = {
    "normal": _normal,
    "outlier": _outlier,  # one channel 20 times larger
    "heavy": _heavy,
    "one_hot": _one_hot,
    "constant": _constant,
    "signs": _signs,  # all +-1: the largest code of the plain formats everywhere
    "zero": _zero,
    "some_zero": _some_zero,
    "subnormal": _subnormal,  # fp16 scales below 6.1e-5
    "limit": _limit,  # near the fp16 limit
    "mixed": _mixed,  # magnitudes from 1e-3 to 1e3 in one tensor
    "tiny": _tiny,
    "huge": _huge,
    "ramp": _ramp,
    "sharp": _normal,  # softmax arguments up to +-200
}
EDGES = (
    "outlier", "heavy", "one_hot", "constant", "signs", "zero", "some_zero", "subnormal", "limit",
    "mixed", "tiny", "huge",
)  # fmt: skip
# With rows of 1e30 the scores of all other rows vanish below float32: no parity case.
ATTENTION_EDGES = tuple(kind for kind in EDGES if kind != "huge")


def masks(window: int) -> Iterator[tuple[int, int, int]]:
    """(n_q, n_kv, window) around a window's edge: W - 1, W, W + 1 and 2W + 1 tokens."""
    for n_kv in (window - 1, window, window + 1, 2 * window + 1):
        for n_q in {1, min(3, n_kv), n_kv}:
            if n_kv > 0:
                yield n_q, n_kv, window


# ---- public fixtures (gate.md section 9) ---------------------------------------------------------


@dataclass(frozen=True)
class Fixture:
    """A public turbo3 or turbo4 fixture: one query, packed keys, the scores printed for them.

    The printed scores use the query without rotation, so they test decoding and not truth.
    """

    kernel: str
    path: Path
    head_dim: int
    q: NDArray[np.float64]  # [head_dim]
    k_blocks: NDArray[np.uint8]  # [n_kv, bytes]
    expected: NDArray[np.float64]  # [n_kv]


FIXTURE_BLOCK = {"turbo3": 14, "turbo4": 18}  # bytes per 32 values


def read_fixtures(folder: Path, kernels: tuple[str, ...]) -> list[Fixture]:
    """The fixtures of the given kernels in a folder, told apart by their "kernel" key.

    RequestError if the folder or a JSON file in it cannot be read or does not hold together.
    """
    if not folder.is_dir():
        raise RequestError(f"--fixtures {folder}: not a folder; name one that holds *.json files")
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise RequestError(f"fixture {path}: cannot be read as JSON ({error})") from error
        if isinstance(document, dict) and document.get("kernel") in kernels:
            found.append(_fixture(path, document))
    return found


def _fixture(path: Path, document: dict[str, Any]) -> Fixture:
    kernel = document["kernel"]
    block = FIXTURE_BLOCK[kernel]
    try:
        head_dim, n_kv = int(document["head_dim"]), int(document["n_kv"])
        q = np.asarray(document["q"], np.float64)
        raw = np.asarray(document["k_blocks"], np.int64)
        expected = np.asarray(document["expected_scores"], np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"fixture {path}: {kernel} fixture lacks or garbles {error}") from error
    sizes = {
        "block_bytes": (document.get("block_bytes"), block),
        "blocks_per_kv": (document.get("blocks_per_kv"), head_dim // 32),
        "q": (q.shape, (head_dim,)),
        "k_blocks": (raw.shape, (n_kv * head_dim // 32 * block,)),
        "expected_scores": (expected.shape, (n_kv,)),
    }
    for name, (got, want) in sizes.items():
        if got != want:
            raise RequestError(f"fixture {path}: {name} is {got}, expected {want}")
    if n_kv < 1 or raw.min() < 0 or raw.max() > 255:
        raise RequestError(f"fixture {path}: needs at least one key, and bytes from 0 to 255")
    if not (np.isfinite(q).all() and np.isfinite(expected).all()):
        raise RequestError(f"fixture {path}: q and expected_scores must be finite")
    return Fixture(kernel, path, head_dim, q, raw.astype(np.uint8).reshape(n_kv, -1), expected)
