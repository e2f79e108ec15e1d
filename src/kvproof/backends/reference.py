"""The reference backend: float64 NumPy, written for clarity.

Kernels are held to it, it is never fast.
"""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvproof.formats as formats
from kvproof import rotation
from kvproof.errors import RequestError
from kvproof.formats import Format
from kvproof.formats.base import as_float32


class ReferenceBackend:
    """Float64 attention on decoded rows, in the stored (rotated) domain."""

    name = "reference"

    def environment(self) -> dict[str, Any]:
        """NumPy and nothing else."""
        return {"device": "NumPy float64", "isa": "numpy", "is_software": False, "threads": 1}

    def refuses(self, op: str, fmt: Format, head_dim: int) -> str | None:
        """Only what the format itself refuses."""
        return fmt.refuses(head_dim, "key" if op == "scores" else sorted(fmt.sides)[0])

    def kernel(self, op: str, fmt: Format, head_dim: int) -> str:
        """`<op>_<format>_numpy`."""
        return f"{op}_{fmt.name}_numpy"

    def digest(self) -> str:
        """SHA-256 of the reference's own sources."""
        return source_digest()

    def encode(self, fmt: Format, x: Any, scale: Any = None) -> NDArray[np.uint8]:
        """See Format.encode."""
        return fmt.encode(x, 1.0 if scale is None else scale)

    def decode(self, fmt: Format, blocks: Any, scale: Any = None) -> NDArray[np.float32]:
        """See Format.decode."""
        return fmt.decode(blocks, 1.0 if scale is None else scale)

    def scores(self, fmt: Format, q: Any, blocks: Any, scale: Any = None) -> NDArray[np.float32]:
        """Dot products in float64 from the rotated query and the stored values."""
        return self.scores64(fmt, q, blocks, scale).astype(np.float32)

    def scores64(self, fmt: Format, q: Any, blocks: Any, scale: Any = None) -> NDArray[np.float64]:
        """`scores` before rounding to float32."""
        queries, keys = _queries(q), np.asarray(blocks)
        if queries.ndim == 2 and keys.ndim == 2:
            return self.scores64(fmt, queries[:, None], keys[:, None], scale)[:, 0]
        rows = fmt.decode_rotated(keys, 1.0 if scale is None else scale)
        check_shapes(queries, keys, fmt.row_values(keys.shape[-1]))
        rotated = fmt.rotate(queries).astype(np.float64)
        group = queries.shape[1] // keys.shape[1]
        out: NDArray[np.float64] = np.einsum(
            "qhd,thd->qht", rotated, np.repeat(rows, group, axis=1), optimize=True
        )
        return out

    def attention(
        self,
        q: Any,
        k_blocks: Any,
        v_blocks: Any,
        *,
        key: str | Format,
        value: str | Format,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        threads: int | None = None,
    ) -> NDArray[np.float32]:
        """Softmax attention in float64 over the decoded values (see docs/architecture.md for
        shapes)."""
        return self.attention64(
            q, k_blocks, v_blocks, key=key, value=value, causal=causal, window=window, scale=scale,
            k_scale=k_scale, v_scale=v_scale,
        ).astype(np.float32)  # fmt: skip

    def attention64(
        self,
        q: Any,
        k_blocks: Any,
        v_blocks: Any,
        *,
        key: str | Format,
        value: str | Format,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> NDArray[np.float64]:
        """`attention` before rounding to float32."""
        fk, fv = formats.get(key), formats.get(value)
        queries, keys, values = _queries(q), np.asarray(k_blocks), np.asarray(v_blocks)
        check_attention(queries, keys, values, fk.row_values(keys.shape[-1]), window, scale)
        n_q, heads, head_dim = queries.shape
        n_kv, kv_heads = values.shape[:2]
        scores = self.scores64(fk, queries, keys, k_scale)
        scores *= 1 / np.sqrt(head_dim) if scale is None else scale
        scores = np.where(visible(n_q, n_kv, causal, window)[:, None, :], scores, -np.inf)
        weights = softmax(scores)
        rows = fv.decode_rotated(values, 1.0 if v_scale is None else v_scale)
        shared = np.repeat(rows, heads // kv_heads, axis=1)
        out: NDArray[np.float64] = np.einsum("qht,thd->qhd", weights, shared, optimize=True)
        if fv.spin is None:
            return out
        plain: NDArray[np.float64] = out @ fv.spin.matrix(out.shape[-1])
        return plain


def _queries(q: Any) -> NDArray[np.float32]:
    queries = as_float32(q, "q")
    if not np.isfinite(queries).all():
        raise RequestError("attention: q has a NaN or infinity")
    return queries


def visible(n_q: int, n_kv: int, causal: bool, window: int | None) -> NDArray[np.bool_]:
    """Mask `[n_q, n_kv]`: which cached tokens each query sees.

    The queries are the last n_q positions. A window of W is W keys, the query's own included; it
    implies an upper bound only with `causal`.
    """
    position = np.arange(n_kv - n_q, n_kv)[:, None]
    token = np.arange(n_kv)[None]
    mask = np.ones((n_q, n_kv), bool)
    if causal:
        mask &= token <= position
    if window is not None:
        mask &= token > position - window
    return mask


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Stable softmax of the last axis; a row of only -inf (or no entries) gives zeros."""
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    out: NDArray[np.float64] = np.zeros_like(weights)
    np.divide(weights, total, out=out, where=total > 0)
    return out


def check_shapes(q: NDArray[Any], blocks: NDArray[Any], head_dim: int) -> None:
    """RequestError naming both sizes when queries `[n_q, heads, d]` do not fit keys `[n_kv,
    kv_heads, ...]`."""
    if q.ndim != 3 or blocks.ndim != 3:
        raise RequestError(
            "attention: q must be [n_q, num_heads, head_dim] and blocks [n_kv, num_kv_heads, "
            f"bytes], got {q.shape} and {blocks.shape}"
        )
    if q.shape[2] != head_dim:
        raise RequestError(f"attention: q has head_dim {q.shape[2]}, the keys {head_dim}")
    if blocks.shape[1] == 0 or q.shape[1] % blocks.shape[1]:
        raise RequestError(
            f"attention: {q.shape[1]} query heads are no multiple of {blocks.shape[1]} KV heads"
        )


def check_attention(
    q: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    head_dim: int,
    window: object,
    scale: object,
) -> None:
    """RequestError naming what does not fit in a call of attention; `head_dim` is that of keys."""
    check_shapes(q, keys, head_dim)
    if values.ndim != 3 or values.shape[:2] != keys.shape[:2]:
        raise RequestError(
            f"attention: keys {keys.shape} and values {values.shape} must agree in tokens and "
            "KV heads"
        )
    if len(q) > len(keys):
        raise RequestError(f"attention: {len(q)} queries but only {len(keys)} cached tokens")
    whole = isinstance(window, (int, np.integer)) and not isinstance(window, bool)
    if window is not None and not (whole and window >= 1):  # type: ignore[operator]
        raise RequestError(f"attention: window {window!r} is not a positive whole number")
    number = isinstance(scale, (int, float, np.number)) and np.isrealobj(scale)
    if scale is not None and not (number and np.isfinite(scale)):  # type: ignore[call-overload]
        raise RequestError(f"attention: scale {scale!r} is not a finite number")


def source_digest() -> str:
    """SHA-256 over the sources that define the numbers: rotations and formats."""
    files = [Path(inspect.getfile(rotation)), *sorted(Path(formats.__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
