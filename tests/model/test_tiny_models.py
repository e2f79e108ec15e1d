"""The transformers integration on tiny random models: windows, shared caches, two head widths.

What is compared is the integration: the kernels have tests of their own (tests/backend).
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: transformers)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import (  # noqa: E402
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import kvproof  # noqa: E402
from kvproof.engines import packed  # noqa: E402
from kvproof.engines.transformers import Model, _cache_argument, load  # noqa: E402
from kvproof.errors import RequestError  # noqa: E402
from kvproof.gguf import write_gguf  # noqa: E402

W = 8
BACKEND = "cpu"
VOCAB = 96
# Relative distances |a - b| / |b| of logits, about ten times what was seen over all models.
F16 = 1e-2  # float16 rows against float32 attention; seen 1e-3
SAME = 1e-3  # float32 sums differ in the last bit, so a rare code does; seen 1.4e-4
# Prompts and single tokens round to 15 bits in other ways, so more codes differ; seen 5e-3.
CHUNKS = 2e-2

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LAYERS = ["sliding_attention", "full_attention"] * 2


def gemma3():
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **COMMON, sliding_window=W, layer_types=list(LAYERS), query_pre_attn_scalar=24
        )
    )


def llama():
    return LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=True))


def gemma4():
    module = pytest.importorskip(
        "transformers.models.gemma4", reason="this transformers has no Gemma 4"
    )
    config = module.Gemma4TextConfig(
        **(COMMON | {"num_hidden_layers": 6, "num_key_value_heads": 1}),
        sliding_window=W,
        layer_types=["sliding_attention", "full_attention"] * 3,
        global_head_dim=64,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB,
    )
    return module.Gemma4ForCausalLM(config)


MODELS = {"llama": llama, "gemma3": gemma3, "gemma4": gemma4}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny products spend their time handing work between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=MODELS)
def hf(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Larger than the initial 0.02, so that attention and text are not degenerate.
            weight.normal_(0, 0.3 if weight.dim() > 1 else 0.1)
            if weight.dim() == 1 and "llama" in request.param:
                weight.add_(1)
            assert torch.isfinite(weight).all(), name
    return model


def distance(got, want):
    assert got.shape == want.shape and bool(torch.isfinite(got).all())
    return float((got - want).norm() / want.norm())


def text(n, seed=5):
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


def wrapped(hf, key="f16", value="f16"):
    cache = kvproof.transformers_cache(hf, key=key, value=value, backend=BACKEND)
    return Model(hf, cache.kv.geometry, tokenizer=None, eos=frozenset()), cache


def own_logits(hf, ids):
    """transformers' eager attention under its own masks, no cache."""
    hf.set_attn_implementation("eager")
    with torch.inference_mode():
        return hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("n", [W - 1, W, W + 1, 2 * W + 1, 33])
def test_one_pass_chunks_tokens_and_no_cache_agree(hf, n):
    ids = text(n)
    want = own_logits(hf, ids)
    model, _ = wrapped(hf)
    runs = []
    for chunk in (n, 1, 5):
        cache = kvproof.transformers_cache(hf, "f16", "f16", BACKEND)
        runs.append(model.forward(ids, cache, chunk=chunk))
        assert cache.kv.length == n
    for got in runs:
        assert got.shape == (n, VOCAB) and got.dtype == torch.float32
        assert distance(got, want) < F16
        assert distance(got, runs[0]) < SAME


@pytest.mark.parametrize("pair", [("q8_0", "q8_0"), ("tq4", "tq4"), ("tq4", "q8_0")])
def test_quantized_caches_give_the_same_numbers_in_any_chunks(hf, pair):
    ids = text(2 * W + 3)
    model, _ = wrapped(hf, *pair)
    runs = [
        model.forward(ids, kvproof.transformers_cache(hf, *pair, BACKEND), chunk=chunk)
        for chunk in (len(ids), 1, 6)
    ]
    apart = max(distance(got, runs[0]) for got in runs[1:])
    assert apart < CHUNKS
    # The codes are really what attention reads: the result is not the float16 one.
    f16, cache = wrapped(hf)
    assert distance(f16.forward(ids, cache), runs[0]) > max(1e-4, 5 * apart)


def test_greedy_text_equals_transformers_own_cache(hf):
    prompt, steps = torch.tensor([text(11)]), 3 * W
    hf.set_attn_implementation("sdpa")
    name = _cache_argument(hf)
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
    want = hf.generate(prompt, **{name: DynamicCache(config=hf.config)}, **options)
    cache = kvproof.transformers_cache(hf, "f16", "f16", backend=BACKEND)
    got = hf.generate(prompt, **{name: cache}, **options)
    assert got.tolist() == want.tolist()
    assert cache.kv.length == 11 + steps - 1
    assert all(sum(layer.values()) > 0 for layer in cache.kv.witness())


def test_attention_without_our_cache_is_transformers_own(hf):
    ids = text(2 * W + 1)
    want = own_logits(hf, ids)
    packed.register()
    hf.set_attn_implementation("kvproof")
    with torch.inference_mode():
        plain = hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        cache = DynamicCache(config=hf.config)
        steps = [
            hf(input_ids=torch.tensor([ids[at : at + 4]]), **{_cache_argument(hf): cache}).logits[0]
            for at in range(0, len(ids), 4)
        ]
    assert distance(plain, want) < SAME
    assert distance(torch.cat(steps), want) < SAME


def test_every_layers_cache_is_read(hf):
    ids, more = text(W - 2), [7]  # short enough that a window can be rolled back
    model, cache = wrapped(hf, "q8_0", "q8_0")
    model.forward(ids, cache)
    want = model.forward(more, cache)
    for owner in range(len(cache.kv.owners)):
        for side in ("k_blocks", "v_blocks"):
            cache.kv.crop(len(ids))
            saved = getattr(cache.kv.owners[owner], side).copy()
            spoiled = saved.copy()
            spoiled[1:] ^= 0x3C
            setattr(cache.kv.owners[owner], side, spoiled)
            assert distance(model.forward(more, cache), want) > 10 * SAME, (owner, side)
            cache.kv.crop(len(ids))
            setattr(cache.kv.owners[owner], side, saved)
    cache.kv.crop(len(ids))
    torch.testing.assert_close(model.forward(more, cache), want)


def test_windowed_layers_hold_their_window_and_shared_layers_nothing(hf):
    model, cache = wrapped(hf)
    model.forward(text(40), cache)
    for layer in cache.kv.owners:
        assert layer.cached == (40 if layer.window is None else W - 1)
    owners = [g for g in cache.kv.geometry.layers if g.shares_kv_with is None]
    assert len(cache.kv.owners) == len(owners) <= len(cache.layers) == len(cache.kv.witness())
    if "Gemma4" in type(hf).__name__:
        assert len(owners) == 4 and {g.head_dim_k for g in owners} == {32, 64}
        assert cache.kv.layer(5) is cache.kv.layer(3) and cache.kv.layer(4) is cache.kv.layer(2)


def test_what_a_cache_of_one_sequence_cannot_do_is_refused():
    torch.manual_seed(0)
    hf = gemma3().eval()
    cache = kvproof.transformers_cache(hf, "f16", "f16", BACKEND)
    two = torch.tensor([text(5), text(5, 6)])
    name = _cache_argument(hf)
    with pytest.raises(RequestError, match="one sequence, found a batch of 2"):
        hf(input_ids=two, **{name: cache})
    with pytest.raises(RequestError, match="does not support padding"):
        hf(
            input_ids=two[:1],
            attention_mask=torch.tensor([[0, 1, 1, 1, 1]]),
            **{name: cache},
        )
    assert cache.kv.length == 0
    with pytest.raises(RequestError, match="takes no attention mask"):
        hf(input_ids=two[:1], attention_mask=torch.zeros(1, 1, 5, 5), **{name: cache})
    with pytest.raises(RequestError, match="set_attn_implementation"):
        hf.generate(two[:1], cache_implementation="static", max_new_tokens=3, do_sample=False)
    with pytest.raises(RequestError, match=r"--cache-type-k tbq4_0: .*head_dim 40"):
        bad = Gemma3TextConfig(**(COMMON | {"head_dim": 40}), sliding_window=W)
        kvproof.transformers_cache(Gemma3ForCausalLM(bad), "tbq4_0", "f16", BACKEND)


def test_rolling_back_gives_the_same_continuation(hf):
    ids = text(12)
    model, cache = wrapped(hf, "tq4", "tq4")
    model.forward(ids[:6], cache)
    want = model.forward(ids[6:7], cache)
    cache.crop(-1)
    assert cache.get_seq_length() == 6
    assert torch.equal(model.forward(ids[6:7], cache), want)
    cache.reset()
    assert distance(model.forward(ids[:7], cache)[6:], want) < SAME


def test_bfloat16_models_keep_their_weights_and_compute_in_float32(hf):
    ids = text(20)
    rounded = hf.to(torch.bfloat16)
    state = {name: value.float() for name, value in rounded.state_dict().items()}
    exact = type(hf)(hf.config).eval()
    exact.load_state_dict(state)
    want = own_logits(exact, ids)
    model, cache = wrapped(packed.pack(rounded))
    got = model.forward(ids, cache)
    # Gemma rounds its embedding scale to the weights' type; exact float32 does not.
    assert distance(got, want) < F16
    torch.set_num_threads(8)
    with packed.torch_threads(model.hf):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 8
    torch.set_num_threads(1)
    assert {p.dtype for n, p in model.hf.named_parameters() if "_proj." in n} == {torch.bfloat16}


def test_unknown_ids_and_empty_text_are_refused():
    model, cache = wrapped(llama().eval())
    for ids, message in (([], "no tokens"), ([3, VOCAB], f"0 to {VOCAB - 1}, found 3 to {VOCAB}")):
        with pytest.raises(RequestError, match=message):
            model.forward(ids, cache)
        with pytest.raises(RequestError, match=message):
            list(model.generate(ids, cache, 3))


# --- GGUF files written from the tiny models, as llama.cpp's converter does it --------------------

NAMES = {
    "embed_tokens": "token_embd",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_of(hf, arch, **changes):
    """(metadata, tensors) of a tiny model."""
    norms = "ffn_norm" if arch == "llama" else "post_attention_norm"
    names = NAMES | {"post_attention_layernorm": norms}
    tensors = {}
    for name, weight in hf.state_dict().items():
        value = weight.float().numpy()
        if name.startswith("model.layers."):
            _, _, index, rest = name.removesuffix(".weight").split(".", 3)
            out = f"blk.{index}.{names[rest]}.weight"
        elif name.startswith("model.norm"):
            out = "output_norm.weight"
        elif name.startswith("model.embed"):
            out = "token_embd.weight"
        else:
            continue
        if arch == "gemma3" and value.ndim == 1:
            value = value + np.float32(1)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            dim, width = hf.config.head_dim, value.shape[1]
            value = value.reshape(-1, 2, dim // 2, width).swapaxes(1, 2).reshape(value.shape)
        tensors[out] = np.ascontiguousarray(value)
    c = hf.config
    meta = {
        "general.architecture": arch,
        f"{arch}.block_count": np.uint32(c.num_hidden_layers),
        f"{arch}.context_length": np.uint32(c.max_position_embeddings),
        f"{arch}.embedding_length": np.uint32(c.hidden_size),
        f"{arch}.feed_forward_length": np.uint32(c.intermediate_size),
        f"{arch}.attention.head_count": np.uint32(c.num_attention_heads),
        f"{arch}.attention.head_count_kv": np.uint32(c.num_key_value_heads),
        f"{arch}.attention.key_length": np.uint32(c.head_dim),
        f"{arch}.attention.value_length": np.uint32(c.head_dim),
        f"{arch}.attention.layer_norm_rms_epsilon": np.float32(c.rms_norm_eps),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [
            "<pad>",
            "<eos>",
            "<bos>",
            *map(chr, range(0x21, 0x21 + 92)),
            "ab",
        ],
        "tokenizer.ggml.token_type": np.array([3] * 3 + [1] * 93, np.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": np.uint32(1),
    }
    if arch == "gemma3":
        meta["gemma3.attention.sliding_window"] = np.uint32(W)
        meta["gemma3.rope.freq_base"] = np.float32(1e6)
        # Six layers a period by default; the tiny model alternates.
        meta["gemma3.attention.sliding_window_pattern"] = np.uint32(2)
    return meta | changes, tensors


def exact_in_bf16(build, seed=0):
    torch.manual_seed(seed)
    hf = build().eval()
    with torch.no_grad():
        for weight in hf.parameters():
            weight.copy_(weight.normal_(0, 0.3 if weight.dim() > 1 else 0.1).bfloat16())
    return hf


def head_dim_scaled():
    """GGUF states no query_pre_attn_scalar: it is head_dim."""
    config = gemma3().config
    config.query_pre_attn_scalar = config.head_dim
    return Gemma3ForCausalLM(config)


@pytest.mark.parametrize(("arch", "build"), [("gemma3", head_dim_scaled), ("llama", llama)])
def test_a_gguf_file_gives_the_model_it_was_written_from(tmp_path, arch, build):
    hf = exact_in_bf16(build)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, *gguf_of(hf, arch))
    model = load(path)
    ids = text(2 * W + 1)
    got = model.forward(ids, model.new_cache("f16", "f16", backend=BACKEND))
    assert distance(got, own_logits(hf, ids)) < F16
    assert model.vocab_size == VOCAB and model.eos == {1}
    assert model.tokenizer.decode(model.tokenizer.encode("ab")) == "ab"


def test_llama3_rope_factors_and_untied_output_are_used(tmp_path):
    hf = exact_in_bf16(lambda: LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=False)))
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    meta, tensors = gguf_of(hf, "llama")
    tensors["rope_freqs.weight"] = factors
    tensors["output.weight"] = hf.lm_head.weight.detach().numpy()
    write_gguf(tmp_path / "a.gguf", meta, tensors)
    model = load(tmp_path / "a.gguf")
    hf.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    ids = text(20)
    got = model.forward(ids, model.new_cache("f16", "f16", backend=BACKEND))
    assert distance(got, own_logits(hf, ids)) < F16


def test_linear_rope_scaling_is_for_global_layers(tmp_path):
    meta, tensors = gguf_of(exact_in_bf16(head_dim_scaled), "gemma3")
    meta |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": np.float32(8)}
    write_gguf(tmp_path / "a.gguf", meta, tensors)
    rotary = load(tmp_path / "a.gguf").hf.model.rotary_emb
    steps = torch.arange(0, 32, 2) / 32
    torch.testing.assert_close(rotary.full_attention_inv_freq, 1e6**-steps / 8)
    torch.testing.assert_close(rotary.sliding_attention_inv_freq, 1e4**-steps)


def test_files_that_do_not_fit_are_refused_by_name(tmp_path):
    meta, tensors = gguf_of(exact_in_bf16(llama), "llama")
    path = tmp_path / "a.gguf"
    changed = {k: v for k, v in tensors.items() if "blk.1.ffn_up" not in k}
    changed["blk.0.attn_q.bias"] = np.zeros(128, np.float32)
    cases = [
        (meta, changed, "missing blk.1.ffn_up.weight; unexpected blk.0.attn_q.bias"),
        (
            meta,
            tensors | {"output_norm.weight": np.zeros(63, np.float32)},
            r"'output_norm.weight': expected shape \[64\], found \[63\]",
        ),
        (meta | {"llama.rope.scaling.type": "yarn"}, tensors, "'yarn' cannot be run here"),
        (meta | {"llama.expert_count": np.uint32(4)}, tensors, "mixtures of experts"),
        (meta | {"tokenizer.ggml.pre": "klingon"}, tensors, "'klingon' is not supported"),
        (meta | {"tokenizer.ggml.model": "rwkv"}, tensors, "'rwkv' is not supported"),
    ]
    for metadata, data, message in cases:
        write_gguf(path, metadata, data)
        with pytest.raises(RequestError, match=message):
            load(path)
    renamed = {k.replace("llama.", "qwen2."): v for k, v in meta.items()}
    write_gguf(path, renamed | {"general.architecture": "qwen2"}, tensors)
    with pytest.raises(RequestError, match="'qwen2' cannot be run here, only gemma3, llama"):
        load(path)


def test_a_hugging_face_directory_loads(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    hf = exact_in_bf16(llama)
    hf.to(torch.bfloat16).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.tokenizer.encode("w5 w7") == [5, 7]
    ids = text(20)
    got = model.forward(ids, model.new_cache("f16", "f16", backend=BACKEND))
    assert distance(got, own_logits(hf.float(), ids)) < F16
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RequestError, match="transformers cannot load it"):
        load(tmp_path)
