"""Moesaic in models of Hugging Face transformers: importing this registers both of its registries' "moesaic".

`experts_implementation="moesaic"` runs the experts of a model on Moesaic's kernels (`backend.py`);
`DistributedConfig(ep_implementation="moesaic")` spreads them over ranks by Moesaic's programs (`expert_parallel.py`).
"""

from __future__ import annotations

from moesaic.errors import InputError
from moesaic.transformers.backend import experts_forward

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise InputError(
        'moesaic.transformers needs transformers 5.23 or later: pip install "moesaic[transformers]"'
    ) from error

ALL_EXPERTS_FUNCTIONS.register("moesaic", experts_forward)
