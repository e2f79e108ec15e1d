"""Native dequantization and products against gguf-py and float64, on every instruction set here."""

import os
import subprocess
import sys

import gguf
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: transformers)")

from kvproof import _weights, weights  # noqa: E402
from kvproof.backends import cpu  # noqa: E402
from kvproof.errors import RequestError  # noqa: E402
from kvproof.gguf import GGUF, RawTensor, write_gguf  # noqa: E402

ISAS = _weights.isas()


def blocks(name, count, seed=0):
    """Random bytes of `count` blocks of a type, scales of all signs and sizes among them."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, count * size, dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):  # random scales are sometimes NaN
        plain = {"f32": np.float32, "f16": np.float16}.get(name, np.uint8)
        want = gguf.quants.dequantize(raw.view(plain).reshape(1, -1), kind)
    return raw, np.ascontiguousarray(want.reshape(-1), np.float32), count * values


def same_bits(a, b):
    """Equal bit for bit; any NaN equals any NaN."""
    kind = np.dtype(f"u{a.dtype.itemsize}")
    return (a.view(kind) == b.view(kind)) | (np.isnan(a) & np.isnan(b))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", weights.READABLE)
def test_dequantization_equals_gguf_py_bit_for_bit(name, isa):
    raw, want, n = blocks(name, 1031)
    guarded = torch.full((n + 16,), float("nan"))
    guarded[n:] = 7.0
    _weights.dequantize_f32(weights.READABLE[name], raw, guarded[:n], 2, isa)
    assert same_bits(guarded[:n].numpy(), want).all()
    assert (guarded[n:] == 7.0).all()
    half = torch.empty(n, dtype=torch.bfloat16)
    _weights.dequantize_bf16(weights.READABLE[name], raw, half.view(torch.int16), 2, isa)
    rounded = torch.from_numpy(want).bfloat16()
    same = (half.view(torch.int16) == rounded.view(torch.int16)) | (half.isnan() & rounded.isnan())
    assert bool(same.all())


def test_a_tensor_read_from_a_file_has_torch_order_and_values(tmp_path):
    raw, want, n = blocks("q5_k", 6)
    path = tmp_path / "a.gguf"
    write_gguf(path, {"general.architecture": "x"}, {"t": RawTensor((512, 3), 13, raw)})
    with GGUF(path) as file:
        got = weights.read_tensor(file, file.tensors["t"], torch.float32)
        assert got.shape == (3, 512) and same_bits(got.numpy().reshape(n), want).all()
        # Pages of the file were let go; it reads the same again.
        again = weights.read_tensor(file, file.tensors["t"], torch.float32)
        assert same_bits(again.numpy(), got.numpy()).all()


def test_types_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(
        path,
        {"general.architecture": "x"},
        {"blk.0.x": RawTensor((256, 1), 10, np.zeros(84, np.uint8))},
    )
    with GGUF(path) as file, pytest.raises(RequestError, match=r"'blk\.0\.x': type q2_k cannot be"):
        weights.read_tensor(file, file.tensors["blk.0.x"], torch.float32)


def test_wrong_sizes_are_refused_before_anything_is_written():
    out = torch.full((64,), 3.0)
    with pytest.raises(ValueError, match="33 bytes do not hold 64 values"):
        _weights.dequantize_f32(8, np.zeros(33, np.uint8), out, 1)
    with pytest.raises(ValueError, match="type 99 is not supported"):
        _weights.dequantize_f32(99, np.zeros(68, np.uint8), out, 1)
    assert (out == 3.0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(7, 16), (130, 640), (257, 100), (300, 517), (1, 3)])
def test_products_match_float64(shape, isa):
    n, k = shape
    for m in (*range(1, 10), 13, 33):
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
        w = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).bfloat16()
        guarded = torch.full((m * n + 16,), float("nan"))
        guarded[m * n :] = 7.0
        args = x.data_ptr(), w.data_ptr(), guarded.data_ptr(), m, n, k
        _weights.linear(*args, 2, isa)
        got, want = guarded[: m * n].view(m, n).double(), x.double() @ w.double().T
        assert bool(torch.isfinite(got).all())
        assert float((got - want).norm() / want.norm()) < 1e-6
        assert (guarded[m * n :] == 7.0).all()
        one = guarded.clone()
        _weights.linear(*args, 1, isa)
        assert torch.equal(one[: m * n], guarded[: m * n])  # the same bits on any thread count


def test_linear_takes_batches_and_strided_rows_and_refuses_other_dtypes():
    w = torch.randn(20, 32).bfloat16()
    x = torch.randn(3, 32, 5).transpose(1, 2)
    got = weights.linear(x, w, 2)
    assert got.shape == (3, 5, 20)
    torch.testing.assert_close(got, x @ w.float().T, rtol=1e-5, atol=1e-5)
    for bad in (x.double(), x.bfloat16(), torch.randn(3, 31)):
        with pytest.raises(ValueError, match="expected float32"):
            weights.linear(bad, w, 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [1, 7, 64, 640, 643])
def test_rms_norm_matches_float64(n, isa):
    x, w = torch.randn(5, n) * 30, torch.randn(n)
    out = torch.full((5 * n + 8,), float("nan"))
    out[5 * n :] = 7.0
    _weights.rms_norm(x.data_ptr(), w.data_ptr(), out.data_ptr(), 5, n, 1e-6, isa)
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * w.double()
    torch.testing.assert_close(out[: 5 * n].view(5, n).double(), exact, rtol=1e-6, atol=1e-6)
    assert (out[5 * n :] == 7.0).all()
    zeros = torch.zeros(2, n)
    assert torch.equal(weights.rms_norm(zeros, w, 1e-6), zeros)
    with pytest.raises(ValueError, match="expected float32"):
        weights.rms_norm(x.double(), w, 1e-6)


def test_an_unknown_instruction_set_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"neon9 cannot run here; choose one of scalar"):
        _weights.dequantize_f32(0, np.zeros(4, np.uint8), torch.zeros(1), 1, "neon9")


def test_the_engine_takes_every_instruction_set_of_the_kernels():
    assert [name for name, here in cpu.isas().items() if here] == ISAS


def test_a_forced_instruction_set_is_used_or_refused():
    code = "from kvproof import weights; print(weights.isa())"
    for name in [*ISAS, "neon9"]:
        env = os.environ | {"KVPROOF_CPU_ISA": name}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        if name == "neon9":
            assert "RequestError: KVPROOF_CPU_ISA: neon9 cannot run here; choose" in done.stderr
        else:
            assert done.stdout.strip() == name
