"""Which compressor a parameter has in a step, without any rank."""

from __future__ import annotations

import pytest
import torch

import commkern as ck
from commkern.policy import Policy

PARAMETERS = {
    "embed.weight": torch.zeros(100, 20),
    "layers.0.weight": torch.zeros(64, 64),
    "layers.0.bias": torch.zeros(64),
    "layers.1.weight": torch.zeros(64, 64),
    "head.weight": torch.zeros(8, 64),
}


def policy(compressor="quantize:bits=8", exempt=None, **settings):
    return Policy(PARAMETERS, compressor, exempt=exempt, **settings)


def coders(made, step=0):
    return {name: str(made.compressor(name, step)) for name in PARAMETERS}


def bits(made, step, name="layers.0.weight"):
    coder = made.compressor(name, step)
    return coder.bits if isinstance(coder, ck.Quantize) else "dense"


def test_default_exemption_is_small_or_vector():
    for shape in [(), (5000,), (1023, 1), (32, 32), (31, 33), (1, 1024), (8, 8, 16)]:
        p = torch.zeros(shape)
        assert ck.Exempt()("x", p) == ck.small_or_vector("x", p), shape
    made = policy(exempt=ck.Exempt())
    assert [n for n in PARAMETERS if made.is_exempt(n)] == [
        "layers.0.bias",
        "head.weight",
    ]


@pytest.mark.parametrize(
    ("exempt", "expected"),
    [
        (None, []),
        (ck.Exempt(0, 0), []),
        (ck.Exempt(2001, 0), ["embed.weight", "layers.0.bias", "head.weight"]),
        (ck.Exempt(0, 0, ["embed.*"]), ["embed.weight"]),
        (ck.Exempt(0, 0, ("*.bias", "head.*")), ["layers.0.bias", "head.weight"]),
        (
            ck.Exempt(0, 1, predicate=lambda name, p: p.shape[0] == 100),
            ["embed.weight", "layers.0.bias"],
        ),
        (lambda name, p: "1" in name, ["layers.1.weight"]),
    ],
)
def test_exemptions(exempt, expected):
    made = policy(exempt=exempt)
    assert [n for n in PARAMETERS if made.is_exempt(n)] == expected
    dense = [n for n, coder in coders(made).items() if coder == "identity"]
    assert dense == expected


def test_exempt_is_a_value():
    assert ck.Exempt(names=["a"]) == ck.Exempt(names=("a",))
    assert hash(ck.Exempt()) == hash(ck.Exempt(1024, 1))
    with pytest.raises(AttributeError):
        ck.Exempt().max_dim = 2


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"min_numel": -1}, ValueError, "min_numel.*-1"),
        ({"max_dim": 1.5}, ValueError, r"max_dim.*1\.5"),
        ({"max_dim": True}, ValueError, "max_dim.*True"),
        ({"names": "embed"}, TypeError, "names.*'embed'"),
        ({"names": [3]}, TypeError, "names.*3"),
        ({"predicate": 5}, TypeError, "predicate.*5"),
    ],
)
def test_exempt_refuses(fields, error, match):
    with pytest.raises(error, match=match):
        ck.Exempt(**fields)


def test_a_pattern_that_matches_nothing_is_refused_with_the_names():
    pattern = r"(?s)exempt.*'embeding\.\*'.*embed\.weight.*head\.weight"
    with pytest.raises(ValueError, match=pattern):
        policy(exempt=ck.Exempt(names=["embed.*", "embeding.*"]))
    with pytest.raises(ValueError, match=r"compressor.*'layer\.\*'.*layers\.0\.weight"):
        policy({"layer.*": "identity", "*": "sign"})
    many = {f"p{i}": torch.zeros(1) for i in range(100)}
    with pytest.raises(ValueError, match="p29, and 70 more"):
        Policy(many, "identity", exempt=ck.Exempt(names=["q"]))


def test_first_match_wins():
    rules = {
        "layers.1.*": ck.Quantize(bits=2),
        "layers.*": "quantize:bits=4",
        "head.*": "identity",
        "*": "quantize:bits=8",
    }
    for given in (rules, list(rules.items())):
        made = policy(given)
        got = {name: bits(made, 0, name) for name in PARAMETERS}
        assert list(got.values()) == [8, 4, 4, 2, "dense"]
        assert not made.codes("head.weight"), "never compressed: no residual"
        assert str(made.given).startswith("layers.1.*=quantize:bits=2")
        assert len(made.known) == 4


def test_a_callable_chooses():
    made = policy(lambda name, p: "sign" if p.dim() == 1 else ck.Quantize(bits=3))
    assert bits(made, 0) == 3
    assert coders(made)["layers.0.bias"].startswith("sign")


def test_one_compressor_stays_readable():
    assert policy("quantize:bits=4").given == ck.Quantize(bits=4)


def test_unmatched_parameters_are_named_unless_exempt():
    with pytest.raises(ValueError, match=r'embed\.weight, head\.weight.*"\*"'):
        policy({"layers.*": "sign"})
    only = policy({"layers.*": "sign"}, exempt=lambda name, p: "layers" not in name)
    assert coders(only)["embed.weight"] == "identity"


@pytest.mark.parametrize(
    "given",
    [5, ["sign"], [("*",)], [(3, "sign")], {"*": 4}, lambda name, p: None],
    ids=repr,
)
def test_no_choice_of_compressors(given):
    with pytest.raises(TypeError, match="compressor"):
        policy(given)


# --- over steps -----------------------------------------------------------------------


def test_start_and_dense_steps():
    made = policy(start_step=2, dense_every=3)
    got = [bits(made, step) for step in range(9)]
    assert got == ["dense", "dense", 8, 8, "dense", 8, 8, "dense", 8]
    assert [made.has_begun(s) for s in range(3)] == [False, False, True]
    assert {bits(policy(dense_every=1), step) for step in range(4)} == {"dense"}
    phases = [made.phase(step) for step in range(9)]
    assert phases[0] == phases[1] != phases[4] == phases[7]
    assert phases[2] == phases[3] == phases[8] != phases[4]


@pytest.mark.parametrize(
    ("course", "expected"),
    [
        (4, [4] * 5),
        (ck.Steps({0: 8, 2: 4, 3: 2}), [8, 8, 4, 2, 2]),
        ({3: 2, 0: 8}, [8, 8, 8, 2, 2]),
        ([(0, 8), (1, 3)], [8, 3, 3, 3, 3]),
        (ck.Exponential(8, 2, 4), [8, 6, 4, 3, 2]),  # 8, 5.66, 4, 2.83, 2
        (ck.Exponential(2, 8, 2), [2, 4, 8, 8, 8]),
        (lambda step: 8 - step, [8, 7, 6, 5, 4]),
        (lambda step: 2.5, [3] * 5),
    ],
    ids=repr,
)
def test_courses(course, expected):
    made = policy(schedule={"bits": course})
    assert [bits(made, step) for step in range(5)] == expected


def test_exponential_stays_at_its_end():
    ramp = ck.Exponential(0.5, 0.001, 1000)
    assert (ramp(0), ramp(1000), ramp(10**9)) == (0.5, 0.001, 0.001)
    assert ramp(500) == pytest.approx((0.5 * 0.001) ** 0.5, rel=1e-5)
    assert all(float(f"{ramp(s):.6g}") == ramp(s) for s in range(1000))


def test_a_schedule_applies_where_there_is_the_field():
    made = policy(
        {
            "embed.*": "rotated:inner=(quantize:bits=8),block_size=128",
            "head.*": "natural",
            "*": "quantize:bits=8",
        },
        schedule={"inner.bits": {0: 8, 5: 4}, "bits": {0: 8, 7: 2}},
    )
    assert made.compressor("embed.weight", 4).inner.bits == 8
    assert made.compressor("embed.weight", 5).inner.bits == 4
    assert [bits(made, step) for step in (5, 6, 7)] == [8, 8, 2]
    assert len({made.phase(step) for step in range(10)}) == 3


def test_two_fields_change_together():
    """Each alone would be refused on the way."""
    made = policy(
        "rotated:inner=(quantize:bits=4,block_size=1024),block_size=1024",
        schedule={
            "block_size": {0: 1024, 3: 32},
            "inner.block_size": {0: 1024, 3: 32},
        },
    )
    coder = made.compressor("layers.0.weight", 3)
    assert (coder.block_size, coder.inner.block_size) == (32, 32)


def test_numbers_of_floats_are_not_rounded():
    made = policy("twobit", schedule={"threshold": {0: 0.5, 1: 0.125}})
    assert made.compressor("layers.0.weight", 1).threshold == 0.125


@pytest.mark.parametrize(
    ("schedule", "match"),
    [
        ({"density": 0.1}, r"'density'.*bits, block_size"),
        ({"symmetric": 1}, "'symmetric'"),
        ({"inner.bits": 4}, r"'inner\.bits'"),
        ({"bits": 9}, r"bits=9 at step 0.*bits.*9"),
        ({"bits": {0: 8, 100: 0}}, r"bits=0 at step 100"),
        ({"bits": ck.Exponential(8, 16, 10)}, r"bits=8\.5.* at step 1:"),
        ({"bits": {5: 8}}, r"begin at step 0.*5"),
        ({"bits": [(0, 8), (0, 4)]}, "twice"),
        ({"bits": {0: "8"}}, "number.*'8'"),
        ({"bits": {-1: 8}}, "step.*-1"),
        ({"bits": float("nan")}, "number.*nan"),
        ({"bits": "falling"}, "number.*falling"),
        ({"bits": True}, "number.*True"),
    ],
    ids=repr,
)
def test_schedules_refused_at_construction(schedule, match):
    with pytest.raises(ValueError, match=match):
        policy(schedule=schedule)


def test_schedule_must_be_a_mapping():
    with pytest.raises(TypeError, match=r"schedule.*list"):
        policy(schedule=[("bits", 4)])


@pytest.mark.parametrize(
    ("course", "match"),
    [
        (lambda step: 8 if step < 3 else 9, "bits=9 at step 3"),
        (lambda step: 8 if step < 3 else None, "'bits' at step 3.*None"),
    ],
)
def test_callables_are_checked_at_use(course, match):
    made = policy(schedule={"bits": course})
    assert bits(made, 2) == 8
    with pytest.raises(ValueError, match=match):
        made.compressor("layers.0.weight", 3)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_dense_every_is_checked(value):
    with pytest.raises(ValueError, match="dense_every"):
        policy(dense_every=value)


def test_what_ranks_compare_names_the_settings():
    text = str(policy(dense_every=3, schedule={"bits": {0: 8, 9: 4}}))
    assert text == (
        "start_step=0 dense_every=3 schedule={bits=Steps(values=((0, 8), (9, 4)))}"
    )
    assert "callable" in str(policy(schedule={"bits": lambda step: 4}))


# --- feedback -------------------------------------------------------------------------


def test_feedback_strings():
    from commkern.feedback import feedback

    for text, value in [
        ("error", ck.ErrorFeedback()),
        ("error:decay=0.9", ck.ErrorFeedback(decay=0.9)),
        ("ef21", ck.EF21()),
    ]:
        assert feedback(text) == value
        assert str(value) == text
    assert feedback("error:decay=1") == ck.ErrorFeedback()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("huh", "ef21, error"),
        ("error:beta=1", "'beta'.*decay"),
        ("error:decay=x", "decay.*'x'"),
        ("error:decay=0", r"decay.*0\.0"),
        ("error:decay=1.5", r"decay.*1\.5"),
        ("error:decay=nan", "decay.*nan"),
        ("ef21:decay=1", "no parameters"),
    ],
)
def test_feedback_refuses(text, match):
    from commkern.feedback import feedback

    with pytest.raises(ValueError, match=match):
        feedback(text)
