"""The `Format` row: everything about a storage format, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvproof.errors import RequestError
from kvproof.rotation import Projection, Rotation

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Counters:
    """What an encode had to bend: scales (or elements) stored as the largest finite value, or as
    zero."""

    scale_saturated: int = 0
    scale_flushed: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.scale_saturated + other.scale_saturated, self.scale_flushed + other.scale_flushed
        )


@dataclass(frozen=True)
class Format:
    """A storage format.

    `encode_blocks(y)` takes finite float32 `[m, block]` in the stored (rotated) domain and returns
    uint8 `[m, bytes]` with Counters; with `plain_input` it takes the plain basis and rotates by
    itself, as formats do whose norm is taken before the rotation. `decode_blocks(b)` returns
    float64 `[m, stored_values(block)]` in the stored domain (not finite where a stored scale is
    not). For a whole-row format (`block_size` None) the block is the row.
    """

    name: str
    block_size: int | None
    block_bytes: int | None
    multiple: int
    sides: frozenset[str]
    encode_blocks: Callable[[Floats], tuple[Bytes, Counters]] = field(repr=False)
    decode_blocks: Callable[[Bytes], NDArray[np.float64]] = field(repr=False)
    spin: Rotation | Projection | None = field(default=None, repr=False)
    plain_input: bool = False
    ggml_type: int | None = None
    scaled: bool = False  # a float32 scale per KV head is held beside the cache
    bits_per_code: int | None = None  # whole-row formats: code bits, the unit not counted
    unit_bytes: int = 2  # whole-row formats: size of the unit that ends a row,
    start_bytes: int = 0  # and of the start of the path that stands before it (trellis formats)
    codebook: tuple[float, ...] | None = field(
        default=None, repr=False
    )  # values of the codes, ascending (tbq3_tcq: of the 512 states)
    codebook_digest: str | None = None  # where a codebook can be passed in
    projection_id: str | None = None  # where the stored domain is a projection
    source: str = ""

    @property
    def rotation(self) -> str:
        """Name of the domain that codes live in: "none", "r32", "head", ..."""
        return self.spin.name if self.spin else "none"

    @property
    def identity(self) -> str:
        """What must agree before stored rows are read: the name and, where the bytes do not say
        which was used, projection id and digest, as in "qjl1_256:ggml:0123456789abcdef"."""
        digest = self.spin.digest if isinstance(self.spin, Projection) else self.codebook_digest
        parts = (self.name, self.projection_id, digest and digest[:16])
        return ":".join(part for part in parts if part)

    def stored_values(self, n: int) -> int:
        """Values that a row of n values has in the stored domain (2n for a sketch of twice the
        width, else n)."""
        return self.spin.stored_values(n) if self.spin else n

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of n values; RequestError if the format does not take n."""
        reason = self._width_reason(n)
        if reason:
            raise RequestError(reason)
        if self.block_size is None:
            assert self.bits_per_code is not None
            return n * self.bits_per_code // 8 + self.start_bytes + self.unit_bytes
        assert self.block_bytes is not None
        return n // self.block_size * self.block_bytes

    def row_values(self, nbytes: int) -> int:
        """Values in a row of `nbytes` bytes (inverse of row_bytes); RequestError if no row has
        that size."""
        if self.block_size is None:
            assert self.bits_per_code is not None
            codes = nbytes - self.start_bytes - self.unit_bytes
            n = codes * 8 // self.bits_per_code
        else:
            assert self.block_bytes is not None
            n = nbytes // self.block_bytes * self.block_size
        if n <= 0 or self._width_reason(n) or self.row_bytes(n) != nbytes:
            raise RequestError(f"{self.name}: no row has {nbytes} bytes")
        return n

    def bits(self, head_dim: int) -> float:
        """Stored bits per value at a head_dim, every byte counted."""
        return self.row_bytes(head_dim) * 8 / head_dim

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value, every byte counted (whole-row formats: at head_dim 128)."""
        return self.bits(128)

    def refuses(self, head_dim: int, side: str) -> str | None:
        """Why this format cannot hold a row of head_dim values as "key", "value" or "weight"; None
        if it can."""
        if side not in self.sides:
            return f"{self.name}: not a {side} format (only {', '.join(sorted(self.sides))})"
        return self._width_reason(head_dim)

    def _width_reason(self, n: int) -> str | None:
        if n <= 0:
            return f"{self.name}: head_dim {n} is not positive"
        if n % self.multiple:
            return f"{self.name}: head_dim {n} is not a multiple of {self.multiple}"
        return None

    def encode(self, x: ArrayLike, scale: ArrayLike = 1.0) -> Bytes:
        """Encode float32 `[..., n]` to uint8 `[..., row_bytes(n)]`.

        `scale` (only for formats held with a scale per KV head) broadcasts to `x.shape[:-1]`.
        Raises RequestError for a width the format does not take or a NaN or infinity, naming the
        row.
        """
        return self.encode_counted(x, scale)[0]

    def encode_counted(self, x: ArrayLike, scale: ArrayLike = 1.0) -> tuple[Bytes, Counters]:
        """`encode`, and how many scales were saturated or flushed to zero."""
        values = as_float32(x, self.name)
        n = values.shape[-1]
        row_bytes = self.row_bytes(n)
        rows = values.reshape(-1, n)
        finite = np.isfinite(rows).all(axis=-1)
        if not finite.all():
            raise RequestError(f"{self.name}: row {int(np.argmin(finite))}: non-finite input")
        rows = self._scaled_rows(rows, scale, values.shape[:-1], divide=True)
        if self.spin and not self.plain_input:
            rows = self.spin.forward(tamed(rows.reshape(-1, self.block_size or n)).reshape(-1, n))
        if not len(rows):
            return np.empty((*values.shape[:-1], row_bytes), np.uint8), Counters()
        block = self.block_size or n
        encoded, counters = self.encode_blocks(np.ascontiguousarray(rows.reshape(-1, block)))
        return encoded.reshape(*values.shape[:-1], row_bytes), counters

    def decode(self, b: ArrayLike, scale: ArrayLike = 1.0) -> Floats:
        """Decode uint8 `[..., row_bytes]` to float32 `[..., n]` in the plain (un-rotated)
        basis."""
        rotated = self.decode_rotated(b, scale).astype(np.float32)
        # + 0 turns the -0.0 that signs and butterflies make of a zero row into +0.0.
        return self.spin.inverse(rotated) + np.float32(0) if self.spin else rotated

    def decode_rotated(self, b: ArrayLike, scale: ArrayLike = 1.0) -> NDArray[np.float64]:
        """Decode to float64 `[..., stored_values(n)]` in the stored domain: exactly code value
        times stored scale.

        Raises RequestError naming the row whose stored scale is NaN or infinite.
        """
        raw = np.asarray(b)
        if raw.dtype != np.uint8 or raw.ndim == 0:
            raise RequestError(f"{self.name}: blocks must be a uint8 array, not {raw.dtype}")
        n = self.row_values(raw.shape[-1])
        width = self.stored_values(n)
        if raw.size == 0:
            return np.empty((*raw.shape[:-1], width))
        block = self.block_size or n
        flat = np.ascontiguousarray(raw).reshape(-1, self.row_bytes(n) * block // n)
        with np.errstate(invalid="ignore"):  # 0 * inf; the row is refused just below
            out = self.decode_blocks(flat)
        bad = ~np.isfinite(out).all(axis=-1)
        if bad.any():
            row = int(np.argmax(bad)) * block // n
            raise RequestError(f"{self.name}: row {row}: stored scale or element is not finite")
        rows = out.reshape(-1, width)
        values: NDArray[np.float64] = self._scaled_rows(rows, scale, raw.shape[:-1], divide=False)
        return values.reshape(*raw.shape[:-1], width)

    def rotate(self, q: ArrayLike) -> Floats:
        """Bring float32 `[..., n]` (a query) into the stored domain, `[..., stored_values(n)]`."""
        x = np.asarray(q, np.float32)
        return self.spin.forward(x) if self.spin else x

    def unrotate(self, y: ArrayLike) -> Floats:
        """Bring float32 `[..., stored_values(n)]` (a sum of decoded values) back to the plain
        basis, `[..., n]`."""
        x = np.asarray(y, np.float32)
        return self.spin.inverse(x) if self.spin else x

    def _scaled_rows(self, rows: Any, scale: ArrayLike, lead: tuple[int, ...], divide: bool) -> Any:
        factor = scales(scale, self.name)
        if not self.scaled:
            if factor.size != 1 or float(factor.reshape(-1)[0]) != 1.0:
                raise RequestError(f"{self.name}: takes no scale (its scales are in its blocks)")
            return rows
        if not (np.isfinite(factor).all() and (factor > 0).all()):
            raise RequestError(f"{self.name}: scales must be finite and positive")
        try:
            column = np.broadcast_to(factor, lead).reshape(-1, 1)
        except ValueError:
            raise RequestError(
                f"{self.name}: scale of shape {factor.shape} does not fit rows of shape {lead}"
            ) from None
        if divide:
            return (rows / column).astype(np.float32)
        return rows * column.astype(rows.dtype)


def tamed(rows: Floats) -> Floats:
    """Rows beyond 2^40 brought to 2^35..2^36 by a power of two: no sum of squares overflows.

    Their scale saturates all the same and codes do not depend on it, so the result is the same.
    """
    top = np.abs(rows).max(axis=-1, keepdims=True, initial=0)
    exponent = np.frexp(top)[1]
    down = np.ldexp(np.float32(1), np.minimum(36 - exponent, 0)).astype(np.float32)
    return np.where(top > np.float32(2.0**40), rows * down, rows)


def as_float32(x: ArrayLike, what: str) -> Floats:
    """Real numbers as a float32 array of at least one axis; RequestError names `what`
    otherwise."""
    try:
        values = np.asarray(x.detach() if hasattr(x, "detach") else x)
    except (TypeError, ValueError) as error:  # ragged lists, bfloat16, tensors of another device
        raise RequestError(f"{what}: needs an array of real numbers: {error}") from error
    if values.ndim == 0 or values.dtype.kind not in "fiu":
        raise RequestError(
            f"{what}: needs an array of real numbers, got {values.dtype} {values.shape}"
        )
    with np.errstate(
        over="ignore"
    ):  # a float64 that overflows becomes infinite and is then refused
        return np.ascontiguousarray(values, dtype=np.float32)


def scales(x: ArrayLike, what: str) -> Floats:
    """A scale or an array of them as float32 of any shape; RequestError names `what` if it is
    none."""
    try:
        values = np.asarray(x.detach() if hasattr(x, "detach") else x)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{what}: scale needs real numbers: {error}") from error
    return as_float32(np.atleast_1d(values), f"{what}: scale").reshape(values.shape)


def store_fp16(scale: Floats) -> tuple[NDArray[np.float16], int, int]:
    """Round scales to fp16: (stored, how many saturated at 65504, how many non-zero became
    zero)."""
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
    over = np.isinf(half)
    half = np.where(over, np.copysign(np.float16(65504), half), half).astype(np.float16)
    flushed = (half == 0) & (scale != 0)
    return half, int(over.sum()), int(flushed.sum())


def store_bf16(scale: Floats) -> tuple[NDArray[np.uint16], int, int]:
    """Round to bf16, ties to even: (bits, how many saturated at the largest finite bf16, how many
    non-zero became zero)."""
    bits = scale.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    over = (rounded & 0x7FFF) >= 0x7F80
    stored = np.where(over, (rounded & 0x8000) | 0x7F7F, rounded).astype(np.uint16)
    flushed = (stored & 0x7FFF == 0) & (scale != 0)
    return stored, int(over.sum()), int(flushed.sum())


def load_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Values of bf16 bit patterns, in float64."""
    with np.errstate(invalid="ignore"):  # a signalling NaN among them becomes a quiet one
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def reciprocal(scale: Floats) -> Floats:
    """Float32 1/scale, and 0 where that is not finite (zero and subnormal scales)."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0)).astype(np.float32)


def cuts_below(codebook: tuple[float, ...]) -> Floats:
    """Decision boundaries of the nearest-entry rule as float32, so code = number of cuts < z.

    A midpoint that float32 cannot hold is rounded down, which leaves `z > cut` unchanged for every
    float32 z; a z exactly on a midpoint goes to the lower index.
    """
    book = np.asarray(codebook, np.float32).astype(np.float64)
    exact = (book[1:] + book[:-1]) / 2
    single = exact.astype(np.float32)
    too_high = single.astype(np.float64) > exact
    return np.where(too_high, np.nextafter(single, np.float32(-np.inf)), single).astype(np.float32)


def nearest_code(z: Floats, cuts: Floats) -> NDArray[np.uint8]:
    """Index of the nearest codebook entry of float32 z (any shape); exact ties go to the lower
    index."""
    return np.searchsorted(cuts, z, side="left").astype(np.uint8)


def pack_nibbles(codes: NDArray[np.uint8]) -> Bytes:
    """4-bit codes `[m, n]` to bytes `[m, n / 2]`: byte j holds element j low and j + n/2 high."""
    half = codes.shape[-1] // 2
    return (codes[:, :half] | codes[:, half:] << 4).astype(np.uint8)


def unpack_nibbles(packed: Bytes) -> NDArray[np.uint8]:
    """Inverse of pack_nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)
