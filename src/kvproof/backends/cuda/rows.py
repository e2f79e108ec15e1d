"""Encode and decode of cached rows on CUDA tensors: what rows.cu is told of a format, and launches.

Bytes are those of the formats' own encode. Tables and constants are those of formats/*.py.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.backends.cuda import program
from kvproof.backends.cuda.device import architecture
from kvproof.formats import Format
from kvproof.formats.base import cuts_below
from kvproof.formats.row import STARTS, search_of
from kvproof.rotation import Rotation

WIDEST = 1024  # values of a row, 32 a lane
WARPS = 8  # of a block
AT_ONCE = 4  # rows of a warp, as in rows.cu
OPTIONS = ("--fmad=false",)  # products and sums round one by one, as NumPy's

# How a format's codes come about: FORM of rows.cu.
FORMS = ("FITTED", "PEAK8", "Q8", "Q4", "NORMED", "HALF", "BRAIN", "E4M3")
FORM_OF = {
    "tq5": "FITTED", "tq4": "FITTED", "tq3": "FITTED", "tq2": "FITTED", "tq8": "PEAK8",
    "q8_0": "Q8", "q4_0": "Q4", "q4_0_rot": "Q4", "tbq4_0": "NORMED", "tbq3_0": "NORMED",
    "f16": "HALF", "bf16": "BRAIN", "fp8_e4m3": "E4M3",
}  # fmt: skip
_BLOCK_BITS = {"q8_0": 8, "q4_0": 4, "q4_0_rot": 4, "tbq4_0": 4, "tbq3_0": 3}
_INPUTS = {"float32": 0, "float16": 1, "bfloat16": 2}
_NO_ROW = 2**63 - 1


class Args(ctypes.Structure):
    """`Args` of rows.cu."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("signs", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("report", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("factor", ctypes.c_float * 16),
        ("book", ctypes.c_float * 32),
        ("cut", ctypes.c_float * 16),
        ("grid", ctypes.c_float),
        ("start", ctypes.c_float),
        ("top", ctypes.c_int),
    ]


def takes(fmt: Format, op: str, dim: int) -> str | None:
    """Why there is no kernel for an operation ("encode" or "decode") on rows of dim values; None
    if there is one."""
    if fmt.name not in FORM_OF:
        return f"{fmt.name}: backend cuda has no {op} kernel for it"
    if dim > WIDEST:
        return f"{fmt.name}: {op} of rows of {dim} values; CUDA kernels take up to {WIDEST}"
    return None


def macros(fmt: Format, dim: int, dtype: str = "float32") -> dict[str, int]:
    """What rows.cu is compiled with for rows of dim values of a format that it `takes`."""
    spin = fmt.rotation
    out = {name: i for i, name in enumerate(FORMS)} | {
        "FORM": FORMS.index(FORM_OF[fmt.name]), "WARPS": WARPS, "AT_ONCE": AT_ONCE,
        "BITS": fmt.bits_per_code or _BLOCK_BITS.get(fmt.name, 8),
        "DIM": dim, "ROW_BYTES": fmt.row_bytes(dim), "INPUT": _INPUTS[dtype],
        "SPIN": 0 if spin == "none" else 32 if spin == "r32" else 1,
    }  # fmt: skip
    if FORM_OF[fmt.name] == "FITTED":
        tries, levels = search_of(fmt.name).cost.shape
        out |= {"TRIES": tries, "LEVELS": levels, "CUTS": len(_nearest(fmt))}
    return out


def signs(fmt: Format, dim: int) -> NDArray[np.float32] | None:
    """The signs of a format's rotation, `[dim]`; None if it changes none."""
    spin = fmt.spin
    if not isinstance(spin, Rotation) or (spin.signs(dim) > 0).all():
        return None
    return np.ascontiguousarray(spin.signs(dim))


@cache
def tables(fmt: Format) -> NDArray[np.uint8] | None:
    """The bytes of `Tables` of rows.cu; None for a format whose unit is not searched for."""
    if FORM_OF[fmt.name] != "FITTED":
        return None
    search = search_of(fmt.name)
    parts = (
        np.ascontiguousarray(search.cost.T), np.ascontiguousarray(search.entry),
        search.beyond.astype("<i4"), _nearest(fmt),
    )  # fmt: skip
    raw = b"".join(part.tobytes() for part in parts)
    return np.frombuffer(raw + bytes(-len(raw) % 16), np.uint8)


def _half(fmt: Format) -> NDArray[np.int64]:
    book = np.asarray(fmt.codebook).astype(np.int64)
    return book[len(book) // 2 :]


def _nearest(fmt: Format) -> NDArray[np.uint16]:
    """Index and entry of a magnitude of h halves of a unit, rounded up: the cuts lie at halves."""
    half = _half(fmt)
    cuts = half[1:] + half[:-1]
    index = np.searchsorted(cuts, np.arange(cuts[-1] + 2), side="left")
    return (index | half[index] << 8).astype("<u2")


def arguments(fmt: Format, dim: int) -> Args:
    """`Args` of a format without its pointers and rows."""
    args = Args()
    if isinstance(fmt.spin, Rotation):
        parts = (32,) if fmt.rotation == "r32" else fmt.spin.parts(dim)
        args.factor[: len(parts)] = [float(np.float32(1 / np.sqrt(size))) for size in parts]
    book = _book(fmt)
    args.book[: len(book)] = book
    form = FORM_OF[fmt.name]
    if form == "NORMED":
        assert fmt.codebook is not None
        cuts = cuts_below(fmt.codebook)
        args.cut[: len(cuts)] = cuts.tolist()
    elif form == "FITTED":
        args.grid = float(search_of(fmt.name).grid)
        args.start = float(STARTS[fmt.name])
        args.top = int(_half(fmt)[-1])
    return args


def _book(fmt: Format) -> list[float]:
    if FORM_OF[fmt.name] == "Q4":
        return [float(code - 8) for code in range(16)]
    return [float(np.float32(value)) for value in fmt.codebook or ()]


def encode(fmt: Format, x: Any) -> tuple[Any, int, int, int]:
    """(blocks, bad row, saturated, flushed) of a contiguous CUDA tensor `[rows, dim]` of float32,
    float16 or bfloat16, for a format that `takes` it.

    blocks are uint8 `[rows, row_bytes]`. The bad row is the first with a NaN or infinity, and
    nothing may then be used; it is -1 where all are finite.
    """
    rows, dim = x.shape
    out = x.new_empty((rows, fmt.row_bytes(dim)), dtype=_torch().uint8)
    bad, saturated, flushed = _launched("encode", fmt, x, out, dim, str(x.dtype).split(".")[-1])
    return out, bad, saturated, flushed


def decode(fmt: Format, blocks: Any, dim: int) -> tuple[Any, int]:
    """(values, bad row) of a contiguous CUDA tensor uint8 `[rows, row_bytes]`.

    values are float32 `[rows, dim]` in the plain basis; the bad row is the first with a scale or
    element that is not finite, or -1.
    """
    out = blocks.new_empty((len(blocks), dim), dtype=_torch().float32)
    return out, _launched("decode", fmt, blocks, out, dim, "float32")[0]


def _torch() -> Any:
    import torch

    return torch


def _launched(
    op: str, fmt: Format, source: Any, to: Any, dim: int, dtype: str
) -> tuple[int, int, int]:
    """The report of a kernel run on torch's current stream, which is waited for."""
    torch = _torch()
    rows = len(source)
    if not rows:
        return -1, 0, 0
    with torch.cuda.device(source.device):
        kernel, args, _ = _prepared(op, fmt, dim, dtype, source.device.index)
        report = torch.tensor([_NO_ROW, 0, 0], dtype=torch.int64, device=source.device)
        mine = Args.from_buffer_copy(args)
        mine.source, mine.to = source.data_ptr(), to.data_ptr()
        mine.report, mine.rows = report.data_ptr(), rows
        kernel((blocks_of(op, rows, kernel, source.device), 1, 1), _stream(source.device), mine)
        bad, saturated, flushed = report.tolist()
    return -1 if bad == _NO_ROW else bad, saturated, flushed


def blocks_of(op: str, rows: int, kernel: program.Kernel, device: Any) -> int:
    """Blocks of a launch: what the rows need, at most what the device holds at once."""
    processors = _torch().cuda.get_device_properties(device).multi_processor_count
    needed = -(-rows // (WARPS * (AT_ONCE if op == "encode" else 1)))
    return int(min(needed, processors * max(1, kernel.blocks_at_once)))


def _stream(device: Any) -> int:
    return int(_torch().cuda.current_stream(device).cuda_stream)


@cache
def _prepared(op: str, fmt: Format, dim: int, dtype: str, device: int) -> tuple[Any, Args, Any]:
    """Kernel and arguments of a format on a device, and the tensors that these point to."""
    torch = _torch()
    kernel = program.Kernel(
        "rows.cu", op, macros(fmt, dim, dtype),
        architecture(torch.cuda.get_device_capability(device)),
        threads=32 * WARPS, shared=0, options=OPTIONS,
    )  # fmt: skip
    args = arguments(fmt, dim)
    held = []
    for name, array in (("signs", signs(fmt, dim)), ("tables", tables(fmt))):
        if array is not None:
            held.append(torch.tensor(array, device=f"cuda:{device}"))
            setattr(args, name, held[-1].data_ptr())
    return kernel, args, held
