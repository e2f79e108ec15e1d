"""Evidence says only what may be said, and a store shows every line that was tampered with."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from kvproof import evidence
from kvproof.errors import RequestError
from kvproof.evidence import Environment, Evidence, GatePass, Outcome, Store, aggregate

HERE = Environment(device="test cpu", isa="scalar", load_average=0.5, versions={"numpy": "2"})
DIGEST = "ab" * 32


def gate(**changes):
    record = {
        "subject": {"kind": "gate", "backend": "cpu", "format": "tq4", "head_dim": 128},
        "outcome": Outcome.PASSED,
        "metrics": {"nmse": 1.25e-9},
        "environment": HERE,
        "digest": DIGEST,
        "commit": "c0ffee",
    }
    return Evidence(**(record | changes))


def speed(gates, **changes):
    return gate(subject={"kind": "speed", "backend": "cpu"}, gates=gates, **changes)


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.PASSED])
def test_all_but_a_pass_need_a_reason(outcome):
    with pytest.raises(ValueError, match="needs a reason"):
        gate(outcome=outcome)
    assert gate(outcome=outcome, reason="because").reason == "because"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", None])
def test_metrics_are_finite_numbers(value):
    with pytest.raises(ValueError, match="metric 'nmse'"):
        gate(metrics={"nmse": value})


def test_a_speed_needs_a_pass_of_the_same_kernels():
    with pytest.raises(ValueError, match="needs a PASSED gate record"):
        speed(())
    with pytest.raises(ValueError, match="run the gate again"):
        speed((GatePass("0" * 16, "cd" * 32),))
    with pytest.raises(ValueError, match="not a PASSED gate record"):
        gate(outcome=Outcome.FAILED, reason="nmse").gate_pass()
    with pytest.raises(ValueError, match="not a PASSED gate record"):
        speed((gate().gate_pass(),)).gate_pass()
    assert speed((gate().gate_pass(),)).outcome is Outcome.PASSED


@pytest.mark.parametrize("name", ["llvmpipe (LLVM 19)", "Google SwiftShader", "LAVAPIPE"])
def test_a_software_device_never_passes(name):
    device = Environment(device=name)
    assert device.is_software
    with pytest.raises(ValueError, match="never a pass"):
        gate(environment=device)
    with pytest.raises(ValueError, match="never a pass"):
        gate(environment=Environment(device="Virtual GPU", driver=name))


def test_other_values_that_cannot_be_built():
    with pytest.raises(ValueError, match='needs a "kind"'):
        gate(subject={"format": "tq4"})
    with pytest.raises(ValueError, match="subject 'format'"):
        gate(subject={"kind": "gate", "format": None})
    with pytest.raises(ValueError, match="needs the digest"):
        gate(digest="")
    with pytest.raises(ValueError, match="MAYBE"):
        gate(outcome="MAYBE")


def test_aggregate_takes_the_worst_and_an_empty_list_fails():
    order = ["FAILED", "REFUSED", "NOT_RUN", "DIAGNOSTIC", "PASSED"]
    for i, worst in enumerate(order):
        assert aggregate(Outcome(o) for o in reversed(order[i:])) == worst
    assert aggregate([]) is Outcome.FAILED
    codes = {o: evidence.exit_code(Outcome(o)) for o in order}
    assert codes == {"FAILED": 1, "REFUSED": 3, "NOT_RUN": 3, "DIAGNOSTIC": 3, "PASSED": 0}


def test_current_environment_knows_machine_and_versions_without_heavy_imports():
    code = (
        "import sys; from kvproof.evidence import Environment, source_commit\n"
        "e = Environment.current({'device': 'cpu', 'isa': 'avx2', 'threads': 2})\n"
        "assert e.isa == 'avx2' and e.threads == 2 and e.cores >= 1, e\n"
        "assert e.versions['python'] and e.versions['numpy'] and e.cpu and e.os, e\n"
        "assert source_commit()\n"
        "assert not {'numpy', 'torch', 'scipy'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_round_trip_keeps_every_bit(tmp_path):
    store = Store(tmp_path / "e.jsonl")
    first = gate(metrics={"nmse": 0.1 + 0.2, "count": 3}, subject={"kind": "gate", "name": "µ 1"})
    second = speed((first.gate_pass(),))
    store.append(first)
    store.append(second, gate(outcome=Outcome.REFUSED, reason="head_dim 80"))
    back = store.read()
    assert back[:2] == [first, second]
    assert [e.id for e in back[:2]] == [first.id, second.id]
    assert len(first.id) == 16 and first.id != second.id
    assert back[2].outcome is Outcome.REFUSED
    for line in store.path.read_text(encoding="utf-8").splitlines():
        assert json.loads(line)["evidence"]["schema_version"] == 1


def test_every_edited_byte_voids_its_line_only(tmp_path):
    store = Store(tmp_path / "e.jsonl")
    store.append(gate(subject={"kind": "gate", "backend": "cpu"}))
    store.append(gate())
    whole = store.path.read_bytes()
    end = whole.index(b"\n")
    for at in range(end):
        for new in (b"0", b" "):
            if whole[at : at + 1] == new:
                continue
            store.path.write_bytes(whole[:at] + new + whole[at + 1 :])
            bad, good = store.read()
            assert bad.outcome is Outcome.NOT_RUN, whole[:at] + new
            assert "line 1" in bad.reason
            assert good == gate_like(good)
    flipped = whole.replace(b'"nmse":1.25e-09', b'"nmse":1.25e-12', 1)
    store.path.write_bytes(flipped)
    bad = store.read()[0]
    assert "changed after it was written" in bad.reason
    assert bad.subject["backend"] == "cpu"  # what it claimed to be stays visible


def gate_like(record):
    return gate(started=record.started, finished=record.finished)


def test_a_line_cut_anywhere_is_reported_and_the_next_append_is_whole(tmp_path):
    store = Store(tmp_path / "e.jsonl")
    store.append(gate())
    whole = store.path.read_bytes()
    for cut in range(1, len(whole) - 1):
        store.path.write_bytes(whole[:cut])
        (torn,) = store.read()
        assert torn.outcome is Outcome.NOT_RUN
        assert "cut short" in torn.reason and "run it again" in torn.reason
    store.append(gate())
    torn, good = store.read()
    assert torn.outcome is Outcome.NOT_RUN
    assert good.outcome is Outcome.PASSED


def test_stale_kernels_void_a_pass(tmp_path):
    store = Store(tmp_path / "e.jsonl")
    store.append(gate(), gate(outcome=Outcome.FAILED, reason="nmse"))
    assert store.read({"cpu": DIGEST})[0].outcome is Outcome.PASSED
    assert store.read({"cuda": "ef" * 32})[0].outcome is Outcome.PASSED
    stale, failed = store.read({"cpu": "ef" * 32})
    assert stale.outcome is Outcome.NOT_RUN and "stale" in stale.reason
    assert failed.outcome is Outcome.FAILED


def test_a_speed_falls_with_its_gate_record(tmp_path):
    store = Store(tmp_path / "e.jsonl")
    passed = gate()
    store.append(passed, speed((passed.gate_pass(),)))
    assert [e.outcome for e in store.read()] == [Outcome.PASSED] * 2
    edited = store.path.read_bytes().replace(b"1.25e-09", b"1.26e-09", 1)
    store.path.write_bytes(edited)
    assert [e.outcome for e in store.read()] == [Outcome.NOT_RUN] * 2
    assert "gate record" in store.read()[1].reason


def test_a_later_schema_is_visible_but_no_pass(tmp_path):
    store = Store(tmp_path / "e.jsonl")
    store.append(replace(gate(), schema_version=2))
    (later,) = store.read()
    assert later.outcome is Outcome.NOT_RUN and "schema version 2" in later.reason


def test_two_processes_never_mix_their_lines(tmp_path):
    path = tmp_path / "e.jsonl"
    code = (
        "import sys; from kvproof.evidence import *\n"
        "s = Store(sys.argv[1])\n"
        "for i in range(60):\n"
        "    s.append(Evidence({'kind': 'gate', 'who': sys.argv[2], 'i': i, 'pad': 'x' * 9000},"
        " Outcome.PASSED, {}, Environment('cpu'), 'd' * 64, 'c'))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, path, who]) for who in "ab"]
    assert [w.wait(timeout=60) for w in writers] == [0, 0]
    records = Store(path).read()
    assert all(e.outcome is Outcome.PASSED for e in records)
    assert [[e.subject["i"] for e in records if e.subject["who"] == w] for w in "ab"] == [
        list(range(60))
    ] * 2


def test_paths_that_cannot_be_used_give_one_line(tmp_path):
    assert Store(tmp_path / "none.jsonl").read() == []
    with pytest.raises(RequestError, match="does not exist; create it") as absent:
        Store(tmp_path / "no" / "e.jsonl").append(gate())
    with pytest.raises(RequestError, match="cannot be opened for writing") as folder:
        Store(tmp_path).append(gate())
    with pytest.raises(RequestError, match="cannot be read"):
        Store(tmp_path).read()
    assert "\n" not in str(absent.value) + str(folder.value)


def test_a_full_disk_gives_one_line(tmp_path):
    full = "/dev/full"
    try:
        open(full, "wb").close()  # noqa: PTH123
    except OSError:
        pytest.skip("no /dev/full on this system")
    with pytest.raises(RequestError, match="free some space"):
        Store(full).append(gate())
