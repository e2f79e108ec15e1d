"""Sizes of a real cache, as llama.cpp logs them when it loads Gemma, against our formula."""

import json
import re
import subprocess
import sys
import threading
from typing import Any

import pytest

from kvproof import models
from kvproof.geometry import Layout, geometry

MIB = 1 << 20

# Loading in a process of its own: the library logs to the process's stderr.
LOAD = """
import json, sys
import xllamacpp as x

a = json.loads(sys.argv[1])
p = x.CommonParams()
p.model.path = a["path"]
p.n_ctx, p.n_ubatch, p.n_parallel = a["context"], a["ubatch"], a["sequences"]
p.kv_unified, p.swa_full = a["unified"], a["swa_full"]
kind = "ENABLED" if a["flash_attention"] else "DISABLED"
p.flash_attn_type = getattr(x.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{kind}")
p.cache_type_k = getattr(x.ggml_type, f"GGML_TYPE_{a['key'].upper()}")
p.cache_type_v = getattr(x.ggml_type, f"GGML_TYPE_{a['value'].upper()}")
p.n_gpu_layers, p.cpuparams.n_threads, p.verbosity = 0, 1, 4
p.warmup, p.fit_params = False, False
x.Server(p)
"""
SIZE = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB")


def logged_sizes(options: dict[str, Any]) -> list[str]:
    """MiB as logged: one line for the global layers, then one for the sliding layers."""
    with subprocess.Popen(
        [sys.executable, "-c", LOAD, json.dumps(options)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        # Ended as soon as it has said what we ask: a server that is closed right after it has
        # started, with several slots, hangs now and then.
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        found: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            found += SIZE.findall(line)
            if len(found) == 2:
                break
        process.kill()
        watchdog.cancel()
    return found


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"context": 3000, "key": "q8_0", "value": "q4_0"},
        {"context": 5000, "sequences": 3},
        {"sequences": 3, "unified": False},
        {"context": 2500, "swa_full": True, "key": "q4_0", "value": "f16"},
        {"context": 4096, "ubatch": 64, "flash_attention": False},
    ],
    ids=str,
)
def test_our_bytes_are_what_llama_cpp_allocates(asked: dict[str, Any]) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    model = models.KNOWN["gemma-3-270m"]
    path = models.cache_dir() / "models" / model.name / model.file
    if not path.exists():
        pytest.skip("gemma-3-270m is not in the cache (run: kvproof fetch gemma-3-270m)")
    options: dict[str, Any] = {
        "context": 8192,
        "key": "f16",
        "value": "f16",
        "ubatch": 512,
        "sequences": 1,
        "unified": True,
        "swa_full": False,
        "flash_attention": True,
        **asked,
    }
    logged = logged_sizes({"path": str(path), **options})
    g = geometry(path)
    context, key, value = options.pop("context"), options.pop("key"), options.pop("value")
    sizes = g.layer_bytes(context, key, value, Layout(**options))
    ours = [
        sum(n for n, layer in zip(sizes, g.layers, strict=True) if layer.kind == kind) / MIB
        for kind in ("global", "sliding")
    ]
    assert logged == [f"{n:.2f}" for n in ours]
