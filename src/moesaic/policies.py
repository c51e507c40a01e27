"""Names that a plan may give to what decides how calls run, and the class that answers to each,
imported on use.

The layer and the runtime know nothing of these classes. To add a replication policy, add a file and
a line here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from moesaic.program.compile import Compiled
    from moesaic.runtime.expert_parallel import AbstractCallPolicy


class CallsOf(Protocol):
    """A function that returns the call policy of a layer."""

    def __call__(self, compiled: Compiled, num_experts: int, dim: int) -> AbstractCallPolicy:
        """Return the call policy for a compiled plan, a layer's number of experts and its width of
        a token."""


AUTO = "moesaic.auto:AutoPlan"
"""What finds the plan of layers that are parallelized with `plan="auto"`."""
PLAIN_CALLS = "moesaic.runtime.expert_parallel:PlainCalls"
BALANCED_CALLS = "moesaic.balance.run.calls:BalancedCalls"
"""The call policies: one that runs the plan in every call, and that of plans that replicate or have
a memory budget."""
REPLICATION = {
    "shadow": "moesaic.balance.replication.shadow:Shadow",
    "published": "moesaic.balance.replication.published:Published",
    "spill": "moesaic.balance.replication.spill:Spill",
    "eplb": "moesaic.balance.replication.eplb:EPLB",
    "arbiter": "moesaic.balance.selector.arbiter:Arbiter",
}
"""Replication policies, by the name in `Plan.replication`."""


def load(place: str) -> Any:
    """Return the class at `place`, given as module:Class."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def calls_of(compiled: Compiled, num_experts: int, dim: int) -> AbstractCallPolicy:
    """Return the call policy that a layer's plan names.

    Args:
        num_experts, dim: number of experts and width of a token of the layer.

    Raises:
        InputError: if no replication policy has the plan's name.
    """
    plan = compiled.plan
    if not plan.replicates and plan.memory_budget is None:
        plain: AbstractCallPolicy = load(PLAIN_CALLS)(compiled)
        return plain
    balanced: AbstractCallPolicy = load(BALANCED_CALLS)(compiled, num_experts, dim)
    return balanced
