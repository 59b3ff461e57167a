"""The DDP hook in real training over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.hook.models import (
    digest,
    everything,
    local_gradients,
    make,
    train,
)

import commkern as ck

MODES = [
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
]


def with_and_without_hook(rank, world_size, dtype):
    plain, hooked = make(dtype=dtype), make(dtype=dtype)
    ck.register(hooked, "identity")
    # DDP halves before it sums: a scaled loss keeps fp16 clear of underflow.
    for ddp in (plain, hooked):
        train(ddp, rank, range(4), lr=1e-5, loss_scale=2.0**14)
    return digest(plain), digest(hooked)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_identity_is_no_hook_in_bits_at_two_ranks(ranks, dtype):
    results = ranks.run(2, with_and_without_hook, dtype)
    assert len({d for pair in results for d in pair}) == 1


def exact_sums(rank, world_size):
    """Small integers, whose sums do not round: equal at any power of two."""
    gradients = []
    for hooked in (False, True):
        ddp = make(width=16)
        if hooked:
            ck.register(ddp, "identity")
        ddp(torch.ones(1, 16))  # DDP wants a forward before the backward
        x = torch.arange(16.0).reshape(1, 16) + rank
        sum(layer(x).sum() for layer in ddp.module.layers).backward()
        gradients.append([p.grad.clone() for p in ddp.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_identity_is_no_hook_for_exact_sums(ranks, world_size):
    assert all(ranks.run(world_size, exact_sums))


def replicas_and_ledger(rank, world_size, spec, mode, feedback):
    ddp = make(**mode)
    state = ck.register(ddp, spec, feedback=feedback, seed=3)
    sums: dict[str, torch.Tensor] = {}
    digests = []

    def note(step: int) -> None:
        mine = local_gradients(ddp, rank, step)
        for name, p in ddp.module.named_parameters():
            pair = torch.stack([mine[name], p.grad.double()])
            sums[name] = sums.get(name, 0) + pair
        digests.append(digest(ddp))

    train(ddp, rank, range(6), after_backward=note)
    residuals = state.state_dict()["residuals"]
    return digests, sums, residuals, state.step


@pytest.mark.parametrize("mode", MODES, ids=lambda m: next(iter(m), "default"))
def test_replicas_are_equal_and_the_ledger_holds(ranks, mode):
    for spec in everything():
        results = ranks.run(2, replicas_and_ledger, spec, mode, "error")
        assert results[0][0] == results[1][0], spec
        assert results[0][3] == 6
        check_ledger(results, spec)


def check_ledger(results, spec):
    """sum of results + mean residual = sum of mean gradients, by name."""
    world_size = len(results)
    for name, (_, reduced) in results[0][1].items():
        wanted = sum(sums[name][0] for _, sums, _, _ in results) / world_size
        left = sum(
            residuals[name].double() if name in residuals else torch.zeros(())
            for _, _, residuals, _ in results
        )
        left = (left / world_size).reshape(-1) if left.dim() else left
        error = (reduced.reshape(-1) + left - wanted.reshape(-1)).norm() / wanted.norm()
        assert error < 1e-5, (spec, name, error)


@pytest.mark.parametrize("world_size", [3, 4])
def test_ledger_at_other_world_sizes(ranks, world_size):
    for spec in ("quantize:bits=4,rounding=stochastic", "fixed_point:bits=8"):
        results = ranks.run(world_size, replicas_and_ledger, spec, {}, "error")
        assert len({tuple(r[0]) for r in results}) == 1
        check_ledger(results, spec)


def bits_do_not_depend_on_buckets(rank, world_size, spec, cap):
    ddp = make(bucket_cap_mb=cap)
    ck.register(ddp, spec)
    train(ddp, rank, range(4))
    return digest(ddp)


@pytest.mark.parametrize("coder", ["quantize:bits=4", "fixed_point:bits=8"])
def test_bits_do_not_depend_on_the_bucket_layout(ranks, coder):
    spec = f"{coder},rounding=stochastic"
    results = [
        ranks.run(3, bits_do_not_depend_on_buckets, spec, cap)
        for cap in (0.001, 0.03, 25)
    ]
    assert len({d for r in results for d in r}) == 1


def settings_of_every_parameter(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=8")
    everything = make()
    other = ck.register(everything, "quantize:bits=8", exempt=None)
    train(ddp, rank, range(2))
    train(everything, rank, range(2))
    return state.report(), other.report(), state.stats(), other.stats()


def test_vectors_are_exempt_by_default(ranks):
    report, other, stats, other_stats = ranks.run(2, settings_of_every_parameter)[0]
    for name, coder in report.items():
        assert coder.startswith("quantize" if name.endswith("weight") else "identity")
    assert all(coder.startswith("quantize") for coder in other.values())
    weights, vectors = 4 * 64 * 64, 4 * 64
    assert stats["bytes_dense"] == 4 * (weights + vectors)
    coded = weights * 33 / 32 + 4 * vectors
    assert coded < stats["bytes_sent"] < coded + 3000
    assert stats["compression_factor"] == stats["bytes_dense"] / stats["bytes_sent"]
    assert other_stats["bytes_sent"] < stats["bytes_sent"]
    assert stats["residual_norm"] > 0
    assert stats["state_nbytes"] == 2 * 4 * weights
    assert stats["step"] == 1


def bytes_by_step(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=8", start_step=3)
    sent = []
    train(ddp, rank, range(5), after_backward=lambda _: sent.append(state.stats()))
    return [s["compression_factor"] for s in sent]


def test_start_step_is_dense_before(ranks):
    for factors in ranks.run(2, bytes_by_step):
        assert all(f < 1 for f in factors[:3])
        assert all(f > 2 for f in factors[3:])


def mixed_dtypes(rank, world_size, spec):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "a": torch.nn.Linear(40, 40),
            "b": torch.nn.Linear(40, 40).bfloat16(),
            "c": torch.nn.Linear(40, 40).double(),
        }
    )
    ddp = torch.nn.parallel.DistributedDataParallel(Mixed(model), bucket_cap_mb=0.001)
    ck.register(ddp, spec)
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.randn(8, 40)).sum().backward()
    dtypes = [p.grad.dtype for p in ddp.parameters()]
    return digest_of_gradients(ddp), dtypes == [p.dtype for p in ddp.parameters()]


class Mixed(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        x = self.layers["a"](x)
        x = self.layers["b"](x.bfloat16())
        return self.layers["c"](x.double())


def digest_of_gradients(ddp):
    return [p.grad.double().sum().item() for p in ddp.parameters()]


@pytest.mark.parametrize("spec", ["quantize:bits=8", "fixed_point:bits=8"])
def test_mixed_dtypes(ranks, spec):
    (first, kept), (second, _) = ranks.run(2, mixed_dtypes, spec)
    assert first == second
    assert kept


def plain_collectives_are_left_alone(rank, world_size):
    before = dist.all_reduce
    values = torch.tensor([1 / 3, 1e-9, 1e9])
    first = values.clone()
    dist.all_reduce(first)
    ddp = make()
    ck.register(ddp, "quantize:bits=4")
    train(ddp, rank, range(2))
    second = values.clone()
    dist.all_reduce(second)
    return torch.equal(first, second) and dist.all_reduce is before


def test_other_collectives_are_untouched(ranks):
    assert all(ranks.run(2, plain_collectives_are_left_alone))


def write_into_old_gradients(rank, world_size, view):
    ddp = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(16, 16), gradient_as_bucket_view=view
    )
    ck.register(ddp, "identity")
    results = []
    for step in range(5):
        ddp.zero_grad(set_to_none=not view)
        ddp(torch.full((1, 16), float(step + rank))).sum().backward()
        results.append(ddp.module.weight.grad[0, 0].item())
        ddp.module.weight.grad.fill_(1e30)
    return results


@pytest.mark.parametrize("view", [False, True])
def test_no_alias_of_an_old_gradient_is_kept(ranks, view):
    for results in ranks.run(2, write_into_old_gradients, view):
        assert results == [0.5, 1.5, 2.5, 3.5, 4.5]
