"""Laws on what compressors do to values, with bounds derived from their own traits."""

from __future__ import annotations

import importlib
import itertools
import math
from types import ModuleType

import numpy as np
import pytest
import torch

import commkern as ck
import commkern.reference
from commkern import backend
from commkern.arrays import as_bytes
from commkern.compressors.base import Operands
from commkern.dtypes import dtype_name
from commkern.errors import BackendError
from commkern.layout import stages_of
from commkern.spans import one_span

EVERY = [
    spec for name in ck.compressors() for spec in (name, *ck.compressor(name).examples)
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(params=EVERY)
def coder(request: pytest.FixtureRequest) -> ck.Compressor:
    return ck.compressor(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def coded(coder: ck.Compressor, tensor: torch.Tensor, **kwargs: int) -> torch.Tensor:
    return coder.decompress(coder.compress(tensor, **kwargs))


def compute(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def smallest(dtype: torch.dtype) -> float:
    """The smallest denormal."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def blocks(coder: ck.Compressor, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Pieces that are coded on their own, in fp64."""
    flat = tensor.reshape(-1).double()
    return list(flat.split(coder.granule(dtype_name(tensor.dtype))))


def tolerance(coder: ck.Compressor, absmax: float, dtype: torch.dtype) -> float:
    """How far a decoded element may be from its value, in a block with this absmax.

    The compressor's own bound holds in exact arithmetic. On top: four roundings of the
    compute type (residual sum or scale, reciprocal, product, decoded product), the
    rounding to the output type, and half a denormal of the scale times a code of at
    most 127.
    """
    bound = coder.error_bound(absmax, dtype_name(dtype))
    if coder.error_bound(1.0, dtype_name(dtype)) == 0.0:
        return 0.0
    arithmetic = 4 * torch.finfo(compute(dtype)).eps * absmax
    output = torch.finfo(dtype).eps * absmax / 2 + smallest(dtype)
    return bound + arithmetic + output + 127 * smallest(compute(dtype)) / 2


def assert_within_bound(coder: ck.Compressor, tensor: torch.Tensor, seed: int) -> None:
    decoded = coded(coder, tensor, seed=seed)
    pairs = zip(blocks(coder, tensor), blocks(coder, decoded), strict=True)
    for before, after in pairs:
        limit = tolerance(coder, before.abs().max().item(), tensor.dtype)
        error = (before - after).abs().max().item()
        assert error <= limit, (error, limit)


INPUTS = {
    "normal": lambda dtype: random((7, 300), dtype),
    "one element": lambda dtype: random((1,), dtype),
    "all equal": lambda dtype: torch.full((500,), -0.3, dtype=dtype),
    "one large": lambda dtype: random((500,), dtype).index_fill_(
        0, torch.tensor(77), 1000.0
    ),
    "many scales": lambda dtype: (
        random((1000,), torch.float64) * 2.0 ** (torch.arange(1000) % 24 - 12)
    ).to(dtype),
    "small": lambda dtype: random((500,), dtype) * torch.finfo(dtype).smallest_normal,
    "denormal": lambda dtype: (torch.arange(-250, 250).double() * smallest(dtype)).to(
        dtype
    ),
    "smallest denormal": lambda dtype: torch.full((500,), smallest(dtype)).to(dtype),
    "huge": lambda dtype: random((500,), dtype).clamp(-1, 1) * torch.finfo(dtype).max,
    "largest": lambda dtype: torch.full((500,), torch.finfo(dtype).max, dtype=dtype),
}


def overflows(coder: ck.Compressor, tensor: torch.Tensor) -> bool:
    """A cast documents that overflow gives Inf."""
    wire = getattr(coder, "wire_dtype", None)
    if wire is None or tensor.numel() == 0:
        return False
    narrow = tensor.to(getattr(torch, wire(dtype_name(tensor.dtype))))
    return bool(narrow.isinf().any())


@pytest.mark.parametrize("kind", INPUTS)
def test_error_is_within_the_stated_bound(coder, dtype, kind) -> None:
    tensor = INPUTS[kind](dtype)
    assert tensor.isfinite().all()
    if overflows(coder, tensor):
        pytest.skip("a cast gives Inf here, as documented")
    assert_within_bound(coder, tensor, seed=11)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4), (0, 5), (1000,)])
def test_zeros_stay_zeros(coder, dtype, shape) -> None:
    decoded = coded(coder, torch.zeros(shape, dtype=dtype))
    assert torch.equal(decoded, torch.zeros(shape, dtype=dtype))


def test_casts_are_torchs_own(dtype) -> None:
    for kind, make in INPUTS.items():
        tensor = make(dtype)
        for name, wire in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if wire.itemsize >= dtype.itemsize:
                continue
            expected = tensor.to(wire).to(dtype)
            decoded = coded(ck.Cast(name), tensor)
            assert as_bytes(decoded).tobytes() == as_bytes(expected).tobytes(), kind


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_nonfinite_values_arrive_and_stay_in_their_block(coder, dtype, value) -> None:
    clean = random((2000,), dtype)
    dirty = clean.clone()
    dirty[1500] = value
    expected, decoded = coded(coder, clean, seed=2), coded(coder, dirty, seed=2)
    assert not decoded[1500].isfinite()
    if math.isnan(value):
        assert decoded[1500].isnan()
    granule = coder.granule(dtype_name(dtype))
    first = 1500 // granule * granule
    last = min(first + granule, 2000)
    outside = torch.ones(2000, dtype=torch.bool)
    outside[first:last] = False
    assert torch.equal(decoded[outside], expected[outside])
    assert decoded[outside].isfinite().all()


def kernel_calls(coder: ck.Compressor, on: Operands, *args, **kwargs) -> None:
    for call in getattr(coder, f"{kwargs.pop('what')}_calls")(on, *args, **kwargs):
        backend.kernel(call.name)(**call.fields)


@pytest.mark.parametrize("numel", [1, 5, 128, 1000])
def test_residual_is_what_was_lost_to_the_bit(coder, dtype, numel) -> None:
    """residual' = (x + residual) - decoded, one rounded operation each.

    Decoded in the compute type: the output type's rounding is not the coder's loss.
    """
    name = dtype_name(dtype)
    working = compute(dtype)
    tensor = random((numel,), dtype, seed=3)
    old = random((numel,), torch.float32, seed=4)
    new = torch.full((numel,), torch.nan)
    body = np.zeros(coder.body_nbytes(numel, name), np.uint8)
    on = Operands(
        one_span(numel, parameter_id=7), name, seed=5, step=6, residual=(old, new)
    )
    for staged in stages_of(coder, on, body):
        kernel_calls(coder, staged, tensor, body, what="compress")
    decoded = torch.empty(numel, dtype=working)
    *_, wide = stages_of(coder, Operands(one_span(numel), dtype_name(working)), body)
    if isinstance(coder, ck.Identity):  # its wire type follows the data's
        decoded = torch.frombuffer(bytearray(body), dtype=dtype).to(working)
    else:
        kernel_calls(coder, wide, body, decoded, what="decompress")
    lost = (tensor.to(working) + old.to(working)) - decoded
    assert as_bytes(new).tobytes() == as_bytes(lost.float()).tobytes()


@pytest.mark.parametrize("kind", ["normal", "one large", "many scales", "all equal"])
def test_deterministic_coders_contract(coder, kind) -> None:
    """|x - C(x)|^2 <= (1 - 1/n) |x|^2 in a block of n: rounding to nearest never loses
    more than an element (0 is a code), and the largest element is a code."""
    if coder.unbiased():
        pytest.skip("unbiased coders need not contract")
    tensor = INPUTS[kind](torch.float32)
    decoded = coded(coder, tensor)
    pairs = zip(blocks(coder, tensor), blocks(coder, decoded), strict=True)
    for before, after in pairs:
        lost = (before - after).square().sum().item()
        kept = 1 - 1 / coder.granule("float32")
        assert lost <= kept * before.square().sum().item() * (1 + 1e-6)
        assert ((before - after).abs() <= before.abs() * (1 + 1e-6)).all()


def test_unbiased_coders_are_right_on_average(coder) -> None:
    """The mean of N independent codings of x is within step * (1/512 + t) of x.

    1/512 of a step is the bias of 8 random bits. One coding lies within a step, so by
    Hoeffding the mean strays by more than t steps with probability 2 exp(-2 N t^2):
    with t = sqrt(ln(2e12) / 2N), less than once in 1e12 for each element.
    """
    if not coder.unbiased():
        pytest.skip("biased by design")
    granule, repeats = coder.granule("float32"), 2048
    block = random((granule,), torch.float32, seed=8)
    decoded = coded(coder, block.repeat(repeats), seed=9)
    mean = decoded.double().reshape(repeats, granule).mean(0)
    absmax = block.abs().max().item()
    step = coder.error_bound(absmax, "float32")
    limit = step * (1 / 512 + math.sqrt(math.log(2e12) / (2 * repeats)))
    limit += 4 * torch.finfo(torch.float32).eps * absmax * (step > 0)
    error = (mean - block.double()).abs().max().item()
    assert error <= limit, (error, limit)


def test_unbiased_coders_draw_anew_each_step(coder) -> None:
    if not coder.unbiased():
        pytest.skip("biased by design")
    tensor = random((4096,), torch.float32)
    codings = [coded(coder, tensor, step=step) for step in range(4)]
    if coder.error_bound(1.0, "float32") == 0.0:
        return
    errors = [coding.double() - tensor.double() for coding in codings]
    for a, b in itertools.combinations(errors, 2):
        correlation = (a @ b / (a.norm() * b.norm())).item()
        # Independent: standard deviation 1/64. The sign of an element's error is not
        # shared between steps, so 8 deviations are never met by chance.
        assert abs(correlation) <= 8 / 64


@pytest.mark.parametrize("scale", [1.0, -0.5, 1 / 3])
def test_decompress_add_is_two_rounded_operations(coder, dtype, scale) -> None:
    if dtype.itemsize < 4:
        pytest.skip("the sum is taken before the rounding to 16 bits")
    payload = coder.compress(random((500,), dtype))
    start = random((500,), dtype, seed=1)
    output = start.clone()
    assert coder.decompress_add(payload, output, scale) is output
    expected = start + coder.decompress(payload) * torch.tensor(scale, dtype=dtype)
    assert as_bytes(output).tobytes() == as_bytes(expected).tobytes()


def test_decompress_add_to_zeros_decompresses(coder, dtype) -> None:
    payload = coder.compress(random((20, 25), dtype))
    output = torch.zeros(25, 20, dtype=dtype).T
    coder.decompress_add(payload, output)
    assert torch.equal(output, coder.decompress(payload))


def compiled_kernels() -> ModuleType:
    kernels = importlib.import_module("commkern.kernels")
    try:
        dir(kernels)
    except BackendError as error:
        pytest.skip(f"no compiled module: {error}")
    return kernels


@pytest.mark.parametrize("numel", [0, 1, 7, 16, 129, 1000])
def test_backends_write_the_same_bytes(coder, dtype, numel, monkeypatch) -> None:
    compiled = compiled_kernels()
    tensor = random((numel,), dtype, seed=numel)
    found = []
    for kernels in (compiled, commkern.reference):
        monkeypatch.setattr(backend, "kernel", lambda name, k=kernels: getattr(k, name))
        payload = coder.compress(tensor, seed=4, step=1, name="w", crc=True)
        decoded = coder.decompress(payload)
        added = coder.decompress_add(payload, random((numel,), dtype), 0.25)
        found.append([as_bytes(x).tobytes() for x in (payload.data, decoded, added)])
    assert found[0] == found[1]
