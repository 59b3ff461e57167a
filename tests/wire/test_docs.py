"""The example in docs/wire-format.md is what the code writes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import commkern as ck
from commkern.payload import decode
from commkern.wire.preamble import FIELDS

TEXT = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()


def documented_bytes() -> bytes:
    raw = bytearray()
    for offset, pairs in re.findall(
        r"^ *(\d+)  ((?:[0-9a-f]{2} ?)+)", TEXT, re.MULTILINE
    ):
        assert int(offset) == len(raw)
        raw += bytes.fromhex(pairs)
    return bytes(raw)


def test_example_message() -> None:
    tensor = torch.tensor([0.0, 1.0, -2.0, 7.0])
    payload = ck.Quantize(bits=4, block_size=16).compress(tensor, step=3)
    assert payload.data.numpy().tobytes() == documented_bytes()
    assert torch.equal(decode(documented_bytes()), tensor)


def test_causes_of_error_preambles() -> None:
    listed = re.search(r"0 none \(.*?\), (1 version.*? sender)\.", TEXT, re.DOTALL)
    assert listed
    causes = re.findall(r"(\d+) ([a-z ]+)", listed[1].replace("\n", " "))
    assert [(int(code), name.strip()) for code, name in causes] == [
        (code, name) for code, name in enumerate(FIELDS) if code
    ]


def test_every_compressor_has_its_layout_documented() -> None:
    for name in ck.compressors():
        assert f"| `{name}` |" in TEXT, name
