"""What the benchmarks of kernels and peers call and check, on few elements."""

import sys

import pytest
import torch

from commkern import backend, kernels, reference
from commkern.benchmarks import peers
from commkern.benchmarks.cases import CHECKED, FORMS, Case, Data, cases, check
from commkern.benchmarks.one_thread import one_thread, time_against
from commkern.compressors import compressor
from commkern.compressors.block import BlockCoder

ELEMENTS = 3 * CHECKED
BLOCK_CODERS = [
    form for form, text in FORMS.items() if isinstance(compressor(text), BlockCoder)
]


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_a_case_agrees_with_the_reference(case):
    check(case, Data.of(case.form, ELEMENTS))


def test_cases_have_names_of_their_own():
    names = [str(case) for case in cases()]
    assert len(set(names)) == len(names)
    assert "quantize 4-bit stochastic feedback" in names


@pytest.mark.parametrize("kernel", ["quantize", "dequantize_add"])
def test_another_answer_is_an_error(monkeypatch, kernel):
    right = getattr(reference, kernel)

    def wrong(**fields):
        right(**fields)
        if "output" in fields:
            fields["output"][-1] += 1
        else:
            fields["payload"][-1] ^= 1

    wrong.fields = right.fields
    monkeypatch.setattr(reference, kernel, wrong)
    with pytest.raises(AssertionError, match=f"{kernel} 4-bit: results differ"):
        check(Case(kernel, "4-bit"), Data.of("4-bit", ELEMENTS))


def test_an_answer_outside_the_body_is_an_error(monkeypatch):
    def wrong(**fields):
        fields["input"][-1] = 0

    monkeypatch.setattr(kernels, "quantize", wrong, raising=False)
    data = Data("8-bit", 0, *both(Data.of("8-bit", ELEMENTS)))
    with pytest.raises(AssertionError, match="quantize 8-bit: results differ"):
        check(Case("quantize", "8-bit"), data)


def both(data):
    return [array.copy() for array in data.dense], data.coded


@pytest.mark.parametrize("form", BLOCK_CODERS)
def test_bytes_moved_are_those_of_the_format(form):
    data = Data.of(form, ELEMENTS)
    coded = compressor(FORMS[form]).block_format().body_nbytes(ELEMENTS, "float32")
    assert data.call(Case("quantize", form)).nbytes == 4 * ELEMENTS + coded
    added = data.call(Case("dequantize_add", form)).nbytes
    assert added == 8 * ELEMENTS + coded
    summed = data.call(Case("requantize_sum", form, "feedback")).nbytes
    assert summed == 8 * ELEMENTS + 3 * coded


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("block_exponents", "fixed16"), 4 + 1 / 256),
        (Case("fixed_quantize", "fixed16"), 4 + 2 + 1 / 256),
        (Case("fixed_sum", "fixed16"), 3 * 2),
        (Case("fixed_dequantize_add", "fixed16"), 8 + 2 + 1 / 256),
        (Case("recast_sum", "bf16", "feedback"), 8 + 3 * 2),
        (Case("hadamard", rotation=32), 8),
    ],
    ids=str,
)
def test_bytes_moved_by_an_element(case, expected):
    assert Data.of(case.form, ELEMENTS).call(case).nbytes == expected * ELEMENTS


def test_turns_and_ratio():
    turns = []
    seconds, ratio = time_against(
        lambda: turns.append("ours"), lambda: turns.append("other"), rounds=3
    )
    assert len(seconds) == 3
    assert ratio > 0
    assert turns == ["other", *["ours", "other"] * 5]


def test_one_thread_is_for_a_while():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with one_thread("baseline"):
        assert torch.get_num_threads() == 1
        assert backend.core().isa() == "baseline"
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


# --- peers ----------------------------------------------------------------------------


class Copier:
    """A peer whose decoded values are off by ``off``."""

    off = 0.0

    def __init__(self, values, bits, form):
        self.values, self.bits = values, bits

    def encode(self):
        return "encoded"

    def decode(self):
        return self.values + self.off

    def decode_add(self):
        return "added"


VALUES = torch.linspace(-1, 1, 1000)


@pytest.mark.parametrize(("form", "bits"), [("8-bit", 8), ("4-bit", 4), ("nf4", 4)])
def test_a_peers_call(form, bits):
    call = peers._checked(peers.Pair("quantize", form, Copier), VALUES)
    assert call.__self__.bits == bits
    assert call() == "encoded"
    added = peers._checked(peers.Pair("dequantize_add", form, Copier), VALUES)
    assert added() == "added"


@pytest.mark.parametrize("off", [0.005, float("nan")])
def test_a_peer_whose_values_are_off(off):
    peer = type("Off", (Copier,), {"off": off})
    with pytest.raises(AssertionError, match=r"quantize 8-bit off: values are off by"):
        peers._checked(peers.Pair("quantize", "8-bit", peer), VALUES)


@pytest.mark.parametrize("peer", [peers.BitsAndBytes, peers.Piquant])
def test_a_peer_that_is_missing_is_skipped(monkeypatch, peer):
    for name in ("bitsandbytes", "bitsandbytes.functional", "piquant"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(pytest.skip.Exception, match=r"bitsandbytes|piquant"):
        peer(VALUES, 8, "8-bit")
