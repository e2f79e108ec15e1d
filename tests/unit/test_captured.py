"""Captured rows: what is kept, when it counts no more, and what formats make of the rows."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from kvproof import captured, cli, formats, models
from kvproof.cases import head_scale
from kvproof.conditioner import LayerCondition
from kvproof.engines.capture import LayerRows
from kvproof.errors import RequestError
from kvproof.geometry import geometry as read_geometry
from kvproof.gguf import write_gguf
from kvproof.lanes.kv import default_text, model_digest

LAYERS, HEADS, KV_HEADS, DIM = 5, 4, 2, 32


def write_model(path, seed=0):
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": np.uint32(LAYERS),
        "llama.context_length": np.uint32(4096),
        "llama.embedding_length": np.uint32(HEADS * DIM),
        "llama.attention.head_count": np.uint32(HEADS),
        "llama.attention.head_count_kv": np.uint32(KV_HEADS),
    }
    write_gguf(path, metadata, {"x": np.full((4, 4), seed, np.float32)})
    return path


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path / "cache"))
    return write_model(tmp_path / "toy.gguf")


@pytest.fixture
def runs(monkeypatch):
    """Rows of N(0,1) in place of a run of the model; what was run is listed."""
    seen = []

    def make(path, text=None, progress=None):
        seen.append(path.name)
        geometry = read_geometry(path)
        rng = np.random.default_rng(len(seen))
        n = captured.TOKENS

        def rows(heads):
            return rng.standard_normal((n, heads, DIM), np.float32)

        layers = [
            LayerRows(i, rows(HEADS), rows(KV_HEADS), rows(KV_HEADS), np.arange(n), turns)
            for i, turns in zip(
                captured.chosen(geometry), (None, np.linspace(0.1, 1, 16), None), strict=True
            )
        ]
        words = captured._digest(default_text() if text is None else text)
        conditions = {
            x.index: LayerCondition(rng.standard_normal((KV_HEADS, DIM), np.float32),
                                    np.exp(rng.standard_normal((KV_HEADS, DIM), np.float32)),
                                    captured._turns(x))
            for x in layers
        }  # fmt: skip
        attending = captured._attending(geometry, layers, conditions)
        return captured.ModelRows(model_digest(path), words, n, "rope", attending)

    monkeypatch.setattr(captured, "make", make)
    return seen


def store(model):
    (file,) = (models.cache_dir() / "captured").iterdir()
    return file


def test_rows_are_captured_once_and_read_back_as_they_were(model, runs):
    first = captured.rows(model)
    again = captured.rows(model)
    assert runs == ["toy.gguf"]
    assert (again.model, again.text, again.tokens) == (first.model, first.text, first.tokens)
    assert [x.rows.index for x in again.layers] == [0, 2, 4]
    for a, b in zip(first.layers, again.layers, strict=True):
        assert (a.window, a.scale) == (b.window, b.scale) == (None, DIM**-0.5)
        for name in ("q", "k", "v", "positions", "inv_freq"):
            np.testing.assert_array_equal(getattr(a.rows, name), getattr(b.rows, name))
        for name in ("mean", "scale", "inv_freq"):
            np.testing.assert_array_equal(getattr(a.condition, name), getattr(b.condition, name))


def test_another_text_model_or_version_is_captured_again(model, runs, monkeypatch):
    captured.rows(model)
    captured.rows(model, "another text")
    assert len(runs) == 2
    captured.rows(model, "another text")
    assert len(runs) == 2
    write_model(model, seed=1)
    assert captured.read(model, "another text") is None
    captured.rows(model, "another text")
    assert len(runs) == 3
    monkeypatch.setattr(captured, "VERSION", captured.VERSION + 1)
    assert captured.read(model, "another text") is None


def spoil_layers(arrays):
    about = json.loads(bytes(arrays["about"]))
    about["layers"] = [0, 1, 4]
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    for name in ("q", "k", "v", "positions"):
        arrays[f"{name}.1"] = arrays[f"{name}.2"]


def spoil_nan(arrays):
    arrays["k.2"][3, 1, 5] = np.nan


def spoil_shape(arrays):
    arrays["v.0"] = arrays["v.0"][:-1]


def spoil_kind(arrays):
    arrays["q.4"] = arrays["q.4"].astype(np.float64)


def spoil_missing(arrays):
    del arrays["k.4"]


def spoil_about(arrays):
    arrays["about"] = np.frombuffer(b"[]", np.uint8)


def spoil_scale(arrays):
    arrays["scale.0"] = -arrays["scale.0"]


def spoil_kind_of_mean(arrays):
    about = json.loads(bytes(arrays["about"]))
    arrays["about"] = np.frombuffer(json.dumps(about | {"kind": "new"}).encode(), np.uint8)


def spoil_turns(arrays):
    arrays["inv_freq.2"] = np.ones(DIM)


def spoil_pickle(arrays):
    arrays["q.0"] = np.array([{"a": 1}], dtype=object)


SPOILS = [v for k, v in sorted(globals().items()) if k.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda f: f.__name__)
def test_a_file_that_does_not_fit_is_made_again(model, runs, spoil):
    captured.rows(model)
    with np.load(store(model)) as arrays:
        changed = {name: arrays[name].copy() for name in arrays}
    spoil(changed)
    np.savez(store(model), **changed)
    assert captured.read(model) is None
    captured.rows(model)
    assert len(runs) == 2 and captured.read(model) is not None


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -1])
def test_a_file_that_was_cut_is_made_again(model, runs, keep):
    captured.rows(model)
    whole = store(model).read_bytes()
    store(model).write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    assert captured.read(model) is None
    captured.rows(model)
    assert len(runs) == 2 and captured.read(model) is not None


def test_a_flipped_byte_is_noticed(model, runs):
    captured.rows(model)
    whole = bytearray(store(model).read_bytes())
    whole[len(whole) // 2] ^= 1
    store(model).write_bytes(whole)
    assert captured.read(model) is None


def test_a_folder_that_cannot_be_written_costs_only_the_next_run(model, runs, monkeypatch):
    file = models.cache_dir()
    file.write_text("a file where a folder is needed")
    said = []
    found = captured.rows(model, progress=said.append)
    assert len(found.layers) == 3 and file.read_text().startswith("a file")
    assert any("not kept" in text for text in said)


def test_a_write_that_is_stopped_leaves_the_old_file(model, runs, monkeypatch):
    captured.rows(model)
    before = store(model).read_bytes()
    made = captured.make(model)

    def stop(out, **arrays):
        out.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", stop)
    with pytest.raises(KeyboardInterrupt):
        captured._write(store(model), made)
    assert store(model).read_bytes() == before  # and nothing beside it


def test_the_layers_chosen_are_first_middle_and_last_of_each_kind(model):
    geometry = read_geometry(model)
    windowed = [replace(x, window=None if x.index % 3 == 2 else 512) for x in geometry.layers * 2]
    layers = tuple(replace(x, index=i) for i, x in enumerate(windowed))
    layers = tuple(replace(x, window=None if x.index % 3 == 2 else 512) for x in layers)
    assert captured.chosen(replace(geometry, layers=layers)) == [0, 2, 4, 5, 8, 9]
    shared = tuple(replace(x, shares_kv_with=4 if x.index > 4 else None) for x in layers)
    assert captured.chosen(replace(geometry, layers=shared)) == [0, 2, 3, 4]


def test_the_table_ranks_keys_by_scores_and_values_by_rows(model, runs):
    found = captured.table(captured.rows(model), None)
    assert list(found) == [f.name for f in formats.all_formats()]
    tq4, tq3 = found["tq4"], found["tq3"]
    assert tq4["key"]["bits"] == formats.get("tq4").bits(DIM)
    assert tq4["key"]["score_error"] < tq3["key"]["score_error"]
    assert tq4["value"]["relative_mse"] < tq3["value"]["relative_mse"]
    assert "score_error" not in tq4["value"]
    assert [x["layer"] for x in tq4["key"]["layers"]] == [0, 2, 4]
    assert "f16" in found["bf16"]["key"]["dominated_by"]
    # On independent N(0,1) rows the relative score error is the relative row error.
    rows = tq4["key"]["relative_mse"] ** 0.5
    assert tq4["key"]["relative_score_error"] == pytest.approx(rows, rel=0.1)


def test_conditioned_keys_are_judged_by_the_scores_of_the_original(model, runs):
    found = captured.rows(model)
    layer = found.layers[1]
    turned = captured._conditioned(layer, "rope")
    # Undone, keys are what they were; a score only loses what is the same for a page.
    means = captured.means_of_rows(
        layer.condition, "rope", captured.PAGE, layer.rows.k, layer.rows.positions
    )
    np.testing.assert_allclose(
        turned.rows.k * layer.condition.scale + means, layer.rows.k, atol=1e-5
    )
    scores = np.einsum("hd,thd->th", turned.rows.q[7, ::2], turned.rows.k)
    lost = np.einsum("hd,thd->th", layer.rows.q[7, ::2], means)
    whole = np.einsum("hd,thd->th", layer.rows.q[7, ::2], layer.rows.k)
    np.testing.assert_allclose(scores + lost, whole, atol=1e-3)
    # Offsets in keys cost codes: conditions that fit them take the cost away.
    offset = np.full_like(layer.condition.mean, 20.0)
    biased = replace(
        layer,
        rows=replace(layer.rows, k=layer.rows.k + np.float32(20), inv_freq=None),
        condition=LayerCondition(offset, np.ones_like(offset)),
    )
    figures = captured.table(replace(found, layers=(biased,)), None)["q8_0"]
    assert figures["conditioned_key"]["score_error"] < 0.2 * figures["key"]["score_error"]


def test_scales_beside_the_cache_come_from_the_rows(model, runs):
    x = np.zeros((3, 2, 4), np.float32)
    x[1, 0, 2] = -896
    scale = head_scale("fp8_e4m3", x)
    np.testing.assert_array_equal(scale, [2, 1])
    assert head_scale("q8_0", x) is None


def call(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["kvproof", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


def test_formats_shows_the_rows_of_a_model(model, runs, capsys, monkeypatch):
    monkeypatch.setattr(cli, "ENGINE", ())
    code, out, _ = call(capsys, monkeypatch, "formats", "--model", model, "--json")
    document = json.loads(out)
    about = document["models"][str(model)]
    assert code == 0 and about["missing"] is None and about["tokens"] == captured.TOKENS
    assert [x["index"] for x in about["layers"]] == [0, 2, 4]
    assert about["sha256"] == model_digest(model)
    rows = {e["name"]: e["captured"][str(model)] for e in document["formats"]}
    assert rows["tq4"]["key"]["score_error"] > 0
    code, out, _ = call(capsys, monkeypatch, "formats", "--model", model)
    assert code == 0 and "K nats" in out and "layers 0, 2, 4" in out
    assert runs == ["toy.gguf"]


def test_formats_without_models_or_engine(model, runs, capsys, monkeypatch):
    """What was not asked for by name is a note; what was is an error."""
    code, out, _ = call(capsys, monkeypatch, "formats")
    assert code == 0 and "run `kvproof fetch smollm2-135m`" in out
    code, out, _ = call(capsys, monkeypatch, "formats", "--no-model", "--json")
    assert code == 0 and json.loads(out)["models"] == {}
    assert all(e["captured"] == {} for e in json.loads(out)["formats"])
    monkeypatch.setattr(cli, "ENGINE", ("no_such_engine",))
    code, out, err = call(capsys, monkeypatch, "formats", "--model", model)
    assert code == 3 and out == "" and "no_such_engine" in err.splitlines()[-1]
    code, out, err = call(capsys, monkeypatch, "formats", "--model", model, "--no-model")
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    code, out, err = call(capsys, monkeypatch, "formats", "--model", "no-such-model")
    assert code == 2 and out == "" and "no such file" in err


def test_a_short_text_is_refused(model, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed (extra: transformers)")
    from kvproof.engines import transformers

    class Words:
        class tokenizer:  # noqa: N801
            @staticmethod
            def encode(text):
                return [1] * len(text)

    monkeypatch.setattr(transformers, "load", lambda path: Words)
    with pytest.raises(RequestError, match="captured rows need"):
        captured.make(model, "short")
