"""Importing commkern prints nothing and leaves torch alone."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import torch, torch.distributed, torch.nn.parallel
watched = (torch, torch.distributed, torch.nn.parallel, torch.optim)
before = [{name: id(getattr(m, name)) for name in dir(m)} for m in watched]
threads = torch.get_num_threads()
import commkern
after = [{name: id(getattr(m, name, None)) for name in old}
         for m, old in zip(watched, before)]
assert before == after
assert [set(dir(m)) - set(old) for m, old in zip(watched, before)] == [set()] * 4
assert torch.get_num_threads() == threads
assert not torch.distributed.is_initialized()
"""


def test_importing_is_silent_and_changes_nothing_in_torch():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
