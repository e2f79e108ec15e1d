"""Captured rows of the two demo models. Skipped where a model is not in the local cache."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed (extra: transformers)")
pytest.importorskip("transformers", reason="transformers is not installed")

from kvproof import backends, captured, models
from kvproof.conditioner import rope

# Layers: (index, window), heads, KV heads, head_dim.
SHAPES = {
    "gemma-3-270m": (
        [(0, 512), (5, None), (8, 512), (11, None), (16, 512), (17, None)],
        (4, 1, 256),
    ),
    "smollm2-135m": ([(0, None), (15, None), (29, None)], (9, 3, 64)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_captured_rows_of_a_real_model(name):
    path = models.on_disk(name)
    if path is None:
        pytest.skip(f"{name} is not in the local cache: kvproof fetch {name}")
    layers, (heads, kv_heads, dim) = SHAPES[name]
    found = captured.rows(path)
    assert [(x.rows.index, x.window) for x in found.layers] == layers
    for x in found.layers:
        assert x.rows.q.shape == (captured.TOKENS, heads, dim)
        assert x.rows.k.shape == x.rows.v.shape == (captured.TOKENS, kv_heads, dim)
        assert x.scale == dim**-0.5 and x.rows.inv_freq is not None
        # Rotary positions are in the rows: turned back, neighbouring keys are more alike.
        back = rope(x.rows.k, -x.rows.positions, x.rows.inv_freq)
        turned = np.square(np.diff(x.rows.k[8:], axis=0)).sum()
        assert np.square(np.diff(back[8:], axis=0)).sum() < turned

    table = captured.table(found, backends.get("cpu"))
    order = ["f16", "q8_0", "tq4", "tq3"]
    for side, error in (("key", "score_error"), ("value", "relative_mse")):
        errors = [table[f][side][error] for f in order]
        assert errors == sorted(errors) and errors[0] > 0
        assert errors[-1] < 10
    for f in ("tq4", "tq3"):  # what conditioning is for
        treated, plain = table[f]["conditioned_key"], table[f]["key"]
        assert treated["score_error"] < 0.8 * plain["score_error"]
