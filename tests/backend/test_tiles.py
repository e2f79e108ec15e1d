"""Cached rows in tiles: the statement of the layout, and the kernels that are held to it."""

import contextlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from kvproof import formats, gate, rules
from kvproof.backends import tiles
from kvproof.backends.reference import ReferenceBackend
from kvproof.cache import LayerCache
from kvproof.cases import Case
from kvproof.errors import Refused, RequestError
from kvproof.evidence import Outcome
from kvproof.formats import tcq
from kvproof.geometry import LayerGeometry
from kvproof.store import TileStore

try:
    from kvproof import _kernels
    from kvproof.backends.cpu import CpuBackend, isas
except (Refused, ImportError) as refused:
    pytest.skip(f"cpu backend: {refused}", allow_module_level=True)

CPU, REFERENCE = CpuBackend(), ReferenceBackend()
WIDTHS = (32, 64, 96, 128, 256, 576)
every = pytest.mark.parametrize("name", tiles.PLANES)
sides = pytest.mark.parametrize("side", tiles.SIDES)


def random_rows(fmt, n, heads, width, seed=0):
    """Rows of random bytes with finite scales: every code occurs."""
    rng = np.random.default_rng([seed, n, width])
    rows = rng.integers(0, 256, (n, heads, fmt.row_bytes(width)), dtype=np.uint8)
    if fmt.name in tcq.CODES:  # every byte names a unit
        return rows
    blocks = rows.reshape(n, heads, -1, fmt.block_bytes or rows.shape[-1])
    scale = rng.standard_normal(blocks.shape[:3]).astype(np.float16)[..., None].view(np.uint8)
    blocks[..., slice(-2, None) if fmt.block_size is None else slice(0, 2)] = scale
    return rows


def codes_of(fmt, rows):
    """Codes `[n, heads, width]` by asking the format what its rows mean; of a trellis those of its
    steps."""
    if fmt.name in tcq.CODES:
        code = tcq.CODES[fmt.name]
        m, u, _ = tcq.steps_of(code, rows.reshape(-1, rows.shape[-1]))
        return (m | u << code.bits - 1).reshape(*rows.shape[:2], -1)
    if fmt.name in ("tq8", "q8_0"):
        size = fmt.block_bytes or rows.shape[-1]
        blocks = rows.reshape(*rows.shape[:2], -1, size)
        at = slice(0, -2) if fmt.block_size is None else slice(2, None)
        return blocks[..., at].reshape(*rows.shape[:2], -1)
    ones = rows.copy()
    blocks = ones.reshape(*rows.shape[:2], -1, fmt.block_bytes or rows.shape[-1])
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    blocks[..., slice(-2, None) if fmt.block_size is None else slice(0, 2)] = one
    book = np.arange(-8, 8) if fmt.codebook is None else np.float32(fmt.codebook)
    return np.searchsorted(book.astype(np.float64), fmt.decode_rotated(ones)).astype(np.uint8)


def scales_of(fmt, rows):
    if fmt.name in tcq.CODES:
        return rows[..., -1:]
    blocks = rows.reshape(*rows.shape[:2], -1, fmt.block_bytes or rows.shape[-1])
    at = slice(-2, None) if fmt.block_size is None else slice(0, 2)
    return blocks[..., at].copy().view(np.uint16)[..., 0]


def dimension_of_step(side, width, step):
    """By the words of the docstring alone."""
    if side == "value":
        return next(16 * g + i for g in range(width // 16) for i in range(16)
                    if g + i * (width // 16) == step)  # fmt: skip
    start = step // 64 * 64
    n = min(64, width - start) // 4
    return start + next(
        4 * (8 * h + 4 * line + k) + j
        for j in range(4) for h in range(n // 8) for line in range(2) for k in range(4)
        if n * j + 8 * h + 2 * k + line == step - start
    )  # fmt: skip


def read_bit_by_bit(fmt, side, width, tile, t, d):
    """Code of token t and dimension (or step) d of a tile, by the words of the docstring alone."""
    planes = tiles.PLANES[fmt.name]
    trellis = fmt.name in tcq.CODES
    if trellis:
        d = dimension_of_step(side, width, d)
    code = low = 0
    for index, bits in enumerate(planes):
        rows_a_line = 8 // bits
        lines = {}
        at = 0  # walk the tile in order, counting bytes
        if side == "key":
            for block in range(0, width, 64):
                dims = min(64, width - block)
                for group in range(4):
                    for i, plane in enumerate(planes):
                        count = dims // 4 * plane // 8
                        if i == index:
                            lines[block // 64, group] = at
                        at += 64 * count
            row, byte = d % 64 // 4, 4 * (t % 16) + d % 4
            start = lines[d // 64, t // 16]
        else:
            for group in range(0, width, 16):
                for i, plane in enumerate(planes):
                    if i == index:
                        lines[group // 16] = at
                    at += 64 * 2 * plane
            j = next(j for j, far in enumerate((0, 32, 16, 48)) if far <= t < far + 16)
            row, byte = t % 16, 4 * (d % 16) + j
            start = lines[d // 16]
        held = tile[start + 64 * (row // rows_a_line) + byte]
        place = row % rows_a_line
        if trellis and bits == 1:
            line, k = place // 4, place % 4
            place = 2 * k + line if index == len(planes) - 1 else 4 * line + 2 * (k % 2) + k // 2
        code |= (int(held) >> bits * place & (1 << bits) - 1) << low
        low += bits
    return code


@every
@sides
@pytest.mark.parametrize("width", [64, 96, 160])
def test_the_statement_puts_every_code_and_scale_where_its_words_say(name, side, width):
    fmt = formats.get(name)
    rows = random_rows(fmt, 64, 1, width)
    buffer = np.zeros((1, 1, 64 * fmt.row_bytes(width)), np.uint8)
    tiles.pack(fmt, side, rows, buffer, 0)
    codes = codes_of(fmt, rows)[:, 0]
    assert len(np.unique(codes)) == 1 << sum(tiles.PLANES[name])
    rng = np.random.default_rng(1)
    for t, d in {*zip(rng.integers(0, 64, 300), rng.integers(0, width, 300), strict=True)}:
        assert read_bit_by_bit(fmt, side, width, buffer[0, 0], t, d) == codes[t, d], (t, d)
    held = buffer[0, 0, 8 * width * sum(tiles.PLANES[name]) :]
    scales = scales_of(fmt, rows)[:, 0]
    np.testing.assert_array_equal(held.view(scales.dtype).reshape(-1, 64).T, scales)


@every
@sides
@pytest.mark.parametrize("width", WIDTHS)
def test_kernels_keep_to_the_statement_and_to_their_buffer(name, side, width):
    """Partial tiles from any slot; written at once, by three threads, and row by row in any order;
    over tiles that were full of other rows."""
    fmt, n, heads, at = formats.get(name), 150, 3, 37
    rows, other = random_rows(fmt, n, heads, width), random_rows(fmt, 256, heads, width, seed=1)
    size = 64 * fmt.row_bytes(width)
    want = np.zeros((heads, 4, size), np.uint8)
    REFERENCE.pack(fmt, side, rows, want, at)
    memory = np.full((heads, 4 * size + 128), 0xA5, np.uint8)
    got = memory[:, 64:-64].reshape(heads, 4, size)
    assert np.shares_memory(got, memory)
    for order in (None, np.arange(n), np.random.default_rng(2).permutation(n)):
        got[:] = 0
        REFERENCE.pack(fmt, side, other, got, 0)
        if order is None:
            CPU.pack(fmt, side, rows, got, at)
        else:
            for t in order:
                CPU.pack(fmt, side, rows[t : t + 1], got, at + t)
        np.testing.assert_array_equal(CPU.unpack(fmt, side, got, at, n), rows)
        np.testing.assert_array_equal(CPU.unpack(fmt, side, got, 0, at), other[:at])
        np.testing.assert_array_equal(CPU.unpack(fmt, side, got, at + n, 256 - at - n),
                                      other[at + n :])  # fmt: skip
        np.testing.assert_array_equal(REFERENCE.unpack(fmt, side, got, at + 5, 90), rows[5:95])
    got[:] = 0
    assert _kernels.pack(3, name, side, rows, got, at) == -1
    np.testing.assert_array_equal(got, want)
    assert (memory[:, :64] == 0xA5).all() and (memory[:, -64:] == 0xA5).all()
    assert _kernels.tile_bytes(name, width) == size


@every
@sides
def test_rows_are_read_and_written_through_their_strides(name, side):
    fmt, width = formats.get(name), 96
    rows = random_rows(fmt, 70, 2, width)
    head_major = rows.transpose(1, 0, 2).copy().transpose(1, 0, 2)
    wide = np.zeros((70, 2, rows.shape[2] + 7), np.uint8)
    wide[..., 3:-4] = rows
    buffers = []
    for given in (rows, head_major, wide[..., 3:-4], np.asfortranarray(rows)):
        buffers.append(np.zeros((2, 2, 64 * rows.shape[2]), np.uint8))
        CPU.pack(fmt, side, given, buffers[-1], 20)
        np.testing.assert_array_equal(buffers[-1], buffers[0])
    wide[:] = 9
    _kernels.unpack(2, name, side, buffers[0], 20, wide[..., 3:-4])
    np.testing.assert_array_equal(wide[..., 3:-4], rows)
    assert (wide[..., :3] == 9).all() and (wide[..., -4:] == 9).all()


@pytest.mark.parametrize("name", [name for name in tiles.PLANES if name not in tcq.CODES])
@pytest.mark.parametrize("backend", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_a_scale_that_is_not_finite_is_refused_before_anything_is_written(name, backend):
    fmt, width = formats.get(name), 64
    buffer = np.zeros((2, 2, 64 * fmt.row_bytes(width)), np.uint8)
    for bad in (b"\x00\x7c", b"\x00\xfc", b"\x01\x7e"):
        rows = random_rows(fmt, 80, 2, width)
        for row, block in ((3, -1), (131, 0)):
            blocks = rows.reshape(160, -1, fmt.block_bytes or rows.shape[-1])
            at = slice(-2, None) if fmt.block_size is None else slice(0, 2)
            blocks[row, block, at] = np.frombuffer(bad, np.uint8)
        with pytest.raises(RequestError, match="row 3 of the values: stored scale is not finite"):
            backend.pack(fmt, "value", rows, buffer, 10)
        with pytest.raises(RequestError, match="row 1 of the keys"):
            backend.pack(fmt, "key", rows[1:2], buffer, 10)
        assert not buffer.any()


@pytest.mark.parametrize("backend", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_what_does_not_fit_is_refused_in_one_line(backend):
    tq4, size = formats.get("tq4"), 64 * 34
    rows, buffer = random_rows(tq4, 3, 2, 64), np.zeros((2, 2, size), np.uint8)
    for fmt, side, given, tile, at, message in (
        (tq4, "key", rows, buffer, 126, "slots 126 to 129 of 128: make the buffer larger"),
        (tq4, "key", rows, buffer, -1, "slots -1 to 2"),
        (tq4, "weight", rows, buffer, 0, "side 'weight' is none of key, value"),
        (tq4, "key", rows[:, :1], buffer, 0, r"rows \(3, 1, 34\) do not fit a buffer"),
        (tq4, "key", rows, buffer[..., :-1], 0, "do not fit a buffer"),
        (tq4, "key", rows[0], buffer, 0, "must be uint8 of three axes"),
        (tq4, "key", rows, buffer.astype(np.int8), 0, "must be uint8 of three axes, got int8"),
        (tq4, "key", rows[..., :33], buffer, 0, "no row has 33 bytes"),
        (formats.get("f16"), "key", np.zeros((1, 1, 128), np.uint8),
         np.zeros((1, 1, 8192), np.uint8), 0, "f16: head_dim 64 is not held in tiles"),
        (tq4, "key", random_rows(tq4, 1, 1, 80), np.zeros((1, 1, 64 * 42), np.uint8), 0,
         "head_dim 80 is not held in tiles"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message) as error:
            backend.pack(fmt, side, given, tile, at)
        assert "\n" not in str(error.value)
    assert not buffer.any()
    with pytest.raises(RequestError, match="slots 100 to 130 of 128"):
        backend.unpack(tq4, "key", buffer, 100, 30)
    with pytest.raises(RequestError, match="-1 rows of a buffer"):
        backend.unpack(tq4, "key", buffer, 100, -1)
    with pytest.raises(RequestError, match="rows 100 to 130 of 128 do not exist"):
        tiles.Tiles(tq4, "key", buffer, 100, 30)
    with pytest.raises(RequestError, match="buffer must be uint8 of three axes"):
        tiles.Tiles(tq4, "key", buffer[0], 0, 3)
    q, wide = np.ones((1, 2, 80), np.float32), np.zeros((2, 1, 64 * 42), np.uint8)
    sides = [tiles.Tiles(tq4, side, wide, 0, 3) for side in tiles.SIDES]
    with pytest.raises(RequestError, match="head_dim 80 is not held in tiles"):
        backend.attention(q, *sides, key=tq4, value=tq4)
    sides = [tiles.Tiles(tq4, side, buffer, 3, 5)[1:3] for side in tiles.SIDES]
    assert [(s.first, len(s)) for s in sides] == [(4, 2), (4, 2)]
    with pytest.raises(RequestError, match="steps of 1, not 2"):
        sides[0][::2]


@pytest.mark.parametrize("backend", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_no_rows_fit_anywhere(backend):
    tq4 = formats.get("tq4")
    none = np.empty((0, 2, 34), np.uint8)
    for count, at in ((0, 0), (1, 0), (1, 64)):
        buffer = np.zeros((2, count, 64 * 34), np.uint8)
        backend.pack(tq4, "key", none, buffer, at)
        assert backend.unpack(tq4, "key", buffer, at, 0).shape == (0, 2, 34)


def test_only_pairs_that_have_tiles_on_both_sides_are_arranged():
    for backend in (CpuBackend(tiles=True), ReferenceBackend(tiles=True)):
        f16, tq4, tq3, tcq2 = (formats.get(n) for n in ("f16", "tq4", "tq3", "tcq2"))
        assert backend.arranges(tq4, tq3, 128, 64)
        assert backend.arranges(formats.get("tcq4"), tq3, 128, 64)
        assert not backend.arranges(tq4, f16, 128, 128)
        assert not backend.arranges(tcq2, tq4, 128, 128)
        assert not backend.arranges(tq4, tq4, 80, 64) and not backend.arranges(tq4, tq4, 64, 80)
        assert not backend.arranges(tq4, tq4, 2048, 64)
    assert not CpuBackend(tiles=False).arranges(tq4, tq4, 128, 128)
    assert not ReferenceBackend().arranges(tq4, tq4, 128, 128)


def test_both_tables_name_the_same_formats_with_as_many_bits():
    for name, planes in tiles.PLANES.items():
        fmt = formats.get(name)
        scales = fmt.unit_bytes * (128 // (fmt.block_size or 128))
        assert fmt.row_bytes(128) == 128 * sum(planes) // 8 + scales
        entries = 1 << sum(planes) + (name in tcq.CODES)
        assert fmt.codebook is None or len(fmt.codebook) == entries
    for name in _kernels.FORMATS:
        assert (_kernels.tile_bytes(name, 128) > 0) == (name in tiles.PLANES), name


def test_taps_that_the_kernels_over_tiles_do_not_have_are_refused():
    for name in ("tcq4", "tcq4_64", "tcq3"):
        code = tcq.CODES[name]
        for taps in ((code.taps0 ^ 1, code.taps1), (code.taps0, code.taps1 ^ 1)):
            with pytest.raises(ValueError, match="bad trellis"):
                _kernels.set_trellis(name, code.states, *taps, list(code.offsets))


@pytest.mark.parametrize("backend", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_a_store_moves_whole_tiles_on_cache_lines(backend):
    fmt = formats.get("tq3")
    rows = random_rows(fmt, 300, 2, 96)
    store = TileStore(fmt, "value", 2, fmt.row_bytes(96), backend)
    assert (store.capacity, store.nbytes) == (0, 0)
    assert store.move(0, 0, 100) == 0 and store.capacity == 128
    store.write(0, rows[:100])
    for first, end, capacity in ((70, 100, 128), (6, 36, 64), (6, 36, 320)):
        start = store.move(first, end - first, capacity)
        assert start == first % 64 and store.capacity == capacity
        np.testing.assert_array_equal(store.read(start, 30), rows[70:100])
        view = store.view(start, 30)
        assert view.buffer.ctypes.data % 64 == 0 and view.buffer.flags.c_contiguous
        assert view.buffer.shape == (2, capacity // 64, 64 * fmt.row_bytes(96))
        assert (len(view), view.shape, view.first) == (30, (30, 2, fmt.row_bytes(96)), start)
    store.write(36, rows[100:300])
    np.testing.assert_array_equal(store.read(6, 230), rows[70:300])
    assert 0 <= store.nbytes - 2 * 320 * fmt.row_bytes(96) < 64


@pytest.mark.parametrize(
    "pair",
    [("tq4", "tq3"), ("tbq4_0", "q8_0"), ("tq5", "tbq3_0"), ("tcq4", "tcq3"), ("tq4", "tcq4_64"),
     ("tcq4_64", "tcq4")],
)  # fmt: skip
@pytest.mark.parametrize(("n", "first", "window"), [(1, 0, None), (64, 0, None), (131, 0, None),
                                                    (131, 63, None), (200, 17, 100)])  # fmt: skip
def test_attention_over_tiles_equals_attention_over_rows(pair, n, first, window):
    """The rows around those that a call names hold others."""
    key, value = (formats.get(name) for name in pair)
    rng = np.random.default_rng(n)
    q = rng.standard_normal((min(n, 5), 4, 64)).astype(np.float32)
    sides = []
    for fmt, side, width in ((key, "key", 64), (value, "value", 96)):
        rows = fmt.encode(rng.standard_normal((n, 2, width)).astype(np.float32))
        store = TileStore(fmt, side, 2, fmt.row_bytes(width), CPU)
        store.move(0, 0, 320)
        store.write(0, random_rows(fmt, 320, 2, width))
        store.write(first, rows)
        sides.append((rows, store.view(first, n)))
    given = {"key": key, "value": value, "window": window, "return_lse": True}
    want, want_lse = REFERENCE.attention(q, *(rows for rows, _ in sides), **given)
    held = [view for _, view in sides]
    for backend in (REFERENCE, CPU, CpuBackend(tiles=True)):
        out, lse = backend.attention(q, *held, **given)
        np.testing.assert_allclose(out, want, rtol=0, atol=3e-3)
        np.testing.assert_allclose(lse, want_lse, rtol=0, atol=3e-3)


@pytest.mark.parametrize("backend", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_tiles_of_something_else_are_refused(backend):
    tq4, tq3 = formats.get("tq4"), formats.get("tq3")
    q = np.ones((1, 2, 64), np.float32)
    k, v = (TileStore(tq4, side, 2, 34, backend) for side in tiles.SIDES)
    for store in (k, v):
        store.move(0, 0, 64)
    given = {"key": tq4, "value": tq4}
    keys, values = k.view(0, 3), v.view(0, 3)
    rows = k.read(0, 3)
    for a, b, options, message in (
        (keys, rows, given, "must both be tiles, or both rows"),
        (values, values, given, "the keys are tiles of tq4 values, not of tq4"),
        (keys, values, given | {"value": tq3}, "the values are tiles of tq4 values, not of tq3"),
        (keys, v.view(1, 3), given, "keys begin in slot 0 and values in 1"),
        (keys, v.view(0, 2), given, "must agree in tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            backend.attention(q, a, b, **options)


@st.composite
def lives(draw):
    """A window or none, and what happens to a cache: (what, how many tokens)."""
    window = draw(st.sampled_from([None, 1, 5, 40, 64, 65, 130]))
    step = st.tuples(
        st.sampled_from(["append", "append", "append", "crop", "evict", "reset"]),
        st.one_of(st.integers(0, 4), st.integers(0, 200)),
    )
    return window, draw(st.lists(step, min_size=1, max_size=12))


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(lives(), st.sampled_from([0, 3]))
def test_tiles_hold_what_rows_hold_whatever_happens(life, sinks):
    window, steps = life
    layer = LayerGeometry(0, 2, 1, 64, 32, window, None)
    pair = formats.get("tq3"), formats.get("tbq4_0")
    rng = np.random.default_rng(0)
    caches = [LayerCache(layer, *pair, CpuBackend(tiles=t), sinks=sinks) for t in (False, True)]
    plain, tiled = caches
    for what, n in steps:
        k, v = (rng.standard_normal((n, 1, d)).astype(np.float32) for d in (64, 32))
        q = rng.standard_normal((1, 2, 64)).astype(np.float32)
        for cache in caches:
            if what == "append":
                cache.append(k, v)
            elif what == "crop":
                with contextlib.suppress(RequestError):  # behind the window, by both
                    cache.crop(min(n, cache.length))
            else:
                getattr(cache, what)()
        assert (plain.length, plain.cached) == (tiled.length, tiled.cached)
        np.testing.assert_array_equal(plain.k_blocks, tiled.k_blocks)
        np.testing.assert_array_equal(plain.v_blocks, tiled.v_blocks)
        assert plain.used_bytes == tiled.used_bytes <= tiled.nbytes
        if what == "append" and n:
            got = [cache.attention(q) for cache in caches]
            np.testing.assert_allclose(*got, rtol=0, atol=3e-3)


@pytest.mark.parametrize("isa", [name for name, here in isas().items() if here])
@pytest.mark.parametrize("pair", [("tq4", "tq4"), ("q8_0", "tbq3_0"), ("tq5", "tq2"),
                                  ("tcq4", "tcq3")])  # fmt: skip
def test_a_cache_in_tiles_passes_the_candidate_gate(pair, isa):
    backend = CpuBackend(isa, tiles=True)
    records = gate.gate_evidence(pair, [64, (96, 128)], backend, windows=[32])
    assert [e.reason for e in records if e.outcome is not Outcome.PASSED] == []
    assert {e.subject["variant"] for e in records} >= {"pack", "attention"}


def test_attention_over_tiles_is_compared_where_they_are_kept_and_only_there():
    case = Case("attention", "tq4", "tq4", head_dim=64, n_kv=70, num_heads=4, num_kv_heads=2)
    for backend, shown in ((CpuBackend(tiles=True), True), (CpuBackend(tiles=False), False)):
        exam = rules.examine(case, backend)
        assert not exam.failed and ("tiles" in {f.rule for f in exam.findings}) == shown
        assert exam.outputs == exam.expected == 4 * 64 * (3 if shown else 1)
