"""Other people's MoE layers, measured against ours with the same weights and the same routing."""

from importlib.util import find_spec

from moesaic.errors import to_install


def absence() -> str | None:
    """Return None if DeepSpeed is installed, otherwise a line with the command that installs it.
    This does not import it."""
    if find_spec("deepspeed") is not None:
        return None
    return f"deepspeed is not installed: with DS_BUILD_OPS=0, {to_install('./lab[peers]')}"
