"""The mutants of tests/mutate.py keep up with the sources."""

from __future__ import annotations

import pytest
from tests.mutate import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_text_is_found_once(mutant: Mutant) -> None:
    assert (ROOT / "csrc" / mutant.file).read_text().count(mutant.old) == 1
    for name in mutant.tests:
        assert (ROOT / "tests" / "kernels" / name).exists()
