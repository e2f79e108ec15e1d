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
