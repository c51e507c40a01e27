"""Test settings: one thread, a fixed seed per test, derandomised property tests. A failure is the same on every machine."""

from __future__ import annotations

import gc
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

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
    "train/test_watch.py", "lab/test_balance_run.py", "lab/test_fuzz.py", "lab/test_layer_run.py",
    "lab/test_comm.py", "testbed/test_leftovers.py", "testbed/test_cluster.py", "testing/test_routed_experts.py",
    "weights/test_convert_memory.py",
)  # fmt: skip
"""Files whose tests spend most of their time waiting: for timeouts, slow links, disks or another process."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the collected tests from garbage collection, which would otherwise scan all of them repeatedly."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that wait first: at the end they would leave processors idle."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(WAITING))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give all files that wait to the same worker, so no two of them wait at the same time."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return "files that wait" if path.endswith(WAITING) else path

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
