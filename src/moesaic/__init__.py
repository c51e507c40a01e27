"""Moesaic: sparse Mixture-of-Experts training in PyTorch, fast on any cluster, the small and slow
ones included.

Names are imported on first use, so planning and reporting work without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moesaic.errors import to_install

if TYPE_CHECKING:
    from moesaic.comm.mesh import Mesh
    from moesaic.compile_ahead import warm_up
    from moesaic.cuda_graphs import capture
    from moesaic.experts import GatedExperts, ModuleExperts, PlainExperts
    from moesaic.interleaved import in_flight
    from moesaic.kernels.encode import encoding, fast_decode, fast_encode
    from moesaic.layer import MoE, balance_on_step, finish_step
    from moesaic.parallel import (
        clip_grad_norm_,
        parallelize_model,
        parameter_groups,
        prepare_ddp,
        shard_over_data,
    )
    from moesaic.program.plan import Plan
    from moesaic.routing.capacity import Capacity, Dropless
    from moesaic.routing.injection import collect_losses, set_loss_scale
    from moesaic.routing.losses import Importance, LoadBalance, ZLoss
    from moesaic.routing.routing import Routing
    from moesaic.runtime.data_parallel import average_gradients
    from moesaic.runtime.routing_cache import checkpoint, replay_contexts
    from moesaic.weights.convert import convert

__version__ = "0.1.0"

_HOMES = {
    "MoE": "moesaic.layer",
    "balance_on_step": "moesaic.layer",
    "finish_step": "moesaic.layer",
    "capture": "moesaic.cuda_graphs",
    "warm_up": "moesaic.compile_ahead",
    "in_flight": "moesaic.interleaved",
    "Mesh": "moesaic.comm.mesh",
    "Plan": "moesaic.program.plan",
    "average_gradients": "moesaic.runtime.data_parallel",
    "clip_grad_norm_": "moesaic.parallel",
    "parallelize_model": "moesaic.parallel",
    "parameter_groups": "moesaic.parallel",
    "prepare_ddp": "moesaic.parallel",
    "shard_over_data": "moesaic.parallel",
    "GatedExperts": "moesaic.experts",
    "ModuleExperts": "moesaic.experts",
    "PlainExperts": "moesaic.experts",
    "encoding": "moesaic.kernels.encode",
    "fast_decode": "moesaic.kernels.encode",
    "fast_encode": "moesaic.kernels.encode",
    "Capacity": "moesaic.routing.capacity",
    "Dropless": "moesaic.routing.capacity",
    "Importance": "moesaic.routing.losses",
    "LoadBalance": "moesaic.routing.losses",
    "ZLoss": "moesaic.routing.losses",
    "collect_losses": "moesaic.routing.injection",
    "set_loss_scale": "moesaic.routing.injection",
    "Routing": "moesaic.routing.routing",
    "checkpoint": "moesaic.runtime.routing_cache",
    "replay_contexts": "moesaic.runtime.routing_cache",
    "convert": "moesaic.weights.convert",
}

__all__ = [
    "Capacity",
    "Dropless",
    "GatedExperts",
    "Importance",
    "LoadBalance",
    "Mesh",
    "MoE",
    "ModuleExperts",
    "PlainExperts",
    "Plan",
    "Routing",
    "ZLoss",
    "average_gradients",
    "balance_on_step",
    "capture",
    "checkpoint",
    "clip_grad_norm_",
    "collect_losses",
    "convert",
    "encoding",
    "fast_decode",
    "fast_encode",
    "finish_step",
    "in_flight",
    "parallelize_model",
    "parameter_groups",
    "prepare_ddp",
    "replay_contexts",
    "set_loss_scale",
    "shard_over_data",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'moesaic' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise ImportError(
            f"moesaic.{name} needs torch: {to_install('.[train]')}", name=error.name
        ) from None


def __dir__() -> list[str]:
    """List the public names, most of which are not imported yet."""
    return sorted([*__all__, "__version__"])
