"""Policies that decide where experts, their replicas and samples go; `balance/run` carries out the
decisions.

Replication policies have their names in `policies.py`. The registries below list the others. A
policy is imported when it is built, so a command line can list the names without imports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moesaic.errors import InputError
from moesaic.policies import REPLICATION, load

if TYPE_CHECKING:
    from moesaic.balance.expert_placement import AbstractExpertPlacer
    from moesaic.balance.replication.policy import AbstractReplicationPolicy
    from moesaic.balance.samples import AbstractPlacer, PlacerOptions
    from moesaic.program.rates import Rates


def _make(place: str, *arguments: Any, **options: Any) -> Any:
    """Build a policy with the class at `place`, given as `file:Class` in this folder."""
    return load(f"moesaic.balance.{place}")(*arguments, **options)


def check_replication(where: str, name: str) -> None:
    """Raise InputError if no replication policy has a name, which stands in the field `where`."""
    if name not in REPLICATION:
        raise InputError(
            f"{where}={name!r} is unknown: choose one of none, {', '.join(REPLICATION)}"
        )


def replication_policy(name: str, costs: Rates | None = None) -> AbstractReplicationPolicy:
    """Return the replication policy of a name in `Plan.replication`.

    Args:
        costs: rates of the machine and of the layer; None for the usual ones.

    Raises:
        InputError: if no policy has this name.
    """
    check_replication("plan.replication", name)
    policy: AbstractReplicationPolicy = load(REPLICATION[name])(
        **({} if costs is None else {"costs": costs})
    )
    return policy


SAMPLE_PLACERS: dict[str, Callable[[PlacerOptions], AbstractPlacer]] = {
    "two_stage": lambda options: _make("samples:TwoStage", options.least_gain, rest=options.rest),
    "weighed": lambda options: _make(
        "samples:Weighed", options.rates, least_gain=options.least_gain, rest=options.rest
    ),
}
"""Builders of sample placers, which decide the homes of samples after a layer, by the name in
`balance.samples`. A builder takes the options of the run."""

EXPERT_PLACERS: dict[str, Callable[[Rates], AbstractExpertPlacer]] = {
    "balanced": lambda rates: _make("expert_placement:Balanced", rates),
    "smartmoe": lambda _: _make("expert_placement:SmartMoE"),
}
"""Builders of expert placers, which decide the homes of experts, by the name in `balance.experts`.
A builder takes the rates of the run."""
