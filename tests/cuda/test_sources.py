"""What the sources of csrc/cuda promise: plain device code, data, exact rounding."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.cuda.devices import CSRC, ROOT, Emulated
from tests.kernels.harness import compare
from tests.kernels.test_cast import cast_case

CUDA = CSRC / "cuda"
# NVRTC knows these alone.
SYSTEM_HEADERS = {"cstddef", "cstdint"}
TUNING = re.compile(
    r"^inline constexpr Tuning k(\w+)Tuning = \{([\d, ]+)\};$", re.MULTILINE
)


def tunings() -> dict[str, tuple[int, ...]]:
    """Kernel -> (threads, per_thread, blocks_per_sm)."""
    found = TUNING.findall((CUDA / "tuning.h").read_text())
    return {name: tuple(map(int, numbers.split(","))) for name, numbers in found}


def reached(source: Path, seen: dict[Path, set[str]]) -> dict[Path, set[str]]:
    """File -> system headers, for all that ``source`` includes."""
    if source not in seen:
        text = source.read_text()
        seen[source] = set(re.findall(r"#\s*include <([^>]+)>", text))
        for path in re.findall(r'#\s*include "([^"]+)"', text):
            reached(CSRC / path, seen)
    return seen


def test_device_code_includes_what_nvrtc_knows() -> None:
    seen: dict[Path, set[str]] = {}
    for source in CUDA.glob("*.cuh"):
        reached(source, seen)
    assert {CUDA / "cast.cuh", CSRC / "core/numerics.h"} <= set(seen)
    assert {str(p): got - SYSTEM_HEADERS for p, got in seen.items()} == {
        str(p): set() for p in seen
    }


def test_kernels_are_launched_in_one_place() -> None:
    for source in CUDA.iterdir():
        text = source.read_text()
        assert "<<<" not in text, source
        assert ("cudaLaunchKernel" in text) == (source.name == "launch.h"), source


def test_every_tuning_can_be_launched() -> None:
    assert set(tunings()) == {"Cast", "Uncast", "RecastSum", "Dequantize"}
    for threads, per_thread, blocks_per_sm in tunings().values():
        assert threads % 32 == 0
        assert 32 <= threads <= 1024
        assert per_thread >= 1
        assert 1 <= blocks_per_sm <= 32


@pytest.mark.parametrize("length", [1, 1000, 5000, 10**5])
def test_the_grid_follows_the_tuning(emulated: Emulated, length: int) -> None:
    threads, per_thread, blocks_per_sm = tunings()["Cast"]
    emulated.settings(multiprocessors=3)
    compare(emulated, "cast", **cast_case("float32", "float16", [length]))
    emulated.settings()
    tiles = -(-length // (threads * per_thread))
    blocks = emulated.library.emulated_blocks()
    assert min(tiles, 3 * blocks_per_sm) <= blocks <= min(tiles + 1, 3 * blocks_per_sm)


def build_flags() -> list[str]:
    """The flags that decide about bits and constexpr, as the build passes them."""
    text = (ROOT / "cmake" / "cuda.cmake").read_text()
    return re.findall(r"(?<=\s)--?(?:(?:fmad|ftz|prec-\w+)=\w+|expt-[\w-]+)", text)


@pytest.mark.parametrize("stem", ["cast", "quantize"])
def test_nvcc_fuses_and_flushes_nothing(tmp_path: Path, stem: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    assert "--fmad=false" in build_flags()
    ptx = tmp_path / f"{stem}.ptx"
    flags = ["-std=c++20", "-O3", "-ptx", f"-I{CSRC}", "-arch=compute_80"]
    subprocess.run(
        [nvcc, *flags, *build_flags(), CUDA / f"{stem}.cu", "-o", ptx], check=True
    )
    text = ptx.read_text()
    assert text.count(".entry") == {"cast": 40, "quantize": 12}[stem]
    assert re.findall(r"\bfma\.|\bmad\.rn|\.ftz\b", text) == []
    assert "st.global.v4.f32" in text, "elements move one by one"
