"""The gate: named checks of backends against the reference, as evidence.

`verify` runs everything, `gate_evidence` what one candidate needs before it may be measured, `run`
a single case. What is compared, and within which bounds, is in rules.py, public fixtures are in
fixtures.py, the routes through the caches in routes.py. mutants.py breaks kernels on purpose: each
must fail by the rules that it names, or the gate itself has FAILED.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvproof import backends as backend_registry
from kvproof import fixtures as public
from kvproof import routes
from kvproof.backends import Backend, tiles
from kvproof.backends.reference import source_digest
from kvproof.cases import ATTENTION_EDGES, EDGES, GQA, HEAD_DIMS, Case, masks
from kvproof.conditioner import KINDS
from kvproof.errors import Refused, RequestError
from kvproof.evidence import WORST_FIRST, Environment, Evidence, Outcome, aggregate, utc_now
from kvproof.formats import Format, all_formats
from kvproof.formats import get as format_named
from kvproof.mutants import MUTANTS, Broken
from kvproof.rules import (
    KERNEL_ERRORS,
    TRUTH,
    TRUTH_KEYS,
    TRUTH_QUERIES,
    Examination,
    differences,
    examine,
    examine_rows,
    pair,
)

if TYPE_CHECKING:
    from kvproof.captured import ModelRows

Progress = Callable[[str], None]
Subject = dict[str, str | int | float]
Captured = Callable[[Progress], "Iterable[tuple[str, ModelRows | str]]"]

# The eight checks of the public gate, and the format that each proves.
EIGHT = {
    "turbo3": "tbq3_0",
    "turbo4": "tbq4_0",
    "turbo3_tcq": "tbq3_tcq",
    "qjl": "qjl1_256",
    "polar": "q4_polar",
    "polar_res": "q4_polar_res",
    "polar_preht": "q4_polar",
    "polar_preht_res": "q4_polar_res",
}
FORMAT_CHECKS = (*EIGHT, "stock", "row")
# The same score by two operators: decode then dot, and stored values times the turned query.
BY_DECODING = ("polar", "polar_res")
BY_TURNING = ("polar_preht", "polar_preht_res")
FUSED_ROUTES = {
    "fused_attn_qjl_tbq": ("qjl1_256", "tbq3_0"),
    "fused_attn_qjl_polar": ("qjl1_256", "q4_polar_res"),
}
CASE_CHECKS = (
    "append", "arrangement", "fused", "gqa", "causal", "window", "split", "segments", "multi_block",
    *FUSED_ROUTES, "cache", "conditioned",
)  # fmt: skip
CHECKS = (
    "self_test", *FORMAT_CHECKS, *CASE_CHECKS, "cross", "dispatch", "captured", "shipped",
    "mutants",
)  # fmt: skip
IN_TILES = "tiles"  # the variant that holds a cache in tiles, whatever the backend does by itself
# What not every machine can run: NOT_RUN unless asked for by name leaves the outcome as it is.
OPTIONAL = ("captured", "shipped")
DEVICES = ("cuda",)  # backends of devices that a machine may lack: likewise


def checks_of(fmt: Format) -> tuple[str, ...]:
    """Names of the checks that prove a format's encode, decode and scores."""
    named = tuple(check for check, name in EIGHT.items() if name == fmt.name)
    return named or (("row",) if fmt.source.startswith("kvproof") else ("stock",))


# ---- what is checked -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One line of the result: a named check on a format (or pair) and head_dim, by its cases."""

    check: str
    variant: str
    cases: tuple[Case, ...]

    @property
    def title(self) -> str:
        """The formats: "tq4", or "tq4/f16" for a mixed pair."""
        case = self.cases[0]
        return case.key if case.value in ("", case.key) else f"{case.key}/{case.value}"


def _widths(fmt: Format, widths: Sequence[int] = HEAD_DIMS) -> list[int]:
    return [n for n in widths if fmt.refuses(n, "key") is None]


def _as_value(fmt: Format) -> Format:
    """The format, or for one of keys only the f16 values that go with it."""
    return fmt if "value" in fmt.sides else format_named("f16")


def _is_trellis(fmt: Format) -> bool:
    """Whether the reference searches a trellis, some milliseconds a row in NumPy."""
    return fmt.name == "tbq3_tcq" or fmt.name.startswith("tcq")


def _format_plans(check: str, fmt: Format, by_reference: bool) -> Iterator[Plan]:
    """Encode, decode, scores and truth of one format, at every head_dim it takes.

    `by_reference`: the backend is the reference, for which trellis formats get one truth only.
    """
    f, slow = fmt.name, _is_trellis(fmt)
    score = "dot" if check in BY_DECODING else "scores"
    truths = (128,) if slow and by_reference else (64, 128, 256)
    for n in _widths(fmt):
        edges = n == 128 if slow else n in (96, 128)
        kinds = ("normal", *EDGES) if edges else ("normal",)
        tokens = 13 if slow else 37
        shape: dict[str, Any] = {"head_dim": n, "n_kv": tokens, "num_kv_heads": 3, "num_heads": 3}
        if check not in BY_TURNING:
            encode = [Case("encode", f, inputs=kind, **shape) for kind in kinds]
            if n == 128:  # enough values for the few codes that a rounded scale changes
                encode.append(Case("encode", f, head_dim=n, n_kv=400, num_kv_heads=2))
            yield Plan(check, "encode", tuple(encode))
        for op in (score,) if check in BY_TURNING else ("decode", score):
            cases = [Case(op, f, inputs=kind, **shape, n_q=5) for kind in kinds]
            if op == "scores":
                small = shape | {"num_kv_heads": 1}
                cases += [Case(op, f, **small | {"num_heads": h}) for h in (1, 2, 4, 8)]
            yield Plan(check, op, tuple(cases))
        if n in truths:
            many: dict[str, Any] = {"head_dim": n, "n_kv": TRUTH_KEYS, "n_q": TRUTH_QUERIES}
            truth = [Case(score, f, **many)]
            if check not in BY_TURNING:
                truth.append(Case("decode", f, **many))
            yield Plan(check, "truth", tuple(truth))


BLOCKS_A_ROW = (1, 2, 3, 4, 8)
TOKENS = (1, 2, 3, 4, 8, 61)


def _multi_block_plans(fmt: Format) -> Iterator[Plan]:
    """Rows of 1 to 8 blocks (groups of 32 where a row is one block), and odd numbers of tokens."""
    block = max(32, fmt.multiple)
    for blocks in BLOCKS_A_ROW:
        shape: dict[str, Any] = {"head_dim": blocks * block, "num_heads": 2, "num_kv_heads": 1}
        # Eight queries: one score alone may be near 0, where a relative error says nothing.
        cases = [Case("scores", fmt.name, n_kv=t, n_q=8, **shape) for t in TOKENS]
        cases += [
            Case("attention", fmt.name, _as_value(fmt).name, n_kv=t, **shape) for t in (1, 3, 8, 61)
        ]
        yield Plan("multi_block", f"{blocks} blocks", tuple(cases))


def _mixed_pairs(rows: Sequence[Format]) -> Iterator[tuple[Format, Format]]:
    """Every key format with three value formats, every value format with at least two keys.

    All pairs are one kernel each way: a key format's scores know nothing of the values.
    """
    values = [f for f in rows if "value" in f.sides]
    for i, fmt in enumerate(rows):
        others = [v for v in values[i + 1 :] + values[: i + 1] if v is not fmt]
        for at in (0, 2, 5):
            if at < len(others):
                yield fmt, others[at]


def _fused_plans(rows: Sequence[Format], by_reference: bool) -> Iterator[Plan]:
    for fmt in rows:
        slow = by_reference and _is_trellis(fmt)
        base = Case(
            "attention", fmt.name, _as_value(fmt).name, head_dim=64, num_heads=4, num_kv_heads=2
        )
        for n in _widths(fmt):
            case = replace(base, head_dim=n, n_kv=131)
            edges = [
                replace(case, inputs=kind, n_q=3, n_kv=70)
                for kind in (ATTENTION_EDGES if n in (96, 128) else ())
            ]
            long = n in (64, 128, 256) and not slow
            truth = [replace(case, n_q=8, n_kv=TRUTH_KEYS)] if long else []
            sharp = replace(case, inputs="sharp", n_q=5)
            yield Plan("fused", "fused", (case, replace(case, n_q=17), sharp, *edges, *truth))
    for fmt, other in _mixed_pairs(rows):
        case = Case(
            "attention", fmt.name, other.name, num_heads=4, num_kv_heads=2, n_kv=131, head_dim=128
        )
        prefill = replace(case, n_q=9, n_kv=73, window=32)
        wide = replace(case, head_dim=256, head_dim_v=128, n_q=5, n_kv=33)
        yield Plan("fused", "mixed", (case, prefill, wide))


def _fused_route_plans(check: str) -> Iterator[Plan]:
    """The public fused operator, at its shapes and beyond: other widths, causal, long, split."""
    key, value = FUSED_ROUTES[check]
    for n in (128, 256, 512):
        base = Case("attention", key, value, head_dim=n, num_heads=4, num_kv_heads=2)
        public_shapes = [(1, 1, 64), (4, 2, 512), (8, 2, 256), (2, 1, 128)]
        shapes = [*(public_shapes if n == 128 else ()), (8, 1, 70)]
        cases = [replace(base, num_heads=h, num_kv_heads=kv, n_kv=t) for h, kv, t in shapes]
        cases += [replace(base, n_kv=t, n_q=q) for q, t in ((1, 1), (1, 18), (17, 40))]
        if n == 128:
            cases.append(replace(base, n_kv=700, num_heads=2, num_kv_heads=1, inputs="ramp"))
        yield Plan(check, "fused", tuple(cases))


def _operator_plans(check: str, rows: Sequence[Format], by_reference: bool) -> Iterator[Plan]:
    """Append, fused attention, GQA, causal masks, windows and splits."""
    if check == "fused":
        yield from _fused_plans(rows, by_reference)
        return
    if check in FUSED_ROUTES:
        if set(FUSED_ROUTES[check]) <= {f.name for f in rows}:
            yield from _fused_route_plans(check)
        return
    for fmt in rows:
        if check == "multi_block":
            yield from _multi_block_plans(fmt)
            continue
        n = max(64, fmt.multiple)
        base = Case(
            "attention", fmt.name, _as_value(fmt).name, head_dim=n, num_heads=4, num_kv_heads=2,
            n_kv=40,
        )  # fmt: skip
        if check == "append":  # token by token against bulk, a rule of every short encode
            for width in _widths(fmt, (64, 96, 256)):
                shape: dict[str, Any] = {"head_dim": width, "n_kv": 70, "num_kv_heads": 3}
                cases = [Case("encode", fmt.name, inputs=k, **shape) for k in ("normal", "mixed")]
                yield Plan(check, "encode", tuple(cases))
        elif check == "arrangement":
            # The reference is its own statement; row by row it takes long.
            for width in (
                w for w in _widths(fmt, (96,) if by_reference else HEAD_DIMS) if tiles.fits(fmt, w)
            ):
                shape = {"head_dim": width, "n_kv": 70, "num_kv_heads": 2}
                yield Plan(check, "pack", (Case("pack", fmt.name, **shape),))
        elif check == "conditioned":
            if TRUTH[fmt.name][1] < 0.2:  # a bound beyond that says nothing
                shown = replace(base, value="f16", n_kv=70)
                for kind in KINDS:
                    yield Plan(check, kind, (shown, replace(shown, window=32)))
        elif check == "cache":
            shown = replace(base, n_kv=47)
            yield Plan(check, "chunks", (shown, replace(shown, window=16)))
            if tiles.fit(fmt, fmt, n, n):
                longer = replace(base, n_kv=150)
                yield Plan(check, IN_TILES, (longer, replace(longer, window=40)))
        elif check == "gqa":
            cases = [
                replace(base, num_heads=h, num_kv_heads=kv, n_q=n_q)
                for h, kv in GQA
                for n_q in (1, 5)
            ]
            yield Plan(check, "fused", tuple(cases))
        elif check == "causal":
            cases = [
                replace(base, n_q=n_q, n_kv=n_kv, causal=causal)
                for n_q, n_kv in ((1, 1), (1, 18), (3, 40), (17, 40), (40, 40), (70, 131))
                for causal in (True, False)
            ]
            yield Plan(check, "fused", tuple(cases))
        elif check == "window":
            shapes = [m for window in (1, 8, 32) for m in masks(window)]
            shapes += [(1, 600, 512), (5, 600, 512), (3, 513, 512)]
            cases = [replace(base, n_q=n_q, n_kv=t, window=w) for n_q, t, w in shapes]
            yield Plan(check, "fused", tuple(cases))
        elif check == "split":
            cases = [
                replace(base, n_kv=t, n_q=n_q, inputs=kind, threads=3)
                for t, n_q in ((517, 1), (2100, 1), (4099, 1), (700, 33))
                for kind in ("ramp", "sharp")
                if t == 517 or not (by_reference and _is_trellis(fmt))
            ]
            yield Plan(check, "split", tuple(cases))
        elif check == "segments":
            # Pages smaller and larger than a tile and a softmax step, whose borders lie anywhere;
            # queries before, among and behind the rows given.
            paged = replace(base, lse=True)
            shapes_of: list[dict[str, Any]] = [
                {"n_kv": 131, "page": 64, "phase": 17},
                {"n_kv": 700, "page": 100, "phase": 250, "window": 512},
                {"n_kv": 600, "page": 256, "phase": 255, "inputs": "sharp"},
                {"n_kv": 73, "n_q": 9, "page": 7, "num_heads": 9, "num_kv_heads": 3},
                {"n_kv": 70, "n_q": 17, "position": -5},
                {"n_kv": 70, "n_q": 5, "position": 66, "page": 32, "phase": 1},
                {"n_kv": 70, "n_q": 5, "position": 90, "page": 16, "window": 40, "causal": False},
            ]
            cases = [replace(paged, **shape) for shape in shapes_of]
            yield Plan(check, "fused", tuple(cases))


def plans(
    checks: Iterable[str], rows: Sequence[Format], by_reference: bool = False
) -> Iterator[Plan]:
    """Everything that the named checks mean for these formats, as far as cases say it."""
    for check in checks:
        if check in FORMAT_CHECKS:
            for fmt in rows:
                if check in checks_of(fmt):
                    yield from _format_plans(check, fmt, by_reference)
        elif check in CASE_CHECKS:
            yield from _operator_plans(check, rows, by_reference)


# ---- evidence ------------------------------------------------------------------------------------


@functools.cache
def reference_digest() -> str:
    """SHA-256 of the sources that define the numbers; gate records name it as "reference"."""
    return source_digest()


@functools.cache
def gate_digest() -> str:
    """SHA-256 of the gate itself: rules, cases, tolerances, mutants, fixtures, routes."""
    folder = Path(__file__).parent
    names = ("cases.py", "rules.py", "fixtures.py", "mutants.py", "routes.py", "gate.py")
    return hashlib.sha256(b"".join((folder / n).read_bytes() for n in names)).hexdigest()


def run(case: Case, backend: Backend, environment: Environment | None = None) -> Evidence:
    """Gate one case on a backend."""
    return _judge(Plan("case", case.op, (case,)), backend, environment or _here(backend))


def _here(backend: Backend) -> Environment:
    return Environment.current(backend.environment())


def _identity(*formats: Format) -> Subject:
    """What the bytes of these formats do not say and evidence must: projection and codebook."""
    out: Subject = {}
    for fmt in formats:
        if fmt.projection_id:
            out["projection_id"] = fmt.projection_id
        if fmt.codebook_digest:
            name = "codebook_digest" if "codebook_digest" not in out else "codebook_digest_v"
            out[name] = fmt.codebook_digest
    return out


def _record(
    subject: Mapping[str, str | int | float],
    outcome: Outcome,
    reason: str | None,
    environment: Environment,
    digest: str,
    started: str,
    metrics: Mapping[str, float] | None = None,
) -> Evidence:
    whole: Subject = {"kind": "gate", "fixture": "generated", "reference": reference_digest()}
    if subject.get("backend") == "cpu":
        whole["binary"] = binary()[0]
    if outcome is Outcome.PASSED and environment.is_software:
        outcome, reason = Outcome.DIAGNOSTIC, f"{environment.device} is a software device"
    return Evidence(
        subject={**whole, "gate": gate_digest()[:16], **subject},
        outcome=outcome,
        metrics=dict(metrics or {}),
        environment=environment,
        digest=digest,
        reason=reason,
        started=started,
        finished=utc_now(),
    )


def _judge(plan: Plan, backend: Backend, environment: Environment) -> Evidence:
    """Run a plan and fold its examinations into one record."""
    started = utc_now()
    case = plan.cases[0]
    key, value = pair(case)
    subject: Subject = {
        "check": plan.check, "variant": plan.variant, "backend": backend.name,
        "format": plan.title, "key": key.name, "value": value.name, "op": case.op,
        "head_dim": case.head_dim, "n_heads": case.num_heads, "n_kv_heads": case.num_kv_heads,
        "n_tokens": case.n_kv, "seed": case.seed, "cases": len(plan.cases),
    }  # fmt: skip
    subject |= _identity(*dict.fromkeys((key, value)))
    for one in plan.cases:
        for fmt, width in zip(
            pair(one), (one.head_dim, one.head_dim_v or one.head_dim), strict=True
        ):
            op = {"dot": "decode", "pack": "encode"}.get(one.op, one.op)
            refused = backend.refuses("encode", fmt, width) or backend.refuses(op, fmt, width)
            if refused is None and one.op == "pack" and not backend.arrangement.fits(fmt, width):
                refused = f"{fmt.name}: backend {backend.name} holds no head_dim {width} in tiles"
            if refused:
                return _record(
                    subject, Outcome.REFUSED, refused, environment, backend.digest(), started
                )
    subject["kernel"] = backend.kernel(
        "decode" if case.op == "dot" else case.op, key, case.head_dim
    )
    look: Callable[..., Examination] = examine
    if plan.variant == IN_TILES:
        # Sound, only told where to keep rows.
        backend = Broken(backend, arranges=backend.arrangement.fit)
    if plan.check == "cache":
        look = routes.examine_cache
    elif plan.check == "conditioned":
        look = functools.partial(routes.examine_conditioned, kind=plan.variant)
    exams = [look(one, backend) for one in plan.cases]
    outcome, reason, metrics = _fold(exams)
    return _record(subject, outcome, reason, environment, backend.digest(), started, metrics)


def _fold(exams: Sequence[Examination]) -> tuple[Outcome, str | None, dict[str, float]]:
    """Outcome, reason and worst figures of several examinations; none at all is FAILED."""
    metrics: dict[str, float] = {}
    for exam in exams:
        for name, value in exam.metrics.items():
            worse = min if name in ("correlation", "guarded") else max
            metrics[name] = worse(value, metrics.get(name, value))
    metrics["outputs"] = sum(exam.outputs for exam in exams)
    metrics["outputs_expected"] = sum(exam.expected for exam in exams)
    missed = [(exam, finding) for exam in exams for finding in exam.failed]
    texts = [f"{f.rule}: {f.text} ({e.case})" for e, f in missed[:3]]
    if len(missed) > 3:
        texts.append(f"and {len(missed) - 3} more")
    if not metrics["outputs"]:
        texts.append("no outputs were compared")
    elif metrics["outputs"] < metrics["outputs_expected"]:
        texts.append(
            f"only {metrics['outputs']} of {metrics['outputs_expected']} outputs were compared"
        )
    if texts:
        return Outcome.FAILED, "; ".join(texts), metrics
    return Outcome.PASSED, None, metrics


def row(record: Evidence) -> dict[str, Any]:
    """A record as one line of `kvproof verify --json`."""
    subject, metrics = record.subject, record.metrics
    encoded = subject.get("op") in ("encode", "pack")
    return {
        "check": subject.get("check"),
        "variant": subject.get("variant"),
        "backend": subject.get("backend"),
        "format": subject.get("format"),
        "head_dim": subject.get("head_dim"),
        "fixture": subject.get("fixture"),
        "outcome": str(record.outcome),
        "reason": record.reason,
        "required": bool(subject.get("required", 1)),
        "worst_error": metrics.get("wrong_rows") if encoded else metrics.get("nmse"),
        "bound": 0.0 if encoded else metrics.get("bound"),
        "outputs": int(metrics.get("outputs", 0)),
        "outputs_expected": int(metrics.get("outputs_expected", 0)),
        "kernel": subject.get("kernel"),
        "binary": subject.get("binary"),
        "evidence": record.id,
    }


def verify(
    backends: str | Sequence[str] = "all",
    checks: Sequence[str] | None = None,
    fixtures: str | Path | None = None,
    formats: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """The results of `kvproof verify`, one dict a line; see `verify_evidence` and `row`."""
    return [row(e) for e in verify_evidence(backends, checks, fixtures, formats, progress)]


def outcome_of(results: Iterable[Mapping[str, Any]]) -> Outcome:
    """Aggregate outcome of `verify` results (evidence.exit_code gives the exit code).

    What could not be run and was not required is left out; nothing else is, and nothing left is
    FAILED.
    """
    return aggregate(
        Outcome(r["outcome"])
        for r in results
        if r["outcome"] != Outcome.NOT_RUN or r.get("required", True)
    )


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `kvproof verify` says of its results: a table of check x backend with the outcome, the
    error nearest to (or farthest beyond) its bound, and counts; what did not pass and why; checks
    and outputs counted apart."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for r in results:
        groups.setdefault((r["check"] or "", r["backend"] or ""), []).append(r)
    table = []
    for (check, backend), rows in groups.items():
        measured = [r for r in rows if r["worst_error"] is not None and r["bound"] is not None]
        worst = max(measured, key=lambda r: r["worst_error"] / (r["bound"] or 1e-300), default={})
        table.append(
            {
                "check": check, "backend": backend,
                "outcome": str(aggregate(Outcome(r["outcome"]) for r in rows)),
                "worst_error": worst.get("worst_error"), "bound": worst.get("bound"),
                "worst_format": worst.get("format"), "rows": len(rows),
                "outputs": sum(r["outputs"] for r in rows),
                "outputs_expected": sum(r["outputs_expected"] for r in rows),
            }
        )  # fmt: skip
    named: dict[str, set[str]] = {}
    for line in table:
        named.setdefault(line["check"], set()).add(line["outcome"])
    passed = {check for check, outcomes in named.items() if outcomes == {str(Outcome.PASSED)}}
    mutants = [r for r in results if r["check"] == "mutants"]
    return {
        "table": table,
        "not_passed": _not_passed(results),
        "eight": {"passed": len(passed & set(EIGHT)), "of": len(EIGHT)},
        "checks": {"passed": len(passed), "of": len(named)},
        "outputs": sum(r["outputs"] for r in results),
        "outputs_expected": sum(r["outputs_expected"] for r in results),
        "mutants": {
            "caught": sum(r["outcome"] == Outcome.PASSED for r in mutants),
            "of": len(mutants), "kinds": len({r["variant"] for r in mutants}),
            "survivors": [f"{r['variant']} {r['format']}" for r in mutants
                          if r["outcome"] != Outcome.PASSED],
        },
    }  # fmt: skip


def _not_passed(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for every reason, worst first; what it concerns is named once."""
    lines: dict[tuple[str, str], list[str]] = {}
    for r in results:
        if r["outcome"] != Outcome.PASSED:
            parts = (r["check"], r["backend"], r["variant"], r["format"], r["head_dim"])
            where = " ".join(str(part) for part in parts if part)
            lines.setdefault((r["outcome"], r["reason"]), []).append(where)
    worst = sorted(lines, key=lambda line: WORST_FIRST.index(Outcome(line[0])))
    texts = []
    for outcome, reason in worst:
        places = lines[outcome, reason]
        more = f" and {len(places) - 1} more" if places[1:] else ""
        texts.append(f"{outcome}: {places[0]}{more}: {reason}")
    return texts


def verify_evidence(
    backends: str | Sequence[str] = "all",
    checks: Sequence[str] | None = None,
    fixtures: str | Path | None = None,
    formats: Sequence[str] | None = None,
    progress: Progress | None = None,
    captured: Captured | None = None,
) -> list[Evidence]:
    """Run the gate: named checks (default: all) on named backends, for named formats.

    `captured` yields (model, its rows or why there are none): `kvproof.captured.known`.

    `fixtures` is a folder of public fixture files, reproduced by the reference and by the kernels.
    Unknown names and unreadable fixtures raise RequestError; a backend that is absent is NOT_RUN.
    A selection that is empty is FAILED.
    """
    say = progress or (lambda text: None)
    for check in checks or ():
        if check not in CHECKS:
            raise RequestError(f"--check {check}: unknown; choose from {', '.join(CHECKS)}")
    wanted = tuple(dict.fromkeys(checks)) if checks is not None else CHECKS
    rows = list(all_formats())
    if formats is not None:
        rows = [format_named(f) for f in dict.fromkeys(formats)]
    everything = backends in ("all", ["all"], ("all",))
    named = backend_registry.names() if everything else backends
    names = [named] if isinstance(named, str) else list(dict.fromkeys(named))
    found: dict[str, Backend] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            found[name] = backend_registry.get(name)
        except Refused as refused:
            absent[name] = str(refused)
    files = public.read(Path(fixtures)) if fixtures is not None else []

    done: list[Evidence] = []
    if "self_test" in wanted and (formats is None or checks is not None):
        done += _self_test_records(say)
    if fixtures is not None:
        done += _fixture_records(files, Path(fixtures), checks, list(found.values()), say)
    for name in names:
        if name in absent:
            own = [check for check in wanted if check != "self_test"]
            required = int(name not in DEVICES or not everything)
            done += [
                _not_run({"check": c, "backend": name, "required": required}, absent[name])
                for c in own
            ]
            continue
        backend = found[name]
        environment = _here(backend)
        for plan in plans(wanted, rows, name == "reference"):
            say(f"{name}: {plan.check} {plan.variant} {plan.title} {plan.cases[0].head_dim}")
            done.append(_judge(plan, backend, environment))
        if "captured" in wanted:
            done += _captured_records(backend, rows, say, checks is not None, captured)
        for check, records in _WHOLE_CHECKS.items():
            if check in wanted:
                asked = checks is not None or check not in OPTIONAL
                done += records(backend, rows, say, asked)
    if not done:
        empty = (
            f"nothing to check: {', '.join(wanted)} has no case of "
            f"{', '.join(f.name for f in rows)}; leave one of --check and --format out"
        )
        done.append(
            _record(
                {"check": "none", "backend": ",".join(names)}, Outcome.FAILED, empty,
                Environment.current(), "", utc_now(),
            )
        )  # fmt: skip
    return done


def _not_run(subject: Mapping[str, str | int | float], reason: str) -> Evidence:
    return _record(subject, Outcome.NOT_RUN, reason, Environment.current(), "", utc_now())


# ---- checks that are more than cases on one backend ----------------------------------------------


def _folded(
    subject: Mapping[str, str | int | float],
    exams: Sequence[Examination],
    environment: Environment,
    digest: str,
    started: str,
) -> Evidence:
    outcome, reason, metrics = _fold(exams)
    return _record(subject, outcome, reason, environment, digest, started, metrics)


def _reference_environment() -> Environment:
    return Environment.current({"device": "NumPy float64", "isa": "numpy"})


def _self_test_records(say: Progress) -> list[Evidence]:
    """The reference against published scores and against itself (gate.md section 4)."""
    environment, records = _reference_environment(), []
    for variant, fmt, exam in public.self_test():
        started = utc_now()
        say(f"reference: self_test {variant}")
        subject: Subject = {
            "check": "self_test", "variant": variant, "backend": "reference", "format": fmt,
            "op": "scores", "head_dim": public.GROUP, "fixture": "published",
        }  # fmt: skip
        records.append(_folded(subject, [exam], environment, reference_digest(), started))
    return records


def _fixture_records(
    files: Sequence[public.Fixture],
    folder: Path,
    asked: Sequence[str] | None,
    backends: Sequence[Backend],
    say: Progress,
) -> list[Evidence]:
    """Every file of a folder by the reference, and by the kernels of the given backends."""
    records = []
    on: list[tuple[Backend | None, Environment]] = [(None, _reference_environment())]
    on += [(b, _here(b)) for b in backends if b.name != "reference"]
    held = set()
    for file in files:
        shown = {part.check for part in file.parts}
        held |= shown
        if asked is not None and not shown & set(asked):
            continue
        for backend, environment in on:
            name = "reference" if backend is None else backend.name
            digest = reference_digest() if backend is None else backend.digest()
            common: Subject = {
                "backend": name, "fixture": file.path.name, "head_dim": public.GROUP,
                "fixture_sha256": file.sha256,
            }  # fmt: skip
            for check in dict.fromkeys(part.check for part in file.parts):
                parts = [p for p in file.parts if p.check == check]
                if backend is not None:
                    parts = [p for p in parts if not p.legacy]
                if not parts or (asked is not None and check not in asked):
                    continue
                started = utc_now()
                say(f"{name}: {check} fixture {file.path.name}")
                exams = [public.examine_part(part, backend) for part in parts]
                subject = common | {
                    "check": check, "variant": "fixture", "format": parts[0].name,
                    "op": "attention" if parts[0].value else "scores",
                }  # fmt: skip
                subject |= _identity(parts[0].key)
                records.append(_folded(subject, exams, environment, digest, started))
            started = utc_now()
            exam = public.examine_bytes(file, backend)
            if exam is not None:
                subject = common | {
                    "check": file.parts[0].check, "variant": "fixture bytes", "op": "encode",
                    "format": file.parts[0].name,
                }  # fmt: skip
                records.append(_folded(subject, [exam], environment, digest, started))
    checks_of_files = {*EIGHT, *FUSED_ROUTES}
    lacking = [c for c in asked or () if c in checks_of_files - held]
    if not files and asked is None:
        lacking = ["fixtures"]
    for check in lacking:
        what = "file" if check == "fixtures" else check
        records.append(
            _record(
                {"check": check, "variant": "fixture", "backend": "reference"}, Outcome.FAILED,
                f"--fixtures {folder}: holds no {what} fixture", _reference_environment(), "",
                utc_now(),
            )
        )  # fmt: skip
    return records


def _variants(backend: Backend) -> list[tuple[str, Backend]]:
    """A backend once for each of the kernel sets that this machine can run, with a name of each."""
    if backend.name != "cpu":
        return [(backend.name, backend)]
    from kvproof.backends.cpu import CpuBackend, isas

    return [(f"cpu {isa}", CpuBackend(isa)) for isa, here in isas().items() if here]


def _cross_records(
    backend: Backend, rows: Sequence[Format], say: Progress, asked: bool
) -> list[Evidence]:
    """Rows encoded by A, attended to by B, for all A that are not B; B is this backend."""
    known = []
    for name in backend_registry.names():
        with contextlib.suppress(Refused):
            known += _variants(backend_registry.get(name))
    records = []
    for reader, attender in _variants(backend):
        environment = _here(attender)
        for writer, encoder in known:
            if writer == reader:
                continue
            for fmt in rows:
                started, value = utc_now(), _as_value(fmt)
                n = max(64, fmt.multiple)
                say(f"{reader}: cross {fmt.name} encoded on {writer}")
                subject: Subject = {
                    "check": "cross", "variant": f"{writer} to {reader}",
                    "backend": backend.name, "format": fmt.name, "op": "attention", "head_dim": n,
                    "encoder": writer, "encoder_digest": encoder.digest(),
                }  # fmt: skip
                subject |= _identity(fmt)
                refused = encoder.refuses("encode", fmt, n) or next(
                    filter(None, (attender.refuses(op, fmt, n) for op in ("encode", "attention"))),
                    None,
                )
                if refused:
                    records.append(
                        _record(
                            subject, Outcome.REFUSED, refused, environment, attender.digest(),
                            started,
                        )
                    )  # fmt: skip
                    continue
                both = Broken(attender, encode=encoder.encode)
                case = Case(
                    "attention", fmt.name, value.name, head_dim=n, num_heads=4, num_kv_heads=2,
                    n_kv=70, n_q=3,
                )  # fmt: skip
                exams = [examine(one, both) for one in (case, replace(case, inputs="mixed"))]
                exams.append(_same_bytes(replace(case, op="encode"), encoder, attender))
                subject["kernel"] = attender.kernel("attention", fmt, n)
                records.append(_folded(subject, exams, environment, attender.digest(), started))
    if not records:
        subject = {"check": "cross", "backend": backend.name}
        records.append(_not_run(subject, "there is no second backend on this machine"))
    return records


def _same_bytes(case: Case, a: Backend, b: Backend) -> Examination:
    exam = Examination(case)
    fmt, arrays = format_named(case.key), case.arrays()
    try:
        one, two = (
            np.asarray(backend.encode(fmt, arrays.k, scale=arrays.k_scale)) for backend in (a, b)
        )
    except KERNEL_ERRORS as error:
        exam.note("crash", False, f"encode raised {type(error).__name__}: {error}")
        return exam
    exam.expected = exam.outputs = one.size
    ties, wrong = differences(fmt, arrays.k, arrays.k_scale, one, two)
    exam.note("bytes", wrong == 0 and ties <= 1, f"{wrong} rows differ, {ties} more only at ties")
    return exam


def _dispatch_records(
    backend: Backend, rows: Sequence[Format], say: Progress, asked: bool
) -> list[Evidence]:
    """The nine public routes through the caches that users run."""
    environment, records = _here(backend), []
    names = {f.name for f in rows}
    for route in routes.ROUTES:
        if not {route.key, route.value} <= names | {"f16"}:
            continue
        for n in routes.WIDTHS:
            for entry in routes.ENTRIES:
                started = utc_now()
                say(f"{backend.name}: dispatch {route.name} {entry} {n}")
                key = format_named(route.key)
                subject: Subject = {
                    "check": "dispatch", "variant": f"{route.name} {entry}",
                    "backend": backend.name, "format": route.title, "op": "attention",
                    "head_dim": n, "kernel": backend.kernel("attention", key, n),
                }  # fmt: skip
                subject |= _identity(key)
                refused = routes.refused(route, n, backend)
                if refused:
                    records.append(
                        _record(
                            subject, Outcome.REFUSED, refused, environment, backend.digest(),
                            started,
                        )
                    )  # fmt: skip
                    continue
                lacking = routes.lacking(entry)
                if lacking:
                    records.append(_not_run(subject | {"required": int(asked)}, lacking))
                    continue
                exam = routes.examine(route, n, entry, backend)
                records.append(_folded(subject, [exam], environment, backend.digest(), started))
    return records


@functools.cache
def binary() -> tuple[str, str]:
    """("shipped", file) if the loaded kernels are the file that the installed wheel's RECORD lists,
    by digest; ("source", why) where no wheel is installed; ("changed", why) where they differ."""
    try:
        import kvproof._kernels as kernels
    except ModuleNotFoundError:
        return "source", "there are no compiled kernels"
    loaded = Path(kernels.__file__).resolve()
    try:
        files = metadata.distribution("kvproof").files or []
    except metadata.PackageNotFoundError:
        return "source", "kvproof is not installed"
    for file in files:
        if Path(str(file.locate())).resolve() == loaded:
            if file.hash is None or file.hash.mode != "sha256":
                return "changed", f"RECORD has no SHA-256 of {file}"
            digest = hashlib.sha256(loaded.read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value:
                return "shipped", str(file)
            return "changed", f"{loaded} is not the file that RECORD lists"
    return "source", "not an installed wheel"


def _captured_records(
    backend: Backend, rows: Sequence[Format], say: Progress, asked: bool, captured: Captured | None
) -> list[Evidence]:
    """Rows of real models: bytes, parity, and the output error by layer and head, worst first."""
    base: Subject = {
        "check": "captured", "backend": backend.name, "op": "attention", "required": int(asked),
    }  # fmt: skip
    if backend.name == "reference":
        reason = "captured rows are for kernels; the reference is what they are held to"
        return [_not_run(base, reason)] if asked else []
    if captured is None:
        return [_not_run(base, "no rows were given: `kvproof verify` captures them")]
    environment, records = _here(backend), []
    for model, found in captured(say):
        if isinstance(found, str):
            records.append(_not_run(base | {"variant": model}, found))
            continue
        widths = {w for x in found.layers for w in (x.rows.k.shape[-1], x.rows.v.shape[-1])}
        for fmt in rows:
            if any(fmt.refuses(n, "key") for n in widths):
                continue
            started, value = utc_now(), _as_value(fmt)
            say(f"{backend.name}: captured {model} {fmt.name}")
            subject = base | {
                "variant": model, "fixture": "captured", "format": fmt.name,
                "head_dim": max(widths), "n_tokens": found.tokens, "layers": len(found.layers),
                "model_sha256": found.model, "text_sha256": found.text,
                "kernel": backend.kernel("attention", fmt, max(widths)),
            }  # fmt: skip
            subject |= _identity(fmt)
            refused = [
                why
                for f in (fmt, value)
                for n in widths
                for op in ("encode", "attention")
                if (why := backend.refuses(op, f, n))
            ]
            if refused:
                records.append(
                    _record(
                        subject, Outcome.REFUSED, refused[0], environment, backend.digest(),
                        started,
                    )
                )  # fmt: skip
                continue
            exams, by_head = [], []
            for layer in found.layers:
                exam, errors = examine_rows(model, fmt, value, layer, backend)
                exams.append(exam)
                by_head += [(e, f"layer {layer.rows.index} head {h}") for h, e in enumerate(errors)]
            worst = sorted(by_head, reverse=True)[:3]
            subject["worst_first"] = ", ".join(f"{where} {error:.1e}" for error, where in worst)
            records.append(_folded(subject, exams, environment, backend.digest(), started))
    return records


def observe_captured(backend: Backend, captured: Captured) -> dict[tuple[str, str], float]:
    """Worst output error by model and format on captured rows (see rules.CAPTURED)."""
    worst: dict[tuple[str, str], float] = {}
    for model, found in captured(lambda _: None):
        if isinstance(found, str):
            raise RequestError(f"{model}: {found}")
        for fmt in all_formats():
            if any(fmt.refuses(x.rows.k.shape[-1], "key") for x in found.layers):
                continue
            errors = [
                e
                for layer in found.layers
                for e in examine_rows(model, fmt, _as_value(fmt), layer, backend)[1]
            ]
            worst[model, fmt.name] = max(errors)
    return worst


def _shipped_records(
    backend: Backend, rows: Sequence[Format], say: Progress, asked: bool
) -> list[Evidence]:
    """Whether the kernels under test are the ones of the installed wheel."""
    started, subject = utc_now(), {"check": "shipped", "variant": "shipped", "op": "encode"}
    if backend.name != "cpu":  # the reference ships as the sources that ran
        return []
    kind, what = binary()
    whole: Subject = {**subject, "backend": "cpu", "required": int(asked), "file": what}
    if kind == "source":
        return [_not_run(whole, what)]
    exam = Examination(Case("encode", "f16"))
    exam.expected = exam.outputs = 1
    exam.most("wrong_rows", float(kind != "shipped"))
    exam.note("bytes", kind == "shipped", what)
    return [_folded(whole, [exam], _here(backend), backend.digest(), started)]


def _mutant_records(
    backend: Backend, rows: Sequence[Format], say: Progress, asked: bool
) -> list[Evidence]:
    return mutant_evidence(backend, rows, say)


def _refused(backend: Backend, shown: Iterable[str], head_dim: int) -> bool:
    """Whether a backend lacks what breaking a kernel of these formats needs."""
    ops = ("encode", "decode", "attention")
    return any(backend.refuses(op, format_named(f), head_dim) for f in shown for op in ops)


def mutant_evidence(
    backend: Backend, rows: Sequence[Format] | None = None, progress: Progress | None = None
) -> list[Evidence]:
    """Every mutant of the given formats on a backend: PASSED if the rules it names caught it."""
    names = {f.name for f in rows} if rows is not None else {f.name for f in all_formats()}
    environment, records = _here(backend), []
    for mutant in MUTANTS:
        shown = {mutant.case.key, mutant.case.value or mutant.case.key}
        if not shown <= names or _refused(backend, shown, mutant.case.head_dim):
            continue
        if progress:
            progress(f"{backend.name}: mutants {mutant.name} {mutant.case.key}")
        started = utc_now()
        exam = mutant.examine(backend)
        caught = mutant.caught(exam)
        subject: Subject = {
            "check": "mutants", "variant": mutant.name, "backend": backend.name,
            "op": mutant.case.op, "format": mutant.case.key, "head_dim": mutant.case.head_dim,
            "rules": ",".join(sorted(mutant.rules)),
            "caught_by": ",".join(sorted(exam.rules_failed)),
        }  # fmt: skip
        reason = None
        if not caught:
            reason = (
                f"survived: expected to fail by {', '.join(sorted(mutant.rules))}, failed by "
                f"{', '.join(sorted(exam.rules_failed)) or 'nothing'} ({mutant.case})"
            )
        figures = {"outputs": exam.outputs, "outputs_expected": exam.outputs}
        records.append(
            _record(
                subject, Outcome.PASSED if caught else Outcome.FAILED, reason, environment,
                backend.digest(), started, figures,
            )
        )  # fmt: skip
    return records


_WHOLE_CHECKS: dict[str, Callable[[Backend, Sequence[Format], Progress, bool], list[Evidence]]] = {
    "cross": _cross_records,
    "dispatch": _dispatch_records,
    "shipped": _shipped_records,
    "mutants": _mutant_records,
}


# ---- one candidate -------------------------------------------------------------------------------


def gate_evidence(
    format_pair: tuple[str, str],
    head_dims: Iterable[int | tuple[int, int]],
    backend: str | Backend,
    progress: Progress | None = None,
    *,
    heads: Iterable[tuple[int, int]] = ((4, 1), (4, 2)),
    windows: Iterable[int | None] = (None,),
) -> list[Evidence]:
    """What one candidate needs before it may be measured: a few seconds on the CPU backend.

    `format_pair` is (key, value); `head_dims` the model's, as d or (key d, value d); `heads` its
    (num_heads, num_kv_heads); `windows` its sliding windows, None for global layers. Encode,
    decode, scores with truth, and attention (decode, prefill, masks, split) per head_dim.
    """
    if isinstance(backend, str):
        backend = backend_registry.get(backend)
    key, value = (format_named(name).name for name in format_pair)
    environment, done = _here(backend), []
    masks_wanted = list(dict.fromkeys([None, *windows]))
    for dims in dict.fromkeys(head_dims):
        width, width_v = dims if isinstance(dims, tuple) else (dims, dims)
        arranged = backend.arranges(format_named(key), format_named(value), width, width_v)
        for plan in _candidate_plans(
            key, value, width, width_v, list(heads), masks_wanted, arranged
        ):
            if progress:
                progress(f"{backend.name}: gate {plan.variant} {plan.title} {width}")
            done.append(_judge(plan, backend, environment))
    return done


def _candidate_plans(
    key: str,
    value: str,
    width: int,
    width_v: int,
    heads: Sequence[tuple[int, int]],
    windows: Sequence[int | None],
    arranged: bool,
) -> Iterator[Plan]:
    kinds = ("normal", "outlier", "mixed", "some_zero", "limit")
    sides = {(key, width), (value, width_v)}
    for name, n in sorted(sides):
        shape: dict[str, Any] = {"head_dim": n, "n_kv": 24, "num_kv_heads": 2, "num_heads": 2}
        for op in ("encode", "decode"):
            cases = [Case(op, name, inputs=kind, **shape) for kind in kinds]
            if op == "decode":
                cases.append(Case(op, name, head_dim=n, n_kv=TRUTH_KEYS))
            yield Plan("candidate", op, tuple(cases))
    if arranged:
        for name, n in sorted(sides):
            case = Case("pack", name, head_dim=n, n_kv=70, num_kv_heads=2)
            yield Plan("candidate", "pack", (case,))
    many = Case("scores", key, head_dim=width, n_kv=TRUTH_KEYS, n_q=TRUTH_QUERIES)
    edges = [replace(many, n_kv=33, n_q=3, inputs=kind) for kind in kinds]
    yield Plan("candidate", "scores", (many, *edges))
    cases = []
    for num_heads, num_kv_heads in heads:
        base = Case(
            "attention", key, value, head_dim=width, head_dim_v=width_v,
            num_heads=num_heads, num_kv_heads=num_kv_heads,
        )  # fmt: skip
        cases += [replace(base, n_kv=700, threads=3), replace(base, n_kv=65, n_q=17)]
        cases.append(replace(base, n_kv=TRUTH_KEYS, n_q=max(8, -(-32 // num_heads))))
        cases += [replace(base, n_kv=70, n_q=3, inputs=kind) for kind in kinds[1:]]
        cases += [replace(base, n_kv=600, inputs="ramp"), replace(base, n_kv=77, inputs="sharp")]
        for window in (w for w in windows if w is not None):
            for n_q in (1, 7):
                for n_kv in (window, window + 1, 2 * window + 1):
                    cases.append(replace(base, n_q=min(n_q, n_kv), n_kv=n_kv, window=window))
    yield Plan("candidate", "attention", tuple(cases))


def observe(backend: Backend, seeds: int = 20) -> dict[tuple[str, str], float]:
    """Worst NMSE by operation and format over seeds, inputs and head_dims (see TOLERANCES).

    Takes minutes. Attention figures are of the format with itself.
    """
    worst: dict[tuple[str, str], float] = {}
    for fmt in all_formats():
        for case in _observed_cases(fmt, seeds):
            op = "sharp" if case.inputs == "sharp" else case.op
            exam = examine(case, backend)
            if "finite" in exam.rules_failed or "crash" in exam.rules_failed:
                raise RuntimeError(f"{case}: {exam.failed[0].text}")
            figure = exam.metrics.get("nmse", 0.0)
            worst[op, fmt.name] = max(worst.get((op, fmt.name), 0.0), figure)
    return worst


def _observed_cases(fmt: Format, seeds: int) -> Iterator[Case]:
    for seed in range(seeds):
        n = _widths(fmt)[seed % len(_widths(fmt))]
        for kind in ("normal", "ramp", *EDGES):
            shape: dict[str, Any] = {"head_dim": n, "seed": seed, "inputs": kind}
            yield Case("decode", fmt.name, n_kv=33, **shape)
            yield Case("scores", fmt.name, n_kv=70, n_q=5, num_heads=2, num_kv_heads=1, **shape)
        for kind in ("normal", "ramp", "sharp", *ATTENTION_EDGES):
            for n_q, n_kv in ((1, 517), (9, 70)):
                yield Case(
                    "attention", fmt.name, fmt.name, head_dim=n, seed=seed, inputs=kind, n_q=n_q,
                    n_kv=n_kv, num_heads=4, num_kv_heads=1,
                )  # fmt: skip
