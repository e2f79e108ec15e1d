"""Rows of real models: what a few layers produce for one text, kept on disk, and what formats make
of them.

A file under the cache folder holds one model's rows. It is used only if it is whole and was made of
the same model file and text by the same version of this module; otherwise it is made again.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof import models
from kvproof.backends import Backend
from kvproof.cases import head_scale
from kvproof.conditioner import (
    PAGE,
    SINKS,
    Calibration,
    Conditioner,
    LayerCondition,
    means_of_rows,
)
from kvproof.distortion import above_bound, centred_scores, dominators, relative_mse, stored
from kvproof.engines.capture import LayerRows
from kvproof.errors import Refused, RequestError
from kvproof.files import replacing
from kvproof.formats import Format, all_formats
from kvproof.geometry import Geometry, LayerGeometry
from kvproof.geometry import geometry as read_geometry
from kvproof.lanes.kv import bos_prefix, default_text, model_digest

VERSION = 2  # of the file; a change of what is captured counts too
TOKENS = 640  # more than Gemma-3's window of 512, so that its windows hide something
EVERY = 4  # every fourth query scores: more of them change the figures by less than a percent
CALIBRATION = 2  # windows of as many tokens, from the end of the text, that conditioners learn from
_ARRAYS = ("q", "k", "v", "positions", "inv_freq")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CapturedLayer:
    """One layer's rows, how it attends (its window and the factor on its scores), and what
    conditions its keys, learned from another part of the text."""

    rows: LayerRows
    window: int | None
    scale: float
    condition: LayerCondition


@dataclass(frozen=True)
class ModelRows:
    """Rows of one model for one text. `model` and `text` are SHA-256 digests, `kind` is that of the
    conditions."""

    model: str
    text: str
    tokens: int
    kind: str
    layers: tuple[CapturedLayer, ...]


def chosen(geometry: Geometry) -> list[int]:
    """Layers worth looking at: the first, middle and last of every kind that owns a cache.

    Layers are of one kind if their windows and shapes are equal.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for layer in geometry.layers:
        if layer.shares_kv_with is None:
            kinds.setdefault(_kind(layer), []).append(layer.index)
    return sorted({at[i] for at in kinds.values() for i in (0, len(at) // 2, -1)})


def _kind(layer: LayerGeometry) -> tuple[Any, ...]:
    return (
        layer.window, layer.num_heads, layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v
    )  # fmt: skip


def rows(path: Path, text: str | None = None, progress: Progress | None = None) -> ModelRows:
    """Rows of the model at `path` for `text` (default: kvproof's own), from disk or captured now.

    Capturing runs the model and needs torch and transformers. RequestError where the model cannot
    be run or the text is too short. A folder that cannot be written to costs only the next run.
    """
    tell = progress or (lambda _: None)
    found = read(path, text)
    if found is not None:
        return found
    made = make(path, text, tell)
    try:
        _write(_file(made.model), made)
    except OSError as error:
        tell(f"{error.filename or _file(made.model)}: rows are not kept: {error.strerror or error}")
    return made


def known(progress: Progress | None = None) -> Iterator[tuple[str, ModelRows | str]]:
    """Every known model's name with its rows, or with why there are none here."""
    for name in models.KNOWN:
        path = models.on_disk(name)
        if path is None:
            yield name, f"not fetched; run `kvproof fetch {name}`"
            continue
        try:
            found = read(path)
            missing = [n for n in ("torch", "transformers") if find_spec(n) is None]
            if found is None and missing:
                yield name, f"capturing needs {' and '.join(missing)}, not installed here"
            else:
                yield name, found or rows(path, progress=progress)
        except (RequestError, Refused) as error:
            yield name, str(error)


def read(path: Path, text: str | None = None) -> ModelRows | None:
    """The stored rows of the model at `path` for `text`, None where there are none that fit."""
    digest = model_digest(path)
    file = _file(digest)
    if not file.is_file():
        return None
    geometry = read_geometry(path)
    words = _digest(default_text() if text is None else text)
    wanted = chosen(geometry)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            about = json.loads(bytes(arrays["about"]).decode())
            kind = about.pop("kind")
            if about != _about(digest, words, wanted):
                return None
            layers = [LayerRows(i, *(_array(arrays, name, i) for name in _ARRAYS)) for i in wanted]
            if not all(_fits(x, geometry.layers[x.index]) for x in layers):
                return None
            conditions = {
                x.index: LayerCondition(
                    arrays[f"mean.{x.index}"], arrays[f"scale.{x.index}"], _turns(x)
                )
                for x in layers
            }
            Conditioner(kind, PAGE, conditions)  # refuses what is no kind
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile,
        zlib.error, RequestError,
    ):  # fmt: skip
        return None  # cut off, edited, or no such archive at all
    return ModelRows(digest, words, TOKENS, kind, _attending(geometry, layers, conditions))


def make(path: Path, text: str | None = None, progress: Progress | None = None) -> ModelRows:
    """Run the model at `path` over the first tokens of `text`; nothing is written."""
    from kvproof.engines.capture import capture
    from kvproof.engines.transformers import load

    tell = progress or (lambda _: None)
    tell(f"{path.name}: loading the model to capture its rows")
    digest, model = model_digest(path), load(path)
    words = default_text() if text is None else text
    prefix = bos_prefix(model.tokenizer.encode)
    ids = model.tokenizer.encode(words)[len(prefix) :]
    body = TOKENS - len(prefix)
    if len(ids) < (1 + CALIBRATION) * body:
        raise RequestError(
            f"the text has {len(ids)} tokens, captured rows need {(1 + CALIBRATION) * body}"
        )
    tell(f"{path.name}: capturing rows of {TOKENS} tokens")
    wanted = chosen(model.geometry)
    layers = [x for x in capture(model, [*prefix, *ids[:body]]) if x.index in wanted]
    calibration = Calibration(model.geometry)
    for i in range(CALIBRATION):
        tell(f"{path.name}: calibrating, window {i + 1} of {CALIBRATION}")
        start = len(ids) - (i + 1) * body
        calibration.add(capture(model, [*prefix, *ids[start : start + body]]))
    try:
        conditioner = calibration.conditioner("rope")
    except RequestError:  # keys turn by position in a way that is not known
        conditioner = calibration.conditioner("previous")
    attending = _attending(model.geometry, layers, conditioner.layers)
    return ModelRows(digest, _digest(words), TOKENS, conditioner.kind, attending)


def _attending(
    geometry: Geometry, layers: Sequence[LayerRows], conditions: Mapping[int, LayerCondition]
) -> tuple[CapturedLayer, ...]:
    def one(x: LayerRows) -> CapturedLayer:
        layer = geometry.layers[x.index]
        scale = geometry.attention_scale or layer.head_dim_k**-0.5
        return CapturedLayer(x, layer.window, scale, conditions[x.index])

    return tuple(one(x) for x in layers)


def _turns(x: LayerRows) -> NDArray[np.float64]:
    return np.empty(0) if x.inv_freq is None else x.inv_freq


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _about(model: str, text: str, layers: list[int]) -> dict[str, Any]:
    """What a file must have been made of to be used."""
    return {
        "version": VERSION, "model": model, "text": text, "tokens": TOKENS, "layers": layers
    }  # fmt: skip


def _file(digest: str) -> Path:
    return models.cache_dir() / "captured" / f"{digest[:32]}.npz"


def _array(arrays: Any, name: str, index: int) -> Any:
    # Layers without rotary positions have no frequencies.
    key = f"{name}.{index}"
    return arrays[key] if key in arrays or name != "inv_freq" else None


def _fits(x: LayerRows, layer: LayerGeometry) -> bool:
    """Whether stored arrays have the shapes and kinds of the layer and hold numbers only."""
    wide = (("q", layer.num_heads), ("k", layer.num_kv_heads), ("v", layer.num_kv_heads))
    for name, heads in wide:
        array: NDArray[Any] = getattr(x, name)
        dim = layer.head_dim_v if name == "v" else layer.head_dim_k
        if array.dtype != np.float32 or array.shape != (TOKENS, heads, dim):
            return False
        if not np.isfinite(array).all():
            return False
    if x.inv_freq is not None and 2 * x.inv_freq.size > layer.head_dim_k:
        return False
    return x.positions.shape == (TOKENS,) and x.positions.dtype == np.int64


def _write(file: Path, made: ModelRows) -> None:
    """All of `made` in `file`, or nothing: a run that is stopped leaves the file as it was."""
    about = _about(made.model, made.text, [x.rows.index for x in made.layers])
    about["kind"] = made.kind
    arrays: dict[str, NDArray[Any]] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for layer in made.layers:
        arrays[f"mean.{layer.rows.index}"] = layer.condition.mean
        arrays[f"scale.{layer.rows.index}"] = layer.condition.scale
        for name in _ARRAYS:
            if getattr(layer.rows, name) is not None:
                arrays[f"{name}.{layer.rows.index}"] = getattr(layer.rows, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file, 0o600) as out:
        np.savez(out, **arrays)  # type: ignore[arg-type]


def table(
    found: ModelRows, backend: Backend | None, progress: Progress | None = None
) -> dict[str, dict[str, Any]]:
    """Format -> figures on the rows, ready for JSON.

    An entry has "refused" (a sentence) or "key" and "value": each with "bits", "relative_mse" and
    "db" as means over the layers, "layers" one by one, and "dominated_by"; keys have
    "score_error" (nats, RMS over all layers) and "relative_score_error" beside it, by which keys
    are compared: row errors do not rank them. "conditioned_key" is the same for keys with their
    means and scales taken off and the first tokens kept exactly, as a conditioned cache with sinks
    holds them. A format that takes one side only has that side.
    """
    tell = progress or (lambda _: None)
    entries: dict[str, dict[str, Any]] = {}
    spreads = [centred_scores(x.rows.q, x.rows.k, x.scale, x.window, EVERY) for x in found.layers]
    conditioned = [_conditioned(x, found.kind) for x in found.layers]
    for f in all_formats():
        tell(f"formats: {f.name} on captured rows")
        entry: dict[str, Any] = {}
        for side in ("key", "value"):
            widths = {(x.rows.k if side == "key" else x.rows.v).shape[-1] for x in found.layers}
            reasons = [why for n in sorted(widths) if (why := f.refuses(n, side))]
            if reasons:
                entry.setdefault("refused", "; ".join(reasons))
                continue
            entry[side] = _side(f, found.layers, side, backend, spreads)
            if side == "key":
                entry["conditioned_key"] = _side(f, conditioned, side, backend, spreads, SINKS)
        if "key" in entry or "value" in entry:
            entry.pop("refused", None)
        entries[f.name] = entry
    ranks = {"key": "score_error", "conditioned_key": "score_error", "value": "relative_mse"}
    for side, error in ranks.items():
        points = {n: (e[side]["bits"], e[side][error]) for n, e in entries.items() if side in e}
        for name in points:
            entries[name][side]["dominated_by"] = dominators(name, points)
    return entries


def _conditioned(layer: CapturedLayer, kind: str) -> CapturedLayer:
    """The layer with its keys as a conditioned cache encodes them, and queries to match."""
    rows, condition = layer.rows, layer.condition
    means = means_of_rows(condition, kind, PAGE, rows.k, rows.positions)
    keys = ((rows.k - means) / condition.scale).astype(np.float32)
    group = rows.q.shape[1] // rows.k.shape[1]
    queries = rows.q * np.repeat(condition.scale, group, axis=0)
    return replace(layer, rows=replace(rows, q=queries, k=keys))


def _side(
    f: Format,
    layers: Sequence[CapturedLayer],
    side: str,
    backend: Backend | None,
    spreads: Sequence[float],
    exact: int = 0,
) -> dict[str, Any]:
    """Figures of one side; the first `exact` rows are kept as they are."""
    each = []
    for layer, spread in zip(layers, spreads, strict=True):
        x = layer.rows.k if side == "key" else layer.rows.v
        y = stored(f, x, backend, head_scale(f.name, x)).copy()
        y[:exact] = x[:exact]
        bits, error = f.bits(x.shape[-1]), relative_mse(x, y)
        one: dict[str, Any] = {"layer": layer.rows.index, "bits": bits, "relative_mse": error}
        if side == "key":
            nats = centred_scores(layer.rows.q, y - x, layer.scale, layer.window, EVERY)
            one |= {"score_error": nats, "relative_score_error": nats / spread if spread else 0.0}
        each.append(one)
    mean: dict[str, Any] = {k: float(np.mean([e[k] for e in each])) for k in each[0]}
    del mean["layer"]
    mean["db"] = above_bound(mean["relative_mse"], mean["bits"])
    for name in ("score_error", "relative_score_error"):
        if name in mean:
            mean[name] = float(np.sqrt(np.mean([e[name] ** 2 for e in each])))
    return mean | {"layers": each}
