"""Imports go one way: a module knows only those above it in docs/architecture.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "kvproof"

# The order of docs/architecture.md, with the modules of the gate spelled out. A folder counts
# as one module.
ORDER = (
    "errors",
    "files",
    "machine",
    "rotation",
    "formats",
    "gguf",
    "geometry",
    "models",
    "backends",
    "conditioner",
    "distortion",
    "segments",
    "store",
    "cache",
    "evidence",
    "cases",
    "rules",
    "fixtures",
    "stats",
    "weights",
    "engines",
    "routes",
    "mutants",
    "gate",
    "decision",
    "lanes",
    "captured",
    "report",
    "cli",
    "__main__",
)
# Compiled modules know no Python; the package itself is a list of lazy names.
FREE = {"_kernels", "_weights", "__init__"}
HEAVY = {
    "torch",
    "transformers",
    "scipy",
    "matplotlib",
    "jinja2",
    "gguf",
    "xllamacpp",
    "tokenizers",
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part not in FREE:
            yield path, part


def imports(tree):
    """(line, module of kvproof) of every import, also those inside functions."""
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "kvproof" and len(parts) > 1:
                yield node.lineno, parts[1]


def test_every_module_has_a_place():
    assert {part for _, part in modules()} <= set(ORDER)


@pytest.mark.parametrize(
    ("path", "part"), [pytest.param(*m, id=str(m[0].relative_to(PACKAGE))) for m in modules()]
)
def test_imports_point_up_the_list(path, part):
    allowed = set(ORDER[: ORDER.index(part) + 1]) | FREE
    wrong = [
        f"{path.name}:{line} imports kvproof.{name}"
        for line, name in imports(ast.parse(path.read_text(encoding="utf-8")))
        if name in ORDER and name not in allowed
    ]
    assert not wrong, "; ".join(wrong)


def test_the_check_itself_sees_an_upward_import():
    source = "def f():\n    from kvproof.cli import main\n"
    assert list(imports(ast.parse(source))) == [(2, "cli")]
    source = "if TYPE_CHECKING:\n    from kvproof.cli import main\nfrom kvproof import gate\n"
    assert list(imports(ast.parse(source))) == [(3, "gate")]


# weights.py fills torch tensors; only the engine imports it, inside its functions.
LIGHT = [m for m in ORDER if m not in ("weights", "__main__") and any(p == m for _, p in modules())]


@pytest.mark.parametrize("name", LIGHT)
def test_import_is_light(name):
    code = (
        f"import sys, importlib; importlib.import_module('kvproof.{name}')\n"
        f"heavy = sorted({HEAVY!r} & set(sys.modules)); assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
