"""The routers, one published method per file. To add a router, add a file and a line in `ROUTERS`.

A router in `ROUTERS` makes the same choices on every mesh. `TopologyRouter` does not, and is in
`ON_MESH` instead: for all other routers a mesh changes no number.

Configurations and command lines can list the names without importing torch; a router's file is
imported when the router is built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.routing.router import AbstractRouter
    from moesaic.routing.routers.base import BalancedAssignment as BalancedAssignment
    from moesaic.routing.routers.cosine import CosineTopK as CosineTopK
    from moesaic.routing.routers.expert_choice import ExpertChoice as ExpertChoice
    from moesaic.routing.routers.group_limited import GroupLimited as GroupLimited
    from moesaic.routing.routers.group_limited import group_limited_sigmoid as group_limited_sigmoid
    from moesaic.routing.routers.gshard import GShardTop2 as GShardTop2
    from moesaic.routing.routers.hash import Hash as Hash
    from moesaic.routing.routers.noisy import NoisyTopK as NoisyTopK
    from moesaic.routing.routers.sigmoid import SigmoidTopK as SigmoidTopK
    from moesaic.routing.routers.softmax import SoftmaxTopK as SoftmaxTopK
    from moesaic.routing.routers.topology import TopologyRouter as TopologyRouter
    from moesaic.routing.routers.topology import node_level as node_level
    from moesaic.routing.routers.topology import topology_gate as topology_gate

RouterFactory = Callable[..., "AbstractRouter"]
"""Builds a router from (dim, num_experts) and the router's own options as keyword arguments."""


def _build(place: str, dim: int, num_experts: int, **options: Any) -> AbstractRouter:
    """Build a router with the factory at `place`, as for `_factory_at`."""
    router: AbstractRouter = _factory_at(place)(dim, num_experts, **options)
    return router


def _factory_at(place: str) -> Callable[..., Any]:
    """Return a class or function of this folder, given as `file.name`."""
    file, _, name = place.partition(".")
    factory: Callable[..., Any] = getattr(import_module(f"{__name__}.{file}"), name)
    return factory


def options_of(make: RouterFactory) -> dict[str, Any]:
    """Return the options of a router in `ROUTERS` or `ON_MESH`, each with its default."""
    assert isinstance(make, partial)  # of `_build`
    (place,) = make.args  # as for `_factory_at`
    # arguments that are no options; those of `make` itself are set by the router's name
    no_options = {"device", "dtype", *make.keywords}
    options = {}
    # options are arguments by keyword only
    for parameter in signature(_factory_at(place)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in no_options:
            options[parameter.name] = parameter.default
    return options


ROUTERS: dict[str, RouterFactory] = {
    "softmax": partial(_build, "softmax.SoftmaxTopK"),
    "switch": partial(_build, "softmax.SoftmaxTopK", normalize="before"),
    "sigmoid": partial(_build, "sigmoid.SigmoidTopK"),
    "noisy": partial(_build, "noisy.NoisyTopK"),
    "cosine": partial(_build, "cosine.CosineTopK"),
    "group_limited": partial(_build, "group_limited.group_limited_sigmoid"),
    "gshard": partial(_build, "gshard.GShardTop2"),
    "base": partial(_build, "base.BalancedAssignment"),
    "expert_choice": partial(_build, "expert_choice.ExpertChoice"),
    "hash": partial(_build, "hash.Hash"),
}

ON_MESH: dict[str, RouterFactory] = {"topology": partial(_build, "topology.topology_gate")}
"""Routers whose choice depends on the mesh. `MoE` accepts their names too, and passes the mesh to
them."""

_FILES = {
    "BalancedAssignment": "base",
    "CosineTopK": "cosine",
    "ExpertChoice": "expert_choice",
    "GShardTop2": "gshard",
    "GroupLimited": "group_limited",
    "Hash": "hash",
    "NoisyTopK": "noisy",
    "SigmoidTopK": "sigmoid",
    "SoftmaxTopK": "softmax",
    "TopologyRouter": "topology",
    "group_limited_sigmoid": "group_limited",
    "node_level": "topology",
    "topology_gate": "topology",
}


def __getattr__(name: str) -> Any:
    """Import a public name of this package from its router's file on first use."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
