"""The KV lane on a toy model: real caches and formats, arithmetic small enough to follow."""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvproof import backends
from kvproof.cache import KVCache
from kvproof.conditioner import Conditioner
from kvproof.decision import BASELINE, Candidate, Policy
from kvproof.errors import Refused, RequestError
from kvproof.evidence import Environment, Evidence, Outcome, Store
from kvproof.geometry import Geometry, LayerGeometry, Source
from kvproof.lanes import kv

torch = pytest.importorskip("torch", reason="the lane measures torch models")

VOCAB = 96
Q8, TQ4, Q4 = Candidate("q8_0", "q8_0"), Candidate("tq4", "tq4"), Candidate("q4_0", "q4_0")
POLICY = Policy(
    candidates=("q8_0", "tq4"),
    window=256,
    chunk=64,
    windows_max=4,
    tokens_min=512,
    depths=(40,),
    prefill_tokens=8,
    decode_tokens=3,
    rounds=3,
    context=100,
)


def shape(head_dims=(32, 32, 32)):
    layers = tuple(
        LayerGeometry(i, 2, 1, d, d, 24 if i == 1 else None, None if i < 2 else 0)
        for i, d in enumerate(head_dims)
    )
    return Geometry(
        architecture="toy",
        layers=layers,
        context_length=1024,
        hidden_size=32,
        vocab_size=VOCAB,
        attention_scale=None,
        source=Source(Path("toy"), "config", {}, {}),
    )


@dataclass
class ToyCache:
    kv: KVCache


class Toy:
    """Three attention layers (one windowed, one sharing); knows that id n is followed by 5n + 1."""

    def __init__(self, sharpness=4.0, reads_cache=True):
        self.geometry = shape()
        self.sharpness, self.reads_cache = sharpness, reads_cache
        rng = np.random.default_rng(3)
        self.table = rng.standard_normal((VOCAB, 2, 32), dtype=np.float32)
        self.out = rng.standard_normal((64, VOCAB), dtype=np.float32) * 0.1
        self.forwards = 0

    def new_cache(self, key="f16", value="f16", backend="cpu", **options):
        return ToyCache(KVCache(self.geometry, key=key, value=value, backend=backend, **options))

    def forward(self, ids, cache):
        self.forwards += 1
        x = self.table[np.asarray(ids)]
        total = np.zeros((len(ids), 64), np.float32)
        for layer in self.geometry.layers:
            live = cache.kv.layer(layer.index)
            if layer.shares_kv_with is None:
                live.append(x[:, :1], x[:, 1:])
            if self.reads_cache:
                total += live.attention(x).reshape(len(ids), 64)
        cache.kv.evict()
        logits = total @ self.out
        logits[np.arange(len(ids)), (5 * np.asarray(ids) + 1) % VOCAB] += self.sharpness
        return torch.from_numpy(logits)

    def prefill(self, ids, cache):
        return self.forward(ids, cache)[-1]


def text(n, seed=0):
    """Ids that follow the toy's rule nine times in ten."""
    rng = np.random.default_rng(seed)
    ids = [1]
    for _ in range(n - 1):
        ids.append((5 * ids[-1] + 1) % VOCAB if rng.random() < 0.9 else int(rng.integers(VOCAB)))
    return ids


ABOUT = kv.About("reference", "ab" * 32, "m" * 64, "toy", Environment("test", threads=1))
WINDOWS = kv.window_ids(text(2600), [], POLICY)


def measure(model, pairs=(Q8, TQ4), policy=POLICY, **more):
    return list(kv.measure_quality(model, WINDOWS, pairs, about=ABOUT, policy=policy, **more))


def summaries(records):
    return {kv._pair_of(e): e for e in records if e.subject["kind"] == "quality"}


def test_candidates_start_with_the_baseline_and_name_refused_layers():
    found = kv.candidates(shape((32, 36, 36)), POLICY, backends.get("reference"))
    assert next(iter(found)) == BASELINE
    assert found[BASELINE] is None
    assert "layer 1, key format q8_0" in found[Q8] and "value format q8_0" in found[Q8]
    assert all(
        why is None for why in kv.candidates(shape(), POLICY, backends.get("reference")).values()
    )


def test_an_unknown_format_of_the_policy_is_named():
    with pytest.raises(RequestError, match="q8_1"):
        kv.candidates(shape(), replace(POLICY, candidates=("q8_1",)), backends.get("reference"))


def test_windows_never_overlap_and_a_longer_run_keeps_those_of_a_shorter():
    ids = list(range(3000))
    few = kv.window_ids(ids, [7], replace(POLICY, windows_max=2))
    many = kv.window_ids(ids, [7], POLICY)
    assert many[:2] == few
    assert all(w[0] == 7 and len(w) == POLICY.window + 1 for w in many)
    used = [i for w in many for i in w[1:]]
    assert len(used) == len(set(used))


def test_a_short_text_says_how_much_is_needed():
    with pytest.raises(RequestError, match="has 10 tokens and one window needs 257"):
        kv.window_ids(text(10), [], POLICY)


def test_the_prefix_of_the_tokenizer_is_found():
    assert kv.bos_prefix(lambda s: [2, *s.encode()]) == [2]
    assert kv.bos_prefix(lambda s: list(s.encode())) == []


def test_quality_equals_what_whole_logits_give():
    model, ids = Toy(), WINDOWS[0]
    figures, noise = kv.compare_window(
        model, ids, [TQ4], backend="reference", chunk=POLICY.chunk, floor=True
    )
    logs = []
    for pair in (BASELINE, TQ4):
        logits = model.forward(ids[:-1], model.new_cache(pair.key, pair.value, "reference"))
        logs.append(torch.log_softmax(logits.double(), dim=-1).numpy())
    p, q = logs
    got = figures[TQ4]
    np.testing.assert_allclose(got.kld, (np.exp(p) * (p - q)).sum(-1), atol=1e-6)
    np.testing.assert_array_equal(got.same_top, p.argmax(-1) == q.argmax(-1))
    at = (np.arange(len(ids) - 1), ids[1:])
    np.testing.assert_allclose(got.delta_nll, p[at] - q[at], atol=1e-5)
    np.testing.assert_allclose(got.nll, -p[at], atol=1e-5)
    assert abs(noise.kld).max() < 1e-5 < got.kld.mean()


def test_records_hold_intervals_quantiles_and_the_poison_check():
    found = summaries(measure(Toy()))
    q8, tq4 = found[Q8].metrics, found[TQ4].metrics
    assert q8["kld"] < tq4["kld"]
    for m in (q8, tq4):
        assert m["kld_low"] <= m["kld"] <= m["kld_high"]
        assert m["kld_median"] <= m["kld_p99"] * 1.08 <= m["kld_max"] * 1.16
        assert m["poison_key"] > 0 and m["poison_value"] > 0
        assert m["kld_floor"] < 1e-6
        assert m["tokens"] >= POLICY.tokens_min
    assert all(e.outcome is Outcome.PASSED for e in found.values())


def test_a_cache_that_is_not_read_fails():
    record = summaries(measure(Toy(reads_cache=False), [Q8]))[Q8]
    assert record.outcome is Outcome.FAILED
    assert "key and value rows left the logits as they were" in record.reason


def test_a_baseline_that_knows_nothing_is_refused():
    with pytest.raises(Refused, match=r"blind guessing gives 4\.56"):
        measure(Toy(sharpness=0.0))


def test_logits_that_are_not_finite_fail_the_candidate_only():
    class Broken(Toy):
        def forward(self, ids, cache):
            logits = super().forward(ids, cache)
            if cache.kv.key == "tq4" and cache.kv.length > 100:
                logits[-1, 5] = math.nan
            return logits

    found = summaries(measure(Broken()))
    assert found[TQ4].outcome is Outcome.FAILED and "not finite" in found[TQ4].reason
    assert found[Q8].outcome is Outcome.PASSED


def test_a_baseline_that_is_not_finite_is_refused():
    class Broken(Toy):
        def forward(self, ids, cache):
            return super().forward(ids, cache) * (math.nan if cache.kv.key == "f16" else 1)

    with pytest.raises(Refused, match="f16 baseline gives logits that are not finite"):
        measure(Broken())


def test_settled_candidates_stop_early_and_open_ones_go_on():
    # q8_0 is clear after the tokens that the policy asks for; a bound amid tq4's figures is not.
    kld = summaries(measure(Toy(), stop_early=False))[TQ4].metrics["kld"]
    records = measure(Toy(), policy=replace(POLICY, kld_max=kld, same_top_min=0.0, delta_nll_max=1))
    count = {p: e.subject["windows"] for p, e in summaries(records).items()}
    assert count == {Q8: 2, TQ4: 4}


def test_a_second_run_measures_only_what_is_missing():
    first = measure(Toy())
    model = Toy()
    again = measure(model, done=first)
    assert model.forwards == 0
    assert [e.metrics for e in again] == [
        e.metrics for e in first if e.subject["kind"] == "quality"
    ]
    windows = [e for e in first if e.subject["kind"] == "quality-window"]
    half = measure(Toy(), done=windows[:2])
    fresh = [e for e in half if e.subject["kind"] == "quality-window"]
    assert {(e.subject["index"], kv._pair_of(e)) for e in fresh} == {
        (e.subject["index"], kv._pair_of(e)) for e in windows[2:]
    }
    got, want = summaries(half), summaries(first)
    assert all(got[p].metrics["kld"] == want[p].metrics["kld"] for p in want)


@pytest.mark.parametrize("change", [{"digest": "cd" * 32}, {"model": "n" * 64}])
def test_records_of_other_kernels_or_models_are_not_reused(change):
    first = measure(Toy(), [Q8])
    model = Toy()
    about = replace(ABOUT, **change)
    list(kv.measure_quality(model, WINDOWS, [Q8], about=about, policy=POLICY, done=first))
    assert model.forwards > 0


def test_a_spent_budget_is_said():
    records = measure(Toy(), deadline=time.monotonic() - 1)
    assert [e.outcome for e in records] == [Outcome.NOT_RUN, Outcome.NOT_RUN]
    assert all("budget" in e.reason for e in records)


def test_the_last_candidates_give_way_when_a_window_would_run_late(monkeypatch):
    class Ticking(Toy):
        def forward(self, ids, cache):
            clock["t"] += 1.0
            return super().forward(ids, cache)

    clock = {"t": 0.0}
    monkeypatch.setattr(kv.time, "monotonic", lambda: clock["t"])
    # Four chunks of one second an arm: three arms take 12 s, two take 9 s after the first chunk.
    for deadline, pairs in ((12.0, {Q8, TQ4}), (9.5, {Q8}), (5.0, set())):
        clock["t"] = 0.0
        figures, _ = kv.compare_window(
            Ticking(), WINDOWS[0], [Q8, TQ4], backend="reference", chunk=64, floor=False,
            deadline=deadline,
        )  # fmt: skip
        assert set(figures) == pairs
        assert clock["t"] <= deadline


def gates():
    record = Evidence({"kind": "gate"}, Outcome.PASSED, {}, ABOUT.environment, ABOUT.digest, "c")
    return {p: (record.gate_pass(),) for p in (Q8, TQ4)}


def time_all(model, **more):
    return list(
        kv.measure_speed(model, [Q8, TQ4], about=ABOUT, policy=POLICY, gates=gates(), **more)
    )


def test_speed_has_every_phase_with_ratio_kernels_and_bytes():
    records = time_all(Toy())
    assert {(kv._pair_of(e), e.subject["phase"], e.subject["depth"]) for e in records} == {
        (p, phase, 40) for p in (Q8, TQ4) for phase in ("pp", "tg")
    }
    for e in records:
        m = e.metrics
        assert e.outcome is Outcome.PASSED
        assert m["ratio_low"] <= m["ratio"] <= m["ratio_high"]
        assert m["tokens_per_second"] > 0 and m["attention_share"] > 0
        assert kv._pair_of(e).key in e.subject["kernels"]
        assert e.subject["kernels"].startswith("layers 0-2: ")
    assert time_all(Toy(), done=records) == []


def test_a_speed_cannot_exist_without_a_passed_gate():
    empty = {p: () for p in (Q8, TQ4)}
    with pytest.raises(ValueError, match="needs a PASSED gate"):
        list(kv.measure_speed(Toy(), [Q8], about=ABOUT, policy=POLICY, gates=empty))


def test_speeds_that_the_budget_leaves_out_are_not_run():
    records = time_all(Toy(), deadline=time.monotonic() - 1)
    assert len(records) == 4
    assert {e.outcome for e in records} == {Outcome.NOT_RUN}


def test_the_ratio_is_candidate_speed_over_baseline_speed(monkeypatch):
    class Delayed(Toy):
        def forward(self, ids, cache):
            clock["t"] += 2.0 if cache.kv.key == "f16" else 1.0
            return super().forward(ids, cache)

    clock = {"t": 0.0}
    monkeypatch.setattr(kv.time, "perf_counter", lambda: clock["t"])
    e = next(kv.measure_speed(Delayed(), [Q8], about=ABOUT, policy=POLICY, gates=gates()))
    assert (e.metrics["ratio_low"], e.metrics["ratio"], e.metrics["ratio_high"]) == (2, 2, 2)
    assert e.metrics["tokens_per_second"] == pytest.approx(2 * e.metrics["tokens_per_second_f16"])


def test_rounds_go_on_while_the_interval_holds_the_bound(monkeypatch):
    class Uneven(Toy):
        def forward(self, ids, cache):
            turn[cache.kv.key] = turn.get(cache.kv.key, 0) + 1
            slow = cache.kv.key == "q8_0" and turn["q8_0"] % 2
            clock["t"] += 1.5 if slow else 1.0
            return super().forward(ids, cache)

    clock, turn = {"t": 0.0}, {}
    monkeypatch.setattr(kv.time, "perf_counter", lambda: clock["t"])
    policy = replace(POLICY, decode_tokens=1, tg_ratio_min=0.9)
    e = next(kv.measure_speed(Uneven(), [Q8], about=ABOUT, policy=policy, gates=gates()))
    assert e.metrics["ratio_low"] < 0.9 <= e.metrics["ratio_high"]
    assert e.metrics["rounds"] == kv.ROUNDS_MORE * policy.rounds


def test_bytes_come_from_live_buffers_and_agree_with_the_geometry():
    be = backends.get("reference")
    records = list(
        kv.measure_bytes(shape(), [BASELINE, Q8, TQ4], backend=be, about=ABOUT, context=100)
    )
    for e in records:
        pair, m = kv._pair_of(e), e.metrics
        row = KVCache(shape(), pair.key, pair.value, be)
        kv.fill(shape(), row, 1)
        one = row.layer(0).used_bytes
        # Layer 0 holds 100 tokens, layer 1 the 23 that the next query of its window of 24 sees.
        assert m["bytes"] == one * (100 + 23)
        assert m["bytes_per_token"] == one
        assert m["bytes_allocated"] >= m["bytes"]
    assert records[1].metrics["bytes"] * 16 == records[0].metrics["bytes"] * 8.5


def test_layer_lists_read_well():
    assert kv._layers([3]) == "layer 3"
    assert kv._layers([0, 1, 2, 5]) == "layers 0-2, 5"


def test_the_default_text_is_english_and_long():
    words = kv.default_text().split()
    assert len(words) > 50_000 and words.count("the") > 1000


class Tokens:
    def encode(self, words):
        return text(3000) if len(words) > 1 else [1 if words == "a" else 2]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """decide_model on the toy; the gate answers for the pairs that `gate_of` names."""
    from kvproof import gate, geometry
    from kvproof.engines import transformers

    path = tmp_path / "toy.gguf"
    path.write_bytes(b"toy")
    model = Toy()
    model.tokenizer = Tokens()
    calls = {"gate": [], "outcome": Outcome.PASSED}

    def gate_evidence(pair, head_dims, backend, progress=None, *, heads, windows):
        calls["gate"].append(pair)
        assert (head_dims, heads, windows) == ([(32, 32)], [(2, 1)], [24])
        outcome = calls["outcome"] if pair[0] == "tq4" else Outcome.PASSED
        return [
            Evidence(
                {"kind": "gate", "op": op, "backend": backend.name},
                outcome,
                {},
                Environment.current(backend.environment()),
                backend.digest(),
                "c",
                None if outcome is Outcome.PASSED else "row 3 is off",
            )
            for op in ("encode", "attention")
        ]

    monkeypatch.setattr(geometry, "geometry", lambda _: shape())
    monkeypatch.setattr(transformers, "load", lambda _: model)
    monkeypatch.setattr(gate, "gate_evidence", gate_evidence)
    store = Store(tmp_path / "evidence.jsonl")

    def start(policy=EASY, **more):
        calls["gate"].clear()
        model.forwards = 0
        return kv.decide_model(path, policy, store, backend="reference", **more)

    return SimpleNamespace(start=start, calls=calls, model=model, store=store, path=path)


# Timings of the toy say nothing, so the speed bounds of this policy are out of reach.
EASY = replace(
    POLICY, kld_max=2.0, same_top_min=0.0, delta_nll_max=2.0, tg_ratio_min=0.01, pp_ratio_min=0.01
)


def test_a_run_ends_in_a_decision_and_the_next_one_only_reads(run):
    first = run.start()
    assert first.decision.chosen == TQ4, first.decision.reason
    assert run.calls["gate"] == [("f16", "f16"), ("q8_0", "q8_0"), ("tq4", "tq4")]
    before = run.store.path.read_bytes()
    again = run.start()
    assert run.calls["gate"] == [] and run.model.forwards == 0
    assert run.store.path.read_bytes() == before
    assert again.decision == first.decision


def test_a_stricter_policy_measures_on_from_what_is_there(run):
    run.start()
    stricter = replace(EASY, tokens_min=1024, depths=(40, 60))
    result = run.start(stricter)
    assert run.calls["gate"] == [] and run.model.forwards > 0
    quality = {kv._pair_of(e): e for e in result.evidence if e.subject["kind"] == "quality"}
    assert quality[Q8].metrics["tokens"] == 1024
    assert result.decision.chosen == TQ4


def test_a_pair_that_fails_the_gate_is_never_measured(run):
    run.calls["outcome"] = Outcome.FAILED
    result = run.start()
    assert result.decision.chosen == Q8
    assert "row 3 is off" in result.decision.rejected["tq4/tq4"]
    kinds = {e.subject["kind"] for e in result.evidence if kv._pair_of(e) == TQ4}
    assert kinds == {"gate"}


def test_without_time_stock_stays_and_every_gap_is_recorded(run):
    result = run.start(budget_seconds=1e-6)
    assert result.decision.chosen == BASELINE
    gaps = [e for e in result.evidence if e.outcome is Outcome.NOT_RUN]
    assert {kv._pair_of(e) for e in gaps} == {BASELINE, Q8, TQ4}
    assert all("budget" in e.reason for e in gaps)
    assert run.start().decision.chosen == TQ4


def test_an_edited_store_never_helps_a_pair(run):
    run.calls["outcome"] = Outcome.FAILED
    run.start()
    text = run.store.path.read_text()
    assert '"outcome":"FAILED"' in text
    edited = text.replace('"outcome":"FAILED"', '"outcome":"PASSED"')
    run.store.path.write_text(edited.replace('"reason":"row 3 is off"', '"reason":null'))
    result = run.start()
    assert ("tq4", "tq4") in run.calls["gate"]
    assert result.decision.chosen == Q8


def test_quality_that_misses_a_bound_spares_the_speed(run):
    result = run.start(replace(EASY, kld_max=1e-9))
    assert result.decision.chosen == BASELINE
    speeds = [e for e in result.evidence if e.subject["kind"] == "speed"]
    assert len(speeds) == 2 and {e.outcome for e in speeds} == {Outcome.NOT_RUN}
    assert all("quality" in e.reason for e in speeds)


def test_one_measurement_can_be_asked_for(run):
    strict = replace(EASY, kld_max=1e-9)
    result = run.start(strict, measures=("speed",))
    speeds = [e for e in result.evidence if e.subject["kind"] == "speed"]
    assert len(speeds) == 4 and {e.outcome for e in speeds} == {Outcome.PASSED}
    assert not [e for e in result.evidence if e.subject["kind"].startswith("quality")]
    result = run.start(measures=("quality",))
    assert not [e for e in result.evidence if e.subject["kind"] == "speed"]
    assert len([e for e in result.evidence if e.subject["kind"] == "quality"]) == 2


def test_a_baseline_that_the_model_refuses_is_said(run, monkeypatch):
    monkeypatch.setattr(kv, "candidates", lambda *_: {BASELINE: "layer 3, key format f16: no"})
    with pytest.raises(Refused, match="layer 3"):
        run.start()


def test_a_model_folder_is_told_apart_by_its_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = kv.model_digest(tmp_path)
    (tmp_path / "README.md").write_text("notes")
    assert kv.model_digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert kv.model_digest(tmp_path) != first


def test_a_treated_candidate_has_records_of_its_own_and_a_paired_effect():
    model = Toy()
    made = Conditioner.uncalibrated(model.geometry, 32)
    treated = kv.Treated.of(TQ4, made, 4)
    assert treated != TQ4 and treated.name == TQ4.name
    records = measure(model, (TQ4, treated), stop_early=False)
    windows = [e for e in records if e.subject["kind"] == "quality-window"]
    assert len(windows) == 2 * len(WINDOWS)
    marked = [e for e in windows if "sinks" in e.subject]
    assert len(marked) == len(WINDOWS)
    assert {e.subject["conditioner"] for e in marked} == {made.digest}
    assert {e.subject["sinks"] for e in marked} == {4}
    # Records of one are never taken for those of the other.
    before = model.forwards
    again = measure(model, (TQ4, treated), stop_early=False, done=windows)
    assert model.forwards == before and len(again) == 2
    other = kv.Treated.of(TQ4, None, 4)
    assert len(measure(model, (other,), stop_early=False, done=windows)) == len(WINDOWS) + 1

    effect = kv.treatment_effect(ABOUT, records, TQ4, treated)
    assert effect.outcome is Outcome.PASSED and effect.subject["kind"] == "treatment"
    m = effect.metrics
    by_hand = [
        np.mean([e.metrics["kld." + f"{i:03d}"] for e in some for i in range(POLICY.window // 32)])
        for some in (marked, [e for e in windows if e not in marked])
    ]
    assert m["kld_treated"] == pytest.approx(by_hand[0])
    assert m["ratio"] == pytest.approx(by_hand[0] / by_hand[1])
    assert m["ratio_low"] <= m["ratio"] <= m["ratio_high"]
    assert m["saved"] == pytest.approx(by_hand[1] - by_hand[0])
    assert kv.treatment_effect(ABOUT, records, TQ4, other).outcome is Outcome.NOT_RUN
