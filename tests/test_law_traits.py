"""Laws on means and norms: what compressors say of themselves holds."""

from __future__ import annotations

import math

import pytest
import torch
from tests.laws import EVERY, INPUTS, blocks, coded, random

import commkern as ck
from commkern.compressors.block import BlockCoder

CODERS = [ck.compressor(spec) for spec in EVERY]
RANDOM = [c for c in CODERS if c.unbiased() and not isinstance(c, ck.Identity)]
EPS = torch.finfo(torch.float32).eps


def ids(coder: ck.Compressor) -> str:
    return str(coder)


def repeats_of(coder: ck.Compressor) -> int:
    return max(256, 2**18 // coder.granule("float32"))


def repeated(coder: ck.Compressor, block: torch.Tensor) -> torch.Tensor:
    """Independent codings of a block, one a row."""
    repeats = repeats_of(coder)
    decoded = coded(coder, block.repeat(repeats), seed=9)
    return decoded.double().reshape(repeats, -1)


@pytest.mark.parametrize("coder", CODERS, ids=ids)
@pytest.mark.parametrize(
    "kind", ["normal", "one large", "many scales", "all equal", "all positive"]
)
def test_deterministic_coders_contract(coder: ck.Compressor, kind: str) -> None:
    """|x - C(x)|^2 <= (1 - delta) |x|^2 in every block."""
    delta = coder.contraction("float32")
    if delta is None:
        pytest.skip("random, or no contraction")
    assert 0 < delta <= 1
    tensor = INPUTS[kind](torch.float32)
    pairs = zip(blocks(coder, tensor), blocks(coder, coded(coder, tensor)), strict=True)
    for before, after in pairs:
        lost = (before - after).square().sum().item()
        assert lost <= (1 - delta) * before.square().sum().item() * (1 + 1e-6) + 1e-40


def test_contractions_are_not_far_off() -> None:
    """A block that meets the bound: equal magnitudes for a sign, one for the others."""
    lone = torch.zeros(128)
    lone[5] = 1.0
    lone[6:] = 0.49 / 127
    before, after = lone.double(), coded(ck.Quantize(bits=8), lone).double()
    assert (before - after).square().sum() > 0.9 * before[6:].square().sum()
    for bits in (2, 3, 4):
        delta = ck.Quantize(bits=bits, scale_dtype="bf16").contraction("float32")
        assert delta is not None
        assert delta < ck.Quantize(bits=bits).contraction("float32")
    assert ck.Quantize(bits=2, scale_dtype="e8m0").contraction("float32") is None


@pytest.mark.parametrize("coder", RANDOM, ids=ids)
def test_unbiased_coders_are_right_on_average(coder: ck.Compressor) -> None:
    """The mean of N independent codings of x is within step * (1/512 + t) of x.

    1/512 of a step is the bias of 8 random bits. The values of one coding span a step
    at most, so by Hoeffding the mean strays by more than t steps with probability
    2 exp(-2 N t^2): with t = sqrt(ln(2e12) / 2N), less than once in 1e12 an element.
    """
    block = random((coder.granule("float32"),), torch.float32, seed=8)
    codings = repeated(coder, block)
    absmax = block.abs().max().item()
    step = coder.error_bound(absmax, "float32")
    limit = step * (1 / 512 + math.sqrt(math.log(2e12) / (2 * codings.shape[0])))
    rotation = coder.block_format().rotation if isinstance(coder, BlockCoder) else 0
    limit += 4 * EPS * absmax * max(rotation, 1)
    error = (codings.mean(0) - block.double()).abs().max().item()
    assert error <= limit, (error, limit)


@pytest.mark.parametrize("coder", RANDOM, ids=ids)
@pytest.mark.parametrize("kind", ["normal", "half steps", "one"])
def test_variance_is_within_the_stated_bound(coder: ck.Compressor, kind: str) -> None:
    """The mean of |C(x) - x|^2 over N codings is at most omega |x|^2 + t n step^2.

    One coding lies within n step^2, so t is Hoeffding's for once in 1e12.
    """
    omega = coder.variance_bound("float32")
    if omega is None:
        assert coder.whole_shares
        pytest.skip("grows with the length")
    n = coder.granule("float32")
    block = variance_input(coder, kind, n)
    codings = repeated(coder, block)
    error = (codings - block.double()).square().sum(1)
    step = coder.error_bound(block.abs().max().item(), "float32")
    spread = min(n * step**2, error.max().item())
    slack = spread * math.sqrt(math.log(1e12) / (2 * codings.shape[0]))
    size = block.double().square().sum().item()
    assert error.mean().item() <= omega * size * (1 + 1e-5) + slack
    assert error.mean().item() > 0 or kind == "one"


def variance_input(coder: ck.Compressor, kind: str, n: int) -> torch.Tensor:
    """Normal values; the worst case, one large and all others half a step; one only."""
    if kind == "normal":
        return random((n,), torch.float32, seed=3)
    block = torch.zeros(n)
    if kind == "half steps":
        block[:] = 2 / 3 if coder.name == "natural" else half_step(coder)
    block[n // 2] = 1.0
    return block


def half_step(coder: ck.Compressor) -> float:
    """Half the distance of two values of a block whose largest is 1."""
    if isinstance(coder, BlockCoder):
        return 0.5 / coder.block_format().largest
    return coder.error_bound(1.0, "float32") / 2


def test_variance_bounds_are_tight_in_the_worst_case() -> None:
    """One element at the scale, others half a step: n / (4 L^2) to 1 % at 8 bits."""
    coder = ck.Quantize(bits=8, rounding="stochastic")
    block = variance_input(coder, "half steps", 128)
    error = (repeated(coder, block) - block.double()).square().sum(1).mean().item()
    omega = coder.variance_bound("float32")
    assert omega is not None
    assert 0.97 * omega <= error / block.double().square().sum().item() <= 1.01 * omega


def test_qsgd_has_the_variance_of_its_paper() -> None:
    """min(n / L^2, sqrt(n) / L) of |x|^2, for every bits and block size."""
    for bits in range(2, 9):
        for n in (16, 128, 512, 8192):
            omega = ck.QSGD(bits=bits, block_size=n).variance_bound("float32")
            levels = 2 ** (bits - 1) - 1
            paper = min(n / levels**2, math.sqrt(n) / levels)
            assert omega is not None
            assert omega <= paper * (1 + math.sqrt(n) / 512) * (1 + EPS)


@pytest.mark.parametrize("coder", CODERS, ids=ids)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_bits_per_element_are_those_of_a_long_payload(
    coder: ck.Compressor, dtype: str
) -> None:
    numel = coder.granule(dtype) * 4096
    extra = 8 * coder.body_nbytes(numel, dtype) - coder.bits_per_element(dtype) * numel
    assert 0 <= extra <= 8 * 16  # a head and an offset


@pytest.mark.parametrize("coder", CODERS, ids=ids)
def test_what_is_stated_is_consistent(coder: ck.Compressor) -> None:
    assert isinstance(coder.supports_feedback, bool)
    if coder.unbiased():
        assert coder.contraction("float32") in (None, 1.0)
    else:
        assert coder.variance_bound("float32") is None
    for absmax in (0.0, 1e-30, 1.0, 1e30):
        assert coder.error_bound(absmax, "float32") >= 0
