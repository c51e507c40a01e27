"""Plans, which say how a layer runs, and planning: search, prediction, memory budgets. Works without torch.

Names are imported on first use, so that a configuration does not load the compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.plan.compile import Compiled, compile_plan
    from moesaic.plan.plan import Plan

__all__ = ["Compiled", "Plan", "compile_plan"]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` from its file."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'plan' if name == 'Plan' else 'compile'}"), name)
