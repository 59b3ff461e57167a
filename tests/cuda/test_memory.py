"""The device code touches nothing outside its buffers, and nothing misaligned.

On a GPU either spoils the whole process. Here, in a process of its own, every buffer
ends where a page that nobody may touch begins, and a misaligned access traps.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cuda.devices import Emulated, build_emulator, compiler
from tests.cuda.test_module import in_new_process
from tests.kernels.harness import DTYPES, _map_buffers
from tests.kernels.test_cast import cast_case, sum_case, uncast_case
from tests.kernels.test_formats import decoding_case, format_case, formats

from commkern.formats import Format
from commkern.reference.numerics import FORMATS

LENGTHS = [3, 0, 8, 1029, 13]


def at_page_end(array: np.ndarray, kept: list[Any]) -> np.ndarray:
    """A copy whose end is the end of what may be touched."""
    raw = array.view(np.uint8).reshape(-1)
    pages = -(-raw.size // mmap.PAGESIZE) or 1
    whole = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    kept.append(whole)
    view = np.frombuffer(whole, np.uint8)
    guard = view.ctypes.data + pages * mmap.PAGESIZE
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(guard, mmap.PAGESIZE, 0) == 0, "mprotect failed"
    end = pages * mmap.PAGESIZE
    copy = view[end - raw.size : end]
    copy[:] = raw
    return copy


def run_at_page_ends(emulator: Emulated, name: str, **arguments: Any) -> None:
    kept: list[Any] = []
    guarded = {
        field: _map_buffers(value, lambda array: at_page_end(array, kept))
        for field, value in arguments.items()
    }
    getattr(emulator, name)(**guarded)


def cut(case: dict[str, Any], field: str, end: int) -> dict[str, Any]:
    """The case with that buffer ending behind its last span."""
    return case | {field: case[field].view(np.uint8).reshape(-1)[:end]}


def run_casts(emulator: Emulated, dtype: str, wire_dtype: str) -> None:
    case = cast_case(dtype, wire_dtype, LENGTHS, "committed")
    last = case["spans"][-1]
    size, wire_size = FORMATS[dtype].nbytes, FORMATS[wire_dtype].nbytes
    elements = int(last["offset"] + last["length"]) * size
    body = int(last["body"] + last["length"] * wire_size)
    case = cut(cut(case, "input", elements), "payload", body)
    decoding = cut(uncast_case(case, case["payload"]), "output", elements)
    run_at_page_ends(emulator, "cast", **case)
    run_at_page_ends(emulator, "uncast", **decoding)
    run_at_page_ends(emulator, "uncast_add", **decoding)
    run_at_page_ends(emulator, "recast_sum", **sum_case(case, 2))


def run_decoders(emulator: Emulated, dtype: str, fmt: Format) -> None:
    case = format_case(fmt, dtype, LENGTHS)
    last = case["spans"][-1]
    body = int(last["body"]) + fmt.body_nbytes(int(last["length"]), dtype)
    decoding = decoding_case(fmt, case, case["payload"][:body])
    end = int(last["offset"] + last["length"]) * FORMATS[dtype].nbytes
    for kernel in ("dequantize", "dequantize_add"):
        run_at_page_ends(emulator, kernel, **cut(decoding, "output", end))


def run_all(library: str) -> None:
    emulator = Emulated(Path(library))
    for dtype in DTYPES:
        for wire_dtype in DTYPES:
            run_casts(emulator, dtype, wire_dtype)
        for fmt in formats():
            run_decoders(emulator, dtype, fmt)


def test_accesses_are_aligned_and_within_buffers(tmp_path: Path) -> None:
    cxx = compiler()
    if cxx is None:
        pytest.skip("no C++ compiler to build the emulator with")
    if sys.platform != "linux":
        pytest.skip("mprotect and its flags are used as on Linux")
    trap = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    library = build_emulator(cxx, tmp_path, *trap)
    code = (
        "import sys; from tests.cuda.test_memory import run_all; run_all(sys.argv[1])"
    )
    assert in_new_process(code, str(library)) == ""
