"""Policy, Decision and decide(): evidence in, a choice with its reasons out.

`decide` is pure. It reads no clock, file or device, and sorts everything it looks at, so the same
evidence and policy give the same decision on any machine.

Records that it understands (all with subject fields `lane="kv"`, `key`, `value`):

    kind="candidate"  REFUSED: the model, backend or format rules the pair out
    kind="gate"       correctness of the kernels of the pair; one or many, all must be PASSED
    kind="bytes"      metrics bytes, bytes_per_token at subject["context"] tokens
    kind="quality"    metrics kld, same_top, delta_nll, each with _low and _high; tokens
    kind="speed"      subject phase ("pp" | "tg") and depth; metrics ratio with _low, _high; rounds

A pair counts only if quality and speed carry the digest of its own PASSED gate records, and only
if the f16 baseline passed the gate with that digest too: a ratio to a broken baseline says nothing.
"""

from __future__ import annotations

import math
import reprlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvproof.errors import RequestError
from kvproof.evidence import Evidence, Outcome
from kvproof.files import contents

MAX_POLICY_BYTES = 1 << 20
OBJECTIVES = ("memory", "speed", "longest-context")

# What `--cache-type-k` of stock llama.cpp accepts.
LLAMACPP_TYPES = frozenset({"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"})
# Pairs that one `--kv-cache-dtype` of vLLM can say.
VLLM_DTYPES = {
    ("f16", "f16"): "--kv-cache-dtype auto",
    ("bf16", "bf16"): "--kv-cache-dtype bfloat16",
    ("fp8_e4m3", "fp8_e4m3"): "--kv-cache-dtype fp8_e4m3 --calculate-kv-scales",
}


@dataclass(frozen=True, order=True, slots=True)
class Candidate:
    """A key format with a value format."""

    key: str
    value: str

    @property
    def name(self) -> str:
        """`key/value`, as tables and messages print it."""
        return f"{self.key}/{self.value}"

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """`"q8_0/tq4"` or `"q8_0"` (both sides alike)."""
        key, _, value = text.partition("/")
        return cls(key.strip(), (value or key).strip())


BASELINE = Candidate("f16", "f16")

DEFAULT_CANDIDATES = (
    "q8_0/q8_0",
    "fp8_e4m3/fp8_e4m3",
    "q8_0/tq4",
    "q8_0/tq3",
    "tbq4_0/tbq4_0",
    "q4_0/q4_0",
    "tq4/tq4",
    "tq4/tq3",
    "tbq3_0/tbq3_0",
    "tq3/tq3",
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a cache must keep to be chosen. policies/default.toml explains every value."""

    objective: str = "memory"
    # quality
    kld_max: float = 0.02  # nats per token
    same_top_min: float = 0.93  # fraction of positions
    delta_nll_max: float = 0.02  # nats per token
    tokens_min: int = 1000
    # speed
    tg_ratio_min: float = 0.95  # candidate speed / f16 speed
    pp_ratio_min: float = 0.90
    allow_contended: bool = True
    # memory
    context: int = 8192  # tokens
    saving_min: float = 0.10  # fraction of the f16 bytes
    # what to measure
    candidates: tuple[str, ...] = DEFAULT_CANDIDATES
    window: int = 512
    chunk: int = 64
    windows_max: int = 8
    depths: tuple[int, ...] = (512, 4096)
    prefill_tokens: int = 64
    decode_tokens: int = 8
    rounds: int = 9

    def __post_init__(self) -> None:
        problems = list(_policy_problems(self))
        if problems:
            raise RequestError("policy: " + "; ".join(problems))

    @classmethod
    def load(cls, path: str | Path | None = None) -> Policy:
        """The default policy, or the default with the values of a TOML file put over it."""
        if path is None:
            return cls()
        try:
            document = tomllib.loads(contents(Path(path), MAX_POLICY_BYTES).decode())
        except OSError as error:
            raise RequestError(f"policy {path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number too long
            raise RequestError(f"policy {path}: not a TOML file: {error}") from error
        return cls(**_flatten(document, str(path)))

    def pairs(self) -> tuple[Candidate, ...]:
        """Candidates besides the f16 baseline, in the order of the policy."""
        return tuple(c for c in map(Candidate.parse, self.candidates) if c != BASELINE)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Policy:
        """The policy that `as_dict` gave; RequestError on a key that is none of its fields."""
        unknown = sorted(set(values) - set(policy_fields()))
        if unknown:
            raise RequestError(f"policy: unknown keys {', '.join(unknown)}")
        return cls(**_typed(values, []))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as decision.json holds them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


SECTIONS = {
    "quality": ("kld_max", "same_top_min", "delta_nll_max", "tokens_min"),
    "speed": ("tg_ratio_min", "pp_ratio_min", "allow_contended"),
    "memory": ("context", "saving_min"),
    "measure": (
        "window",
        "chunk",
        "windows_max",
        "depths",
        "prefill_tokens",
        "decode_tokens",
        "rounds",
    ),
}


def _flatten(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Sections of the TOML file -> fields of Policy. Every unknown key is named at once."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in document.items():
        if key in SECTIONS and isinstance(value, Mapping):
            for name, inner in value.items():
                if name in SECTIONS[key]:
                    values[name] = inner
                else:
                    known = ", ".join(SECTIONS[key])
                    problems.append(f"unknown key {key}.{name} (known: {known})")
        elif key in ("objective", "candidates"):
            values[key] = value
        elif key != "schema_version":
            known = ", ".join(("objective", "candidates", *SECTIONS))
            problems.append(f"unknown key {key} (known: {known})")
        elif value != 1:
            problems.append(f"schema_version {value!r} is not 1, the only one there is")
    try:
        return _typed(values, problems)
    except RequestError as error:
        raise RequestError(str(error).replace("policy", f"policy {where}", 1)) from None


def _typed(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Values of the types that Policy holds; RequestError names `problems` and all misfits."""
    defaults = Policy()
    typed: dict[str, Any] = {}
    for name, value in values.items():
        default = getattr(defaults, name)
        if isinstance(default, float) and type(value) is int:
            # A number that no float holds is out of every range: infinity says so.
            typed[name] = float(value) if abs(value) < 2**63 else math.inf
        elif isinstance(default, tuple) and isinstance(value, list):
            typed[name] = tuple(value)
        elif type(value) is type(default):
            typed[name] = value
        else:
            want = "list" if isinstance(default, tuple) else type(default).__name__
            problems.append(f"{name} must be a {want}, found {reprlib.repr(value)}")
    if problems:
        raise RequestError("policy: " + "; ".join(problems))
    return typed


# Far above any use, and low enough that a slip of the finger does not run for days.
MOST = 1 << 16
MOST_TOKENS = 1 << 24


def _policy_problems(p: Policy) -> Iterable[str]:
    if p.objective not in OBJECTIVES:
        yield f"objective {p.objective!r} is none of {', '.join(OBJECTIVES)}"
    for name in ("kld_max", "delta_nll_max"):
        value = getattr(p, name)
        if not (math.isfinite(value) and value > 0):
            yield f"{name} must be a positive number of nats, found {value}"
    for name in ("same_top_min", "saving_min"):
        value = getattr(p, name)
        if not 0 <= value < 1:
            yield f"{name} must lie in [0, 1), found {value}"
    for name in ("tg_ratio_min", "pp_ratio_min"):
        value = getattr(p, name)
        if not 0 < value <= 2:
            yield f"{name} must lie in (0, 2], found {value}"
    counts = ("context", "window", "chunk", "windows_max", "prefill_tokens", "decode_tokens")
    for name in (*counts, "tokens_min", "rounds"):
        most = MOST_TOKENS if name in ("context", "tokens_min") else MOST
        if not 1 <= getattr(p, name) <= most:
            yield f"{name} must be from 1 to {most}, found {reprlib.repr(getattr(p, name))}"
    if p.window < 256 or p.window % 32:
        yield f"window must be a multiple of 32 from 256 on, found {p.window}"
    if p.chunk > p.window:
        yield f"window ({p.window}) must be no shorter than chunk ({p.chunk})"
    if p.tokens_min > p.windows_max * p.window:
        most = p.windows_max * p.window
        yield f"tokens_min {p.tokens_min} cannot be reached: windows_max x window scores {most}"
    if p.rounds < 3:
        yield f"rounds must be at least 3 for an interval, found {p.rounds}"
    if not p.depths or any(type(d) is not int or not 1 <= d <= MOST_TOKENS for d in p.depths):
        yield (
            f"depths must be whole numbers from 1 to {MOST_TOKENS}, found "
            f"{reprlib.repr(list(p.depths))}"
        )
    elif list(p.depths) != sorted(set(p.depths)):
        yield f"depths must ascend without repeats, found {list(p.depths)}"
    if not p.candidates or any(not isinstance(c, str) or not c for c in p.candidates):
        yield 'candidates must be a list of names such as "q8_0/tq4"'
    else:
        parsed = [Candidate.parse(c) for c in p.candidates]
        twice = sorted({c.name for c in parsed if parsed.count(c) > 1})
        if twice:
            yield f"candidates named twice: {', '.join(twice)}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the matrix: what became of a candidate, and why."""

    candidate: Candidate
    # "chosen" | "accepted" | "baseline" | "inconclusive" | "rejected" (by a bound) |
    # "failed" (gate or run) | "not run" | "refused"
    status: str
    reason: str
    evidence: tuple[str, ...]  # ids of the records that it rests on


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer of one lane on one backend and device."""

    lane: str
    backend: str
    device: str
    chosen: Candidate
    reason: str
    evidence: tuple[str, ...]
    rejected: dict[str, str]
    flags: dict[str, str]
    verdicts: tuple[Verdict, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """The object that `decide --json` and decision.json hold."""
        return {
            "lane": self.lane,
            "backend": self.backend,
            "device": self.device,
            "chosen": {"key": self.chosen.key, "value": self.chosen.value},
            "reason": self.reason,
            "evidence": list(self.evidence),
            "rejected": dict(self.rejected),
            "flags": dict(self.flags),
            "verdicts": [
                {
                    "key": v.candidate.key,
                    "value": v.candidate.value,
                    "status": v.status,
                    "reason": v.reason,
                    "evidence": list(v.evidence),
                }
                for v in self.verdicts
            ],
        }


@dataclass(frozen=True, slots=True)
class _Judged:
    """A verdict before the choice between the accepted ones."""

    verdict: Verdict
    bytes: float = math.inf
    bytes_per_token: float = math.inf
    kld: float = math.inf
    tg_ratio_low: float = 0.0  # at the deepest depth


def decide(evidence: Sequence[Evidence], policy: Policy) -> Decision:
    """Choose a pair by the policy; f16 stays unless a pair clears every bound with its interval.

    Raises RequestError where the records belong to several models, backends or devices: a decision
    speaks for one of each.
    """
    records = sorted((e for e in evidence if e.subject.get("lane") == "kv"), key=lambda e: e.id)
    backend = _only(records, "backend", lambda e: e.subject.get("backend"))
    # Lines that could not be read come back without digest and device.
    device = _only(records, "device", lambda e: e.environment.device if e.digest else None)
    _only(records, "model", lambda e: e.subject.get("model"))

    by_pair: dict[Candidate, list[Evidence]] = {}
    for e in records:
        if "key" in e.subject and "value" in e.subject:
            pair = Candidate(str(e.subject["key"]), str(e.subject["value"]))
            by_pair.setdefault(pair, []).append(e)
    named = [c for c in policy.pairs() if c not in by_pair]
    baseline = by_pair.get(BASELINE, [])
    base_bytes = _bytes(baseline, policy)
    judged = [
        _judge(pair, by_pair.get(pair, []), baseline, base_bytes, policy)
        for pair in sorted({*by_pair, *named} - {BASELINE})
    ]
    accepted = sorted(
        (j for j in judged if j.verdict.status == "accepted"), key=lambda j: _rank(j, policy)
    )
    best = accepted[0] if accepted else None
    verdicts = [_baseline_verdict(baseline, base_bytes, chosen=best is None)]
    for j in [*accepted, *(j for j in judged if j not in accepted)]:
        v = j.verdict
        if j is best:
            v = Verdict(v.candidate, "chosen", v.reason, v.evidence)
        elif best is not None and v.status == "accepted":
            reason = f"{v.reason} Not chosen: {_why_not(j, best, policy)}."
            v = Verdict(v.candidate, "accepted", reason, v.evidence)
        verdicts.append(v)
    chosen = best.verdict.candidate if best else BASELINE
    used = best.verdict.evidence if best else verdicts[0].evidence
    return Decision(
        lane="kv",
        backend=backend,
        device=device,
        chosen=chosen,
        reason=_headline(best, base_bytes, verdicts, policy),
        evidence=used,
        rejected={v.candidate.name: v.reason for v in verdicts if v.candidate != chosen},
        flags=_flags(chosen, [j.verdict.candidate for j in accepted]),
        verdicts=tuple(verdicts),
    )


def _only(records: Sequence[Evidence], what: str, of: Any) -> str:
    """The one value that all records share; "none" without records."""
    values = sorted({str(v) for v in map(of, records) if v is not None})
    if len(values) > 1:
        raise RequestError(
            f"the evidence covers {len(values)} {what}s ({', '.join(values)}); a decision speaks "
            f"for one: pass the records of one {what}"
        )
    return values[0] if values else "none"


def _judge(
    pair: Candidate,
    records: list[Evidence],
    baseline: list[Evidence],
    base_bytes: Evidence | None,
    policy: Policy,
) -> _Judged:
    """Take a candidate through refusal, gate, bytes, quality and speed; the first failure ends it.

    Open questions (an interval across its bound) are collected, so that all are named together.
    """

    def end(status: str, reason: str, used: Iterable[Evidence]) -> _Judged:
        return _Judged(Verdict(pair, status, reason, tuple(sorted(e.id for e in used))))

    refusals = [e for e in records if e.outcome is Outcome.REFUSED]
    if refusals:
        return end("refused", _sentence("; ".join(_reasons(refusals))), refusals)
    gate, whole = _newest_gate(records)
    bad = [e for e in gate if e.outcome is not Outcome.PASSED]
    if any(e.outcome is Outcome.FAILED for e in bad):
        failed = [e for e in bad if e.outcome is Outcome.FAILED]
        return end("failed", f"Gate failed: {_first(_reasons(failed))}.", failed)
    if bad or not gate or len({e.id for e in gate}) < whole:
        why = _first(_reasons(bad)) if bad else f"{len(gate)} of {whole} gate records"
        why = why if gate else "no gate record"
        return end("not run", f"No passed gate, so nothing else counts: {why}.", bad)
    digests = {e.digest for e in gate}
    base_gate = [e for e in _of(baseline, "gate") if e.digest in digests]
    if not base_gate or any(e.outcome is not Outcome.PASSED for e in base_gate):
        return end("not run", "The f16 baseline has no passed gate of the same kernels.", gate)

    used = [*gate]
    mine = _bytes(records, policy)
    if mine is None or base_bytes is None:
        return end("not run", f"Bytes at {policy.context} tokens were not measured.", used)
    used.append(mine)
    saving = 1 - mine.metrics["bytes"] / base_bytes.metrics["bytes"]
    if saving < policy.saving_min:
        text = f"Saves {saving:.1%} of the f16 bytes; the policy asks for {policy.saving_min:.0%}."
        return end("rejected", text, used)

    quality = _latest(_of(records, "quality"), digests)
    if quality is None or quality.outcome is Outcome.NOT_RUN:
        return end("not run", _missing("Quality", quality, records, "quality"), used)
    used.append(quality)
    if quality.outcome is not Outcome.PASSED:
        return end("failed", f"Quality run failed: {'; '.join(_reasons([quality]))}.", used)
    m = quality.metrics
    tokens = int(m["tokens"])
    checks = [
        _bound(f"KL divergence {_ci(m, 'kld')} nats", m, "kld", policy.kld_max, tokens, "most"),
        _bound(f"same top token {_pct(m)}", m, "same_top", policy.same_top_min, tokens, "least"),
        _bound(
            f"loss change {_ci(m, 'delta_nll')} nats",
            m,
            "delta_nll",
            policy.delta_nll_max,
            tokens,
            "most",
        ),
    ]
    failed_checks = [text for state, text in checks if state == "fail"]
    if failed_checks:
        return end("rejected", _sentence("; ".join(failed_checks)), used)
    open_checks = [text for state, text in checks if state == "open"]
    if not open_checks and tokens < policy.tokens_min:
        open_checks.append(f"only {tokens} of the {policy.tokens_min} tokens asked for were scored")

    wanted = [(phase, depth) for depth in policy.depths for phase in ("pp", "tg")]
    speeds: list[Evidence] = []
    missing: dict[str, list[str]] = {}  # why -> what
    for phase, depth in wanted:
        of_depth = [
            e
            for e in _of(records, "speed")
            if e.subject.get("phase") == phase and e.subject.get("depth") == depth
        ]
        speed = _latest(of_depth, digests)
        if speed is None or speed.outcome is not Outcome.PASSED:
            why = _missing("", speed, of_depth, "speed")
            missing.setdefault(why, []).append(f"{phase} at depth {depth:,}")
        else:
            speeds.append(speed)
    used += speeds
    for e in speeds:
        s = e.metrics
        least = policy.tg_ratio_min if e.subject["phase"] == "tg" else policy.pp_ratio_min
        what = f"{e.subject['phase']} at depth {e.subject['depth']:,} runs at {_ci(s, 'ratio', 2)}x"
        if s.get("contended") and not policy.allow_contended:
            open_checks.append(f"{what} of f16, on a machine busy with other work")
            continue
        state, text = _bound(what, s, "ratio", least, int(s["rounds"]), "least", "rounds")
        if state == "fail":
            return end("rejected", _sentence(text), used)
        if state == "open":
            open_checks.append(text)
    if open_checks:
        return end("inconclusive", _sentence("; ".join(open_checks)), used)
    if missing:
        text = " ".join(", ".join(what) + why for why, what in missing.items())
        return end("not run", text, used)

    worst = min(speeds, key=lambda e: (e.metrics["ratio_low"], e.id))
    deepest = [e for e in speeds if e.subject["phase"] == "tg"][-1]
    w = f"{worst.subject['phase']} at depth {worst.subject['depth']:,}"
    speed_text = f"slowest against f16: {w}, {_ci(worst.metrics, 'ratio', 2)}x"
    reason = (
        f"Saves {saving:.0%}; KL divergence {_ci(m, 'kld')} nats, same top token {_pct(m)} "
        f"over {tokens:,} tokens; {speed_text}."
    )
    if policy.objective == "speed" and deepest.metrics["ratio_low"] <= 1:
        text = f"Not faster than f16 beyond doubt: tg {_ci(deepest.metrics, 'ratio', 2)}x."
        return end("rejected", text, used)
    return _Judged(
        Verdict(pair, "accepted", reason, tuple(sorted(e.id for e in used))),
        bytes=mine.metrics["bytes"],
        bytes_per_token=mine.metrics["bytes_per_token"],
        kld=m["kld"],
        tg_ratio_low=deepest.metrics["ratio_low"],
    )


def _rank(j: _Judged, policy: Policy) -> tuple[float, float, Candidate]:
    first = {
        "memory": j.bytes,
        "longest-context": j.bytes_per_token,
        "speed": -j.tg_ratio_low,
    }[policy.objective]
    return first, j.kld, j.verdict.candidate


def _why_not(j: _Judged, best: _Judged, policy: Policy) -> str:
    name = best.verdict.candidate.name
    if policy.objective == "speed":
        return f"{name} is faster ({best.tg_ratio_low:.2f}x against {j.tg_ratio_low:.2f}x)"
    mine, theirs = (
        (j.bytes_per_token, best.bytes_per_token)
        if policy.objective == "longest-context"
        else (j.bytes, best.bytes)
    )
    if mine > theirs:
        return f"{name} needs {1 - theirs / mine:.0%} fewer bytes"
    return f"{name} needs the same bytes and changes the output less"


def _newest_gate(records: Iterable[Evidence]) -> tuple[list[Evidence], int]:
    """Gate records of the kernels gated last, and how many a whole gate of them has (0: unsaid).

    A store keeps what earlier kernels did, and gates that a budget cut off; once a whole gate ran,
    neither says anything.
    """
    gate = _of(records, "gate")
    newest = max(gate, key=lambda e: (e.finished, e.id)).digest if gate else ""
    gate = [e for e in gate if e.digest == newest]
    whole = max((int(e.subject.get("records", 0)) for e in gate), default=0)
    ran = [e for e in gate if e.outcome is not Outcome.NOT_RUN]
    return (ran if whole and len({e.id for e in ran}) >= whole else gate), whole


def _of(records: Iterable[Evidence], kind: str) -> list[Evidence]:
    return [e for e in records if e.subject.get("kind") == kind]


def _latest(records: Iterable[Evidence], digests: set[str]) -> Evidence | None:
    """The record that saw most (tokens or rounds), of the digest that the gate passed."""
    fitting = [e for e in records if e.digest in digests]
    ran = [e for e in fitting if e.outcome is not Outcome.NOT_RUN] or fitting

    def seen(e: Evidence) -> tuple[float, str]:
        return e.metrics.get("tokens", e.metrics.get("rounds", 0)), e.id

    return max(ran, key=seen, default=None)


def _bytes(records: Iterable[Evidence], policy: Policy) -> Evidence | None:
    fitting = [
        e
        for e in _of(records, "bytes")
        if e.outcome is Outcome.PASSED and e.subject.get("context") == policy.context
    ]
    return max(fitting, key=lambda e: e.id, default=None)


def _missing(what: str, record: Evidence | None, records: list[Evidence], kind: str) -> str:
    if record is not None:
        return f"{what} not measured: {'; '.join(_reasons([record]))}."
    if _of(records, kind):
        return f"{what} was measured with other kernels than the gate passed: void."
    return f"{what} not measured."


def _reasons(records: Iterable[Evidence]) -> list[str]:
    return sorted({(e.reason or e.outcome.value).rstrip(".") for e in records})


def _first(reasons: Sequence[str], room: int = 240) -> str:
    """The first of many reasons, cut to fit a table; the evidence holds all of them."""
    first = reasons[0] if len(reasons[0]) <= room else reasons[0][: room - 1].rstrip() + "…"
    return first + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")


def _bound(
    what: str,
    metrics: Mapping[str, float],
    name: str,
    bound: float,
    n: int,
    side: str,
    unit: str = "tokens",
) -> tuple[str, str]:
    """("pass" | "fail" | "open", sentence). Open: the 95 % interval holds the bound.

    For an open one the sentence says how many tokens or rounds would settle it, if the value stays
    (an interval shrinks with the square root of the number).
    """
    value, low, high = (metrics[name + end] for end in ("", "_low", "_high"))
    if side == "most":
        state = "pass" if high <= bound else "fail" if low > bound else "open"
        half = high - value if value <= bound else value - low
    else:
        state = "pass" if low >= bound else "fail" if high < bound else "open"
        half = value - low if value >= bound else high - value
    limit = f"{bound:.0%}" if name == "same_top" else f"{bound:g}"
    text = f"{what}; the policy allows at {side} {limit}"
    if state == "fail":
        return state, f"{what}, outside the policy (at {side} {limit})"
    if state == "open":
        gap = abs(value - bound)
        need = n * (half / gap) ** 2 if gap > 0 else math.inf
        more = (
            f"about {_round_up(max(need, n + 1)):,} {unit} would decide it"
            if need < 1e7
            else "too close to the bound for any sample to decide"
        )
        text = f"{text}: the interval holds the bound, {more} ({n:,} so far)"
    return state, text


def _round_up(n: float) -> int:
    """Two significant digits, upwards: a plan, not a measurement."""
    step: int = 10 ** max(int(math.log10(n)) - 1, 0)
    return math.ceil(n / step) * step


def _ci(metrics: Mapping[str, float], name: str, digits: int = 0) -> str:
    values = [metrics[name + end] for end in ("", "_low", "_high")]
    text = [f"{v:.{digits}f}" if digits else f"{v:.3g}" for v in values]
    return f"{text[0]} [{text[1]}, {text[2]}]"


def _pct(metrics: Mapping[str, float]) -> str:
    value, low, high = (metrics["same_top" + end] for end in ("", "_low", "_high"))
    return f"{value:.1%} [{low:.1%}, {high:.1%}]"


def _sentence(text: str) -> str:
    text = text.strip()
    return text if not text or text.endswith(".") else text + "."


def _baseline_verdict(
    records: list[Evidence], base_bytes: Evidence | None, *, chosen: bool
) -> Verdict:
    gate = _of(records, "gate")
    used = [*gate, *([base_bytes] if base_bytes else [])]
    if any(e.outcome is Outcome.FAILED for e in gate):
        reason = "The stock cache that all others are compared with; its gate FAILED here."
    elif gate and all(e.outcome is Outcome.PASSED for e in gate):
        reason = "The stock cache that all others are compared with; its gate passed."
    else:
        reason = "The stock cache that all others are compared with; its gate was not run."
    ids = tuple(sorted(e.id for e in used))
    return Verdict(BASELINE, "chosen" if chosen else "baseline", reason, ids)


def _headline(
    best: _Judged | None,
    base_bytes: Evidence | None,
    verdicts: Sequence[Verdict],
    policy: Policy,
) -> str:
    if best is not None and base_bytes is not None:
        pair = best.verdict.candidate
        kv = f"{pair.key} keys and {pair.value} values" if pair.key != pair.value else pair.key
        before, after = base_bytes.metrics["bytes"] / 2**20, best.bytes / 2**20
        goal = {
            "memory": "the smallest cache",
            "speed": "the fastest cache",
            "longest-context": "the fewest bytes per further token",
        }[policy.objective]
        return (
            f"Use {kv}: {goal} that clears every bound. At {policy.context:,} tokens the cache "
            f"shrinks from {before:.1f} to {after:.1f} MiB. {best.verdict.reason}"
        )
    tried = [v for v in verdicts if v.candidate != BASELINE]
    if not any(v.evidence for v in tried):
        return "Keep stock (f16): nothing else was measured, so nothing else is proven."
    phrases = {
        "failed": "{n} failed a check",
        "rejected": "{n} missed a bound of the policy",
        "inconclusive": "{n} need more data",
        "refused": "{n} cannot run on this model",
        "not run": "{n} were not measured in full",
    }
    counted = {s: sum(v.status == s for v in tried) for s in phrases}
    text = ", ".join(p.format(n=counted[s]) for s, p in phrases.items() if counted[s])
    return f"Keep stock (f16): of {len(tried)} candidates {text}."


def _flags(chosen: Candidate, accepted: Sequence[Candidate]) -> dict[str, str]:
    """Engine -> what to paste. An engine that lacks the pair gets a `#` line that says so."""
    pair = (chosen.key, chosen.value)
    flags = {
        "kvproof": f"--cache-type-k {chosen.key} --cache-type-v {chosen.value}",
        "transformers": (
            f'cache=kvproof.transformers_cache(model, key="{chosen.key}", value="{chosen.value}")'
        ),
    }

    def llamacpp(c: Candidate) -> str:
        return f"--cache-type-k {c.key} --cache-type-v {c.value} --flash-attn on"

    lacking = sorted({chosen.key, chosen.value} - LLAMACPP_TYPES)
    if not lacking:
        flags["llama.cpp"] = llamacpp(chosen)
    else:
        stock = [c for c in accepted if {c.key, c.value} <= LLAMACPP_TYPES]
        other = (
            f"best accepted pair it has: {llamacpp(stock[0])}"
            if stock
            else f"no accepted pair is in it; keep stock: {llamacpp(BASELINE)}"
        )
        flags["llama.cpp"] = f"# stock llama.cpp has no cache type {', '.join(lacking)}; {other}"
    if pair in VLLM_DTYPES:
        flags["vllm"] = VLLM_DTYPES[pair]
    else:
        known = [VLLM_DTYPES[(c.key, c.value)] for c in accepted if (c.key, c.value) in VLLM_DTYPES]
        other = known[0] if known else "--kv-cache-dtype auto (stock)"
        flags["vllm"] = f"# vLLM cannot be told {chosen.name}; nearest accepted: {other}"
    return flags


def policy_fields() -> tuple[str, ...]:
    """Names of all policy values; the default TOML states each of them."""
    return tuple(f.name for f in fields(Policy))
