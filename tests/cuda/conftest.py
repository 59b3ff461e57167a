"""Fixtures over what can run the CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cuda.devices import Emulated, Gpu, build_emulator, compiler, no_gpu


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """The device code of csrc/cuda, compiled for the CPU."""
    cxx = compiler()
    if cxx is None:
        pytest.skip("no C++ compiler to build the emulator with")
    return Emulated(build_emulator(cxx, tmp_path_factory.mktemp("emulator")))


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    if NO_GPU:
        pytest.skip(NO_GPU)
    return Gpu()


NO_GPU = no_gpu()
WHERE = ["emulated", "emulated backwards", *([] if NO_GPU else ["gpu"])]


@pytest.fixture(params=WHERE)
def compiled(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The CUDA kernels, on CPU arrays."""
    if request.param == "gpu":
        yield request.getfixturevalue("gpu")
        return
    emulator = request.getfixturevalue("emulated")
    emulator.settings(backwards=request.param.endswith("backwards"))
    yield emulator
    emulator.settings()
