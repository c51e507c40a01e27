"""Weights that must be the same on all ranks before a layer is spread: what to compare them by, and taking the first rank's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.comm.collectives import broadcast
from moesaic.comm.transport import AbstractTransport, as_bytes
from moesaic.errors import InputError
from moesaic.experts.experts import is_dtensor

ADVICE = (
    "give every rank the same weights (seed alike before the layer is made), or call parallelize(..., broadcast=True)"
)
"""What an error says where weights differ."""
_WORDS = 65536
"""So many words of 8 bytes are hashed at a time: little memory, and few steps."""
_ODD = -7046029254386353131
"""A multiplier without small factors: 2**64 over the golden ratio, as a signed number."""


def described(module: nn.Module, *, values: bool) -> dict[str, str]:
    """Return name to dtype and shape of a module's parameters and persistent buffers, and a hash of the values.

    Tensors on the meta device have no values; neither have those that are not asked for.

    Args:
        module: whole, not sharded.
        values: hash them.

    Raises:
        InputError: for weights that are sharded already.
    """
    found = {}
    for name, tensor in module.state_dict().items():
        if is_dtensor(tensor):
            raise InputError(f"MoE.parallelize: {name} is sharded already: call parallelize first, then fully_shard")
        value = "on meta" if tensor.is_meta else fingerprint(tensor) if values else ""
        found[name] = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} {value}".strip()
    return found


def fingerprint(tensor: Tensor) -> str:
    """Return 16 hexadecimal digits that differ, all but surely, for tensors of different bits; computed where it lies.

    A polynomial in odd multipliers modulo 2**64: one word that differs is always noticed.
    """
    data = as_bytes(tensor.detach().contiguous())
    words = F.pad(data, (0, -len(data) % 8)).view(torch.int64) if len(data) % 8 else data.view(torch.int64)
    factors = (2 * torch.arange(min(_WORDS, len(words)), device=words.device) + 1) * _ODD
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(_WORDS):
        mixed = piece ^ (piece >> 32 & 0xFFFFFFFF)  # low bits of a float64 that was a float32 are all zero
        total = total * _ODD + (mixed * factors[: len(piece)]).sum()
    return f"{int(total) % 2**64:016x}"


@torch.no_grad()
def take_first(module: nn.Module, transport: AbstractTransport) -> None:
    """Give a module the first rank's parameters and persistent buffers, in place; those on the meta device stay as they are.

    Args:
        module: of the same names, dtypes and shapes on all ranks.
        transport: of all ranks.
    """
    everyone = tuple(range(transport.world))
    for tensor in module.state_dict().values():
        if not tensor.is_meta:
            tensor.copy_(broadcast(transport, everyone, tensor.to(transport.device), 0))
