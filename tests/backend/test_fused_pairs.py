"""Attention on keys and values that live in different domains: a sketch, rotations of 32 and 128
values and of a whole head, each with its own scale, in one call that keeps no score vector."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvproof import formats
from kvproof.backends.reference import ReferenceBackend
from kvproof.segments import merge

cpu = pytest.importorskip("kvproof.backends.cpu", reason="the native kernels are not built")

ISAS = [name for name, available in cpu.isas().items() if available]
REFERENCE = ReferenceBackend()
PAIRS = (
    ("qjl1_256", "tbq3_0"),
    ("qjl1_256", "q4_polar"),
    ("qjl1_256", "q4_polar_res"),
    ("tbq3_0", "tbq3_0"),
    ("tbq4_0", "tbq3_0"),
    ("tbq3_0", "tbq4_0"),
    ("tbq3_tcq", "tbq3_tcq"),
    ("tbq3_tcq", "q4_polar"),
    ("q4_polar", "tbq4_0"),
    ("tcq4", "tbq3_tcq"),
    ("tq4", "q4_polar_res"),
    ("q4_0_rot", "tcq3"),
)
FIXTURE = Path(__file__).parents[3] / "shared" / "fixtures" / "fused_attn_qjl_tbq.json"


@pytest.fixture(params=ISAS)
def backend(request):
    return cpu.CpuBackend(request.param)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(pair, n, dim, kv_heads=2):
    key, value = (formats.get(name) for name in pair)
    return key.encode(normal(0, n, kv_heads, dim)), value.encode(normal(1, n, kv_heads, dim))


def nmse(got, want):
    assert got.shape == want.shape and np.isfinite(got).all()
    return float(np.square(got - want).sum() / np.square(want).sum())


def limit(pair):
    """NMSE of outputs with softmax arguments of a few units: ten times the worst seen here."""
    return 4e-6 if pair[1] == "q4_polar_res" else 6e-7


def need(backend, pair):
    known = {f.name for f in formats.all_formats()}
    for name in pair:
        if name not in known or backend.refuses("attention", name, 128):
            pytest.skip(f"{name} has no kernels in this version")


def names(pair):
    return {"key": pair[0], "value": pair[1]}


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_decode_and_prefill(backend, pair):
    """One query and many, short and long rows, one and several groups of 128, all or grouped
    heads."""
    need(backend, pair)
    for dim, n, n_q, heads, window in (
        (128, 131, 1, 4, None),
        (128, 700, 1, 2, None),
        (256, 73, 9, 8, None),
        (128, 150, 40, 4, 48),
    ):
        k, v = packed(pair, n, dim)
        q = normal(2, n_q, heads, dim)
        how = names(pair) | {"window": window}
        want = REFERENCE.attention64(q, k, v, **how)
        assert nmse(backend.attention(q, k, v, **how), want) < limit(pair), (dim, n, n_q)


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_a_causal_query_sees_its_own_position(backend, pair):
    """A query at position 17 sees 18 tokens, at position 0 one: its output is that token's value,
    for all heads."""
    need(backend, pair)
    k, v = packed(pair, 40, 128)
    q = normal(3, 1, 4, 128)
    for position in (17, 0):
        seen = position + 1
        got = backend.attention(q, k, v, **names(pair), position=position)
        alone = backend.attention(q, k[:seen], v[:seen], **names(pair))
        np.testing.assert_array_equal(got, alone)
        assert nmse(got, REFERENCE.attention64(q, k[:seen], v[:seen], **names(pair))) < limit(pair)
    rows = np.repeat(formats.get(pair[1]).decode(v[0]), 2, axis=0)
    assert nmse(got[0], rows.astype(np.float64)) < limit(pair)


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_merged_splits_equal_the_whole(backend, pair):
    need(backend, pair)
    k, v = packed(pair, 1200, 128)
    q = normal(4, 3, 4, 128)
    want = REFERENCE.attention64(q, k, v, **names(pair))
    parts = [
        backend.attention(q, k[a:b], v[a:b], **names(pair), position=1197 - a, return_lse=True)
        for a, b in ((0, 64), (64, 611), (611, 1200))
    ]
    assert nmse(merge(parts)[0], want) < 2 * limit(pair)
    threads = [backend.attention(q, k, v, **names(pair), threads=t).tobytes() for t in (1, 2, 5)]
    assert len(set(threads)) == 1


MEMORY = """
import numpy as np
from kvproof import _kernels, formats
from kvproof.backends.cpu import CpuBackend

key, value = formats.get({key!r}), formats.get({value!r})
q = np.ones((1, 32, 128), np.float32)
for n in (32768, 131072):
    k, v = (np.zeros((n, 8, f.row_bytes(128)), np.uint8) for f in (key, value))
    CpuBackend().attention(q, k, v, key=key, value=value, threads=2)
    print(_kernels.scratch_bytes())
"""


@pytest.mark.parametrize("pair", [("qjl1_256", "tbq3_0"), ("tq4", "tq4"), ("f16", "f16")])
def test_scratch_memory_does_not_grow_with_the_cache(pair):
    need(cpu.CpuBackend(), pair)
    run = subprocess.run(
        [sys.executable, "-c", MEMORY.format(**names(pair))],
        capture_output=True, text=True, check=True, env=os.environ,
    )  # fmt: skip
    at_32k, at_128k = map(int, run.stdout.split())
    assert at_128k == at_32k
    assert at_128k < 32 * 131072 * 4 / 2  # half of what the scores of all heads would take


@pytest.mark.skipif(not FIXTURE.exists(), reason="no public fixtures beside this repository")
def test_public_fixture(backend):
    """QJL keys with TBQ3 values of the public test data.

    Its queries come already projected (256 values a head), which no kernel of ours takes: the plain
    query is brought back by the pseudo-inverse of the fixture's projection, exact up to its
    printed digits, and then takes the ordinary route.
    """
    need(backend, ("qjl1_256", "tbq3_0"))
    document = json.loads(FIXTURE.read_text())
    key, value = formats.qjl1_256("fused_fixture"), formats.get("tbq3_0")
    assert document["q_is_pre_projected"] == 1
    projection = key.spin.forward(np.eye(128, dtype=np.float32)).astype(np.float64)
    outputs = 0
    for case in document["cases"]:
        heads, kv, n = case["n_heads"], case["n_kv_heads"], case["n_kv"]
        sketch = np.asarray(case["q_sketch"]).reshape(heads, 256)
        q = sketch @ np.linalg.pinv(projection)
        assert np.abs(q @ projection - sketch).max() < 1e-5 * np.abs(sketch).max()
        k, v = (
            np.uint8(case[name]).reshape(kv, n, -1).transpose(1, 0, 2)
            for name in ("k_blocks", "v_blocks")
        )
        want = np.asarray(case["expected_out"]).reshape(1, heads, 128)
        how = {"key": key, "value": value, "causal": False, "scale": document["sm_scale"]}
        q = q[None].astype(np.float32)
        assert nmse(REFERENCE.attention64(q, k, v, **how), want) < 1e-11
        assert nmse(backend.attention(q, k, v, **how), want) < limit(("qjl1_256", "tbq3_0"))
        outputs += want.size
    assert outputs == 1920
