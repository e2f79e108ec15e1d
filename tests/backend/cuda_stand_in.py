"""A CUDA device out of NumPy: it reads the argument of every launch from memory, as a kernel does,
and says what the sources say (pack.cu, plain.cu, attention.cu) by the statements that they are held
to. With it the host's side of the CUDA backend runs where there is no device."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch

from kvproof.backends import cuda, tiles
from kvproof.backends.cuda import codes, device, launch, layout
from kvproof.errors import RequestError
from kvproof.formats import all_formats


def array(pointer, dtype, shape, strides=None):
    """Memory behind a pointer of a launch."""
    dtype = np.dtype(dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides or _strides(shape), strict=True))
    raw = (ctypes.c_uint8 * (max(extent, 0) * dtype.itemsize)).from_address(pointer)
    flat = np.frombuffer(raw, dtype)
    return np.lib.stride_tricks.as_strided(
        flat, shape, [s * dtype.itemsize for s in strides or _strides(shape)]
    )


def _strides(shape):
    out, step = [], 1
    for n in reversed(shape):
        out.insert(0, step)
        step *= n
    return out


class Kernel:
    """`program.Kernel` without a driver."""

    formats = tuple(f for f in all_formats() if codes.known(f))

    def __init__(self, name, entry, macros, threads, shared):
        self.run = getattr(self, f"{name.removesuffix('.cu')}_{entry}")
        self.macros, self.threads, self.shared = macros, threads, shared
        self.blocks_at_once = 1
        self.launches = 0

    def __call__(self, grid, stream, argument):
        assert min(grid) > 0 and grid[1] <= 65535 and grid[2] <= 65535
        self.launches += 1
        self.run(grid, argument)

    def pack_check(self, grid, g):
        assert grid[0] * self.threads >= g.n * g.heads
        rows = array(g.rows, np.uint8, (g.n, g.heads, g.row_bytes), (g.of_token, g.of_head, 1))
        places = array(g.scales, np.int32, (g.n_scales,))
        bad = ((rows[..., places + 1] & 0x7C) == 0x7C).any(axis=-1).reshape(-1)
        if bad.any():
            array(g.bad, np.int32, (1,))[0] = np.argmax(bad)

    def pack_pack(self, grid, g):
        words = tiles.TOKENS * g.row_bytes // 4
        assert grid[0] * self.threads >= words and grid[2] == g.heads
        assert grid[1] == -(-(g.at % 64 + g.n) // 64)
        if array(g.bad, np.int32, (1,))[0] != cuda.NONE:
            return
        table = array(g.table, np.int32, (32, words))
        rows = array(g.rows, np.uint8, (g.n, g.heads, g.row_bytes), (g.of_token, g.of_head, 1))
        bits = np.unpackbits(rows, axis=-1, bitorder="little")
        for tile in range(g.at // 64, g.at // 64 + grid[1]):
            for head in range(g.heads):
                at = g.buffer + head * g.of_heads + tile * 64 * g.row_bytes
                held = array(at, np.uint8, (64 * g.row_bytes,))
                row, bit = (table >> 16) - (g.at - tile * 64), table & 0xFFFF
                ours = (row >= 0) & (row < g.n)
                new = np.unpackbits(held, bitorder="little").reshape(words, 32).T
                new[ours] = bits[row[ours], head, bit[ours]]
                held[:] = np.packbits(new.T.reshape(-1), bitorder="little")

    def pack_unpack(self, grid, g):
        assert grid[0] * self.threads >= g.n * g.heads * g.row_bytes
        table = array(g.table, np.int32, (64, 8, g.row_bytes))
        rows = array(g.rows, np.uint8, (g.n, g.heads, g.row_bytes))
        for i in range(g.n):
            slot = g.at + i
            for head in range(g.heads):
                at = g.buffer + head * g.of_heads + slot // 64 * 64 * g.row_bytes
                held = np.unpackbits(array(at, np.uint8, (64 * g.row_bytes,)), bitorder="little")
                rows[i, head] = np.packbits(held[table[slot % 64]].T, bitorder="little")

    def plain_scores(self, grid, g):
        q = array(g.q, np.float32, (g.n_q, g.heads, g.dim_k)).astype(np.float64)
        k = array(g.k, np.float32, (g.n_kv, g.kv_heads, g.dim_k)).astype(np.float64)
        assert grid[0] * 8 >= g.n_q * g.heads * g.n_kv
        out = array(g.out, np.float32, (g.n_q, g.heads, g.n_kv))
        out[:] = np.einsum("qhd,thd->qht", q, np.repeat(k, g.heads // g.kv_heads, axis=1))

    def plain_attend(self, grid, g):
        assert grid[0] == g.n_q * g.heads
        q = array(g.q, np.float32, (g.n_q, g.heads, g.dim_k))
        k = array(g.k, np.float32, (g.n_kv, g.kv_heads, g.dim_k))
        v = array(g.v, np.float32, (g.n_kv, g.kv_heads, g.dim_v))
        seen = [array(p, np.int32, (g.n_q,)) for p in (g.first, g.end)]
        self.softmax(g, q, k, v, seen, g.heads // g.kv_heads, g.scale)

    def attention_attend(self, grid, g):
        m = self.macros
        heads = g.kv_heads * g.group
        blocks = -(-g.group // m["HEADS"])
        n_q = grid[1] // (g.kv_heads * blocks)
        assert grid[0] == g.splits and n_q * g.kv_heads * blocks == grid[1]
        assert self.threads == 32 * m["TEAM"] * m["TEAMS"]
        assert not array(g.arrived, np.int32, (grid[1],)).any()
        if g.splits > 1:
            array(g.parts, np.float32, (grid[1], g.splits, m["HEADS"], m["DIM_V"] + 2))[:] = np.nan
        seen = [array(p, np.int32, (n_q,)) if p else np.full(n_q, value, np.int32)
                for p, value in ((g.first, g.start), (g.end, g.length))]  # fmt: skip
        end = int(seen[1].max())
        sides = zip((g.k, g.v), tiles.SIDES, strict=True)
        rows = [self.rows_of(side, name, g.kv_heads, end) for side, name in sides]
        q = array(g.q, np.float32, (n_q, heads, m["DIM_K"]))
        self.softmax(g, q, *rows, seen, g.group, g.factor / cuda._LOG2_E)

    def rows_of(self, side, name, heads, end):
        """Rows in the plain basis, of the format whose codes and signs these are."""
        letter = "K" if name == "key" else "V"
        dim = self.macros[f"DIM_{letter}"]
        for fmt in self.formats:
            c = codes.code(fmt, name)
            own = (c.bits, int(c.blocks), int(c.fine), c.rotation)
            theirs = tuple(self.macros[f"{k}_{letter}" if k == "ROTATE" else f"{letter}_{k}"]
                           for k in ("BITS", "BLOCKS", "FINE", "ROTATE"))  # fmt: skip
            same = bytes(c.table) == bytes(side.table) and bytes(c.fine_table) == bytes(side.fine)
            signs = fmt.spin and fmt.spin.signs(dim)
            if own != theirs or not same or (signs is None) != (side.signs is None):
                continue
            if signs is None or (array(side.signs, np.float32, (dim,)) == signs).all():
                break
        else:
            raise AssertionError(f"no format has the codes of these {name}s")
        size = 64 * fmt.row_bytes(dim)
        count = -(-end // 64)
        held = array(side.base, np.uint8, (heads, count, size), (side.of_head, size, 1))
        return fmt.decode(layout.unpack(fmt, name, held, 0, end))

    def softmax(self, g, q, k, v, span, group, scale):
        first, end = span
        n_q, heads = q.shape[:2]
        out = array(g.out, np.float32, (n_q, heads, v.shape[-1]))
        lse = array(g.lse, np.float32, (n_q, heads)) if g.lse else np.empty((n_q, heads))
        offsets = array(g.offsets, np.float32, (n_q, heads, g.n_pages)) if g.offsets else None
        for i in range(n_q):
            seen = np.arange(first[i], end[i])
            for h in range(heads):
                s = k[seen, h // group].astype(np.float64) @ q[i, h].astype(np.float64) * scale
                if offsets is not None:
                    s = s + offsets[i, h, (g.phase + seen) // g.page]
                top = s.max(initial=-np.inf)
                w = np.exp(s - top)
                total = w.sum()
                out[i, h] = w @ v[seen, h // group].astype(np.float64) / total if len(seen) else 0
                lse[i, h] = top + np.log(total) if len(seen) else -np.inf


def backend(monkeypatch, room=232448):
    """A CudaBackend on a device in the memory of the host, whose rows are made by NumPy."""
    monkeypatch.setattr(cuda.rows, "encode", _encode)
    monkeypatch.setattr(cuda.rows, "decode", _decode)
    return cuda.CudaBackend(Device(room=room))


def _encode(fmt, x):
    bad = torch.nonzero(~torch.isfinite(x).all(dim=-1))
    if len(bad):
        return None, int(bad[0]), 0, 0
    blocks, counters = fmt.encode_counted(x.float().numpy())
    return torch.tensor(blocks), -1, counters.scale_saturated, counters.scale_flushed


def _decode(fmt, blocks, dim):
    try:
        return torch.tensor(fmt.decode(blocks.numpy())), -1
    except RequestError as error:
        return None, int(str(error).split("row ")[1].split(":")[0])


class Device(device.Device):
    """A device in the memory of the host."""

    def __init__(self, index=0, capability=(9, 0), room=232448):
        self.torch, self.index, self.nvrtc = torch, index, "0"
        self.torch_device = torch.device("cpu")
        self.capability, self.architecture = capability, device.architecture(capability)
        self.processors, self.room, self.driver = 4, room, 13000
        self.properties = SimpleNamespace(name="stand-in", total_memory=1 << 30)
        self._kernels, self._tables, self._scratch, self._outgrown = {}, {}, {}, []

    def kernel(self, name, entry, macros, threads, shared=0):
        key = (name, entry, *macros.items())
        assert shared <= self.room - launch.KEPT
        if key not in self._kernels:
            self._kernels[key] = Kernel(name, entry, macros, threads, shared)
        return self._kernels[key]

    def current(self):
        return nullcontext()

    def memory(self):
        return 0, 1 << 30

    def stream(self):
        return 0

    def capturing(self):
        return False
