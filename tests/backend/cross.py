"""Native programs with the kernels of sets that the machine of the tests may lack.

Arm kernels are cross-compiled and run under QEMU, those of AVX-VNNI and AMX run with their
instructions spelled out in AVX2, the scalar ones as they are.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvproof.backends import cpu

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
KERNELS = NATIVE / "kernels"
FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]
ARM = platform.machine() in ("aarch64", "arm64")
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
# Set -> compiler, flags of its own files, what runs the program.
SETS: dict[str, tuple[str, list[str], list[str]]] = {
    "scalar": ("g++", [], []),
    "neon": (
        "g++" if ARM else "aarch64-linux-gnu-g++",
        ["-march=armv8.2-a+dotprod"],
        [] if ARM else ["qemu-aarch64"],
    ),
    "avx2vnni": ("g++", [*AVX2, "-include", str(NATIVE / "tests/avxvnni.h")], []),
    "amx": ("g++", [*AVX2, "-DKVPROOF_EMULATED_AMX"], []),
}
TILES = ["-ffp-contract=fast", "-Wno-psabi"]  # as CMakeLists.txt has for the kernels over tiles


def not_run(isa: str) -> str | None:
    """Why programs of a set cannot be made or run here, or None."""
    compiler, _, runner = SETS[isa]
    lacking = [tool for tool in (compiler, *runner) if shutil.which(tool) is None]
    if lacking:
        return f"NOT_RUN {isa}: {' and '.join(lacking)} not installed (see CONTRIBUTING.md)"
    if isa not in ("scalar", "neon") and not cpu.isas().get("avx2", False):
        return f"NOT_RUN {isa}: this machine has no AVX2"
    return None


def build(isa: str, program: str, own: Path, *, define: str, also: Sequence[Path] = ()) -> Path:
    """The program of native/tests/`program`.cpp with a set's `own` file of kernels.

    All kernels but those of single sets are linked, and what is asked for `also`. What is compiled
    is kept until a native source changes, in a folder for each compiler.
    """
    compiler, of_set, _ = SETS[isa]
    sets = tuple(f"_{name}" for name in cpu.isas())
    shared = [f for f in sorted(KERNELS.glob("*.cpp")) if not f.stem.endswith((*sets, "module"))]
    seen = hashlib.sha256(f"{FLAGS} {TILES} {SETS}".encode())
    for file in sorted([*KERNELS.iterdir(), *(NATIVE / "tests").iterdir(), NATIVE / "pool.h"]):
        seen.update(file.read_bytes())
    folder = ROOT / "build" / "cross" / f"{Path(compiler).name}-{seen.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{program}_{isa}"

    def run(command: list[str], result: Path) -> Path:
        """Run a command that ends in the name of its result; a result that is there is kept."""
        if not result.exists():
            unfinished = result.with_suffix(".unfinished")
            done = subprocess.run(
                [*command, str(unfinished)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            unfinished.rename(result)
        return result

    def compile_one(source: Path, options: Sequence[str] = (), to: str = "") -> Path:
        where = folder if source.is_relative_to(NATIVE) else source.parent
        includes = ["-I", str(NATIVE), "-I", str(KERNELS)]
        tiles = TILES if source.stem.startswith("tiles_") else []
        command = [compiler, *FLAGS, *tiles, *includes, *options, "-c", str(source), "-o"]
        return run(command, where / f"{to or source.stem}.o")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(compile_one, own, of_set)]
        jobs += [pool.submit(compile_one, file) for file in (*shared, *also)]
        main = NATIVE / "tests" / f"{program}.cpp"
        jobs.append(pool.submit(compile_one, main, [f"-D{define}"], name))
        objects = [str(job.result()) for job in jobs]
    where = folder if own.is_relative_to(NATIVE) else own.parent
    return run([compiler, "-static", "-pthread", *objects, "-o"], where / name)
