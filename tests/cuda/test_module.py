"""The module ``_cuda`` and how ``_core`` takes its kernels, mostly without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.cuda.devices import ROOT, Emulated, Gpu, table_struct
from tests.kernels.harness import compare
from tests.kernels.test_cast import cast_case
from tests.kernels.test_formats import decoding_case, format_case

from commkern import _core, backend
from commkern.errors import BackendError
from commkern.formats import Format

HELD = ["dequantize", "dequantize_add", "cast", "uncast", "uncast_add", "recast_sum"]
NAME = ctypes.create_string_buffer(b"commkern.KernelTable")
needs_cuda_module = pytest.mark.skipif(
    importlib.util.find_spec("commkern._cuda") is None,
    reason="commkern._cuda was not built",
)


def capsule(address: int, name: Any = NAME) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    make.restype = ctypes.py_object
    return make(address, ctypes.cast(name, ctypes.c_char_p), None)


def in_new_process(code: str, *arguments: str, **environment: str) -> str:
    """What ``code`` prints, both streams together; it must exit with 0."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# ---- import ----

IMPORT = """
import sys
import commkern
import torch
assert "commkern._cuda" not in sys.modules, "loaded before its first use"
assert not torch.cuda.is_initialized()
commkern.compressor("quantize:bits=8").compress(torch.ones(10))
assert "commkern._cuda" not in sys.modules, "loaded for a CPU tensor"
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
assert "libcuda.so" not in maps, "the driver was loaded"
"""


def test_import_is_silent_and_starts_no_driver() -> None:
    assert in_new_process(IMPORT) == ""
    assert in_new_process(IMPORT, CUDA_VISIBLE_DEVICES="") == ""


# ---- the capsule ----


def test_a_table_of_another_version_is_refused() -> None:
    version = _core.kernel_table_version
    table = table_struct()(version + 1, b"cuda")
    before = _core.tables()
    with pytest.raises(
        ImportError, match=rf"expected version {version}, got {version + 1}"
    ):
        _core.register_table(capsule(ctypes.addressof(table)))
    assert _core.tables() == before


def test_another_capsule_is_refused() -> None:
    table = table_struct()(_core.kernel_table_version, b"cuda")
    other = ctypes.create_string_buffer(b"other.Table")
    for wrong in (None, 3, capsule(ctypes.addressof(table), other)):
        with pytest.raises(TypeError, match=r"named commkern\.KernelTable, got "):
            _core.register_table(wrong)


@needs_cuda_module
def test_the_module_hands_over_its_kernels() -> None:
    module = backend.cuda()
    assert "commkern.KernelTable" in repr(module.table())
    assert _core.tables()["cuda"] == HELD
    assert list(_core.kernel_signatures()) == _core.tables()["cpu"]
    assert all(arch.startswith(("sm_", "compute_")) for arch in module.archs())
    assert any(arch.startswith("compute_") for arch in module.archs()), "no PTX"
    assert float(module.runtime_version()) >= 11.8


def test_a_module_of_another_version_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = table_struct()(7, b"cuda")
    module = SimpleNamespace(table=lambda: capsule(ctypes.addressof(table)))
    monkeypatch.setitem(sys.modules, "commkern._cuda", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    backend.cuda.cache_clear()
    expected = rf"expected version {_core.kernel_table_version}, got 7\. Build"
    with pytest.raises(BackendError, match=expected):
        backend.cuda()
    assert backend.cuda_status().startswith("not usable: ")


def test_a_missing_module_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    backend.cuda.cache_clear()
    with pytest.raises(BackendError, match=r"_cuda was not built\. Build .* nvcc"):
        backend.cuda()
    assert backend.cuda_status() == "not built: tensors on CPU only"


# ---- status ----


@pytest.mark.parametrize(
    ("archs", "device", "runs"),
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_86", True),
        ("sm_86", "sm_80", False),
        ("sm_80", "sm_90", False),
        ("sm_80 compute_80", "sm_90", True),
        ("sm_75 sm_80 sm_90 compute_90", "sm_120", True),
        ("sm_75 sm_80 sm_90 compute_90", "sm_70", False),
        ("sm_90a", "sm_90", True),
    ],
)
def test_status_knows_which_devices_fit(
    monkeypatch: pytest.MonkeyPatch, archs: str, device: str, runs: bool
) -> None:
    module = SimpleNamespace(
        archs=archs.split,
        runtime_version=lambda: "13.0",
        device_count=lambda: (1, ""),
        device_archs=lambda: [device],
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(backend, "cuda", lambda: module)
    status = backend.cuda_status()
    if runs:
        assert status == f"active: CUDA 13.0, built for {archs}; 1 device(s)"
    else:
        assert status.startswith(f"not usable: device 0 is {device}; CUDA 13.0, built")
        assert status.endswith(f"ARCHITECTURES={device[3:]}")


@needs_cuda_module
def test_status_without_a_device() -> None:
    code = "from commkern import backend; print(backend.cuda_status())"
    status = in_new_process(code, CUDA_VISIBLE_DEVICES="")
    assert "built for sm_" in status
    reason = r"(cudaErrorNoDevice: |no driver|the driver)"
    assert re.search(rf"; no device \({reason}", status)


# ---- calls ----

NO_GPU = """
import numpy as np
from commkern import _core, backend, kernels
from commkern.spans import one_span

backend.cuda()
payload = np.zeros(8, np.uint8)
args = dict(spans=one_span(4), dtype="float32", wire_dtype="float16")
for _ in range(2):
    try:
        device = dict(input=(4096, 16), payload=(8192, 8))
        _core.call_cuda("cast", args | device, 4096)
    except RuntimeError as error:
        print(error)
kernels.cast(**args, input=np.ones(4, np.float32), payload=payload)
assert payload.view(np.float16).tolist() == [1, 1, 1, 1]
"""


@needs_cuda_module
def test_a_call_without_a_gpu_raises() -> None:
    first, second = in_new_process(NO_GPU, CUDA_VISIBLE_DEVICES="").splitlines()
    assert first.startswith("cast: cudaError")
    assert len(first.split(": ")) >= 3, "no text beside the error's name"
    assert first == second


def test_a_call_without_a_table_raises() -> None:
    code = "from commkern import _core; _core.call_cuda('cast', {}, 0)"
    code = f"try:\n {code}\nexcept RuntimeError as error:\n print(error)"
    assert in_new_process(code) == "cuda kernels: none are registered\n"


REGISTERED = """
import sys
from pathlib import Path
from tests.cuda.test_module import use_registered
from tests.cuda.devices import Emulated
use_registered(Emulated(Path(sys.argv[1])))
"""


def test_core_calls_a_registered_table(emulated: Emulated) -> None:
    """In a process of its own: the emulator takes the place of the CUDA kernels."""
    assert in_new_process(REGISTERED, emulated.library._name) == ""


def use_registered(emulator: Emulated) -> None:
    _core.register_table(capsule(ctypes.addressof(emulator.table)))
    assert _core.tables()["cuda"] == HELD

    def call(
        name: str, spans: Any, device_spans: int | None = None, **args: Any
    ) -> None:
        rows = spans.copy()
        given = rows.ctypes.data if device_spans is None else device_spans
        args = {field: as_pointers(value) for field, value in args.items()}
        _core.call_cuda(name, args | {"spans": spans}, given)

    def as_pointers(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.ctypes.data, value.nbytes
        if isinstance(value, (tuple, list)):
            return type(value)(map(as_pointers, value))
        return value

    case = cast_case("float32", "bfloat16", [3000, 0, 17], "committed")
    through_core = SimpleNamespace(cast=lambda spans, **a: call("cast", spans, **a))
    compare(through_core, "cast", **case)
    with pytest.raises(ValueError, match=r"payload: expected at least \d+ bytes"):
        call("cast", **case | {"payload": case["payload"][:-6]})
    with pytest.raises(ValueError, match="table of 3 rows on the device, got none"):
        call("cast", **case, device_spans=0)
    with pytest.raises(TypeError, match="has no field 'inputs'"):
        call("cast", **case, inputs=None)
    with pytest.raises(RuntimeError, match=r"one of dequantize, .*, got 'quantize'"):
        call("quantize", **case)
    with pytest.raises(ValueError, match="got 'quantise'"):
        call("quantise", **case)
    fields = ("spans", "dtype", "wire_dtype", "payload")
    summing = {name: case[name] for name in fields}
    call("recast_sum", **summing, parts=[case["payload"].copy()] * 480)
    with pytest.raises(ValueError, match="at most 480 parts on CUDA, got 481"):
        call("recast_sum", **summing, parts=[case["payload"].copy()] * 481)
    check_rotation_is_refused(emulator, call)


def check_rotation_is_refused(emulator: Emulated, call: Callable[..., None]) -> None:
    fmt = Format(block_size=64, rotation=32)
    case = format_case(fmt, "float16", [70, 3])
    decoding = decoding_case(fmt, case, case["payload"])
    before = emulator.library.emulated_launches()
    for kernel in ("dequantize", "dequantize_add"):
        with pytest.raises(
            ValueError, match=f"{kernel}: expected rotation 0 on CUDA, got 32"
        ):
            call(kernel, **decoding)
    assert emulator.library.emulated_launches() == before
    decoding |= {"code": "nf4", "bits": 4, "rotation": 0}
    call("dequantize", **decoding)
    assert emulator.library.emulated_launches() == before + 1


def test_a_gpu_is_used(gpu: Gpu) -> None:
    """Where this runs, every other test here runs on the GPU, too."""
    compare(gpu, "cast", **cast_case("float32", "bfloat16", [3000, 0, 17], "committed"))
