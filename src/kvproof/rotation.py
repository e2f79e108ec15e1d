"""Hadamard and sign rotations, as values.

A rotation is orthonormal, so it keeps inner products: a query is rotated once and a cached row is
never un-rotated. All arithmetic is float32 in a fixed order (butterflies, then one factor), which
native kernels repeat exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

S32_HEX = "2d4b96a5"  # sign vector of R32 (elizaOS TBQ formats): bit i of byte i // 8, 1 is +1
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


@lru_cache(maxsize=64)
def head_signs(head_dim: int) -> Array:
    """The first `head_dim` signs of the sequence used by the "head" rotation.

    splitmix64 from HEAD_SIGN_SEED, 64 signs per output, least significant bit first, 1 is +1. A
    shorter head uses a prefix, so the sequence never has to be stored.
    """
    words = []
    state = HEAD_SIGN_SEED
    for _ in range(-(-head_dim // 64)):
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        words.append(z ^ (z >> 31))
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
    """An orthonormal map of the last axis: signs, then a block-diagonal Hadamard.

    `parts(n)` gives the sizes of the diagonal blocks of a row of n values, `signs(n)` its sign
    vector.
    """

    name: str
    parts: Callable[[int], tuple[int, ...]]
    signs: Callable[[int], Array]

    def forward(self, x: Array) -> Array:
        """Rotate float32 `[..., n]`."""
        return self._blocks(x * self.signs(x.shape[-1]))

    def inverse(self, y: Array) -> Array:
        """Undo `forward` (float32 `[..., n]`)."""
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


_S32 = signs_from_hex(S32_HEX)
_S32.flags.writeable = False

R32 = Rotation("r32", lambda n: (32,) * (n // 32), lambda n: np.tile(_S32, n // 32))
HEAD = Rotation("head", power_of_two_parts, head_signs)
