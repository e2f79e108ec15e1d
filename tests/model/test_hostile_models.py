"""Model files and models that are not what they should be: one refusal, no code from them runs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: transformers)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import kvproof  # noqa: E402
from kvproof.engines.transformers import _cache_argument, load  # noqa: E402
from kvproof.errors import RequestError  # noqa: E402
from kvproof.gguf import write_gguf  # noqa: E402

TOKENS = ["<unk>", "<s>", "</s>", "\u2581a", "b", "c"] + [f"<0x{i:02X}>" for i in range(256)]
VOCAB = len(TOKENS)
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": np.uint32(1),
    "llama.context_length": np.uint32(512),
    "llama.embedding_length": np.uint32(64),
    "llama.feed_forward_length": np.uint32(64),
    "llama.attention.head_count": np.uint32(2),
    "llama.attention.head_count_kv": np.uint32(1),
    "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": -np.arange(VOCAB, dtype=np.float32),
    "tokenizer.ggml.token_type": np.array([2, 3, 3, 1, 1, 1] + [6] * 256, np.int32),
    "tokenizer.ggml.bos_token_id": np.uint32(1),
    "tokenizer.ggml.eos_token_id": np.uint32(2),
}
SHAPES = {
    "token_embd": (VOCAB, 64),
    "output_norm": (64,),
    "blk.0.attn_norm": (64,),
    "blk.0.ffn_norm": (64,),
    "blk.0.attn_q": (64, 64),
    "blk.0.attn_k": (32, 64),
    "blk.0.attn_v": (32, 64),
    "blk.0.attn_output": (64, 64),
    "blk.0.ffn_gate": (64, 64),
    "blk.0.ffn_up": (64, 64),
    "blk.0.ffn_down": (64, 64),
}
NAN = np.float32("nan")
PAIR = np.ones(2, np.float32)


def same(value):
    return np.full(VOCAB, value, np.int32)


def write(path: Path, metadata=None, tensors=None) -> Path:
    rng = np.random.default_rng(0)
    weights = {
        f"{name}.weight": (0.1 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    changed = {k: v for k, v in (METADATA | (metadata or {})).items() if v is not None}
    write_gguf(path, changed, weights | (tensors or {}))
    return path


def test_the_model_that_the_others_spoil_runs(tmp_path):
    model = load(write(tmp_path / "m.gguf"))
    ids = model.tokenizer.encode("a b c")
    assert len(list(model.generate(ids, model.new_cache(), 3))) == 3


LL, TK = "llama.", "tokenizer.ggml."
HEADERS = [
    {LL + "block_count": np.uint32(10**9)},
    {LL + "block_count": np.uint32(2)},
    {LL + "attention.head_count": np.uint32(0)},
    {LL + "attention.sliding_window": np.int32(-5)},
    {LL + "attention.key_length": np.uint32(31), LL + "attention.value_length": np.uint32(31)},
    {LL + "context_length": None},
    *({LL + "rope.freq_base": v} for v in (NAN, np.float32(0), np.float32(-5), "x", PAIR)),
    {LL + "rope.scaling.type": PAIR},
    {LL + "rope.scaling.type": "linear", LL + "rope.scaling.factor": np.float32(0)},
    *({LL + "attention.layer_norm_rms_epsilon": v} for v in (NAN, np.float32(-1), "x")),
    *({LL + "feed_forward_length": v} for v in (np.int32(-3), np.uint64(2**62), "x", PAIR)),
    {LL + "expert_count": PAIR},
    *({TK + "tokens": v} for v in (None, same(1), np.uint32(3), "abc", ["a"] * VOCAB)),
    *({TK + "tokens": v} for v in ([""] * VOCAB, [b"\xff"] * VOCAB, TOKENS[:-1])),
    *({TK + "scores": v} for v in (None, ["x"] * VOCAB, np.float32(1), PAIR)),
    *({TK + "token_type": same(v)} for v in (-1, 0, 77, 999, 1, 2, 3)),
    *({TK + "token_type": v} for v in (["x"] * VOCAB, np.int32(1))),
    *({TK + "bos_token_id": v} for v in ("x", PAIR, NAN, np.uint32(99999))),
    *({TK + "padding_token_id": v} for v in ("x", np.uint32(99999))),
    {TK + "add_bos_token": PAIR},
    {TK + "add_space_prefix": "maybe"},
    *({TK + "model": v} for v in (None, ["llama"], "\x1b[2J")),
    *({TK + "model": "gpt2", TK + "merges": v} for v in (None, ["ab"], ["q z"], same(1), "a b")),
    {TK + "model": "gpt2", TK + "merges": ["b c"], TK + "pre": PAIR},
]
TENSORS = [
    {"token_embd.weight": np.zeros((), np.float32)},
    {"token_embd.weight": np.zeros((0, 64), np.float32)},
    {"token_embd.weight": np.zeros((VOCAB - 1, 64), np.float32)},
    {"output_norm.weight": np.ones((8, 8), np.float32)},
    {"blk.0.attn_q.weight": np.ones(64, np.float32)},
    {"blk.0.attn_q.weight": np.ones((33, 64), np.float32)},
    {"blk.0.attn_q.weight": np.ones((64, 64), np.float64)},
    {"rope_freqs.weight": np.ones(3, np.float32)},
    {"rope_freqs.weight": np.ones((4, 16), np.float32)},
    {"evil": np.ones((4, 4), np.float32)},
]


@pytest.mark.parametrize("metadata", HEADERS, ids=lambda m: repr(m)[:60])
def test_a_hostile_header_is_refused(tmp_path, metadata):
    with pytest.raises(RequestError, match=r"m\.gguf"):
        load(write(tmp_path / "m.gguf", metadata))


@pytest.mark.parametrize("tensors", TENSORS, ids=lambda t: repr(t)[:40])
def test_a_hostile_tensor_is_refused(tmp_path, tensors):
    with pytest.raises(RequestError, match=r"m\.gguf: t"):
        load(write(tmp_path / "m.gguf", tensors=tensors))


# --- folders --------------------------------------------------------------------------------------

CONFIG = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "good"
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder, max_shard_size="60KB")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def configure(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = shard(folder)
    weights = load_file(path)
    weights.pop(min(weights))
    save_file(weights, path, metadata={"format": "pt"})


def pickles_only(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def remote_code(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass C: pass\n")
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    configure(folder, model_type="evil", auto_map=names)


SPOIL = {
    "a missing shard": lambda d: shard(d).unlink(),
    "a page for weights": lambda d: shard(d).write_text("<html>sign in</html>"),
    "a pointer for weights": lambda d: shard(d).write_text(
        "version https://git-lfs.github.com/spec/v1\nsize 1"
    ),
    "cut weights": lambda d: shard(d).write_bytes(shard(d).read_bytes()[:1000]),
    "a missing tensor": drop_tensor,
    "pickles only": pickles_only,
    "remote code": remote_code,
    "no tokenizer": lambda d: [p.unlink() for p in d.glob("token*")],
    "a bad tokenizer": lambda d: (d / "tokenizer.json").write_text('{"a": 1}'),
    "a bad index": lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
    "other heads": lambda d: configure(d, num_attention_heads=8),
    "another vocabulary": lambda d: configure(d, vocab_size=50),
    "no such dtype": lambda d: configure(d, dtype="float7"),
    "bad rotary positions": lambda d: configure(d, rope_parameters="x"),
}


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
def test_a_spoiled_folder_is_refused_and_runs_no_code(tmp_path, good, spoil):
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    spoil(folder)
    with pytest.raises(RequestError, match="model"):
        load(folder)
    assert not (folder / "ran").exists()


def test_the_folder_that_the_others_spoil_runs(good):
    model = load(good)
    ids = model.tokenizer.encode("w1 w2 w3")
    assert len(list(model.generate(ids, model.new_cache(), 2))) <= 2


# --- models of the user ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


def test_what_a_cache_of_one_sequence_cannot_do_is_refused(llama):
    ids = torch.tensor([[3, 4, 5, 6]])
    name = _cache_argument(llama)
    for batch, options, says in (
        (ids.repeat(2, 1), {}, "batch of 2"),
        (ids, {"num_beams": 2}, "batch of 2"),
        (ids, {"do_sample": True, "num_return_sequences": 2}, "batch of 2"),
        (ids, {"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "padding"),
    ):
        cache = kvproof.transformers_cache(llama)
        with pytest.raises(RequestError, match=says):
            llama.generate(batch, max_new_tokens=2, **options, **{name: cache})


def test_training_and_foreign_models_are_refused(llama):
    ids = torch.tensor([[3, 4, 5, 6]])
    cache = kvproof.transformers_cache(llama)
    try:
        with pytest.raises(RequestError, match="no gradients"):
            llama.train()(ids, **{_cache_argument(llama): cache})
    finally:
        llama.eval()
    for other in ("x", torch.nn.Linear(2, 2)):
        with pytest.raises(RequestError, match="expected a transformers model"):
            kvproof.transformers_cache(other)
    capped = Gemma2ForCausalLM(Gemma2Config(**CONFIG, sliding_window=8)).eval()
    cache = kvproof.transformers_cache(capped)
    with pytest.raises(RequestError, match="soft capping"):
        capped(ids, **{_cache_argument(capped): cache})
