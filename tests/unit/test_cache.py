"""LayerCache and KVCache on the reference backend: append, evict, crop, refusals, accounting.

Where it can matter, with rows and with tiles, which f16 has none of.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from kvproof import formats
from kvproof.backends.reference import ReferenceBackend, softmax
from kvproof.cache import KVCache
from kvproof.errors import RequestError

STORES = {"rows": ReferenceBackend(), "tiles": ReferenceBackend(tiles=True)}
stores = pytest.mark.parametrize("backend", STORES.values(), ids=STORES)


def geometry(*layers, heads=4, kv_heads=2, dim=64):
    """A geometry of layers given as dicts of what differs from a global layer of `dim`."""
    rows = [
        SimpleNamespace(
            **{
                "index": i,
                "num_heads": heads,
                "num_kv_heads": kv_heads,
                "head_dim_k": dim,
                "head_dim_v": dim,
                "window": None,
                "shares_kv_with": None,
                **layer,
            }
        )
        for i, layer in enumerate(layers)
    ]
    return SimpleNamespace(layers=tuple(rows))


def rows(n, seed, heads=2, dim=64):
    return np.random.default_rng(seed).standard_normal((n, heads, dim)).astype(np.float32)


def explicit(q, k, v, window):
    """Float64 attention of every token under an explicit mask of exactly `window` keys."""
    n, heads, dim = q.shape
    k, v = (np.repeat(x.astype(np.float64), heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qhd,thd->hqt", q.astype(np.float64), k) / np.sqrt(dim)
    at = np.arange(n)
    seen = at[None] <= at[:, None]
    if window:
        seen &= at[None] > at[:, None] - window
    weights = softmax(np.where(seen, scores, -np.inf))
    return np.einsum("hqt,thd->qhd", weights, v)


def feed(layer, q, k, v, sizes):
    """Append and attend chunk by chunk; `sizes` repeats until the text is used up."""
    out, at, turn = [], 0, 0
    while at < len(q):
        n = sizes[turn % len(sizes)]
        part = slice(at, at + n)
        layer.append(k[part], v[part])
        out.append(layer.attention(q[part]))
        at, turn = at + n, turn + 1
    return np.concatenate(out)


@pytest.mark.parametrize("window", [None, 1, 8])
@pytest.mark.parametrize("n", [7, 8, 9, 16, 17, 31, 32, 33, 70])
@pytest.mark.parametrize(
    ("fmt", "backend"),
    [("f16", STORES["rows"]), ("tq4", STORES["rows"]), ("tq4", STORES["tiles"])],
    ids=["f16", "tq4", "tq4-tiles"],
)
def test_chunks_and_single_tokens_equal_an_explicit_mask(window, n, fmt, backend):
    q, k, v = rows(n, 1, heads=4), rows(n, 2), rows(n, 3)
    row = formats.get(fmt)
    stored_k, stored_v = row.decode(row.encode(k)), row.decode(row.encode(v))
    want = explicit(q, stored_k, stored_v, window)
    for sizes in ([n], [1], [5], [16, 1, 1, 3]):
        layer = KVCache(geometry({"window": window}), fmt, fmt, backend).layer(0)
        np.testing.assert_allclose(feed(layer, q, k, v, sizes), want, rtol=0, atol=2e-6)
        assert layer.length == n


def test_a_windowed_layer_keeps_one_row_less_than_its_window_between_steps():
    layer = KVCache(geometry({"window": 8}), "f16", "f16", ReferenceBackend()).layer(0)
    for n in (1, 3, 60, 1, 1):
        layer.append(rows(n, n), rows(n, n))
        layer.evict()
        assert layer.cached == min(layer.length, 7)
        assert layer.k_blocks.shape == (layer.cached, 2, 128)
        assert layer.used_bytes == layer.cached * 2 * 256
    assert layer.nbytes == (7 + 16) * 2 * 256  # the room of the 60-token chunk was given back


def test_a_windowed_layer_in_tiles_holds_whole_tiles():
    layer = KVCache(geometry({"window": 100}), "tq4", "tq8", STORES["tiles"]).layer(0)
    row = 2 * (34 + 66)
    starts = set()
    for n in (1, 3, 300, *[1] * 200, 90):
        layer.append(rows(n, n), rows(n, n))
        layer.evict()
        starts.add(layer._start)
        assert layer.cached == min(layer.length, 99) and layer.used_bytes == layer.cached * row
        assert layer.k_blocks.shape == (layer.cached, 2, 34)
        # 99 rows, 25 to spare and up to 63 in front are three tiles; a cache line before each side.
        if layer.length > 99:
            assert 0 <= layer.nbytes - 192 * row <= 2 * 63
    assert len(starts) > 64  # the first row has been in any slot, and whole tiles were dropped


@stores
def test_evicted_rows_do_not_influence_the_result(backend):
    n, window = 200, 8
    q, k, v = rows(n, 1, heads=4), rows(n, 2), rows(n, 3)
    q8 = formats.get("q8_0")
    want = explicit(q, *(q8.decode(q8.encode(x)) for x in (k, v)), window)
    layer = KVCache(geometry({"window": window}), "q8_0", "q8_0", backend).layer(0)
    for at in range(n):
        layer.append(k[at : at + 1], v[at : at + 1])
        for store in (layer._k, layer._v):  # every row outside the view becomes a large one
            held = store.read(layer._start, layer.cached).copy()
            store.write(0, np.full((store.capacity, *held.shape[1:]), 0x7B, np.uint8))
            store.write(layer._start, held)
        got = layer.attention(q[at : at + 1])
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want[at : at + 1], rtol=0, atol=2e-6)


@stores
def test_poisoning_a_held_row_changes_the_result(backend):
    layer = KVCache(geometry({}), "q8_0", "q8_0", backend).layer(0)
    layer.append(rows(9, 1), rows(9, 2))
    q = rows(1, 3, heads=4)
    before = layer.attention(q)
    clean = layer.v_blocks.copy()
    spoiled = clean.copy()
    spoiled[4, :, 2:34] ^= 0x55
    layer.v_blocks = spoiled
    assert not np.allclose(before, layer.attention(q))
    layer.v_blocks = clean
    np.testing.assert_array_equal(before, layer.attention(q))
    for wrong in (spoiled[1:], spoiled.astype(np.int16)):
        with pytest.raises(RequestError, match=r"layer 0: blocks must be uint8 \[9, 2, 68\], got"):
            layer.k_blocks = wrong


def test_blocks_are_a_view_of_rows_and_a_read_only_copy_of_tiles():
    for name, backend in STORES.items():
        layer = KVCache(geometry({}), "q8_0", "q8_0", backend).layer(0)
        layer.append(rows(9, 1), rows(9, 2))
        if name == "rows":
            layer.v_blocks[4] ^= 0x55
            assert (
                layer.v_blocks[4, 0, 2:] != formats.get("q8_0").encode(rows(9, 2))[4, 0, 2:]
            ).all()
        else:
            with pytest.raises(ValueError, match="read-only"):
                layer.v_blocks[4] ^= 0x55


def test_random_values_independent_of_keys_are_what_attention_returns():
    k = rows(6, 1)
    outs = []
    for seed in (2, 3):
        layer = KVCache(geometry({}), "f16", "f16", ReferenceBackend()).layer(0)
        layer.append(k, rows(6, seed))
        outs.append(layer.attention(rows(1, 4, heads=4)))
    assert np.abs(outs[0] - outs[1]).max() > 0.1


@stores
@pytest.mark.parametrize("fmt", [f.name for f in formats.all_formats()])
def test_every_format_appends_token_by_token_as_in_bulk(fmt, backend):
    dim = 128
    k, v = rows(11, 1, dim=dim), rows(11, 2, dim=dim)
    value = fmt if "value" in formats.get(fmt).sides else "f16"
    bulk, single = (KVCache(geometry({}, dim=dim), fmt, value, backend).layer(0) for _ in range(2))
    bulk.append(k, v)
    single.k_scale, single.v_scale = bulk.k_scale, bulk.v_scale  # fp8: one calibration for both
    for at in range(11):
        single.append(k[at : at + 1], v[at : at + 1])
    assert np.array_equal(bulk.k_blocks, single.k_blocks)
    assert np.array_equal(bulk.v_blocks, single.v_blocks)


@pytest.mark.parametrize("peak", [1e-3, 1.0, 1000.0])
def test_fp8_scales_are_fixed_by_the_first_append(peak):
    cache = KVCache(geometry({}), "fp8_e4m3", "fp8_e4m3", ReferenceBackend())
    layer, k = cache.layer(0), rows(20, 1) * np.float32(peak)
    layer.append(k, rows(20, 2))
    np.testing.assert_allclose(layer.k_scale, np.abs(k).max(axis=(0, 2)) / 448, rtol=1e-6)
    first = layer.k_scale.copy()
    layer.append(k * np.float32(10), rows(20, 3))
    assert np.array_equal(layer.k_scale, first)
    got = formats.get("fp8_e4m3").decode(layer.k_blocks, layer.k_scale)
    np.testing.assert_allclose(got[:20], k, atol=peak * 0.2, rtol=0.07)
    assert layer.nbytes == layer._k.nbytes + layer._v.nbytes + 2 * 2 * 4


def test_layers_that_share_read_the_owners_cache_and_cost_nothing():
    shared = geometry({}, {"window": 8}, {"shares_kv_with": 1, "window": 8}, {"shares_kv_with": 0})
    cache = KVCache(shared, "tq4", "tq3", ReferenceBackend())
    assert cache.layer(2) is cache.layer(1) and cache.layer(3) is cache.layer(0)
    cache.layer(0).append(rows(4, 1), rows(4, 2))
    assert cache.nbytes == cache.layer(0).nbytes + cache.layer(1).nbytes
    assert cache.witness()[3] == cache.witness()[0] != {}


def test_witness_counts_the_kernels_that_ran():
    cache = KVCache(geometry({}), "tq4", "q8_0", ReferenceBackend())
    layer = cache.layer(0)
    layer.append(rows(4, 1), rows(4, 2))
    layer.append(rows(1, 1), rows(1, 2))
    layer.attention(rows(1, 3, heads=4))
    assert cache.witness() == [
        {
            "encode_tq4_numpy": 2,
            "encode_q8_0_numpy": 2,
            "attention_tq4_numpy": 1,
            "attention_q8_0_numpy": 1,
        }
    ]


def test_formats_can_differ_per_layer():
    cache = KVCache(geometry({}, {}), "tq4", "tq4", ReferenceBackend(), {1: ("f16", "q8_0")})
    assert [(layer.key.name, layer.value.name) for layer in cache.owners] == [
        ("tq4", "tq4"),
        ("f16", "q8_0"),
    ]


def test_refusals_name_layers_flag_format_and_reason_all_at_once():
    bad = geometry({}, {}, {"head_dim_k": 128, "head_dim_v": 128}, {}, dim=80)
    with pytest.raises(RequestError) as error:
        KVCache(bad, "tbq4_0", "tbq3_0", ReferenceBackend())
    text = str(error.value)
    assert "layer 0-1, 3: --cache-type-k tbq4_0: " in text and "head_dim 80" in text
    assert "layer 0-1, 3: --cache-type-v tbq3_0: " in text and "\n" not in text
    with pytest.raises(RequestError, match="did you mean"):
        KVCache(geometry({}), "tq6", "f16", ReferenceBackend())
    with pytest.raises(RequestError, match="layers 5: own no cache"):
        KVCache(geometry({}), "f16", "f16", ReferenceBackend(), {5: ("f16", "f16")})


def test_a_backend_without_a_kernel_refuses_before_allocation():
    class Narrow(ReferenceBackend):
        def refuses(self, op, fmt, head_dim):
            return f"no {op} kernel for {fmt.name}" if op == "attention" else None

    with pytest.raises(RequestError, match="--cache-type-k f16: no attention kernel for f16"):
        KVCache(geometry({}), "f16", "f16", Narrow())


@stores
@pytest.mark.parametrize("kept", [1, 8, 63, 64, 65])
def test_crop_rolls_back_and_gives_the_same_continuation(kept, backend):
    n = kept + 4
    q, k, v = rows(n, 1, heads=4), rows(n, 2), rows(n, 3)
    cache = KVCache(geometry({}, {"window": 100}), "tq4", "tq4", backend)
    straight = [feed(layer, q, k, v, [n])[kept:] for layer in cache.owners]
    cache.crop(kept)
    assert cache.length == kept and cache.layer(0).cached == kept
    for layer, want in zip(cache.owners, straight, strict=True):
        layer.append(-k[kept:], -v[kept:])  # other rows, to be forgotten again
        layer.crop(kept)
        layer.append(k[kept:], v[kept:])
        np.testing.assert_allclose(layer.attention(q[kept:]), want, rtol=0, atol=1e-6)


def test_crop_behind_a_window_is_refused_for_all_layers():
    cache = KVCache(geometry({}, {"window": 8}), "f16", "f16", ReferenceBackend())
    for layer in cache.owners:
        layer.append(rows(30, 1), rows(30, 2))
        layer.append(rows(1, 1), rows(1, 2))
    with pytest.raises(RequestError, match="layer 1: cannot roll back to 20 tokens: its window"):
        cache.crop(20)
    assert [layer.length for layer in cache.owners] == [31, 31]
    cache.crop(30)  # its next query needs tokens 23 to 29, which are held
    with pytest.raises(RequestError, match="has seen 30"):
        cache.crop(31)
    cache.reset()
    assert cache.length == 0 and cache.witness() == [{}, {}]


@stores
def test_bad_rows_are_refused_and_leave_the_cache_as_it_was(backend):
    layer = KVCache(geometry({}), "q8_0", "q8_0", backend).layer(0)
    layer.append(rows(3, 1), rows(3, 2))
    held = layer.k_blocks.copy()
    bad = rows(2, 3)
    bad[1, 0, 5] = np.nan
    for k, v, message in (
        (rows(2, 1), bad, r"layer 0: values: .*row 2: non-finite"),
        (rows(2, 1, dim=32), rows(2, 1), r"keys must be float32 \[tokens, 2, 64\]"),
        (rows(2, 1).astype(np.float64), rows(2, 1), "got float64"),
        (rows(2, 1), rows(3, 1), "2 keys but 3 values"),
    ):
        with pytest.raises(RequestError, match=message):
            layer.append(k, v)
    assert layer.length == 3 and np.array_equal(layer.k_blocks, held)


def test_queries_older_than_the_window_are_refused():
    layer = KVCache(geometry({"window": 8}), "f16", "f16", ReferenceBackend()).layer(0)
    for at in range(20):
        layer.append(rows(1, at), rows(1, at))
    assert layer.attention(rows(1, 1, heads=4)).shape == (1, 4, 64)
    with pytest.raises(RequestError, match="no longer held"):
        layer.attention(rows(5, 1, heads=4))


@stores
def test_spare_room_of_a_growing_cache_stays_below_a_quarter(backend):
    layer = KVCache(geometry({}), "q8_0", "q8_0", backend).layer(0)
    moves, room = 0, 0
    for at in range(2000):
        layer.append(rows(1, at), rows(1, at))
        moves, room = moves + (layer.nbytes != room), layer.nbytes
        if at > 256:  # the last tile is whole
            spare = 1.26 if layer._k.granule == 1 else 1.26 + 64 / at
            assert layer.nbytes <= spare * layer.used_bytes
    assert moves < 20
