"""The KV lane: which key and value formats to try on a model, and how they are measured.

Every measurement compares a candidate cache with the f16 cache of the same backend in one process:
quality in lockstep on the same tokens, speed in interleaved rounds. Each one ends as Evidence that
is stored at once, so that an interrupted or short run loses nothing and the next one resumes.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvproof import stats
from kvproof.decision import BASELINE, Candidate, Decision, Policy, decide
from kvproof.errors import Refused, RequestError
from kvproof.evidence import Environment, Evidence, GatePass, Outcome, Store, utc_now
from kvproof.formats import get as get_format
from kvproof.geometry import LayerGeometry, index_ranges
from kvproof.models import sha256_file

if TYPE_CHECKING:
    from kvproof.backends import Backend
    from kvproof.cache import KVCache, LayerCache
    from kvproof.conditioner import Conditioner
    from kvproof.geometry import Geometry

Progress = Callable[[str], None]
Subject = Mapping[str, str | int | float]

BLOCK = 32  # neighbouring tokens are alike: intervals come from blocks of this many
ROWS = 8  # rows of logits handled at a time: 8 x 262144 float32 are 8 MiB
# (num_heads, num_kv_heads, head_dim) of the bench without a model: Llama-3-8B, Gemma-3, SmolLM2.
KERNEL_SHAPES = ((32, 8, 128), (4, 1, 256), (9, 3, 64))
CONTENDED = 0.15  # share of the processors that other programs may use before a round is flagged
# Rounds go on up to this many times policy.rounds while the interval holds the bound.
ROUNDS_MORE = 3
# Share of the time left after the gate that quality may use; speed gets the rest.
QUALITY_SHARE = 0.6


@dataclass(frozen=True, order=True)
class Treated(Candidate):
    """A candidate whose keys are conditioned, or whose first tokens are kept in f16, or both.

    `digest` is that of the conditioner ("" without one): records of one are never taken for those
    of another.
    """

    sinks: int = 0
    digest: str = ""
    conditioner: Conditioner | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, pair: Candidate, conditioner: Conditioner | None, sinks: int) -> Treated:
        """`pair` with a conditioner and so many sinks."""
        digest = conditioner.digest if conditioner else ""
        return cls(pair.key, pair.value, sinks, digest, conditioner)

    def subject(self) -> Subject:
        """What it adds to the subject of a record."""
        subject: dict[str, str | int | float] = {"sinks": self.sinks, "conditioner": self.digest}
        if self.conditioner:
            subject |= {"means": self.conditioner.kind, "page": self.conditioner.page}
        return subject


@dataclass(frozen=True)
class About:
    """What all records of a run share."""

    backend: str
    digest: str
    model: str  # SHA-256 of the model file
    model_name: str
    environment: Environment

    def subject(self, kind: str, pair: Candidate, **more: str | int | float) -> Subject:
        """Subject of a record about `pair`."""
        return {
            "kind": kind,
            "lane": "kv",
            "backend": self.backend,
            "model": self.model,
            "model_name": self.model_name,
            "key": pair.key,
            "value": pair.value,
            **(pair.subject() if isinstance(pair, Treated) else {}),
            **more,
        }

    def record(
        self,
        subject: Subject,
        outcome: Outcome,
        metrics: Mapping[str, float],
        *,
        started: str,
        reason: str | None = None,
        gates: tuple[GatePass, ...] = (),
    ) -> Evidence:
        """A record of this run, finished now."""
        return Evidence(
            subject=subject,
            outcome=outcome,
            metrics=metrics,
            environment=self.environment,
            digest=self.digest,
            reason=reason,
            started=started,
            gates=gates,
        )

    def not_run(self, subject: Subject, reason: str) -> Evidence:
        """A record that says what is missing, and why."""
        return self.record(subject, Outcome.NOT_RUN, {}, started=utc_now(), reason=reason)


def candidates(geometry: Geometry, policy: Policy, backend: Backend) -> dict[Candidate, str | None]:
    """Pair -> None, or why a layer of the model or the backend refuses it. The baseline is first.

    RequestError where the policy names a format that does not exist.
    """
    found: dict[Candidate, str | None] = {}
    for pair in (BASELINE, *policy.pairs()):
        problems: dict[str, list[int]] = {}
        for layer in geometry.layers:
            if layer.shares_kv_with is not None:
                continue
            sides = (("key", pair.key, layer.head_dim_k), ("value", pair.value, layer.head_dim_v))
            for side, name, head_dim in sides:
                fmt = get_format(name)
                why = fmt.refuses(head_dim, side) or next(
                    filter(
                        None, (backend.refuses(op, fmt, head_dim) for op in ("encode", "attention"))
                    ),
                    None,
                )
                if why:
                    problems.setdefault(f"{side} format {name}: {why}", []).append(layer.index)
        texts = [f"{_layers(at)}, {why}" for why, at in problems.items()]
        found[pair] = "; ".join(texts) or None
    return found


def _layers(indices: Sequence[int]) -> str:
    return f"layer{'s' if len(indices) > 1 else ''} {index_ranges(sorted(indices))}"


def default_text() -> str:
    """English that is present on every machine: the topics of Python's own documentation."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def window_ids(ids: Sequence[int], prefix: Sequence[int], policy: Policy) -> list[list[int]]:
    """Windows of `policy.window + 1` ids spread over the text, each behind `prefix` (the BOS).

    Positions follow the binary van der Corput sequence, so that a longer run keeps the windows of a
    shorter one. RequestError where the text is too short for one.
    """
    body = policy.window + 1 - len(prefix)
    room = len(ids) - body
    if room < 0:
        raise RequestError(
            f"the text has {len(ids)} tokens and one window needs {body}; give a longer text "
            "(--text FILE) or a smaller measure.window in the policy"
        )
    windows: list[list[int]] = []
    seen: set[int] = set()
    for i in range(4 * policy.windows_max):
        fraction = sum(((i >> bit) & 1) / 2 ** (bit + 1) for bit in range(i.bit_length()))
        start = int(fraction * (room + 1))
        # Windows never overlap: a token that counts twice would narrow the interval for nothing.
        if all(abs(start - other) >= body for other in seen):
            seen.add(start)
            windows.append([*prefix, *ids[start : start + body]])
        if len(windows) == policy.windows_max:
            break
    return windows


def _windows(model: Any, text: str, policy: Policy) -> list[list[int]]:
    ids, prefix = model.tokenizer.encode(text), bos_prefix(model.tokenizer.encode)
    return window_ids(ids[len(prefix) :], prefix, policy)


def bos_prefix(encode: Callable[[str], list[int]]) -> list[int]:
    """What the tokenizer puts before any text; a window from the middle of a text needs it too."""
    first, second = encode("a"), encode("0")
    prefix = []
    for a, b in zip(first[:-1], second[:-1], strict=False):
        if a != b:
            break
        prefix.append(a)
    return prefix


def _hash(ids: Iterable[int]) -> str:
    return hashlib.sha256(np.asarray(list(ids), dtype="<i8").tobytes()).hexdigest()


@dataclass(frozen=True)
class Compared:
    """Per-token figures of one candidate against the f16 cache; float64 [tokens] each."""

    kld: NDArray[np.float64]  # nats
    same_top: NDArray[np.float64]  # 0 or 1
    delta_nll: NDArray[np.float64]  # nats, candidate - f16
    nll: NDArray[np.float64]  # nats, of the f16 cache


def _cache(model: Any, pair: Candidate, backend: str, first_position: int = 0) -> Any:
    options: dict[str, Any] = {"first_position": first_position} if first_position else {}
    if isinstance(pair, Treated):
        options |= {"conditioner": pair.conditioner, "sinks": pair.sinks}
    return model.new_cache(key=pair.key, value=pair.value, backend=backend, **options)


def compare_window(
    model: Any,
    ids: Sequence[int],
    pairs: Sequence[Candidate],
    *,
    backend: str,
    chunk: int,
    floor: bool,
    deadline: float = math.inf,
    first_position: int = 0,
) -> tuple[dict[Candidate, Compared | str], Compared | None]:
    """Feed `ids[:-1]` chunk by chunk to the f16 cache and to all candidates, side by side.

    Logits of one chunk of the baseline and one candidate are all that is held at a time, whatever
    the window. With `floor` a second f16 cache is fed in chunks of another size: what it differs by
    is the noise floor of the engine. A candidate whose logits are not finite gets that as a
    sentence in place of its figures; for the baseline it is Refused. Where the pace so far would
    overrun `deadline` (time.monotonic()), the last candidates of the list are given up: no figures.
    All caches begin at `first_position` of a text.
    """
    import torch

    inputs, targets = list(ids[:-1]), torch.tensor(ids[1:])
    n = len(inputs)
    base_cache = _cache(model, BASELINE, backend, first_position)
    caches = {pair: _cache(model, pair, backend, first_position) for pair in pairs}
    floor_cache = _cache(model, BASELINE, backend, first_position) if floor else None
    rows: dict[Candidate, list[NDArray[np.float64]]] = {pair: [] for pair in pairs}
    noise: list[NDArray[np.float64]] = []
    broken: dict[Candidate, str] = {}
    begin, ran = time.monotonic(), 0  # tokens of all arms together
    with torch.inference_mode():
        for start in range(0, n, chunk):
            if start:
                # The arms that fit in the time left, at the pace of those that ran.
                now = time.monotonic()
                pace = (now - begin) / ran
                room = (deadline - now) / (pace * (n - start)) - 1 - floor
                for pair in list(caches)[max(0, int(min(room, len(caches)))) :]:
                    del caches[pair], rows[pair]
                if not caches:
                    return dict(broken), None
            piece, want = inputs[start : start + chunk], targets[start : start + chunk]
            ran += len(piece) * (len(caches) + 1 + floor)
            base = _log_softmax(model.forward(piece, base_cache))
            if not bool(torch.isfinite(base.sum(dtype=torch.float64))):
                raise Refused(
                    f"the f16 baseline gives logits that are not finite near token {start} of a "
                    "window; nothing can be compared with it: check the model file"
                )
            for pair, cache in list(caches.items()):
                logits = _log_softmax(model.forward(piece, cache))
                if bool(torch.isfinite(logits.sum(dtype=torch.float64))):
                    rows[pair].append(_differences(base, logits, want))
                else:
                    broken[pair] = f"logits are not finite near token {start} of a window"
                    del caches[pair], rows[pair]
                del logits
            if floor_cache is not None:
                # Two unequal pieces instead of one: other shapes, other order of sums.
                cut = max(1, len(piece) // 3)
                both = [model.forward(x, floor_cache) for x in (piece[:cut], piece[cut:]) if x]
                noise.append(_differences(base, _log_softmax(torch.cat(both)), want))
                del both
            del base
    lengths = {c.kv.length for c in (base_cache, *caches.values())}
    if lengths != {n}:
        raise RuntimeError(f"caches saw {sorted(lengths)} tokens instead of {n} each")
    figures: dict[Candidate, Compared | str] = dict(broken)
    figures |= {pair: Compared(*np.concatenate(r, axis=1)) for pair, r in rows.items()}
    return figures, Compared(*np.concatenate(noise, axis=1)) if noise else None


def _log_softmax(logits: Any) -> Any:
    """Log-softmax over the last axis of float32 `[tokens, vocab]`, in place, few rows at a time."""
    for start in range(0, len(logits), ROWS):
        rows = logits[start : start + ROWS]
        rows -= rows.logsumexp(dim=-1, keepdim=True)
    return logits


def _differences(base: Any, other: Any, targets: Any) -> NDArray[np.float64]:
    """KLD, same top, loss change and baseline loss of log-probabilities, float64 [4, tokens]."""
    import torch

    out = np.empty((4, len(base)))
    for start in range(0, len(base), ROWS):
        rows = slice(start, start + ROWS)
        p, q = base[rows], other[rows]
        out[0, rows] = torch.sum((p - q) * p.exp(), dim=-1, dtype=torch.float64).numpy()
        out[1, rows] = (p.argmax(dim=-1) == q.argmax(dim=-1)).double().numpy()
        index = targets[rows].unsqueeze(-1)
        nll = -p.gather(-1, index)[:, 0].double()
        out[2, rows] = (-q.gather(-1, index)[:, 0].double() - nll).numpy()
        out[3, rows] = nll.numpy()
    return out


def poison(model: Any, ids: Sequence[int], pair: Candidate, backend: str) -> dict[str, float]:
    """How far logits move when the packed keys, or values, of all earlier tokens change places.

    Rows are rolled by one token within the live buffers: still valid codes, so nothing but a cache
    that is not read can leave the logits alone. Returns the largest change, {"key": c, "value": c}.
    Only logits of the last token are computed: for a large vocabulary the others cost most.
    """
    import torch

    half = len(ids) // 2

    def logits(spoil: str | None) -> Any:
        cache = _cache(model, pair, backend)
        model.prefill(ids[:half], cache)
        if spoil is not None:
            for layer in cache.kv.owners:
                if spoil == "key":
                    layer.k_blocks = np.roll(layer.k_blocks, 1, axis=0)
                else:
                    layer.v_blocks = np.roll(layer.v_blocks, 1, axis=0)
        return model.prefill(ids[half:], cache)

    with torch.inference_mode():
        clean = logits(None)
        return {side: float((logits(side) - clean).abs().max()) for side in ("key", "value")}


def measure_quality(
    model: Any,
    windows: Sequence[Sequence[int]],
    pairs: Sequence[Candidate],
    *,
    about: About,
    policy: Policy,
    done: Iterable[Evidence] = (),
    stop_early: bool = True,
    deadline: float = math.inf,
    progress: Progress | None = None,
) -> Iterator[Evidence]:
    """Yield one record per pair and window as it is finished, then one "quality" record per pair.

    `done` holds records of earlier runs; windows found there are not measured again. With
    `stop_early` a pair leaves once its intervals are clear of all bounds, or one is broken.
    `deadline` is a time.monotonic() value: pairs that it leaves without a window are NOT_RUN.
    Refused where the baseline's own loss is implausible: nothing can be compared with it.
    """
    tell = progress or (lambda _: None)
    hashes = [_hash(w) for w in windows]
    held: dict[Candidate, dict[str, Evidence]] = {p: {} for p in pairs}
    for e in done:
        known = next((p for p in pairs if _is_of(e, p)), None)
        if known is not None and _is_window(e, about, policy):
            held[known][str(e.subject["tokens_sha256"])] = e
    order = {h: i for i, h in enumerate(hashes)}
    live = list(pairs)
    arm_seconds = 0.0
    for index, (ids, digest) in enumerate(zip(windows, hashes, strict=True)):
        if stop_early:
            live = [p for p in live if not _settled(held[p], order, policy)]
        todo = [p for p in live if digest not in held[p]]
        left = deadline - time.monotonic()
        if arm_seconds and todo and left < math.inf:
            # The baseline runs in any case; the first of the list are the most promising.
            todo = todo[: max(0, int(left / arm_seconds) - 1)]
        if not todo or left <= 0:
            continue
        text = f"quality: window {index + 1} of at most {len(windows)}, candidates: {len(todo)}"
        tell(text + (f", about {arm_seconds * (len(todo) + 1):.0f} s" if arm_seconds else ""))
        started = utc_now()
        clock = time.perf_counter()
        floor = not any(held.values())
        figures, noise = compare_window(
            model,
            ids,
            todo,
            backend=about.backend,
            chunk=policy.chunk,
            floor=floor,
            deadline=deadline,
        )
        if not figures:
            break  # not even the first candidate fits in the time left
        arm_seconds = (time.perf_counter() - clock) / (len(figures) + 1 + floor)
        for pair in (p for p in todo if p in figures):
            found = figures[pair]
            subject = about.subject(
                "quality-window", pair, index=index, tokens_sha256=digest, chunk=policy.chunk
            )
            if isinstance(found, str):
                record = about.record(subject, Outcome.FAILED, {}, started=started, reason=found)
            else:
                _check_baseline(found.nll, int(model.geometry.vocab_size))
                moved = poison(model, ids[:BLOCK], pair, about.backend) if not held[pair] else {}
                record = _window_record(about, subject, found, noise, moved, started)
            held[pair][digest] = record
            yield record
    for pair in pairs:
        yield _summary(about, policy, pair, held[pair], order)


def _pair_of(e: Evidence) -> Candidate:
    return Candidate(str(e.subject.get("key", "")), str(e.subject.get("value", "")))


def _is_of(e: Evidence, pair: Candidate) -> bool:
    """Whether a record is about this candidate, treated the same way."""
    treated = (pair.sinks, pair.digest) if isinstance(pair, Treated) else (None, None)
    return (
        _pair_of(e) == Candidate(pair.key, pair.value)
        and (e.subject.get("sinks"), e.subject.get("conditioner")) == treated
    )


def _is_window(e: Evidence, about: About, policy: Policy) -> bool:
    s = e.subject
    return (
        s.get("kind") == "quality-window"
        and e.outcome in (Outcome.PASSED, Outcome.FAILED)
        and e.digest == about.digest
        and (s.get("model"), s.get("backend")) == (about.model, about.backend)
        and s.get("chunk") == policy.chunk
    )


def _check_baseline(nll: NDArray[np.float64], vocab: int) -> None:
    mean, blind = float(nll.mean()), math.log(vocab)
    if not 0 < mean < 0.7 * blind:
        raise Refused(
            f"the f16 baseline predicts this text with a loss of {mean:.2f} nats per token; blind "
            f"guessing gives {blind:.2f}, a working model on its kind of text far less. Nothing "
            "can be compared with it: check the model file, or give a text it knows (--text FILE)"
        )


def _window_record(
    about: About,
    subject: Subject,
    figures: Compared,
    noise: Compared | None,
    moved: Mapping[str, float],
    started: str,
) -> Evidence:
    """Block means (for intervals) and a histogram (for quantiles) of one window."""
    metrics: dict[str, float] = {
        "tokens": len(figures.kld),
        "nll": float(figures.nll.mean()),
        "kld_max": float(figures.kld.max()),
    }
    for name in ("kld", "same_top", "delta_nll"):
        values = getattr(figures, name)
        for i in range(len(values) // BLOCK):
            block = values[i * BLOCK : (i + 1) * BLOCK]
            metrics[f"{name}.{i:03d}"] = float(block.mean())
    bins, counts = np.unique(_bin(figures.kld), return_counts=True)
    metrics |= {f"h.{b:+04d}": int(c) for b, c in zip(bins, counts, strict=True)}
    if noise is not None:
        metrics["kld_floor"] = float(noise.kld.mean())
    metrics |= {f"poison_{side}": change for side, change in moved.items()}
    unread = [side for side, change in moved.items() if change == 0]
    if unread:
        reason = f"changing the packed {' and '.join(unread)} rows left the logits as they were: "
        reason += "the cache is not read"
        return about.record(subject, Outcome.FAILED, metrics, started=started, reason=reason)
    return about.record(subject, Outcome.PASSED, metrics, started=started)


def _bin(kld: NDArray[np.float64]) -> NDArray[np.int64]:
    """16 bins a decade: a quantile read from them is right to within 7.5 %."""
    bins: NDArray[np.int64] = np.floor(16 * np.log10(np.maximum(kld, 1e-9))).astype(np.int64)
    return bins


def _quantile(histogram: Mapping[int, float], q: float) -> float:
    total = sum(histogram.values())
    seen = 0.0
    for b in sorted(histogram):
        seen += histogram[b]
        if seen >= q * total:
            return float(10 ** ((b + 0.5) / 16))
    raise ValueError("an empty histogram has no quantiles")


def _pooled(windows: Sequence[Evidence], name: str) -> stats.Estimate:
    """Mean over all blocks of all windows; whole blocks are resampled."""
    values = np.concatenate([_blocks(e, name) for e in windows])
    estimate = stats.paired_mean(values, block=1)
    return replace(estimate, n=BLOCK * estimate.n)


def treatment_effect(
    about: About, records: Sequence[Evidence], plain: Candidate, treated: Treated
) -> Evidence:
    """A "treatment" record: the KLD of a treated candidate over that of the plain one, paired on
    the blocks of the windows that both have, and how many nats per token it saves.

    NOT_RUN without such a window.
    """
    by_window: list[dict[str, Evidence]] = []
    for pair in (plain, treated):
        by_window.append(
            {
                str(e.subject["tokens_sha256"]): e
                for e in records
                if e.subject["kind"] == "quality-window"
                and _is_of(e, pair)
                and e.outcome is Outcome.PASSED
            }
        )
    both = [(by_window[0][h], by_window[1][h]) for h in by_window[0] if h in by_window[1]]
    subject = about.subject("treatment", treated, windows=len(both))
    if not both:
        return about.not_run(subject, "no window was measured both with and without the treatment")
    before, after = (np.concatenate([_blocks(pair[i], "kld") for pair in both]) for i in (0, 1))
    ratio = stats.paired_ratio(after, before, block=1)
    saved = stats.paired_mean(before - after, block=1)
    metrics = {
        "kld_plain": float(before.mean()),
        "kld_treated": float(after.mean()),
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "saved": saved.value,
        "saved_low": saved.low,
        "saved_high": saved.high,
        "tokens": BLOCK * len(before),
    }
    return about.record(subject, Outcome.PASSED, metrics, started=both[0][1].started)


def _blocks(e: Evidence, name: str) -> NDArray[np.float64]:
    """Block means of one figure of a window."""
    return np.array([e.metrics[k] for k in sorted(e.metrics) if k.startswith(name + ".")])


def _ordered(held: Mapping[str, Evidence], order: Mapping[str, int]) -> list[Evidence]:
    return [held[h] for h in sorted((h for h in held if h in order), key=order.__getitem__)]


def _settled(held: Mapping[str, Evidence], order: Mapping[str, int], policy: Policy) -> bool:
    """True once no further window can be worth its time."""
    windows = _ordered(held, order)
    if any(e.outcome is Outcome.FAILED for e in windows):
        return True
    if not windows:
        return False
    kld, top, nll = (_pooled(windows, name) for name in ("kld", "same_top", "delta_nll"))
    broken = (
        kld.low > policy.kld_max or top.high < policy.same_top_min or nll.low > policy.delta_nll_max
    )
    kept = (
        kld.high <= policy.kld_max
        and top.low >= policy.same_top_min
        and nll.high <= policy.delta_nll_max
        and sum(e.metrics["tokens"] for e in windows) >= policy.tokens_min
    )
    return broken or kept


def _summary(
    about: About,
    policy: Policy,
    pair: Candidate,
    held: Mapping[str, Evidence],
    order: Mapping[str, int],
) -> Evidence:
    windows = _ordered(held, order)
    common = {"window": policy.window, "chunk": policy.chunk, "windows": len(windows)}
    subject = about.subject("quality", pair, **common)
    if not windows:
        return about.not_run(subject, "budget: no time was left for a window of this candidate")
    hashes = "".join(str(e.subject["tokens_sha256"]) for e in windows)
    subject = {**subject, "tokens_sha256": hashlib.sha256(hashes.encode()).hexdigest()}
    started = windows[-1].started
    failed = [e.reason for e in windows if e.outcome is Outcome.FAILED]
    windows = [e for e in windows if "tokens" in e.metrics]
    if not windows:
        return about.record(
            subject, Outcome.FAILED, {}, started=started, reason="; ".join(map(str, failed))
        )
    metrics: dict[str, float] = {"tokens": sum(e.metrics["tokens"] for e in windows)}
    for name in ("kld", "same_top", "delta_nll"):
        estimate = _pooled(windows, name)
        metrics |= {
            name: estimate.value,
            f"{name}_low": estimate.low,
            f"{name}_high": estimate.high,
        }
    histogram: dict[int, float] = {}
    for e in windows:
        for key, count in e.metrics.items():
            if key.startswith("h."):
                histogram[int(key[2:])] = histogram.get(int(key[2:]), 0) + count
    metrics["kld_median"] = _quantile(histogram, 0.5)
    metrics["kld_p99"] = _quantile(histogram, 0.99)
    metrics["kld_max"] = max(e.metrics["kld_max"] for e in windows)
    metrics["nll_f16"] = float(np.mean([e.metrics["nll"] for e in windows]))
    for name in ("kld_floor", "poison_key", "poison_value"):
        seen = [e.metrics[name] for e in windows if name in e.metrics]
        if seen:
            metrics[name] = seen[0]
    if failed:
        return about.record(
            subject, Outcome.FAILED, metrics, started=started, reason="; ".join(map(str, failed))
        )
    return about.record(subject, Outcome.PASSED, metrics, started=started)


class _Load:
    """Share of the processors that other programs used since construction (Linux; else None)."""

    def __init__(self) -> None:
        self._before = self._read()

    @staticmethod
    def _read() -> tuple[float, float] | None:
        path = Path("/proc/stat")
        if not path.is_file():
            return None
        # user nice system idle iowait irq softirq steal, in ticks; all of the machine.
        ticks = [int(x) for x in path.read_text().split("\n", 1)[0].split()[1:9]]
        hz = os.sysconf("SC_CLK_TCK")
        own = sum(os.times()[:4])
        return (sum(ticks) - ticks[3] - ticks[4]) / hz - own, sum(ticks) / hz

    def others(self) -> float | None:
        """In [0, 1], since construction."""
        now = self._read()
        if now is None or self._before is None or now[1] <= self._before[1]:
            return None
        return max(0.0, (now[0] - self._before[0]) / (now[1] - self._before[1]))


def fill(geometry: Geometry, kv: KVCache, depth: int, seed: int = 0) -> None:
    """Append `depth` tokens of random rows to every layer that owns a cache.

    What a step costs depends on how many rows are cached, not on what they say.
    """
    rng = np.random.default_rng(seed)
    for layer in geometry.layers:
        if layer.shares_kv_with is not None:
            continue
        owner = kv.layer(layer.index)
        step = min(depth, 512)
        k = rng.standard_normal((step, layer.num_kv_heads, layer.head_dim_k), dtype=np.float32)
        v = rng.standard_normal((step, layer.num_kv_heads, layer.head_dim_v), dtype=np.float32)
        for start in range(0, depth, step):
            n = min(step, depth - start)
            owner.append(k[:n], v[:n])
            owner.evict()


def measure_bytes(
    geometry: Geometry,
    pairs: Sequence[Candidate],
    *,
    backend: Backend,
    about: About,
    context: int,
    deadline: float = math.inf,
) -> Iterator[Evidence]:
    """Yield the bytes of live buffers at `context` tokens, for each pair.

    `bytes` are rows in use, `bytes_allocated` the buffers with their room to grow, and
    `bytes_per_token` what a further token adds once windows are full.
    """
    from kvproof.cache import KVCache

    for pair in pairs:
        started = utc_now()
        subject = about.subject("bytes", pair, context=context)
        if time.monotonic() > deadline:
            yield about.not_run(subject, "budget: no time was left to fill a cache")
            continue
        kv = KVCache(geometry, key=pair.key, value=pair.value, backend=backend.name)
        fill(geometry, kv, context)
        growing = [
            (x, kv.layer(x.index))
            for x in geometry.layers
            if x.shares_kv_with is None and (x.window is None or x.window > context)
        ]
        per_token = sum(layer.used_bytes / layer.cached for _, layer in growing)
        metrics = {
            "bytes": kv.used_bytes,
            "bytes_allocated": kv.nbytes,
            "bytes_per_token": per_token,
        }
        yield about.record(subject, Outcome.PASSED, metrics, started=started)


def measure_speed(
    model: Any,
    pairs: Sequence[Candidate],
    *,
    about: About,
    policy: Policy,
    gates: Mapping[Candidate, tuple[GatePass, ...]],
    done: Iterable[Evidence] = (),
    deadline: float = math.inf,
    progress: Progress | None = None,
) -> Iterator[Evidence]:
    """Yield one record per pair, depth and phase: pp (a prompt chunk) and tg (decoded tokens).

    Rounds of the candidate and of f16 take turns, and who goes first alternates; both caches grow
    alike from `depth`. `gates` are the passed gate records that a speed needs in order to exist.
    """
    tell = progress or (lambda _: None)
    have = {
        (_pair_of(e), e.subject["phase"], e.subject["depth"])
        for e in done
        if _is_speed(e, about, policy)
    }
    cost = 0.0
    for pair in pairs:  # the most promising first: it gets all its depths before the next starts
        for depth in policy.depths:
            wanted = [p for p in ("tg", "pp") if (pair, p, depth) not in have]
            subjects = {p: _speed_subject(about, policy, pair, p, depth) for p in wanted}
            if wanted and (time.monotonic() + cost > deadline):
                why = f"budget: about {cost:.0f} s were needed" if cost else "budget: no time left"
                yield from (about.not_run(s, why) for s in subjects.values())
                continue
            if not wanted:
                continue
            tell(
                f"speed: {pair.name} at depth {depth:,}" + (f", about {cost:.0f} s" if cost else "")
            )
            clock = time.monotonic()
            yield from _time_pair(
                model, pair, depth, subjects, about, policy, gates[pair], deadline
            )
            cost = max(cost, time.monotonic() - clock)


def _speed_subject(
    about: About, policy: Policy, pair: Candidate, phase: str, depth: int
) -> Subject:
    tokens = policy.prefill_tokens if phase == "pp" else policy.decode_tokens
    return about.subject(
        "speed",
        pair,
        phase=phase,
        depth=depth,
        tokens=tokens,
        threads=about.environment.threads,
    )


def _is_speed(e: Evidence, about: About, policy: Policy) -> bool:
    s = e.subject
    if s.get("kind") != "speed" or e.outcome is not Outcome.PASSED or e.digest != about.digest:
        return False
    wanted = _speed_subject(about, policy, _pair_of(e), str(s["phase"]), int(s["depth"]))
    return (
        all(s.get(k) == v for k, v in wanted.items() if k != "model_name")
        and e.environment.device == about.environment.device
        and e.metrics["rounds"] >= policy.rounds
    )


def _time_pair(
    model: Any,
    pair: Candidate,
    depth: int,
    subjects: Mapping[str, Subject],
    about: About,
    policy: Policy,
    gates: tuple[GatePass, ...],
    deadline: float,
) -> Iterator[Evidence]:
    arms = {c: _cache(model, c, about.backend) for c in (BASELINE, pair)}
    for cache in arms.values():
        fill(model.geometry, cache.kv, depth)
    rng = np.random.default_rng(depth)
    vocab = int(model.geometry.vocab_size)
    for cache in arms.values():  # warm-up: first calls allocate and page in
        model.prefill(rng.integers(0, vocab, 2).tolist(), cache)
        model.prefill([1], cache)
    for phase, subject in subjects.items():
        started = utc_now()
        load = _Load()
        tokens = int(subject["tokens"])
        times: dict[Candidate, list[float]] = {c: [] for c in arms}
        least = policy.tg_ratio_min if phase == "tg" else policy.pp_ratio_min
        for r in range(ROUNDS_MORE * policy.rounds):
            if time.monotonic() > deadline:
                break
            if r >= policy.rounds:
                so_far = stats.interleaved_ratio(times[pair], times[BASELINE])
                if not so_far.low < least <= so_far.high:
                    break
            ids = rng.integers(0, vocab, tokens).tolist()
            for c in list(arms)[:: 1 if r % 2 else -1]:
                clock = time.perf_counter()
                if phase == "pp":
                    model.prefill(ids, arms[c])
                else:
                    for token in ids:
                        model.prefill([token], arms[c])
                times[c].append(time.perf_counter() - clock)
        others = load.others()
        if len(times[pair]) < 3:
            yield about.not_run(subject, f"budget: it ended after {len(times[pair])} rounds")
            continue
        ratio = stats.interleaved_ratio(times[pair], times[BASELINE])
        median = {c: float(np.median(t)) for c, t in times.items()}
        kernels = witness(arms[pair].kv)
        share = {c: _attention_seconds(model, arms[c], phase, tokens) / median[c] for c in arms}
        metrics = {
            "ratio": ratio.value,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "rounds": ratio.n,
            "tokens_per_second": tokens / median[pair],
            "tokens_per_second_f16": tokens / median[BASELINE],
            "fastest_round_f16": min(times[BASELINE]),
            "slowest_round_f16": max(times[BASELINE]),
            "attention_share": share[pair],
            "attention_share_f16": share[BASELINE],
            "bytes": arms[pair].kv.used_bytes,
            "depth_end": depth + ratio.n * tokens,
        }
        if others is not None:
            metrics |= {"other_load": others, "contended": int(others > CONTENDED)}
        yield about.record(
            {**subject, "kernels": kernels}, Outcome.PASSED, metrics, started=started, gates=gates
        )


def _attention_seconds(model: Any, cache: Any, phase: str, tokens: int) -> float:
    """Seconds that one round spends in the cache (encoding and attention), by replaying both.

    The replay appends random rows to every layer alike, so the cache stays usable.
    """
    n, repeats = (tokens, 1) if phase == "pp" else (1, tokens)
    rng = np.random.default_rng(1)
    total = 0.0
    for timed in (False, True):
        for layer in model.geometry.layers:
            live = cache.kv.layer(layer.index)
            heads = layer.num_kv_heads
            q = rng.standard_normal((n, layer.num_heads, layer.head_dim_k), dtype=np.float32)
            k = rng.standard_normal((n, heads, layer.head_dim_k), dtype=np.float32)
            v = rng.standard_normal((n, heads, layer.head_dim_v), dtype=np.float32)
            clock = time.perf_counter()
            if layer.shares_kv_with is None:
                live.append(k, v)
            live.attention(q)
            if timed:
                total += time.perf_counter() - clock
        cache.kv.evict()
    return total * repeats


def measure_attention(
    backend: Backend,
    pairs: Sequence[Candidate],
    depths: Sequence[int],
    *,
    shapes: Sequence[tuple[int, int, int]] = KERNEL_SHAPES,
    rounds: int = 15,
    progress: Progress | None = None,
) -> Iterator[Evidence]:
    """Attention of one query on its own, without a model: gate records, then one speed a case.

    `shapes` are (num_heads, num_kv_heads, head_dim). Rounds of a pair and of f16 take turns on
    random rows in the layout of the cache. A pair that a shape or the gate refuses is recorded so.
    """
    from kvproof.gate import gate_evidence

    tell = progress or (lambda _: None)
    environment = Environment.current(backend.environment())
    rng = np.random.default_rng(0)

    for heads, kv_heads, head_dim in shapes:
        layer = LayerGeometry(0, heads, kv_heads, head_dim, head_dim, None, None)
        gates: dict[Candidate, tuple[GatePass, ...]] = {}
        for pair in (BASELINE, *pairs):
            tell(f"gate: {pair.name} at head_dim {head_dim}")
            reasons = (get_format(f).refuses(head_dim, s) for f, s in _sides(pair))
            why = next(filter(None, reasons), None)
            about = {"lane": "attention", "backend": backend.name}
            about |= {"key": pair.key, "value": pair.value}
            if why:
                yield Evidence(
                    {"kind": "candidate", **about, "head_dim": head_dim}, Outcome.REFUSED, {},
                    environment, backend.digest(), reason=why,
                )  # fmt: skip
                continue
            found = gate_evidence(
                (pair.key, pair.value), [head_dim], backend, heads=[(heads, kv_heads)]
            )
            yield from found
            if all(e.outcome is Outcome.PASSED for e in found):
                gates[pair] = tuple(e.gate_pass() for e in found)
        for depth in depths:
            k, v = rng.standard_normal((2, depth, kv_heads, head_dim), dtype=np.float32)
            q = rng.standard_normal((1, heads, head_dim), dtype=np.float32)
            baseline = _filled(BASELINE, layer, backend, k, v, q) if BASELINE in gates else None
            for pair in pairs:
                if pair not in gates or baseline is None:
                    continue
                tell(f"attention: {pair.name}, {heads}/{kv_heads} heads of {head_dim}, {depth:,}")
                candidate = _filled(pair, layer, backend, k, v, q)
                started = utc_now()
                times: tuple[list[float], list[float]] = ([], [])
                for r in range(rounds):
                    arms = ((candidate, times[0]), (baseline, times[1]))
                    for arm, into in arms[:: 1 if r % 2 else -1]:
                        clock = time.perf_counter()
                        arm.attention(q)
                        into.append(time.perf_counter() - clock)
                ratio = stats.interleaved_ratio(times[0], times[1])
                median = float(np.median(times[0]))
                metrics = {
                    "ratio": ratio.value,
                    "ratio_low": ratio.low,
                    "ratio_high": ratio.high,
                    "rounds": ratio.n,
                    "milliseconds": 1e3 * median,
                    "milliseconds_f16": 1e3 * float(np.median(times[1])),
                    "bytes": candidate.used_bytes,
                    "gigabytes_per_second": candidate.used_bytes / median / 1e9,
                }
                subject: Subject = {
                    "kind": "speed", "lane": "attention", "backend": backend.name,
                    "key": pair.key, "value": pair.value, "num_heads": heads,
                    "num_kv_heads": kv_heads, "head_dim": head_dim, "depth": depth,
                    "kernels": ", ".join(k for k in candidate.calls if k.startswith("attention")),
                }  # fmt: skip
                yield Evidence(
                    subject, Outcome.PASSED, metrics, environment, backend.digest(),
                    started=started, gates=(*gates[BASELINE], *gates[pair]),
                )  # fmt: skip


def _filled(
    pair: Candidate, layer: LayerGeometry, backend: Backend, k: Any, v: Any, q: Any
) -> LayerCache:
    """A layer's cache that holds rows k and v, after one call of attention as warm-up."""
    from kvproof.cache import LayerCache

    cache = LayerCache(layer, get_format(pair.key), get_format(pair.value), backend)
    cache.append(k, v)
    cache.attention(q)
    return cache


def _sides(pair: Candidate) -> tuple[tuple[str, str], tuple[str, str]]:
    return (pair.key, "key"), (pair.value, "value")


def witness(kv: KVCache) -> str:
    """Kernels that really ran, with their layers: "layers 0-17: attention_q8_0_tq4_avx2"."""
    by_kernel: dict[str, list[int]] = {}
    for index, counts in enumerate(kv.witness()):
        for kernel in counts:
            by_kernel.setdefault(kernel, []).append(index)
    return "; ".join(f"{_layers(at)}: {kernel}" for kernel, at in sorted(by_kernel.items()))


@dataclass(frozen=True)
class Result:
    """A finished decision with everything that the report shows."""

    decision: Decision
    policy: Policy
    evidence: list[Evidence]
    about: About
    geometry: Geometry
    text: str  # what was read, in words


class _Kept:
    """Evidence of this run. Records go to the store at once; one that it holds is not repeated."""

    def __init__(self, store: Store, about: About) -> None:
        self.store = store
        everything = store.read(digests={about.backend: about.digest})
        self.unreadable = [e for e in everything if e.subject["kind"] == "unreadable"]
        self.earlier = [
            e
            for e in everything
            if e.digest == about.digest
            and e.subject.get("lane") == "kv"
            and (e.subject.get("model"), e.subject.get("backend")) == (about.model, about.backend)
            and e.environment.device == about.environment.device
        ]
        self.run: list[Evidence] = []

    def add(self, *records: Evidence) -> None:
        fresh = []
        for e in records:
            same = next((x for x in self.earlier if _alike(x, e)), None)
            if same is None:
                fresh.append(e)
            self.run.append(same or e)
        if fresh:
            self.store.append(*fresh)

    def reuse(self, kind: str, pair: Candidate, **subject: str | int) -> list[Evidence]:
        """Earlier records of a kind that came to an end, taken into this run."""
        found = [
            e
            for e in self.earlier
            if e.subject["kind"] == kind
            and _pair_of(e) == pair
            and e.outcome is not Outcome.NOT_RUN
            and all(e.subject.get(k) == v for k, v in subject.items())
        ]
        self.run += found
        return found

    def drop(self, records: Iterable[Evidence]) -> None:
        """Take reused records out of this run and do not match new ones with them."""
        gone = list(records)
        self.run = [e for e in self.run if e not in gone]
        self.earlier = [e for e in self.earlier if e not in gone]


def _alike(a: Evidence, b: Evidence) -> bool:
    return (a.subject, a.outcome, a.metrics, a.reason) == (
        b.subject,
        b.outcome,
        b.metrics,
        b.reason,
    )


def decide_model(
    path: str | Path,
    policy: Policy,
    store: Store,
    *,
    backend: str = "cpu",
    name: str | None = None,
    text: str | None = None,
    text_name: str = "Python's own documentation (pydoc_data.topics)",
    measures: Collection[str] = ("quality", "speed"),
    budget_seconds: float | None = None,
    treatment: tuple[Conditioner | None, int] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Measure what the policy asks for and decide.

    Every finished measurement is in `store` at once and a second call measures only what is
    missing. With a budget the order is gate, bytes, quality of the most promising pairs, their
    speed; what does not fit is recorded as NOT_RUN. With only "speed" in `measures` every pair
    that passed the gate is timed, whatever its quality. With a `treatment` (conditioner, sinks)
    quality is measured of every pair with and without it, on the same windows, all of them; the
    decision is about pairs without. RequestError and Refused as the parts raise them.
    """
    from kvproof import backends
    from kvproof.engines.transformers import load
    from kvproof.geometry import geometry as read_geometry

    begin = time.monotonic()
    end = begin + budget_seconds if budget_seconds else math.inf
    tell = progress or (lambda _: None)
    path = Path(path)
    shape = read_geometry(path)
    be = backends.get(backend)
    about = About(
        backend=be.name,
        digest=be.digest(),
        model=model_digest(path),
        model_name=name or path.name,
        environment=Environment.current(be.environment()),
    )
    kept = _Kept(store, about)
    found = candidates(shape, policy, be)
    if found[BASELINE]:
        raise Refused(f"the f16 baseline cannot run on this model: {found[BASELINE]}")
    _check_memory(shape, policy, measures)
    for pair, why in found.items():
        if why:
            subject = about.subject("candidate", pair)
            kept.add(about.record(subject, Outcome.REFUSED, {}, started=utc_now(), reason=why))
    pairs = [pair for pair, why in found.items() if not why]

    passes: dict[Candidate, tuple[GatePass, ...]] = {}
    for i, pair in enumerate(pairs):
        records = kept.reuse("gate", pair)
        if not records or len(records) != records[0].subject["records"]:
            kept.drop(records)
            tell(f"gate: {pair.name} ({i + 1} of {len(pairs)})")
            records = _gate(pair, shape, be, about, end)
            kept.add(*records)
        if all(e.outcome is Outcome.PASSED for e in records):
            passes[pair] = tuple(e.gate_pass() for e in records)
    pairs = [pair for pair in pairs if pair in passes]
    todo = [p for p in pairs if not kept.reuse("bytes", p, context=policy.context)]
    tell(f"bytes: caches of {policy.context:,} tokens")
    for e in measure_bytes(
        shape, todo, backend=be, about=about, context=policy.context, deadline=end
    ):
        kept.add(e)
    size = {_pair_of(e): e.metrics["bytes"] for e in kept.run if _measured(e, "bytes")}

    rivals = [pair for pair in pairs if pair != BASELINE and BASELINE in passes]
    if rivals:
        tell("loading the model")
        model = load(path)
        good = rivals
        treated = [Treated.of(p, *treatment) for p in rivals] if treatment else []
        if "quality" in measures:
            for e in measure_quality(
                model,
                _windows(model, default_text() if text is None else text, policy),
                [*rivals, *treated],
                about=about,
                policy=policy,
                done=kept.earlier,
                stop_early=not treated,
                deadline=time.monotonic() + QUALITY_SHARE * (end - time.monotonic()),
                progress=tell,
            ):
                kept.add(e)
            windows = [*kept.earlier, *kept.run]
            for plain, other in zip(rivals, treated, strict=False):
                kept.add(treatment_effect(about, windows, plain, other))
            quality = [e for e in kept.run if e.subject["kind"] == "quality"]
            good = [p for p in rivals if any(_is_of(e, p) and _within(e, policy) for e in quality)]
        if "speed" in measures:
            for pair in (p for p in rivals if p not in good):
                why = "speed decides only where quality clears the policy"
                kept.add(about.not_run(about.subject("speed", pair), why))
            if policy.objective != "speed":
                good = sorted(good, key=lambda p: (size.get(p, math.inf), p))
            kept.run += [e for e in kept.earlier if _is_speed(e, about, policy)]
            for e in measure_speed(
                model,
                good,
                about=about,
                policy=policy,
                gates={p: (*passes[BASELINE], *passes[p]) for p in good},
                done=kept.earlier,
                deadline=end,
                progress=tell,
            ):
                kept.add(e)
    tell(f"done after {time.monotonic() - begin:.0f} s")
    decided = [
        e
        for e in kept.run
        if e.subject["kind"] not in ("quality-window", "treatment") and "sinks" not in e.subject
    ]
    decision = decide(decided, policy)
    return Result(decision, policy, [*kept.run, *kept.unreadable], about, shape, text_name)


def _check_memory(shape: Geometry, policy: Policy, measures: Collection[str]) -> None:
    """Refused before anything runs if the caches to measure do not fit in free memory (Linux)."""
    info = Path("/proc/meminfo")
    if not info.is_file():
        return
    free = next(
        1024 * int(line.split()[1])
        for line in info.read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    wanted = {f"a context of {policy.context:,} tokens (memory.context)": (policy.context, 1.25)}
    if "speed" in measures:
        # f16 and the candidate side by side, each with room to grow.
        wanted[f"a depth of {policy.depths[-1]:,} tokens (measure.depths)"] = (
            policy.depths[-1],
            2.5,
        )
    for what, (tokens, caches) in wanted.items():
        need = int(caches * shape.kv_bytes(tokens, "f16", "f16", padding=False))
        if need > free:
            raise Refused(
                f"{what} needs {need / 2**30:.1f} GiB of memory for its caches, "
                f"{free / 2**30:.1f} GiB are free; ask for fewer tokens in the policy"
            )


def _gate(
    pair: Candidate, shape: Geometry, be: Backend, about: About, end: float
) -> list[Evidence]:
    """Gate records of a pair, marked as this lane's: decide() looks them up by key and value."""
    from kvproof.gate import gate_evidence

    subject = about.subject("gate", pair)
    if time.monotonic() > end:
        return [about.not_run(subject, "budget: no time was left for the gate")]
    layers = shape.layers
    records = gate_evidence(
        (pair.key, pair.value),
        sorted({(x.head_dim_k, x.head_dim_v) for x in layers}),
        be,
        heads=sorted({(x.num_heads, x.num_kv_heads) for x in layers}),
        windows=sorted({x.window for x in layers if x.window}),
    )
    # The number of records lets a reader notice one that was taken out of the store.
    subject = {**subject, "records": len(records)}
    return [replace(e, subject={**e.subject, **subject}) for e in records]


def model_digest(path: Path) -> str:
    """SHA-256 of a model file, or of the sorted digests of the files that make up a folder."""
    if path.is_file():
        return sha256_file(path)
    parts = sorted(p for p in path.iterdir() if p.suffix in (".gguf", ".safetensors", ".json"))
    lines = "".join(f"{model_digest(p)}  {p.name}\n" for p in parts)
    return hashlib.sha256(lines.encode()).hexdigest()


def _measured(e: Evidence, kind: str) -> bool:
    return e.subject["kind"] == kind and e.outcome is Outcome.PASSED


def _within(quality: Evidence, policy: Policy) -> bool:
    m = quality.metrics
    return (
        quality.outcome is Outcome.PASSED
        and m["kld_high"] <= policy.kld_max
        and m["same_top_low"] >= policy.same_top_min
        and m["delta_nll_high"] <= policy.delta_nll_max
    )
