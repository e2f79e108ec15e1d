"""Model weights for the engine: GGUF tensors as torch tensors, and products with them.

Weights stay bf16 (a decode step reads all of them once, so their bytes are its time), activations
are float32. `linear` runs natively: on CPUs without bf16 instructions torch 2.13 multiplies bf16
several times slower than float32 (262144 x 640 by 64 tokens on two Zen 3 cores: 1209 ms in bf16,
337 ms in float32, 201 ms here without a float32 copy of the weights).
"""

from __future__ import annotations

from typing import Any

import torch

import kvproof._weights
from kvproof.backends.cpu import default_threads
from kvproof.errors import RequestError
from kvproof.gguf import GGUF, TensorInfo

_weights: Any = kvproof._weights

READABLE = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "q4_k": 12,
    "q5_k": 13,
    "q6_k": 14,
    "bf16": 30,
}


def isa() -> str:
    """Instruction set in use, named as in `backends.cpu.isas`; RequestError if KVPROOF_CPU_ISA
    names one that cannot run here."""
    try:
        name: str = _weights.isa()
    except ValueError as error:
        raise RequestError(str(error)) from error
    return name


def read_tensor(file: GGUF, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    """Tensor `info` of `file` as float32 or bfloat16, axes in torch's order ([out, in]).

    Float32 equals ggml's reference bit for bit; bfloat16 is that rounded to nearest even. Written
    straight into the result, and the file's pages are let go, so peak memory is the tensor itself.
    RequestError for types that cannot be read.
    """
    if info.ggml_type not in READABLE.values():
        raise RequestError(
            f"{file.path}: tensor {info.name!r}: type {info.type_name} cannot be dequantized here; "
            f"convert the file to {', '.join(READABLE)}"
        )
    out = torch.empty(info.shape[::-1], dtype=dtype)
    _weights.advise_huge(out.data_ptr(), out.nbytes)
    source = file.data(info.name)
    if dtype == torch.float32:
        _weights.dequantize_f32(info.ggml_type, source, out, default_threads())
    elif dtype == torch.bfloat16:
        _weights.dequantize_bf16(info.ggml_type, source, out.view(torch.int16), default_threads())
    else:
        raise ValueError(f"tensors are read as float32 or bfloat16, not {dtype}")
    _weights.release_mapped(source)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, threads: int) -> torch.Tensor:
    """Float32 `[..., in]` times bfloat16 weight `[out, in]`, transposed: float32 `[..., out]`."""
    n, k = weight.shape
    if x.dtype != torch.float32 or weight.dtype != torch.bfloat16 or x.shape[-1] != k:
        raise ValueError(
            f"linear: expected float32 [..., {k}] and bfloat16 [{n}, {k}], found {x.dtype} "
            f"{list(x.shape)} and {weight.dtype}"
        )
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty((*x.shape[:-1], n))
    rows = x.numel() // k
    _weights.linear(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, n, k, threads)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Float32 `[..., n]` divided by its root mean square over the last axis, times weight `[n]`."""
    n = weight.numel()
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or x.shape[-1] != n:
        raise ValueError(
            f"rms_norm: expected float32 [..., {n}] and float32 [{n}], found {x.dtype} "
            f"{list(x.shape)} and {weight.dtype}"
        )
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    _weights.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // n, n, eps)
    return out
