"""Threads, forks and CPU flags change no bit."""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.harness import Copies, assert_same, encode, filler
from tests.kernels.test_cast import cast_case, uncast_case
from tests.kernels.test_cast import sum_case as recast_case
from tests.kernels.test_feedback import accumulate_case, scale_case, subtract_case
from tests.kernels.test_fixed_point import decode_case as fixed_decode_case
from tests.kernels.test_fixed_point import exponents_case, fixed_case, max_case
from tests.kernels.test_fixed_point import sum_case as fixed_sum_case
from tests.kernels.test_quantize import decode_case, quantize_case
from tests.kernels.test_quantize import sum_case as requantize_case
from tests.kernels.test_reduce import spans_of, sum_case

from commkern import reference

LONG = [5, 90_001, 0, 64, 50_000]  # several threads share the longest span


def all_cases(lengths: list[int], magnitude: float = 1.0) -> dict[str, dict[str, Any]]:
    """One call of every kernel over fp32 data of about ``magnitude``."""
    quantizing = quantize_case("float32", 4, 32, lengths, "two versions")
    quantizing["rounding"] = "stochastic"
    casting = cast_case("float32", "float16", lengths, "two versions")
    summing = sum_case("float32", lengths, 3)
    scaled = encode(np.random.default_rng(8).standard_normal(200_000), "float32")
    scaled *= np.float32(magnitude)
    for case in (quantizing, casting):
        case["input"] = scaled[: len(case["input"])]
        for version in case["residual"]:
            version *= np.float32(magnitude)
    elements = len(summing["output"])
    parts = [scaled[rank : rank + elements].copy() for rank in range(3)]
    coded = {**quantizing, "payload": quantizing["payload"].copy()}
    reference.quantize(**coded | {"residual": None})
    decoding = decode_case(quantizing, coded["payload"])
    cast_parts = recast_case(casting, 3)
    uncasting = uncast_case(casting, cast_parts["parts"][0])
    for case in (decoding, uncasting):
        case["output"] = scaled[: len(case["output"])].copy()
    fixed = fixed_case("float32", 8, 32, lengths, "two versions")
    fixed["input"] = scaled[: len(fixed["input"])]
    for version in fixed["residual"]:
        version *= np.float32(magnitude)
    reference.block_exponents(**exponents_case(fixed))  # into the case
    fixed_coded = {**fixed, "payload": fixed["payload"].copy()}
    reference.fixed_quantize(**fixed_coded | {"residual": None})
    fixed_decoding = fixed_decode_case(fixed, fixed_coded["payload"])
    fixed_decoding["output"] = scaled[: len(fixed_decoding["output"])].copy()
    subtracting = subtract_case("float32", lengths, "two versions")
    accumulating = accumulate_case("float32", lengths, "two versions")
    scaling = scale_case(lengths, "two versions")
    for case in (subtracting, accumulating, scaling):
        for version in case["residual"]:
            version *= np.float32(magnitude)
        if "input" in case:
            case["input"] = scaled[: len(case["input"])]
    spans, _ = spans_of(lengths)
    dense = {"spans": spans, "dtype": "float32"}
    flags = np.zeros(len(lengths), np.uint8)
    parts_of_sum = requantize_case(quantizing, 1) | {"parts": [coded["payload"]] * 3}
    return {
        "quantize": quantizing,
        "dequantize": decoding,
        "dequantize_add": decoding,
        "requantize_sum": parts_of_sum,
        "cast": casting,
        "uncast": uncasting,
        "uncast_add": uncasting,
        "recast_sum": cast_parts,
        "residual_subtract": subtracting,
        "residual_scale": scaling,
        "accumulate": accumulating,
        "block_exponents": exponents_case(fixed),
        "max_exponents": max_case(fixed, 3),
        "fixed_quantize": fixed,
        "fixed_sum": fixed_sum_case(fixed, 3),
        "fixed_dequantize": fixed_decoding,
        "fixed_dequantize_add": fixed_decoding,
        "sum": summing | {"parts": parts, "scale": 1 / 3},
        "absmax": dense
        | {"input": parts[0], "output": filler(len(lengths), np.float32)},
        "nonfinite_check": dense | {"input": parts[0], "flags": flags},
        "nonzero_check": dense | {"input": parts[0], "flags": flags},
        "saturate": dense | {"data": parts[0], "limit": magnitude},
        "hadamard": dense | {"input": parts[0], "output": parts[1], "seed": 3},
    }


def results(run: Callable[..., Any], case: dict[str, Any]) -> list[Any]:
    copies = Copies(case, None)
    run(**copies.arguments)
    return copies.buffers()


def assert_equal(got: list[Any], want: list[Any], name: str) -> None:
    for (label, one), (_, other) in zip(got, want, strict=True):
        assert_same(one, other, f"{name}: {label}")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    from commkern import _core

    before = _core.num_threads()
    yield _core.set_num_threads
    _core.set_num_threads(before)


@pytest.mark.parametrize("kernel", reference.KERNELS)
def test_threads_change_no_bit(compiled: Any, threads: Any, kernel: str) -> None:
    case, run = all_cases(LONG)[kernel], getattr(compiled, kernel)
    threads(1)
    alone = results(run, case)
    assert_equal(alone, results(getattr(reference, kernel), case), kernel)
    for count in (2, 3, 7):
        threads(count)
        for _ in range(3):
            assert_equal(results(run, case), alone, f"{kernel}, {count} threads")


def test_calls_from_many_threads(compiled: Any, threads: Any) -> None:
    """One of them gets the pool, the others do their own work; all are right."""
    threads(3)
    case = all_cases(LONG)["quantize"]
    expected = results(compiled.quantize, case)

    def work() -> None:
        for _ in range(10):
            assert_equal(results(compiled.quantize, case), expected, "quantize")

    with ThreadPoolExecutor(4) as callers:
        for done in [callers.submit(work) for _ in range(4)]:
            done.result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_child_of_a_fork_works(compiled: Any, threads: Any) -> None:
    threads(3)
    case = all_cases(LONG)["quantize"]
    expected = results(compiled.quantize, case)  # the pool has threads now

    def child() -> bytes:
        assert_equal(results(compiled.quantize, case), expected, "quantize")
        return b"equal"

    assert answer_of_fork(child) == b"equal"
    assert_equal(results(compiled.quantize, case), expected, "the parent")


def answer_of_fork(child: Callable[[], bytes]) -> bytes:
    """What ``child`` returns in a forked process, b"" where it hangs or dies."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        try:
            os.write(writing, child())
        finally:
            os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 20)
    answer = os.read(reading, 100) if ready else b""
    os.close(reading)
    if not ready:
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return answer


@pytest.fixture
def flushing() -> Iterator[Callable[[], bool]]:
    """Turns flushing of denormals on; returns whether this thread flushes."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU has no flush-to-zero mode")
    smallest = np.full(4, 1e-42, np.float32)

    def active() -> bool:
        torch.set_flush_denormal(True)
        return not (smallest * np.float32(1.5)).any()

    yield active
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("kernel", reference.KERNELS)
def test_flush_denormal_changes_no_bit(
    implementation: Any, flushing: Any, kernel: str
) -> None:
    case = all_cases([70, 3, 1000], magnitude=1e-41)[kernel]
    expected = results(getattr(reference, kernel), case)
    copies = Copies(case, None)
    assert flushing(), "the flags should be set for this test to mean something"
    getattr(implementation, kernel)(**copies.arguments)
    smallest = np.full(4, 1, np.uint32).view(np.float32)
    still_flushes = not (smallest * np.float32(1)).any()
    torch.set_flush_denormal(False)
    assert_equal(copies.buffers(), expected, kernel)
    assert still_flushes, "the caller's flags must come back"


def test_flush_denormal_reaches_no_worker(
    compiled: Any, threads: Any, flushing: Any
) -> None:
    case = all_cases(LONG, magnitude=1e-41)["quantize"]
    expected = results(reference.quantize, case)
    threads(3)
    copies = Copies(case, None)
    assert flushing()
    compiled.quantize(**copies.arguments)
    torch.set_flush_denormal(False)
    assert_equal(copies.buffers(), expected, "quantize")
