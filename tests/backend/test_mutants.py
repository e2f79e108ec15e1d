"""Broken CPU kernels: each mutant ends FAILED by the rules that it names."""

import pytest

from kvproof import backends
from kvproof.errors import Refused
from kvproof.mutants import MUTANTS
from kvproof.rules import examine

try:
    CPU = backends.get("cpu")
except Refused as refused:
    pytest.skip(f"cpu backend: {refused}", allow_module_level=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.name}-{m.case.op}-{m.case.key}")
def test_mutant_is_caught(mutant):
    exam = mutant.examine(CPU)
    assert mutant.caught(exam), (
        f"expected {sorted(mutant.rules)}, not {sorted(mutant.passes)}; failed by "
        f"{[f'{f.rule}: {f.text}' for f in exam.failed]}"
    )


def test_no_mutant_is_caught_only_because_the_kernel_is_broken():
    """The cases themselves pass on the sound backend, so it is the mutation that is caught."""
    for case in {m.case for m in MUTANTS}:
        assert examine(case, CPU).failed == [], str(case)
