"""Payloads: one compressed tensor as bytes that decode and validate on their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from commkern import backend
from commkern.arrays import as_bytes
from commkern.compressors import Compressor, Identity, compressor
from commkern.compressors.base import KernelCall, Operands
from commkern.dtypes import dtype_name, torch_dtype
from commkern.errors import PayloadError
from commkern.inputs import (
    checked_bool,
    checked_name,
    checked_number,
    checked_seed,
    checked_tensor,
    real_view,
)
from commkern.layout import Member, effective, stages_of
from commkern.spans import one_span
from commkern.wire import Descriptor, Header, Section, hash_text, place, validate
from commkern.wire.dtypes import CODES
from commkern.wire.message import seal

_COMPLEX = {"complex64": torch.complex64, "complex128": torch.complex128}
_COMPLEX_NAME = {dtype: name for name, dtype in _COMPLEX.items()}


@dataclass(frozen=True, eq=False)
class Payload:
    """A compressed tensor: a whole message of docs/wire-format.md.

    ``data`` is a contiguous uint8 tensor of shape ``(nbytes,)`` on the CPU. Nothing is
    checked before it is read: properties and decompression raise PayloadError for bytes
    that are not a message of one tensor.
    """

    data: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Size of the message, header included."""
        return self.data.numel()

    @property
    def descriptor(self) -> Descriptor:
        """Shape and dtype of the tensor, and the string form of what coded it."""
        return _read(self.data)[1]

    @property
    def compression_factor(self) -> float:
        """Bytes of the original tensor per byte of the message."""
        return self.descriptor.dense_nbytes / self.nbytes


def decode(data: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor of a `Payload` or of its bytes alone, in its shape and dtype.

    ``data`` may be a payload, a contiguous uint8 tensor or any bytes-like object.
    ``out`` is written to and returned where given. Raises PayloadError for bytes that
    are not a message of one tensor, ValueError for an ``out`` of another shape or
    dtype.
    """
    raw = data.data if isinstance(data, Payload) else data
    return _decompress(raw, *_read(raw), out)


def payload_nbytes(coder: Compressor, shape: tuple[int, ...], dtype: str) -> int:
    """Exact size of the payload of a tensor, without a CRC; the bound for a compressor
    whose size depends on data."""
    return _header(coder, dtype, shape)[1].message_nbytes


def compress(
    coder: Compressor,
    tensor: torch.Tensor,
    *,
    seed: int = 0,
    step: int = 0,
    name: str = "",
    out: torch.Tensor | None = None,
    crc: bool = False,
) -> Payload:
    """See `Compressor.compress`."""
    checked_bool("crc", crc)
    real = real_view(tensor).contiguous()
    used, header = _header(coder, _name(tensor.dtype), tuple(tensor.shape))
    header = place(replace(header, step=checked_seed(step, "step"), crc=crc))
    data = _destination(out, header.message_nbytes)
    section = header.sections[0]
    spans = one_span(real.numel(), parameter_id=hash_text(checked_name(name)))
    drawn = {"seed": checked_seed(seed), "step": step & 0xFFFFFFFF}
    on = Operands(spans, dtype_name(real.dtype), **drawn)
    touched = torch.zeros(1, dtype=torch.uint8)
    flags = {"spans": spans, "input": real, "dtype": on.dtype, "flags": touched}
    body = data[section.offset : section.offset + section.nbytes]
    calls = [KernelCall("nonzero_check", flags)]
    for staged in stages_of(used, on, body):
        begin = int(staged.spans[0]["body"])
        body[max(0, begin - used.alignment(on.dtype)) : begin] = 0  # padding in between
        calls += used.compress_calls(staged, real, body)
    _run(calls)
    packed = replace(header, touched=(bool(touched[0]),)).pack()
    data[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    if crc:
        seal(as_bytes(data))
    return Payload(data)


def decompress(
    coder: Compressor, payload: Payload, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `Compressor.decompress`."""
    header, descriptor = _read_own(coder, payload)
    return _decompress(payload.data, header, descriptor, out)


def decompress_add(
    coder: Compressor, payload: Payload, output: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """See `Compressor.decompress_add`."""
    header, descriptor = _read_own(coder, payload)
    checked_tensor("output", output)
    checked_number("scale", scale)
    return _decompress(payload.data, header, descriptor, output, scale=scale, add=True)


def _header(
    coder: Compressor, dtype: str, shape: tuple[int, ...]
) -> tuple[Compressor, Header]:
    """What codes the tensor (the identity where that is no larger), and the header."""
    tensor = Descriptor(dtype, shape, "")
    real_dtype, numel = tensor.real_dtype, tensor.real_numel
    used = effective(Member("", numel, 0, coder), real_dtype).compressor
    nbytes = used.body_nbytes(numel, real_dtype)
    text = str(used)
    section = Section(0, 1, hash_text(text), CODES[real_dtype], nbytes)
    descriptor = replace(tensor, compressor=text)
    return used, place(Header((section,), (False,), descriptor=descriptor))


def _destination(out: torch.Tensor | None, nbytes: int) -> torch.Tensor:
    if out is None:
        return torch.empty(nbytes, dtype=torch.uint8)
    checked_tensor("out", out)
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(
            "out must be a contiguous uint8 tensor of one dimension, got "
            f"{out.dtype} of shape {tuple(out.shape)}, strides {out.stride()}"
        )
    if out.numel() < nbytes:
        raise ValueError(f"out must have {nbytes} bytes, got {out.numel()}")
    return out[:nbytes]


def _run(calls: Iterable[KernelCall]) -> None:
    for call in calls:
        backend.kernel(call.name)(**call.fields)


# --- untrusted bytes --------------------------------------------------------------


def _read(data: Any) -> tuple[Header, Descriptor]:
    header = validate(as_bytes(data))
    if header.descriptor is None:
        raise PayloadError("expected a message of one tensor, got one of a bucket")
    return header, header.descriptor


def _coder(header: Header, descriptor: Descriptor) -> Compressor:
    try:
        coder = compressor(descriptor.compressor)
    except (ValueError, TypeError) as error:
        raise PayloadError(f"descriptor's compressor: {error}") from None
    if str(coder) != descriptor.compressor:
        raise PayloadError(
            f"descriptor's compressor: expected the canonical {str(coder)!r}, "
            f"got {descriptor.compressor!r}"
        )
    nbytes = coder.body_nbytes(descriptor.real_numel, descriptor.real_dtype)
    if header.sections[0].nbytes != nbytes:
        raise PayloadError(
            f"body of {descriptor}: expected {nbytes} bytes, "
            f"got {header.sections[0].nbytes}"
        )
    return coder


def _read_own(coder: Compressor, payload: Payload) -> tuple[Header, Descriptor]:
    if not isinstance(payload, Payload):
        raise TypeError(
            f"payload must be a Payload, got {type(payload).__name__} "
            "(commkern.payload.decode reads bytes)"
        )
    header, descriptor = _read(payload.data)
    if descriptor.compressor not in (str(coder), str(Identity())):
        raise ValueError(
            f"the payload was made by {descriptor.compressor}, not by {coder}"
        )
    return header, descriptor


def _decompress(
    data: Any,
    header: Header,
    descriptor: Descriptor,
    out: torch.Tensor | None,
    *,
    scale: float = 1.0,
    add: bool = False,
) -> torch.Tensor:
    coder = _coder(header, descriptor)
    out = _output(descriptor, out)
    dense = real_view(out).resolve_neg().contiguous()
    if header.nonfinite:
        dense.fill_(torch.nan)
    else:
        section = header.sections[0]
        body = as_bytes(data)[section.offset : section.offset + section.nbytes]
        on = Operands(one_span(dense.numel()), descriptor.real_dtype)
        *_, last = stages_of(coder, on, body)
        _run(coder.decompress_calls(last, body, dense, scale=scale, add=add))
    if dense.data_ptr() != out.data_ptr():
        out.detach().copy_(torch.view_as_complex(dense) if out.is_complex() else dense)
    return out


def _output(descriptor: Descriptor, out: torch.Tensor | None) -> torch.Tensor:
    shape, dtype = descriptor.shape, _dtype(descriptor)
    if out is None:
        return torch.empty(shape, dtype=dtype)
    checked_tensor("output", out)
    if (tuple(out.shape), out.dtype) != (shape, dtype):
        raise ValueError(
            f"output must have shape {shape} and dtype {dtype}, "
            f"got {tuple(out.shape)} and {out.dtype}"
        )
    return out


def _dtype(descriptor: Descriptor) -> torch.dtype:
    return _COMPLEX.get(descriptor.dtype) or torch_dtype(descriptor.dtype)


def _name(dtype: torch.dtype) -> str:
    return _COMPLEX_NAME.get(dtype) or dtype_name(dtype)
