"""One thread, one seed per test, and derandomised property tests: a failure is the same on every machine."""

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
    "train/test_watch.py", "lab/test_balance_run.py", "lab/test_fuzz.py", "lab/test_bench_convert.py", "lab/test_layer_run.py",
    "lab/test_comm.py", "testbed/test_leftovers.py", "testbed/test_cluster.py", "testing/test_routed_experts.py",
)  # fmt: skip
"""Files whose tests wait most of their time, for patience, slow links, disks or another process."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the tests from the garbage collector, which else goes through all of them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that wait: at the end they would leave processors idle."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(WAITING))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give the files that wait to one worker, one after another, so that no two wait at a time."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return "files that wait" if path.endswith(WAITING) else path

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
