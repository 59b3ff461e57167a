"""Runs that fail: who is told what, and when."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from tests.runtime.plans import (
    buffers_of,
    gather_plan,
    header,
    outcomes,
    run,
    with_step,
)

from commkern.errors import MismatchError, PayloadError, PeerFailed, PeerLost
from commkern.plan import WriteHeader
from commkern.wire.crc import hash_text
from commkern.wire.preamble import unpack

SOON_S = 15.0  # far below the time-out of 30 s
STEP = 11


def run_all(way, plans, *, steps=None, timeout_s=30.0):
    """Each rank's outcome, and how long the slowest took."""
    endpoints = way.endpoints(len(plans), timeout_s)
    begin = time.monotonic()
    found = outcomes(
        len(plans),
        lambda rank: run(
            plans[rank],
            buffers_of(plans[rank]),
            endpoints[rank],
            step=steps[rank] if steps else STEP,
        ),
    )
    return found, time.monotonic() - begin


def gather_plans(world_size, numel=5, **options):
    return [
        gather_plan(rank, world_size, numel, **options) for rank in range(world_size)
    ]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("compressor", "quantize:bits=4"),
        ("settings", "op=avg"),
        ("parameter names", "v"),
        ("shapes", "6"),
        ("dtypes", "float16"),
    ],
)
@pytest.mark.parametrize("odd", [0, 2])
def test_a_mismatch_is_named_on_every_rank_at_once(way, field, text, odd):
    plans = gather_plans(4)
    plans[odd] = gather_plan(odd, 4, 5, **{field: text})
    found, took = run_all(way, plans)
    assert took < SOON_S
    mine, theirs = (
        hex(hash_text(plan.description[field])) for plan in (plans[1], plans[odd])
    )
    for rank, error in enumerate(found):
        assert type(error) is MismatchError
        assert field in str(error)
        assert mine in str(error)
        assert theirs in str(error)
        assert error.step == STEP
        assert (error.rank == odd) == (rank != odd)
        assert f"rank {error.rank}" in str(error)


def test_another_step_is_a_mismatch(way):
    found, took = run_all(way, gather_plans(3), steps=[5, 5, 6])
    assert took < SOON_S
    for rank, error in enumerate(found):
        assert type(error) is MismatchError
        assert "step" in str(error)
        assert "5" in str(error)
        assert "6" in str(error)
        assert (error.rank == 2) == (rank != 2)


def test_another_size_is_a_mismatch_and_no_body_is_copied(way):
    endpoints = way.endpoints(2)
    plans = [gather_plan(0, 2, 5), gather_plan(1, 2, 9)]
    kept = [buffers_of(plan) for plan in plans]
    found = outcomes(2, lambda rank: run(plans[rank], kept[rank], endpoints[rank]))
    for error, buffers in zip(found, kept, strict=True):
        assert type(error) is MismatchError
        assert "message size" in str(error)
        assert not buffers["parts"].any()


def test_ranks_that_do_not_meet_the_odd_one_learn_of_it(way):
    """In a ring of one round they may be done already: then the next run tells."""
    plans = gather_plans(5, ring=True)
    plans[2] = gather_plan(2, 5, 5, ring=True, settings="op=avg")
    endpoints = way.endpoints(5)

    def rank_body(rank):
        for _ in range(2):
            run(plans[rank], buffers_of(plans[rank]), endpoints[rank], step=STEP)

    begin = time.monotonic()
    found = outcomes(5, rank_body)
    assert time.monotonic() - begin < SOON_S
    for error in found:
        assert type(error) is MismatchError
        assert "settings" in str(error)
        assert "rank 2" in str(error) or error.rank in (1, 3)


def test_a_rank_that_fails_before_its_round(way):
    plans = gather_plans(4)
    endpoints = way.endpoints(4)

    def rank_body(rank):
        if rank == 1:
            error = RuntimeError("out of paper")
            endpoints[rank].abort(error)
            raise error
        return run(plans[rank], buffers_of(plans[rank]), endpoints[rank], step=STEP)

    begin = time.monotonic()
    found = outcomes(4, rank_body)
    assert time.monotonic() - begin < SOON_S
    for rank, error in enumerate(found):
        if rank == 1:
            assert type(error) is RuntimeError
            continue
        assert type(error) is PeerFailed
        assert (error.rank, error.step) == (1, STEP)
        assert "out of paper" in str(error)


def test_a_rank_that_never_comes(way):
    plans = gather_plans(3)
    endpoints = way.endpoints(3, timeout_s=0.5)

    def rank_body(rank):
        if rank == 0:
            return None
        return run(plans[rank], buffers_of(plans[rank]), endpoints[rank], step=STEP)

    begin = time.monotonic()
    found = outcomes(3, rank_body)
    assert 0.45 < time.monotonic() - begin < SOON_S
    for error in found[1:]:
        assert type(error) is PeerLost
        assert (error.rank, error.step) == (0, STEP)


def corrupted(plan, numel, change):
    """The plan with another header than the one that its peers expect."""
    template = bytearray(header(numel, plan.world_size).pack())
    change(template)
    original = plan.steps[1]
    return with_step(
        plan, 1, WriteHeader(original.message, bytes(template), original.touched)
    )


def flag_nonfinite(template):
    template[6] = 4


def other_compressor(template):
    template[40] ^= 0xFF


@pytest.mark.parametrize(
    ("change", "field"),
    [(flag_nonfinite, "flags: expected 0, got 4"), (other_compressor, "byte 40")],
)
def test_a_corrupted_header_names_its_sender(way, change, field):
    plans = gather_plans(3)
    plans[1] = corrupted(plans[1], 5, change)
    found, took = run_all(way, plans)
    assert took < SOON_S
    assert {type(found[0]), type(found[2])} <= {PayloadError, PeerFailed}
    errors = [e for e in (found[0], found[2]) if type(e) is PayloadError]
    assert errors
    for error in errors:
        assert "from rank 1" in str(error)
        assert f"step {STEP}" in str(error)
        assert field in str(error)


def test_a_wrong_checksum_is_found(way):
    """Rank 1's body changes after its header (and CRC) was written."""
    plans = gather_plans(2, crc=True)
    steps = list(plans[1].steps)
    steps[0], steps[1] = steps[1], steps[0]
    plans[1] = replace(plans[1], steps=tuple(steps))
    found, _ = run_all(way, plans)
    assert type(found[0]) is PayloadError
    assert "CRC-32C" in str(found[0])
    assert "from rank 1" in str(found[0])


@pytest.mark.parametrize("name", ["data", "result", "touched", "preambles_in"])
def test_a_buffer_too_small_is_refused_before_anything_is_written(way, name):
    plans = gather_plans(2)
    endpoints = way.endpoints(2)
    kept = [buffers_of(plan) for plan in plans]
    kept[0][name] = kept[0][name][:-1].copy()
    before = {key: value.copy() for key, value in kept[0].items()}
    found = outcomes(2, lambda rank: run(plans[rank], kept[rank], endpoints[rank]))
    assert type(found[0]) is ValueError
    held = len(kept[0][name])
    assert f"buffer {name}: expected at least {held + 1} bytes, got {held}" == str(
        found[0]
    )
    for key, value in before.items():
        assert np.array_equal(kept[0][key], value), key
    assert type(found[1]) is PeerFailed
    assert str(found[0]) in str(found[1])


def test_the_number_of_buffers_is_checked(way):
    plan = gather_plan(0, 1, 5)
    buffers = buffers_of(plan)
    del buffers["touched"]
    with pytest.raises(ValueError, match="buffers: expected 8, got 7"):
        run(plan, buffers, way.endpoints(1)[0])


def test_a_failed_group_stays_failed_and_a_fresh_one_works(way):
    plans = gather_plans(3)
    odd = [*plans[:2], gather_plan(2, 3, 5, settings="op=avg")]
    endpoints = way.endpoints(3)

    def attempt(used):
        return outcomes(
            3, lambda rank: run(used[rank], buffers_of(used[rank]), endpoints[rank])
        )

    first = attempt(odd)
    assert [type(error) for error in first] == [MismatchError] * 3
    second = attempt(plans)
    assert [type(error) for error in second] == [MismatchError] * 3
    found, _ = run_all(way, plans)
    assert all(isinstance(times, dict) for times in found)


@pytest.mark.parametrize("world_size", [1, 2])
def test_who_has_aborted_is_refused(way, world_size):
    plans = gather_plans(world_size)
    endpoints = way.endpoints(world_size)
    for endpoint in endpoints:
        endpoint.abort(RuntimeError("out of paper"))
    found = outcomes(
        world_size,
        lambda rank: run(plans[rank], buffers_of(plans[rank]), endpoints[rank]),
    )
    assert [type(error) for error in found] == [PeerFailed] * world_size


def test_the_memory_of_a_failed_sender_is_not_read_any_more(way):
    """A rank that comes late finds the preamble of one that gave up, not its body."""
    plans = gather_plans(2)
    endpoints = way.endpoints(2, timeout_s=0.3)
    kept = buffers_of(plans[0])
    with pytest.raises(PeerLost):
        run(plans[0], kept, endpoints[0], step=STEP)
    late = buffers_of(plans[1])
    with pytest.raises(PeerLost):
        run(plans[1], late, endpoints[1], step=STEP)
    assert not late["parts"].any()


def test_the_preamble_of_a_failed_sender_still_explains(way):
    odd = gather_plan(0, 2, 5, settings="op=avg")
    endpoints = way.endpoints(2, timeout_s=0.3)
    with pytest.raises(PeerLost):
        run(odd, buffers_of(odd), endpoints[0], step=STEP)
    plan = gather_plan(1, 2, 5)
    with pytest.raises(MismatchError, match=r"rank 0 .* settings"):
        run(plan, buffers_of(plan), endpoints[1], step=STEP)


def test_another_version_is_a_mismatch(way):
    plans = gather_plans(2)
    template = replace(unpack(plans[1].preamble), version=2).pack()
    plans[1] = replace(plans[1], preamble=template)
    found, _ = run_all(way, plans)
    for error in found:
        assert type(error) is MismatchError
        assert "version" in str(error)
