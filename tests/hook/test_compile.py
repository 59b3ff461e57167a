"""torch.compile around DDP and inside it, under every setting of optimize_ddp."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import ReverseOrder, batch, digest
from torch._dynamo import config
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

MODES = [
    True,
    False,
    "ddp_optimizer",
    "python_reducer_without_compiled_forward",
    "no_optimization",
]
NAMES = [f"layers.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]


def built(where: str):
    """The DDP module, and what to call."""
    torch.manual_seed(0)
    model = ReverseOrder()
    if where == "inside":
        model = torch.compile(model, backend="aot_eager")
    if where == "layers":
        for i, layer in enumerate(model.layers):
            model.layers[i] = torch.compile(layer, backend="aot_eager")
    ddp = DistributedDataParallel(model)
    if where == "outside":
        return ddp, torch.compile(ddp, backend="aot_eager")
    return ddp, ddp


def trained(where: str, rank: int, spec: str):
    torch._dynamo.reset()
    ddp, call = built(where)
    state = ck.register(call, spec, seed=2)  # the compiled one, too
    for step in range(3):
        call.zero_grad()
        call(batch(rank, step)).square().mean().backward()
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.1 * p.grad
    residuals = state.state_dict()["residuals"]
    assert sorted(state.report()) == sorted(NAMES), where
    assert sorted(residuals) == sorted(n for n in NAMES if n.endswith("weight"))
    assert state.step == 3
    return digest(ddp), {name: r.sum().item() for name, r in residuals.items()}


def every_place(rank, world_size, mode, spec):
    with config.patch(optimize_ddp=mode):
        return [
            trained(where, rank, spec)
            for where in ("nowhere", "outside", "inside", "layers")
        ]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_compiled_model_gets_the_same_bits(ranks, mode):
    results = ranks.run(2, every_place, mode, "quantize:bits=4,rounding=stochastic")
    digests = {digest for result in results for digest, _ in result}
    assert len(digests) == 1
    for result in results:
        assert all(sums == result[0][1] for _, sums in result)


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
