"""kvproof: which low-precision KV cache should this model ship with, on this machine?

The names below are the stable public API. Everything heavy is imported on first use, so that
`import kvproof` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvproof.backends import Backend
    from kvproof.conditioner import Conditioner
    from kvproof.decision import Decision, Policy
    from kvproof.evidence import Evidence
    from kvproof.formats import Format
    from kvproof.formats import all_formats as formats
    from kvproof.geometry import geometry as geometry

__version__ = "0.1.0.dev0"

__all__ = [
    "backend",
    "decide",
    "format",
    "formats",
    "geometry",
    "transformers_cache",
]

# `kp.formats()` and `kp.geometry(path)` are the submodules themselves, made callable: a function of
# the same name would be overwritten by the first import of its submodule.
_CALLABLE_MODULES = ("formats", "geometry")


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_MODULES:
        return importlib.import_module(f"kvproof.{name}")
    raise AttributeError(f"module 'kvproof' has no attribute {name!r}")


def format(name: str) -> Format:
    """The format called `name`, e.g. "tbq4_0" (RequestError with a suggestion if unknown)."""
    from kvproof.formats import get

    return get(name)


def backend(name: str) -> Backend:
    """The backend called `name`: "cpu" or "reference" (RequestError, or Refused if not here)."""
    from kvproof.backends import get

    return get(name)


def decide(evidence: Sequence[Evidence], policy: Policy | None = None) -> Decision:
    """The decision that a policy draws from evidence: pure, the same on every machine."""
    from kvproof.decision import Policy, decide

    return decide(evidence, policy or Policy.load(None))


def transformers_cache(
    model: Any,
    key: str = "tq4",
    value: str = "tq4",
    backend: str = "cpu",
    *,
    conditioner: Conditioner | str | Path | None = None,
    sinks: int | None = None,
) -> Any:
    """A KV cache for a transformers model, holding keys and values in the named formats.

    `conditioner` is what `kvproof calibrate` made for this model (or its file): far better keys at
    no cost in bytes. `sinks` first tokens are kept in f16; None: 4 with a conditioner, else none.

    Pass it to `model.generate(..., cache=cache)` (`past_key_values=cache` before transformers
    5.24). Switches the model's attention to kvproof's. RequestError if a layer's head_dim does not
    fit.
    """
    from kvproof.engines.transformers import transformers_cache

    return transformers_cache(
        model, key=key, value=value, backend=backend, conditioner=conditioner, sinks=sinks
    )
