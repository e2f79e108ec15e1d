"""Encoding on one core: values per second of every format, and the share of a token's time.

    python benchmarks/encode.py                          # every format that has a kernel
    python benchmarks/encode.py --formats tcq4,tcq4_64 --head-dims 256 --evidence FILE
    python benchmarks/encode.py --token-ms 21.5          # of `kvproof run`, instead of measuring it

Every round visits each format in shuffled order, so that a slow moment of the machine hits all
of them; a visit is one call on rows of N(0,1) that stay in the caches, on one thread. Rates are
medians over rounds with their 95 % bootstrap interval, "best" is that of the fastest round, which
tells on a busy machine what an idle one would do. "x f16" is the ratio of times to f16's in
the same rounds. "floor" is the rate at which one core copies as many bytes as the float32 values
and the encoded rows have, measured here on arrays that stay in the caches too. "path ops" are the
sums, minima and comparisons of a trellis search a value, all tries included; "Gop/s" is their rate.

A token's rows are encoded at every step. The time of that is measured as the cache does it, a call
for the keys and one for the values of every layer of the model, with what calling costs. The share
is that time over the time of a token, given or measured here (f16 cache, after 256 tokens).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvproof import formats, models
from kvproof.backends.cpu import CpuBackend
from kvproof.evidence import Environment, Evidence, Outcome, Store
from kvproof.geometry import geometry
from kvproof.stats import interleaved_ratio

VALUES = 1 << 14  # of a call: short enough to be left alone on a busy machine now and then
# Million values a second a core, by states of the trellis, and the share of a token's time.
BARS = {8: 20.0, 64: 5.0}
SHARE = 0.10
Run = Callable[[], object]


def gaussian(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def timed(run: Run) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def copy_bandwidth() -> float:
    """GB/s of one core copying 256 KiB, read and written bytes together, best of many."""
    x = np.ones(1 << 16, np.float32)
    y = np.empty_like(x)
    return 2 * x.nbytes / min(timed(lambda: np.copyto(y, x)) for _ in range(500)) / 1e9


def trellis(name: str) -> Any:
    """The trellis code behind a format, None where there is none."""
    try:
        from kvproof.formats.tcq import CODES
    except ModuleNotFoundError:
        return None
    return CODES.get(name)


def measure(
    be: CpuBackend, head_dim: int, names: list[str], rounds: int, bandwidth: float
) -> list[dict[str, Any]]:
    """A row of figures for each format that takes the width."""
    names = [n for n in names if be.refuses("encode", n, head_dim) is None]
    x = gaussian(0, VALUES // head_dim, head_dim)
    outputs = {n: np.empty((len(x), formats.get(n).row_bytes(head_dim)), np.uint8) for n in names}
    runs: dict[str, Run] = {n: lambda n=n: be.encode(n, x, out=outputs[n]) for n in names}
    for run in runs.values():
        run()
    times = interleave(runs, rounds)
    table = []
    for name in names:
        rate = interleaved_ratio(times[name], [x.size / 1e6] * rounds)
        against = interleaved_ratio(times["f16"], times[name])
        row: dict[str, Any] = {
            "name": name, "head_dim": head_dim, "rounds": rounds,
            "bits": formats.get(name).bits(head_dim), "mvalues_per_s": rate.value,
            "mvalues_per_s_low": rate.low, "mvalues_per_s_high": rate.high,
            "mvalues_per_s_best": x.size / min(times[name]) / 1e6,
            "times_f16": against.value, "times_f16_low": against.low,
            "times_f16_high": against.high, "kernel": be.kernel("encode", name, head_dim),
        }  # fmt: skip
        row["floor_mvalues_per_s"] = bandwidth * 1e3 / (4 + row["bits"] / 8)
        code = trellis(name)
        if code is not None:
            # Two sums, a minimum and a comparison a state.
            row["states"] = code.states
            row["path_operations"] = 4 * code.states * len(code.offsets)
            row["gops_per_s"] = row["path_operations"] * rate.value / 1e3
        table.append(row)
    return table


def interleave(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run in every round, in shuffled order."""
    times: dict[str, list[float]] = {n: [] for n in runs}
    order = list(runs)
    shuffle = np.random.default_rng(0).shuffle  # nobody always follows the same neighbour
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(timed(runs[name]))
    return times


def token_encode(
    be: CpuBackend, path: Path, names: list[str], rounds: int
) -> tuple[int, dict[str, list[float]]]:
    """Values of a token's rows in a model, and seconds to encode them, by format and round.

    A format of keys only is timed as if it held both.
    """
    layers = [x for x in geometry(path).layers if x.shares_kv_with is None]
    runs: dict[str, Run] = {}
    for name in names:
        f = formats.get(name)
        if any(be.refuses("encode", f, d) for x in layers for d in (x.head_dim_k, x.head_dim_v)):
            continue
        rows = [
            gaussian(i, 1, x.num_kv_heads, dim)
            for i, x in enumerate(layers)
            for dim in (x.head_dim_k, x.head_dim_v)
        ]
        runs[name] = lambda f=f, rows=rows: [be.encode(f, x) for x in rows]
    for run in runs.values():
        run()
    values = sum(x.num_kv_heads * (x.head_dim_k + x.head_dim_v) for x in layers)
    return values, interleave(runs, rounds)


def token_seconds(path: Path) -> list[float]:
    """Seconds of decode steps with an f16 cache after 256 tokens, threads as in `kvproof run`."""
    from kvproof.engines.transformers import load
    from kvproof.lanes.kv import default_text

    model = load(path)
    cache = model.new_cache()
    ids = model.tokenizer.encode(default_text())
    model.prefill(ids[:256], cache)
    return [timed(lambda token=token: model.prefill([token], cache)) for token in ids[256:304]]


def record(be: CpuBackend, row: dict[str, Any], what: str) -> Evidence:
    """A row as evidence of kind "bench"."""
    subject = {
        "kind": "bench", "backend": "cpu", "op": what, "name": row["name"],
        "head_dim": row["head_dim"], "threads": 1,
    }  # fmt: skip
    metrics = {k: v for k, v in row.items() if isinstance(v, (int, float)) and k != "head_dim"}
    return Evidence(
        subject, Outcome.PASSED, metrics, Environment.current(be.environment()), be.digest()
    )


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\nhead_dim {rows[0]['head_dim']}: million values a second on one core")
    for r in rows:
        line = f"  {r['name']:12s} {r['mvalues_per_s']:8.1f} "
        line += f"[{r['mvalues_per_s_low']:.1f}, {r['mvalues_per_s_high']:.1f}]"
        line = f"{line:40s} best {r['mvalues_per_s_best']:7.1f} {r['times_f16']:7.1f} x f16"
        line += f"  floor {r['floor_mvalues_per_s']:6.0f}"
        if "states" in r:
            line += f"  {r['path_operations']} path ops, {r['gops_per_s']:.1f} Gop/s"
            line += verdict(r["mvalues_per_s"], BARS.get(r["states"]), "M/s")
        print(line)


def verdict(value: float, bar: float | None, unit: str) -> str:
    if bar is None:
        return ""
    return f"  bar {bar:g} {unit}: {'met' if value >= bar else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", help="comma-separated; default: all that have a kernel")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--token-ms", type=float, help="time of a token, instead of measuring it")
    parser.add_argument("--json", help="write all rows here")
    parser.add_argument("--evidence", help="add all rows to this evidence file (JSON Lines)")
    args = parser.parse_args()

    path = models.on_disk(args.model) if args.model in models.KNOWN else Path(args.model)
    token = None if args.token_ms is None else args.token_ms / 1e3
    if token is None and path is not None:
        steps = token_seconds(path)
        token = float(np.median(steps))
        print(f"a token of {args.model}: {token * 1e3:.2f} ms (of {len(steps)}: "
              f"{min(steps) * 1e3:.2f} to {max(steps) * 1e3:.2f})")  # fmt: skip

    os.environ["KVPROOF_THREADS"] = "1"
    be = CpuBackend()
    names = args.formats.split(",") if args.formats else [f.name for f in formats.all_formats()]
    names = ["f16", *(n for n in names if n != "f16")]
    lacking = [n for n in names if be.refuses("encode", n, 256) is not None]
    if lacking:
        print(f"no kernel, not timed: {', '.join(lacking)}", file=sys.stderr)
    bandwidth = copy_bandwidth()
    environment = be.environment() | {
        "python": sys.version.split()[0], "numpy": np.__version__,
        "load_average": os.getloadavg()[0], "copy_gb_per_s": bandwidth,
    }  # fmt: skip
    for key, value in environment.items():
        print(f"{key}: {value}")
    rows: list[dict[str, Any]] = []
    records: list[Evidence] = []
    for head_dim in (int(part) for part in args.head_dims.split(",")):
        found = measure(be, head_dim, names, args.rounds, bandwidth)
        show(found)
        rows += found
        records += [record(be, row, "encode") for row in found]

    if path is None:
        print(f"\n{args.model} was not fetched: no time of a token (kvproof fetch {args.model})")
    else:
        values, times = token_encode(be, path, names, args.rounds)
        print(f"\n{args.model}: {values} values a token, encoded one layer after the other")
        widest = max(x.head_dim_k for x in geometry(path).layers)
        for name, t in times.items():
            seconds = interleaved_ratio([1.0] * len(t), t)
            row = {"name": name, "head_dim": widest, "rounds": args.rounds, "values": values,
                   "token_encode_us": seconds.value * 1e6, "token_encode_us_low": seconds.low * 1e6,
                   "token_encode_us_high": seconds.high * 1e6}  # fmt: skip
            line = f"  {name:12s} {seconds.value * 1e6:8.0f} us "
            line += f"[{seconds.low * 1e6:.0f}, {seconds.high * 1e6:.0f}]"
            if token is not None:
                row |= {"token_ms": token * 1e3, "share_of_token": seconds.value / token}
                line += f"  {row['share_of_token']:6.1%} of {token * 1e3:.2f} ms"
                if trellis(name) is not None:
                    within = row["share_of_token"] < SHARE
                    line += f"  bar {SHARE:.0%}: {'met' if within else 'MISSED'}"
            print(line)
            rows.append(row)
            records.append(record(be, row, "encode a token"))
    environment["load_average_after"] = os.getloadavg()[0]
    print(f"\nload average after: {environment['load_average_after']:.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))
    if args.evidence:
        Store(args.evidence).append(*records)


if __name__ == "__main__":
    main()
