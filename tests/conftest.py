"""Test settings: one thread, a fixed seed per test, derandomised property tests. A failure is the
same on every machine."""

from __future__ import annotations

import functools
import gc
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from listed_tests import Collected

pytest_plugins = "moesaic_testbed.plugin"
settings.register_profile(
    "moesaic",
    deadline=None,
    derandomize=True,
    max_examples=40,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("moesaic")
torch.set_num_threads(1)

WAITING = (
    "train/test_watch.py",
    "lab/test_balance_run.py",
    "lab/test_fuzz.py",
    "lab/test_layer_run.py",
    "lab/test_comm.py",
    "testbed/test_leftovers.py",
    "testbed/test_cluster.py",
    "testing/test_routed_experts.py",
    "weights/test_convert_memory.py",
)
"""Files whose tests spend most of their time waiting: for timeouts, slow links, disks or another
process."""
LONG = (
    "transformers/test_four_bit_loading.py",
    "train/test_launch.py",
    "testing/test_equivalence.py",
    "train/test_first_values.py",
    "train/test_auto_plan.py",
    "train/test_blocks_on_ranks.py",
    "transformers/test_lora.py",
)
"""Files that take ten processor seconds or more, and whose names would bring them to the end, where
the other workers idle."""
PRINTING = (
    "COLUMNS",
    "LINES",
    "NO_COLOR",
    "FORCE_COLOR",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "PYTHONWARNINGS",
)
"""Variables of a person's shell that change what commands print."""
FURTHER = re.compile(r"mark\.random|\b(pairwise|seed_ranges|thinned)\(")
"""What a file says that has tests marked `random`."""


@functools.cache
def may_hold_random(path: Path) -> bool:
    """Return whether a file's text asks for tests marked `random`."""
    return FURTHER.search(path.read_text(encoding="utf-8")) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Keep what the session collects, for `test_listed_tests.py`."""
    config.pluginmanager.register(Collected(), "collected")


def pytest_sessionstart() -> None:
    """Let tests and the commands that they start print as into a file: without colours, 80 columns
    wide."""
    for name in PRINTING:
        os.environ.pop(name, None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that hold no test for `-m "random ..."`: importing them takes longer than
    many tests."""
    if not config.option.markexpr.startswith("random") or not collection_path.match("test_*.py"):
        return None
    return None if may_hold_random(collection_path) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the collected tests from garbage collection, which would otherwise scan all of them
    repeatedly."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that wait first, then long ones: at the end they would leave processors idle.

    Hold `may_hold_random` to the markers.
    """
    missed = {
        str(item.path)
        for item in items
        if item.get_closest_marker("random") and not may_hold_random(item.path)
    }
    if missed:
        raise pytest.UsageError(
            f"make test-random would leave out the random tests of {', '.join(sorted(missed))}"
        )
    items.sort(
        key=lambda item: [not item.path.as_posix().endswith(files) for files in (WAITING, LONG)]
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give all files that wait to the same worker, so no two of them wait
    at the same time."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return "files that wait" if path.endswith(WAITING) else path

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
