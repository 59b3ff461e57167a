"""Plans written by hand, and ranks that run them as threads."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from commkern import runner
from commkern.compressors.base import KernelCall
from commkern.plan import (
    Complete,
    Exchange,
    Plan,
    Post,
    ReadHeader,
    Slice,
    Transfer,
    WriteHeader,
)
from commkern.spans import one_span
from commkern.wire.crc import hash_text
from commkern.wire.dtypes import CODES
from commkern.wire.message import Header, Section, align, header_nbytes, place
from commkern.wire.preamble import pack_template

DESCRIPTION = {
    "compressor": "identity",
    "settings": "op=sum",
    "parameter names": "w",
    "shapes": "5",
    "dtypes": "float32",
}


def preamble(world_size, **changes):
    texts = {**DESCRIPTION, **changes}
    hashes = [hash_text(text) for text in texts.values()]
    return pack_template(*hashes, world_size=world_size)


def header(numel, parameters, crc=False):
    """The placed header of ``numel`` fp32 elements in one section."""
    section = Section(0, parameters, hash_text("identity"), CODES["float32"], 4 * numel)
    return place(Header((section,), (False,) * parameters, crc=crc))


def gather_plan(
    rank, world_size, numel, *, crc=False, ring=False, flagged=False, **changes
):
    """Everybody's fp32 "data" to everybody's "result", in rank order, in one round.

    As many parameters as ranks. With ``ring`` only the right neighbour is sent to; with
    ``flagged`` headers say whether the buffer "nonfinite" has anything but zeros.
    """
    head = header(numel, world_size, crc)
    body = header_nbytes(1, world_size)
    stride = align(head.message_nbytes, 64)
    touched = Slice("touched", 0, world_size)
    flag = Slice("nonfinite", 0, 3) if flagged else None
    outgoing = Slice("outgoing", 0, head.message_nbytes)
    peers = [r for r in range(world_size) if r != rank]
    targets, sources = peers, peers
    if ring:
        targets = [(rank + 1) % world_size]
        sources = [(rank - 1) % world_size]
    part = {r: Slice("parts", r * stride, head.message_nbytes) for r in peers}
    part[rank] = outgoing
    cast = {
        "spans": one_span(numel, body=body),
        "input": Slice("data", 0, 4 * numel),
        "dtype": "float32",
        "payload": outgoing,
        "wire_dtype": "float32",
    }
    steps = [
        KernelCall("cast", cast),
        WriteHeader(outgoing, head.pack(), touched, flag),
        Post(0),
        Complete(0),
    ]
    steps += [ReadHeader(part[r], head.pack(), touched, r, flag) for r in sources]
    for r in (*sources, rank):
        uncast = {
            "spans": one_span(numel, body=body),
            "payload": part[r],
            "wire_dtype": "float32",
            "output": Slice("result", 4 * numel * r, 4 * numel),
            "dtype": "float32",
        }
        steps.append(KernelCall("uncast", uncast))
    exchange = Exchange(
        tuple(Transfer(peer, (outgoing,)) for peer in targets),
        tuple(Transfer(peer, (part[peer],)) for peer in sources),
    )
    return Plan(
        rank=rank,
        world_size=world_size,
        dtype="float32",
        members=(),
        bytes_dense=0,
        buffers={
            "data": 4 * numel,
            "result": 4 * numel * world_size,
            "outgoing": head.message_nbytes,
            "parts": stride * world_size,
            "touched": world_size,
            "preambles_out": 64 * world_size,
            "preambles_in": 64 * world_size,
            "preambles_expected": 64 * world_size,
            **({"nonfinite": 3} if flagged else {}),
        },
        preamble=preamble(world_size, **changes),
        description={**DESCRIPTION, **changes},
        exchanges=(exchange,),
        steps=tuple(steps),
    )


def with_step(plan, index, step):
    """The plan with one step replaced."""
    steps = list(plan.steps)
    steps[index] = step
    return replace(plan, steps=tuple(steps))


def data_of(rank, numel):
    return np.arange(numel, dtype=np.float32) + np.float32(1000 * rank + 0.5)


def buffers_of(plan):
    """A buffer of each size, "data" filled and this rank's parameter touched."""
    buffers = {k: np.zeros(nbytes, np.uint8) for k, nbytes in plan.buffers.items()}
    numel = plan.buffers["data"] // 4
    buffers["data"][:] = data_of(plan.rank, numel).view(np.uint8)
    buffers["touched"][plan.rank] = 7
    return buffers


def run(plan, buffers, endpoint, *, step=0, seed=0):
    bound = endpoint.bind(plan, buffers, step)
    registers = {"seed": seed, "step": step}
    return runner.run(plan, list(buffers.values()), registers, bound)


def outcomes(world_size, fn):
    """``fn(rank)`` in a thread each: its result, or its exception, in rank order."""
    found = [None] * world_size

    def call(rank):
        try:
            found[rank] = fn(rank)
        except BaseException as error:  # noqa: BLE001
            found[rank] = error

    threads = [
        threading.Thread(target=call, args=(rank,), daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return found


def results(world_size, fn):
    """As `outcomes`, for calls that must all succeed."""
    found = outcomes(world_size, fn)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found
