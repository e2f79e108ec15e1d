"""The kernels as shipped: a wheel, installed into an empty environment, is gated there."""

import base64
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_path("purelib"))


def sha256(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
    return f"sha256={digest.rstrip('=')}"


def wheel_from_built_kernels(folder: Path) -> Path:
    """A wheel of this tree with the kernels that are built here, without compiling them once more
    (`make wheel` does)."""
    # An editable install keeps them elsewhere.
    specs = [importlib.util.find_spec(f"kvproof.{name}") for name in ("_kernels", "_weights")]
    built = [Path(spec.origin) for spec in specs if spec and spec.origin]
    if len(built) < len(specs):
        pytest.skip("no kernels are built here")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    path = folder / f"kvproof-0.1.0.dev0-{tag}-{tag}-linux_x86_64.whl"
    info = "kvproof-0.1.0.dev0.dist-info"
    files = {
        f"kvproof/{p.relative_to(ROOT / 'src' / 'kvproof').as_posix()}": p.read_bytes()
        for p in sorted((ROOT / "src" / "kvproof").rglob("*"))
        if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".so"
    }
    files |= {f"kvproof/{p.name}": p.read_bytes() for p in built}
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: kvproof\nVersion: 0.1.0.dev0\n"
    about = ("Wheel-Version: 1.0", "Generator: test", "Root-Is-Purelib: false")
    files[f"{info}/WHEEL"] = "\n".join((*about, f"Tag: {tag}-{tag}-linux_x86_64", "")).encode()
    record = "".join(f"{name},{sha256(data)},{len(data)}\n" for name, data in files.items())
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python of a fresh environment with the wheel in it; other packages are this one's."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = wheel_from_built_kernels(folder)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, cwd=folder)
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    # Behind the wheel's own folder, so that kvproof is the wheel's; .pth files there do not count.
    others = folder / "others"
    others.mkdir()
    for entry in SITE.iterdir():
        if "kvproof" not in entry.name:
            (others / entry.name).symlink_to(entry)
    (Path(own) / "others.pth").write_text(str(others))
    return python


def verify(python, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    program = [python, "-c", "from kvproof.cli import main; main()"]
    done = subprocess.run(
        [*program, "verify", "--backend", "cpu", *arguments, "--json"],
        capture_output=True, text=True, env=environment, cwd=python.parent,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_the_installed_kernels_are_gated_as_shipped(installed):
    code, out, err = verify(installed, "--check", "shipped", "--check", "turbo4")
    assert code == 0, err
    results = json.loads(out)["results"]
    assert {r["outcome"] for r in results} == {"PASSED"}
    assert {r["binary"] for r in results} == {"shipped"}
    (shipped,) = [r for r in results if r["check"] == "shipped"]
    assert shipped["variant"] == "shipped" and shipped["outputs"] == 1


def test_a_changed_binary_is_not_what_was_shipped(installed):
    (kernels,) = installed.parents[1].glob("lib/python*/site-packages/kvproof/_kernels*.so")
    kept = kernels.read_bytes()
    try:
        kernels.write_bytes(kept + b"\0")
        code, out, err = verify(installed, "--check", "shipped")
        assert code == 1, err
        (result,) = json.loads(out)["results"]
        assert result["outcome"] == "FAILED" and "RECORD" in result["reason"]
    finally:
        kernels.write_bytes(kept)
