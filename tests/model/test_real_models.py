"""The two demo models: load time and memory, token ids of llama.cpp, text of transformers' cache.

Skipped where a model is not in the local cache (`kvproof fetch NAME` brings it).
"""

import json
import subprocess
import sys
import urllib.request

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: transformers)")
pytest.importorskip("transformers", reason="transformers is not installed")

from pydoc_data.topics import topics  # noqa: E402

from kvproof import models  # noqa: E402
from kvproof.engines.tokenizer import Tokenizer  # noqa: E402
from kvproof.engines.transformers import _cache_argument, load  # noqa: E402
from kvproof.gguf import GGUF  # noqa: E402

TEXT = "\n\n".join(topics[name] for name in sorted(topics))
TRICKY = [
    "a",
    " a",
    "   leading",
    "trailing   ",
    "\n",
    "\n\n\n\nx\n \n",
    "\t\tx\t",
    "héllo wörld, ÅÅ e\u0301",
    "日本語のテキスト、中文字符",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "<bos>x<eos>",
    "<start_of_turn>user\nhi<end_of_turn>",
    "<|im_start|>user\nhi<|im_end|>",
    "<unused5><table><tr><not a token>",
    "12345 3.14159 ٣٤٥",
    "don't we'll I'VE",
    "a\r\nb",
    "\u3000x\u00a0y\ufeffz",
    "<0x41>",
    "x" * 300,
    " " * 40 + "y",
    "\n" * 40,
    "`code` {}[]()!@#$%^&*",
    "Ωμέγα русский עברית العربية ไทย हिन्दी 한국어",
    "\u2581a \u2581\u2581b  c",
    "𝔹𝕆𝕃𝔻 ㍿ ﷺ \x1b[0m",
]
NAMES = ["gemma-3-270m", "smollm2-135m"]
BF16_BYTES = {"gemma-3-270m": 268.1e6 * 2, "smollm2-135m": 134.5e6 * 2}


def path_of(name):
    known = models.KNOWN[name]
    path = models.cache_dir() / "models" / known.name / known.file
    if not path.is_file():
        pytest.skip(f"{name} is not in the local cache: kvproof fetch {name}")
    return path


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return load(path_of(request.param))


@pytest.mark.parametrize("name", NAMES)
def test_token_ids_equal_llama_cpp(name):
    path = path_of(name)
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed (extra: llamacpp)")
    # In a process of its own: closing an idle server can hang.
    script = (
        "import sys, json, time, xllamacpp as x; p = x.CommonParams(); p.model.path = sys.argv[1];"
        "p.n_ctx = 256; p.n_gpu_layers = 0; p.warmup = False; p.port = 0; s = x.Server(p);"
        "print('@' + s.listening_address, flush=True); sys.stdin.read()"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        url = next(line[1:].strip() for line in server.stdout if line.startswith("@"))

        def ids(text, special, bos=False):
            body = {"content": text, "parse_special": special, "add_special": bos}
            request = urllib.request.Request(
                f"{url}/tokenize", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)["tokens"]

        with GGUF(path) as file:
            tokenizer = Tokenizer(file)
        for text in (TEXT, *TRICKY):
            for special in (True, False):
                got = tokenizer.encode(text, add_bos=False, special=special)
                assert got == ids(text, special), (text[:40], special)
                # U+2581 comes back as the space that it stands for, in llama.cpp as well.
                assert special or tokenizer.decode(got) == text or "\u2581" in text
        assert tokenizer.encode("hi") == ids("hi", True, bos=True)
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("name", NAMES)
def test_load_is_fast_and_small(name):
    """Load below 8 s of processor time, peak memory (imports included) below 2.5 x the weights.

    Processor time of the main thread (the slowest): the machine that runs the tests is shared.
    """
    script = (
        "import sys, time, resource; from kvproof.engines.transformers import load;"
        "m = load(sys.argv[1]); c = m.new_cache('tq4', 'tq4');"
        "print(time.thread_time()); list(m.generate(m.tokenizer.encode('Hello'), c, 3));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path_of(name))],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, peak = map(float, done.stdout.split())
    assert seconds < 8
    if name == "gemma-3-270m":  # the smaller model is dwarfed by torch and transformers themselves
        assert peak < 2.5 * BF16_BYTES[name]


@pytest.mark.parametrize("prompt", ["The capital of France is", "def fibonacci(n):"])
def test_greedy_text_with_f16_rows_equals_transformers_own_cache(model, prompt):
    from transformers import DynamicCache

    ids, steps = model.tokenizer.encode(prompt), 24
    ours = list(model.generate(ids, model.new_cache("f16", "f16"), steps))
    hf = model.hf
    hf.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            cache = {_cache_argument(hf): DynamicCache(config=hf.config)}
            options = {"max_new_tokens": steps, "do_sample": False}
            theirs = hf.generate(torch.tensor([ids]), **cache, **options)[0, len(ids) :].tolist()
    finally:
        hf.set_attn_implementation("kvproof")
    assert ours == [i for i in theirs if i not in model.eos]


def test_one_pass_equals_single_tokens_beyond_the_window(model):
    ids = model.tokenizer.encode(TEXT)[:530]  # beyond Gemma's window of 512
    whole, single = (model.new_cache("f16", "f16") for _ in range(2))
    want = model.forward(ids, whole, chunk=len(ids))[-3:]
    model.prefill(ids[:-3], single, chunk=100)
    got = torch.cat([model.forward([i], single) for i in ids[-3:]])
    assert float((got - want).norm() / want.norm()) < 5e-3
    assert got.argmax(-1).tolist() == want.argmax(-1).tolist()
    for layer in single.kv.owners:
        assert layer.cached == (530 if layer.window is None else layer.window - 1)


@pytest.mark.parametrize("pair", [("tq4", "tq4"), ("q8_0", "tq3"), ("tbq4_0", "q4_0")])
def test_any_pair_runs_and_shows_what_ran(model, pair):
    reason = model.geometry.refuses(*pair)
    if reason:
        pytest.skip(f"refused for this model: {reason}")
    cache = model.new_cache(*pair)
    out = list(model.generate(model.tokenizer.encode("Once upon a time"), cache, 8))
    assert len(out) == 8 and model.tokenizer.decode(out)
    for layer in cache.kv.witness():
        assert any(f"encode_{pair[0]}" in kernel for kernel in layer), layer
        assert any("attention" in kernel and pair[1] in kernel for kernel in layer), layer
