"""Formats of groups of 128: public fixtures to the byte, published scores, each one's promises."""

import importlib.util
import json
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvproof import backends, formats
from kvproof.errors import RequestError
from kvproof.fixtures import fixture_normals
from kvproof.formats import polar, qjl, trellis512
from kvproof.rotation import projection

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
# Draws of the fixtures' generator come in this order: a query and 8 keys of 128 each.
ORDER = ("turbo3", "turbo4", "turbo3_tcq", "qjl", "polar", "polar_qjl", "polar_preht")
PRINTED = 1e-12  # NMSE of values that are printed with 7 digits


def fixture(name: str) -> dict:
    path = FIXTURES / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"public fixture {name}.json (../shared/fixtures) is not on this machine")
    return json.loads(path.read_text())


@lru_cache(maxsize=1)
def draws() -> np.ndarray:
    fused = sum(
        (h + 2 * kv * n) * 128 for h, kv, n in ((1, 1, 64), (4, 2, 512), (8, 2, 256), (2, 1, 128))
    )
    return fixture_normals(len(ORDER) * 9 * 128 + fused)


def drawn(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Query `[128]` and keys `[8, 128]` of a fixture."""
    at = ORDER.index(name)
    rows = draws()[at * 9 * 128 : (at + 1) * 9 * 128].reshape(9, 128)
    return rows[0], rows[1:]


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.square(np.asarray(got) - want).sum() / np.square(want).sum())


@pytest.mark.parametrize("name", ["polar", "polar_qjl"])
def test_public_polar_fixtures(name: str) -> None:
    document = fixture(name)
    f = formats.get("q4_polar_res" if document["use_qjl"] else "q4_polar")
    stored = np.array(document["k_blocks"], np.uint8).reshape(8, 82)
    q, keys = drawn(name)
    np.testing.assert_array_equal(f.encode(keys), stored)
    np.testing.assert_allclose(q, document["q"], rtol=5e-6)
    given, want = np.array(document["q"]), np.array(document["expected_scores"])
    assert nmse(f.decode_rotated(stored) @ f.rotate(given), want) < PRINTED
    assert nmse(f.decode(stored).astype(np.float64) @ given, want) < PRINTED


def test_public_qjl_fixture() -> None:
    document = fixture("qjl")
    f = formats.qjl1_256("fixture")
    stored = np.array(document["k_blocks"], np.uint8).reshape(8, 34)
    q, keys = drawn("qjl")
    np.testing.assert_array_equal(f.encode(keys), stored)
    np.testing.assert_allclose(f.rotate(q), document["q_sketch"], rtol=1e-5, atol=1e-5)
    sketch, want = np.array(document["q_sketch"]), np.array(document["expected_scores"])
    assert nmse(f.decode_rotated(stored) @ sketch, want) < PRINTED
    assert nmse(f.decode(stored).astype(np.float64) @ q, want) < PRINTED


def test_public_fused_fixture() -> None:
    document = fixture("fused_attn_qjl_tbq")
    key, value = formats.qjl1_256("fused_fixture"), formats.get("tbq3_0")
    at = len(ORDER) * 9 * 128
    for case in document["cases"]:
        heads, kv_heads, n = case["n_heads"], case["n_kv_heads"], case["n_kv"]
        sizes = np.cumsum([heads * 128, kv_heads * n * 128, kv_heads * n * 128])
        q, k, v = np.split(draws()[at : at + sizes[-1]], sizes[:-1])
        at += int(sizes[-1])
        k_blocks = np.array(case["k_blocks"], np.uint8).reshape(kv_heads, n, 34)
        v_blocks = np.array(case["v_blocks"], np.uint8).reshape(kv_heads, n, 56)
        np.testing.assert_array_equal(key.encode(k.reshape(kv_heads, n, 128)), k_blocks)
        np.testing.assert_array_equal(value.encode(v.reshape(kv_heads, n, 128)), v_blocks)
        sketch = np.array(case["q_sketch"]).reshape(heads, 256)
        np.testing.assert_allclose(key.rotate(q.reshape(heads, 128)), sketch, rtol=1e-5, atol=1e-5)
        group = heads // kv_heads
        scores = np.einsum("hs,hts->ht", sketch, key.decode_rotated(k_blocks).repeat(group, axis=0))
        weights = np.exp((scores - scores.max(axis=-1, keepdims=True)) * document["sm_scale"])
        weights /= weights.sum(axis=-1, keepdims=True)
        rows = value.decode(v_blocks).astype(np.float64).repeat(group, axis=0)
        out = np.einsum("ht,htd->hd", weights, rows)
        assert nmse(out, np.array(case["expected_out"]).reshape(heads, 128)) < PRINTED


@lru_cache(maxsize=1)
def public_trellis() -> formats.Format:
    document = fixture("tbq3_tcq_codebook")
    f = formats.tbq3_tcq(document["values"])
    assert f.codebook_digest == document["sha256_f32_le"]
    return f


def test_public_trellis_fixture() -> None:
    document = fixture("turbo3_tcq")
    f = public_trellis()
    stored = np.array(document["k_blocks"], np.uint8).reshape(8, 52)
    q, keys = drawn("turbo3_tcq")
    np.testing.assert_array_equal(f.encode(keys), stored)
    # The printed scores use the query as given, so they test decoding and not truth.
    want = np.array(document["expected_scores"])
    assert nmse(f.decode_rotated(stored) @ np.array(document["q"]), want) < PRINTED
    np.testing.assert_allclose(q, document["q"], rtol=5e-6)


def test_published_trellis_self_test() -> None:
    pair = fixture_normals(256)
    q, x = pair[0::2], pair[1::2]
    f = public_trellis()
    stored = f.decode_rotated(f.encode(x))
    assert q @ stored == pytest.approx(-4.822659, abs=3e-6)
    assert f.rotate(q) @ stored == pytest.approx(0.363133, abs=3e-6)


def test_published_self_test_scores() -> None:
    pair = fixture_normals(256)
    q, x = pair[0::2], pair[1::2]
    assert float(q.astype(np.float64) @ x) == pytest.approx(-1.293642, abs=1e-6)
    for f, want in (
        (formats.qjl1_256("fixture"), 3.696591),
        (formats.get("q4_polar"), -1.994053),
        (formats.get("q4_polar_res"), -1.438744),
    ):
        for score in (
            f.decode_rotated(f.encode(x)) @ f.rotate(q),
            f.decode(f.encode(x)).astype(np.float64) @ q,
        ):
            assert score == pytest.approx(want, rel=2e-6), f.name


# ---- q4_polar ------------------------------------------------------------------------------------


def polar_block(head: str, codes: int, residual: int = 0) -> np.ndarray:
    body = [*bytes.fromhex(head), *[codes] * 64, residual, *[0] * 15]
    return np.array([body], np.uint8)


def test_polar_blocks_mean_what_the_layout_says() -> None:
    plain, moved = formats.get("q4_polar"), formats.get("q4_polar_res")
    x = np.random.default_rng(3).standard_normal((50, 128)).astype(np.float32)
    a, b = plain.encode(x), moved.encode(x)
    np.testing.assert_array_equal(a[:, :66], b[:, :66])
    assert not a[:, 66:].any() and not b[:, 67:].any() and set(b[:, 66]) == {0, 1}
    # Element 2j is in the low nibble: code 1 there, code 14 in the high one.
    block = polar_block("003c", 0xE1)  # d = 1
    values = plain.decode_rotated(block)[0] * np.sqrt(128)
    np.testing.assert_allclose(values[:4], [-2.093562707, 2.093562707] * 2, rtol=1e-7)
    step = (moved.decode_rotated(block) - plain.decode_rotated(block))[0] * 128
    np.testing.assert_allclose(step, -0.5 * polar.RESIDUAL_SIGNS, rtol=1e-6)
    assert polar.RESIDUAL_SIGNS.sum() == -6
    up = moved.decode_rotated(polar_block("003c", 0xE1, 1)) - plain.decode_rotated(block)
    np.testing.assert_allclose(up[0] * 128, 0.5 * polar.RESIDUAL_SIGNS, rtol=1e-6)


def test_a_value_on_a_cut_takes_the_upper_code() -> None:
    # One-hot rows spread to +-1 everywhere; a constant row to one spike and exact zeros.
    block = formats.get("q4_polar").encode(np.full((1, 128), 2.0, np.float32))
    codes = np.stack([block[0, 2:66] & 15, block[0, 2:66] >> 4], axis=-1).reshape(-1)
    assert codes[0] == 15 and (codes[1:] == 8).all()


def test_residual_raises_the_error() -> None:
    x = np.random.default_rng(4).standard_normal((2048, 128)).astype(np.float32)
    error = [nmse(f.decode(f.encode(x)), x) for f in map(formats.get, ("q4_polar", "q4_polar_res"))]
    assert error[0] < error[1]


# ---- qjl1_256 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [128, 256, 512])
@pytest.mark.parametrize("name", ["ggml", "fixture", "fused_fixture"])
def test_qjl_estimates_dot_products_without_bias(name: str, head_dim: int) -> None:
    f = formats.qjl1_256(name)
    rng = np.random.default_rng(5)
    k = rng.standard_normal((1024, head_dim)).astype(np.float32)
    q = rng.standard_normal((64, head_dim)).astype(np.float32)
    true = (q.astype(np.float64) @ k.T).reshape(-1)
    score = (f.rotate(q).astype(np.float64) @ f.decode_rotated(f.encode(k)).T).reshape(-1)
    slope = float(true @ score / (true @ true))
    assert 0.9 <= slope <= 1.1
    assert np.corrcoef(true, score)[0, 1] >= 0.72


def test_qjl_projections_do_not_mix() -> None:
    ours, other = formats.qjl1_256(), formats.qjl1_256("fixture")
    assert ours is formats.get("qjl1_256") and ours.projection_id == "ggml"
    assert ours.identity == f"qjl1_256:ggml:{projection('ggml').digest[:16]}"
    assert len({ours.identity, other.identity, formats.qjl1_256("fused_fixture").identity}) == 3
    x = np.random.default_rng(6).standard_normal((512, 128)).astype(np.float32)
    q = x[:64] + 0
    true = (q @ x.T).reshape(-1)
    mixed = (other.rotate(q) @ ours.decode_rotated(ours.encode(x)).T).reshape(-1)
    assert abs(np.corrcoef(true, mixed)[0, 1]) < 0.2
    with pytest.raises(RequestError, match="unknown projection 'mine'"):
        formats.qjl1_256("mine")
    assert (formats.get("tq4").identity, formats.get("q4_polar").projection_id) == ("tq4", None)


def test_qjl_is_no_value_format() -> None:
    reason = formats.get("qjl1_256").refuses(128, "value")
    assert reason == "qjl1_256: not a value format (only key)"


def test_qjl_norms_are_bf16_over_their_whole_range() -> None:
    f = formats.get("qjl1_256")
    x = np.eye(3, 128, dtype=np.float32) * np.float32([[1e30], [3.4e38], [1e-41]])
    x[1] = 3.4e38
    packed, counters = f.encode_counted(x)
    norms = (packed[:, 32:].copy().view("<u2").astype(np.uint32) << 16).view(np.float32)[:, 0]
    assert norms[0] == pytest.approx(1e30, rel=0.004)
    assert packed[1, 32:].tobytes().hex() == "7f7f" and counters.scale_saturated == 1
    assert norms[2] == 0 and counters.scale_flushed == 1
    assert not f.decode(packed[2]).any()


@pytest.mark.parametrize("head_dim", [128, 256])
def test_integer_scores_stay_within_their_bound(head_dim: int) -> None:
    f = formats.get("qjl1_256")
    rng = np.random.default_rng(7)
    k = f.encode(rng.standard_normal((300, head_dim)).astype(np.float32))
    q = rng.standard_normal((40, head_dim)).astype(np.float32)
    q[7] = 0
    exact = f.rotate(q).astype(np.float64) @ f.decode_rotated(k).T
    off = np.abs(qjl.integer_scores(f, q, k) - exact)
    step = np.abs(f.rotate(q)).max(axis=-1) / 127
    norms = np.abs(f.decode_rotated(k)).sum(axis=-1)  # FACTOR * 256 * (sum of the groups' norms)
    bound = step[:, None] / 2 * norms[None]
    assert (off <= bound * (1 + 1e-6)).all()
    assert off.max() > 0.05 * bound.max() and not off[7].any()


# ---- tbq3_tcq ------------------------------------------------------------------------------------


def best_by_enumeration(y: np.ndarray, book: np.ndarray) -> float:
    """Least squared distance over all 512 * 8^(n-1) paths, in float32 as the encoder adds it."""
    states = np.arange(512)
    cost = np.square(y[0] - book)
    for value in y[1:]:
        states = (states[:, None] >> 3 | np.arange(8) << 6).reshape(-1)
        cost = cost.repeat(8) + np.square(value - book[states])
    return float(cost.min())


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_viterbi_finds_the_best_of_all_paths(n: int) -> None:
    rng = np.random.default_rng(n)
    book = np.asarray(formats.get("tbq3_tcq").codebook, np.float32)
    y = rng.standard_normal((20, n)).astype(np.float32) / np.float32(np.sqrt(128))
    states = trellis512.viterbi(y, book)
    assert (states[:, 1:] & 63 == states[:, :-1] >> 3).all()
    for row, path in zip(y, states, strict=True):
        cost = np.float32(0)
        for term in np.square(row - book[path]):
            cost += term
        assert float(cost) == best_by_enumeration(row, book)


def test_viterbi_ties_go_to_the_lowest() -> None:
    y = np.zeros((2, 6), np.float32)
    flat = np.full(512, 0.5, np.float32)
    np.testing.assert_array_equal(trellis512.viterbi(y, flat), 0)
    twin = np.linspace(-1, 1, 512, dtype=np.float32)
    twin[8 * 52 + 6] = twin[8 * 52 + 5]  # as the public codebook has it
    y[:] = twin[8 * 52 + 5]
    first = trellis512.viterbi(y[:, :1], twin)
    assert first[0, 0] == 8 * 52 + 5


def test_viterbi_beats_the_greedy_path() -> None:
    f = formats.get("tbq3_tcq")
    book = np.asarray(f.codebook, np.float32)
    y = np.random.default_rng(8).standard_normal((64, 128)).astype(np.float32)
    y /= np.sqrt(np.square(y).sum(axis=-1, keepdims=True))
    best = np.square(y - book[trellis512.viterbi(y, book)]).sum(axis=-1)
    greedy, state = np.zeros(64), np.full(64, -1)
    for t in range(128):
        nearby = np.arange(512)[None].repeat(64, axis=0) if t == 0 else (
            state[:, None] >> 3 | np.arange(8) << 6
        )  # fmt: skip
        away = np.square(y[:, t : t + 1] - book[nearby])
        pick = away.argmin(axis=-1)
        state, greedy = nearby[np.arange(64), pick], greedy + away.min(axis=-1)
    assert (best < greedy).all()


def test_trellis_blocks_mean_what_the_layout_says() -> None:
    f = formats.get("tbq3_tcq")
    x = np.random.default_rng(9).standard_normal((40, 256)).astype(np.float32)
    packed = f.encode(x).reshape(-1, 52)
    states = trellis512.path_states(packed)
    assert (states[:, 1:] & 63 == states[:, :-1] >> 3).all()
    assert not packed[:, 51].any() and not (packed[:, 50] >> 6).any()
    stream = np.unpackbits(packed[:, 2:], axis=-1, bitorder="little").astype(int)
    symbol_100 = stream[:, 6 + 300] + 2 * stream[:, 7 + 300] + 4 * stream[:, 8 + 300]
    np.testing.assert_array_equal(symbol_100, states[:, 100] >> 6)
    np.testing.assert_array_equal(states[:, 0] & 63, stream[:, :6] @ (1 << np.arange(6)))
    # The stored norm makes the decoded row as long as the row was, up to its fp16.
    long = np.linalg.norm(f.decode(packed.reshape(40, -1)).reshape(-1, 128), axis=-1)
    np.testing.assert_allclose(long, np.linalg.norm(x.reshape(-1, 128), axis=-1), rtol=5e-4)


def test_shipped_codebook() -> None:
    f = formats.get("tbq3_tcq")
    # Rows in use were written with it: another one is another format.
    assert f.codebook_digest is not None and f.codebook_digest[:16] == "996eca945503571b"
    assert f.identity == "tbq3_tcq:996eca945503571b"
    groups = np.asarray(f.codebook).reshape(64, 8)
    assert (np.diff(groups, axis=1) >= 0).all() and np.unique(groups).size > 500
    other = formats.tbq3_tcq(-np.asarray(f.codebook))
    assert other.identity != f.identity and other.name == f.name
    for scale in range(1, 20):  # however many others come between
        formats.tbq3_tcq(np.asarray(f.codebook) * np.float32(scale + 1))
    assert formats.tbq3_tcq(f.codebook) is f
    for wrong in (
        np.ones(511), np.full(512, np.nan), np.zeros(512), ["x"] * 512, np.full(512, 1e-40),
        np.full(512, 1e20), np.full(512, 1e300), np.ones(512, bool), np.ones(512) + 1j,
        [[1], [2, 3]],
    ):  # fmt: skip
        with pytest.raises(RequestError, match="tbq3_tcq: a codebook"):
            formats.tbq3_tcq(wrong)


def test_shipped_codebook_is_where_training_stops() -> None:
    tool = load_tool("train_tbq3_tcq")
    book = np.asarray(formats.get("tbq3_tcq").codebook, np.float32)
    y = tool.rows(2048, 77)
    moved = tool.improved(book, y) - book
    count = np.bincount(trellis512.viterbi(y, book).reshape(-1), minlength=512)
    # One more pass moves an entry no further than the noise of so few values explains.
    spread = 0.15 / np.sqrt(128) / np.sqrt(np.maximum(count, 1))
    assert np.sqrt(np.mean(np.square(moved / spread))) < 1.5
    # And passes do move one that is not there yet.
    early = tool.train(tool.SEED, ((2, 256),))
    np.testing.assert_array_equal(early, tool.train(tool.SEED, ((2, 256),)))
    assert tool.error(book) < 0.0205 < tool.error(early) < tool.error(tool.start(tool.SEED))


def load_tool(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trellis_error_on_gaussian_rows_beats_the_published_codebook() -> None:
    x = np.random.default_rng(10).standard_normal((2048, 128)).astype(np.float32)
    ours = formats.get("tbq3_tcq")
    error = nmse(ours.decode(ours.encode(x)), x)
    assert 4**-3.25 < error < 0.0205
    public = public_trellis()
    assert error < nmse(public.decode(public.encode(x)), x) == pytest.approx(0.0217, rel=0.03)


@pytest.mark.parametrize("name", ["tbq3_tcq", "q4_polar", "q4_polar_res", "qjl1_256"])
def test_groups_are_independent_and_zero_scales_decode_to_zero(name: str) -> None:
    f = formats.get(name)
    x = np.random.default_rng(11).standard_normal((5, 512)).astype(np.float32)
    x[2, 128:256] = 0
    packed = f.encode(x)
    np.testing.assert_array_equal(packed.reshape(20, -1), f.encode(x.reshape(20, 128)))
    decoded = f.decode(packed)
    assert not decoded[2, 128:256].any() and not np.signbit(decoded[2, 128:256]).any()
    blocks = packed.reshape(20, -1).copy()
    assert not blocks[9].any()
    at = 32 if name == "qjl1_256" else 0
    for zero in (0x0000, 0x8000):  # codes are read by nobody then
        blocks[3, at : at + 2] = np.array([zero], "<u2").view(np.uint8)
        out = f.decode(blocks)
        assert not out[3].any() and not np.signbit(out[3]).any() and out[4].any()
    for width in (64, 96, 192, 576):
        reason = f"{name}: head_dim {width} is not a multiple of 128"
        assert f.refuses(width, "key") == reason


@pytest.mark.parametrize("name", [[], {}, 3, None, b"ggml", "GGML"])
def test_names_of_any_type_are_unknown_in_one_line(name) -> None:
    for call in (formats.get, formats.qjl1_256, backends.get):
        with pytest.raises(RequestError, match="unknown") as caught:
            call(name)
        assert "\n" not in str(caught.value)
