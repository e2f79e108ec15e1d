"""Encode and decode of rows by the CUDA kernels' own source, run lane by lane as C++.

NumPy's bytes are the reference. No device and no CUDA compiler is needed: lockstep.h stands for
both, so what is tested is the arithmetic and the order of it, not what NVRTC makes of it
(test_cuda.py and the gate do that on a device).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvproof.backends.cuda import program, rows
from kvproof.cases import EDGES, Case
from kvproof.errors import RequestError
from kvproof.formats import Format, all_formats
from kvproof.formats import get as format_named

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or ""
needs_compiler = pytest.mark.skipif(not COMPILER, reason="g++ is not installed")
ENTRIES = """
static kvproof::Args arguments;
extern "C" void run_encode(const kvproof::Args* args, unsigned grid) {
  arguments = *args;
  lockstep::run(grid, [] { kvproof::encode(arguments); });
}
extern "C" void run_decode(const kvproof::Args* args, unsigned grid) {
  arguments = *args;
  lockstep::run(grid, [] { kvproof::decode(arguments); });
}
"""


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """build(format, dim, dtype): rows.cu as a library of the host."""

    @cache
    def built(name: str, dim: int, dtype: str = "float32") -> ctypes.CDLL:
        given = rows.macros(format_named(name), dim, dtype) | {"WARPS": 1}
        folder = tmp_path_factory.mktemp("rows")
        text, library = folder / "rows.cpp", folder / "rows.so"
        text.write_text(f'#include "lockstep.h"\n{program.source("rows.cu")}{ENTRIES}')
        options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
        defined = [f"-D{key}={value}" for key, value in given.items()]
        subprocess.run(
            [COMPILER, *options, *defined, f"-I{HERE}", "-o", str(library), str(text)], check=True
        )
        return ctypes.CDLL(str(library))

    return built


def run(library: ctypes.CDLL, op: str, fmt: Format, dim: int, x: Any, out: Any) -> list[int]:
    """(bad row, saturated, flushed) as a kernel counts them, by blocks of one warp."""
    args = rows.arguments(fmt, dim)
    report = np.array([rows._NO_ROW, 0, 0], np.int64)
    held = [rows.signs(fmt, dim), rows.tables(fmt)]
    for name, array in zip(("signs", "tables"), held, strict=True):
        if array is not None:
            setattr(args, name, array.ctypes.data)
    args.source, args.to = x.ctypes.data, out.ctypes.data
    args.report, args.rows = report.ctypes.data, len(x)
    getattr(library, f"run_{op}")(ctypes.byref(args), 3)
    return [int(count) for count in report]


def encoded(
    library: ctypes.CDLL, fmt: Format, x: NDArray[Any]
) -> tuple[NDArray[np.uint8], list[int]]:
    out = np.full((len(x), fmt.row_bytes(x.shape[-1])), 0xA5, np.uint8)
    return out, run(library, "encode", fmt, x.shape[-1], np.ascontiguousarray(x), out)


def edges(name: str, dim: int, each: int) -> NDArray[np.float32]:
    cases = [Case("encode", name, head_dim=dim, n_kv=each, inputs=kind) for kind in EDGES]
    return np.concatenate([case.arrays().k.reshape(-1, dim) for case in cases])


DIMS = {"f16": (80, 100), "bf16": (80,), "fp8_e4m3": (80, 100)}
BLOCKS = ("q8_0", "q4_0", "q4_0_rot", "tbq4_0", "tbq3_0")
WIDTHS = [
    (name, dim)
    for name in rows.FORM_OF
    for dim in DIMS.get(name, (96, 128) if name in BLOCKS else (80, 128, 512))
]


@needs_compiler
@pytest.mark.parametrize(("name", "dim"), WIDTHS)
def test_bytes_and_values_are_numpy_s(build: Any, name: str, dim: int) -> None:
    """Encoded bytes and counts, and decoded values, on every edge of the cases."""
    fmt, library = format_named(name), build(name, dim)
    x = edges(name, dim, 9)
    expected, counters = fmt.encode_counted(x)
    blocks, report = encoded(library, fmt, x)
    wrong = np.flatnonzero((blocks != expected).any(axis=-1))
    assert not len(wrong), (wrong, blocks[wrong[0]], expected[wrong[0]])
    assert report == [rows._NO_ROW, counters.scale_saturated, counters.scale_flushed]
    values = np.empty_like(x)
    report = run(library, "decode", fmt, dim, blocks, values)
    np.testing.assert_array_equal(values.view(np.uint32), fmt.decode(blocks).view(np.uint32))
    assert report[0] == rows._NO_ROW


@needs_compiler
@pytest.mark.parametrize("name", list(rows.FORM_OF))
def test_any_bytes_decode_as_in_numpy(build: Any, name: str) -> None:
    """Codes and units that no encoder writes; and the first row with a unit or element that is not
    finite is found."""
    dim = 80 if name in DIMS else 128
    fmt, library = format_named(name), build(name, dim)
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (400, fmt.row_bytes(dim)), np.uint8)
    sound = np.array([_decodes(fmt, row) for row in blocks])
    assert sound.sum() > 20 or name == "f16", "nearly every row has an infinity"
    values = np.empty((len(blocks), dim), np.float32)
    bad = run(library, "decode", fmt, dim, blocks, values)[0]
    assert bad == (rows._NO_ROW if sound.all() else int(np.argmin(sound)))
    good = np.ascontiguousarray(blocks[sound])
    values = np.empty((len(good), dim), np.float32)
    assert run(library, "decode", fmt, dim, good, values)[0] == rows._NO_ROW
    np.testing.assert_array_equal(values.view(np.uint32), fmt.decode(good).view(np.uint32))


def _decodes(fmt: Format, row: NDArray[np.uint8]) -> bool:
    try:
        fmt.decode(row)
    except RequestError:
        return False
    return True


@needs_compiler
@pytest.mark.parametrize("name", ["tq4", "q8_0", "f16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_first_row_that_is_not_finite_is_found(build: Any, name: str, value: float) -> None:
    dim = 80 if name == "f16" else 128
    fmt = format_named(name)
    x = np.random.default_rng(5).standard_normal((40, dim)).astype(np.float32)
    x[33, dim - 1] = x[21, 17] = value
    assert encoded(build(name, dim), fmt, x)[1][0] == 21


@needs_compiler
@pytest.mark.parametrize("name", ["tq3", "q4_0"])
def test_fp16_and_bf16_rows_are_taken_as_their_float32(build: Any, name: str) -> None:
    fmt = format_named(name)
    x = edges(name, 128, 3)
    half = np.clip(x, -65504, 65504).astype(np.float16)
    brain = (x.view(np.uint32) >> 16).astype(np.uint16)
    for dtype, given, wide in (
        ("float16", half, half.astype(np.float32)),
        ("bfloat16", brain, (brain.astype(np.uint32) << 16).view(np.float32)),
    ):
        blocks, _ = encoded(build(name, 128, dtype), fmt, given)
        np.testing.assert_array_equal(blocks, fmt.encode(wide))


@needs_compiler
@pytest.mark.parametrize("n", [1, 3, 4, 5, 12, 13])
def test_every_row_is_written_and_nothing_beyond(build: Any, n: int) -> None:
    """Rows leave four at a time and as words: also where rows or bytes remain."""
    fmt = format_named("tq4")
    x = np.random.default_rng(7).standard_normal((n, 128)).astype(np.float32)
    size = n * fmt.row_bytes(128)
    out = np.full(size + 64, 0xA5, np.uint8)
    run(build("tq4", 128), "encode", fmt, 128, x, out)
    np.testing.assert_array_equal(out[:size].reshape(n, -1), fmt.encode(x))
    assert (out[size:] == 0xA5).all()


def test_formats_and_widths_without_a_kernel_are_refused() -> None:
    for fmt in all_formats():
        reason = rows.takes(fmt, "encode", 128)
        assert (reason is None) == (fmt.name in rows.FORM_OF), fmt.name
        assert reason is None or fmt.name in reason
    assert "2048" in (rows.takes(format_named("tq4"), "decode", 2048) or "")
