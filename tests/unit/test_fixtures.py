"""Public fixture files: every kind is read strictly, reproduced, and encoded again."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import kvproof.formats as formats
from kvproof import fixtures, gate
from kvproof.backends.reference import ReferenceBackend
from kvproof.errors import RequestError
from kvproof.formats import get, qjl1_256
from kvproof.rotation import hadamard, projection
from kvproof.rules import decode_turbo3, encode_turbo3

SHARED = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
REFERENCE = ReferenceBackend()
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"public fixtures are not at {SHARED}"
)
STREAM = fixtures.fixture_normals(40_000)


def draws(start, *shape):
    count = int(np.prod(shape))
    return STREAM[start : start + count].reshape(shape)


def numbers(values):
    """As a fixture prints them: flat, seven digits."""
    flat = np.asarray(values, np.float64).ravel()
    return [float(f"{v:.7g}") for v in flat]


def raw(blocks):
    return np.asarray(blocks).ravel().tolist()


def turbo(kernel, start=640):
    """A turbo fixture's document, made here from the documented draws."""
    q, rows = draws(start, 128), draws(start + 128, 8, 128)
    if kernel == "turbo3":
        blocks, per_key, size = encode_turbo3(rows), 4, 14
        scores = decode_turbo3(blocks) @ q
    else:
        fmt, per_key, size = (get("tbq4_0"), 4, 18)
        if kernel == "turbo3_tcq":
            need_trellis()
            fmt, per_key, size = formats.tbq3_tcq(codebook()), 1, 52
        blocks = fmt.encode(rows)
        scores = fmt.decode_rotated(blocks) @ q
    return {
        "kernel": kernel, "head_dim": 128, "n_kv": 8, "block_bytes": size,
        "blocks_per_kv": per_key, "q": numbers(q), "k_blocks": raw(blocks),
        "expected_scores": numbers(scores),
    }  # fmt: skip


def need_trellis():
    if not hasattr(formats, "tbq3_tcq"):
        pytest.skip("tbq3_tcq is not registered yet")


def codebook():
    need_trellis()
    return np.sort(np.random.default_rng(1).normal(0, 0.09, (64, 8)), axis=-1).astype("f4").ravel()


def codebook_document(book):
    import hashlib

    digest = hashlib.sha256(book.astype("<f4").tobytes()).hexdigest()
    return {"states": 512, "values": [float(v) for v in book], "sha256_f32_le": digest}


def qjl(heads=4, kv_heads=2, tokens=8, start=1280):
    fmt = qjl1_256("fixture")
    q = draws(start, heads, 128)
    rows = draws(start + heads * 128, kv_heads, tokens, 128)
    blocks = fmt.encode(rows)
    scores = REFERENCE.scores64(fmt, q[None], blocks.transpose(1, 0, 2))[0]
    return {
        "kernel": "qjl", "head_dim": 128, "proj_dim": 256, "n_heads": heads,
        "n_kv_heads": kv_heads, "n_tokens": tokens, "block_bytes": 34,
        "q_sketch": numbers(projection("fixture").sketch(q)), "k_blocks": raw(blocks),
        "expected_scores": numbers(scores),
    }  # fmt: skip


def polar(use_qjl, start=2560):
    q, rows = draws(start, 128), draws(start + 128, 8, 128)
    fmt = get("q4_polar_res" if use_qjl else "q4_polar")
    blocks = fmt.encode(rows)
    return {
        "kernel": "polar", "head_dim": 128, "n_rows": 8, "block_bytes": 82, "use_qjl": use_qjl,
        "q": numbers(q), "k_blocks": raw(blocks),
        "expected_scores": numbers(REFERENCE.scores64(fmt, q[None], blocks)),
    }  # fmt: skip


def polar_preht():
    plain, residual = polar(0), polar(1)
    return plain | {
        "kernel": "polar_preht", "hadamard_inv_scale": 1 / 128,
        "hq": numbers(hadamard(draws(2560, 128).astype(np.float64))),
        "k_blocks_qjl": residual["k_blocks"],
        "expected_scores_qjl": residual["expected_scores"],
    }  # fmt: skip


def fused(kernel="fused_attn_qjl_tbq", causal=None, start=6400):
    heads, kv_heads, tokens = 4, 2, 24
    key = qjl1_256("fused_fixture")
    value = get("tbq3_0" if kernel.endswith("tbq") else "q4_polar_res")
    q = draws(start, heads, 128)
    k = draws(start + heads * 128, kv_heads, tokens, 128)
    v = draws(start + heads * 128 + k.size, kv_heads, tokens, 128)
    kb, vb = key.encode(k), value.encode(v)
    seen = tokens if causal is None else causal + 1
    out = REFERENCE.attention64(
        q[None], kb[:, :seen].transpose(1, 0, 2), vb[:, :seen].transpose(1, 0, 2), key=key,
        value=value, causal=False,
    )[0]  # fmt: skip
    case = {
        "n_heads": heads, "n_kv_heads": kv_heads, "n_kv": tokens,
        "q_sketch": numbers(projection("fused_fixture").sketch(q)), "k_blocks": raw(kb),
        "v_blocks": raw(vb), "expected_out": numbers(out),
    }  # fmt: skip
    if causal is not None:
        case |= {"causal": 1, "q_pos_base": causal}
    polar_values = {} if kernel.endswith("tbq") else {"use_qjl": 1}
    return {
        "kernel": kernel, "head_dim": 128, "proj_dim": 256, "k_block_bytes": 34,
        "v_block_bytes": 14 if kernel.endswith("tbq") else 82,
        "v_blocks_per_token": 4 if kernel.endswith("tbq") else 1,
        "sm_scale": float(np.float32(128**-0.5)), "q_is_pre_projected": 1, "cases": [case],
    } | polar_values  # fmt: skip


KINDS = {
    "turbo3": lambda: turbo("turbo3"),
    "turbo4": lambda: turbo("turbo4"),
    "turbo3_tcq": lambda: turbo("turbo3_tcq"),
    "qjl": qjl,
    "polar": lambda: polar(0),
    "polar_res": lambda: polar(1),
    "polar_preht": polar_preht,
    "fused_attn_qjl_tbq": fused,
    "fused_attn_qjl_tbq 17": lambda: fused(causal=17),
    "fused_attn_qjl_tbq 0": lambda: fused(causal=0),
    "fused_attn_qjl_polar": lambda: fused("fused_attn_qjl_polar"),
    "fused_attn_qjl_polar 17": lambda: fused("fused_attn_qjl_polar", causal=17),
}


def write(folder, document, name="any name.json"):
    if document["kernel"] == "turbo3_tcq":
        (folder / "book.json").write_text(json.dumps(codebook_document(codebook())))
    (folder / name).write_text(json.dumps(document))
    return folder


def verified(folder, kernels=False):
    """(outcome, variant, check, reason) of what a folder's files bring, by the reference alone or
    by the reference's operators as a backend too."""
    files = fixtures.read(folder)
    records = gate._fixture_records(files, folder, None, [], lambda _: None)
    return [(str(e.outcome), e.subject["variant"], e.subject["check"], e.reason) for e in records]


def test_the_generator_is_the_documented_one():
    first = [-1.2275401, 0.6004496, -1.1063669, -1.0806532, 0.3998436, 0.8242239]
    np.testing.assert_allclose(STREAM[:6], first, rtol=2e-7)
    np.testing.assert_array_equal(fixtures.fixture_normals(1000), STREAM[:1000])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_is_reproduced_and_encoded_again(kind, tmp_path):
    results = verified(write(tmp_path, KINDS[kind]()))
    assert {r[0] for r in results} == {"PASSED"}, results
    assert "fixture bytes" in {r[1] for r in results}
    checks = {r[2] for r in results}
    if kind == "polar_preht":
        assert checks == {"polar", "polar_preht", "polar_res", "polar_preht_res"}
    else:
        assert kind.split()[0] in checks


@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_of_a_backend_are_held_to_the_file(kind, tmp_path):
    (file,) = fixtures.read(write(tmp_path, KINDS[kind]()))
    for part in file.parts:
        exam = fixtures.examine_part(part, REFERENCE)
        assert exam.outputs == (0 if part.legacy else part.expected.size)
        if not part.legacy:
            assert exam.failed == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_byte_and_one_wrong_figure_fail(kind, tmp_path):
    document = KINDS[kind]()
    place = document["cases"][0] if "cases" in document else document
    place["k_blocks"][9] ^= 16
    results = verified(write(tmp_path, document))
    assert ("FAILED", "fixture bytes") in {r[:2] for r in results}
    assert any("1 of" in (r[3] or "") for r in results)
    document = KINDS[kind]()
    place = document["cases"][0] if "cases" in document else document
    figures = place["expected_out" if "cases" in document else "expected_scores"]
    figures[3] += 1e-4 * max(map(abs, figures))
    results = verified(write(tmp_path, document))
    assert ("FAILED", "fixture") in {r[:2] for r in results}


def test_other_draws_are_reproduced_though_their_bytes_cannot_be_made_again(tmp_path):
    rng = np.random.default_rng(5)
    fmt = get("tbq4_0")
    q, blocks = rng.standard_normal(128), fmt.encode(rng.standard_normal((8, 128)))
    document = turbo("turbo4") | {
        "q": numbers(q), "k_blocks": raw(blocks),
        "expected_scores": numbers(fmt.decode_rotated(blocks) @ q),
    }  # fmt: skip
    assert [r[:2] for r in verified(write(tmp_path, document))] == [("PASSED", "fixture")]


def test_several_files_of_one_kind_all_run(tmp_path):
    write(tmp_path, polar(0), "b.json")
    write(tmp_path, polar(0, start=3840), "a.json")
    assert [f.path.name for f in fixtures.read(tmp_path)] == ["a.json", "b.json"]
    assert {r[0] for r in verified(tmp_path)} == {"PASSED"}


WRONG = [
    ("turbo4", {"q": [0.0] * 127}, "q has 127 entries, expected 128"),
    ("turbo4", {"k_blocks": [0] * 17}, "k_blocks has 17 entries"),
    ("turbo4", {"k_blocks": [256] * 576}, "k_blocks holds numbers beyond a byte"),
    ("turbo4", {"k_blocks": [1.0] * 576}, "k_blocks is not a flat list"),
    ("turbo4", {"block_bytes": 14}, "block_bytes is 14, expected 18"),
    ("turbo4", {"expected_scores": [float("nan")] * 8}, "expected_scores holds a NaN"),
    ("turbo4", {"q": [10**400] * 128}, "q holds a NaN, an infinity or a number beyond 1e+30"),
    ("turbo4", {"q": [1e300] * 128}, "q holds a NaN, an infinity or a number beyond 1e+30"),
    ("turbo4", {"n_kv": 10**400}, "n_kv is 1000"),
    ("turbo4", {"expected_scores": []}, "expected_scores has 0 entries"),
    ("turbo4", {"head_dim": None}, "head_dim is None"),
    ("turbo4", {"head_dim": 64}, "head_dim is 64, expected 128"),
    ("turbo4", {"n_kv": 0}, "n_kv is 0"),
    ("turbo4", {"n_kv": True}, "n_kv is True"),
    ("turbo4", {"n_kv": -8}, "n_kv is -8"),
    ("turbo4", {"kernel": "turbo5"}, "kernel is 'turbo5'"),
    ("turbo4", {"kernel": ["turbo4"]}, "kernel is"),
    ("qjl", {"q_sketch": [0.5] * 1024}, "q_sketch is no sketch"),
    ("qjl", {"n_kv_heads": 3}, "n_heads is 4, no multiple of n_kv_heads 3"),
    ("qjl", {"proj_dim": 128}, "proj_dim is 128"),
    ("polar", {"use_qjl": 2}, "use_qjl is 2"),
    ("polar_preht", {"hq": [0.0] * 128}, "hq is not the Hadamard transform"),
    ("fused_attn_qjl_tbq", {"cases": []}, "cases is not a list of at least one"),
    ("fused_attn_qjl_tbq", {"sm_scale": 0}, "sm_scale is 0"),
    ("fused_attn_qjl_tbq", {"sm_scale": 10**400}, "sm_scale is 1000"),
    ("turbo4", {"kernel": {str(i): i for i in range(10**4)}}, "kernel is {"),
    ("fused_attn_qjl_tbq", {"v_block_bytes": 18}, "v_block_bytes is 18"),
    ("fused_attn_qjl_tbq", {"q_is_pre_projected": 0}, "q_is_pre_projected is 0"),
]


@pytest.mark.parametrize(("kind", "change", "says"), WRONG, ids=lambda v: str(v)[:30])
def test_an_inconsistent_file_is_a_wrong_request_that_names_file_and_field(
    kind, change, says, tmp_path
):
    write(tmp_path, KINDS[kind]() | change, "bad.json")
    with pytest.raises(RequestError) as error:
        fixtures.read(tmp_path)
    assert says in str(error.value) and "bad.json" in str(error.value)
    assert len(str(error.value)) < 200 + len(str(tmp_path)) + len(", ".join(fixtures.KERNELS))


def test_fields_inside_a_case_are_named_with_the_case(tmp_path):
    document = fused(causal=17)
    document["cases"][0]["q_pos_base"] = 24
    with pytest.raises(RequestError, match=r"cases\[0\].q_pos_base is 24, expected 0 to 23"):
        fixtures.read(write(tmp_path, document))
    del document["cases"][0]["v_blocks"]
    document["cases"][0]["q_pos_base"] = 3
    with pytest.raises(RequestError, match=r"cases\[0\].v_blocks is missing"):
        fixtures.read(write(tmp_path, document))


@pytest.mark.parametrize("text", ["<html>", '{"kernel": "turbo4"', "[]", "{}", '{"q": 1}'])
def test_a_file_that_is_no_fixture_is_a_wrong_request(text, tmp_path):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(RequestError, match=r"bad.json"):
        fixtures.read(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_among_the_fixtures_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / "bad.json")
    with pytest.raises(RequestError, match=r"bad.json: cannot be read as JSON \(not a file\)"):
        fixtures.read(tmp_path)


def test_a_trellis_file_needs_its_codebook_whole(tmp_path):
    write(tmp_path, turbo("turbo3_tcq"))
    book = codebook_document(codebook())
    (tmp_path / "book.json").unlink()
    with pytest.raises(RequestError, match=r"put tbq3_tcq_codebook.json beside it"):
        fixtures.read(tmp_path)
    book["values"][7] += 1e-3
    (tmp_path / "book.json").write_text(json.dumps(book))
    with pytest.raises(RequestError, match="values have SHA-256"):
        fixtures.read(tmp_path)


def test_folders_that_hold_nothing(tmp_path):
    with pytest.raises(RequestError, match="not a folder"):
        gate.verify("reference", ["turbo4"], tmp_path / "none")
    assert verified(tmp_path)[0][0] == "FAILED"
    write(tmp_path, polar(0))
    results = gate.verify("reference", ["turbo4"], tmp_path, formats=["f16"])
    assert [(r["outcome"], r["check"]) for r in results] == [("FAILED", "turbo4")]
    assert "holds no turbo4 fixture" in results[0]["reason"]


@needs_shared
def test_the_public_files_are_reproduced_and_no_byte_differs():
    need_trellis()
    files = fixtures.read(SHARED)
    assert {f.kernel for f in files} == {
        "turbo3", "turbo4", "turbo3_tcq", "qjl", "polar", "fused_attn_qjl_tbq",
    }  # fmt: skip
    records = gate._fixture_records(files, SHARED, None, [], lambda _: None)
    assert [e.reason for e in records if e.outcome != "PASSED"] == []
    assert sum(e.subject["variant"] == "fixture bytes" for e in records) == len(files) == 7
    outputs = sum(e.metrics["outputs"] for e in records if e.subject["variant"] == "fixture")
    assert outputs == 4 * 8 + 2 * 2 * 8 + 1920


@needs_shared
def test_the_self_test_scores_the_trellis_with_the_public_codebook():
    need_trellis()
    shown = [variant for variant, _, exam in fixtures.self_test(fixtures.read(SHARED))
             if not exam.failed]  # fmt: skip
    assert shown[:6] == list(fixtures.PUBLISHED)


def test_the_reference_agrees_with_itself():
    for variant, fmt, exam in fixtures.self_test():
        assert exam.failed == [], (variant, fmt)
        assert exam.outputs == exam.expected > 0
