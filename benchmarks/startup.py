"""Start-up bars: `kvproof --help`, `kvproof inspect`, loading the demo model, its memory.

Each is a fresh process, repeated; the median and the range are printed with the load average, since
a busy machine makes all of them slower. Run: python benchmarks/startup.py [--rounds 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

CLI = "from kvproof.cli import main; main()"
LOAD = (
    "import resource, time; start = time.perf_counter()\n"
    "from kvproof import models; path = models.resolve('{model}')\n"
    "from kvproof.engines.transformers import load; model = load(path)\n"
    "model.tokenizer.encode('ready')\n"
    "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20\n"
    "weights = sum(p.numel() for p in model.hf.parameters()) * 2 / 2**30\n"
    "print(time.perf_counter() - start, peak, weights)"
)


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", CLI, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def load(model: str) -> tuple[float, float, float]:
    """Seconds from process start of Python code to a usable model, peak RSS GiB, bf16 GiB."""
    command = [sys.executable, "-c", LOAD.format(model=model)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(out[0]), float(out[1]), float(out[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = {}
    jobs = {
        "kvproof --help": (lambda: seconds("--help"), 0.4),
        "kvproof inspect": (lambda: seconds("inspect", options.model), 2.0),
    }
    for name, (job, bar) in jobs.items():
        job()
        rows[name] = ([job() for _ in range(options.rounds)], "s", bar)
    loads = [load(options.model) for _ in range(max(3, options.rounds // 2))]
    rows["load, tokenizer included"] = ([x[0] for x in loads], "s", 8.0)
    rows["peak RSS over bf16 weights"] = ([x[1] / x[2] for x in loads], "x", 2.5)
    result = {
        name: {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "unit": unit,
            "bar": bar,
            "met": statistics.median(values) < bar,
        }
        for name, (values, unit, bar) in rows.items()
    }
    load_average = os.getloadavg()[0]
    if options.json:
        print(json.dumps({"model": options.model, "load_average": load_average, "rows": result}))
        return
    print(f"{options.model}, load average {load_average:.2f}")
    for name, r in result.items():
        print(
            f"{name:28} {r['median']:6.2f} {r['unit']} [{r['min']:.2f}, {r['max']:.2f}]  "
            f"bar {r['bar']} {'met' if r['met'] else 'MISSED'}"
        )


if __name__ == "__main__":
    main()
