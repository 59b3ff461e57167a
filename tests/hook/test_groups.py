"""Several DDP modules in a process, parts of the world as groups, groups of one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.hook.models import batch, digest, make
from tests.hook.recording import CODERS, Chain, Recorder, check_ledger, check_lossless
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commkern as ck


def halves(rank, world_size):
    """Two modules on {0, 1} and {2, 3}; gradients 1, 3 and 5, 7; 3 and 5 steps."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rank // 2
    ddp = DistributedDataParallel(
        torch.nn.Linear(4, 1, bias=False), process_group=groups[half]
    )
    with pytest.raises(ValueError, match="the DDP module reduces over"):
        ck.CompressionState(dist.group.WORLD, "identity", module=ddp)
    with pytest.raises(ValueError, match="not a member"):
        ck.CompressionState(groups[1 - half], "identity", module=ddp.module)
    states = [
        ck.CompressionState(None, "identity", module=ddp),
        ck.CompressionState(groups[half], "identity", module=ddp.module),
    ]
    assert states[0].reducer.worker is states[1].reducer.worker
    ddp.register_comm_hook(states[rank % 2], ck.compression_hook)
    gradients = []
    for _ in range((3, 5)[half]):
        ddp.zero_grad()
        ddp(torch.full((1, 4), 2.0 * rank + 1)).sum().backward()
        gradients.append(ddp.module.weight.grad.tolist())
    return gradients, states[rank % 2].step


def test_subgroups_with_different_numbers_of_steps(ranks):
    results = ranks.run(4, halves)
    for rank, (gradients, step) in enumerate(results):
        value, steps = ((2.0, 3), (6.0, 5))[rank // 2]
        assert gradients == [[[value] * 4]] * steps
        assert step == steps


def mesh(rank, world_size):
    """One module over the rows of a mesh, another over its columns, each rank in both;
    rows and columns are summed in one backward pass."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    modules = [
        DistributedDataParallel(
            torch.nn.Linear(8, 8, bias=False), device_mesh=grid[name]
        )
        for name in ("rows", "columns")
    ]
    states = [ck.register(ddp, "identity") for ddp in modules]
    gradients = []
    for _ in range(3):
        x = torch.full((1, 8), float(rank))
        (modules[0](x) + 10 * modules[1](x)).sum().backward()
        gradients.append([ddp.module.weight.grad[0, 0].item() for ddp in modules])
        for ddp in modules:
            ddp.zero_grad()
    return gradients, [state.step for state in states]


def test_a_rank_in_two_groups_of_a_mesh(ranks):
    # "rows" joins ranks of equal column: {0, 2}, {1, 3}; "columns" {0, 1}, {2, 3}.
    expected = [(1.0, 5.0), (2.0, 5.0), (1.0, 25.0), (2.0, 25.0)]
    for (gradients, steps), wanted in zip(ranks.run(4, mesh), expected, strict=True):
        assert gradients == [list(wanted)] * 3
        assert steps == [3, 3]


def several(rank, world_size, own_groups):
    """Two modules whose steps alternate, overlap in one backward pass, and differ in
    number; each must be as if it were alone."""
    groups = [dist.new_group([0, 1]) if own_groups else None for _ in range(2)]
    settings = [{"seed": 0}, {"seed": 1}]

    def pair():
        return [
            make(process_group=group, **each)
            for group, each in zip(groups, settings, strict=True)
        ]

    specs = ("quantize:bits=4,rounding=stochastic", "sign")
    together, alone = pair(), pair()
    recorders = [Recorder(d, s) for d, s in zip(together, specs, strict=True)]
    for ddp, spec in zip(alone, specs, strict=True):
        ck.register(ddp, spec, exempt=None)

    def descend(ddp):
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.1 * p.grad
        ddp.zero_grad()

    first, second = together
    for step in range(6):
        a = first(batch(rank, step)).square().mean()
        if step % 3 == 1:
            a.backward()
        else:
            b = second(batch(rank, 50 + step)).square().mean()
            (a + b).backward()
            recorders[1].note()
            descend(second)
        recorders[0].note()
        descend(first)
    for which, steps in enumerate((range(6), (50, 52, 53, 55))):
        for step in steps:
            alone[which](batch(rank, step)).square().mean().backward()
            descend(alone[which])
    return (
        [digest(d) for d in together],
        [digest(d) for d in alone],
        [r.summary() for r in recorders],
        [r.state.step for r in recorders],
    )


@pytest.mark.parametrize("own_groups", [False, True])
def test_several_modules_in_one_process(ranks, own_groups):
    results = ranks.run(2, several, own_groups)
    assert results[0][0] == results[1][0]
    for together, alone, _, steps in results:
        assert together == alone
        assert steps == [6, 4]
    for which in range(2):
        check_ledger([r[2][which] for r in results])


def foreign_module(rank, world_size):
    """A state that was made for another module is refused at the first call."""
    one, other = make(), make()
    state = ck.CompressionState(None, "identity", module=one)
    other.register_comm_hook(state, ck.compression_hook)
    loss = other(batch(rank, 0)).square().mean()
    with pytest.raises(ValueError, match="not in the module that this state was made"):
        loss.backward()
    return True


def test_a_state_of_another_module(ranks):
    assert all(ranks.run(2, foreign_module))


def alone(rank, world_size, subgroup):
    """World size 1: nothing is sent, the gradient goes through the coder all the
    same, and the ledger holds."""
    group = [dist.new_group([r]) for r in range(world_size)][rank] if subgroup else None
    results = {}
    for spec in CODERS:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Chain(64), process_group=group)
        recorder = Recorder(ddp, spec)
        outputs = []
        with ddp.join():
            for step in range(3 + rank):
                ddp.zero_grad()
                with ddp.no_sync():
                    ddp(batch(rank, step)).square().mean().backward()
                ddp(batch(rank, 50 + step)).square().mean().backward()
                recorder.note()
                outputs.append({n: p.grad for n, p in ddp.module.named_parameters()})
        sent = recorder.state.stats()["bytes_sent"]
        results[spec] = outputs, recorder.steps, recorder.summary(), sent
    return results


@pytest.mark.parametrize(("world_size", "subgroup"), [(1, False), (2, True)])
def test_a_group_of_one(ranks, world_size, subgroup):
    for rank, results in enumerate(ranks.run(world_size, alone, subgroup)):
        for spec, (outputs, steps, summary, sent) in results.items():
            assert sent == 0
            assert len(outputs) == 3 + rank
            check_ledger([summary], spec)
            for output, local in zip(outputs, steps, strict=False):
                if spec == "identity":
                    check_lossless(output, [local])
                else:
                    weight = output["layers.0.weight"]
                    assert not torch.equal(weight.double(), local["layers.0.weight"])
