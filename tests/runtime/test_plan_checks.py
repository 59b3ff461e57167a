"""Plans that the compiled runner refuses, each with a sentence."""

from __future__ import annotations

import numpy as np
import pytest
from tests.runtime.plans import (
    buffers_of,
    gather_plan,
    header,
    preamble,
    run,
    with_step,
)

from commkern import _core
from commkern.compressors.base import KernelCall
from commkern.local_transport import LocalGroup
from commkern.plan import Slice, lower
from commkern.spans import one_span

HEADER, SEALED = header(5, 2).pack(), header(5, 2, crc=True).pack()
SPANS = one_span(5)
CAST = {"spans": SPANS, "dtype": "float32", "wire_dtype": "float32"}
MESSAGE, TOUCHED = (2, 0, 200), (4, 0, 2)


def build(steps=(), rounds=(), **changes):
    lowered = lower(gather_plan(0, 2, 5))
    return _core.Plan(
        **{**lowered, "steps": list(steps), "rounds": list(rounds), **changes}
    )


def kernel(name="cast", **fields):
    return ("kernel", name, {**CAST, **fields})


def write(message, header, touched, nonfinite=None):
    return ("write_header", message, header, touched, nonfinite)


WRONG_STEPS = [
    (kernel("lossless"), "step 0: kernel: expected a name .* got lossless"),
    (kernel(bits=8), "step 0: fields: expected some of spans, .*; got .*bits"),
    (kernel(dtype=0), "step 0: dtype: the plan has a value of the wrong kind"),
    (kernel(dtype="int8"), "dtype: expected one of float32, .* got int8"),
    (kernel(input=("slice", 8, 0, 4)), r"buffer: expected 0 \.\.\. 7, got 8"),
    (kernel(input=("slice", 0, -4, 4)), "slice of data: .* got -4 and 4"),
    (kernel(input=("slice", 0, 2**62, 4)), "slice of data"),
    (kernel(input=("part", 0, 0, 4)), "step 0: field: expected a slice"),
    (kernel(spans=np.zeros(3, np.int64)), "step 0: spans: .* got rows of 8"),
    (
        ("kernel", "quantize", {"step": ("register", 2)}),
        r"register: expected 0 \.\.\. 1, got 2",
    ),
    (("kernel", "quantize", {"bits": 2**31}), "bits: expected at most 2147483647"),
    (("kernel", "quantize", {"bits": -1}), "step 0: "),
    (("launch", 0), "step 0: expected kernel, .* got launch"),
    (("begin", "rest"), "step 0: purpose: expected other, .* got rest"),
    (("post", 0), r"step 0: round: expected 0 \.\.\. -1, got 0"),
    (write(MESSAGE, HEADER[:31], TOUCHED), "at least 32 bytes, got 31"),
    (write(MESSAGE, b"x" + HEADER[1:], TOUCHED), "magic: expected"),
    (write(MESSAGE, HEADER[:64], TOUCHED), "header template: expected at"),
    (write((2, 0, 71), HEADER, TOUCHED), "message: .* 72 bytes, got 71"),
    (write((2, 0, 95), SEALED, TOUCHED), "message: .* 96 bytes, got 95"),
    (write(MESSAGE, HEADER, (4, 0, 1)), "touched: .* 2 bytes, got 1"),
    (write(MESSAGE, HEADER, TOUCHED, (4, 2, 0)), "nonfinite: .* 1 byte, got 0"),
    (write(MESSAGE, HEADER, TOUCHED, (8, 0, 1)), r"buffer: expected 0 \.\.\. 7, got 8"),
    (("read_header", MESSAGE, HEADER, TOUCHED, None, 0), "peer: expected .* got 0"),
    (("read_header", MESSAGE, HEADER, TOUCHED, None, 2), "peer: expected .* got 2"),
]


@pytest.mark.parametrize(("step", "text"), WRONG_STEPS)
def test_a_wrong_step_is_refused(step, text):
    with pytest.raises(ValueError, match=text):
        build([step])


def transfers(*peers):
    return [(peer, [(2, 0, 64)]) for peer in peers]


@pytest.mark.parametrize(
    ("rounds", "steps", "text"),
    [
        ([(transfers(1), [])], [], "round 0: expected one post"),
        ([([], [])], [("complete", 0), ("post", 0)], "step 0: round 0: expected one"),
        ([([], [])], [("post", 0), ("post", 0)], "step 1: round 0: expected one"),
        ([(transfers(0), [])], [], "peer: expected .* got 0"),
        ([(transfers(1, 1), [])], [], "peer: expected one transfer"),
        ([([], transfers(2))], [], "peer: expected .* got 2"),
    ],
)
def test_wrong_rounds_are_refused(rounds, steps, text):
    with pytest.raises(ValueError, match=text):
        build(steps, rounds)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rank": 2}, r"rank: expected 0 \.\.\. 1, got 2"),
        ({"preamble": bytes(63)}, "preamble: expected 64 bytes, got 63"),
        ({"preamble": bytes(64)}, "magic"),
        ({"registers": ["seed"]}, "a register called step"),
        ({"buffers": ["a"] * 8}, "a buffer called preambles_out"),
    ],
)
def test_a_wrong_plan_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        build([("post", 0), ("complete", 0)], [([], [])], **changes)


def test_a_group_of_threads_is_checked():
    with pytest.raises(ValueError, match="world_size: expected at least 1, got 0"):
        _core.ThreadGroup(0)
    with pytest.raises(ValueError, match=r"timeout_s: .* got nan"):
        _core.ThreadGroup(1, float("nan"))
    with pytest.raises(ValueError, match=r"rank: expected 0 \.\.\. 1, got 2"):
        _core.ThreadGroup(2).endpoint(2)
    _core.ThreadGroup(2, float("inf"))


def test_a_kernels_own_check_runs_before_the_first_step():
    plan = gather_plan(0, 1, 5)
    last = plan.steps[-1]
    fields = last.fields | {"output": Slice("result", 0, 16)}
    plan = with_step(plan, len(plan.steps) - 1, KernelCall("uncast", fields))
    buffers = buffers_of(plan)
    before = {name: buffer.copy() for name, buffer in buffers.items()}
    endpoint = _core.ThreadGroup(1).endpoint(0)
    with pytest.raises(
        ValueError, match=r"step 4 \(uncast\): output: .* 20 bytes .* 16"
    ):
        run(plan, buffers, endpoint)
    for name, buffer in before.items():
        assert np.array_equal(buffers[name], buffer), name


def test_registers_are_checked_against_their_fields():
    call = KernelCall(
        "quantize",
        {
            "spans": one_span(0),
            "dtype": "float32",
            "step": ("register", 1),
        },
    )
    plan = _core.Plan(
        buffers=[],
        registers=["seed", "step"],
        rank=0,
        world_size=1,
        preamble=preamble(1),
        rounds=[],
        steps=[("kernel", call.name, call.fields)],
    )
    endpoint = _core.ThreadGroup(1).endpoint(0)
    plan.run([], [2**64 - 1, 2**32 - 1], endpoint)
    with pytest.raises(
        ValueError, match="step: expected at most 4294967295, got 4294967296"
    ):
        plan.run([], [0, 2**32], endpoint)
    with pytest.raises(ValueError, match="registers: expected 2, got 1"):
        plan.run([], [0], endpoint)


def test_read_only_memory_is_refused():
    plan = gather_plan(0, 1, 5)
    buffers = buffers_of(plan)
    buffers["result"].flags.writeable = False
    with pytest.raises((ValueError, TypeError, BufferError)):
        run(plan, buffers, LocalGroup(1).endpoint(0))
