"""The routers, one published method a file. To add one: a new file and a line in `ROUTERS`.

A router there chooses alike on every mesh. `TopologyRouter` does not, so its name stands in `ON_MESH`: what holds for
all others (a mesh changes no number) does not hold for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moesaic.routing.router import AbstractRouter
from moesaic.routing.routers.base import BalancedAssignment
from moesaic.routing.routers.cosine import CosineTopK
from moesaic.routing.routers.expert_choice import ExpertChoice
from moesaic.routing.routers.group_limited import GroupLimited
from moesaic.routing.routers.gshard import GShardTop2
from moesaic.routing.routers.hash import Hash
from moesaic.routing.routers.noisy import NoisyTopK
from moesaic.routing.routers.sigmoid import SigmoidTopK
from moesaic.routing.routers.softmax import SoftmaxTopK
from moesaic.routing.routers.topology import LinkLevel, TopologyRouter, levels_of, node_level, topology_gate

RouterFactory = Callable[[int, int], AbstractRouter]
"""Builds a router from (dim, num_experts)."""


def group_limited(
    dim: int, num_experts: int, *, num_groups: int = 4, top_groups: int = 2, bias_rate: float = 1e-3
) -> GroupLimited:
    """Build DeepSeek-V3's router: sigmoid scores with a bias, limited to `top_groups` of `num_groups` groups."""
    inner = SigmoidTopK(dim, num_experts, bias_rate=bias_rate)
    return GroupLimited(inner, num_groups=num_groups, top_groups=top_groups)


ROUTERS: dict[str, RouterFactory] = {
    "softmax": SoftmaxTopK,
    "switch": partial(SoftmaxTopK, normalize="before"),
    "sigmoid": SigmoidTopK,
    "noisy": NoisyTopK,
    "cosine": CosineTopK,
    "group_limited": group_limited,
    "gshard": GShardTop2,
    "base": BalancedAssignment,
    "expert_choice": ExpertChoice,
    "hash": Hash,
}

ON_MESH: dict[str, RouterFactory] = {"topology": topology_gate}
"""Routers whose choice depends on the mesh; `MoE` takes their names too, and tells them the mesh."""

__all__ = [
    "ON_MESH",
    "ROUTERS",
    "BalancedAssignment",
    "CosineTopK",
    "ExpertChoice",
    "GShardTop2",
    "GroupLimited",
    "Hash",
    "LinkLevel",
    "NoisyTopK",
    "RouterFactory",
    "SigmoidTopK",
    "SoftmaxTopK",
    "TopologyRouter",
    "group_limited",
    "levels_of",
    "node_level",
    "topology_gate",
]
