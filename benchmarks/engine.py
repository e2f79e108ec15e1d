"""Tokens of a real model through kvproof's engine, by cache format and depth, beside llama.cpp.

    python benchmarks/engine.py                              # everything, on gemma-3-270m
    python benchmarks/engine.py --only overhead --model smollm2-135m
    python benchmarks/engine.py --peer /other/venv/bin/python --evidence FILE

Three tables:

- growth: time per token of `--tokens` greedy tokens (tg128) after each of `--depths` tokens, and
  how much it grows from the first depth to the last. Weights are read by every token at any depth,
  so the growth is what attention costs. The peer is llama.cpp on the same GGUF file with the same
  number of threads (benchmarks/peers/llama_cpp.py), with keys and values as `--peer-formats` say.
- prompt: 512 tokens read after 8192 (pp512), each cache against kvproof's own f16 cache.
- overhead: where the time of one token goes, at the first depth; `+` formats are conditioned
  ("rope" means, scales and four sinks in f16). Times of parts are measured around them, in passes
  of their own, and cost each a microsecond or two.

Every round visits every cell (engine, format, depth) in shuffled order, from the same state: caches
are copies, llama.cpp's states come from files. A visit starts from 50 ms of rest, since OpenMP
workers of llama.cpp go on spinning for a while. Caches are filled with real passes over random
tokens. Medians over rounds; intervals are 95 % percentile bootstrap intervals over rounds. Run on a
quiet machine: where anything else runs, llama.cpp takes up to ten times as long (its threads wait
for each other at barriers), so on a shared machine raise the priority of the whole session
(`echo -20 > /proc/$$/autogroup`) before you start this.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvproof import models, stats, weights
from kvproof.backends import cpu
from kvproof.cache import LayerCache
from kvproof.conditioner import SINKS, Calibration, Conditioner
from kvproof.engines import capture, packed
from kvproof.engines.transformers import Model, load
from kvproof.evidence import Environment, Evidence, Outcome, Store

PEER = Path(__file__).parent / "peers" / "llama_cpp.py"
PROMPT, PROMPT_DEPTH = 512, 8192
REST = 0.05  # seconds
WARM = 3  # tokens of a visit before those that are timed
KERNELS = ("encode", "decode", "scores", "attention", "attention_tiles", "pack", "unpack")
Rows = list[dict[str, Any]]


class Ours:
    """kvproof's engine, with a cache of each format filled to each depth."""

    def __init__(self, model: Model, ids: list[int], depths: list[int]) -> None:
        self.model, self.ids, self.depths = model, ids, depths
        self.filled: dict[tuple[str, int], packed.PackedCache] = {}
        self._conditioner: Conditioner | None = None

    def empty(self, name: str) -> packed.PackedCache:
        fmt, _, more = name.partition("+")
        key, _, value = fmt.partition("/")
        if not more and name == fmt:
            return self.model.new_cache(key, value or key)
        if self._conditioner is None:
            calibration = Calibration(self.model.geometry)
            calibration.add(capture.capture(self.model, self.ids[:512]))
            self._conditioner = calibration.conditioner("rope")
        return self.model.new_cache(key, value or key, conditioner=self._conditioner, sinks=SINKS)

    def fill(self, name: str) -> None:
        cache, seen = self.empty(name), 0
        for depth in self.depths:
            self.model.prefill(self.ids[seen:depth], cache)
            self.filled[name, depth] = copied(cache)
            seen = depth

    def generate(self, name: str, depth: int, tokens: int) -> float:
        """Milliseconds of a token."""
        cache = copied(self.filled[name, depth])
        token = 9
        for i in range(tokens + WARM):
            if i == WARM:
                start = time.perf_counter()
            token = int(self.model.prefill([token], cache).argmax())
        return (time.perf_counter() - start) / tokens * 1e3

    def prompt(self, name: str, ids: list[int]) -> float:
        """Milliseconds of a prompt after PROMPT_DEPTH tokens."""
        cache = copied(self.filled[name, PROMPT_DEPTH])
        start = time.perf_counter()
        self.model.prefill(ids, cache)
        return (time.perf_counter() - start) * 1e3


def copied(cache: packed.PackedCache) -> packed.PackedCache:
    """A cache of its own with the same rows; what never changes is shared."""
    shared: list[Any] = [cache.kv.geometry, cache.kv.backend, cache.kv.conditioner]
    for layer in cache.kv.owners:
        shared += [layer.geometry, layer.key, layer.value]
    return copy.deepcopy(cache, {id(x): x for x in shared})


class LlamaCpp:
    """The peer: a process for each format."""

    def __init__(self, python: str, model: Path, fmt: str, context: int, threads: int) -> None:
        command = [python, str(PEER), str(model), "--format", fmt, "--context", str(context)]
        self.process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.version = self._answer()["version"]

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{PEER.name} ended with {self.process.wait()}; run it by hand")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def fill(self, ids: list[int], depths: list[int]) -> None:
        for depth in depths:
            self.ask(do="fill", ids=ids[:depth], name=str(depth))

    def generate(self, depth: int, tokens: int) -> float:
        return float(self.ask(do="generate", name=str(depth), tokens=tokens)["ms_per_token"])

    def prompt(self, ids: list[int]) -> float:
        answer = self.ask(do="prompt", name=str(PROMPT_DEPTH), ids=ids)
        return float(answer["ms"] / answer["tokens"] * len(ids))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def rounds_of(runs: dict[Any, Callable[[], float]], rounds: int) -> dict[Any, np.ndarray]:
    """Figures by run, one a round, every round in an order of its own."""
    order = list(runs)
    found: dict[Any, list[float]] = {key: [] for key in order}
    shuffle = np.random.default_rng(0).shuffle
    for i in range(rounds):
        shuffle(order)
        for key in order:
            time.sleep(REST)
            found[key].append(runs[key]())
        print(f"round {i + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return {key: np.array(values) for key, values in found.items()}


def interval(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def growths(times: dict[Any, np.ndarray], names: list[str], depths: list[int]) -> dict[str, Any]:
    """Of every name: median growth from the first depth to the last, and bootstrap draws of it."""
    rounds = len(next(iter(times.values())))
    picks = np.random.default_rng(1).integers(0, rounds, (4000, rounds))
    grown = {name: times[name, depths[-1]] - times[name, depths[0]] for name in names}
    return {name: (float(np.median(x)), np.median(x[picks], axis=1)) for name, x in grown.items()}


def growth_rows(times: dict[Any, np.ndarray], names: list[str], depths: list[int],
                peers: list[str]) -> Rows:  # fmt: skip
    found = growths(times, names, depths)
    rows: Rows = []
    for name in names:
        value, draws = found[name]
        low, high = interval(draws)
        row: dict[str, Any] = {"table": "growth", "name": name, "growth_ms": value,
                               "growth_low": low, "growth_high": high}  # fmt: skip
        for depth in depths:
            row[f"ms_at_{depth}"] = float(np.median(times[name, depth]))
            row[f"min_ms_at_{depth}"] = float(times[name, depth].min())
        for peer in peers:
            if name in peers:
                continue
            theirs, their_draws = found[peer]
            low, high = interval(draws / their_draws)
            row |= {f"of {peer}": value / theirs, f"of {peer} low": low, f"of {peer} high": high}
        rows.append(row)
    return rows


def show_growth(rows: Rows, depths: list[int], tokens: int) -> None:
    print(f"\nmilliseconds a token, {tokens} tokens after each depth; growth from {depths[0]} to "
          f"{depths[-1]}")  # fmt: skip
    for r in rows:
        at = "  ".join(f"{d}: {r[f'ms_at_{d}']:7.2f}" for d in depths)
        ratios = "  ".join(
            f"{r[k]:.2f} [{r[k + ' low']:.2f}, {r[k + ' high']:.2f}] {k}"
            for k in r if k.startswith("of ") and not k.endswith((" low", " high"))
        )  # fmt: skip
        print(f"  {r['name']:16s} {at}  growth {r['growth_ms']:6.2f} "
              f"[{r['growth_low']:.2f}, {r['growth_high']:.2f}]  {ratios}")  # fmt: skip


def prompt_rows(times: dict[str, np.ndarray]) -> Rows:
    rows: Rows = []
    for name, t in times.items():
        ratio = stats.interleaved_ratio(t, times["f16"])
        rows.append({
            "table": "prompt", "name": name, "ms": float(np.median(t)), "min_ms": float(t.min()),
            "tokens_per_s": PROMPT / float(np.median(t)) * 1e3, "of_f16": ratio.value,
            "low": ratio.low, "high": ratio.high,
        })  # fmt: skip
    return rows


def show_prompt(rows: Rows) -> None:
    print(f"\npp{PROMPT} after {PROMPT_DEPTH} tokens; times the speed of kvproof's f16 cache")
    for r in rows:
        print(f"  {r['name']:16s} {r['ms']:8.0f} ms  {r['tokens_per_s']:7.1f} tokens/s  "
              f"{r['of_f16']:.2f}x [{r['low']:.2f}, {r['high']:.2f}]")  # fmt: skip


# ---- where the time of a token goes --------------------------------------------------------------


class Watch:
    """Seconds spent in functions while it is open, and how often they ran."""

    def __init__(self, places: dict[str, list[tuple[Any, str]]]) -> None:
        self.places = places
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Watch:
        self._before = []
        for label, found in self.places.items():
            for owner, name in found:
                inner = getattr(owner, name)
                self._before.append((owner, name, inner))
                setattr(owner, name, self._timed(label, inner))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, inner in self._before:
            setattr(owner, name, inner)

    def _timed(self, label: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **given: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **given)
            finally:
                self.seconds[label] += time.perf_counter() - start
                self.calls[label] += 1

        return timed


def overhead(ours: Ours, name: str, depth: int, tokens: int) -> dict[str, float]:
    """Milliseconds a token: the whole, our kernels, the cache around them, products, the rest."""
    whole = ours.generate(name, depth, tokens)
    with Watch({
        "cache": [(LayerCache, "append"), (LayerCache, "attention")],
        "products": [(weights, "linear"), (weights, "rms_norm")],
    }) as outer:  # fmt: skip
        ours.generate(name, depth, tokens)
    calls = [(cpu._kernels, name) for name in KERNELS]
    calls += [(cpu.CpuStep, name) for name in ("append", "attend")]
    with Watch({"kernels": calls}) as inner:
        ours.generate(name, depth, tokens)
    passes = (tokens + WARM) / 1e3
    row = {
        "token": whole,
        "kernels": inner.seconds["kernels"] / passes,
        "cache": (outer.seconds["cache"] - inner.seconds["kernels"]) / passes,
        "products": outer.seconds["products"] / passes,
    }
    row["rest"] = row["token"] - row["kernels"] - row["cache"] - row["products"]
    return row


def overhead_rows(ours: Ours, names: list[str], depth: int, tokens: int, rounds: int) -> Rows:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].append(overhead(ours, name, depth, tokens))
    rows: Rows = []
    for name, parts in found.items():
        medians = {k: float(np.median([p[k] for p in parts])) for k in parts[0]}
        own = stats.interleaved_ratio([found[names[0]][i]["token"] for i in range(rounds)],
                                      [p["token"] for p in parts])  # fmt: skip
        rows.append({
            "table": "overhead", "name": name, **{f"{k}_ms": v for k, v in medians.items()},
            "min_token_ms": min(p["token"] for p in parts), "of_first": own.value,
            "low": own.low, "high": own.high,
        })  # fmt: skip
    return rows


def show_overhead(rows: Rows, depth: int, layers: int) -> None:
    print(
        f"\nmilliseconds of one token after {depth}: our kernels, the cache around them,\n"
        "products and norms, the rest (torch, transformers); microseconds of the cache a layer"
    )
    for r in rows:
        print(f"  {r['name']:16s} {r['token_ms']:6.2f} (min {r['min_token_ms']:.2f})  kernels "
              f"{r['kernels_ms']:5.2f}  cache {r['cache_ms']:5.2f}  products "
              f"{r['products_ms']:6.2f}  rest {r['rest_ms']:5.2f}  a layer "
              f"{r['cache_ms'] / layers * 1e3:6.1f}  of {rows[0]['name']} {r['of_first']:.3f} "
              f"[{r['low']:.3f}, {r['high']:.3f}]")  # fmt: skip


# ---- command line --------------------------------------------------------------------------------


def record(
    row: dict[str, Any], fixed: dict[str, Any], digest: str, about: dict[str, Any]
) -> Evidence:
    subject = {"kind": "bench", "backend": "cpu", "op": f"engine {row['table']}",
               "name": row["name"], **fixed}  # fmt: skip
    metrics = {k: v for k, v in row.items() if isinstance(v, int | float)}
    return Evidence(subject, Outcome.PASSED, metrics, Environment.current(about), digest)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--formats", default="f16,q8_0,tq4,tq3")
    parser.add_argument("--overhead-formats", default="f16,tq4,tq4+")
    parser.add_argument("--depths", default="1024,4096,16384")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=cpu.default_threads())
    parser.add_argument("--only", default="growth,prompt,overhead")
    here = sys.executable if importlib.util.find_spec("xllamacpp") else ""
    parser.add_argument("--peer", default=here, help="Python that has xllamacpp; '' for none")
    parser.add_argument("--peer-formats", default="f16,q8_0")
    parser.add_argument("--json", help="write all rows here")
    parser.add_argument("--evidence", help="add all rows to this evidence file (JSON Lines)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    os.environ["KVPROOF_THREADS"] = str(args.threads)
    path = Path(models.resolve(args.model))
    model = load(path)
    only, names = args.only.split(","), args.formats.split(",")
    depths = sorted(int(d) for d in args.depths.split(","))
    fills = sorted({
        *(depths if "growth" in only else []),
        *([PROMPT_DEPTH] if "prompt" in only else []),
        *(depths[:1] if "overhead" in only else []),
    })  # fmt: skip
    longest = fills[-1] + PROMPT
    ids = np.random.default_rng(0).integers(5, model.vocab_size - 5, longest).tolist()
    about = cpu.CpuBackend().environment() | {"load_average_before": os.getloadavg()[0]}
    for key, value in about.items():
        print(f"{key}: {value}")
    ours = Ours(model, ids[: fills[-1]], fills)
    timed = [n for n in names if {"growth", "prompt"} & set(only)]
    more = args.overhead_formats.split(",") if "overhead" in only else []
    for name in timed:
        ours.fill(name)
    shallow = Ours(model, ids[: depths[0]], depths[:1])
    for name in more:
        shallow.fill(name)
    peers: dict[str, LlamaCpp] = {}
    if args.peer and timed:
        for fmt in args.peer_formats.split(","):
            peer = LlamaCpp(args.peer, path, fmt, longest + args.tokens + 64, args.threads)
            about["xllamacpp"] = peer.version
            peer.fill(ids, fills)
            peers[f"llama.cpp {fmt}"] = peer
    print(f"load average after filling: {os.getloadavg()[0]:.2f}")
    rows: Rows = []
    if "growth" in only:
        runs: dict[Any, Callable[[], float]] = {}
        for depth in depths:
            for name in names:
                runs[name, depth] = lambda n=name, d=depth: ours.generate(n, d, args.tokens)
            for name, peer in peers.items():
                runs[name, depth] = lambda p=peer, d=depth: p.generate(d, args.tokens)
        times = rounds_of(runs, args.rounds)
        table = growth_rows(times, [*names, *peers], depths, list(peers))
        show_growth(table, depths, args.tokens)
        rows += table
    if "prompt" in only:
        after = ids[fills[-1] : fills[-1] + PROMPT]
        prompts: dict[Any, Callable[[], float]] = {
            name: lambda n=name: ours.prompt(n, after) for name in names
        }
        prompts |= {name: lambda p=peer: p.prompt(after) for name, peer in peers.items()}
        table = prompt_rows(rounds_of(prompts, args.rounds))
        show_prompt(table)
        rows += table
    for peer in peers.values():
        peer.close()
    if "overhead" in only:
        table = overhead_rows(shallow, more, depths[0], min(args.tokens, 32), args.rounds)
        show_overhead(table, depths[0], len(model.geometry.layers))
        rows += table
    about["load_average_after"] = os.getloadavg()[0]
    print(f"\nload average after: {about['load_average_after']:.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"environment": about, "rows": rows}, indent=1))
    if args.evidence:
        fixed = {"model": args.model, "tokens": args.tokens, "threads": args.threads}
        digest = cpu.CpuBackend().digest()
        Store(args.evidence).append(*(record(row, fixed, digest, about) for row in rows))


if __name__ == "__main__":
    main()
