"""Plans that `compose` builds: the same bits compiled, with callbacks and in Python."""

from __future__ import annotations

import numpy as np
import pytest
from tests.runtime.conftest import Way
from tests.runtime.plans import results

from commkern import layout, runner
from commkern.compose import Settings, compose
from commkern.compressors import compressor
from commkern.layout import Member
from commkern.plan import FLAGS

SPECS = [
    "identity",
    "identity in pieces",
    "cast:dtype=bf16",
    "quantize:bits=8",
    "quantize:bits=4,block_size=64,rounding=stochastic",
    "fixed_point:bits=8,rounding=stochastic",
]
SIZES = [700, 0, 1, 129, 2048]


@pytest.fixture(autouse=True)
def short_pieces(request, monkeypatch):
    if request.node.callspec.params.get("spec", "").endswith(" in pieces"):
        monkeypatch.setattr(layout, "_WORTH_A_PIECE", 256)


def members(spec):
    listed, offset = [], 0
    for number, numel in enumerate(SIZES):
        coder = compressor(spec.removesuffix(" in pieces"))
        listed.append(Member(f"w{number}", numel, offset, coder, offset, number))
        offset += numel
    return tuple(listed)


def plan_of(spec, rank, world_size, segments):
    settings = Settings(op="avg", feedback="error", segments=segments)
    return compose(
        members(spec), "float32", rank=rank, world_size=world_size, settings=settings
    )


def run_steps(name, spec, world_size, segments):
    """Three steps with error feedback; every buffer of every rank."""
    endpoints = Way(name).endpoints(world_size)

    def rank_body(rank):
        plan = plan_of(spec, rank, world_size, segments)
        buffers = {k: np.zeros(size, np.uint8) for k, size in plan.buffers.items()}
        random = np.random.default_rng(rank)
        history = []
        for step in range(3):
            for flag in FLAGS:
                buffers[flag][:] = 0
            data = random.standard_normal(sum(SIZES), dtype=np.float32)
            data[700] = 0  # a parameter that no rank uses
            buffers["data"][:] = data.view(np.uint8)
            registers = {"seed": 5, "step": step}
            bound = endpoints[rank].bind(plan, buffers, step)
            runner.run(plan, list(buffers.values()), registers, bound)
            buffers["committed"] ^= 1
            history.append({key: value.copy() for key, value in buffers.items()})
        return history

    return results(world_size, rank_body)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("world_size", "segments"), [(1, 1), (2, 1), (3, 1), (5, 1), (3, 2)]
)
def test_all_ways_agree_in_every_bit(spec, world_size, segments, monkeypatch):
    monkeypatch.delenv("COMMKERN_BACKEND", raising=False)
    found = [
        run_steps(name, spec, world_size, segments) for name in ("threads", "callbacks")
    ]
    monkeypatch.setenv("COMMKERN_BACKEND", "reference")
    found.append(run_steps("reference", spec, world_size, segments))
    for rank in range(world_size):
        for step in range(3):
            first, *others = (way[rank][step] for way in found)
            for other in others:
                for name, buffer in first.items():
                    assert np.array_equal(buffer, other[name]), (rank, step, name)
            assert np.array_equal(first["data"], found[0][0][step]["data"])
    used = {"w0", "w3", "w4"}
    plan = plan_of(spec, 0, world_size, segments)
    touched = found[0][0][2]["touched"]
    assert touched.tolist() == [member.name in used for member in plan.members]
