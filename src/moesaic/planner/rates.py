"""The name that `moesaic.planner.policy_rates` had before: import from there."""

from moesaic.planner.policy_rates import costs_of, levels_of, machine_of, simulator_of

__all__ = ["costs_of", "levels_of", "machine_of", "simulator_of"]
