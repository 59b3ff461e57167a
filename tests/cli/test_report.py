"""``commkern report`` on files of pytest-benchmark's form."""

import json

import pytest

from commkern.cli import main, report


def write(path, medians, **extra):
    benchmarks = [
        {
            "name": name,
            "group": "kernels",
            "extra_info": extra,
            "stats": {"median": median, "iqr": median / 50, "rounds": 5},
        }
        for name, median in medians.items()
    ]
    path.write_text(json.dumps({"benchmarks": benchmarks}))
    return str(path)


def test_one_file(tmp_path, capsys):
    ratios = {"roof": 1.25, "torch": 0.5, "other": 0.0321}
    extra = {"nbytes": 4_000_000, "ratios": ratios, "figures": {"exposed ms": 17.25}}
    extra["notes"] = {"link": "12 MiB [one way]"}
    path = write(tmp_path / "a.json", {"x[a]": 2e-3}, **extra)
    assert main(["report", path]) == 0
    out = capsys.readouterr().out
    for text in (
        "kernels",
        "x[a]",
        "/ roof",
        "/ torch",
        "2 ms",
        "2 %",
        "2.00",
        "1.25",
        "0.50",
        "0.032",
        "exposed",
        "17.25",
        "link: 12 MiB [one way]",
    ):
        assert text in out


def test_two_files(tmp_path, capsys):
    old = write(tmp_path / "a.json", {"x": 1e-3, "y": 1e-3, "z": 1e-3, "gone": 1e-3})
    new = write(tmp_path / "b.json", {"x": 2e-3, "y": 1.01e-3, "z": 0.5e-3})
    assert main(["report", old, new]) == 0
    out = capsys.readouterr().out
    verdicts = [line.split()[-1] for line in out.splitlines() if "±" in line]
    assert verdicts == ["slower", "same", "faster"]
    assert "3 in common, 1 only in the old file" in out


@pytest.mark.parametrize(
    ("ratio", "noise", "expected"),
    [(1.04, 0.05, "same"), (1.06, 0.05, "slower"), (0.94, 0.05, "faster")],
)
def test_verdict(ratio, noise, expected):
    assert report.verdict(ratio, noise) == expected


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"benchmarks": [{}]}', "\x00"])
def test_other_files_are_refused_in_one_line(tmp_path, capsys, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["report", str(path)]) == 2
    err = capsys.readouterr().err
    assert "is not pytest-benchmark JSON" in err
    assert err.count("\n") == 1


def test_missing_file(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_files_without_a_common_benchmark(tmp_path, capsys):
    old = write(tmp_path / "a.json", {"x": 1e-3})
    new = write(tmp_path / "b.json", {"y": 1e-3})
    assert main(["report", old, new]) == 1
    assert "no benchmark in common" in capsys.readouterr().err
