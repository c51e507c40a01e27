"""The presets of the papers' machines are the machines that their figures are reproduced on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moesaic.planner.cluster import ClusterSpec, presets, read_cluster
from moesaic_lab.reproduce import netmoe, parm, schemoe, tutel
from moesaic_lab.reproduce.papers import REPRODUCTIONS
from moesaic_lab.reproduce.records import Book, read_book

MACHINES: dict[str, Callable[[Book], ClusterSpec]] = {
    "parm-a": lambda book: parm.testbed(book, "a"),
    "parm-b": lambda book: parm.testbed(book, "b"),
    "schemoe": schemoe.cluster,
    "tutel": lambda book: tutel.cluster(book, 16),
    "netmoe": lambda book: netmoe.NetMoECluster(book, 4, 8).spec,
    # Their reproductions read the presets as they are.
    "fastermoe-johnny": lambda book: read_cluster("fastermoe-johnny"),
    "fastermoe-trevor": lambda book: read_cluster("fastermoe-trevor"),
}


def test_every_preset_of_a_paper_is_here() -> None:
    assert {*MACHINES} == {name for name in presets() if name.split("-")[0] in REPRODUCTIONS}


@pytest.mark.parametrize("name", MACHINES)
def test_a_preset_is_the_machine_of_its_reproduction(name: str) -> None:
    ours = read_cluster(name)
    theirs = MACHINES[name](read_book())
    for one, other in zip(ours.links, theirs.links, strict=True):
        for field, value in vars(other).items():
            assert getattr(one, field) == (
                pytest.approx(value, rel=1e-4) if isinstance(value, float | tuple) else value
            )
    assert ours.host.task_us == pytest.approx(theirs.host.task_us, rel=1e-4)
    assert ours.host.messages == theirs.host.messages
    for dtype, rate in vars(theirs.device.tflops).items():
        assert not rate or getattr(ours.device.tflops, dtype) == pytest.approx(rate, rel=1e-4)
    assert ours.device.contention == theirs.device.contention
    codec = theirs.device.codec_gigabytes_per_second
    assert ours.device.codec_gigabytes_per_second == (codec and pytest.approx(codec, rel=1e-4))
