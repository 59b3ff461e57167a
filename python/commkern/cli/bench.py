"""``commkern bench``: run the benchmarks of the installed package through pytest."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from commkern.cli import report
from commkern.cli.console import CliError, load, writable

_STDERR = 2
_SETTINGS = """\
[pytest]
addopts = --import-mode=importlib -p no:cacheprovider
filterwarnings =
    error
    ignore:Not saving anything
markers =
    timeout: of pytest-timeout, which need not be installed
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="run the benchmark suite",
        description=(
            "Run benchmarks (each checks its answer first) and print their table. The "
            "JSON is pytest-benchmark's; commkern report reads it."
        ),
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of: {', '.join(names())}"
    )
    parser.add_argument(
        "-k", dest="expression", metavar="EXPR", help="pytest's -k: only what matches"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="PATH",
        help="write the results as JSON; - or nothing: to stdout",
    )
    parser.set_defaults(run=run)


def directory() -> Path:
    """Where the benchmark files are."""
    return Path(__file__).parent.parent / "benchmarks"


def names() -> list[str]:
    """The benchmark files by name: those that define tests."""
    return sorted(
        path.stem
        for path in directory().glob("*.py")
        if "\ndef test_" in path.read_text(encoding="utf-8")
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the files and show the table, or JSON on stdout; pytest's exit code."""
    for package in ("pytest", "pytest_benchmark"):
        load(package, package.replace("_", "-"), "bench")
    target = writable(arguments.json, "--json")
    wanted = arguments.names or names()
    unknown = [name for name in wanted if name not in names()]
    if unknown:
        raise CliError(f"unknown benchmark {unknown[0]!r}; known: {', '.join(names())}")
    with tempfile.TemporaryDirectory(prefix="commkern-bench-") as scratch:
        settings = Path(scratch) / "pytest.ini"
        settings.write_text(_SETTINGS, encoding="utf-8")
        results = Path(scratch) / "results.json"
        code = _pytest(wanted, settings, results, arguments.expression)
        if not results.is_file() or not results.stat().st_size:
            raise CliError(f"no results: pytest ended with exit code {code}", 1)
        text = results.read_text(encoding="utf-8")
        if target:
            target.write_text(text, encoding="utf-8")
        if arguments.json == "-":
            print(text)
        else:
            report.show(report.read_entries(results))
    return 1 if code else 0


def _pytest(
    wanted: list[str], settings: Path, results: Path, expression: str | None
) -> int:
    """Run pytest in a process of its own, its output on our stderr."""
    files = [str(directory() / f"{name}.py") for name in wanted]
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(settings)]
    command += ["--rootdir", str(directory()), f"--benchmark-json={results}"]
    command += ["--benchmark-disable-gc", "--benchmark-quiet", *files]
    if expression:
        command += ["-k", expression]
    return subprocess.run(command, stdout=_STDERR, check=False).returncode
