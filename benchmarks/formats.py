"""Write the measured tables of README.md and docs/formats.md anew.

    python benchmarks/formats.py            # both demo models must have been fetched
    python benchmarks/formats.py --check    # write nothing; exit code 1 if a table is out of date

The figures are those of `kvproof formats`. What stands between the marks in the two files is
replaced, nothing else.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvproof import backends, captured, distortion, formats, models

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = (64, 128, 256)
MARKS = "<!-- measured: begin (benchmarks/formats.py) -->\n", "<!-- measured: end -->"


def number(x: float) -> str:
    """Three digits: 0.00789, 4.34e-08."""
    return f"{x:.3g}" if x < 1e-3 else f"{x:#.3g}".rstrip(".")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def gaussian_rows(tables: dict[int, dict[str, Any]]) -> str:
    """Bits, error and decibels by width, the floor and the correlation of scores at 128."""
    rows = []
    for f in formats.all_formats():
        at = {n: table[f.name] for n, table in tables.items()}
        cells = [f"`{f.name}`" + (" *" if at[128].get("frontier") else "")]
        for e in at.values():
            if e["refused"]:
                cells.append("refused")
            else:
                cells.append(f"{e['bits']:.3f}: {number(e['relative_mse'])} ({e['db']:.2f})")
        middle = at[128]
        floor = middle.get("floor")
        cells += [number(floor) if floor else "-", f"{middle['score_correlation']:.5f}"]
        rows.append(cells)
    columns = ["format", *(f"{n}" for n in tables), "scalar floor, 128", "scores, 128"]
    return markdown(columns, rows)


def captured_rows(found: captured.ModelRows, table: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, e in table.items():
        key, value = e.get("key"), e.get("value")
        if key is None and value is None:
            continue
        stands = [s for s, x in (("K", key), ("V", value)) if x and not x["dominated_by"]]
        side = key or value
        rows.append([
            f"`{name}`" + (f" *{' '.join(stands)}*" if stands else ""),
            f"{side['bits']:.3f}",
            f"{number(key['relative_mse'])} ({key['db']:.2f})" if key else "-",
            number(key["score_error"]) if key else "-",
            number(e["conditioned_key"]["score_error"]) if key else "-",
            f"{number(value['relative_mse'])} ({value['db']:.2f})" if value else "-",
        ])  # fmt: skip
    return markdown(
        ("format", "bits", "K: error (dB)", "K: nats", "K conditioned: nats", "V: error (dB)"), rows
    )


def measured() -> tuple[str, str]:
    """The section of docs/formats.md and that of README.md."""
    backend = backends.get("cpu")
    tables = {n: {e["name"]: e for e in distortion.gaussian_table(n, backend)} for n in WIDTHS}
    docs = (
        "Rows of N(0,1), by head_dim: bits: relative error (dB above 4^-bits). *: at 128 no other "
        "format is both no\nlarger and no worse.\n\n" + gaussian_rows(tables)
    )
    errors = {}
    for name in models.KNOWN:
        path = models.on_disk(name)
        if path is None:
            sys.exit(f"{name} was not fetched: kvproof fetch {name}")
        found = captured.rows(path)
        table = captured.table(found, backend)
        errors[name] = table
        shown = ", ".join(str(x.rows.index) for x in found.layers)
        docs += (
            f"\n{name}, head_dim {found.layers[0].rows.k.shape[-1]}, {found.tokens} tokens, layers "
            f"{shown}:\n\n{captured_rows(found, table)}"
        )
    rows = []
    for name, e in tables[128].items():
        nats = [
            number(t[name]["key"]["score_error"]) if "key" in t[name] else "refused"
            for t in errors.values()
        ]
        rows.append([
            f"`{name}`" + (" *" if e["frontier"] else ""),
            f"{e['bits']:.3f}", number(e["relative_mse"]), *nats, e["source"],
        ])  # fmt: skip
    columns = ["", "bits, d 128", "error on N(0,1)", *(f"K, {n}" for n in errors), "source"]
    return docs, markdown(columns, rows)


def replace(file: Path, section: str) -> Callable[[], None] | None:
    """How to put `section` between the marks of `file`; None if it stands there already."""
    text = file.read_text(encoding="utf-8")
    begin, end = map(re.escape, MARKS)
    new, count = re.subn(
        f"({begin}).*?({end})", lambda m: m[1] + section + m[2], text, flags=re.DOTALL
    )
    if count != 1:
        sys.exit(f"{file}: expected the marks {MARKS[0].strip()} and {MARKS[1]} once")
    return None if new == text else lambda: print(file, file.write_text(new, encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    docs, readme = measured()
    changes = [
        change
        for file, section in ((ROOT / "docs/formats.md", docs), (ROOT / "README.md", readme))
        if (change := replace(file, section))
    ]
    if args.check:
        sys.exit(1 if changes else 0)
    for change in changes:
        change()


if __name__ == "__main__":
    main()
