"""The examples run as their first lines say, on two ranks, and resume in bits."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# fp32 gradients of 64 x 512 and 512 x 8 at 8.25 bits, 520 biases and headers in fp32.
FACTOR = 3.70
LINE = re.compile(
    r"rank (\d): .*?(\d+) steps, ([\d.]+) times fewer bytes, parameters (\w{16})"
)


@dataclass(frozen=True)
class Told:
    """What the ranks of a run printed at its end."""

    steps: list[int]
    factors: list[float]
    parameters: list[str]


@contextmanager
def running(
    script: str, *arguments: object, launcher: list[str]
) -> Iterator[subprocess.Popen[str]]:
    """An example on its way in two processes, of one thread each."""
    process = subprocess.Popen(
        [sys.executable, *launcher, str(EXAMPLES / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str]) -> Told:
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    lines = sorted(LINE.findall(output))
    assert [rank for rank, *_ in lines] == ["0", "1"], output
    _, steps, factors, parameters = zip(*lines, strict=True)
    return Told(list(map(int, steps)), list(map(float, factors)), list(parameters))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "package", "unit", "half", "steps", "launcher"),
    [
        ("torchrun.py", "torch", "--steps", 20, 40, TORCHRUN),
        ("accelerate_ddp.py", "accelerate", "--epochs", 1, 32, TORCHRUN),
        ("lightning_ddp.py", "lightning", "--epochs", 1, 32, []),
    ],
)
def test_a_resumed_run_equals_one_without_a_stop(
    script, package, unit, half, steps, launcher, tmp_path
):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")

    def started(folder, amount, launcher):
        path = tmp_path / folder
        return running(script, unit, amount, "--folder", path, launcher=launcher)

    with started("straight", 2 * half, launcher) as straight:
        with started("resumed", half, TORCHRUN) as begun:
            first = told(begun)
        with started("resumed", 2 * half, TORCHRUN) as gone_on:
            second = told(gone_on)
        whole = told(straight)
    assert first.steps == [steps // 2] * 2
    assert whole.steps == second.steps == [steps] * 2
    assert whole.factors == second.factors == [FACTOR] * 2
    # Replicas are equal, a stop leaves no trace, and training went on after it.
    assert whole.parameters == second.parameters == whole.parameters[:1] * 2
    assert first.parameters[0] != second.parameters[0]


def test_every_example_is_short_and_says_how_to_run_it():
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) >= 3
    for path in scripts:
        text = path.read_text("utf-8")
        assert len(text.splitlines()) <= 110, path
        assert f"examples/{path.name} --" in text, path
