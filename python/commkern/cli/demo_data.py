"""Real text for the demo: by default the source code of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from commkern.cli.console import CliError

_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
_HELD_OUT_EVERY = 10
_RARE_SHARE = 1e-5
_MOST_SYMBOLS = 255
_MOST_CHARS = 50_000_000
_FEWEST_CHARS = 20_000

Tokens = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """Text as symbols. Symbol 0 stands for every character that is rare or unseen."""

    train: Tokens
    held_out: Tokens
    vocabulary: str
    source: str
    files: int

    @property
    def symbols(self) -> int:
        return len(self.vocabulary) + 1


def load_corpus(path: str | None) -> Corpus:
    """Read the text; every tenth file is held out (of one file, its last tenth)."""
    if path is None:
        source = "the standard library of the running Python"
        texts = list(_standard_library())
    else:
        source = path
        texts = list(_user_text(Path(path)))
    train, held_out = _split(texts)
    if len(train) < _FEWEST_CHARS or len(held_out) < _FEWEST_CHARS // 10:
        raise CliError(
            f"{source} holds {len(train)} characters of text for training and "
            f"{len(held_out)} held out; expected at least {_FEWEST_CHARS} and "
            f"{_FEWEST_CHARS // 10} (--text names other text)"
        )
    vocabulary = _vocabulary(train)
    return Corpus(
        _encode(train, vocabulary),
        _encode(held_out, vocabulary),
        vocabulary,
        source,
        len(texts),
    )


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    names = (p.relative_to(root) for p in root.rglob("*.py"))
    wanted = sorted(name for name in names if not _SKIPPED & set(name.parts[:-1]))
    yield from _read(root / name for name in wanted)


def _user_text(path: Path) -> Iterator[str]:
    if path.is_dir():
        yield from _read(p for p in sorted(path.rglob("*")) if p.is_file())
        return
    try:
        yield path.read_text(encoding="utf-8")[:_MOST_CHARS]
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"--text: cannot read {path}: {error}") from None


def _read(paths: Iterator[Path]) -> Iterator[str]:
    total = 0
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        total += len(text)
        if total > _MOST_CHARS:
            return
        yield text


def _split(texts: list[str]) -> tuple[str, str]:
    if len(texts) == 1:
        cut = len(texts[0]) * (_HELD_OUT_EVERY - 1) // _HELD_OUT_EVERY
        return texts[0][:cut], texts[0][cut:]
    every = min(_HELD_OUT_EVERY, len(texts))
    held_out = texts[every - 1 :: every]
    train = [t for i, t in enumerate(texts) if i % every != every - 1]
    return "\n".join(train), "\n".join(held_out)


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def _vocabulary(text: str) -> str:
    points, counts = np.unique(_code_points(text), return_counts=True)
    by_count = np.argsort(-counts, kind="stable")[:_MOST_SYMBOLS]
    common = by_count[counts[by_count] >= _RARE_SHARE * len(text)]
    return "".join(sorted(chr(points[i]) for i in common))


def _encode(text: str, vocabulary: str) -> Tokens:
    known = _code_points(vocabulary)
    points = _code_points(text)
    place = np.minimum(np.searchsorted(known, points), len(known) - 1)
    tokens = np.where(known[place] == points, place + 1, 0)
    return tokens.astype(np.uint8)
