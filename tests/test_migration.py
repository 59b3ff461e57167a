"""docs/migration.md names compressors that exist, and calls none missing that does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import commkern as ck

TEXT = (Path(__file__).parents[1] / "docs" / "migration.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("| there |")
]
SPECS = sorted(set(re.findall(r"`(\w+:\w+=[^`]*)`", TEXT)))


@pytest.mark.parametrize("spec", SPECS)
def test_every_string_makes_a_compressor(spec: str) -> None:
    coder = ck.compressor(spec)
    assert coder == ck.compressor(str(coder))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_rows(row: list[str]) -> None:
    there, here, _ = row
    offered = re.fullmatch(r"`([^`]+)`", here)
    if offered:
        ck.compressor(offered[1])
    else:
        assert here in ("not yet", "–")  # noqa: RUF001
        words = {word.lower() for word in re.findall(r"[a-zA-Z0-9]+", there)}
        assert not words & set(ck.compressors()), "it is there by now"


def test_the_page_has_what_people_come_from() -> None:
    assert len(ROWS) > 25
    assert len(SPECS) > 12
    text = " ".join(row[0] for row in ROWS)
    grace = "none fp16 qsgd signsgd signum efsignsgd onebit terngrad natural topk "
    for name in (grace + "randomk threshold dgc powersgd").split():
        assert f"`{name}`" in text
