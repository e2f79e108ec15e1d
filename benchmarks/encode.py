"""Encoding on one core: values per second of every format, and the share of a token's time.

    python benchmarks/encode.py                          # every format that has a kernel
    python benchmarks/encode.py --formats tcq4,tcq4_64 --head-dims 256 --evidence FILE
    python benchmarks/encode.py --token-ms 21.5          # of `kvproof run`, instead of measuring it
    python benchmarks/encode.py --attention              # against the attention of the same tokens

Every round visits each format in shuffled order, so that a slow moment of the machine hits all
of them; a visit is one call on rows of N(0,1) that stay in the caches, on one thread. Rates are
medians over rounds with their 95 % bootstrap interval, "best" is that of the fastest round, which
tells on a busy machine what an idle one would do; "rows" are millions of rows a second of the same
rounds. "x f16" is the ratio of times to f16's in
the same rounds. "floor" is the rate at which one core copies as many bytes as the float32 values
and the encoded rows have, measured here on arrays that stay in the caches too. "path ops" are the
sums, minima and comparisons of a trellis search a value, all tries included; "Gop/s" is their rate.

A token's rows are encoded at every step. The time of that is measured as the cache does it, a call
for the keys and one for the values of every layer of the model, with what calling costs. The share
is that time over the time of a token, given or measured here (f16 cache, after 256 tokens).

`--attention` compares, after 4096 tokens, what it takes to hold new tokens (keys and values encoded
and written to where a cache holds them) with their attention: of one token, by the two calls of a
decode step, and of a prompt's last 512. All threads, or KVPROOF_THREADS; a token's rows are encoded
by one. The share is the median over rounds with its 95 % bootstrap interval.
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
from kvproof.store import RowStore, TileStore

VALUES = 1 << 14  # of a call: short enough to be left alone on a busy machine now and then
# Million rows a second of tq4 on one thread, by head_dim.
ROWS = {128: 8.0, 256: 4.0, 512: 2.5}
# Million values a second a core, by states of the trellis, and the share of a token's time.
BARS = {8: 20.0, 64: 5.0}
SHARE = 0.10
# Heads, KV heads and head_dim of --attention, tokens held before, tokens of a prompt, and the bar.
SHAPES = ((32, 8, 128), (4, 1, 256), (8, 1, 512))
DEPTH, PROMPT = 4096, 512
SHARE_OF_ATTENTION = 0.05
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
    be: CpuBackend, head_dim: int, names: list[str], values: int, rounds: int, bandwidth: float
) -> list[dict[str, Any]]:
    """A row of figures for each format that takes the width."""
    names = [n for n in names if be.refuses("encode", n, head_dim) is None]
    x = gaussian(0, values // head_dim, head_dim)
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
            "mrows_per_s": rate.value / head_dim, "values_of_call": x.size,
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


def held(be: CpuBackend, name: str, side: str, x: np.ndarray) -> TileStore | RowStore:
    """Rows of x `[n, kv_heads, dim]` as a cache of this backend holds them."""
    f, (_, heads, dim) = formats.get(name), x.shape
    tiled = be.arranges(f, f, dim, dim)
    store: TileStore | RowStore = RowStore(heads, f.row_bytes(dim))
    if tiled:
        store = TileStore(f, side, heads, f.row_bytes(dim), be)
    store.move(0, 0, len(x))
    store.write(0, be.encode(f, x))
    return store


def against_attention(
    be: CpuBackend, name: str, shape: tuple[int, int, int], rounds: int
) -> list[dict[str, Any]]:
    """Seconds to hold tokens and to attend to them, of one token and of a prompt."""
    heads, kv_heads, dim = shape
    f, total = formats.get(name), DEPTH + PROMPT
    q = gaussian(0, total, heads, dim)
    k, v = gaussian(1, total, kv_heads, dim), gaussian(2, total, kv_heads, dim)
    keys, values = held(be, name, "key", k), held(be, name, "value", v)
    tiled = isinstance(keys, TileStore)
    step = be.step(f, f, (heads, kv_heads), (dim, dim), tiled=tiled)
    assert step is not None
    token, out = slice(DEPTH, DEPTH + 1), np.empty((1, heads, dim), np.float32)

    def append_token() -> object:
        return step.append(
            k[token], v[token], None, None, None, keys.buffer, values.buffer, DEPTH
        )  # fmt: skip

    def attend_token() -> object:
        return step.attend(
            None, q[token], keys.buffer, values.buffer, 0, DEPTH + 1, -1, dim**-0.5, None, None,
            None, None, -1, None, 0, 0, out,
        )  # fmt: skip

    def append_prompt() -> object:
        keys.write(DEPTH, be.encode(f, k[DEPTH:]))
        return values.write(DEPTH, be.encode(f, v[DEPTH:]))

    def attend_prompt() -> object:
        rows = keys.view(0, total), values.view(0, total)
        return be.attention(q[DEPTH:], *rows, key=f, value=f)

    table = []
    for tokens, append, attend, calls in (
        (1, append_token, attend_token, 20), (PROMPT, append_prompt, attend_prompt, 1),
    ):  # fmt: skip
        runs = {
            "append": lambda run=append, calls=calls: [run() for _ in range(calls)],
            "attend": lambda run=attend, calls=calls: [run() for _ in range(calls)],
        }
        for run in runs.values():
            run()
        times = interleave(runs, rounds)
        share = interleaved_ratio(times["attend"], times["append"])
        table.append({
            "name": name, "head_dim": dim, "heads": heads, "kv_heads": kv_heads, "tokens": tokens,
            "depth": DEPTH, "tiled": int(tiled), "rounds": rounds,
            "append_us": float(np.median(times["append"])) / calls * 1e6,
            "attend_us": float(np.median(times["attend"])) / calls * 1e6,
            "share": share.value, "share_low": share.low, "share_high": share.high,
        })  # fmt: skip
    return table


def show_shares(rows: list[dict[str, Any]]) -> None:
    for r in rows:
        shape = f"{r['heads']},{r['kv_heads']},{r['head_dim']}"
        what = "one token" if r["tokens"] == 1 else f"{r['tokens']} tokens"
        print(
            f"  {r['name']:8s} {shape:10s} {what:10s} {'tiles' if r['tiled'] else 'rows ':5s}"
            f" encode {r['append_us']:9.1f} us, attention {r['attend_us']:10.1f} us: "
            f"{r['share']:6.2%} [{r['share_low']:.2%}, {r['share_high']:.2%}]"
            f"{'  met' if r['share'] < SHARE_OF_ATTENTION else '  MISSED'}"
        )


def record(be: CpuBackend, row: dict[str, Any], what: str, **more: int) -> Evidence:
    """A row as evidence of kind "bench"."""
    subject = {
        "kind": "bench", "backend": "cpu", "op": what, "name": row["name"],
        "head_dim": row["head_dim"], "threads": 1, **more,
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
        line += f"  rows {r['mrows_per_s']:5.2f}"
        line += f"  floor {r['floor_mvalues_per_s']:6.0f}"
        if "states" in r:
            line += f"  {r['path_operations']} path ops, {r['gops_per_s']:.1f} Gop/s"
            line += verdict(r["mvalues_per_s"], BARS.get(r["states"]), "M/s")
        if r["name"] == "tq4":
            line += verdict(r["mrows_per_s"], ROWS.get(r["head_dim"]), "M rows/s")
        print(line)


def shares(args: argparse.Namespace) -> None:
    """What `--attention` asks for."""
    be = CpuBackend()
    environment = be.environment() | {"load_average": os.getloadavg()[0]}
    for key, value in environment.items():
        print(f"{key}: {value}")
    print(f"\nafter {DEPTH} tokens, bar {SHARE_OF_ATTENTION:.0%}:")
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for name in args.formats.split(",") if args.formats else ("tq4", "tq3", "tq5", "q8_0"):
            found = against_attention(be, name, shape, args.rounds)
            show_shares(found)
            rows += found
    if args.json:
        Path(args.json).write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))
    if args.evidence:
        keys = ("heads", "kv_heads", "tokens", "depth")
        Store(args.evidence).append(*(
            record(be, row, "hold and attend", threads=environment["threads"],
                   **{key: row[key] for key in keys})
            for row in rows
        ))  # fmt: skip


def verdict(value: float, bar: float | None, unit: str) -> str:
    if bar is None:
        return ""
    return f"  bar {bar:g} {unit}: {'met' if value >= bar else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", help="comma-separated; default: all that have a kernel")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--values", type=int, default=VALUES, help=f"of a call ({VALUES})")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument(
        "--attention", action="store_true", help="the time to hold tokens against their attention"
    )
    parser.add_argument("--token-ms", type=float, help="time of a token, instead of measuring it")
    parser.add_argument("--json", help="write all rows here")
    parser.add_argument("--evidence", help="add all rows to this evidence file (JSON Lines)")
    args = parser.parse_args()
    if args.attention:
        shares(args)
        return

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
        found = measure(be, head_dim, names, args.values, args.rounds, bandwidth)
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
