"""What a compressor is: parameters, traits and a composition of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from commkern.spans import SpanTable
from commkern.wire.dtypes import NBYTES

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
    called at once, slices of named buffers inside a plan.
    """

    spans: SpanTable
    dtype: str
    seed: Any = 0
    step: Any = 0
    who: int = 0
    residual: Any = None


@dataclass(frozen=True)
class Compressor:
    """Base of all compressors; instances are immutable and compare by value."""

    name: ClassVar[str]
    aggregation: ClassVar[Aggregation]
    fixed_size: ClassVar[bool] = True
    stages: ClassVar[int] = 1

    # --- size and layout ----------------------------------------------------------

    def body_nbytes(self, length: int, dtype: str) -> int:
        """Exact bytes of the coded form of a span of ``length`` elements."""
        raise NotImplementedError

    def alignment(self, dtype: str) -> int:
        """Bytes that a span's coded form is aligned to inside a section."""
        raise NotImplementedError

    def granule(self, dtype: str) -> int:
        """Elements that are never split between owners, segments or spans."""
        raise NotImplementedError

    # --- composition of kernels ---------------------------------------------------

    def compress_calls(self, on: Operands, data: Any, payload: Any) -> list[KernelCall]:
        """Dense ``data`` to ``payload``; updates ``on.residual`` where there is one."""
        raise NotImplementedError

    def reduce_calls(
        self, on: Operands, parts: Sequence[Any], payload: Any
    ) -> list[KernelCall]:
        """The owner's step: sum the parts in rank order and code the sum."""
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
        world_size: int = 1,
    ) -> list[KernelCall]:
        """``payload`` to dense ``output``, times ``scale``; ``add`` accumulates.

        ``world_size`` is that of the ``reduce_calls`` which made the payload, 1 for a
        payload that a single rank compressed.
        """
        raise NotImplementedError

    # --- traits that tests and docs use -------------------------------------------

    def unbiased(self) -> bool:
        """Whether the expectation of the decoded value is the value."""
        raise NotImplementedError

    def error_bound(self, absmax: float, dtype: str) -> float:
        """Largest |x - decoded| of one element whose block has this absmax."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The string form, every field written out; ``ck.compressor`` reads it."""
        fields = ",".join(
            f"{f.name}={_field_text(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
        )
        return f"{self.name}:{fields}" if fields else self.name


def _field_text(value: object) -> str:
    return f"({value})" if isinstance(value, Compressor) else str(value)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def dense_nbytes(length: int, dtype: str) -> int:
    """Bytes of ``length`` uncompressed elements."""
    return length * NBYTES[dtype]
