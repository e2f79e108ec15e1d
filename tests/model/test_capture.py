"""Captured rows against those that transformers' own cache holds, on tiny random models."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: transformers)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from test_tiny_models import F16, MODELS, VOCAB, hf, one_thread, text, wrapped  # noqa: E402, F401
from transformers import DynamicCache  # noqa: E402

from kvproof.conditioner import rope  # noqa: E402
from kvproof.engines.capture import capture  # noqa: E402
from kvproof.engines.transformers import _cache_argument  # noqa: E402
from kvproof.errors import RequestError  # noqa: E402

N = 21


def test_rows_are_what_the_caches_of_transformers_hold(hf):  # noqa: F811
    hf.set_attn_implementation("eager")
    own = DynamicCache(config=hf.config)
    ids = text(N)
    with torch.inference_mode():
        hf(input_ids=torch.tensor([ids]), **{_cache_argument(hf): own})
    model, _ = wrapped(hf)
    rows = capture(model, ids)
    assert [r.index for r in rows] == list(range(len(model.geometry.layers)))
    for r, layer in zip(rows, model.geometry.layers, strict=True):
        assert r.q.shape == (N, layer.num_heads, layer.head_dim_k) and r.q.dtype == np.float32
        owner = r.index if layer.shares_kv_with is None else layer.shares_kv_with
        for got, want in ((r.k, own.layers[owner].keys), (r.v, own.layers[owner].values)):
            held = want[0].transpose(0, 1).numpy()
            assert got.shape[1:] == held.shape[1:] and len(got) == N
            assert np.linalg.norm(got[-len(held) :] - held) < F16 * np.linalg.norm(held)
        np.testing.assert_array_equal(r.positions, np.arange(N))


def test_queries_of_layers_that_share_a_cache_are_their_own():
    if "gemma4" not in MODELS:
        pytest.skip("no model that shares caches")
    torch.manual_seed(1)
    model, _ = wrapped(MODELS["gemma4"]().eval())
    seen = {}
    for index, layer in enumerate(model.hf.model.layers):
        layer.self_attn.q_norm.register_forward_hook(
            lambda _m, _i, out, index=index: seen.setdefault(index, []).append(out[0].clone())
        )
    rows = capture(model, text(N))
    for r in rows:  # a turn keeps lengths
        want = torch.cat(seen[r.index])[:N].norm(dim=-1).numpy()
        np.testing.assert_allclose(np.linalg.norm(r.q, axis=-1), want, rtol=1e-4)
    assert rows[4].k is rows[2].k and rows[5].k is rows[3].k


def test_frequencies_are_found_for_each_kind_of_layer(hf):  # noqa: F811
    model, _ = wrapped(hf)
    rows = capture(model, text(4))
    kinds = getattr(hf.config, "layer_types", None) or ["full_attention"] * len(rows)
    rotary = hf.model.rotary_emb
    for r, kind in zip(rows, kinds, strict=True):
        owner = model.geometry.layers[r.index].shares_kv_with
        kind = kinds[owner] if owner is not None else kind
        buffer = getattr(rotary, f"{kind}_inv_freq", getattr(rotary, "inv_freq", None))
        np.testing.assert_allclose(r.inv_freq, buffer.double().numpy())


def test_another_layout_of_pairs_shows_as_no_frequencies(monkeypatch):
    from transformers.models.llama import modeling_llama

    def neighbours(q, k, cos, sin, unsqueeze_dim=1):
        half = cos.shape[-1] // 2
        c = cos[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)
        s = sin[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)

        def turn(x):
            return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s

        return turn(q), turn(k)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", neighbours)
    torch.manual_seed(0)
    model, _ = wrapped(MODELS["llama"]().eval())
    assert [r.inv_freq for r in capture(model, text(3))] == [None] * 4


def test_an_empty_text_and_unknown_ids_are_refused():
    model, _ = wrapped(MODELS["llama"]().eval())
    with pytest.raises(RequestError, match="no tokens"):
        capture(model, [])
    with pytest.raises(RequestError, match=str(VOCAB - 1)):
        capture(model, [VOCAB])


def test_rope_turns_pairs_and_leaves_the_rest():
    x = np.zeros((2, 1, 6))
    x[:, 0, 0] = 1
    x[:, 0, 5] = 7
    got = rope(x, np.array([0, 3]), np.array([0.5, 0.1]))
    np.testing.assert_allclose(got[0], x[0])
    np.testing.assert_allclose(got[1, 0], [np.cos(1.5), 0, np.sin(1.5), 0, 0, 7])
    np.testing.assert_allclose(rope(got, np.array([0, -3]), np.array([0.5, 0.1])), x, atol=1e-15)
