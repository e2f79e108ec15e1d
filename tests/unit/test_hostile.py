"""Hostile and careless use: one line on stderr, exit code 2 or 3, nothing half-written."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvproof import cli, report
from kvproof.decision import Policy, decide
from kvproof.errors import Refused, RequestError
from kvproof.evidence import Environment, Evidence, Outcome, Store, _sha256, canonical
from kvproof.formats import get as get_format
from kvproof.gguf import GGUF, write_gguf
from kvproof.lanes import kv as lane

ESC = "\x1b[2J"
LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": np.uint32(1),
    "llama.context_length": np.uint32(512),
    "llama.embedding_length": np.uint32(64),
    "llama.attention.head_count": np.uint32(2),
}


def gguf(path: Path, **more) -> Path:
    metadata = LLAMA | {name.replace("__", "."): value for name, value in more.items()}
    write_gguf(path, metadata, {"x": np.zeros((4, 4), np.float32)})
    return path


def call(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["kvproof", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr()
    return stop.value.code, out.out, out.err


PROGRAM = [sys.executable, "-c", "from kvproof.cli import main; main()"]


BAD_ARGUMENTS = [
    (["inspect", ""], "an empty name"),
    (["inspect", "~no-such-user-here/x"], "no such user"),
    (["inspect", "x" * 5000], "too long"),
    (["inspect", ESC], "\\x1b[2J"),
    (["inspect", "{model}", "--memory", "9" * 400], "not a size"),
    (["inspect", "{model}", "--memory", "\u0663GiB"], "not a size"),
    (["inspect", "{model}", "--memory", ""], "not a size"),
    (["inspect", "{model}", "--context", "99999999999"], "context"),
    (["formats", "--head-dim", "100000000000"], "--head-dim"),
    (["bench", "{model}", "--depths", "\u00b2"], "--depths"),
    (["bench", "{model}", "--depths", "9" * 5000], "--depths"),
    (["bench", "{model}", "--depths", "1000000000"], "depths must be"),
    (["decide", "{model}", "--budget", ""], "--budget"),
    (["decide", "{model}", "--budget", "9" * 400], "--budget"),
    (["decide", "{model}", "--text", "{empty}"], "is empty"),
    (["decide", "{model}", "--text", "/dev/zero"], "longer than"),
    (["decide", "{model}", "--policy", "{folder}"], "cannot be read"),
    (["run", "{model}", "-p", "x", "--decision", "x", "--cache-type-k", "f16"], "leave out"),
    (["report", "{empty}"], "cannot be read"),
    # Bounds are known before a model is loaded.
    (["calibrate", "{model}", "-o", "c.npz", "--page", "1048577"], "--page"),
    (["calibrate", "{model}", "-o", "c.npz", "--tokens", "63"], "--tokens"),
    (["calibrate", "{model}", "-o", "c.npz", "--kind", ""], "--kind"),
    (["calibrate", "{model}", "-o", "none/c.npz"], "does not exist"),
    (["calibrate", "{model}", "-o", "{model}"], "is not overwritten"),
    (["run", "{model}", "-p", "x", "--sinks", "4097"], "--sinks"),
    (["quality", "{model}", "--sinks", "-1"], "--sinks"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD_ARGUMENTS, ids=lambda v: str(v)[:40])
def test_bad_arguments_are_one_line(capsys, monkeypatch, tmp_path, arguments, says):
    model, empty = gguf(tmp_path / "m.gguf"), tmp_path / "empty"
    empty.touch()
    names = {"{model}": model, "{empty}": empty, "{folder}": tmp_path}
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    code, out, err = call(capsys, monkeypatch, *(names.get(a, a) for a in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err and "\x1b" not in err
    assert sorted(tmp_path.iterdir()) == before


def test_names_in_a_model_file_do_not_steer_the_terminal(capsys, monkeypatch, tmp_path):
    path = gguf(tmp_path / "m.gguf", **{f"llama.x.ssm.{ESC}": np.uint32(1)})
    code, _, err = call(capsys, monkeypatch, "inspect", path)
    assert code == 2 and "\x1b" not in err and "\\x1b[2J" in err


def test_values_that_json_lacks_are_printed_as_text(capsys, monkeypatch, tmp_path):
    for value in (np.float32("nan"), ["a", "b"]):
        path = gguf(tmp_path / "m.gguf", llama__attention__causal=value)
        code, out, _ = call(capsys, monkeypatch, "inspect", path, "--json")
        fields = json.loads(out)["source"]["fields"]
        assert code == 0 and isinstance(fields["llama.attention.causal"], str)


def test_metadata_is_read_by_its_kind(tmp_path):
    path = gguf(
        tmp_path / "m.gguf", n=np.uint32(3), s="x", f=np.float32("nan"), a=np.ones(2, np.float32)
    )
    with GGUF(path) as file:
        assert (file.whole("n", 1, 3), file.positive("n"), file.text("s")) == (3, 3.0, "x")
        assert file.whole("absent", 0, 1) is file.strings("absent") is None
        for read in (
            lambda: file.whole("n", 4, 5),
            lambda: file.whole("s", 0, 9),
            lambda: file.positive("f"),
            lambda: file.flag("n"),
            lambda: file.text("a"),
            lambda: file.strings("a"),
            lambda: file.numbers("a", 3),
        ):
            with pytest.raises(RequestError, match="expected"):
                read()


def test_a_closed_pipe_and_a_full_disk_give_no_traceback(tmp_path):
    model = gguf(tmp_path / "m.gguf")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*PROGRAM, "inspect", model],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "kvproof: standard output: No space left on device\n"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*PROGRAM, "inspect", model], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_terminal_that_is_not_utf_8_gets_its_line():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "TERM": "dumb"}
    done = subprocess.run(
        [*PROGRAM, "inspect", "\u00fcn\u00ef"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "no such file" in done.stderr


def test_ctrl_c_says_that_work_is_kept(tmp_path):
    fifo = tmp_path / "text"
    os.mkfifo(fifo)  # reading it waits for a writer that never comes
    command = [*PROGRAM, "decide", gguf(tmp_path / "m.gguf"), "--text", fifo]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        writer = None
        while writer is None:  # opens as soon as the program reads
            try:
                writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                time.sleep(0.02)
        time.sleep(0.5)  # from open() into read(): a signal between the two would not wake it
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
            os.close(writer)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("kvproof: stopped")


# --- evidence -------------------------------------------------------------------------------------


def record(kind="gate", **metrics):
    subject = {"kind": kind, "lane": "kv", "backend": "cpu", "key": "f16", "value": "f16"}
    return Evidence(subject, Outcome.PASSED, metrics, Environment("box"), "d", "c")


def line(document) -> bytes:
    """A line with the right digest of whatever it holds."""
    return canonical({"evidence": document, "sha256": _sha256(document)}).encode()


def forged(**changes):
    return {**record().document(), **changes}


HOSTILE_LINES = [
    b"[" * 100_000,
    b"\xff\xfe\x00",
    b'{"evidence": NaN}',
    b"9" * 5000,
    line([1, 2]),
    line(None),
    line(forged(schema_version="1" * 500)),
    line(forged(finished=7)),
    line(forged(digest=None)),
    line(forged(subject=["kind"])),
    line(forged(metrics=[1])),
    line(forged(gates=3)),
    line(forged(environment={"device": 5})),
    line(forged(environment={**record().document()["environment"], "versions": [1]})),
    line(forged(subject={**record().document()["subject"], "kind": "bytes"})),
    line(forged(subject={**record().document()["subject"], "kind": "quality"})),
]


@pytest.mark.parametrize("hostile", HOSTILE_LINES, ids=lambda b: repr(b[:40]))
def test_a_hostile_line_is_a_record_that_was_not_run(tmp_path, hostile):
    store = Store(tmp_path / "e.jsonl")
    store.append(record())
    with store.path.open("ab") as file:
        file.write(hostile + b"\n")
    good, bad = store.read()
    assert good.outcome is Outcome.PASSED
    assert bad.outcome is Outcome.NOT_RUN and "line 2" in str(bad.reason)
    assert decide([good, bad], Policy()).chosen.name == "f16/f16"
    assert len(bad.id) == 16


def test_a_write_that_fails_leaves_no_half_record(tmp_path, monkeypatch):
    store = Store(tmp_path / "e.jsonl")
    store.append(record())
    before = store.path.read_bytes()
    real = os.write

    def full(descriptor, data):
        if len(data) < 200:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:200])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RequestError, match="No space left"):
        store.append(record("other", x=1.0))
    assert store.path.read_bytes() == before


# --- files without an end -------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")
@pytest.mark.parametrize("read", [Policy.load, report.read])
def test_a_device_without_an_end_is_refused(read):
    with pytest.raises(RequestError, match=r"/dev/zero: cannot be read.*longer than \d+ MiB"):
        read(Path("/dev/zero"))


# --- policy, decision.json ------------------------------------------------------------------------

HOSTILE_POLICIES = [
    "x = " + "[" * 50_000,
    "[quality]\ntokens_min = " + "9" * 5000,
    "[quality]\nkld_max = nan",
    "[quality]\nkld_max = " + "9" * 400,
    "[quality]\nkld_max = true",
    "[measure]\nrounds = 1000000000",
    "[measure]\nwindows_max = 1000000000000",
    "[measure]\ndepths = [1000000000000]",
    "[measure]\ndepths = [true]",
    "[memory]\ncontext = -1",
    "candidates = [[1]]",
    "quality = 3",
]


@pytest.mark.parametrize("text", HOSTILE_POLICIES, ids=lambda t: t[:30])
def test_a_hostile_policy_is_refused_in_a_short_line(tmp_path, text):
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(RequestError, match="policy") as error:
        Policy.load(path)
    assert len(str(error.value)) < 500


def test_caches_that_do_not_fit_in_memory_are_refused_before_anything_runs(tmp_path):
    from kvproof.geometry import geometry

    shape = geometry(gguf(tmp_path / "m.gguf", llama__block_count=np.uint32(4096)))
    lane._check_memory(shape, Policy(), ("speed",))
    with pytest.raises(Refused, match=r"measure\.depths"):
        lane._check_memory(shape, Policy(depths=(1 << 24,)), ("speed",))
    lane._check_memory(shape, Policy(depths=(1 << 24,)), ("quality",))


def decision() -> dict:
    d = decide([], Policy(candidates=("q8_0",)))
    return {
        "schema_version": 1,
        "decisions": [d.as_dict()],
        "policy": Policy().as_dict(),
        "model": {"name": "m", "sha256": "s", "architecture": "llama", "layers": []},
        "text": "t",
        "environment": {
            "device": "box", "cpu": "box", "isa": "", "os": "", "cores": 1, "threads": 1,
            "is_software": False, "versions": {},
        },
        "digest": "d",
    }  # fmt: skip


CHANGES = [
    (("decisions",), []),
    (("decisions",), 5),
    (("decisions", 0), "x"),
    (("decisions", 0, "chosen"), {"key": "q8_0", "value": "q8_0"}),
    (("decisions", 0, "chosen", "key"), 7),
    (("decisions", 0, "verdicts"), []),
    (("decisions", 0, "verdicts", 0, "status"), "great"),
    (("decisions", 0, "backend"), None),
    (("decisions", 0, "flags"), None),
    (("policy",), {"kld_max": "x"}),
    (("policy",), {"nonsense": 1}),
    (("environment",), {}),
    (("schema_version",), 2),
]


@pytest.mark.parametrize(("where", "value"), CHANGES, ids=str)
def test_an_edited_decision_is_refused_by_report_and_run(
    capsys, monkeypatch, tmp_path, where, value
):
    content = decision()
    *path, last = where
    inner = content
    for step in path:
        inner = inner[step]
    inner[last] = value
    (tmp_path / "decision.json").write_text(json.dumps(content))
    model = gguf(tmp_path / "m.gguf")
    commands = (
        ("report", tmp_path),
        ("run", model, "-p", "x", "--decision", tmp_path / "decision.json"),
    )
    for command in commands:
        code, out, err = call(capsys, monkeypatch, *command)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "decision.json" in err
    assert not list(tmp_path.glob("report*"))


def test_a_decision_whose_evidence_is_gone_is_not_drawn(tmp_path):
    content = decision()
    content["decisions"][0]["verdicts"][0]["evidence"] = ["0123456789abcdef"]
    (tmp_path / "decision.json").write_text(json.dumps(content))
    with pytest.raises(RequestError, match="0123456789abcdef"):
        report.report(tmp_path)


def test_the_report_holds_no_control_characters(tmp_path):
    content = decision()
    content["model"]["name"] = f"{ESC}<script>\u202e\ud800"
    (tmp_path / "decision.json").write_text(json.dumps(content))
    for path in report.report(tmp_path).values():
        text = path.read_text(encoding="utf-8")
        assert "\x1b" not in text and "\u202e" not in text
        assert "<script" not in text.replace("\\<script", "")


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RequestError, match="No space left"):
        report._replace(tmp_path / "report.html", "x")
    assert list(tmp_path.iterdir()) == []


# --- Python API -----------------------------------------------------------------------------------


def test_arrays_that_do_not_fit_are_refused(tmp_path):
    from kvproof.backends import get
    from kvproof.cache import KVCache
    from kvproof.geometry import geometry

    shape = geometry(gguf(tmp_path / "m.gguf", llama__attention__head_count_kv=np.uint32(1)))
    rows = np.ones((4, 1, 32), np.float32)
    layer = KVCache(shape).layer(0)
    layer.append(rows, rows)
    q = np.ones((1, 2, 32), np.float32)
    reference = get("reference")
    blocks = reference.encode(get_format("f16"), np.ones((4, 2, 32), np.float32))

    def attention(q, v=blocks, **options):
        return reference.attention(q, blocks, v, key="f16", value="f16", **options)

    assert layer.attention(q).shape == attention(q).shape == (1, 2, 32)
    for call_it in (
        lambda: layer.append(rows.astype(">f4"), rows),
        lambda: layer.append([[1], [1, 2]], rows),
        lambda: layer.attention(q[:, :1]),
        lambda: layer.attention(np.ones((1, 4, 32), np.float32)),
        lambda: layer.attention(q, scale=float("nan")),
        lambda: layer.crop(1.5),
        lambda: shape.kv_bytes(1.5, "f16", "f16"),
        lambda: attention(q * np.float32("nan")),
        lambda: attention(q.astype(np.complex64)),
        lambda: attention(q[0]),
        lambda: attention(q, blocks[:-1]),
        lambda: attention(q, blocks[:, :1]),
        lambda: attention(q, scale=float("inf")),
        lambda: reference.encode(get_format("f16"), [[1], [1, 2]]),
    ):
        with pytest.raises(RequestError):
            call_it()
    assert layer.length == 4
