"""The table of docs/support.md: what compressors say, and what ranks then send."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.hook.given import reduced, registered

import commkern as ck
from commkern.compressors import Identity
from commkern.layout import Member, effective

COLUMNS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NUMEL = 200_000


def table() -> dict[str, list[str]]:
    """Compressor to its cells, one for each dtype."""
    text = (Path(__file__).parents[2] / "docs" / "support.md").read_text("utf-8")
    section = text.split("\n## Values and dtypes")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    return {row[0].strip("`"): row[1:] for row in rows}


def cell(name: str, dtype: torch.dtype) -> str:
    kind = str(dtype).removeprefix("torch.")
    coder = effective(Member("w", NUMEL, 0, ck.compressor(name)), kind).compressor
    plain = coder == Identity()
    return "plain" if plain else f"{coder.bits_per_element(kind):.4g}"


def test_the_table_says_what_compressors_say():
    expected = {name: [cell(name, d) for d in COLUMNS] for name in ck.compressors()}
    assert table() == expected


def sent(rank, world_size, names):
    """Bits that a rank sends for an element: at two ranks, each element once."""
    figures = {}
    for name in names:
        for dtype in (*COLUMNS, torch.complex64):
            values = {"w": torch.ones(400, 500).to(dtype)}
            ddp, state = registered(values, name)
            reduced(ddp, values)
            figures[name, dtype] = 8 * state.stats()["bytes_sent"] / NUMEL
    return figures


def test_ranks_send_what_the_table_says(ranks):
    rows = table()
    for figures in ranks.run(2, sent, list(rows)):
        for name, cells in rows.items():
            for dtype, text in zip(COLUMNS, cells, strict=True):
                bits = torch.finfo(dtype).bits if text == "plain" else float(text)
                assert abs(figures[name, dtype] / bits - 1) < 0.02, (name, dtype)
            pairs = figures[name, torch.complex64] / figures[name, torch.float32]
            assert abs(pairs / 2 - 1) < 0.01, name
