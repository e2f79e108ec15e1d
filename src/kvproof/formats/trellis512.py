"""tbq3_tcq: 3 bits a value on a trellis of 512 states (elizaOS block layout), with our codebook.

A state is the last three symbols of 3 bits; every step shifts one in. A value is read from the
codebook by the state, so that each symbol has a say in three values, and the encoder looks for the
best path (Viterbi) instead of the best entry. The codebook is made by tools/train_tbq3_tcq.py.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvproof.errors import RequestError
from kvproof.formats.base import (
    Bytes,
    Counters,
    Floats,
    Format,
    as_float32,
    reciprocal,
    store_fp16,
    tamed,
)
from kvproof.rotation import GROUP, R128

KV = frozenset({"key", "value"})

STATES, SYMBOLS = 512, 8
NODES = STATES // SYMBOLS  # what a state leaves to the next one: its two newest symbols
CODEBOOK_FILE = Path(__file__).with_name("tbq3_tcq_codebook.txt")
BLOCK_BYTES = 52
SMALLEST = 1e-15  # magnitude of a codebook's entries; the largest is 1e15
_AT_ONCE = 128  # rows whose costs fit a processor's cache together


def viterbi(y: Floats, book: Floats) -> NDArray[np.uint16]:
    """States `[m, n]` of the path of least squared distance from rows y `[m, n]`, in float32.

    `book` is float32 `[512]`. Any state may precede the first value. The cost of state s' is
    (y_t - book[s'])^2 plus the least cost of its eight predecessors ((s' & 63) << 3) | p, the
    lowest p on a tie; the path ends in the state of least cost, the lowest on a tie.
    """
    out = np.empty(y.shape, np.uint16)
    for start in range(0, len(y), _AT_ONCE):
        piece = slice(start, start + _AT_ONCE)
        out[piece] = _viterbi(y[piece], book)
    return out


def _viterbi(y: Floats, book: Floats) -> NDArray[np.uint16]:
    m, n = y.shape
    values = np.ascontiguousarray(y.T)
    entries = book.reshape(
        SYMBOLS, NODES, 1
    )  # by newest symbol, and what remains of the last state
    came_from = np.empty((n, NODES, m), np.uint8)
    cost = np.zeros((STATES, m), np.float32)
    for t in range(n):
        before = cost.reshape(NODES, SYMBOLS, m)
        # The least of eight by pairs; <, not <=, so that the lower p keeps a tie.
        later = before[:, 1::2] < before[:, 0::2]
        least = np.minimum(before[:, 1::2], before[:, 0::2])
        p = later + np.arange(0, SYMBOLS, 2, dtype=np.uint8)[:, None]
        while least.shape[1] > 1:
            later = least[:, 1::2] < least[:, 0::2]
            least = np.minimum(least[:, 1::2], least[:, 0::2])
            p = np.where(later, p[:, 1::2], p[:, 0::2])
        came_from[t] = p[:, 0]
        distance = values[t] - entries
        distance *= distance
        distance += least[:, 0]
        cost = distance.reshape(STATES, m)
    path = np.empty((n, m), np.uint16)
    state = cost.argmin(axis=0).astype(np.uint16)
    rows = np.arange(m)
    for t in range(n - 1, -1, -1):
        path[t] = state
        node = state & (NODES - 1)
        state = node << 3 | came_from[t, node, rows]
    return path.T


def _encode(x: Floats, book: Floats) -> tuple[Bytes, Counters]:
    x = tamed(x)
    norm = np.sqrt(np.square(x, dtype=np.float64).sum(axis=-1)).astype(np.float32)
    inverse = reciprocal(norm)
    states = viterbi(R128.forward(x * inverse[:, None]), book)
    length = np.sqrt(np.square(book[states], dtype=np.float64).sum(axis=-1)).astype(np.float32)
    return _packed(states, norm / length, inverse != 0)


def _packed(
    states: NDArray[np.uint16], scale: Floats, live: NDArray[np.bool_]
) -> tuple[Bytes, Counters]:
    half, saturated, flushed = store_fp16(scale)
    # The first state whole, which holds the two symbols before the first value; then symbols.
    first = states[:, :1].astype("<u2").view(np.uint8)
    symbols = (states[:, 1:] >> 6).astype(np.uint8)
    bits = np.zeros((len(states), (BLOCK_BYTES - 2) * 8), np.uint8)
    bits[:, :9] = np.unpackbits(first, axis=-1, bitorder="little")[:, :9]
    each = np.unpackbits(symbols[..., None], axis=-1, bitorder="little")[..., :3]
    bits[:, 9 : 9 + 3 * symbols.shape[1]] = each.reshape(len(states), -1)
    bits[~live] = 0
    out = np.empty((len(states), BLOCK_BYTES), np.uint8)
    out[:, :2] = half[:, None].view(np.uint8)
    out[:, 2:] = np.packbits(bits, axis=-1, bitorder="little")
    return out, Counters(saturated, flushed)


def path_states(b: Bytes) -> NDArray[np.uint16]:
    """The 128 states of blocks `[m, 52]`: state t is the 9 bits from bit 3t of the stream."""
    bits = np.unpackbits(b[:, 2:], axis=-1, bitorder="little").astype(np.uint16)
    last = 3 * (GROUP - 1) + 1
    states = np.zeros((len(b), GROUP), np.uint16)
    for i in range(9):
        states |= bits[:, i : i + last : 3] << i
    return states


def _decode(b: Bytes, book: NDArray[np.float64]) -> NDArray[np.float64]:
    norm = b[:, :2].copy().view(np.float16).astype(np.float64)
    return np.where(norm == 0, 0.0, book[path_states(b)] * norm)


def tbq3_tcq(codebook: ArrayLike | None = None) -> Format:
    """The trellis format with a codebook of 512 float32 values by state (default: kvproof's own).

    Rows written with one codebook are noise to another: compare `Format.identity`. RequestError if
    the codebook is not 512 finite numbers, or has entries that are zero or so small or large that
    float32 cannot hold sums of their squares.
    """
    book = _shipped() if codebook is None else as_float32(codebook, "tbq3_tcq: a codebook")
    if book.shape != (STATES,) or not np.isfinite(book).all():
        raise RequestError(f"tbq3_tcq: a codebook is 512 finite numbers, not {book.shape}")
    if not (book != 0).all():
        raise RequestError("tbq3_tcq: a codebook has no zeros (a path of them has no norm)")
    size = np.abs(book)
    if size.min() < SMALLEST or size.max() > 1 / SMALLEST:
        raise RequestError(
            f"tbq3_tcq: a codebook has magnitudes from {SMALLEST:g} to {1 / SMALLEST:g}"
        )
    return _with(book.astype("<f4").tobytes())


@cache  # unbounded: a codebook is one format for as long as the process lives
def _with(raw: bytes) -> Format:
    book = np.frombuffer(raw, "<f4").astype(np.float32)
    wide = book.astype(np.float64)
    return Format(
        "tbq3_tcq", GROUP, BLOCK_BYTES, GROUP, KV, lambda x: _encode(x, book),
        lambda b: _decode(b, wide), spin=R128, plain_input=True, ggml_type=48,
        codebook=tuple(float(v) for v in book), codebook_digest=hashlib.sha256(raw).hexdigest(),
        source="elizaOS TBQ3_TCQ, kvproof's codebook",
    )  # fmt: skip


def _shipped() -> Floats:
    return np.array(CODEBOOK_FILE.read_text(encoding="ascii").split(), np.float32)


TBQ3_TCQ = tbq3_tcq()
