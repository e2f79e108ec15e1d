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
    assert "cases 144 bad 0" in done.stdout


@pytest.mark.parametrize(("isa", "file", "sound", "broken"), BROKEN.values(), ids=BROKEN)
def test_a_broken_set_is_found(isa, file, sound, broken, tmp_path):
    if why := cross.not_run(isa):
        pytest.skip(why)
    own = f"tiles_{isa}.cpp"
    for name in {own, "tiles_avx2.h", "tiles_leaf.h"}:
        shutil.copy(cross.KERNELS / name, tmp_path)
    text = (tmp_path / file).read_text()
    assert sound in text
    (tmp_path / file).write_text(text.replace(sound, broken))
    done = run(isa, tmp_path / own)
    assert done.returncode == 1 and "bad 0" not in done.stdout
