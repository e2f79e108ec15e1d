"""The gate on the reference backend: what passes, what is refused, what never counts as a pass."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvproof import cases, gate, mutants, rules
from kvproof.backends.reference import ReferenceBackend
from kvproof.cases import Case
from kvproof.errors import RequestError
from kvproof.evidence import Environment, Outcome, Store
from kvproof.formats import all_formats

SHARED = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
REFERENCE = ReferenceBackend()
FIELDS = {
    "check", "variant", "backend", "format", "head_dim", "fixture", "outcome", "reason",
    "worst_error", "bound", "outputs",
}  # fmt: skip


@pytest.mark.parametrize("check", ["turbo3", "turbo4", "row"])
def test_a_check_passes_and_says_so_in_the_documented_fields(check):
    results = gate.verify("reference", checks=[check])
    assert {r["outcome"] for r in results} == {"PASSED"}, [r["reason"] for r in results]
    assert gate.outcome_of(results) is Outcome.PASSED
    assert {r["variant"] for r in results} >= {"encode", "decode", "scores", "truth"}
    for r in results:
        assert set(r) >= FIELDS
        assert r["check"] == check and r["backend"] == "reference"
        assert r["reason"] is None and r["outputs"] > 0
        assert r["worst_error"] <= r["bound"]
    assert json.loads(json.dumps(results)) == results


def test_published_scores_and_normals_are_reproduced():
    first = [-1.2275401, 0.6004496, -1.1063669, -1.0806532, 0.3998436, 0.8242239]
    np.testing.assert_allclose(gate.fixture_normals(6), first, rtol=2e-7)
    for check in ("turbo3", "turbo4"):
        got, want = gate._published(check)
        np.testing.assert_allclose(got[0], want[0], rtol=2e-7)
        np.testing.assert_allclose(got[1], want[1], rtol=2e-5)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"public fixtures are not at {SHARED}")
def test_public_fixtures_are_reproduced_by_the_reference():
    results = gate.verify("reference", ["turbo3", "turbo4"], SHARED, formats=["f16"])
    of = {r["fixture"]: r for r in results}
    assert set(of) == {"published", "turbo3.json", "turbo4.json"}
    for name in ("turbo3.json", "turbo4.json"):
        assert of[name]["outcome"] == "PASSED" and of[name]["outputs"] == 8
        assert of[name]["variant"] == "fixture"


def fixture(kernel="turbo4", **changes):
    """A fixture file's document, made here from random rows."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal(128).astype(np.float32)
    fmt = next(f for f in all_formats() if f.name == "tbq4_0")
    blocks = fmt.encode(rng.standard_normal((8, 128)))
    document = {
        "kernel": kernel, "head_dim": 128, "n_kv": 8, "block_bytes": 18, "blocks_per_kv": 4,
        "q": q.tolist(), "k_blocks": blocks.ravel().tolist(),
        "expected_scores": [float(f"{s:.7g}") for s in fmt.decode_rotated(blocks) @ q],
    }  # fmt: skip
    return document | changes


def test_a_fixture_of_any_name_is_found_by_its_kernel(tmp_path):
    (tmp_path / "anything.json").write_text(json.dumps(fixture()))
    (tmp_path / "codebook.json").write_text('{"codebook": []}')
    results = gate.verify("reference", ["turbo4"], tmp_path, formats=["f16"])
    assert [(r["fixture"], r["outcome"]) for r in results] == [
        ("published", "PASSED"), ("anything.json", "PASSED"),
    ]  # fmt: skip


def test_a_wrong_expected_score_fails(tmp_path):
    document = fixture()
    document["expected_scores"][3] *= 1.0001
    (tmp_path / "turbo4.json").write_text(json.dumps(document))
    results = gate.verify("reference", ["turbo4"], tmp_path, formats=["f16"])
    assert results[1]["outcome"] == "FAILED" and "parity" in results[1]["reason"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": [0.0] * 127}, "q is"),
        ({"k_blocks": [0] * 17}, "k_blocks is"),
        ({"k_blocks": [256] * 576}, "bytes from 0 to 255"),
        ({"block_bytes": 14}, "block_bytes is 14"),
        ({"expected_scores": [float("nan")] * 8}, "finite"),
        ({"expected_scores": []}, "expected_scores is"),
        ({"head_dim": None}, "lacks or garbles"),
        ({"n_kv": 0, "k_blocks": [], "expected_scores": []}, "at least one key"),
    ],
)
def test_an_inconsistent_fixture_is_a_wrong_request(tmp_path, change, says):
    (tmp_path / "bad.json").write_text(json.dumps(fixture(**change)))
    with pytest.raises(RequestError, match=says) as error:
        gate.verify("reference", ["turbo4"], tmp_path)
    assert "bad.json" in str(error.value)


def test_unreadable_and_absent_fixtures(tmp_path):
    with pytest.raises(RequestError, match="not a folder"):
        gate.verify("reference", ["turbo4"], tmp_path / "none")
    results = gate.verify("reference", ["turbo4"], tmp_path, formats=["f16"])
    assert [r["outcome"] for r in results] == ["PASSED", "FAILED"]
    assert "holds no turbo4 fixture" in results[1]["reason"]
    (tmp_path / "bad.json").write_text("<html>")
    with pytest.raises(RequestError, match="cannot be read as JSON"):
        gate.verify("reference", ["turbo4"], tmp_path)


def test_names_that_are_wrong_are_refused():
    with pytest.raises(RequestError, match="--check turbo5: unknown; choose from turbo3"):
        gate.verify("reference", ["turbo5"])
    with pytest.raises(RequestError, match="unknown format 'tq6'"):
        gate.verify("reference", formats=["tq6"])
    with pytest.raises(RequestError, match="unknown backend"):
        gate.verify("abacus", ["turbo3"])


def test_checks_of_later_formats_are_not_run_when_asked_by_name():
    results = gate.verify("reference", ["qjl", "polar_preht"])
    assert [r["outcome"] for r in results] == ["NOT_RUN"] * 2
    assert all("not in this version" in r["reason"] for r in results)
    assert not any(r["check"] in gate.LATER for r in gate.verify("reference", ["causal"]))


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


def test_every_format_has_a_check_a_truth_and_tolerances():
    names = {f.name for f in all_formats()}
    assert {gate.check_of(f) for f in all_formats()} == set(gate.FORMAT_CHECKS)
    assert set(rules.TRUTH) == names
    assert {f for _, f in rules.TOLERANCES} == names
    assert set(rules.TOLERANCES) == {
        (op, f) for op in ("decode", "scores", "attention", "sharp") for f in names
    }
    assert {plan.check for plan in gate.plans(gate.CHECKS, all_formats())} | {"mutants"} == set(
        gate.CHECKS
    )


def test_every_mutant_is_caught_on_the_reference():
    records = gate.mutant_evidence(REFERENCE)
    assert len(records) == len(mutants.MUTANTS) > 60
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
    assert exam.rules_failed == {"parity"} and not noisy.caught(exam)


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


def test_a_format_asked_for_alone_brings_no_published_scores_of_others():
    def published(fmt):
        return [
            r["check"] for r in gate.verify("cuda", formats=[fmt]) if r["fixture"] == "published"
        ]

    assert published("tq4") == []
    assert published("tbq4_0") == ["turbo4"]
