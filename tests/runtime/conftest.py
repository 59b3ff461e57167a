import pytest

from commkern.local_transport import LocalGroup


class Way:
    """A runner with a transport of threads."""

    def __init__(self, name):
        self.name = name
        self.is_compiled = name != "reference"

    def endpoints(self, world_size, timeout_s=30.0):
        if self.name == "threads":
            from commkern._core import ThreadGroup as Group
        else:
            Group = LocalGroup  # noqa: N806
        group = Group(world_size, timeout_s)
        return [group.endpoint(rank) for rank in range(world_size)]


@pytest.fixture(params=["threads", "callbacks", "reference"])
def way(request, monkeypatch):
    """Compiled with threads, compiled with a callback transport, and pure Python."""
    found = Way(request.param)
    if found.is_compiled:
        monkeypatch.delenv("COMMKERN_BACKEND", raising=False)
    else:
        monkeypatch.setenv("COMMKERN_BACKEND", "reference")
    return found
