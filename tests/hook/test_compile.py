"""torch.compile around DDP and inside it, under every setting of optimize_ddp."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import ReverseOrder, batch, digest
from torch._dynamo import config
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

MODES = [
    True,
    False,
    "ddp_optimizer",
    "python_reducer_without_compiled_forward",
    "no_optimization",
]
NAMES = [f"layers.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
WIDTH = 512  # a layer is 1 MB: torch takes no smaller bucket where it splits graphs
SPLIT = {True, "ddp_optimizer"}  # a graph for each bucket


class Graphs:
    """A backend that counts what it is given to compile."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return aot_eager(graph, inputs)


def built(where: str, backend="aot_eager"):
    """The DDP module, and what to call."""
    torch.manual_seed(0)
    model = ReverseOrder(WIDTH, 3)
    if where == "inside":
        model = torch.compile(model, backend=backend)
    if where == "layers":
        for i, layer in enumerate(model.layers):
            model.layers[i] = torch.compile(layer, backend=backend)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1.1)
    if where == "outside":
        return ddp, torch.compile(ddp, backend=backend)
    return ddp, ddp


def trained(where: str, rank: int, spec: str):
    """Digests, sums of residuals, buckets in each step, and graphs."""
    torch._dynamo.reset()
    graphs, buckets = Graphs(), [0] * 3
    ddp, call = built(where, graphs)
    state = ck.register(call, spec, seed=2)  # the compiled one, too
    submit = state.reducer.submit

    def counted(bucket):
        buckets[step] += 1
        return submit(bucket)

    state.reducer.submit = counted
    for step in range(3):
        call.zero_grad()
        call(batch(rank, step, WIDTH)).square().mean().backward()
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.1 * p.grad
    residuals = state.state_dict()["residuals"]
    assert sorted(state.report()) == sorted(NAMES), where
    assert sorted(residuals) == sorted(n for n in NAMES if n.endswith("weight"))
    assert state.step == 3
    sums = {name: r.sum().item() for name, r in residuals.items()}
    return digest(ddp), sums, buckets, graphs.count


def every_place(rank, world_size, mode, spec):
    with config.patch(optimize_ddp=mode):
        return [
            trained(where, rank, spec)
            for where in ("nowhere", "outside", "inside", "layers")
        ]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_compiled_model_gets_the_same_bits(ranks, mode):
    results = ranks.run(2, every_place, mode, "quantize:bits=4,rounding=stochastic")
    assert len({digest for result in results for digest, *_ in result}) == 1
    whole = 2 if mode in SPLIT else 1
    for result in results:
        assert all(sums == result[0][1] for _, sums, *_ in result)
        assert [buckets for _, _, buckets, _ in result] == [[1, 2, 2]] * 4
        assert [graphs for *_, graphs in result] == [0, whole, whole, 2]


def checkpoint_of_compiled(rank, world_size):
    """Names are those of the user's model: a compiled run resumes an ordinary one."""
    torch._dynamo.reset()
    plain, _ = built("nowhere")
    saved = ck.register(plain, "quantize:bits=4").state_dict()
    for where in ("outside", "inside", "layers"):
        ddp, call = built(where)
        ck.register(call, "quantize:bits=4").load_state_dict(saved)
        alone = ck.CompressionState(None, "quantize:bits=4", module=ddp.module)
        alone.load_state_dict(saved)
    return True


def test_states_are_exchanged_with_compiled_models(ranks):
    assert all(ranks.run(2, checkpoint_of_compiled))


def python_reducer(rank, world_size):
    texts = []
    with config.patch(optimize_ddp="python_reducer"):
        ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
        for case in (
            lambda: ck.register(ddp),
            lambda: ck.CompressionState(module=ddp),
            lambda: ck.CompressionState(module=torch.compile(ddp, backend="eager")),
        ):
            with pytest.raises(TypeError) as caught:
                case()
            texts.append(str(caught.value))
        # A state made without the DDP module: the first call tells.
        state = ck.CompressionState(module=ddp.module)
        ddp.register_comm_hook(state, ck.compression_hook)
        loss = ddp(torch.ones(1, 8)).sum()
        with pytest.raises(TypeError) as caught:
            loss.backward()
        texts.append(str(caught.value))
    return texts


def test_the_python_reducer_is_refused(ranks):
    for texts in ranks.run(2, python_reducer):
        for text in texts:
            assert "optimize_ddp='python_reducer'" in text
            assert "'ddp_optimizer'" in text
