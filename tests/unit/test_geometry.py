"""Geometry per layer from headers and configs, and the bytes of a cache, against the spec's tables.

Headers here are synthetic: one for each model whose geometry is known, and one for each refusal.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvproof
from kvproof.errors import RequestError
from kvproof.geometry import Geometry, Layout, geometry, inspect_model
from kvproof.gguf import write_gguf

MIB = 1 << 20


def header(path: Path, arch: str, **fields: Any) -> Path:
    """A GGUF without tensors; `attention_head_count=4` sets "<arch>.attention.head_count"."""
    metadata: dict[str, Any] = {"general.architecture": arch}
    for name, value in fields.items():
        if value is not None:
            name = name.replace("attention_", "attention.", 1)
            metadata[f"{arch}.{name}"] = value
    write_gguf(path, metadata)
    return path


def every(n: int, count: int) -> list[bool]:
    """Sliding flags: the last of every n layers is global."""
    return [i % n < n - 1 for i in range(count)]


GEMMA3_270M = dict(
    block_count=18,
    context_length=32768,
    embedding_length=640,
    attention_head_count=4,
    attention_head_count_kv=1,
    attention_key_length=256,
    attention_value_length=256,
    attention_sliding_window=512,
)
GEMMA3N_E2B = dict(
    block_count=30,
    context_length=32768,
    embedding_length=2048,
    attention_head_count=8,
    attention_head_count_kv=2,
    attention_key_length=256,
    attention_value_length=256,
    attention_sliding_window=512,
)
GEMMA4_E2B = dict(
    block_count=35,
    context_length=131072,
    embedding_length=1536,
    attention_head_count=8,
    attention_head_count_kv=1,
    attention_key_length=512,
    attention_value_length=512,
    attention_key_length_swa=256,
    attention_value_length_swa=256,
    attention_sliding_window=512,
    attention_sliding_window_pattern=every(5, 35),
    attention_shared_kv_layers=20,
)
GEMMA4_E4B = GEMMA4_E2B | dict(
    block_count=42,
    embedding_length=2560,
    attention_head_count_kv=2,
    attention_sliding_window_pattern=every(6, 42),
    attention_shared_kv_layers=18,
)
SMOLLM2 = dict(
    block_count=30,
    context_length=8192,
    embedding_length=576,
    attention_head_count=9,
    attention_head_count_kv=3,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-3-270m": ("gemma3", GEMMA3_270M),
    "gemma3n-E2B": ("gemma3n", GEMMA3N_E2B),
    "gemma-4-E2B": ("gemma4", GEMMA4_E2B),
    "gemma-4-E4B": ("gemma4", GEMMA4_E4B),
    "smollm2-135m": ("llama", SMOLLM2),
}


def known(name: str, folder: Path) -> Geometry:
    arch, fields = MODELS[name]
    return geometry(header(folder / f"{name}.gguf", arch, **fields))


def indices(g: Geometry, **wanted: Any) -> list[int]:
    return [x.index for x in g.layers if all(getattr(x, k) == v for k, v in wanted.items())]


# layers, heads, KV heads, (global, sliding) width, sliding layers, own global, own sliding, targets
KNOWN = {
    "gemma-3-270m": (18, 4, 1, 256, 256, 15, 3, 15, None, None),
    "gemma3n-E2B": (30, 8, 2, 256, 256, 24, 4, 16, 18, 19),
    "gemma-4-E2B": (35, 8, 1, 512, 256, 28, 3, 12, 13, 14),
    "gemma-4-E4B": (42, 8, 2, 512, 256, 35, 4, 20, 22, 23),
    "smollm2-135m": (30, 9, 3, 64, 64, 0, 30, 0, None, None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models(name: str, tmp_path: Path) -> None:
    count, heads, kv, wide, narrow, sliding, own_global, own_sliding, to_sliding, to_global = KNOWN[
        name
    ]
    g = known(name, tmp_path)
    assert len(g.layers) == count
    assert [x.index for x in g.layers] == list(range(count))
    assert {(x.num_heads, x.num_kv_heads) for x in g.layers} == {(heads, kv)}
    assert len(indices(g, window=512)) == sliding
    assert len(indices(g, window=None, shares_kv_with=None)) == own_global
    assert len(indices(g, window=512, shares_kv_with=None)) == own_sliding
    for layer in g.layers:
        width = wide if layer.window is None else narrow
        assert (layer.head_dim_k, layer.head_dim_v) == (width, width)
        target = to_global if layer.window is None else to_sliding
        assert layer.shares_kv_with in (None, target)
        if layer.shares_kv_with is not None:
            assert layer.kind == g.layers[layer.shares_kv_with].kind


def test_where_the_global_layers_are(tmp_path: Path) -> None:
    assert indices(known("gemma-3-270m", tmp_path), window=None) == [5, 11, 17]
    g = known("gemma-4-E2B", tmp_path)
    assert indices(g, window=None, shares_kv_with=None) == [4, 9, 14]


def test_defaults_that_were_used_are_on_record(tmp_path: Path) -> None:
    source = known("gemma-3-270m", tmp_path).source
    assert source.defaults == {
        "gemma3.attention.key_length_swa": 256,
        "gemma3.attention.value_length_swa": 256,
        "gemma3.attention.sliding_window_pattern": 6,
        "gemma3.attention.shared_kv_layers": 0,
    }
    assert source.fields["gemma3.attention.sliding_window"] == 512
    assert (
        known("gemma3n-E2B", tmp_path).source.defaults["gemma3n.attention.shared_kv_layers"] == 10
    )
    smollm2 = known("smollm2-135m", tmp_path)
    assert smollm2.source.defaults["llama.attention.key_length"] == 64
    assert smollm2.context_length == 8192
    assert smollm2.hidden_size == 576


def test_attention_scale(tmp_path: Path) -> None:
    assert known("gemma-3-270m", tmp_path).attention_scale == 256**-0.5
    assert known("gemma3n-E2B", tmp_path).attention_scale == 1.0
    assert known("gemma-4-E2B", tmp_path).attention_scale == 1.0
    assert known("smollm2-135m", tmp_path).attention_scale is None
    big = GEMMA3_270M | dict(block_count=62, embedding_length=5376, attention_head_count=32)
    g = geometry(
        header(
            tmp_path / "27b.gguf",
            "gemma3",
            **big,
        )
    )
    assert g.attention_scale == 168**-0.5


def test_scalar_and_array_fields_agree(tmp_path: Path) -> None:
    scalar = known("gemma-4-E2B", tmp_path)
    fields = GEMMA4_E2B | dict(
        attention_head_count=[8] * 35,
        attention_head_count_kv=np.full(35, 1, np.int32),
        attention_sliding_window_pattern=5,
    )
    assert geometry(header(tmp_path / "a.gguf", "gemma4", **fields)).layers == scalar.layers
    fields["attention_sliding_window_pattern"] = [int(s) for s in every(5, 35)]
    assert geometry(header(tmp_path / "b.gguf", "gemma4", **fields)).layers == scalar.layers


def test_layers_may_differ_in_kv_heads(tmp_path: Path) -> None:
    kv = [8, 8, 8, 8, 8, 2]
    fields = GEMMA4_E2B | dict(
        block_count=6,
        attention_head_count_kv=kv,
        attention_sliding_window_pattern=every(6, 6),
        attention_shared_kv_layers=None,
    )
    g = geometry(header(tmp_path / "x.gguf", "gemma4", **fields))
    assert [x.num_kv_heads for x in g.layers] == kv
    assert g.kv_bytes(4096, "f16", "f16") == 2 * 2 * (5 * 1024 * 8 * 256 + 4096 * 2 * 512)


def test_integer_patterns(tmp_path: Path) -> None:
    def sliding(pattern: int) -> list[bool]:
        fields = GEMMA3_270M | dict(attention_sliding_window_pattern=pattern)
        g = geometry(header(tmp_path / "x.gguf", "gemma3", **fields))
        return [x.window is not None for x in g.layers]

    assert sliding(0) == [True] * 18
    assert sliding(1) == [False] * 18
    assert sliding(4) == every(4, 18)


@pytest.mark.parametrize("window", [0, None])
def test_without_a_window_nothing_slides(window: int | None, tmp_path: Path) -> None:
    fields = GEMMA3_270M | dict(attention_sliding_window=window)
    g = geometry(header(tmp_path / "x.gguf", "gemma3", **fields))
    assert indices(g, window=None) == list(range(18))


@pytest.mark.parametrize(("layers", "shared"), [(35, 20), (35, 15)])
def test_shared_layers_are_counted_once(layers: int, shared: int, tmp_path: Path) -> None:
    fields = GEMMA4_E2B | dict(attention_shared_kv_layers=shared)
    g = geometry(header(tmp_path / "x.gguf", "gemma4", **fields))
    assert len(indices(g, shares_kv_with=None)) == layers - shared
    assert sum(b > 0 for b in g.layer_bytes(4096, "f16", "f16")) == layers - shared


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no layers": ("llama", SMOLLM2 | dict(block_count=None), "llama.block_count: missing"),
    "endless layers": (
        "llama",
        SMOLLM2 | dict(block_count=2**32 - 1),
        "llama.block_count: expected a whole number from 1 to 4096, found 4294967295",
    ),
    "no heads": (
        "llama",
        SMOLLM2 | dict(attention_head_count=None),
        "llama.attention.head_count: missing",
    ),
    "heads as text": (
        "llama",
        SMOLLM2 | dict(attention_head_count="nine"),
        "llama.attention.head_count: expected a whole number from 0 to 16777216, found 'nine'",
    ),
    "no width": (
        "llama",
        SMOLLM2 | dict(embedding_length=None),
        "llama.embedding_length: missing",
    ),
    "ragged width": (
        "llama",
        SMOLLM2 | dict(embedding_length=577),
        "llama.attention.key_length: missing, and embedding_length 577 / heads [9] is not whole",
    ),
    "zero width": (
        "llama",
        SMOLLM2 | dict(attention_key_length=0),
        "llama.attention.key_length: expected a whole number from 1",
    ),
    "ragged groups": (
        "llama",
        SMOLLM2 | dict(attention_head_count_kv=4),
        "llama.attention.head_count_kv: layer 0: 9 query heads are not a multiple of 4 KV heads",
    ),
    "short head array": (
        "llama",
        SMOLLM2 | dict(attention_head_count_kv=[3] * 29),
        "llama.attention.head_count_kv: expected 30 entries, one per layer, found 29",
    ),
    "long array": (
        "llama",
        SMOLLM2 | dict(attention_head_count_kv=np.ones(5000, np.uint32)),
        "llama.attention.head_count_kv: expected at most 4096 entries, found 5000",
    ),
    "short pattern": (
        "gemma4",
        GEMMA4_E2B | dict(attention_sliding_window_pattern=every(5, 34)),
        "gemma4.attention.sliding_window_pattern: expected 35 entries, one per layer, found 34",
    ),
    "pattern of numbers": (
        "gemma4",
        GEMMA4_E2B | dict(attention_sliding_window_pattern=[2] * 35),
        "gemma4.attention.sliding_window_pattern: expected booleans",
    ),
    "gemma4 without pattern": (
        "gemma4",
        GEMMA4_E2B | dict(attention_sliding_window_pattern=None),
        "gemma4.attention.sliding_window_pattern: missing",
    ),
    "window of an architecture without pattern": (
        "phi3",
        SMOLLM2 | dict(attention_sliding_window=2047),
        "phi3.attention.sliding_window_pattern: missing, with attention.sliding_window 2047",
    ),
    "widths of sliding layers without a window": (
        "gemma4",
        GEMMA4_E2B | dict(attention_sliding_window=None),
        "gemma4.attention.sliding_window: missing or 0, but attention.key_length_swa 256",
    ),
    "all shared": (
        "gemma4",
        GEMMA4_E2B | dict(attention_shared_kv_layers=35),
        "gemma4.attention.shared_kv_layers: expected fewer than the 35 layers, found 35",
    ),
    "sharing from the wrong kinds": (
        "gemma4",
        GEMMA4_E2B | dict(attention_shared_kv_layers=21),
        "gemma4.attention.shared_kv_layers: 21: the last two layers with a cache, 12 and 13",
    ),
    "gemma3n that contradicts llama.cpp": (
        "gemma3n",
        GEMMA3N_E2B | dict(attention_shared_kv_layers=5),
        "gemma3n.attention.shared_kv_layers: 5, but gemma3n with 30 layers shares the last 10",
    ),
    "latent attention": (
        "deepseek2",
        SMOLLM2 | dict(attention_key_length_mla=192),
        "deepseek2.attention.key_length_mla: multi-head latent attention",
    ),
    "latent attention, old header": (
        "deepseek2",
        SMOLLM2 | dict(attention_kv_lora_rank=512),
        "deepseek2.attention.kv_lora_rank: multi-head latent attention",
    ),
    "hybrid by array": (
        "lfm2",
        SMOLLM2 | dict(attention_head_count_kv=[3, 3, 0] + [3] * 27),
        "lfm2.attention.head_count_kv: layer 2 has no attention heads",
    ),
    "hybrid by key": (
        "jamba",
        SMOLLM2 | {"ssm.state_size": 16, "attention_head_count_kv": [3, 0] + [3] * 28},
        "jamba.ssm.state_size: layer 1 is a recurrent or linear-attention layer",
    ),
    "encoder": (
        "bert",
        SMOLLM2 | dict(attention_causal=False),
        "bert.attention.causal: false: an encoder has no KV cache",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_headers_name_the_field(name: str, tmp_path: Path) -> None:
    arch, fields, expected = REFUSED[name]
    path = header(tmp_path / "x.gguf", arch, **fields)
    with pytest.raises(RequestError) as caught:
        geometry(path)
    assert str(caught.value).startswith(f"{path}: {expected}")
    assert "\n" not in str(caught.value)


def test_a_header_without_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", {"general.architecture": "two\nlines"})
    with pytest.raises(RequestError, match=r"general.architecture: expected .*'two\\nlines'"):
        geometry(tmp_path / "x.gguf")


# --- Hugging Face configs -------------------------------------------------------------------------


def config(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    return path


def kinds(flags: Sequence[bool]) -> list[str]:
    return ["sliding_attention" if s else "full_attention" for s in flags]


HF_GEMMA3_270M = dict(
    model_type="gemma3_text",
    num_hidden_layers=18,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    hidden_size=640,
    sliding_window=512,
    query_pre_attn_scalar=256,
    max_position_embeddings=32768,
    layer_types=kinds(every(6, 18)),
)
HF_GEMMA3N_E2B = dict(
    model_type="gemma3n_text",
    num_hidden_layers=30,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    hidden_size=2048,
    sliding_window=512,
    num_kv_shared_layers=10,
    layer_types=kinds(every(5, 30)),
)
HF_GEMMA4_E2B = dict(
    model_type="gemma4_text",
    num_hidden_layers=35,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=256,
    global_head_dim=512,
    hidden_size=1536,
    sliding_window=512,
    num_kv_shared_layers=20,
    layer_types=kinds(every(5, 35)),
    attention_k_eq_v=False,
    max_position_embeddings=131072,
)
HF_SMOLLM2 = dict(
    model_type="llama",
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    hidden_size=576,
    vocab_size=49152,
    max_position_embeddings=8192,
)
PAIRS = {
    "gemma-3-270m": HF_GEMMA3_270M,
    "gemma3n-E2B": HF_GEMMA3N_E2B,
    "gemma-4-E2B": HF_GEMMA4_E2B,
    "smollm2-135m": HF_SMOLLM2,
}


@pytest.mark.parametrize("name", PAIRS)
def test_config_and_header_of_one_model_agree(name: str, tmp_path: Path) -> None:
    ours = geometry(config(tmp_path / "hf", **PAIRS[name]))
    header_geometry = known(name, tmp_path)
    assert ours.layers == header_geometry.layers
    assert ours.architecture == header_geometry.architecture
    assert ours.attention_scale == header_geometry.attention_scale
    assert ours.hidden_size == header_geometry.hidden_size


@pytest.mark.parametrize("name", PAIRS)
def test_configs_agree_with_the_transformers_classes(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    path = config(tmp_path / "hf", **PAIRS[name])
    theirs = transformers.AutoConfig.from_pretrained(path.parent)
    modes = getattr(theirs, "kv_sharing_modes", [None] * theirs.num_hidden_layers)
    types = getattr(theirs, "layer_types", None) or kinds([False] * theirs.num_hidden_layers)
    ours = geometry(path)
    for layer in ours.layers:
        assert layer.head_dim_k == theirs.per_layer_config[layer.index].head_dim
        assert layer.num_kv_heads == theirs.per_layer_config[layer.index].num_key_value_heads
        assert kinds([layer.window is not None]) == [types[layer.index]]
        assert layer.window in (None, getattr(theirs, "sliding_window", None))
        assert (layer.shares_kv_with is not None) == (modes[layer.index] == "reuse")
    # What the class saves states the same model in its own words (per_layer_config for Gemma 4).
    theirs.save_pretrained(tmp_path / "saved")
    assert geometry(tmp_path / "saved").layers == ours.layers


def test_multimodal_configs_hold_the_model_inside(tmp_path: Path) -> None:
    path = config(tmp_path, model_type="gemma3", text_config=HF_GEMMA3_270M, vision_config={})
    g = geometry(path)
    assert g.architecture == "gemma3"
    assert g.layers == known("gemma-3-270m", tmp_path).layers


def test_class_defaults_are_reported(tmp_path: Path) -> None:
    g = geometry(config(tmp_path / "3", model_type="gemma3_text"))
    assert (len(g.layers), g.layers[0].num_kv_heads, g.layers[0].window) == (26, 4, 4096)
    assert g.source.defaults["num_key_value_heads"] == 4
    assert g.source.defaults["sliding_window_pattern"] == 6
    assert indices(g, window=None) == [5, 11, 17, 23]
    g = geometry(config(tmp_path / "3n", model_type="gemma3n_text"))
    assert (len(g.layers), len(indices(g, shares_kv_with=None))) == (35, 20)
    g = geometry(config(tmp_path / "4", model_type="gemma4_text"))
    assert {x.head_dim_k for x in g.layers if x.window is None} == {512}
    assert g.source.defaults["global_head_dim"] == 512


def test_old_gemma3_files_have_an_integer_pattern(tmp_path: Path) -> None:
    fields = HF_GEMMA3_270M | dict(layer_types=..., sliding_window_pattern=3)
    g = geometry(config(tmp_path, **fields))
    assert indices(g, window=None) == [2, 5, 8, 11, 14, 17]


def test_gemma4_forces_the_last_layer_to_be_global(tmp_path: Path) -> None:
    types = ["sliding_attention"] * 4
    fields = HF_GEMMA4_E2B | dict(num_hidden_layers=4, layer_types=types, num_kv_shared_layers=0)
    g = geometry(config(tmp_path, **fields))
    assert indices(g, window=None) == [3]
    assert "forces the last layer" in g.source.notes[0]


def test_gemma4_global_kv_heads_need_the_flag(tmp_path: Path) -> None:
    fields = HF_GEMMA4_E2B | dict(
        num_attention_heads=16, num_key_value_heads=8, num_global_key_value_heads=2
    )
    g = geometry(config(tmp_path / "on", **fields | dict(attention_k_eq_v=True)))
    assert {x.num_kv_heads for x in g.layers if x.window is None} == {2}
    assert {x.num_kv_heads for x in g.layers if x.window is not None} == {8}
    with pytest.raises(RequestError, match="num_global_key_value_heads: 2 differs"):
        geometry(config(tmp_path / "off", **fields))
    same = fields | dict(num_global_key_value_heads=8)
    assert {x.num_kv_heads for x in geometry(config(tmp_path / "same", **same)).layers} == {8}


def test_gemma4_per_layer_config_takes_precedence(tmp_path: Path) -> None:
    overrides = {"4": {"head_dim": 128}, "9": {"head_dim": 512, "num_key_value_heads": 2}}
    g = geometry(config(tmp_path, **HF_GEMMA4_E2B | dict(per_layer_config=overrides)))
    assert [g.layers[i].head_dim_k for i in (3, 4, 9, 14)] == [256, 128, 512, 256]
    assert [g.layers[i].num_kv_heads for i in (4, 9)] == [1, 2]


def test_windows_of_llama_like_configs(tmp_path: Path) -> None:
    mistral = HF_SMOLLM2 | dict(model_type="mistral", sliding_window=None)
    assert indices(geometry(config(tmp_path, **mistral)), window=None) == list(range(30))
    qwen = HF_SMOLLM2 | dict(model_type="qwen2", sliding_window=32768, use_sliding_window=False)
    assert indices(geometry(config(tmp_path, **qwen)), window=None) == list(range(30))
    mixed = HF_SMOLLM2 | dict(
        model_type="gpt_oss",
        head_dim=64,
        sliding_window=128,
        layer_types=kinds([i % 2 == 0 for i in range(30)]),
    )
    assert indices(geometry(config(tmp_path, **mixed)), window=128) == list(range(0, 30, 2))


CONFIG_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no type": (HF_SMOLLM2 | dict(model_type=...), "model_type: expected"),
    "no layers": (HF_SMOLLM2 | dict(num_hidden_layers=...), "num_hidden_layers: missing"),
    "no KV heads": (
        HF_SMOLLM2 | dict(model_type="mistral", num_key_value_heads=...),
        "num_key_value_heads: missing",
    ),
    "no head_dim": (HF_SMOLLM2 | dict(model_type="qwen3"), "head_dim: missing"),
    "fraction": (
        HF_SMOLLM2 | dict(num_attention_heads=9.5),
        "num_attention_heads: expected a whole",
    ),
    "true": (HF_SMOLLM2 | dict(num_attention_heads=True), "num_attention_heads: expected a whole"),
    "mistral with a window": (
        HF_SMOLLM2 | dict(model_type="mistral", sliding_window=4096),
        "layer_types: missing, with sliding_window 4096",
    ),
    "mistral that does not say": (
        HF_SMOLLM2 | dict(model_type="mistral"),
        "sliding_window: missing; mistral has windows unless",
    ),
    "sliding without window": (
        HF_SMOLLM2 | dict(layer_types=kinds(every(2, 30))),
        "sliding_window: missing or off, but layer_types says that layer 0 slides",
    ),
    "short layer_types": (
        HF_GEMMA3_270M | dict(layer_types=kinds(every(6, 17))),
        "layer_types: expected 18 entries, one per layer, found 17",
    ),
    "linear attention": (
        HF_SMOLLM2
        | dict(
            model_type="qwen3_next",
            head_dim=64,
            layer_types=["full_attention"] * 7 + ["linear_attention"] * 23,
        ),
        "layer_types: layer 7 is 'linear_attention'",
    ),
    "hybrid by interval": (
        HF_SMOLLM2 | dict(model_type="qwen3_next", full_attention_interval=4),
        "full_attention_interval: layer 0 is a recurrent or linear-attention layer",
    ),
    "hybrid by list": (
        HF_SMOLLM2 | dict(model_type="jamba", layers_block_type=["attention", "mamba"] * 15),
        "layers_block_type: layer 1 is a recurrent",
    ),
    "latent attention": (
        HF_SMOLLM2 | dict(model_type="deepseek_v3", kv_lora_rank=512),
        "kv_lora_rank: multi-head latent attention",
    ),
    "encoder-decoder": (
        HF_SMOLLM2 | dict(model_type="t5", is_encoder_decoder=True),
        "is_encoder_decoder: true",
    ),
    "two widths in an unknown class": (
        HF_SMOLLM2 | dict(model_type="gemma5_text", head_dim=64, global_head_dim=512),
        "global_head_dim: changes layers in a way not known for gemma5_text",
    ),
    "all shared": (
        HF_GEMMA4_E2B | dict(num_kv_shared_layers=35),
        "num_kv_shared_layers: expected fewer than 35 layers, found 35",
    ),
    "nothing to share": (
        HF_GEMMA4_E2B | dict(num_kv_shared_layers=31),
        "num_kv_shared_layers: layer 4 is global and no layer before 4 owns such a cache",
    ),
    "override of a layer that is not there": (
        HF_GEMMA4_E2B | dict(per_layer_config={"35": {"head_dim": 8}}),
        "per_layer_config['35']: expected a layer index below 35",
    ),
}


@pytest.mark.parametrize("name", CONFIG_REFUSED)
def test_refused_configs_name_the_field(name: str, tmp_path: Path) -> None:
    fields, expected = CONFIG_REFUSED[name]
    path = config(tmp_path, **fields)
    with pytest.raises(RequestError) as caught:
        geometry(path)
    assert str(caught.value).startswith(f"{path}: {expected}")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b"\xff\xfe\x00", "expected JSON"),
        (b"<html>Sign in</html>", "found an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "found a Git LFS pointer"),
        (b'{"text_config": 3}', "text_config: expected an object, found 3"),
    ],
)
def test_files_that_are_no_config(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        geometry(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


JUNK = [None, True, -1, 0, 1, 7, 2**31, 2**63, 0.5, "x\ny", [], [1], [None] * 35, {}, {"4": {}}]


@pytest.mark.parametrize("fields", [HF_GEMMA4_E2B, HF_GEMMA3_270M, HF_SMOLLM2])
def test_junk_in_a_config_is_refused_in_one_line(fields: dict[str, Any], tmp_path: Path) -> None:
    more = ("per_layer_config", "num_global_key_value_heads", "layer_types", "text_config")
    refused = 0
    for name in (*fields, *more):
        for junk in JUNK:
            path = config(tmp_path, **fields | {name: junk})
            try:
                g = geometry(path)
                assert g.kv_bytes(1000, "f16", "f16") > 0
            except RequestError as error:
                refused += 1
                assert str(error).startswith(f"{path}: ")
                assert "\n" not in str(error)
    assert refused > 60


@pytest.mark.parametrize("arch", ["gemma3", "gemma3n", "gemma4", "llama"])
def test_junk_in_a_header_is_refused_in_one_line(arch: str, tmp_path: Path) -> None:
    junk = [True, -1, 0, 1, 7, 2**31, 2**63, 0.5, "x\ny", ["a"] * 35, [True] * 35, [0.5] * 35]
    refused = 0
    for name in GEMMA4_E2B:
        for value in junk:
            path = header(tmp_path / "x.gguf", arch, **GEMMA4_E2B | {name: value})
            try:
                g = geometry(path)
                assert g.kv_bytes(1000, "f16", "f16") > 0
            except RequestError as error:
                refused += 1
                assert str(error).startswith(f"{path}: ")
                assert "\n" not in str(error)
    assert refused > 60


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="found neither"):
        geometry(tmp_path)
    header(tmp_path / "a.gguf", "llama", **SMOLLM2)
    assert len(geometry(tmp_path).layers) == 30
    header(tmp_path / "b.gguf", "llama", **SMOLLM2)
    with pytest.raises(RequestError, match=r"expected one GGUF file, found 2; name one: a.gguf, b"):
        geometry(tmp_path)
    config(tmp_path, **HF_GEMMA3_270M)
    assert geometry(tmp_path).architecture == "gemma3"
    with pytest.raises(RequestError, match="no such file or folder"):
        geometry(tmp_path / "absent")


def test_the_public_name_is_callable(tmp_path: Path) -> None:
    path = header(tmp_path / "x.gguf", "gemma3", **GEMMA3_270M)
    g = kvproof.geometry(path)
    assert g.kv_bytes(context=8192, key="q8_0", value="q8_0") == 21_725_184
    assert g.layers[0].window == 512


# --- bytes ----------------------------------------------------------------------------------------

WORKED = [
    ("gemma-4-E2B", 8192, (60, 66, 31.875, 16.875, 13.125)),
    ("gemma-4-E2B", 131072, (780, 786, 414.375, 219.375, 170.625)),
    ("gemma-4-E4B", 8192, (168, 188, 89.25, 47.25, 36.75)),
    ("gemma-4-E4B", 131072, (2088, 2108, 1109.25, 587.25, 456.75)),
]


@pytest.mark.parametrize(("name", "context", "mib"), WORKED)
def test_worked_examples(name: str, context: int, mib: tuple[float, ...], tmp_path: Path) -> None:
    g = known(name, tmp_path)
    assert g.cells(g.layers[0], context).total == 1024
    found = [
        g.kv_bytes(context, "f16", "f16"),
        g.kv_bytes(context, "f16", "f16", flash_attention=False),
        *(g.kv_bytes(context, f, f) for f in ("q8_0", "q4_0", "tbq3_0")),
    ]
    assert [n / MIB for n in found] == list(mib)


def test_formats_of_keys_and_values_count_apart(tmp_path: Path) -> None:
    g = known("gemma-4-E2B", tmp_path)
    k_only, v_only = g.kv_bytes(8192, "q8_0", "q4_0"), g.kv_bytes(8192, "q4_0", "q8_0")
    assert k_only == v_only == (31.875 + 16.875) / 2 * MIB
    assert g.layer_bytes(8192, "f16", "q8_0")[4] == 8192 * (1024 + 512 // 32 * 34)
    assert g.layer_bytes(8192, "f16", "q8_0")[0] == 1024 * (512 + 256 // 32 * 34)


def test_window_slack_and_padding_are_apart(tmp_path: Path) -> None:
    fields = GEMMA3_270M | dict(attention_sliding_window=1024)
    g = geometry(header(tmp_path / "x.gguf", "gemma3", **fields))
    sliding, wide = g.layers[0], g.layers[5]

    def parts(layer: Any, context: int, **layout: Any) -> tuple[int, ...]:
        c = g.cells(layer, context, Layout(**layout))
        return c.tokens, c.slack, c.padding, c.total

    assert parts(sliding, 4096) == (1024, 512, 0, 1536)
    assert parts(sliding, 4096, ubatch=100) == (1024, 100, 156, 1280)
    assert parts(sliding, 4096, swa_full=True) == (4096, 0, 0, 4096)
    assert parts(sliding, 700) == (700, 0, 68, 768)
    assert parts(sliding, 1200) == (1024, 176, 80, 1280)
    assert parts(wide, 4000) == (4000, 0, 96, 4096)
    assert parts(sliding, 4000, padding=False) == (1024, 0, 0, 1024)
    assert parts(sliding, 1000, padding=False) == (1000, 0, 0, 1000)


def test_several_sequences(tmp_path: Path) -> None:
    g = known("gemma-4-E2B", tmp_path)

    def cells(layer: int, unified: bool) -> int:
        return g.cells(g.layers[layer], 8192, Layout(sequences=3, unified=unified)).total

    assert cells(4, unified=True) == 8192
    assert cells(0, unified=True) == 512 * 3 + 512
    # ceil(8192 / 3 / 256) * 256 = 2816 cells in each of three streams
    assert cells(4, unified=False) == 3 * 2816
    assert cells(0, unified=False) == 3 * 1024
    both = [g.kv_bytes(8192, "f16", "f16", sequences=3, unified=u) for u in (True, False)]
    assert both == [
        3 * 8192 * 2048 + 12 * 2048 * 1024,
        3 * 3 * 2816 * 2048 + 12 * 3 * 1024 * 1024,
    ]


def test_swa_full_charges_the_whole_context(tmp_path: Path) -> None:
    g = known("gemma-4-E2B", tmp_path)
    assert g.kv_bytes(8192, "f16", "f16", swa_full=True) == 8192 * (3 * 2048 + 12 * 1024)


def test_the_exact_cache_of_kvproof(tmp_path: Path) -> None:
    g = known("gemma-3-270m", tmp_path)
    rows = 3 * 3000 + 15 * 512
    assert g.kv_bytes(3000, "q8_0", "q8_0", padding=False) == rows * 2 * 272
    with pytest.raises(RequestError, match="padding=False sizes kvproof's own cache"):
        g.kv_bytes(3000, "f16", "f16", padding=False, sequences=2)


def test_options_out_of_range_are_refused(tmp_path: Path) -> None:
    g = known("gemma-3-270m", tmp_path)
    with pytest.raises(RequestError, match="context: expected 1 to 2147483647, found 0"):
        g.kv_bytes(0, "f16", "f16")
    with pytest.raises(RequestError, match="ubatch: expected 1"):
        g.kv_bytes(1, "f16", "f16", ubatch=0)
    with pytest.raises(RequestError, match="value format q8_0: V cache quantization requires"):
        g.kv_bytes(1024, "q8_0", "q8_0", flash_attention=False)


def test_a_format_that_does_not_fit_names_the_layer(tmp_path: Path) -> None:
    fields = SMOLLM2 | dict(attention_key_length=80, attention_value_length=64)
    g = geometry(header(tmp_path / "x.gguf", "llama", **fields))
    assert g.refuses("q8_0", "q8_0") == "layer 0: q8_0: head_dim 80 is not a multiple of 32"
    assert g.refuses("f16", "q8_0") is None
    with pytest.raises(RequestError, match="layer 0: q8_0: head_dim 80"):
        g.kv_bytes(1024, "q8_0", "f16")
    document = inspect_model(tmp_path / "x.gguf", memory=MIB)
    assert document["bytes"]["q8_0"] is None
    assert document["max_context"]["q8_0"] is None
    assert document["refused"]["q8_0"] == "layer 0: q8_0: head_dim 80 is not a multiple of 32"
    assert document["bytes"]["f16"] == 8192 * 30 * 3 * (160 + 128)


def test_savings(tmp_path: Path) -> None:
    g = known("gemma-4-E2B", tmp_path)
    actual = 60 * MIB
    saved = g.savings(8192, "f16", "f16")
    assert saved["windows"] == 8192 * (3 * 2048 + 12 * 1024) - actual
    assert saved["sharing"] == 7 * 8192 * 2048 + 28 * 1024 * 1024 - actual
    assert saved["both"] == 8192 * (7 * 2048 + 28 * 1024) - actual


def test_the_longest_context_that_fits(tmp_path: Path) -> None:
    g = known("gemma-4-E2B", tmp_path)
    fit = g.max_context(60 * MIB, "f16", "f16")
    assert (fit.tokens, fit.nbytes, fit.capped) == (8192, 60 * MIB, False)
    assert g.max_context(60 * MIB - 1, "f16", "f16").tokens == 8192 - 256
    everything = g.max_context(1 << 40, "f16", "f16")
    assert (everything.tokens, everything.capped) == (131072, True)
    nothing = g.max_context(1000, "f16", "f16")
    assert (nothing.tokens, nothing.nbytes, nothing.capped) == (0, 0, False)
    exact = g.max_context(MIB, "q8_0", "q8_0", Layout(padding=False)).tokens
    assert g.kv_bytes(exact, "q8_0", "q8_0", padding=False) <= MIB
    assert g.kv_bytes(exact + 1, "q8_0", "q8_0", padding=False) > MIB


def test_inspect_is_one_json_document(tmp_path: Path) -> None:
    path = header(tmp_path / "x.gguf", "gemma4", **GEMMA4_E2B)
    document = inspect_model(path, context=8192, memory=60 * MIB)
    assert json.loads(json.dumps(document)) == document
    assert document["architecture"] == "gemma4"
    assert document["layers"][13] == {
        "index": 13,
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim_k": 256,
        "head_dim_v": 256,
        "window": 512,
        "shares_kv_with": None,
        "kind": "sliding",
    }
    assert document["layers"][33]["shares_kv_with"] == 13
    assert document["bytes"]["f16"] == 60 * MIB
    assert document["max_context"]["f16"] == 8192
    assert document["max_context_capped"] == {
        name: tokens == 131072
        for name, tokens in document["max_context"].items()
        if name != "qjl1_256"  # for keys only, so no context fits with it on both sides
    }
    assert sum(document["bytes_per_layer"]["q4_0"]) == document["bytes"]["q4_0"]
    assert document["bytes_exact"]["f16"] == 3 * 8192 * 2048 + 12 * 512 * 1024
    grouped = [(len(g["layers"]), g["kind"], g["owns_cache"]) for g in document["groups"]]
    assert sorted(grouped) == [
        (3, "global", True),
        (4, "global", False),
        (12, "sliding", True),
        (16, "sliding", False),
    ]
    assert "max_context" not in inspect_model(path)
    assert inspect_model(path)["context"] == 8192
