"""Laws on what compressors do to values, with bounds derived from their own traits."""

from __future__ import annotations

import importlib
import itertools
import math
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.laws import (
    DTYPES,
    EVERY,
    INPUTS,
    assert_within_bound,
    coded,
    compute,
    overflows,
    random,
)

import commkern as ck
import commkern.reference
from commkern import backend
from commkern.arrays import as_bytes
from commkern.compressors.base import Operands
from commkern.compressors.block import BlockCoder
from commkern.dtypes import dtype_name
from commkern.errors import BackendError
from commkern.layout import stages_of
from commkern.spans import one_span


@pytest.fixture(params=EVERY)
def coder(request: pytest.FixtureRequest) -> ck.Compressor:
    return ck.compressor(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("kind", INPUTS)
def test_error_is_within_the_stated_bound(coder, dtype, kind) -> None:
    tensor = INPUTS[kind](dtype)
    assert tensor.isfinite().all()
    if overflows(coder, tensor):
        pytest.skip("a cast gives Inf here and a rotation NaN, as documented")
    assert_within_bound(coder, tensor, seed=11)


def test_error_is_within_the_stated_bound_at_any_length(coder, dtype) -> None:
    granule = coder.granule(dtype_name(dtype))
    for numel in (2, 7, granule - 1, granule, granule + 1, 2 * granule + 5, 1009):
        assert_within_bound(coder, random((numel,), dtype, seed=numel), seed=numel)


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
    outside = outside_of_block(coder, dtype, 1500, 2000)
    assert decoded[outside].isfinite().all()
    if coder.whole_shares:  # others may be scaled anew where it was the largest
        dirty[~outside] = 0
        expected = coded(coder, dirty, seed=2)
    assert torch.equal(decoded[outside], expected[outside])


def outside_of_block(coder, dtype, index: int, numel: int) -> torch.Tensor:
    """Which elements must not notice a NaN at ``index``."""
    outside = torch.ones(numel, dtype=torch.bool)
    if isinstance(coder, BlockCoder) and coder.block_format().scales == "span":
        return ~outside
    granule = coder.granule(dtype_name(dtype))
    first = index // granule * granule
    outside[first : first + granule] = False
    return outside


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
