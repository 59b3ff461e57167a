"""``commkern doctor`` says what is wrong, and sees a kernel that is."""

import numpy as np
import pytest

from commkern import backend, kernels, reference
from commkern.arrays import as_bytes
from commkern.cli import main, selftest
from commkern.errors import BackendError
from commkern.formats import CODES


def test_all_is_well(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("all well\n")
    for isa in backend.core().available_isas():
        assert f"self-test {isa} " in out
    assert f"{len(reference.KERNELS)} kernels" in out


def test_it_leaves_the_isa_as_it_was():
    before = backend.core().isa()
    main(["doctor"])
    assert backend.core().isa() == before


def written(arguments):
    fields = ("output", "flags", "data", "payload")
    found = (arguments[field] for field in fields if field in arguments)
    return next(found) if set(fields) & set(arguments) else arguments["residual"][1]


@pytest.mark.parametrize("broken", reference.KERNELS)
def test_a_wrong_byte_of_any_kernel_is_seen(broken):
    class Broken:
        def __getattr__(self, name):
            def kernel(**arguments):
                getattr(kernels, name)(**arguments)
                if name == broken:
                    as_bytes(written(arguments))[-1] ^= 1

            return kernel

    found = dict(selftest.differences(Broken()))
    assert [name for name, problem in found.items() if problem] == [broken]


def test_every_kernel_writes_something_in_the_self_test():
    for name in reference.KERNELS:
        build = selftest._BUILDERS[name]
        for before, after in zip(build("float32"), build("float32"), strict=True):
            getattr(reference, name)(**after, **selftest.typed(name, "float32"))
            old, new = as_bytes(written(before)), as_bytes(written(after))
            assert not np.array_equal(old, new), name


def test_the_self_test_goes_through_every_format():
    chosen = [fmt for fmt, _ in selftest._FORMATS]
    assert {fmt.code for fmt in chosen} == set(CODES)
    every = [code.scales for code in CODES.values()]
    assert {fmt.scales for fmt in chosen} == {x for scales in every for x in scales}
    every = [code.statistics for code in CODES.values()]
    assert {fmt.statistic for fmt in chosen} == {x for kinds in every for x in kinds}


def test_a_missing_module_is_named_with_its_cure(capsys, monkeypatch):
    def missing():
        raise BackendError("commkern._core cannot be imported: gone. Reinstall it")

    monkeypatch.setattr(backend, "core", missing)
    monkeypatch.delenv("COMMKERN_BACKEND", raising=False)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "problem: commkern._core cannot be imported: gone. Reinstall it" in out


def test_the_reference_has_nothing_to_compare(capsys, monkeypatch):
    monkeypatch.setenv("COMMKERN_BACKEND", "reference")
    assert main(["doctor"]) == 0
    assert "reference (COMMKERN_BACKEND=reference)" in capsys.readouterr().out


def test_a_wrong_variable_is_a_problem(capsys, monkeypatch):
    monkeypatch.setenv("COMMKERN_BACKEND", "gpu")
    assert main(["doctor"]) == 1
    assert "expected one of cpu, reference, got 'gpu'" in capsys.readouterr().out


def test_a_cuda_module_that_cannot_be_used_is_a_problem(capsys, monkeypatch):
    monkeypatch.setattr(backend, "cuda_status", lambda: "not usable: too old")
    assert main(["doctor"]) == 1
    assert "problem: CUDA module not usable: too old" in capsys.readouterr().out
