"""decide() follows the policy, says why, and never lets unproven figures count."""

import random
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from kvproof.decision import (
    BASELINE,
    SECTIONS,
    Candidate,
    Policy,
    decide,
    policy_fields,
)
from kvproof.errors import RequestError
from kvproof.evidence import Environment, Evidence, GatePass, Outcome

DEFAULT_TOML = Path(__file__).parents[2] / "src/kvproof/policies/default.toml"
HERE = Environment(device="test cpu", isa="avx2", load_average=0.1, versions={"kvproof": "0"})
DIGEST = "ab" * 32
MIB = 2**20
SMALL = Policy(candidates=("q8_0/q8_0", "q8_0/tq4", "tq4/tq4"), depths=(512,), tokens_min=500)


def record(kind, pair, metrics=None, *, outcome=Outcome.PASSED, reason=None, **more):
    digest, device = more.pop("digest", DIGEST), more.pop("device", HERE.device)
    c = Candidate.parse(pair)
    subject = {"kind": kind, "lane": "kv", "backend": "cpu", "model": "m" * 64, "model_name": "toy"}
    subject |= {"key": c.key, "value": c.value, **more}
    gates = ()
    if kind == "speed" and outcome is Outcome.PASSED:
        gates = (gate("f16", digest=digest).gate_pass(),)
    return Evidence(
        subject,
        outcome,
        metrics or {},
        replace(HERE, device=device),
        digest,
        "c0ffee",
        reason,
        "2026-01-01T00:00:00.000+00:00",
        "2026-01-01T00:00:01.000+00:00",
        gates,
    )


def gate(pair, **changes):
    return record("gate", pair, {"nmse": 1e-12}, **changes)


def size(pair, mib, context=8192):
    metrics = {"bytes": mib * MIB, "bytes_allocated": mib * MIB, "bytes_per_token": mib * 100.0}
    return record("bytes", pair, metrics, context=context)


def quality(pair, kld, *, half=0.001, same_top=0.97, delta=0.001, tokens=2048, **changes):
    metrics = {"tokens": tokens}
    for name, value, width in (
        ("kld", kld, half),
        ("same_top", same_top, 0.01),
        ("delta_nll", delta, 0.002),
    ):
        metrics |= {name: value, f"{name}_low": value - width, f"{name}_high": value + width}
    return record("quality", pair, metrics, **changes)


def speed(pair, ratio, *, half=0.02, depth=512, phase="tg", rounds=5, contended=0, **changes):
    metrics = {
        "ratio": ratio,
        "ratio_low": ratio - half,
        "ratio_high": ratio + half,
        "rounds": rounds,
        "tokens_per_second": 30.0 * ratio,
        "tokens_per_second_f16": 30.0,
        "contended": contended,
    }
    return record("speed", pair, metrics, phase=phase, depth=depth, **changes)


def proven(pair, mib, kld, ratio=1.05, **changes):
    """A pair with everything measured."""
    return [
        gate(pair),
        size(pair, mib),
        quality(pair, kld, **changes),
        speed(pair, ratio),
        speed(pair, ratio, phase="pp"),
    ]


BASE = [gate("f16"), size("f16", 100)]
GOOD = [
    *BASE,
    *proven("q8_0", 53, 0.0006),
    *proven("q8_0/tq4", 39, 0.008),
    *proven("tq4", 25, 0.17),
]


def status(decision, pair):
    return next(v.status for v in decision.verdicts if v.candidate == Candidate.parse(pair))


def test_the_smallest_cache_that_clears_every_bound_is_chosen():
    d = decide(GOOD, SMALL)
    assert d.chosen == Candidate("q8_0", "tq4")
    assert (d.lane, d.backend, d.device) == ("kv", "cpu", "test cpu")
    assert "100.0 to 39.0 MiB" in d.reason
    assert "KL divergence" in d.rejected["tq4/tq4"] and "0.02" in d.rejected["tq4/tq4"]
    assert "fewer bytes" in d.rejected["q8_0/q8_0"]
    assert status(d, "q8_0") == "accepted" and status(d, "tq4") == "rejected"
    ids = {e.id for e in GOOD}
    assert d.evidence and set(d.evidence) <= ids
    assert all(v.evidence and set(v.evidence) <= ids for v in d.verdicts)


def test_order_of_the_evidence_changes_nothing():
    expected = decide(GOOD, SMALL).as_dict()
    for seed in range(5):
        shuffled = random.Random(seed).sample(GOOD, len(GOOD))
        assert decide(shuffled, SMALL).as_dict() == expected


def test_without_evidence_stock_stays():
    d = decide([], SMALL)
    assert d.chosen == BASELINE
    assert d.reason.startswith("Keep stock (f16): nothing else was measured")
    assert set(d.rejected) == set(SMALL.candidates)


def test_stock_stays_when_nothing_clears_the_bounds():
    d = decide([*BASE, *proven("tq4", 25, 0.17), *proven("q8_0", 53, 0.0006, ratio=0.8)], SMALL)
    assert d.chosen == BASELINE
    assert d.reason == (
        "Keep stock (f16): of 3 candidates 2 missed a bound of the policy, 1 were not measured in "
        "full."
    )
    assert "runs at 0.80 [0.78, 0.82]x" in d.rejected["q8_0/q8_0"]
    assert d.flags["llama.cpp"] == "--cache-type-k f16 --cache-type-v f16 --flash-attn on"
    assert d.flags["vllm"] == "--kv-cache-dtype auto"


@pytest.mark.parametrize(
    ("change", "pair_status", "word"),
    [
        (lambda e: e.subject["kind"] == "gate", "not run", "no gate record"),
        (lambda e: e.subject["kind"] == "bytes", "not run", "Bytes at 8192"),
        (lambda e: e.subject["kind"] == "quality", "not run", "Quality not measured"),
        (lambda e: e.subject.get("phase") == "pp", "not run", "pp at depth 512 not measured"),
    ],
)
def test_a_missing_link_of_the_chain_is_no_pass(change, pair_status, word):
    chain = [e for e in proven("q8_0", 53, 0.0006) if not change(e)]
    d = decide([*BASE, *chain], SMALL)
    assert d.chosen == BASELINE
    assert status(d, "q8_0") == pair_status
    assert word in d.rejected["q8_0/q8_0"]


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.NOT_RUN, Outcome.DIAGNOSTIC])
def test_one_gate_record_that_did_not_pass_is_enough(outcome):
    bad = gate("q8_0", outcome=outcome, reason="row 3 is off", head_dim=512)
    d = decide([*BASE, *proven("q8_0", 53, 0.0006), bad], SMALL)
    assert d.chosen == BASELINE
    assert "row 3 is off" in d.rejected["q8_0/q8_0"]


def test_what_failed_is_told_apart_from_what_missed_a_bound():
    bad = gate("q8_0", outcome=Outcome.FAILED, reason="row 3 is off")
    unread = record("quality", "tq4", outcome=Outcome.FAILED, reason="the cache is not read")
    d = decide([*BASE, bad, *proven("tq4", 25, 0.1)[:2], unread], SMALL)
    assert status(d, "q8_0") == status(d, "tq4") == "failed"
    assert "2 failed a check" in d.reason
    assert "cache is not read" in d.rejected["tq4/tq4"]


def test_a_gate_record_taken_out_is_noticed():
    chain = proven("q8_0", 53, 0.0006)[1:]
    whole = [gate("q8_0", op=op, records=2) for op in ("encode", "attention")]
    assert decide([*BASE, *chain, *whole], SMALL).chosen == Candidate("q8_0", "q8_0")
    d = decide([*BASE, *chain, whole[0]], SMALL)
    assert d.chosen == BASELINE
    assert "1 of 2 gate records" in d.rejected["q8_0/q8_0"]


def test_a_whole_store_with_earlier_kernels_and_cut_gates_can_be_decided_on():
    old = replace(
        gate("q8_0", outcome=Outcome.FAILED, reason="old kernels", records=1, digest="cd" * 32),
        finished="2025-01-01T00:00:00.000+00:00",
    )
    cut = gate("q8_0", outcome=Outcome.NOT_RUN, reason="budget")
    whole = gate("q8_0", records=1)
    chain = [*BASE, *proven("q8_0", 53, 0.0006)[1:], old, cut]
    assert status(decide([*chain, whole], SMALL), "q8_0") == "chosen"
    assert status(decide(chain, SMALL), "q8_0") == "not run"


def test_many_long_reasons_are_cut():
    bad = [gate("q8_0", outcome=Outcome.FAILED, reason=f"{i} " * 400) for i in range(3)]
    reason = decide([*BASE, *bad], SMALL).rejected["q8_0/q8_0"]
    assert len(reason) < 300 and "and 2 more" in reason


@pytest.mark.parametrize("kind", ["quality", "speed"])
def test_figures_of_other_kernels_are_void(kind):
    chain = [
        replace(e, digest="cd" * 32, gates=tuple(GatePass(g.id, "cd" * 32) for g in e.gates))
        if e.subject["kind"] == kind
        else e
        for e in proven("q8_0", 53, 0.0006)
    ]
    d = decide([*BASE, *chain], SMALL)
    assert d.chosen == BASELINE
    assert "other kernels than the gate passed" in d.rejected["q8_0/q8_0"]


def test_a_baseline_without_a_passed_gate_supports_nothing():
    broken = gate("f16", outcome=Outcome.FAILED, reason="NaN")
    for base in ([size("f16", 100)], [broken, size("f16", 100)]):
        d = decide([*base, *proven("q8_0", 53, 0.0006)], SMALL)
        assert d.chosen == BASELINE
        assert "baseline has no passed gate" in d.rejected["q8_0/q8_0"]


def test_an_interval_across_the_bound_is_inconclusive_and_says_what_would_settle_it():
    chain = proven("q8_0", 53, 0.015, half=0.01, tokens=1000)
    d = decide([*BASE, *chain], SMALL)
    assert status(d, "q8_0") == "inconclusive"
    # The half width has to shrink from 0.010 to 0.005: four times the tokens.
    assert "about 4,000 tokens would decide it (1,000 so far)" in d.rejected["q8_0/q8_0"]
    assert "1 need more data" in d.reason


def test_all_open_questions_are_named_together():
    chain = proven("q8_0", 53, 0.015, half=0.01)[:3]
    chain += [speed("q8_0", 0.96, half=0.03), speed("q8_0", 0.91, half=0.03, phase="pp")]
    reason = decide([*BASE, *chain], SMALL).rejected["q8_0/q8_0"]
    assert "KL divergence" in reason and "tg at depth" in reason and "pp at depth" in reason
    assert "rounds would decide it" in reason


def test_a_value_on_the_bound_is_never_promised_a_decision():
    chain = proven("q8_0", 53, SMALL.kld_max, half=0.004)
    assert "too close to the bound" in decide([*BASE, *chain], SMALL).rejected["q8_0/q8_0"]


def test_same_top_and_loss_have_bounds_of_their_own():
    low = decide([*BASE, *proven("q8_0", 53, 0.001, same_top=0.8)], SMALL)
    assert "same top token 80.0%" in low.rejected["q8_0/q8_0"]
    loss = decide([*BASE, *proven("q8_0", 53, 0.001, delta=0.3)], SMALL)
    assert "loss change" in loss.rejected["q8_0/q8_0"]


def test_too_few_tokens_decide_nothing():
    d = decide([*BASE, *proven("q8_0", 53, 0.001, tokens=100)], SMALL)
    assert status(d, "q8_0") == "inconclusive"
    assert "only 100 of the 500 tokens" in d.rejected["q8_0/q8_0"]


def test_more_tokens_replace_fewer_and_a_run_replaces_a_gap():
    gap = record("quality", "q8_0", outcome=Outcome.NOT_RUN, reason="budget")
    first = quality("q8_0", 0.015, half=0.01, tokens=512)
    d = decide([*BASE, gap, first, *proven("q8_0", 53, 0.001, tokens=2048)], SMALL)
    assert d.chosen == Candidate("q8_0", "q8_0")


def test_what_the_budget_left_out_is_said():
    chain = proven("q8_0", 53, 0.001)[:3]
    chain += [
        record("speed", "q8_0", outcome=Outcome.NOT_RUN, reason="budget", phase=p, depth=512)
        for p in ("pp", "tg")
    ]
    d = decide([*BASE, *chain], SMALL)
    assert status(d, "q8_0") == "not run"
    assert d.rejected["q8_0/q8_0"] == "pp at depth 512, tg at depth 512 not measured: budget."


def test_a_refusal_carries_its_reason():
    refusal = record(
        "candidate", "tq4", outcome=Outcome.REFUSED, reason="layer 3, key format tq4: head_dim 7"
    )
    d = decide([*GOOD, refusal], SMALL)
    assert status(d, "tq4") == "refused"
    assert "head_dim 7" in d.rejected["tq4/tq4"]


def test_a_saving_too_small_is_not_worth_a_change():
    d = decide([*BASE, *proven("q8_0", 95, 0.0006)], SMALL)
    assert "Saves 5.0%" in d.rejected["q8_0/q8_0"]


def test_contended_rounds_count_unless_the_policy_says_no():
    chain = [*proven("q8_0", 53, 0.0006)[:3], speed("q8_0", 1.1, contended=1)]
    chain.append(speed("q8_0", 1.1, contended=1, phase="pp"))
    assert decide([*BASE, *chain], SMALL).chosen == Candidate("q8_0", "q8_0")
    strict = replace(SMALL, allow_contended=False)
    d = decide([*BASE, *chain], strict)
    assert status(d, "q8_0") == "inconclusive" and "busy" in d.rejected["q8_0/q8_0"]


def test_objectives():
    chain = [
        *BASE,
        *proven("q8_0", 53, 0.0006, ratio=1.3),
        *proven("q8_0/tq4", 39, 0.008, ratio=1.0),
    ]
    assert decide(chain, SMALL).chosen == Candidate("q8_0", "tq4")
    fast = decide(chain, replace(SMALL, objective="speed"))
    assert fast.chosen == Candidate("q8_0", "q8_0")
    assert "Not faster than f16" in fast.rejected["q8_0/tq4"]
    long = [e for e in chain if not (e.subject["kind"] == "bytes" and e.subject["value"] == "tq4")]
    tail = record(
        "bytes",
        "q8_0/tq4",
        {"bytes": 60.0 * MIB, "bytes_allocated": 60.0 * MIB, "bytes_per_token": 10.0},
        context=8192,
    )
    assert decide([*long, tail], SMALL).chosen == Candidate("q8_0", "q8_0")
    longest = decide([*long, tail], replace(SMALL, objective="longest-context"))
    assert longest.chosen == Candidate("q8_0", "tq4")


def test_a_decision_speaks_for_one_device_and_model():
    with pytest.raises(RequestError, match="2 devices"):
        decide([*GOOD, gate("q8_0", device="another")], SMALL)
    with pytest.raises(RequestError, match="2 models"):
        decide([*GOOD, gate("q8_0", model="n" * 64)], SMALL)


def test_flags_are_pasteable_and_honest_about_what_an_engine_lacks():
    flags = decide(GOOD, SMALL).flags
    assert flags["kvproof"] == "--cache-type-k q8_0 --cache-type-v tq4"
    assert 'key="q8_0", value="tq4"' in flags["transformers"]
    assert flags["llama.cpp"].startswith("# stock llama.cpp has no cache type tq4")
    assert flags["llama.cpp"].endswith("--cache-type-k q8_0 --cache-type-v q8_0 --flash-attn on")
    assert flags["vllm"].startswith("# vLLM cannot be told q8_0/tq4")
    fp8 = decide([*BASE, *proven("fp8_e4m3", 50, 0.001)], SMALL).flags
    assert fp8["vllm"] == "--kv-cache-dtype fp8_e4m3 --calculate-kv-scales"


def test_default_toml_states_every_value_of_the_default_policy():
    assert Policy.load(DEFAULT_TOML) == Policy.load() == Policy()
    document = tomllib.loads(DEFAULT_TOML.read_text())
    stated = {k for s in SECTIONS for k in document[s]} | {"objective", "candidates"}
    assert stated == set(policy_fields())


def test_a_policy_file_may_hold_only_what_differs(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text('objective = "speed"\n[quality]\nkld_max = 1\n')
    p = Policy.load(path)
    assert (p.objective, p.kld_max, p.same_top_min) == ("speed", 1.0, Policy().same_top_min)
    assert Policy.from_dict(p.as_dict()) == p


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[quality]\nkdl_max = 1", ["unknown key quality.kdl_max", "known: kld_max"]),
        ("colour = 1", ["unknown key colour"]),
        ("[speed]\nfoo = 1\n[memory]\nbar = 2", ["speed.foo", "memory.bar"]),
        ('objective = "best"', ["objective 'best'", "memory, speed"]),
        ("[quality]\nkld_max = -1", ["kld_max", "positive"]),
        ("[quality]\nkld_max = nan", ["kld_max"]),
        ("[quality]\nsame_top_min = 95", ["same_top_min", "[0, 1)"]),
        ("[measure]\ndepths = [4096, 512]", ["ascend"]),
        ("[measure]\ndepths = []", ["depths"]),
        ("[measure]\nchunk = 1024", ["no shorter than chunk"]),
        ("[measure]\nwindows_max = 1", ["tokens_min 1000 cannot be reached"]),
        ("[measure]\nwindow = 100", ["multiple of 32", "found 100"]),
        ('candidates = ["q8_0", "q8_0/q8_0"]', ["named twice: q8_0/q8_0"]),
        ("candidates = []", ["candidates must be a list"]),
        ('candidates = "q8_0"', ["candidates must be a list"]),
        ("[speed]\nallow_contended = 1", ["allow_contended must be a bool"]),
        ("schema_version = 2", ["schema_version 2"]),
        ("objective = ", ["not a TOML file"]),
    ],
)
def test_bad_policies_are_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(RequestError) as error:
        Policy.load(path)
    message = str(error.value)
    assert "\n" not in message.removesuffix("\n")
    assert all(w in message for w in words), message


def test_an_absent_policy_file_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"absent\.toml: cannot be read"):
        Policy.load(tmp_path / "absent.toml")
