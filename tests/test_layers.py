"""The layers of csrc: who includes whom, and what the kernel objects export."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
MAY_INCLUDE = {
    "core": {"core"},
    "kernels": {"core", "kernels"},
    "cpu": {"core", "kernels", "cpu"},
    "cuda": {"core", "kernels", "cuda"},
    "runtime": {"core", "kernels", "runtime"},
    "bindings": {"core", "kernels", "cpu", "cuda", "runtime", "bindings"},
}
# What the objects that exist once per ISA may see of the system.
KERNEL_HEADERS = {"cstddef", "cstdint", "cstring", "immintrin.h", "smmintrin.h"}
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def sources(root: Path, folder: str = "") -> list[Path]:
    kinds = {".h", ".cpp", ".cuh", ".cu"}
    return sorted(p for p in (root / folder).rglob("*") if p.suffix in kinds)


def includes(source: Path) -> Iterator[tuple[bool, str]]:
    """(is one of ours, path) of every include."""
    for quote, path in INCLUDE.findall(source.read_text()):
        yield quote == '"', path


def breaches(root: Path) -> list[str]:
    """Every include that the rule of the layers forbids."""
    found = []
    for source in sources(root):
        name = source.relative_to(root)
        layer = name.parts[0]
        for ours, path in includes(source):
            if ours and path.split("/")[0] not in MAY_INCLUDE[layer]:
                found.append(f"{name} includes {path}")
            python = path == "Python.h" or path.startswith("pybind11")
            if python and layer != "bindings":
                found.append(f"{name} includes {path}")
            if re.match(r"(torch|ATen|c10)\b", path):
                found.append(f"{name} includes {path}")
    return found


def seen_by_kernels(root: Path) -> dict[str, set[str]]:
    """File -> system headers, for all that the per-ISA sources reach."""
    waiting = [p for p in sources(root, "cpu") if p.stem != "isa_select"]
    seen: dict[str, set[str]] = {}
    while waiting:
        source = waiting.pop()
        name = str(source.relative_to(root))
        if name in seen:
            continue
        seen[name] = {path for ours, path in includes(source) if not ours}
        waiting += [root / path for ours, path in includes(source) if ours]
    return seen


def weak_symbols(objects: list[Path], isa: str) -> list[str]:
    """Weak symbols outside the ISA's namespace; a linker would merge them."""
    command = ["nm", "-C", *map(str, objects)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True)
    weak = re.findall(r"^[0-9a-f ]* [WVu] (.*)$", listing.stdout, re.MULTILINE)
    return [name for name in weak if f"commkern::cpu::{isa}::" not in name]


def test_layers_include_downwards() -> None:
    assert len(sources(CSRC)) > 20
    assert breaches(CSRC) == []


def test_a_breach_is_found(tmp_path: Path) -> None:
    for layer in MAY_INCLUDE:
        (tmp_path / layer).mkdir()
    (tmp_path / "core" / "up.h").write_text('#include "kernels/cast.h"\n')
    (tmp_path / "cpu" / "t.cpp").write_text(
        '#include <torch/torch.h>\n  # include "cuda/x.cuh"\n'
    )
    (tmp_path / "runtime" / "p.h").write_text("#include <pybind11/stl.h>\n")
    assert len(breaches(tmp_path)) == 4


def test_kernels_see_no_containers() -> None:
    seen = seen_by_kernels(CSRC)
    assert {"cpu/quantize.cpp", "core/numerics.h", "core/thread_pool.h"} <= set(seen)
    assert {name: got - KERNEL_HEADERS for name, got in seen.items()} == {
        name: set() for name in seen
    }


def kernel_objects() -> dict[str, list[Path]]:
    """ISA -> object files of the newest build without sanitizers."""
    builds = [p for p in ROOT.glob("build/*") if "asan" not in p.name]
    for build in sorted(builds, key=lambda p: p.stat().st_mtime, reverse=True):
        folders = build.glob("CMakeFiles/commkern_cpu_*.dir")
        found = {
            f.name.removeprefix("commkern_cpu_").removesuffix(".dir"): list(
                f.rglob("*.o")
            )
            for f in folders
        }
        if any(found.values()):
            return found
    return {}


def test_kernel_objects_leak_no_weak_symbol() -> None:
    found = kernel_objects()
    if not found:
        pytest.skip("no objects under build/: this installation was built elsewhere")
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine")
    for isa, objects in found.items():
        assert len(objects) >= 4, isa
        assert weak_symbols(objects, isa) == []


def test_a_weak_symbol_is_found(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None or shutil.which("nm") is None:
        pytest.skip("no compiler or no nm on this machine")
    source = tmp_path / "leak.cpp"
    source.write_text(
        "inline int shared(int x) { return x; }\nint (*keep)(int) = &shared;\n"
        "namespace commkern::cpu::avx2 { inline int own(int x) { return x; }\n"
        "int (*kept)(int) = &own; }\n"
    )
    target = tmp_path / "leak.o"
    subprocess.run([compiler, "-std=c++20", "-c", source, "-o", target], check=True)
    assert weak_symbols([target], "avx2") == ["shared(int)"]
