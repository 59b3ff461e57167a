"""Parameters of any shape, size and memory format."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.hook.given import reduced, registered, simulated
from tests.laws import EVERY
from tests.simulation import gradient, same_bits, two_shot
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck
from commkern.layout import Member, effective
from commkern.local_transport import LocalGroup
from commkern.testing import spawn_threads

SHAPES = [(), (1,), (5,), (3, 4), (2, 3, 4), (8, 3, 1, 1), (0, 5), (2, 0, 3)]
SIZES = [1, 2, 3, 4, 31, 32, 33, 127, 128]  # others: test_compressors.py


def values_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    values = {}
    for number, shape in enumerate([*SHAPES, (7, 5, 11), (1031,)]):
        numel = torch.Size(shape).numel()
        flat = gradient(rank, numel, torch.float32, seed=10 * step + number)
        values[f"p{number}"] = flat.reshape(shape)
    return values


def every_shape(rank, world_size, specs):
    for spec in specs:
        feedback = {"feedback": None}
        ddp, state = registered(values_of(rank, 0), spec, bucket_view=True, **feedback)
        for step in range(2):  # in the second the buckets are rebuilt
            parts = [values_of(r, step) for r in range(world_size)]
            for name, result in reduced(ddp, parts[rank]).items():
                expected = simulated(spec, name, [p[name] for p in parts], step=step)
                assert same_bits(result, expected), (spec, name, step)
        assert state.stats()["committed"]


def test_every_shape_in_one_bucket(ranks):
    ranks.run(2, every_shape, EVERY)


def nothing_to_send(rank, world_size):
    """A bucket without elements, alone (its dtype is its own) and as the only one."""
    for values in (
        {"none": torch.zeros(0, 5)},
        {"none": torch.zeros(2, 0, 3).double(), "one": torch.full((1,), rank + 1.0)},
    ):
        ddp, state = registered(values, "quantize:bits=4")
        for _ in range(3):
            results = reduced(ddp, values)
            assert results["none"].shape == values["none"].shape
        if "one" in results:
            assert results["one"].item() == (world_size + 1) / 2
        assert state.step == 3
        assert state.stats()["committed"]
    return True


def test_parameters_without_elements(ranks):
    for world_size in (1, 2):
        assert all(ranks.run(world_size, nothing_to_send))


def multiples(world_size: int, numel: int) -> list[torch.Tensor]:
    return [(torch.arange(numel) + 1.0) * (rank + 1) for rank in range(world_size)]


def all_reduced(world_size: int, calls: list[tuple[str, int]]) -> list:
    """On threads, without DDP: the results of every rank, a list for each call."""
    group = LocalGroup(world_size)
    ends = [group.endpoint(rank) for rank in range(world_size)]

    def one(rank: int) -> list[torch.Tensor]:
        results = []
        for spec, numel in calls:
            tensor = multiples(world_size, numel)[rank]
            settings = {"compressor": spec, "name": "w", "seed": 1}
            ck.all_reduce(tensor, group=ends[rank], **settings)
            results.append(tensor)
        return results

    return list(zip(*spawn_threads(world_size, one), strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_size_at_odd_numbers_of_ranks(world_size):
    calls = [(spec, numel) for spec in EVERY for numel in SIZES]
    for step, results in enumerate(all_reduced(world_size, calls)):
        spec, numel = calls[step]
        member = Member("w", numel, 0, ck.compressor(spec))
        coder = effective(member, "float32").compressor
        draws = {"name": "w", "seed": 1, "step": step}
        expected = two_shot(coder, multiples(world_size, numel), **draws)
        for result in results:
            assert same_bits(result, expected), calls[step]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_large_size_that_nothing_divides(world_size):
    numel = 1_000_003
    specs = ["identity", "quantize:bits=8", "fixed_point:bits=16", "sign"]
    exact, coded, *others = all_reduced(world_size, [(s, numel) for s in specs])
    for step, spec in enumerate(specs[2:], 2):
        draws = {"name": "w", "seed": 1, "step": step}
        expected = two_shot(spec, multiples(world_size, numel), **draws)
        for result in others[step - 2]:
            assert same_bits(result, expected), spec
    wanted = (torch.arange(numel) + 1.0) * (world_size * (world_size + 1) / 2)
    for result in exact:
        assert torch.equal(result, wanted)
    for result in coded:
        assert torch.equal(result, coded[0])
        # Half a step of each rank's code and half a step of the sum's.
        assert (result - wanted).abs().max() <= 1.01 * wanted[-1] / 127
        assert (result[-1] - wanted[-1]).abs() <= 1.01 * wanted[-1] / 127


# --- memory formats -------------------------------------------------------------------


def convolutions(channels_last: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1))
    with torch.no_grad():  # integers: no sum rounds, in whatever order
        for p in model.parameters():
            p.copy_((8 * p).round())
    return model.to(memory_format=torch.channels_last) if channels_last else model


def formats(rank, world_size, spec):
    """Gradients with and without the hook, contiguous and channels_last; warnings."""
    results = {}
    for channels_last in (False, True):
        for hooked in (False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ddp = DistributedDataParallel(convolutions(channels_last))
                if hooked:
                    ck.register(ddp, spec, exempt=None)
                x = (torch.arange(2 * 3 * 25).reshape(2, 3, 5, 5) % 7 - 3.0) + rank
                if channels_last:
                    x = x.to(memory_format=torch.channels_last)
                for _ in range(3):
                    ddp.zero_grad()
                    ddp(x).sum().backward()
            gradients = [p.grad.contiguous() for p in ddp.module.parameters()]
            texts = sorted({str(w.message) for w in caught})
            results[channels_last, hooked] = gradients, texts
    return results


def test_channels_last_without_loss(ranks):
    for results in ranks.run(2, formats, "identity"):
        expected = results[False, False][0]
        for (channels_last, _), (gradients, texts) in results.items():
            assert texts == results[channels_last, False][1]
            for wanted, found in zip(expected, gradients, strict=True):
                assert torch.equal(wanted, found)


def test_channels_last_is_coded_in_memory_order(ranks):
    """Blocks follow the memory, alike on every rank: equal replicas, and each element
    within half a step of a block that holds it."""
    first, second = ranks.run(2, formats, "quantize:bits=8")
    for key in first:
        for a, b in zip(first[key][0], second[key][0], strict=True):
            assert torch.equal(a, b)
    exact, coded = first[True, False][0], first[True, True][0]
    for wanted, found in zip(exact, coded, strict=True):
        assert found.shape == wanted.shape
        # Two codings, each at most half of 1/127 of the largest element of a rank.
        assert (found - wanted).abs().max() <= 2 * 2 * wanted.abs().max() / 127
