"""The main job on a real model, small: decide, resume without measuring again, run with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvproof import models

POLICY = """
candidates = ["q8_0/q8_0", "tq4/tq4", "q8_0/tq3"]
[quality]
tokens_min = 64
[memory]
context = 1024
[measure]
window = 256
windows_max = 1
depths = [64]
prefill_tokens = 32
decode_tokens = 4
rounds = 6
"""


def kvproof(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvproof.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    known = models.KNOWN["smollm2-135m"]
    if not (models.cache_dir() / "models" / known.name / known.file).is_file():
        pytest.skip("smollm2-135m is not fetched: kvproof fetch smollm2-135m")
    out = tmp_path_factory.mktemp("decide here")
    policy = out / "policy.toml"
    policy.write_text(POLICY)
    done = kvproof(
        "decide", "smollm2-135m", "--policy", str(policy), "--out", str(out), "--json"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_decision_has_the_promised_fields_and_reasons(decided: tuple[Path, dict]) -> None:
    out, document = decided
    (decision,) = document["decisions"]
    assert decision["lane"] == "kv" and decision["backend"] == "cpu" and decision["device"]
    assert set(decision["chosen"]) == {"key", "value"}
    others = {"q8_0/q8_0", "tq4/tq4", "q8_0/tq3", "f16/f16"}
    chosen = f"{decision['chosen']['key']}/{decision['chosen']['value']}"
    assert set(decision["rejected"]) == others - {chosen}
    assert all(len(reason) > 10 for reason in decision["rejected"].values())
    assert {"llama.cpp", "vllm", "transformers"} <= {k.lower() for k in decision["flags"]}
    stored = {json.loads(line)["evidence"]["subject"]["kind"]: 0 for line in _lines(out)}
    assert {"gate", "bytes", "quality", "quality-window"} <= set(stored)
    page = (out / "report.html").read_text()
    assert len(page) < 1_000_000 and "http-equiv" in page and "smollm2-135m" in page


def test_second_run_measures_nothing_and_says_the_same(decided: tuple[Path, dict]) -> None:
    out, document = decided
    before = (out / "evidence.jsonl").read_bytes(), (out / "decision.json").read_bytes()
    again = kvproof(
        "decide", "smollm2-135m", "--policy", str(out / "policy.toml"), "--out", str(out), "--json"
    )
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["decisions"] == document["decisions"]
    assert (out / "evidence.jsonl").read_bytes() == before[0]
    assert (out / "decision.json").read_bytes() == before[1]


def test_run_takes_the_decision_and_reports_what_is_in_effect(decided: tuple[Path, dict]) -> None:
    out, document = decided
    done = kvproof(
        "run", "smollm2-135m", "-p", "The capital of France is", "-n", "6",
        "--decision", str(out / "decision.json"), "--strict", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["text"].startswith(" Paris")
    assert answer["tokens"] == len(answer["token_ids"]) == 6
    assert answer["cache"]["effective"] == document["decisions"][0]["chosen"]
    assert answer["cache"]["effective"] == answer["cache"]["requested"]
    assert answer["cache"]["bytes"] > 0 and answer["tokens_per_second"] > 0
    kernels = {name for layer in answer["cache"]["kernels"] for name in layer}
    assert any(answer["cache"]["effective"]["key"] in name for name in kernels)


def _lines(out: Path) -> list[str]:
    return (out / "evidence.jsonl").read_text().splitlines()
