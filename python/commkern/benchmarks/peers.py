"""Other quantisers' calls against ours of the same kind, on one thread of one core.

They are the extra ``peers``; what is not installed is skipped. Each runs on 32 MiB of
fp32 at most (some take 16 times that while they work), in turn with ours;
``ratios["peer"]`` is the median over the rounds of our time over theirs. All run on one
core, since some have threads that no option bounds. torch and piquant have one scale
for the whole tensor, which is found before: only ours is timed with finding scales.
Results are checked first: ours in bits, theirs by how far decoded values are off.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import pytest
import torch

from commkern import kernels
from commkern.benchmarks.cases import FORMS, Case, Data, check
from commkern.benchmarks.interleaved import CLOCK, record
from commkern.benchmarks.one_thread import one_thread, time_against
from commkern.compressors import compressor

MIB = min(32, int(os.environ.get("COMMKERN_BENCH_MIB", "32")))
ROUNDS = 5
_ELEMENTS = MIB * 2**20 // 4
_SLACK = 1.001  # of error bounds, which are those of exact arithmetic


class Peer(Protocol):
    """A library that codes ``values`` and decodes what it coded last."""

    def __init__(self, values: torch.Tensor, bits: int, form: str) -> None: ...

    def encode(self) -> Any: ...

    def decode(self) -> torch.Tensor: ...


class Torch:
    """``torch.quantize_per_tensor``."""

    def __init__(self, values: torch.Tensor, bits: int, form: str) -> None:
        self._values, self._scale = values, _scale(values, bits)
        self._coded = values

    def encode(self) -> None:
        self._coded = torch.quantize_per_tensor(
            self._values, self._scale, 0, torch.qint8
        )

    def decode(self) -> torch.Tensor:
        return self._coded.dequantize()


class BitsAndBytes:
    """Blockwise quantisation of bitsandbytes, with the same blocks as ours."""

    def __init__(self, values: torch.Tensor, bits: int, form: str) -> None:
        library = _load("bitsandbytes.functional")
        self._values, self._coded = values, ()
        if form == "nf4":
            options = {"blocksize": 64, "quant_type": "nf4"}
            self._encode = functools.partial(library.quantize_4bit, **options)
            self._decode = functools.partial(library.dequantize_4bit, **options)
        else:
            options = {"blocksize": 256}
            self._encode = functools.partial(library.quantize_blockwise, **options)
            self._decode = functools.partial(library.dequantize_blockwise, **options)

    def encode(self) -> None:
        self._coded = self._encode(self._values)

    def decode(self) -> torch.Tensor:
        decoded: torch.Tensor = self._decode(*self._coded)
        return decoded


class Piquant:
    """pypiquant's quantisation with a scale and a zero point, into given memory."""

    def __init__(self, values: torch.Tensor, bits: int, form: str) -> None:
        library = _load("piquant")
        self._context = library.Context(1)
        self._values, self._output = values, torch.zeros_like(values)
        self._coded = torch.zeros(len(values) * bits // 8, dtype=torch.uint8)
        dense, short = (
            getattr(library.DataType, name) for name in ("F32", f"UINT{bits}")
        )
        mode = "STOCHASTIC" if form.endswith("stochastic") else "NEAREST"
        units = {
            "numel": len(values),
            "scale": _scale(values, bits),
            "zero_point": 2 ** (bits - 1),
        }
        self._encode = functools.partial(
            self._context.quantize_ptr,
            *(values.data_ptr(), dense, self._coded.data_ptr(), short),
            round_mode=library.RoundMode[mode],
            **units,
        )
        self._decode = functools.partial(
            self._context.dequantize_ptr,
            *(self._coded.data_ptr(), short, self._output.data_ptr(), dense),
            **units,
        )
        self._set, self._add = library.ReduceOp.SET, library.ReduceOp.ADD

    def encode(self) -> None:
        self._encode()

    def decode(self) -> torch.Tensor:
        self._decode(reduce_op=self._set)
        return self._output

    def decode_add(self) -> None:
        self._decode(reduce_op=self._add)


class Pair(NamedTuple):
    """A kernel of ours, and who does the same."""

    kernel: str
    form: str
    peer: type[Peer]

    def __str__(self) -> str:
        return f"{self.kernel} {self.form} {self.peer.__name__.lower()}"

    @property
    def bits(self) -> int:
        return 8 if "8" in self.form else 4


def pairs() -> Iterator[Pair]:
    for form, peer in (
        ("8-bit", Torch),
        ("8-bit", BitsAndBytes),
        ("dynamic8", BitsAndBytes),
        ("nf4", BitsAndBytes),
        ("8-bit", Piquant),
        ("4-bit", Piquant),
        ("8-bit stochastic", Piquant),
        ("4-bit stochastic", Piquant),
    ):
        yield Pair("quantize", form, peer)
    for form, peer in (
        ("8-bit", Torch),
        ("dynamic8", BitsAndBytes),
        ("nf4", BitsAndBytes),
        ("8-bit", Piquant),
        ("4-bit", Piquant),
    ):
        yield Pair("dequantize", form, peer)
    for form in ("8-bit", "4-bit"):
        yield Pair("dequantize_add", form, Piquant)


@pytest.mark.benchmark(
    group=f"against others, {MIB} MiB of fp32, one thread", timer=CLOCK
)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("pair", list(pairs()), ids=str)
def test_peer(benchmark: Any, pair: Pair) -> None:
    data = Data.of(pair.form, _ELEMENTS)
    case = Case(pair.kernel, pair.form)
    with one_thread(), _one_core(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = _checked(pair, torch.from_numpy(data.dense[0]))
        call = check(case, data)
        run = functools.partial(getattr(kernels, case.kernel), **call.fields)
        seconds, ratio = time_against(run, theirs, ROUNDS)
    record(benchmark, seconds, nbytes=call.nbytes, ratios={"peer": ratio})


def _checked(pair: Pair, values: torch.Tensor) -> Callable[[], Any]:
    """The peer's call, once what it decodes is as near as it would be with us."""
    peer = pair.peer(values, pair.bits, pair.form)
    peer.encode()
    off = float((peer.decode() - values).abs().max())
    own_8_bits = pair.peer is BitsAndBytes and pair.form == "8-bit"
    coder = compressor(FORMS["dynamic8" if own_8_bits else pair.form])
    bound = _SLACK * coder.error_bound(float(values.abs().max()), "float32")
    if not off <= bound:
        raise AssertionError(f"{pair}: values are off by {off:.3g}, bound {bound:.3g}")
    names = {"quantize": "encode", "dequantize": "decode"}
    call: Callable[[], Any] = getattr(peer, names.get(pair.kernel, "decode_add"))
    return call


def _scale(values: torch.Tensor, bits: int) -> float:
    """Of symmetric codes, from the largest magnitude."""
    largest = 2.0 ** (bits - 1) - 1
    return float(values.abs().max()) / largest


def _load(name: str) -> Any:
    """A module, or skip with the reason."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"{name}: {error}")


@contextmanager
def _one_core() -> Iterator[None]:
    """Before a library is loaded, so that it makes one thread where it counts cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
