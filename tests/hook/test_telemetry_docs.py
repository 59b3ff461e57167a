"""docs/telemetry.md lists every figure of `stats`, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.hook.models import make, train

import commkern as ck

PAGE = Path(__file__).parents[2] / "docs/telemetry.md"


def figures(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=8", sample_every=1)
    before = state.stats()
    train(ddp, rank, range(2))
    return before, state.stats()


def flat(stats):
    nested = {"total": stats["total"], "sampled": stats["sampled"] or {}}
    keys = [f"{outer}.{key}" for outer, inner in nested.items() for key in inner]
    return [*stats, *keys]


def test_the_tables_list_what_there_is(ranks):
    ((before, after),) = ranks.run(1, figures)
    text = PAGE.read_text(encoding="utf-8")
    tables, _ = text.split("## Profiles")
    rows = re.findall(r"^\| `([\w.]+)` \|", tables, flags=re.MULTILINE)
    assert sorted(rows) == sorted(flat(after))
    assert before.keys() == after.keys()


def test_times_and_bytes_have_their_units(ranks):
    ((_, after),) = ranks.run(1, figures)
    text = PAGE.read_text(encoding="utf-8")
    for key in flat(after):
        (unit,) = re.findall(
            rf"^\| `{re.escape(key)}` \| (.*?) ?\|", text, re.MULTILINE
        )
        assert (unit == "ms") == key.endswith("_ms"), key
        is_bytes = "bytes_" in key or key.endswith("nbytes")
        assert (unit == "bytes") == is_bytes, key


def test_ranges_are_those_of_the_library():
    from commkern import reducer

    text = PAGE.read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(commkern::\w+)`", text, re.MULTILINE))
    source = Path(reducer.__file__).read_text(encoding="utf-8")
    assert listed == set(re.findall(r'"(commkern::\w+)"', source))
