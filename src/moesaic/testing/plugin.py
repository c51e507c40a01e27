"""The pytest plugin: a test that uses the fixture `moe_mesh` runs on every small mesh; `moe_ranks`
runs code on all ranks.

`pytest -p moesaic.testing.plugin` or `pytest_plugins = ["moesaic.testing.plugin"]` of a conftest.py
asks for it: to install Moesaic adds nothing to anybody's pytest. It imports torch only when a test
uses one of its fixtures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from moesaic.comm.transport import AbstractTransport
    from moesaic.program.grid import Grid
    from moesaic.testing.certify import Rank

T = TypeVar("T")
MARKER = "moe_meshes"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(max_ranks=4, axes=('tp', 'ep', 'etp')): the meshes that moe_mesh goes through",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test that uses `moe_mesh`, so that it runs once per mesh."""
    if "moe_mesh" not in metafunc.fixturenames:
        return
    from moesaic.testing.certify import small_meshes

    marker = metafunc.definition.get_closest_marker(MARKER)
    meshes = small_meshes(**(marker.kwargs if marker else {}))
    ids = [f"{mesh.world}-tp{mesh.tp}-ep{mesh.ep}-etp{mesh.etp}" for mesh in meshes]
    metafunc.parametrize("moe_mesh", meshes, ids=ids)


@pytest.fixture
def moe_ranks(moe_mesh: Grid) -> Callable[[Callable[[Rank], Any]], list[Any]]:
    """Return a function that runs a function on all ranks of the mesh, in lock step, and returns
    the list of their results."""
    from moesaic.comm.loopback import run_ranks
    from moesaic.comm.mesh import Mesh
    from moesaic.testing.certify import Rank

    def run(function: Callable[[Rank], T]) -> list[T]:
        """Call the function on all ranks, each with its own rank, and return the results."""

        def rank(transport: AbstractTransport) -> T:
            return function(Rank(Mesh(moe_mesh, transport)))

        return run_ranks(moe_mesh.world, rank)

    return run
