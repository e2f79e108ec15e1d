"""Calibration: from a model and a text to a Conditioner."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvproof.conditioner import PAGE, Calibration, Conditioner, Origin
from kvproof.errors import RequestError
from kvproof.lanes.kv import bos_prefix, default_text, model_digest

if TYPE_CHECKING:
    from kvproof.geometry import Geometry

TOKENS = 2048
WINDOW = 512  # tokens of one run of the calibration text
TEXT_NAME = "docstrings of Python's standard library"
# Modules that are written in Python, long, and in every installation.
_MODULES = (
    "argparse", "ast", "asyncio.streams", "calendar", "collections", "concurrent.futures.thread",
    "configparser", "csv", "dataclasses", "datetime", "decimal", "difflib", "doctest",
    "email.message", "enum", "fractions", "functools", "gettext", "heapq", "http.client",
    "http.cookiejar", "inspect", "ipaddress", "json", "logging", "mailbox", "optparse", "pathlib",
    "pickle", "random", "shutil", "socket", "statistics", "string", "subprocess", "tarfile",
    "textwrap", "threading", "tokenize", "turtle", "typing", "unittest.case", "unittest.mock",
    "urllib.request", "uuid", "zipfile",
)  # fmt: skip


def calibration_text() -> str:
    """English that is present on every machine, and is not the text that quality is measured on:
    the docstrings of the standard library. RequestError where its sources are not installed."""
    found = []
    for name in _MODULES:
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:
            continue
        origin = Path(spec.origin) if spec and spec.origin else None
        if origin is None or origin.suffix != ".py" or not origin.is_file():
            continue
        tree = ast.parse(origin.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found.append(ast.get_docstring(node) or "")
    text = "\n\n".join(x for x in found if x.count(" ") >= 20)
    if not text:
        raise RequestError(
            "the sources of Python's standard library are not installed here, so there is no "
            "default calibration text: give one (--text FILE)"
        )
    return text


def text_digest(text: str) -> str:
    """SHA-256 of a text, by which calibration and evaluation texts are told apart."""
    return hashlib.sha256(text.encode()).hexdigest()


def same_text(conditioner: Conditioner, text: str | None) -> bool:
    """Whether a conditioner was calibrated on the text that quality is measured on (None: the
    default)."""
    digest = text_digest(default_text() if text is None else text)
    return conditioner.origin.text_sha256 == digest


def calibrate_model(
    path: str | Path,
    *,
    text: str | None = None,
    tokens: int = TOKENS,
    kind: str = "rope",
    page: int = PAGE,
    progress: Callable[[str], None] | None = None,
) -> Conditioner:
    """Run a text through the model at `path` and make its Conditioner.

    RequestError for a text that is too short, and as loading and Calibration raise it.
    """
    from kvproof.engines.transformers import load

    tell = progress or (lambda _: None)
    tell("loading the model")
    model = load(path)
    words = calibration_text() if text is None else text
    tell("reading the text")
    calibration = gather(model, words, tokens, tell)
    tell("writing the conditioner")
    return calibration.conditioner(kind, page, origin=origin(path, words))


def origin(path: str | Path, text: str) -> Origin:
    """What a conditioner says about where it comes from."""
    from kvproof import __version__

    return Origin(model_digest(Path(path)), text_digest(text), f"kvproof {__version__}")


def gather(
    model: Any, text: str, tokens: int, tell: Callable[[str], None] = lambda _: None
) -> Calibration:
    """What `tokens` tokens of a text say about a model, in windows spread over it."""
    from kvproof.engines.capture import capture

    window = min(WINDOW, tokens)
    count = tokens // window
    ids, prefix = model.tokenizer.encode(text), bos_prefix(model.tokenizer.encode)
    ids = ids[len(prefix) :]
    body = window - len(prefix)
    room = len(ids) - body
    if count * body > len(ids):
        raise RequestError(
            f"the text has {len(ids)} tokens, which is not {count} windows of {window}; give a "
            "longer text (--text FILE) or fewer tokens (--tokens)"
        )
    starts = [i * room // max(1, count - 1) for i in range(count)]
    geometry: Geometry = model.geometry
    calibration = Calibration(geometry)
    for i, start in enumerate(starts):
        tell(f"running the text: window {i + 1} of {count}")
        calibration.add(capture(model, [*prefix, *ids[start : start + body]]))
    return calibration
