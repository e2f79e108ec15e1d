"""Rotations are orthonormal, deterministic and equal to their stated check values."""

import numpy as np
import pytest

from kvproof import rotation


def test_hadamard_check_value() -> None:
    np.testing.assert_array_equal(rotation.hadamard(np.array([1.0, 2, 3, 4])), [10, -2, -4, 0])
    with pytest.raises(ValueError, match="power of two"):
        rotation.hadamard(np.zeros(12))


def test_r32_check_value() -> None:
    y = rotation.R32.forward(np.arange(1, 33, dtype=np.float32))
    np.testing.assert_allclose(y[:4], [-2.828427, -2.828427, 0, 0], atol=1e-6)


@pytest.mark.parametrize("n", [16, 48, 64, 80, 96, 112, 128, 192, 256, 512, 576])
def test_head_rotation_is_orthonormal_and_exactly_n_wide(n: int) -> None:
    matrix = rotation.HEAD.matrix(n)
    assert np.abs(matrix @ matrix.T - np.eye(n)).max() < 1e-12
    x = np.random.default_rng(n).standard_normal((7, n)).astype(np.float32)
    y = rotation.HEAD.forward(x)
    np.testing.assert_allclose(y, x @ matrix.T.astype(np.float32), atol=2e-5)
    np.testing.assert_allclose(rotation.HEAD.inverse(y), x, atol=1e-5)


def test_parts_are_powers_of_two_largest_first() -> None:
    assert rotation.power_of_two_parts(80) == (64, 16)
    assert rotation.power_of_two_parts(96) == (64, 32)
    assert rotation.power_of_two_parts(576) == (512, 64)


def test_head_signs_are_a_prefix_of_one_sequence() -> None:
    long = rotation.head_signs(576)
    assert set(np.unique(long)) == {-1.0, 1.0}
    for n in (16, 64, 80, 128):
        np.testing.assert_array_equal(rotation.head_signs(n), long[:n])
    # The sequence is part of the format: a change of it would make every stored row unreadable.
    assert "".join("+" if s > 0 else "-" for s in long[:32]) == HEAD_SIGNS_32


HEAD_SIGNS_32 = "+-+++++-+++-+-+++-+--++-++-++++-"


def test_r128_check_value() -> None:
    y = rotation.R128.forward(np.arange(1, 129, dtype=np.float32))
    np.testing.assert_allclose(y[:4], [39.06765, 39.774757, 5.833631, -18.915106], atol=2e-5)


@pytest.mark.parametrize("n", [128, 256, 512])
@pytest.mark.parametrize("spin", [rotation.R128, rotation.POLAR], ids=lambda s: s.name)
def test_rotations_of_128_groups_are_orthonormal(spin: rotation.Rotation, n: int) -> None:
    matrix = spin.matrix(n)
    assert np.abs(matrix @ matrix.T - np.eye(n)).max() < 1e-12
    assert not matrix[:128, 128:].any()
    x = np.random.default_rng(n).standard_normal((7, n)).astype(np.float32)
    y = spin.forward(x)
    np.testing.assert_allclose(y, x @ matrix.T.astype(np.float32), atol=2e-5)
    np.testing.assert_allclose(y @ matrix.astype(np.float32), x, atol=2e-5)
    np.testing.assert_allclose(spin.inverse(y), x, atol=1e-5)


PROJECTION_STARTS = {  # the stored bytes mean nothing without the table that made them
    "fixture": ([0.08738272, -0.5604128, 1.7685238, 0.5665752], "183ea99178e43585"),
    "fused_fixture": ([0.8948582, -0.15060087, 1.004024, 0.5369207], "4ddc149b20817126"),
    "ggml": ([-0.4304026, -0.4065058, 0.7516407, 0.7888951], "87a698e749845384"),
}


@pytest.mark.parametrize("name", PROJECTION_STARTS)
def test_projections_start_as_specified_and_never_change(name: str) -> None:
    start, digest = PROJECTION_STARTS[name]
    p = rotation.projection(name)
    np.testing.assert_allclose(p.table[0, :4], start, rtol=2e-7)
    assert p.digest[:16] == digest
    assert abs(p.table.mean()) < 0.02 and abs(p.table.std() - 1) < 0.02


def test_a_projection_keeps_the_inner_products_of_its_own_transpose() -> None:
    p = rotation.projection("ggml")
    rng = np.random.default_rng(1)
    q = rng.standard_normal((5, 256)).astype(np.float32)
    y = rng.standard_normal((5, 512)).astype(np.float32)
    np.testing.assert_allclose((p.forward(q) * y).sum(-1), (q * p.inverse(y)).sum(-1), rtol=1e-4)
    assert p.matrix(256).shape == (512, 256) == (p.stored_values(256), 256)
    np.testing.assert_allclose(y @ p.matrix(256), p.inverse(y), atol=1e-4)
    np.testing.assert_allclose(q @ p.matrix(256).T, p.forward(q), atol=1e-4)
