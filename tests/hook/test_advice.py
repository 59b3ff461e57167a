"""Advice: from numbers alone, and from the steps of a state."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from tests.hook.models import make, train

import commkern as ck
from commkern.advice import cheapest
from commkern.compressors import Identity
from commkern.forecast import BucketCost, Forecast
from commkern.layout import Member

MB_25 = 25_000_000 // 4
MBIT = 1e6 / 8


@pytest.mark.parametrize("world_size", [2, 8])
def test_a_fast_network_stays_dense_and_a_slow_one_compresses(world_size):
    assert ck.advise(MB_25, world_size, 200e9).verdict == "dense"
    slow = ck.advise(MB_25, world_size, 100 * MBIT)
    assert slow.verdict == "compress"
    assert slow.compressor == "quantize:bits=4"


def test_the_times_are_those_of_the_bytes():
    times = ck.advise(MB_25, 2, 100 * MBIT, latency_ms=0).milliseconds
    # Two ranks: each sends half of everything twice.
    kernels = {"identity": 1.5 / 2, "quantize:bits=8": 1.24 + 0.625 + 0.62}
    for name, copies in kernels.items():
        nbytes = {"identity": 25e6, "quantize:bits=8": MB_25 * (1 + 4 / 128)}[name]
        expected = 1e3 * nbytes / (100 * MBIT) + 1e3 * 25e6 * copies / 8e9
        assert times[name] == pytest.approx(expected, rel=1e-3)


def test_what_backward_hides_costs_nothing():
    link = 1000 * MBIT
    assert ck.advise(MB_25, 2, link).verdict == "compress"
    hidden = ck.advise(MB_25, 2, link, backward_ms=300)
    assert hidden.verdict == "dense"
    assert set(hidden.milliseconds.values()) == {0.0}
    partly = ck.advise(MB_25, 2, link, backward_ms=150)
    whole = ck.advise(MB_25, 2, link).milliseconds["identity"]
    assert partly.milliseconds["identity"] == pytest.approx(whole - 150)
    assert partly.compressor == "quantize:bits=8"  # 4 bits hide no more


def test_the_sentence_has_the_numbers():
    text = str(ck.advise(MB_25, 2, 100 * MBIT))
    for part in ("compress with quantize:bits=4", "25 MB", "2 ranks", "12.5 MB/s"):
        assert part in text
    assert "2002.5 ms" in text
    advice = ck.advise(MB_25, 1, 1e9)
    assert str(advice).startswith("stay dense")
    with pytest.raises(AttributeError):
        advice.compressor = "identity"


def test_candidates_of_ones_own():
    spec = "quantize:bits=2"
    advice = ck.advise(MB_25, 2, 100 * MBIT, candidates=[spec])
    assert list(advice.milliseconds) == ["identity", str(ck.compressor(spec))]
    assert advice.compressor == str(ck.compressor(spec))


@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        ("numel", -1),
        ("numel", 0.5),
        ("world_size", 0),
        ("bandwidth", 0),
        ("bandwidth", float("nan")),
        ("dtype", "int8"),
        ("backward_ms", -1),
        ("latency_ms", float("inf")),
    ],
)
def test_numbers_without_sense(wrong, value):
    good = {"numel": 10, "world_size": 2, "bandwidth": 1e9}
    with pytest.raises(ValueError, match=rf"{wrong} must be .*{value!r}"):
        ck.advise(**good | {wrong: value})


@pytest.mark.parametrize(
    ("costs", "best"),
    [
        ([100, 96, 95.1], 0),
        ([100, 94, 93], 1),
        ([100, 96, 94], 2),
        ([100, 60, 50], 2),
        ([0, 0, 0], 0),
        ([100, float("nan"), 90], 2),
    ],
)
def test_each_candidate_has_to_win_by_a_margin(costs, best):
    assert cheapest(costs, 0.05) == best


# --- a forecast -----------------------------------------------------------------------


class OnePlan:
    """A bucket of a million elements that travels dense, between two ranks."""

    members = (Member("w", 1_000_000, 0, Identity()),)
    dtype = "float32"
    world_size = 2
    bytes_sent = 4_000_000


def forecast(ready, exempt=(), exchange=42.0):
    buckets = [BucketCost(at, 6.0, exchange, 1.0) for at in ready]
    return Forecast([OnePlan] * len(ready), buckets, 2.0, lambda name: name in exempt)


def test_a_forecast_of_what_was_measured_is_what_was_measured():
    assert forecast([100]).step_ms(Identity()) == 100 + 49
    assert forecast([100, 120, 300]).step_ms(Identity()) == 300 + 49
    assert forecast([100, 120, 140]).step_ms(Identity()) == 100 + 3 * 49


def test_a_forecast_of_fewer_bytes():
    eight = ck.compressor("quantize:bits=8")
    # 40 ms for 4 MB: 10 ms for a MB. Kernels: as docs/advice.md has them.
    kernel = 6 * (1.24 + 0.62 + 1.25 / 2) / (1.5 / 2)
    coded = 2 + 10 * 1.03125 + kernel + 1
    assert forecast([100]).step_ms(eight) == pytest.approx(100 + coded, rel=1e-3)
    both = forecast([100, 102]).step_ms(eight)
    assert both == pytest.approx(100 + 2 * coded, rel=1e-3)
    assert forecast([100], exempt=("w",)).step_ms(eight) == 149


def test_a_link_that_takes_no_time():
    one = forecast([100], exchange=1.0)
    assert one.ms_per_byte == 0
    assert "/s" not in str(one)
    assert "8.0 ms of it after backward" in str(one)


# --- a state --------------------------------------------------------------------------


class Clock:
    """Stands still but while messages travel: a microsecond for each byte. To backward
    it stands still during a step, so that all buckets are full at once."""

    def __init__(self, state):
        self.now = self.begun = 1
        self.state, self.step = state, 0
        self.worker = state.reducer.worker
        run = self.worker.run

        def slow(plan, data, **rest):
            outcome = run(plan, data, **rest)
            exchange = 1000 * plan.bytes_sent
            self.now += exchange
            times = dict.fromkeys(outcome.times, 0) | {"exchange": exchange}
            return replace(outcome, times=times)

        self.worker.run = slow

    def __call__(self):
        if threading.current_thread() is not threading.main_thread():
            return self.now
        if self.state.step != self.step:
            self.step, self.begun = self.state.step, self.now
        return self.begun


def advised(rank, world_size, spec, steps):
    ddp = make()
    state = ck.register(ddp, spec)
    state.reducer.timeline.clock = Clock(state)
    train(ddp, rank, range(steps))
    advice = state.advise()
    return advice.compressor, dict(advice.milliseconds), str(advice), state.step


@pytest.mark.parametrize("spec", ["identity", "quantize:bits=4"])
def test_a_state_gives_the_same_advice_on_every_rank(ranks, spec):
    first, second = ranks.run(2, advised, spec, 6)
    assert first == second
    best, times, text, step = first
    assert step == 6
    assert best == "quantize:bits=4"
    assert list(times) == ["identity", "quantize:bits=8", "quantize:bits=4"]
    assert times["identity"] > times["quantize:bits=8"] > times["quantize:bits=4"]
    assert text.startswith("compress with quantize:bits=4: a step takes")
    assert "after backward" in text


def test_forecasts_from_dense_and_from_coded_steps_agree(ranks):
    dense = ranks.run(2, advised, "identity", 6)[0][1]
    coded = ranks.run(2, advised, "quantize:bits=4", 6)[0][1]
    for name, ms in dense.items():
        assert coded[name] == pytest.approx(ms, rel=0.1), name


def too_early(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "identity")
    texts = []
    for step in range(3):
        with pytest.raises(ValueError, match="finished steps") as caught:
            state.advise()
        texts.append(str(caught.value))
        train(ddp, rank, range(step, step + 1))
    train(ddp, rank, range(3, 5))
    return texts, isinstance(state.advise(), ck.Advice)


def test_too_few_steps(ranks):
    texts, later = ranks.run(2, too_early)[0]
    assert all("got 0" in text for text in texts)
    assert later


def sampled_on_one(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "identity", sample_every=1 - rank)
    train(ddp, rank, range(5))
    with pytest.raises(ValueError, match=r"got 0; .* sampled"):
        state.advise()
    train(ddp, rank, range(5, 6))
    return state.step


def test_too_few_steps_on_one_rank_are_told_on_all(ranks):
    assert ranks.run(2, sampled_on_one, group_timeout_s=20) == [6, 6]


def unchanged(rank, world_size, asks):
    torch.manual_seed(rank)
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4,rounding=stochastic")
    train(ddp, rank, range(5))
    if asks:
        state.advise()
    train(ddp, rank, range(5, 8))
    return [p.detach().clone() for p in ddp.parameters()]


def test_asking_changes_nothing(ranks):
    without, with_it = (ranks.run(2, unchanged, asks)[0] for asks in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(without, with_it, strict=True))
