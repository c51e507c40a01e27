"""The name that `moesaic.planner.simulator` had before: import from there."""

from moesaic.planner.simulator import Simulator

__all__ = ["Simulator"]
