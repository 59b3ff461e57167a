"""What the commands share: errors, values from the command line, files to write."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


class CliError(Exception):
    """Ends the command with one line on stderr."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def load(module: str, package: str, extra: str = "cli") -> Any:
    """Import an optional dependency, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CliError(
            f"{package} is not available ({error}): pip install 'commkern[{extra}]'", 1
        ) from None


def integer(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: an integer from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"expected an integer from {low} to {high}, got {text!r}"
            )
        return value

    return parse


def positive_number(text: str) -> float:
    """An argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def writable(path: str | None, option: str) -> Path | None:
    """Check before the work begins that its result can be written."""
    if path is None or path == "-":
        return None
    target = Path(path)
    if target.is_dir():
        raise CliError(f"{option}: {path} is a directory, expected a file")
    if not target.absolute().parent.is_dir():
        raise CliError(f"{option}: the directory of {path} does not exist")
    return target
