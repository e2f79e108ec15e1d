"""Evidence: what was checked or measured, where, on which kernels, and with what outcome.

A record is frozen and checks its own invariants when it is built, so that a claim that may not
be made cannot be represented: a non-pass carries its reason, metrics are finite, software devices
never pass, and a speed exists only beside a PASSED gate record of the same kernel digest.

The store is append-only JSON Lines. Each line holds the record and the SHA-256 of its canonical
JSON (sorted keys, no spaces). Lines that were edited, cut or made by other kernels stay visible as
NOT_RUN with the reason; they never read as PASSED.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import reprlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from kvproof.errors import RequestError
from kvproof.machine import cpu_model, usable_cpus

SCHEMA_VERSION = 1
SOFTWARE_DEVICES = ("llvmpipe", "lavapipe", "swiftshader", "softpipe", "software rasterizer")


class Outcome(StrEnum):
    """How a check or a measurement ended; only PASSED counts as a pass."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    REFUSED = "REFUSED"
    NOT_RUN = "NOT_RUN"
    DIAGNOSTIC = "DIAGNOSTIC"


WORST_FIRST = (
    Outcome.FAILED,
    Outcome.REFUSED,
    Outcome.NOT_RUN,
    Outcome.DIAGNOSTIC,
    Outcome.PASSED,
)


def aggregate(outcomes: Iterable[Outcome]) -> Outcome:
    """Outcome of a list of checks: the worst one present; an empty list proves nothing: FAILED."""
    present = set(outcomes)
    return next((o for o in WORST_FIRST if o in present), Outcome.FAILED)


def exit_code(outcome: Outcome) -> int:
    """Process exit code of an aggregate: 0 PASSED, 1 FAILED, 3 nothing recordable."""
    return {Outcome.PASSED: 0, Outcome.FAILED: 1}.get(outcome, 3)


def utc_now() -> str:
    """The current time, ISO 8601 in UTC to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@functools.cache
def source_commit() -> str:
    """Commit of the checkout this package runs from ("-dirty" if edited); else its version."""
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):  # no git program: the version must do
            return "version " + _versions(("kvproof",)).get("kvproof", "unknown")
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.strip()
    return "version " + _versions(("kvproof",)).get("kvproof", "unknown")


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of installed packages, read from their metadata without importing them."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _installed() -> tuple[tuple[str, str], ...]:
    versions = _versions(("kvproof", "numpy", "scipy", "torch", "transformers"))
    versions["python"] = platform.python_version()
    return tuple(versions.items())


@dataclass(frozen=True)
class Environment:
    """Where a record was made. `load_average` is the 1-minute figure when it was built (-1: none).

    `is_software` is forced to True when the device or driver names a software rasterizer.
    """

    device: str
    isa: str = ""
    is_software: bool = False
    driver: str = ""
    cpu: str = ""
    os: str = ""
    cores: int = 0
    threads: int = 0
    load_average: float = -1.0
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        text = f"{self.device} {self.driver}".lower()
        if any(name in text for name in SOFTWARE_DEVICES):
            object.__setattr__(self, "is_software", True)
        if not math.isfinite(self.load_average):
            raise ValueError(f"environment: load_average {self.load_average} is not finite")

    @classmethod
    def current(cls, backend: Mapping[str, Any] | None = None) -> Environment:
        """This machine, with the facts that a backend's `environment()` adds. Takes about 1 ms."""
        facts = dict(backend or {})
        versions = dict(_installed()) | {k: str(v) for k, v in facts.get("versions", {}).items()}
        try:
            load = round(os.getloadavg()[0], 2)
        except (AttributeError, OSError):  # not on every system
            load = -1.0
        return cls(
            device=str(facts.get("device") or cpu_model()),
            isa=str(facts.get("isa") or ""),
            is_software=bool(facts.get("is_software", False)),
            driver=str(facts.get("driver") or ""),
            cpu=cpu_model(),
            os=f"{platform.system()} {platform.release()} {platform.machine()}",
            cores=usable_cpus(),
            threads=int(facts.get("threads") or 0),
            load_average=load,
            versions=versions,
        )


@dataclass(frozen=True)
class GatePass:
    """Reference to a PASSED gate record; made by `Evidence.gate_pass()`."""

    id: str
    digest: str


def _intervals(*names: str) -> tuple[str, ...]:
    return tuple(name + end for name in names for end in ("", "_low", "_high"))


# kind -> (subject fields, metrics) that a PASSED record of it has: what decisions are drawn from.
_FIGURES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bytes": (("context",), ("bytes", "bytes_per_token")),
    "quality": ((), ("tokens", *_intervals("kld", "same_top", "delta_nll"))),
    "speed": (("phase", "depth"), ("rounds", *_intervals("ratio"))),
}


@dataclass(frozen=True)
class Evidence:
    """One record: a subject, its outcome, finite metrics, and what it was made with.

    `subject` is a flat dict of str, int or float values with at least "kind" ("gate", "speed",
    "quality", ...). `digest` is the backend's kernel digest. A "speed" record that PASSED needs
    `gates`: references to PASSED gate records of the same digest.
    """

    subject: Mapping[str, str | int | float]
    outcome: Outcome
    metrics: Mapping[str, float]
    environment: Environment
    digest: str
    commit: str = field(default_factory=source_commit)
    reason: str | None = None
    started: str = field(default_factory=utc_now)
    finished: str = field(default_factory=utc_now)
    gates: tuple[GatePass, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        name = f"evidence {dict(self.subject)}"
        object.__setattr__(self, "outcome", Outcome(self.outcome))
        if not isinstance(self.subject.get("kind"), str) or not self.subject["kind"]:
            raise ValueError(f'{name}: the subject needs a "kind"')
        for key, value in self.subject.items():
            if not isinstance(value, (str, int, float)):
                raise ValueError(f"{name}: subject {key!r} is {value!r}, not a string or number")
        for key, value in self.metrics.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name}: metric {key!r} is {value!r}, not a number")
            if not math.isfinite(value):
                raise ValueError(f"{name}: metric {key!r} is {value}, which is not finite")
        if self.outcome is not Outcome.PASSED and not self.reason:
            raise ValueError(f"{name}: {self.outcome} needs a reason")
        if self.outcome is Outcome.PASSED:
            self._check_pass(name)

    def _check_pass(self, name: str) -> None:
        if self.environment.is_software:
            raise ValueError(f"{name}: {self.environment.device} is software, never a pass")
        if not self.digest:
            raise ValueError(f"{name}: a pass needs the digest of its kernels")
        if self.subject.get("lane") == "kv":
            self._check_figures(name)
        if self.subject["kind"] != "speed":
            return
        if not self.gates:
            raise ValueError(f"{name}: a speed needs a PASSED gate record of the same kernels")
        for gate in self.gates:
            if gate.digest != self.digest:
                raise ValueError(
                    f"{name}: gate record {gate.id} has kernel digest {gate.digest[:16]}, the "
                    f"speed {self.digest[:16]}; run the gate again on these kernels"
                )

    def _check_figures(self, name: str) -> None:
        kind = str(self.subject["kind"])
        wanted, figures = _FIGURES.get(kind, ((), ()))
        lacking = [n for n in wanted if n not in self.subject]
        lacking += [n for n in figures if n not in self.metrics]
        if lacking:
            raise ValueError(f"{name}: a {kind} that passed needs {', '.join(lacking)}")

    @property
    def id(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON."""
        return _sha256(self.document())[:16]

    def gate_pass(self) -> GatePass:
        """Reference for a speed record; ValueError unless this is a gate record that PASSED."""
        if self.subject["kind"] != "gate" or self.outcome is not Outcome.PASSED:
            raise ValueError(
                f"evidence {dict(self.subject)}: {self.outcome}, not a PASSED gate record"
            )
        return GatePass(self.id, self.digest)

    def document(self) -> dict[str, Any]:
        """The record as JSON values."""
        return asdict(self) | {
            "subject": dict(self.subject),
            "metrics": dict(self.metrics),
            "outcome": str(self.outcome),
            "environment": asdict(self.environment) | {"versions": dict(self.environment.versions)},
            "gates": [asdict(gate) for gate in self.gates],
        }

    @classmethod
    def from_document(cls, document: Any) -> Evidence:
        """The record of a JSON document; ValueError names what does not fit the schema."""
        if not isinstance(document, dict):
            raise ValueError(f"an evidence record is an object, found {reprlib.repr(document)}")
        version = document.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"schema version {reprlib.repr(version)}, this kvproof reads {SCHEMA_VERSION}"
            )
        names = {f.name for f in fields(cls)}
        if set(document) != names:
            raise ValueError(f"fields that do not fit: {sorted(set(document) ^ names)}")
        texts = {n: document[n] for n in ("digest", "commit", "started", "finished")}
        _check_kinds(
            texts | {"reason": document["reason"] or ""}, dict.fromkeys((*texts, "reason"), "")
        )
        try:
            environment = Environment(**document["environment"])
            _check_kinds(asdict(environment), asdict(Environment("")))
            _check_kinds(environment.versions, dict.fromkeys(environment.versions, ""))
            gates = tuple(GatePass(**gate) for gate in document["gates"])
            for gate in gates:
                _check_kinds(asdict(gate), {"id": "", "digest": ""})
            return cls(**{**document, "environment": environment, "gates": gates})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not an evidence record: {error}") from error

    def voided(self, reason: str) -> Evidence:
        """The same record as NOT_RUN, with the reason why it no longer counts."""
        return replace(self, outcome=Outcome.NOT_RUN, reason=reason)


def _check_kinds(values: Mapping[str, object], like: Mapping[str, object]) -> None:
    """ValueError unless each value of `like` meets one of its own type (an int is also a float)."""
    for name, model in like.items():
        kinds = (int, float) if isinstance(model, float) else type(model)
        if not isinstance(values[name], kinds):
            raise ValueError(
                f"{name} is {reprlib.repr(values[name])}, expected a {type(model).__name__}"
            )


def canonical(document: Mapping[str, Any]) -> str:
    """Canonical JSON: sorted keys, no spaces, no NaN; the text that digests are taken of."""
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    )


def _sha256(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(document).encode()).hexdigest()


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Hold an exclusive lock on an open file, so that two processes never mix their lines."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
        try:
            yield
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


class Store:
    """An append-only evidence file, JSON Lines, shared safely by several processes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, *records: Evidence) -> None:
        """Write records at the end and wait until they are on disk; RequestError if it cannot."""
        lines = "".join(
            canonical({"evidence": e.document(), "sha256": _sha256(e.document())}) + "\n"
            for e in records
        )
        if not self.path.parent.is_dir():
            raise RequestError(
                f"evidence store {self.path}: folder {self.path.parent} does not exist; "
                "create it or name another folder"
            )
        try:
            binary = getattr(os, "O_BINARY", 0)  # Windows would translate the line ends
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | binary, 0o644)
        except OSError as error:
            raise RequestError(
                f"evidence store {self.path}: cannot be opened for writing "
                f"({error.strerror}); name another folder or change its permissions"
            ) from error
        try:
            with _locked(descriptor):
                size = os.lseek(descriptor, 0, os.SEEK_END)
                if size:
                    os.lseek(descriptor, size - 1, os.SEEK_SET)
                    if os.read(descriptor, 1) != b"\n":
                        # A torn line of a killed process stays as it is, and stays visible.
                        lines = "\n" + lines
                data = lines.encode()
                try:
                    while data:
                        data = data[os.write(descriptor, data) :]
                    os.fsync(descriptor)
                except OSError:
                    os.ftruncate(descriptor, size)  # half a record helps nobody
                    raise
        except OSError as error:
            raise RequestError(
                f"evidence store {self.path}: writing failed ({error.strerror}); "
                "free some space or name another folder"
            ) from error
        finally:
            os.close(descriptor)

    def read(self, digests: Mapping[str, str] | None = None) -> list[Evidence]:
        """All records in order; an absent file is an empty store.

        `digests` maps a backend's name to its kernel digest now: records of that backend made
        with other kernels become NOT_RUN, and so do gate records held against another reference
        (subject "reference"). So do edited and cut lines, and speeds whose gate records are not
        PASSED here.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RequestError(
                f"evidence store {self.path}: cannot be read ({error.strerror}); name a "
                "readable .jsonl file"
            ) from error
        lines = text.split(b"\n")
        torn = bool(lines[-1])
        if not torn:
            lines.pop()
        records = []
        for number, line in enumerate(lines, 1):
            last = torn and number == len(lines)
            record = self._parse(number, line, last)
            if record.outcome is Outcome.PASSED and digests:
                record = _fresh(record, digests)
            records.append(record)
        passed = {e.id for e in records if e.outcome is Outcome.PASSED}
        return [_gated(e, passed) for e in records]

    def _parse(self, number: int, line: bytes, torn: bool) -> Evidence:
        where = f"{self.path.name} line {number}"
        try:
            entry = json.loads(line)
            document = entry["evidence"]
            whole = canonical(entry).encode() == line and entry["sha256"] == _sha256(document)
        except (ValueError, TypeError, KeyError, RecursionError):
            what = "cut short" if torn else "not readable"
            return _unreadable(where, number, f"{where}: {what}; the record is lost, run it again")
        if not whole:
            return _unreadable(
                where, number, f"{where}: changed after it was written; run it again", document
            )
        try:
            return Evidence.from_document(document)
        except ValueError as error:
            return _unreadable(where, number, f"{where}: {error}", document)


def _unreadable(where: str, number: int, reason: str, document: object = None) -> Evidence:
    """A NOT_RUN record in place of a bad line; keeps what can be told of its subject."""
    subject: dict[str, str | int | float] = {"kind": "unreadable", "where": where, "line": number}
    if isinstance(document, dict) and isinstance(document.get("subject"), dict):
        said = document["subject"]
        if isinstance(said.get("kind"), str) and said["kind"]:
            subject |= {k: v for k, v in said.items() if isinstance(v, (str, int, float))}
    return Evidence(
        subject, Outcome.NOT_RUN, {}, Environment("unknown"), "", "unknown", reason, "", ""
    )


def _fresh(record: Evidence, digests: Mapping[str, str]) -> Evidence:
    used = {str(record.subject.get("backend", "")): record.digest}
    if "reference" in record.subject:
        used["reference"] = str(record.subject["reference"])
    for name, digest in used.items():
        if digests.get(name, digest) != digest:
            return record.voided(
                f"stale: made with {name} kernels {digest[:16]}, now {digests[name][:16]}; "
                "run it again"
            )
    return record


def _gated(record: Evidence, passed: set[str]) -> Evidence:
    missing = [gate.id for gate in record.gates if gate.id not in passed]
    if record.outcome is not Outcome.PASSED or not missing:
        return record
    return record.voided(f"its gate record {missing[0]} is not PASSED in this store")
