"""Kernels of instruction sets that the machine of the tests may lack, held to the gate.

`native/tests/isa_cases.cpp` is compiled with the kernels of one set (cross.py) and takes the place
of the compiled module: the same calls, over a pipe. The scalar kernels test the pipe itself.
"""

from __future__ import annotations

import struct
import subprocess

import numpy as np
import pytest

from kvproof import formats, gate
from kvproof.cases import EDGES, Case
from kvproof.evidence import Outcome
from kvproof.mutants import Broken

cpu = pytest.importorskip("kvproof.backends.cpu", reason="the native kernels are not built")
import cross  # noqa: E402

ISAS = ("scalar", "neon", "avx2vnni")


class Elsewhere:
    """The functions of kvproof._kernels, in a process of `isa_cases`."""

    MAX_DIM, FORMATS, __file__ = cpu._kernels.MAX_DIM, cpu._kernels.FORMATS, cpu._kernels.__file__

    def __init__(self, isa, command):
        self.isa = isa
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def isas(self):
        return [(self.isa, True)]

    def missing_for(self, isa):
        return ""

    def send(self, *fields):
        for x in fields:
            if isinstance(x, int):
                self.process.stdin.write(struct.pack("<q", x))
            elif isinstance(x, float):
                self.process.stdin.write(struct.pack("<d", x))
            else:
                data = x.encode() if isinstance(x, str) else b"" if x is None else x.tobytes()
                self.process.stdin.write(struct.pack("<q", len(data)) + data)

    def number(self):
        data = self.process.stdout.read(8)
        assert len(data) == 8, f"the process of {self.isa} has ended: {self.process.wait(60)}"
        return struct.unpack("<q", data)[0]

    def fill(self, out):
        n = self.number()
        assert n == (0 if out is None else out.nbytes)
        if out is not None:
            out[...] = np.frombuffer(self.process.stdout.read(n), out.dtype).reshape(out.shape)

    def rows(self, name, blocks, dim, scale):
        self.send(name, dim, blocks.shape[1] if blocks.ndim == 3 else 1, blocks, scale)

    def queries(self, q):
        self.send(*q.shape[1:], q)

    def encode(self, isa, threads, name, x, scale, out):
        self.send("encode", threads, name, x.shape[1], x, scale)
        self.process.stdin.flush()
        counted = self.number(), self.number(), self.number()
        self.fill(out)
        return counted

    def decode(self, isa, threads, name, blocks, dim, scale, out):
        self.send("decode", threads)
        self.rows(name, blocks, dim, scale)
        self.process.stdin.flush()
        bad = self.number()
        self.fill(out)
        return bad

    def scores(self, isa, threads, q, k, key, k_scale, out):
        self.send("scores", threads)
        self.queries(q)
        self.rows(key, k, q.shape[2], k_scale)
        self.process.stdin.flush()
        bad = self.number()
        self.fill(out)
        return bad

    def attention(
        self, isa, threads, q, k, v, key, value, dim_v, first, end, scale, k_scale, v_scale,
        offsets, page, phase, out, lse,
    ):  # fmt: skip
        self.send("attention", threads)
        self.queries(q)
        self.rows(key, k, q.shape[2], k_scale)
        self.rows(value, v, dim_v, v_scale)
        self.send(first, end, scale, offsets, page, phase, int(lse is not None))
        self.process.stdin.flush()
        side, bad = self.number(), self.number()
        self.fill(out)
        self.fill(lse)
        return side, bad

    def set_book(self, name, values, cuts, start):
        self.send("set_book", name, *[np.array(x, np.float32) for x in (values, cuts)], start)

    def set_search(self, name, grid, cost, entry, beyond):
        tables = np.ascontiguousarray(cost, np.uint8), np.ascontiguousarray(entry, np.uint8)
        self.send("set_search", name, float(grid), *tables, np.array(beyond, np.int32))

    def set_trellis(self, name, states, taps0, taps1, offsets):
        self.send("set_trellis", name, states, taps0, taps1, np.array(offsets, np.int32))

    def set_units(self, values, cuts):
        self.send("set_units", np.float32(values), np.float32(cuts))

    def set_signs(self, *signs):
        self.send("set_signs", *[np.float32(s) for s in signs])

    def add_variant(self, name, identity, table):
        self.send("add_variant", name, identity, table)


@pytest.fixture(scope="module")
def backend(request):
    """A CpuBackend whose calls go to the process of a set."""
    isa = request.param
    reason = cross.not_run(isa)
    if reason:
        pytest.skip(reason)
    own = cross.KERNELS / f"kernels_{isa}.cpp"
    program = cross.build(isa, "isa_cases", own, define=f"KVPROOF_KERNELS=kernels_{isa}")
    kernels = Elsewhere(isa, [*cross.SETS[isa][2], str(program)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_kernels", kernels)
        patch.setattr(cpu, "_handed_over", set())
        patch.setattr(cpu, "TILE_ISAS", frozenset())  # rows only come through the pipe
        cpu._hand_over_constants()
        yield cpu.CpuBackend(isa)
    kernels.process.stdin.close()
    assert kernels.process.wait(60) == 0
    kernels.process.stdout.close()


every_set = pytest.mark.parametrize("backend", ISAS, indirect=True)

# Every format as keys, and as values where it can be; row formats with a last half group too.
KEYS = [f.name for f in formats.all_formats() if cpu.CpuBackend().refuses("scores", f, 128) is None]
VALUES = [name for name in KEYS if "value" in formats.get(name).sides]
PAIRS = [(key, VALUES[-1 - i % len(VALUES)]) for i, key in enumerate(KEYS)]


def width(*names):
    """80, which leaves half a group of 32, or the width that all formats take."""
    wide = any(formats.get(n).refuses(80, side) for n in names for side in ("key", "value")
               if side in formats.get(n).sides)  # fmt: skip
    return 128 if wide else 80


def cases_of(key, value):
    n = width(key, value)
    shape = {"head_dim": n, "num_heads": 4, "num_kv_heads": 2}
    for name in {key, value}:
        for kind in EDGES:
            yield Case("encode", name, head_dim=n, n_kv=3, num_kv_heads=2, inputs=kind)
        yield Case("decode", name, head_dim=n, n_kv=40, num_kv_heads=2, inputs="mixed")
    for kind in ("normal", "mixed", "limit"):
        yield Case("scores", key, **shape, n_q=2, n_kv=67, inputs=kind)
    wide = {"head_dim": n, "num_heads": 7, "num_kv_heads": 1}
    yield Case("attention", key, value, **shape, n_kv=600, threads=2, inputs="ramp")
    yield Case("attention", key, value, **shape, n_q=17, n_kv=65)
    yield Case("attention", key, value, **wide, n_q=3, n_kv=131, window=50)
    yield Case("attention", key, value, **shape, n_q=2, n_kv=77, inputs="sharp")
    yield Case("attention", key, value, **shape, n_q=3, n_kv=70, inputs="some_zero", causal=False)
    yield Case(
        "attention", key, value, **shape, n_q=2, n_kv=96, position=50, page=16, phase=5, lse=True
    )


# Other tests run the scalar and AVX2 kernels over all formats; here they show the way there.
@pytest.mark.parametrize(
    ("backend", "pair"),
    [(isa, pair) for isa in ISAS for pair in (PAIRS if isa == "neon" else PAIRS[::4])],
    indirect=["backend"],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_every_format_passes_the_cases_of_the_gate(backend, pair):
    records = [gate.run(case, backend) for case in cases_of(*pair)]
    assert [e.reason for e in records if e.outcome is not Outcome.PASSED] == []
    assert sum(e.metrics["outputs"] for e in records) > 5000


@every_set
def test_a_candidate_passes_the_gate(backend):
    records = gate.gate_evidence(("tq4", "tq3"), [64], backend, windows=[32])
    assert [e.reason for e in records if e.outcome is not Outcome.PASSED] == []
    assert {e.environment.isa for e in records} == {backend.isa}


@every_set
def test_a_wrong_result_fails(backend):
    def attention(q, k, v, **options):
        out = backend.attention(q, k, v, **options)
        out[-1, -1] = out[-1, 0]
        return out

    def encode(fmt, x, scale=None):
        out = backend.encode(fmt, x, scale)
        out.reshape(-1)[-1] ^= 1
        return out

    broken = Broken(backend, attention=attention, encode=encode)
    for case in (
        Case("attention", "q8_0", num_heads=4, num_kv_heads=2, n_kv=70, n_q=3),
        Case("encode", "q8_0", head_dim=64, n_kv=9),
    ):
        assert gate.run(case, backend).outcome is Outcome.PASSED
        assert gate.run(case, broken).outcome is Outcome.FAILED


@every_set
def test_a_row_that_is_not_finite_is_named(backend):
    blocks = backend.encode("q8_0", np.ones((5, 1, 64), np.float32))
    blocks[3, 0, :2] = np.frombuffer(b"\x00\x7c", np.uint8)
    with pytest.raises(cpu.RequestError, match="q8_0: row 3"):
        backend.decode("q8_0", blocks)
    with pytest.raises(cpu.RequestError, match="q8_0: row 3 of the values"):
        good = backend.encode("q8_0", np.ones((5, 1, 64), np.float32))
        backend.attention(np.ones((1, 1, 64), np.float32), good, blocks, key="q8_0", value="q8_0")
