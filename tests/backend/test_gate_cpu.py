"""The gate on the CPU backend: every check passes, and a candidate's evidence comes quickly."""

import time

import pytest

from kvproof import backends, gate
from kvproof.cases import Case
from kvproof.errors import Refused
from kvproof.evidence import Outcome, Store
from kvproof.formats import all_formats
from kvproof.mutants import Broken

try:
    CPU = backends.get("cpu")
    from kvproof.backends.cpu import isas
except Refused as refused:
    pytest.skip(f"cpu backend: {refused}", allow_module_level=True)

ISAS = [name for name, here in isas().items() if here]


# Rows of real models are tests/model's, the wheel is test_wheel's.
ELSEWHERE = ("mutants", "captured", "shipped")


@pytest.mark.parametrize("check", [c for c in gate.CHECKS if c not in ELSEWHERE])
def test_every_check_passes(check):
    have = [f.name for f in all_formats() if CPU.refuses("attention", f, 128) is None]
    results = gate.verify("cpu", checks=[check], formats=have)
    assert [(r["variant"], r["format"], r["head_dim"], r["reason"]) for r in results
            if r["outcome"] != "PASSED"] == []  # fmt: skip
    assert sum(r["outputs"] for r in results) > 1000
    assert all(r["worst_error"] <= r["bound"] for r in results if r["bound"] is not None)


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_passes_the_candidate_gate(isa):
    backend = type(CPU)(isa)
    for pair in (("tq4", "tq3"), ("q8_0", "tbq4_0"), ("fp8_e4m3", "f16"), ("tbq3_0", "q4_0")):
        records = gate.gate_evidence(pair, [128, 64], backend, windows=[32])
        assert [e.reason for e in records if e.outcome is not Outcome.PASSED] == []
        assert {e.environment.isa for e in records} == {isa}
        assert any(str(e.subject["kernel"]).endswith(isa) for e in records)


def test_a_candidate_takes_seconds_and_its_evidence_goes_stale_with_the_kernels(tmp_path):
    began = time.monotonic()
    records = gate.gate_evidence(("tq4", "tq4"), [256], CPU, heads=[(4, 1)], windows=[None, 512])
    assert time.monotonic() - began < 20  # under 1 s on an idle machine; CI machines are shared
    assert {e.outcome for e in records} == {Outcome.PASSED}, [e.reason for e in records]
    store = Store(tmp_path / "e.jsonl")
    store.append(*records)
    assert store.read({"cpu": CPU.digest()}) == records
    stale = store.read({"cpu": "0" * 64})
    assert {e.outcome for e in stale} == {Outcome.NOT_RUN}
    assert all("stale" in e.reason for e in stale)


def test_one_wrong_row_among_thousands_fails_the_candidate():
    def attention(q, k, v, **options):
        out = CPU.attention(q, k, v, **options)
        out[-1, -1] = out[-1, 0]
        return out

    records = gate.gate_evidence(("q8_0", "q8_0"), [64], Broken(CPU, attention=attention))
    assert {e.subject["variant"] for e in records if e.outcome is Outcome.FAILED} == {"attention"}


def test_a_width_that_a_format_refuses_is_refused():
    e = gate.run(Case("scores", "tbq4_0", head_dim=80), CPU)
    assert e.outcome is Outcome.REFUSED and "80 is not a multiple of 32" in e.reason
