"""``commkern demo``: train a small language model under several compressors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

from commkern.cli import demo_report
from commkern.cli.console import CliError, integer, load, positive_number, writable

DEFAULT_COMPRESSORS = ["none", "cast:dtype=bf16", "quantize:bits=8", "quantize:bits=4"]
LEARNING_RATES = {"adamw": 2e-3, "sgd": 0.1}
_GROUP_TIMEOUT_S = 120.0
_PLAIN_LINES = 6


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small GPT with several compressors and compare",
        description=(
            "Train a character-level GPT of about 0.9 million parameters on real text "
            "with DistributedDataParallel over gloo, once per compressor with the same "
            "seed and data, and compare loss, bytes sent and time."
        ),
    )
    add = parser.add_argument
    add("--compressors", nargs="+", default=DEFAULT_COMPRESSORS, metavar="C",
        help="strings like quantize:bits=4; none: DDP without a hook; all: every "
        f"compressor there is (default: {' '.join(DEFAULT_COMPRESSORS)})")  # fmt: skip
    add("--steps", type=integer(1, 10**6), default=600, metavar="N",
        help="training steps per compressor (default: %(default)s)")  # fmt: skip
    add("--world-size", type=integer(1, 64), default=2, metavar="N",
        help="processes, each with one thread (default: %(default)s)")  # fmt: skip
    add("--seed", type=integer(0, 2**63 - 1), default=0, metavar="N")
    add("--batch-size", type=integer(1, 4096), default=8, metavar="N",
        help="sequences per rank and step (default: %(default)s)")  # fmt: skip
    add("--text", metavar="PATH",
        help="a file or a directory of UTF-8 text (default: Python's own standard "
        "library)")  # fmt: skip
    add("--optimizer", choices=list(LEARNING_RATES), default="adamw",
        help="adamw, or sgd with momentum 0.9 (default: %(default)s)")  # fmt: skip
    add("--lr", type=positive_number, metavar="X",
        help="learning rate (default: the optimizer's, "
        f"{LEARNING_RATES})")  # fmt: skip
    add("--feedback", default="error", metavar="F",
        help="error feedback of the hook: error, none, or a string form "
        "(default: %(default)s)")  # fmt: skip
    add("--json", nargs="?", const="-", metavar="PATH",
        help="write the results as JSON; - or nothing: to stdout")  # fmt: skip
    add("--plot", metavar="PATH",
        help="write a PNG: loss by step, loss by megabytes sent")  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check everything that can be checked, train, and show what came out."""
    rich_console = load("rich.console", "rich")
    if arguments.plot:
        load("matplotlib", "matplotlib")
    files = demo_report.Files(
        json=writable(arguments.json, "--json"),
        json_to_stdout=arguments.json == "-",
        plot=writable(arguments.plot, "--plot"),
    )
    settings = _settings(arguments)
    console = rich_console.Console(stderr=files.json_to_stdout)
    from commkern.cli.demo_data import load_corpus

    corpus = load_corpus(arguments.text)
    demo_report.show_setup(console, corpus, settings, arguments.world_size)
    results = _train_all(console, settings, corpus, arguments.world_size)
    demo_report.show_table(console, results, arguments.world_size)
    demo_report.write_files(files, results, vars(arguments), corpus)
    unequal = [r.compressor for r in results if not r.replicas_equal]
    if unequal:
        raise CliError(f"replicas differ after training: {', '.join(unequal)}", 1)
    return 0


def _settings(arguments: argparse.Namespace) -> list[Any]:
    from commkern.cli.demo_train import Settings
    from commkern.feedback import feedback as read_feedback

    feedback = None if arguments.feedback == "none" else arguments.feedback
    try:
        read_feedback(feedback)
    except (ValueError, TypeError) as error:
        raise CliError(f"--feedback: {error}") from None
    return [
        Settings(
            compressor=name,
            steps=arguments.steps,
            batch_size=arguments.batch_size,
            optimizer=arguments.optimizer,
            learning_rate=arguments.lr or LEARNING_RATES[arguments.optimizer],
            seed=arguments.seed,
            feedback=feedback,
        )
        for name in _compressors(arguments.compressors)
    ]


def _compressors(names: list[str]) -> list[str]:
    import commkern as ck

    listed: list[str] = []
    for name in names:
        listed += ck.compressors() if name == "all" else [name]
    try:
        for name in listed:
            if name != "none":
                ck.compressor(name)
    except (ValueError, TypeError) as error:
        raise CliError(f"--compressors: {error}") from None
    return list(dict.fromkeys(listed))


def _train_all(
    console: Any, settings: list[Any], corpus: Any, world_size: int
) -> list[Any]:
    from commkern.cli.demo_train import train
    from commkern.rank_pool import RankPool

    results = []
    with RankPool() as pool:
        for one in settings:
            with _progress(console, one) as update:
                answers = pool.run(
                    world_size,
                    train,
                    one,
                    corpus,
                    timeout_s=None,
                    group_timeout_s=_GROUP_TIMEOUT_S,
                    on_message=update,
                )
            results.append(answers[0])
    return results


Update = Callable[[int, tuple[int, float, float]], None]


def _progress(console: Any, settings: Any) -> AbstractContextManager[Update]:
    """Gives the function that takes rank 0's (step, loss, step time in ms)."""
    if console.is_terminal:
        return _bar(console, settings)
    return _lines(settings, sys.stderr if console.stderr else sys.stdout)


@contextmanager
def _lines(settings: Any, file: TextIO) -> Iterator[Update]:
    """Progress where there is no terminal: a few plain lines."""
    shown = 0

    def update(_rank: int, message: tuple[int, float, float]) -> None:
        nonlocal shown
        step, loss, step_ms = message
        due = step * _PLAIN_LINES // settings.steps
        if due > shown:
            shown = due
            print(
                f"{settings.compressor}: step {step}/{settings.steps}, "
                f"loss {loss:.3f}, {step_ms:.0f} ms a step",
                file=file,
                flush=True,
            )

    yield update


@contextmanager
def _bar(console: Any, settings: Any) -> Iterator[Update]:
    rich = load("rich.progress", "rich")
    bar = rich.Progress(
        rich.TextColumn("{task.description:24}"),
        rich.BarColumn(),
        rich.TextColumn("{task.completed}/{task.total}"),
        rich.TextColumn("{task.fields[figures]}"),
        rich.TimeRemainingColumn(),
        console=console,
    )
    task = bar.add_task(settings.compressor, total=settings.steps, figures="starting")

    def update(_rank: int, message: tuple[int, float, float]) -> None:
        step, loss, step_ms = message
        figures = f"loss {loss:.3f}  {step_ms:3.0f} ms"
        bar.update(task, completed=step, figures=figures)

    with bar:
        yield update
