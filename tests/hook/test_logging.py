"""What the logger "commkern" gets, and what TensorBoard gets."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.hook.models import make, train

import commkern as ck


class Collected(logging.Handler):
    """(level, text) of every record of the library."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append((record.levelname, record.getMessage()))

    def __enter__(self):
        self._logger = logging.getLogger("commkern")
        self._level = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *error):
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

    def at(self, level):
        return [text for name, text in self.records if name == level]


def ordinary(rank, world_size):
    with Collected() as log:
        ddp = make()
        ck.register(ddp, "quantize:bits=8")
        train(ddp, rank, range(2))
        early = list(log.records)
        log.records.clear()
        train(ddp, rank, range(2, 6))
    return early, log.records


def test_one_line_at_registration_and_none_per_step(ranks):
    for rank, (early, late) in enumerate(ranks.run(2, ordinary)):
        assert late == []
        ((level, first), *rest) = early
        assert level == "INFO"
        assert first.startswith(f"rank {rank} of 2: quantize:bits=8,")
        assert "feedback error; 4 parameters (16384 elements) compressed, 4 exempt" in (
            first
        )
        assert first.endswith(f"residuals take {2 * 4 * 16384} bytes")
        assert {level for level, _ in rest} == {"DEBUG"}
        # One bucket at first, two once they are rebuilt.
        sent = [text for _, text in rest if "float32, that sends" in text]
        assert len(sent) == len(rest) == 3


def everything(name, parameter):
    return True


def warned(rank, world_size, spec, settings):
    with Collected() as log:
        ddp = make()
        ck.register(ddp, spec, **settings)
        train(ddp, rank, range(4))
    return log.at("WARNING")


TOO_HIGH = "twobit:threshold=1000000.0"


@pytest.mark.parametrize(
    ("spec", "settings", "texts"),
    [
        ("quantize:bits=4", {}, []),
        ("identity", {}, []),
        ("identity", {"exempt": None}, []),
        ("quantize:bits=8", {"start_step": 3}, []),
        (TOO_HIGH, {}, ["layers.", "all zero, though", "twobit"]),
        ("quantize:bits=4", {"exempt": everything}, ["all 8 parameters are ex"]),
    ],
    ids=str,
)
def test_warnings_come_once(ranks, spec, settings, texts):
    for log in ranks.run(2, warned, spec, settings):
        assert len(log) == bool(texts)
        for text in texts:
            assert text in log[0]


def test_no_handler_means_no_output(ranks):
    handlers = logging.getLogger("commkern").handlers
    assert any(isinstance(h, logging.NullHandler) for h in handlers)
    assert not any(isinstance(h, logging.StreamHandler) for h in handlers)


def small_parameters(rank, world_size):
    """Parameters of 7 elements, headers of more than they are."""
    with Collected() as log:
        model = torch.nn.Linear(7, 1, bias=False)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ck.register(ddp, "quantize:bits=8", exempt=None)
        for _ in range(3):
            ddp(torch.ones(2, 7)).sum().backward()
    return log.at("WARNING")


def test_a_step_that_sends_as_much_as_plain(ranks):
    for log in ranks.run(2, small_parameters):
        assert len(log) == 1
        assert "plain elements would take 28: compression saves nothing" in log[0]


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        assert type(value) is float
        assert (tag, step) not in self.scalars
        self.scalars[tag, step] = value


def written(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=8", sample_every=2)
    writer, later = Writer(), Writer()
    ck.write_stats(writer, state)
    assert writer.scalars == {}
    every = []

    def note(step):
        ck.write_stats(writer, state)
        every.append(state.stats())

    train(ddp, rank, range(3), after_backward=note)
    ck.write_stats(later, state, 70)
    with pytest.raises(TypeError, match="add_scalar"):
        ck.write_stats(None, state)
    with pytest.raises(TypeError, match="CompressionState"):
        ck.write_stats(writer, ddp)
    return writer.scalars, later.scalars, every


def test_write_stats(ranks):
    for scalars, later, every in ranks.run(2, written):
        for stats in every:
            step, sampled = stats.pop("step"), stats.pop("sampled")
            del stats["total"], stats["sparse"]
            wanted = {f"commkern/{key}": float(value) for key, value in stats.items()}
            if step != 1:
                assert sampled["step"] == step
                for figure in ("relative_error", "residual_norm"):
                    wanted |= {
                        f"commkern/{figure}/{name}": value
                        for name, value in sampled[figure].items()
                    }
            assert {t: v for (t, at), v in scalars.items() if at == step} == wanted
        assert {at for _, at in later} == {70}
        assert {t for t, _ in later} == {t for t, at in scalars if at == 2}


def test_write_stats_to_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")

    class State:
        def stats(self):
            return {"step": 3, "hook_ms": 1.5, "total": {}, "sampled": None}

    with tensorboard.SummaryWriter(tmp_path) as writer:
        ck.write_stats(writer, State())
    (file,) = tmp_path.iterdir()
    assert b"commkern/hook_ms" in file.read_bytes()
