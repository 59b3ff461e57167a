"""``commkern demo``: the data, short runs, and what it refuses."""

import json
import random

import numpy as np
import pytest
import torch

from commkern.cli import console, main
from commkern.cli.demo_data import Corpus, load_corpus
from commkern.cli.demo_model import CONTEXT, CharacterGPT
from commkern.cli.demo_train import Settings, train

WORDS = ["gradient", "bucket", "rank", "sum", "hook", "ring", "é"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of 40 000 characters; ÿ is rare, é is not."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    chooser = random.Random(0)
    words = " ".join(chooser.choice(WORDS) for _ in range(7000))
    path.write_text("ÿ" + words[:40_000].replace("ring", "ring\n"), encoding="utf-8")
    return path


def run(*arguments):
    return main(["demo", "--steps", "4", "--batch-size", "2", *map(str, arguments)])


# --- data -----------------------------------------------------------------------------


def test_symbols_round_trip(tmp_path):
    path = tmp_path / "text.txt"
    body = "abc\n" * 30_000
    path.write_text("Ω" + body)
    corpus = load_corpus(str(path))
    decoded = "".join("?" if t == 0 else corpus.vocabulary[t - 1] for t in corpus.train)
    assert decoded == "?" + body[: len(decoded) - 1]
    assert corpus.symbols == 5
    assert len(corpus.train) == 9 * (len(body) + 1) // 10


def test_files_are_held_out_whole(tmp_path):
    for index in range(20):
        (tmp_path / f"{index:02}.txt").write_text(chr(ord("a") + index) * 3000)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    corpus = load_corpus(str(tmp_path))
    assert corpus.files == 20
    # j and t are the tenth and the twentieth file; the model has never seen them.
    assert "j" not in corpus.vocabulary
    assert np.count_nonzero(corpus.held_out == 0) == len(corpus.held_out) - 1
    assert len(corpus.held_out) == 6001


def test_the_standard_library_is_the_same_text_every_time():
    first, second = load_corpus(None), load_corpus(None)
    assert np.array_equal(first.train, second.train)
    assert len(first.train) > 2_000_000
    assert set("abcdef 0123():\n") <= set(first.vocabulary)


def test_the_model_has_about_0_9_million_parameters():
    count = sum(p.numel() for p in CharacterGPT(100).parameters())
    assert 850_000 < count < 950_000


def test_the_model_does_not_look_ahead():
    torch.manual_seed(0)
    model = CharacterGPT(10)
    ids = torch.randint(0, 10, (1, CONTEXT))
    changed = ids.clone()
    changed[0, 40] = (ids[0, 40] + 1) % 10
    same = (model(ids) == model(changed)).all(dim=2)[0]
    assert same[:40].all()
    assert not same[40]


# --- training -------------------------------------------------------------------------


def settings(compressor, steps=3, optimizer="adamw"):
    return Settings(compressor, steps, 2, optimizer, 2e-3, 0, "error")


def tiny_corpus():
    tokens = np.random.default_rng(0).integers(1, 9, 5000).astype(np.uint8)
    return Corpus(tokens, tokens[:1000], "abcdefgh", "random", 1)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("compressor", ["none", "identity", "quantize:bits=4"])
def test_ranks_agree(ranks, compressor, optimizer):
    chosen = settings(compressor, optimizer=optimizer)
    results = ranks.run(2, train, chosen, tiny_corpus())
    assert results[0].replicas_equal
    assert results[0].losses == results[1].losses
    assert results[0].held_out_loss == results[1].held_out_loss
    assert len(results[0].losses) == 3


def test_identity_is_plain_ddp(ranks):
    plain, identity = (
        ranks.run(2, train, settings(c), tiny_corpus())[0] for c in ("none", "identity")
    )
    assert plain.losses == identity.losses
    assert plain.held_out_loss == identity.held_out_loss


def test_the_sent_bytes_are_those_of_the_compressor(ranks):
    plain, half = (
        ranks.run(2, train, settings(c), tiny_corpus())[0] for c in ("none", "cast")
    )
    assert plain.bytes_per_step == plain.bytes_plain
    assert 1.9 < half.compression_factor < 2.0


# --- the command ----------------------------------------------------------------------


def test_json_and_plot(tmp_path, text, capsys):
    plot, path = tmp_path / "demo.png", tmp_path / "demo.json"
    names = ["none", "quantize:bits=8"]
    arguments = ["--compressors", *names, "--text", text, "--plot", plot]
    assert run(*arguments, "--json", path) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    document = json.loads(path.read_text())
    runs = document["runs"]
    assert [r["compressor"] for r in runs] == names
    assert [len(r["losses"]) for r in runs] == [4, 4]
    assert all(r["replicas_equal"] for r in runs)
    assert [r["bytes_sent_are"] for r in runs] == ["computed", "counted"]
    assert document["settings"]["steps"] == 4
    out = capsys.readouterr().out
    assert "step 4/4" in out
    for name in names:
        assert name in out


def test_json_alone_on_stdout(text, capsys):
    assert run("--compressors", "none", "--text", text, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["runs"][0]["compressor"] == "none"
    assert "held-out" in captured.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "expected an integer from 1 to 1000000, got '0'"),
        (["--world-size", "x"], "expected an integer from 1 to 64, got 'x'"),
        (["--lr", "-1"], "expected a number above 0, got '-1'"),
        (["--lr", "nan"], "expected a number above 0, got 'nan'"),
        (["--compressors", "zip"], "unknown compressor 'zip'; known: "),
        (["--compressors", "quantize:bits=9"], "got 9"),
        (["--feedback", "nonsense"], "nonsense"),
        (["--text", "/nonexistent"], "cannot read /nonexistent"),
        (["--json", "/nonexistent/x"], "the directory of /nonexistent/x does not"),
        (["--plot", "/"], "is a directory"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_values_give_one_line(arguments, expected, capsys):
    try:
        code = main(["demo", *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


def test_too_little_text(tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_text("short")
    assert run("--text", path) == 2
    assert "expected at least 20000 and 2000" in capsys.readouterr().err


def test_a_missing_dependency_is_named_with_its_cure(monkeypatch, capsys):
    def missing(module):
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(console.importlib, "import_module", missing)
    assert main(["demo"]) == 1
    err = capsys.readouterr().err
    assert "pip install 'commkern[cli]'" in err
    assert err.count("\n") == 1


def test_an_interrupt_ends_quietly(monkeypatch, capsys):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("commkern.cli.demo._train_all", interrupted)
    assert main(["demo", "--compressors", "none"]) == 130
    assert "interrupted" in capsys.readouterr().err
