"""The queries, keys and values that a model really produces, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvproof.conditioner import rope
from kvproof.engines.transformers import CHUNK
from kvproof.errors import RequestError

if TYPE_CHECKING:
    from kvproof.cache import LayerCache
    from kvproof.engines.packed import PackedCache
    from kvproof.engines.transformers import Model

Rows = NDArray[np.float32]

# Tokens of the run that finds each layer's frequencies, and how far its keys may be from them.
PROBE = 32
PROBE_ERROR = 1e-2


@dataclass(frozen=True)
class LayerRows:
    """What one layer produced for a text of n tokens.

    `q` float32 `[n, num_heads, head_dim_k]`, `k` `[n, num_kv_heads, head_dim_k]` and `v`
    `[n, num_kv_heads, head_dim_v]` as attention and cache receive them, rotary positions applied. A
    layer that shares a cache has its own `q` and its owner's `k` and `v`. `positions` int64 `[n]`.
    `inv_freq` float64 `[m]`: frequencies of the rotary pairs (j, j + m); empty where keys do not
    depend on their position, None where they do in another way.
    """

    index: int
    q: Rows
    k: Rows
    v: Rows
    positions: NDArray[np.int64]
    inv_freq: NDArray[np.float64] | None


def capture(model: Model, ids: Sequence[int]) -> list[LayerRows]:
    """Run `ids` through `model` with an f16 cache and keep every layer's rows, in float32.

    RequestError for an empty text and ids that the model does not have.
    """
    found = _record(model, ids)
    turns = _frequencies(model, int(ids[-1]))
    positions = np.arange(len(ids))
    return [
        LayerRows(index, q, k, v, positions, turns[index]) for index, (q, k, v) in enumerate(found)
    ]


class _Recorder:
    """Stands before the cache of a layer and copies what goes in. `readers`: the layers that read
    this cache, in the order in which the model asks for attention."""

    def __init__(self, layer: LayerCache, readers: Sequence[int]) -> None:
        self.layer = layer
        self.index, self.window = layer.index, layer.window
        self.keys: list[Rows] = []
        self.values: list[Rows] = []
        self.queries: dict[int, list[Rows]] = {i: [] for i in readers}
        self._asked = 0

    @property
    def length(self) -> int:
        return self.layer.length

    def append(self, k: Any, v: Any) -> None:
        self._asked = 0
        self.keys.append(k.numpy().copy())
        self.values.append(v.numpy().copy())
        self.layer.append(k, v)

    def attention(self, q: Any, **options: Any) -> Any:
        list(self.queries.values())[self._asked].append(q.numpy().copy())
        self._asked += 1
        return self.layer.attention(q, **options)


def _record(model: Model, ids: Sequence[int]) -> list[tuple[Rows, Rows, Rows]]:
    """q, k and v of every layer."""
    cache: PackedCache = model.new_cache()
    owners = {
        layer.index: layer.index if layer.shares_kv_with is None else layer.shares_kv_with
        for layer in model.geometry.layers
    }
    recorders: dict[int, _Recorder] = {}
    for owner in sorted(set(owners.values())):
        readers = [index for index, of in owners.items() if of == owner]
        recorders[owner] = _Recorder(cache.kv.layer(owner), readers)
        cache.layers[owner].layer = recorders[owner]
    if not len(ids):
        raise RequestError("no tokens: the text is empty")
    if any(index != owner for index, owner in owners.items()):
        # Where one logit is wanted, Gemma 4 runs the layers that share a cache for one token only.
        for at in range(0, len(ids), CHUNK):
            model.forward(ids[at : at + CHUNK], cache)
    else:
        model.prefill(ids, cache)
    rows = {
        owner: (np.concatenate(r.keys), np.concatenate(r.values)) for owner, r in recorders.items()
    }
    return [
        (np.concatenate(recorders[owner].queries[index]), *rows[owner])
        for index, owner in owners.items()
    ]


def _frequencies(model: Model, token: int) -> list[NDArray[np.float64] | None]:
    """Per layer the frequencies by which its keys turn, found by a run of one token repeated.

    All rows of such a text are alike but for their position, in every layer, so keys must be the
    first key turned. What the model's configuration says need not be known, and a layout other
    than halves shows as None.
    """
    candidates = [*_rotary_buffers(model.hf), np.empty(0)]
    found: list[NDArray[np.float64] | None] = []
    positions = np.arange(PROBE)
    for _, keys, _ in _record(model, [token] * PROBE):
        best, error = None, PROBE_ERROR
        for inv_freq in candidates:
            if 2 * len(inv_freq) > keys.shape[-1]:
                continue
            turned = rope(np.broadcast_to(keys[:1], keys.shape), positions, inv_freq)
            size = float(np.linalg.norm(keys)) or 1.0
            off = float(np.linalg.norm(turned - keys)) / size
            if off < error:
                best, error = inv_freq, off
        found.append(best)
    return found


def _rotary_buffers(hf: Any) -> list[NDArray[np.float64]]:
    """Every set of inverse frequencies that a module of the model holds for all lengths."""
    found = []
    for module in hf.modules():
        kinds = getattr(module, "rope_type", None)
        for name, buffer in module.named_buffers(recurse=False):
            layer_type = name.removesuffix("inv_freq").removesuffix("_")
            kind = kinds.get(layer_type) if isinstance(kinds, dict) else kinds
            # These two change their frequencies as the text grows.
            if name.endswith("inv_freq") and kind not in ("dynamic", "longrope"):
                found.append(buffer.detach().double().cpu().numpy())
    return found
