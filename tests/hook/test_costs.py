"""Memory that the hook holds, and messages that it sends."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType

import pytest
import torch
from tests.hook.models import batch
from tests.hook.recording import Chain, Recorder, check_ledger
from torch.nn.parallel import DistributedDataParallel

import commkern as ck
from commkern.groups import GroupWorker
from commkern.transports import ProcessGroupTransport

WIDTH, DEPTH = 256, 4


def reachable(root, stop=()):
    """Bytes of the distinct storages of all tensors that an object leads to, and their
    addresses. Types, modules and functions lead everywhere: those are not entered."""
    seen, queue, storages = set(), [root], {}
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(item))
        if isinstance(item, stop):
            continue
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        queue += gc.get_referents(item)
        queue += list(getattr(item, "__dict__", {}).values())
    storages.pop(0, None)
    return sum(storages.values()), set(storages)


def memory(rank, world_size, spec, settings):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Chain(WIDTH, DEPTH), bucket_cap_mb=0.25)
    state = ck.register(ddp, spec, exempt=None, **settings)
    own, told, with_worker, aliases = [], [], [], []
    for step in range(8):
        ddp.zero_grad()
        ddp(batch(rank, step, WIDTH)).square().mean().backward()
        told.append(state.stats()["state_nbytes"])
        nbytes, addresses = reachable(state, stop=GroupWorker)
        own.append(nbytes)
        with_worker.append(reachable(state)[0])
        gradients = {p.grad.untyped_storage().data_ptr() for p in ddp.parameters()}
        parameters = {p.untyped_storage().data_ptr() for p in ddp.parameters()}
        aliases.append(bool(addresses & (gradients | parameters)))
    return own, with_worker, aliases, told


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({}, 2),
        ({"rollback": False}, 1),
        ({"feedback": None}, 0),
        ({"feedback": "ef21"}, 4),
        ({"feedback": None, "delayed": True}, 2),
        ({"delayed": True}, 4),
        ({"delayed": True, "feedback": "ef21"}, 6),
    ],
    ids=str,
)
def test_memory_is_what_is_documented_and_constant(ranks, settings, copies):
    gradients = 4 * DEPTH * WIDTH**2
    # A byte for each parameter of each store: which version is committed.
    rows = DEPTH * {"ef21": 2, None: 0}.get(settings.get("feedback", "error"), 1)
    steady = 1 if "delayed" in settings else 0  # the first result has none before it
    results = ranks.run(2, memory, "quantize:bits=8", settings)
    for own, with_worker, aliases, told in results:
        assert own == [nbytes + rows for nbytes in told]
        assert set(told[steady:]) == {copies * gradients}
        assert told[0] == (copies - steady) * gradients
        assert not any(aliases)
        # One bucket of four layers first, then four of one: scratch shrinks with them.
        scratch = [a - b for a, b in zip(with_worker, own, strict=True)]
        assert len(set(scratch[3:])) == 1
        assert 0 < scratch[3] < gradients / 4


class Many(torch.nn.Module):
    """200 matrices and 300 vectors of mixed shapes, all in one bucket."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(3 + i % 17, 5 + i % 11) for i in range(200)]
        shapes += [(1 + i % 29,) for i in range(300)]
        self.values = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(shape, generator=generator))
            for shape in shapes
        )

    def forward(self, x):
        return sum((p * x).square().sum() for p in self.values)


class CountedTransport:
    """Counts the rounds of every call while it is entered."""

    def __enter__(self):
        self.calls = []
        self._bind = ProcessGroupTransport.bind
        counted = self

        def bind(transport, plan, buffers, step):
            bound = counted._bind(transport, plan, buffers, step)
            post, rounds = bound.post, []
            counted.calls.append(rounds)

            def counting(number):
                rounds.append(sum(t.nbytes for t in plan.exchanges[number].sends))
                post(number)

            bound.post = counting
            return bound

        ProcessGroupTransport.bind = bind
        return self

    def __exit__(self, *_):
        ProcessGroupTransport.bind = self._bind


def messages(rank, world_size, spec):
    ddp = DistributedDataParallel(Many(), bucket_cap_mb=25)
    recorder = Recorder(ddp, spec)
    with CountedTransport() as counted:
        for step in range(3):
            ddp.zero_grad()
            ddp(1.0 + rank + step).backward()
            recorder.note()
    sizes = [len(buckets) for buckets in recorder.buckets[:3]]
    return counted.calls, sizes, recorder.summary(), recorder.state.stats()


@pytest.mark.parametrize(
    ("spec", "rounds"),
    [("quantize:bits=8", 2), ("sign", 2), ("identity", 2), ("fixed_point:bits=8", 4)],
)
def test_messages_do_not_grow_with_the_number_of_parameters(ranks, spec, rounds):
    results = ranks.run(2, messages, spec)
    check_ledger([r[2] for r in results], spec)
    for calls, sizes, _, stats in results:
        assert sizes == [1, 1, 1]
        assert [len(posted) for posted in calls] == [rounds] * 3
        headers = 64 * rounds
        assert stats["bytes_sent"] == sum(calls[-1]) + headers
