"""The side of ``rank_pool`` that runs in the rank's process."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Task:
    """A call: the function by the module (and file) it lives in, and its arguments."""

    module: str
    file: str | None
    qualname: str
    arguments: bytes
    rank: int = 0
    world_size: int = 1
    name: str = ""
    group_timeout_s: float = 0.0

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...]) -> Task:
        module = sys.modules.get(getattr(fn, "__module__", None) or "")
        qualname = getattr(fn, "__qualname__", repr(fn))
        if getattr(module, qualname, None) is not fn:
            raise TypeError(f"expected a module-level function, got {qualname}")
        file = getattr(module, "__file__", None)
        return cls(fn.__module__, file, qualname, pickle.dumps(args))

    def placed(self, rank: int, world_size: int, name: str, timeout_s: float) -> Task:
        return replace(
            self,
            rank=rank,
            world_size=world_size,
            name=name,
            group_timeout_s=timeout_s,
        )

    def loaded(self) -> Callable[[], Any]:
        """The call, once what it needs is imported."""
        function = getattr(_module(self.module, self.file), self.qualname)
        args = pickle.loads(self.arguments)
        return lambda: function(self.rank, self.world_size, *args)

    def call(self) -> Any:
        return self.loaded()()


@dataclass(frozen=True)
class Reply:
    """``kind`` is "result", "error", "message" or "idle"."""

    kind: str
    value: Any = None
    traceback: str = ""

    def dump(self) -> bytes:
        return pickle.dumps((self.kind, self.value, self.traceback))

    @classmethod
    def load(cls, data: bytes) -> Reply:
        return cls(*pickle.loads(data))


_connection: Connection | None = None


def send_message(value: Any) -> None:
    """From inside a rank: pass a value to the ``on_message`` of the run."""
    if _connection is None:
        raise RuntimeError("send_message was called outside a rank of a pool")
    _connection.send_bytes(Reply("message", value).dump())


def serve(connection: Connection, port: int, threads: int, stacks: str) -> None:
    """Run tasks until the pipe closes. ``port`` is the store's, on this host."""
    global _connection
    _connection = connection
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(threads)
    with open(stacks, "w") as file, contextlib.suppress(EOFError, BrokenPipeError):
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
        while True:
            _run(connection, store, pickle.loads(connection.recv_bytes()))


def _run(connection: Connection, store: Any, task: Task) -> None:
    import torch.distributed as dist

    try:
        mine = dist.PrefixStore(task.name, store)  # type: ignore[attr-defined]
        call = task.loaded()
        # How long a process takes to start is no matter of the group's time-out, nor
        # may a rank end while others still connect to it.
        _meet(mine, "loaded", task.world_size)
        dist.init_process_group(
            "gloo",
            store=mine,
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.group_timeout_s),
        )
        _meet(mine, "connected", task.world_size)
        reply = Reply("result", call()).dump()
    except BaseException as error:  # noqa: BLE001 - raised in the parent
        reply = _error_reply(error)
    connection.send_bytes(reply)
    connection.recv_bytes()  # all ranks are done
    if dist.is_initialized():
        dist.destroy_process_group()
    connection.send_bytes(Reply("idle").dump())


def _meet(store: Any, place: str, world_size: int) -> None:
    """Wait for all ranks; if one does not come, until the parent ends this one."""
    if store.add(place, 1) == world_size:
        store.set(f"all {place}", "")
    store.wait([f"all {place}"], timedelta(days=1))


def _error_reply(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        reply = Reply("error", error, text).dump()
        pickle.loads(reply)
    except Exception:  # noqa: BLE001 - pickling runs code of the exception type
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        reply = Reply("error", substitute, text).dump()
    return reply


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _module(name: str, file: str | None) -> ModuleType:
    """Import a module by name or, as test runners do, from its file under that name."""
    if name in sys.modules:
        return sys.modules[name]
    if name != "__main__":
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    elif "__mp_main__" in sys.modules:
        return sys.modules["__mp_main__"]
    _add_parents(name, file)
    spec = importlib.util.spec_from_file_location(name, file or "")
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _add_parents(name: str, file: str | None) -> None:
    """Stand-ins for packages that pickle looks up, where they have no file."""
    directory = os.path.dirname(file or "")
    while "." in name:
        name = name.rpartition(".")[0]
        if name not in sys.modules:
            parent = ModuleType(name)
            parent.__path__ = [directory]
            sys.modules[name] = parent
        directory = os.path.dirname(directory)
