"""The command line: ``commkern doctor | demo | bench | report``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from commkern.cli import bench, demo, doctor, report
from commkern.cli.console import CliError


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="commkern",
        description="Communication kernels for distributed training.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (doctor, demo, bench, report):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for wrong values, 1 for failures."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except CliError as error:
        print(f"commkern {arguments.command}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"commkern {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return code
