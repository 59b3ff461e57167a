"""``compressor="auto"``: what is tried when, what is chosen, and that it is kept."""

from __future__ import annotations

import io
import logging

import pytest
import torch
from tests.hook.models import digest, local_gradients, make, train

import commkern as ck
from commkern.auto import Auto, AutoChoice, read
from commkern.benchmarks import network
from commkern.feedback import ErrorFeedback
from commkern.timeline import Bucket, StepTimes

NAMES = ("identity", "quantize:bits=8", "quantize:bits=4")
FULL = [str(ck.compressor(name)) for name in NAMES]


class Clock:
    """Time passes where a bucket is reduced: so many ms for each compressor."""

    def __init__(self, state, costs):
        self.now = 1
        run = state.reducer.worker.run

        def timed(plan, data, **rest):
            outcome = run(plan, data, **rest)
            used = {str(m.compressor) for m in plan.members} - {"identity"}
            name = used.pop() if used else "identity"
            self.now += int(1e6 * dict(zip(FULL, costs, strict=True))[name])
            return outcome

        state.reducer.worker.run = timed

    def __call__(self):
        return self.now


def auto(rank, costs, **settings):
    ddp = make()
    settings = {"compressor": "auto", "exempt": None} | settings
    state = ck.register(ddp, **settings)
    mine = costs[rank] if isinstance(costs[0], tuple) else costs
    state.reducer.timeline.clock = Clock(state, mine)
    return ddp, state


def trace(rank, world_size, costs, steps, settings):
    ddp, state = auto(rank, costs, **settings)
    used = []

    def note(step: int) -> None:
        used.append(state.stats()["compression_factor"])

    train(ddp, rank, range(steps), after_backward=note)
    report = set(state.report().values())
    return used, report, state.compressor.sentence(), digest(ddp)


@pytest.mark.parametrize(
    ("costs", "best"),
    [
        ((100, 50, 25), 2),
        ((100, 50, 49), 1),
        ((100, 96, 96), 0),
        ((10, 50, 50), 0),
        (((10, 50, 50), (100, 50, 20)), 0),
    ],
    ids=str,
)
def test_the_choice_follows_the_times_and_is_the_same_everywhere(ranks, costs, best):
    first, second = ranks.run(2, trace, costs, 18, {})
    assert first == second
    used, report, sentence, _ = first
    factors = [used[number] for number in range(3)]
    assert factors[0] < 1
    assert factors[1] == pytest.approx(3.7, abs=0.3)
    assert factors[2] == pytest.approx(6.8, abs=0.8)
    tried = [factors[step % 3] for step in range(15)]
    assert used[3:15] == pytest.approx(tried[3:], rel=0.05)
    assert used[15:] == pytest.approx([factors[best]] * 3, rel=0.05)
    assert report == {FULL[best]}
    assert sentence.startswith(f"auto: {NAMES[best]} from step 15 on: a step takes")


def test_the_margin_and_the_candidates_are_settings(ranks):
    strict = Auto(candidates=("quantize:bits=4",), margin=0.6, rounds=3)
    for settings, best in ((strict, "identity"), (Auto(margin=0.0), "quantize:bits=4")):
        costs = (100, 90, 50)
        result = ranks.run(2, trace, costs, 18, {"compressor": settings})[0]
        assert result[1] == {str(ck.compressor(best))}


def test_other_world_sizes(ranks):
    for world_size in (1, 3):
        results = ranks.run(world_size, trace, (100, 50, 25), 16, {})
        assert len({result[3] for result in results}) == 1
        assert all(result[1] == {FULL[2]} for result in results)


def test_steps_before_start_step_are_not_tries(ranks):
    used = ranks.run(2, trace, (100, 50, 25), 22, {"start_step": 4})[0][0]
    assert all(factor < 1 for factor in used[:5])
    assert used[5] > 3
    assert all(factor > 6 for factor in used[19:])


def ledger(rank, world_size):
    ddp, state = auto(rank, (100, 50, 10))
    sums: dict[str, torch.Tensor] = {}

    def note(step: int) -> None:
        mine = local_gradients(ddp, rank, step)
        for name, p in ddp.module.named_parameters():
            pair = torch.stack([mine[name], p.grad.double()])
            sums[name] = sums.get(name, 0) + pair

    train(ddp, rank, range(17), after_backward=note)
    return sums, state.state_dict()["residuals"], digest(ddp)


def test_no_residual_is_lost_while_compressors_change(ranks):
    first, second = ranks.run(2, ledger)
    assert first[2] == second[2]
    for name, (_, reduced) in first[0].items():
        wanted = (first[0][name][0] + second[0][name][0]) / 2
        left = (first[1][name] + second[1][name]).double().reshape(wanted.shape) / 2
        assert left.norm() > 0
        assert (reduced + left - wanted).norm() <= 1e-5 * wanted.norm(), name


def resumed(rank, world_size, stop, kind):
    """Stop and go on; and the same without a stop."""
    costs = (100, 50, 10)
    ddp, state = auto(rank, costs)
    train(ddp, rank, range(stop))
    saved = state.full_state_dict() if kind == "full" else state.state_dict()
    if kind == "merged":
        states = [None] * world_size
        torch.distributed.all_gather_object(states, saved)
        saved = ck.merge_state_dicts(states)
    file = io.BytesIO()
    torch.save({"hook": saved, "model": ddp.module.state_dict()}, file)
    train(ddp, rank, range(stop, 22))
    file.seek(0)
    read_back = torch.load(file)
    again, restored = auto(rank, costs)
    again.module.load_state_dict(read_back["model"])
    restored.load_state_dict(read_back["hook"])
    early = restored.compressor.choice
    train(again, rank, range(stop, 22))
    choices = [state.compressor.sentence(), restored.compressor.sentence()]
    return digest(ddp), digest(again), str(early), choices


@pytest.mark.parametrize("stop", [1, 7, 16])
def test_a_resumed_run_goes_on_in_the_same_way(ranks, stop):
    results = ranks.run(2, resumed, stop, "own")
    assert results[0][2:] == results[1][2:]
    for straight, again, early, choices in results:
        assert early == (FULL[2] if stop == 16 else "None")
        if stop != 7:  # there the layout of the first step costs samples
            assert choices[0] == choices[1]
            assert straight == again
        assert all("quantize:bits=4 from step" in choice for choice in choices)


@pytest.mark.parametrize("kind", ["full", "merged"])
def test_a_full_state_keeps_the_choice_and_else_starts_anew(ranks, kind):
    assert ranks.run(2, resumed, 16, kind)[0][2] == FULL[2]
    choices = ranks.run(2, resumed, 5, kind)[0][3]
    assert "from step 20 on" in choices[1]


def other_settings(rank, world_size):
    _, state = auto(rank, (1, 1, 1))
    saved = state.state_dict()
    with pytest.raises(ValueError, match=r"compressor.*auto.*quantize") as caught:
        ck.CompressionState(
            None, "quantize:bits=8", module=make().module, exempt=None
        ).load_state_dict(saved)
    plain = ck.CompressionState(None, module=make().module, exempt=None).state_dict()
    state.load_state_dict(plain | {"step": 100}, strict=False)
    return str(caught.value), state.compressor.phase(100), state.report()


def test_a_state_that_did_not_choose_is_the_start_of_choosing(ranks):
    _, phase, report = ranks.run(2, other_settings)[0]
    assert phase == 0
    assert set(report.values()) == {"identity"}


def logged(rank, world_size):
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("auto: "):
                records.append(record.getMessage())

    logger = logging.getLogger("commkern")
    handler = Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    ddp, _ = auto(rank, (100, 50, 10))
    train(ddp, rank, range(16))
    logger.removeHandler(handler)
    return records


def test_the_choice_is_logged(ranks):
    for records in ranks.run(2, logged):
        assert len(records) == 1
        # two buckets, each of them so long
        assert "identity 200.0 ms, quantize:bits=8 100.0 ms" in records[0]


def rejoins(rank, world_size, chosen):
    ddp, state = auto(rank, (100, 50, 10))
    train(ddp, rank, range(15))
    if not chosen and rank == 0:  # as if this rank had failed before it could choose
        state.compressor._restart(0)
    if chosen:
        train(ddp, rank, range(15, 17))
    group = torch.distributed.new_group([0, 1])
    state.rejoin(group)
    return str(state.compressor.choice), state.compressor.phase(state.step)


def test_ranks_that_differ_choose_anew_after_rejoin(ranks):
    assert ranks.run(2, rejoins, False) == [("None", 0)] * 2
    assert ranks.run(2, rejoins, True) == [(FULL[2], 2)] * 2


# --- without ranks --------------------------------------------------------------------


class Plan:
    def __init__(self, coder):
        self.members = (Member(coder),)


class Member:
    def __init__(self, coder):
        self.compressor = coder


class Alone:
    """A worker of one rank."""

    rank, world_size = 0, 1

    def plan(self, *_):
        return None

    def run(self, *_, **__):
        return None


def feed(choice, costs, steps, *, composed=(), coder=None):
    for step in steps:
        used = coder or choice.compressor(step)
        ms = costs[choice.phase(step)]
        bucket = Bucket(Plan(used), 0, 0, int(1e6 * ms), 0, 0)
        times = StepTimes(step, -5_000_000, (bucket,), step in composed)
        choice.after(times, Alone())


def test_steps_in_which_plans_were_made_do_not_count():
    choice = AutoChoice(Auto(rounds=3), 0)
    feed(choice, (10, 5, 5), range(9), composed=range(6))
    assert choice.choice is None
    feed(choice, (10, 5, 5), range(9, 12))
    assert str(choice.choice) == FULL[1]
    assert choice.milliseconds["quantize:bits=8"] == 10  # with the rest of the step


def test_an_end_without_anything_to_compare():
    choice = AutoChoice(Auto(rounds=3), 0)
    feed(choice, (10, 5, 5), range(26), coder=ck.Identity())
    assert choice.choice is None
    feed(choice, (10, 5, 5), range(26, 27), coder=ck.Identity())
    assert choice.choice == ck.Identity()
    assert "no steps to compare" in choice.sentence()


def test_one_slow_step_does_not_decide():
    choice = AutoChoice(Auto(rounds=5), 0)
    feed(choice, (10, 5, 5), range(12))
    feed(choice, (10, 500, 5), range(12, 15))
    assert str(choice.choice) == FULL[1]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"candidates": ()}, "one or more"),
        ({"candidates": ("identity",)}, "identity"),
        ({"candidates": ("quantize:bits=8", "quantize:bits=8")}, "each once"),
        ({"candidates": ("sign:scale=none",)}, "feedback"),
        ({"margin": 1.0}, "1.0"),
        ({"rounds": 2}, "2"),
    ],
)
def test_wrong_settings(settings, error):
    with pytest.raises(ValueError, match=error):
        Auto(**settings)


@pytest.mark.parametrize(
    ("others", "error"),
    [
        ({"feedback": None}, "auto.*feedback=None"),
        ({"schedule": {"bits": 4}}, "auto.*schedule="),
        ({"delayed": True}, "auto.*delayed="),
    ],
)
def test_auto_does_not_go_with(others, error):
    settings = {"feedback": ErrorFeedback(), "schedule": None, "delayed": False}
    with pytest.raises(ValueError, match=error):
        read("auto", 0, **settings | others)
    assert str(read("auto", 0, **settings)).startswith("auto:candidates=(quantize:bits")
    assert read("identity", 0, **settings | others) == "identity"


def held_back_travels(rank, world_size):
    """Dense for good: the first such step takes along what candidates held back."""
    ddp = make()
    state = ck.register(ddp, ck.Auto(rounds=3, margin=0.99), ledger=True)
    train(ddp, rank, range(30))
    norm = state.stats()["residual_norm"]
    state.check_ledger()
    return str(state.compressor.choice), norm


def test_nothing_stays_behind_where_nothing_is_compressed(ranks):
    assert ranks.run(2, held_back_travels) == [("identity", 0.0)] * 2


# --- a real link ----------------------------------------------------------------------


def over_a_link(rank, world_size):
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 1000))
    state = ck.register(ddp, "auto")
    data = torch.randn(4, 1000)
    for _ in range(16):
        ddp.zero_grad()
        ddp(data).square().mean().backward()
    advice = state.advise()
    return str(state.compressor.choice), state.compressor.milliseconds, advice.verdict


@pytest.mark.slow
@pytest.mark.skipif(bool(network.missing()), reason=network.missing() or "links work")
def test_a_slow_link_is_seen(ranks):
    first, second = network.Link(100).run(ranks, 2, over_a_link)
    assert first == second
    choice, times, verdict = first
    assert choice in FULL[1:]
    assert verdict == "compress"
    # 4 MB take 320 ms at 100 Mbit/s
    assert times["identity"] > 300
    assert times["quantize:bits=8"] < 0.5 * times["identity"]
