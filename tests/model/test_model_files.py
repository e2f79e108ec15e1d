"""The real demo models, where they are in the cache: what their headers say, and what it costs."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvproof import models
from kvproof.geometry import geometry
from kvproof.gguf import GGUF

MIB = 1 << 20


def cached(name: str) -> Path:
    model = models.KNOWN[name]
    path = models.cache_dir() / "models" / name / model.file
    if not path.exists():
        pytest.skip(f"{name} is not in the cache (run: kvproof fetch {name})")
    return path


def test_gemma_3_270m() -> None:
    path = cached("gemma-3-270m")
    g = geometry(path)
    assert (g.architecture, len(g.layers), g.context_length) == ("gemma3", 18, 32768)
    assert [layer.index for layer in g.layers if layer.window is None] == [5, 11, 17]
    assert {(x.num_heads, x.num_kv_heads, x.head_dim_k, x.head_dim_v) for x in g.layers} == {
        (4, 1, 256, 256)
    }
    assert {x.window for x in g.layers} == {None, 512}
    assert g.vocab_size == 262_144
    # 3 global layers of 8192 cells and 15 sliding ones of 1024, 1024 bytes a cell
    assert g.kv_bytes(8192, "f16", "f16") == (3 * 8192 + 15 * 1024) * 1024


def test_smollm2_135m() -> None:
    g = geometry(cached("smollm2-135m"))
    assert (g.architecture, len(g.layers), g.context_length) == ("llama", 30, 8192)
    assert {(x.num_heads, x.num_kv_heads, x.head_dim_k, x.window) for x in g.layers} == {
        (9, 3, 64, None)
    }
    assert g.kv_bytes(8192, "f16", "f16") == 180 * MIB


@pytest.mark.parametrize("name", list(models.KNOWN))
def test_the_cached_file_is_the_pinned_one(name: str) -> None:
    result = models.fetch(name) if cached(name) else None
    assert result is not None
    assert models.sha256_file(result.path) == models.KNOWN[name].sha256
    assert result.notice is not None
    assert result.notice.stat().st_size > 1000


@pytest.mark.parametrize("name", list(models.KNOWN))
def test_tensors_cover_the_file(name: str) -> None:
    path = cached(name)
    with GGUF(path) as file:
        total = sum(t.nbytes or 0 for t in file.tensors.values())
        assert 0 <= path.stat().st_size - file.data_offset - total < 32 * len(file.tensors)
        assert (
            file.data("output_norm.weight").size
            == 4 * (file.tensors["output_norm.weight"].shape[0])
        )


def test_inspecting_starts_fast_and_light() -> None:
    path = cached("gemma-3-270m")
    program = (
        "import sys, json; from kvproof.geometry import inspect_model; "
        f"d = inspect_model({str(path)!r}, memory=1 << 28); "
        "json.dump([len(d['layers']), sorted({'torch', 'scipy', 'transformers', 'gguf'} "
        "& set(sys.modules))], sys.stdout)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    # About 0.4 s here, most of it Python and NumPy; the requirement for `kvproof inspect` is 2 s.
    assert time.perf_counter() - start < 2
    assert json.loads(done.stdout) == [18, []]
