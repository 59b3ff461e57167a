"""Ranks behind a slow link. Skipped where the kernel or the user does not allow it."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
import torch.distributed as dist

from commkern.benchmarks import link, network
from commkern.benchmarks.network import Link, message_ms, missing

needs_links = pytest.mark.skipif(bool(missing()), reason=missing() or "links work")


@pytest.mark.parametrize(
    ("mbit", "burst"), [(10, "32kb"), (100, "32kb"), (1000, "256kb"), (10000, "1mb")]
)
def test_burst(mbit, burst):
    assert Link(mbit).burst == burst
    assert Link(mbit).bytes_per_s == mbit * 125_000


def test_an_odd_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="even world size, got 3"):
        Link(100).run(None, 3, print)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("sys.platform", "darwin", "Linux's, this is darwin"),
        ("os.geteuid", lambda: 1000, "root, this is user 1000"),
        ("shutil.which", lambda _: None, "ip and tc"),
        ("_shape", lambda _: "tc qdisc add dev nothing root tbf", "no shaped veth"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, name, value, reason):
    if name == "_shape" and missing():
        pytest.skip(missing())
    monkeypatch.setattr(f"commkern.benchmarks.network.{name}", value)
    assert reason in missing.__wrapped__()


def test_a_failing_command_is_an_error_with_its_output():
    with pytest.raises(OSError, match="exit 3"):
        network._run("echo 'it broke' >&2; exit 3")


def inside(rank, world_size, nbytes):
    sums = torch.tensor([rank + 1.0])
    dist.all_reduce(sums)
    sent = message_ms(nbytes)
    return float(sums), sent, os.readlink("/proc/self/ns/net")


def outside(rank, world_size):
    return os.readlink("/proc/self/ns/net"), os.environ["GLOO_SOCKET_IFNAME"]


def ends(rank, world_size):
    if rank == 1:
        os._exit(1)
    dist.barrier()


def interfaces():
    listed = subprocess.run(["ip", "-o", "link"], capture_output=True, check=True)
    return listed.stdout.decode().count("ckwire")


@needs_links
def test_the_rate_holds_and_the_way_back(ranks):
    nbytes = 1_000_000
    results = Link(100).run(ranks, 2, inside, nbytes)
    assert [r[0] for r in results] == [3.0, 3.0]
    assert results[0][2] != results[1][2]
    # 80 ms at 100 Mbit/s, what fits into the bucket at once apart.
    least = (nbytes - 32_768) / Link(100).bytes_per_s
    assert results[0][1] == results[1][1] >= 0.98e3 * least
    here = os.readlink("/proc/self/ns/net")
    assert ranks.run(2, outside) == [(here, "lo")] * 2


@needs_links
def test_four_ranks_on_two_hosts(ranks):
    results = Link(1000).run(ranks, 4, inside, 1000)
    assert [r[0] for r in results] == [10.0] * 4
    hosts = [r[2] for r in results]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


@needs_links
def test_nothing_is_left_of_a_link_whose_ranks_died(ranks):
    with pytest.raises(RuntimeError):
        Link(100).run(ranks, 2, ends, timeout_s=30)
    assert interfaces() == 0


def test_ratios_and_figures_of_the_benchmark():
    plain = [{"step": 100.0, "backward": 50.0, "exposed": at} for at in (30, 20, 10)]
    ours = [
        {"step": step, "backward": 50.0, "exposed": 48.0, "last": 20.0, "others": 80.0}
        for step in (50.0, 90.0, 80.0)
    ]
    measured = link.Measured({link.PLAIN: plain, "identity": ours}, {})
    assert measured.ratios(link.PLAIN) == {}
    assert measured.ratios("identity") == {link.PLAIN: 0.8, "bar": 1.0}
    assert measured.figures(link.PLAIN) == {"backward ms": 50, "exposed ms": 20}
    assert measured.figures("identity")["others ms"] == 80


def test_waiting_for_another_rank_is_not_exposed():
    early = {"step": 90.0, "backward": 40.0, "exposed": 50.0}, [9.0, 30.0, 3.0]
    late = {"step": 91.0, "backward": 80.0, "exposed": 11.0}, [8.0, 5.0, 4.0]
    figures = link.of_ranks([early, late])
    assert figures.pop("step") == 91
    assert figures.pop("backward") == 80
    assert figures == {"exposed": 11, "last": 3, "others": 13}
    plain = {"step": 1.0, "backward": 1.0, "exposed": 1.0}, []
    assert "last" not in link.of_ranks([plain, plain])
