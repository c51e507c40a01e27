"""The name that `moesaic.planner.policy_rates` had before: import from there."""

from moesaic.planner.policy_rates import levels_of, seen_by, simulator_of

__all__ = ["levels_of", "seen_by", "simulator_of"]
