"""What is done to keys before they are encoded, so that codes are not spent on offsets.

Keys have channels with large offsets and very different spreads (biases, slow rotary frequencies).
A conditioned key is (k - mean) / scale per channel: the query is multiplied by the scale, and what
the mean adds to a score, q . mean, is the same for all rows of a page. Nothing is lost but the
error of the codes, and no row gets longer.

The mean of a page is one of three kinds:

- "rope": the mean of keys *before* their rotary turn, from a calibration text, turned to the
  positions of the page and averaged over them. It is right at any depth.
- "previous": the mean of the keys of the page before, as they are stored. The first page has the
  mean of "rope", or without a calibration text its own first key.
- "static": the mean of keys as cached, the same everywhere. It fits the positions of the
  calibration text only.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvproof.errors import RequestError
from kvproof.files import replacing
from kvproof.geometry import index_ranges

if TYPE_CHECKING:
    from kvproof.engines.capture import LayerRows
    from kvproof.geometry import Geometry

KINDS = ("rope", "previous", "static")
# Tokens of a page. Shorter pages fit hardly better (docs/quality.md) and cost attention more; those
# of "previous" also hold a mean each, 16 / page bits per value of a key.
PAGE = 64
# The first tokens of a text have keys unlike all others: statistics leave them out, and conditioned
# caches should keep them in f16 (as many sinks), since means and scales do not fit them.
SINKS = 4
# Scales stay within this factor of a head's median: a channel that was silent in the calibration
# text gets no scale of 1e-30, and its first sound no code of its own.
SCALE_RANGE = 100.0
# Queries are multiplied by scales: beyond this, ordinary ones would leave float32.
LARGEST_SCALE = 1e9
FILE_VERSION = 1
MAX_FILE_BYTES = 1 << 28

_F16_MAX = 65504.0
_SHA256 = re.compile("([0-9a-f]{64})?")


def rope(
    x: NDArray[np.floating], positions: NDArray[np.integer], inv_freq: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Rotary embedding in float64: `x` `[n, heads, d]` turned to `positions` `[n]`.

    Channels j and j + m of the first 2 m, m = len(inv_freq), are a pair (halves layout); channels
    beyond them stay. Negative positions turn back.
    """
    m = len(inv_freq)
    angle = np.asarray(positions, np.float64)[:, None, None] * np.asarray(inv_freq, np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    out = np.array(x, np.float64)
    a, b = np.asarray(x[..., :m], np.float64), np.asarray(x[..., m : 2 * m], np.float64)
    out[..., :m] = a * cos - b * sin
    out[..., m : 2 * m] = a * sin + b * cos
    return out


@dataclass(frozen=True, eq=False)
class LayerCondition:
    """What is done to the keys of one layer.

    `mean` and `scale` float32 `[num_kv_heads, head_dim]`: the mean before the rotary turn ("rope",
    "previous") or as cached ("static"), and the divisor of every channel, from 1e-9 to 1e9.
    `inv_freq` float64 `[m]`: frequencies of the rotary pairs (j, j + m); empty where keys do not
    turn.
    """

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    inv_freq: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        mean, scale, turns = self.mean, self.scale, self.inv_freq
        if not all(isinstance(x, np.ndarray) for x in (mean, scale, turns)):
            raise RequestError("conditioner: mean, scale and inv_freq must be NumPy arrays")
        if mean.ndim != 2 or mean.shape != scale.shape or 0 in mean.shape:
            raise RequestError(
                f"conditioner: mean {mean.shape} and scale {scale.shape} must both be "
                "[num_kv_heads, head_dim]"
            )
        types: list[Any] = [x.dtype for x in (mean, scale, turns)]
        if types != [np.dtype(t) for t in (np.float32, np.float32, np.float64)]:
            raise RequestError(
                "conditioner: mean and scale must be float32 and inv_freq float64, not "
                f"{mean.dtype}, {scale.dtype}, {turns.dtype}"
            )
        if not np.isfinite(mean).all():
            raise RequestError("conditioner: means must be finite")
        if not ((scale >= 1 / LARGEST_SCALE) & (scale <= LARGEST_SCALE)).all():
            raise RequestError(
                f"conditioner: scales must be from {1 / LARGEST_SCALE:g} to {LARGEST_SCALE:g}"
            )
        if turns.ndim != 1 or 2 * len(turns) > mean.shape[1]:
            raise RequestError(
                f"conditioner: {turns.shape} frequencies do not fit a head_dim of {mean.shape[1]}"
            )
        if not (np.isfinite(turns) & (np.abs(turns) < math.pi)).all():
            raise RequestError("conditioner: a frequency is not within -pi and pi")

    def page_mean(self, kind: str, position: int, page: int) -> NDArray[np.float32]:
        """`[num_kv_heads, head_dim]`: the mean of the keys at `position` to `position + page - 1`,
        by `kind`."""
        if kind == "static" or not len(self.inv_freq):
            return as_half(self.mean)
        return turned(self.mean, *page_turn(self.inv_freq, position, page))


def page_turn(
    inv_freq: NDArray[np.float64], position: int, page: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin `[m]` of rotary turns, averaged over `position` to `position + page - 1`; values
    that float16 holds."""
    half = inv_freq / 2
    sine = np.sin(half)
    still = np.abs(sine) < 1e-12
    # The average of `page` turns by one step each is the middle one, shortened.
    short = np.where(still, 1.0, np.sin(page * half) / np.where(still, 1.0, page * sine))
    angle = (position + (page - 1) / 2) * inv_freq
    return as_half(short * np.cos(angle)), as_half(short * np.sin(angle))


def turned(
    mean: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Means `[..., d]` with the pairs (j, j + m) of their first 2 m channels turned by cos and sin
    `[..., m]`, in float32."""
    m = cos.shape[-1]
    a, b, rest = mean[..., :m], mean[..., m : 2 * m], mean[..., 2 * m :]
    out: NDArray[np.float32] = np.concatenate(
        np.broadcast_arrays(a * cos - b * sin, a * sin + b * cos), axis=-1
    )
    if rest.shape[-1]:
        rest = np.broadcast_to(rest, (*out.shape[:-1], rest.shape[-1]))
        out = np.concatenate([out, rest], axis=-1)
    return out


def as_half(x: NDArray[Any]) -> NDArray[np.float32]:
    """The nearest finite float16 values, as float32."""
    half: NDArray[np.float16] = np.clip(x, -_F16_MAX, _F16_MAX).astype(np.float16)
    return half.astype(np.float32)


@dataclass(frozen=True)
class Origin:
    """What a conditioner was made from and by; empty where that is not known."""

    model_sha256: str = ""
    text_sha256: str = ""
    made_by: str = ""

    def __post_init__(self) -> None:
        if not all(isinstance(x, str) for x in asdict(self).values()):
            raise RequestError("conditioner: its origin is not text")
        if not all(map(_SHA256.fullmatch, (self.model_sha256, self.text_sha256))):
            raise RequestError("conditioner: its origin has no SHA-256 of model or text")


@dataclass(frozen=True, eq=False)
class Conditioner:
    """What is done to the keys of a model: kind of mean, tokens of a page, and every layer that
    owns a cache. `tokens` of a text were read for it; 0: nothing was calibrated.
    """

    kind: str
    page: int
    layers: Mapping[int, LayerCondition] = field(repr=False)
    origin: Origin = Origin()
    tokens: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(
                f"conditioner: kind {str(self.kind)[:40]!r} is none of {', '.join(KINDS)}"
            )
        if type(self.page) is not int or not 1 <= self.page <= 1 << 20:
            raise RequestError(f"conditioner: page {self.page!r} is not from 1 to {1 << 20} tokens")
        if not self.layers:
            raise RequestError("conditioner: it has no layers")
        if not all(type(index) is int and index >= 0 for index in self.layers):
            raise RequestError("conditioner: layers are known by whole numbers from 0")
        if not all(isinstance(layer, LayerCondition) for layer in self.layers.values()):
            raise RequestError("conditioner: its layers must be LayerConditions")
        if not isinstance(self.origin, Origin):
            raise RequestError("conditioner: its origin must be an Origin")
        if type(self.tokens) is not int or self.tokens < 0:
            raise RequestError(f"conditioner: {self.tokens!r} tokens are no count")

    @classmethod
    def uncalibrated(cls, geometry: Geometry, page: int = PAGE) -> Conditioner:
        """Means of the page before and no scales: what needs no text."""
        layers = {}
        for layer in geometry.layers:
            if layer.shares_kv_with is None:
                shape = (layer.num_kv_heads, layer.head_dim_k)
                layers[layer.index] = LayerCondition(
                    np.zeros(shape, np.float32), np.ones(shape, np.float32)
                )
        return cls("previous", page, layers)

    def check(self, geometry: Geometry) -> None:
        """RequestError unless it has exactly the layers of `geometry`, in their shapes."""
        want = {
            layer.index: (layer.num_kv_heads, layer.head_dim_k)
            for layer in geometry.layers
            if layer.shares_kv_with is None
        }
        have = {index: layer.mean.shape for index, layer in self.layers.items()}
        wrong = sorted(i for i in want.keys() | have.keys() if want.get(i) != have.get(i))
        if wrong:
            i = wrong[0]
            raise RequestError(
                f"the conditioner was made for another model: layer {i} has KV heads x head_dim "
                f"{_shape(want.get(i))}, the conditioner {_shape(have.get(i))}; calibrate this "
                "model (kvproof calibrate)"
            )

    @property
    def digest(self) -> str:
        """SHA-256 over everything that it is."""
        digest = hashlib.sha256(json.dumps(self._about(), sort_keys=True).encode())
        for index in sorted(self.layers):
            for name, array in self._arrays(index).items():
                digest.update(f"{name} {array.shape}".encode())
                digest.update(array.tobytes())
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write it to one file, whole or not at all. RequestError as `check_target` raises it."""
        path = Path(path)
        self.check_target(path)
        members = {"about.json": json.dumps(self._about(), sort_keys=True).encode()}
        for index in sorted(self.layers):
            for name, array in self._arrays(index).items():
                raw = io.BytesIO()
                np.lib.format.write_array(raw, array, allow_pickle=False)
                members[f"{name}.npy"] = raw.getvalue()
        try:
            with replacing(path, 0o644) as file, zipfile.ZipFile(file, "w") as archive:
                for member, data in members.items():
                    # A fixed date: the same conditioner gives the same file.
                    archive.writestr(zipfile.ZipInfo(member), data)
        except (OSError, ValueError) as error:  # ValueError: no name of a file
            reason = getattr(error, "strerror", None) or error
            raise RequestError(f"{path}: cannot be written ({reason})") from error

    @classmethod
    def check_target(cls, path: Path) -> None:
        """RequestError unless `path` is free or holds a conditioner that a new one may replace."""
        if os.path.lexists(path):
            try:
                cls.load(path)
            except RequestError as error:
                raise RequestError(
                    f"{path}: exists and is no conditioner, so it is not overwritten; name another "
                    "file"
                ) from error
        if not os.path.isdir(path.parent):  # noqa: PTH112 (is_dir raises for a name too long)
            raise RequestError(f"{path}: the folder {path.parent} does not exist")

    @classmethod
    def load(
        cls,
        path: str | Path,
        geometry: Geometry | None = None,
        model_sha256: str | None = None,
    ) -> Conditioner:
        """Read what `save` wrote. RequestError if it is anything else, or made for another model
        than the one with `geometry` and `model_sha256`."""
        path = Path(path)
        try:
            status = path.stat()
            # Devices and pipes have no size and may never end.
            if not stat.S_ISREG(status.st_mode):
                raise RequestError("is no file")
            if status.st_size > MAX_FILE_BYTES:
                raise RequestError("too large for a conditioner")
            with zipfile.ZipFile(path) as archive:
                found = cls._from_members(_members(archive))
        except OSError as error:
            raise RequestError(f"{path}: cannot be read ({error.strerror or error})") from error
        except RequestError as error:
            raise RequestError(f"{path}: {error}") from error
        except (
            Exception
        ) as error:  # readers of archives, headers and JSON raise errors of all kinds
            raise RequestError(
                f"{path}: not a conditioner of kvproof, or damaged; make one with kvproof calibrate"
            ) from error
        if geometry is not None:
            try:
                found.check(geometry)
            except RequestError as error:
                raise RequestError(f"{path}: {error}") from None
        made_for = found.origin.model_sha256
        if model_sha256 and made_for and made_for != model_sha256:
            raise RequestError(
                f"{path}: the conditioner was made for another model (SHA-256 "
                f"{made_for[:12]}, this one {model_sha256[:12]}); calibrate this model "
                "(kvproof calibrate)"
            )
        return found

    @classmethod
    def _from_members(cls, members: Mapping[str, bytes]) -> Conditioner:
        about = json.loads(members["about.json"])
        version = about.get("kvproof_conditioner")
        if type(version) is int and version > FILE_VERSION:
            raise RequestError(
                f"a conditioner of version {version}, this kvproof reads {FILE_VERSION}: update it"
            )
        if version != FILE_VERSION:
            raise ValueError("version")
        origin = Origin(**about["origin"])
        layers = {}
        for index in about["layers"]:
            arrays = [_array(members[f"{index}.{name}.npy"]) for name in _ARRAYS]
            layers[int(index)] = LayerCondition(*arrays)
        return cls(about["kind"], about["page"], layers, origin, about["tokens"])

    def _about(self) -> dict[str, Any]:
        return {
            "kvproof_conditioner": FILE_VERSION,
            "kind": self.kind,
            "page": self.page,
            "layers": sorted(self.layers),
            "tokens": self.tokens,
            "origin": asdict(self.origin),
        }

    def _arrays(self, index: int) -> dict[str, NDArray[Any]]:
        layer = self.layers[index]
        return {f"{index}.{name}": np.ascontiguousarray(getattr(layer, name)) for name in _ARRAYS}


_ARRAYS = ("mean", "scale", "inv_freq")


def _members(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """Contents by name; ValueError beyond what a conditioner can take up unpacked."""
    infos = archive.infolist()
    # `save` compresses nothing, so damage cannot reach a decompressor.
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise ValueError("compressed")
    if sum(info.file_size for info in infos) > MAX_FILE_BYTES:
        raise ValueError("too large")
    return {info.filename: archive.read(info) for info in infos}


def _array(raw: bytes) -> NDArray[Any]:
    """The array in a .npy file whose header and size agree."""
    file = io.BytesIO(raw)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("version")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    rest = raw[file.tell() :]
    if fortran or dtype.hasobject or math.prod(shape) * dtype.itemsize != len(rest):
        raise ValueError("size")
    return np.frombuffer(rest, dtype).reshape(shape)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else " x ".join(map(str, shape))


class Calibration:
    """Gathers what a text says about a model's keys and queries, and makes a Conditioner of it.

    `add` takes windows of the text one by one. Keys are held until the end, in float32: means come
    first, and scales are those of what the means leave.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.tokens = 0
        self._layers = {
            layer.index: _LayerStatistics(layer.num_kv_heads)
            for layer in geometry.layers
            if layer.shares_kv_with is None
        }

    def add(self, window: Sequence[LayerRows]) -> None:
        """The rows of one window of text, of every layer of the model; its first tokens are left
        out."""
        for rows, layer in zip(window, self.geometry.layers, strict=True):
            if layer.shares_kv_with is None:
                self._layers[layer.index].add_keys(rows.k, rows.positions, rows.inv_freq)
                self._layers[layer.index].add_queries(rows.q)
            else:
                self._layers[layer.shares_kv_with].add_queries(rows.q)
        self.tokens += len(window[0].k)

    def conditioner(
        self,
        kind: str,
        page: int = PAGE,
        *,
        scaled: bool = True,
        origin: Origin | None = None,
    ) -> Conditioner:
        """Means of `kind` over `page` tokens, and scales (all 1 unless `scaled`).

        RequestError without a row to learn from, and for "rope" where keys of a layer turn by
        position in a way that is not known.
        """
        if kind == "rope":
            unknown = [i for i, layer in self._layers.items() if layer.inv_freq is None]
            if unknown:
                raise RequestError(
                    f"layer {index_ranges(unknown)}: keys turn by position in a way that kvproof "
                    "does not know; calibrate with --kind previous"
                )
        layers = {i: layer.condition(kind, page, scaled) for i, layer in self._layers.items()}
        return Conditioner(kind, page, layers, origin or Origin(), self.tokens)


class _LayerStatistics:
    """Keys of the layer that owns a cache, and sums of squares of all queries that read it."""

    def __init__(self, kv_heads: int) -> None:
        self.kv_heads = kv_heads
        self.inv_freq: NDArray[np.float64] | None = None
        self._windows: list[tuple[NDArray[np.float32], NDArray[np.int64]]] = []
        self._power: NDArray[np.float64] | None = None
        self._asked = 0

    def add_keys(
        self,
        k: NDArray[np.float32],
        positions: NDArray[np.int64],
        inv_freq: NDArray[np.float64] | None,
    ) -> None:
        self.inv_freq = inv_freq
        self._windows.append((k[SINKS:], positions[SINKS:]))

    def add_queries(self, q: NDArray[np.float32]) -> None:
        n, heads, dim = q[SINKS:].shape
        group = heads // self.kv_heads
        rows = q[SINKS:].reshape(n, self.kv_heads, group, dim).astype(np.float64)
        power: NDArray[np.float64] = np.square(rows).sum(axis=(0, 2))
        self._power = power if self._power is None else self._power + power
        self._asked += n * group

    def condition(self, kind: str, page: int, scaled: bool) -> LayerCondition:
        count = sum(len(k) for k, _ in self._windows)
        if not count or self._power is None:
            raise RequestError(f"the calibration text has no more than {SINKS} tokens a window")
        turns = np.empty(0) if self.inv_freq is None else self.inv_freq
        still = np.empty(0) if kind == "static" else turns
        total = sum(rope(k, -at, still).sum(axis=0) for k, at in self._windows)
        mean = np.asarray(total / count).astype(np.float32)
        condition = LayerCondition(mean, np.ones_like(mean), turns)
        if not scaled:
            return condition
        power = np.zeros(mean.shape)
        for k, at in self._windows:
            means = means_of_rows(condition, kind, page, k, at)
            power += np.square(k - means).sum(axis=0)
        return LayerCondition(mean, _scale(power / count, self._power / self._asked, turns), turns)


def means_of_rows(
    condition: LayerCondition, kind: str, page: int, k: NDArray[np.float32], at: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The mean that a cache of `kind` takes from every row of k, `[n, num_kv_heads, head_dim]` at
    the positions `at` `[n]`."""
    means = np.empty(k.shape)
    for first in range(0, len(k), page):
        own = slice(first, first + page)
        if kind == "previous" and first:
            means[own] = k[first - page : first].mean(axis=0, dtype=np.float64)
        else:
            means[own] = condition.page_mean(kind, int(at[first]), page)
    return means


def _scale(
    key_power: NDArray[np.float64], query_power: NDArray[np.float64], turns: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Divisor per channel `[num_kv_heads, head_dim]`: the square root of rms key over rms query.

    It makes the error of a score, sum of query power times key error, least for codes that spread
    their error evenly. Both channels of a rotary pair have one scale, so that it is as right for
    the positions that were not in the text; the median of a head is 1.
    """
    m = len(turns)
    for power in (key_power, query_power):
        pair = (power[:, :m] + power[:, m : 2 * m]) / 2
        power[:, :m], power[:, m : 2 * m] = pair, pair
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = (key_power / query_power) ** 0.25
    # 0 / 0: nothing is known of a channel that neither keys nor queries use.
    scale[np.isnan(scale)] = 1.0
    usable = np.where((scale > 0) & np.isfinite(scale), scale, np.nan)
    for head, row in enumerate(usable):
        middle = np.nanmedian(row) if np.isfinite(row).any() else 1.0
        scale[head] = np.clip(scale[head] / middle, 1 / SCALE_RANGE, SCALE_RANGE)
    return scale.astype(np.float32)
