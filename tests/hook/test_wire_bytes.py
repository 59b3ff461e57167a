"""What goes over the wire, counted where torch is called; stats() says the same."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.hook.given import reduced, registered
from tests.hook.models import make, train
from tests.laws import DTYPES, EVERY

import commkern as ck
from commkern.connections import Connections

MILLION = 1_000_000
MESSAGE = 64 + 32 + 32 + 8  # preamble, header, a section, parameter bits

# Bodies of a million fp32 elements in two shares, with the scales of 128, 32 or 256
# elements or of a share. Each share travels twice: as a part, and as the sum.
BODIES = {
    "identity": 4 * MILLION,
    "cast:dtype=bf16": 2 * MILLION,
    "cast:dtype=fp16": 2 * MILLION,
    "quantize:bits=8": MILLION + 4 * 7813,
    "quantize:bits=4": MILLION // 2 + 4 * 7813,
    "quantize:bits=4,scale_dtype=bf16": MILLION // 2 + 2 * 7813,
    "sign": MILLION // 8 + 4 * 31250,
    "sign:scale=parameter": MILLION // 8 + 2 * 4,
    "twobit": MILLION // 4,
}


class Counted:
    """A process group that counts the bytes it sends. Nothing but bytes goes through
    it: gloo and NCCL know few dtypes."""

    def __init__(self, group, sent: list[int]) -> None:
        self.group, self.sent = group, sent

    def send(self, tensors, peer, tag):
        assert all(t.dtype == torch.uint8 for t in tensors)
        self.sent.append(sum(t.numel() * t.element_size() for t in tensors))
        return self.group.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        assert all(t.dtype == torch.uint8 for t in tensors)
        return self.group.recv(tensors, peer, tag)


def counting(sent: list[int]):
    """Count every message; any collective of torch's on the way is an error."""
    carrier = Connections.carrier

    def counted(self, group, sender, receiver):
        return Counted(carrier(self, group, sender, receiver), sent)

    return mock.patch.object(Connections, "carrier", counted)


def a_million(rank, world_size, specs):
    figures = {}
    for spec in specs:
        values = {"w": torch.full((1000, 1000), rank + 1.0)}
        ddp, state = registered(values, spec, feedback=None)
        reduced(ddp, values)  # opens the second connection
        sent: list[int] = []
        with counting(sent), mock.patch.object(dist, "all_reduce", side_effect=OSError):
            reduced(ddp, values)
        figures[spec] = sent, state.stats()
    return figures


def test_bytes_of_a_million_elements(ranks):
    for figures in ranks.run(2, a_million, list(BODIES)):
        for spec, (sent, stats) in figures.items():
            padded = sum(sent) - 2 * MESSAGE - BODIES[spec]
            assert 0 <= padded < 16, (spec, sent)
            # Two messages, each with its preamble; plain elements are a piece of one.
            assert len(sent) == (6 if spec == "identity" else 4)
            assert stats["bytes_sent"] == sum(sent)
            assert stats["bytes_dense"] == 4 * MILLION
            assert stats["compression_factor"] == 4 * MILLION / sum(sent)


def test_bytes_of_two_stages(ranks):
    """Exponents and their maximum, then codes and their sum; a byte for 256 elements
    in the first stage."""
    for figures in ranks.run(2, a_million, ["fixed_point:bits=8"]):
        sent, stats = figures["fixed_point:bits=8"]
        padded = sum(sent) - 4 * MESSAGE - MILLION - 3907
        assert 0 <= padded < 32, sent
        assert len(sent) == 8
        assert stats["bytes_sent"] == sum(sent)


def nothing_but_bytes(rank, world_size):
    """How many messages each compressor sends of each dtype."""
    messages = {}
    for spec in EVERY:
        for dtype in DTYPES:
            values = {"w": torch.linspace(-1, 1, 1200).to(dtype)}
            ddp, _ = registered(values, spec)
            sent: list[int] = []
            with counting(sent):
                reduced(ddp, values)
            messages[spec, dtype] = len(sent)
    return messages


def test_every_compressor_sends_bytes(ranks):
    for messages in ranks.run(2, nothing_but_bytes):
        assert len(messages) == len(EVERY) * len(DTYPES)
        assert min(messages.values()) >= 4


def a_model(rank, world_size, spec, start_step):
    ddp = make()
    state = ck.register(ddp, spec, start_step=start_step)
    sent: list[int] = []
    counted, told = [], []

    def note(step: int) -> None:
        counted.append(sum(sent))
        told.append(state.stats())
        sent.clear()

    with counting(sent):
        train(ddp, rank, range(4), after_backward=note)
    return counted, told


@pytest.mark.parametrize("world_size", [2, 3])
def test_stats_count_every_bucket_of_every_step(ranks, world_size):
    weights, vectors = 4 * 64 * 64, 4 * 64
    share = 2 * (world_size - 1) / world_size
    dense = 4 * (weights + vectors)
    coded = weights * 33 / 32 + 4 * vectors
    results = ranks.run(world_size, a_model, "quantize:bits=8", 2)
    assert all([s["step"] for s in told] == [0, 1, 2, 3] for _, told in results)
    for step, body in enumerate([dense, dense, coded, coded]):
        for counted, told in results:
            assert told[step]["bytes_sent"] == counted[step]
        total = sum(counted[step] for counted, _ in results) / world_size
        assert share * body < total < share * body + 6000, step


def alone(rank, world_size):
    values = {"w": torch.ones(1000, 10)}
    ddp, state = registered(values, "quantize:bits=4")
    sent: list[int] = []
    with counting(sent):
        reduced(ddp, values)
    return sent, state.stats()


def test_one_rank_sends_nothing(ranks):
    ((sent, stats),) = ranks.run(1, alone)
    assert sent == []
    assert stats["bytes_sent"] == 0
    assert stats["compression_factor"] == 1.0
