"""Every compressor with gradients of every dtype, alone and in one model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.hook.given import real, reduced, registered, simulated
from tests.laws import EVERY
from tests.simulation import gradient, same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
]
STEPS = 3


def values_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    """One parameter of each dtype, some larger than a block, none a multiple of it."""
    values = {}
    for number, dtype in enumerate(DTYPES):
        part = torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
        flat = gradient(rank, 2 * 305, part, seed=10 * step + number)
        name = str(dtype).replace("torch.", "of_")
        if dtype.is_complex:
            values[name] = torch.view_as_complex(flat.reshape(5, 61, 2))
        else:
            values[name] = flat.reshape(5, 122)
    return values


def every_dtype(rank, world_size, specs):
    for spec in specs:
        ddp, state = registered(values_of(rank, 0), spec, seed=3)
        ledger = {}
        for step in range(STEPS):
            parts = [values_of(r, step) for r in range(world_size)]
            results = reduced(ddp, parts[rank])
            if step == 0:
                check_bits(spec, results, parts)
            for name, result in results.items():
                entry = (real(result), [real(p[name]).double() for p in parts])
                ledger.setdefault(name, []).append(entry)
        if state.feedback is not None:
            check_ledger(spec, ledger, state, world_size)


def check_bits(spec, results, parts):
    for name, result in results.items():
        assert result.dtype == parts[0][name].dtype, (spec, name)
        expected = simulated(spec, name, [p[name] for p in parts], seed=3)
        assert same_bits(result, expected), (spec, name)


def check_ledger(spec, ledger, state, world_size):
    """Results + mean residual = mean gradients, but for the results' own rounding."""
    residuals = state.state_dict()["residuals"]
    for name, entries in ledger.items():
        assert (name in residuals) == (spec != "identity")
        held = residuals.get(name, torch.zeros(entries[0][0].numel()))
        assert held.dtype == torch.float32
        left = held.double()
        dist.all_reduce(left)
        total = sum(result.double() for result, _ in entries)
        wanted = sum(sum(parts) for _, parts in entries) / world_size
        error = total.reshape(-1) + left / world_size - wanted.reshape(-1)
        allowed = 1e-5 * wanted.abs().max()
        info = torch.finfo(entries[0][0].dtype)
        if info.bits == 16:  # half a unit of each result
            rounded = sum(result.double().abs() for result, _ in entries)
            allowed = allowed + info.eps / 2 * rounded.reshape(-1)
        assert (error.abs() <= allowed).all(), (spec, name, error.abs().max())


def test_every_compressor_reduces_every_dtype_in_one_model(ranks):
    ranks.run(2, every_dtype, EVERY)


# --- buckets that change places -------------------------------------------------------


class TwoTypes(nn.Module):
    """Equal layers of two dtypes: their buckets change places after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).bfloat16())


def watched(seen, bucket):
    state, order = seen
    order.append((bucket.index(), str(bucket.buffer().dtype)))
    return ck.compression_hook(state, bucket)


def inputs(rank: int, step: int) -> torch.Tensor:
    return (torch.arange(16).reshape(2, 8) % 5 - 2.0) * (1 + rank + step)


def local(model: nn.Module, rank: int, step: int) -> dict[str, torch.Tensor]:
    twin = TwoTypes()
    twin.load_state_dict(model.state_dict())
    twin(inputs(rank, step)).float().sum().backward()
    return {name: p.grad for name, p in twin.named_parameters()}


def four_steps(ddp, state, order, rank, world_size):
    """After each of four steps: its number, and what each rank has given."""
    ddp.register_comm_hook((state, order), watched)
    for step in range(4):
        ddp.zero_grad()
        ddp(inputs(rank, step)).float().sum().backward()
        yield step, [local(ddp.module, r, step) for r in range(world_size)]


def places_change(rank, world_size, spec):
    torch.manual_seed(0)
    ddp, order = DistributedDataParallel(TwoTypes()), []
    state = ck.CompressionState(None, spec, module=ddp, exempt=None, feedback=None)
    for step, parts in four_steps(ddp, state, order, rank, world_size):
        for name, p in ddp.module.named_parameters():
            expected = simulated(spec, name, [part[name] for part in parts], step=step)
            assert same_bits(p.grad, expected), (step, name)
    return order


def residuals_change_places(rank, world_size, spec):
    """With error feedback: what every iteration leaves is that parameter's own."""
    torch.manual_seed(0)
    ddp, order, ledger = DistributedDataParallel(TwoTypes()), [], {}
    state = ck.CompressionState(None, spec, module=ddp, exempt=None)
    for _, parts in four_steps(ddp, state, order, rank, world_size):
        for name, p in ddp.module.named_parameters():
            assert p.grad.dtype == p.dtype
            entry = (p.grad.clone(), [part[name].double() for part in parts])
            ledger.setdefault(name, []).append(entry)
        check_ledger(spec, ledger, state, world_size)
        residuals = state.state_dict()["residuals"]
        assert all(residuals[f"{layer}.weight"].any() for layer in ("first", "second"))
    return order


@pytest.mark.parametrize(
    ("run", "spec"),
    [
        (places_change, "quantize:bits=4,rounding=stochastic"),
        (places_change, "fixed_point"),
        (residuals_change_places, "quantize:bits=4,rounding=stochastic"),
        (residuals_change_places, "sign"),
    ],
)
def test_buckets_of_two_dtypes_may_change_places(ranks, run, spec):
    first = {(0, "torch.bfloat16"), (1, "torch.float32")}
    swapped = {(0, "torch.float32"), (1, "torch.bfloat16")}
    for order in ranks.run(2, run, spec):
        found = [set(order[i : i + 2]) for i in (0, 2, 4, 6)]
        assert found == [first] + [swapped] * 3
        assert len(order) == 8


# --- complex parameters ---------------------------------------------------------------


def complex_layer(rank, world_size):
    """Integers, so that the mean is exact; and a real layer in the same model."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 2, dtype=torch.cfloat), nn.Linear(3, 2)])
    ddp = DistributedDataParallel(Both(model))
    ck.register(ddp, "identity")
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)).backward()
    return [p.grad.clone() for p in model.parameters()]


class Both(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers[0](torch.complex(x, -2 * x))
        return out.real.sum() + 3 * out.imag.sum() + self.layers[1](x).sum()


def test_complex_parameters_keep_their_imaginary_part(ranks):
    # d(Re z + 3 Im z) / dw for z = w c is (1 + 3i) conj(c), c = (1 - 2i) x.
    row = torch.tensor([1.0, 2.0, 3.0]) * 1.5
    expected = [
        (row * complex(-5, 5)).repeat(2, 1),
        torch.full((2,), complex(1, 3)),
        row.repeat(2, 1),
        torch.ones(2),
    ]
    for gradients in ranks.run(2, complex_layer):
        for found, wanted in zip(gradients, expected, strict=True):
            assert torch.equal(found, wanted.to(found.dtype))
