"""The command line: exit codes, one line per error, one JSON document on stdout."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvproof import __version__, backends, cli
from kvproof.decision import Candidate, Policy
from kvproof.evidence import Environment
from kvproof.geometry import index_ranges
from kvproof.gguf import write_gguf
from kvproof.lanes.kv import model_digest


def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["kvproof", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    return lambda *arguments: call(capsys, monkeypatch, *arguments)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "toy [bold].gguf"
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": np.uint32(4),
        "llama.context_length": np.uint32(4096),
        "llama.embedding_length": np.uint32(640),
        "llama.attention.head_count": np.uint32(8),
        "llama.attention.head_count_kv": np.uint32(2),
    }
    write_gguf(path, metadata, {"x": np.zeros((4, 4), np.float32)})
    return str(path)


BAD_REQUESTS = [
    (["calibrate", "{model}"], "Missing option"),
    (["calibrate", "{model}", "-o", "c.npz", "--kind", "mean"], "rope, previous, static"),
    (["calibrate", "{model}", "-o", "{model}"], "not overwritten"),
    (["calibrate", "{model}", "-o", "/nonexistent/c.npz"], "folder /nonexistent does not exist"),
    (["calibrate", "{model}", "-o", "c.npz", "--tokens", "5"], "64"),
    (["calibrate", "{model}", "-o", "c.npz", "--text", "/nonexistent.txt"], "/nonexistent.txt"),
    (["quality", "{model}", "--conditioner", "/nonexistent.npz"], "/nonexistent.npz"),
    (["quality", "{model}", "--conditioner", "{model}"], "not a conditioner"),
    (["quality", "{model}", "--sinks", "-1"], "--sinks"),
    (["run", "{model}", "-p", "x", "--conditioner", "{model}"], "not a conditioner"),
    (["inspec"], "No such command"),
    (["inspect"], "Missing argument"),
    (["inspect", "no-such-model"], "gemma-3-270m"),
    (["inspect", "{model}", "--memory", "lots"], "--memory 'lots'"),
    (["inspect", "{model}", "--context", "0"], "greater than or equal to 1"),
    (["inspect", "{model}", "--nonsense"], "--nonsense"),
    (["decide", "{model}", "--budget", "soon"], "--budget 'soon'"),
    (["decide", "{model}", "--policy", "/nonexistent.toml"], "/nonexistent.toml"),
    (["decide", "{model}", "--text", "/nonexistent.txt"], "/nonexistent.txt"),
    (["bench", "{model}", "--depths", "deep"], "--depths 'deep'"),
    (["bench", "{model}", "--cache-type-k", "tbq4"], "did you mean tbq4_0"),
    (["quality", "{model}", "--cache-type-v", "int4"], "unknown format 'int4'"),
    (["run", "{model}", "-p", "x", "--cache-type-k", "Q8"], "did you mean q8_0"),
    (["run", "{model}", "-p", "x", "--backend", "tpu"], "unknown backend 'tpu'"),
    (["run", "{model}", "-p", "x", "--decision", "{model}"], "not JSON"),
    (["verify", "--check", "turbo9"], "turbo9"),
    (["verify", "--format", "tq9"], "unknown format 'tq9'"),
    (["verify", "--backend", "tpu"], "unknown backend 'tpu'"),
    (["verify", "--fixtures", "/nonexistent"], "/nonexistent"),
    (["report", "/nonexistent"], "/nonexistent"),
    (["merge", "/nonexistent", "-o", "{model}.jsonl"], "/nonexistent"),
    (["merge", "/nonexistent", "-o", "{model}"], "exists already"),
    (["formats", "--head-dim", "x"], "--head-dim"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD_REQUESTS, ids=lambda v: str(v)[:40])
def test_bad_requests_are_one_line_and_exit_2(kv, model, arguments, says) -> None:  # type: ignore[no-untyped-def]
    code, out, err = kv(*(a.replace("{model}", model) for a in arguments))
    assert code == 2, err
    assert out == ""
    assert says in err
    assert len(err.strip().splitlines()) == 1 and err.startswith("kvproof: ")


def test_missing_backends_exit_3_with_the_reason(kv, model) -> None:  # type: ignore[no-untyped-def]
    code, out, err = kv("run", model, "-p", "x", "--backend", "cuda")
    assert (code, out) == (3, "")
    assert "backend cuda: " in err and len(err.strip().splitlines()) == 1


def test_inspect_json_has_the_promised_fields(kv, model) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = kv("inspect", model, "--context", "1000", "--memory", "4MiB", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["architecture"] == "llama"
    layer = document["layers"][3]
    expected = {"num_heads": 8, "num_kv_heads": 2, "head_dim_k": 80, "head_dim_v": 80}
    assert {k: layer[k] for k in expected} == expected
    assert (layer["index"], layer["window"], layer["shares_kv_with"]) == (3, None, None)
    assert document["bytes"]["f16"] == 4 * 1024 * 2 * 2 * 80 * 2
    assert document["bytes"]["q8_0"] is None
    assert "80 is not a multiple of 32" in document["refused"]["q8_0"]
    assert document["max_context"]["tq4"] > document["max_context"]["f16"]


def test_inspect_prints_names_with_markup_as_they_are(kv, model) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = kv("inspect", model, "--memory", "4MiB")
    assert code == 0
    assert "refused: q8_0" in out and "80/80" in out and "tq4" in out


def test_formats_lists_every_format_with_measured_error(kv) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = kv("formats", "--json", "--head-dim", "64", "--no-model")
    rows = {r["name"]: r for r in json.loads(out)["formats"]}
    assert code == 0
    assert rows["tbq4_0"]["bits"] == 4.5
    assert 0.0085 < rows["tbq4_0"]["relative_mse"] < 0.0095
    assert rows["tbq4_0"]["floor"] == pytest.approx(0.00877, abs=6e-6)
    assert rows["tbq4_0"]["db"] == rows["tbq4_0"]["db_above_bound"]


def test_formats_says_what_a_width_does_not_fit(kv) -> None:  # type: ignore[no-untyped-def]
    code, out, err = kv("formats", "--head-dim", "80", "--no-model")
    assert code == 0 and "kvproof:" not in err
    assert "captured" not in out
    assert "refused: q8_0: head_dim 80 is not a multiple of 32" in out
    table = [line.split()[0] for line in out.splitlines() if line]
    assert "tq4" in table and "q4_0" not in table


def test_doctor_names_what_is_there_and_what_is_not(kv) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = kv("doctor", "--json")
    document = json.loads(out)
    rows = {r["backend"]: r for r in document["backends"]}
    assert code == 0
    assert rows["cpu"]["available"] and rows["cpu"]["environment"]["isa"] in document["cpu_isas"]
    assert not rows["cuda"]["available"] and rows["cuda"]["reason"]
    assert "tq4" in rows["cpu"]["kernels"]["tq4"]
    assert (
        rows["cpu"]["environment"]["isa"] == [n for n, ok in document["cpu_isas"].items() if ok][-1]
    )


def test_doctor_names_the_instruction_set_in_use_and_what_others_need(kv) -> None:  # type: ignore[no-untyped-def]
    document = json.loads(kv("doctor", "--json")[1])
    in_use = {r["backend"]: r for r in document["backends"]}["cpu"]["environment"]["isa"]
    lines = kv("doctor")[1].splitlines()
    for name, here in document["cpu_isas"].items():
        needed = document["cpu_isas_missing"].get(name)
        state = "in use" if name == in_use else "available" if here else f"needs {needed}"
        assert f"instruction set {name}: {state}" in lines
        assert here == (needed is None) and needed != ""


def test_help_needs_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['kvproof', '--help']\n"
        "from kvproof.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'scipy', 'torch', 'matplotlib', 'transformers', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    assert "decide" in done.stdout


def test_sizes_and_durations() -> None:
    assert cli._size("8GiB") == 8 << 30
    assert cli._size("500MB") == 500_000_000
    assert cli._size("1.5k") == 1500
    assert cli._size("123") == 123
    assert cli._duration("5m") == 300
    assert cli._duration("90") == 90
    assert cli._duration("0.5h") == 1800
    assert index_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_merge_keeps_good_records_and_names_bad_lines(kv, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from kvproof.evidence import Environment, Evidence, Outcome, Store

    def record(device: str) -> Evidence:
        subject = {"kind": "gate", "backend": "cpu"}
        return Evidence(subject, Outcome.PASSED, {"nmse": 1e-9}, Environment(device), "digest")

    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    shared = record("one")
    Store(first).append(shared)
    Store(second).append(shared, record("two"))
    out = tmp_path / "all.jsonl"
    code, text, _ = kv("merge", str(first), str(second), "-o", str(out), "--json")
    assert (code, json.loads(text)["records"]) == (0, 2)
    assert json.loads(text)["devices"] == ["one", "two"]
    with second.open("a") as file:
        file.write('{"evidence": {"outcome": "PASSED"}}\n')
    code, text, err = kv("merge", str(first), str(second), "-o", str(tmp_path / "c.jsonl"))
    assert code == 1 and "b.jsonl" in err and "2 records" in text


def test_bench_without_a_model_times_attention_of_passed_kernels(kv, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from kvproof.evidence import Store

    code, out, _ = kv(
        "bench", "--cache-type-k", "q8_0", "--cache-type-v", "tq4", "--depths", "70",
        "--out", str(tmp_path), "--json",
    )  # fmt: skip
    records = json.loads(out)["results"]
    speeds = [r for r in records if r["subject"]["kind"] == "speed"]
    assert code == 0 and len(speeds) == 3
    for r in speeds:
        head_dim, kv_heads = r["subject"]["head_dim"], r["subject"]["num_kv_heads"]
        assert r["metrics"]["bytes"] == 70 * kv_heads * (head_dim * 34 // 32 + head_dim // 2 + 2)
        assert r["metrics"]["ratio_low"] <= r["metrics"]["ratio"] <= r["metrics"]["ratio_high"]
        assert r["gates"]
    stored = Store(tmp_path / "evidence.jsonl").read()
    assert [e.outcome for e in stored].count("PASSED") == len(records)


def test_version(kv) -> None:  # type: ignore[no-untyped-def]
    assert kv("--version")[:2] == (0, f"kvproof {__version__}\n")


@pytest.mark.parametrize("command", ["decide", "quality", "bench", "run"])
def test_without_torch_one_line_says_what_to_install(  # type: ignore[no-untyped-def]
    kv, model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "torch" else find(n, *a)
    )
    where = ("-p", "x") if command == "run" else ("--out", str(tmp_path / "out"))
    code, out, err = kv(command, model, *where)
    assert (code, out) == (3, "")
    assert err.count("\n") == 1 and "torch" in err and "kvproof[transformers]" in err
    assert not (tmp_path / "out").exists()


def test_piped_tables_have_one_line_a_row_and_no_trailing_blanks(capsys) -> None:  # type: ignore[no-untyped-def]
    cli._table("", ("a", "why"), [("x", "word " * 100), ("y", "short")])
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith(("x", "y"))]) == 2
    assert lines == [line.rstrip() for line in lines]


def test_merge_of_nothing_readable_writes_nothing(kv, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    prose, out = tmp_path / "prose.jsonl", tmp_path / "out.jsonl"
    prose.write_text("not evidence\n" * 3)
    code, _, err = kv("merge", str(prose), "-o", str(out))
    assert code == 2 and "no readable evidence" in err and err.count("\n") == 1
    assert not out.exists()


def test_a_decision_used_elsewhere_says_what_differs(model) -> None:  # type: ignore[no-untyped-def]
    backend = backends.get("cpu")
    device = Environment.current(backend.environment()).device
    made = {
        "decisions": [{"backend": "cpu", "device": device}],
        "model": {"name": "toy", "sha256": model_digest(Path(model))},
        "digest": backend.digest(),
    }
    assert cli._differences(made, Path(model), "cpu") == []
    [note] = cli._differences(made | {"model": {"name": "big", "sha256": "0"}}, Path(model), "cpu")
    assert "another model, big" in note
    [note] = cli._differences(made | {"digest": "0"}, Path(model), "cpu")
    assert "other kernels" in note
    [note] = cli._differences(made, Path(model), "reference")
    assert f"made on cpu {device}, this is reference" in note


@pytest.mark.parametrize(
    ("record", "cut"),
    [
        (("speed", "NOT_RUN", "budget: no time left", {}), True),
        (("quality", "PASSED", None, {"tokens": 512.0}), True),
        (("quality", "PASSED", None, {"tokens": 1024.0}), False),
        (("speed", "NOT_RUN", "speed decides only where quality clears the policy", {}), False),
    ],
)
def test_only_what_time_left_open_is_worth_a_second_run(record, cut: bool) -> None:  # type: ignore[no-untyped-def]
    kind, outcome, reason, metrics = record
    pair = {"key": "q8_0", "value": "tq4"}
    e = SimpleNamespace(
        subject=pair | {"kind": kind}, outcome=outcome, reason=reason, metrics=metrics
    )

    def result(status: str) -> SimpleNamespace:
        verdict = SimpleNamespace(candidate=Candidate(**pair), status=status)
        return SimpleNamespace(decision=SimpleNamespace(verdicts=[verdict]), evidence=[e])

    assert cli._cut_short(result("inconclusive"), Policy()) is cut
    assert not cli._cut_short(result("rejected"), Policy())
