"""Train the codebooks of the row-scaled formats again: `python tools/codebooks.py [NAME ...]`.

Prints, for each of tq5, tcq4, tcq3, tcq2, tcq4_64, tcq3_64 and tcq2_64, the positive half of its
integer codebook and the `start` of its unit search, as src/kvproof/formats has them. Lloyd's
algorithm through the format's own encoder, unit search and trellis included: encode fresh N(0,1)
rows, move every entry to the mean of what chose it, stretch the book now and then (along its scale
Lloyd's steps hardly move), average the last passes, round to int8. Everything is drawn from SEED.
tq4, tq3 and tq2 keep the Lloyd-Max centroids of N(0,1), which training betters by 0.2 % at most.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvproof.formats import row, tcq
from kvproof.formats.base import cuts_below, nearest_code

SEED, HEAD_DIM, ROWS = 20250101, 128, 1024
PASSES, AVERAGED = 60, 20
STRETCHES = (0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06)
# Multiples of the start that tq5's book is trained with; each is refined to its least-squares unit.
TRIES = tuple(np.float32(m) for m in (0.85, 0.90, 0.95, 1.00, 1.05, 1.10, 1.15))
WIDTH = {4: 2.2, 3: 2.05, 2: 1.85}  # of the uniform trellis book that training starts from, by bits

Book = NDArray[np.float64]
# (book, start, rows) -> index of every value's entry `[m, n]`, and the rows' units `[m, 1]`.
Encoder = Callable[[Book, float, NDArray[np.float32]], tuple[NDArray[np.intp], Book]]


def trellis_encoder(code: tcq.Trellis) -> Encoder:
    """Encode with the trellis `code` and another book."""

    def encode(book: Book, start: float, x: NDArray[np.float32]) -> tuple[NDArray[np.intp], Book]:
        trained = replace(code, book=tuple(book), start=np.float32(start))
        m, u, before, unit, _ = tcq.quantise(trained, x)
        index = np.empty(x.shape, np.intp)
        index[:, tcq.time_order(x.shape[-1])] = m.astype(np.intp) << 2 | trained.subsets(u, before)
        return index, tcq.UNITS[unit].astype(np.float64)[:, None]

    return encode


def scalar_encode(
    book: Book, start: float, x: NDArray[np.float32]
) -> tuple[NDArray[np.intp], Book]:
    """Encode with a real-valued book, which the tables of row.Search cannot: every try of the unit
    in float32, the one that explains most energy, and once more with its least-squares unit."""
    cuts, values = cuts_below(tuple(book)), np.asarray(book, np.float32)

    def fitted(unit: NDArray[np.float32]) -> tuple[NDArray[np.uint8], Book, Book]:
        codes = nearest_code(x * (1 / unit)[:, None], cuts)
        correlation = row.lane_sum(x * values[codes])
        best = correlation / row.lane_sum(values[codes] * values[codes])
        return codes, best, correlation * best

    base = np.sqrt(row.lane_sum(x * x) / np.float32(x.shape[-1])) * np.float32(start)
    unit, gain = base, np.full(len(x), -np.inf, np.float32)
    for multiple in TRIES:
        _, candidate, explained = fitted(base * multiple)
        better = explained > gain
        unit, gain = np.where(better, candidate, unit), np.where(better, explained, gain)
    codes, unit, _ = fitted(unit)
    return codes.astype(np.intp), unit.astype(np.float64)[:, None]


def error(encode: Encoder, book: Book, start: float, x: NDArray[np.float32]) -> float:
    """Relative MSE of rows x."""
    index, unit = encode(book, start, x)
    return float(np.square(book[index] * unit - x).sum() / np.square(x, dtype=np.float64).sum())


def lloyd_step(encode: Encoder, book: Book, start: float, x: NDArray[np.float32]) -> Book:
    """Every entry moved to the least-squares value of what chose it; the book stays symmetric."""
    index, unit = encode(book, start, x)
    weight = np.broadcast_to(unit, x.shape).ravel()
    top = np.bincount(index.ravel(), weight * x.ravel(), len(book))
    bottom = np.bincount(index.ravel(), weight * weight, len(book))
    return np.asarray((top - top[::-1]) / (bottom + bottom[::-1]))


def train(encode: Encoder, book: Book, passes: int = PASSES) -> tuple[tuple[int, ...], float]:
    """Positive half of the integer book, and the start."""
    rng = np.random.default_rng(SEED)

    def draw() -> NDArray[np.float32]:
        return rng.standard_normal((ROWS, HEAD_DIM)).astype(np.float32)

    total = np.zeros_like(book)
    for step in range(passes):
        x = draw()
        if step % 5 == 4:
            errors = [error(encode, book * stretch, 1.0, x) for stretch in STRETCHES]
            book = book * STRETCHES[int(np.argmin(errors))]
        moved = lloyd_step(encode, book, 1.0, x)
        tail = passes - step <= AVERAGED
        book = moved if tail else np.sort(book + 1.5 * (moved - book))
        if tail:
            total += book / AVERAGED
    half = total[len(total) // 2 :]
    x = np.concatenate([draw(), draw()])
    return min(_rounded(half), key=lambda found: error(encode, _whole(found[0]), found[1], x))


def _whole(half: tuple[int, ...]) -> Book:
    return np.asarray(row.symmetric(half))


def _rounded(half: Book) -> list[tuple[tuple[int, ...], float]]:
    """The int8 books nearest to `half`, four of them with three starts each."""
    found = []
    for largest in range(60, 128):
        unit = half[-1] / largest
        whole = np.rint(half / unit)
        if whole[0] >= 1 and (np.diff(whole) > 0).all():
            off = float((np.square(whole * unit - half) * np.exp(-half * half / 2)).sum())
            found.append((off, tuple(int(v) for v in whole), unit))
    return [
        (whole, float(f"{unit * stretch:.3g}"))
        for _, whole, unit in sorted(found)[:4]
        for stretch in (0.985, 1.0, 1.015)
    ]


def trained(name: str) -> tuple[tuple[int, ...], float]:
    """Positive half of the codebook and start of the format called `name`."""
    if name == "tq5":
        return train(scalar_encode, np.asarray(row.CODEBOOK5) * float(row.STARTS["tq5"]))
    code = tcq.CODES[name]
    count = 2 << code.bits
    uniform = (np.arange(count) - (count - 1) / 2) * (WIDTH[code.bits] / (count / 2))
    return train(trellis_encoder(code), uniform)


if __name__ == "__main__":
    for name in sys.argv[1:] or ("tq5", *tcq.CODES):
        print(name, *trained(name), flush=True)
