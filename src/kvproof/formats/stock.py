"""The formats that engines ship today: f16, bf16, fp8_e4m3, q8_0, q4_0 (the last two byte-equal to
ggml's), and q4_0_rot: q4_0 of rows that went through a Hadamard transform first, which is what
llama.cpp stores in a q4_0 cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvproof.formats.base import (
    Bytes,
    Counters,
    Floats,
    Format,
    load_bf16,
    pack_nibbles,
    reciprocal,
    store_bf16,
    store_fp16,
    unpack_nibbles,
)
from kvproof.rotation import HADAMARD

KV = frozenset({"key", "value"})
ANY = frozenset({"key", "value", "weight"})


def _encode_f16(y: Floats) -> tuple[Bytes, Counters]:
    half, saturated, _ = store_fp16(y)
    return half.view(np.uint8), Counters(scale_saturated=saturated)


def _decode_f16(b: Bytes) -> NDArray[np.float64]:
    return b.view(np.float16).astype(np.float64)


def _encode_bf16(y: Floats) -> tuple[Bytes, Counters]:
    bits, saturated, _ = store_bf16(y)
    return bits.view(np.uint8), Counters(scale_saturated=saturated)


def _decode_bf16(b: Bytes) -> NDArray[np.float64]:
    return load_bf16(b.view(np.uint16))


def _e4m3_values() -> NDArray[np.float64]:
    """All 256 OCP E4M3FN values by code (NaN at 0x7f and 0xff, no infinities)."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    positive = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    positive[127] = np.nan
    return np.concatenate([positive, -positive])


E4M3 = _e4m3_values()
_E4M3_CUTS = (E4M3[:126] + E4M3[1:127]) / 2


def _encode_fp8(y: Floats) -> tuple[Bytes, Counters]:
    magnitude = np.abs(y).astype(np.float64)
    code = np.searchsorted(_E4M3_CUTS, magnitude, side="left")  # a tie lands on the lower code
    tie = magnitude == _E4M3_CUTS[np.minimum(code, 125)]
    code = np.where(tie & (code % 2 == 1) & (code < 126), code + 1, code)  # ties to even
    code = np.minimum(code, 126)
    saturated = int((magnitude >= 464).sum())  # 464 is midway to the value after 448
    return (code | (np.signbit(y) << 7)).astype(np.uint8), Counters(scale_saturated=saturated)


def _decode_fp8(b: Bytes) -> NDArray[np.float64]:
    return E4M3[b]


def _encode_q8_0(y: Floats) -> tuple[Bytes, Counters]:
    d = (np.abs(y).max(axis=-1) / np.float32(127)).astype(np.float32)
    scaled = (y * reciprocal(d)[:, None]).astype(np.float64)
    codes = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)  # halves away from zero
    half, saturated, flushed = store_fp16(d)
    out = np.empty((len(y), 34), np.uint8)
    out[:, :2] = half[:, None].view(np.uint8)
    out[:, 2:] = codes.astype(np.int8).view(np.uint8)
    return out, Counters(saturated, flushed)


def _decode_q8_0(b: Bytes) -> NDArray[np.float64]:
    d = b[:, :2].copy().view(np.float16).astype(np.float64)
    codes = b[:, 2:].copy().view(np.int8).astype(np.float64)
    return np.where(d == 0, 0.0, codes * d)


def _encode_q4_0(y: Floats) -> tuple[Bytes, Counters]:
    largest = np.take_along_axis(y, np.abs(y).argmax(axis=-1)[:, None], axis=-1)[:, 0]
    # ggml starts from +0, so a zero block stores -0.0 whatever the signs of its zeros.
    d = np.where(largest == 0, np.float32(-0.0), largest / np.float32(-8)).astype(np.float32)
    codes = np.floor(y * reciprocal(d)[:, None] + np.float32(8.5))
    half, saturated, flushed = store_fp16(d)
    out = np.empty((len(y), 18), np.uint8)
    out[:, :2] = half[:, None].view(np.uint8)
    out[:, 2:] = pack_nibbles(np.clip(codes, 0, 15).astype(np.uint8))
    return out, Counters(saturated, flushed)


def _decode_q4_0(b: Bytes) -> NDArray[np.float64]:
    d = b[:, :2].copy().view(np.float16).astype(np.float64)
    codes = unpack_nibbles(b[:, 2:]).astype(np.float64) - 8
    return np.where(d == 0, 0.0, codes * d)


F16 = Format("f16", 1, 2, 1, ANY, _encode_f16, _decode_f16, ggml_type=1, source="IEEE binary16")
BF16 = Format("bf16", 1, 2, 1, ANY, _encode_bf16, _decode_bf16, ggml_type=30, source="bfloat16")
FP8_E4M3 = Format(
    "fp8_e4m3", 1, 1, 1, KV, _encode_fp8, _decode_fp8, scaled=True, source="OCP E4M3FN"
)
Q8_0 = Format("q8_0", 32, 34, 32, ANY, _encode_q8_0, _decode_q8_0, ggml_type=8, source="ggml")
Q4_0 = Format("q4_0", 32, 18, 32, ANY, _encode_q4_0, _decode_q4_0, ggml_type=2, source="ggml")
Q4_0_ROT = Format(
    "q4_0_rot", 32, 18, 32, KV, _encode_q4_0, _decode_q4_0, spin=HADAMARD,
    source="ggml, rotated as in llama.cpp",
)  # fmt: skip
