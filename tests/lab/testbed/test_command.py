"""`moesaic testbed`: a command per rank, its exit code, the torchrun line, and what the machine can
do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import moesaic_testbed as testbed
from moesaic.cli.main import main
from moesaic_testbed.command import exit_code, torchrun_line


def test_a_command_runs_once_per_rank(cluster_launcher, capfd):
    flags = [
        "--nodes",
        "2",
        "--ranks-per-node",
        "2",
        "--inter",
        "300mbit",
        "1gbit",
        "--intra",
        "400mbit",
        "--threads",
        "3",
    ]
    script = (
        "tc class show dev eth0 > /dev/null; echo $RANK $LOCAL_RANK $GROUP_RANK "
        "$MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS"
    )
    assert main(["testbed", "run", *flags, "--", "sh", "-c", script]) == 0
    out, err = capfd.readouterr()
    lines = sorted(out.splitlines())
    assert lines == [f"{rank} {rank % 2} {rank // 2} 10.64.0.2:29500 3" for rank in range(4)]
    assert err == (
        "on a real cluster, on every node: torchrun --nnodes 2 --nproc-per-node 2 --node-rank "
        f"<0..1> --master-addr <node 0> --master-port 29500 --no-python sh -c '{script}'\n"
    )


def test_flags_reach_the_bed(monkeypatch):
    beds = []

    def opened(self, bed):
        beds.append(bed)
        raise KeyboardInterrupt

    monkeypatch.setattr(testbed.Launcher, "open", opened)
    flags = ["--nodes", "3", "--ranks-per-node", "1", "--per-message", "5000"]
    flags += ["--changes", "1.5:2:20mbit", "3:0:1gbit"]
    assert main(["testbed", "run", *flags, "--", "true"]) == 130
    changes = (
        testbed.Change(at_seconds=1.5, node=2, rate="20mbit"),
        testbed.Change(at_seconds=3, node=0, rate="1gbit"),
    )
    assert beds == [
        testbed.Bed(nodes=3, ranks_per_node=1, inter="200mbit", per_message=5000, changes=changes)
    ]


def test_the_exit_code_is_that_of_a_rank(cluster_launcher, capfd):
    assert (
        main(["testbed", "run", "--ranks-per-node", "1", "--", "sh", "-c", "exit $((RANK * 7))"])
        == 7
    )
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([0, 3, 4], 3), ([-15, 3], 3), ([-9, -15], 137), ([0, -15], 143), ([], 0)],
)
def test_one_exit_code_for_all(codes, expected):
    assert exit_code(codes) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python", "train.py", "--x", "a b"], "train.py --x 'a b'"),
        (["/usr/bin/python3.11", "-m", "moesaic", "train"], "-m moesaic train"),
        (["python", "-c", "1"], "--no-python python -c 1"),
        (["python"], "--no-python python"),
        (["moesaic", "train"], "--no-python moesaic train"),
    ],
)
def test_the_line_for_a_real_cluster(words, expected):
    assert torchrun_line(1, 8, words) == f"torchrun --nnodes 1 --nproc-per-node 8 {expected}"
    assert torchrun_line(3, 8, words) == (
        (
            "torchrun --nnodes 3 --nproc-per-node 8 --node-rank <0..2> --master-addr <node 0> "
            "--master-port 29500 "
        )
        + expected
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "unknown word nonsense: write run or info"),
        (
            ["run"],
            "no command: write it after --, as in moesaic testbed run --nodes 2 -- python train.py",
        ),
        (
            ["run", "--nodes", "2", "--"],
            "no command: write it after --, as in moesaic testbed run --nodes 2 -- python train.py",
        ),
        (
            ["run", "--inter", "200mbps", "--", "true"],
            "inter='200mbps' is no rate: write a number with kbit, mbit or gbit, as in 200mbit",
        ),
        (
            ["run", "--node", "2", "--", "true"],
            "unknown argument --node, did you mean --nodes?; --help lists all",
        ),
        (
            ["run", "--changes", "1:0", "--", "true"],
            "--changes 1:0: write seconds:node:rate, as in 10:1:20mbit",
        ),
        (
            ["run", "--changes", "x:0:1mbit", "--", "true"],
            "--changes x:0:1mbit: write seconds:node:rate, as in 10:1:20mbit",
        ),
        (
            ["run", "--changes", "1:0:1", "--", "true"],
            "change.rate='1' is no rate: write a number with kbit, mbit or gbit, as in 200mbit",
        ),
        (["run", "--threads", "0", "--", "true"], "--threads 0: must be at least 1"),
        (["info", "--all"], "unknown argument --all: info takes none"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(["testbed", *arguments]) == 2
    assert capsys.readouterr().err == f"moesaic testbed: {message}\n"


def test_a_machine_that_cannot_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = "no emulated cluster on this machine: "
    assert main(["testbed", "run", "--", "true"]) == 2
    assert f"moesaic testbed: {reason}" in capsys.readouterr().err
    assert main(["testbed", "info"]) == 1
    assert capsys.readouterr().out.startswith(reason)


def test_what_the_machine_can_do(cluster_launcher, capsys):
    assert main(["testbed", "info"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("this machine can emulate clusters\nwith the rights of ")
    assert said.endswith(f"{len(os.sched_getaffinity(0))} cores\n")
    assert main(["testbed"]) == 0
    assert "moesaic testbed run [options] -- COMMAND" in capsys.readouterr().out


def attend() -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of shells ignore it


def test_ctrl_c_reaches_ranks_and_lets_them_save(cluster_launcher, tmp_path):
    script = (
        f"trap 'echo saved > \"{tmp_path}/rank$RANK\"; exit 0' INT; echo up; while :; do sleep "
        "0.1; done"
    )
    words = [
        sys.executable,
        "-m",
        "moesaic",
        "testbed",
        "run",
        "--ranks-per-node",
        "1",
        "--",
        "sh",
        "-c",
        script,
    ]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=attend
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "moesaic testbed: interrupted"
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["rank0", "rank1"]
