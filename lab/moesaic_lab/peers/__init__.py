"""Other people's MoE layers, to be measured beside ours: the same weights, the same routing, another way to run."""

from importlib.util import find_spec


def absence() -> str | None:
    """Return None if DeepSpeed is installed, asked without importing it, else one line that says what to do."""
    if find_spec("deepspeed") is not None:
        return None
    return 'deepspeed is not installed: DS_BUILD_OPS=0 pip install "moesaic[peers]"'
