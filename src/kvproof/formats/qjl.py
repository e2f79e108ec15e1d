"""qjl1_256: the signs of 256 random projections of a key, and its norm (elizaOS block layout; QJL,
arXiv 2406.03482).

The score of a query is an unbiased estimate of its dot product with the key. Keys only: a value
brought back from signs is too coarse. Which projection made the signs is not in the bytes, so it is
part of the format's identity.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.errors import RequestError
from kvproof.formats.base import Bytes, Counters, Floats, Format, as_float32, load_bf16, store_bf16
from kvproof.rotation import GROUP, PROJECTIONS, SKETCH, Projection, projection

FACTOR = float(np.sqrt(np.pi / 2)) / SKETCH  # of norm times signed sum, in the estimate
_SIGNS = SKETCH // 8


def _encode(x: Floats, spin: Projection) -> tuple[Bytes, Counters]:
    norm = np.sqrt(np.square(x, dtype=np.float64).sum(axis=-1))
    top = float(np.finfo(np.float32).max)  # beyond it the bf16 saturates in any case
    bits, saturated, flushed = store_bf16(np.minimum(norm, top).astype(np.float32))
    signs = np.packbits(spin.sketch(x) > 0, axis=-1, bitorder="little")
    return np.concatenate([signs, bits[:, None].view(np.uint8)], axis=-1), Counters(
        saturated, flushed
    )


def _parts(b: Bytes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Signs (+1 or -1) `[m, 256]` and norms `[m, 1]` of blocks `[m, 34]`."""
    bits = np.unpackbits(b[:, :_SIGNS], axis=-1, bitorder="little")
    signs = bits.astype(np.float64) * 2 - 1
    return signs, load_bf16(b[:, _SIGNS:].copy().view(np.uint16))


def _decode(b: Bytes) -> NDArray[np.float64]:
    signs, norm = _parts(b)
    return np.where(norm == 0, 0.0, signs * (norm * FACTOR))


def qjl1_256(projection_id: str = "ggml") -> Format:
    """The sketch format with a projection: "ggml", "fixture" or "fused_fixture".

    RequestError for another one. Rows written with one projection are noise to another: compare
    `Format.identity`.
    """
    if not isinstance(projection_id, str) or projection_id not in PROJECTIONS:
        known = ", ".join(PROJECTIONS)
        raise RequestError(f"qjl1_256: unknown projection {projection_id!r} (known: {known})")
    return _with(str(projection_id))


@lru_cache(maxsize=len(PROJECTIONS))
def _with(projection_id: str) -> Format:
    spin = projection(projection_id)
    return Format(
        "qjl1_256", GROUP, _SIGNS + 2, GROUP, frozenset({"key"}), lambda x: _encode(x, spin),
        _decode, spin=spin, plain_input=True, ggml_type=46, projection_id=projection_id,
        source="elizaOS QJL1_256",
    )  # fmt: skip


def integer_scores(fmt: Format, q: Any, blocks: Bytes) -> NDArray[np.float64]:
    """Scores with the query's sketch rounded to int8, float64 `[n_q, n_kv]`.

    `q` is float32 `[n_q, n]`, `blocks` uint8 `[n_kv, row_bytes(n)]`. The sketch of a query is
    divided by its largest magnitude / 127 and rounded to nearest, ties to even. Every one of the
    256 terms of a group moves by at most half a step, so that a score differs from that of the
    plain operator by at most FACTOR * 256 * step / 2 * (sum of the norms of the row's groups).
    """
    sketch = fmt.rotate(as_float32(q, "q"))
    step = (np.abs(sketch).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float32)
    step[step == 0] = 1
    codes = np.clip(np.rint(sketch / step), -127, 127).astype(np.float64)
    rows = fmt.decode_rotated(blocks)
    out: NDArray[np.float64] = np.einsum("qs,ts->qt", codes, rows) * step.astype(np.float64)
    return out


QJL1_256 = qjl1_256()
