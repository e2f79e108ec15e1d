"""The NumPy reference: public vectors, ggml's bytes, the distortion table, edge rules."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof import formats
from kvproof.errors import RequestError
from kvproof.formats.base import Format
from kvproof.formats.tcq import UNITS

ALL = formats.all_formats()
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512, 576)
VECTORS = Path(__file__).parents[3] / "shared" / "fixtures" / "vectors"

# Relative MSE on N(0,1): the specification's figures; for the row-scaled formats our own, by
# head_dim. They lie below the exact Lloyd-Max floor of a fixed norm (SPHERE_FLOOR) because the
# unit is searched for each row.
EXPECTED_MSE = {
    "f16": 4.3e-8, "bf16": 2.8e-6, "q8_0": 2.9e-5, "fp8_e4m3": 7.0e-4, "q4_0": 0.0074,
    "q4_0_rot": 0.0074, "tbq4_0": 0.0090, "tbq3_0": 0.0326, "q4_polar": 0.0093,
    "q4_polar_res": 0.0107, "qjl1_256": 0.797, "tbq3_tcq": 0.0201,
    "tq8": {64: 3.51e-5, 128: 4.16e-5, 256: 4.81e-5, 512: 5.53e-5},
    "tq5": {64: 0.001719, 128: 0.001933, 256: 0.002108, 512: 0.002268},
    "tcq4": {64: 0.005437, 128: 0.00562, 256: 0.005784, 512: 0.005963},
    "tcq4_64": {64: 0.005236, 128: 0.005352, 256: 0.005467, 512: 0.005609},
    "tcq3": {64: 0.02174, 128: 0.02217, 256: 0.02265, 512: 0.02299},
    "tcq3_64": {64: 0.01816, 128: 0.01975, 256: 0.02079, 512: 0.02137},
    "tcq2": {64: 0.07767, 128: 0.08129, 256: 0.08318, 512: 0.08444},
    "tcq2_64": {64: 0.07046, 128: 0.07525, 256: 0.0779, 512: 0.07944},
    "tq2": {64: 0.1107, 128: 0.1138, 256: 0.1155, 512: 0.1166},
    "tq4": {64: 0.00709, 128: 0.00789, 256: 0.00850, 512: 0.00893},
    "tq3": {64: 0.02935, 128: 0.03179, 256: 0.03300, 512: 0.03375},
}  # fmt: skip
SPHERE_FLOOR = {
    "tq4": {64: 0.00913, 128: 0.00931, 256: 0.00941, 512: 0.00945},
    "tq3": {64: 0.03339, 128: 0.03397, 256: 0.03426, 512: 0.03440},
    "tq2": {64: 0.11453, 128: 0.11600, 256: 0.11674, 512: 0.11711},
}


def gaussian(rows: int, head_dim: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, head_dim)).astype(np.float32)


def relative_mse(f: Format, x: np.ndarray) -> float:
    y = f.decode(f.encode(x)).astype(np.float64)
    return float(np.square(y - x).sum() / np.square(x.astype(np.float64)).sum())


@pytest.mark.parametrize("name", ["tbq3_0", "tbq4_0"])
def test_public_vectors_match_to_the_byte(name: str) -> None:
    if not VECTORS.is_dir():
        pytest.skip("public vectors (../shared/fixtures/vectors) are not on this machine")
    f = formats.get(name)
    x = np.fromfile(VECTORS / "x.f32", np.float32)
    packed = f.encode(x)
    np.testing.assert_array_equal(packed, np.fromfile(VECTORS / f"{name}.bin", np.uint8))
    np.testing.assert_array_equal(
        f.decode(packed), np.fromfile(VECTORS / f"{name}.f32", np.float32)
    )


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("tbq3_0", "813a343d4622e37653b9225465ed"),
        ("tbq4_0", "813a695cb99c76a803259449b853cc5a7bd6"),
    ],
)
def test_first_block_of_the_specification(name: str, start: str) -> None:
    x = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    packed = formats.get(name).encode(x)
    assert packed[: len(start) // 2].tobytes().hex() == start


@pytest.mark.parametrize("name", ["f16", "bf16", "q8_0", "q4_0"])
def test_stock_formats_are_byte_equal_to_ggml(name: str) -> None:
    x = gaussian(4096, 128)
    x[5], x[6], x[7] = 0, x[6] * 1e4, x[7] * 1e-3
    x[8, 3] = 50
    kind = GGMLQuantizationType[name.upper()]
    expected = quants.quantize(x, kind).view(np.uint8).reshape(len(x), -1)
    f = formats.get(name)
    np.testing.assert_array_equal(f.encode(x), expected)
    np.testing.assert_array_equal(f.decode(expected), quants.dequantize(expected, kind))


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)
def test_distortion_on_gaussian_rows(f: Format, head_dim: int) -> None:
    if f.refuses(head_dim, "key"):
        pytest.skip(f"{f.name} does not take head_dim {head_dim}")
    mse = relative_mse(f, gaussian(max(1024, 2**18 // head_dim), head_dim))
    expected = EXPECTED_MSE[f.name]
    if f.name in SPHERE_FLOOR:
        assert mse < 1.03 * SPHERE_FLOOR[f.name][head_dim]
    if isinstance(expected, dict):
        expected = expected[head_dim]
    assert mse == pytest.approx(expected, rel=0.03)
    assert mse > 4 ** -f.bits(head_dim)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_format_of_others_is_at_once_no_larger_and_no_worse_than_one_of_ours(
    head_dim: int,
) -> None:
    figures = {
        f: (f.bits(head_dim), relative_mse(f, gaussian(2**16 // head_dim, head_dim)))
        for f in ALL
        if not f.refuses(head_dim, "key")
    }
    ours = {f: at for f, at in figures.items() if f.source.startswith("kvproof")}
    assert len(ours) >= 11 and len(figures) > len(ours)
    beaten = [
        (peer.name, f.name)
        for f, (bits, error) in ours.items()
        for peer, (peer_bits, peer_error) in figures.items()
        if peer not in ours and peer_bits <= bits and peer_error <= error
    ]
    assert beaten == []


@pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_of_rotated_query_and_stored_codes_equal_the_plain_dot(
    f: Format, head_dim: int
) -> None:
    reason = f.refuses(head_dim, "key")
    if reason:
        assert f.name in reason and str(head_dim) in reason and str(f.multiple) in reason
        with pytest.raises(RequestError, match=f"{head_dim} is not a multiple of {f.multiple}"):
            f.encode(gaussian(1, head_dim))
        return
    packed = f.encode(gaussian(64, head_dim))
    q = gaussian(16, head_dim, seed=2)
    plain = q.astype(np.float64) @ f.decode(packed).astype(np.float64).T
    coded = f.rotate(q).astype(np.float64) @ f.decode_rotated(packed).T
    assert np.square(plain - coded).sum() <= 1e-12 * np.square(plain).sum()
    assert packed.shape[-1] == f.row_bytes(head_dim)
    assert f.row_values(packed.shape[-1]) == head_dim


@pytest.mark.parametrize("f", [f for f in ALL if f.codebook], ids=lambda f: f.name)
def test_every_code_is_used_and_no_other(f: Format) -> None:
    packed = f.encode(gaussian(512, 128))
    values = f.decode_rotated(packed)
    if f.unit_bytes == 1:
        scale = UNITS[packed[:, -1:]].astype(np.float16).view(np.uint8)
    elif f.block_size is None:
        scale = packed[:, -2:]
    else:
        scale, values = packed.reshape(-1, f.block_bytes)[:, :2], values.reshape(-1, f.block_size)
    codes = np.unique((values / scale.copy().view(np.float16).astype(np.float64)).round(6))
    assert f.codebook is not None
    book = np.unique(np.asarray(f.codebook, np.float32).astype(np.float64).round(6))
    np.testing.assert_allclose(codes, book, atol=2e-6)


HARD_ROWS = {
    "zeros": np.zeros(128), "minus zeros": np.full(128, -0.0),
    "one subnormal": np.eye(1, 128) * 1e-40,
    "tiny": np.full(128, 1e-35), "one 7e4": np.eye(1, 128) * 7e4, "one 1e30": np.eye(1, 128) * 1e30,
    "largest": np.full(128, 3.4e38), "constant": np.full(128, 1.5),
}  # fmt: skip


@pytest.mark.parametrize("hard", HARD_ROWS, ids=str)
@pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)
def test_hard_rows_stay_finite_and_leave_their_neighbours_alone(f: Format, hard: str) -> None:
    x = gaussian(3, 128)
    alone = f.encode(x)
    x[1] = HARD_ROWS[hard]
    packed, counters = f.encode_counted(x)
    decoded = f.decode(packed)
    assert np.isfinite(decoded).all()
    np.testing.assert_array_equal(packed[[0, 2]], alone[[0, 2]])
    if "zeros" in hard:
        assert not decoded[1].any()
        assert counters == formats.Counters()
    if hard == "largest":
        assert counters.scale_saturated > 0
    if hard in ("one subnormal", "tiny") and f.codebook:
        assert counters.scale_flushed > 0 and not decoded[1].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)
def test_non_finite_input_is_refused_by_row(f: Format, bad: float) -> None:
    x = gaussian(20, 128)
    x[17, 5] = bad
    with pytest.raises(RequestError, match="row 17: non-finite input"):
        f.encode(x)


@pytest.mark.parametrize(
    "f", [f for f in ALL if f.name != "fp8_e4m3" and f.unit_bytes == 2], ids=lambda f: f.name
)
def test_stored_infinity_is_refused_by_row(f: Format) -> None:
    packed = f.encode(gaussian(5, 128))
    at = packed.shape[-1] - 2 if f.block_size is None or f.name == "qjl1_256" else 0
    packed[3, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    if f.name in ("bf16", "qjl1_256"):
        packed[3, at : at + 2] = (0x80, 0x7F)
    with pytest.raises(RequestError, match="row 3"):
        f.decode(packed)


def test_fp8_enumerates_every_code_and_rounds_to_even() -> None:
    f = formats.get("fp8_e4m3")
    codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)
    values = f.decode(codes[:, None])
    np.testing.assert_array_equal(f.encode(values)[:, 0], codes)
    ladder = np.unique(np.abs(values))
    for low, high in itertools.pairwise(ladder):
        middle = np.float32((float(low) + float(high)) / 2)
        even = low if int(f.encode(np.array([low]))[0]) % 2 == 0 else high
        assert f.decode(f.encode(np.array([middle])))[0] == even
    packed, counters = f.encode_counted(np.array([[464.0, -1000.0, 463.0]]))
    np.testing.assert_array_equal(f.decode(packed), [[448, -448, 448]])
    assert counters.scale_saturated == 2


def test_fp8_scale_is_per_head_and_required_positive() -> None:
    f = formats.get("fp8_e4m3")
    x = gaussian(6, 64).reshape(3, 2, 64) * np.float32([[1e-3], [1e3]])
    scale = np.abs(x).max(axis=(0, 2)) / 448
    y = f.decode(f.encode(x, scale), scale)
    assert np.square(y - x).sum() / np.square(x).sum() < 1e-3
    for wrong in (0.0, -1.0, np.nan):
        with pytest.raises(RequestError, match="finite and positive"):
            f.encode(x, wrong)
    with pytest.raises(RequestError, match="takes no scale"):
        formats.get("q8_0").encode(x, 2.0)


@pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)
def test_wrong_kinds_of_input(f: Format) -> None:
    assert f.encode(np.empty((0, 128), np.float32)).shape == (0, f.row_bytes(128))
    assert f.decode(np.empty((0, f.row_bytes(128)), np.uint8)).shape == (0, 128)
    swapped = gaussian(4, 128).astype(">f4")
    np.testing.assert_array_equal(f.encode(swapped), f.encode(gaussian(4, 128)))
    strided = gaussian(8, 256)[::2, ::2]
    np.testing.assert_array_equal(f.encode(strided), f.encode(strided.copy()))
    for wrong in (np.zeros(128, complex), np.array("x"), np.float32(1)):
        with pytest.raises(RequestError):
            f.encode(wrong)
    with pytest.raises(RequestError, match="not positive"):
        f.encode(np.zeros((3, 0), np.float32))
    wrong_bytes = 1 if f.name != "fp8_e4m3" else 0
    with pytest.raises(RequestError, match=f"no row has {wrong_bytes} bytes"):
        f.decode(np.zeros((2, wrong_bytes), np.uint8))
    with pytest.raises(RequestError, match="uint8"):
        f.decode(np.zeros((2, f.row_bytes(128)), np.int8))


def test_names_are_suggested_and_sides_are_named() -> None:
    with pytest.raises(RequestError, match="did you mean tbq4_0"):
        formats.get("tbq4")
    reason = formats.get("tq4").refuses(128, "weight")
    assert reason == "tq4: not a weight format (only key, value)"
    assert formats.get("tq3").refuses(100, "key") == "tq3: head_dim 100 is not a multiple of 16"


def test_public_api_is_callable_and_stays_so() -> None:
    import kvproof as kp
    import kvproof.formats

    assert kp.formats() == ALL
    f = kp.format("tbq4_0")
    assert (f.bits_per_value, f.block_size, f.block_bytes) == (4.5, 32, 18)
    assert kp.format("tq4").bits_per_value == 4.125
    assert kp.format("tq3").bits_per_value == 3.125
    assert "multiple of 32" in (f.refuses(80, "key") or "")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([f.name for f in ALL]),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
)
def test_any_finite_row_decodes_finite_with_bounded_error(name: str, row: list[float]) -> None:
    f = formats.get(name)
    x = np.resize(np.array([row], np.float32), (1, max(32, f.multiple)))
    packed, counters = f.encode_counted(x)
    y = f.decode(packed).astype(np.float64)
    assert np.isfinite(y).all()
    if counters == formats.Counters() and f.codebook:
        # A nearest-entry code is never worse than twice the row's own norm.
        assert np.linalg.norm(y - x) <= 2 * np.linalg.norm(x.astype(np.float64)) + 1e-30
