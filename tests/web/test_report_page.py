"""The report in a real browser: nothing overflows, nothing is loaded, nothing runs."""

import http.server
import json
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvproof import report
from kvproof.decision import Candidate, Policy, decide
from kvproof.evidence import Environment, Evidence, GatePass, Outcome
from kvproof.geometry import Geometry, LayerGeometry, Source
from kvproof.lanes import kv

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

HOSTILE = "x\"><script>document.title='RAN'</script><img src=http://{host}/pixel onerror=1>"
ABOUT = kv.About(
    "cpu",
    "ab" * 32,
    "m" * 64,
    "gemma-3-270m-" + 12 * "a_very_long_name_without_any_break_" + ".gguf",
    Environment("A processor with a long name @ 2.25GHz", "avx2", cores=2, versions={"torch": "2"}),
)


def records(policy):
    """Everything measured for every candidate, with figures that fall with the size."""
    out = []
    for i, pair in enumerate((Candidate("f16", "f16"), *policy.pairs())):
        gate = ABOUT.record(ABOUT.subject("gate", pair), Outcome.PASSED, {}, started="")
        size = {"bytes": 3e7 / (i + 1), "bytes_allocated": 3e7, "bytes_per_token": 3e3 / (i + 1)}
        out += [gate, *_passed("bytes", pair, size, context=policy.context)]
        kld = 0.0005 * 2**i
        triples = {"kld": kld, "same_top": 0.99 - 0.02 * i, "delta_nll": kld / 5}
        m = {"tokens": 2048, "kld_floor": 1e-6}
        for name, value in triples.items():
            m |= {name: value, f"{name}_low": 0.9 * value, f"{name}_high": 1.01 * value}
        out += _passed("quality", pair, m)
        for phase in ("pp", "tg"):
            for depth in policy.depths:
                m = {"ratio": 1 + i / 50, "ratio_low": 0.99 + i / 50, "ratio_high": 1.02 + i / 50}
                m |= {"rounds": 5, "tokens_per_second": 30.0, "tokens_per_second_f16": 30.0}
                kernels = f"layers 0-17: attention_{pair.key}_avx2; layers 0-17: encode_{pair.key}"
                out += _passed(
                    "speed", pair, m, gate=gate, phase=phase, depth=depth, kernels=kernels
                )
    return out


def _passed(kind, pair, metrics, gate: Evidence | None = None, **subject):
    gates = (GatePass(gate.id, gate.digest),) if gate else ()
    return [
        ABOUT.record(
            ABOUT.subject(kind, pair, **subject), Outcome.PASSED, metrics, started="", gates=gates
        )
    ]


def write(folder: Path, name: str) -> Path:
    policy = Policy()
    evidence = records(policy)
    layers = tuple(LayerGeometry(i, 4, 1, 256, 256, 512, None) for i in range(18))
    shape = Geometry("gemma3", layers, 32768, 640, 262144, None, Source(Path("x"), "gguf", {}, {}))
    about = replace(ABOUT, model_name=name)
    result = kv.Result(decide(evidence, policy), policy, evidence, about, shape, "a text")
    return report.write(folder, result)["report.html"]


def dom(page: str, width: int, profile: Path) -> str:
    """The page's DOM after it was laid out at a width, as Chromium prints it."""
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        f"--user-data-dir={profile}",
        f"--window-size={width},1200",
        "--virtual-time-budget=3000",
        "--dump-dom",
        page,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.fixture
def server(tmp_path):
    """A local server that notes every request."""
    seen = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def do_GET(self):
            seen.append(self.path)
            super().do_GET()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{running.server_port}", seen
        running.shutdown()


# The page forbids scripts, so it is measured from outside, in a frame of exactly the width.
MEASURE = """<!doctype html><body style="margin:0"><iframe id="f" src="report.html"
style="width:{width}px;height:2000px;border:0"></iframe><pre id="out"></pre><script>
f.onload = () => {{
  const d = f.contentDocument, root = d.documentElement, wide = [];
  for (const e of d.querySelectorAll("main *")) {{
    if (e.closest(".scroll, .chart")) continue;
    const box = e.getBoundingClientRect();
    if (box.right > {width} + 0.5 || box.left < -0.5) wide.push(e.tagName + "." + e.className);
  }}
  out.textContent = JSON.stringify({{scroll: root.scrollWidth, wide, title: d.title,
    tables: d.querySelectorAll("table").length, plots: d.querySelectorAll("svg").length,
    reason: Math.max(...[...d.querySelectorAll(".reason div")].map(
      e => e.getBoundingClientRect().right))}});
}};
</script></body>"""


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_the_page(server, tmp_path, width):
    host, seen = server
    write(tmp_path, ABOUT.model_name)
    (tmp_path / "measure.html").write_text(MEASURE.format(width=width))
    text = dom(f"http://{host}/measure.html", width + 40, tmp_path / "profile")
    found = json.loads(re.search(r'<pre id="out">(.*?)</pre>', text, re.S)[1])
    assert found["scroll"] <= width
    assert found["wide"] == []
    assert found["reason"] <= width
    assert (found["tables"], found["plots"]) == (3, 3)
    assert set(seen) <= {"/measure.html", "/report.html", "/favicon.ico"}


def test_a_hostile_name_neither_runs_nor_loads(server, tmp_path):
    host, seen = server
    write(tmp_path, HOSTILE.format(host=host))
    text = dom(f"http://{host}/report.html", 1280, tmp_path / "profile")
    assert "<title>RAN" not in text
    assert "KV cache of x" in text
    assert "<script" not in text and "<img" not in text
    assert seen == ["/report.html"]


def test_the_page_itself_forbids_scripts_and_loads(server, tmp_path):
    # Were something to slip through the escaping, the content security policy still stops it.
    host, seen = server
    page = write(tmp_path, "toy")
    injected = "<script>document.title = 'RAN'</script><img src='/pixel.png'></main>"
    page.write_text(page.read_text().replace("</main>", injected))
    text = dom(f"http://{host}/report.html", 1280, tmp_path / "profile")
    assert "<script>" in text
    assert "<title>RAN" not in text
    assert seen == ["/report.html"]
