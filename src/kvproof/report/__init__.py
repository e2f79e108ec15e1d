"""Decision + evidence -> decision.json, report.html (one self-contained page) and report.md.

The page loads nothing: styles and plots are inline, there is no script, and a content security
policy forbids both. Everything that comes from outside (model names, reasons, devices) is escaped.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvproof import __version__
from kvproof.decision import BASELINE, Candidate, Policy
from kvproof.errors import RequestError
from kvproof.evidence import Evidence, Outcome, Store
from kvproof.files import contents, replacing
from kvproof.report import plots

if TYPE_CHECKING:
    from kvproof.lanes.kv import Result

DECISION, EVIDENCE, PAGE, MARKDOWN = "decision.json", "evidence.jsonl", "report.html", "report.md"

# Order of the rows, and the mark that says the status where colour does not.
MAX_DECISION_BYTES = 1 << 26
STATUS_MARK = {
    "chosen": "★",
    "accepted": "✓",
    "baseline": "○",
    "inconclusive": "?",
    "rejected": "✕",
    "failed": "!",
    "not run": "…",
    "refused": "⊘",
}


def document(result: Result) -> dict[str, Any]:
    """What decision.json holds. Without clocks: equal evidence gives equal bytes."""
    g, about = result.geometry, result.about
    environment = about.environment
    return {
        "schema_version": 1,
        "decisions": [result.decision.as_dict()],
        "policy": result.policy.as_dict(),
        "model": {
            "name": about.model_name,
            "sha256": about.model,
            "architecture": g.architecture,
            "layers": _layer_groups(g),
        },
        "text": result.text,
        "environment": {
            "device": environment.device,
            "cpu": environment.cpu,
            "isa": environment.isa,
            "os": environment.os,
            "cores": environment.cores,
            "threads": environment.threads,
            "is_software": environment.is_software,
            "versions": dict(sorted({"kvproof": __version__, **environment.versions}.items())),
        },
        "digest": about.digest,
    }


def _layer_groups(geometry: Any) -> list[dict[str, Any]]:
    """Layers of one shape are one entry, in the order of their first layer."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for x in geometry.layers:
        shared = x.shares_kv_with is not None
        shape = (x.num_heads, x.num_kv_heads, x.head_dim_k, x.head_dim_v, x.window, shared)
        groups.setdefault(shape, []).append(x.index)
    names = ("num_heads", "num_kv_heads", "head_dim_k", "head_dim_v", "window", "shared")
    return [
        {"count": len(at), "layers": at, **dict(zip(names, shape, strict=True))}
        for shape, at in groups.items()
    ]


def write(out: str | Path, result: Result) -> dict[str, Path]:
    """Write decision.json, report.html and report.md into `out`; each appears whole or not at all.

    The evidence that the decision rests on is put beside them as evidence.jsonl unless the run's
    store is there already, so that `report(out)` can draw the page again.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"--out {folder}: cannot be created ({error.strerror}); name another folder"
        ) from error
    store = Store(folder / EVIDENCE)
    if not store.path.exists():
        store.append(*result.evidence)
    content = document(result)
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    paths = {DECISION: _replace(folder / DECISION, text)}
    return paths | _render(folder, content, result.evidence)


def report(directory: str | Path) -> dict[str, Path]:
    """Draw report.html and report.md again from decision.json and evidence.jsonl in a folder."""
    folder = Path(directory)
    content = read(folder / DECISION)
    evidence = Store(folder / EVIDENCE).read()
    held = {e.id for e in evidence}
    chosen = next(v for v in content["decisions"][0]["verdicts"] if v["status"] == "chosen")
    lost = [i for i in chosen["evidence"] if i not in held]
    if lost:
        raise RequestError(
            f"{folder / DECISION}: rests on evidence {reprlib.repr(lost[0])}, which "
            f"{EVIDENCE} beside it does not hold (anymore); run `kvproof decide` again"
        )
    return _render(folder, content, evidence)


# What decision.json must hold for its readers: lists have entries like their one entry here, a
# tuple names the types that are allowed.
_SHAPE: dict[str, Any] = {
    "schema_version": int,
    "decisions": [
        {
            "lane": str,
            "backend": str,
            "device": str,
            "chosen": {"key": str, "value": str},
            "reason": str,
            "evidence": [str],
            "flags": dict,
            "verdicts": [
                {"key": str, "value": str, "status": str, "reason": str, "evidence": [str]}
            ],
        }
    ],
    "policy": dict,
    "model": {
        "name": str,
        "sha256": str,
        "architecture": str,
        "layers": [
            {
                "count": int,
                "num_heads": int,
                "num_kv_heads": int,
                "head_dim_k": int,
                "head_dim_v": int,
                "window": (int, type(None)),
                "shared": bool,
            }
        ],
    },
    "text": str,
    "environment": {
        "device": str,
        "cpu": str,
        "isa": str,
        "os": str,
        "cores": int,
        "threads": int,
        "is_software": bool,
        "versions": dict,
    },
    "digest": str,
}


def _misfit(value: Any, shape: Any, where: str) -> str | None:
    """What in `value` is not as `shape` says, None if all of it is."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where or 'it'} is no object"
        lacking = [name for name in shape if name not in value]
        if lacking:
            return f"{where or 'it'} lacks {', '.join(lacking)}"
        inner = ((value[name], shape[name], f"{where}.{name}".lstrip(".")) for name in shape)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        inner = ((x, shape[0], f"{where}[{i}]") for i, x in enumerate(value))
    else:
        return None if isinstance(value, shape) else f"{where} is {reprlib.repr(value)}"
    return next(filter(None, (_misfit(*each) for each in inner)), None)


def read(path: Path) -> dict[str, Any]:
    """The content of a decision.json, its shape checked; RequestError says what is wrong."""
    try:
        content = json.loads(contents(path, MAX_DECISION_BYTES).decode())
    except OSError as error:
        raise RequestError(
            f"{path}: cannot be read ({error.strerror}); name a folder that `kvproof decide "
            "--out` wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON ({error}); run `kvproof decide` again") from error
    problem = _misfit(content, _SHAPE, "") or _contradiction(content)
    if problem:
        raise RequestError(f"{path}: {problem}; run `kvproof decide` again")
    try:
        Policy.from_dict(content["policy"])
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    return content  # type: ignore[no-any-return]


def _contradiction(content: Mapping[str, Any]) -> str | None:
    """How a decision.json of the right shape contradicts itself, None if it does not."""
    if content["schema_version"] != 1 or len(content["decisions"]) != 1:
        return "is of another version"
    decision = content["decisions"][0]
    verdicts = decision["verdicts"]
    strange = sorted({v["status"] for v in verdicts} - set(STATUS_MARK))
    if strange:
        return f"unknown verdict {reprlib.repr(strange[0])}"
    chosen = [{k: v[k] for k in ("key", "value")} for v in verdicts if v["status"] == "chosen"]
    if chosen != [decision["chosen"]]:
        return "the pair chosen is not the one whose verdict says so"
    if BASELINE not in [Candidate(v["key"], v["value"]) for v in verdicts]:
        return f"no verdict on {BASELINE.name}"
    return None


def _render(
    folder: Path, content: Mapping[str, Any], evidence: Sequence[Evidence]
) -> dict[str, Path]:
    return {
        PAGE: _replace(folder / PAGE, html(content, evidence)),
        MARKDOWN: _replace(folder / MARKDOWN, markdown(content, evidence)),
    }


# Control characters but tab and line feed (they steer a terminal that shows report.md), marks that
# turn text around, and halves of characters, which no file can hold.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def html(content: Mapping[str, Any], evidence: Sequence[Evidence]) -> str:
    """The page, as text."""
    page = _template("report.html.j2", content, evidence, autoescape=True)
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", page)


def markdown(content: Mapping[str, Any], evidence: Sequence[Evidence]) -> str:
    """The Markdown twin, as text."""
    page = _template("report.md.j2", content, evidence, autoescape=False)
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", page)


def _template(
    name: str, content: Mapping[str, Any], evidence: Sequence[Evidence], *, autoescape: bool
) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "mib": _mib,
        "md": _escape_markdown,
        "sig": lambda x: f"{x:.3g}",
    }
    return environment.get_template(name).render(view(content, evidence))


def _mib(n: float | None) -> str:
    if n is None:
        return "?"
    return f"{n / 2**20:.{2 if n < 100 * 2**20 else 0}f}"


def _escape_markdown(text: object) -> str:
    """Text that stays text within a Markdown table: no markup, no cell or line breaks."""
    flat = " ".join(str(text).split())
    return re.sub(r"([\\`*_{}\[\]<>#|~!])", r"\\\1", flat)


def view(content: Mapping[str, Any], evidence: Sequence[Evidence]) -> dict[str, Any]:
    """Everything that the templates show, as plain values."""
    decision = content["decisions"][0]
    policy = Policy.from_dict(content["policy"])
    relevant = [
        e
        for e in evidence
        if e.digest in (content["digest"], "") and e.subject.get("lane") == decision["lane"]
    ]
    by_id = {e.id: e for e in relevant if e.subject["kind"] != "quality-window"}
    rows = [_row(v, by_id, policy) for v in decision["verdicts"]]
    base = next(r for r in rows if r["pair"] == BASELINE.name)
    order = list(STATUS_MARK)
    rows.sort(key=lambda r: (order.index(r["status"]), r["bytes"] or float("inf"), r["pair"]))
    colour = 0
    for row in rows:
        colour += row is not base
        row["series"] = 0 if row is base else 1 + (colour - 1) % (plots.SERIES - 1)
        size, whole = row["bytes"], base["bytes"]
        row["share"] = size / whole if size is not None and whole else None
    used = {i for v in decision["verdicts"] for i in v["evidence"]}
    chosen = next(r for r in rows if r["status"] == "chosen")
    return {
        "decision": decision,
        # The page's heading says what comes before the colon.
        "why": _capital(decision["reason"].partition(": ")[2]),
        "policy": policy,
        "model": content["model"],
        "text": content.get("text", ""),
        "environment": content["environment"],
        "digest": content["digest"],
        "rows": rows,
        "base": base,
        "chosen": chosen,
        "keep_stock": chosen["pair"] == BASELINE.name,
        "contended": any(s["contended"] for r in rows for s in r["speeds"].values()),
        "mark": STATUS_MARK,
        "flags": decision["flags"],
        "not_run": _not_run(by_id.values(), rows),
        "unreadable": [e for e in evidence if e.subject["kind"] == "unreadable"],
        "evidence": [
            {
                "id": i,
                "used": i in used,
                "kind": e.subject["kind"],
                "pair": f"{e.subject.get('key', '')}/{e.subject.get('value', '')}",
                "what": _subject_text(e),
                "outcome": str(e.outcome),
                "reason": e.reason or "",
                "metrics": _metrics_text(e),
                "finished": e.finished[:19].replace("T", " "),
            }
            for i, e in sorted(by_id.items(), key=lambda p: (p[1].subject["kind"], p[1].finished))
        ],
        "quality_plot": plots.quality_against_bytes(rows, policy.kld_max),
        "speed_plots": [
            plots.speed_against_depth(rows, phase, least)
            for phase, least in (("tg", policy.tg_ratio_min), ("pp", policy.pp_ratio_min))
        ],
        "phases": [(phase, depth) for phase in ("tg", "pp") for depth in policy.depths],
        "latest": max((e.finished for e in by_id.values()), default="")[:16].replace("T", " "),
        "commits": sorted({e.commit for e in by_id.values()}),
    }


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _row(
    verdict: Mapping[str, Any], by_id: Mapping[str, Evidence], policy: Policy
) -> dict[str, Any]:
    """One row of the matrix: every figure that exists for the pair, decided on or not."""
    pair = Candidate(verdict["key"], verdict["value"])
    mine = [
        e
        for e in by_id.values()
        if (e.subject.get("key"), e.subject.get("value")) == (pair.key, pair.value)
    ]
    gate = [e for e in mine if e.subject["kind"] == "gate"]
    size = _best(e for e in mine if _is(e, "bytes") and e.subject["context"] == policy.context)
    quality = _best(e for e in mine if _is(e, "quality"))
    speeds = {}
    for phase in ("tg", "pp"):
        for depth in policy.depths:
            speed = _best(
                e
                for e in mine
                if _is(e, "speed") and (e.subject["phase"], e.subject["depth"]) == (phase, depth)
            )
            if speed is not None:
                # Timed on its own, after the rounds: on a busy machine it can come out longer.
                share = speed.metrics.get("attention_share")
                speeds[phase, depth] = {
                    **_interval(speed, "ratio"),
                    "rate": speed.metrics["tokens_per_second"],
                    "rate_f16": speed.metrics["tokens_per_second_f16"],
                    "attention": share if share is not None and share <= 1 else None,
                    "contended": bool(speed.metrics.get("contended", 0)),
                    "kernels": str(speed.subject.get("kernels", "")),
                }
    return {
        "pair": pair.name,
        "key": pair.key,
        "value": pair.value,
        "status": verdict["status"],
        "reason": verdict["reason"],
        "evidence": verdict["evidence"],
        "gate": _gate_text(gate),
        "bytes": size.metrics["bytes"] if size else None,
        "bytes_allocated": size.metrics["bytes_allocated"] if size else None,
        "bytes_per_token": size.metrics["bytes_per_token"] if size else None,
        "kld": _interval(quality, "kld") if quality else None,
        "same_top": _interval(quality, "same_top") if quality else None,
        "delta_nll": _interval(quality, "delta_nll") if quality else None,
        "quality": dict(quality.metrics) if quality else None,
        "speeds": speeds,
    }


def _is(e: Evidence, kind: str) -> bool:
    return e.subject["kind"] == kind and e.outcome is Outcome.PASSED


def _best(records: Iterable[Evidence]) -> Evidence | None:
    """The record that saw most; the choice that `decide` makes."""
    return max(
        records,
        key=lambda e: (e.metrics.get("tokens", e.metrics.get("rounds", 0)), e.id),
        default=None,
    )


def _interval(e: Evidence, name: str) -> dict[str, float]:
    return {
        "value": e.metrics[name],
        "low": e.metrics[f"{name}_low"],
        "high": e.metrics[f"{name}_high"],
    }


def _gate_text(gate: Sequence[Evidence]) -> str:
    if not gate:
        return "NOT_RUN"
    counts: dict[str, int] = {}
    for e in gate:
        counts[str(e.outcome)] = counts.get(str(e.outcome), 0) + 1
    if set(counts) == {"PASSED"}:
        return "PASSED"
    return ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))


def _not_run(evidence: Iterable[Evidence], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences about what is missing; what a later record made up for is left out."""
    measured: set[tuple[Any, ...]] = {
        (r["pair"], phase, depth) for r in rows for phase, depth in r["speeds"]
    }
    measured |= {(r["pair"], "quality") for r in rows if r["quality"]}
    measured |= {(r["pair"], "bytes") for r in rows if r["bytes"] is not None}
    missing: dict[tuple[str, str], list[str]] = {}
    for e in evidence:
        if e.outcome in (Outcome.PASSED, Outcome.FAILED):
            continue
        pair = f"{e.subject.get('key', '')}/{e.subject.get('value', '')}"
        kind = str(e.subject["kind"])
        done: tuple[Any, ...] = (pair, kind)
        if kind == "speed":
            done = (pair, e.subject.get("phase"), e.subject.get("depth"))
        if done not in measured:
            what = f"{kind} ({e.outcome})"
            names = missing.setdefault((what, e.reason or ""), [])
            if pair not in names:
                names.append(pair)
    return [f"{what}: {', '.join(sorted(names))}: {why}" for (what, why), names in missing.items()]


def _subject_text(e: Evidence) -> str:
    skip = {"kind", "lane", "backend", "model", "model_name", "key", "value", "tokens_sha256"}
    return ", ".join(f"{k} {v}" for k, v in sorted(e.subject.items()) if k not in skip)


def _metrics_text(e: Evidence) -> str:
    names = sorted(k for k in e.metrics if "." not in k)[:20]
    return ", ".join(f"{k} {e.metrics[k]:.5g}" for k in names)


def _replace(path: Path, text: str) -> Path:
    """Write through a temporary file in the same folder, so that no reader sees half a page."""
    try:
        with replacing(path, 0o644) as file:
            file.write(text.encode())
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error.strerror})") from error
    return path
