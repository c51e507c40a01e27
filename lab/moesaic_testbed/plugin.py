"""The pytest fixture `cluster`: an emulated cluster for a test, removed when the test ends.

`pytest -p moesaic_testbed.plugin` or `pytest_plugins = ["moesaic_testbed.plugin"]` of a conftest.py
asks for it. It imports the test bed only when a test uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from moesaic_testbed.cluster import Cluster, Launcher


@pytest.fixture(scope="session")
def cluster_launcher() -> Iterator[Launcher]:
    """Start the process that imports torch for all beds of the session; skip the test if clusters
    cannot be emulated."""
    from moesaic_testbed import Launcher, refusal

    reason = refusal()
    if reason is not None:
        pytest.skip(reason)
    with Launcher() as launcher:
        yield launcher


@pytest.fixture
def cluster(cluster_launcher: Launcher) -> Iterator[Callable[..., Cluster]]:
    """Provide a function that starts emulated clusters:
    `cluster(nodes, ranks_per_node, inter=..., ...)`, fields of `Bed`."""
    from moesaic_testbed import Bed

    with ExitStack() as beds:

        def make(nodes: int = 2, ranks_per_node: int = 2, **options: Any) -> Cluster:
            bed = Bed(nodes=nodes, ranks_per_node=ranks_per_node, **options)
            return beds.enter_context(cluster_launcher.open(bed))

        yield make
