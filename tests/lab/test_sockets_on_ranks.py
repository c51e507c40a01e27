"""The transport over sockets between real processes, found by the name that the laboratory offers
it under."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from test_spread_weights import EXPECTED, check_differences, refusals

from comm.test_processes import check_movements, movements, refusal
from moesaic.comm import mesh
from moesaic.comm.mesh import Mesh, open_transport
from moesaic.configfile import read_table
from moesaic.errors import InputError
from moesaic_lab import sockets
from test_layer_in_torch import check_copies, check_refusals, copies
from worlds import on_ranks

LAB = Path(__file__).resolve().parents[2] / "lab"


def test_the_package_offers_the_transport() -> None:
    offered = read_table(LAB / "pyproject.toml")["project"]["entry-points"][mesh.TRANSPORTS_GROUP]
    loaded = {
        name: EntryPoint(name, value, mesh.TRANSPORTS_GROUP).load()
        for name, value in offered.items()
    }
    assert loaded == {"sockets": sockets.Sockets.create}


def test_an_unknown_name_lists_it() -> None:
    with pytest.raises(InputError) as error:
        open_transport(name="mpi")
    assert str(error.value) == "transport='mpi' is unknown: choose one of auto, gloo, nccl, sockets"


def on_a_rank() -> dict[str, Any]:
    found = movements(dist.get_rank(), dist.get_world_size(), "sockets")
    with (
        patch.object(sockets, "_hosts", lambda: ["not an address"]),
        patch.object(sockets, "CONNECT_SECONDS", 0.1),
    ):
        found["unreachable"] = refusal(lambda: open_transport(name="sockets"))
    found["differ"] = refusal(
        lambda: Mesh.create(transport="sockets" if dist.get_rank() else "gloo")
    )
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_real_processes(world: int) -> None:
    results = on_ranks(world, on_a_rank)
    check_movements(results, "Sockets")
    others = "rank 1" if world == 2 else f"ranks 1-{world - 1}"
    for saw in results:
        assert saw["unreachable"] == (
            "transport=sockets cannot connect rank 0: rank 0 has no address to listen on: set "
            "GLOO_SOCKET_IFNAME to the network interface that all ranks reach, or choose "
            "transport=gloo"
        )
        assert saw["differ"] == (
            f"transport differs: gloo on rank 0, sockets on {others}: start every rank with "
            "the same settings"
        )


def test_a_layer_over_it_is_copied_but_not_written() -> None:
    of_ranks = on_ranks(2, copies, "sockets")
    check_copies(of_ranks)
    for how in ("pickle", "torch.save"):
        check_refusals(how, of_ranks)


def test_ranks_that_differ_are_told_in_what() -> None:
    results = on_ranks(2, refusals, "sockets")
    for name in EXPECTED:
        check_differences(name, results)
