"""The string form of compressors, both ways."""

from __future__ import annotations

import dataclasses
import pickle
from typing import ClassVar

import pytest

import commkern as ck
from commkern.compressors import registry
from commkern.compressors.base import Compressor

EVERY = [
    spec for name in ck.compressors() for spec in (name, *ck.compressor(name).examples)
]


@dataclasses.dataclass(frozen=True)
class Wrapper(Compressor):
    """A compressor with parameters of every kind, for these tests alone."""

    name: ClassVar[str] = "wrapper"

    values: Compressor | None = None
    density: float = 0.5
    count: int | None = None
    exact: bool = False
    text: str = "plain"


@pytest.fixture(autouse=True)
def _wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._REGISTRY, "wrapper", Wrapper)


@pytest.mark.parametrize("spec", EVERY)
def test_strings_go_both_ways(spec: str) -> None:
    coder = ck.compressor(spec)
    assert ck.compressor(str(coder)) == coder
    assert str(ck.compressor(str(coder))) == str(coder)
    assert ck.compressor(coder) is coder
    assert pickle.loads(pickle.dumps(coder)) == coder
    assert hash(ck.compressor(spec)) == hash(coder)


def test_known_strings() -> None:
    assert ck.compressor("quantize") == ck.Quantize()
    assert ck.compressor("quantize:bits=4") == ck.Quantize(bits=4)
    assert ck.compressor(" quantize : bits = 4 , block_size = 64 ") == ck.Quantize(
        bits=4, block_size=64
    )
    assert str(ck.Quantize()) == "quantize:bits=8,block_size=128,rounding=nearest"
    assert str(ck.Quantize(block_size=None, symmetric=False)) == (
        "quantize:bits=8,block_size=None,rounding=nearest,symmetric=False"
    )
    assert ck.compressor("codebook:book=dynamic8") == ck.CodeBook("dynamic8", 256)
    assert ck.compressor("twobit:threshold=1") == ck.TwoBit(1.0)
    assert str(ck.Identity()) == "identity"
    assert str(ck.Cast()) == "cast:dtype=bf16"


def test_nested_compressors_stand_in_parentheses() -> None:
    inner = ck.Quantize(bits=4)
    nested = Wrapper(values=Wrapper(values=inner, density=0.25), count=3)
    text = str(nested)
    assert text.startswith("wrapper:values=(wrapper:values=(quantize:bits=4,")
    assert ck.compressor(text) == nested
    short = "wrapper:density=0.01,values=(quantize:bits=4)"
    assert ck.compressor(short) == Wrapper(density=0.01, values=inner)


@pytest.mark.parametrize("value", [1e-05, 1 / 3, 0.1, 1.0])
def test_floats_keep_their_bits(value: float) -> None:
    found = ck.compressor(str(Wrapper(density=value)))
    assert isinstance(found, Wrapper)
    assert found.density == value


def test_every_kind_of_value_is_read() -> None:
    text = "wrapper:values=None,count=4,exact=True,text=any"
    assert ck.compressor(text) == Wrapper(None, 0.5, 4, True, "any")
    assert ck.compressor("wrapper:count=None") == Wrapper()


def test_unknown_names_list_what_exists() -> None:
    with pytest.raises(ValueError, match="'quantise'") as caught:
        ck.compressor("quantise:bits=4")
    for name in ck.compressors():
        assert name in str(caught.value)


@pytest.mark.parametrize("name", ck.compressors())
def test_unknown_parameters_list_what_exists(name: str) -> None:
    fields = [
        field.name for field in dataclasses.fields(registry.compressor_class(name))
    ]
    with pytest.raises(ValueError, match="unknown parameter 'bitz'") as caught:
        ck.compressor(f"{name}:bitz=4")
    for field in fields or ["no parameters"]:
        assert field in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("", "unknown compressor ''"),
        (":bits=4", "unknown compressor ''"),
        ("quantize:bits", "'bits' in 'quantize:bits' has no value"),
        ("quantize:bits=", "has no value"),
        ("quantize:=4", "unknown parameter ''"),
        ("quantize:bits=4,", "unknown parameter ''"),
        ("quantize:bits=4,bits=8", "twice"),
        ("quantize:bits=four", "must be a number, got 'four'"),
        ("quantize:bits=4.0", "must be a number, got '4.0'"),
        ("quantize:bits=9", "1 to 8, got 9"),
        ("quantize:block_size=none", "must be a number, got 'none'"),
        ("quantize:symmetric=no", "True or False, got 'no'"),
        ("quantize:scale_dtype=fp8", "fp32, fp16, bf16, e8m0, got 'fp8'"),
        ("quantize:block_size=None,scale_dtype=fp16", "fp32 with block_size=None"),
        ("quantize:bits=1,scale_dtype=e8m0", "fp32, fp16 or bf16 with bits=1"),
        ("rotated:inner=(twobit)", "one of codebook, float8,.*got twobit"),
        ("rotated:inner=(sign:scale=none)", "got sign:scale=none"),
        ("rotated:inner=(rotated)", "got rotated:inner"),
        ("rotated:inner=(cast)", "got cast"),
        ("rotated:block_size=100", "one of 32, 64,.*got 100"),
        ("rotated:inner=(quantize:block_size=24)", "divisor of inner's 24, got 1024"),
        ("twobit:threshold=0", "1e-30 to 1e[+]30, got 0"),
        ("twobit:threshold=nan", "got nan"),
        ("microscaling:format=mxfp5", "mxfp6_e3m2.*got 'mxfp5'"),
        ("codebook:book=fp4", "nf4, dynamic8, got 'fp4'"),
        ("float8:format=e3m4", "e4m3, e5m2, got 'e3m4'"),
        ("qsgd:norm=l1", "l2, linf, got 'l1'"),
        ("qsgd:bits=1", "2 to 8, got 1"),
        ("natural:bits=1", "2 to 8, got 1"),
        ("sign:scale=both", "block, parameter, none, got 'both'"),
        ("quantize:bits=(identity)", "takes no compressor, got '[(]identity[)]'"),
        ("quantize:block_size=12", "got 12"),
        ("quantize:block_size=8200", "got 8200"),
        ("quantize:rounding=up", "got 'up'"),
        ("cast:dtype=fp8", "bf16, fp16, fp32, got 'fp8'"),
        ("wrapper:exact=yes", "True or False, got 'yes'"),
        ("wrapper:values=(quantize:bits=4", "unbalanced"),
        ("wrapper:values=quantize:bits=4)", "unbalanced"),
        ("wrapper:values=)(", "unbalanced"),
        ("wrapper:values=(nothing)", "unknown compressor 'nothing'"),
        ("wrapper:values=" + "(wrapper:values=" * 9 + ")" * 9, "more than 8"),
        ("cast:dtype=" + "(cast:dtype=" * 5000 + ")" * 5000, "more than 8"),
        ("quantize:bits=" + "9" * 5000, "number"),
    ],
)
def test_bad_strings(spec: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ck.compressor(spec)


@pytest.mark.parametrize("spec", [None, 4, b"quantize", ck.Quantize, ["quantize"]])
def test_other_types(spec: object) -> None:
    with pytest.raises(TypeError, match="string form"):
        ck.compressor(spec)  # type: ignore[arg-type]


def test_bad_arguments_name_both_values() -> None:
    with pytest.raises(ValueError, match=r"1 to 8, got 16"):
        ck.Quantize(bits=16)
    with pytest.raises(TypeError, match=r"bits must be an int, got 4\.0"):
        ck.Quantize(bits=4.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="block_size must be an int or None, got True"):
        ck.Quantize(block_size=True)
    with pytest.raises(TypeError, match="block_size must be an int, got None"):
        ck.Natural(block_size=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="symmetric must be a bool, got 1"):
        ck.Quantize(symmetric=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="threshold must be a number, got '1'"):
        ck.TwoBit("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inner must be a compressor, got 'sign'"):
        ck.Rotated("sign")  # type: ignore[arg-type]


def test_compressors_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ck.Quantize().bits = 4  # type: ignore[misc]


def test_registering_a_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'wrapper' is registered already"):
        registry.register(Wrapper)
