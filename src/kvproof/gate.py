"""The gate: named checks of backends against the reference, as evidence.

`verify` runs everything, `gate_evidence` what one candidate needs before it may be measured, `run`
a single case. What is compared, and within which bounds, is in rules.py. mutants.py breaks kernels
on purpose: each must fail by the rules that it names, or the gate itself has FAILED.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvproof import backends as backend_registry
from kvproof.backends import Backend
from kvproof.backends.reference import source_digest
from kvproof.cases import (
    ATTENTION_EDGES,
    EDGES,
    FIXTURE_BLOCK,
    GQA,
    HEAD_DIMS,
    Case,
    Fixture,
    Floats,
    masks,
    read_fixtures,
)
from kvproof.errors import Refused, RequestError
from kvproof.evidence import Environment, Evidence, Outcome, aggregate, utc_now
from kvproof.formats import Format, all_formats
from kvproof.formats import get as format_named
from kvproof.mutants import MUTANTS
from kvproof.rules import (
    PRINTED,
    TRUTH_KEYS,
    TRUTH_QUERIES,
    TURBO3,
    TURBO3_CUTS,
    Examination,
    Float64,
    compare,
    decode_turbo3,
    examine,
    pair,
    rotate128,
)

Progress = Callable[[str], None]

# NMSE of the published self-test scores with a rotated query: 1.5e-10 observed (turbo4).
ROTATED = 1e-9

CHECK_OF = {"tbq3_0": "turbo3", "tbq4_0": "turbo4"} | {
    f.name: "row" for f in all_formats() if f.block_size is None
}
FORMAT_CHECKS = ("turbo3", "turbo4", "stock", "row")
OPERATOR_CHECKS = ("append", "fused", "gqa", "causal", "window", "split", "segments")
CHECKS = (*FORMAT_CHECKS, *OPERATOR_CHECKS, "mutants")
# Checks of the public gate whose formats this version does not have.
LATER = {
    "turbo3_tcq": "tbq3_tcq",
    "qjl": "qjl1_256",
    "polar": "q4_polar",
    "polar_res": "q4_polar_res",
    "polar_preht": "q4_polar",
    "polar_preht_res": "q4_polar_res",
    "fused_attn_qjl_tbq": "qjl1_256",
}


# ---- public fixtures and the reference's own test ------------------------------------------------


def fixture_normals(count: int) -> Floats:
    """First normals of the fixtures' generator (gate.md 9.2): Marsaglia polar in float32."""
    state = 0x9E3779B97F4A7C15
    out: list[np.float32] = []
    one, two = np.float32(1), np.float32(2)

    def uniform() -> np.float32:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return np.float32(state >> 11 & 0xFFFFFF) / np.float32(2**24) * two - one

    while len(out) < count:
        u, v = uniform(), uniform()
        r = u * u + v * v
        if r >= one or r == 0:
            continue
        f = np.sqrt(-two * np.log(r) / r)
        out += [u * f, v * f]
    return np.array(out[:count], np.float32)


def _published(check: str) -> tuple[Float64, Float64]:
    """(got, published) scores of the reference self-test of gate.md section 4, without and with
    the query rotated."""
    draws = fixture_normals(256)
    q, x = draws[0::2], draws[1::2]
    if check == "turbo4":
        fmt = format_named("tbq4_0")
        stored = fmt.decode_rotated(fmt.encode(x))
        turned = fmt.rotate(q).astype(np.float64)
        want = (-23.721790, -2.360713)
    else:
        length = np.sqrt(np.square(x, dtype=np.float64).sum())
        codes = np.searchsorted(TURBO3_CUTS, rotate128(x / length), side="right")
        centroids = TURBO3[codes]
        norm = np.float16(length / np.sqrt(np.square(centroids).sum()))
        stored, turned, want = centroids * float(norm), rotate128(q), (-2.501480, -2.070670)
    return np.array([q @ stored, turned @ stored]), np.array(want)


def _self_test(check: str, exam: Examination) -> None:
    got, want = _published(check)
    compare(exam, "parity", got[:1], want[:1], PRINTED)
    compare(exam, "truth", got[1:], want[1:], ROTATED)


def _reproduce(fixture: Fixture, exam: Examination) -> None:
    """The printed scores of a fixture, by the reference decoder and the query as given."""
    if fixture.kernel == "turbo3":
        stored = decode_turbo3(fixture.k_blocks)
    else:
        stored = format_named("tbq4_0").decode_rotated(fixture.k_blocks)
    compare(exam, "parity", stored @ fixture.q, fixture.expected, PRINTED)


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


def check_of(fmt: Format) -> str:
    """Name of the check that proves a format's encode, decode and scores."""
    return CHECK_OF.get(fmt.name, "stock")


def _widths(fmt: Format, widths: Sequence[int] = HEAD_DIMS) -> list[int]:
    return [n for n in widths if fmt.refuses(n, "key") is None]


def _format_plans(check: str, fmt: Format) -> Iterator[Plan]:
    """Encode, decode, scores, truth and attention of one format, at every head_dim it takes."""
    f = fmt.name
    for n in _widths(fmt):
        edges = EDGES if n in (96, 128) else ()
        shape: dict[str, Any] = {"head_dim": n, "n_kv": 37, "num_kv_heads": 3, "num_heads": 3}
        encode = [Case("encode", f, inputs=kind, **shape) for kind in ("normal", *edges)]
        if n == 128:  # enough values for the few codes that a rounded scale changes
            encode.append(Case("encode", f, head_dim=n, n_kv=400, num_kv_heads=2))
        yield Plan(check, "encode", tuple(encode))
        for op in ("decode", "scores"):
            kinds = ("normal", *edges)
            cases = [Case(op, f, inputs=kind, **shape, n_q=5) for kind in kinds]
            yield Plan(check, op, tuple(cases))
        if n in (64, 128, 256):
            many: dict[str, Any] = {"head_dim": n, "n_kv": TRUTH_KEYS, "n_q": TRUTH_QUERIES}
            yield Plan(check, "truth", (Case("decode", f, **many), Case("scores", f, **many)))


def _operator_plans(check: str, rows: Sequence[Format]) -> Iterator[Plan]:
    """Append, fused attention, GQA, causal masks, windows and splits."""
    for fmt in rows:
        f = fmt.name
        base = Case("attention", f, f, head_dim=64, num_heads=4, num_kv_heads=2, n_kv=40)
        if check == "append":  # token by token against bulk, a rule of every short encode
            for n in _widths(fmt, (64, 96, 256)):
                shape: dict[str, Any] = {"head_dim": n, "n_kv": 70, "num_kv_heads": 3}
                cases = [Case("encode", f, inputs=k, **shape) for k in ("normal", "mixed")]
                yield Plan(check, "encode", tuple(cases))
        elif check == "fused":
            for n in _widths(fmt):
                case = replace(base, head_dim=n, n_kv=131)
                edges = [
                    replace(case, inputs=kind, n_q=3, n_kv=70)
                    for kind in (ATTENTION_EDGES if n in (96, 128) else ())
                ]
                truth = [replace(case, n_q=8, n_kv=1024)] if n in (64, 128, 256) else []
                sharp = replace(case, inputs="sharp", n_q=5)
                yield Plan(check, "fused", (case, replace(case, n_q=17), sharp, *edges, *truth))
            for other in rows:
                case = replace(base, value=other.name, head_dim=128)
                wide = replace(case, head_dim=192, head_dim_v=128, n_q=5, n_kv=33)
                if other is not fmt:
                    prefill = replace(case, n_q=9, n_kv=73, window=32)
                    yield Plan(check, "mixed", (replace(case, n_kv=131), prefill, wide))
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
            cases = [replace(base, n_q=n_q, n_kv=n, window=w) for n_q, n, w in shapes]
            yield Plan(check, "fused", tuple(cases))
        elif check == "split":
            cases = [
                replace(base, n_kv=n, n_q=n_q, inputs=kind, threads=3)
                for n, n_q in ((517, 1), (2100, 1), (4099, 1), (700, 33))
                for kind in ("ramp", "sharp")
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


def plans(checks: Iterable[str], rows: Sequence[Format]) -> Iterator[Plan]:
    """Everything that the named checks mean for these formats."""
    for check in checks:
        if check in FORMAT_CHECKS:
            for fmt in rows:
                if check_of(fmt) == check:
                    yield from _format_plans(check, fmt)
        elif check in OPERATOR_CHECKS:
            yield from _operator_plans(check, rows)


# ---- evidence ------------------------------------------------------------------------------------


@functools.cache
def reference_digest() -> str:
    """SHA-256 of the sources that define the numbers; gate records name it as "reference"."""
    return source_digest()


@functools.cache
def gate_digest() -> str:
    """SHA-256 of the gate itself: rules, cases, tolerances, mutants."""
    folder = Path(__file__).parent
    names = ("cases.py", "rules.py", "mutants.py", "gate.py")
    return hashlib.sha256(b"".join((folder / n).read_bytes() for n in names)).hexdigest()


def run(case: Case, backend: Backend, environment: Environment | None = None) -> Evidence:
    """Gate one case on a backend."""
    return _judge(Plan("case", case.op, (case,)), backend, environment or _here(backend))


def _here(backend: Backend) -> Environment:
    return Environment.current(backend.environment())


def _record(
    subject: Mapping[str, str | int | float],
    outcome: Outcome,
    reason: str | None,
    environment: Environment,
    digest: str,
    started: str,
    metrics: Mapping[str, float] | None = None,
) -> Evidence:
    whole = {"kind": "gate", "fixture": "generated", "reference": reference_digest()}
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
    subject: dict[str, str | int | float] = {
        "check": plan.check, "variant": plan.variant, "backend": backend.name,
        "format": plan.title, "key": key.name, "value": value.name, "op": case.op,
        "head_dim": case.head_dim, "cases": len(plan.cases),
    }  # fmt: skip
    for one in plan.cases:
        for fmt, width in zip(
            pair(one), (one.head_dim, one.head_dim_v or one.head_dim), strict=True
        ):
            refused = backend.refuses("encode", fmt, width) or backend.refuses(one.op, fmt, width)
            if refused:
                return _record(
                    subject, Outcome.REFUSED, refused, environment, backend.digest(), started
                )
    subject["kernel"] = backend.kernel(case.op, key, case.head_dim)
    exams = [examine(one, backend) for one in plan.cases]
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
    missed = [(exam, finding) for exam in exams for finding in exam.failed]
    if not exams or not metrics["outputs"] or missed:
        texts = [f"{f.rule}: {f.text} ({e.case})" for e, f in missed[:3]]
        if len(missed) > 3:
            texts.append(f"and {len(missed) - 3} more")
        return Outcome.FAILED, "; ".join(texts) or "no outputs were compared", metrics
    return Outcome.PASSED, None, metrics


def row(record: Evidence) -> dict[str, Any]:
    """A record as one line of `kvproof verify --json`."""
    subject, metrics = record.subject, record.metrics
    encoded = subject.get("op") == "encode"
    return {
        "check": subject.get("check"),
        "variant": subject.get("variant"),
        "backend": subject.get("backend"),
        "format": subject.get("format"),
        "head_dim": subject.get("head_dim"),
        "fixture": subject.get("fixture"),
        "outcome": str(record.outcome),
        "reason": record.reason,
        "worst_error": metrics.get("wrong_rows") if encoded else metrics.get("nmse"),
        "bound": 0.0 if encoded else metrics.get("bound"),
        "outputs": int(metrics.get("outputs", 0)),
        "kernel": subject.get("kernel"),
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
    """Aggregate outcome of `verify` results (evidence.exit_code gives the exit code)."""
    return aggregate(Outcome(r["outcome"]) for r in results)


def verify_evidence(
    backends: str | Sequence[str] = "all",
    checks: Sequence[str] | None = None,
    fixtures: str | Path | None = None,
    formats: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> list[Evidence]:
    """Run the gate: named checks (default: all that this version has) on named backends.

    `fixtures` is a folder of public fixture files, reproduced by the reference decoder. Unknown
    names and unreadable fixtures raise RequestError; a backend that is absent is NOT_RUN, and so
    is a check by name whose format this version lacks. A selection that is empty is FAILED.
    """
    say = progress or (lambda text: None)
    for check in checks or ():
        if check not in CHECKS and check not in LATER:
            raise RequestError(
                f"--check {check}: unknown; choose from {', '.join([*CHECKS, *LATER])}"
            )
    wanted = tuple(dict.fromkeys(checks)) if checks is not None else CHECKS
    rows = [format_named(f) for f in formats] if formats is not None else list(all_formats())
    named = backend_registry.names() if backends in ("all", ["all"], ("all",)) else backends
    names = [named] if isinstance(named, str) else list(dict.fromkeys(named))

    for name in names:
        with contextlib.suppress(Refused):  # becomes NOT_RUN below; an unknown name ends here
            backend_registry.get(name)
    published = wanted
    if formats is not None and checks is None and fixtures is None:
        known = {CHECK_OF.get(f.name) for f in rows}
        published = tuple(c for c in wanted if c not in FIXTURE_BLOCK or c in known)
    done = _fixture_records(published, checks, fixtures, say)
    for name in names:
        try:
            backend = backend_registry.get(name)
        except Refused as refused:
            done += [_absent({"check": c, "backend": name}, str(refused)) for c in wanted]
            continue
        environment = _here(backend)
        for check in (c for c in wanted if c in LATER):
            reason = f"format {LATER[check]} is not in this version of kvproof"
            done.append(_absent({"check": check, "backend": name, "format": LATER[check]}, reason))
        for plan in plans(wanted, rows):
            say(f"{name}: {plan.check} {plan.variant} {plan.title} {plan.cases[0].head_dim}")
            done.append(_judge(plan, backend, environment))
        if "mutants" in wanted:
            done += mutant_evidence(backend, rows, say)
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


def _absent(subject: Mapping[str, str | int | float], reason: str) -> Evidence:
    return _record(subject, Outcome.NOT_RUN, reason, Environment.current(), "", utc_now())


def _fixture_records(
    wanted: Sequence[str], asked: Sequence[str] | None, folder: str | Path | None, say: Progress
) -> list[Evidence]:
    """The reference against published scores, and against the fixture files of a folder."""
    kernels = tuple(k for k in FIXTURE_BLOCK if k in wanted)
    found = read_fixtures(Path(folder), kernels) if folder is not None else []
    environment = Environment.current({"device": "NumPy float64", "isa": "numpy"})
    records = []

    def add(check: str, subject: dict[str, str | int | float], exam: Examination) -> None:
        say(f"reference: {check} {subject['variant']} {subject['fixture']}")
        outcome, reason, metrics = _fold([exam])
        name = "tbq4_0" if check == "turbo4" else "turbo3"
        whole = {"check": check, "backend": "reference", "format": name, "op": "scores"} | subject
        records.append(
            _record(whole, outcome, reason, environment, reference_digest(), utc_now(), metrics)
        )

    for check in kernels:
        exam = Examination(Case("scores", "tbq4_0"))
        _self_test(check, exam)
        add(check, {"variant": "self-test", "fixture": "published", "head_dim": 128}, exam)
    for fixture in found:
        exam = Examination(Case("scores", "tbq4_0", head_dim=fixture.head_dim))
        _reproduce(fixture, exam)
        digest = hashlib.sha256(fixture.path.read_bytes()).hexdigest()
        subject: dict[str, str | int | float] = {
            "variant": "fixture", "fixture": fixture.path.name, "head_dim": fixture.head_dim,
            "fixture_sha256": digest,
        }  # fmt: skip
        add(fixture.kernel, subject, exam)
    if folder is not None:
        held = {fixture.kernel for fixture in found}
        lacking = [k for k in kernels if k not in held and (asked is not None or not held)]
        for check in lacking:
            reason = f"--fixtures {folder}: holds no {check} fixture"
            records.append(
                _record(
                    {"check": check, "variant": "fixture", "backend": "reference"},
                    Outcome.FAILED, reason, environment, "", utc_now(),
                )
            )  # fmt: skip
    return records


def mutant_evidence(
    backend: Backend, rows: Sequence[Format] | None = None, progress: Progress | None = None
) -> list[Evidence]:
    """Every mutant of the given formats on a backend: PASSED if the rules it names caught it."""
    names = {f.name for f in rows} if rows is not None else {f.name for f in all_formats()}
    environment, records = _here(backend), []
    for mutant in MUTANTS:
        if not {mutant.case.key, mutant.case.value or mutant.case.key} <= names:
            continue
        if progress:
            progress(f"{backend.name}: mutants {mutant.name} {mutant.case.key}")
        started = utc_now()
        exam = mutant.examine(backend)
        caught = mutant.caught(exam)
        subject: dict[str, str | int | float] = {
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
        records.append(
            _record(
                subject, Outcome.PASSED if caught else Outcome.FAILED, reason, environment,
                backend.digest(), started, {"outputs": exam.outputs},
            )
        )  # fmt: skip
    return records


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
        for plan in _candidate_plans(key, value, width, width_v, list(heads), masks_wanted):
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
