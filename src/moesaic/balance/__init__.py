"""Policies that decide where experts, their replicas and samples go; `runtime/balance` carries out the decisions.

The registries below list every policy by its name. To add a policy, add a file and a line here. A policy is imported when it
is built, so a command line can list the names without imports.
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
    """Build a policy with the class at `place`, given as `file.Class` in this folder."""
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
"""Builders of replication policies, which decide which experts are replicated, by the name in `Plan.replication`. A builder
takes the rates of the machine and of the layer."""

SAMPLE_PLACERS: dict[str, Callable[[PlacerOptions], AbstractPlacer]] = {
    "stay": lambda _: _make("samples.Stay"),
    "two_stage": lambda options: _make("samples.TwoStage", options.least_gain, rest=options.rest),
    "weighed": lambda options: _make(
        "samples.Weighed", options.machine, least_gain=options.least_gain, rest=options.rest
    ),
}
"""Builders of sample placers, which decide the homes of samples after a layer, by the name in `balance.samples`. A builder
takes the options of the run."""

EXPERT_PLACERS: dict[str, Callable[[ExpertRates], AbstractExpertPlacer]] = {
    "balanced": lambda rates: _make("experts.Balanced", rates),
    "smartmoe": lambda _: _make("experts.SmartMoE"),
}
"""Builders of expert placers, which decide the homes of experts, by the name in `balance.experts`. A builder takes the rates
of the run."""
