"""The bytes on the wire do not change within a version."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from commkern.payload import decode
from commkern.wire import difference, validate

HERE = Path(__file__).parent
CASES = runpy.run_path(str(HERE / "make.py"))["cases"]()
ADVICE = "python tests/golden/make.py"


@pytest.mark.parametrize("file", CASES)
def test_bytes_are_the_golden_ones(file: str) -> None:
    path = HERE / file
    assert path.exists(), f"write it with: {ADVICE}"
    assert CASES[file]() == path.read_bytes()


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in HERE.glob("*.bin")} == set(CASES)


@pytest.mark.parametrize("file", [file for file in CASES if file.startswith("payload")])
def test_golden_payloads_decode(file: str) -> None:
    raw = (HERE / file).read_bytes()
    tensor = decode(raw)
    assert tensor.shape == (3, 100)
    assert str(tensor.dtype).removeprefix("torch.") == file.split("-")[-1][:-4]


def test_golden_messages_are_valid() -> None:
    header = validate((HERE / "message-bucket.bin").read_bytes())
    assert [section.nbytes for section in header.sections] == [11, 8]
    raw = (HERE / "preamble.bin").read_bytes()
    assert difference(raw, raw) is None
    failed = difference(raw, (HERE / "preamble-error.bin").read_bytes())
    assert failed == ("error", "data", "rank 1 found that rank 3 differs in shapes")
