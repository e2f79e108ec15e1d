"""Hadamard and sign rotations, and the projection of a sketch, as values.

A rotation is orthonormal, so it keeps inner products: a query is rotated once and a cached row is
never un-rotated. All arithmetic is float32 in a fixed order (butterflies, then one factor), which
native kernels repeat exactly. A projection keeps them on average only; its sums are float64.

Every one of them has `name`, `forward(x)`, `inverse(y)`, `stored_values(n)` and `matrix(n)`, a
float64 `[stored_values(n), n]` with which a stored row is brought back: plain = stored @ matrix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

S32_HEX = "2d4b96a5"  # sign vector of R32 (elizaOS TBQ formats): bit i of byte i // 8, 1 is +1
# The two sign vectors of R128 (elizaOS TurboQuant), before and after the transform.
W1_HEX = "a6fc951bb6a607bd44c4395b56af0db6"
W2_HEX = "6f1153e923709dc085ca5a489d9a5a41"
HEAD_SIGN_SEED = (
    0x6B7670726F6F6621  # "kvproof!" in ASCII; start state of the sign sequence of "head"
)


def hadamard(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """Natural-order Walsh-Hadamard transform of the last axis, not normalised.

    `x` is `[..., n]` with n a power of two; the dtype is kept. H4(1, 2, 3, 4) = (10, -2, -4, 0).
    """
    n = x.shape[-1]
    if n & (n - 1) or n == 0:
        raise ValueError(f"hadamard: length {n} is not a power of two")
    y = np.array(x, copy=True)
    step = 1
    while step < n:
        pairs = y.reshape(*y.shape[:-1], n // (2 * step), 2, step)
        a = pairs[..., 0, :].copy()
        b = pairs[..., 1, :]
        pairs[..., 0, :] = a + b
        pairs[..., 1, :] = a - b
        step *= 2
    return y


def signs_from_hex(text: str) -> Array:
    """+1/-1 float32 vector from little-endian sign bits (bit i of byte i // 8; 1 is +1)."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), bitorder="little")
    return (bits.astype(np.float32) * 2 - 1).astype(np.float32)


def splitmix64(state: int) -> Iterator[int]:
    """The endless 64-bit outputs of splitmix64 from a start state."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        yield z ^ (z >> 31)


@lru_cache(maxsize=64)
def head_signs(head_dim: int) -> Array:
    """The first `head_dim` signs of the sequence used by the "head" rotation.

    splitmix64 from HEAD_SIGN_SEED, 64 signs per output, least significant bit first, 1 is +1. A
    shorter head uses a prefix, so the sequence never has to be stored.
    """
    source = splitmix64(HEAD_SIGN_SEED)
    words = [next(source) for _ in range(-(-head_dim // 64))]
    bits = np.unpackbits(np.array(words, "<u8").view(np.uint8), bitorder="little")
    out = (bits[:head_dim].astype(np.float32) * 2 - 1).astype(np.float32)
    out.flags.writeable = False
    return out


def power_of_two_parts(n: int) -> tuple[int, ...]:
    """Powers of two that add up to n, largest first: 80 -> (64, 16), 96 -> (64, 32), 128 ->
    (128,)."""
    return tuple(1 << b for b in range(n.bit_length() - 1, -1, -1) if n >> b & 1)


@dataclass(frozen=True)
class Rotation:
    """An orthonormal map of the last axis: signs, then a block-diagonal Hadamard, then perhaps
    signs.

    `parts(n)` gives the sizes of the diagonal blocks of a row of n values, `signs(n)` its sign
    vector, `signs_after(n)` the second one.
    """

    name: str
    parts: Callable[[int], tuple[int, ...]]
    signs: Callable[[int], Array]
    signs_after: Callable[[int], Array] | None = None

    def stored_values(self, n: int) -> int:
        """Width of a rotated row of n values: n."""
        return n

    def forward(self, x: Array) -> Array:
        """Rotate float32 `[..., n]`."""
        y = self._blocks(x * self.signs(x.shape[-1]))
        return y * self.signs_after(x.shape[-1]) if self.signs_after else y

    def inverse(self, y: Array) -> Array:
        """Undo `forward` (float32 `[..., n]`)."""
        if self.signs_after:
            y = y * self.signs_after(y.shape[-1])
        return self._blocks(y) * self.signs(y.shape[-1])

    def matrix(self, n: int) -> NDArray[np.float64]:
        """The rotation as a float64 `[n, n]` matrix R with forward(x) = R @ x."""
        signs = self.signs(n).astype(np.float64)
        out = np.zeros((n, n))
        start = 0
        for size in self.parts(n):
            block = hadamard(np.eye(size)) / np.sqrt(size)
            out[start : start + size, start : start + size] = block
            start += size
        if self.signs_after:
            out *= self.signs_after(n).astype(np.float64)[:, None]
        return out * signs

    def _blocks(self, x: Array) -> Array:
        parts = self.parts(x.shape[-1])
        if len(set(parts)) == 1:  # equal blocks: one vectorised transform
            size = parts[0]
            y = hadamard(x.reshape(*x.shape[:-1], len(parts), size))
            return (y * np.float32(1 / np.sqrt(size))).astype(np.float32).reshape(x.shape)
        out = np.empty(x.shape, np.float32)
        start = 0
        for size in parts:
            piece = hadamard(x[..., start : start + size])
            out[..., start : start + size] = piece * np.float32(1 / np.sqrt(size))
            start += size
        return out


GROUP, SKETCH = 128, 256  # values of a group, and of the sketch of one

# id -> start state of splitmix64 and the way to normals (see `projection`).
PROJECTIONS = {
    "ggml": (42 ^ 0xC0FFEE1234567890, "box-muller"),
    "fixture": (0xCAFEBABE12345678, "marsaglia"),
    "fused_fixture": (0xF00DCAFEBABE1234, "marsaglia"),
}


@dataclass(frozen=True)
class Projection:
    """A random map of every group of 128 values to a sketch of 256: group @ table.

    `table` is float32 `[128, 256]`. The bytes of a sketch do not tell which table made them, so
    `id` and `digest` (SHA-256 of the table's little-endian bytes) are part of a format's identity.
    """

    name: str
    id: str
    digest: str
    table: Array = field(repr=False, compare=False)

    def stored_values(self, n: int) -> int:
        """Width of the sketch of a row of n values: 2n."""
        return n // GROUP * SKETCH

    def sketch(self, x: Array) -> NDArray[np.float64]:
        """`x @ table` of float32 `[..., n]`, group by group, in float64: `[..., 2n]`."""
        groups = x.astype(np.float64).reshape(-1, GROUP)
        # No BLAS: its order of summation depends on the machine.
        out: NDArray[np.float64] = np.einsum("gd,ds->gs", groups, self.table.astype(np.float64))
        return out.reshape(*x.shape[:-1], self.stored_values(x.shape[-1]))

    def forward(self, x: Array) -> Array:
        """`sketch`, rounded to float32."""
        return _single(self.sketch(x))

    def inverse(self, y: Array) -> Array:
        """Float32 `[..., 2n]` back to `[..., n]`: the transpose of `forward`, summed in float64.

        No inverse in the strict sense; with it `<forward(q), y> == <q, inverse(y)>`.
        """
        groups = y.astype(np.float64).reshape(-1, SKETCH)
        out = np.einsum("gs,ds->gd", groups, self.table.astype(np.float64))
        return _single(out.reshape(*y.shape[:-1], y.shape[-1] // SKETCH * GROUP))

    def matrix(self, n: int) -> NDArray[np.float64]:
        """Float64 `[2n, n]`: the transposed table once per group."""
        return np.kron(np.eye(n // GROUP), self.table.T).astype(np.float64)


def _single(x: NDArray[np.float64]) -> Array:
    """Float64 to float32; what lies beyond becomes the largest finite number of its sign."""
    top = float(np.finfo(np.float32).max)
    return np.clip(x, -top, top).astype(np.float32)


@lru_cache(maxsize=8)
def projection(id_: str) -> Projection:
    """The projection called `id_`; KeyError if it is not one of PROJECTIONS.

    128 x 256 normals in row-major order. "ggml": u = ((z >> 11) | 1) / 2^53 and Box-Muller in
    float64, cosine then sine. "fixture" and "fused_fixture" (those of the public test data):
    u = ((z >> 11) & 0xFFFFFF) / 2^24 * 2 - 1 and the polar method in float32. Logarithms and
    cosines are taken in float64, so that no machine's float32 library can change a table.
    """
    state, method = PROJECTIONS[id_]
    normals = (_box_muller if method == "box-muller" else _marsaglia)(splitmix64(state))
    table = np.array([next(normals) for _ in range(GROUP * SKETCH)], np.float32)
    digest = hashlib.sha256(table.astype("<f4").tobytes()).hexdigest()
    table = table.reshape(GROUP, SKETCH)
    table.flags.writeable = False
    return Projection("qjl", id_, digest, table)


def _box_muller(source: Iterator[int]) -> Iterator[float]:
    while True:
        u, v = ((next(source) >> 11 | 1) / 2**53 for _ in range(2))
        radius = math.sqrt(-2 * math.log(u))
        yield radius * math.cos(2 * math.pi * v)
        yield radius * math.sin(2 * math.pi * v)


def _marsaglia(source: Iterator[int]) -> Iterator[np.float32]:
    one, two = np.float32(1), np.float32(2)
    while True:
        u, v = (
            np.float32(next(source) >> 11 & 0xFFFFFF) / np.float32(2**24) * two - one
            for _ in range(2)
        )
        r = u * u + v * v
        if r >= one or r == 0:
            continue
        f = np.sqrt(-two * np.float32(math.log(r)) / r)
        yield u * f
        yield v * f


def _tiled(text: str) -> Callable[[int], Array]:
    signs = signs_from_hex(text)
    return lambda n: np.tile(signs, n // len(signs))


R32 = Rotation("r32", lambda n: (32,) * (n // 32), _tiled(S32_HEX))
R128 = Rotation("r128", lambda n: (GROUP,) * (n // GROUP), _tiled(W1_HEX), _tiled(W2_HEX))
POLAR = Rotation("polar", lambda n: (GROUP,) * (n // GROUP), lambda n: np.ones(n, np.float32))
HEAD = Rotation("head", power_of_two_parts, head_signs)
# What llama.cpp does to quantised caches, made for every width that has a head rotation: no signs.
HADAMARD = Rotation("hadamard", power_of_two_parts, lambda n: np.ones(n, np.float32))
