"""``commkern bench`` runs the benchmarks of the package through pytest."""

import json

import pytest

from commkern.cli import bench, main


def test_benchmarks_are_found():
    assert bench.names() == ["all_reduce", "hook", "kernels", "link", "peers"]


def test_unknown_benchmark(capsys):
    assert main(["bench", "nothing"]) == 2
    assert "unknown benchmark 'nothing'; known: " in capsys.readouterr().err


def test_nothing_selected_is_an_error(capsys):
    assert main(["bench", "hook", "-k", "nothing_of_that_name"]) == 1
    assert "no results" in capsys.readouterr().err


@pytest.mark.parametrize("stdout", [False, True])
def test_results_are_those_of_pytest_benchmark(tmp_path, capsys, monkeypatch, stdout):
    monkeypatch.setenv("COMMKERN_BENCH_MIB", "1")
    path = tmp_path / "results.json"
    target = "-" if stdout else str(path)
    arguments = ["kernels", "-k", "uncast_add and baseline", "--json", target]
    assert main(["bench", *arguments]) == 0
    out = capsys.readouterr().out
    document = json.loads(out if stdout else path.read_text())
    (result,) = document["benchmarks"]
    assert result["extra_info"]["nbytes"] > 2**20
    assert result["extra_info"]["ratios"]["copy"] > 0
    assert stdout or "kernel[uncast_add bf16-baseline]" in out


def test_peers_are_timed_against_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMKERN_BENCH_MIB", "1")
    path = tmp_path / "results.json"
    arguments = ["peers", "-k", "dequantize and torch", "--json", str(path)]
    assert main(["bench", *arguments]) == 0
    (result,) = json.loads(path.read_text())["benchmarks"]
    assert result["name"] == "test_peer[dequantize 8-bit torch]"
    assert result["extra_info"]["ratios"]["peer"] > 0
