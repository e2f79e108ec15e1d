"""GGUF model files: a reader that trusts nothing in them, and an atomic writer.

The file is mapped, not read. Every length, count and offset is checked against the bytes that are
left before it is used; sizes are products of Python ints, which do not wrap. Arrays stay in the map
until asked for: the 262144 tokens of a Gemma header are walked once, to find where the next key
starts, and decoded only when someone wants text.

Layout (v2, v3, little-endian):
    "GGUF" u32 version, u64 tensors, u64 keys
    keys:     string name, u32 type, value       string: u64 length, UTF-8 bytes
    tensors:  string name, u32 dims, u64 sizes (fastest first), u32 type, u64 offset
    padding to general.alignment, then tensor data, each padded to the alignment
"""

from __future__ import annotations

import math
import mmap
import os
import reprlib
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self, overload

import numpy as np
from numpy.typing import NDArray

from kvproof.errors import RequestError
from kvproof.files import replacing

# ggml type number: (name, values per block, bytes per block).
TENSOR_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 40),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
}

_STRING, _ARRAY = 8, 9
_BOOL = 7
_SCALARS: Final[Mapping[int, np.dtype[Any]]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

# Far above any real model, and low enough that a hostile file is refused in well under a second.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_STRINGS = 1 << 22
MAX_STRING_BYTES = 1 << 24
MAX_NAME_BYTES = 64
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

Value = Any  # str, bool, int, float, a 1-D NumPy array (a view of the file) or a StringArray


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the file.

    `shape` is as stored: the fastest axis first, so a matrix [out, in] reads (in, out). `offset` is
    in bytes from the start of the file. For a type this table does not know, `type_name` is
    "type <number>" and `nbytes` is None.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    offset: int
    nbytes: int | None


class StringArray(Sequence[str]):
    """Strings in the file, decoded one by one when asked for. Raises RequestError if not UTF-8."""

    def __init__(self, where: str, buffer: mmap.mmap, starts: array[int], end: int) -> None:
        # starts[i] is the offset of the i-th length field; `end` is where the array ends.
        self._where = where
        self._buffer = buffer
        self._starts = starts
        self._end = end

    def __len__(self) -> int:
        return len(self._starts)

    def raw(self, index: int) -> bytes:
        """The bytes of string `index`."""
        start = self._starts[index]
        following = index + 1 if index >= 0 else index + 1 + len(self._starts)
        end = self._starts[following] if following < len(self._starts) else self._end
        return self._buffer[start + 8 : end]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._text(index, self.raw(index))

    def __iter__(self) -> Iterator[str]:
        # One slice per string and no bounds arithmetic: 262144 tokens in about 0.1 s.
        buffer = self._buffer
        ends = self._starts[1:]
        ends.append(self._end)
        for i, (start, end) in enumerate(zip(self._starts, ends, strict=True)):
            yield self._text(i, buffer[start + 8 : end])

    def _text(self, index: int, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise RequestError(
                f"{self._where}[{index}]: expected UTF-8, found byte 0x{raw[error.start]:02x} at "
                f"{error.start}"
            ) from error

    def tolist(self) -> list[str]:
        """All strings."""
        return list(self)

    def __repr__(self) -> str:
        return f"<{len(self)} strings>"


class GGUF:
    """A GGUF file, mapped read-only. Raises RequestError with one line if the file is not sound.

    `metadata` maps key -> value in file order; `tensors` maps name -> TensorInfo in file order.
    Views of arrays and tensor data keep the map alive after `close`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map: mmap.mmap | None = _map_file(self.path)
        self._buffer = self._map
        self._size = len(self._buffer)
        self._pos = 0
        self._strings = 0
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file as soon as no view of it is left."""
        # An explicit mmap.close() raises while NumPy views are exported; dropping our references
        # lets the last view unmap it.
        self._map = None
        del self._buffer

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of tensor `name`: uint8 [nbytes], a read-only view of the file."""
        info = self.tensors.get(name)
        if info is None:
            raise RequestError(f"{self.path}: no tensor {name!r}")
        if info.nbytes is None:
            raise RequestError(
                f"{self.path}: tensor {name!r}: expected a tensor type kvproof knows, found "
                f"{info.type_name}"
            )
        if self._map is None:
            raise RequestError(f"{self.path}: the file has been closed")
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)

    # Metadata of the kind that a reader needs; None if the key is absent, RequestError if it holds
    # something else. `metadata` itself has whatever the file says.

    def text(self, key: str) -> str | None:
        """A string."""
        value: str | None = self._checked(key, "a string", lambda v: isinstance(v, str))
        return value

    def flag(self, key: str) -> bool | None:
        """True or false."""
        value: bool | None = self._checked(key, "true or false", lambda v: type(v) is bool)
        return value

    def whole(self, key: str, low: int, high: int) -> int | None:
        """An integer in low..high."""
        value: int | None = self._checked(
            key,
            f"a whole number from {low} to {high}",
            lambda v: type(v) is int and low <= v <= high,
        )
        return value

    def positive(self, key: str) -> float | None:
        """A finite number above zero."""
        value = self._checked(
            key,
            "a positive number",
            lambda v: type(v) in (int, float) and 0 < v < math.inf,
        )
        return None if value is None else float(value)

    def strings(self, key: str) -> StringArray | None:
        """An array of strings."""
        value: StringArray | None = self._checked(
            key, "an array of strings", lambda v: isinstance(v, StringArray)
        )
        return value

    def numbers(self, key: str, count: int) -> NDArray[Any] | None:
        """An array of `count` numbers."""
        value: NDArray[Any] | None = self._checked(
            key,
            f"an array of {count} numbers",
            lambda v: isinstance(v, np.ndarray) and v.shape == (count,),
        )
        return value

    def _checked(self, key: str, expected: str, fits: Callable[[Any], bool]) -> Any:
        value = self.metadata.get(key)
        if value is not None and not fits(value):
            self._fail(key, expected, reprlib.repr(value))
        return value

    # --- parsing ----------------------------------------------------------------------------------

    def _fail(self, where: str, expected: str, found: object) -> NoReturn:
        raise RequestError(f"{self.path}: {where}: expected {expected}, found {found}")

    def _take(self, count: int, where: str) -> int:
        """Offset of the next `count` bytes, which are consumed; fails if they are not there."""
        start = self._pos
        if count > self._size - start:
            self._fail(
                where, f"{count} bytes at offset {start}", f"{self._size - start} (cut file?)"
            )
        self._pos = start + count
        return start

    def _u32(self, where: str) -> int:
        return int(struct.unpack_from("<I", self._buffer, self._take(4, where))[0])

    def _u64(self, where: str) -> int:
        return int(struct.unpack_from("<Q", self._buffer, self._take(8, where))[0])

    def _string(self, where: str, limit: int) -> str:
        length = self._u64(f"{where}: length")
        if length > limit:
            self._fail(where, f"at most {limit} bytes", length)
        start = self._take(length, where)
        raw = self._buffer[start : start + length]
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self._fail(where, "UTF-8", f"byte 0x{raw[error.start]:02x} at {error.start}")

    def _read(self) -> None:
        magic = self._buffer[: min(512, self._size)]
        if magic[:4] != b"GGUF":
            self._not_gguf(magic)
        self._pos = 4
        self.version = self._u32("version")
        if self.version not in (2, 3):
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            if swapped in (2, 3):
                self._fail(
                    "byte order",
                    "little-endian",
                    "a big-endian file (convert it with gguf-convert-endian)",
                )
            self._fail("version", "2 or 3", self.version)
        num_tensors = self._u64("tensor count")
        num_keys = self._u64("key count")
        # A key takes at least 13 bytes, a tensor at least 24.
        for what, count, least, most in (
            ("tensor count", num_tensors, 24, MAX_TENSORS),
            ("key count", num_keys, 13, MAX_KEYS),
        ):
            bound = min(most, (self._size - self._pos) // least)
            if count > bound:
                self._fail(what, f"at most {bound} in {self._size} bytes", count)
        self.metadata: dict[str, Value] = {}
        for i in range(num_keys):
            self._read_key(i)
        self.alignment = self._alignment()
        self.tensors: dict[str, TensorInfo] = {}
        for i in range(num_tensors):
            self._read_tensor(i)
        self.data_offset = _pad(self._pos, self.alignment)
        self.tensors = self._placed(self.tensors)

    def _not_gguf(self, start: bytes) -> NoReturn:
        self._fail("magic", "b'GGUF'", foreign_file(start) or repr(start[:4]))

    def _read_key(self, index: int) -> None:
        key = self._string(f"name of key {index}", 65535)
        where = f"key {key!r}"
        if key in self.metadata:
            self._fail(where, "one value", "a duplicate")
        kind = self._u32(f"{where}: type")
        if kind == _STRING:
            self.metadata[key] = self._string(where, MAX_STRING_BYTES)
        elif kind == _ARRAY:
            self.metadata[key] = self._array(where)
        elif kind in _SCALARS:
            self.metadata[key] = self._numbers(where, kind, 1)[0].item()
        else:
            self._fail(where, "a value type 0 to 12", kind)

    def _numbers(self, where: str, kind: int, count: int) -> NDArray[Any]:
        dtype = _SCALARS[kind]
        start = self._take(count * dtype.itemsize, where)
        if kind != _BOOL:
            return np.frombuffer(self._buffer, dtype, count, start)
        raw = np.frombuffer(self._buffer, np.uint8, count, start)
        if count and raw.max() > 1:
            self._fail(where, "booleans 0 or 1", int(raw.max()))
        return raw.view(np.bool_)

    def _array(self, where: str) -> NDArray[Any] | StringArray:
        kind = self._u32(f"{where}: element type")
        count = self._u64(f"{where}: length")
        if kind == _STRING:
            return self._string_array(where, count)
        if kind in _SCALARS:
            return self._numbers(where, kind, count)
        if kind == _ARRAY:
            self._fail(where, "an array of values", "an array of arrays")
        self._fail(where, "an element type 0 to 12", kind)

    def _string_array(self, where: str, count: int) -> StringArray:
        left = self._size - self._pos
        bound = min(left // 8, MAX_STRINGS - self._strings)
        if count > bound:
            self._fail(where, f"at most {bound} strings in {left} bytes", count)
        self._strings += count
        starts = array("Q")
        append = starts.append
        length_at = struct.Struct("<Q").unpack_from
        buffer, pos, last = self._buffer, self._pos, self._size - 8
        for _ in range(count):
            # Past `last` no length field fits; a length that leaves the file moves `pos` past it.
            if pos > last:
                break
            append(pos)
            pos += 8 + length_at(buffer, pos)[0]
        if len(starts) < count or pos > self._size:
            index = len(starts) - (pos > self._size)
            self._fail(
                f"{where}[{index}]", f"a string inside {self._size} bytes", "a cut or wrong length"
            )
        self._pos = pos
        return StringArray(f"{self.path}: {where}", buffer, starts, pos)

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 1 <= value <= 1 << 20 or value & (value - 1):
            self._fail("key 'general.alignment'", "a power of two up to 1048576", repr(value)[:40])
        return value

    def _read_tensor(self, index: int) -> None:
        name = self._string(f"name of tensor {index}", MAX_NAME_BYTES)
        where = f"tensor {name!r}"
        if name in self.tensors:
            self._fail(where, "one entry", "a duplicate")
        dims = self._u32(f"{where}: dimensions")
        if dims > MAX_DIMS:
            self._fail(f"{where}: dimensions", f"at most {MAX_DIMS}", dims)
        shape = tuple(self._u64(f"{where}: size of axis {axis}") for axis in range(dims))
        ggml_type = self._u32(f"{where}: type")
        offset = self._u64(f"{where}: offset")
        nbytes = _nbytes(shape, ggml_type)
        type_name = f"type {ggml_type}"
        if nbytes is not None:
            type_name, block, _ = TENSOR_TYPES[ggml_type]
            row = shape[0] if shape else 1
            if row % block:
                self._fail(f"{where}: rows of {type_name}", f"a multiple of {block}", row)
            if nbytes > self._size:
                self._fail(
                    f"{where}: shape {list(shape)}",
                    f"at most {self._size} bytes, the size of the file",
                    nbytes,
                )
        self.tensors[name] = TensorInfo(name, shape, ggml_type, type_name, offset, nbytes)

    def _placed(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors with file offsets, checked: aligned, inside the file, no overlap, no gap."""
        start = self.data_offset
        placed = {}
        for name, info in tensors.items():
            where = f"tensor {name!r}: offset"
            if info.offset % self.alignment:
                self._fail(where, f"a multiple of {self.alignment}", info.offset)
            end = start + info.offset + (info.nbytes or 0)
            if end > self._size:
                self._fail(
                    f"tensor {name!r}: data",
                    f"an end within {self._size} bytes",
                    f"{end} (cut file?)",
                )
            placed[name] = TensorInfo(
                name, info.shape, info.ggml_type, info.type_name, start + info.offset, info.nbytes
            )
        order = sorted(placed.values(), key=lambda t: (t.offset, t.nbytes or 0))
        if order and order[0].offset != start:
            self._fail(
                f"tensor {order[0].name!r}: offset", "0 for the first", order[0].offset - start
            )
        for before, after in pairwise(order):
            if before.nbytes is None:
                continue  # an unknown type: where its data ends is unknown too
            expected = _pad(before.offset + before.nbytes, self.alignment)
            if after.offset != expected:
                what = "an overlap" if after.offset < expected else "a gap"
                self._fail(
                    f"tensor {after.name!r}: offset",
                    f"{expected - start}, the end of {before.name!r}",
                    f"{after.offset - start} ({what})",
                )
        if order and order[-1].nbytes is not None:
            end = order[-1].offset + order[-1].nbytes
            if self._size > _pad(end, self.alignment):
                self._fail("end of file", f"{_pad(end, self.alignment)} bytes", self._size)
        return placed


def _nbytes(shape: tuple[int, ...], ggml_type: int) -> int | None:
    """Bytes of a tensor, None for an unknown type; a Python int, so a product cannot wrap."""
    if ggml_type not in TENSOR_TYPES:
        return None
    _, block, block_bytes = TENSOR_TYPES[ggml_type]
    return math.prod(shape) // block * block_bytes


def foreign_file(start: bytes) -> str | None:
    """What a file that is no model really is, from its first bytes; None if they do not tell."""
    head = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return "an HTML page (a download that needed a login, or a wrong address?)"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (run git lfs pull to get the real file)"
    if start[:4] == b"FUGG":
        return "a big-endian file (convert it with gguf-convert-endian)"
    if start[:2] == b"PK":
        return "a zip archive (a PyTorch checkpoint?)"
    if start[8:10] == b'{"':
        return "a safetensors file (give its folder, with config.json)"
    return None


def _map_file(path: Path) -> mmap.mmap:
    if path.is_dir():
        raise RequestError(f"{path}: expected a GGUF file, found a directory")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise RequestError(f"{path}: expected a GGUF file, found an empty file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise RequestError(f"{path}: no such file") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror or error}") from error


def _pad(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# --- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RawTensor:
    """Bytes of a tensor already in a ggml type; `shape` as stored, the fastest axis first."""

    shape: tuple[int, ...]
    ggml_type: int
    data: NDArray[np.uint8]


_NUMBER_TYPES: Final[Mapping[str, int]] = {d.str: number for number, d in _SCALARS.items()}
_FLOAT_TENSORS: Final[Mapping[str, int]] = {"<f4": 0, "<f2": 1, "<f8": 28}


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Value],
    tensors: Mapping[str, NDArray[Any] | RawTensor] | None = None,
) -> None:
    """Write a GGUF v3 file; it appears under `path` complete, or not at all.

    Python ints become u32 (i32 if negative, u64 or i64 if large), floats f32; NumPy values keep
    their dtype; lists become arrays. Tensors are f16, f32 or f64 arrays in NumPy order (slowest
    axis first) or RawTensor; one at a time is in flight. Raises RequestError if `path` cannot be
    written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise RequestError(f"{path.parent}: no such directory; create it first")
    if path.is_dir():
        raise RequestError(f"{path}: expected a file name to write, found a directory")
    raw = {name: _raw(tensor) for name, tensor in (tensors or {}).items()}
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    header = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(raw), len(metadata)))
    for key, value in metadata.items():
        header += _packed_string(key) + _packed_value(value)
    offset = 0
    for name, tensor in raw.items():
        expected = _nbytes(tensor.shape, tensor.ggml_type)
        if expected not in (None, tensor.data.nbytes):
            raise ValueError(
                f"tensor {name}: expected {expected} bytes, found {tensor.data.nbytes}"
            )
        header += _packed_string(name) + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.ggml_type, offset)
        offset = _pad(offset + tensor.data.nbytes, alignment)
    try:
        with replacing(path) as file:
            file.write(header)
            for tensor in raw.values():
                file.write(bytes(-file.tell() % alignment))
                file.write(np.ascontiguousarray(tensor.data).data)
            file.write(bytes(-file.tell() % alignment))
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror or error}") from error


def _raw(tensor: NDArray[Any] | RawTensor) -> RawTensor:
    if isinstance(tensor, RawTensor):
        return tensor
    ggml_type = _FLOAT_TENSORS[tensor.dtype.newbyteorder("<").str]
    flat = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).reshape(-1)
    return RawTensor(tensor.shape[::-1], ggml_type, flat.view(np.uint8))


def _packed_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _packed_value(value: Value) -> bytes:
    """Type number and bytes of one metadata value."""
    if isinstance(value, str | bytes):
        return struct.pack("<I", _STRING) + _packed_string(value)
    if isinstance(value, StringArray):
        value = [value.raw(i) for i in range(len(value))]
    if isinstance(value, list | tuple) and value and isinstance(value[0], str | bytes):
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        return head + b"".join(_packed_string(text) for text in value)
    numbers = np.asarray(value)
    if not isinstance(value, np.ndarray | np.generic):
        numbers = numbers.astype(_plain_dtype(numbers))
    numbers = numbers.astype(numbers.dtype.newbyteorder("<"))
    number = _NUMBER_TYPES[numbers.dtype.str]
    if numbers.ndim == 0:
        return struct.pack("<I", number) + numbers.tobytes()
    return struct.pack("<IIQ", _ARRAY, number, numbers.size) + numbers.tobytes()


def _plain_dtype(numbers: NDArray[Any]) -> np.dtype[Any]:
    """GGUF's usual type for plain Python numbers: bool, f32, else the first int type that fits."""
    if numbers.dtype.kind == "b":
        return numbers.dtype
    if numbers.dtype.kind == "f" and numbers.size:
        return np.dtype(np.float32)
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    for dtype in (np.uint32, np.int32, np.uint64):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    return np.dtype(np.int64)
