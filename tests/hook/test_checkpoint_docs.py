"""The examples of docs/checkpoints.md run in order, in one process."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commkern as ck

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_examples_run():
    torch.manual_seed(0)
    names = {"model": torch.nn.Linear(64, 64), "rank": 0, "world_size": 1}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 10
    for index, block in enumerate(blocks):
        code = compile(block, f"{PAGE.name}, example {index + 1}", "exec")
        warns = pytest.warns(UserWarning, match="reset=True: going on at step 1")
        with warns if "reset=True" in block else contextlib.nullcontext():
            exec(code, names)  # noqa: S102 - the text is our own
    assert names["differences"] == {"weight": 0.0, "bias": 0.0}
    assert names["twin"].step == 1
    assert names["full"]["residuals"]["weight"].any()


def test_the_table_names_what_there_is():
    text = PAGE.read_text("utf-8")
    for name in re.findall(r"`state\.(\w+)\(", text):
        assert hasattr(ck.CompressionState, name), name
    for name in re.findall(r"`commkern\.(\w+)", text):
        assert hasattr(ck, name), name
