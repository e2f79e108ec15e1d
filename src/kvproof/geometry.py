"""What a model's cache looks like, layer by layer, and how many bytes it takes.

Geometry is read from the model's own file: a GGUF header or a Hugging Face config.json. Windows,
two head widths and shared caches are facts of a layer. A field that is missing or contradicts
another is refused by name; a default is used only where the file format or the model's class
states one, and is recorded in `Geometry.source`.
"""

# A table of words as one string: a list literal would take a line for each word.
# ruff: noqa: SIM905

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from kvproof.errors import RequestError
from kvproof.formats import Format, all_formats
from kvproof.formats import get as get_format
from kvproof.gguf import GGUF, StringArray, foreign_file

# llama.cpp rounds a cache up to this many cells.
CELL_STEP = 256

MAX_LAYERS = 4096
MAX_SIZE = 1 << 24  # heads, widths: far above any model, small enough that products stay sane
MAX_TOKENS = 2**31 - 1
MAX_CONFIG_BYTES = 1 << 24

_NAME = re.compile(r"[\w.-]{1,64}")


def _check_tokens(name: str, number: int) -> None:
    if type(number) is not int or not 1 <= number <= MAX_TOKENS:
        raise RequestError(f"{name}: expected 1 to {MAX_TOKENS}, found {number}")


def _pad(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class LayerGeometry:
    """One attention layer.

    `window` is the number of keys that a query sees, itself included; None: all of them.
    `shares_kv_with` is the layer whose cache this one reads; None: it owns its cache.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None
    shares_kv_with: int | None

    @property
    def kind(self) -> str:
        """ "sliding" or "global"."""
        return "global" if self.window is None else "sliding"


@dataclass(frozen=True)
class Source:
    """Where a geometry comes from: the file, the fields read (raw values), the defaults used."""

    path: Path
    kind: str  # "gguf" or "config"
    fields: Mapping[str, Any]
    defaults: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How a runtime lays a cache out; the defaults are llama.cpp's.

    `ubatch`: tokens of a micro-batch; `sequences` share the context, in one stream if `unified`;
    `swa_full`: sliding layers at full size; `padding=False`: the rows that kvproof's own cache
    keeps, min(context, window), and nothing else.
    """

    ubatch: int = 512
    sequences: int = 1
    unified: bool = True
    swa_full: bool = False
    flash_attention: bool = True
    padding: bool = True

    def __post_init__(self) -> None:
        for name in ("ubatch", "sequences"):
            _check_tokens(name, getattr(self, name))
        if not self.padding and (self.sequences != 1 or not self.flash_attention):
            raise RequestError(
                "padding=False sizes kvproof's own cache: one sequence, with flash attention"
            )


LLAMA_CPP = Layout()


@dataclass(frozen=True)
class Cells:
    """Token slots of one layer's cache: tokens kept, slack for a micro-batch, padding; streams."""

    tokens: int
    slack: int
    padding: int
    streams: int

    @property
    def total(self) -> int:
        """Slots over all streams."""
        return (self.tokens + self.slack + self.padding) * self.streams


@dataclass(frozen=True)
class Fit:
    """The longest context whose cache fits: tokens, its bytes, and whether training ended first."""

    tokens: int
    nbytes: int
    capped: bool


@dataclass(frozen=True)
class Geometry:
    """Every layer of a model, and the few numbers beside them that a cache depends on.

    `attention_scale` is the factor on scores where the model states one, None: 1/sqrt(head_dim_k).
    """

    architecture: str
    layers: tuple[LayerGeometry, ...]
    context_length: int | None
    hidden_size: int | None
    vocab_size: int | None
    attention_scale: float | None
    source: Source

    def cells(self, layer: LayerGeometry, context: int, layout: Layout = LLAMA_CPP) -> Cells:
        """Token slots of `layer` for `context` tokens in all sequences together."""
        _check_tokens("context", context)
        window = None if layout.swa_full else layer.window
        if not layout.padding:
            return Cells(context if window is None else min(context, window), 0, 0, 1)
        # llama.cpp pads the whole context first, then each stream's share of it.
        streams, allocated = 1, _pad(context, CELL_STEP)
        if not layout.unified:
            streams = layout.sequences
            allocated = _pad(allocated // streams, CELL_STEP)
        tokens = min(max(context // streams, 1), allocated)
        if window is None:
            return Cells(tokens, 0, allocated - tokens, streams)
        reach = window * (layout.sequences if layout.unified else 1)
        kept, used = min(tokens, reach), min(tokens, reach + layout.ubatch)
        total = _pad(min(allocated, reach + layout.ubatch), CELL_STEP)
        return Cells(kept, used - kept, total - used, streams)

    def layer_bytes(
        self, context: int, key: str | Format, value: str | Format, layout: Layout = LLAMA_CPP
    ) -> tuple[int, ...]:
        """Bytes of each layer's cache (0 where it reads another's); see `kv_bytes`."""
        k, v = get_format(key), get_format(value)
        reason = self.refuses(k, v)
        if reason:
            raise RequestError(reason)
        widest = None
        if not layout.flash_attention:
            if v.name not in ("f16", "bf16"):
                raise RequestError(
                    f"value format {v.name}: V cache quantization requires flash attention "
                    "(flash_attn); turn it on or use f16 or bf16 values"
                )
            # Without flash attention V is stored transposed, each layer as wide as the widest.
            widest = v.row_bytes(max(g.num_kv_heads * g.head_dim_v for g in self.layers))
        sizes = []
        for layer in self.layers:
            if layer.shares_kv_with is not None:
                sizes.append(0)
                continue
            v_bytes = widest or layer.num_kv_heads * v.row_bytes(layer.head_dim_v)
            k_bytes = layer.num_kv_heads * k.row_bytes(layer.head_dim_k)
            sizes.append(self.cells(layer, context, layout).total * (k_bytes + v_bytes))
        return tuple(sizes)

    def kv_bytes(
        self,
        context: int,
        key: str | Format,
        value: str | Format,
        *,
        ubatch: int = 512,
        sequences: int = 1,
        unified: bool = True,
        swa_full: bool = False,
        flash_attention: bool = True,
        padding: bool = True,
    ) -> int:
        """Bytes of the whole cache for `context` tokens in all sequences together.

        The options are those of `Layout`: `padding=True` gives llama.cpp's allocation,
        `padding=False` the rows that kvproof's own cache keeps. fp8 scale tables (4 bytes per
        layer, side and KV head) are not included. Raises RequestError where a format does not take
        a layer's width.
        """
        layout = Layout(ubatch, sequences, unified, swa_full, flash_attention, padding)
        return sum(self.layer_bytes(context, key, value, layout))

    def refuses(self, key: str | Format, value: str | Format) -> str | None:
        """Why these formats cannot hold this model's cache, naming the layer; None if they can."""
        k, v = get_format(key), get_format(value)
        for layer in self.layers:
            if layer.shares_kv_with is None:
                reason = k.refuses(layer.head_dim_k, "key") or v.refuses(layer.head_dim_v, "value")
                if reason:
                    return f"layer {layer.index}: {reason}"
        return None

    def savings(
        self, context: int, key: str | Format, value: str | Format, layout: Layout = LLAMA_CPP
    ) -> dict[str, int]:
        """Bytes that windows, shared caches, and both save against a plain cache of this model."""

        def total(windows: bool, sharing: bool) -> int:
            layers = tuple(
                replace(
                    g,
                    window=g.window if windows else None,
                    shares_kv_with=g.shares_kv_with if sharing else None,
                )
                for g in self.layers
            )
            return sum(replace(self, layers=layers).layer_bytes(context, key, value, layout))

        actual = total(windows=True, sharing=True)
        return {
            "windows": total(windows=False, sharing=True) - actual,
            "sharing": total(windows=True, sharing=False) - actual,
            "both": total(windows=False, sharing=False) - actual,
        }

    def max_context(
        self, memory: int, key: str | Format, value: str | Format, layout: Layout = LLAMA_CPP
    ) -> Fit:
        """The longest context whose cache fits in `memory` bytes, at most the trained context.

        A Fit of 0 tokens: not even one token fits.
        """

        def total(context: int) -> int:
            return sum(self.layer_bytes(context, key, value, layout)) if context else 0

        limit = self.context_length or MAX_TOKENS
        low, high = 0, limit
        while low < high:  # bytes never fall as the context grows
            middle = (low + high + 1) // 2
            if total(middle) <= memory:
                low = middle
            else:
                high = middle - 1
        return Fit(low, total(low), capped=low == limit)

    def groups(self) -> list[tuple[LayerGeometry, tuple[int, ...]]]:
        """Layers of one shape together: (the first of them, all their indices)."""
        found: dict[tuple[Any, ...], list[LayerGeometry]] = {}
        for layer in self.layers:
            shape = replace(layer, index=0, shares_kv_with=None)
            found.setdefault((shape, layer.shares_kv_with is None), []).append(layer)
        return [(group[0], tuple(g.index for g in group)) for group in found.values()]


def geometry(path: str | os.PathLike[str]) -> Geometry:
    """Geometry of a GGUF file, a config.json, or a folder that holds one of them.

    Raises RequestError with one line naming the field if the model is not described completely, or
    holds state that is no KV cache.
    """
    found = model_file(Path(path))
    if found.suffix == ".json":
        return _from_config(found, _read_config(found))
    with GGUF(found) as file:
        return _from_gguf(file)


def model_file(path: Path) -> Path:
    """The GGUF file or config.json that describes the model at `path`; RequestError if none."""
    if not path.exists():
        raise RequestError(f"{path}: no such file or folder")
    if not path.is_dir():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise RequestError(
            f"{path}: expected one GGUF file, found {len(files)}; name one: "
            + ", ".join(f.name for f in files[:8])
        )
    raise RequestError(f"{path}: expected config.json or a .gguf file inside, found neither")


def inspect_model(
    path: str | os.PathLike[str],
    context: int | None = None,
    memory: int | None = None,
    *,
    ubatch: int = 512,
) -> dict[str, Any]:
    """Everything `kvproof inspect` prints, as one JSON document.

    `context` defaults to the trained context, at most 8192. Byte counts take the same format for
    keys and values: `bytes` as llama.cpp allocates, `bytes_exact` the rows kvproof's cache keeps,
    `bytes_full_window` with full-size sliding layers. `max_context` needs `memory` (bytes).
    """
    g = geometry(path)
    layout = Layout(ubatch=ubatch)
    full, exact = replace(layout, swa_full=True), replace(layout, padding=False)
    if context is None:
        context = min(g.context_length or 8192, 8192)
    document: dict[str, Any] = {
        "path": str(path),
        "architecture": g.architecture,
        "context_length": g.context_length,
        "hidden_size": g.hidden_size,
        "vocab_size": g.vocab_size,
        "attention_scale": g.attention_scale,
        "context": context,
        "ubatch": ubatch,
        "layers": [{**asdict(layer), "kind": layer.kind} for layer in g.layers],
        "groups": [],
        "bytes": {},
        "bytes_exact": {},
        "bytes_full_window": {},
        "bytes_per_layer": {},
        "savings": {},
        "refused": {},
        "source": {
            "path": str(g.source.path),
            "kind": g.source.kind,
            "fields": {name: _plain(value) for name, value in g.source.fields.items()},
            "defaults": dict(g.source.defaults),
            "notes": list(g.source.notes),
        },
    }
    for first, indices in g.groups():
        shape = {k: v for k, v in asdict(first).items() if k not in ("index", "shares_kv_with")}
        shape |= {"kind": first.kind, "owns_cache": first.shares_kv_with is None}
        cells = g.cells(first, context, layout)
        shape["cells"] = {
            **{k: v for k, v in asdict(cells).items() if k != "streams"},
            "total": cells.total,
            "full_window": g.cells(first, context, full).total,
        }
        document["groups"].append({"layers": list(indices), **shape})
    if memory is not None:
        document |= {"memory": memory, "max_context": {}, "max_context_capped": {}}
    for row in all_formats():
        if not {"key", "value"} & row.sides:
            continue
        reason = g.refuses(row, row)
        if reason:
            document["refused"][row.name] = reason
            for table in ("bytes", "bytes_exact", "bytes_full_window", "bytes_per_layer"):
                document[table][row.name] = None
            if memory is not None:
                document["max_context"][row.name] = None
            continue
        per_layer = g.layer_bytes(context, row, row, layout)
        document["bytes_per_layer"][row.name] = list(per_layer)
        document["bytes"][row.name] = sum(per_layer)
        document["bytes_exact"][row.name] = sum(g.layer_bytes(context, row, row, exact))
        document["bytes_full_window"][row.name] = sum(g.layer_bytes(context, row, row, full))
        document["savings"][row.name] = g.savings(context, row, row, layout)
        if memory is not None:
            fit = g.max_context(memory, row, row, layout)
            document["max_context"][row.name] = fit.tokens
            document["max_context_capped"][row.name] = fit.capped
    return document


def _plain(value: Any) -> Any:
    """A field as JSON holds it: what JSON has no number or type for becomes text."""
    if isinstance(value, list):
        return [_plain(x) for x in value]
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if number or isinstance(value, str | None) else repr(value)


class _Fields:
    """Reads checked fields of one file and remembers what it read and what it had to assume."""

    def __init__(self, path: Path, kind: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.kind = kind
        self.values = values
        self.prefix = prefix
        self.read: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.notes: list[str] = []

    def fail(self, name: str, why: str) -> NoReturn:
        raise RequestError(f"{self.path}: {self.prefix}{name}: {why}")

    def raw(self, name: str) -> Any:
        """The value of a field as plain Python, None if absent (or null)."""
        value = self.values.get(self.prefix + name)
        if isinstance(value, np.ndarray):
            # Checked before it is turned into a list: an array here has an entry per layer.
            if value.size > MAX_LAYERS:
                self.fail(name, f"expected at most {MAX_LAYERS} entries, found {value.size}")
            value = value.tolist()
        if value is not None:
            self.read[self.prefix + name] = value
        return value

    def default(self, name: str, value: Any) -> Any:
        self.defaults[self.prefix + name] = value
        return value

    def check(self, name: str, value: Any, low: int, high: int = MAX_SIZE) -> int:
        if type(value) is not int or not low <= value <= high:
            self.fail(name, f"expected a whole number from {low} to {high}, found {_short(value)}")
        return value

    def number(
        self, name: str, low: int = 1, high: int = MAX_SIZE, default: int | None = None
    ) -> int:
        """A whole number in low..high; without a default a missing field is refused."""
        value = self.raw(name)
        if value is None:
            if default is None:
                self.fail(name, "missing; the cache cannot be sized without it")
            return int(self.default(name, default))
        return self.check(name, value, low, high)

    def optional(self, name: str, low: int = 1, high: int = MAX_SIZE) -> int | None:
        value = self.raw(name)
        return None if value is None else self.check(name, value, low, high)

    def per_layer(
        self, name: str, count: int, default: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """A number for all layers, or an array with one for each; zeros are the caller's matter."""
        value = self.raw(name)
        if value is None:
            if default is None:
                self.fail(name, "missing; the cache cannot be sized without it")
            self.default(name, default[0] if len(set(default)) == 1 else list(default))
            return tuple(default)
        if isinstance(value, list):
            if len(value) != count:
                self.fail(name, f"expected {count} entries, one per layer, found {len(value)}")
            return tuple(self.check(f"{name}[{i}]", v, 0) for i, v in enumerate(value))
        return (self.check(name, value, 0),) * count

    def source(self) -> Source:
        return Source(self.path, self.kind, self.read, self.defaults, tuple(self.notes))


_short = reprlib.repr  # bounded in length and depth, whatever a file holds


def _head_dim_default(fields: _Fields, name: str, hidden: str, heads: Sequence[int]) -> int:
    """Hidden size / heads, where a file gives no width; refused if that is not one whole number."""
    width = fields.number(hidden)
    if len(set(heads)) != 1 or width % heads[0]:
        fields.fail(
            name, f"missing, and {hidden} {width} / heads {_short(sorted(set(heads)))} is not whole"
        )
    return width // heads[0]


def _check_heads(fields: _Fields, name: str, heads: Sequence[int], kv: Sequence[int]) -> None:
    for i, (h, n) in enumerate(zip(heads, kv, strict=True)):
        if h == 0 or n == 0:
            fields.fail(
                name,
                f"layer {i} has no attention heads: a recurrent, linear-attention or "
                "attention-free layer; hybrid models are not supported",
            )
        if h % n:
            fields.fail(name, f"layer {i}: {h} query heads are not a multiple of {n} KV heads")


def _share(
    fields: _Fields, name: str, sliding: Sequence[bool], shared: int
) -> tuple[int | None, ...]:
    """Per layer, the layer whose cache it reads: the last own layer of its kind; None: its own."""
    own = len(sliding) - shared
    last = {kind: i for i, kind in enumerate(sliding[:own])}
    for i in range(own, len(sliding)):
        if sliding[i] not in last:
            kind = "sliding" if sliding[i] else "global"
            fields.fail(name, f"layer {i} is {kind} and no layer before {own} owns such a cache")
    return tuple(None if i < own else last[kind] for i, kind in enumerate(sliding))


# --- GGUF -----------------------------------------------------------------------------------------

# Layers of these keep a state that is no KV cache; the key tells.
_GGUF_RECURRENT = (".ssm.", ".wkv.", ".shortconv.", ".full_attention_interval", ".kda.")
# "last of every n is global" where the header leaves the pattern out (llama.cpp's own defaults).
_GGUF_PATTERN = {"gemma3": 6, "gemma3n": 5}
# llama.cpp does not read shared_kv_layers for gemma3n: 20 layers own a cache.
_GEMMA3N_OWN_LAYERS = 20
_GEMMA3_27B_LAYERS = 62


def _from_gguf(file: GGUF) -> Geometry:
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or not _NAME.fullmatch(arch):
        raise RequestError(
            f"{file.path}: general.architecture: expected the name of a model architecture, found "
            f"{_short(arch)}"
        )
    f = _Fields(file.path, "gguf", file.metadata, f"{arch}.")
    f.read["general.architecture"] = arch
    _refuse_gguf(f, arch)
    count = f.number("block_count", 1, MAX_LAYERS)
    heads = f.per_layer("attention.head_count", count)
    kv_heads = f.per_layer("attention.head_count_kv", count, default=heads)
    _check_heads(f, "attention.head_count_kv", heads, kv_heads)
    widths = {}
    for side in ("key", "value"):
        name = f"attention.{side}_length"
        width = f.optional(name)
        if width is None:
            width = f.default(name, _head_dim_default(f, name, "embedding_length", heads))
        widths[side, False] = width
        swa = f.optional(f"{name}_swa")
        widths[side, True] = swa if swa is not None else f.default(f"{name}_swa", width)
    window = f.number("attention.sliding_window", 0, MAX_TOKENS, default=0)
    sliding = _gguf_sliding(f, arch, count, window)
    if not window and any(sliding):
        for side in ("key", "value"):
            if widths[side, True] != widths[side, False]:
                f.fail(
                    "attention.sliding_window",
                    f"missing or 0, but attention.{side}_length_swa {widths[side, True]} differs "
                    f"from {widths[side, False]}: are there sliding layers or not?",
                )
        f.notes.append("no sliding_window: every layer is global, whatever the pattern says")
        sliding = (False,) * count
    owners = _gguf_owners(f, arch, count, sliding)
    hidden = f.optional("embedding_length")
    return Geometry(
        architecture=arch,
        layers=tuple(
            LayerGeometry(
                index=i,
                num_heads=heads[i],
                num_kv_heads=kv_heads[i],
                head_dim_k=widths["key", sliding[i]],
                head_dim_v=widths["value", sliding[i]],
                window=window if sliding[i] else None,
                shares_kv_with=owners[i],
            )
            for i in range(count)
        ),
        context_length=f.optional("context_length", 1, MAX_TOKENS),
        hidden_size=hidden,
        vocab_size=_gguf_vocab_size(f, file),
        attention_scale=_gguf_scale(arch, count, hidden, heads[0], widths["key", False]),
        source=f.source(),
    )


def _refuse_gguf(f: _Fields, arch: str) -> None:
    for name in ("key_length_mla", "value_length_mla", "kv_lora_rank"):
        if f.raw(f"attention.{name}") is not None:
            f.fail(
                f"attention.{name}",
                "multi-head latent attention: its cache is one latent vector per token, which "
                "kvproof does not support",
            )
    for key in f.values:
        if key.startswith(f"{arch}.") and any(mark in key for mark in _GGUF_RECURRENT):
            kv = f.raw("attention.head_count_kv")
            layer = kv.index(0) if isinstance(kv, list) and 0 in kv else 0
            raise RequestError(
                f"{f.path}: {key}: layer {layer} is a recurrent or linear-attention layer, whose "
                "state is no KV cache; hybrid models are not supported"
            )
    if f.raw("attention.causal") is False:
        f.fail("attention.causal", "false: an encoder has no KV cache")


def _gguf_sliding(f: _Fields, arch: str, count: int, window: int) -> tuple[bool, ...]:
    """Per layer whether it slides, from the pattern: a bool array, or n (last of n is global)."""
    name = "attention.sliding_window_pattern"
    pattern = f.raw(name)
    if isinstance(pattern, list):
        if len(pattern) != count:
            f.fail(name, f"expected {count} entries, one per layer, found {len(pattern)}")
        if not all(p in (0, 1) for p in pattern):
            f.fail(name, f"expected booleans, found {_short(pattern)}")
        return tuple(bool(p) for p in pattern)
    if pattern is None:
        if arch == "gemma4":
            f.fail(name, "missing; gemma4 needs the array of sliding layers")
        if not window:
            return (False,) * count
        if arch not in _GGUF_PATTERN:
            f.fail(
                name,
                f"missing, with attention.sliding_window {window}: the header does not say which "
                "layers slide",
            )
        pattern = f.default(name, _GGUF_PATTERN[arch])
    n = f.check(name, pattern, 0, MAX_LAYERS)
    return tuple(n == 0 or i % n < n - 1 for i in range(count))


def _gguf_owners(
    f: _Fields, arch: str, count: int, sliding: Sequence[bool]
) -> tuple[int | None, ...]:
    name = "attention.shared_kv_layers"
    shared = f.optional(name, 0)
    if arch == "gemma3n":
        fixed = max(count - _GEMMA3N_OWN_LAYERS, 0)
        if shared not in (None, fixed):
            f.fail(
                name,
                f"{shared}, but gemma3n with {count} layers shares the last {fixed} (llama.cpp "
                f"gives {_GEMMA3N_OWN_LAYERS} layers a cache, whatever the header says)",
            )
        shared = fixed if shared is not None else f.default(name, fixed)
    if not shared:
        if shared is None:
            f.default(name, 0)
        return (None,) * count
    if shared >= count:
        f.fail(name, f"expected fewer than the {count} layers, found {shared}")
    own = count - shared
    # llama.cpp reads from own - 2 (sliding) and own - 1 (global) without looking at the kinds.
    if own < 2 or not sliding[own - 2] or sliding[own - 1]:
        f.fail(
            name,
            f"{shared}: the last two layers with a cache, {own - 2} and {own - 1}, must be sliding "
            "and global in that order",
        )
    return _share(f, name, sliding, shared)


def _gguf_vocab_size(f: _Fields, file: GGUF) -> int | None:
    size = f.optional("vocab_size", 1, MAX_TOKENS)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if size is None and isinstance(tokens, StringArray) else size


def _gguf_scale(arch: str, count: int, hidden: int | None, heads: int, width: int) -> float | None:
    if arch in ("gemma3n", "gemma4"):
        return 1.0
    if arch == "gemma3":
        if count == _GEMMA3_27B_LAYERS and hidden:
            width = hidden // heads
        return float(width**-0.5)
    return None


# --- Hugging Face config.json ---------------------------------------------------------------------

# Defaults of the classes (transformers 5.24), where the class and not the file knows a value.
_GEMMA_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3": {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "pattern": 6,
    },
    "gemma3n": {
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
        "pattern": 5,
    },
    "gemma4": {
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "num_kv_shared_layers": 0,
        "pattern": 6,
    },
}
_HEAD_DIM_FROM_HIDDEN = (
    "llama mistral mixtral qwen2 qwen2_moe phi phi3 granite olmo olmo2 stablelm starcoder2 smollm3 "
    "cohere"
).split()
_KV_HEADS_FROM_HEADS = "llama phi phi3 granite olmo olmo2 olmo3 cohere cohere2".split()
# These classes slide unless the file says otherwise, so the file has to say.
_SLIDES_BY_DEFAULT = "mistral ministral gemma2 cohere2 exaone4 olmo3 gpt_oss".split()
# `sliding_window` of these counts only if `use_sliding_window` is true, which it is not by default.
_SWITCHED_WINDOW = "qwen2 qwen2_moe qwen3 qwen3_moe smollm3".split()

# Fields that tell of layers without a KV cache, where there is no layer_types to name them.
_CONFIG_RECURRENT = (
    "layers_block_type block_types hybrid_override_pattern full_attention_interval "
    "linear_num_value_heads attn_layer_period attn_layer_indices mamba_d_state mamba_d_ssm "
    "ssm_state_size state_size conv_L_cache rwkv_version"
).split()
_ATTENTION_NAMES = ("attention", "full_attention", "sliding_attention")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise RequestError(f"{path}: expected a config of at most {MAX_CONFIG_BYTES} bytes")
    foreign = foreign_file(raw[:512])
    if foreign:
        raise RequestError(f"{path}: expected a model's config.json, found {foreign}")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise RequestError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def _from_config(path: Path, config: dict[str, Any]) -> Geometry:
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise RequestError(f"{path}: text_config: expected an object, found {_short(text)}")
    f = _Fields(path, "config", text)
    model_type = text.get("model_type", config.get("model_type"))
    if not isinstance(model_type, str) or not _NAME.fullmatch(model_type):
        f.fail("model_type", f"expected a transformers model type, found {_short(model_type)}")
    f.read["model_type"] = model_type
    arch = model_type.removesuffix("_text")
    if arch in _GEMMA_DEFAULTS:
        return _from_gemma_config(f, arch)
    return _from_plain_config(f, arch)


def _layer_types(f: _Fields, count: int, derive: Callable[[], list[str]]) -> list[str]:
    """layer_types with one known kind per layer; `derive` supplies them where the file does not."""
    types = f.raw("layer_types")
    if types is None:
        types = derive()
    if not isinstance(types, list) or len(types) != count:
        found = len(types) if isinstance(types, list) else _short(types)
        f.fail("layer_types", f"expected {count} entries, one per layer, found {found}")
    for i, kind in enumerate(types):
        if kind not in ("sliding_attention", "full_attention"):
            f.fail(
                "layer_types",
                f"layer {i} is {_short(kind)}: only full_attention and sliding_attention layers "
                "have a KV cache that kvproof supports",
            )
    return types


def _build(
    f: _Fields,
    arch: str,
    types: Sequence[str],
    shapes: Sequence[tuple[int, int, int]],
    window: int | None,
    shared: int,
    scale: float | None,
) -> Geometry:
    """Geometry from per-layer (num_heads, num_kv_heads, head_dim) and kinds."""
    _check_heads(f, "num_key_value_heads", [s[0] for s in shapes], [s[1] for s in shapes])
    sliding = [t == "sliding_attention" for t in types]
    if shared >= len(types):
        f.fail("num_kv_shared_layers", f"expected fewer than {len(types)} layers, found {shared}")
    owners = _share(f, "num_kv_shared_layers", sliding, shared)
    return Geometry(
        architecture=arch,
        layers=tuple(
            LayerGeometry(i, heads, kv, width, width, window if sliding[i] else None, owners[i])
            for i, (heads, kv, width) in enumerate(shapes)
        ),
        context_length=f.optional("max_position_embeddings", 1, MAX_TOKENS),
        hidden_size=f.optional("hidden_size"),
        vocab_size=f.optional("vocab_size", 1, MAX_TOKENS),
        attention_scale=scale,
        source=f.source(),
    )


def _from_gemma_config(f: _Fields, arch: str) -> Geometry:
    defaults = _GEMMA_DEFAULTS[arch]

    def number(name: str, low: int = 1, high: int = MAX_SIZE) -> int:
        return f.number(name, low, high, default=defaults[name])

    count = number("num_hidden_layers", high=MAX_LAYERS)
    heads = number("num_attention_heads")
    kv_heads = number("num_key_value_heads")
    width = number("head_dim")
    window = number("sliding_window", high=MAX_TOKENS)

    def derive() -> list[str]:
        n = defaults["pattern"]
        if arch == "gemma3":
            n = f.number("sliding_window_pattern", 1, MAX_LAYERS, default=n)
        kinds = ["sliding_attention" if (i + 1) % n else "full_attention" for i in range(count)]
        f.default("layer_types", f"every {n}th full")
        return kinds

    types = list(_layer_types(f, count, derive))
    f.raw("use_bidirectional_attention")  # recorded: the class halves the window when loaded
    shared = 0
    shapes = [(heads, kv_heads, width)] * count
    scale: float | None = 1.0
    if arch == "gemma3":
        scale = number("query_pre_attn_scalar") ** -0.5
    else:
        shared = number("num_kv_shared_layers", low=0)
    if arch == "gemma4":
        if types[-1] != "full_attention":
            f.notes.append(f"layer {count - 1}: the class forces the last layer to full_attention")
            types[-1] = "full_attention"
        overrides = _gemma4_overrides(f, types, kv_heads, width)
        shapes = [(heads, *overrides.get(i, (kv_heads, width))) for i in range(count)]
    return _build(f, arch, types, shapes, window, shared, scale)


def _gemma4_overrides(
    f: _Fields, types: Sequence[str], kv_heads: int, head_dim: int
) -> dict[int, tuple[int, int]]:
    """(num_kv_heads, head_dim) of the layers that differ: per_layer_config, or the full layers."""
    explicit = f.raw("per_layer_config")
    if explicit is not None:
        if not isinstance(explicit, dict):
            f.fail("per_layer_config", f"expected an object, found {_short(explicit)}")
        found = {}
        for key, layer in explicit.items():
            name = f"per_layer_config[{_short(key)}]"
            if not (key.isdecimal() and len(key) < 6 and int(key) < len(types)):
                f.fail(name, f"expected a layer index below {len(types)}")
            if not isinstance(layer, dict):
                f.fail(name, f"expected an object, found {_short(layer)}")
            found[int(key)] = (
                f.check(
                    f"{name}.num_key_value_heads", layer.get("num_key_value_heads", kv_heads), 1
                ),
                f.check(f"{name}.head_dim", layer.get("head_dim", head_dim), 1),
            )
        return found
    width = f.number("global_head_dim", default=_GEMMA_DEFAULTS["gemma4"]["global_head_dim"])
    global_kv = f.optional("num_global_key_value_heads")
    k_eq_v = f.raw("attention_k_eq_v")
    if k_eq_v is None:
        k_eq_v = f.default("attention_k_eq_v", False)
    if type(k_eq_v) is not bool:
        f.fail("attention_k_eq_v", f"expected true or false, found {_short(k_eq_v)}")
    if global_kv is not None and global_kv != kv_heads and not k_eq_v:
        f.fail(
            "num_global_key_value_heads",
            f"{global_kv} differs from num_key_value_heads {kv_heads}, but attention_k_eq_v is "
            "false: transformers ignores it and llama.cpp's converter applies it",
        )
    shape = (global_kv if global_kv is not None and k_eq_v else kv_heads, width)
    return {i: shape for i, kind in enumerate(types) if kind == "full_attention"}


def _refuse_config(f: _Fields) -> None:
    if f.raw("kv_lora_rank") is not None:
        f.fail(
            "kv_lora_rank",
            "multi-head latent attention: its cache is one latent vector per token, which kvproof "
            "does not support",
        )
    if f.raw("is_encoder_decoder"):
        f.fail("is_encoder_decoder", "true: only decoder-only models are supported")
    if f.raw("layer_types") is None:
        for name in _CONFIG_RECURRENT:
            kinds = f.raw(name)
            if kinds is None:
                continue
            layer = 0
            if isinstance(kinds, list) and name in ("layers_block_type", "block_types"):
                layer = next((i for i, k in enumerate(kinds) if k not in _ATTENTION_NAMES), 0)
            f.fail(
                name,
                f"layer {layer} is a recurrent or linear-attention layer, whose state is no KV "
                "cache; hybrid models are not supported",
            )
        if f.raw("attention_chunk_size") is not None:
            f.fail("attention_chunk_size", "chunked attention layers are not supported")
    for name in ("global_head_dim", "per_layer_config", "num_kv_shared_layers", "v_head_dim"):
        if f.raw(name):
            f.fail(name, f"changes layers in a way not known for {f.read['model_type']}; refused")


def _from_plain_config(f: _Fields, arch: str) -> Geometry:
    """Llama-like models: one shape for all layers, with or without windows."""
    _refuse_config(f)
    count = f.number("num_hidden_layers", 1, MAX_LAYERS)
    heads = f.number("num_attention_heads")
    default_kv = heads if arch in _KV_HEADS_FROM_HEADS else None
    kv_heads = f.number("num_key_value_heads", default=default_kv)
    width = f.optional("head_dim")
    if width is None:
        if arch not in _HEAD_DIM_FROM_HIDDEN:
            f.fail("head_dim", "missing; the cache cannot be sized without it")
        width = f.default("head_dim", _head_dim_default(f, "head_dim", "hidden_size", [heads]))
    window = f.optional("sliding_window", 0, MAX_TOKENS) or None
    enabled = f.raw("use_sliding_window")
    if enabled is None and arch in _SWITCHED_WINDOW:
        enabled = f.default("use_sliding_window", False)
    if enabled is False:
        window = None
    given = f.raw("layer_types")
    if given is None and window is not None:
        f.fail(
            "layer_types",
            f"missing, with sliding_window {window}: the file does not say which layers slide",
        )
    if given is None and arch in _SLIDES_BY_DEFAULT and "sliding_window" not in f.values:
        f.fail("sliding_window", f"missing; {arch} has windows unless the file says null")
    types = _layer_types(f, count, lambda: ["full_attention"] * count)
    if window is None and "sliding_attention" in types:
        layer = types.index("sliding_attention")
        f.fail("sliding_window", f"missing or off, but layer_types says that layer {layer} slides")
    return _build(f, arch, types, [(heads, kv_heads, width)] * count, window, 0, None)


def index_ranges(indices: Iterable[int]) -> str:
    """Layer indices in ascending order as text: [0, 1, 2, 5] is "0-2, 5"."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][-1] + 1:
            runs[-1][1:] = [i]
        else:
            runs.append([i])
    return ", ".join("-".join(map(str, run)) for run in runs)


class _CallableModule(ModuleType):
    """Lets `kvproof.geometry(path)` read a model (see kvproof/__init__.py)."""

    def __call__(self, path: str | os.PathLike[str]) -> Geometry:
        return geometry(path)


sys.modules[__name__].__class__ = _CallableModule
