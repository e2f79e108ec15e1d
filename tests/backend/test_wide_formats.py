"""Formats with blocks of 128 values on the CPU kernels: codebooks and projections of a call, stored
norms, trellis paths."""

from __future__ import annotations

import numpy as np
import pytest

from kvproof import formats
from kvproof.backends.reference import ReferenceBackend
from kvproof.errors import RequestError
from kvproof.formats import qjl1_256, tbq3_tcq

cpu = pytest.importorskip("kvproof.backends.cpu", reason="the native kernels are not built")

ISAS = [name for name, available in cpu.isas().items() if available]
WIDE = ("q4_polar", "q4_polar_res", "tbq3_tcq", "qjl1_256")
REFERENCE = ReferenceBackend()


@pytest.fixture(params=ISAS)
def backend(request):
    return cpu.CpuBackend(request.param)


def gaussian(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def nmse(got, want):
    return float(np.square(got - want).sum() / np.square(want).sum())


def variants():
    """Formats of one name with tables of their own, and the shipped ones between them."""
    book = np.float32(0.09) * gaussian(1, 512)
    return (tbq3_tcq(book), tbq3_tcq(), tbq3_tcq(-book)), (
        qjl1_256("fixture"), qjl1_256(), qjl1_256("fused_fixture"),
    )  # fmt: skip


@pytest.mark.parametrize("which", [0, 1])
def test_a_call_uses_the_table_of_its_format(backend, which):
    """In turns, so that a table kept from the call before would be seen."""
    x, q = gaussian(2, 40, 2, 256), gaussian(3, 3, 4, 256)
    value = formats.get("tbq3_0")
    v = value.encode(x)
    encoded = []
    for _ in range(2):
        for f in variants()[which]:
            k = backend.encode(f, x)
            np.testing.assert_array_equal(k, f.encode(x))
            np.testing.assert_array_equal(backend.decode(f, k), f.decode(k))
            assert nmse(backend.scores(f, q, k), REFERENCE.scores64(f, q, k)) < 2e-7
            want = REFERENCE.attention64(q, k, v, key=f, value=value)
            assert nmse(backend.attention(q, k, v, key=f, value=value), want) < 1e-6
            encoded.append(k.tobytes())
    assert len(set(encoded)) == 3


def test_keys_and_values_can_have_codebooks_of_their_own(backend):
    (f, shipped, _), _ = variants()
    k, v = f.encode(gaussian(4, 70, 1, 128)), shipped.encode(gaussian(5, 70, 1, 128))
    q = gaussian(6, 2, 3, 128)
    want = REFERENCE.attention64(q, k, v, key=f, value=shipped)
    assert nmse(backend.attention(q, k, v, key=f, value=shipped), want) < 2e-6
    swapped = backend.attention(q, k, v, key=shipped, value=f)
    assert nmse(swapped, want) > 0.1


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("bad", [0x7C00, 0x7E01, 0xFC00])
def test_a_stored_norm_that_is_not_finite_names_its_row(backend, name, bad):
    f = formats.get(name)
    k = f.encode(gaussian(7, 70, 2, 256))
    at = slice(32, 34) if name == "qjl1_256" else slice(0, 2)
    bits = bad | 0x03FF if name == "qjl1_256" else bad  # 0x7f80 and up are not finite in bf16
    k[41, 1, f.row_bytes(128) :][at] = np.array([bits], "<u2").view(np.uint8)
    v = formats.get("q4_polar").encode(gaussian(8, 70, 2, 128))
    q = gaussian(9, 1, 4, 256)
    for call in (
        lambda: backend.decode(f, k),
        lambda: backend.scores(f, q, k),
        lambda: backend.attention(q, k, v, key=f, value="q4_polar"),
    ):
        with pytest.raises(RequestError, match="row 83"):
            call()


@pytest.mark.parametrize("name", WIDE)
def test_a_norm_of_zero_is_a_row_of_zeros_whatever_its_codes(backend, name):
    f = formats.get(name)
    k = f.encode(gaussian(10, 70, 1, 128))
    at = slice(32, 34) if name == "qjl1_256" else slice(0, 2)
    k[3, :, at] = 0
    k[4, :, at] = np.array([0, 0x80], np.uint8)  # -0
    rows = backend.decode(f, k)[3:5]
    assert not rows.any() and not np.signbit(rows).any()
    assert not backend.scores(f, gaussian(11, 2, 2, 128), k)[..., 3:5].any()


def test_a_sketch_holds_keys_only(backend):
    k = formats.get("qjl1_256").encode(gaussian(12, 5, 1, 128))
    with pytest.raises(RequestError, match="qjl1_256: not a value format"):
        backend.attention(gaussian(13, 1, 1, 128), k, k, key="qjl1_256", value="qjl1_256")


def test_sketches_wider_than_the_kernels_are_refused(backend):
    assert backend.refuses("scores", "qjl1_256", 2048) is None
    assert "above 2048" in backend.refuses("scores", "qjl1_256", 4096 - 128)
    assert backend.refuses("scores", "tbq3_tcq", 4096) is None


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dim", [64, 192, 576])
def test_other_widths_are_refused_by_name(backend, name, dim):
    assert backend.refuses("scores", name, dim) == (
        f"{name}: head_dim {dim} is not a multiple of 128"
    )


def test_ties_of_the_trellis_go_to_the_lowest(backend):
    """Codebooks of few values make most predecessors and many paths equally good."""
    rng = np.random.default_rng(14)
    for choices in ([0.1], [-0.1, 0.1], [-0.125, -0.0625, 0.0625, 0.125]):
        f = tbq3_tcq(rng.choice(np.float32(choices), 512))
        x = np.concatenate([gaussian(15, 60, 128), np.sign(gaussian(16, 60, 128))])
        x[0], x[1] = 1, np.eye(128, dtype=np.float32)[5]
        np.testing.assert_array_equal(backend.encode(f, x), f.encode(x))
