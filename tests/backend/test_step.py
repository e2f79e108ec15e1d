"""One token in a call for its rows and a call for its query, against the separate calls."""

import copy
from pathlib import Path

import numpy as np
import pytest

from kvproof import formats, routes
from kvproof.backends import cpu
from kvproof.cache import KVCache
from kvproof.cases import Case
from kvproof.conditioner import Conditioner, LayerCondition
from kvproof.errors import RequestError
from kvproof.geometry import Geometry, LayerGeometry, Source

HEADS, KV_HEADS, DIM = 4, 2, 64


class Separate(cpu.CpuBackend):
    """Without the calls for one token."""

    def step(self, *_, **__):
        return None


def rows(n, seed, heads=KV_HEADS, dim=DIM):
    return np.random.default_rng(seed).standard_normal((n, heads, dim)).astype(np.float32)


def condition(kind, dim=DIM):
    rng = np.random.default_rng(9)
    turns = 10000.0 ** (-np.arange(dim // 2 - 3) / 29) if kind == "rope" else np.empty(0)
    mean = (3 * rng.standard_normal((KV_HEADS, dim))).astype(np.float32)
    scale = rng.uniform(0.3, 3, (KV_HEADS, dim)).astype(np.float32)
    return Conditioner(kind, 16, {0: LayerCondition(mean, scale, turns)}, tokens=1)


def pair_of_layers(isa, key, value, *, tiles=False, window=None, kind=None, sinks=0, dim=DIM):
    one = LayerGeometry(0, HEADS, KV_HEADS, dim, dim, window, None)
    made = Geometry("one", (one,), None, None, None, None, Source(Path("one"), "config", {}, {}))
    given = condition(kind, dim) if kind else None
    return [
        KVCache(made, key, value, backend(isa, tiles=tiles), conditioner=given, sinks=sinks).layer(
            0
        )
        for backend in (cpu.CpuBackend, Separate)
    ]


def run(layer, n, first=5, dim=DIM):
    """Outputs of a chunk of `first` tokens and then single ones."""
    q, k, v = rows(n, 1, HEADS, dim), rows(n, 2, KV_HEADS, dim), rows(n, 3, KV_HEADS, dim)
    outs = []
    for at, end in [(0, first), *((i, i + 1) for i in range(first, n))]:
        layer.append(k[at:end], v[at:end])
        outs.append(layer.attention(q[at:end]))
        layer.evict()
    return np.concatenate(outs)


def assert_alike(fast, slow, got, want, exact):
    assert fast._step is not None and slow._step is None
    for name in ("length", "cached", "used_bytes", "nbytes", "_start", "_end", "_dropped", "calls"):
        assert getattr(fast, name) == getattr(slow, name), name
    np.testing.assert_array_equal(fast.k_blocks, slow.k_blocks)
    np.testing.assert_array_equal(fast.v_blocks, slow.v_blocks)
    if exact:
        np.testing.assert_array_equal(got, want)
    else:  # exponentials of the two libraries differ in their last bit
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


def isas():
    return [name for name, here in cpu.isas().items() if here]


PAIRS = [(f.name, f.name) for f in formats.all_formats() if {"key", "value"} <= f.sides]
PAIRS += [("qjl1_256", "tbq3_0"), ("q8_0", "tq4")]


@pytest.mark.parametrize("key, value", PAIRS)
@pytest.mark.parametrize("isa", isas())
def test_the_bytes_are_those_of_the_separate_calls(isa, key, value):
    if formats.get(key).refuses(128, "key") or formats.get(value).refuses(128, "value"):
        pytest.skip("no rows of 128")
    fast, slow = pair_of_layers(isa, key, value, dim=128)
    got, want = run(fast, 24, dim=128), run(slow, 24, dim=128)
    assert_alike(fast, slow, got, want, exact=True)


@pytest.mark.parametrize("window", [None, 1, 12])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("kind", [None, "rope", "previous", "static"])
@pytest.mark.parametrize("key", ["tq4", "q8_0", "fp8_e4m3"])
def test_conditioned_caches_sinks_and_windows(key, kind, sinks, window):
    fast, slow = pair_of_layers(cpu.chosen_isa(), key, key, window=window, kind=kind, sinks=sinks)
    got, want = run(fast, 60), run(slow, 60)
    assert_alike(fast, slow, got, want, exact=sinks == 0)


@pytest.mark.parametrize("first", [1, 2, 6])
def test_a_text_may_begin_with_single_tokens(first):
    fast, slow = pair_of_layers(cpu.chosen_isa(), "tq4", "tq4", kind="rope", sinks=4)
    got, want = run(fast, 40, first), run(slow, 40, first)
    assert_alike(fast, slow, got, want, exact=False)


@pytest.mark.parametrize("pair", [("tq4", "q8_0"), ("tcq4", "tcq3")])
@pytest.mark.parametrize(
    "kind, sinks, window", [(None, 0, None), ("rope", 4, 40), ("static", 4, 70)]
)
def test_tiles(monkeypatch, pair, kind, sinks, window):
    monkeypatch.setattr(cpu, "TILE_ISAS", frozenset(cpu._kernels.tiled_isas()))
    for isa in set(cpu._kernels.tiled_isas()) & set(isas()):
        fast, slow = pair_of_layers(isa, *pair, tiles=True, window=window, kind=kind, sinks=sinks)
        got, want = run(fast, 150), run(slow, 150)
        assert_alike(fast, slow, got, want, exact=sinks == 0)


def test_torch_queries_in_any_strides_give_torch():
    torch = pytest.importorskip("torch")
    fast, slow = pair_of_layers(cpu.chosen_isa(), "tq4", "tq4")
    for layer in (fast, slow):
        for i in range(3):
            k, v = (torch.from_numpy(rows(1, i + s, KV_HEADS)) for s in (10, 20))
            layer.append(k, v)
    wide = [torch.from_numpy(rows(1, s, KV_HEADS, 2 * DIM))[..., ::2] for s in (7, 8)]
    for layer in (fast, slow):
        layer.append(*wide)
    np.testing.assert_array_equal(fast.k_blocks, slow.k_blocks)
    q = torch.from_numpy(rows(1, 5, HEADS, 2 * DIM))[..., ::2]
    got, want = fast.attention(q), slow.attention(q)
    assert torch.equal(got, want)
    assert torch.equal(fast.attention(q.bfloat16()), slow.attention(q.bfloat16()))


@pytest.mark.parametrize("kind", [None, "rope", "previous"])
def test_a_copy_of_a_cache_goes_its_own_way(kind):
    layer, _ = pair_of_layers(cpu.chosen_isa(), "tq4", "tq4", kind=kind, sinks=4)
    run(layer, 20)
    other, q, k, v = copy.deepcopy(layer), rows(1, 1, HEADS), rows(1, 2), rows(1, 3)
    held = layer.k_blocks.copy()
    other.append(-k, -v)
    other.attention(q)
    np.testing.assert_array_equal(layer.k_blocks, held)
    layer.append(k, v)
    want = layer.attention(q)
    again = copy.deepcopy(layer)
    np.testing.assert_array_equal(again.attention(q), want)


@pytest.mark.parametrize("kind", [None, "rope", "previous"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_and_changes_nothing(kind, bad):
    layer, _ = pair_of_layers(cpu.chosen_isa(), "tq4", "tq4", kind=kind)
    run(layer, 9)
    before, length = (layer.k_blocks.copy(), layer.v_blocks.copy()), layer.length
    fine, broken = rows(1, 1, KV_HEADS), rows(1, 2, KV_HEADS)
    broken[0, 1, 7] = bad
    for k, v, side in ((broken, fine, "keys"), (fine, broken, "values")):
        with pytest.raises(RequestError, match=f"layer 0: {side}: tq4: row 1: non-finite input"):
            layer.append(k, v)
    q = rows(1, 3, HEADS)
    q[0, 3, 5] = bad
    with pytest.raises(RequestError, match="NaN or infinity"):
        layer.attention(q)
    assert layer.length == length
    np.testing.assert_array_equal(layer.k_blocks, before[0])
    np.testing.assert_array_equal(layer.v_blocks, before[1])


def test_a_stored_scale_that_is_not_finite_is_named():
    layer, _ = pair_of_layers(cpu.chosen_isa(), "tq4", "tq4")
    run(layer, 9)
    broken = layer.v_blocks.copy()
    broken[3, 1, -2:] = 0xFF, 0x7F
    layer.v_blocks = broken
    with pytest.raises(RequestError, match="tq4: row 7 of the values: stored scale is not finite"):
        layer.attention(rows(1, 3, HEADS))


def test_arrays_that_do_not_match_are_refused_by_the_kernels():
    layer, _ = pair_of_layers(cpu.chosen_isa(), "tq4", "tq4")
    run(layer, 9)
    step, k = layer._step, rows(1, 1, KV_HEADS)
    keys, values = layer._k.buffer, layer._v.buffer
    fine = [k, k, None, None, None, keys, values, 20]
    assert step.append(*fine)
    page = np.zeros((KV_HEADS, 2 * DIM), np.uint8)
    for at, wrong in ((0, k[:, :1]), (0, k[..., :63]), (1, rows(2, 1)), (4, page),
                      (5, keys[:, :, :30].copy()), (6, values[:1].copy()),
                      (7, keys.shape[1])):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            step.append(*fine[:at], wrong, *fine[at + 1 :])
    out = np.empty((1, HEADS, DIM), np.float32)
    fine = [1, rows(1, 1, HEADS), keys, values, 0, 9, -1, 0.1, None, None, None, None, -1, None, 0,
            0, out]  # fmt: skip
    assert step.attend(*fine)
    for at, wrong in ((1, rows(1, 1, KV_HEADS)), (1, rows(2, 1, HEADS)), (2, keys[:1].copy()),
                      (4, -1), (5, 0), (5, keys.shape[1] + 1), (6, 10), (6, -2), (10, keys),
                      (13, page[None]), (16, out[:, :3].copy())):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            step.attend(*fine[:at], wrong, *fine[at + 1 :])


class Spoiled:
    """The calls of a step with an argument changed."""

    def __init__(self, inner, append=lambda a: a, attend=lambda a: a):
        self.inner, self.change_append, self.change_attend = inner, append, attend

    def append(self, *arrays):
        return self.inner.append(*self.change_append(arrays))

    def attend(self, *arrays):
        return self.inner.attend(*self.change_attend(arrays))


@pytest.mark.parametrize(
    "spoil",
    [
        {},
        {"append": lambda a: (*a[:-1], a[-1] - 1)},  # over the token before
        {"append": lambda a: (a[0], a[0], *a[2:])},  # the key for the value
        {"attend": lambda a: (*a[:5], a[5] - 1, *a[6:])},  # without the token itself
        {"attend": lambda a: (*a[:6], 1, *a[7:])},  # without the first
    ],
    ids=["sound", "slot", "value", "newest", "first"],
)
def test_the_gate_sees_a_broken_step_of_a_cache(spoil):
    class Backend(cpu.CpuBackend):
        def step(self, *shape, **given):
            return Spoiled(super().step(*shape, **given), **spoil)

    case = Case("attention", "tq4", "tq4", n_kv=70, n_q=1, num_heads=4, num_kv_heads=2, head_dim=64)
    exam = routes.examine_cache(case, Backend(tiles=False))
    assert bool(exam.rules_failed) == bool(spoil), exam.rules_failed
