"""The mutants of tests/mutate.py keep up with the sources."""

from __future__ import annotations

import pytest
from tests.mutate import MUTANTS, ROOT, Mutant, holders


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_text_is_found_once(mutant: Mutant) -> None:
    assert len(holders(ROOT, mutant.old)) == 1
    for name in mutant.tests:
        assert (ROOT / "tests" / "kernels" / name).exists()
