"""`check_sync` finds every bit that differs between ranks, and says where."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.hook.models import batch, make, train

import commkern as ck


def verdict(module, group=None, **options):
    """None, or (text, name, ranks) of what check_sync raises."""
    try:
        return ck.check_sync(module, group, **options)
    except ck.ReplicasDiffer as error:
        return str(error), error.name, error.ranks


class Everything(torch.nn.Module):
    """Parameters and buffers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(7, 5))
        self.strided = torch.nn.Parameter(torch.randn(6, 4).t()[::2])
        self.narrow = torch.nn.Parameter(torch.randn(9).bfloat16())
        self.wide = torch.nn.Parameter(torch.randn(3).double())
        self.phase = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(3.5))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.arange(5))
        self.register_buffer("eight", torch.randn(6).to(torch.float8_e4m3fn))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.register_buffer("coo", torch.eye(4).to_sparse())
        self.register_buffer("csr", torch.eye(4).to_sparse_csr())
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("expanded", torch.ones(1).expand(4))


def bytes_of(tensor):
    """A writable uint8 view of a tensor that is dense in memory."""
    base = tensor.detach()
    return torch.view_as_real(base) if base.is_complex() else base


def flip(tensor, bit):
    """Flip one bit of the elements, counted in memory of a contiguous copy."""
    plain = bytes_of(tensor)
    raw = plain.contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    raw[bit // 8] ^= np.uint8(1 << bit % 8)
    changed = torch.from_numpy(raw).view(plain.dtype).reshape(plain.shape)
    plain.copy_(changed)


def flips(rank, world_size):
    """First, last and a middle bit of every tensor, on rank 1."""
    model, found = Everything(), {"equal": verdict(Everything())}
    dense = dict(model.named_parameters()) | {
        n: b for n, b in model.named_buffers() if n in ("scalar", "count", "eight")
    }
    for name, tensor in dense.items():
        nbits = 8 * tensor.numel() * tensor.element_size()
        for bit in (0, nbits // 2, nbits - 1) if nbits else ():
            if rank == 1:
                flip(tensor, bit)
            found[name, bit] = verdict(model)
            if rank == 1:
                flip(tensor, bit)
    found["again"] = verdict(model)
    return found


def test_one_flipped_bit_is_found(ranks):
    first, *others = ranks.run(3, flips)
    assert all(other == first for other in others)
    assert first.pop("equal") is None
    assert first.pop("again") is None
    assert len(first) == 8 * 3
    for (name, bit), (text, where, drifted) in first.items():
        kind = "buffer" if name in ("scalar", "count", "eight") else "parameter"
        assert where == f"{kind} {name!r}", bit
        assert drifted == (1,)
        assert "rank 1 of 3 drifted from the others" in text
        assert "(1 of 15 tensors differ)" in text


CHANGES = {
    "minus zero": lambda m: m.weight.data[0].zero_().neg_(),
    "NaN payload": lambda m: flip(m.weight, 3),
    "mask": lambda m: m.mask.logical_not_(),
    "sparse value": lambda m: m.coo.values().mul_(2),
    "sparse place": lambda m: setattr(m, "coo", torch.eye(4).flip(0).to_sparse()),
    "csr": lambda m: m.csr.values().mul_(2),
    "unsaved": lambda m: m.unsaved.zero_(),
    "dtype": lambda m: setattr(m, "count", m.count.int()),
    "shape": lambda m: setattr(m, "count", m.count.reshape(5, 1)),
    "layout": lambda m: setattr(m, "coo", m.coo.to_dense()),
    "fewer": lambda m: delattr(m, "scalar"),
    "more": lambda m: m.register_buffer("extra", torch.zeros(1)),
}


def change(rank, world_size):
    found = {}
    for name, changed in CHANGES.items():
        model = Everything()
        if name == "minus zero":
            model.weight.data[0].zero_()
        if name == "NaN payload":
            model.weight.data.fill_(float("nan"))
        assert ck.check_sync(model) is None
        if rank == 1:
            changed(model)
        found[name] = verdict(model)
    return found


def test_everything_else_that_differs(ranks):
    zero, one = ranks.run(2, change)
    assert zero == one
    names = {name: where for name, (_, where, _) in zero.items()}
    assert names == {
        "minus zero": "parameter 'weight'",
        "NaN payload": "parameter 'weight'",
        "mask": "buffer 'mask'",
        "sparse value": "buffer 'coo'",
        "sparse place": "buffer 'coo'",
        "csr": "buffer 'csr'",
        "unsaved": "buffer 'unsaved'",
        "dtype": "buffer 'count'",
        "shape": "buffer 'count'",
        "layout": "buffer 'coo'",
        "fewer": "buffer 'scalar'",
        "more": "buffer 'extra'",
    }
    assert all(drifted == (0, 1) for _, _, drifted in zero.values())
    assert "rank 0 and rank 1 differ" in zero["mask"][0]
    assert "(5,) torch.int64 at rank 0; (5,) torch.int32 at rank 1" in zero["dtype"][0]
    assert "() torch.float32 at rank 0; missing at rank 1" in zero["fewer"][0]
    assert "missing at rank 0; (1,) torch.float32 at rank 1" in zero["more"][0]
    assert "sparse" in zero["layout"][0]


def drift(rank, world_size, values):
    """A parameter that is values[rank] on this rank, and another one behind it."""
    model = torch.nn.Linear(3, 1)
    for parameter in model.parameters():
        parameter.data.fill_(values[rank])
    return verdict(model)


@pytest.mark.parametrize(
    ("values", "drifted", "text"),
    [
        ((1, 1, 2, 1), (2,), "rank 2 of 4 drifted from the others"),
        ((2, 1, 1, 3), (0, 3), "ranks 0, 3 of 4 drifted from the others"),
        ((1, 2, 1, 2), (0, 1, 2, 3), "ranks 0, 2 and ranks 1, 3 differ"),
        ((1, 1, 1, 1), None, ""),
    ],
)
def test_the_minority_is_named(ranks, values, drifted, text):
    for found in ranks.run(4, drift, values):
        if drifted is None:
            assert found is None
        else:
            assert found[1:] == ("parameter 'weight'", drifted)
            assert text in found[0]
            assert "2 of 2 tensors differ" in found[0]


def accumulate(rank, world_size, right):
    """Two micro-batches; the collective belongs to the second one."""
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    ck.register(ddp, "identity")
    x = torch.tensor([[1.0, 1.0]]) * (rank + 1)
    if right:
        with ddp.no_sync():
            ddp(x).sum().backward()
        ddp(10 * x).sum().backward()
    else:
        ddp(x).sum().backward()
        with ddp.no_sync():
            ddp(10 * x).sum().backward()
    return verdict(ddp), verdict(ddp, gradients=True)


def test_no_sync_at_the_wrong_micro_batch(ranks):
    assert ranks.run(2, accumulate, True) == [(None, None)] * 2
    for parameters, gradients in ranks.run(2, accumulate, False):
        assert parameters is None
        assert gradients[1] == "gradient of 'weight'"


def ddp_modules(rank, world_size):
    ddp = make()
    ck.register(ddp, "quantize:bits=4")
    train(ddp, rank, range(3))
    found = [verdict(ddp, gradients=True), verdict(ddp.module)]
    unused = torch.nn.Linear(2, 2)
    if rank == 0:
        unused.weight.grad = torch.zeros(2, 2)
    found.append(verdict(unused, gradients=True))
    alone = dist.new_group([rank], use_local_synchronization=True)
    found.append(verdict(unused, alone, gradients=True))
    # Running means are those of the rank's own batches until the next forward.
    norm = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8))
    ddp = torch.nn.parallel.DistributedDataParallel(norm)
    ddp(batch(rank, 0)).sum().backward()
    found += [verdict(ddp), verdict(ddp, buffers=False)]
    return found


def test_modules_of_ddp(ranks):
    for found in ranks.run(2, ddp_modules):
        trained, bare, unused, alone, norm, without_buffers = found
        assert trained is bare is alone is without_buffers is None
        assert unused[1] == "gradient of 'weight'"
        assert "torch.float32 at rank 0; nothing at rank 1" in unused[0]
        assert norm[1] == "buffer '1.running_mean'"


def ignored_and_unreadable(rank, world_size):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("own", torch.full((2,), float(rank)))
    wrapper = torch.nn.parallel.DistributedDataParallel
    wrapper._set_params_and_buffers_to_ignore_for_model(model, ["own"])
    found = [verdict(wrapper(model)), verdict(model)]
    texts = []
    for buffer in (torch.ones(3).to_mkldnn(), "not a tensor"):
        broken = torch.nn.Linear(2, 2)
        if isinstance(buffer, str):
            broken = buffer
        else:
            broken.register_buffer("odd", buffer)
        with pytest.raises(TypeError) as caught:
            ck.check_sync(broken)
        texts.append(str(caught.value))
    lazy = torch.nn.LazyLinear(3)
    lazy.register_buffer("shapes_only", torch.empty(3, device="meta"))
    return found, texts, verdict(lazy)


def test_what_is_left_out_and_what_is_refused(ranks):
    for found, texts, lazy in ranks.run(2, ignored_and_unreadable):
        assert found[0] is None
        assert found[1][1] == "buffer 'own'"
        assert "buffer 'odd'" in texts[0]
        assert "mkldnn" in texts[0]
        assert "str" in texts[1]
        assert lazy is None


def unreadable_on_one(rank, world_size):
    model = torch.nn.Linear(2, 2)
    model.weight.data.fill_(1.0)
    model.bias.data.fill_(1.0)
    model.register_buffer("odd", torch.ones(3).to_mkldnn() if rank else torch.ones(3))
    with pytest.raises((TypeError, ck.CommkernError)) as caught:
        ck.check_sync(model)
    model.odd = torch.ones(3)
    return type(caught.value).__name__, str(caught.value), verdict(model)


def test_tensors_that_one_rank_cannot_read_end_the_check_on_every_rank(ranks):
    told, other, own = ranks.run(3, unreadable_on_one, group_timeout_s=10)
    assert (told[0], own[0]) == ("CommkernError", "TypeError")
    assert own[1] in told[1]
    assert "rank 1: TypeError" in told[1]
    assert other[0] == "TypeError"
    assert told[2] is own[2] is other[2] is None


def traffic(rank, world_size):
    """Collectives and their bytes, where ranks agree."""
    model = torch.nn.Linear(300, 300)
    for parameter in model.parameters():
        parameter.data.zero_()
    calls, plain = [], dist.all_gather

    def counted(outputs, mine, *rest):
        calls.append(mine.numel() * mine.element_size())
        return plain(outputs, mine, *rest)

    dist.all_gather = counted
    try:
        ck.check_sync(model)
    finally:
        dist.all_gather = plain
    return calls


def test_one_small_message_where_ranks_agree(ranks):
    assert ranks.run(2, traffic) == [[16], [16]]


def test_the_error_travels_between_processes():
    error = ck.ReplicasDiffer("text", name="w", ranks=(1, 2))
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, ck.CommkernError)
    assert (str(copy), copy.name, copy.ranks) == ("text", "w", (1, 2))
