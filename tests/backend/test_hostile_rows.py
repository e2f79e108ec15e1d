"""Hostile rows through every format and backend: zeros, counted saturation, or one clear line.

Each example puts hostile rows among ordinary ones and holds all of them to what a row alone gives:
a row never touches its neighbours.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof import backends, formats
from kvproof.errors import Refused, RequestError
from kvproof.formats import Counters

SENTINEL = 0xA5


def every_backend():
    found = [backends.get("reference")]
    try:
        from kvproof.backends.cpu import CpuBackend, isas
    except Refused:
        return found
    return found + [CpuBackend(isa) for isa, available in isas().items() if available]


BACKENDS = {f"{b.name}-{getattr(b, 'isa', 'numpy')}": b for b in every_backend()}
SIDES = [f.name for f in formats.all_formats() if f.sides & {"key", "value"}]
CASES = [
    pytest.param(name, label, id=f"{name}-{label}")
    for name in SIDES
    for label, be in BACKENDS.items()
    if be.refuses("encode", formats.get(name), 128) is None
]


def gaussian(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def outlier(seed, n):
    row = gaussian(seed, n)
    row[seed % n] *= 100
    return row


def single(value):
    def row(seed, n):
        out = np.zeros(n, np.float32)
        out[seed % n] = value
        return out

    return row


def constant(value):
    return lambda seed, n: np.full(n, value, np.float32)


ROWS = {
    "ordinary": gaussian,
    "zeros": constant(0.0),
    "minus zeros": constant(-0.0),
    "one subnormal": single(1e-40),
    "all subnormal": constant(-3e-39),
    "all 1e-35": constant(1e-35),
    "tiny spread": lambda seed, n: gaussian(seed, n) * np.float32(1e-9),
    "constant": constant(1.5),
    "one value": single(-2.0),
    "one 7e4": single(7e4),
    # About 2^40, from where a row is scaled before it is rotated.
    "one 1.2e12": single(1.2e12),
    "all 1e12": constant(1e12),
    "one 1e30": single(-1e30),
    "all 1e30": constant(1e30),
    "largest": constant(3.4e38),
    "outlier x100": outlier,
    "alternating": lambda seed, n: np.where(np.arange(n) % 2, 1, -1).astype(np.float32),
}
kinds = st.lists(st.sampled_from(sorted(ROWS)), min_size=1, max_size=5)


def widths(name, label):
    """The narrowest width of a format, and some where blocks, groups and vectors end elsewhere."""
    f, be = formats.get(name), BACKENDS[label]
    wanted = (f.multiple, 3 * f.multiple, 48, 64, 80, 128, 256, 384)
    fits = {n for n in wanted if f.refuses(n, min(f.sides)) is None}
    return sorted(n for n in fits if be.refuses("encode", f, n) is None)


def counted(be, f, x):
    if hasattr(be, "encode_counted"):
        return be.encode_counted(f, x)
    return f.encode_counted(x)


@pytest.mark.parametrize(("name", "label"), CASES)
@settings(max_examples=12, deadline=None)
@given(kinds=kinds, seed=st.integers(0, 2**20), pick=st.integers(0, 7))
def test_finite_rows_stay_finite_and_leave_their_neighbours_alone(name, label, kinds, seed, pick):
    f, be = formats.get(name), BACKENDS[label]
    n = widths(name, label)[pick % len(widths(name, label))]
    x = np.stack([ROWS[kind](seed + i, n) for i, kind in enumerate(kinds)])
    before = x.copy()
    packed, counters = counted(be, f, x)
    np.testing.assert_array_equal(x, before)
    decoded = be.decode(f, packed)
    assert decoded.dtype == np.float32 and np.isfinite(decoded).all()
    total = Counters()
    for i, kind in enumerate(kinds):
        alone, mine = counted(be, f, x[i : i + 1])
        total += mine
        np.testing.assert_array_equal(packed[i], alone[0], err_msg=kind)
        np.testing.assert_array_equal(decoded[i], be.decode(f, alone)[0], err_msg=kind)
        expected, reference = f.encode_counted(x[i : i + 1])
        np.testing.assert_array_equal(packed[i], expected[0], err_msg=kind)
        assert mine == reference, kind
        check_row(f, kind, x[i], decoded[i], mine)
    assert counters == total


def check_row(f, kind, x, y, counters):
    if kind in ("zeros", "minus zeros"):
        assert not y.any() and counters == Counters()
        # An element format keeps the sign of a zero; blocks and rows have none.
        assert f.block_size == 1 or not np.signbit(y).any()
        return
    if not y.any():  # gone: too small for its scale, and counted; elements round as ever
        assert counters.scale_flushed or f.block_size == 1, kind
        return
    far = np.linalg.norm(y.astype(np.float64) - x) > 2.5 * np.linalg.norm(x.astype(np.float64))
    if np.linalg.norm(y.astype(np.float64)) < 0.05 * np.linalg.norm(x.astype(np.float64)) or far:
        # Cut down to the largest scale, or its small blocks are gone.
        assert counters != Counters(), kind
    if kind in ("ordinary", "constant", "one value", "outlier x100", "alternating"):
        assert counters == Counters() and not far, kind


@pytest.mark.parametrize(("name", "label"), CASES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_row_that_is_not_finite_refuses_the_call_before_a_byte_is_written(name, label, bad):
    f, be = formats.get(name), BACKENDS[label]
    for n in widths(name, label):
        for at in {0, n // 2, n - 1}:
            x = gaussian(3, 40, n)
            x[17, at] = bad
            x[33, 0] = bad
            out = np.full((40, f.row_bytes(n)), SENTINEL, np.uint8)
            with pytest.raises(RequestError, match="row 17: non-finite input") as error:
                if be.name == "reference":
                    be.encode(f, x)
                else:
                    be.encode(f, x, out=out)
            assert "\n" not in str(error.value)
            assert (out == SENTINEL).all()


@pytest.mark.parametrize(("name", "label"), CASES)
def test_numbers_of_any_kind_or_place_give_the_same_bytes_or_one_line(name, label):
    f, be = formats.get(name), BACKENDS[label]
    n = 128
    x = (gaussian(5, 6, n) * 3).round(1)
    expected = be.encode(f, x)
    wide = np.full((12, 2 * n), np.nan, np.float32)
    wide[::2, ::2] = x
    turned = np.asfortranarray(x)
    for same in (
        x.astype(np.float64), x.astype(">f4"), x.astype(">f8"), wide[::2, ::2], turned,
        x[::-1][::-1], x.tolist(), np.broadcast_to(x, (2, *x.shape))[1],
    ):  # fmt: skip
        np.testing.assert_array_equal(be.encode(f, same), expected)
    whole = np.arange(-64, 64, dtype=np.int64)[None]
    np.testing.assert_array_equal(be.encode(f, whole), be.encode(f, whole.astype(np.float32)))
    for wrong in (x.astype(complex), np.full((2, n), "1"), x > 0, None, [[1.0, 2.0], [3.0]]):
        with pytest.raises(RequestError) as error:
            be.encode(f, wrong)
        assert "\n" not in str(error.value)
    with pytest.raises(RequestError, match="row 0: non-finite"):  # beyond float32
        be.encode(f, np.full((1, n), 1e39))

    packed = be.encode(f, x)
    swollen = np.zeros((12, 2 * packed.shape[1]), np.uint8)
    swollen[::2, ::2] = packed
    np.testing.assert_array_equal(be.decode(f, swollen[::2, ::2]), be.decode(f, packed))
    for wrong in (packed.astype(np.int8), packed.astype(np.float32), packed[:, :-1][:, :1]):
        if f.block_size != 1 or wrong.dtype != np.uint8:
            with pytest.raises(RequestError):
                be.decode(f, wrong)


@pytest.mark.parametrize(("name", "label"), CASES)
def test_torch_tensors_are_read_or_refused_in_one_line(name, label):
    torch = pytest.importorskip("torch", reason="torch is not installed (extra: transformers)")
    f, be = formats.get(name), BACKENDS[label]
    x = torch.from_numpy(gaussian(5, 6, 128)).bfloat16()
    expected = be.encode(f, x.float().numpy())
    np.testing.assert_array_equal(be.encode(f, x.float()), expected)
    np.testing.assert_array_equal(be.encode(f, x.double()), expected)
    np.testing.assert_array_equal(be.encode(f, x.float().t().contiguous().t()), expected)
    np.testing.assert_array_equal(be.encode(f, x.float().requires_grad_()), expected)
    try:
        np.testing.assert_array_equal(be.encode(f, x), expected)
    except RequestError as error:  # NumPy has no bfloat16
        assert be.name == "reference" and "\n" not in str(error)


@pytest.mark.parametrize(("name", "label"), CASES)
def test_empty_arrays_and_wrong_widths(name, label):
    f, be = formats.get(name), BACKENDS[label]
    n = widths(name, label)[-1]
    size = f.row_bytes(n)
    for lead in ((0,), (3, 0), (0, 2)):
        assert be.encode(f, np.empty((*lead, n), np.float32)).shape == (*lead, size)
        assert be.decode(f, np.empty((*lead, size), np.uint8)).shape == (*lead, n)
    one = be.encode(f, gaussian(1, n))
    assert one.shape == (size,) and be.decode(f, one).shape == (n,)
    with pytest.raises(RequestError, match="not positive"):
        be.encode(f, np.empty((3, 0), np.float32))
    with pytest.raises(RequestError):
        be.encode(f, np.float32(1))
    if f.multiple > 1:
        for wrong in (1, n - 1, n + 1, n + f.multiple // 2):
            why = f"{f.name}: head_dim {wrong} is not a multiple of {f.multiple}"
            with pytest.raises(RequestError, match=why):
                be.encode(f, np.zeros((2, wrong), np.float32))
        for wrong in (0, 1, size - 1, size + 1):
            with pytest.raises(RequestError):
                be.decode(f, np.zeros((2, wrong), np.uint8))


def attend(be, f, q, blocks, **how):
    other = f if "value" in f.sides else formats.get("f16")
    own = other is f
    values = blocks if own else other.encode(gaussian(9, *blocks.shape[:2], q.shape[-1]))
    return be.attention(q, blocks, values, key=f, value=other, **how)


@pytest.mark.parametrize(("name", "label"), CASES)
def test_no_token_and_one_token(name, label):
    f, be = formats.get(name), BACKENDS[label]
    if "key" not in f.sides or be.refuses("attention", f, 128):
        pytest.skip(f"no attention on keys in {name}")
    q = gaussian(1, 1, 4, 128)
    none = np.empty((0, 2, f.row_bytes(128)), np.uint8)
    assert be.scores(f, q, none).shape == (1, 4, 0)
    with pytest.raises(RequestError, match="1 queries but only 0 cached tokens"):
        attend(be, f, q, none)
    assert attend(be, f, q[:0], none).shape == (0, 4, 128)
    out, lse = attend(be, f, q, none, position=0, return_lse=True)
    assert not out.any() and np.isneginf(lse).all()

    rows = gaussian(2, 1, 2, 128)
    one = be.encode(f, rows)
    out = attend(be, f, q, one)
    if "value" in f.sides:  # a softmax over one token is the token
        expected = np.repeat(be.decode(f, one)[0], 2, axis=0)[None]
        np.testing.assert_allclose(out, expected, atol=2e-3 * np.abs(expected).max())
    assert attend(be, f, q[:0], one).shape == (0, 4, 128)


@pytest.mark.parametrize(("name", "label"), CASES)
@settings(max_examples=6, deadline=None)
@given(kinds=kinds, seed=st.integers(0, 2**20))
def test_hostile_keys_score_as_decoded_and_zero_keys_score_zero(name, label, kinds, seed):
    f, be = formats.get(name), BACKENDS[label]
    if "key" not in f.sides or be.refuses("scores", f, 128):
        return
    # What remains of 3.4e38 after rounding times a query is beyond float32.
    kinds = [k for k in kinds if k != "largest"] or ["zeros"]
    x = np.stack([ROWS[kind](seed + i, 128) for i, kind in enumerate(kinds)])
    packed = be.encode(f, x)
    q = gaussian(seed, 3, 128)
    found = be.scores(f, q, packed)
    assert np.isfinite(found).all()
    expected = f.rotate(q).astype(np.float64) @ f.decode_rotated(packed).T
    size = np.linalg.norm(q.astype(np.float64), axis=1)[:, None] * np.linalg.norm(
        f.decode_rotated(packed), axis=1
    )
    # Integer products of quantized queries: parts per thousand of |q| |k|, a row at a time.
    assert (np.abs(found - expected) <= 2e-3 * size + 1e-30).all()
    for i, kind in enumerate(kinds):
        if kind in ("zeros", "minus zeros"):
            assert (found[:, i] == 0).all()
        alone = be.scores(f, q, packed[i : i + 1])[:, 0]
        np.testing.assert_allclose(found[:, i], alone, atol=float(2e-3 * size[:, i].max()) + 1e-30)
    out, lse = attend(
        be, f, q[-1:, None], packed[:, None], scale=1e-33, return_lse=True, position=len(kinds)
    )
    assert np.isfinite(out).all() and np.isfinite(lse).all()
