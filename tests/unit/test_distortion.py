"""The rate-distortion table: floors, bits from real buffers, score errors, frontiers."""

import itertools
import math

import numpy as np
import pytest

from kvproof import backends, distortion, formats
from kvproof.errors import Refused

# Specification of the formats, section 3.1: b = 1, 2, 3, 4.
FLOORS = {
    32: (0.35336, 0.11160, 0.03226, 0.00877),
    64: (0.35839, 0.11453, 0.03339, 0.00913),
    128: (0.36089, 0.11600, 0.03397, 0.00931),
    256: (0.36214, 0.11674, 0.03426, 0.00941),
    512: (0.36276, 0.11711, 0.03440, 0.00945),
    None: (0.36338, 0.11748, 0.03455, 0.00950),
}
WIDTHS = (64, 80, 96, 128, 192, 256, 512, 576)


def gaussian(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def native():
    try:
        return backends.get("cpu")
    except Refused:
        return None


@pytest.mark.parametrize("dimension", FLOORS)
def test_floors_are_those_of_the_specification(dimension):
    found = [distortion.scalar_floor(bits, dimension) for bits in (1, 2, 3, 4)]
    np.testing.assert_allclose(found, FLOORS[dimension], atol=6e-6)


@pytest.mark.parametrize("dimension", [4, 16, 48, 80, 576, 4096, None])
def test_floors_fall_with_every_bit_towards_the_law_of_many_levels(dimension):
    found = [distortion.scalar_floor(bits, dimension) for bits in range(9)]
    ratios = [a / b for a, b in itertools.pairwise(found)]
    assert found[0] == 1 and all(2.7 < r < 4.001 for r in ratios)
    if dimension is None:  # Panter and Dite: sqrt(3) pi / 2 / 4^b, reached from below
        assert 0.985 < found[8] / (math.sqrt(3) * math.pi / 2 / 4**8) < 1
    else:
        assert found[4] < distortion.scalar_floor(4, None)


def test_no_quantiser_trained_on_samples_is_below_the_floor():
    x = gaussian(0, 4000, 48)
    x *= np.sqrt(48) / np.linalg.norm(x, axis=-1, keepdims=True)
    values = np.sort(x.ravel().astype(np.float64))
    levels = np.quantile(values, (np.arange(8) + 0.5) / 8)
    for _ in range(300):
        cuts = np.searchsorted(values, (levels[1:] + levels[:-1]) / 2)
        levels = np.array([cell.mean() for cell in np.split(values, cuts)])
    code = np.searchsorted((levels[1:] + levels[:-1]) / 2, values)
    found = float(np.square(values - levels[code]).mean())
    assert found == pytest.approx(distortion.scalar_floor(3, 48), rel=0.01)


def test_tiny_dimensions_have_no_floor():
    with pytest.raises(ValueError, match="dimension 3"):
        distortion.scalar_floor(2, 3)


def test_floors_belong_to_the_bits_and_block_of_a_format():
    floor = distortion.scalar_floor
    expected = {
        "tbq4_0": floor(4, 32),
        "tbq3_0": floor(3, 32),
        "q8_0": floor(8, 32),
        "tq4": floor(4, 256),
        "tq3": floor(3, 256),
        "f16": None,
        "fp8_e4m3": None,
    }
    for name, value in expected.items():
        assert distortion.floor_of(formats.get(name), 256) == value, name


@pytest.mark.parametrize("head_dim", WIDTHS)
def test_bits_are_those_of_real_buffers(head_dim):
    for f in formats.all_formats():
        if f.refuses(head_dim, min(f.sides)) is None:
            packed = f.encode(gaussian(1, 3, head_dim))
            assert f.bits(head_dim) == packed.nbytes * 8 / (3 * head_dim), f.name


def test_widths_that_do_not_fit_have_a_reason_and_no_figures():
    for e in distortion.gaussian_table(80, native()):
        if e["refused"]:
            assert e["refused"].startswith(f"{e['name']}: head_dim 80 is not a multiple of ")
            assert not {"bits", "relative_mse", "frontier"} & e.keys()
        else:
            assert formats.get(e["name"]).row_bytes(80)


def test_table_has_its_fields_and_no_error_below_the_bound():
    seen = []
    table = distortion.gaussian_table(128, native(), seen.append)
    assert [e["name"] for e in table] == [f.name for f in formats.all_formats()]
    assert len(seen) == len(table)
    for e in table:
        assert e["relative_mse"] > 4.0 ** -e["bits"] and e["db"] > 0, e["name"]
        assert e["db"] == e["db_above_bound"]
        assert 0.7 < e["score_correlation"] <= 1
        assert e["frontier"] == (not e["dominated_by"])
        assert e["encoder"] in ("cpu", "reference")
        known = {"name", "sides", "rotation", "multiple", "source", "own", "refused", "values"}
        assert known | {"bits", "relative_mse", "floor"} <= e.keys()


def test_the_reference_and_the_kernels_agree_on_an_entry():
    cpu = native()
    if cpu is None:
        pytest.skip("backend cpu is not built here")
    f = formats.get("tq4")
    a, b = distortion.on_gaussian(f, 128, cpu), distortion.on_gaussian(f, 128, None)
    assert (a.encoder, b.encoder) == ("cpu", "reference") and b.values < a.values
    assert a.relative_mse == pytest.approx(b.relative_mse, rel=0.02)


def test_frontier_of_made_up_points():
    points = {
        "large": (8.0, 1e-4),
        "good": (4.0, 0.01),
        "twin": (4.0, 0.01),  # equal in both: neither beats the other
        "fat": (4.5, 0.01),  # as good, larger
        "bad": (4.0, 0.02),  # as large, worse
        "small": (2.0, 0.1),
    }
    assert distortion.frontier(points) == {"large", "good", "twin", "small"}
    assert distortion.dominators("fat", points) == ["good", "twin"]
    assert distortion.dominators("bad", points) == ["good", "twin"]
    assert distortion.frontier({}) == set()


def test_decibels_and_errors_of_degenerate_rows():
    assert distortion.above_bound(4.0**-3, 3) == pytest.approx(0, abs=1e-12)
    assert distortion.above_bound(0.0, 3) is None
    zero, one = np.zeros((2, 4), np.float32), np.ones((2, 4), np.float32)
    assert distortion.relative_mse(zero, zero) == 0
    assert distortion.relative_mse(zero, one) == math.inf
    assert distortion.relative_mse(one, 3 * one) == 4


def test_scores_ignore_what_softmax_ignores():
    q = gaussian(0, 40, 4, 32)
    shift = np.broadcast_to(gaussian(2, 1, 2, 32), (40, 2, 32))
    assert distortion.centred_scores(q, shift, 0.5) < 1e-5  # q.shift is one number a query
    assert distortion.centred_scores(q, 0 * shift, 0.5) == 0


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("window", [None, 8])
def test_centred_scores_are_those_of_the_definition(window, every):
    q, k = gaussian(0, 21, 4, 32), gaussian(1, 21, 2, 32)
    scores = []
    for head in range(4):
        for i in range(20, -1, -every):
            seen = range(max(0, i + 1 - window) if window else 0, i + 1)
            row = np.array([0.5 * float(q[i, head] @ k[t, head // 2]) for t in seen])
            scores += list(row - row.mean())
    expected = math.sqrt(np.mean(np.square(scores)))
    assert distortion.centred_scores(q, k, 0.5, window, every) == pytest.approx(expected, rel=1e-5)
