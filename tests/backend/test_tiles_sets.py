"""Attention over tiles by sets that the machine of the tests may lack, against the scalar kernels.

The scalar kernels over tiles are held to the gate by test_tiles.py.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

pytest.importorskip("kvproof.backends.cpu", reason="the native kernels are not built")
import cross

ISAS = ("neon", "avx2vnni", "amx")


def run(isa, own):
    """What native/tests/tiles_agree.cpp says of a set's kernels in the file `own`."""
    scalar = [cross.KERNELS / f"{stem}_scalar.cpp" for stem in ("kernels", "tiles")]
    program = cross.build(isa, "tiles_agree", own, define=f"KVPROOF_TILES=tiles_{isa}", also=scalar)
    return subprocess.run(
        [*cross.SETS[isa][2], str(program)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
def test_a_set_agrees_with_the_scalar_kernels(isa):
    if why := cross.not_run(isa):
        pytest.skip(why)
    done = run(isa, cross.KERNELS / f"tiles_{isa}.cpp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases 108 bad 0" in done.stdout


def test_a_broken_set_is_found(tmp_path):
    if why := cross.not_run("avx2vnni"):
        pytest.skip(why)
    for name in ("tiles_avx2vnni.cpp", "tiles_avx2.h", "tiles_leaf.h"):
        shutil.copy(cross.KERNELS / name, tmp_path)
    leaf = tmp_path / "tiles_leaf.h"
    # Weights would lose their low parts.
    wrong = "store(low + 4 * lane, (a & 0x00ff00ff) | Ints(Shorts(b) << 8));"
    assert wrong in leaf.read_text()
    leaf.write_text(leaf.read_text().replace(wrong, ""))
    done = run("avx2vnni", tmp_path / "tiles_avx2vnni.cpp")
    assert done.returncode == 1 and "bad 0" not in done.stdout
