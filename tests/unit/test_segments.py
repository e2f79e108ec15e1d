"""Position, page offsets and log-sum-exp of attention, and the merge of parts, on the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvproof.backends.reference import ReferenceBackend
from kvproof.errors import RequestError
from kvproof.formats import get
from kvproof.segments import merge

BE = ReferenceBackend()
F16 = {"key": "f16", "value": "f16"}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(seed, n, heads=2, dim=32):
    x = normal(seed, n, heads, dim).astype(np.float16)
    return x, x.view(np.uint8).reshape(n, heads, dim * 2)


def one_by_one(q, k, v, *, position, window, causal=True, offsets=None, page=None, phase=0):
    """(out, lse) by the definition: a loop over queries, heads and rows."""
    n_q, heads, dim = q.shape
    out, lse = np.zeros((n_q, heads, v.shape[-1])), np.full((n_q, heads), -np.inf)
    for i, h in itertools.product(range(n_q), range(heads)):
        total, top = np.zeros(v.shape[-1]), []
        for t in range(len(k)):
            if (causal and t > position + i) or (window and t <= position + i - window):
                continue
            kv_head = h // (heads // k.shape[1])
            s = q[i, h].astype(float) @ k[t, kv_head].astype(float) / np.sqrt(dim)
            if offsets is not None:
                s += offsets[i, h, (phase + t) // page]
            top.append(s)
            total += np.exp(s) * v[t, kv_head].astype(float)
        if top:
            out[i, h], lse[i, h] = total / np.exp(top).sum(), np.log(np.exp(top).sum())
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("position", [-9, -3, -1, 0, 5, 10, 11, 14, 40])
def test_reference_by_the_definition(position, window, causal):
    (k, kb), (v, vb) = packed(0, 11), packed(1, 11)
    q = normal(2, 3, 4, 32)
    how = {"position": position, "window": window, "causal": causal}
    for page, phase in ((3, 0), (4, 2), (4, 9), (100, 7)):
        offsets = normal(3, 3, 4, (phase + 10) // page + 1)
        pages = {"offsets": offsets, "page": page, "phase": phase}
        want = one_by_one(q, k, v, **how, **pages)
        got = BE.attention64(q, kb, vb, **F16, **how, **pages, return_lse=True)
        np.testing.assert_allclose(got[0], want[0], atol=1e-6)
        np.testing.assert_allclose(got[1], want[1], atol=1e-6)


def test_parts_with_and_without_rows():
    """No rows at all, rows that nobody sees, and fewer rows than queries."""
    q = normal(0, 5, 2, 32)
    _, rows = packed(1, 3)
    for part, position in ((rows[:0], 0), (rows, -5), (rows[:0], 7)):
        out, lse = BE.attention(q, part, part, **F16, position=position, return_lse=True)
        assert not out.any() and (lse == -np.inf).all()
    out, lse = BE.attention(q, rows, rows, **F16, position=-3, return_lse=True)
    assert (lse[:3] == -np.inf).all() and np.isfinite(lse[3:]).all()
    assert not out[:3].any() and out[3:].all()


def test_page_offsets_are_a_mean_taken_out_of_the_keys():
    """What they are for: q.(k - mean) + q.mean = q.k, page by page."""
    k, v = normal(0, 40, 2, 32).astype(np.float16), packed(1, 40)[1]
    means = np.float16([1, -2, 3])
    page_of = (5 + np.arange(40)) // 16
    less = k - means[page_of, None, None]
    q = normal(2, 2, 4, 32)
    offsets = np.float32(q.sum(-1)[..., None] * means.astype(np.float32)) / np.float32(np.sqrt(32))
    as_bytes = lambda x: np.ascontiguousarray(x).view(np.uint8).reshape(40, 2, 64)  # noqa: E731
    want = BE.attention64(q, as_bytes(k), v, **F16)
    got = BE.attention64(q, as_bytes(less), v, **F16, offsets=offsets, page=16, phase=5)
    np.testing.assert_allclose(got, want, atol=1e-2)  # fp16 rounds k - mean


@pytest.mark.parametrize("window", [None, 6, 25])
@pytest.mark.parametrize("cuts", [(4,), (1, 2, 30), (0, 33), (39,), (16, 16)])
def test_merged_parts_equal_the_whole(cuts, window):
    _, k = packed(0, 40)
    _, v = packed(1, 40)
    q = normal(2, 7, 4, 32) * 3
    offsets = normal(3, 7, 4, 4)
    pages = {"offsets": offsets, "page": 12}
    how = F16 | {"window": window}
    want = BE.attention64(q, k, v, **how, **pages, phase=5, return_lse=True)
    parts = []
    for start, end in itertools.pairwise((0, *cuts, 40)):
        part = BE.attention(
            q, k[start:end], v[start:end], **how, **pages, phase=5 + start, position=33 - start,
            return_lse=True,
        )  # fmt: skip
        parts.append(part)
    out, lse = merge(parts)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, want[0], atol=1e-6)
    np.testing.assert_allclose(lse, want[1], atol=1e-5)
    first = merge([merge(parts[:2]), *parts[2:]])  # of merged parts too
    np.testing.assert_allclose(first[0], out, atol=1e-6)


def test_merge_is_exact_where_it_can_be():
    out, lse = normal(0, 3, 2, 8), normal(1, 3, 2)
    assert merge([(out, lse)])[0] is out
    nothing = np.zeros_like(out), np.full_like(lse, -np.inf)
    with np.errstate(all="raise"):
        for parts in ([(out, lse), nothing], [nothing, nothing, (out, lse)]):
            got = merge(parts)
            np.testing.assert_array_equal(got[0], out)
            np.testing.assert_array_equal(got[1], lse)
        none = merge([nothing, nothing])
    assert not none[0].any() and (none[1] == -np.inf).all()
    far = merge([(out, lse + 1000), (out * 7, lse - 1000)])  # exp(1000) would overflow
    np.testing.assert_array_equal(far[0], out)
    before = out.copy()
    merge([(out, lse), (out, lse)])
    np.testing.assert_array_equal(out, before)


def test_merge_of_torch_parts():
    torch = pytest.importorskip("torch")
    parts = [(normal(s, 3, 2, 8), normal(s + 1, 3, 2)) for s in (0, 2)]
    want = merge(parts)
    got = merge([tuple(map(torch.from_numpy, part)) for part in parts])
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, torch.Tensor)
        np.testing.assert_array_equal(a.numpy(), b)


def test_merge_refuses_what_does_not_fit():
    out, lse = normal(0, 3, 2, 8), normal(1, 3, 2)
    for parts in (
        [], [(out, lse), (out[:2], lse[:2])], [(out, lse[:1]), (out, lse[:1])], [1], [(out,)],
        iter([(out, lse)]), [(out, None)] * 2, [(out + 1j, lse)] * 2, [(out, lse * np.nan)],
        [(out, lse + np.inf), (out, lse)], [("a", "b")], [(out, lse, lse)],
    ):  # fmt: skip
        with pytest.raises(RequestError, match=r"^merge: .*[a-z]"):
            merge(parts)


REFUSED = {
    "position 1.5": {"position": 1.5},
    "position True": {"position": True},
    "offsets is missing": {"page": 4},
    "say where offsets go": {"phase": 4},
    "need page": {"offsets": normal(0, 2, 4, 3)},
    "page 0": {"offsets": normal(0, 2, 4, 3), "page": 0},
    "page 4.0": {"offsets": normal(0, 2, 4, 3), "page": 4.0},
    "page 4294967296": {"offsets": normal(0, 2, 4, 3), "page": 2**32},
    "phase -1": {"offsets": normal(0, 2, 4, 3), "page": 4, "phase": -1},
    r"\(2, 4, 2\) must be \[2, 4, at least 3\]": {"offsets": normal(0, 2, 4, 2), "page": 4},
    "at least 4": {"offsets": normal(0, 2, 4, 3), "page": 4, "phase": 2},
    r"\(4, 2, 3\)": {"offsets": normal(0, 4, 2, 3), "page": 4},
    r"\(2, 12\)": {"offsets": normal(0, 2, 12), "page": 4},
    "offsets have a NaN": {"offsets": np.full((2, 4, 3), np.inf, np.float32), "page": 4},
    "real numbers": {"offsets": np.full((2, 4, 3), "x"), "page": 4},
}


def backends():
    yield BE
    try:
        from kvproof.backends.cpu import CpuBackend
    except Exception:  # not built
        return
    yield CpuBackend()


@pytest.mark.parametrize("backend", list(backends()), ids=lambda b: b.name)
@pytest.mark.parametrize("message", REFUSED)
def test_wrong_requests_say_what_is_wrong(backend, message):
    _, rows = packed(0, 11)
    with pytest.raises(RequestError, match=message) as caught:
        backend.attention(normal(0, 2, 4, 32), rows, rows, **F16, **REFUSED[message])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", list(backends()), ids=lambda b: b.name)
@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int32, np.uint64])
def test_small_integers_do_not_wrap(backend, kind):
    q, rows = normal(1, 2, 4, 32), packed(0, 200)[1]
    offsets = normal(2, 2, 4, 60)
    want = backend.attention(q, rows, rows, **F16, offsets=offsets, page=7, phase=120)
    got = backend.attention(q, rows, rows, **F16, offsets=offsets, page=kind(7), phase=kind(120))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("backend", list(backends()), ids=lambda b: b.name)
@pytest.mark.parametrize("wrong", ["x", b"x", 1j, {}, object(), [[1], [2, 3]], [True], np.inf, 0])
@pytest.mark.parametrize("name", ["tq4", "fp8_e4m3"])
def test_scales_that_are_none_are_refused_in_one_line(backend, name, wrong):
    fmt = get(name)
    x = normal(0, 5, 2, 32)
    rows, q = fmt.encode(x), normal(1, 2, 4, 32)
    for call in (
        lambda: backend.encode(fmt, x, wrong),
        lambda: backend.decode(fmt, rows, wrong),
        lambda: backend.scores(fmt, q, rows, wrong),
        lambda: backend.attention(q, rows, rows, key=fmt, value=fmt, k_scale=wrong),
        lambda: backend.attention(q, rows, rows, key=fmt, value=fmt, v_scale=wrong),
    ):
        with pytest.raises(RequestError, match="scale") as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", list(backends()), ids=lambda b: b.name)
def test_queries_that_are_not_finite_and_scales_beyond_float32_are_refused(backend):
    _, rows = packed(0, 11)
    q = normal(0, 2, 4, 32)
    with pytest.raises(RequestError, match="not a finite number"):
        backend.attention(q, rows, rows, **F16, scale=1e39)
    q[1, 2, 3] = np.nan
    with pytest.raises(RequestError, match="NaN or infinity"):
        backend.scores(get("f16"), q, rows)
