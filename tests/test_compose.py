"""Plans as data: who owns what, how many messages, how many bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from commkern.compose import Settings, compose
from commkern.compressors import compressor
from commkern.layout import Member, chunk_bounds, effective
from commkern.plan import Complete, Post
from commkern.wire.message import header_nbytes, parse_header

INT8, INT4 = compressor("quantize:bits=8"), compressor("quantize:bits=4")
IDENTITY = compressor("identity")


def plan_of(members, *, rank=0, world_size=2, dtype="float32", **settings):
    return compose(
        members, dtype, rank=rank, world_size=world_size, settings=Settings(**settings)
    )


def many_parameters(coder=INT8):
    """200 matrices and 300 vectors, the vectors exempt, in mixed order."""
    members, offset = [], 0
    for i in range(500):
        matrix = i % 5 < 2
        numel = 64 * 32 if matrix else 33
        used = coder if matrix else IDENTITY
        members.append(
            Member(f"p{i}", numel, offset, used, offset if matrix else None, i)
        )
        offset += numel
    return members


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_two_rounds_whatever_the_number_of_parameters(world_size):
    plan = plan_of(many_parameters(), world_size=world_size)
    posts = [step for step in plan.steps if isinstance(step, Post)]
    completes = [step for step in plan.steps if isinstance(step, Complete)]
    assert len(posts) == len(completes) == len(plan.exchanges) == 2
    for exchange in plan.exchanges:
        assert len(exchange.sends) == len(exchange.receives) == world_size - 1


def owned(plan):
    """(parameter, first element) -> owner, read off the plan's decompression."""
    owners = {}
    for step in plan.steps:
        if getattr(step, "name", "") not in ("dequantize", "uncast"):
            continue
        for row in step.fields["spans"]:
            place = int(row["parameter_id"]), int(row["begin"])
            owners[place] = int(row["length"])
    return owners


def test_ownership_is_a_function_of_the_parameter_alone():
    members = many_parameters()
    alone = {}
    for member in members[:20]:
        moved = Member(member.name, member.numel, 7, member.compressor, None, 0)
        alone |= owned(plan_of([moved], world_size=3))
    together = owned(plan_of(members, world_size=3))
    assert alone.items() <= together.items()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("numel", [0, 1, 5, 127, 128, 129, 1000, 100_003])
def test_chunks_cover_a_parameter_once_at_block_boundaries(world_size, numel):
    for rotation in (0, 1, 12345):
        bounds = sorted(
            chunk_bounds(numel, 128, world_size, rank, rotation)
            for rank in range(world_size)
        )
        pieces = [(a, b) for a, b in bounds if a < b]
        assert sum(b - a for a, b in pieces) == numel
        assert all(a % 128 == 0 for a, _ in pieces)
        assert all(b == c for (_, b), (c, _) in itertools.pairwise(pieces))


def test_small_parameters_are_spread_over_the_owners():
    members = [Member(f"bias{i}", 64, 64 * i, IDENTITY) for i in range(400)]
    plan = plan_of(members, world_size=4)
    sizes = [transfer.nbytes for transfer in plan.exchanges[0].sends]
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ("identity", 4_000_000),
        ("cast:dtype=fp16", 2_000_000),
        ("cast:dtype=bf16", 2_000_000),
        ("quantize:bits=8", 1_050_000),
        ("quantize:bits=4", 550_000),
    ],
)
def test_bytes_on_the_wire(spec, limit):
    """Of 1,000,000 fp32 elements at two ranks, for both passes together."""
    plan = plan_of([Member("w", 1_000_000, 0, compressor(spec))])
    headers = len(plan.exchanges) * (header_nbytes(1, 1) + 8)
    assert plan.bytes_sent <= limit + headers
    assert plan.bytes_dense == 4_000_000


def test_never_larger_than_plain():
    for numel in range(1, 40):
        for dtype in ("float32", "float16", "float64"):
            member = Member("w", numel, 0, INT8)
            used = effective(member, dtype).compressor
            itemsize = {"float32": 4, "float16": 2, "float64": 8}[dtype]
            assert used.body_nbytes(numel, dtype) <= numel * itemsize


def test_headers_describe_the_sections():
    members = many_parameters()
    plan = plan_of(members)
    template = next(s.template for s in plan.steps if hasattr(s, "template"))
    size = int.from_bytes(template[24:32], "little")
    header = parse_header(template.ljust(size, b"\0"))
    assert len(header.sections) == 2
    assert [s.parameter_count for s in header.sections] == [200, 300]
    assert [m.compressor for m in plan.members] == [INT8] * 200 + [IDENTITY] * 300
    assert not any(header.touched)


def test_printing_a_plan():
    text = str(plan_of([Member("w", 1000, 0, INT4)], rank=1))
    assert "plan of rank 1 of 2, float32" in text
    assert "quantize(" in text
    assert "bits=4" in text
    assert "seed=$seed" in text
    assert text.index("post round 0") < text.index("requantize_sum(")


def test_the_preamble_tells_settings_apart():
    member = Member("w", 1000, 0, INT8)
    variants = [
        plan_of([member]),
        plan_of([member], op="avg"),
        plan_of([member], seed=1),
        plan_of([member], feedback="error"),
        plan_of([Member("v", 1000, 0, INT8)]),
        plan_of([Member("w", 1001, 0, INT8)]),
        plan_of([Member("w", 1000, 0, INT4)]),
        plan_of([member], dtype="float64"),
        plan_of([member], world_size=3),
    ]
    assert len({plan.preamble for plan in variants}) == len(variants)


def test_names_with_equal_check_sums_are_refused():
    # CRC-32C is linear, so a collision can be made: four bytes undo any change.
    first, second = "parameter", collide("parameter", "another/")
    members = [Member(first, 10, 0, INT8), Member(second, 10, 10, INT8)]
    with pytest.raises(ValueError, match="rename"):
        plan_of(members)


def collide(name, prefix):
    """A string that starts with ``prefix`` and has the CRC-32C of ``name``."""
    from commkern.wire.crc import hash_text

    alphabet = "@ABCDEFGHIJKLMNO"  # 0x40 and four bits
    base = prefix + "@" * 32
    target = hash_text(name) ^ hash_text(base)
    rows = {}
    for place in range(32):
        for letter in (1, 2, 4, 8):
            text = list(base)
            text[len(prefix) + place] = alphabet[letter]
            change = hash_text("".join(text)) ^ hash_text(base)
            rows[place, letter] = change
    keys = solve(list(rows.items()), target)
    letters = np.zeros(32, dtype=int)
    for place, letter in keys:
        letters[place] ^= letter
    return prefix + "".join(alphabet[x] for x in letters)


def solve(rows, target):
    """The keys whose values XOR to ``target`` (Gaussian elimination over GF(2))."""
    basis = {}
    for key, row in rows:
        value, used = row, {key}
        while value and value.bit_length() in basis:
            other, keys = basis[value.bit_length()]
            value, used = value ^ other, used ^ keys
        if value:
            basis[value.bit_length()] = value, used
    chosen: set = set()
    while target:
        value, keys = basis[target.bit_length()]
        target, chosen = target ^ value, chosen ^ keys
    return chosen
