"""The reference backend: float64 NumPy, written for clarity.

Kernels are held to it, it is never fast.
"""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvproof.formats as formats
from kvproof import rotation
from kvproof.backends import tiles
from kvproof.errors import RequestError
from kvproof.formats import Format
from kvproof.formats.base import as_float32, scales


class ReferenceBackend:
    """Float64 attention on decoded rows, in the stored (rotated) domain."""

    name = "reference"
    arrangement: ModuleType = tiles

    def __init__(self, *, tiles: bool = False) -> None:
        """`tiles`: whether caches hold rows in tiles where they can."""
        self._tiles = tiles

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

    def arranges(self, key: Format, value: Format, head_dim_k: int, head_dim_v: int) -> bool:
        """If it was made so, wherever there are tiles for both."""
        return self._tiles and tiles.fit(key, value, head_dim_k, head_dim_v)

    def pack(self, fmt: Format, side: str, rows: Any, buffer: NDArray[np.uint8], at: int) -> None:
        """See tiles.pack."""
        tiles.pack(fmt, side, np.asarray(rows), buffer, at)

    def unpack(
        self, fmt: Format, side: str, buffer: NDArray[np.uint8], first: int, n: int
    ) -> NDArray[np.uint8]:
        """See tiles.unpack."""
        return tiles.unpack(fmt, side, buffer, first, n)

    def step(self, *_: Any, **__: Any) -> None:
        """None: there are only the separate calls."""

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
        position: int | None = None,
        offsets: Any = None,
        page: int | None = None,
        phase: int = 0,
        return_lse: bool = False,
    ) -> Any:
        """Softmax attention in float64 over the decoded values (see `Backend.attention`)."""
        out, lse = self.attention64(
            q, k_blocks, v_blocks, key=key, value=value, causal=causal, window=window, scale=scale,
            k_scale=k_scale, v_scale=v_scale, position=position, offsets=offsets, page=page,
            phase=phase, return_lse=True,
        )  # fmt: skip
        if return_lse:
            return out.astype(np.float32), lse.astype(np.float32)
        return out.astype(np.float32)

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
        position: int | None = None,
        offsets: Any = None,
        page: int | None = None,
        phase: int = 0,
        return_lse: bool = False,
    ) -> Any:
        """`attention` before rounding to float32."""
        fk, fv = formats.get(key), formats.get(value)
        tiles.check_pair(k_blocks, v_blocks, fk, fv)
        queries, keys, values = _queries(q), _rows(k_blocks), _rows(v_blocks)
        head_dim_k = fk.row_values(keys.shape[-1])
        check_attention(queries, keys, values, head_dim_k, window, scale, position)
        added = None if offsets is None else as_float32(offsets, "offsets")
        page, phase = check_offsets(queries, len(keys), added, page, phase)
        n_q, heads, head_dim = queries.shape
        n_kv, kv_heads = values.shape[:2]
        scores = self.scores64(fk, queries, keys, k_scale)
        scores *= 1 / np.sqrt(head_dim) if scale is None else scale
        if added is not None:
            scores += added.astype(np.float64)[:, :, (phase + np.arange(n_kv)) // page]
        seen = visible(n_q, n_kv, causal, window, position)
        scores = np.where(seen[:, None, :], scores, -np.inf)
        weights = softmax(scores)
        rows = fv.decode_rotated(values, 1.0 if v_scale is None else v_scale)
        shared = np.repeat(rows, heads // kv_heads, axis=1)
        out: NDArray[np.float64] = np.einsum("qht,thd->qhd", weights, shared, optimize=True)
        if fv.spin is not None:
            out = out @ fv.spin.matrix(out.shape[-1])
        return (out, log_sum_exp(scores)) if return_lse else out


def _rows(blocks: Any) -> NDArray[Any]:
    """Encoded rows as an array; those in tiles are read from them."""
    if isinstance(blocks, tiles.Tiles):
        return tiles.unpack(blocks.format, blocks.side, blocks.buffer, blocks.first, blocks.n)
    return np.asarray(blocks)


def _queries(q: Any) -> NDArray[np.float32]:
    queries = as_float32(q, "q")
    if not np.isfinite(queries).all():
        raise RequestError("attention: q has a NaN or infinity")
    return queries


def spans(
    n_q: int, n_kv: int, causal: bool, window: int | None, position: int | None
) -> tuple[int, int]:
    """(first, end): query i sees the tokens [first + i, end + i), as far as they exist.

    Query 0 belongs to row `position`, by default the n_q-th from the end. A window of W is W keys,
    the query's own included; it implies an upper bound only with `causal`. Both numbers lie from
    -n_q (nothing is cut off in front, or nothing is seen) to n_kv.
    """
    own = n_kv - n_q if position is None else int(position)
    first = -n_q if window is None else own - int(window) + 1
    end = own + 1 if causal else n_kv
    return max(-n_q, min(first, n_kv)), max(-n_q, min(end, n_kv))


def visible(
    n_q: int, n_kv: int, causal: bool, window: int | None, position: int | None = None
) -> NDArray[np.bool_]:
    """Mask `[n_q, n_kv]`: which cached tokens each query sees (see `spans`)."""
    first, end = spans(n_q, n_kv, causal, window, position)
    query, token = np.arange(n_q)[:, None], np.arange(n_kv)[None]
    mask: NDArray[np.bool_] = (token >= first + query) & (token < end + query)
    return mask


def log_sum_exp(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of the sum of exp over the last axis; -inf for a row of only -inf."""
    top = scores.max(axis=-1, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        out: NDArray[np.float64] = shift + np.log(np.exp(scores - shift[..., None]).sum(axis=-1))
    return out


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
    position: object = None,
) -> None:
    """RequestError naming what does not fit in a call of attention; `head_dim` is that of keys."""
    check_shapes(q, keys, head_dim)
    if values.ndim != 3 or values.shape[:2] != keys.shape[:2]:
        raise RequestError(
            f"attention: keys {keys.shape} and values {values.shape} must agree in tokens and "
            "KV heads"
        )
    if position is None and len(q) > len(keys):
        raise RequestError(f"attention: {len(q)} queries but only {len(keys)} cached tokens")
    if position is not None and not whole(position):
        raise RequestError(f"attention: position {position!r} is not a whole number")
    if window is not None and not (whole(window) and window >= 1):  # type: ignore[operator]
        raise RequestError(f"attention: window {window!r} is not a positive whole number")
    plain = scale.item() if isinstance(scale, np.generic) else scale  # in no narrower type
    number = isinstance(plain, (int, float, np.longdouble))
    # Kernels take it in float32.
    if scale is not None and not (number and abs(plain) <= _F32_MAX):  # type: ignore[arg-type]
        raise RequestError(f"attention: scale {scale!r} is not a finite number")


_F32_MAX = float(np.finfo(np.float32).max)
LARGEST_PAGE = 2**31 - 1


def check_offsets(
    q: NDArray[Any], n_kv: int, offsets: NDArray[np.float32] | None, page: Any, phase: Any
) -> tuple[int, int]:
    """(page, phase) as Python integers, which do not overflow; page 1 where there are no offsets.

    RequestError naming what does not fit in the page offsets of a call of attention.
    """
    if not (whole(phase) and 0 <= phase <= LARGEST_PAGE):
        raise RequestError(f"attention: phase {phase!r} is not from 0 to {LARGEST_PAGE}")
    if offsets is None:
        if page is not None or phase:
            raise RequestError("attention: page and phase say where offsets go; offsets is missing")
        return 1, 0
    if page is None:
        raise RequestError("attention: offsets need page, the number of rows that share one")
    if not (whole(page) and 1 <= page <= LARGEST_PAGE):
        raise RequestError(f"attention: page {page!r} is not from 1 to {LARGEST_PAGE}")
    page, phase = int(page), int(phase)
    pages = -(-(phase + n_kv) // page) if n_kv else 0
    if offsets.ndim != 3 or offsets.shape[:2] != q.shape[:2] or offsets.shape[2] < pages:
        raise RequestError(
            f"attention: offsets {offsets.shape} must be [{q.shape[0]}, {q.shape[1]}, at least "
            f"{pages}]: {n_kv} rows from phase {phase} in pages of {page}"
        )
    if not np.isfinite(offsets).all():
        raise RequestError("attention: offsets have a NaN or infinity")
    return page, phase


def whole(number: object) -> bool:
    """Whether it is a whole number of Python or NumPy, which True and False are not here."""
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def row_scales(f: Format, scale: Any, lead: tuple[int, ...]) -> NDArray[np.float32] | None:
    """One float32 scale for each row of arrays `[*lead, ...]`, `[rows]`, from an array of the host;
    None where there is none to pass on. RequestError if they do not fit or are not legal."""
    factor = _scales_of(f, scale)
    if factor is None:
        return None
    try:
        rows = np.broadcast_to(factor, lead)
    except ValueError:
        raise RequestError(
            f"{f.name}: scale of shape {factor.shape} does not fit rows of shape {lead}"
        ) from None
    _check_scales(f, factor)
    return np.ascontiguousarray(rows).reshape(-1)


def head_scales(f: Format, scale: Any, heads: int, what: str) -> NDArray[np.float32] | None:
    """`row_scales`, one for each KV head; `what` names the argument."""
    factor = _scales_of(f, scale)
    if factor is None:
        return None
    if factor.shape not in ((), (1,), (heads,)):
        raise RequestError(f"{f.name}: {what} has shape {factor.shape}, needs ({heads},)")
    _check_scales(f, factor)
    return np.ascontiguousarray(np.broadcast_to(factor, (heads,)))


def _scales_of(f: Format, scale: Any) -> NDArray[np.float32] | None:
    if scale is None:
        return None
    factor: NDArray[np.float32] = scales(scale, f.name)
    if f.scaled:
        return factor
    if factor.size != 1 or float(factor.reshape(-1)[0]) != 1.0:
        raise RequestError(f"{f.name}: takes no scale (its scales are in its blocks)")
    return None


def _check_scales(f: Format, factor: NDArray[np.float32]) -> None:
    if not (np.isfinite(factor) & (factor > 0)).all():
        raise RequestError(f"{f.name}: scales must be positive and finite")


def source_digest() -> str:
    """SHA-256 over the sources that define the numbers: rotations, formats, their codebooks."""
    folder = Path(formats.__file__).parent
    sources = sorted([*folder.glob("*.py"), *folder.glob("*.txt")])
    files = [Path(inspect.getfile(rotation)), *sources]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
