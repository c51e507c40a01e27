"""Where some of the machines are as fast as all of them, one line says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.cli.main import main

SLOW = """
nodes = 2
devices_per_node = 1
[device]
memory_gib = 16
tflops.fp32 = 0.1
memory_gigabytes_per_second = 100
[[links]]
name = "network"
devices = 1
carries = "outside"
gbps = [{gbps}]
latency_us = 50
"""


def lines_of(folder: Path, capsys: pytest.CaptureFixture[str], gbps: float) -> list[str]:
    (folder / "cluster.toml").write_text(SLOW.format(gbps=gbps))
    words = ["plan", "--model", "demo", "--cluster", str(folder / "cluster.toml")]
    assert main(words) == 0
    return [line for line in capsys.readouterr().out.splitlines() if "leave the others out" in line]


def test_machines_that_do_not_pay_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = lines_of(tmp_path, capsys, gbps=0.001)
    assert line.startswith("1 of 2 machines is as fast: ")
    assert line.endswith("with tp 1, ep 1, etp 1: leave the others out")


@pytest.mark.random
def test_machines_that_pay_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(tmp_path, capsys, gbps=10.0) == []
