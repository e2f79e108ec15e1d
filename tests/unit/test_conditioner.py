"""Conditioned keys and sinks: statistics, files, and LayerCache against explicit float64."""

import contextlib
import io
import os
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from test_cache import explicit, feed, geometry

from kvproof import formats
from kvproof.backends.cpu import CpuBackend
from kvproof.backends.reference import ReferenceBackend
from kvproof.cache import KVCache
from kvproof.conditioner import (
    KINDS,
    SCALE_RANGE,
    SINKS,
    Calibration,
    Conditioner,
    LayerCondition,
    Origin,
    rope,
    turned,
)
from kvproof.errors import RequestError

DIM, HEADS, KV_HEADS = 64, 4, 2
INV_FREQ = 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
BACKENDS = {
    "reference": ReferenceBackend,
    "cpu": lambda: CpuBackend(tiles=False),
    "tiles": lambda: CpuBackend(tiles=True),
}


def decades(seed, shape=(KV_HEADS, DIM), low=-2, high=2):
    return 10 ** np.random.default_rng(seed).uniform(low, high, shape)


def layer_condition(seed=0, dim=DIM):
    """Means and scales over four decades; scales alike in a rotary pair."""
    rng = np.random.default_rng(seed)
    mean = decades(seed, (KV_HEADS, dim)) * rng.choice([-1, 1], (KV_HEADS, dim))
    scale = np.tile(decades(seed + 1, (KV_HEADS, dim // 2)), 2)
    return LayerCondition(mean.astype(np.float32), scale.astype(np.float32), INV_FREQ[: dim // 2])


def conditioner(kind, page, layers=1):
    return Conditioner(kind, page, {i: layer_condition(i) for i in range(layers)}, tokens=1)


def text_rows(n, kind, first=0, seed=3, layer=None):
    """q, k, v whose keys have the offsets and spreads that a condition is for."""
    layer = layer or layer_condition()
    rng = np.random.default_rng(seed)
    k = np.broadcast_to(layer.mean, (n, KV_HEADS, DIM)).astype(np.float64)
    if kind != "static":
        k = rope(k, first + np.arange(n), layer.inv_freq)
    k = k + rng.standard_normal(k.shape) * layer.scale
    q = rng.standard_normal((n, KV_HEADS, HEADS // KV_HEADS, DIM)) / layer.scale[:, None]
    q *= 2 * np.sqrt(DIM) / np.einsum("qhgd,thd->qhgt", q, k - k.mean(axis=0)).std()
    v = rng.standard_normal((n, KV_HEADS, DIM))
    return [x.astype(np.float32) for x in (q.reshape(n, HEADS, DIM), k, v)]


def half(x):
    return np.asarray(x, np.float16).astype(np.float64)


def stored_keys(k, fmt, layer, kind, page, sinks, first=0):
    """What a cache holds of raw keys k, in the plain basis, written out row by row in float64."""
    row = formats.get(fmt)
    out = half(k)
    coded = k[sinks:]
    mean, done = None, []
    for i, key in enumerate(coded):
        if i % page == 0:
            if kind == "static":
                mean = half(layer.mean)
            elif kind == "rope" or i == 0:
                at = first + sinks + i + np.arange(page)
                angle = at[:, None] * layer.inv_freq
                turn = [
                    half(x.mean(axis=0)).astype(np.float32) for x in (np.cos(angle), np.sin(angle))
                ]
                mean = turned(layer.mean, *turn)
                mean = mean if kind == "rope" else half(mean)
            else:
                mean = half(np.mean(done[-page:], axis=0))
        ready = ((key - mean.astype(np.float32)) / layer.scale).astype(np.float32)
        done.append(row.decode(row.encode(ready)) * layer.scale.astype(np.float64) + mean)
    if done:
        out[sinks:] = done
    return out


def cache_of(kind, page, backend="reference", fmt="tq4", sinks=0, window=None, first=0):
    return KVCache(
        geometry({"window": window}),
        fmt,
        fmt,
        BACKENDS[backend](),
        conditioner=None if kind is None else conditioner(kind, page),
        sinks=sinks,
        first_position=first,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 8])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("kind", [*KINDS, None])
def test_any_chunks_equal_float64_attention_over_the_stored_keys(kind, sinks, window, backend):
    page, first = 7, 100
    for n in (3, 4, 11, 12, 40, 131):
        q, k, v = text_rows(n, kind, first)
        row = formats.get("tq4")
        if kind is None:
            keys = row.decode(row.encode(k)).astype(np.float64)
            keys[:sinks] = half(k[:sinks])
        else:
            shown = page if window is None or kind != "previous" else min(page, window)
            keys = stored_keys(k, "tq4", layer_condition(), kind, shown, sinks, first)
        values = row.decode(row.encode(v)).astype(np.float64)
        values[:sinks] = half(v[:sinks])
        want = explicit(q, keys, values, window)
        # Offsets and spreads over four decades make terms of scores in the thousands, and float32
        # sums know them to so much.
        wide = np.abs(keys).repeat(HEADS // KV_HEADS, axis=1)
        reach = np.einsum("qhd,thd->qth", np.abs(q), wide).max()
        atol = 2e-6 + {"reference": 3e-7}.get(backend, 3e-5) * reach / np.sqrt(DIM)
        for sizes in ([n], [1], [5], [16, 1, 1, 3]):
            layer = cache_of(kind, page, backend, "tq4", sinks, window, first).layer(0)
            got = feed(layer, q, k, v, sizes)
            assert got.dtype == np.float32 and layer.length == n
            np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("fmt", ["f16", "q8_0", "tq4", "tbq3_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_output_do_not_depend_on_chunks(kind, fmt):
    n, page = 150, 16
    q, k, v = text_rows(n, kind)
    # Prompts and single tokens sum scores in other orders, and round weights apart: float32 of the
    # largest sum that a score can have, and 16 bits.
    reach = np.einsum("qhd,thd->qth", np.abs(q), np.abs(k).repeat(HEADS // KV_HEADS, axis=1)).max()
    atol = 5e-4 + 6e-7 * reach / np.sqrt(DIM)
    runs = []
    for sizes in ([n], [1], [7], [64, 1, 1, 30]):
        layer = cache_of(kind, page, "cpu", fmt, 4).layer(0)
        out = feed(layer, q, k, v, sizes)
        runs.append((out, layer.k_blocks.copy(), layer.v_blocks.copy(), layer._means._held[:, :8]))
    for out, *held in runs[1:]:
        for got, want in zip(held, runs[0][1:], strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_allclose(out, runs[0][0], rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 8, 40])
def test_crop_gives_the_numbers_of_a_fresh_run(kind, window):
    page, n = 6, 30
    q, k, v = text_rows(n + 20, kind)
    for length in (n, n - 1, 26, 25, 24, 5, 4, 2, 0):
        layer = cache_of(kind, page, "cpu", "tq4", 4, window).layer(0)
        if window == 8 and 0 < length < n:
            continue  # refused: tested with the cache itself
        feed(layer, q[:n], k[:n], v[:n], [9])
        layer.crop(length)
        fresh = cache_of(kind, page, "cpu", "tq4", 4, window).layer(0)
        if length:
            feed(fresh, q[:length], k[:length], v[:length], [9])
        for part in (slice(length, length + 2), slice(length + 2, length + 20)):
            outs = []
            for cache in (layer, fresh):
                cache.append(k[part], v[part])
                outs.append(cache.attention(q[part]))
            np.testing.assert_array_equal(*outs)
        assert layer.length == fresh.length == length + 20


def test_windowed_layers_let_go_of_means_with_their_rows():
    layer = cache_of("previous", 4, "cpu", window=16).layer(0)
    q, k, v = text_rows(300, "previous")
    feed(layer, q, k, v, [1])
    layer.evict()
    assert layer._means._count <= 16 // 4 + 2
    assert layer._means._held.shape[1] <= 16


def test_layers_share_the_turns_of_their_pages():
    n, page = 5000, 4
    shape = geometry({}, {}, {"window": 16})
    cache = KVCache(
        shape, "tq4", "tq4", CpuBackend(), conditioner=conditioner("rope", page, 3), sinks=4
    )
    plain = KVCache(shape, "tq4", "tq4", CpuBackend(), sinks=4)
    _, k, v = text_rows(n, "rope")
    for layers in (cache, plain):
        for layer in layers.owners:
            for at in range(0, n, 500):
                layer.append(k[at : at + 500], v[at : at + 500])
                layer.evict()
    own = layer_condition()
    tables = 3 * (own.mean.nbytes + own.scale.nbytes + own.inv_freq.nbytes)
    turns = cache.used_bytes - plain.used_bytes - tables
    assert len(cache._turns) == 1  # all three have the same frequencies
    assert 2 * DIM * (n - 4) / page <= turns <= 2 * DIM * (n / page * 1.3 + 8)
    # Alone, a windowed layer keeps the turns of its window.
    alone = KVCache(
        geometry({"window": 16}), "tq4", "tq4", CpuBackend(), conditioner=conditioner("rope", page)
    )
    for at in range(0, n, 10):
        alone.layer(0).append(k[at : at + 10], v[at : at + 10])
        alone.layer(0).evict()
    assert sum(t.nbytes for t in alone._turns.values()) <= 2 * DIM * 200


def test_sinks_are_the_first_rows_in_f16_and_counted():
    q, k, v = text_rows(10, "rope")
    layer = cache_of(None, 1, "cpu", "tq3", sinks=4).layer(0)
    plain = cache_of(None, 1, "cpu", "tq3").layer(0)
    for cache in (layer, plain):
        cache.append(k, v)
        cache.attention(q)
    assert (layer.cached, layer.sinks_held, layer.k_blocks.shape[0]) == (6, 4, 6)
    row = formats.get("tq3").row_bytes(DIM)
    assert layer.used_bytes == 2 * KV_HEADS * (6 * row + 4 * 2 * DIM)
    assert layer.nbytes == layer._k.nbytes + layer._v.nbytes + 2 * KV_HEADS * 4 * 2 * DIM
    assert any("f16" in kernel for kernel in layer.calls)
    assert not any("f16" in kernel for kernel in plain.calls)
    # A sink is read: another one changes the result.
    before = layer.attention(q)
    layer._sinks[1][:, 2] = layer._sinks[1][:, 3]
    assert np.abs(layer.attention(q) - before).max() > 1e-3


def test_means_and_scales_are_counted():
    n, page = 64, 16
    _, k, v = text_rows(n, "previous")
    layer = cache_of("previous", page, "cpu").layer(0)
    layer.append(k, v)
    row = formats.get("tq4").row_bytes(DIM)
    own = layer_condition()
    tables = own.mean.nbytes + own.scale.nbytes + own.inv_freq.nbytes
    pages = KV_HEADS * 5 * 2 * DIM  # four, and the one that follows
    assert layer.used_bytes == 2 * KV_HEADS * n * row + pages + tables
    assert layer.nbytes >= layer.used_bytes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ["f16", "tq4", "q8_0"])
def test_dead_channels_and_four_decades(kind, fmt, backend):
    """Silent channels in keys, queries or both; offsets and spreads from 0.01 to 100."""
    rng = np.random.default_rng(11)
    base = layer_condition()
    live = np.ones((KV_HEADS, DIM), np.float32)
    live[:, rng.choice(DIM // 2, 6, replace=False)] = 0
    live[:, DIM // 2 :] = live[:, : DIM // 2]
    n = 300
    q, k, v = text_rows(n, kind)
    k *= live
    calibration = Calibration(geometry({}))
    calibration.add([captured(q, k, v)])
    made = calibration.conditioner(kind, 32)
    scale = made.layers[0].scale
    assert np.isfinite(scale).all() and scale.max() / scale.min() <= SCALE_RANGE**2 * 1.01
    layer = KVCache(geometry({}), fmt, fmt, BACKENDS[backend](), conditioner=made).layer(0)
    got = feed(layer, q, k, v, [50])
    assert np.isfinite(got).all()
    want = explicit(q, k, v, None)
    off = np.linalg.norm(got - want) / np.linalg.norm(want)
    plain = KVCache(geometry({}), fmt, fmt, BACKENDS[backend]()).layer(0)
    worse = np.linalg.norm(feed(plain, q, k, v, [50]) - want) / np.linalg.norm(want)
    assert off < {"f16": 2e-3, "q8_0": 2e-2, "tq4": 0.25}[fmt]
    assert fmt == "f16" or off < worse / 1.5
    assert base.scale.max() / base.scale.min() > 1e3


def captured(q, k, v, first=0, inv_freq=INV_FREQ):
    return SimpleNamespace(q=q, k=k, v=v, positions=first + np.arange(len(k)), inv_freq=inv_freq)


def test_calibration_finds_the_mean_before_the_turn_and_one_scale_a_pair():
    scale = np.tile(decades(1, (KV_HEADS, DIM // 2), -0.8, 0.8), 2).astype(np.float32)
    layer = LayerCondition(5 * scale, scale, INV_FREQ)
    calibration = Calibration(geometry({}))
    for i in range(8):
        q, k, v = text_rows(512, "rope", first=1000 * i, seed=i, layer=layer)
        k[:SINKS] = 1e6  # sinks say nothing
        q[:SINKS] = 1e6
        calibration.add([captured(q, k, v, first=1000 * i)])
    found = calibration.conditioner("rope", 16)
    assert calibration.tokens == found.tokens == 8 * 512
    got = found.layers[0]
    spread = layer.scale / np.sqrt(8 * 508)
    assert (np.abs(got.mean - layer.mean) < 5 * spread).all()
    np.testing.assert_array_equal(got.scale[:, : DIM // 2], got.scale[:, DIM // 2 :])
    np.testing.assert_allclose(np.median(got.scale, axis=1), 1, rtol=1e-6)
    # Slow pairs stand still within a page: there the residual is the spread alone.
    slow = slice(20, DIM // 2)
    ratio = got.scale[:, slow] / layer.scale[:, slow]
    np.testing.assert_allclose(ratio / ratio.mean(axis=1, keepdims=True), 1, rtol=0.25)


def test_scales_can_be_left_out():
    calibration = Calibration(geometry({}))
    calibration.add([captured(*text_rows(64, "rope"))])
    assert (calibration.conditioner("rope", 16, scaled=False).layers[0].scale == 1).all()


def test_unknown_turns_are_refused_for_rope_only():
    calibration = Calibration(geometry({}))
    calibration.add([captured(*text_rows(64, "static"), inv_freq=None)])
    with pytest.raises(RequestError, match=r"layer 0.*--kind previous"):
        calibration.conditioner("rope")
    assert len(calibration.conditioner("previous").layers[0].inv_freq) == 0


def test_a_text_of_nothing_but_sinks_is_refused():
    calibration = Calibration(geometry({}))
    calibration.add([captured(*text_rows(SINKS, "rope"))])
    with pytest.raises(RequestError, match="no more than 4 tokens"):
        calibration.conditioner("rope")


def test_queries_of_sharing_layers_count():
    shared = geometry({}, {"shares_kv_with": 0})
    rows = text_rows(200, "rope")
    loud = captured(rows[0] * np.float32(3), rows[1], rows[2])
    quiet, both = Calibration(geometry({})), Calibration(shared)
    quiet.add([captured(*rows)])
    both.add([captured(*rows), loud])
    assert set(both.conditioner("rope").layers) == {0}
    for a, b in ((quiet, both),):  # the median is 1 in any case, so a common factor is not seen
        np.testing.assert_allclose(
            a.conditioner("rope").layers[0].scale, b.conditioner("rope").layers[0].scale, rtol=1e-5
        )


@pytest.mark.parametrize("page", [1, 2, 64, 100])
def test_the_mean_of_a_page_is_the_average_of_its_turns(page):
    layer = layer_condition()
    for position in (0, 3, 8192, 10**6):
        same = np.broadcast_to(layer.mean, (page, KV_HEADS, DIM))
        want = rope(same, position + np.arange(page), INV_FREQ).mean(axis=0)
        got = layer.page_mean("rope", position, page)
        # cos and sin are float16: one part in 2,000 of the mean stays in the key.
        reach = np.hypot(*np.split(layer.mean, 2, axis=1))
        assert (np.abs(got - want) <= 2**-10 * np.tile(reach, 2)).all()
    np.testing.assert_array_equal(layer.page_mean("static", 5, page), half(layer.mean))


def test_a_file_gives_back_what_was_saved(tmp_path):
    made = Conditioner(
        "rope", 64, {0: layer_condition(), 3: layer_condition(3)}, Origin("a" * 64, "b" * 64), 2048
    )
    path = tmp_path / "c.npz"
    made.save(path)
    again = Conditioner.load(path)
    assert again.digest == made.digest
    assert (again.kind, again.page, again.tokens, again.origin.text_sha256) == (
        "rope",
        64,
        2048,
        "b" * 64,
    )
    for index, layer in made.layers.items():
        for name in ("mean", "scale", "inv_freq"):
            np.testing.assert_array_equal(getattr(again.layers[index], name), getattr(layer, name))
    assert list(tmp_path.iterdir()) == [path]
    other = Conditioner("rope", 128, made.layers)
    assert other.digest != made.digest
    other.save(path)  # one conditioner may take the place of another
    assert Conditioner.load(path).page == 128


def test_other_files_are_never_overwritten(tmp_path):
    for name, raw in (("model.gguf", b"GGUF" + bytes(64)), ("x.npz", b""), ("y.txt", b"hello")):
        path = tmp_path / name
        path.write_bytes(raw)
        with pytest.raises(RequestError, match="not overwritten"):
            conditioner("rope", 8).save(path)
        link = tmp_path / f"link-{name}"
        link.symlink_to(path)
        with pytest.raises(RequestError, match="not overwritten"):
            conditioner("rope", 8).save(link)
        assert path.read_bytes() == raw
    with pytest.raises(RequestError, match=r"folder .* does not exist"):
        conditioner("rope", 8).save(tmp_path / "no" / "c.npz")
    assert not list(tmp_path.glob(".*"))


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(RequestError, match="No space left"):
        conditioner("rope", 8).save(tmp_path / "c.npz")
    assert not list(tmp_path.iterdir())


def damaged(path, change):
    """The file with some of its members changed."""
    with zipfile.ZipFile(path) as archive:
        members = {i.filename: archive.read(i) for i in archive.infolist()}
    change(members)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    path.write_bytes(out.getvalue())


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def header(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("about.json"),
        lambda m: m.pop("0.mean.npy"),
        lambda m: m.update({"about.json": b"[]"}),
        lambda m: m.update({"about.json": b"{" * 100000}),
        lambda m: m.update({"0.mean.npy": m["0.mean.npy"][:-1]}),
        lambda m: m.update({"0.mean.npy": npy(np.full((2, 64), np.nan, np.float32))}),
        lambda m: m.update({"0.scale.npy": npy(np.zeros((2, 64), np.float32))}),
        lambda m: m.update({"0.scale.npy": npy(np.ones((2, 64)))}),
        lambda m: m.update({"0.scale.npy": npy(np.ones((2, 32), np.float32))}),
        lambda m: m.update({"0.scale.npy": npy(np.ones((2, 64), ">f4"))}),
        lambda m: m.update({"0.inv_freq.npy": npy(np.full(32, np.inf))}),
        lambda m: m.update({"0.inv_freq.npy": npy(np.ones(33))}),
        lambda m: m.update({"about.json": m["about.json"].replace(b'"rope"', b'"robe"')}),
        lambda m: m.update({"about.json": m["about.json"].replace(b'"page": 8', b'"page": 0')}),
        lambda m: m.update({"about.json": m["about.json"].replace(b'r": 1', b'r": 2')}),
        lambda m: m.update({"about.json": m["about.json"].replace(b"[0]", b"[[0]]")}),
        lambda m: m.update({"about.json": m["about.json"].replace(b"[0]", b"[-1]")}),
        lambda m: m.update(
            {"about.json": m["about.json"].replace(b'model_sha256": "', b'model_sha256": "\\n')}
        ),
        lambda m: m.update({"0.scale.npy": npy(np.full((2, 64), 1e30, np.float32))}),
        lambda m: m.update({"0.mean.npy": header("(" * 9000)}),
        lambda m: m.update(
            {"0.mean.npy": header("{'descr': (('a',), '<f4'), 'fortran_order': 0, 'shape': (0,)}")}
        ),
        lambda m: m.update({"0.scale.npy": npy(np.full((2, 64), 1e-30, np.float32))}),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, change):
    path = tmp_path / "c.npz"
    conditioner("rope", 8).save(path)
    damaged(path, change)
    with pytest.raises(RequestError) as error:
        Conditioner.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_cut_or_flipped_files_are_refused(tmp_path):
    path = tmp_path / "c.npz"
    made = conditioner("rope", 8)
    made.save(path)
    raw = path.read_bytes()
    for cut in (0, 10, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:cut])
        with pytest.raises(RequestError, match="not a conditioner"):
            Conditioner.load(path)
    for at in range(0, len(raw), 97):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        with contextlib.suppress(RequestError):  # what loads has a flipped name or date only
            assert Conditioner.load(path).digest == made.digest
    with pytest.raises(RequestError, match="cannot be read"):
        Conditioner.load(tmp_path / "absent.npz")


def test_damage_never_reaches_a_decompressor(tmp_path):
    path = tmp_path / "c.npz"
    conditioner("rope", 8).save(path)
    raw = path.read_bytes()
    at = raw.index(b"PK\x01\x02") + 10  # how the first member is compressed: "not"
    for method in (8, 12, 14, 99):
        path.write_bytes(raw[:at] + bytes([method]) + raw[at + 1 :])
        with pytest.raises(RequestError, match="not a conditioner"):
            Conditioner.load(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda layer: LayerCondition([1.0], [1.0]),
        lambda layer: LayerCondition(layer.mean, layer.scale, None),
        lambda layer: Conditioner("rope", 8, [layer]),
        lambda layer: Conditioner("rope", 8, {0: 3}),
        lambda layer: Conditioner("rope", 8, {np.int64(0): layer}),
        lambda layer: Conditioner("rope", 8, {0: layer}, None),
        lambda layer: Conditioner("rope", 8, {0: layer}, Origin("abc")),
        lambda layer: Conditioner("rope", 8, {0: layer}, tokens=1.5),
        lambda layer: KVCache(geometry({}), "tq4", "tq4", conditioner="c.npz"),
        lambda layer: KVCache(geometry({}), "tq4", "tq4", per_layer={0: "f16"}),
        lambda layer: KVCache(geometry({}), "tq4", "tq4", per_layer={0: ("f16",) * 3}),
    ],
)
def test_what_cannot_be_saved_or_used_is_refused_when_made(make):
    with pytest.raises(RequestError):
        make(layer_condition())


def test_what_is_no_file_is_refused_at_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/zero", tmp_path):
        with pytest.raises(RequestError, match="is no file"):
            Conditioner.load(path)
        with pytest.raises(RequestError, match="not overwritten"):
            conditioner("rope", 8).save(path)
    for name in ("a\0b", "x" * 300, "y" * 250, "z" * 300 + "/c.npz"):
        with pytest.raises(RequestError):
            conditioner("rope", 8).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_conditioner_of_another_model_is_refused(tmp_path):
    path = tmp_path / "c.npz"
    Conditioner("rope", 8, {0: layer_condition()}, Origin("a" * 64), 9).save(path)
    assert Conditioner.load(path, geometry({}), "a" * 64).page == 8
    with pytest.raises(RequestError, match="another model"):
        Conditioner.load(path, geometry({}), "c" * 64)
    for other in (geometry({}, {}), geometry({}, dim=128), geometry({}, kv_heads=1)):
        with pytest.raises(RequestError, match=r"another model.*layer"):
            Conditioner.load(path, other)
        with pytest.raises(RequestError, match=r"another model.*layer"):
            KVCache(other, "tq4", "tq4", ReferenceBackend(), conditioner=conditioner("rope", 8))


@pytest.mark.parametrize("option", [{"sinks": -1}, {"sinks": 1.5}, {"first_position": True}])
def test_options_that_are_no_counts_are_refused(option):
    with pytest.raises(RequestError, match=next(iter(option))):
        KVCache(geometry({}), "tq4", "tq4", ReferenceBackend(), **option)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_keys_leave_a_conditioned_cache_as_it_was(kind):
    layer = cache_of(kind, 4, "cpu", sinks=2).layer(0)
    q, k, v = text_rows(30, kind)
    layer.append(k[:10], v[:10])
    before = layer.attention(q[:1]).copy()
    for bad_k, bad_v in ((np.nan, 0), (0, np.inf), (-np.inf, 0)):
        spoiled = [x[10:25].copy() for x in (k, v)]
        spoiled[0][9, 0, 3] += np.float32(bad_k)
        spoiled[1][9, 0, 3] += np.float32(bad_v)
        with pytest.raises(RequestError, match="layer 0"):
            layer.append(*spoiled)
        assert layer.length == 10
        np.testing.assert_array_equal(layer.attention(q[:1]), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3e38, 7e4, 1e-35, 0.0])
def test_finite_keys_of_any_size_stay_finite(kind, size):
    layer = cache_of(kind, 4, "cpu", sinks=2).layer(0)
    q, k, v = text_rows(12, kind)
    k = (k / np.abs(k).max() * size).astype(np.float32)
    assert np.isfinite(feed(layer, q * np.float32(1e-3), k, v, [5])).all()


def test_uncalibrated_means_help_where_keys_have_an_offset():
    rng = np.random.default_rng(0)
    n = 400
    k = rng.standard_normal((n, KV_HEADS, DIM)).astype(np.float32)
    k[..., 5] += 100
    k[..., 40] -= 30
    q, v = (rng.standard_normal((n, h, DIM)).astype(np.float32) for h in (HEADS, KV_HEADS))
    want = explicit(q, k, v, None)
    shape = geometry({})
    made = Conditioner.uncalibrated(shape, 32)
    off = []
    for condition in (None, made):
        layer = KVCache(shape, "tq4", "f16", CpuBackend(), conditioner=condition).layer(0)
        got = feed(layer, q, k, v, [100])[64:]
        off.append(np.linalg.norm(got - want[64:]) / np.linalg.norm(want[64:]))
    assert off[1] < off[0] / 5


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("sinks", [0, 3])
def test_queries_of_any_kind_are_read_alike_with_and_without_a_condition(kind, sinks):
    torch = pytest.importorskip("torch", reason="torch is not installed (extra: transformers)")
    layer = cache_of(kind, 4, "cpu", sinks=sinks).layer(0)
    q, k, v = text_rows(10, kind or "static")
    layer.append(k, v)
    low = torch.from_numpy(q).bfloat16()
    want = layer.attention(low.float())
    for same in (low, low.double(), low.float().requires_grad_()):
        got = layer.attention(same)
        assert isinstance(got, torch.Tensor)
        np.testing.assert_array_equal(got, want)
    assert layer.attention(q[:0]).shape == (0, HEADS, DIM)
    for wrong in (q.tolist(), None, q + 1j, q > 0, q[0], np.full_like(q, np.nan)):
        with pytest.raises(RequestError):
            layer.attention(wrong)
    for scale in ("x", 1j, [1], np.nan, 1e39):
        with pytest.raises(RequestError, match="scale"):
            layer.attention(q, scale=scale)
