"""Every balancing policy by its name. To add one: a new file, and a line here; everything that lists policies reads this."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.balance.experts import AbstractExpertPlacer, Balanced, ExpertRates, SmartMoE
from moesaic.balance.replication.cost import ReplicationCosts
from moesaic.balance.replication.eplb import EPLB
from moesaic.balance.replication.laer import LAER
from moesaic.balance.replication.lplb import LPLB
from moesaic.balance.replication.policy import AbstractReplicationPolicy
from moesaic.balance.replication.shadow import Published, Shadow
from moesaic.balance.replication.spill import LeastLoaded, Spill
from moesaic.balance.samples import AbstractPlacer, PlacerOptions, Stay, TwoStage, Weighed
from moesaic.balance.selector.arbiter import Arbiter

REPLICATION_POLICIES: dict[str, Callable[[ReplicationCosts], AbstractReplicationPolicy]] = {
    "shadow": Shadow,
    "published": Published,
    "spill": Spill,
    "least_loaded": lambda _: LeastLoaded(),
    "eplb": lambda _: EPLB(),
    "lplb": lambda _: LPLB(),
    "laer": lambda _: LAER(),
    "arbiter": lambda costs: Arbiter(costs=costs),
}
"""Which experts are replicated: what builds a policy from the rates of a machine and a layer, by the name that
`Plan.replication` takes."""

SAMPLE_PLACERS: dict[str, Callable[[PlacerOptions], AbstractPlacer]] = {
    "stay": lambda _: Stay(),
    "two_stage": lambda options: TwoStage(options.least_gain, rest=options.rest),
    "weighed": lambda options: Weighed(options.machine, least_gain=options.least_gain, rest=options.rest),
}
"""Where samples live after a layer: what builds a policy from the options of the run, by the name that `balance.samples`
takes."""

EXPERT_PLACERS: dict[str, Callable[[ExpertRates], AbstractExpertPlacer]] = {
    "balanced": Balanced,
    "smartmoe": lambda _: SmartMoE(),
}
"""Where experts live: what builds a policy from the rates of the run, by the name that `balance.experts` takes."""
