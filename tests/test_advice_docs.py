"""What docs/advice.md says is what the code does."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import commkern as ck
from commkern import advice
from commkern.auto import Auto

TEXT = (Path(__file__).parents[1] / "docs" / "advice.md").read_text("utf-8")


def test_the_table_of_copies():
    rows = re.findall(r"\| `(\S+)` \| (\S+) \| (\S+) \| (\S+) \|", TEXT)
    listed = {name: tuple(map(float, numbers)) for name, *numbers in rows}
    assert listed == advice.COPIES
    assert f"{advice.COPY_BYTES_PER_S / 1e9:.0f} GB/s" in TEXT


def test_the_numbers_of_auto():
    settings = Auto()
    steps = settings.rounds * len(settings.coders)
    assert f"five times\neach: {steps} steps" in TEXT
    assert f"{settings.margin:.0%}".replace("%", " %") in TEXT
    assert f"up to {3 * steps} steps" in TEXT


def test_the_examples():
    tests = doctest.DocTestParser().get_doctest(
        TEXT.replace("```", ""), {"ck": ck}, "advice.md", None, 0
    )
    assert len(tests.examples) == 2
    assert doctest.DocTestRunner().run(tests).failed == 0
