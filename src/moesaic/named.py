"""Names that `parallelize` accepts in place of an object, each with the class that answers it.

A class is imported when its name is used, so the layer depends on none of these parts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

NAMED = {
    "auto": "moesaic.auto:AutoPlan",
}
"""Names to "module:class"."""


def named(name: str) -> Any:
    """Return the class that answers a name in `NAMED`."""
    module, _, of_class = NAMED[name].partition(":")
    return getattr(import_module(module), of_class)
