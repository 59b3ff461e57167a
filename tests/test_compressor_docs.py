"""The table in docs/compressors.md says what the compressors say of themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import commkern as ck

TEXT = (Path(__file__).parents[1] / "docs" / "compressors.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| `")
]


def text(number: float | None) -> str:
    return "–" if number is None else f"{number:.3g}"  # noqa: RUF001


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_rows(row: list[str]) -> None:
    coder = ck.compressor(row[0].strip("`"))
    assert row[1:6] == [
        f"{coder.bits_per_element('float32'):.4g}",
        "no" if coder.unbiased() else "yes",
        text(coder.error_bound(1.0, "float32")),
        text(coder.variance_bound("float32")),
        text(coder.contraction("float32")),
    ]
    assert row[6]


def test_every_compressor_is_in_the_table() -> None:
    listed = {re.match(r"`(\w+)", row[0])[1] for row in ROWS}  # type: ignore[index]
    assert listed == set(ck.compressors())
