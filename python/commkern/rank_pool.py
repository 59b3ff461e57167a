"""Processes that run a function as the ranks of a gloo group and stay alive between
calls: importing torch takes far longer than most of what is run in them."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commkern import rank_worker

if TYPE_CHECKING:
    from typing_extensions import Self

# DistributedDataParallel imports torch._dynamo, which takes as long as torch itself.
_PRELOAD = ["numpy", "torch", "torch._dynamo", "commkern.rank_worker"]
_GRACE_S = 5.0  # for a process that should be ending or idle
_LINGER_S = 1.0  # for the other ranks once one has failed
# A signal that arrives just before a wait begins doesn't end it: Python's handler
# raises only once the wait is over.
_SIGNAL_S = 0.5


class RankDied(RuntimeError):  # noqa: N818 - the name of the event
    """A rank's process ended without a result."""


class RankTimeout(RuntimeError):  # noqa: N818
    """Ranks did not finish in time; the text holds their stacks."""


class RankTraceback(Exception):  # noqa: N818
    """The cause of an exception that a rank raised: which rank, and its traceback."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"\nrank {self.rank}: {self.text}"


@dataclass(frozen=True)
class Died:
    """The result of a rank that was expected to die. A signal is a negative code."""

    exitcode: int


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _Process:
    """One worker process: its pipe, and the file its stack is dumped to."""

    def __init__(self, port: int, threads: int, stacks: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.conn, theirs = context.Pipe()
        self.stacks = stacks
        self.handle = context.Process(
            target=rank_worker.serve,
            args=(theirs, port, threads, str(stacks)),
            daemon=True,
        )
        self.handle.start()
        theirs.close()

    def send(self, task: rank_worker.Task | None) -> None:
        with contextlib.suppress(OSError):  # dead: found when its result is awaited
            self.conn.send_bytes(pickle.dumps(task))

    def stack(self) -> str:
        """Where the process is now, as faulthandler prints it."""
        with contextlib.suppress(OSError, TypeError):
            os.kill(self.handle.pid, signal.SIGUSR1)  # type: ignore[arg-type]
            deadline = time.monotonic() + _GRACE_S
            text, before = "", ""
            while not text or text != before:  # yet to answer, or still writing
                if time.monotonic() > deadline or not self.handle.is_alive():
                    break
                time.sleep(0.2)
                before, text = text, self.stacks.read_text()
            return text.strip() or "(no stack: not started)"
        return "(no stack)"

    def kill(self) -> None:
        self.handle.kill()
        self.handle.join(_GRACE_S)
        self.conn.close()


class RankPool:
    """``run`` calls a function on every rank of a new gloo group; gives the results.

    Processes are forked from a server that has imported torch, are kept while all goes
    well, and are replaced after any failure. Use it as a context manager, or call
    ``close``. Not for use from several threads.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._processes: list[_Process] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="commkern-ranks-")
        self._names = itertools.count()
        self._store: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process."""
        self._kill(self._processes)
        self._store = None
        self._scratch.cleanup()

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = 60.0,
        group_timeout_s: float | None = None,
        expect_death: Sequence[int] = (),
        on_message: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Call ``fn(rank, world_size, *args)`` on every rank; results in rank order.

        ``fn`` is a module-level function, called after ``init_process_group("gloo")``
        with a time-out of ``group_timeout_s`` (default: ``timeout_s``, or 30 minutes).
        The first exception that a rank raises is raised here with a ``RankTraceback``
        as its cause; the other ranks get a few seconds more, then are killed. A process
        that dies raises RankDied, unless its rank is in ``expect_death``: then its
        result is ``Died``. Ranks that are not done after ``timeout_s`` are killed and
        RankTimeout names them and shows their stacks. ``on_message(rank, value)`` gets
        what ranks pass to ``rank_worker.send_message``.
        """
        _check(world_size, expect_death)
        task = rank_worker.Task.of(fn, args)
        self._start(world_size)
        members = self._processes[:world_size]
        group_timeout = group_timeout_s or timeout_s or 1800.0
        name = f"run{next(self._names)}"
        run = _Run(members, set(expect_death), timeout_s, on_message)
        reusable = False
        try:
            for rank, process in enumerate(members):
                process.send(task.placed(rank, world_size, name, group_timeout))
            results = run.collect()
            if run.clean:
                self._release(members)
                reusable = True
            return results
        finally:
            if not reusable:
                self._kill(members)

    def _start(self, world_size: int) -> None:
        for process in [p for p in self._processes if not p.handle.is_alive()]:
            self._kill([process])
        if self._store is None:
            self._store = _serve_store()
        with _single_threaded_environment():
            while len(self._processes) < world_size:
                stacks = Path(self._scratch.name) / f"stack{next(self._names)}"
                process = _Process(self._store.port, self._threads, stacks)
                self._processes.append(process)

    def _release(self, members: list[_Process]) -> None:
        """Let the ranks destroy their group, now that all of them are done."""
        for process in members:
            process.send(None)
        deadline = time.monotonic() + _GRACE_S
        for process in members:
            left = max(0.0, deadline - time.monotonic())
            try:
                idle = process.conn.poll(left) and process.conn.recv_bytes()
            except (EOFError, OSError):
                idle = False
            if not idle:
                self._kill([process])

    def _kill(self, processes: list[_Process]) -> None:
        for process in list(processes):
            process.kill()
            if process in self._processes:
                self._processes.remove(process)


class _Run:
    """Waits for the results of one call. ``clean``: every rank returned a value."""

    def __init__(
        self,
        members: list[_Process],
        expect_death: set[int],
        timeout_s: float | None,
        on_message: Callable[[int, Any], None] | None,
    ) -> None:
        self._members = members
        self._expect_death = expect_death
        self._timeout_s = timeout_s
        self._on_message = on_message
        self._results: dict[int, Any] = {}
        self._failures: list[BaseException] = []
        self._failed_at = 0.0
        self.clean = False

    def collect(self) -> list[Any]:
        deadline = _deadline(self._timeout_s)
        while len(self._results) < len(self._members):
            if not self._wait(deadline):
                break
            if self._failures:
                deadline = min(deadline, self._failed_at + _LINGER_S)
        self._raise_failure()
        self.clean = not self._expect_death
        return [self._results[rank] for rank in range(len(self._members))]

    def _wait(self, deadline: float) -> bool:
        waiting: dict[Any, int] = {}
        for rank, process in enumerate(self._members):
            if rank not in self._results:
                waiting[process.conn] = rank
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        for conn in wait(list(waiting), min(left, _SIGNAL_S)):
            self._receive(waiting[conn], conn)  # type: ignore[arg-type]
        return True

    def _receive(self, rank: int, conn: Connection) -> None:
        try:
            reply = rank_worker.Reply.load(conn.recv_bytes())
        except (EOFError, OSError):
            self._results[rank] = self._death(rank)
        else:
            if reply.kind == "message":
                if self._on_message:
                    self._on_message(rank, reply.value)
                return
            self._results[rank] = reply.value
            if reply.kind == "error":
                reply.value.__cause__ = RankTraceback(rank, reply.traceback)
                self._results[rank] = _Failure(reply.value)
        result = self._results[rank]
        if isinstance(result, _Failure):
            self._fail(result.error)
        elif rank in self._expect_death and not isinstance(result, Died):
            error = RankDied(f"rank {rank} was expected to die but returned {result!r}")
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failed_at = self._failed_at or time.monotonic()
        self._failures.append(error)

    def _death(self, rank: int) -> Died | _Failure:
        handle = self._members[rank].handle
        handle.join(_GRACE_S)
        code = handle.exitcode if handle.exitcode is not None else 0
        if rank in self._expect_death:
            return Died(code)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return _Failure(RankDied(f"rank {rank} died {how}"))

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures[0]
        late = [r for r in range(len(self._members)) if r not in self._results]
        if late:
            stacks = [f"rank {r}:\n{self._members[r].stack()}" for r in late]
            raise RankTimeout(
                f"ranks {late} of {len(self._members)} were not done after "
                f"{self._timeout_s} s\n" + "\n".join(stacks)
            )


def _check(world_size: int, expect_death: Sequence[int]) -> None:
    if world_size < 1:
        raise ValueError(f"expected a world size of at least 1, got {world_size}")
    if not all(0 <= rank < world_size for rank in expect_death):
        raise ValueError(
            f"expected ranks below the world size {world_size} in expect_death, "
            f"got {list(expect_death)}"
        )


def _deadline(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


def _serve_store() -> Any:
    """The store lives in this process, so that it outlives any rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )


@contextlib.contextmanager
def _single_threaded_environment() -> Iterator[None]:
    """The server that forks must not have threads of its own; it inherits this."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
