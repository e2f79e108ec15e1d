"""KLD of conditioned keys and sinks against the f16 cache: kinds of mean, scales, pages, depths.

    python benchmarks/quality.py MODEL --study keys                # which kind and page
    python benchmarks/quality.py MODEL --study depth               # the same at far positions
    python benchmarks/quality.py MODEL --study pairs               # keys and values together
    python benchmarks/quality.py MODEL --arm tq4/f16+rope.64+4 --arm tq4/f16 --windows 4

An arm is KEY/VALUE[+KIND.PAGE[.plain]][+SINKS]; ".plain" leaves the scales out. All arms of a
study see the same windows beside one f16 cache, so ratios to the first arm are paired; intervals
are a block bootstrap over tokens. Means and scales come from another text (the default of
`kvproof calibrate`). --evidence FILE adds one record per arm, first position and window length.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvproof import backends, models
from kvproof.conditioner import Calibration, Conditioner, Origin
from kvproof.decision import Candidate, Policy
from kvproof.engines.transformers import load
from kvproof.evidence import Environment, Outcome, Store, utc_now
from kvproof.lanes import conditioning
from kvproof.lanes.kv import (
    BLOCK,
    About,
    Compared,
    Treated,
    bos_prefix,
    compare_window,
    default_text,
    model_digest,
    window_ids,
)
from kvproof.stats import paired_mean, paired_ratio

KEYS = (
    "tq4/f16", "tq4/f16+4",
    "tq4/f16+static.1", "tq4/f16+static.1+4", "tq4/f16+static.1.plain+4",
    "tq4/f16+rope.64", "tq4/f16+rope.64+4", "tq4/f16+rope.64.plain+4",
    "tq4/f16+rope.32+4", "tq4/f16+rope.128+4", "tq4/f16+rope.256+4",
    "tq4/f16+previous.64", "tq4/f16+previous.64+4", "tq4/f16+previous.64.plain+4",
    "tq4/f16+previous.32+4", "tq4/f16+previous.128+4", "tq4/f16+previous.256+4",
    "tq4/f16+own.64+4",
)  # fmt: skip
DEPTH = (
    "tq4/f16", "tq4/f16+static.1+4", "tq4/f16+rope.32+4", "tq4/f16+rope.64+4",
    "tq4/f16+previous.64+4",
)  # fmt: skip
STUDIES: dict[str, tuple[tuple[str, ...], tuple[int, ...], int]] = {
    # arms, first positions, tokens of a window
    "keys": (KEYS, (0,), 512),
    "depth": (DEPTH, (0, 8192), 512),
    "long": (DEPTH, (0,), 2048),
    "pairs": (
        ("q4_0_rot/q4_0_rot", "q8_0/q8_0", "tq4/tq4", "tq4/tq4+rope.64+4", "tq8/tq4+rope.64+4",
         "tcq4/tcq4+rope.64+4", "tcq3/tcq3+rope.64+4", "tcq3_64/tcq3_64+rope.64+4"),
        (0,), 512,
    ),
}  # fmt: skip


def parse(arm: str, calibration: Calibration, origin: Origin) -> Candidate:
    """The candidate that an arm's name stands for."""
    pair, *parts = arm.split("+")
    conditioner, sinks = None, 0
    for part in parts:
        if part.isdigit():
            sinks = int(part)
            continue
        kind, page, *plain = part.split(".")
        if kind == "own":
            conditioner = Conditioner.uncalibrated(calibration.geometry, int(page))
        else:
            conditioner = calibration.conditioner(kind, int(page), scaled=not plain, origin=origin)
    candidate = Candidate.parse(pair)
    return Treated.of(candidate, conditioner, sinks) if parts else candidate


def study(args: argparse.Namespace, arms: tuple[str, ...], first: int, window: int) -> None:
    path = models.resolve(args.model)
    model = load(path)
    text = conditioning.calibration_text()
    calibration = conditioning.gather(model, text, args.tokens)
    names = {parse(a, calibration, conditioning.origin(path, text)): a for a in arms}
    policy = Policy(window=window, windows_max=args.windows, tokens_min=window)
    windows = []
    for words in [Path(t).read_text(encoding="utf-8") for t in args.text] or [default_text()]:
        ids, prefix = model.tokenizer.encode(words), bos_prefix(model.tokenizer.encode)
        windows += window_ids(ids[len(prefix) :], prefix, policy)
    started, clock = utc_now(), time.monotonic()
    found: dict[Candidate, list[Compared]] = {p: [] for p in names}
    floors = []
    for i, ids in enumerate(windows):
        figures, noise = compare_window(
            model, ids, list(names), backend="cpu", chunk=128, floor=not floors,
            first_position=first,
        )  # fmt: skip
        for pair, figure in figures.items():
            if isinstance(figure, str):
                sys.exit(f"{names[pair]}: {figure}")
            found[pair].append(figure)
        floors += [noise] if noise else []
        passed = time.monotonic() - clock
        print(f"window {i + 1} of {len(windows)}, {passed:.0f} s", file=sys.stderr, flush=True)
    report(args, path, names, found, floors, first, window, started)


def report(
    args: argparse.Namespace,
    path: Path,
    names: dict[Candidate, str],
    found: dict[Candidate, list[Compared]],
    floors: list[Any],
    first: int,
    window: int,
    started: str,
) -> None:
    be = backends.get("cpu")
    env = Environment.current(be.environment())
    about = About("cpu", be.digest(), model_digest(path), args.model, env)
    floor = float(np.concatenate([f.kld for f in floors]).mean())
    print(f"\n{args.model}, {window} tokens from position {first}, "
          f"{len(found[next(iter(names))])} windows, floor {floor:.6f}")  # fmt: skip
    print(f"{'arm':32s} {'KLD [95 %]':>26s} {'ratio to first [95 %]':>24s} {'same top':>8s}")
    base = None
    records = []
    for pair, name in names.items():
        kld = np.concatenate([f.kld for f in found[pair]])
        top = np.concatenate([f.same_top for f in found[pair]])
        nll = np.concatenate([f.delta_nll for f in found[pair]])
        base = kld if base is None else base
        e, r = paired_mean(kld, BLOCK), paired_ratio(kld, base, BLOCK)
        kld_text = f"{e.value:8.5f} [{e.low:.5f}, {e.high:.5f}]"
        ratio_text = f"{r.value:8.4f} [{r.low:.4f}, {r.high:.4f}]"
        print(f"{name:32s} {kld_text} {ratio_text} {top.mean():8.4f}", flush=True)
        metrics = {
            "kld": e.value, "kld_low": e.low, "kld_high": e.high,
            "ratio": r.value, "ratio_low": r.low, "ratio_high": r.high,
            "same_top": float(top.mean()), "delta_nll": float(nll.mean()),
            "tokens": len(kld), "kld_floor": floor,
        }  # fmt: skip
        subject = about.subject(
            "quality-study", pair, arm=name, first_position=first, window=window,
            ratio_to=next(iter(names.values())),
        )  # fmt: skip
        records.append(about.record(subject, Outcome.PASSED, metrics, started=started))
    if args.evidence:
        Store(args.evidence).append(*records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="smollm2-135m, gemma-3-270m, or a path")
    parser.add_argument("--study", choices=STUDIES)
    parser.add_argument("--arm", action="append", default=[], help="instead of a study's arms")
    parser.add_argument("--first", type=int, action="append", default=[], help="first positions")
    parser.add_argument("--window", type=int, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=4, help="windows of every text")
    parser.add_argument("--tokens", type=int, default=conditioning.TOKENS, help="calibration")
    parser.add_argument("--text", action="append", default=[], help="evaluation texts (UTF-8)")
    parser.add_argument("--evidence", help="JSON Lines file to add records to")
    args = parser.parse_args()
    if not (args.study or args.arm):
        parser.error("name a --study or an --arm")
    arms, firsts, window = STUDIES[args.study] if args.study else ((), (0,), 512)
    for first in args.first or firsts:
        study(args, tuple(args.arm) or arms, first, args.window or window)


if __name__ == "__main__":
    main()
