"""The command line. Commands parse, call one function and print; they decide nothing.

Results go to stdout (one JSON document with --json), progress and logs to stderr. Exit codes: 0
done and everything asked for passed; 1 something failed; 2 the request is wrong; 3 something asked
for by name could not be run or is only diagnostic.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvproof.errors import Refused, RequestError

if TYPE_CHECKING:
    from kvproof.evidence import Evidence

app = typer.Typer(
    name="kvproof",
    help="Which low-precision KV cache should this model ship with, on this machine? With proof.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from kvproof import __version__

        print(f"kvproof {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Model = Annotated[
    str,
    typer.Argument(
        help="gemma-3-270m, smollm2-135m, a .gguf file, a folder, or a Hugging Face ORG/NAME.",
        show_default=False,
    ),
]
KeyType = Annotated[
    str | None,
    typer.Option(
        "--cache-type-k", help="Format of the cached keys; default f16 (kvproof formats)."
    ),
]
ValueType = Annotated[
    str | None, typer.Option("--cache-type-v", help="Format of the cached values; default f16.")
]
BackendName = Annotated[str, typer.Option("--backend", help="cpu, cuda or reference.")]
ConditionerFile = Annotated[
    Path | None,
    typer.Option("--conditioner", help="What `kvproof calibrate` wrote: condition the keys."),
]
Sinks = Annotated[
    int | None,
    typer.Option(
        "--sinks",
        min=0,
        max=4096,  # MAX_SINKS of the cache
        help="First tokens kept in f16; 4 with a conditioner, else 0.",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads; default: every core allowed.")
]


def main() -> NoReturn:
    """Entry point: errors become one line and an exit code, never a traceback."""
    # Typer carries click or a copy of it, by version: its exports lead to the base classes.
    # Read by libgomp when torch is imported. Threads that spin at barriers burn the time of those
    # they wait for as soon as the machine is busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    usage_error: Any = typer.BadParameter.__mro__[1]
    click_error: Any = typer.BadParameter.__mro__[2]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 gets escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(prog_name="kvproof", standalone_mode=False)
        if code == 130:  # how Typer returns a KeyboardInterrupt
            raise KeyboardInterrupt
        if sys.stdout is not None:
            sys.stdout.flush()
    except RequestError as error:
        _fail(str(error), 2)
    except Refused as error:
        _fail(str(error), 3)
    except click_error as error:
        context = getattr(error, "ctx", None) if isinstance(error, usage_error) else None
        where = context.command_path if context else "kvproof"
        text = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            print(text)
            sys.exit(2)
        _fail(f"{text} (see `{where} --help`)", 2)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _fail("stopped; finished measurements are kept, the same command goes on from there", 130)
    except BrokenPipeError:  # `kvproof ... | head`
        _discard_output()
        sys.exit(1)  # what Typer says of pipes that close earlier
    except OSError as error:
        _discard_output()
        _fail(f"{error.filename or 'standard output'}: {error.strerror or error}", 2)
    except MemoryError as error:
        _fail(f"not enough memory: {error}; ask for less, or close other programs", 3)
    sys.exit(code if isinstance(code, int) else 0)


def _discard_output() -> None:
    """What is still buffered has nowhere to go; Python would complain about it at exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> NoReturn:
    _say(f"kvproof: {' '.join(message.split())}", err=True)
    sys.exit(code)


# Control characters but tab and line feed, marks that turn the direction of text, and halves of
# characters: names in model files must not steer the terminal.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _safe(text: str) -> str:
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def _say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Text for a person, whatever it came from."""
    typer.echo(_safe(text), err=err, nl=nl)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _table(
    title: str, columns: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Any]
) -> None:
    """A plain table on stdout; numbers are right-aligned; piped, each row is one whole line."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    body = [[escape(_safe(str(cell))) for cell in row] for row in rows]
    for i, column in enumerate(columns):
        numeric = bool(body) and all(
            re.match(r"[-+]?[\d.]", row[i]) or row[i] in "-" for row in body
        )
        table.add_column(column, justify="right" if numeric else "left")
    for row in body:
        table.add_row(*row)
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    console = Console(width=10_000)
    with console.capture() as lines:
        console.print(table)
    print("\n".join(line.rstrip() for line in lines.get().splitlines()))


@contextmanager
def _progress(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner with the current step and the time it has taken, on stderr; lines when piped."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
    elif not console.is_terminal:
        last = -10.0

        def line(text: str) -> None:  # a log should grow by the step, not by the case
            nonlocal last
            if time.monotonic() - last >= 2:
                last = time.monotonic()
                _say(text, err=True)

        yield line
    else:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("")
            yield lambda text: progress.update(task, description=escape(_safe(text)))


@contextmanager
def _fetch_progress() -> Iterator[Callable[[Any], Any]]:
    """A bar for downloads and checks on stderr; licence notices are printed above it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    seen: set[tuple[str, str]] = set()

    def say(p: Any) -> bool:
        if p.step == "licence":
            console.print(_safe(p.text), markup=False, highlight=False)
        elif not console.is_terminal and (p.step, p.text) not in seen:
            console.print(_safe(f"{p.step}: {p.text}"), markup=False, highlight=False)
        seen.add((p.step, p.text))
        return console.is_terminal and p.step != "licence"

    if not console.is_terminal:
        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None, visible=False)  # most models are here already

        def report(p: Any) -> None:
            if say(p):
                text = escape(_safe(f"{p.step}: {p.text}"))
                progress.update(
                    task,
                    description=text,
                    completed=p.done,
                    total=p.total or None,
                    visible=True,
                )

        yield report


def _resolve(model: str) -> Path:
    """A model's local path; known names and repositories are fetched when they are absent."""
    from kvproof import models

    with _fetch_progress() as report:
        return models.resolve(model, report)


ENGINE = ("torch", "transformers", "tokenizers", "sentencepiece")


def _need_engine() -> None:
    """Refused with what to install, before anything is fetched or measured."""
    import importlib.util

    missing = [name for name in ENGINE if importlib.util.find_spec(name) is None]
    if missing:
        raise Refused(
            f"running a model needs {', '.join(missing)}, not installed here: "
            "pip install 'kvproof[transformers]'"
        )


_NUMBER = r"\d{1,15}(?:\.\d{1,15})?"


def _duration(text: str) -> float:
    """Seconds of "90", "90s", "5m" or "1h"."""
    match = re.fullmatch(rf"({_NUMBER})\s*(s|m|h)?", text.strip(), re.ASCII)
    if not match or float(match[1]) <= 0:
        raise RequestError(f"--budget {text!r}: not a duration; write for example 90s, 5m or 1h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]


def _size(text: str) -> int:
    """Bytes of "8GiB", "500MB", "123456"."""
    match = re.fullmatch(rf"({_NUMBER})\s*([kMGT]i?)?B?", text.strip(), re.IGNORECASE | re.ASCII)
    if not match or float(match[1]) <= 0:
        raise RequestError(f"--memory {text!r}: not a size; write for example 8GiB or 500MB")
    unit = (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * base ** " kmgt".index(unit[:1] or " "))


def _mib(n: int | float | None) -> str:
    return "-" if n is None else f"{n / 2**20:,.2f}"


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A known model or a Hugging Face ORG/NAME.")],
    json_: Json = False,
) -> None:
    """Download a model, verify it and show its licence."""
    from kvproof import models

    with _fetch_progress() as report:
        result = models.fetch(name, report)
    if json_:
        _print_json({"path": str(result.path), "sha256": result.sha256, "license": result.license})
    else:
        _say(f"{result.path}\nsha256 {result.sha256}\nlicence: {result.license}")
        if result.notice:
            _say(f"licence text: {result.notice}")


@app.command()
def inspect(
    model: Model,
    context: Annotated[int, typer.Option(min=1, help="Tokens to count bytes for.")] = 8192,
    memory: Annotated[
        str | None, typer.Option(help="Cache memory, e.g. 8GiB: print the longest context.")
    ] = None,
    json_: Json = False,
) -> None:
    """Layers by shape, and the bytes of a cache in every format."""
    from kvproof.geometry import index_ranges, inspect_model

    room = _size(memory) if memory is not None else None
    document = inspect_model(_resolve(model), context, room)
    if json_:
        _print_json(document)
        return
    groups = document["groups"]
    made_for = document["context_length"]
    _say(
        f"{document['architecture']}, {len(document['layers'])} layers, trained for "
        f"{f'{made_for:,}' if made_for else '?'} tokens; cache at {document['context']:,} tokens"
    )
    shape = ("layers", "heads", "KV heads", "head_dim K/V", "window", "cache", "tokens held")
    _table(
        "",
        shape,
        [
            (
                index_ranges(g["layers"]),
                g["num_heads"],
                g["num_kv_heads"],
                f"{g['head_dim_k']}/{g['head_dim_v']}",
                g["window"] or "-",
                "own" if g["owns_cache"] else "shared",
                f"{g['cells']['tokens']:,} + {g['cells']['total'] - g['cells']['tokens']:,} slack",
            )
            for g in groups
        ],
    )
    owning = [g for g in groups if g["owns_cache"]]
    columns = [
        "format",
        *(f"each of {index_ranges(g['layers'])}" for g in owning),
        "total",
        "of f16",
    ]
    columns += [
        "saved by windows",
        "by sharing",
        "in kvproof",
        *(["longest"] if memory is not None else []),
    ]
    rows = []
    for name, total in document["bytes"].items():
        if total is None:
            continue
        per_layer, saved = document["bytes_per_layer"][name], document["savings"][name]
        row = [name, *(_mib(per_layer[g["layers"][0]]) for g in owning), _mib(total)]
        row += [f"{total / document['bytes']['f16']:.1%}", _mib(saved["windows"])]
        row += [_mib(saved["sharing"]), _mib(document["bytes_exact"][name])]
        if memory is not None:
            mark = "+" if document["max_context_capped"][name] else ""
            row.append(f"{document['max_context'][name]:,}{mark}")
        rows.append(row)
    _say("")
    title = f"MiB as llama.cpp allocates it (micro-batch {document['ubatch']})"
    _table(f'{title}; "in kvproof": its own cache, without slack', columns, rows)
    if memory is not None:
        _say(f"longest: tokens that fit in {memory}; + means all that the model was made for")
    for name, reason in document["refused"].items():
        _say(f"refused: {name}: {reason}")
    for field, value in document["source"]["defaults"].items():
        _say(f"not in the file, default used: {field} = {value}")
    for note in document["source"]["notes"]:
        _say(note)


@app.command()
def formats(
    head_dim: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="Width of the rows of N(0,1).")
    ] = 128,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Measure on rows of this model too (repeatable); default: the known models that "
            "were fetched.",
            show_default=False,
        ),
    ] = None,
    no_model: Annotated[bool, typer.Option("--no-model", help="Rows of N(0,1) only.")] = False,
    json_: Json = False,
) -> None:
    """Every format: bits, error on N(0,1) and on rows of real models, the floor, the frontier."""
    from kvproof import distortion

    if model and no_model:
        raise RequestError("--model and --no-model: name models or none")
    backend = _cpu_or_none()
    names = list(dict.fromkeys(model)) if model else None
    paths = {name: _resolve(name) for name in names or ()}
    with _progress() as tell:
        captured = {} if no_model else _captured(paths, names is None, backend, tell)
        entries = distortion.gaussian_table(head_dim, backend, tell)
    if json_:
        for e in entries:
            e["captured"] = {
                name: document["formats"][e["name"]]
                for name, document in captured.items()
                if document["missing"] is None
            }
        about = {
            name: {key: value for key, value in document.items() if key != "formats"}
            for name, document in captured.items()
        }
        _print_json({"head_dim": head_dim, "models": about, "formats": entries})
        return
    _show_gaussian(head_dim, entries)
    for name, document in captured.items():
        _say("")
        if document["missing"] is not None:
            _say(f"{name}: no captured rows: {document['missing']}")
        else:
            _show_captured(name, document)


def _captured(
    paths: Mapping[str, Path], known: bool, backend: Any, tell: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Model -> its captured rows' digests, layers and figures, or what is missing.

    With `known`: the known models; one that was not fetched or cannot be run is a note, since it
    was not asked for by name.
    """
    from kvproof import captured, models

    found: dict[str, dict[str, Any]] = {}
    wanted: dict[str, Path | None] = {n: models.on_disk(n) for n in models.KNOWN} if known else {}
    for name, path in {**wanted, **paths}.items():
        if path is None:
            found[name] = {"missing": f"not fetched; run `kvproof fetch {name}`"}
            continue
        try:
            if captured.read(path) is None:
                _need_engine()
            rows = captured.rows(path, progress=tell)
        except Refused as error:
            if not known:
                raise
            found[name] = {"missing": str(error)}
            continue
        found[name] = {
            "missing": None,
            "sha256": rows.model,
            "text_sha256": rows.text,
            "tokens": rows.tokens,
            "conditioner": rows.kind,
            "layers": [
                {
                    "index": x.rows.index,
                    "window": x.window,
                    "head_dim_k": x.rows.k.shape[-1],
                    "head_dim_v": x.rows.v.shape[-1],
                }
                for x in rows.layers
            ],
            "formats": captured.table(rows, backend, tell),
        }
    return found


def _show_gaussian(head_dim: int, entries: Sequence[Mapping[str, Any]]) -> None:
    measured = [e for e in entries if e["refused"] is None]
    _table(
        f"Formats at head_dim {head_dim}, rows of N(0,1)",
        ("format", "bits", "relative MSE", "dB", "floor", "scores", "frontier", "domain", "holds"),
        [
            (
                e["name"],
                f"{e['bits']:.3f}",
                f"{e['relative_mse']:.3g}",
                _decibels(e["db"]),
                f"{e['floor']:.3g}" if e["floor"] else "-",
                f"{e['score_correlation']:.5f}",
                "*" if e["frontier"] else "",
                e["rotation"],
                ", ".join(e["sides"]),
            )
            for e in measured
        ],
    )
    _say(
        "dB: above the bound 4^-bits. floor: the best scalar code of as many code bits, its norm\n"
        "stored exactly. scores: correlation of q.k with the original. *: no other format is both\n"
        "no larger and no worse."
    )
    for e in entries:
        if e["refused"]:
            _say(f"refused: {e['refused']}")
    _say_dominated({e["name"]: e["dominated_by"] for e in measured}, "")
    slow = [e["name"] for e in measured if e["encoder"] == "reference"]
    if slow:
        _say(f"encoded by the NumPy reference, on fewer rows: {', '.join(slow)}")


def _say_dominated(dominated_by: Mapping[str, Sequence[str]], where: str) -> None:
    """A line for each of kvproof's own formats that a peer's beats."""
    from kvproof.distortion import is_own
    from kvproof.formats import get

    own = {name for name in dominated_by if is_own(get(name))}
    for name, others in dominated_by.items():
        peers = [other for other in others if other not in own]
        if name in own and peers:
            _say(f"dominated{where}: {name} is no smaller and no better than {', '.join(peers)}")


def _show_captured(name: str, document: Mapping[str, Any]) -> None:
    from kvproof.geometry import index_ranges

    entries = {n: e for n, e in document["formats"].items() if "key" in e or "value" in e}
    layers = document["layers"]
    body = []
    for fmt, entry in entries.items():
        key, value = entry.get("key"), entry.get("value")
        bits = dict.fromkeys(f"{side['bits']:.3f}" for side in (key, value) if side)
        stands = [s for s, side in (("K", key), ("V", value)) if side and not side["dominated_by"]]
        body.append(
            (
                fmt,
                "/".join(bits),
                f"{key['relative_mse']:.3g}" if key else "-",
                _decibels(key["db"]) if key else "-",
                f"{key['score_error']:.3g}" if key else "-",
                f"{entry['conditioned_key']['score_error']:.3g}" if key else "-",
                f"{value['relative_mse']:.3g}" if value else "-",
                _decibels(value["db"]) if value else "-",
                " ".join(stands),
            )
        )
    _table(
        f"{name}: {document['tokens']} tokens, layers {index_ranges([x['index'] for x in layers])}",
        ("format", "bits", "K MSE", "dB", "K nats", "conditioned", "V MSE", "dB", "frontier"),
        body,
    )
    _say(
        "K nats: RMS error of the scores, less each query's mean, which softmax does not see.\n"
        "conditioned: the same for keys without their means and scales, the first tokens exact.\n"
        "Keys are ranked by nats, values by their relative MSE."
    )
    for side in ("key", "value"):
        beaten = {n: e[side]["dominated_by"] for n, e in entries.items() if side in e}
        _say_dominated(beaten, f" for {side}s")
    for why in dict.fromkeys(
        e["refused"] for e in document["formats"].values() if e.get("refused")
    ):
        _say(f"refused: {why}")


def _decibels(db: float | None) -> str:
    return "-" if db is None else f"{db:.2f}"


def _cpu_or_none() -> Any:
    """The native backend, None where it cannot run: the reference stands in."""
    from kvproof import backends

    try:
        return backends.get("cpu")
    except Refused:
        return None


@app.command()
def doctor(json_: Json = False) -> None:
    """What this machine offers: backends, instruction sets, optional parts."""
    import importlib.metadata
    import importlib.util

    from kvproof import __version__, backends
    from kvproof.backends.cpu import isas, missing_for
    from kvproof.formats import all_formats

    rows: list[dict[str, Any]] = []
    for name in backends.known():
        try:
            be = backends.get(name)
        except Refused as reason:
            rows.append({"backend": name, "available": False, "reason": str(reason)})
            continue
        kernels = {
            f.name: be.kernel("attention", f, 128)
            for f in all_formats()
            if be.refuses("attention", f, 128) is None
        }
        rows.append(
            {"backend": name, "available": True, "digest": be.digest(), "kernels": kernels}
            | {"environment": be.environment()}
        )
    parts = {}
    for part in ("torch", "transformers", "sentencepiece", "tokenizers", "xllamacpp"):
        found = importlib.util.find_spec(part) is not None
        parts[part] = importlib.metadata.version(part) if found else None
    document = {
        "version": __version__,
        "backends": rows,
        "cpu_isas": isas(),
        "cpu_isas_missing": {name: missing_for(name) for name, ok in isas().items() if not ok},
        "optional": parts,
    }
    if json_:
        _print_json(document)
        return
    _say(f"kvproof {__version__}")
    for row in rows:
        if not row["available"]:
            _say(f"{row['backend']}: no: {row['reason']}")
            continue
        env = row["environment"]
        _say(
            f"{row['backend']}: {env['device']}, instruction set {env['isa']}, "
            + (f"threads {env['threads']}, " if env["threads"] else "")
            + f"kernels {row['digest'][:12]}"
        )
    in_use = [r["environment"]["isa"] for r in rows if r["backend"] == "cpu" and r["available"]]
    _say("instruction sets, slowest first (KVPROOF_CPU_ISA=NAME takes another than the best):")
    for name, ok in isas().items():
        state = "in use" if name in in_use else "available" if ok else f"needs {missing_for(name)}"
        _say(f"instruction set {name}: {state}")
    for part, version in parts.items():
        _say(f"{part}: {version or 'not installed'}")


@app.command()
def verify(
    backend: Annotated[str, typer.Option("--backend", help="A backend, or all.")] = "all",
    check: Annotated[
        list[str] | None,
        typer.Option("--check", help="Only this check, e.g. row or fused; may be repeated."),
    ] = None,
    fixtures: Annotated[
        Path | None, typer.Option(help="Folder of public fixture files (JSON) to run too.")
    ] = None,
    format_: Annotated[
        list[str] | None, typer.Option("--format", help="Only this format; may be repeated.")
    ] = None,
    evidence: Annotated[
        Path | None, typer.Option(help="Evidence file (JSON Lines) to add the records to.")
    ] = None,
    json_: Json = False,
) -> None:
    """Hold every kernel to the reference; exit code 0 only if all passed."""
    from kvproof import captured, gate
    from kvproof.evidence import Outcome, Store, exit_code

    with _progress() as tell:
        records = gate.verify_evidence(
            backend, check, fixtures, format_, tell, captured=captured.known
        )
    results = [gate.row(e) for e in records]
    outcome = gate.outcome_of(results)
    if evidence is not None:
        try:
            Store(evidence).append(*records)
        except RequestError as error:  # what is not written down has not passed
            outcome = Outcome.FAILED
            _say(f"FAILED: the report was not written: {error}", err=True)
    document = gate.summary(results)
    if json_:
        _print_json({"outcome": str(outcome), **document, "results": results})
        raise typer.Exit(exit_code(outcome))
    columns = ("check", "backend", "outcome", "worst error", "bound", "of", "cases", "outputs")
    rows = []
    for line in document["table"]:
        figures = ("-" if line[n] is None else f"{line[n]:.1e}" for n in ("worst_error", "bound"))
        counts = (line["rows"], f"{line['outputs']:,}/{line['outputs_expected']:,}")
        name = (line["check"], line["backend"], line["outcome"])
        rows.append((*name, *figures, line["worst_format"] or "", *counts))
    _table("", columns, rows)
    for text in document["not_passed"]:
        _say(text)
    eight, whole = document["eight"], document["checks"]
    mutants = document["mutants"]
    _say(
        f"{outcome}: checks {eight['passed']}/{eight['of']} of the public eight, "
        f"{whole['passed']}/{whole['of']} in all; outputs {document['outputs']:,}/"
        f"{document['outputs_expected']:,}; broken kernels caught {mutants['caught']}/"
        f"{mutants['of']} of {mutants['kinds']} kinds"
    )
    raise typer.Exit(exit_code(outcome))


def _policy(path: Path | None, **changes: Any) -> Any:
    from dataclasses import replace

    from kvproof.decision import Policy

    return replace(Policy.load(path), **{k: v for k, v in changes.items() if v is not None})


MAX_TEXT_BYTES = 8 << 20


def _text(path: Path | None) -> dict[str, Any]:
    """Keyword arguments of the lane for --text FILE."""
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
        if len(raw) > MAX_TEXT_BYTES:
            raise RequestError(
                f"--text {path}: longer than {MAX_TEXT_BYTES >> 20} MiB, far more than is ever "
                "scored; give a part of it"
            )
        text = raw.decode()
        if not text.strip():
            raise RequestError(f"--text {path}: is empty; give a text of some thousand words")
        return {"text": text, "text_name": path.name}
    except OSError as error:
        raise RequestError(f"--text {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"--text {path}: not UTF-8 text ({error.reason})") from error


def _store(out: Path) -> Any:
    """The evidence store in a folder, which is made if it is not there."""
    from kvproof.evidence import Store

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--out {out}: cannot be created ({error.strerror})") from error
    return Store(out / "evidence.jsonl")


def _out(out: Path | None, model: str) -> Path:
    """--out, or a folder named after the model in the working directory."""
    return out or Path("kvproof-" + re.sub(r"[^\w.-]+", "-", Path(model).name))


def _exit_for(evidence: Sequence[Evidence]) -> NoReturn:
    """1 if something that ran failed, else 0: refused and unfinished candidates are an answer."""
    raise typer.Exit(1 if any(e.outcome == "FAILED" for e in evidence) else 0)


OutDir = Annotated[
    Path | None,
    typer.Option(help="Folder for evidence and report; default ./kvproof-MODEL."),
]
Text = Annotated[Path | None, typer.Option("--text", help="Evaluation text (UTF-8 file).")]
PolicyFile = Annotated[Path | None, typer.Option("--policy", help="Policy file (TOML).")]


@app.command()
def decide(
    model: Model,
    backend: BackendName = "cpu",
    budget: Annotated[
        str | None, typer.Option(help="Time to spend measuring, e.g. 90s, 5m, 1h.")
    ] = None,
    policy: PolicyFile = None,
    text: Text = None,
    out: OutDir = None,
    json_: Json = False,
) -> None:
    """Gate, quality, speed, decision, report. Resumes from the evidence in --out."""
    from kvproof import report as reports
    from kvproof.lanes.kv import decide_model

    rules = _policy(policy)
    seconds = _duration(budget) if budget is not None else None
    words = _text(text)
    _need_engine()
    path = _resolve(model)
    folder = _out(out, model)
    store = _store(folder)
    with _progress() as tell:
        result = decide_model(
            path,
            rules,
            store,
            backend=backend,
            name=model,
            budget_seconds=seconds,
            progress=tell,
            **words,
        )
    paths = reports.write(folder, result)
    if json_:
        document = {"decisions": [result.decision.as_dict()]}
        _print_json(document | {"report": {k: str(v) for k, v in paths.items()}})
    else:
        _print_decision(result)
        _say(f"report: {paths['report.html']}")
        if seconds is not None and _cut_short(result, rules):
            _say("the budget left some unmeasured: the same command again goes on from here")
    _exit_for(result.evidence)


def _cut_short(result: Any, rules: Any) -> bool:
    """Whether time was missing for a candidate that is still open."""
    still = {
        v.candidate.name
        for v in result.decision.verdicts
        if v.status in ("inconclusive", "not run")
    }
    return any(
        f"{e.subject.get('key')}/{e.subject.get('value')}" in still
        and (
            (e.outcome == "NOT_RUN" and str(e.reason).startswith("budget"))
            or (
                e.subject["kind"] == "quality"
                and e.metrics.get("tokens", rules.tokens_min) < rules.tokens_min
            )
        )
        for e in result.evidence
    )


def _print_decision(result: Any) -> None:
    d = result.decision
    _say(f"{result.about.model_name} on {d.backend} ({d.device})")
    rows = [(v.candidate.name, v.status, v.reason) for v in d.verdicts]
    _table("", ("keys/values", "verdict", "why"), rows)
    _say(f"\n{d.reason}")
    for engine, flag in d.flags.items():
        _say(f"{engine}: {flag}")


@app.command()
def calibrate(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write (.npz).")],
    text: Annotated[
        Path | None,
        typer.Option("--text", help="Calibration text (UTF-8 file); default: Python's docstrings."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=64, max=1 << 20, help="Tokens of the text to read.")
    ] = 2048,
    kind: Annotated[
        str, typer.Option("--kind", help="Kind of mean: rope, previous or static.")
    ] = "rope",
    page: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Tokens that share a mean (docs/quality.md).")
    ] = 64,
    json_: Json = False,
) -> None:
    """Learn means and scales of a model's keys from a text: better keys at no cost in bytes."""
    from kvproof.conditioner import KINDS, Conditioner
    from kvproof.lanes.conditioning import TEXT_NAME, calibrate_model

    if kind not in KINDS:
        raise RequestError(f"--kind {kind!r}: none of {', '.join(KINDS)}")
    words = _text(text)
    Conditioner.check_target(out)
    _need_engine()
    path = _resolve(model)
    with _progress() as tell:
        made = calibrate_model(
            path,
            text=words.get("text"),
            tokens=tokens,
            kind=kind,
            page=page,
            progress=tell,
        )
        made.save(out)
    document = {"path": str(out), "text": words.get("text_name", TEXT_NAME)}
    document |= _about_conditioner(made)
    if json_:
        _print_json(document)
        return
    _say(
        f"{out}: {made.kind} means, pages of {made.page} tokens, {len(made.layers)} layers, from "
        f"{made.tokens:,} tokens of {document['text']}\ndigest {made.digest[:12]}; use it with "
        f"--conditioner {out} (kvproof quality, kvproof run) or "
        f'kvproof.transformers_cache(model, ..., conditioner="{out}")'
    )


def _about_conditioner(made: Any) -> dict[str, Any]:
    """What JSON documents say about a conditioner."""
    return {
        "kind": made.kind,
        "page": made.page,
        "tokens": made.tokens,
        "layers": len(made.layers),
        "model_sha256": made.origin.model_sha256,
        "text_sha256": made.origin.text_sha256,
        "made_by": made.origin.made_by,
        "digest": made.digest,
    }


def _treatment(file: Path | None, sinks: int | None, path: Path) -> tuple[Any, int] | None:
    """(conditioner, sinks) of --conditioner and --sinks for the model at `path`, None without
    either."""
    from kvproof.conditioner import SINKS, Conditioner
    from kvproof.geometry import geometry
    from kvproof.lanes.kv import model_digest

    if file is None:
        return (None, sinks) if sinks else None
    made = Conditioner.load(file, geometry(path), model_digest(path))
    return made, SINKS if sinks is None else sinks


def _measure(
    kind: str,
    model: str,
    rules: Any,
    out: Path | None,
    text: Path | None,
    json_: bool,
    conditioner: Path | None = None,
    sinks: int | None = None,
) -> None:
    """`bench` and `quality`: one measurement of decide, without its decision."""
    from kvproof.decision import BASELINE
    from kvproof.lanes.kv import decide_model

    words = _text(text)
    _need_engine()
    path = _resolve(model)
    treatment = _treatment(conditioner, sinks, path)
    store = _store(_out(out, model))
    with _progress() as tell:
        result = decide_model(
            path,
            rules,
            store,
            name=model,
            progress=tell,
            measures=(kind,),
            treatment=treatment,
            **words,
        )
    # The folder may hold more of earlier runs than was asked for now.
    pairs = {c.name for c in (*rules.pairs(), BASELINE)}
    records = [
        e
        for e in result.evidence
        if e.subject["kind"] in (kind, "gate", "candidate", "treatment")
        and f"{e.subject.get('key')}/{e.subject.get('value')}" in pairs
        and (kind != "speed" or e.subject.get("depth") in (None, *rules.depths))
    ]
    document: dict[str, Any] = {"results": [e.document() | {"id": e.id} for e in records]}
    notes = []
    if treatment is not None and treatment[0] is not None:
        from kvproof.lanes.conditioning import same_text

        document["conditioner"] = _about_conditioner(treatment[0])
        if same_text(treatment[0], words.get("text")):
            notes.append(
                "the conditioner was calibrated on the very text that is measured here: its "
                "figures are better than on any other; give another text (--text FILE)"
            )
    if treatment is not None:
        document |= {"sinks": treatment[1], "notes": notes}
    if json_:
        _print_json(document)
    else:
        _print_measured(kind, [e for e in records if e.subject["kind"] == kind])
        for e in records:
            if e.subject["kind"] == "treatment" and e.outcome == "PASSED":
                m = e.metrics
                _say(
                    f"{e.subject['key']}/{e.subject['value']}: with {_treated(e.subject)} the KLD "
                    f"is {m['ratio']:.3f} [{m['ratio_low']:.3f}, {m['ratio_high']:.3f}] of what it "
                    "is without"
                )
        for note in notes:
            _say(note)
        for e in records:
            if e.outcome != "PASSED":
                pair = f"{e.subject.get('key')}/{e.subject.get('value')}"
                _say(f"{e.outcome}: {e.subject['kind']} {pair}: {e.reason}")
    _exit_for(records)


def _treated(subject: Mapping[str, Any]) -> str:
    """The treatment of a record in words, "" for none."""
    parts = []
    if subject.get("conditioner"):
        parts.append(f"{subject['means']} means ({subject['page']})")
    if subject.get("sinks"):
        parts.append(f"{subject['sinks']} sinks")
    return ", ".join(parts)


def _print_measured(kind: str, records: Sequence[Evidence]) -> None:

    def interval(m: Mapping[str, float], name: str, spec: str) -> str:
        low, high = m[f"{name}_low"], m[f"{name}_high"]
        return f"{m[name]:{spec}} [{low:{spec}}, {high:{spec}}]"

    rows: list[tuple[str, ...]] = []
    for e in records:
        s, m = e.subject, e.metrics
        pair = f"{s['key']}/{s['value']}"
        if _treated(s):
            pair += f" with {_treated(s)}"
        if e.outcome != "PASSED":
            continue
        if kind == "quality":
            rows.append(
                (
                    pair,
                    interval(m, "kld", ".5f"),
                    interval(m, "same_top", ".2%"),
                    interval(m, "delta_nll", "+.5f"),
                    f"{m['tokens']:.0f}",
                )
            )
        else:
            rows.append(
                (
                    pair,
                    f"{s['phase']}{s['tokens']} @ {s['depth']}",
                    f"{m['tokens_per_second']:.1f}",
                    f"{m['tokens_per_second_f16']:.1f}",
                    interval(m, "ratio", ".3f"),
                    # Timed on its own, after the rounds: on a busy machine it can come out longer.
                    f"{m['attention_share']:.0%}" if m["attention_share"] <= 1 else "-",
                    str(s.get("kernels", "")),
                )
            )
    quality = (
        "keys/values", "KLD, nats [95 %]", "same top token", "change of loss", "tokens"
    )  # fmt: skip
    speed = ("keys/values", "what", "tok/s", "f16", "ratio [95 %]", "attention", "kernels")
    _table("", quality if kind == "quality" else speed, rows)
    if any(e.metrics.get("contended") for e in records):
        _say("other programs used the processor meanwhile: the ratios stay fair, tok/s are low")


@app.command()
def quality(
    model: Model,
    key: Annotated[str | None, typer.Option("--cache-type-k", help="Key format.")] = None,
    value: Annotated[str | None, typer.Option("--cache-type-v", help="Value format.")] = None,
    conditioner: ConditionerFile = None,
    sinks: Sinks = None,
    text: Text = None,
    policy: PolicyFile = None,
    out: OutDir = None,
    json_: Json = False,
) -> None:
    """KLD, same top token and change of loss against the f16 cache, with intervals.

    With --conditioner or --sinks every pair is measured with and without them, on the same tokens.
    """
    rules = _policy(policy, candidates=_pair(key, value))
    _measure("quality", model, rules, out, text, json_, conditioner, sinks)


@app.command()
def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A model; without one, attention kernels on their own."),
    ] = None,
    key: Annotated[str | None, typer.Option("--cache-type-k", help="Key format.")] = None,
    value: Annotated[str | None, typer.Option("--cache-type-v", help="Value format.")] = None,
    depths: Annotated[
        str | None, typer.Option(help="Tokens already in the cache, e.g. 512,4096.")
    ] = None,
    policy: PolicyFile = None,
    out: OutDir = None,
    json_: Json = False,
) -> None:
    """Prompt and decode speed at depths, in rounds that alternate with the f16 cache.

    Every candidate of the policy takes a while on a model; --cache-type-k and -v name one.
    """
    at = None
    if depths is not None:
        parts = depths.split(",")
        if not all(re.fullmatch(r"\s*\d{1,10}\s*", p, re.ASCII) for p in parts):
            raise RequestError(f"--depths {depths!r}: write whole numbers, e.g. 512,4096")
        at = tuple(int(p) for p in parts)
    rules = _policy(policy, candidates=_pair(key, value), depths=at)
    if model is None:
        _bench_kernels(rules, out, json_)
    else:
        _measure("speed", model, rules, out, None, json_)


def _bench_kernels(rules: Any, out: Path | None, json_: bool) -> None:
    from kvproof import backends
    from kvproof.lanes.kv import measure_attention

    store = _store(out) if out else None
    with _progress() as tell:
        backend = backends.get("cpu")
        found = measure_attention(backend, rules.pairs(), rules.depths, progress=tell)
        records = []
        for e in found:
            records.append(e)
            if store:
                store.append(e)
    if json_:
        _print_json({"results": [e.document() | {"id": e.id} for e in records]})
    else:
        rows = []
        for e in records:
            s, m = e.subject, e.metrics
            if s["kind"] == "speed":
                shape = f"{s['num_heads']}/{s['num_kv_heads']} x {s['head_dim']}"
                ratio = f"{m['ratio']:.2f} [{m['ratio_low']:.2f}, {m['ratio_high']:.2f}]"
                ms = (f"{m['milliseconds']:.3f}", f"{m['milliseconds_f16']:.3f}")
                rate = f"{m['gigabytes_per_second']:.1f}"
                rows.append(
                    (f"{s['key']}/{s['value']}", shape, f"{s['depth']:,}", *ms, ratio, rate)
                )
        columns = ("keys/values", "heads x dim", "tokens", "ms", "ms f16", "x f16 [95 %]", "GB/s")
        _table("Attention of one query, kernels alone", columns, rows)
        for e in records:
            if e.outcome != "PASSED":
                _say(f"{e.outcome}: {e.subject['key']}/{e.subject['value']}: {e.reason}")
    _exit_for(records)


def _pair(key: str | None, value: str | None) -> tuple[str] | None:
    """The one candidate of --cache-type-k/-v, or None for those of the policy."""
    from kvproof.formats import get

    if key is None and value is None:
        return None
    return (f"{get(key or 'f16').name}/{get(value or 'f16').name}",)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="Folder that `kvproof decide` wrote.")],
    json_: Json = False,
) -> None:
    """Draw report.html and report.md again from decision.json and evidence.jsonl."""
    from kvproof import report as reports

    paths = reports.report(directory)
    if json_:
        _print_json({name: str(path) for name, path in paths.items()})
    else:
        for path in paths.values():
            _say(str(path))


LINES_NAMED = 8  # bad lines of `merge` that are printed


@app.command()
def merge(
    evidence: Annotated[list[Path], typer.Argument(help="Evidence files (JSON Lines).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")],
    json_: Json = False,
) -> None:
    """Put evidence of several runs or machines into one file; bad lines are named and left out."""
    from kvproof.evidence import Store

    if out.exists():
        raise RequestError(f"--out {out}: exists already; name a new file")
    kept: dict[str, Evidence] = {}
    bad = []
    for path in evidence:
        if not path.is_file():
            raise RequestError(f"{path}: no such file; name evidence files (evidence.jsonl)")
        for e in Store(path).read():
            if e.subject["kind"] == "unreadable":
                bad.append(f"{path}: {e.reason}")
            else:
                kept.setdefault(e.id, e)
    if not kept:
        first = bad[0] if bad else "they are empty"
        raise RequestError(f"no readable evidence in {', '.join(map(str, evidence))}: {first}")
    Store(out).append(*kept.values())
    devices = sorted({e.environment.device for e in kept.values()})
    if json_:
        _print_json({"records": len(kept), "devices": devices, "left_out": bad, "path": str(out)})
    else:
        _say(f"{out}: {len(kept)} records of {', '.join(devices) or 'no device'}")
        for line in bad[:LINES_NAMED]:
            _say(f"left out: {line}", err=True)
        if bad[LINES_NAMED:]:
            _say(f"left out: {len(bad) - LINES_NAMED} more (--json lists all)", err=True)
    raise typer.Exit(1 if bad else 0)


@app.command()
def run(
    model: Model,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Text to continue.")],
    tokens: Annotated[int, typer.Option("-n", "--predict", min=1, help="Tokens to write.")] = 64,
    key: KeyType = None,
    value: ValueType = None,
    decision: Annotated[
        Path | None,
        typer.Option(help="decision.json, or its folder: use what was chosen there."),
    ] = None,
    conditioner: ConditionerFile = None,
    sinks: Sinks = None,
    backend: BackendName = "cpu",
    strict: Annotated[
        bool, typer.Option("--strict", help="Anything other than as requested is an error.")
    ] = False,
    json_: Json = False,
) -> None:
    """Continue a text, greedily, with the cache held in the named formats."""
    from kvproof import backends, report
    from kvproof.decision import Candidate
    from kvproof.formats import get
    from kvproof.lanes.kv import Treated

    decided: dict[str, Any] | None = None
    if decision is None:
        key, value = get(key or "f16").name, get(value or "f16").name
    elif key is not None or value is not None:
        raise RequestError("--decision names both formats: leave out --cache-type-k and -v")
    else:
        file = decision / report.DECISION if decision.is_dir() else decision
        decided = report.read(file)
        chosen = decided["decisions"][0]["chosen"]
        key, value = get(chosen["key"]).name, get(chosen["value"]).name
    backends.get(backend)
    _need_engine()
    path = _resolve(model)
    made, kept = _treatment(conditioner, sinks, path) or (None, 0)
    notes = _differences(decided, path, backend) if decided else []
    if notes:
        text = f"{'; '.join(notes)}; run `kvproof decide` on this model here"
        if strict:
            raise RequestError(f"--strict: {text}")
        _say(f"kvproof: {text}", err=True)
    from kvproof.engines.transformers import load

    with _progress() as tell:
        tell("loading the model")
        engine = load(path)
        cache = engine.new_cache(
            key=key, value=value, backend=backend, conditioner=made, sinks=kept
        )
        ids = engine.tokenizer.encode(prompt)
    if not ids:
        raise RequestError("--prompt is empty and the model has no start token; write some text")
    produced: list[int] = []
    shown = ""
    first = last = time.perf_counter()
    if not json_:
        _say(prompt, nl=False)
    for token in engine.generate(ids, cache, tokens):
        produced.append(token)
        last = time.perf_counter()
        if len(produced) == 1:
            first = last
        if not json_:
            text = engine.tokenizer.decode(produced)
            if not text.endswith("\ufffd"):  # half a character: the next token completes it
                _say(text[len(shown) :], nl=False)
                sys.stdout.flush()
                shown = text
    speed = (len(produced) - 1) / (last - first) if len(produced) > 1 else None
    owners = cache.kv.owners
    effective = {
        "key": ", ".join(sorted({layer.key.name for layer in owners})),
        "value": ", ".join(sorted({layer.value.name for layer in owners})),
    }
    document = {
        "text": engine.tokenizer.decode(produced),
        "tokens": len(produced),
        "token_ids": produced,
        "prompt_tokens": len(ids),
        "cache": {
            "requested": {"key": key, "value": value},
            "effective": effective,
            "bytes": cache.kv.nbytes,
            "kernels": [dict(k) for k in cache.kv.witness()],
            "conditioner": None if made is None else _about_conditioner(made),
            "sinks": kept,
        },
        "tokens_per_second": speed,
    }
    if json_:
        _print_json(document)
        return
    rate = f", {speed:.1f} tokens/s after the first" if speed else ""
    treated = _treated(Treated.of(Candidate(key, value), made, kept).subject())
    _say(
        f"\n[{len(produced)} tokens{rate}; cache keys {effective['key']}, values "
        f"{effective['value']}, {f'{treated}, ' if treated else ''}"
        f"{_mib(cache.kv.nbytes)} MiB]",
        err=True,
    )


def _differences(decided: Mapping[str, Any], path: Path, backend: str) -> list[str]:
    """What differs between where a decision was made and this run of it."""
    from kvproof.backends import get
    from kvproof.evidence import Environment
    from kvproof.lanes.kv import model_digest

    entry = decided["decisions"][0]
    be = get(backend)
    made_on = (entry["backend"], entry["device"])
    here = (backend, Environment.current(be.environment()).device)
    notes = []
    if decided["model"]["sha256"] != model_digest(path):
        notes.append(f"the decision is about another model, {decided['model']['name']}")
    if made_on != here:
        notes.append(f"the decision was made on {' '.join(made_on)}, this is {' '.join(here)}")
    elif decided["digest"] != be.digest():
        notes.append("the decision was made with other kernels than those installed now")
    return notes


if __name__ == "__main__":
    main()
