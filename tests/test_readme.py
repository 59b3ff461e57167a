"""The README's Python examples run in order, in one process; its links work."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commkern as ck
from commkern.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def group(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_examples_run(capsys):
    assert len(blocks("python")) == 4
    names = {"model": torch.nn.Linear(64, 64)}
    for index, block in enumerate(blocks("python")):
        code = compile(block, f"README.md, example {index + 1}", "exec")
        exec(code, names)  # noqa: S102 - the text is our own
    nbytes, factor = capsys.readouterr().out.split()
    assert int(nbytes) < 4 * 4096 / 6
    assert float(factor) > 6
    assert torch.equal(names["restored"], ck.decode(names["payload"].data))
    names["ddp"](torch.randn(8, 64)).sum().backward()
    assert {"bytes_sent", "bytes_dense"} <= names["state"].stats().keys()


def test_every_compressor_is_in_the_table():
    for name in ck.compressors():
        assert re.search(rf"^\| `{name}\b", README, re.MULTILINE), name


def test_named_commands_exist(capsys):
    for command in set(re.findall(r"`commkern (\w+)", README)):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        capsys.readouterr()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/index.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"(?m)(?:^|`)make (\w+)", text):
            assert re.search(rf"(?m)^{target}:", makefile), target
