"""What is done to keys before they are encoded, so that codes are not spent on offsets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rope(
    x: NDArray[np.floating], positions: NDArray[np.integer], inv_freq: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Rotary embedding in float64: `x` `[n, heads, d]` turned to `positions` `[n]`.

    Channels j and j + m of the first 2 m, m = len(inv_freq), are a pair (halves layout); channels
    beyond them stay. Negative positions turn back.
    """
    m = len(inv_freq)
    angle = np.asarray(positions, np.float64)[:, None, None] * np.asarray(inv_freq, np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    out = np.array(x, np.float64)
    a, b = np.asarray(x[..., :m], np.float64), np.asarray(x[..., m : 2 * m], np.float64)
    out[..., :m] = a * cos - b * sin
    out[..., m : 2 * m] = a * sin + b * cos
    return out
