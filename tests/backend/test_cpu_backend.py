"""The CPU backend's surface: requests that are wrong, torch tensors, threads, instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kvproof import formats
from kvproof.errors import Refused, RequestError

cpu = pytest.importorskip("kvproof.backends.cpu", reason="the native kernels are not built")


@pytest.fixture
def be():
    return cpu.CpuBackend()


def rows(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_kernel_names_and_refusals(be):
    assert be.kernel("attention", formats.get("tq4"), 128) == f"attention_tq4_{be.isa}"
    assert be.refuses("attention", formats.get("tq4"), 128) is None
    assert be.refuses("attention", formats.get("tq4"), 72) == formats.get("tq4").refuses(72, "key")
    assert "4096" in be.refuses("encode", formats.get("f16"), 5000)
    assert "no operation" in be.refuses("matmul", formats.get("f16"), 64)
    assert len(be.digest()) == 64
    assert be.environment()["isa"] in be.environment()["isas"]


def test_native_rows_have_the_formats_sizes():
    from kvproof import _kernels

    for f in formats.all_formats():
        for dim in (32, 64, 96, 128, 512, 576):
            if f.name in _kernels.FORMATS and f.refuses(dim, "key") is None:
                assert _kernels.row_bytes(f.name, dim) == f.row_bytes(dim)


@pytest.mark.parametrize("name", ["tq4", "q8_0", "f16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_input_names_the_first_row(be, name, bad):
    x = rows(200, 64)
    x[130, 3] = bad
    x[17, 60] = bad
    with pytest.raises(RequestError, match=f"{name}: row 17: non-finite input"):
        be.encode(name, x)


@pytest.mark.parametrize("name", ["tq4", "tbq4_0", "f16"])
def test_non_finite_stored_scale_names_its_row(be, name):
    f = formats.get(name)
    blocks = f.encode(rows(40, 2, 64))
    where = slice(-2, None) if name == "tq4" else slice(0, 2)
    blocks[21, 1, where] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    q, good = rows(1, 2, 64), f.encode(rows(40, 2, 64))
    with pytest.raises(RequestError, match="row 43 of the keys"):
        be.attention(q, blocks, good, key=f, value=f)
    with pytest.raises(RequestError, match="row 43 of the values"):
        be.attention(q, good, blocks, key=f, value=f)
    with pytest.raises(RequestError, match="row 43"):
        be.scores(f, q, blocks)
    with pytest.raises(RequestError, match="row 43"):
        be.decode(f, blocks)
    # The scratch of that call is not remembered.
    assert np.isfinite(be.attention(q, good, good, key=f, value=f)).all()


def test_zero_rows_score_zero(be):
    for f in formats.all_formats():
        if be.refuses("attention", f, 64):
            continue
        blocks = f.encode(np.zeros((5, 1, 64), np.float32))
        assert (be.scores(f, rows(2, 4, 64), blocks) == 0).all()
        assert (be.attention(rows(2, 4, 64), blocks, blocks, key=f, value=f) == 0).all()
        assert not np.signbit(be.decode(f, blocks)).any() or f.name in ("f16", "bf16", "fp8_e4m3")


def test_requests_that_are_wrong(be):
    f = formats.get("tq4")
    k, q = f.encode(rows(10, 2, 64)), rows(1, 4, 64)
    run = lambda **how: be.attention(  # noqa: E731
        how.pop("q", q), how.pop("k", k), how.pop("v", k), key="tq4", value="tq4", **how
    )
    with pytest.raises(RequestError, match="11 queries but only 10"):
        run(q=rows(11, 4, 64))
    with pytest.raises(RequestError, match="1 queries but only 0"):
        run(k=k[:0], v=k[:0])
    with pytest.raises(RequestError, match="window 0"):
        run(window=0)
    with pytest.raises(RequestError, match=r"\(10, 2, 34\) and values \(9, 2, 34\)"):
        run(v=k[:9])
    with pytest.raises(RequestError, match="5 query heads are no multiple of 2"):
        run(q=rows(1, 5, 64))
    with pytest.raises(RequestError, match="head_dim 80, the keys 64"):
        run(q=rows(1, 4, 80))
    with pytest.raises(RequestError, match="uint8"):
        run(k=k.astype(np.int32))
    with pytest.raises(RequestError, match="q has a NaN"):
        run(q=q * np.float32(np.nan))
    for threads in (0, True, 1.5, np.int64(1025)):
        with pytest.raises(RequestError, match=r"threads .* is not a whole number from 1 to 1024"):
            run(threads=threads)
    np.testing.assert_array_equal(run(threads=np.int64(2)), run(threads=2))
    with pytest.raises(RequestError, match="not a finite number"):
        run(scale=np.float16("inf"))
    np.testing.assert_array_equal(run(scale=np.float16(0.5)), run(scale=0.5))
    with pytest.raises(RequestError, match="takes no scale"):
        run(k_scale=np.float32([2, 2]))
    with pytest.raises(RequestError, match="did you mean tq"):
        be.encode("tq6", rows(1, 64))
    with pytest.raises(RequestError, match="72 is not a multiple of 16"):
        be.encode("tq4", rows(1, 72))
    fp8 = formats.get("fp8_e4m3")
    with pytest.raises(RequestError, match=r"v_scale has shape \(3,\), needs \(2,\)"):
        be.attention(
            q, k, fp8.encode(rows(10, 2, 64)), key="tq4", value=fp8, v_scale=np.ones(3, np.float32)
        )
    with pytest.raises(RequestError, match="positive"):
        be.encode(fp8, rows(2, 64), np.float32(-1))


def test_torch_tensors_pass_without_copies(be):
    torch = pytest.importorskip("torch")
    f = formats.get("tbq4_0")
    k = f.encode(rows(50, 2, 64))
    q = rows(3, 4, 64)
    want = be.attention(q, k, k, key=f, value=f)
    tensor = torch.from_numpy(k)
    torch.ones(64, 64) @ torch.ones(64, 64)  # torch's own threads have just been busy
    got = be.attention(torch.from_numpy(q), tensor, tensor, key=f, value=f)
    assert isinstance(got, torch.Tensor)
    np.testing.assert_array_equal(got.numpy(), want)
    assert np.shares_memory(cpu._array(tensor, "k"), k)
    half = be.attention(torch.from_numpy(q).bfloat16(), tensor, tensor, key=f, value=f)
    assert half.dtype == torch.float32 and torch.isfinite(half).all()


def test_torch_tensors_that_numpy_does_not_know(be):
    torch = pytest.importorskip("torch")
    f = formats.get("tq4")
    k, q = f.encode(rows(5, 2, 64)), rows(3, 4, 64)
    negated = torch._neg_view(torch.from_numpy(q))
    got = be.attention(negated, k, k, key=f, value=f)
    np.testing.assert_array_equal(got.numpy(), be.attention(-q, k, k, key=f, value=f))
    quantized = torch.ops.aten.quantize_per_tensor(torch.from_numpy(q), 0.1, 0, torch.qint8)
    with pytest.raises(RequestError, match=r"attention: q: torch.qint8 does not become an array"):
        be.attention(quantized, k, k, key=f, value=f)


def test_out_is_an_array_in_memory_that_is_not_read(be):
    f = formats.get("tq4")
    x = rows(40, 2, 64)
    k, q = f.encode(x), rows(3, 4, 64)
    with pytest.raises(RequestError, match="attention: out is a list, needs a NumPy array"):
        be.attention(q, k, k, key=f, value=f, out=[])
    shared = np.zeros((4, 4, 64), np.float32)
    kept = x.copy()
    buffer = np.zeros((2, 1, 64 * 34), np.uint8)
    for call in (
        lambda: be.attention(shared[:3], k, k, key=f, value=f, out=shared[1:]),
        lambda: be.encode(f, x, out=x.reshape(-1)[: k.size // 4].view(np.uint8).reshape(k.shape)),
        lambda: be.decode(f, x.view(np.uint8)[..., :34], out=x),
        lambda: be.scores(f, q, k, out=q.reshape(-1)[: 3 * 4 * 40].reshape(3, 4, 40)),
        lambda: be.unpack(f, "key", buffer, 0, 3, out=buffer.reshape(-1)[:204].reshape(3, 2, 34)),
    ):
        with pytest.raises(RequestError, match="out overlaps what is read"):
            call()
    np.testing.assert_array_equal(x, kept)


def in_process(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True
    )


def test_isa_and_threads_from_the_environment(monkeypatch):
    monkeypatch.setenv("KVPROOF_CPU_ISA", "scalar")
    assert cpu.CpuBackend().isa == "scalar"
    monkeypatch.setenv("KVPROOF_CPU_ISA", "neon9")
    with pytest.raises(RequestError, match="neon9: unknown, choose one of scalar"):
        cpu.CpuBackend()
    assert {"scalar", "avx2", "avx2vnni", "avx512"} <= set(cpu.isas())
    for name, available in cpu.isas().items():
        lacks = cpu.missing_for(name)
        assert available == (lacks == "")
        if not available:
            monkeypatch.setenv("KVPROOF_CPU_ISA", name)
            with pytest.raises(Refused, match=f"cannot run it, it lacks {lacks}; choose one of"):
                cpu.CpuBackend()
    monkeypatch.setenv("KVPROOF_THREADS", "3")
    assert cpu.default_threads() == 3
    monkeypatch.setenv("KVPROOF_THREADS", "many")
    with pytest.raises(RequestError, match="found 'many'"):
        cpu.default_threads()


def test_a_forked_child_gets_its_own_threads():
    code = """
import os, numpy as np
from kvproof.backends.cpu import CpuBackend
be = CpuBackend()
x = np.random.default_rng(0).standard_normal((3000, 1, 64)).astype(np.float32)
k = be.encode("tq4", x)
run = lambda: be.attention(x[:1], k, k, key="tq4", value="tq4", threads=2)
want = run()
pid = os.fork()
if pid == 0:
    os._exit(0 if (run() == want).all() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    result = in_process(code)
    assert result.stdout.strip() == "0", result.stderr


def test_calls_from_several_python_threads(be):
    from concurrent.futures import ThreadPoolExecutor

    f = formats.get("tq4")
    k, q = f.encode(rows(600, 1, 64)), rows(1, 4, 64)
    want = be.attention(q, k, k, key=f, value=f)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: be.attention(q, k, k, key=f, value=f), range(40)):
            np.testing.assert_array_equal(got, want)


def test_out_takes_every_result():
    f = formats.get("tq4")
    x = np.random.default_rng(0).standard_normal((70, 2, 64)).astype(np.float32)
    q = x[:3].repeat(2, axis=1)
    be = cpu.CpuBackend()
    blocks = be.encode(f, x)
    kv = {"key": f, "value": f}
    calls = {
        "encode": (lambda out: be.encode(f, x, out=out), np.uint8),
        "decode": (lambda out: be.decode(f, blocks, out=out), np.float32),
        "scores": (lambda out: be.scores(f, q, blocks, out=out), np.float32),
        "flat": (lambda out: be.scores(f, q[:, 0], blocks[:, 0], out=out), np.float32),
        "attention": (lambda out: be.attention(q, blocks, blocks, **kv, out=out), np.float32),
    }
    for name, (call, dtype) in calls.items():
        want = call(None)
        out = np.empty_like(want)
        assert call(out) is out, name
        np.testing.assert_array_equal(out, want, err_msg=name)
        wide = np.empty((*want.shape[:-1], 2 * want.shape[-1]), dtype)
        for bad, why in [
            (out[1:], "needs"),
            (out.astype(np.float64), "needs"),
            (wide[..., ::2], "contiguous"),
        ]:
            with pytest.raises(RequestError, match=f"out .*{why}"):
                call(bad)


@pytest.mark.parametrize("text", ["many", "0", "-1", "²", "9" * 400, "1.5"])
def test_thread_counts_from_the_environment_are_checked(monkeypatch, text):
    monkeypatch.setenv("KVPROOF_THREADS", text)
    with pytest.raises(RequestError, match="KVPROOF_THREADS: expected a number from 1 to 1024"):
        cpu.default_threads()
    monkeypatch.setenv("KVPROOF_THREADS", "3")
    assert cpu.default_threads() == 3


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"scale": float("nan")}, "scale nan is not a finite number"),
        ({"scale": float("inf")}, "scale inf is not a finite number"),
        ({"scale": "big"}, "scale 'big' is not a finite number"),
        ({"scale": 1j}, "is not a finite number"),
        ({"scale": np.ones(2)}, "is not a finite number"),
        ({"window": 2.5}, "window 2.5 is not a positive whole number"),
        ({"window": 0}, "window 0 is not a positive whole number"),
        ({"window": True}, "window True is not a positive whole number"),
    ],
    ids=str,
)
def test_both_backends_refuse_the_same_calls(name, wrong, says):
    from kvproof import backends

    f = formats.get("tq4")
    rows = f.encode(np.ones((4, 1, 64), np.float32))
    q = np.ones((1, 1, 64), np.float32)
    with pytest.raises(RequestError, match=says):
        backends.get(name).attention(q, rows, rows, key="tq4", value="tq4", **wrong)


def test_ragged_and_sparse_input_is_refused_in_one_line():
    import torch

    backend = cpu.CpuBackend()
    with pytest.raises(RequestError, match="q"):
        backend.attention([[1.0], [1.0, 2.0]], None, None, key="tq4", value="tq4")
    with pytest.raises(RequestError, match="dense CPU tensor"):
        backend.encode("tq4", torch.ones(2, 64).to_sparse())
