"""``commkern doctor``: what is active and why, and whether the kernels are right."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

_WIDTH = 20


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show what is active and why, and check every kernel",
        description=(
            "Print versions, the active backend and why it is active, and compare "
            "every kernel with its reference in bits. Exit code 1 if anything is wrong."
        ),
    )
    parser.set_defaults(run=run)


def run(_arguments: argparse.Namespace) -> int:
    """Print the report; 0 if all is well, else 1."""
    problems: list[str] = []
    _show_versions()
    if _show_backend(problems):
        _show_selftest(problems)
    print()
    for problem in problems:
        print(f"problem: {problem}")
    print("all well" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


def _show(title: str, text: object) -> None:
    print(f"{title:{_WIDTH}}{text}")


def _show_versions() -> None:
    import torch

    import commkern

    _show("commkern", f"{commkern.__version__} in {os.path.dirname(commkern.__file__)}")
    _show("Python", f"{platform.python_version()}, {platform.platform()}")
    groups = torch.distributed
    if groups.is_available():
        checks = {"gloo": groups.is_gloo_available, "nccl": groups.is_nccl_available}
        usable = [name for name, available in checks.items() if available()]
        _show("torch", f"{torch.__version__}, process groups: {', '.join(usable)}")
    else:
        _show("torch", f"{torch.__version__}, built without torch.distributed")
    _show("CPU", f"{platform.machine()}, {os.cpu_count()} logical cores")
    _show("GPU", _gpu(torch))


def _gpu(torch: Any) -> str:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        return "none visible" if built else "none (torch is a build without CUDA)"
    return ", ".join(
        torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
    )


def _show_backend(problems: list[str]) -> bool:
    """Whether compiled kernels can be checked."""
    from commkern import backend
    from commkern.errors import CommkernError

    try:
        active = backend.active()
    except (CommkernError, ValueError) as error:
        _show("backend", "BROKEN")
        problems.append(str(error))
        return False
    _show("backend", f"{active.name} ({active.reason})")
    status = backend.cuda_status()
    _show("CUDA module", status)
    if status.startswith("not usable"):
        problems.append(f"CUDA module {status}")
    if active.name == "reference":
        _show("self-test", "nothing to compare: the reference itself is in use")
        return False
    available = backend.core().available_isas()
    forced = os.environ.get("COMMKERN_ISA")
    why = f"COMMKERN_ISA={forced}" if forced else "the best that this CPU has"
    _show("ISA", f"{active.isa} ({why}); available: {', '.join(available)}")
    threads = os.environ.get("COMMKERN_THREADS")
    why = f"COMMKERN_THREADS={threads}" if threads else "default"
    _show("threads", f"{active.threads} ({why}); torch: {_torch_threads()}")
    return True


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def _show_selftest(problems: list[str]) -> None:
    from commkern import backend, kernels
    from commkern.cli.selftest import DTYPES, differences

    core = backend.core()
    before = core.isa()
    print()
    try:
        for isa in core.available_isas():
            core.set_isa(isa)
            wrong = []
            checked = 0
            for name, problem in differences(kernels):
                checked += 1
                if problem:
                    wrong.append(name)
                    problems.append(f"{name} on {isa}, {problem}")
            verdict = "equal in bits" if not wrong else f"WRONG: {', '.join(wrong)}"
            _show(
                f"self-test {isa}",
                f"{checked} kernels x {len(DTYPES)} dtypes: {verdict}",
            )
    finally:
        core.set_isa(before)
