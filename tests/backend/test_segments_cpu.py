"""Position, page offsets and log-sum-exp of the native kernels against the float64 reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvproof import formats
from kvproof.backends.reference import ReferenceBackend
from kvproof.segments import merge

cpu = pytest.importorskip("kvproof.backends.cpu", reason="the native kernels are not built")

ISAS = [name for name, available in cpu.isas().items() if available]
REFERENCE = ReferenceBackend()
FORMATS = ("f16", "q8_0", "tbq4_0", "tq4", "tq3")  # one of every path, and both row formats
# NMSE of outputs: about ten times the worst seen here. Log-sum-exps are compared in absolute terms:
# the quantised query moves a score by up to 2e-4 at the scores of these cases.
OUTPUT = {"f16": 3e-12, "q8_0": 6e-8, "tbq4_0": 9e-7, "tq4": 7e-8, "tq3": 7e-8}
LSE = {"f16": 5e-6} | dict.fromkeys(("q8_0", "tbq4_0", "tq4", "tq3"), 2e-3)


@pytest.fixture(params=ISAS)
def backend(request):
    return cpu.CpuBackend(request.param)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows(name, n, kv_heads=2, dim=64):
    f = formats.get(name)
    return f.encode(normal(0, n, kv_heads, dim)), f.encode(normal(1, n, kv_heads, dim))


def check(backend, name, q, k, v, **how):
    """Compare (out, lse) with float64; return them."""
    how = {"key": name, "value": name, "return_lse": True} | how
    want_out, want_lse = REFERENCE.attention64(q, k, v, **how)
    out, lse = backend.attention(q, k, v, **how)
    seen = np.isfinite(want_lse)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(np.isneginf(lse), ~seen, str(how))
    assert not out[~seen].any()
    if seen.any():
        wrong, power = np.square(out - want_out).sum(), np.square(want_out).sum()
        assert wrong <= OUTPUT[name] * power, how
        assert np.abs(lse[seen] - want_lse[seen]).max() <= LSE[name], how
    return out, lse


@pytest.mark.parametrize("name", FORMATS)
def test_position(backend, name):
    """Negative, inside, at the end and beyond the rows."""
    n = 150
    k, v = rows(name, n)
    for n_q, position in itertools.product((1, 40), (-41, -40, -7, 0, 63, 110, 149, 150, 400)):
        q = normal(2, n_q, 4, 64)
        for window, causal in itertools.product((None, 1, 64, 300), (True, False)):
            check(backend, name, q, k, v, position=position, window=window, causal=causal)


@pytest.mark.parametrize("name", FORMATS)
def test_page_offsets(backend, name):
    """Pages that are smaller and larger than a tile and a softmax step, and start anywhere."""
    n = 700
    k, v = rows(name, n)
    pages = ((1, 0), (7, 3), (64, 0), (64, 17), (100, 250), (256, 255), (1000, 1))
    for n_q, (page, phase) in itertools.product((1, 9), pages):
        q = normal(3, n_q, 4, 64)
        offsets = 2 * normal(4, n_q, 4, (phase + n - 1) // page + 1)
        how = {"offsets": offsets, "page": page, "phase": phase}
        check(backend, name, q, k, v, **how)
        check(backend, name, q, k, v, **how, window=90, position=n - 30)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (9, 3), (7, 1), (40, 1)])
def test_offsets_reach_their_own_query_and_head(backend, heads, kv_heads):
    k, v = rows("tq4", 300, kv_heads)
    for n_q in (1, 3, 17):
        offsets = 3 * normal(5, n_q, heads, 4)
        check(backend, "tq4", normal(6, n_q, heads, 64), k, v, offsets=offsets, page=100, phase=50)


def test_offsets_of_any_strides_and_more_pages_than_needed(backend):
    k, v = rows("tq4", 100)
    q, offsets = normal(7, 3, 4, 64), normal(8, 3, 4, 9)
    how = {"key": "tq4", "value": "tq4", "page": 30, "phase": 29}
    want = backend.attention(q, k, v, **how, offsets=np.ascontiguousarray(offsets[..., :5]))
    wide = np.full((3, 6, 11), np.nan, np.float32)
    wide[:, 1:5, 1:10] = offsets
    for same in (offsets, wide[:, 1:5, 1:10], np.asfortranarray(offsets), offsets.astype(float)):
        np.testing.assert_array_equal(backend.attention(q, k, v, **how, offsets=same), want)


def test_what_changes_nothing_gives_the_same_bytes(backend):
    k, v = rows("tq4", 1500)
    q = normal(9, 5, 4, 64)
    how = {"key": "tq4", "value": "tq4"}
    want = backend.attention(q, k, v, **how)
    zero = np.zeros((5, 4, 24), np.float32)
    for same in (
        {"position": 1495},
        {"offsets": zero, "page": 64},
        {"window": 10**30},
        {"return_lse": True},
    ):
        got = backend.attention(q, k, v, **how, **same)
        np.testing.assert_array_equal(got[0] if "return_lse" in same else got, want)
    behind = backend.attention(q, k, v, **how, position=10**30)
    np.testing.assert_array_equal(behind, backend.attention(q, k, v, **how, causal=False))


def test_parts_without_rows(backend):
    k, v = rows("tq4", 5)
    q = normal(10, 9, 4, 64)
    check(backend, "tq4", q, k[:0], v[:0], position=3)
    check(backend, "tq4", q, k[:0], v[:0], position=3, offsets=np.zeros((9, 4, 0)), page=4)
    check(backend, "tq4", q, k, v, position=100, window=20)
    check(backend, "tq4", q, k, v, position=-9)
    check(backend, "tq4", q, k, v, position=-3)


@pytest.mark.parametrize("pair", [("f16", "f16"), ("tq4", "tq3"), ("tbq4_0", "q8_0")])
def test_merged_parts_equal_the_whole(backend, pair):
    """Decode, a prompt and a window, cut at tile borders and off them; long enough for chunks."""
    key, value = pair
    n = 3000
    k, _ = rows(key, n)
    _, v = rows(value, n)
    limit = 4 * max(OUTPUT[key], OUTPUT[value])
    for n_q, window in ((1, None), (33, None), (33, 1200)):
        q = normal(11, n_q, 4, 64)
        how = {"key": key, "value": value, "window": window, "page": 200}
        offsets = normal(12, n_q, 4, 16)
        want = REFERENCE.attention64(q, k, v, **how, offsets=offsets, phase=40)
        for cuts in ((4,), (64, 1900), (1, 2998, 2999)):
            parts = [
                backend.attention(
                    q, k[a:b], v[a:b], **how, offsets=offsets, phase=40 + a,
                    position=n - n_q - a, return_lse=True,
                )
                for a, b in itertools.pairwise((0, *cuts, n))
            ]  # fmt: skip
            out, _ = merge(parts)
            assert np.square(out - want).sum() <= limit * np.square(want).sum(), (n_q, cuts)


def test_threads_do_not_change_a_byte(backend):
    k, v = rows("tq4", 3000)
    for n_q in (1, 40):
        q, offsets = normal(13, n_q, 8, 64), normal(14, n_q, 8, 48)
        how = {"key": "tq4", "value": "tq4", "offsets": offsets, "page": 64, "position": 2000}
        one, *others = (
            backend.attention(q, k, v, **how, return_lse=True, threads=t) for t in (1, 2, 5)
        )
        for other in others:
            np.testing.assert_array_equal(one[0], other[0])
            np.testing.assert_array_equal(one[1], other[1])


def test_torch(backend):
    torch = pytest.importorskip("torch")
    k, v = rows("tq4", 100)
    q, offsets = normal(15, 2, 4, 64), normal(16, 2, 4, 2)
    how = {"key": "tq4", "value": "tq4", "page": 60, "return_lse": True}
    want = backend.attention(q, k, v, **how, offsets=offsets)
    got = backend.attention(
        torch.from_numpy(q), torch.from_numpy(k), torch.from_numpy(v), **how,
        offsets=torch.from_numpy(offsets),
    )  # fmt: skip
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, torch.Tensor)
        np.testing.assert_array_equal(a.numpy(), b)
