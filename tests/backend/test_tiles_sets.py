"""Attention over tiles by sets that the machine of the tests may lack, against the scalar kernels.

The scalar kernels over tiles are held to the gate by test_tiles.py.
"""

from __future__ import annotations

import concurrent.futures
import shutil
import subprocess

import pytest

pytest.importorskip("kvproof.backends.cpu", reason="the native kernels are not built")
import cross

ISAS = ("neon", "avx2vnni", "amx")
# Formats that broken sets are compiled with, which takes a third of the time of all.
FEW = "std::integer_sequence<int, T_TQ4, T_TCQ4, T_Q4_0>"
ALL = {
    "avx2vnni": ("tiles_leaf.h", "std::make_integer_sequence<int, TILE_KINDS>", FEW),
    "amx": ("tiles_amx.cpp", "fill(t, TileKindList{});", f"fill(t, {FEW}{{}});"),
}
# What is wrong: set, file, what is right in it, what is there instead.
BROKEN = {
    "weights without low parts": (
        "avx2vnni", "tiles_leaf.h",
        "store(low + 4 * lane, (a & 0x00ff00ff) | Ints(Shorts(b) << 8));", "",
    ),
    "path cut at blocks of keys": (
        "avx2vnni", "tiles_leaf.h", "line = kb == 0 ?", "line = kb >= 0 ?",
    ),
    "path of values from other lanes": (
        "avx2vnni", "tiles_leaf.h", "load<Bytes>(now + to[j]) & load<Bytes>(mask[j])",
        "load<Bytes>(now + to[j])",
    ),
    "rows of a wrong unit": (
        "amx", "tiles_amx.cpp", "float(most) / unit", "float(most) / (2 * unit)",
    ),
    "scales of rows without signs": (
        "amx", "tiles_amx.cpp", "load<Floats>(scales) * inverse",
        "I::larger_magnitude(load<Floats>(scales), all(0.f)) * inverse",
    ),
    "rows without fine entries": ("amx", "tiles_amx.cpp", "_tile_dpbssd(2, 5, 7);", ""),
}  # fmt: skip


def build(isa, own):
    """native/tests/tiles_agree.cpp with a set's kernels in the file `own`."""
    scalar = [cross.KERNELS / f"{stem}_scalar.cpp" for stem in ("kernels", "tiles")]
    return cross.build(isa, "tiles_agree", own, define=f"KVPROOF_TILES=tiles_{isa}", also=scalar)


def run(isa, program):
    """What it says."""
    return subprocess.run(
        [*cross.SETS[isa][2], str(program)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
def test_a_set_agrees_with_the_scalar_kernels(isa):
    if why := cross.not_run(isa):
        pytest.skip(why)
    done = run(isa, build(isa, cross.KERNELS / f"tiles_{isa}.cpp"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases 144 bad 0" in done.stdout


def build_broken(name, folder):
    """The program of one of BROKEN."""
    isa, file, sound, broken = BROKEN[name]
    for kept in {f"tiles_{isa}.cpp", "tiles_avx2.h", "tiles_leaf.h"}:
        shutil.copy(cross.KERNELS / kept, folder)
    for where, here, instead in ((file, sound, broken), ALL[isa]):
        text = (folder / where).read_text()
        assert here in text
        (folder / where).write_text(text.replace(here, instead))
    return build(isa, folder / f"tiles_{isa}.cpp")


@pytest.fixture(scope="module")
def broken_programs(tmp_path_factory):
    """Futures of the programs of BROKEN that can be made here: each takes a compiler a minute."""
    for isa in {isa for isa, *_ in BROKEN.values() if cross.not_run(isa) is None}:
        build(isa, cross.KERNELS / f"tiles_{isa}.cpp")  # what they share
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = {
            name: pool.submit(build_broken, name, tmp_path_factory.mktemp("broken"))
            for name, (isa, *_) in BROKEN.items()
            if cross.not_run(isa) is None
        }
        yield jobs


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_set_is_found(name, broken_programs):
    isa = BROKEN[name][0]
    if why := cross.not_run(isa):
        pytest.skip(why)
    done = run(isa, broken_programs[name].result())
    assert done.returncode == 1 and "bad 0" not in done.stdout
    assert "cases 0" not in done.stdout
