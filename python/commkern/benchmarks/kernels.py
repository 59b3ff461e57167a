"""Every compiled kernel on one thread against ``Tensor.copy_`` of the same elements.

Each case runs on every ISA of the machine (``-k avx512``; ``COMMKERN_ISA`` leaves one)
on 128 MiB of fp32, far outside the cache, or on ``COMMKERN_BENCH_MIB``. Before it is
timed, a stretch of its results is compared in bits with `commkern.reference`. Copies
and calls take turns: ``ratios["copy"]`` is the median over the rounds of a call's time
over that of the copies before and after it. ``nbytes`` is what a call reads and writes.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from commkern import backend, kernels, reference
from commkern.benchmarks.interleaved import CLOCK, record
from commkern.spans import one_span

MIB = int(os.environ.get("COMMKERN_BENCH_MIB", "128"))
ROUNDS = 15
_BLOCK = 128
_FIXED_BLOCK = 256
_CHECKED = 64 * _BLOCK  # elements compared with the reference
_UNTIMED_ROUNDS = 2

Array = npt.NDArray[Any]


class Case(NamedTuple):
    """A kernel and how it is called; ``bits`` 0 is bf16 on the wire."""

    kernel: str
    bits: int
    rounding: str = "nearest"
    feedback: str = ""
    rotation: int = 0
    inverse: int = 0

    def __str__(self) -> str:
        wire = f"{self.bits} bits" if self.bits else "bf16"
        words = (
            self.kernel,
            wire if self.kernel != "hadamard" else "",
            f"rotation {self.rotation}" if self.rotation else "",
            "inverse" if self.inverse else "",
            self.rounding if self.bits and self.encodes() else "",
            f"feedback {self.feedback}" if self.feedback else "",
        )
        return " ".join(filter(None, words))

    def encodes(self) -> bool:
        return "residual" in getattr(reference, self.kernel).fields

    def is_fixed(self) -> bool:
        """Whether codes are fixed point."""
        return self.kernel.startswith("fixed_") or self.kernel == "block_exponents"

    def moved_nbytes(self) -> float:
        """Bytes read and written for an element."""
        if self.kernel == "hadamard":
            return 8
        coded = self.bits / 8 + 4 / _BLOCK if self.bits else 2
        if self.is_fixed():
            coded = self.bits / 8 + 1 / _FIXED_BLOCK
        if self.kernel == "block_exponents":
            coded = 1 / _FIXED_BLOCK
        parts = 2 if self.kernel.endswith("_sum") else 0
        dense = 8 if self.kernel.endswith("_add") else 0 if parts else 4
        residual = {"": 0, "own": 8, "in place": 8, "two versions": 8}[self.feedback]
        return coded * (1 + parts) + dense + residual


def _cases() -> Iterator[Case]:
    for bits in (8, 4):
        for rounding in ("nearest", "stochastic"):
            for feedback in ("", "two versions", "in place"):
                yield Case("quantize", bits, rounding, feedback)
            yield Case("requantize_sum", bits, rounding, "own")
        yield Case("dequantize", bits)
        yield Case("dequantize_add", bits)
    for bits in (8, 16):
        for rounding in ("nearest", "stochastic"):
            yield Case("fixed_quantize", bits, rounding)
        yield Case("fixed_quantize", bits, feedback="two versions")
        yield Case("block_exponents", bits)
        yield Case("fixed_sum", bits)
        yield Case("fixed_dequantize", bits)
        yield Case("fixed_dequantize_add", bits)
    yield Case("cast", 0)
    yield Case("cast", 0, feedback="two versions")
    yield Case("uncast", 0)
    yield Case("uncast_add", 0)
    yield Case("recast_sum", 0, feedback="own")
    for rotation in (32, 128, 1024, 4096):
        for inverse in (0, 1):
            yield Case("hadamard", 0, rotation=rotation, inverse=inverse)
    for feedback in ("", "two versions"):
        yield Case("quantize", 4, feedback=feedback, rotation=32)
    yield Case("requantize_sum", 4, feedback="own", rotation=32)
    yield Case("dequantize", 4, rotation=32)


class Data:
    """What the kernels of one wire format read and write, over one parameter."""

    def __init__(self, bits: int, begin: int, dense: list[Array], coded: list[Array]):
        self.bits, self.begin, self.dense, self.coded = bits, begin, dense, coded
        self.elements = len(dense[0])

    @classmethod
    def of(cls, bits: int, elements: int) -> Data:
        # torch aligns memory to 64 bytes, as the kernels' stores past the cache need.
        values, output = torch.randn(elements), torch.randn(elements)
        residuals = values * 0.01, torch.zeros(elements)
        dense = [array.numpy() for array in (values, output, *residuals)]
        head, codes = cls.nbytes(bits, elements)
        coded = [np.zeros(head + codes, np.uint8) for _ in range(3)]
        data = cls(bits, 0, dense, coded)
        for payload in coded:
            data.encode(payload)
        return data

    @staticmethod
    def nbytes(bits: int, elements: int) -> tuple[int, int]:
        """Bytes of the scales and of the codes."""
        if not bits:
            return 0, 2 * elements
        return elements // _BLOCK * 4, elements * bits // 8

    def encode(self, payload: Array) -> None:
        case = Case("quantize" if self.bits else "cast", self.bits)
        arguments = self.arguments(case) | {"payload": payload}
        getattr(kernels, case.kernel)(**arguments)

    def arguments(self, case: Case) -> dict[str, Any]:
        values, output, old, new = self.dense
        residuals = {
            "": None,
            "own": (old, new),
            "two versions": (old, new),
            "in place": (old, old),
        }
        all_fields = {
            "spans": one_span(self.elements, begin=self.begin, parameter_id=9),
            "input": values,
            "dtype": "float32",
            "payload": self.coded[0],
            "parts": self.coded[1:],
            "output": output,
            "residual": residuals[case.feedback],
            "bits": self.bits,
            "wire_dtype": "bfloat16",
            "rounding": case.rounding,
            "scale": 0.5,
            "rotation": case.rotation,
            "inverse": case.inverse,
            "seed": 7,
        }
        fields = getattr(reference, case.kernel).fields
        return {name: all_fields[name] for name in fields if name in all_fields}

    def stretch(self, first: int, last: int) -> Data:
        """A copy of the elements [first, last), which begin and end a block."""
        dense = [array[first:last].copy() for array in self.dense]
        coded = [self._coded_stretch(array, first, last) for array in self.coded]
        return type(self)(self.bits, first, dense, coded)

    def _coded_stretch(self, payload: Array, first: int, last: int) -> Array:
        (from_head, from_codes), (to_head, to_codes), (head, _) = (
            self.nbytes(self.bits, count) for count in (first, last, self.elements)
        )
        scales, codes = payload[:head], payload[head:]
        both: Array = np.concatenate(
            [scales[from_head:to_head], codes[from_codes:to_codes]]
        )
        return both


class FixedData(Data):
    """The same in fixed point, as one of two ranks has it."""

    @staticmethod
    def nbytes(bits: int, elements: int) -> tuple[int, int]:
        """Bytes of the exponents and of the codes."""
        return elements // _FIXED_BLOCK, elements * bits // 8

    def encode(self, payload: Array) -> None:
        for kernel in ("block_exponents", "fixed_quantize"):
            arguments = self.arguments(Case(kernel, self.bits)) | {"payload": payload}
            if kernel == "fixed_quantize":
                arguments["exponents"] = payload
            getattr(kernels, kernel)(**arguments)

    def arguments(self, case: Case) -> dict[str, Any]:
        made, (head, _) = super().arguments(case), self.nbytes(self.bits, self.elements)
        if case.kernel != "block_exponents":
            made["spans"]["body"] = head
        more = {
            "exponents": self.coded[0],
            "digits": self.bits - 2,
            "largest": 2 ** (self.bits - 2) - 1,
            "block_size": _FIXED_BLOCK,
        }
        fields = getattr(reference, case.kernel).fields
        return made | {name: more[name] for name in fields if name in more}


@functools.lru_cache(maxsize=1)
def _data(fixed: bool, bits: int) -> Data:
    elements = MIB * 2**20 // 4
    return FixedData.of(bits, elements) if fixed else Data.of(bits, elements)


def _isas() -> list[str]:
    core = backend.core()
    if os.environ.get("COMMKERN_ISA"):
        return [core.isa()]
    names: list[str] = core.available_isas()
    return names


@contextmanager
def _one_thread_on(isa: str) -> Iterator[None]:
    core = backend.core()
    before = core.isa(), core.num_threads(), torch.get_num_threads()
    core.set_isa(isa)
    core.set_num_threads(1)
    torch.set_num_threads(1)
    yield
    core.set_isa(before[0])
    core.set_num_threads(before[1])
    torch.set_num_threads(before[2])


def _check(case: Case, data: Data) -> None:
    """The last blocks as the reference has them, everything it could touch."""
    first, last = data.elements - _CHECKED, data.elements
    expected = data.stretch(first, last)
    getattr(reference, case.kernel)(**expected.arguments(case))
    getattr(kernels, case.kernel)(**data.arguments(case))
    got = data.stretch(first, last)
    pairs = zip(got.dense + got.coded, expected.dense + expected.coded, strict=True)
    if not all(ours.tobytes() == theirs.tobytes() for ours, theirs in pairs):
        raise AssertionError(f"{case}: results differ from the reference")


def _timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


@pytest.mark.benchmark(group=f"kernels, {MIB} MiB of fp32, one thread", timer=CLOCK)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("isa", _isas())
@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_kernel(benchmark: Any, isa: str, case: Case) -> None:
    data = _data(case.is_fixed(), case.bits)
    source, target = torch.from_numpy(data.dense[0]), _spare()
    with _one_thread_on(isa):
        _check(case, data)
        run = functools.partial(getattr(kernels, case.kernel), **data.arguments(case))
        copies = [_timed(lambda: target.copy_(source))]
        calls = []
        for _ in range(_UNTIMED_ROUNDS + ROUNDS):
            calls.append(_timed(run))
            copies.append(_timed(lambda: target.copy_(source)))
    rounds = zip(calls, copies[:-1], copies[1:], strict=True)
    ratios = [2 * ours / (before + after) for ours, before, after in rounds]
    record(
        benchmark,
        calls[_UNTIMED_ROUNDS:],
        nbytes=round(data.elements * case.moved_nbytes()),
        ratios={"copy": median(ratios[_UNTIMED_ROUNDS:])},
    )


@functools.cache
def _spare() -> torch.Tensor:
    return torch.zeros(MIB * 2**20 // 4)
