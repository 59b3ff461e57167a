"""The headers that plans send are valid messages of this format."""

from __future__ import annotations

import dataclasses

import pytest

import commkern as ck
from commkern.compose import Settings, compose
from commkern.layout import Member
from commkern.plan import ReadHeader, WriteHeader
from commkern.wire import hash_text, validate
from commkern.wire.preamble import difference, unpack


def members() -> list[Member]:
    spec = [("w", 1000, "quantize:bits=4"), ("b", 3, "quantize:bits=4")]
    spec += [("v", 77, "cast"), ("s", 1, "identity"), ("e", 0, "quantize")]
    listed, offset = [], 0
    for name, numel, coder in spec:
        listed.append(Member(name, numel, offset, ck.compressor(coder)))
        offset += numel
    return listed


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_headers_of_plans_are_valid(world_size: int, dtype: str) -> None:
    for rank in range(world_size):
        plan = compose(
            members(), dtype, rank=rank, world_size=world_size, settings=Settings()
        )
        steps = [s for s in plan.steps if isinstance(s, (WriteHeader, ReadHeader))]
        assert steps
        for step in steps:
            zeros = bytes(step.message.nbytes - len(step.template))
            header = validate(step.template + zeros)
            assert len(header.touched) == 5
            assert header.sections[0].parameter_count >= 1
        preamble = unpack(plan.preamble)
        assert preamble.world_size == world_size
        texts = plan.description
        assert preamble.names == hash_text(texts["parameter names"]) != 0
        assert preamble.compressor == hash_text(texts["compressor"])


def test_preambles_name_what_differs_between_plans() -> None:
    def preamble(changed: list[Member], dtype: str = "float32", **settings) -> bytes:
        options = Settings(**settings)
        made = compose(changed, dtype, rank=0, world_size=2, settings=options)
        return made.preamble

    def changed(**fields: object) -> list[Member]:
        first, *rest = members()
        return [dataclasses.replace(first, **fields), *rest]

    mine = preamble(members())
    theirs = {
        "settings": preamble(members(), op="avg"),
        "compressor": preamble(changed(compressor=ck.Quantize(bits=8))),
        "parameter names": preamble(changed(name="x")),
        "shapes": preamble(changed(numel=999)),
    }
    for field, received in theirs.items():
        found = difference(mine, received)
        assert found is not None
        assert found.field == field
    # The compressors in use follow from the dtype, so they are kept out of this one.
    dense = [Member("w", 1000, 0, ck.Identity())]
    found = difference(preamble(dense), preamble(dense, "bfloat16"))
    assert found is not None
    assert found.field == "dtypes"
