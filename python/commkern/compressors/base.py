"""What a compressor is: parameters, traits and a composition of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from commkern.spans import SpanTable
from commkern.wire.message import align

if TYPE_CHECKING:
    import torch

    from commkern.payload import Payload

Aggregation = Literal["linear", "hop", "gathered"]

PURPOSE_ROUNDING = 1
WHO_REDUCED = 0xFFFF
WHO_SHARED = 0xFFFE


def stream(purpose: int, level: int, who: int) -> int:
    """The fourth counter word of a random draw: what for, at which level, by whom."""
    return purpose << 24 | level << 16 | who


class KernelCall(NamedTuple):
    """One call of a kernel by name; operands are arrays or a plan's symbols."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Operands:
    """What the kernels of one compression, reduction or decompression work on.

    ``payload`` and the dense buffers are whatever the caller can resolve: arrays when
    called at once, slices of named buffers inside a plan. ``world_size`` is the number
    of ranks whose payloads are reduced, 1 for a payload of its own. ``earlier`` is the
    reduced payload of the stage before, where ``spans`` have the offset ``earlier``.
    """

    spans: SpanTable
    dtype: str
    seed: Any = 0
    step: Any = 0
    who: int = 0
    residual: Any = None
    world_size: int = 1
    stage: int = 0
    earlier: Any = None


@dataclass(frozen=True)
class Compressor:
    """Base of all compressors; instances are immutable and compare by value."""

    name: ClassVar[str]
    aggregation: ClassVar[Aggregation]
    fixed_size: ClassVar[bool] = True
    #: Whether a body is the span's elements as they are.
    is_plain: ClassVar[bool] = False
    #: Reductions that it needs one after another. The calls of a stage may read what
    #: the stage before agreed on; the last one's result decodes together with it.
    stages: ClassVar[int] = 1
    #: String forms that tests and golden files go through besides the default.
    examples: ClassVar[tuple[str, ...]] = ()

    # --- one tensor ---------------------------------------------------------------

    def compress(
        self,
        tensor: torch.Tensor,
        *,
        seed: int = 0,
        step: int = 0,
        name: str = "",
        out: torch.Tensor | None = None,
        crc: bool = False,
    ) -> Payload:
        """Code one tensor as a message whose bytes alone decode it.

        Parameters
        ----------
        tensor : fp32, fp64, fp16, bf16 or complex, any shape and strides, on the CPU
        seed, step : int
            Key the random draws, together with ``name``; equal ones give equal bytes.
        out : contiguous uint8 tensor, written from its start
            Raises ValueError where it is too small; ``payload_nbytes`` tells the size.
        crc : end the message with a CRC-32C, checked when it is decoded

        A tensor that coding would not make smaller travels as it is.
        """
        from commkern.payload import compress

        return compress(self, tensor, seed=seed, step=step, name=name, out=out, crc=crc)

    def decompress(
        self, payload: Payload, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The tensor, in its original shape and dtype; into ``out`` where given.

        Raises PayloadError for bytes that are cut or corrupted, ValueError for another
        compressor's payload and for an ``out`` of another shape or dtype.
        """
        from commkern.payload import decompress

        return decompress(self, payload, out)

    def decompress_add(
        self, payload: Payload, output: torch.Tensor, scale: float = 1.0
    ) -> torch.Tensor:
        """Add ``scale`` times the tensor to ``output``, in place; errors as above."""
        from commkern.payload import decompress_add

        return decompress_add(self, payload, output, scale)

    # --- size and layout ----------------------------------------------------------

    def body_nbytes(self, length: int, dtype: str) -> int:
        """Exact bytes of the coded form of a span of ``length`` elements."""
        raise NotImplementedError

    def stage_nbytes(self, stage: int, length: int, dtype: str) -> int:
        """Exact bytes of the part of the coded form that one stage reduces."""
        return self.body_nbytes(length, dtype)

    def stage_begin(self, stage: int, length: int, dtype: str) -> int:
        """Where a stage's part begins in the coded form of a span, which holds the
        parts of all stages one behind the other, each aligned."""
        begin = 0
        for before in range(stage):
            end = begin + self.stage_nbytes(before, length, dtype)
            begin = align(end, self.alignment(dtype))
        return begin

    def alignment(self, dtype: str) -> int:
        """Bytes that a span's coded form is aligned to inside a section."""
        raise NotImplementedError

    def granule(self, dtype: str) -> int:
        """Elements that are never split between owners, segments or spans."""
        raise NotImplementedError

    @property
    def whole_shares(self) -> bool:
        """Whether an owner's share of a parameter must stay one span, because what it
        is coded to depends on all of it."""
        return False

    @property
    def supports_feedback(self) -> bool:
        """Whether what coding loses may be added to the next step's gradient."""
        return True

    # --- composition of kernels ---------------------------------------------------

    def compress_calls(self, on: Operands, data: Any, payload: Any) -> list[KernelCall]:
        """Dense ``data`` to the stage's part of ``payload``.

        The last stage updates ``on.residual`` where there is one; the others read it.
        """
        raise NotImplementedError

    def reduce_calls(
        self, on: Operands, parts: Sequence[Any], payload: Any
    ) -> list[KernelCall]:
        """The owner's step: sum the parts in rank order and code the sum.

        A stage may reduce by something else, in any fixed order.
        """
        raise NotImplementedError

    def decompress_calls(
        self,
        on: Operands,
        payload: Any,
        output: Any,
        *,
        scale: float = 1.0,
        nonfinite: Any = None,
        add: bool = False,
    ) -> list[KernelCall]:
        """``payload`` to dense ``output``, times ``scale``; ``add`` accumulates.

        ``on`` is that of the last stage; ``payload`` also holds the stage before.
        """
        raise NotImplementedError

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError where payloads of so many ranks cannot be reduced."""

    # --- traits that tests and docs use -------------------------------------------

    def unbiased(self) -> bool:
        """Whether the expectation of the decoded value is the value."""
        raise NotImplementedError

    def error_bound(
        self, absmax: float, dtype: str, largest: float | None = None
    ) -> float:
        """Largest |x - decoded| of one element whose block has this absmax.

        ``largest`` is the absmax of the whole span (None: the same); it matters where
        ``whole_shares`` holds.
        """
        raise NotImplementedError

    def bits_per_element(self, dtype: str) -> float:
        """Bits on the wire of an element of a long parameter, scales included."""
        raise NotImplementedError

    def variance_bound(self, dtype: str) -> float | None:
        """omega with E|C(x) - x|^2 <= omega |x|^2, for a coder that is unbiased.

        None for a biased one, and where it grows with the length of the parameter.
        Holds apart from underflow of scales and elements.
        """
        return None

    def contraction(self, dtype: str) -> float | None:
        """delta > 0 with |C(x) - x|^2 <= (1 - delta) |x|^2, block by block.

        None for a random coder, and where there is no such number. Holds apart from
        underflow of scales and elements.
        """
        return None

    def __str__(self) -> str:
        """The string form; ``ck.compressor`` reads it.

        Every field is written out but for those that came later, which are left out
        where they hold their default: strings of earlier versions stay canonical.
        """
        fields = ",".join(
            f"{f.name}={_field_text(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if not (f.metadata.get("later") and getattr(self, f.name) == f.default)
        )
        return f"{self.name}:{fields}" if fields else self.name


def later(default: Any) -> Any:
    """A field that came later: strings hold it only where it is not ``default``."""
    return dataclasses.field(default=default, metadata={"later": True})


def _field_text(value: object) -> str:
    return f"({value})" if isinstance(value, Compressor) else str(value)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)
