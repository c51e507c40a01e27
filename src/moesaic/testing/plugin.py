"""The pytest plugin: a test that asks for `moe_mesh` runs on every small mesh; `moe_ranks` runs code on all its ranks.

It is found by its entry point and imports torch only where a test asks for it, since it is loaded wherever Moesaic is
installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from moesaic.comm.transport import AbstractTransport
    from moesaic.program.grid import Grid
    from moesaic.testing.your_layer import Rank

T = TypeVar("T")
MARKER = "moe_meshes"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", f"{MARKER}(max_ranks=4, axes=('tp', 'ep', 'etp')): the meshes that moe_mesh goes through"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `moe_mesh` once per mesh."""
    if "moe_mesh" not in metafunc.fixturenames:
        return
    from moesaic.testing.your_layer import small_meshes

    marker = metafunc.definition.get_closest_marker(MARKER)
    meshes = small_meshes(**(marker.kwargs if marker else {}))
    metafunc.parametrize("moe_mesh", meshes, ids=[f"{m.world}-tp{m.tp}-ep{m.ep}-etp{m.etp}" for m in meshes])


@pytest.fixture
def moe_ranks(moe_mesh: Grid) -> Callable[[Callable[[Rank], Any]], list[Any]]:
    """Give a function that runs code on all ranks of the mesh, in lock step, and returns what each rank returned."""
    from moesaic.comm.loopback import run_ranks
    from moesaic.comm.mesh import Mesh
    from moesaic.testing.your_layer import Rank

    def run(function: Callable[[Rank], T]) -> list[T]:
        def rank(transport: AbstractTransport) -> T:
            return function(Rank(Mesh(moe_mesh, transport)))

        return run_ranks(moe_mesh.world, rank)

    return run
