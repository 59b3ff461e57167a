"""Sizes of files and widths of lines, over all sources."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh"}
MOST_LINES = 500
MOST_COLUMNS = 88


def sources():
    found = [
        path
        for folder in ("csrc", "python", "tests", "bench", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES
    ]
    return sorted(found)


def test_the_sources_are_found():
    assert len(sources()) > 50
    assert ROOT / "csrc/core/types.h" in sources()


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_budget(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES
    wide = [n for n, line in enumerate(lines, 1) if len(line) > MOST_COLUMNS]
    assert wide == []
