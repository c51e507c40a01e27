"""The adapters of all stages in one file, as PEFT writes and reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor

from moesaic.train.ranks import Ranks

CPU = torch.device("cpu")


def save_adapters(model: peft.PeftModel, ranks: Ranks, folder: Path) -> None:
    """Save the adapters of a model, or of all its stages; all ranks call it together."""
    if ranks.pp == 1:
        model.save_pretrained(
            str(folder), is_main_process=ranks.is_first, save_embedding_layers=False
        )
        return
    state = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    own = peft.get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    whole = dict(on_first(own.items(), ranks))
    if ranks.is_first:
        model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
        # PEFT leaves out what its own modules do not have
        save_file(whole, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


def on_first(own: Iterable[tuple[str, Tensor]], ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of all stages on the first rank, one at a time; on others their own,
    which are sent. All ranks exhaust it together.

    Args:
        own: named tensors of this rank's stage; only its first rank's count. They may be computed
            as they are asked for, by the ranks of the stage together.
        ranks: the ranks.
    """
    per_stage = ranks.world // ranks.pp
    sends = ranks.stage > 0 and ranks.rank % per_stage == 0  # the first rank of a later stage
    for name, tensor in own:
        if sends:
            dist.send_object_list([(name, tensor.shape, tensor.dtype)], 0, device=CPU)
            dist.send(tensor.cpu().contiguous(), 0)
        yield name, tensor
    if sends:
        dist.send_object_list([None], 0, device=CPU)
    if ranks.is_first:
        for stage in range(1, ranks.pp):
            sender = stage * per_stage
            while True:
                # what comes next, before it comes: (name, shape, dtype), or None at the end
                description: list[tuple[str, torch.Size, torch.dtype] | None] = [None]
                dist.recv_object_list(description, sender, device=CPU)
                if description[0] is None:
                    break
                name, shape, dtype = description[0]
                received = torch.empty(shape, dtype=dtype)
                dist.recv(received, sender)
                yield name, received
