"""Which implementation of the kernels is in use, and why.

``COMMKERN_BACKEND`` chooses: ``cpu`` (default) is the compiled module ``_core``,
``reference`` the slow NumPy twin, which needs no compiled code. Nothing falls back
silently: a missing or broken ``_core`` raises BackendError at first use. Further
variables, read at first use: ``COMMKERN_ISA`` forces an instruction set,
``COMMKERN_THREADS`` the number of threads of the compiled kernels.

The kernels for CUDA tensors are in a module of their own, ``_cuda``, which a build with
nvcc brings. It is loaded at first use, never by an import.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from commkern.errors import BackendError

BACKENDS = ("cpu", "reference")
KERNEL_TABLE_VERSION = 4
_DEFAULT_THREADS = 4
_CURE = (
    "Reinstall commkern with a C++20 compiler at hand (pip install --force-reinstall), "
    "or set COMMKERN_BACKEND=reference for the slow NumPy kernels"
)
_CUDA_CURE = (
    "Build commkern where nvcc is on PATH or in CUDACXX (pip install --force-reinstall "
    "-C cmake.define.COMMKERN_CUDA=ON says what is missing)"
)
_ARCHS_CURE = "rebuild with -C cmake.define.COMMKERN_CUDA_ARCHITECTURES="

Kernel = Callable[..., None]


@dataclass(frozen=True)
class Active:
    """The backend in use: ``isa`` and ``threads`` are None without compiled code."""

    name: str
    isa: str | None
    threads: int | None
    reason: str


def name() -> str:
    """``"cpu"`` or ``"reference"``; ValueError for another COMMKERN_BACKEND."""
    wanted = os.environ.get("COMMKERN_BACKEND") or BACKENDS[0]
    if wanted not in BACKENDS:
        listed = ", ".join(BACKENDS)
        raise ValueError(f"COMMKERN_BACKEND: expected one of {listed}, got {wanted!r}")
    return wanted


def active() -> Active:
    """What is in use and why; loads ``_core`` where that is the backend.

    Raises BackendError, with reason and cure, where it cannot be used.
    """
    asked = os.environ.get("COMMKERN_BACKEND")
    reason = f"COMMKERN_BACKEND={asked}" if asked else "default"
    if name() == "reference":
        return Active("reference", None, None, reason)
    module = core()
    return Active("cpu", module.isa(), module.num_threads(), reason)


def kernel(kernel_name: str) -> Kernel:
    """The kernel of that name in the active backend.

    Raises AttributeError, listing what there is, for an unknown name, and BackendError
    where the compiled module cannot be used.
    """
    package = "commkern.reference" if name() == "reference" else "commkern.kernels"
    found: Kernel = getattr(importlib.import_module(package), kernel_name)
    return found


@functools.cache
def core() -> ModuleType:
    """The compiled module, checked and with its thread pool set up."""
    try:
        module = importlib.import_module("commkern._core")
    except ImportError as error:
        raise BackendError(
            f"commkern._core cannot be imported: {error}. {_CURE}"
        ) from error
    found = getattr(module, "kernel_table_version", None)
    if found != KERNEL_TABLE_VERSION:
        raise BackendError(
            f"commkern._core has kernel table version {found}, this package needs "
            f"{KERNEL_TABLE_VERSION}. {_CURE}"
        )
    module.isa()  # a wrong COMMKERN_ISA raises here, not in the middle of a step
    module.set_num_threads(_wanted_threads())
    return module


def _wanted_threads() -> int:
    asked = os.environ.get("COMMKERN_THREADS")
    if not asked:
        import torch

        return min(_DEFAULT_THREADS, torch.get_num_threads())
    try:
        count = int(asked)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"COMMKERN_THREADS: expected a number >= 1, got {asked!r}")
    return count


def signatures() -> dict[str, dict[str, tuple[str, Any]]]:
    """``{kernel: {field: (kind, default)}}``; a default of ``...`` must be given."""
    listed: dict[str, dict[str, tuple[str, Any]]] = core().kernel_signatures()
    return listed


@functools.cache
def cuda() -> ModuleType:
    """The CUDA module, its kernels registered with ``_core``. Starts no driver.

    Raises BackendError, with reason and cure, where it was not built, cannot be loaded
    or belongs to another version of ``_core``.
    """
    if importlib.util.find_spec("commkern._cuda") is None:
        raise BackendError(f"commkern._cuda was not built. {_CUDA_CURE}")
    try:
        module = importlib.import_module("commkern._cuda")
        core().register_table(module.table())
    except ImportError as error:
        raise BackendError(
            f"commkern._cuda cannot be used: {error}. {_CUDA_CURE}"
        ) from error
    return module


def cuda_status() -> str:
    """One line on the CUDA kernels: active, or why they are not. Never raises.

    Asks the driver for its devices; a process must not fork after that and then use
    CUDA in the child.
    """
    if importlib.util.find_spec("commkern._cuda") is None:
        return "not built: tensors on CPU only"
    try:
        module = cuda()
        count, reason = module.device_count()
        devices = module.device_archs()
    except (RuntimeError, ValueError) as error:
        return f"not usable: {error}"
    archs = module.archs()
    built = f"CUDA {module.runtime_version()}, built for {' '.join(archs)}"
    if count == 0:
        return f"{built}; no device ({reason})"
    for index, arch in enumerate(devices):
        if not _runs_on(archs, arch):
            cure = f"{_ARCHS_CURE}{arch.removeprefix('sm_')}"
            return f"not usable: device {index} is {arch}; {built}; {cure}"
    return f"active: {built}; {count} device(s)"


def _runs_on(archs: list[str], device: str) -> bool:
    """Whether code for ``archs`` runs on a device: the same major version's machine
    code, no newer than it, or PTX no newer than it."""
    major, minor = _capability(device)
    for arch in archs:
        built_major, built_minor = _capability(arch)
        if arch.startswith("sm_"):
            if built_major == major and built_minor <= minor:
                return True
        elif (built_major, built_minor) <= (major, minor):
            return True
    return False


def _capability(arch: str) -> tuple[int, int]:
    """``"sm_90"`` or ``"compute_120a"`` to ``(9, 0)`` or ``(12, 0)``."""
    number = int(arch.partition("_")[2].rstrip("af"))
    return number // 10, number % 10
