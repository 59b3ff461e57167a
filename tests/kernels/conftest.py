"""Fixtures over what can run a kernel: the reference and every ISA of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from commkern import reference


def _isas() -> list[str]:
    try:
        from commkern import _core
    except ImportError:
        return ["missing"]  # the fixture fails and says why
    return list(_core.available_isas())


ISAS = _isas()


def _forced(isa: str) -> Iterator[Any]:
    """commkern.kernels dispatching to ``isa``, checked before and after the test."""
    from commkern import _core, kernels

    before = _core.isa()
    _core.set_isa(isa)
    try:
        assert _core.isa() == isa, "the call would not dispatch to this ISA"
        yield kernels
        assert _core.isa() == isa, "the test ran on another ISA"
    finally:
        _core.set_isa(before)


@pytest.fixture(params=ISAS)
def compiled(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The compiled kernels, once for every ISA of this machine."""
    yield from _forced(request.param)


@pytest.fixture(params=["reference", *ISAS])
def implementation(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The reference, then the compiled kernels on every ISA."""
    if request.param == "reference":
        yield reference
    else:
        yield from _forced(request.param)
