"""The CUDA backend. Without a device: its sources compile for every architecture, layout and tables
are what the sources read, and the host's side is held to the gate's rules on a stand-in for the
device. With one: the gate's cases, and tensors, streams and graphs."""

from __future__ import annotations

import cuda_stand_in
import numpy as np
import pytest

from kvproof import formats, rules
from kvproof.backends import cuda, get, tiles
from kvproof.backends.cuda import codes, launch, layout, program
from kvproof.cases import Case
from kvproof.errors import Refused, RequestError

torch = pytest.importorskip("torch")

KNOWN = [f for f in formats.all_formats() if codes.known(f)]
# Architecture -> shared memory that a block may ask for.
ROOMS = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90a": 232448, "sm_100": 232448}
# Key, value, dims, group, offsets: every number of bits, every rotation, every team of warps.
SHAPES = [
    ("tq4", "tq4", (128, 128), 4, False),
    ("tbq4_0", "tq3", (128, 128), 8, True),
    ("q8_0", "tq5", (256, 256), 7, False),
    ("tq2", "q4_0", (512, 512), 16, False),
    ("tq8", "tbq3_0", (96, 96), 1, True),
    ("q4_0_rot", "q8_0", (192, 160), 3, False),
]


@pytest.fixture
def be(monkeypatch):
    return cuda_stand_in.backend(monkeypatch)


@pytest.fixture(scope="module")
def gpu():
    try:
        return get("cuda")
    except Refused as refused:
        pytest.skip(str(refused))


@pytest.fixture(scope="module")
def nvrtc():
    try:
        return program.nvrtc_version()
    except Refused as refused:
        pytest.skip(str(refused))


# ---- without a device ----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ROOMS)
def test_sources_compile(nvrtc, architecture):
    for name in ("pack.cu", "plain.cu"):
        assert program.compiled(name, (), architecture)
    for key, value, dims, group, offsets in SHAPES:
        pair = formats.get(key), formats.get(value)
        found = launch.setting(*pair, dims, group, offsets, ROOMS[architecture])
        assert found is not None, (key, value, dims)
        macros = tuple(sorted(found.macros.items()))
        assert program.compiled("attention.cu", macros, architecture)


def test_a_source_that_does_not_compile_says_where(nvrtc):
    with pytest.raises(Refused, match=r"^backend cuda: .* for sm_90a: attention.cu\(\d+\): error"):
        program.compiled("attention.cu", (), "sm_90a")


def test_without_a_device_the_reason_is_one_line():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(Refused, match=r"^backend cuda: .*; (install|check) ") as refused:
        cuda.CudaBackend()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("fmt", KNOWN, ids=lambda f: f.name)
@pytest.mark.parametrize("side", tiles.SIDES)
def test_every_bit_of_a_tile_is_one_bit_of_one_row(fmt, side):
    for n in (32, 64, 96, 256):
        slot, bit = layout.tile_bits(fmt, side, n)
        seen = np.zeros((tiles.TOKENS, 8 * fmt.row_bytes(n)), int)
        np.add.at(seen, (slot, bit), 1)
        assert (seen == 1).all()


@pytest.mark.parametrize("side", tiles.SIDES)
def test_tiles_hold_other_rows_than_those_written(side):
    fmt = formats.get("tq3")
    rng = np.random.default_rng(0)
    rows = fmt.encode(rng.standard_normal((150, 2, 64), dtype=np.float32))
    others = fmt.encode(rng.standard_normal((192, 2, 64), dtype=np.float32))
    buffer = np.zeros((2, 3, 64 * rows.shape[2]), np.uint8)
    layout.pack(fmt, side, others, buffer, 0)
    layout.pack(fmt, side, rows, buffer, 17)
    held = layout.unpack(fmt, side, buffer, 0, 192)
    assert (held[17:167] == rows).all()
    assert (held[:17] == others[:17]).all() and (held[167:] == others[167:]).all()


def permute(a, b, selector):
    """The instruction of that name: byte i of the result is the byte of (a, b) that nibble i names,
    or eight times its sign."""
    source = [a >> 8 * i & 255 for i in range(4)] + [b >> 8 * i & 255 for i in range(4)]
    out = []
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = source[nibble & 7]
        out.append(255 * (byte >> 7) if nibble & 8 else byte)
    return out


def xor(a, b):
    return [x ^ y for x, y in zip(a, b, strict=True)]


def words_of(bits, group, lane):
    """`Group::load`: words, and that of the fifth bits."""
    u32 = group.view("<u4")
    if bits == 8:
        first, second = lane * 4, 128 + lane * 4
        return [*u32[first : first + 4], *u32[second : second + 4]], 0
    if bits in (4, 5):
        return list(u32[lane * 4 : lane * 4 + 4]), int(u32[128 + lane]) if bits == 5 else 0
    if bits == 3:
        a, b, c = (int(u32[lane + 32 * i]) for i in range(3))
        top = (a >> 3 & 0x11111111) | (b >> 2 & 0x22222222) | (c >> 1 & 0x44444444)
        return [a & 0x77777777, b & 0x77777777, c & 0x77777777, top], 0
    return list(u32[lane * 2 : lane * 2 + 2]), 0


def entries(bits, table, words, fifth, u):
    """`Group::entries`: eight int8."""
    even, odd = list(table.even), list(table.odd)
    if bits == 8:
        return list(np.array(words[2 * u : 2 * u + 2], "<u4").view(np.int8))
    w = int(words[u if bits > 2 else u // 2])
    out = []
    for half in (w & 0xFFFF, w >> 16):
        inverse = half ^ 0xFFFF

        def nibbles(h, half=half, inverse=inverse):
            first = permute(even[2 * h], even[2 * h + 1], half)
            return xor(first, permute(odd[2 * h], odd[2 * h + 1], inverse))

        if bits == 4:
            out += nibbles(0)
        elif bits == 5:
            upper = fifth >> u >> 16 * (len(out) // 4) & 0xFFFF
            take = [upper >> 4 * i & 1 for i in range(4)]
            out += [b if t else a for a, b, t in zip(nibbles(0), nibbles(1), take, strict=True)]
        else:
            selector = half if bits == 3 else half >> u % 2 * 2 & 0x3333
            out += permute(even[0], even[1], selector)
    return list(np.array(out, np.uint8).view(np.int8))


def entries_of_any_sign(bits, table, words, fifth, u):
    """`Group::entries_of_any_sign`."""
    if bits != 4:
        return entries(bits, table, words, fifth, u)
    even, odd, w = list(table.even), list(table.odd), int(words[u])
    out = []
    for half in (w & 0xFFFF, w >> 16):
        low = half & 0x7777
        pairs = zip(permute(*even[:2], low), permute(*odd[:2], low), strict=True)
        out += [b if half >> 4 * i + 3 & 1 else a for i, (a, b) in enumerate(pairs)]
    return list(np.array(out, np.uint8).view(np.int8))


@pytest.mark.parametrize("fmt", KNOWN, ids=lambda f: f.name)
@pytest.mark.parametrize("side", tiles.SIDES)
def test_kernels_read_from_tiles_what_the_format_decodes(fmt, side):
    """Units of a tile as codes.cuh takes them apart, by the places and tables of the host."""
    n = 64
    rng = np.random.default_rng(1)
    rows = fmt.encode(rng.standard_normal((tiles.TOKENS, 1, n), dtype=np.float32))
    buffer = np.zeros((1, 1, tiles.TOKENS * rows.shape[2]), np.uint8)
    layout.pack(fmt, side, rows, buffer, 0)
    code = codes.code(fmt, side)
    stored = fmt.decode_rotated(rows)[:, 0]
    _, scale = tiles.split(fmt, rows)
    held = np.repeat(scale[:, 0].astype(np.float64), n // scale.shape[2], axis=1)
    token, dim = layout._items(side, n)
    size = 128 * code.bits
    bound = 0.51 / codes.PARTS[side] * code.scale if code.fine else 0.0
    for unit in range(len(token)):
        group = np.ascontiguousarray(buffer[0, 0, unit // 4 * size : (unit // 4 + 1) * size])
        for lane in (0, 5, 18, 31):
            words, fifth = words_of(code.bits, group, lane)
            got = np.array(entries(code.bits, code.table, words, fifth, unit % 4), float)
            if code.fine:
                rest = entries_of_any_sign(code.bits, code.fine_table, words, fifth, unit % 4)
                got += np.array(rest) / codes.PARTS[side]
            at = token[unit, lane], dim[unit, lane]
            wrong = np.abs(got * code.scale * held[at] - stored[at])
            assert wrong.max() <= 1e-12 + bound * np.abs(held).max()


def test_a_pair_of_both_signs_has_no_table():
    with pytest.raises(ValueError, match="pair of both signs"):
        codes.table(np.arange(-7, 9), 4)


def test_settings_fit_their_room():
    for key in KNOWN:
        for value in KNOWN:
            for n in (32, 64, 128, 224, 256, 320, 512):
                for group in (1, 4, 5, 8, 16):
                    found = launch.setting(key, value, (n, n), group, True, 232448)
                    assert found is not None and found.shared <= 232448 - launch.KEPT
                    two = launch.setting(key, value, (n, n), group, True, 232448, 2)
                    assert two is None or 2 * (two.shared + launch.KEPT) <= 232448
                    assert found.team * found.teams <= launch.WARPS
    assert launch.setting(KNOWN[0], KNOWN[0], (512, 512), 8, False, 8192) is None


@pytest.mark.parametrize("tasks", [1, 7, 132, 1000])
@pytest.mark.parametrize("count", [1, 2, 100, 16384])
def test_splits_fill_the_device_and_leave_no_part_without_tiles(tasks, count):
    parts = launch.splits(132, tasks, count, 12)
    assert 1 <= parts <= min(launch.SPLITS, count) and (parts == 1 or parts * tasks <= 132)


CASES = [
    Case("pack", "tq4", n_kv=70, num_kv_heads=2, head_dim=96),
    Case("pack", "tbq3_0", n_kv=70, num_kv_heads=2, head_dim=64),
    Case("encode", "tq4", n_kv=20, num_kv_heads=2),
    Case("encode", "fp8_e4m3", n_kv=20, num_kv_heads=2, inputs="heavy"),
    Case("decode", "fp8_e4m3", n_kv=20, num_kv_heads=2),
    Case("decode", "tbq4_0", n_kv=20, num_kv_heads=2),
    Case("scores", "tq4", n_kv=70, num_kv_heads=2, num_heads=4, n_q=3),
    Case("scores", "f16", n_kv=37, head_dim=80),
    *(
        Case("attention", f.name, f.name, n_kv=131, num_kv_heads=2, num_heads=8, head_dim=n)
        for f in KNOWN
        for n in (64, 256)
    ),
    Case("attention", "tq4", "tbq4_0", n_kv=700, num_kv_heads=2, num_heads=4, n_q=9, window=64),
    Case("attention", "q4_0_rot", "tq3", n_kv=700, num_kv_heads=2, num_heads=4, n_q=3, page=100,
         phase=250, window=512, lse=True),
    Case("attention", "tq4", "f16", n_kv=70, num_kv_heads=2, num_heads=4, n_q=3, page=7, lse=True),
    Case("attention", "fp8_e4m3", "bf16", n_kv=70, num_kv_heads=2, num_heads=4, n_q=3),
    Case("attention", "tq4", "q8_0", n_kv=70, num_kv_heads=3, num_heads=27, n_q=17, position=-5,
         lse=True),
    Case("attention", "tq5", "tq5", n_kv=70, num_kv_heads=1, num_heads=7, n_q=5, position=90,
         page=16, window=40, causal=False, lse=True),
    Case("attention", "tq4", "tq4", n_kv=2100, num_kv_heads=2, num_heads=8, inputs="ramp"),
    Case("attention", "tq3", "tq2", n_kv=517, num_kv_heads=2, num_heads=8, inputs="sharp"),
    Case("attention", "tq4", "tq4", head_dim=256, head_dim_v=128, num_heads=4, num_kv_heads=2,
         n_q=5, n_kv=33),
]  # fmt: skip
HOST_CASES = [c for c in CASES if c.n_kv <= 700]


def held_to_the_rules(case, backend):
    exam = rules.examine(case, backend)
    assert not exam.failed, "; ".join(f"{f.rule}: {f.text}" for f in exam.failed)
    assert exam.outputs == exam.expected > 0


@pytest.mark.parametrize("case", HOST_CASES, ids=str)
def test_the_hosts_side_on_a_stand_in(be, case):
    held_to_the_rules(case, be)


def test_a_device_with_little_memory_a_block_decodes_first(monkeypatch):
    small = cuda_stand_in.backend(monkeypatch, room=20000)
    held_to_the_rules(Case("attention", "tq4", "tq4", n_kv=70, num_heads=2, head_dim=256), small)


def sides(fmt="tq4", n=70, heads=2, width=64):
    f = formats.get(fmt)
    rng = np.random.default_rng(0)
    return [f.encode(rng.standard_normal((n, heads, width), dtype=np.float32)) for _ in "kv"]


def test_wrong_requests_say_what_and_launch_nothing(be):
    k, v = sides()
    q = np.zeros((1, 4, 64), np.float32)
    pair = {"key": "tq4", "value": "tq4"}
    launches = dict(be.device._kernels)

    def refused(match, *args, **given):
        with pytest.raises(RequestError, match=match) as error:
            be.attention(*args, **(pair | given))
        assert "\n" not in str(error.value)

    refused("head_dim 96, the keys 64", np.zeros((1, 4, 96), np.float32), k, v)
    refused("q has a NaN", np.full((1, 4, 64), np.nan, np.float32), k, v)
    refused("must agree in tokens", q, k, v[:-1])
    refused("no multiple of 2", q[:, :3], k, v)
    refused("uint8 array of encoded rows", q, k.astype(np.int16), v)
    refused("window 0", q, k, v, window=0)
    refused("scale nan", q, k, v, scale=float("nan"))
    refused("takes no scale", q, k, v, k_scale=2.0)
    refused("offsets need page", q, k, v, offsets=np.zeros((1, 4, 2), np.float32))
    refused("must both be tiles", q, tiles.Tiles(formats.get("tq4"), "key", buffer_of(k), 0, 70), v)
    assert be.device._kernels == launches


def buffer_of(rows):
    return np.zeros((rows.shape[1], 2, 64 * rows.shape[2]), np.uint8)


def test_slots_that_do_not_exist_leave_the_cache_as_it_was(be):
    fmt, (rows, _) = formats.get("tq4"), sides()
    buffer = buffer_of(rows)
    for at in (-1, 59, 2**40):
        with pytest.raises(RequestError, match="of 128: make the buffer larger"):
            be.pack(fmt, "key", rows, buffer, at)
    with pytest.raises(RequestError, match="not a whole number"):
        be.pack(fmt, "key", rows, buffer, 1.5)
    with pytest.raises(RequestError, match="side 'query'"):
        be.pack(fmt, "query", rows, buffer, 0)
    with pytest.raises(RequestError, match="make the buffer larger"):
        be.unpack(fmt, "key", buffer, 100, 29)
    buffer.flags.writeable = False
    with pytest.raises(RequestError, match="writable"):
        be.pack(fmt, "key", rows, buffer, 0)
    assert not buffer.any()


def test_buffers_that_kernels_cannot_copy_from_are_refused(be):
    fmt = formats.get("tq4")
    size = 64 * fmt.row_bytes(64)
    memory = torch.zeros(2 * 3 * size + 64, dtype=torch.uint8)
    base = -memory.data_ptr() % 16
    whole = memory[base : base + 6 * size].reshape(2, 3, size)
    assert be._aligned(whole, "buffer") is whole
    with pytest.raises(RequestError, match="multiple of 16 bytes"):
        be._aligned(memory[base + 2 : base + 2 + 6 * size].reshape(2, 3, size), "buffer")
    with pytest.raises(RequestError, match="one after the other"):
        be._aligned(whole[:, ::2], "buffer")


def test_one_array_takes_no_more_elements_than_kernels_count(be):
    q = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (2**20, 64, 64), (0, 0, 4))
    k, v = sides()
    with pytest.raises(RequestError, match="elements, more than 2147483647"):
        be.attention(q, k, v, key="tq4", value="tq4", position=0)


def test_arrays_of_the_host_and_of_a_device_do_not_mix(be):
    k, v = sides()
    q = torch.zeros(1, 4, 64, device="meta")
    with pytest.raises(RequestError, match="different devices: q on meta, keys on the host"):
        be.attention(q, k, v, key="tq4", value="tq4")


def test_a_full_device_is_one_line(be, monkeypatch):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(be.device, "empty", full)
    k, v = sides()
    with pytest.raises(RequestError, match="attention needs more memory than is left on stand-in"):
        be.attention(np.zeros((1, 4, 64), np.float32), k, v, key="tq4", value="tq4")


def test_scratch_is_kept_and_grows(be):
    floats, counters = be.device.scratch(10, 3)
    assert be.device.scratch(4, 2) == (floats, counters) and not counters.any()
    larger, _ = be.device.scratch(11, 1)
    assert len(larger) == 20 and be.device._outgrown == [(floats, counters)]


def test_kernel_names_and_refusals(be):
    assert be.kernel("attention", formats.get("tq4"), 128) == "attention_tq4_sm_90a"
    assert be.kernel("attention", formats.get("f16"), 128) == "attention_plain_f16_sm_90a"
    assert "no operation" in be.refuses("matmul", formats.get("f16"), 64)
    assert be.refuses("attention", formats.get("tq4"), 72) == formats.get("tq4").refuses(72, "key")
    assert "no encode kernel" in be.refuses("encode", formats.get("qjl1_256"), 128)
    assert len(be.digest()) == 64


# ---- on a device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gates_rules(gpu, case):
    held_to_the_rules(case, gpu)


def on(gpu, *arrays):
    return [torch.tensor(x, device=gpu.device.torch_device) for x in arrays]


def tiled(gpu, fmt, n, first=5, **shape):
    """(rows, tensors of tiles, Tiles) of both sides on the device."""
    rows = sides(fmt, n, **shape)
    f, views = formats.get(fmt), []
    for side, x in zip(tiles.SIDES, rows, strict=True):
        (x,) = on(gpu, x)
        count = -(-(first + n) // 64) + 1
        buffer = torch.zeros(
            (x.shape[1], count, 64 * x.shape[2]), dtype=torch.uint8, device=x.device
        )
        gpu.pack(f, side, x, buffer, first)
        views.append(tiles.Tiles(f, side, buffer, first, n))
    return rows, views


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_give_tensors(gpu, dtype):
    rows, (k, v) = tiled(gpu, "tq4", 300)
    q = torch.randn(2, 8, 64, device=k.buffer.device, dtype=getattr(torch, dtype))
    out = gpu.attention(q, k, v, key="tq4", value="tq4")
    assert out.device == q.device and out.dtype == torch.float32
    want = get("reference").attention(q.float().cpu().numpy(), *rows, key="tq4", value="tq4")
    assert rules.nmse(out.cpu().numpy(), want) < 1e-6
    back = gpu.unpack(formats.get("tq4"), "key", k.buffer, 5, 300)
    assert back.device == q.device and (back.cpu().numpy() == rows[0]).all()


def test_a_call_is_captured_and_replayed_with_other_numbers(gpu):
    fmt = formats.get("tq4")
    rows, (k, v) = tiled(gpu, "tq4", 3000)
    q = torch.randn(1, 8, 64, device=k.buffer.device)
    (new,) = on(gpu, rows[0][:1])

    def step():
        gpu.pack(fmt, "key", new, k.buffer, 5 + 1234)
        return gpu.attention(q, k, v, key="tq4", value="tq4", return_lse=True)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out, lse = step()
    for seed in range(3):
        torch.manual_seed(seed)
        q.copy_(torch.randn_like(q))
        new.copy_(torch.tensor(rows[1][seed : seed + 1]))
        graph.replay()
        torch.cuda.synchronize()
        want, want_lse = step()
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_steady_state_allocates_no_memory_of_the_device(gpu):
    _, (k, v) = tiled(gpu, "tq4", 3000)
    q = torch.randn(1, 8, 64, device=k.buffer.device)
    for _ in range(3):
        gpu.attention(q, k, v, key="tq4", value="tq4")
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    for _ in range(20):
        gpu.attention(q, k, v, key="tq4", value="tq4")
    assert torch.cuda.memory_stats()["segment.all.allocated"] == before


def test_two_streams_have_scratch_of_their_own(gpu):
    _, (k, v) = tiled(gpu, "tq4", 20000)
    q = torch.randn(1, 8, 64, device=k.buffer.device)
    want = gpu.attention(q, k, v, key="tq4", value="tq4")
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 2]):
            outs.append(gpu.attention(q, k, v, key="tq4", value="tq4"))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


def test_a_bad_row_leaves_a_cache_of_the_device_as_it_was(gpu):
    fmt, (rows, _) = formats.get("tq4"), sides()
    bad = rows.copy()
    bad[9, 1, -2:] = 0x00, 0x7C
    good, poisoned = on(gpu, rows, bad)
    buffer = torch.zeros((2, 2, 64 * rows.shape[2]), dtype=torch.uint8, device=good.device)
    gpu.pack(fmt, "value", good, buffer, 3)
    before = buffer.clone()
    with pytest.raises(RequestError, match="row 19 of the values"):
        gpu.pack(fmt, "value", poisoned, buffer, 3)
    unchecked = cuda.CudaBackend(gpu.device, check=False)
    unchecked.pack(fmt, "value", poisoned, buffer, 3)
    assert torch.equal(buffer, before)


def test_tensors_that_are_wrong_are_refused(gpu):
    _, (k, v) = tiled(gpu, "tq4", 100)
    q = torch.randn(1, 8, 64, device=k.buffer.device)
    pair = {"key": "tq4", "value": "tq4"}
    with pytest.raises(RequestError, match="needs float32, bfloat16 or float16"):
        gpu.attention(q.double(), k, v, **pair)
    with pytest.raises(RequestError, match="different devices"):
        gpu.attention(q.cpu(), k, v, **pair)
    q[0, 3, 7] = float("inf")
    with pytest.raises(RequestError, match="q has a NaN or infinity"):
        gpu.attention(q, k, v, **pair)


def test_random_shapes(gpu):
    """Pairs, dims, groups and lengths at random against the reference."""
    rng = np.random.default_rng(7)
    names = [f.name for f in KNOWN]
    for seed in range(40):
        key, value = rng.choice(names, 2)
        kv = int(rng.integers(1, 4))
        case = Case(
            "attention", str(key), str(value), head_dim=int(rng.choice((32, 64, 96, 128, 256))),
            head_dim_v=int(rng.choice((32, 64, 128, 160, 256, 512))), num_kv_heads=kv,
            num_heads=kv * int(rng.integers(1, 17)), n_kv=int(rng.integers(101, 900)),
            n_q=int(rng.integers(1, 6)), window=int(rng.integers(1, 900)), seed=seed,
        )  # fmt: skip
        held_to_the_rules(case, gpu)
