"""What a transformers model needs to run on our caches: attention, cache classes, bf16 products.

The tensors that `Cache.update` returns carry the layer's cache as an attribute, and the attention
function finds it there; layers that share a cache are handed the same tensors by the model. No
attention mask is ever built: queries are the last tokens of the cache, so position decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from kvproof import weights
from kvproof.backends.cpu import default_threads
from kvproof.cache import KVCache, LayerCache
from kvproof.errors import RequestError

ATTENTION = "kvproof"


class Linear(nn.Module):  # type: ignore[misc]
    """A linear layer of bfloat16 weights and float32 activations."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)
        self.out_features, self.in_features = weight.shape
        self.threads = default_threads()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 `[..., in]` to float32 `[..., out]`."""
        out = weights.linear(x, self.weight, self.threads)
        return out if self.bias is None else out + self.bias


class Embedding(nn.Module):  # type: ignore[misc]
    """Rows of bfloat16 weights as float32, times `scale` (Gemma's sqrt(hidden size))."""

    def __init__(self, weight: torch.Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids `[...]` to float32 `[..., hidden]`."""
        rows = functional.embedding(ids, self.weight).float()
        return rows if self.scale == 1.0 else rows * self.scale


class RMSNorm(nn.Module):  # type: ignore[misc]
    """Float32 RMS norm in one operation; `weight` (float32) is the whole factor (Gemma's 1 + w)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 `[..., n]`, normalized over the last axis."""
        return weights.rms_norm(x, self.weight, self.eps)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: query `[1, heads, n, dim]` to `[1, n, heads, dim]`.

    On keys that carry no cache of ours (no cache at all, or transformers' DynamicCache) it is
    torch's own attention under the mask that shapes and window imply.
    """
    if attention_mask is not None:
        raise RequestError(
            "attention 'kvproof' takes no attention mask: pass one sequence without padding"
        )
    if dropout or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise RequestError(
            f"{type(module).__name__}: attention with dropout, soft capping or sinks is not "
            "supported by attention 'kvproof'"
        )
    if module.training:
        raise RequestError(
            f"{type(module).__name__}: attention 'kvproof' has no gradients: call model.eval()"
        )
    if getattr(module, "is_causal", True) is False:
        raise RequestError(f"{type(module).__name__}: attention 'kvproof' is causal only")
    layer: LayerCache | None = getattr(key, "kvproof_layer", None)
    if layer is None:
        return _uncached(query, key, value, scaling, kwargs.get("sliding_window")), None
    if kwargs.get("sliding_window", layer.window) != layer.window:
        raise RequestError(
            f"layer {layer.index}: the model attends over a window of "
            f"{kwargs['sliding_window']}, its cache was made for {layer.window}"
        )
    out = layer.attention(_by_token(query), scale=scaling)
    return torch.as_tensor(out).to(query.dtype)[None], None


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """Rows `[1, heads, n, dim]` as float32 `[n, heads, dim]`, without a copy if they are that."""
    rows = x[0].transpose(0, 1)
    return rows if rows.dtype == torch.float32 else rows.float()


def _uncached(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    n, total = query.shape[2], key.shape[2]
    mask = None
    plain = window is None or total <= window
    if not (plain and n in (1, total)):
        position = torch.arange(total - n, total)[:, None]
        token = torch.arange(total)
        mask = token <= position
        if window is not None:
            mask &= token > position - window
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and n > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous()


def no_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """The mask builder: builds nothing, and refuses what would need a mask."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise RequestError(
            "attention 'kvproof' does not support padding: run the sequences one at a time"
        )
    if kv_offset + kv_length != q_offset + q_length:
        raise RequestError(
            "attention 'kvproof' works with its own cache or DynamicCache, not with static caches: "
            "model.set_attn_implementation('sdpa') brings back the model's own attention"
        )


def register() -> None:
    """Make `attn_implementation="kvproof"` known to transformers; RequestError if the products
    cannot run as KVPROOF_CPU_ISA asks."""
    weights.isa()
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, no_mask)


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's cache in the shape that transformers expects."""

    supports_early_init = False

    def __init__(self, layer: LayerCache) -> None:
        super().__init__()
        self.layer = layer
        self.is_sliding = layer.window is not None
        self.is_croppable = not self.is_sliding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: buffers grow on append."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values `[1, kv_heads, n, dim]`; they come back carrying the cache."""
        if key_states.shape[0] != 1:
            raise RequestError(
                f"kvproof caches hold one sequence, found a batch of {key_states.shape[0]}: "
                "generate the sequences one at a time, each with its own cache"
            )
        self.layer.append(_by_token(key_states), _by_token(value_states))
        key_states.kvproof_layer = self.layer
        self.is_initialized = True
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.layer.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that the next `query_length` tokens attend to."""
        window, seen = self.layer.window, self.layer.length
        offset = 0 if window is None else max(0, seen - window + 1)
        return seen + query_length - offset, offset

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # transformers before 5.24

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused: beams are several sequences."""
        raise RequestError("beam search needs several sequences; kvproof caches hold one")


class PackedCache(Cache):  # type: ignore[misc]
    """A transformers cache that holds codes only. `kv` is the KVCache behind it."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv
        indices = range(len(kv.geometry.layers))
        super().__init__(layers=[PackedLayer(kv.layer(i)) for i in indices])

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PackedLayer.update."""
        updated: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].update(
            key_states, value_states
        )
        return updated

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen."""
        return self.kv.layer(layer_idx).length

    def crop(self, tokens: int) -> None:
        """Forget the last -`tokens` tokens; a positive number is the length to keep (before
        transformers 5.24)."""
        self.kv.crop(tokens if tokens > 0 else self.kv.length + tokens)

    def reset(self) -> None:
        """Forget everything."""
        self.kv.reset()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: several sequences."""
        raise RequestError(f"kvproof caches hold one sequence, asked for {repeats}")


@contextmanager
def torch_threads(model: nn.Module) -> Iterator[None]:
    """Fewer threads for torch while a packed model runs; its products have threads of their own.

    What is left to torch are small sums and copies, a barrier each. On two busy cores a barrier
    waits for a thread that has no CPU: 512 tokens of Gemma-3-270m took 9 s with two threads and
    1.3 s with one; on the idle machine it was 1.4 s and 1.3 s.
    """
    before = torch.get_num_threads()
    if isinstance(model.get_output_embeddings(), Linear):
        torch.set_num_threads(max(1, before // 4))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pack(model: nn.Module) -> nn.Module:
    """Turn a bfloat16 model into one of bfloat16 weights and float32 activations, in place.

    Linear layers and embeddings keep their weights; norms and all the rest become float32.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                setattr(parent, name, Linear(child.weight.data, child.bias))
            elif isinstance(child, nn.Embedding) and child.weight.dtype == torch.bfloat16:
                scale = float(getattr(child, "scalar_embed_scale", 1.0))
                setattr(parent, name, Embedding(child.weight.data, scale))
    for module in model.modules():
        if not isinstance(module, Linear | Embedding):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.float()
    return model
