"""Attention of many query rows: what fills panels, blocks and chunks, and what strains integers."""

from __future__ import annotations

import numpy as np
import pytest

from kvproof import formats
from kvproof.backends.reference import ReferenceBackend

cpu = pytest.importorskip("kvproof.backends.cpu", reason="the native kernels are not built")

ISAS = [name for name, available in cpu.isas().items() if available]
REFERENCE = ReferenceBackend()
# NMSE of outputs: about ten times the worst seen here.
LIMIT = {"f16": 4e-12, "row": 5e-8, "block": 7e-7}
PAIRS = {
    ("f16", "f16"): "f16", ("tq4", "tq4"): "row", ("tcq3", "tq8"): "row", ("f16", "tq3"): "row",
    ("tbq4_0", "tbq4_0"): "block", ("q8_0", "q4_0"): "block", ("tq4", "f16"): "row",
    ("qjl1_256", "tbq3_tcq"): "block", ("q4_polar_res", "tbq3_0"): "block",
}  # fmt: skip


@pytest.fixture(params=ISAS)
def backend(request):
    return cpu.CpuBackend(request.param)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(backend, pair, q, k, v, limit, **how):
    key, value = pair
    blocks = formats.get(key).encode(k), formats.get(value).encode(v)
    how |= {"key": key, "value": value}
    want = REFERENCE.attention64(q, *blocks, **how, return_lse=True)[0]
    out = backend.attention(q, *blocks, **how, threads=1)
    assert np.isfinite(out).all()
    wrong, power = np.square(out - want).sum(), np.square(want).sum()
    assert wrong <= limit * power, (pair, q.shape, how, wrong / power)
    np.testing.assert_array_equal(backend.attention(q, *blocks, **how, threads=3), out)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("n_q", "heads", "kv_heads", "n", "window"),
    [(14, 1, 1, 33, None), (33, 1, 1, 33, None), (5, 14, 2, 131, 64), (150, 3, 3, 150, 1),
     (90, 4, 2, 1300, None), (300, 1, 1, 301, 77)],
)  # fmt: skip
def test_rows_tokens_and_windows(backend, pair, n_q, heads, kv_heads, n, window):
    q, k, v = normal(0, n_q, heads, 128), normal(1, n, kv_heads, 128), normal(2, n, kv_heads, 128)
    check(backend, pair, q, k, v, LIMIT[PAIRS[pair]], window=window)


@pytest.mark.parametrize("pair", PAIRS)
def test_wide_and_unequal_rows(backend, pair):
    q, k, v = normal(3, 40, 2, 384), normal(4, 90, 1, 384), normal(5, 90, 1, 128)
    check(backend, pair, q, k, v, LIMIT[PAIRS[pair]])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_and_channels_of_all_sizes(backend, pair, seed):
    """Lengths of rows over six decades, a large channel, zeros, and rows of one value."""
    n, rng = 200, np.random.default_rng(seed)
    q, k, v = (
        normal(6 + seed, 50, 2, 128),
        normal(9 + seed, n, 1, 128),
        normal(12 + seed, n, 1, 128),
    )
    q[7] = 0
    q[8] *= 1e-30
    k[..., 5] *= 30
    k[3], k[4] = 0, 2
    k[10:20] *= np.exp(rng.uniform(-12, 1, (10, 1, 1))).astype(np.float32)
    v *= np.exp(rng.uniform(-7, 7, (n, 1, 1))).astype(np.float32)
    v[..., 17] *= 50
    check(backend, pair, q, k, v, 10 * LIMIT[PAIRS[pair]])


@pytest.mark.parametrize("name", ["tq4", "tbq4_0", "q8_0", "q4_polar"])
def test_rows_that_are_all_their_largest_value(backend, name):
    """The longest rows that integers can hold: sums reach the largest of an int32."""
    for dim in (128, 1024):
        k = np.full((70, 1, dim), 3.0, np.float32)
        v = np.full((70, 1, dim), -5.0, np.float32)
        q = np.full((20, 1, dim), 0.01, np.float32)
        check(backend, (name, name), q, k, v, 2e-7)
        check(backend, (name, name), q, np.sign(normal(1, 70, 1, dim)), v, 2e-7)
