"""TurboQuant with a scale per 32 values: tbq4_0 and tbq3_0 (elizaOS block layouts; arXiv
2504.19874)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvproof.formats.base import (
    Bytes,
    Counters,
    Floats,
    Format,
    cuts_below,
    nearest_code,
    pack_nibbles,
    reciprocal,
    store_fp16,
    unpack_nibbles,
)
from kvproof.rotation import R32

KV = frozenset({"key", "value"})

_HALF4 = (0.1283243, 0.3878412, 0.6564307, 0.9419147, 1.2557391, 1.6175243, 2.0685055, 2.7321365)
_HALF3 = (0.2450942, 0.7560053, 1.3439093, 2.1519457)
CODEBOOK4 = tuple(-v for v in reversed(_HALF4)) + _HALF4
CODEBOOK3 = tuple(-v for v in reversed(_HALF3)) + _HALF3
_CUTS4, _CUTS3 = cuts_below(CODEBOOK4), cuts_below(CODEBOOK3)
_BOOK4 = np.asarray(CODEBOOK4, np.float32).astype(np.float64)
_BOOK3 = np.asarray(CODEBOOK3, np.float32).astype(np.float64)


def pack_stream3(codes: NDArray[np.uint8]) -> Bytes:
    """3-bit codes `[m, n]` to a little-endian bit stream `[m, 3n / 8]`, element i at bits [3i, 3i
    + 3)."""
    bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :3]
    return np.packbits(bits.reshape(len(codes), -1), axis=-1, bitorder="little")


def unpack_stream3(packed: Bytes) -> NDArray[np.uint8]:
    """Inverse of pack_stream3."""
    bits = np.unpackbits(packed, axis=-1, bitorder="little").reshape(len(packed), -1, 3)
    return (bits[..., 0] | bits[..., 1] << 1 | bits[..., 2] << 2).astype(np.uint8)


def _codes(y: Floats, cuts: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Codes of y over its RMS, and that RMS (float64 sum, rounded to float32); zero blocks get
    code 0."""
    d = np.sqrt(np.mean(np.square(y, dtype=np.float64), axis=-1)).astype(np.float32)
    inverse = reciprocal(d)
    codes = nearest_code(y * inverse[:, None], cuts)
    return np.where(inverse[:, None] == 0, np.uint8(0), codes).astype(np.uint8), d


def _encode_tbq4(y: Floats) -> tuple[Bytes, Counters]:
    codes, d = _codes(y, _CUTS4)
    half, saturated, flushed = store_fp16(d)
    out = np.concatenate([half[:, None].view(np.uint8), pack_nibbles(codes)], axis=-1)
    return out, Counters(saturated, flushed)


def _encode_tbq3(y: Floats) -> tuple[Bytes, Counters]:
    codes, d = _codes(y, _CUTS3)
    half, saturated, flushed = store_fp16(d)
    out = np.concatenate([half[:, None].view(np.uint8), pack_stream3(codes)], axis=-1)
    return out, Counters(saturated, flushed)


def _scaled(b: Bytes, values: NDArray[np.float64]) -> NDArray[np.float64]:
    d = b[:, :2].copy().view(np.float16).astype(np.float64)
    return np.where(d == 0, 0.0, values * d)


def _decode_tbq4(b: Bytes) -> NDArray[np.float64]:
    return _scaled(b, _BOOK4[unpack_nibbles(b[:, 2:])])


def _decode_tbq3(b: Bytes) -> NDArray[np.float64]:
    return _scaled(b, _BOOK3[unpack_stream3(b[:, 2:])])


TBQ4_0 = Format(
    "tbq4_0", 32, 18, 32, KV, _encode_tbq4, _decode_tbq4, spin=R32, ggml_type=45,
    codebook=CODEBOOK4, source="elizaOS TBQ4_0",
)  # fmt: skip
TBQ3_0 = Format(
    "tbq3_0", 32, 14, 32, KV, _encode_tbq3, _decode_tbq3, spin=R32, ggml_type=44,
    codebook=CODEBOOK3, source="elizaOS TBQ3_0",
)  # fmt: skip
