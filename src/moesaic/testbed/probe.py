"""Can this machine emulate a cluster, and if not, why."""

from __future__ import annotations

import sys

from moesaic.errors import InputError
from moesaic.testbed.bed import Bed
from moesaic.testbed.cluster import Launcher


def refusal() -> str | None:
    """Try it: make the network of a bed of two nodes, without torch.

    Returns:
        None if that works, else one line: what is missing and what would help.
    """
    if not sys.platform.startswith("linux"):
        return f"no emulated cluster on this machine: it needs Linux, this is {sys.platform}"
    try:
        with Launcher(with_torch=False) as launcher:
            launcher.open(Bed(nodes=2, ranks_per_node=1)).close()
    except InputError as error:
        return str(error)
    return None
