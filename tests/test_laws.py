"""Laws that every registered compressor obeys (the bytes; tests/test_law_values.py has
those on values)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.laws import DTYPES, EVERY, random

import commkern as ck
from commkern import backend
from commkern.arrays import as_bytes
from commkern.compressors.base import Operands
from commkern.dtypes import dtype_name
from commkern.errors import PayloadError
from commkern.layout import stages_of
from commkern.payload import decode, payload_nbytes
from commkern.spans import span_table
from commkern.wire import hash_text, header_nbytes, validate

SHAPES = [(), (1,), (5,), (3, 4), (2, 3, 4), (0, 5), (2, 0, 3), (1000,), (7, 300)]


@pytest.fixture(params=EVERY)
def coder(request: pytest.FixtureRequest) -> ck.Compressor:
    return ck.compressor(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def raw(payload: ck.Payload) -> bytes:
    return payload.data.numpy().tobytes()


def body_of(payload: ck.Payload) -> bytes:
    return raw(payload)[validate(raw(payload)).sections[0].offset :]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and as_bytes(a).tobytes() == as_bytes(b).tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_size_shape_and_dtype(coder, dtype, shape) -> None:
    tensor = random(shape, dtype)
    payload = coder.compress(tensor)
    assert payload.nbytes == payload.data.numel() == len(raw(payload))
    assert payload.nbytes == payload_nbytes(coder, shape, dtype_name(dtype))
    header = validate(raw(payload))
    dense = tensor.numel() * tensor.element_size()
    overhead = header_nbytes(1, 1, header.descriptor)
    assert payload.nbytes == overhead + header.sections[0].nbytes <= overhead + dense
    assert payload.compression_factor == dense / payload.nbytes
    assert payload.descriptor.shape == shape
    decoded = coder.decompress(payload)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, dtype)
    assert same_bits(decode(raw(payload)), decoded)
    assert same_bits(decode(payload), decoded)


def test_coded_form_is_used_where_it_is_smaller(coder, dtype) -> None:
    numel = 1000
    coded = coder.body_nbytes(numel, dtype_name(dtype))
    dense = numel * random((), dtype).element_size()
    used = coder.compress(random((numel,), dtype)).descriptor.compressor
    assert used == (str(coder) if coded < dense else "identity")


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (3, 40), (0,)])
def test_every_truncation_is_rejected(coder, shape, crc) -> None:
    whole = raw(coder.compress(random(shape, torch.float32), crc=crc))
    for nbytes in range(len(whole)):
        with pytest.raises(PayloadError):
            decode(whole[:nbytes])
    cut = ck.Payload(torch.frombuffer(bytearray(whole[:-1]), dtype=torch.uint8))
    with pytest.raises(PayloadError, match=f"got {len(whole) - 1}"):
        coder.decompress(cut)
    with pytest.raises(PayloadError):
        decode(whole + b"\0")


def test_corruption_is_rejected_or_decodes_to_a_tensor(coder) -> None:
    whole = bytearray(raw(coder.compress(random((3, 40), torch.float32))))
    rng = np.random.default_rng(0)
    for position in range(len(whole)):
        kept = whole[position]
        for value in {0, 0xFF, kept ^ 1, kept ^ 0x80, int(rng.integers(256))}:
            whole[position] = value
            try:
                decoded = decode(whole)
            except PayloadError:
                continue
            assert decoded.numel() < 130  # as many bytes, or fewer
        whole[position] = kept


def test_corruption_is_rejected_with_a_crc(coder) -> None:
    whole = bytearray(raw(coder.compress(random((3, 40), torch.float32), crc=True)))
    for bit in range(0, 8 * len(whole), 3):
        whole[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError):
            decode(whole)
        whole[bit // 8] ^= 1 << bit % 8
    decode(whole)


def test_strides_do_not_matter(coder, dtype) -> None:
    tensor = random((40, 30), dtype)
    for view in (
        tensor.T,
        tensor[::2, 3:],
        tensor[:, 0].expand(9, -1),
        tensor[5:6],
        tensor[0, :2][::2],
    ):
        expected = coder.compress(view.contiguous(), seed=1)
        assert raw(coder.compress(view, seed=1)) == raw(expected)
        out = torch.full((2 * view.numel(),), 7.0, dtype=dtype)[::2].view(view.shape)
        assert coder.decompress(expected, out) is out
        assert same_bits(out.contiguous(), coder.decompress(expected))


def test_misaligned_bytes_decode(coder, dtype) -> None:
    payload = coder.compress(random((3, 100), dtype))
    expected = coder.decompress(payload)
    for shift in (1, 2, 3, 5):
        moved = bytearray(shift) + raw(payload)
        assert same_bits(decode(memoryview(moved)[shift:]), expected)


def test_views_that_start_anywhere(coder, dtype) -> None:
    """As the same values at an aligned address, and with nothing written around."""
    numel = 1031
    for offset in (1, 2, 3):
        base = random((numel + 2 * offset,), dtype)
        given, around = base.clone(), torch.full_like(base, 7.0)
        view, out = (t[offset : offset + numel] for t in (base, around))
        assert base.data_ptr() % 64 == 0 != view.data_ptr() % 64
        payload = coder.compress(view, seed=1)
        assert raw(payload) == raw(coder.compress(view.clone(), seed=1))
        assert same_bits(base, given)
        expected = coder.decompress(payload)
        for decode_into in (coder.decompress, lambda p, to: decode(raw(p), to)):
            out.fill_(7.0)
            decode_into(payload, out)
            assert same_bits(out.clone(), expected)
            assert (around[:offset] == 7.0).all()
            assert (around[-offset:] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_tensors_are_pairs_of_reals(coder, dtype) -> None:
    tensor = torch.view_as_complex(random((3, 50, 2), dtype.to_real()))
    payload = coder.compress(tensor)
    assert (
        payload.compression_factor == tensor.numel() * dtype.itemsize / payload.nbytes
    )
    decoded = coder.decompress(payload)
    assert decoded.dtype == dtype
    pairs = torch.view_as_real(tensor)
    expected = coder.decompress(coder.compress(pairs))
    assert same_bits(torch.view_as_real(decoded), expected)
    assert same_bits(decode(raw(payload)), decoded)
    conjugated = coder.decompress(coder.compress(tensor.conj()))
    assert same_bits(
        conjugated, coder.decompress(coder.compress(tensor.conj().clone()))
    )
    out = torch.zeros_like(tensor).conj()
    coder.decompress(payload, out)
    assert torch.equal(out, decoded)
    negative = coder.compress(tensor.conj().imag)
    assert raw(negative) == raw(coder.compress(-tensor.imag))


def test_randomness_is_keyed_and_leaves_the_global_state_alone(coder) -> None:
    tensor = random((1000,), torch.float32)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    kwargs = {"seed": 3, "step": 4, "name": "w"}
    first = coder.compress(tensor, **kwargs)
    assert raw(coder.compress(tensor, **kwargs)) == raw(first)
    assert torch.equal(torch.get_rng_state(), before)
    bodies = {
        body_of(coder.compress(tensor, **(kwargs | change)))
        for change in ({}, {"seed": 4}, {"seed": 3 + 2**32}, {"step": 5}, {"name": "v"})
    }
    random_draws = coder.unbiased() and not isinstance(coder, ck.Identity)
    assert len(bodies) == (5 if random_draws else 1)


def test_writes_into_out_and_nowhere_else(coder, dtype) -> None:
    tensor = random((3, 100), dtype)
    expected = coder.compress(tensor, crc=True)
    out = torch.full((expected.nbytes + 64,), 0xAB, dtype=torch.uint8)
    payload = coder.compress(tensor, out=out, crc=True)
    assert payload.data.data_ptr() == out.data_ptr()
    assert raw(payload) == raw(expected)
    assert (out[expected.nbytes :] == 0xAB).all()


def test_a_buckets_bodies_equal_the_single_tensors(coder, dtype) -> None:
    """What a plan codes is equal in bits to the payload of each tensor."""
    tensors = {"a": random((300,), dtype, 1), "b": random((1000,), dtype, 2)}
    name = dtype_name(dtype)
    rows, offset, body = [], 0, 0
    for key, tensor in tensors.items():
        body = -(-body // coder.alignment(name)) * coder.alignment(name)
        row = {"offset": offset, "length": tensor.numel(), "body": body}
        rows.append(row | {"parameter_id": hash_text(key)})
        offset += tensor.numel()
        body += coder.body_nbytes(tensor.numel(), name)
    coded = np.zeros(body, np.uint8)
    on = Operands(span_table(rows), name, seed=9, step=2)
    bucket = torch.cat(list(tensors.values()))
    for staged in stages_of(coder, on, coded):
        for call in coder.compress_calls(staged, bucket, coded):
            backend.kernel(call.name)(**call.fields)
    for row, (key, tensor) in zip(rows, tensors.items(), strict=True):
        payload = coder.compress(tensor, seed=9, step=2, name=key)
        if payload.descriptor.compressor != str(coder):
            continue
        section = validate(raw(payload)).sections[0]
        alone = raw(payload)[section.offset :]
        assert coded[row["body"] : row["body"] + section.nbytes].tobytes() == alone


def test_touched_bit_says_whether_anything_is_not_zero(coder, dtype) -> None:
    tensor = torch.zeros(100, dtype=dtype)
    tensor[3] = -0.0
    assert validate(raw(coder.compress(tensor))).touched == (False,)
    tensor[99] = 1e-7
    assert validate(raw(coder.compress(tensor))).touched == (True,)


# --- mistakes of the caller -------------------------------------------------------


def test_other_compressors_payloads_are_refused(coder) -> None:
    other = ck.Quantize(bits=8, block_size=256)
    payload = other.compress(random((300,), torch.float32))
    with pytest.raises(ValueError, match="block_size=256") as caught:
        coder.decompress(payload)
    assert str(coder) in str(caught.value)
    with pytest.raises(TypeError, match="payload must be a Payload, got bytes"):
        coder.decompress(raw(payload))


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (torch.zeros(4, 3), r"\(3, 4\).*\(4, 3\)"),
        (torch.zeros(3, 4, dtype=torch.float64), "float32.*float64"),
        (torch.zeros(12), r"\(3, 4\).*\(12,\)"),
    ],
)
def test_outputs_must_fit(coder, out, match) -> None:
    payload = coder.compress(torch.ones(3, 4))
    with pytest.raises(ValueError, match=match):
        coder.decompress(payload, out)
    with pytest.raises(ValueError, match=match):
        coder.decompress_add(payload, out)
    with pytest.raises(ValueError, match=match):
        decode(raw(payload), out)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"out": torch.zeros(3, dtype=torch.uint8)}, ValueError, "bytes, got 3"),
        ({"out": torch.zeros(999)}, ValueError, "uint8.*float32"),
        ({"out": torch.zeros(999, 2, dtype=torch.uint8)}, ValueError, r"\(999, 2\)"),
        ({"seed": -1}, ValueError, "seed.*-1"),
        ({"seed": 2**64}, ValueError, "seed.*18446744073709551616"),
        ({"step": -1}, ValueError, "step.*-1"),
    ],
)
def test_bad_arguments(coder, arguments, error, match) -> None:
    with pytest.raises(error, match=match):
        coder.compress(torch.ones(3, 4), **arguments)


@pytest.mark.parametrize(
    "value",
    [[1.0], np.ones(3), torch.ones(3, dtype=torch.int32), torch.ones(2).to_sparse()],
    ids=["list", "array", "int32", "sparse"],
)
def test_unsupported_input(coder, value) -> None:
    with pytest.raises(TypeError):
        coder.compress(value)
