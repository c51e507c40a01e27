"""One thread, one seed per test, and derandomised property tests: a failure is the same on every machine."""

from __future__ import annotations

import gc
from collections.abc import Generator

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
    """Begin with the file that waits longest, for ranks that stand still: at the end it would leave processors idle."""
    items.sort(key=lambda item: item.path.name != "test_watch.py")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
