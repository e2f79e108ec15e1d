"""Attention over tiles by sets that the machine of the tests may lack, against the scalar kernels.

NEON runs under QEMU, AVX-VNNI and AMX with their instructions spelled out. The scalar kernels over
tiles are held to the gate by test_tiles.py.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
ARM = platform.machine() in ("aarch64", "arm64")
X86 = platform.machine() in ("x86_64", "AMD64")
FLAGS = ["-std=c++20", "-O1", "-Wno-psabi", "-ffp-contract=fast", f"-I{NATIVE}", "-pthread"]
ARM_COMPILER = "g++" if ARM else "aarch64-linux-gnu-g++"
VNNI = ["-mavx2", "-mfma", "-mf16c", "-include", str(NATIVE / "tests/avxvnni.h")]
# Set -> compiler, flags of its own file, what runs the binary.
SETS: dict[str, tuple[str, list[str], list[str]]] = {
    "neon": (ARM_COMPILER, ["-march=armv8.2-a+dotprod"], [] if ARM else ["qemu-aarch64"]),
    "avx2vnni": ("g++", VNNI, []),
    "amx": ("g++", ["-mavx2", "-mfma", "-mf16c", "-DKVPROOF_EMULATED_AMX"], []),
}


def lacking(isa: str) -> str | None:
    compiler, _, runner = SETS[isa]
    missing = [tool for tool in (compiler, *runner) if shutil.which(tool) is None]
    if missing:
        return f"NOT_RUN {isa}: {' and '.join(missing)} not installed (see CONTRIBUTING.md)"
    if isa != "neon" and not (X86 and "avx2" in Path("/proc/cpuinfo").read_text()):
        return f"NOT_RUN {isa}: this machine has no AVX2"
    return None


def build(isa: str, folder: Path, *, broken: str = "") -> Path:
    """The binary that compares a set with the scalar kernels. `broken`: a text of tiles_leaf.h that
    is left out of the set's own file."""
    compiler, own, _ = SETS[isa]
    kernels = folder / "native" / "kernels"
    shutil.copytree(NATIVE, folder / "native", dirs_exist_ok=True)
    source = kernels / f"tiles_{isa}.cpp"
    if broken:
        leaf = (kernels / "tiles_leaf.h").read_text()
        assert broken in leaf
        (kernels / "broken_leaf.h").write_text(leaf.replace(broken, ""))
        for file in (source, kernels / "tiles_avx2.h"):
            file.write_text(file.read_text().replace("tiles_leaf.h", "broken_leaf.h"))
    flags = [*FLAGS, f"-I{folder / 'native'}"]
    plain = ["attention", "codec", "kernels_scalar", "prompt", "tiles", "tiles_scalar"]
    jobs = [(kernels / f"{stem}.cpp", []) for stem in plain] + [(source, own)]
    jobs.append((folder / "native/tests/tiles_agree.cpp", [f"-DKVPROOF_TILES=tiles_{isa}"]))
    objects, running = [], []
    for file, more in jobs:
        objects.append(folder / f"{file.stem}.o")
        command = [compiler, *flags, *more, "-c", str(file), "-o", str(objects[-1])]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    store = folder / "tiles_store.o"
    objects.append(store)
    command = [compiler, *flags, "-c", str(kernels / "tiles_store.cpp"), "-o", str(store)]
    running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for job in running:
        _, errors = job.communicate()
        assert job.returncode == 0, errors
    binary = folder / "tiles_agree"
    link = [compiler, "-static", "-pthread", *map(str, objects), "-o", str(binary)]
    subprocess.run(link, check=True)
    return binary


def run(isa: str, binary: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SETS[isa][2], str(binary)], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("isa", SETS)
def test_a_set_agrees_with_the_scalar_kernels(isa, tmp_path):
    if why := lacking(isa):
        pytest.skip(why)
    done = run(isa, build(isa, tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases 108 bad 0" in done.stdout


def test_a_broken_set_is_found(tmp_path):
    if why := lacking("avx2vnni"):
        pytest.skip(why)
    # Weights would lose their low parts.
    wrong = "store(low + 4 * lane, (a & 0x00ff00ff) | Ints(Shorts(b) << 8));"
    done = run("avx2vnni", build("avx2vnni", tmp_path, broken=wrong))
    assert done.returncode == 1 and "bad 0" not in done.stdout
