"""What `sample_every` measures, against the same worked out by hand."""

from __future__ import annotations

import pytest
from tests.hook.models import local_gradients, make, train

import commkern as ck


def sampled(rank, world_size, spec, every):
    """What stats() says was sampled, and the same worked out by hand."""
    ddp = make()
    state = ck.register(ddp, spec, sample_every=every, seed=5)
    told, by_hand = [], []
    for step in range(5):
        mine = local_gradients(ddp, rank, step)
        before = state.state_dict()["residuals"]
        train(ddp, rank, range(step, step + 1))
        told.append(state.stats()["sampled"])
        worked_out = {}
        for name, residual in before.items():
            u = (mine[name].float().reshape(-1) + residual).double()
            coded = state.compressor.compress(u.float(), seed=5, step=step, name=name)
            back = ck.decode(coded).double()
            error = (back - u).norm() / u.norm()
            worked_out[name] = error.item(), residual.double().norm().item()
        by_hand.append(worked_out)
    return told, by_hand


@pytest.mark.parametrize(
    "spec", ["quantize:bits=4", "qsgd:bits=3", "fixed_point:bits=8", "sign"]
)
def test_sampled_errors_are_those_of_this_ranks_gradient(ranks, spec):
    for told, by_hand in ranks.run(2, sampled, spec, 2):
        assert [s["step"] for s in told] == [0, 0, 2, 2, 4]
        for step in (0, 2, 4):
            stats = told[step]
            assert stats["relative_error"].keys() == by_hand[step].keys()
            assert all(name.endswith("weight") for name in stats["relative_error"])
            for name, (error, norm) in by_hand[step].items():
                assert 1e-3 < stats["relative_error"][name] < 1.5
                assert stats["relative_error"][name] == pytest.approx(error, rel=1e-5)
                assert stats["residual_norm"][name] == pytest.approx(norm, rel=1e-9)
                assert (norm > 0) == (step > 0)


def test_nothing_is_sampled_unless_asked(ranks):
    for told, _ in ranks.run(2, sampled, "quantize:bits=4", 0):
        assert told == [None] * 5


def wrong_sample_every(rank, world_size):
    texts = []
    for value in (-1, 2.5, True):
        with pytest.raises(ValueError, match="sample_every") as caught:
            ck.register(make(), "identity", sample_every=value)
        texts.append(str(caught.value))
    return texts


def test_wrong_sample_every_is_refused(ranks):
    (texts,) = ranks.run(1, wrong_sample_every)
    for text, value in zip(texts, ("-1", "2.5", "True"), strict=True):
        assert text.endswith(f"got {value}")
