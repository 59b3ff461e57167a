"""What the demo shows and writes: the table, the JSON and the picture."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commkern.cli.console import CliError, load

if TYPE_CHECKING:
    from commkern.cli.demo_data import Corpus
    from commkern.cli.demo_train import Result, Settings

_SMOOTHED_STEPS = 20
_HEADINGS = (
    "train\nloss",
    "held-out\nloss",
    "MB sent\n/step",
    "factor",
    "ms\n/step",
    "replicas\nequal",
)


@dataclass(frozen=True)
class Files:
    """Where the results go besides the terminal."""

    json: Path | None
    json_to_stdout: bool
    plot: Path | None


def show_setup(
    console: Any, corpus: Corpus, settings: list[Settings], world_size: int
) -> None:
    first = settings[0]
    console.print(
        f"Text: {corpus.source}, {corpus.files} files, "
        f"{len(corpus.train) / 1e6:.1f} M characters to train on and "
        f"{len(corpus.held_out) / 1e6:.1f} M held out, {corpus.symbols} symbols.\n"
        f"{len(settings)} runs of {first.steps} steps: {world_size} processes with one "
        f"thread and {first.batch_size} sequences each, seed {first.seed}.",
        highlight=False,
        markup=False,
    )


def show_table(console: Any, results: list[Result], world_size: int) -> None:
    simple = load("rich.box", "rich").SIMPLE_HEAD
    table = load("rich.table", "rich").Table(box=simple, padding=(0, 1, 0, 0))
    longest = max(len(result.compressor) for result in results)
    table.add_column("compressor", overflow="fold", min_width=min(longest, 24))
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result))
    console.print(table)
    console.print(
        "Losses are nats per character; train: mean of the last tenth of the steps.\n"
        "MB are sent by each rank; factor: plain over sent; ms: median on rank 0.\n"
        f"~ DDP's own all-reduce is not counted: 2(n-1)/n x gradient bytes, n = "
        f"{world_size}.\n"
        "Between processes of one machine a byte costs little: step time shows what\n"
        "compressing costs, the bytes sent show what a slow network would save.",
        highlight=False,
        style="dim",
    )


def _cells(result: Result) -> list[str]:
    factor = result.compression_factor
    return [
        load("rich.markup", "rich").escape(result.compressor),
        f"{result.train_loss:.4f}",
        f"{result.held_out_loss:.4f}",
        ("~" if _computed(result) else "") + f"{result.bytes_per_step / 1e6:.3f}",
        "-" if factor is None else f"{factor:.2f}x",
        f"{result.step_ms:.1f}",
        "yes" if result.replicas_equal else "NO",
    ]


def _computed(result: Result) -> bool:
    return result.compressor == "none"


def write_files(
    files: Files, results: list[Result], arguments: dict[str, Any], corpus: Corpus
) -> None:
    if files.json or files.json_to_stdout:
        text = json.dumps(as_json(results, arguments, corpus), indent=2)
        if files.json_to_stdout:
            print(text)
        else:
            _write(files.json, text + "\n")
    if files.plot:
        _plot(files.plot, results)


def as_json(
    results: list[Result], arguments: dict[str, Any], corpus: Corpus
) -> dict[str, Any]:
    settings = {k: v for k, v in arguments.items() if not callable(v)}
    text = {
        "source": corpus.source,
        "files": corpus.files,
        "train_characters": len(corpus.train),
        "held_out_characters": len(corpus.held_out),
        "symbols": corpus.symbols,
    }
    runs = [_run_as_json(result) for result in results]
    document: dict[str, Any] = _finite(
        {"settings": settings, "text": text, "runs": runs}
    )
    return document


def _run_as_json(result: Result) -> dict[str, Any]:
    return {
        "compressor": result.compressor,
        "train_loss": result.train_loss,
        "held_out_loss": result.held_out_loss,
        "bytes_sent_per_step_and_rank": result.bytes_per_step,
        "bytes_sent_are": "computed" if _computed(result) else "counted",
        "bytes_plain_per_step_and_rank": result.bytes_plain,
        "compression_factor": result.compression_factor,
        "step_ms_median": result.step_ms,
        "replicas_equal": result.replicas_equal,
        "parameters": result.parameters,
        "seconds": result.seconds,
        "stats": result.stats,
        "losses": result.losses,
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN and no Inf: null stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _write(path: Path | None, text: str) -> None:
    assert path is not None
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error}", 1) from None


def _plot(path: Path, results: list[Result]) -> None:
    load("matplotlib", "matplotlib").use("agg")
    pyplot = load("matplotlib.pyplot", "matplotlib")
    figure, (by_step, by_bytes) = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for result in results:
        losses = _smoothed(result.losses)
        steps = range(1, len(losses) + 1)
        by_step.plot(steps, losses, label=result.compressor)
        megabytes = [step * result.bytes_per_step / 1e6 for step in steps]
        by_bytes.plot(megabytes, losses, label=result.compressor)
    by_step.set_xlabel("step")
    by_step.set_ylabel(f"train loss (mean of {_SMOOTHED_STEPS} steps)")
    by_step.legend()
    by_bytes.set_xlabel("megabytes sent per rank")
    by_bytes.set_xscale("log")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error}", 1) from None
    pyplot.close(figure)


def _smoothed(losses: list[float]) -> list[float]:
    means = []
    for end in range(1, len(losses) + 1):
        window = losses[max(0, end - _SMOOTHED_STEPS) : end]
        means.append(sum(window) / len(window))
    return means
