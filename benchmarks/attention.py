"""Attention over an encoded cache against torch's scaled_dot_product_attention, in one run.

    python benchmarks/attention.py                       # decode: one query after N cached tokens
    python benchmarks/attention.py --formats tq4,q8_0/tq4 --shapes 32,8,128,32768 --json out.json
    python benchmarks/attention.py --scaling             # threads 1 and all, 1k to 128k tokens

By default every format that has a kernel is timed for keys and values, and the pairs in PAIRS.

Every round visits each candidate and each torch variant, in shuffled order, so that a slow moment
of the machine hits all of them. A visit starts from 10 ms of rest, since OpenMP workers of the call
before it go on spinning for a while and would take a core from it, and makes five calls: the first
is the time "from rest" (threads asleep, caches cold), the median of the others the time of a loop
that calls again and again, as decoding does. Ratios are of the latter; both are printed. The
baseline is the torch variant with the lowest median
among bf16, f16 and f32, with `enable_gqa` and with the query group folded into the query length
(the faster form: K and V are then read once a group). The ratio is the median over rounds of
baseline / candidate with its 95 % bootstrap interval; "of f16" is the same against our own f16
attention, and those that lose to it are named below the table. Our side is the call that a layer's
cache makes for a token (`Step.attend`), on buffers as the cache holds them. Prompts are in
benchmarks/prefill.py. Run on a quiet machine: the load average is printed and stored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvproof import evidence, formats
from kvproof.backends.cpu import CpuBackend, default_threads
from kvproof.evidence import Environment, Evidence, Outcome
from kvproof.stats import interleaved_ratio
from kvproof.store import RowStore, Store, TileStore

DECODE = "32,8,128,32768;4,1,256,32768;8,1,512,32768;9,3,64,32768"
# Keys and values in different formats: sketched keys, and more bits for keys than for values.
PAIRS = (
    "qjl1_256/tbq3_0", "qjl1_256/q4_polar", "tbq4_0/tbq3_0", "q8_0/tq4", "tq8/tq4", "tq4/tq3",
    "tq4/tcq3", "tcq4/tcq3",
)  # fmt: skip
ENCODED = 2048  # tokens that are encoded; longer caches repeat them
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
TOO_SLOW = 8.0  # times the fastest torch variant of the warm-up
FOLDED_BF16 = "torch bf16 folded"  # the strongest baseline on a quiet machine: never left out
LENGTHS = (1024, 4096, 16384, 65536, 131072)
REST = 0.01  # seconds
CALLS = 5  # of a visit
Run = Callable[[], object]


def shapes_of(text: str, parts: str) -> list[tuple[int, ...]]:
    """Shapes apart by semicolons, each of as many positive numbers as `parts` names."""
    count, found = len(parts.split(",")), []
    for shape in text.split(";"):
        numbers = shape.split(",")
        positive = all(n.isascii() and n.isdigit() and int(n) for n in numbers)
        if len(numbers) != count or not positive:
            raise argparse.ArgumentTypeError(f"{shape!r} is not {parts}, all positive numbers")
        found.append(tuple(map(int, numbers)))
    return found


def gaussian(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def read_bandwidth(threads: int) -> float:
    """GB/s of torch summing 256 MiB of float32, best of ten."""
    torch.set_num_threads(threads)
    x = torch.ones(1 << 26)
    best = min(timed(lambda: x.sum()) for _ in range(10))
    return x.numel() * 4 / best / 1e9


def timed(run: Run) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def visit(run: Run) -> tuple[float, float]:
    """Seconds of a call from rest, and of the calls that follow it at once (their median)."""
    time.sleep(REST)
    first = timed(run)
    return first, float(np.median([timed(run) for _ in range(CALLS - 1)]))


def pair_of(name: str) -> tuple[str, str]:
    """Formats of keys and values: "tq4" is "tq4/tq4"."""
    key, _, value = name.partition("/")
    return key, value or key


def why_not(be: CpuBackend, name: str, dim: int) -> str | None:
    """Why a pair cannot be timed at a head_dim."""
    for f, side in zip(map(formats.get, pair_of(name)), ("key", "value"), strict=True):
        why = f.refuses(dim, side) or be.refuses("attention", f, dim)
        if why:
            return why
    return None


def default_names() -> list[str]:
    both = [f.name for f in formats.all_formats() if {"key", "value"} <= f.sides]
    known = {f.name for f in formats.all_formats()}
    return both + [pair for pair in PAIRS if set(pair_of(pair)) <= known]


def held(be: CpuBackend, name: str, side: str, x: np.ndarray, tiled: bool) -> Store:
    """x `[kv_heads, n, dim]` encoded, as a layer's cache keeps it."""
    fmt, (heads, n, dim) = formats.get(name), x.shape
    size = fmt.row_bytes(dim)
    store = TileStore(fmt, side, heads, size, be) if tiled else RowStore(heads, size)
    store.move(0, 0, n)
    rows = be.encode(fmt, x[:, :ENCODED]).transpose(1, 0, 2)
    for at in range(0, n, ENCODED):
        store.write(at, rows[: n - at])
    return store


def ours(
    be: CpuBackend,
    name: str,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    threads: int | None = None,
) -> tuple[Run, int]:
    """The call for a token, q `[1, heads, dim]`, and the bytes of the cache that it reads."""
    key, value = pair_of(name)
    dims = k.shape[2], v.shape[2]
    tiled = be.arranges(key, value, *dims)
    keys, values = held(be, key, "key", k, tiled), held(be, value, "value", v, tiled)
    step = be.step(key, value, (q.shape[1], k.shape[0]), dims, tiled=tiled)
    if step is None:
        raise SystemExit(f"{name}: {be.name} has no call for a token")
    n, scale, out = k.shape[1], dims[0] ** -0.5, np.empty((1, q.shape[1], dims[1]), np.float32)

    def run() -> None:
        none = None
        if not step.attend(threads, q, keys.buffer, values.buffer, 0, n, -1, scale, none, none,
                           none, none, -1, none, 0, 0, out):  # fmt: skip
            raise SystemExit(f"{name}: a number is not finite")

    return run, n * k.shape[0] * (formats.get(key).row_bytes(dims[0])
                                  + formats.get(value).row_bytes(dims[1]))  # fmt: skip


def torch_variants(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, Run]:
    """scaled_dot_product_attention by dtype and form; q `[1, heads, dim]`."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    heads, dim = q.shape[1:]
    kv_heads = k.shape[0]
    group = heads // kv_heads
    out: dict[str, Run] = {}
    for name, dtype in DTYPES.items():
        keys, values = (torch.from_numpy(x)[None].to(dtype) for x in (k, v))
        plain = torch.from_numpy(q).permute(1, 0, 2)[None].to(dtype).contiguous()
        folded = plain.reshape(1, kv_heads, group, dim)
        out[f"torch {name} gqa"] = lambda q=plain, k=keys, v=values: sdpa(q, k, v, enable_gqa=True)
        out[f"torch {name} folded"] = lambda q=folded, k=keys, v=values: sdpa(q, k, v)
    return out


def measure(
    be: CpuBackend,
    shape: tuple[int, ...],
    names: list[str],
    rounds: int,
    bandwidth: float,
    with_torch: bool = True,
) -> list[dict[str, Any]]:
    heads, kv_heads, dim, n = shape
    q = gaussian(0, 1, heads, dim)
    k, v = gaussian(1, kv_heads, n, dim), gaussian(2, kv_heads, n, dim)
    runs: dict[str, Run] = {}
    nbytes: dict[str, int] = {}
    for name in names:
        if why_not(be, name, dim) is None:
            runs[name], nbytes[name] = ours(be, name, q, k, v)
    baselines = torch_variants(q, k, v) if with_torch else {}
    for run in runs.values():
        run()
    warm = {label: min(timed(run) for _ in range(3)) for label, run in baselines.items()}
    fastest = min(warm.values(), default=0.0)
    slow = [n for n, t in warm.items() if t > TOO_SLOW * fastest and n != FOLDED_BF16]
    for label in slow:  # never the best one, and they would take most of the time
        print(f"not timed further: {label}, {warm[label] * 1e3:.1f} ms", file=sys.stderr)
        del baselines[label]
    runs |= baselines
    times: dict[str, list[float]] = {label: [] for label in runs}
    from_rest: dict[str, list[float]] = {label: [] for label in runs}
    order = list(runs)
    shuffle = np.random.default_rng(0).shuffle  # nobody always follows the same neighbour
    for _ in range(rounds):
        shuffle(order)
        for label in order:
            first, steady = visit(runs[label])
            from_rest[label].append(first)
            times[label].append(steady)
    best = (
        "f16" if not baselines else min(baselines, key=lambda label: float(np.median(times[label])))
    )
    table = []
    for label, t in times.items():
        ratio = interleaved_ratio(t, times[best])
        median = float(np.median(t))
        row: dict[str, Any] = {
            "shape": list(shape), "n_q": 1, "name": label, "median_ms": median * 1e3,
            "min_ms": min(t) * 1e3, "rest_ms": float(np.median(from_rest[label])) * 1e3,
            "rest_ratio": float(np.median(from_rest[best]) / np.median(from_rest[label])),
            "baseline": best, "ratio": ratio.value, "low": ratio.low,
            "high": ratio.high, "rounds": rounds,
        }  # fmt: skip
        if label in nbytes:
            own = interleaved_ratio(t, times["f16"])
            row |= {"of_f16": own.value, "of_f16_low": own.low, "of_f16_high": own.high}
            tiled = be.arranges(*pair_of(label), dim, dim)
            op = "attention_tiles" if tiled else "attention"
            row["kernel"] = be.kernel(op, pair_of(label)[0], dim)
            row["gb_per_s"] = nbytes[label] / median / 1e9
            row["share_of_read_bandwidth"] = row["gb_per_s"] / bandwidth
        table.append(row)
    return table


LEGEND = """
Columns: median of a call in a loop, and the least; speed against the baseline that the table names
and against our own f16, each with its 95 % interval: above 1 is faster; the rate at which the cache
was read, and its share of read_gb_per_s; time and speed of a first call after a rest."""


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n(heads, kv heads, head_dim, tokens) = {tuple(rows[0]['shape'])}; "
          f"baseline: {rows[0]['baseline']}")  # fmt: skip
    for r in rows:
        traffic = ""
        if "gb_per_s" in r:
            traffic = f"of f16 {r['of_f16']:5.2f}x [{r['of_f16_low']:.2f}, {r['of_f16_high']:.2f}]"
            traffic += f" {r['gb_per_s']:7.1f} GB/s {100 * r['share_of_read_bandwidth']:4.0f} %"
        print(f"  {r['name']:18s} {r['median_ms']:9.3f} ms (min {r['min_ms']:9.3f})  "
              f"{r['ratio']:6.2f}x [{r['low']:.2f}, {r['high']:.2f}] {traffic}  "
              f"from rest {r['rest_ms']:.3f} ms {r['rest_ratio']:.2f}x")  # fmt: skip
    ours_only = [r for r in rows if "of_f16" in r and r["name"] != "f16"]
    rivals = {"our f16": ("of_f16", "of_f16_high")}
    if rows[0]["baseline"] != "f16":
        rivals[rows[0]["baseline"]] = ("ratio", "high")
    for against, (value, high) in rivals.items():
        lost = sorted((r for r in ours_only if r[high] < 1), key=lambda r: r[value])
        close = [r["name"] for r in ours_only if r[value] < 1 <= r[high]]
        texts = [f"{r['name']} takes {1 / r[value]:.2f} times as long" for r in lost]
        print(f"  slower than {against}: {'; '.join(texts) or 'none'}")
        if close:
            print(f"  not told apart from {against}: {', '.join(close)}")


def scaling(
    be: CpuBackend, names: list[str], shape: tuple[int, ...], threads: list[int], rounds: int
) -> list[dict[str, Any]]:
    """One query after LENGTHS tokens by number of threads, all in the same rounds; the time of a
    token in the cache should not depend on how many there are."""
    heads, kv_heads, dim = shape[:3]
    runs: dict[tuple[str, int, int], Run] = {}
    q = gaussian(0, 1, heads, dim)
    for n in LENGTHS:
        k, v = gaussian(1, kv_heads, n, dim), gaussian(2, kv_heads, n, dim)
        for name in names:
            if why_not(be, name, dim) is None:
                for t in threads:
                    runs[name, n, t] = ours(be, name, q, k, v, t)[0]
    times: dict[tuple[str, int, int], list[float]] = {key: [] for key in runs}
    order = list(runs)
    shuffle = np.random.default_rng(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for key in order:
            times[key].append(visit(runs[key])[1])
    table = []
    for (name, n, t), found in times.items():
        speedup = interleaved_ratio(found, times[name, n, threads[0]])
        median = float(np.median(found))
        table.append({
            "shape": [*shape[:3], n], "n_q": 1, "name": name, "threads": t, "baseline": name,
            "median_ms": median * 1e3, "min_ms": min(found) * 1e3, "rounds": rounds,
            "ns_per_token": median / n * 1e9, "min_ns_per_token": min(found) / n * 1e9,
            "ratio": speedup.value, "low": speedup.low, "high": speedup.high,
        })  # fmt: skip
    return table


def show_scaling(rows: list[dict[str, Any]]) -> None:
    print(f"\n(heads, kv heads, head_dim) = {tuple(rows[0]['shape'][:3])}: one query; ns a token "
          "in the cache, and speed against the fewest threads")  # fmt: skip
    for r in rows:
        print(f"  {r['name']:12s} {r['shape'][3]:7d} tokens  {r['threads']} threads "
              f"{r['median_ms']:9.3f} ms (min {r['min_ms']:9.3f})  {r['ns_per_token']:7.1f} ns "
              f"(min {r['min_ns_per_token']:.1f})  {r['ratio']:.2f}x "
              f"[{r['low']:.2f}, {r['high']:.2f}]")  # fmt: skip


def record(be: CpuBackend, row: dict[str, Any], environment: dict[str, Any]) -> Evidence:
    """A row as evidence. Not a "speed" record: those belong to a decision and need a gate."""
    heads, kv_heads, dim, n = row["shape"]
    subject = {
        "kind": "bench", "backend": "cpu", "op": "attention", "name": row["name"],
        "baseline": row["baseline"], "num_heads": heads, "num_kv_heads": kv_heads,
        "head_dim": dim, "tokens": n, "n_q": row["n_q"], "torch": environment["torch"],
    }  # fmt: skip
    if "threads" in row:
        subject |= {"op": "attention scaling", "threads": row["threads"]}
    metrics = {k: v for k, v in row.items() if isinstance(v, (int, float)) and k != "n_q"}
    return Evidence(
        subject, Outcome.PASSED, metrics, Environment.current(be.environment()), be.digest()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = "heads,kv_heads,head_dim,tokens"
    parser.add_argument(
        "--shapes", type=partial(shapes_of, parts=parts), default=DECODE, help=f"{parts};..."
    )
    parser.add_argument("--formats", help="formats, or pairs KEYS/VALUES; default: see above")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=15, help="3 or more")
    parser.add_argument(
        "--no-torch", action="store_true", help="our f16 is the baseline (torch dwells when busy)"
    )
    parser.add_argument("--scaling", action="store_true", help="by threads and tokens, no torch")
    parser.add_argument("--json", help="write all rows here")
    parser.add_argument("--evidence", help="add all rows to this evidence file (JSON Lines)")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads: {args.threads} is not positive")
    if args.rounds < 3:
        parser.error("--rounds: an interval needs at least 3")

    os.environ["KVPROOF_THREADS"] = str(args.threads)
    be = CpuBackend()
    bandwidth = read_bandwidth(args.threads)
    environment = be.environment() | {
        "torch": torch.__version__, "python": sys.version.split()[0], "numpy": np.__version__,
        "load_average": os.getloadavg()[0], "read_gb_per_s": bandwidth,
    }  # fmt: skip
    for key, value in environment.items():
        print(f"{key}: {value}")
    names = args.formats.split(",") if args.formats else default_names()
    names = ["f16", *(name for name in names if name != "f16")]
    rows: list[dict[str, Any]] = []
    if not args.scaling:
        print(LEGEND)

    def keep(table: list[dict[str, Any]]) -> None:  # shape by shape: a run may be stopped
        rows.extend(table)
        if args.evidence:
            evidence.Store(args.evidence).append(*(record(be, row, environment) for row in table))

    for heads, kv_heads, dim, n in args.shapes:
        for name in names:
            why = why_not(be, name, dim)
            if why:
                print(f"not timed: {name}: {why}", file=sys.stderr)
        if args.scaling:
            threads = sorted({1, args.threads})
            table = scaling(be, names, (heads, kv_heads, dim), threads, args.rounds)
            show_scaling(table)
            keep(table)
            continue
        shape = heads, kv_heads, dim, n
        table = measure(be, shape, names, args.rounds, bandwidth, not args.no_torch)
        show(table)
        keep(table)
    environment["load_average_after"] = os.getloadavg()[0]
    print(f"\nload average after: {environment['load_average_after']:.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
