"""The gate on the reference backend: what passes, what is refused, what never counts as a pass."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvproof import cases, gate, mutants, routes, rules
from kvproof.backends.reference import ReferenceBackend
from kvproof.cases import Case
from kvproof.errors import RequestError
from kvproof.evidence import Environment, Outcome, Store, exit_code
from kvproof.formats import all_formats

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ReferenceBackend()
FIELDS = {
    "check", "variant", "backend", "format", "head_dim", "fixture", "outcome", "reason",
    "worst_error", "bound", "outputs",
}  # fmt: skip


@pytest.mark.parametrize("check", ["turbo3", "turbo4", "row"])
def test_a_check_passes_and_says_so_in_the_documented_fields(check):
    results = gate.verify("reference", checks=[check], formats=["tbq3_0", "tbq4_0", "tq4", "tq5"])
    assert {r["outcome"] for r in results} == {"PASSED"}, [r["reason"] for r in results]
    assert gate.outcome_of(results) is Outcome.PASSED
    assert {r["variant"] for r in results} >= {"encode", "decode", "scores", "truth"}
    for r in results:
        assert set(r) >= FIELDS
        assert r["check"] == check and r["backend"] == "reference"
        assert r["reason"] is None and r["outputs"] > 0
        assert r["worst_error"] <= r["bound"]
    assert json.loads(json.dumps(results)) == results


def test_names_that_are_wrong_are_refused():
    with pytest.raises(
        RequestError, match="--check turbo5: unknown; choose from self_test, turbo3"
    ):
        gate.verify("reference", ["turbo5"])
    with pytest.raises(RequestError, match="unknown format 'tq6'"):
        gate.verify("reference", formats=["tq6"])
    with pytest.raises(RequestError, match="unknown backend"):
        gate.verify("abacus", ["turbo3"])


def test_an_absent_backend_is_not_run():
    results = gate.verify("cuda", ["turbo3"], formats=["tbq3_0"])
    assert results[-1]["check"] == "turbo3" and results[-1]["outcome"] == "NOT_RUN"
    assert "cuda" in results[-1]["reason"]
    assert gate.outcome_of(results) is Outcome.NOT_RUN


def test_an_empty_selection_fails():
    for empty in ({"checks": []}, {"checks": ["row"], "formats": ["f16"]}, {"formats": []}):
        results = gate.verify("reference", **({"checks": ["fused"]} | empty))
        assert gate.outcome_of(results) is Outcome.FAILED
        assert "nothing to check" in results[0]["reason"]
    assert gate.verify([], ["fused"])[0]["outcome"] == "FAILED"


def test_the_registry_and_the_gate_name_the_same_formats():
    """Both ways: every format has its checks, bounds, truth, kernels and page; none has without."""
    names = {f.name for f in all_formats()}
    if lacking := set(gate.EIGHT.values()) - names:
        pytest.skip(f"not registered yet: {', '.join(sorted(lacking))}")
    assert {c for f in all_formats() for c in gate.checks_of(f)} == set(gate.FORMAT_CHECKS)
    assert set(rules.TRUTH) == names
    assert {f for f, _ in rules.TRUTH_BY_WIDTH} <= names
    assert set(rules.TOLERANCES) == {
        (op, f) for op in ("decode", "scores", "attention", "sharp") for f in names
    }
    used = {r.key for r in routes.ROUTES} | {r.value for r in routes.ROUTES}
    used |= {name for pair in gate.FUSED_ROUTES.values() for name in pair}
    used |= {n for m in mutants.MUTANTS for n in (m.case.key, m.case.value or m.case.key)}
    assert used <= names
    for fmt in all_formats():
        assert len(REFERENCE.kernel("encode", fmt, 128)) > 0
    pages = (ROOT / "docs" / "formats.md").read_text()
    assert [name for name in names if f"`{name}`" not in pages] == []
    planned = {plan.check for plan in gate.plans(gate.CHECKS, all_formats())}
    assert planned == {*gate.FORMAT_CHECKS, *gate.CASE_CHECKS}
    assert set(gate.CHECKS) - planned == {"self_test", "captured", *gate._WHOLE_CHECKS}
    covered = {
        (plan.check, case.key) for plan in gate.plans(gate.CHECKS, all_formats())
        for case in plan.cases
    }  # fmt: skip
    every = ("append", "fused", "gqa", "causal", "window", "split", "segments", "multi_block")
    treated = {name for name, (_, error) in rules.TRUTH.items() if error < 0.2}
    assert covered >= {("conditioned", name) for name in treated}
    of = {name for _, name in rules.CAPTURED}
    assert of == names
    assert covered >= {(check, name) for check in (*every, "cache") for name in names}


def test_every_mutant_is_caught_on_the_reference():
    records = gate.mutant_evidence(REFERENCE)
    names = {f.name for f in all_formats()}
    shown = [m for m in mutants.MUTANTS if {m.case.key, m.case.value or m.case.key} <= names]
    assert len(records) == len(shown) > 150
    assert len({m.name for m in shown}) >= 25
    assert [(e.subject["variant"], e.reason) for e in records if e.outcome != "PASSED"] == []
    assert all(e.subject["caught_by"] for e in records)


def test_a_surviving_mutant_fails_the_gate(monkeypatch):
    idle = mutants.Mutant("idle", Case("scores", "tq4"), frozenset({"parity"}), lambda b: b)
    monkeypatch.setattr(gate, "MUTANTS", (idle,))
    results = gate.verify("reference", ["mutants"])
    assert results[0]["outcome"] == "FAILED"
    assert "survived: expected to fail by parity, failed by nothing" in results[0]["reason"]


def test_a_mutant_that_the_wrong_rule_catches_has_survived():
    noisy = mutants.Mutant(
        "noisy", Case("scores", "tq4"), frozenset({"truth"}), mutants.outputs(np.zeros_like)
    )
    exam = noisy.examine(REFERENCE)
    assert exam.rules_failed == {"parity", "equal"} and not noisy.caught(exam)


def test_a_case_is_a_value_and_its_arrays_follow_from_it():
    one, two = Case("attention", "tq4", seed=5, n_kv=9), Case("attention", "tq4", seed=5, n_kv=9)
    assert one == two and hash(one) == hash(two)
    np.testing.assert_array_equal(one.arrays().k, two.arrays().k)
    assert (one.arrays().k != Case("attention", "tq4", seed=6, n_kv=9).arrays().k).any()
    for kind in cases.INPUTS:
        arrays = Case("attention", "fp8_e4m3", n_kv=6, num_kv_heads=2, num_heads=2, inputs=kind)
        x = arrays.arrays()
        assert all(np.isfinite(a).all() for a in (x.q, x.k, x.v, x.k_scale, x.v_scale)), kind
        assert x.k.dtype == np.float32
    with pytest.raises(RequestError, match="operation 'dance'"):
        Case("dance", "tq4")
    with pytest.raises(RequestError, match="inputs 'odd'"):
        Case("scores", "tq4", inputs="odd")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bounds_fail_on_nan_wherever_it_stands(bad):
    assert rules.within(1e-9, 1e-8)
    assert not rules.within(bad, 1.0) and not rules.within(1.0, bad)
    assert not rules.within(2.0, 1.0)
    zero = np.zeros(3)
    assert rules.nmse(zero, zero) == 0.0
    assert rules.nmse(np.array([1e-30, 0, 0]), zero) == np.inf


def test_the_sliding_window_of_the_reference_is_exact():
    case = Case("attention", "f16", n_q=3, n_kv=9, window=4, head_dim=2)
    scores = np.zeros((3, 1, 9))
    values = np.eye(9)[:, None, :]  # token t is basis vector t, so outputs are the weights
    out = rules.attend(case, scores, values)
    for i, position in enumerate((6, 7, 8)):
        want = np.zeros(9)
        want[position - 3 : position + 1] = 0.25
        np.testing.assert_allclose(out[i, 0], want)


def test_run_gives_evidence_that_a_store_keeps(tmp_path):
    e = gate.run(Case("scores", "tq4", n_kv=20), REFERENCE)
    assert e.outcome is Outcome.PASSED and e.digest == REFERENCE.digest()
    assert e.subject["kernel"] == "scores_tq4_numpy"
    store = Store(tmp_path / "e.jsonl")
    store.append(e)
    assert store.read({"reference": REFERENCE.digest()}) == [e]
    (stale,) = store.read({"reference": "0" * 64})
    assert stale.outcome is Outcome.NOT_RUN and "stale" in stale.reason


def test_what_the_backend_refuses_is_refused_and_not_run():
    narrow = mutants.Broken(REFERENCE, refuses=lambda op, fmt, n: f"{op}: no kernel for {n}")
    e = gate.run(Case("scores", "tq4"), narrow)
    assert e.outcome is Outcome.REFUSED and e.reason == "encode: no kernel for 128"


def test_a_software_device_is_diagnostic():
    e = gate.run(Case("scores", "tq4"), REFERENCE, Environment(device="llvmpipe"))
    assert e.outcome is Outcome.DIAGNOSTIC and "software" in e.reason


def test_a_kernel_that_raises_has_failed():
    def scores(fmt, q, blocks, scale=None):
        raise ZeroDivisionError("lane 3")

    e = gate.run(Case("scores", "tq4"), mutants.Broken(REFERENCE, scores=scores))
    assert e.outcome is Outcome.FAILED
    assert "crash: scores raised ZeroDivisionError: lane 3" in e.reason


def test_candidate_evidence_covers_both_sides_and_every_shape():
    dims = [(192, 128), 64]
    records = gate.gate_evidence(
        ("tq4", "q8_0"), dims, "reference", heads=[(3, 1)], windows=[None, 16]
    )
    assert Counter(e.outcome for e in records) == {Outcome.PASSED: len(records)}
    seen = {(e.subject["variant"], e.subject["format"], e.subject["head_dim"]) for e in records}
    assert seen == {
        ("encode", "tq4", 192), ("decode", "tq4", 192), ("encode", "q8_0", 128),
        ("decode", "q8_0", 128), ("scores", "tq4", 192), ("attention", "tq4/q8_0", 192),
        ("encode", "tq4", 64), ("decode", "tq4", 64), ("encode", "q8_0", 64),
        ("decode", "q8_0", 64), ("scores", "tq4", 64), ("attention", "tq4/q8_0", 64),
    }  # fmt: skip
    assert all(e.gate_pass().digest == REFERENCE.digest() for e in records)


def test_candidate_evidence_fails_on_a_broken_window():
    narrow = next(m for m in mutants.MUTANTS if m.name == "window_one_too_narrow")
    spoiled = mutants.options(
        lambda given: given | {"window": given["window"] and max(1, given["window"] - 1)}
    )(REFERENCE)
    assert narrow.caught(narrow.examine(REFERENCE))
    records = gate.gate_evidence(("f16", "f16"), [64], spoiled, windows=[16])
    (bad,) = [e for e in records if e.outcome is not Outcome.PASSED]
    assert bad.subject["variant"] == "attention" and "parity" in bad.reason
    assert "window 16" in bad.reason


def test_a_format_asked_for_alone_brings_no_self_test_of_others():
    checks = {r["check"] for r in gate.verify("cuda", formats=["tq4"])}
    assert "self_test" not in checks and "row" in checks


def test_every_public_head_dim_is_covered_where_a_format_takes_it():
    for fmt in all_formats():
        wanted = {n for n in cases.HEAD_DIMS if fmt.refuses(n, "key") is None}
        shown = {
            plan.cases[0].head_dim
            for check in gate.checks_of(fmt)
            for plan in gate.plans([check], [fmt])
        }
        assert shown == wanted, fmt.name


def test_rows_of_one_to_eight_blocks_and_odd_numbers_of_tokens_are_covered():
    for name, block in (("tbq3_0", 32), ("q4_polar", 128), ("tq4", 32)):
        plans = list(gate.plans(["multi_block"], [f for f in all_formats() if f.name == name]))
        assert [p.cases[0].head_dim // block for p in plans] == [1, 2, 3, 4, 8]
        tokens = {c.n_kv for p in plans for c in p.cases}
        assert tokens == {1, 2, 3, 4, 8, 61}


@pytest.mark.parametrize("check", ["self_test", "multi_block", "cache", "dispatch", "cross"])
def test_the_checks_of_routes_and_shapes_pass_on_the_reference(check):
    results = gate.verify("reference", [check], formats=["f16", "tbq4_0", "tq4"])
    assert [r["reason"] for r in results if r["outcome"] not in ("PASSED", "NOT_RUN")] == []
    assert any(r["outcome"] == "PASSED" for r in results) or check == "cross"
    assert all(r["outputs"] == r["outputs_expected"] for r in results)


def test_evidence_says_which_projection_and_codebook_made_the_bytes():
    e = gate.run(Case("scores", "qjl1_256", n_kv=9), REFERENCE)
    assert e.subject["projection_id"] == all_formats_by_name()["qjl1_256"].projection_id
    mixed = gate.run(Case("attention", "qjl1_256", "tbq3_0", n_kv=9), REFERENCE)
    assert mixed.subject["projection_id"]
    assert "projection_id" not in gate.run(Case("scores", "tq4", n_kv=9), REFERENCE).subject


def all_formats_by_name():
    return {f.name: f for f in all_formats()}


# ---- nothing but a pass reads as one -------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bound_that_is_no_number_fails(bad, monkeypatch):
    monkeypatch.setitem(rules.TOLERANCES, ("scores", "tq4"), rules.Bound(bad, 0.0))
    e = gate.run(Case("scores", "tq4", n_kv=9), REFERENCE)
    assert e.outcome is Outcome.FAILED and "parity" in e.reason


def test_a_reference_that_is_no_number_fails(monkeypatch):
    def rows(self, fmt, blocks, scale):
        return np.full((*blocks.shape[:-1], fmt.row_values(blocks.shape[-1])), np.nan)

    monkeypatch.setattr(rules.Reference, "rows", rows)
    e = gate.run(Case("scores", "tq4", n_kv=9), REFERENCE)
    assert e.outcome is Outcome.FAILED and "finite" in e.reason


def test_a_truth_that_is_no_number_fails(monkeypatch):
    monkeypatch.setitem(rules.TRUTH, "tq4", (np.nan, np.nan))
    e = gate.run(Case("scores", "tq4", n_kv=1024, n_q=8), REFERENCE)
    assert e.outcome is Outcome.FAILED and "truth" in e.reason
    e = gate.run(Case("decode", "tq4", n_kv=1024), REFERENCE)
    assert e.outcome is Outcome.FAILED and "truth" in e.reason


def test_examinations_that_compared_nothing_or_too_little_fail():
    empty = rules.Examination(Case("scores", "tq4"))
    assert gate._fold([])[0] is Outcome.FAILED
    assert gate._fold([empty])[0] is Outcome.FAILED
    short = rules.Examination(Case("scores", "tq4"), outputs=7, expected=8)
    short.note("parity", True, "fine")
    outcome, reason, _ = gate._fold([short])
    assert outcome is Outcome.FAILED and "only 7 of 8 outputs" in reason


@pytest.mark.parametrize("device", ["llvmpipe (LLVM 15)", "Lavapipe", "SwiftShader Device"])
def test_software_devices_are_diagnostic_and_exit_3(device):
    e = gate.run(Case("scores", "tq4", n_kv=9), REFERENCE, Environment(device=device))
    assert e.outcome is Outcome.DIAGNOSTIC
    assert exit_code(gate.outcome_of([gate.row(e)])) == 3
    driver = Environment(device="GPU 0", driver=f"Mesa {device}")
    assert gate.run(Case("scores", "tq4", n_kv=9), REFERENCE, driver).outcome == "DIAGNOSTIC"


def test_optional_checks_that_cannot_run_leave_the_outcome_unless_asked_for():
    ran = {"outcome": "PASSED", "required": True}
    optional = {"outcome": "NOT_RUN", "required": False}
    assert gate.outcome_of([ran, optional]) is Outcome.PASSED
    assert gate.outcome_of([optional]) is Outcome.FAILED
    assert gate.outcome_of([ran, optional | {"required": True}]) is Outcome.NOT_RUN
    assert gate.outcome_of([ran, optional | {"outcome": "FAILED"}]) is Outcome.FAILED
    assert gate.outcome_of([]) is Outcome.FAILED


@pytest.mark.parametrize("spoil", ["edit", "cut", "twice"])
def test_spoiled_evidence_lines_never_read_as_passed(spoil, tmp_path):
    path = tmp_path / "e.jsonl"
    Store(path).append(gate.run(Case("scores", "tq4", n_kv=9), REFERENCE))
    line = path.read_text()
    if spoil == "edit":
        path.write_text(line.replace('"nmse":', '"nmse":1', 1))
    elif spoil == "cut":
        path.write_text(line[: len(line) // 2])
    else:
        path.write_text(line + line.replace('"head_dim":128', '"head_dim":256', 1))
    outcomes = [e.outcome for e in Store(path).read()]
    assert outcomes[-1] is Outcome.NOT_RUN
    assert len(outcomes) == (2 if spoil == "twice" else 1)


def test_a_summary_counts_checks_and_outputs_apart():
    results = gate.verify("reference", ["turbo4", "append"], formats=["tbq4_0"])
    said = gate.summary(results)
    assert said["eight"] == {"passed": 1, "of": 8}
    assert said["checks"] == {"passed": 2, "of": 2}
    assert said["outputs"] == said["outputs_expected"] == sum(r["outputs"] for r in results) > 0
    assert {(r["check"], r["backend"]) for r in said["table"]} == {
        ("turbo4", "reference"), ("append", "reference"),
    }  # fmt: skip
    assert said["not_passed"] == []


def test_a_summary_names_what_did_not_pass_worst_first():
    base = {"backend": "cpu", "variant": "v", "format": "tq4", "head_dim": 64, "outputs": 1,
            "outputs_expected": 1, "worst_error": None, "bound": None}  # fmt: skip
    results = [
        base | {"check": "captured", "outcome": "NOT_RUN", "reason": "no model"},
        base | {"check": "row", "outcome": "FAILED", "reason": "parity: bad"},
        base | {"check": "row", "outcome": "FAILED", "reason": "parity: bad", "head_dim": 96},
    ]
    lines = gate.summary(results)["not_passed"]
    assert lines == [
        "FAILED: row cpu v tq4 64 and 1 more: parity: bad",
        "NOT_RUN: captured cpu v tq4 64: no model",
    ]


def test_kernels_of_a_source_tree_are_not_shipped(monkeypatch):
    assert gate.binary()[0] in ("source", "shipped")
    monkeypatch.setattr(gate, "binary", lambda: ("changed", "k.so is not the file"))
    cpu = mutants.Broken(REFERENCE, name="cpu")
    (e,) = gate._shipped_records(cpu, [], lambda _: None, False)
    assert e.outcome is Outcome.FAILED and "not the file" in e.reason
    monkeypatch.setattr(gate, "binary", lambda: ("source", "not an installed wheel"))
    (e,) = gate._shipped_records(cpu, [], lambda _: None, False)
    assert e.outcome is Outcome.NOT_RUN and not gate.row(e)["required"]


def test_a_format_that_is_named_twice_runs_once():
    once, twice = (gate.verify(["reference"], ["row"], formats=names) for names in (
        ["f16"], ["f16", "f16"]
    ))  # fmt: skip
    assert len(twice) == len(once) > 0
