"""DeepSpeed's engine: experts that are spread over ranks are refused in one line. `make test-peers`
runs this.

tests/test_recipes.py trains with experts on every rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("deepspeed", reason="make test-peers installs it")

from worlds import on_ranks, refusal

sys.path.append(str(Path(__file__).parents[2] / "examples" / "recipes"))


def initialised(stage: int) -> str:
    """Return the message for a model whose experts `parallelize_model` has spread."""
    import deepspeed
    from tiny import Tiny

    from moesaic.parallel import parallelize_model, parameter_groups

    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as a launcher sets it: the engine asks for it
    model = Tiny()
    parallelize_model(model, dist.group.WORLD)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.01)
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    return refusal(deepspeed.initialize, model=model, optimizer=optimizer, config=settings)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_on_several_ranks_are_refused_in_one_line(stage: int) -> None:
    for message in on_ranks(2, initialised, stage):
        assert message.startswith(
            "InputError: GatedExperts is spread over ranks and another library"
        )
        assert "give deepspeed.initialize the model without parallelize" in message
        assert "\n" not in message
