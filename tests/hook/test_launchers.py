"""The hook in processes that torchrun and mp.spawn start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import free_port

SCRIPT = Path(__file__).with_name("launched.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["torchrun", "mp.spawn"])
def test_two_ranks(launcher, tmp_path):
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    if launcher == "torchrun":
        command = [sys.executable, *run, str(SCRIPT), str(tmp_path)]
    else:
        command = [sys.executable, str(SCRIPT), str(tmp_path), str(free_port())]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error::RuntimeWarning:commkern",
    }
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        # Every block holds one value, which its scale holds exactly: (127 + 254) / 2.
        assert found["gradients"] == [[190.5 + step] for step in range(4)]
        assert found["step"] == 4
        assert found["factor"] > 3.5
        assert found["world_size"] == 2
