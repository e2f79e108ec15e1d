"""The report shows what was decided, escapes what it is given and writes whole files."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_decision import BASE, DIGEST, GOOD, HERE, SMALL, gate, quality, record, size, speed

from kvproof import report
from kvproof.decision import decide
from kvproof.errors import RequestError
from kvproof.evidence import Outcome, Store
from kvproof.lanes import kv

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>|`[a](javascript:1)'


def result(evidence=GOOD, name="toy.gguf", policy=SMALL, environment=HERE):
    layers = [
        SimpleNamespace(
            index=i,
            num_heads=4,
            num_kv_heads=1,
            head_dim_k=256,
            head_dim_v=256,
            window=None if i % 6 == 5 else 512,
            shares_kv_with=None,
        )
        for i in range(12)
    ]
    return kv.Result(
        decide(evidence, policy),
        policy,
        list(evidence),
        kv.About("cpu", DIGEST, "m" * 64, name, environment),
        SimpleNamespace(architecture="toy", layers=layers),
        "a text",
    )


def pages(**changes):
    r = result(**changes)
    content = report.document(r)
    return report.html(content, r.evidence), report.markdown(content, r.evidence)


class Outline(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_says_what_to_use_and_what_to_paste():
    page, _ = pages()
    text = " ".join(" ".join(Outline(page).text).split())
    assert "Use q8_0 keys and tq4 values" in text
    assert "100 → 39.00 MiB" in text
    assert "--cache-type-k q8_0 --cache-type-v tq4" in text
    assert "# stock llama.cpp has no cache type tq4" in text
    assert "0.17 [0.169, 0.171]" in text  # the rejected pair's interval
    assert "1.05x [1.03, 1.07] at 512" in text
    assert text.count("PASSED") >= 4


def test_stock_is_a_first_class_answer():
    page, md = pages(evidence=BASE)
    assert "Keep the stock cache (f16)" in page and "Keep the stock cache (f16)" in md
    assert "<svg" not in page


@pytest.mark.parametrize("where", ["name", "device", "reason"])
def test_hostile_text_stays_text(where):
    changes = {
        "name": {"name": HOSTILE},
        "device": {"environment": replace(HERE, device=HOSTILE, cpu=HOSTILE, os=HOSTILE)},
        "reason": {
            "evidence": [
                *GOOD,
                record("candidate", "q4_0", outcome=Outcome.REFUSED, reason=HOSTILE),
            ]
        },
    }[where]
    page, md = pages(**changes)
    outline = Outline(page)
    assert not {"script", "img", "iframe", "object", "a", "form"} & set(outline.tags)
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert "<script" not in md.replace("\\<script", "")
    cells = {
        len(re.findall(r"(?<!\\)\|", line)) for line in md.splitlines() if line.startswith("|")
    }
    assert cells == {12}


def test_a_key_name_from_a_changed_file_stays_text():
    # decision.json is read back from disk: nothing in it may become markup either.
    r = result()
    text = json.dumps(report.document(r)).replace("tq4", "<b>tq4</b>")
    page = report.html(json.loads(text), r.evidence)
    assert "<b>tq4" not in page and "&lt;b&gt;tq4" in page


def test_the_page_is_self_contained_and_small():
    page, _ = pages()
    assert len(page.encode()) < 1_000_000
    outline = Outline(page)
    loaded = [(n, v) for n, v in outline.attributes if n in ("src", "href", "srcset", "data")]
    assert loaded == [("href", "data:,")]
    assert "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page


def test_plots_hold_every_measured_pair():
    page, _ = pages()
    plots = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(plots) == 3
    assert all(name in plots[0] for name in (">q8_0<", ">q8_0/tq4<", ">tq4<"))
    assert not re.search(r'="(nan|inf|-inf)', page)


@pytest.mark.parametrize("kld", [0.0, -1e-9, 1e-12, 40.0])
def test_plots_stand_any_divergence(kld):
    page, _ = pages(evidence=[*GOOD, quality("tq4", kld, half=2e-9, tokens=9999)])
    assert len(re.findall(r"<svg.*?</svg>", page, re.S)) == 3
    assert not re.search(r'[" ](nan|-?inf)["0-9]', page)


def test_what_is_missing_is_listed_once_and_not_when_a_later_run_filled_it():
    gap = record("quality", "tq4/tq3", outcome=Outcome.NOT_RUN, reason="budget: no time")
    stale = record("quality", "q8_0", outcome=Outcome.NOT_RUN, reason="budget: no time")
    page, md = pages(evidence=[*GOOD, gap, stale, gate("tq4/tq3"), size("tq4/tq3", 22)])
    line = next(x for x in md.splitlines() if x.startswith("- quality (NOT"))
    assert "tq4/tq3" in line and "q8" not in line and "budget" in line
    assert "budget: no time" in page


def test_contended_and_unreadable_records_are_said():
    slow = speed("q8_0", 1.1, contended=1, rounds=9)
    bad = record("unreadable", "q8_0", outcome=Outcome.NOT_RUN, reason="line 3: changed")
    page, md = pages(evidence=[*GOOD, slow, bad])
    assert "Other programs used the processor" in page and "Other programs" in md
    assert "line 3: changed" in page


def test_write_then_report_draw_the_same_page(tmp_path):
    paths = report.write(tmp_path / "out", result())
    assert set(paths) == {"decision.json", "report.html", "report.md"}
    before = {name: path.read_bytes() for name, path in paths.items()}
    document = json.loads(before["decision.json"])
    chosen = document["decisions"][0]["chosen"]
    assert chosen == {"key": "q8_0", "value": "tq4"}
    assert {"lane", "backend", "device", "reason", "evidence", "rejected", "flags"} <= set(
        document["decisions"][0]
    )
    again = report.report(tmp_path / "out")
    assert {name: path.read_bytes() for name, path in again.items()} == {
        name: before[name] for name in ("report.html", "report.md")
    }
    assert not list((tmp_path / "out").glob("*.part"))


def test_a_changed_record_loses_its_cell_when_the_report_is_drawn_again(tmp_path):
    report.write(tmp_path, result())
    path = tmp_path / "evidence.jsonl"
    text = path.read_text()
    assert '"kld":0.17' in text
    path.write_text(text.replace('"kld":0.17', '"kld":0.01'))
    page = report.report(tmp_path)["report.html"].read_text()
    assert "changed after it was written" in page
    assert "0.17 " not in " ".join(Outline(page).text).split("Decision matrix")[1][:200]


def test_the_store_of_a_run_in_the_same_folder_is_kept(tmp_path):
    Store(tmp_path / "evidence.jsonl").append(*GOOD, quality("tq3", 0.5))
    before = (tmp_path / "evidence.jsonl").read_bytes()
    report.write(tmp_path, result())
    assert (tmp_path / "evidence.jsonl").read_bytes() == before


def test_folders_that_hold_no_decision_are_named(tmp_path):
    with pytest.raises(RequestError, match=r"decision\.json: cannot be read"):
        report.report(tmp_path)
    (tmp_path / "decision.json").write_text("{")
    with pytest.raises(RequestError, match="not JSON"):
        report.report(tmp_path)
    (tmp_path / "decision.json").write_text('{"schema_version": 1}')
    with pytest.raises(RequestError, match="lacks decisions, policy"):
        report.report(tmp_path)


def test_an_out_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="--out"):
        report.write(tmp_path / "file" / "out", result())
