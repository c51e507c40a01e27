"""Moesaic as a backend of Hugging Face transformers. Importing this module registers "moesaic" with
both of its registries.

`experts_implementation="moesaic"` runs a model's experts on Moesaic's kernels
(`experts_backend.py`). `quantization_config=FourBitExpertsConfig()` keeps them in four bits
(`nf4.py`), with PEFT's adapters of experts (`lora.py`). `distributed_config(ep_size=...)` runs them
expert-parallel with Moesaic's programs (`expert_parallel.py`). `Resumable` makes a trainer's
checkpoints whole, on any number of ranks (`resume.py`), `InFlight` computes a micro-batch's halves
in flight (`in_flight.py`).
"""

from __future__ import annotations

from moesaic.errors import InputError, to_install

try:
    from transformers.distributed.expert_parallel import EPImplementationInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise InputError(
        f"moesaic.transformers needs transformers 5.23 or later ({error}): "
        f"{to_install('.[transformers]')}"
    ) from None

from moesaic.transformers.expert_parallel import (
    MoesaicEP,
    distributed_config,
    register_plan,
    use_plan,
)
from moesaic.transformers.in_flight import InFlight
from moesaic.transformers.lora import adopt_adapters, experts_forward
from moesaic.transformers.nf4 import FourBitExpertsConfig
from moesaic.transformers.resume import Resumable

ALL_EXPERTS_FUNCTIONS.register("moesaic", experts_forward)
EPImplementationInterface.register("moesaic", MoesaicEP)

__all__ = [
    "FourBitExpertsConfig",
    "InFlight",
    "MoesaicEP",
    "Resumable",
    "adopt_adapters",
    "distributed_config",
    "experts_forward",
    "register_plan",
    "use_plan",
]
