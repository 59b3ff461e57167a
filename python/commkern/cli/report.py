"""``commkern report``: tables of pytest-benchmark files, one file or two compared."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commkern.cli.console import CliError, load

_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


@dataclass(frozen=True)
class Entry:
    """One benchmark: seconds, and what its ``extra_info`` says.

    ``spread`` is the distance between the quartiles over the median. ``ratios`` are
    ours over another's time in the same run (``roof``, or a peer's name): below 1 means
    faster. ``nbytes`` are the bytes that one round moves, ``figures`` what else was
    measured, ``notes`` sentences about all of the group.
    """

    name: str
    group: str
    median: float
    spread: float
    rounds: int
    nbytes: int | None
    ratios: dict[str, float]
    figures: dict[str, float]
    notes: tuple[str, ...]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="print benchmark results, or compare two files",
        description=(
            "Read pytest-benchmark JSON (commkern bench --json PATH). One file: a "
            "table with ratios to the roof and to peers. Two files: old and new "
            "compared, with the noise."
        ),
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="one or two JSON files"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table of one file, or the comparison of two."""
    if len(arguments.files) > 2:
        raise CliError(f"expected one or two files, got {len(arguments.files)}")
    read = [read_entries(Path(name)) for name in arguments.files]
    if len(read) == 1:
        show(read[0])
    else:
        compare(*read)
    return 0


def read_entries(path: Path) -> list[Entry]:
    """The benchmarks of a file, in its order; CliError if it is not such a file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return [_entry(item) for item in document["benchmarks"]]
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CliError(f"{path} is not pytest-benchmark JSON: {error!r}") from None


def _entry(item: dict[str, Any]) -> Entry:
    stats, extra = item["stats"], item.get("extra_info") or {}
    median = float(stats["median"])
    return Entry(
        name=item["name"].removeprefix("test_"),
        group=item.get("group") or "",
        median=median,
        spread=float(stats["iqr"]) / median if median else 0.0,
        rounds=int(stats["rounds"]),
        nbytes=extra.get("nbytes"),
        ratios=_floats(extra.get("ratios")),
        figures=_floats(extra.get("figures")),
        notes=tuple(f"{k}: {v}" for k, v in (extra.get("notes") or {}).items()),
    )


def _floats(values: dict[str, Any] | None) -> dict[str, float]:
    return {str(name): float(value) for name, value in (values or {}).items()}


def show(entries: list[Entry]) -> None:
    """Print one table a group."""
    escape = load("rich.markup", "rich").escape
    console = load("rich.console", "rich").Console()
    for group in dict.fromkeys(entry.group for entry in entries):
        members = [entry for entry in entries if entry.group == group]
        peers = list(dict.fromkeys(peer for e in members for peer in e.ratios))
        figures = list(dict.fromkeys(name for e in members for name in e.figures))
        over = [escape("/ " + peer.replace(" ", "\n")) for peer in peers]
        named = [escape(name.replace(" ", "\n")) for name in figures]
        table = _table(["median", "spread", "GB/s", *over, *named], members)
        table.title = escape(group)
        for entry in members:
            cells = [_ratio(entry.ratios.get(peer)) for peer in peers]
            cells += [_figure(entry.figures.get(name)) for name in figures]
            rate = f"{entry.nbytes / entry.median / 1e9:.2f}" if entry.nbytes else "-"
            spread = f"{100 * entry.spread:.0f} %"
            table.add_row(escape(entry.name), _time(entry.median), spread, rate, *cells)
        console.print(table)
        for note in dict.fromkeys(note for e in members for note in e.notes):
            console.print(note, markup=False, highlight=False)
    console.print(
        "spread: quartile distance over the median. '/ x': our time over that of x in "
        "the same run, below 1 is faster.",
        style="dim",
        highlight=False,
    )


def compare(old: list[Entry], new: list[Entry]) -> None:
    """Print new over old for every benchmark that both files have."""
    escape = load("rich.markup", "rich").escape
    console = load("rich.console", "rich").Console()
    before = {(entry.group, entry.name): entry for entry in old}
    shared = [e for e in new if (e.group, e.name) in before]
    if not shared:
        raise CliError("the two files have no benchmark in common", 1)
    table = _table(["old", "new", "new / old", "noise", "verdict"], shared)
    for entry in shared:
        reference = before[entry.group, entry.name]
        ratio = entry.median / reference.median if reference.median else float("nan")
        noise = entry.spread + reference.spread
        table.add_row(
            escape(entry.name),
            _time(reference.median),
            _time(entry.median),
            f"{ratio:.3f}",
            f"± {100 * noise:.0f} %",
            verdict(ratio, noise),
        )
    console.print(table)
    console.print(
        f"noise: the sum of both spreads; {len(shared)} in common, "
        f"{len(old) - len(shared)} only in the old file, {len(new) - len(shared)} only "
        "in the new one. Two runs on one machine can differ by more than that.",
        style="dim",
        highlight=False,
    )


def _table(headings: list[str], entries: list[Entry]) -> Any:
    simple = load("rich.box", "rich").SIMPLE_HEAD
    table = load("rich.table", "rich").Table(
        box=simple, padding=(0, 1, 0, 0), title_justify="left"
    )
    longest = max(len(entry.name) for entry in entries)
    table.add_column("benchmark", overflow="fold", min_width=min(longest, 36))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def verdict(ratio: float, noise: float) -> str:
    """``same`` where the change is within the noise."""
    if not abs(ratio - 1) > noise:
        return "same"
    return "slower" if ratio > 1 else "faster"


def _ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _time(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
