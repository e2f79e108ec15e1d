"""Trains the codebook of tbq3_tcq and writes it into the package: python tools/train_tbq3_tcq.py

Generalised Lloyd on rows uniform on the sphere of 128 dimensions, which is what N(0,1) rows become
when they are normalised: find the best path of every row, then move each of the 512 entries to the
mean of the values that it was chosen for. Every pass draws new rows, so that it does not settle in
the first minimum of one sample. Same seed, same file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from kvproof.formats.trellis512 import CODEBOOK_FILE, NODES, STATES, SYMBOLS, viterbi
from kvproof.rotation import GROUP

SEED = 1
# (passes, rows a pass): many rough ones first, then a few that average the noise away.
SCHEDULE = ((150, 2048), (20, 8192))

Floats = NDArray[np.float32]


def rows(count: int, *seed: int) -> Floats:
    """Float32 `[count, 128]`, uniform on the unit sphere."""
    x = np.random.default_rng(seed).standard_normal((count, GROUP))
    unit: Floats = (x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True))).astype(np.float32)
    return unit


def start(seed: int) -> Floats:
    """The first codebook.

    The eight states of a group share their two newest symbols and differ in the oldest. The entries
    of a group ascend, each in its own eighth of the distribution; a random order of the groups says
    where in the eighths. So the oldest symbol names the eighth and the newer two refine it, and the
    paths through different groups see different, interleaved quantisers.
    """
    order = np.random.default_rng(seed).permutation(NODES)
    rank = np.arange(SYMBOLS) * NODES + order[:, None]
    normal = NormalDist(sigma=float(1 / np.sqrt(GROUP)))
    return np.array([normal.inv_cdf((r + 0.5) / STATES) for r in rank.reshape(-1)], np.float32)


def ascending(values: NDArray[np.float64], weights: NDArray[np.float64]) -> list[float]:
    """The non-descending sequence of least weighted squared distance (neighbours are pooled)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = (float(value), float(weight), 1)
        while pools and pools[-1][0] > pool[0]:
            v, w, n = pools.pop()
            total = w + pool[1]
            pool = ((v * w + pool[0] * pool[1]) / total, total, n + pool[2])
        pools.append(pool)
    return [value for value, _, n in pools for _ in range(n)]


def improved(book: Floats, y: Floats) -> Floats:
    """One pass: every entry at the mean of its values, groups of eight kept in order."""
    states = viterbi(y, book).reshape(-1)
    count = np.bincount(states, minlength=STATES).astype(np.float64)
    total = np.bincount(states, y.reshape(-1).astype(np.float64), STATES)
    mean = np.divide(total, count, out=book.astype(np.float64), where=count > 0)
    groups = zip(mean.reshape(NODES, SYMBOLS), count.reshape(NODES, SYMBOLS), strict=True)
    # An entry that no path chose keeps its place without weight.
    return np.array([ascending(v, w + 1e-6) for v, w in groups], np.float32).reshape(-1)


def train(seed: int, schedule: tuple[tuple[int, int], ...], show: bool = False) -> Floats:
    """The codebook after every pass of the schedule."""
    book, done = start(seed), 0
    for passes, count in schedule:
        for _ in range(passes):
            book = improved(book, rows(count, seed, done))
            done += 1
            if show and done % 20 == 0:
                print(f"pass {done}: relative MSE {error(book):.5f}", flush=True)
    return book


def error(book: Floats) -> float:
    """Relative MSE of 4096 rows that training never sees, with the norm kept as the format does."""
    y = rows(4096, 0)
    path = book[viterbi(y, book)].astype(np.float64)
    path /= np.sqrt(np.square(path).sum(axis=-1, keepdims=True))
    return float(np.square(path - y).sum() / len(y))


def main() -> None:
    """Train and write."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else CODEBOOK_FILE
    book = train(SEED, SCHEDULE, show=True)
    lines = [" ".join(f"{v:.9g}" for v in group) for group in book.reshape(NODES, SYMBOLS)]
    target.write_text("\n".join(lines) + "\n", encoding="ascii")
    print(f"{target}: relative MSE {error(book):.5f}")


if __name__ == "__main__":
    main()
