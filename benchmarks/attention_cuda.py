"""Attention of one token over an encoded cache on a CUDA device, against torch's bf16 attention.

    python benchmarks/attention_cuda.py                  # every shape and format of the tables
    python benchmarks/attention_cuda.py --shapes 8,32,8,128,32768 --formats tq4 --evidence FILE

A shape is batch, query heads, KV heads, head_dim, tokens. Time is that of a CUDA graph of 20
launches, over as many copies of the cache as make 420 MB, so that no launch finds its rows in L2;
the median of `--rounds` replays, in turns with every other candidate, with 95 % bootstrap
intervals of the ratios. The baseline is the faster of torch's flash and cuDNN attention in
bfloat16 with `enable_gqa`, whose caches are larger than L2; where neither has a kernel (head_dim
512), its other forms. "copy" is the share of the bandwidth of
a device-to-device copy of 4 GiB (bytes read and written) in the same run; kvproof's bytes are those
of the rows. Rows are random and repeat every 2048 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvproof import backends, evidence, formats
from kvproof.backends import tiles
from kvproof.backends.cuda import CudaBackend
from kvproof.evidence import Environment, Evidence, Outcome
from kvproof.stats import interleaved_ratio

SHAPES = (
    "8,32,8,128,32768;1,32,8,128,131072;16,8,1,256,32768;4,8,1,256,131072;4,8,1,512,65536;"
    "32,32,8,128,2048"
)
FORMATS = "tq4,tq3,tbq4_0,q4_0,q8_0"
LAUNCHES = 20  # of a graph
ROTATED = 420e6  # bytes that launches go round
ROWS = 2048  # tokens that are encoded
TORCH = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
OTHERS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
Launch = Callable[[int], object]


def copy_bandwidth() -> float:
    """GB/s of a copy of 4 GiB on the device, bytes read and written; the median of ten."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() / float(np.median(times[2:])) / 1e6


def captured(launch: Launch) -> torch.cuda.CUDAGraph:
    """A graph of LAUNCHES launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for i in range(LAUNCHES):
                launch(i)
    torch.cuda.current_stream().wait_stream(side)
    return graph


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of a launch."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / LAUNCHES


def caches(be: CudaBackend, name: str, shape: tuple[int, ...]) -> tuple[list[Any], int]:
    """Copies of (keys, values) in tiles `[batch * kv_heads, tiles, bytes]`, and bytes of one."""
    batch, _, kv_heads, dim, n = shape
    fmt, found = formats.get(name), []
    x = np.random.default_rng(0).standard_normal((2, ROWS, 1, dim), dtype=np.float32)
    for side, rows in zip(tiles.SIDES, x, strict=True):
        encoded = torch.from_numpy(np.asarray(be.encode(fmt, rows))).cuda()
        size = tiles.TOKENS * encoded.shape[2]
        one = torch.zeros((1, ROWS // tiles.TOKENS, size), dtype=torch.uint8, device="cuda")
        be.pack(fmt, side, encoded, one, 0)
        count = n // tiles.TOKENS
        head = one.repeat(1, -(-count // one.shape[1]), 1)[:, :count]
        found.append(head.expand(batch * kv_heads, -1, -1).contiguous())
    nbytes = sum(t.numel() for t in found)
    copies = min(8, max(1, int(np.ceil(ROTATED / nbytes))))
    return [tuple(t.clone() for t in found) for _ in range(copies)], nbytes


def ours(be: CudaBackend, name: str, shape: tuple[int, ...]) -> tuple[Launch, int]:
    """A launch for a token of every sequence, and the bytes of the cache that it reads."""
    batch, heads, _, dim, n = shape
    sets, nbytes = caches(be, name, shape)
    q = torch.randn((1, batch * heads, dim), device="cuda")
    fmt = formats.get(name)

    def launch(i: int) -> object:
        k, v = (
            tiles.Tiles(fmt, side, buffer, 0, n)
            for side, buffer in zip(tiles.SIDES, sets[i % len(sets)], strict=True)
        )
        return be.attention(q, k, v, key=fmt, value=fmt)

    return launch, nbytes


def torch_launch(backend: SDPBackend, shape: tuple[int, ...]) -> Launch:
    """torch's attention in bfloat16."""
    batch, heads, kv_heads, dim, n = shape
    q = torch.randn((batch, heads, 1, dim), dtype=torch.bfloat16, device="cuda")
    k, v = (
        torch.randn((batch, kv_heads, n, dim), dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )

    def launch(_: int) -> object:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return launch


def measure(
    be: CudaBackend, shape: tuple[int, ...], names: list[str], rounds: int, copy: float
) -> list[dict[str, Any]]:
    """One row for each candidate and form of torch's attention."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    nbytes: dict[str, int] = {}
    kept: list[Launch] = []  # graphs hold no tensors
    for label, backend in (TORCH | OTHERS).items():
        if label in OTHERS and graphs:
            break
        try:
            launch = torch_launch(backend, shape)
            graphs[f"torch {label}"] = captured(launch)
            kept.append(launch)
        except RuntimeError as error:
            print(f"not timed: torch {label}: {str(error).splitlines()[0]}", file=sys.stderr)
            torch.cuda.synchronize()
    baselines = list(graphs)
    for name in names:
        launch, nbytes[name] = ours(be, name, shape)
        graphs[name] = captured(launch)
        kept.append(launch)
    times: dict[str, list[float]] = {label: [] for label in graphs}
    order = list(graphs)
    shuffle = np.random.default_rng(0).shuffle
    for turn in range(rounds + 2):  # two to warm up
        shuffle(order)
        for label in order:
            ms = replay(graphs[label])
            if turn >= 2:
                times[label].append(ms)
    best = min(baselines, key=lambda label: float(np.median(times[label])))
    rows = []
    for label, t in times.items():
        ratio, median = interleaved_ratio(t, times[best]), float(np.median(t))
        row: dict[str, Any] = {
            "shape": list(shape), "name": label, "median_ms": median, "min_ms": min(t),
            "baseline": best, "ratio": ratio.value, "low": ratio.low, "high": ratio.high,
            "rounds": rounds,
        }  # fmt: skip
        if label in nbytes:
            row |= {"gb": nbytes[label] / 1e9, "of_copy": nbytes[label] / median / 1e6 / copy}
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n(batch, heads, KV heads, head_dim, tokens) = {tuple(rows[0]['shape'])}; baseline: "
          f"{rows[0]['baseline']}")  # fmt: skip
    for r in rows:
        share = f"{r['of_copy']:.3f} of copy, {r['gb']:.3f} GB" if "of_copy" in r else ""
        print(f"  {r['name']:12s} {r['median_ms']:.4f} ms (min {r['min_ms']:.4f})  "
              f"{r['ratio']:.2f}x [{r['low']:.2f}, {r['high']:.2f}]  {share}")  # fmt: skip


def record(be: CudaBackend, row: dict[str, Any], copy: float) -> Evidence:
    """A row as evidence. Not a "speed" record: those belong to a decision and need a gate."""
    batch, heads, kv_heads, dim, n = row["shape"]
    subject = {
        "kind": "bench", "backend": "cuda", "op": "attention", "name": row["name"],
        "baseline": row["baseline"], "batch": batch, "num_heads": heads, "num_kv_heads": kv_heads,
        "head_dim": dim, "tokens": n, "n_q": 1, "torch": torch.__version__,
    }  # fmt: skip
    metrics = {k: v for k, v in row.items() if isinstance(v, (int, float))}
    metrics["copy_gb_per_s"] = copy
    return Evidence(
        subject, Outcome.PASSED, metrics, Environment.current(be.environment()), be.digest()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES, help="batch,heads,kv_heads,head_dim,tokens;...")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", help="write all rows here")
    parser.add_argument("--evidence", help="add all rows to this evidence file (JSON Lines)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # torch on kernels that it lacks
    be: Any = backends.get("cuda")
    copy = copy_bandwidth()
    environment = be.environment() | {"torch": torch.__version__, "copy_gb_per_s": copy}
    for key, value in environment.items():
        print(f"{key}: {value}")
    rows = []
    for text in args.shapes.split(";"):
        shape = tuple(int(part) for part in text.split(","))
        table = measure(be, shape, args.formats.split(","), args.rounds, copy)
        show(table)
        rows += table
        if args.evidence:
            evidence.Store(args.evidence).append(*(record(be, row, copy) for row in table))
        torch.cuda.empty_cache()
    if args.json:
        Path(args.json).write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
