"""Arguments that make no sense: every public function names the argument, and says what
it expected and what it got."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

NAN, INF = float("nan"), float("inf")
NO_INT = (None, True, "4", -1, NAN, 1.5, [])
NO_NUMBER = (None, True, "4", NAN, INF, [])
NO_BOOL = (None, 1, "yes", -1, NAN)
NO_OBJECT = (None, True, "x", -1, NAN, [])
NO_CALLABLE = (True, "x", -1, NAN, [])
NO_NAME = (True, -1, NAN, [])


def ints(*allowed):
    return tuple(value for value in NO_INT if value not in allowed)


def others(*allowed):
    return tuple(value for value in NO_OBJECT if value not in allowed)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A group of one rank, a DDP module in it, and a state of its."""
    path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(path), 1), rank=0, world_size=1
    )
    yield Given()
    dist.destroy_process_group()


class Given:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(64, 64)
        self.ddp = DistributedDataParallel(self.model)
        self.state = ck.register(self.ddp)
        self.saved = self.state.state_dict()
        self.payload = ck.Quantize().compress(torch.ones(4))

    def settings(self, field, value):
        return ck.CompressionState(**{"module": self.ddp, field: value})

    def load(self, field, value):
        return self.state.load_state_dict(self.saved | {field: value})

    def merge(self, field, value):
        return ck.merge_state_dicts([self.saved | {field: value}])

    def reduce(self, field, value):
        return ck.all_reduce(**{"tensor": torch.ones(4), field: value})

    def compress(self, field, value):
        return ck.Quantize().compress(**{"tensor": torch.ones(4), field: value})

    def sync(self, field, value):
        return ck.check_sync(**{"module": self.model, field: value})

    def backward(self, **settings):
        """With settings that are wrong only once they are called: each in a group of
        its own, because that is spent then."""
        model, group = torch.nn.Linear(64, 64), dist.new_group([0])
        ddp = DistributedDataParallel(model, process_group=group)
        ck.register(ddp, **settings)
        ddp(torch.ones(1, 64)).sum().backward()


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def get_scale(self):
        return self.scale


def advise(g, field, value):
    return ck.advise(**{"numel": 10, "world_size": 2, "bandwidth": 1e9, field: value})


def course(g, field, value):
    return ck.Exponential(**{"start": 8, "end": 2, "steps": 5, field: value})


def auto(g, field, value):
    return ck.Auto(**{field: value})


def exempt(g, field, value):
    return ck.Exempt(**{field: value})


def error_feedback(g, field, value):
    return ck.ErrorFeedback(**{field: value})


def reduce_state(g, field, value):
    return ck.ReduceState(**{field: value})


def cast(g, field, value):
    return ck.Cast(**{field: value})


# Field -> values that are refused, for what takes fields by name.
SETTINGS = {
    "process_group": others(None),
    "compressor": others("x"),
    "module": others(),
    "feedback": others(None),
    "algorithm": others("x"),
    "exempt": NO_CALLABLE,
    "start_step": ints(),
    "schedule": others(None),
    "dense_every": (*ints(None), 0),
    "delayed": NO_BOOL,
    "seed": (*ints(), 2**64),
    "nonfinite": others(),
    "rollback": NO_BOOL,
    "deterministic": NO_BOOL,
    "grad_scaler": NO_CALLABLE,
    "learning_rate": NO_CALLABLE,
    "ledger": NO_BOOL,
    "sample_every": ints(),
}
SAVED = {
    "format": others(),
    "rank": (*(v for v in ints() if v != -1), -2),
    "world_size": (*ints(), 0),
    "step": ints(),
    "loss_scale": (True, "4", NAN, INF, -1),
    "learning_rate": (True, "4", NAN, INF, -1),
    "compressor": others("x"),
    "feedback": others("x"),
    "seed": ints(),
    "residuals": others(),
    "held_back": (None, True, "x", -1, [3]),
}
REDUCE = {
    "tensor": others(),
    "op": (*others(), torch.ones(3)),
    "group": others(None),
    "async_op": NO_BOOL,
    "compressor": others("x"),
    "algorithm": others("x"),
    "state": others(None),
    "name": NO_NAME,
    "seed": (*ints(), 2**64),
    "deterministic": (*NO_BOOL, torch.ones(3)),
}
FIELDS = [
    (Given.settings, SETTINGS),
    (Given.load, SAVED),
    (Given.merge, SAVED),
    (Given.reduce, REDUCE),
    (
        Given.compress,
        {
            "tensor": others(),
            "seed": ints(),
            "step": ints(),
            "name": NO_NAME,
            "out": others(None),
            "crc": NO_BOOL,
        },
    ),
    (
        Given.sync,
        {
            "module": others(),
            "group": others(None),
            "gradients": (*NO_BOOL, torch.ones(3)),
            "buffers": NO_BOOL,
        },
    ),
    (
        advise,
        {
            "numel": ints(),
            "world_size": (*ints(), 0),
            "bandwidth": (*NO_NUMBER, 0, -1),
            "dtype": others(),
            "backward_ms": (*NO_NUMBER, -1),
            "latency_ms": (*NO_NUMBER, -1),
            "candidates": others([]),
        },
    ),
    (
        course,
        {
            "start": (*NO_NUMBER, 0, -1),
            "end": (*NO_NUMBER, 0, -1),
            "steps": (*ints(), 0),
        },
    ),
    (
        auto,
        {
            "candidates": others(),
            "margin": (*NO_NUMBER, 1, -0.1),
            "rounds": (*ints(), 2),
        },
    ),
    (
        exempt,
        {
            "min_numel": ints(),
            "max_dim": ints(),
            "names": (None, True, "x", -1, [3]),
            "predicate": NO_CALLABLE,
        },
    ),
    (
        error_feedback,
        {"decay": (*NO_NUMBER, 0, -1, 1.5)},
    ),
    (
        reduce_state,
        {"feedback": others(None), "rollback": NO_BOOL},
    ),
    (cast, {"dtype": others()}),
]
# What is called -> the call, what its error must name, and values that are refused.
CALLS = {
    "register": (lambda g, value: ck.register(value), "ddp", others()),
    "Steps": (
        lambda g, value: ck.Steps(value),
        "values",
        (None, True, "x", -1, NAN, 3),
    ),
    "Steps, a step": (lambda g, value: ck.Steps([(value, 1)]), "step", ints()),
    "Steps, a number": (lambda g, value: ck.Steps({0: value}), "number", NO_NUMBER),
    "Steps, a pair": (lambda g, value: ck.Steps([value]), "pair", others()),
    "merge_state_dicts": (
        lambda g, value: ck.merge_state_dicts(value),
        "states",
        (None, True, "x", -1, NAN, {}),
    ),
    "merge_state_dicts, one": (
        lambda g, value: ck.merge_state_dicts([value]),
        "state_dict",
        others(),
    ),
    "load_state_dict": (
        lambda g, value: g.state.load_state_dict(value),
        "state_dict",
        others(),
    ),
    "load_state_dict, strict": (
        lambda g, value: g.state.load_state_dict(g.saved, strict=value),
        "strict",
        NO_BOOL,
    ),
    "load_state_dict, reset": (
        lambda g, value: g.state.load_state_dict(g.saved, reset=value),
        "reset",
        NO_BOOL,
    ),
    "per_rank": (
        lambda g, value: g.state.per_rank(value),
        "saved_world_size",
        (*ints(None), 0),
    ),
    "per_rank, loading": (
        lambda g, value: g.state.per_rank().load_state_dict(value),
        "state_dict",
        others(),
    ),
    "per_rank, another rank's": (
        lambda g, value: g.state.per_rank().load_state_dict({value: g.saved}),
        "'rank_0'",
        ("rank_1", 0),
    ),
    "step": (lambda g, value: setattr(g.state, "step", value), "step", ints()),
    "state.advise": (lambda g, value: g.state.advise(value), "candidates", others([])),
    "bind": (lambda g, value: g.state.bind(value), "module", others()),
    "rejoin": (lambda g, value: g.state.rejoin(value), "group", others(None)),
    "residual": (lambda g, value: ck.ReduceState().residual(value), "name", NO_NAME),
    "write_stats, writer": (
        lambda g, value: ck.write_stats(value, g.state),
        "writer",
        others(),
    ),
    "write_stats, step": (
        lambda g, value: ck.write_stats(Writer(), g.state, value),
        "step",
        ints(None),
    ),
    "decompress": (
        lambda g, value: ck.Quantize().decompress(value),
        "payload",
        others(),
    ),
    "decompress, out": (
        lambda g, value: ck.Quantize().decompress(g.payload, value),
        "output",
        others(None),
    ),
    "decompress_add": (
        lambda g, value: ck.Quantize().decompress_add(g.payload, value),
        "output",
        others(),
    ),
    "decompress_add, scale": (
        lambda g, value: ck.Quantize().decompress_add(
            g.payload, torch.ones(4), scale=value
        ),
        "scale",
        NO_NUMBER,
    ),
    "small_or_vector": (
        lambda g, value: ck.small_or_vector("name", value),
        "parameter",
        others(),
    ),
    "Exempt()": (lambda g, value: ck.Exempt()("name", value), "parameter", others()),
    "get_scale()": (
        lambda g, value: g.backward(grad_scaler=Scaler(value)),
        "get_scale",
        (*NO_NUMBER, -1, torch.ones(3)),
    ),
    "learning_rate()": (
        lambda g, value: g.backward(learning_rate=lambda: value),
        "learning_rate",
        (*NO_NUMBER, -1, torch.ones(3)),
    ),
    "a course()": (
        lambda g, value: g.backward(schedule={"bits": lambda step: value}),
        "bits",
        (*NO_NUMBER, -1),
    ),
}


class Writer:
    def add_scalar(self, tag, value, step):
        raise AssertionError("nothing is written")


def cases():
    for make, fields in FIELDS:
        kind = make.__name__
        for field, values in fields.items():
            call = functools.partial(make, field=field)
            yield pytest.param(call, field, values, id=f"{kind}, {field}")
    for what, (call, named, values) in CALLS.items():
        yield pytest.param(call, named, values, id=what)


@pytest.mark.parametrize(("call", "named", "values"), [*cases()])
def test_what_makes_no_sense_is_named(given, call, named, values):
    before = dict(vars(given.state))
    for value in values:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(given, value=value)
        text = str(caught.value)
        assert named in text
        got = (repr(value), str(value), type(value).__name__)
        assert any(form in text for form in got), (value, text)
        assert "not supported between" not in text
        assert vars(given.state) == before
        assert given.state.step == 0
