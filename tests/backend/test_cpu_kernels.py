"""The native CPU kernels against the reference, from the same packed bytes, for every instruction
set that this machine runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvproof import formats
from kvproof.backends.reference import ReferenceBackend

cpu = pytest.importorskip("kvproof.backends.cpu", reason="the native kernels are not built")

ISAS = [name for name, available in cpu.isas().items() if available]
FORMATS = [
    f.name for f in formats.all_formats() if cpu.CpuBackend().refuses("attention", f, 128) is None
]
VALUES = [name for name in FORMATS if "value" in formats.get(name).sides]
DIMS = (64, 80, 96, 128, 192, 256, 512, 576)
REFERENCE = ReferenceBackend()

# NMSE bounds, about ten times the worst seen here. Element formats accumulate in float32. Coded
# formats quantise the query and the weights to 14 to 16 bits; tbq tables are rounded to 12 bits.
SCORES = dict.fromkeys(FORMATS, 4e-8) | dict.fromkeys(("f16", "bf16", "fp8_e4m3"), 2e-12)
ATTENTION = dict.fromkeys(FORMATS, 5e-7) | dict.fromkeys(("f16", "bf16", "fp8_e4m3"), 5e-11)
ATTENTION |= {"tbq4_0": 1e-6, "tbq3_0": 1e-6}


@pytest.fixture(params=ISAS)
def backend(request):
    return cpu.CpuBackend(request.param)


def value_of(name):
    """The format itself, or one for values beside a format of keys only."""
    return name if name in VALUES else "tbq3_0"


def narrow(name):
    """64, or 128 where the format takes no less."""
    return 128 if formats.get(name).refuses(64, "key") else 64


def accepted(dims=DIMS):
    return [(f, d) for f in FORMATS for d in dims if not formats.get(f).refuses(d, "key")]


def rows(seed, *shape):
    """Mixed rows: Gaussian, heavy tails, one large channel, constant, zero, one-hot, tiny, huge."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    flat = x.reshape(-1, shape[-1])
    kinds = np.arange(len(flat)) % 16
    flat[kinds == 1] **= 3
    flat[kinds == 2, 5] *= 20
    flat[kinds == 3] = 0.7
    flat[kinds == 4] = 0
    flat[kinds == 5] = np.eye(shape[-1], dtype=np.float32)[3]
    flat[kinds == 6] *= np.float32(1e-6)
    flat[kinds == 7] *= np.float32(1e5)
    return x


def gaussian(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def nmse(got, want):
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape and np.isfinite(got).all()
    return float(np.square(got - want).sum() / np.square(want).sum())


def attend(be, q, k, v, key, value, **how):
    """(NMSE of be.attention against float64)"""
    want = REFERENCE.attention64(q, k, v, key=key, value=value, **how)
    return nmse(be.attention(q, k, v, key=key, value=value, **how), want)


@pytest.mark.parametrize(("name", "dim"), accepted())
def test_encode_is_byte_equal(backend, name, dim):
    f = formats.get(name)
    x = rows(dim, 321, dim)
    scale = np.float32(0.013) if f.scaled else 1.0
    want, counted = f.encode_counted(x, scale)
    got, counters = backend.encode_counted(f, x, scale if f.scaled else None)
    # Row formats and elements repeat the reference's float32 operations exactly; block formats
    # take a float64 sum in another order, which could move a code that sits on a cut.
    assert int((got != want).sum()) == 0
    assert counters == counted


@pytest.mark.parametrize(("name", "dim"), accepted())
def test_decode_is_exact(backend, name, dim):
    f = formats.get(name)
    blocks = f.encode(rows(dim + 1, 67, 3, dim))
    got = backend.decode(f, blocks)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, f.decode(blocks))


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 112, 144, 192, 208, 256])
@pytest.mark.parametrize(
    "name", ["tq8", "tq5", "tq2", "tcq4", "tcq4_64", "tcq3", "tcq3_64", "tcq2", "tcq2_64"]
)
def test_rows_of_any_codes(backend, name, dim):
    """Rows that no encoder wrote, at widths that end in every kind of remainder."""
    f = formats.get(name)
    blocks = np.random.default_rng(dim).integers(0, 256, (30, 1, f.row_bytes(dim)), np.uint8)
    blocks[..., -1] &= 0x3F  # finite halves, units of one byte below 2^-12
    got = backend.decode(f, blocks)
    np.testing.assert_array_equal(got, f.decode(blocks))
    q = gaussian(dim, 2, 2, dim)
    assert nmse(backend.scores(f, q, blocks), REFERENCE.scores64(f, q, blocks)) < SCORES[name]


@pytest.mark.parametrize("value", ["f16", "bf16", "fp8_e4m3"])
def test_decode_of_every_element_code(backend, value):
    f = formats.get(value)
    bits = 8 if value == "fp8_e4m3" else 16
    codes = np.arange(2**bits, dtype=np.uint16).astype(f"<u{bits // 8}").view(np.uint8)
    codes = codes.reshape(-1, bits // 8)
    with np.errstate(invalid="ignore"):  # signalling NaNs among the codes
        finite = np.isfinite(f.decode_blocks(codes)[:, 0])
    assert not finite.all()
    np.testing.assert_array_equal(backend.decode(f, codes[finite]), f.decode(codes[finite]))


@pytest.mark.parametrize(("name", "dim"), accepted())
def test_scores_and_attention(backend, name, dim):
    f = formats.get(name)
    value = value_of(name)
    k = f.encode(gaussian(dim, 150, 2, dim))
    v = formats.get(value).encode(gaussian(dim + 1, 150, 2, dim))
    q = gaussian(dim + 2, 3, 8, dim) * 2
    assert nmse(backend.scores(f, q, k), REFERENCE.scores64(f, q, k)) < SCORES[name]
    assert attend(backend, q, k, v, name, value) < max(ATTENTION[name], ATTENTION[value])


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (9, 3), (7, 1), (28, 4), (40, 1)])
@pytest.mark.parametrize(
    "name",
    ["tq4", "tbq4_0", "q8_0", "f16", "q4_polar", "q4_polar_res", "tbq3_tcq", "qjl1_256"],
)
def test_query_groups(backend, name, heads, kv_heads):
    f, value, dim = formats.get(name), value_of(name), narrow(name)
    k = f.encode(gaussian(1, 90, kv_heads, dim))
    v = formats.get(value).encode(gaussian(2, 90, kv_heads, dim))
    for n_q in (1, 3, 17):
        q = gaussian(3, n_q, heads, dim)
        assert attend(backend, q, k, v, name, value) < ATTENTION[value]


@pytest.mark.parametrize(
    "name",
    [
        "tq4",
        "tq3",
        "tbq3_0",
        "q4_0",
        "bf16",
        "q4_polar",
        "q4_polar_res",
        "tbq3_tcq",
        "qjl1_256",
        "tq8",
        "tq5",
        "tq2",
        "tcq4",
        "tcq2_64",
    ],
)
def test_every_token_count(backend, name):
    f, value = formats.get(name), value_of(name)
    dim = 96 if f.refuses(96, "key") is None else 128
    k = f.encode(gaussian(4, 70, 1, dim))
    v = formats.get(value).encode(gaussian(5, 70, 1, dim))
    for n in range(1, 71):
        for heads in (1, 2, 4):
            q = gaussian(n, 1, heads, dim)
            assert attend(backend, q, k[:n], v[:n], name, value) < ATTENTION[value], (n, heads)


@pytest.mark.parametrize("name", ["tq4", "q8_0", "f16"])
def test_causal_and_window_edges(backend, name):
    f = formats.get(name)
    n, dim = 700, 64
    k, v = f.encode(gaussian(6, n, 2, dim)), f.encode(gaussian(7, n, 2, dim))
    for n_q, window, causal in itertools.product((1, 50), (1, 63, 64, 65, 256, n), (True, False)):
        q = gaussian(8, n_q, 4, dim)
        how = {"window": window, "causal": causal}
        assert attend(backend, q, k, v, name, name, **how) < ATTENTION[name], how


def test_every_pair_of_formats(backend):
    dim = 128
    k = {n: formats.get(n).encode(gaussian(9, 101, 2, dim)) for n in FORMATS}
    v = {n: formats.get(n).encode(gaussian(10, 101, 2, narrow(n))) for n in VALUES}
    q = gaussian(11, 2, 4, dim)
    for key, value in itertools.product(FORMATS, VALUES):
        bound = max(ATTENTION[key], ATTENTION[value])
        assert attend(backend, q, k[key], v[value], key, value) < bound, (key, value)


def test_large_scores_and_sharp_weights(backend):
    """Scores around +-200: without the maximum subtracted, exp overflows."""
    for name in FORMATS:
        f, value = formats.get(name), formats.get(value_of(name))
        dim = narrow(name)
        k, v = f.encode(gaussian(12, 300, 1, dim)), value.encode(gaussian(13, 300, 1, dim))
        q = gaussian(14, 2, 4, dim)
        want = REFERENCE.attention64(q, k, v, key=f, value=value, scale=8.0)
        got = backend.attention(q, k, v, key=f, value=value, scale=8.0)
        # The quantised query moves a score of 200 by up to 0.01, and the weights with it.
        assert nmse(got, want) < 1e-4, name


def test_fp8_scale_per_head(backend):
    f = formats.get("fp8_e4m3")
    k_scale, v_scale = np.float32([0.01, 0.02]), np.float32([0.03, 0.005])
    k = f.encode(gaussian(15, 80, 2, 64), k_scale)
    v = f.encode(gaussian(16, 80, 2, 64), v_scale)
    q = gaussian(17, 5, 4, 64)
    how = {"k_scale": k_scale, "v_scale": v_scale}
    assert attend(backend, q, k, v, f, f, **how) < ATTENTION["fp8_e4m3"]
    want = REFERENCE.scores64(f, q, k, k_scale)
    assert nmse(backend.scores(f, q, k, k_scale), want) < SCORES["fp8_e4m3"]
    np.testing.assert_array_equal(backend.decode(f, k, k_scale), f.decode(k, k_scale))
    np.testing.assert_array_equal(backend.encode(f, gaussian(15, 80, 2, 64), k_scale), k)


@pytest.mark.parametrize("name", ["tq4", "tbq4_0", "f16"])
def test_any_number_of_threads_gives_the_same_bytes(backend, name):
    f = formats.get(name)
    k, v = f.encode(gaussian(18, 3000, 2, 64)), f.encode(gaussian(19, 3000, 2, 64))
    for n_q in (1, 40):
        q = gaussian(20, n_q, 8, 64)
        one, *others = (
            backend.attention(q, k, v, key=f, value=f, threads=t) for t in (1, 2, 3, 8, 2)
        )
        for other in others:
            np.testing.assert_array_equal(one, other)


def test_caches_are_read_in_place(backend):
    """Head-major and padded buffers give the same bytes as a packed copy."""
    f = formats.get("tq4")
    k, v = f.encode(gaussian(21, 130, 4, 80)), f.encode(gaussian(22, 130, 4, 80))
    q = gaussian(23, 2, 8, 80)
    want = backend.attention(q, k, v, key=f, value=f)
    head_major = np.ascontiguousarray(k.transpose(1, 0, 2)).transpose(1, 0, 2)
    padded = np.full((200, 6, 64), 0xFF, np.uint8)
    padded[:130, 1:5, 3 : 3 + v.shape[2]] = v
    view = padded[:130, 1:5, 3 : 3 + v.shape[2]]
    wide = np.full((2, 9, 200), np.nan, np.float32)
    wide[:, 1:, 7:87] = q
    got = backend.attention(wide[:, 1:, 7:87], head_major, view, key=f, value=f)
    np.testing.assert_array_equal(got, want)
    fortran = np.asfortranarray(k)  # last axis not contiguous: copied once
    np.testing.assert_array_equal(backend.attention(q, fortran, v, key=f, value=f), want)


def test_nothing_is_written_or_read_outside(backend):
    """Outputs inside guard bytes; inputs end at the end of their page-sized buffer."""
    from kvproof import _kernels

    for name, dim in [
        ("tq4", 80),
        ("tq3", 80),
        ("tbq3_0", 96),
        ("q8_0", 64),
        ("fp8_e4m3", 72),
        ("tq8", 80),
        ("tq5", 80),
        ("tq2", 80),
        ("tcq4", 80),
        ("tcq3", 64),
        ("tcq2_64", 192),
    ]:
        f = formats.get(name)
        x, q = gaussian(24, 33, dim), gaussian(25, 1, 2, dim)
        size = f.row_bytes(dim)
        out = np.full(33 * size + 128, 0xA5, np.uint8)
        inner = out[64:-64].reshape(33, size)
        _kernels.encode(backend.isa, 1, name, x, None, inner)
        assert (out[:64] == 0xA5).all() and (out[-64:] == 0xA5).all()
        np.testing.assert_array_equal(inner, f.encode(x))
        result = np.full(2 * dim + 32, np.nan, np.float32)
        blocks = inner[:, None]
        _kernels.attention(
            backend.isa, 2, q, blocks, blocks, name, name, dim, -1, 33, 0.1, None, None,
            None, 1, 0, result[16:-16].reshape(1, 2, dim), None,
        )  # fmt: skip
        assert np.isnan(result[:16]).all() and np.isnan(result[-16:]).all()
        assert np.isfinite(result[16:-16]).all()
