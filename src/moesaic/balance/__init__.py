"""Balancing, the deciding half: where experts, their replicas and samples go; `runtime/balance` acts on it.

Here is every policy by its name. To add one: a new file, and a line here; everything that lists policies reads this. Policies
are imported when they are built: a command line lists their names without them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.balance.experts import AbstractExpertPlacer, ExpertRates
    from moesaic.balance.replication.cost import ReplicationCosts
    from moesaic.balance.replication.policy import AbstractReplicationPolicy
    from moesaic.balance.samples import AbstractPlacer, PlacerOptions


def _make(place: str, *arguments: Any, **options: Any) -> Any:
    """Build the policy of `file.Class` in this folder."""
    file, _, name = place.rpartition(".")
    return getattr(import_module(f"moesaic.balance.{file}"), name)(*arguments, **options)


REPLICATION_POLICIES: dict[str, Callable[[ReplicationCosts], AbstractReplicationPolicy]] = {
    "shadow": lambda costs: _make("replication.shadow.Shadow", costs),
    "published": lambda costs: _make("replication.published.Published", costs),
    "spill": lambda costs: _make("replication.spill.Spill", costs),
    "least_loaded": lambda _: _make("replication.least_loaded.LeastLoaded"),
    "eplb": lambda _: _make("replication.eplb.EPLB"),
    "lplb": lambda _: _make("replication.lplb.LPLB"),
    "laer": lambda _: _make("replication.laer.LAER"),
    "arbiter": lambda costs: _make("selector.arbiter.Arbiter", costs=costs),
}
"""Which experts are replicated: what builds a policy from the rates of a machine and a layer, by the name that
`Plan.replication` takes."""

SAMPLE_PLACERS: dict[str, Callable[[PlacerOptions], AbstractPlacer]] = {
    "stay": lambda _: _make("samples.Stay"),
    "two_stage": lambda options: _make("samples.TwoStage", options.least_gain, rest=options.rest),
    "weighed": lambda options: _make(
        "samples.Weighed", options.machine, least_gain=options.least_gain, rest=options.rest
    ),
}
"""Where samples live after a layer: what builds a policy from the options of the run, by the name that `balance.samples`
takes."""

EXPERT_PLACERS: dict[str, Callable[[ExpertRates], AbstractExpertPlacer]] = {
    "balanced": lambda rates: _make("experts.Balanced", rates),
    "smartmoe": lambda _: _make("experts.SmartMoE"),
}
"""Where experts live: what builds a policy from the rates of the run, by the name that `balance.experts` takes."""
