"""What can run a table of CUDA kernels: the emulator, and a GPU where there is one.

``Emulated`` and ``Gpu`` offer the kernels as ``commkern.kernels`` does, on CPU arrays.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from commkern import backend
from commkern.formats import CODES, Format
from commkern.spans import SPAN

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
EMULATOR = Path(__file__).parent / "emulator"
# As the device code is compiled: no contraction, and bytes seen as any element type.
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-ffp-contract=off"]
FLAGS += ["-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]

DTYPES = ("float32", "float64", "float16", "bfloat16")
# As csrc numbers them.
NAMES = {
    "code": tuple(CODES),
    "scales": ("compute", "float16", "bfloat16", "e8m0", "ocp", "e4m3", "span"),
    "statistic": ("absmax", "l2", "mean", "range", "constant"),
    "rounding": ("nearest", "stochastic"),
}


def compiler() -> str | None:
    wanted = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((found for name in wanted if (found := shutil.which(name))), None)


def build_emulator(cxx: str, folder: Path, *flags: str) -> Path:
    """The CUDA filler's sources as a shared library for the CPU."""
    library = folder / "emulated.so"
    paths = [f"-I{EMULATOR}", f"-I{CSRC}", EMULATOR / "table.cpp", "-o", library]
    subprocess.run([cxx, *FLAGS, *flags, *paths], check=True)
    return library


# ---- csrc's structs ----


class _Buffer(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("count", ctypes.c_int64))


class _Residual(ctypes.Structure):
    _fields_ = (("version", _Buffer * 2), ("committed", _Buffer))


_KINDS = {
    "bytes": _Buffer,
    "mutable_bytes": _Buffer,
    "spans": _Buffer,
    "parts": _Buffer,
    "residual": _Residual,
    "dtype": ctypes.c_int32,
    "name": ctypes.c_int32,
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "uint64": ctypes.c_uint64,
    "float64": ctypes.c_double,
}


def table_struct() -> type[ctypes.Structure]:
    """KernelTable, its entries as addresses."""
    entries = [(name, ctypes.c_void_p) for name in backend.signatures()]
    head = [("version", ctypes.c_uint32), ("filler", ctypes.c_char_p)]
    return type("KernelTable", (ctypes.Structure,), {"_fields_": head + entries})


def _struct(name: str, fields: dict[str, Any], *unnamed: str) -> Any:
    members = {"_anonymous_": unnamed, "_fields_": list(fields.items())}
    return type(name, (ctypes.Structure,), members)


@functools.cache
def _args_struct(name: str) -> type[ctypes.Structure]:
    signature = backend.signatures()[name]
    kinds = {field: _KINDS[kind] for field, (kind, _) in signature.items()}
    if "code" not in kinds:
        return _struct(name, kinds)
    # A struct within the struct, which aligns as a whole.
    inner = {field: kinds[field] for field in Format.__dataclass_fields__}
    fields: dict[str, Any] = {}
    for field, kind in kinds.items():
        if field not in inner:
            fields[field] = kind
        elif "format" not in fields:
            fields["format"] = _struct("Format", inner)
    return _struct(name, fields, "format")


def _buffer(value: Any) -> _Buffer:
    if value is None:
        return _Buffer(None, 0)
    return _Buffer(value.ctypes.data, value.nbytes)


def _parts(values: list[Any]) -> _Buffer:
    rows = (_Buffer * len(values))(*map(_buffer, values))
    made = _Buffer(ctypes.addressof(rows), len(values))
    made.keep = rows
    return made


def _residual(value: Any) -> _Residual:
    first, second, committed = (*value, None)[:3] if value else (None,) * 3
    return _Residual((_buffer(first), _buffer(second)), _buffer(committed))


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "bytes": _buffer,
    "mutable_bytes": _buffer,
    "spans": lambda rows: _Buffer(rows.ctypes.data, len(rows)),
    "parts": _parts,
    "residual": _residual,
    "dtype": DTYPES.index,
}


def _converted(field: str, kind: str, value: Any) -> Any:
    if kind == "name":
        return NAMES[field].index(value)
    return _CONVERT.get(kind, lambda v: v)(value)


class Emulated:
    """The kernels of an emulator library, called by address."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.emulated_table.restype = ctypes.c_void_p
        self.library.emulated_widen.restype = ctypes.c_uint64
        self.library.emulated_narrow.argtypes = [ctypes.c_uint64]
        self.library.emulated_narrow.restype = ctypes.c_uint32
        self.table = table_struct().from_address(self.library.emulated_table())

    def settings(self, *, multiprocessors: int = 2, backwards: bool = False) -> None:
        self.library.emulated_settings(
            ctypes.c_int64(multiprocessors), ctypes.c_bool(backwards)
        )

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in backend.signatures():
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, **given: Any) -> None:
        args = _args_struct(name)()
        kept = []  # a struct holds copies of its fields, not what they point to
        for field, (kind, default) in backend.signatures()[name].items():
            value = given.pop(field, default)
            kept.append(_converted(field, kind, value))
            setattr(args, field, kept[-1])
        assert not given, f"{name} has no field {', '.join(given)}"
        entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        entry(getattr(self.table, name))(ctypes.addressof(args), None)


# ---- a GPU ----


def no_gpu() -> str:
    """Why no kernel can run on a GPU here; empty where one can."""
    import torch

    if importlib.util.find_spec("commkern._cuda") is None:
        return "commkern._cuda was not built"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    status = backend.cuda_status()
    return "" if status.startswith("active") else status


class _OnDevice:
    """Copies of arrays on the GPU, as far from a 256-byte boundary as the originals."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[np.ndarray, Any]] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype != SPAN:
            return self.pointer(value), value.nbytes
        if isinstance(value, (tuple, list)):
            return type(value)(map(self, value))
        return value

    def pointer(self, array: np.ndarray) -> int:
        import torch

        raw = array.view(np.uint8).reshape(-1)
        if id(array) not in self._copies:
            shift = array.ctypes.data % 256
            whole = torch.empty(raw.size + shift + 1, dtype=torch.uint8, device="cuda")
            copy = whole[shift : shift + raw.size]
            copy.copy_(torch.from_numpy(raw.copy()))
            self._copies[id(array)] = raw, copy
        return int(self._copies[id(array)][1].data_ptr())

    def copy_back(self) -> None:
        for raw, copy in self._copies.values():
            if raw.flags.writeable:
                raw[:] = copy.cpu().numpy()


class Gpu:
    """The kernels of ``_cuda``, each called on copies and waited for."""

    def __init__(self) -> None:
        backend.cuda()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in backend.core().tables()["cuda"]:
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, **given: Any) -> None:
        import torch

        on_device = _OnDevice()
        args = {field: on_device(value) for field, value in given.items()}
        spans = given["spans"].view(np.uint8)
        stream = torch.cuda.current_stream().cuda_stream
        backend.core().call_cuda(name, args, on_device.pointer(spans), stream)
        torch.cuda.synchronize()
        on_device.copy_back()
