"""The calls that benchmarks time: compressors' own, on one long parameter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from commkern import kernels, reference
from commkern.compressors import compressor
from commkern.compressors.base import Operands
from commkern.compressors.block import BlockCoder
from commkern.layout import stages_of
from commkern.spans import one_span

#: Names that ``-k`` can select -> the compressors' string forms.
FORMS = {
    "8-bit": "quantize:bits=8",
    "4-bit": "quantize:bits=4",
    "2-bit": "quantize:bits=2",
    "1-bit": "quantize:bits=1",
    "3-bit": "quantize:bits=3",
    "5-bit": "quantize:bits=5",
    "6-bit": "quantize:bits=6",
    "7-bit": "quantize:bits=7",
    "8-bit stochastic": "quantize:bits=8,rounding=stochastic",
    "4-bit stochastic": "quantize:bits=4,rounding=stochastic",
    "8-bit asymmetric": "quantize:bits=8,symmetric=False",
    "4-bit asymmetric": "quantize:bits=4,symmetric=False",
    "float8 e4m3": "float8:format=e4m3",
    "float8 e5m2": "float8:format=e5m2",
    "mxfp8": "microscaling:format=mxfp8_e4m3",
    "mxfp6": "microscaling:format=mxfp6_e3m2",
    "mxfp4": "microscaling:format=mxfp4",
    "nvfp4": "nvfp4",
    "4-bit rotated-32": "rotated:inner=(quantize:bits=4),block_size=32",
    "ternary": "ternary",
    "twobit": "twobit:threshold=0.5",
    "natural": "natural",
    "nf4": "codebook:book=nf4",
    "dynamic8": "codebook:book=dynamic8",
    "fixed8": "fixed_point:bits=8",
    "fixed8 stochastic": "fixed_point:bits=8,rounding=stochastic",
    "fixed16": "fixed_point:bits=16",
    "fixed16 stochastic": "fixed_point:bits=16,rounding=stochastic",
    "bf16": "cast:dtype=bf16",
}
RANKS = 2
CHECKED = 8192
"""Elements compared with the reference; a multiple of every block and rotation."""
_DTYPE = "float32"
_DENSE_NBYTES = 4
_LARGEST = 8.0
_SEED = 7
_SCALE = 0.5

Array = npt.NDArray[Any]


class Case(NamedTuple):
    """A kernel, the form it is called for and whether the error is kept.

    ``feedback`` is "", "feedback" (which reads one version of the residual and writes
    another) or "feedback in place". The kernel "hadamard" has a rotation and no form.
    """

    kernel: str
    form: str = ""
    feedback: str = ""
    rotation: int = 0
    inverse: int = 0

    def __str__(self) -> str:
        words = (
            self.kernel,
            self.form,
            f"rotation-{self.rotation}" if self.rotation else "",
            "inverse" if self.inverse else "",
            self.feedback,
        )
        return " ".join(filter(None, words))


def cases() -> Iterator[Case]:
    """In an order that keeps those of one form together."""
    for form, text in FORMS.items():
        name = text.partition(":")[0]
        if name == "cast":
            yield from _cast(form)
        elif name == "fixed_point":
            yield from _fixed_point(form)
        else:
            yield from _block(form)
    for rotation in (32, 128, 1024, 4096):
        for inverse in (0, 1):
            yield Case("hadamard", rotation=rotation, inverse=inverse)


_WITH_FEEDBACK = ("8-bit", "4-bit", "2-bit", "1-bit", "mxfp4", "twobit")
_ALSO_STOCHASTIC = ("8-bit stochastic", "4-bit stochastic", "4-bit rotated-32")


def _block(form: str) -> Iterator[Case]:
    yield Case("quantize", form)
    if form in (*_WITH_FEEDBACK, *_ALSO_STOCHASTIC):
        yield Case("quantize", form, "feedback")
        yield Case("requantize_sum", form, "feedback")
    if form in ("8-bit", "4-bit"):
        yield Case("quantize", form, "feedback in place")
        yield Case("dequantize", form)
    if not form.endswith("stochastic"):
        yield Case("dequantize_add", form)


def _fixed_point(form: str) -> Iterator[Case]:
    yield Case("fixed_quantize", form)
    if not form.endswith("stochastic"):
        yield Case("fixed_quantize", form, "feedback")
        yield Case("block_exponents", form)
        yield Case("fixed_sum", form)
        yield Case("fixed_dequantize", form)
        yield Case("fixed_dequantize_add", form)


def _cast(form: str) -> Iterator[Case]:
    yield Case("cast", form)
    yield Case("cast", form, "feedback")
    yield Case("uncast", form)
    yield Case("uncast_add", form)
    yield Case("recast_sum", form, "feedback")


class Call(NamedTuple):
    """Keyword arguments of a kernel, and the bytes that it reads and writes."""

    fields: dict[str, Any]
    nbytes: int


class Data:
    """What the kernels of one form read and write, over one parameter.

    ``dense`` are the values, an output and two versions of a residual; ``coded`` are
    three bodies: one that calls write or decode, and the parts of a sum of two.
    """

    def __init__(self, form: str, begin: int, dense: list[Array], coded: list[Array]):
        self.form, self.begin, self.dense, self.coded = form, begin, dense, coded
        self.coder = compressor(FORMS[form]) if form else None
        self.elements = len(dense[0])

    @classmethod
    def of(cls, form: str, elements: int) -> Data:
        """New coded data over values that all forms share."""
        dense = _dense(elements)
        values, output, old, new = dense
        np.copyto(output, values)
        np.multiply(values, np.float32(0.01), out=old)
        new.fill(0)
        data = cls(form, 0, dense, [])
        if data.coder:
            nbytes = data.coder.body_nbytes(elements, _DTYPE)
            data.coded = [np.zeros(nbytes, np.uint8) for _ in range(1 + RANKS)]
            for payload in data.coded:
                data._encode(payload)
        return data

    def _encode(self, payload: Array) -> None:
        assert self.coder
        for on in stages_of(self.coder, self._operands(None), payload):
            for name, fields in self.coder.compress_calls(on, self.dense[0], payload):
                getattr(kernels, name)(**fields)

    def call(self, case: Case) -> Call:
        """How a case's kernel is called."""
        if case.kernel == "hadamard":
            return self._hadamard(case)
        _, _, old, new = self.dense
        residuals = {"": None, "feedback": (old, new), "feedback in place": (old, old)}
        return self._calls(residuals[case.feedback])[case.kernel]

    def _operands(self, residual: Any) -> Operands:
        spans = one_span(self.elements, begin=self.begin, parameter_id=9)
        return Operands(spans, _DTYPE, seed=_SEED, residual=residual, world_size=RANKS)

    def _calls(self, residual: Any) -> dict[str, Call]:
        """All that the compressor calls in a reduction, by the kernels' names."""
        assert self.coder
        payload, *parts = self.coded
        values, output, _, _ = self.dense
        made = {}
        for on in stages_of(self.coder, self._operands(residual), payload):
            stage = self.coder.stage_nbytes(on.stage, self.elements, _DTYPE)
            calls = self.coder.compress_calls(on, values, payload)
            calls += self.coder.reduce_calls(on, parts, payload)
            made.update({name: self._sized(fields, stage) for name, fields in calls})
        whole = self.coder.body_nbytes(self.elements, _DTYPE)
        for add in (False, True):
            for name, fields in self.coder.decompress_calls(
                on, payload, output, scale=_SCALE, add=add
            ):
                made[name] = self._sized(fields, whole, 2 if add else 1)
        return made

    def _sized(self, fields: dict[str, Any], coded: int, outputs: int = 1) -> Call:
        assert self.coder
        dense = self.elements * _DENSE_NBYTES
        nbytes = coded * (1 + len(fields.get("parts", ())))
        nbytes += dense * ("input" in fields) + dense * outputs * ("output" in fields)
        nbytes += 2 * dense * (fields.get("residual") is not None)
        if "exponents" in fields:
            nbytes += self.coder.stage_nbytes(0, self.elements, _DTYPE)
        return Call(fields, nbytes)

    def _hadamard(self, case: Case) -> Call:
        values, output, _, _ = self.dense
        fields = {"spans": self._operands(None).spans, "dtype": _DTYPE, "seed": _SEED}
        fields |= {"input": values, "output": output}
        fields |= {"rotation": case.rotation, "inverse": case.inverse}
        return Call(fields, 2 * self.elements * _DENSE_NBYTES)

    # --- a part of it -------------------------------------------------------------

    def stretch(self, first: int) -> Data:
        """A copy of the elements from ``first`` on, which begins a block."""
        dense = [array[first:].copy() for array in self.dense]
        coded = [self._coded_stretch(array, first) for array in self.coded]
        return type(self)(self.form, first, dense, coded)

    def _coded_stretch(self, payload: Array, first: int) -> Array:
        """What belongs to a span as a whole, then what comes after ``first``."""
        head = 0
        if isinstance(self.coder, BlockCoder):
            head = self.coder.block_format().head_nbytes(_DTYPE)
        pieces, at = [payload[:head]], head
        sizes = zip(self._regions(first), self._regions(self.elements), strict=True)
        for skipped, size in sizes:
            pieces.append(payload[at + skipped : at + size])
            at += size
        joined: Array = np.concatenate(pieces)
        return joined

    def _regions(self, length: int) -> list[int]:
        """Bytes of the parts of a body behind its head, for so many elements."""
        assert self.coder
        if not isinstance(self.coder, BlockCoder):
            stages = range(self.coder.stages)
            return [self.coder.stage_nbytes(n, length, _DTYPE) for n in stages]
        fmt = self.coder.block_format()
        per_block = (fmt.scales_nbytes, fmt.offsets_nbytes)
        return [*(part(length, _DTYPE) for part in per_block), fmt.codes_nbytes(length)]


@functools.lru_cache(maxsize=1)
def _dense(elements: int) -> list[Array]:
    # torch aligns memory to 64 bytes, as the kernels' stores past the cache need.
    values = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    # A span's head follows from its largest value, which every stretch has to have.
    values[-1] = _LARGEST
    others = [torch.zeros(elements) for _ in range(3)]
    return [array.numpy() for array in (values, *others)]


def check(case: Case, data: Data) -> Call:
    """The call, once its last blocks are as the reference has them, in every bit of
    everything that it could touch; AssertionError where they are not."""
    first = data.elements - CHECKED
    expected = data.stretch(first)
    call = data.call(case)
    getattr(reference, case.kernel)(**expected.call(case).fields)
    getattr(kernels, case.kernel)(**call.fields)
    got = data.stretch(first)
    pairs = zip(got.dense + got.coded, expected.dense + expected.coded, strict=True)
    if not all(ours.tobytes() == theirs.tobytes() for ours, theirs in pairs):
        raise AssertionError(f"{case}: results differ from the reference")
    return call
