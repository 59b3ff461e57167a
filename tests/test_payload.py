"""Payloads made by hand: valid messages that are no valid payload, and rare flags."""

from __future__ import annotations

import pytest
import torch

import commkern as ck
from commkern.errors import PayloadError
from commkern.payload import decode
from commkern.wire import Descriptor, Header, Section, hash_text, pack_message, place

QUANTIZE = "quantize:bits=8,block_size=128,rounding=nearest"


def message(
    compressor: str = "identity",
    shape: tuple[int, ...] = (4,),
    nbytes: int = 16,
    nonfinite: bool = False,
) -> bytearray:
    section = Section(0, 1, hash_text(compressor), 0, nbytes)
    descriptor = Descriptor("float32", shape, compressor)
    header = place(
        Header((section,), (True,), descriptor=descriptor, nonfinite=nonfinite)
    )
    return pack_message(header, [bytes(nbytes)])


def test_a_valid_one_decodes() -> None:
    assert torch.equal(decode(message()), torch.zeros(4))
    assert torch.equal(decode(message(QUANTIZE, (12,))), torch.zeros(12))


@pytest.mark.parametrize(
    ("compressor", "match"),
    [
        ("quantise", "known: cast, codebook, .*quantize, "),
        ("", "unknown compressor ''"),
        ("quantize:bits=9", "got 9"),
        ("quantize:bits=(identity)", "takes no compressor"),
        ("cast:dtype=" + "(cast:dtype=" * 5000 + ")" * 5000, "more than 8"),
        ("quantize:bits=8", f"canonical '{QUANTIZE}', got 'quantize:bits=8'"),
        (QUANTIZE + " ", "canonical"),
    ],
)
def test_compressors_are_known_and_canonical(compressor: str, match: str) -> None:
    with pytest.raises(PayloadError, match=match):
        decode(message(compressor))


@pytest.mark.parametrize("nbytes", [0, 15, 17, 1000])
def test_bodies_have_the_compressors_size(nbytes: int) -> None:
    with pytest.raises(PayloadError, match=f"expected 16 bytes, got {nbytes}"):
        decode(message(nbytes=nbytes))


@pytest.mark.parametrize("shape", [(2**61 - 1,), (2**30, 2**30), (5,), (0,)])
def test_a_shape_without_its_body_allocates_nothing(shape: tuple[int, ...]) -> None:
    with pytest.raises(PayloadError, match="bytes"):
        decode(message(shape=shape))


def test_messages_of_buckets_are_no_payloads() -> None:
    header = place(Header((Section(0, 1, hash_text("identity"), 0, 16),), (True,)))
    with pytest.raises(PayloadError, match="of one tensor, got one of a bucket"):
        decode(pack_message(header, [bytes(16)]))


def test_the_nonfinite_flag_makes_everything_nan() -> None:
    raw = message(nonfinite=True)
    assert decode(raw).isnan().all()
    payload = ck.Payload(torch.frombuffer(raw, dtype=torch.uint8))
    output = torch.ones(4)
    ck.Identity().decompress_add(payload, output)
    assert output.isnan().all()


def test_negated_views_are_resolved() -> None:
    negated = torch.tensor([[1 + 2j]]).conj().imag
    assert negated.is_neg()
    assert negated.is_contiguous()
    coder = ck.Identity()
    assert torch.equal(
        coder.decompress(coder.compress(negated)), torch.tensor([[-2.0]])
    )
    coder.decompress(coder.compress(torch.tensor([[5.0]])), negated)
    assert negated.item() == 5.0


def test_gradients_are_not_tracked() -> None:
    tensor = torch.ones(4, requires_grad=True)
    payload = ck.Cast().compress(tensor)
    assert not ck.Cast().decompress(payload).requires_grad


@pytest.mark.parametrize("data", [None, 3, "text"])
def test_other_types_are_a_mistake_of_the_caller(data: object) -> None:
    with pytest.raises(TypeError):
        decode(data)
