"""Attention of a prompt over an encoded cache against torch's scaled_dot_product_attention.

    python benchmarks/prefill.py                         # 512 queries at depths 0, 8192 and 16384
    python benchmarks/prefill.py --formats tq4,tq3/tq4 --depths 8192 --queries 2048 --json out.json

A depth is the number of tokens cached before the prompt, whose own tokens are cached too. Rounds
visit each candidate and each torch variant in shuffled order; a visit rests for 10 ms and makes
one call. The baseline is the torch variant with the lowest median among bf16, f16 and f32, with K
and V repeated for each query head, with `enable_gqa`, and with the query group folded into the
query length, all with an additive mask; at depth 0 also with `is_causal`, which skips what is
masked. Repeated and masked copies are made beforehand and cost torch nothing. Ratios are medians
over rounds of baseline / candidate with 95 % bootstrap intervals; "of f16" is the same against our
own f16 attention, and formats that lose to it are named below the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention import (
    DTYPES,
    REST,
    TOO_SLOW,
    Run,
    gaussian,
    held,
    pair_of,
    shapes_of,
    timed,
    why_not,
)

from kvproof.backends.cpu import CpuBackend, default_threads
from kvproof.evidence import Environment, Evidence, Outcome, Store
from kvproof.stats import interleaved_ratio

SHAPES = "32,8,128;4,1,256;8,1,512"
FORMATS = (
    "f16", "tq4", "tq3", "tbq4_0", "tbq3_0", "q4_0", "q8_0", "tcq4", "tcq3", "q4_polar",
    "tbq3_tcq", "tq4/tq3", "q8_0/tq4",
)  # fmt: skip
DEPTHS = "0,8192,16384"


def torch_variants(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, Run]:
    """scaled_dot_product_attention by dtype and form; q `[n_q, heads, dim]`."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    n_q, heads, dim = q.shape
    kv_heads, n = k.shape[:2]
    group = heads // kv_heads
    seen = torch.ones(n_q, n, dtype=torch.bool).tril(n - n_q)
    out: dict[str, Run] = {}
    for name, dtype in DTYPES.items():
        keys, values = (torch.from_numpy(x)[None].to(dtype) for x in (k, v))
        full_keys, full_values = (x.repeat_interleave(group, 1) for x in (keys, values))
        plain = torch.from_numpy(q).permute(1, 0, 2)[None].to(dtype).contiguous()
        folded = plain.reshape(1, kv_heads, group * n_q, dim)
        mask = torch.zeros(n_q, n, dtype=dtype).masked_fill(~seen, -torch.inf)
        tall = mask.repeat(group, 1)
        out[f"torch {name} repeated"] = lambda q=plain, k=full_keys, v=full_values, m=mask: sdpa(
            q, k, v, attn_mask=m
        )
        out[f"torch {name} gqa"] = lambda q=plain, k=keys, v=values, m=mask: sdpa(
            q, k, v, attn_mask=m, enable_gqa=True
        )
        out[f"torch {name} folded"] = lambda q=folded, k=keys, v=values, m=tall: sdpa(
            q, k, v, attn_mask=m
        )
        if n == n_q:
            out[f"torch {name} causal"] = lambda q=plain, k=full_keys, v=full_values: sdpa(
                q, k, v, is_causal=True
            )
    return out


def ours(be: CpuBackend, name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Run:
    """A call on rows as a layer's cache holds them; q `[n_q, heads, dim]`."""
    key, value = pair_of(name)
    tiled = be.arranges(key, value, k.shape[2], v.shape[2])
    keys, values = held(be, key, "key", k, tiled), held(be, value, "value", v, tiled)
    sides = keys.view(0, k.shape[1]), values.view(0, v.shape[1])
    return lambda: be.attention(q, *sides, key=key, value=value)


def measure(
    be: CpuBackend, shape: tuple[int, int, int], names: list[str], depth: int, n_q: int, rounds: int
) -> list[dict[str, Any]]:
    heads, kv_heads, dim = shape
    q = gaussian(0, n_q, heads, dim)
    k, v = (gaussian(seed, kv_heads, depth + n_q, dim) for seed in (1, 2))
    runs: dict[str, Run] = {}
    for name in names:
        why = why_not(be, name, dim)
        if why is None:
            runs[name] = ours(be, name, q, k, v)
        else:
            print(f"not timed: {name}: {why}", file=sys.stderr)
    baselines = torch_variants(q, k, v)
    warm = {label: min(timed(run) for _ in range(2)) for label, run in baselines.items()}
    for label, seconds in warm.items():
        if seconds > TOO_SLOW / 4 * min(warm.values()):  # never the best one
            print(f"not timed further: {label}, {seconds * 1e3:.1f} ms", file=sys.stderr)
            del baselines[label]
    for run in runs.values():
        run()
    runs |= baselines
    times: dict[str, list[float]] = {label: [] for label in runs}
    order = list(runs)
    shuffle = np.random.default_rng(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for label in order:
            time.sleep(REST)
            times[label].append(timed(runs[label]))
    best = min(baselines, key=lambda label: float(np.median(times[label])))
    # Of the two products, over the tokens that are seen.
    work = 2 * heads * dim * (n_q * depth + n_q * (n_q + 1) // 2)
    table = []
    for label, t in times.items():
        ratio, own = interleaved_ratio(t, times[best]), interleaved_ratio(t, times["f16"])
        median = float(np.median(t))
        table.append({
            "shape": [*shape, depth + n_q], "n_q": n_q, "name": label, "ours": label in names,
            "median_ms": median * 1e3, "min_ms": min(t) * 1e3, "baseline": best,
            "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "of_f16": own.value,
            "of_f16_low": own.low, "of_f16_high": own.high, "rounds": rounds,
            "gmac_per_s": work / median / 1e9,
        })  # fmt: skip
    return table


LEGEND = """
Columns: median of a call, and the least; speed against the baseline that the table names
and against our own f16, each with its 95 % interval: above 1 is faster; products a second."""


def show(rows: list[dict[str, Any]]) -> None:
    *shape, tokens = rows[0]["shape"]
    print(f"\n(heads, kv heads, head_dim) = {tuple(shape)}, {rows[0]['n_q']} queries, the last of "
          f"{tokens} tokens; baseline: {rows[0]['baseline']}")  # fmt: skip
    for r in rows:
        print(f"  {r['name']:20s} {r['median_ms']:9.2f} ms (min {r['min_ms']:9.2f})  "
              f"{r['ratio']:5.2f}x [{r['low']:.2f}, {r['high']:.2f}]  "
              f"of f16 {r['of_f16']:5.2f}x [{r['of_f16_low']:.2f}, {r['of_f16_high']:.2f}]  "
              f"{r['gmac_per_s']:6.1f} GMAC/s")  # fmt: skip
    lost = [r for r in rows if r["ours"] and r["name"] != "f16" and r["of_f16_high"] < 1]
    texts = [f"{r['name']} takes {1 / r['of_f16']:.2f} times as long" for r in lost]
    print(f"  slower than our f16: {'; '.join(texts) or 'none'}")


def record(be: CpuBackend, row: dict[str, Any]) -> Evidence:
    """A row as evidence. Not a "speed" record: those belong to a decision and need a gate."""
    heads, kv_heads, dim, n = row["shape"]
    subject = {
        "kind": "bench", "backend": "cpu", "op": "prefill", "name": row["name"],
        "baseline": row["baseline"], "num_heads": heads, "num_kv_heads": kv_heads,
        "head_dim": dim, "tokens": n, "n_q": row["n_q"], "torch": torch.__version__,
    }  # fmt: skip
    metrics = {k: v for k, v in row.items() if isinstance(v, (int, float))}
    del metrics["n_q"], metrics["ours"]
    return Evidence(
        subject, Outcome.PASSED, metrics, Environment.current(be.environment()), be.digest()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = "heads,kv_heads,head_dim"
    parser.add_argument(
        "--shapes", type=partial(shapes_of, parts=parts), default=SHAPES, help=f"{parts};..."
    )
    parser.add_argument("--depths", default=DEPTHS, help="cached tokens before the prompt,...")
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--formats", help="formats, or pairs KEYS/VALUES")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=9, help="3 or more")
    parser.add_argument("--json", help="write all rows here")
    parser.add_argument("--evidence", help="add all rows to this evidence file (JSON Lines)")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads: {args.threads} is not positive")
    if args.rounds < 3:
        parser.error("--rounds: an interval needs at least 3")

    os.environ["KVPROOF_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    be = CpuBackend()
    environment = be.environment() | {
        "torch": torch.__version__, "python": sys.version.split()[0], "numpy": np.__version__,
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    for key, value in environment.items():
        print(f"{key}: {value}")
    names = args.formats.split(",") if args.formats else list(FORMATS)
    names = ["f16", *(name for name in names if name != "f16")]
    rows: list[dict[str, Any]] = []
    print(LEGEND)
    for heads, kv_heads, dim in args.shapes:
        for depth in (int(part) for part in args.depths.split(",")):
            table = measure(be, (heads, kv_heads, dim), names, depth, args.queries, args.rounds)
            show(table)
            rows += table
            if args.evidence:  # at once: a run may be stopped
                Store(args.evidence).append(*(record(be, row) for row in table))
    environment["load_average_after"] = os.getloadavg()[0]
    print(f"\nload average after: {environment['load_average_after']:.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
