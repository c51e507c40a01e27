"""Whether the packages of others are here, asked without importing them."""

from __future__ import annotations

from importlib.util import find_spec


def absence() -> str | None:
    """Return None if DeepSpeed is installed, else one line that says what to do."""
    if find_spec("deepspeed") is not None:
        return None
    return 'deepspeed is not installed: DS_BUILD_OPS=0 pip install "moesaic[peers]"'
