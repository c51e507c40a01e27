"""Plans: which of the equivalent ways a layer runs in. No torch."""

from __future__ import annotations

from moesaic.plan.compile import Compiled, compile_plan
from moesaic.plan.plan import Plan

__all__ = ["Compiled", "Plan", "compile_plan"]
