"""What the hook cannot serve is refused at registration, or on the first call."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.hook.given import Given
from tests.hook.models import Bucket, everything
from tests.test_compose import collide
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import commkern as ck
from commkern.bucket_plans import BucketPlans

SPEC = "quantize:bits=4"


def refusal(case, *kinds) -> str:
    with pytest.raises(kinds or TypeError) as caught:
        case()
    return str(caught.value)


# --- dtypes ---------------------------------------------------------------------------


def integers(rank, world_size):
    """DDP takes frozen parameters of any dtype, and never reduces them."""
    model = nn.Linear(8, 8)
    model.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    ddp = DistributedDataParallel(model)
    state = ck.register(ddp, "quantize:bits=4", exempt=None)
    ddp(torch.ones(1, 8) * (rank + 1)).sum().backward()
    assert state.step == 1
    return model.weight.grad[0, 0].item(), sorted(state.state_dict()["residuals"])


def test_frozen_integers_are_left_alone(ranks):
    assert ranks.run(2, integers) == [(1.5, ["bias", "weight"])] * 2


def quarter_precision(rank, world_size):
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn))
    return refusal(lambda: ck.CompressionState(None, SPEC, module=model))


def test_a_dtype_that_is_not_supported_is_named_with_those_that_are(ranks):
    for text in ranks.run(2, quarter_precision):
        assert "parameter 'w'" in text
        assert f"compressor {SPEC}: dtype" in text
        assert "float8_e4m3fn" in text
        assert "float32, float64, float16, bfloat16" in text


def other_gradients(rank, world_size, dtypes):
    """The hook's errors and steps, by compressor and dtype; and of tensors alone."""
    model = nn.Linear(64, 64, bias=False)
    found = {}
    for spec, dtype in itertools.product(everything(), dtypes):
        feedback = "error" if ck.compressor(spec).supports_feedback else None
        settings = {"feedback": feedback, "exempt": None}
        group = dist.new_group([0, 1])  # an error is the group's last word
        state = ck.CompressionState(group, spec, module=model, **settings)
        gradient = torch.ones(model.weight.numel(), dtype=dtype)  # as DDP never has it
        bucket, tensor = Bucket(model.weight, gradient), torch.ones(64, dtype=dtype)
        texts = [refusal(lambda s=state, b=bucket: ck.compression_hook(s, b))]
        coder = ck.compressor(spec)
        texts.append(refusal(lambda c=coder, t=tensor: c.compress(t)))
        texts.append(refusal(lambda s=spec, t=tensor: ck.all_reduce(t, compressor=s)))
        found[spec, str(dtype)] = texts, state.step
    return found


def test_a_gradient_of_another_dtype_is_refused_by_every_compressor(ranks):
    """With names of compressor and dtype and what is supported, in the error's text."""
    dtypes = (torch.int32, torch.bool)
    for found in ranks.run(2, other_gradients, dtypes):
        assert len(found) == len(everything()) * len(dtypes)
        for (spec, dtype), (texts, step) in found.items():
            assert step == 0
            for text in texts:
                assert f"compressor {ck.compressor(spec)}: dtype {dtype} is" in text
                assert "float32, float64, float16, bfloat16" in text


def test_a_torch_that_hands_out_half_of_a_complex_gradient_is_refused():
    parameters = [torch.ones(3, 2, dtype=torch.complex64), torch.ones(2)]
    names = {id(p): name for p, name in zip(parameters, "ab", strict=True)}
    plans = BucketPlans(names, policy=None, stores=None, settings=None, watch=None)
    assert plans.sizes(parameters, torch.ones(14)) == {"a": 12, "b": 2}
    text = refusal(lambda: plans.sizes(parameters, torch.ones(8)))
    assert "14 real numbers" in text
    assert "8 of dtype torch.float32" in text


# --- names ----------------------------------------------------------------------------


def colliding_names(rank, world_size):
    """In buckets of their own, so that no plan holds both; also in `bind`."""
    first, second = "parameter", collide("parameter", "another/")
    values = {first: torch.ones(64, 64), second: torch.ones(64, 64)}
    settings = {"bucket_cap_mb": 0.001, "find_unused_parameters": True}
    ddp = DistributedDataParallel(Given(values), **settings)
    texts = [refusal(lambda: ck.register(ddp, "quantize:bits=4"), ValueError)]
    copied = copy.deepcopy(ck.CompressionState(module=nn.Linear(8, 8)))
    texts.append(refusal(lambda: copied.bind(ddp), ValueError))
    assert all(repr(first) in text and repr(second) in text for text in texts)
    return texts


def test_names_of_one_checksum_are_refused_at_registration(ranks):
    for texts in ranks.run(2, colliding_names):
        assert all("have the same CRC-32C" in text for text in texts)


# --- FSDP -----------------------------------------------------------------------------


def fsdp1(rank, world_size):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    texts = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1's own
            model = FullyShardedDataParallel(
                nn.Linear(8, 8),
                sharding_strategy=strategy,
                device_id=torch.device("cpu"),
            )
            texts.append(refusal(lambda m=model: ck.register(m)))
            texts.append(refusal(lambda m=model: ck.CompressionState(module=m)))
            state = ck.CompressionState(module=nn.Linear(8, 8))
            model.register_comm_hook(state, ck.compression_hook)
            texts.append(refusal(model(torch.ones(1, 8)).sum().backward))
    return texts


def fsdp2(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    inner = nn.Linear(8, 8)
    fully_shard(inner, mesh=mesh)
    model = nn.Sequential(inner)
    texts = [
        refusal(lambda: ck.register(inner)),
        refusal(lambda: ck.CompressionState(module=model)),
    ]
    inner.set_all_reduce_hook(ck.compression_hook)
    texts.append(refusal(inner(torch.ones(1, 8)).sum().backward))
    return texts


@pytest.mark.parametrize("kind", [fsdp1, fsdp2])
def test_fsdp_gets_advice(ranks, kind):
    for texts in ranks.run(2, kind):
        assert len(texts) in (3, 6)
        assert all("FSDP has another hook contract" in text for text in texts), texts


def replicas_of_fsdp2(rank, world_size):
    """The advice: hybrid sharding with our all_reduce between the replicas."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=mesh["shards"])
    replicas = mesh["replicas"].get_group()

    def between_replicas(gradient: torch.Tensor) -> None:
        ck.all_reduce(gradient, torch.distributed.ReduceOp.AVG, replicas)

    model.set_all_reduce_hook(between_replicas)
    model(torch.full((1, 4), 2.0 * (rank + 1))).sum().backward()
    return model.weight.grad.full_tensor()


def test_all_reduce_serves_the_replicas_of_fsdp2(ranks):
    for gradient in ranks.run(2, replicas_of_fsdp2):
        assert torch.equal(gradient, torch.full((4, 4), 3.0))


# --- other hooks and callers ----------------------------------------------------------


def native_mixed_precision(rank, world_size):
    ddp = DistributedDataParallel(
        nn.Linear(8, 8), mixed_precision=_MixedPrecision(torch.bfloat16, torch.bfloat16)
    )
    return refusal(lambda: ck.register(ddp), ValueError)


def test_the_mixed_precision_of_ddp_is_refused(ranks):
    for text in ranks.run(2, native_mixed_precision):
        assert "mixed_precision" in text
        assert "autocast" in text


def wrong_states(rank, world_size):
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    ddp.register_comm_hook("state", ck.compression_hook)
    loss = ddp(torch.ones(1, 8)).sum()
    texts = [refusal(loss.backward)]
    texts.append(refusal(lambda: ck.CompressionState(module="model")))
    return texts


def test_another_state_is_named(ranks):
    for texts in ranks.run(2, wrong_states):
        assert "got (str, GradBucket)" in texts[0]
        assert "register_comm_hook(state, commkern.compression_hook)" in texts[0]
        assert "got str" in texts[1]
