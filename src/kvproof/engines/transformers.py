"""Models from transformers' own classes that run on our caches.

A GGUF file becomes one of those classes without transformers' slow path: the config comes from the
header, the module tree is built without memory, and tensors are dequantized natively straight into
place. torch and transformers are imported by the functions that need them.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvproof.cache import KVCache
from kvproof.conditioner import SINKS, Conditioner
from kvproof.errors import RequestError
from kvproof.geometry import MAX_SIZE, Geometry, model_file
from kvproof.geometry import geometry as read_geometry
from kvproof.gguf import GGUF

if TYPE_CHECKING:
    import torch

    from kvproof.engines.packed import PackedCache

CHUNK = 128  # tokens of one pass: products reach their full speed, logits stay below 140 MB


class TextTokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with a beginning-of-text token where the model asks for one."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens left out."""


class Model:
    """A causal language model on our caches.

    `hf` is the transformers model, `eos` the ids that end a text.
    """

    def __init__(
        self, hf: Any, geometry: Geometry, tokenizer: TextTokenizer, eos: frozenset[int]
    ) -> None:
        self.hf = hf
        self.geometry = geometry
        self.tokenizer = tokenizer
        self.eos = eos
        self.vocab_size: int = hf.config.get_text_config().vocab_size
        self._cache_name = _cache_argument(hf)

    def new_cache(
        self,
        key: str = "f16",
        value: str = "f16",
        backend: str = "cpu",
        per_layer: Mapping[int, tuple[str, str]] | None = None,
        *,
        conditioner: Conditioner | None = None,
        sinks: int = 0,
        first_position: int = 0,
    ) -> PackedCache:
        """An empty cache for one sequence, whose first token is at `first_position` of its text;
        RequestError if a format or the conditioner does not fit a layer."""
        from kvproof.engines.packed import PackedCache

        kv = KVCache(
            self.geometry,
            key,
            value,
            backend,
            per_layer,
            conditioner=conditioner,
            sinks=sinks,
            first_position=first_position,
        )
        return PackedCache(kv)

    def forward(self, ids: Sequence[int], cache: PackedCache, chunk: int = CHUNK) -> torch.Tensor:
        """Logits float32 `[len(ids), vocab]` of `ids`, which follow what the cache has seen."""
        import torch

        self._check(ids)
        if len(ids) <= chunk:
            return self._pass(ids, cache, 0)
        logits = torch.empty((len(ids), self.vocab_size))
        for at in range(0, len(ids), chunk):
            part = ids[at : at + chunk]
            logits[at : at + len(part)] = self._pass(part, cache, 0)
        return logits

    def prefill(self, ids: Sequence[int], cache: PackedCache, chunk: int = CHUNK) -> torch.Tensor:
        """Logits float32 `[vocab]` of the last of `ids`; those of the others are not computed."""
        self._check(ids)
        for at in range(0, len(ids), chunk):
            logits = self._pass(ids[at : at + chunk], cache, 1)
        return logits[-1]

    def generate(
        self,
        ids: Sequence[int],
        cache: PackedCache,
        max_new_tokens: int,
        greedy: bool = True,
        seed: int = 0,
    ) -> Iterator[int]:
        """New ids after the prompt `ids`, one by one, until an end-of-text token (not included).

        Not `greedy`: sampled from the model's distribution, by `seed`.
        """
        import torch

        source = torch.Generator().manual_seed(seed)
        logits = self.prefill(ids, cache)
        for step in range(max_new_tokens):
            if greedy:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial(logits.softmax(-1), 1, generator=source))
            if token in self.eos:
                return
            yield token
            if step + 1 < max_new_tokens:
                logits = self._pass([token], cache, 1)[-1]

    def _pass(self, ids: Sequence[int], cache: PackedCache, keep: int) -> torch.Tensor:
        """One forward of the model: logits `[keep or all, vocab]`."""
        import torch

        from kvproof.engines.packed import torch_threads

        with torch.inference_mode(), torch_threads(self.hf):
            seen = cache.kv.first_position + cache.kv.length
            out = self.hf(
                input_ids=torch.tensor([list(ids)]),
                position_ids=torch.arange(seen, seen + len(ids))[None],
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_name: cache},
            )
            cache.kv.evict()
            return out.logits[0].float()

    def _check(self, ids: Sequence[int]) -> None:
        if not len(ids):
            raise RequestError("no tokens: the text is empty")
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise RequestError(
                f"token ids must be from 0 to {self.vocab_size - 1}, found {min(ids)} to {max(ids)}"
            )


def load(path: str | Path) -> Model:
    """The model in a GGUF file or a Hugging Face directory (safetensors, no code from it).

    RequestError for architectures and tensors that cannot be loaded.
    """
    file = model_file(Path(path))
    return _load_gguf(file) if file.suffix == ".gguf" else _load_directory(file.parent)


def transformers_cache(
    model: Any,
    key: str = "tq4",
    value: str = "tq4",
    backend: str = "cpu",
    *,
    conditioner: Conditioner | str | Path | None = None,
    sinks: int | None = None,
) -> PackedCache:
    """A cache for `model.generate(..., cache=cache)` of any transformers model (past_key_values=
    before 5.24), for one sequence without padding.

    `conditioner` is one for this model, or the file of one (`kvproof calibrate`); `sinks` first
    tokens are kept in f16 (None: 4 with a conditioner, else none). Switches the model to attention
    "kvproof" (`model.set_attn_implementation("sdpa")` goes back). RequestError, before anything
    changes, if a format does not fit a layer.
    """
    from kvproof.engines import packed

    config = getattr(model, "config", None)
    if not (hasattr(config, "to_json_string") and hasattr(model, "set_attn_implementation")):
        raise RequestError(
            f"transformers_cache: expected a transformers model, found a {type(model).__name__}"
        )
    if isinstance(conditioner, str | Path):
        conditioner = Conditioner.load(conditioner)
    if sinks is None:
        sinks = SINKS if conditioner else 0
    kv = KVCache(
        _config_geometry(config), key, value, backend, conditioner=conditioner, sinks=sinks
    )
    cache = packed.PackedCache(kv)
    packed.register()
    model.set_attn_implementation(packed.ATTENTION)
    return cache


def _config_geometry(config: Any) -> Geometry:
    """Geometry of a transformers config, every field spelled out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(json.loads(config.to_json_string(use_diff=False))))
        return read_geometry(path)


def _cache_argument(model: Any) -> str:
    """`cache` from transformers 5.24 on, `past_key_values` before."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _load_directory(folder: Path) -> Model:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from kvproof.engines import packed

    geometry = read_geometry(folder)
    if not any(part in p.name for p in folder.iterdir() for part in ("token", "vocab")):
        raise RequestError(
            f"{folder}: holds no tokenizer (tokenizer.json or tokenizer.model); put the "
            "model's own beside its weights"
        )
    logging.disable_progress_bar()  # the command line has one of its own
    packed.register()
    try:
        hf, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            attn_implementation=packed.ATTENTION,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        words = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # tokenizers raises Exception itself; the files are anyone's
        raise RequestError(f"{folder}: transformers cannot load it: {_line(error)}") from error
    # transformers makes up random weights for those that a folder lacks.
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - 8} more" if missing[8:] else ""
        raise RequestError(
            f"{folder}: weights are missing: {', '.join(missing[:8])}{more}; fetch the files again"
        )
    # float16 has no products here; float32 stays what it is.
    hf = packed.pack(hf) if hf.dtype == torch.bfloat16 else hf.float()
    eos = hf.generation_config.eos_token_id
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return Model(hf.eval(), geometry, _HubTokenizer(words), frozenset(ids))


def _line(error: Exception) -> str:
    return textwrap.shorten(str(error), 300, placeholder=" ...")


class _HubTokenizer:
    def __init__(self, words: Any) -> None:
        self.words = words

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.words.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.words.decode(ids, skip_special_tokens=True)
        return text


def _load_gguf(path: Path) -> Model:
    from kvproof.engines.tokenizer import Tokenizer

    with GGUF(path) as file:
        arch = str(file.metadata.get("general.architecture"))
        if arch not in _ARCHITECTURES:
            raise RequestError(
                f"{path}: architecture {arch!r} cannot be run here, only "
                f"{', '.join(_ARCHITECTURES)} (a Hugging Face directory of the model can)"
            )
        geometry = read_geometry(path)
        tokenizer = Tokenizer(file)
        hf = _build(file, geometry)
        if tokenizer.vocab_size != hf.config.vocab_size:
            raise RequestError(
                f"{path}: tokenizer.ggml.tokens has {tokenizer.vocab_size} tokens, tensor "
                f"'token_embd.weight' {hf.config.vocab_size} rows"
            )
    eos = frozenset() if tokenizer.eos is None else frozenset({tokenizer.eos})
    return Model(hf, geometry, tokenizer, eos)


_Names = Mapping[str, str]

_ROPE_FACTORS = "rope_freqs.weight"
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA_BLOCK = {**_BLOCK, "ffn_norm": "post_attention_layernorm"}
_GEMMA3_BLOCK = {
    **_BLOCK,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _common(file: GGUF, geometry: Geometry) -> dict[str, Any]:
    """Config fields that every architecture has."""
    arch, layers = geometry.architecture, geometry.layers
    heads = {(x.num_heads, x.num_kv_heads, x.head_dim_k, x.head_dim_v) for x in layers}
    if len(heads) != 1 or layers[0].head_dim_k != layers[0].head_dim_v:
        raise RequestError(f"{file.path}: {arch}: layers of different shapes cannot be run here")
    if layers[0].head_dim_k % 2:
        raise RequestError(
            f"{file.path}: {arch}: head_dim {layers[0].head_dim_k} is odd: rotary positions turn "
            "pairs of values"
        )
    if file.whole(f"{arch}.expert_count", 0, MAX_SIZE):
        raise RequestError(f"{file.path}: {arch}.expert_count: mixtures of experts cannot be run")
    embedding = file.tensors["token_embd.weight"]
    if len(embedding.shape) != 2 or 0 in embedding.shape:
        raise RequestError(
            f"{file.path}: tensor 'token_embd.weight': expected a matrix, found shape "
            f"{list(embedding.shape)}"
        )
    vocab = embedding.shape[1]

    def need(name: str, value: Any) -> Any:
        if value is None:
            raise RequestError(f"{file.path}: {arch}.{name} is missing")
        return value

    def whole(name: str) -> Any:
        return need(name, file.whole(f"{arch}.{name}", 1, MAX_SIZE))

    def token(name: str) -> int | None:
        return file.whole(f"tokenizer.ggml.{name}_token_id", 0, vocab - 1)

    epsilon = "attention.layer_norm_rms_epsilon"
    return {
        "vocab_size": vocab,
        "hidden_size": whole("embedding_length"),
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": len(layers),
        "num_attention_heads": layers[0].num_heads,
        "num_key_value_heads": layers[0].num_kv_heads,
        "head_dim": layers[0].head_dim_k,
        "max_position_embeddings": need("context_length", geometry.context_length),
        "rms_norm_eps": need(epsilon, file.positive(f"{arch}.{epsilon}")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": token("bos"),
        "eos_token_id": token("eos"),
        "pad_token_id": token("padding"),
    }


def _rope(file: GGUF, arch: str, default: float) -> dict[str, Any]:
    """Rotary parameters of the global layers."""
    kind = file.text(f"{arch}.rope.scaling.type") or "none"
    rope = {
        "rope_type": "default",
        "rope_theta": file.positive(f"{arch}.rope.freq_base") or default,
    }
    if kind == "linear":
        factor = file.positive(f"{arch}.rope.scaling.factor") or 1.0
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise RequestError(
            f"{file.path}: {arch}.rope.scaling.type {kind!r} cannot be run here (none, linear)"
        )
    return rope


def _llama(file: GGUF, geometry: Geometry) -> tuple[Any, Callable[[Any], Any]]:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

    if any(layer.window for layer in geometry.layers):
        raise RequestError(f"{file.path}: llama with a sliding window cannot be run here")
    config = LlamaConfig(**_common(file, geometry), rope_parameters=_rope(file, "llama", 10000.0))
    return config, LlamaForCausalLM


def _gemma3(file: GGUF, geometry: Geometry) -> tuple[Any, Callable[[Any], Any]]:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM, Gemma3TextConfig

    layers = geometry.layers
    scale = geometry.attention_scale or layers[0].head_dim_k ** -0.5
    local = file.positive("gemma3.rope.freq_base_swa") or 10000.0
    config = Gemma3TextConfig(
        **_common(file, geometry),
        query_pre_attn_scalar=round(scale**-2),
        sliding_window=next((x.window for x in layers if x.window), None),
        layer_types=["sliding_attention" if x.window else "full_attention" for x in layers],
        final_logit_softcapping=file.positive("gemma3.final_logit_softcapping"),
        rope_parameters={
            "full_attention": _rope(file, "gemma3", 1_000_000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    )
    return config, Gemma3ForCausalLM


_ARCHITECTURES: Mapping[
    str, tuple[_Names, Callable[[GGUF, Geometry], tuple[Any, Callable[[Any], Any]]]]
] = {"gemma3": (_GEMMA3_BLOCK, _gemma3), "llama": (_LLAMA_BLOCK, _llama)}


def _build(file: GGUF, geometry: Geometry) -> Any:
    """The model with all its tensors, built without memory for those it replaces."""
    block, configure = _ARCHITECTURES[geometry.architecture]
    names = _tensor_names(file, geometry, block)
    # Tensors are dequantized while transformers is imported, which is seconds of pure Python.
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_read_tensors, file, names)
        try:
            config, construct = configure(file, geometry)
            hf = _construct(config, construct)
        finally:
            tensors = reading.result()
    return _fill(file, geometry, hf, names, tensors)


def _tensor_names(file: GGUF, geometry: Geometry, block: _Names) -> dict[str, str]:
    """Tensor of the file -> module of the model; RequestError unless they fit exactly."""
    names = {f"{gguf}.weight": f"model.{module}" for gguf, module in _TOP.items()} | {
        f"blk.{i}.{gguf}.weight": f"model.layers.{i}.{module}"
        for i in range(len(geometry.layers))
        for gguf, module in block.items()
    }
    if "output.weight" in file.tensors:
        names["output.weight"] = "lm_head"
    known = {*names, _ROPE_FACTORS} if geometry.architecture == "llama" else names.keys()
    missing = [name for name in names if name not in file.tensors]
    unexpected = [name for name in file.tensors if name not in known]
    if missing or unexpected:
        raise RequestError(
            f"{file.path}: tensors do not fit {geometry.architecture}: "
            + "; ".join(
                f"{what} {', '.join(some[:8])}{f' and {len(some) - 8} more' if some[8:] else ''}"
                for what, some in (("missing", missing), ("unexpected", unexpected))
                if some
            )
        )
    return names


def _read_tensors(file: GGUF, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Matrices as bfloat16, vectors (norms) as float32."""
    import torch

    from kvproof.weights import read_tensor

    infos = [file.tensors[name] for name in names]
    return {
        info.name: read_tensor(
            file, info, torch.float32 if len(info.shape) == 1 else torch.bfloat16
        )
        for info in infos
    }


def _construct(config: Any, construct: Callable[[Any], Any]) -> Any:
    """The module tree on the meta device: shapes, no memory."""
    import torch

    from kvproof.engines import packed

    packed.register()
    config._attn_implementation = packed.ATTENTION
    with torch.device("meta"):
        return construct(config)


def _fill(
    file: GGUF, geometry: Geometry, hf: Any, names: _Names, tensors: dict[str, torch.Tensor]
) -> Any:
    """Put the tensors in place of the modules that wait for them."""
    import torch

    from kvproof.engines import packed
    from kvproof.weights import read_tensor

    config = hf.config
    for name, target in names.items():
        module, weight = hf.get_submodule(target), tensors.pop(name)
        if module.weight.shape != weight.shape:
            raise RequestError(
                f"{file.path}: tensor {name!r}: expected shape {list(module.weight.shape)}, found "
                f"{list(weight.shape)}"
            )
        if weight.dim() == 1:  # GGUF holds Gemma's factor as 1 + w already
            replacement: Any = packed.RMSNorm(weight, config.rms_norm_eps)
        elif target.endswith("embed_tokens"):
            scale = float(getattr(module, "scalar_embed_scale", 1.0))
            replacement = packed.Embedding(weight, scale)
        else:
            if geometry.architecture == "llama" and target.endswith(("q_proj", "k_proj")):
                weight = _unpermute(weight, config.head_dim)
            replacement = packed.Linear(weight)
        hf.set_submodule(target, replacement)
    if config.tie_word_embeddings:
        hf.lm_head = packed.Linear(hf.model.embed_tokens.weight)
        hf.lm_head.weight = hf.model.embed_tokens.weight
    hf.model.rotary_emb = type(hf.model.rotary_emb)(config)  # its buffers were made without memory
    factors = file.tensors.get(_ROPE_FACTORS)
    if factors is not None:
        expected = hf.model.rotary_emb.inv_freq.shape
        if factors.shape != tuple(expected):
            raise RequestError(
                f"{file.path}: tensor {_ROPE_FACTORS!r}: expected shape {list(expected)}, found "
                f"{list(factors.shape)}"
            )
        hf.model.rotary_emb.inv_freq /= read_tensor(file, factors, torch.float32)
    return hf.eval()


def _unpermute(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows [heads, dim / 2, 2] (llama.cpp turns neighbours) to [heads, 2, dim / 2] (halves)."""
    out, width = weight.shape
    pairs = weight.view(out // head_dim, head_dim // 2, 2, width)
    return pairs.transpose(1, 2).reshape(out, width)
