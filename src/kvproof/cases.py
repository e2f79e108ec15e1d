"""Cases: operation x format x shape x input, one list for the gate, the tests and the benches.

A case is a value. Its arrays follow from it alone (the seed is a field), so a failure that names
its case can be repeated anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvproof.errors import RequestError
from kvproof.formats import get as format_named

Floats = NDArray[np.float32]

OPS = ("encode", "decode", "scores", "dot", "attention", "pack")
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512, 576)
# (num_heads, num_kv_heads): ratios 1, 2, 4, 8, and what real models have beside them
GQA = ((8, 8), (8, 4), (8, 2), (8, 1), (9, 3), (7, 1), (28, 4))
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

    `inputs` names a row of INPUTS. "dot" is scores by decoding and a plain dot product, "pack" rows
    to tiles and back. Queries are the last n_q of the n_kv tokens; `window` is the number of keys a
    query sees, its own included. `threads` is a hint for attention.

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
        if self.inputs == "maximal":  # a single value where codes are counted: the largest code
            k, v = _unrotated(self.key, k), _unrotated(self.value or self.key, v)
        q = rng.standard_normal((self.n_q, self.num_heads, self.head_dim)).astype(np.float32)
        if self.op == "attention":
            q *= _query_factor(q, k, 200.0 if self.inputs == "sharp" else 6.0)
        offsets = None
        if self.page:
            pages = -(-(self.phase + self.n_kv) // self.page)
            offsets = 2 * _normal(rng, (self.n_q, self.num_heads, pages))
        return Arrays(
            q, k, v, head_scale(self.key, k), head_scale(self.value or self.key, v), offsets
        )


def _query_factor(q: Floats, k: Floats, top: float) -> np.float32:
    """Factor that makes the largest softmax argument of q on k equal `top` (1 where all are 0)."""
    grouped = q.astype(np.float64).reshape(len(q), k.shape[1], -1, q.shape[-1])
    scores = np.einsum("qhgd,thd->qhgt", grouped, k.astype(np.float64))
    largest = np.abs(scores).max(initial=0.0)
    largest /= np.sqrt(q.shape[-1])
    return np.float32(top / largest) if largest > 0 else np.float32(1)


def _unrotated(name: str, x: Floats) -> Floats:
    """Rows whose rotation by a format is x; those of a format that projects stay as they are."""
    fmt = format_named(name)
    return fmt.unrotate(x) if fmt.stored_values(x.shape[-1]) == x.shape[-1] else x


def head_scale(name: str, x: Floats) -> Floats | None:
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


def _norm_limit(rng: np.random.Generator, shape: Shape) -> Floats:
    """Rows of a length just below and just above the largest fp16."""
    x = rng.standard_normal(shape)
    length = 65504 * rng.uniform(0.98, 1.01, (*shape[:-1], 1))
    out: Floats = (x * length / np.sqrt(np.square(x).sum(axis=-1, keepdims=True))).astype(
        np.float32
    )
    return out


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
    "norm_limit": _norm_limit,
    "maximal": _one_hot,  # in the domain of the codes: the largest code of rotated formats
    "mixed": _mixed,  # magnitudes from 1e-3 to 1e3 in one tensor
    "tiny": _tiny,
    "huge": _huge,
    "ramp": _ramp,
    "sharp": _normal,  # softmax arguments up to +-200
}
EDGES = (
    "outlier", "heavy", "one_hot", "constant", "signs", "zero", "some_zero", "subnormal", "limit",
    "norm_limit", "maximal", "mixed", "tiny", "huge",
)  # fmt: skip
# With rows of 1e30 the scores of all other rows vanish below float32: no parity case.
ATTENTION_EDGES = tuple(kind for kind in EDGES if kind != "huge")


def masks(window: int) -> Iterator[tuple[int, int, int]]:
    """(n_q, n_kv, window) around a window's edge: W - 1, W, W + 1 and 2W + 1 tokens."""
    for n_kv in (window - 1, window, window + 1, 2 * window + 1):
        for n_q in {1, min(3, n_kv), n_kv}:
            if n_kv > 0:
                yield n_q, n_kv, window
