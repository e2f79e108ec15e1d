"""Attention over parts of a cache, joined.

Parts may hold their rows in different formats (first tokens in f16, the rest coded): each gives its
own softmax output and the log-sum-exp that says how much that output weighs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.errors import RequestError
from kvproof.formats.base import as_float32

Part = tuple[Any, Any]  # (out [n_q, num_heads, head_dim], lse [n_q, num_heads]), float32


def merge(parts: Sequence[Part]) -> Part:
    """(out, lse) of attention over the rows of all parts, from `Backend.attention(...,
    return_lse=True)` on each.

    out float32 `[n_q, num_heads, head_dim]`, lse float32 `[n_q, num_heads]`. A query that sees no
    row of a part (lse -inf) takes nothing from it; one part comes back as it is. Torch tensors give
    torch tensors. RequestError where a part is no pair of arrays of real numbers, has a NaN or an
    infinite sum, where shapes differ or there is no part.
    """
    if not parts:
        raise RequestError("merge: needs the (out, lse) of at least one part")
    if not isinstance(parts, Sequence) or not all(
        isinstance(part, Sequence) and len(part) == 2 for part in parts
    ):
        raise RequestError("merge: needs a sequence of pairs (out, lse)")
    outs = [as_float32(out, "merge: out") for out, _ in parts]
    sums: list[NDArray[np.float32]] = [as_float32(x, "merge: lse") for _, x in parts]
    if not all((lse < np.inf).all() for lse in sums):
        raise RequestError("merge: an lse is NaN or plus infinity")
    shapes = {(out.shape, lse.shape) for out, lse in zip(outs, sums, strict=True)}
    if len(shapes) > 1 or outs[0].shape[:-1] != sums[0].shape:
        found = ", ".join(f"{out} with {lse}" for out, lse in sorted(shapes))
        raise RequestError(f"merge: out and lse of all parts must agree in shape, got {found}")
    if len(parts) == 1:
        return parts[0]
    top = np.maximum.reduce(sums)
    shift = np.where(top == -np.inf, np.float32(0), top)  # not seen anywhere: all weights are 0
    weights = [np.exp(lse - shift) for lse in sums]
    total: NDArray[np.float32] = np.add.reduce(weights)
    share: Any = np.float32(1) / np.where(total > 0, total, np.float32(1))
    out: NDArray[np.float32] = outs[0] * (weights[0] * share)[..., None]
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        out += part * (weight * share)[..., None]
    with np.errstate(divide="ignore"):
        lse = shift + np.log(total)
    if type(parts[0][0]).__module__.split(".")[0] != "torch":
        return out, lse
    import torch

    return torch.from_numpy(out), torch.from_numpy(lse)
