"""q4_polar and q4_polar_res: 4 bits behind an unsigned Hadamard transform (elizaOS block layout;
PolarQuant, arXiv 2502.02617).

A group of 128 values is normalised before it is transformed, and its norm is stored as it is. The
residual bit of q4_polar_res moves all values of a group along one fixed sign vector. Nothing in a
block tells whether the bit was meant to be used, so the two are two formats.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvproof.formats.base import Bytes, Counters, Floats, Format, reciprocal, store_fp16, tamed
from kvproof.rotation import GROUP, POLAR, hadamard, signs_from_hex

KV = frozenset({"key", "value"})

# 100 Lloyd-Max iterations on N(0,1), as published, which is short of the optimum by 0.1 %.
_HALF = (
    0.1317577823, 0.3978971029, 0.6723921169, 0.9626409783,
    1.279739752, 1.643041510, 2.093562707, 2.754354807,
)  # fmt: skip
_HALF_CUTS = (
    0.2648274426, 0.5351446099, 0.8175165476, 1.121190365,
    1.461390631, 1.868302108, 2.423958757,
)  # fmt: skip
CENTROIDS = np.array([-v for v in reversed(_HALF)] + list(_HALF), np.float32)
CUTS = np.array([-v for v in reversed(_HALF_CUTS)] + [0.0, *_HALF_CUTS], np.float32)
RESIDUAL_SIGNS = signs_from_hex("04cb343a54e8cba3f51079dab1262597")
RESIDUAL = 0.5 / np.sqrt(GROUP)  # step of the residual, in units of the centroids

_CODES = slice(2, 2 + GROUP // 2)
_RESIDUAL_BYTE = 2 + GROUP // 2


def _encode(x: Floats, residual: bool) -> tuple[Bytes, Counters]:
    x = tamed(x)
    d = np.sqrt(np.square(x, dtype=np.float64).sum(axis=-1)).astype(np.float32)
    inverse = reciprocal(d)
    y = hadamard(x * inverse[:, None]).astype(np.float32)
    codes = np.searchsorted(CUTS, y, side="right").astype(np.uint8)  # how many cuts are <= y
    live = inverse != 0
    codes[~live] = 0
    half, saturated, flushed = store_fp16(d)
    out = np.zeros((len(x), 82), np.uint8)
    out[:, :2] = half[:, None].view(np.uint8)
    out[:, _CODES] = codes[:, 0::2] | codes[:, 1::2] << 4
    if residual:
        left = y.astype(np.float64) - CENTROIDS[codes]
        out[:, _RESIDUAL_BYTE] = ((left * RESIDUAL_SIGNS).sum(axis=-1) > 0) & live
    return out, Counters(saturated, flushed)


def _decode(b: Bytes, residual: bool) -> NDArray[np.float64]:
    codes = np.empty((len(b), GROUP), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = b[:, _CODES] & 15, b[:, _CODES] >> 4
    values = CENTROIDS.astype(np.float64)[codes]
    if residual:
        sign = np.where(b[:, _RESIDUAL_BYTE] & 1, 1.0, -1.0)[:, None]
        values += sign * RESIDUAL * RESIDUAL_SIGNS
    d = b[:, :2].copy().view(np.float16).astype(np.float64)
    return np.where(d == 0, 0.0, values * d / np.sqrt(GROUP))


Q4_POLAR = Format(
    "q4_polar", GROUP, 82, GROUP, KV, lambda x: _encode(x, False), lambda b: _decode(b, False),
    spin=POLAR, plain_input=True, ggml_type=47, source="elizaOS Q4_POLAR, no residual",
    codebook=tuple(float(c) for c in CENTROIDS / np.sqrt(GROUP)),
)  # fmt: skip
Q4_POLAR_RES = Format(
    "q4_polar_res", GROUP, 82, GROUP, KV, lambda x: _encode(x, True), lambda b: _decode(b, True),
    spin=POLAR, plain_input=True, ggml_type=47, source="elizaOS Q4_POLAR with residual",
)  # fmt: skip
