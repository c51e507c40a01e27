"""The files of a checkpoint that hold what a rank needs to go on with the same bits: optimizer,
schedule, random numbers. Another split of the ranks goes on from them too.

A *split* says which layers and experts each rank has. An optimizer numbers its parameters, in an
order that depends on the split, so parameters of another split are found by their names, such as
`base_model.model.model.layers.3.mlp.experts.lora_A.default.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic.errors import InputError
from moesaic.resuming import COMPLETE, DamagedError, sealed_sums
from moesaic.storage.nested import read_nested, write_nested
from moesaic.train.ranks import Ranks
from moesaic.transformers.lora import factor_part, whole_factor

PATTERN = "states-*-of-*.safetensors"
"""Names of such files in a checkpoint."""
NAMES = "names"
"""What a rank of several stages writes besides: the names of its adapters, as the optimizer counts
them."""


def states_name(rank: int, world: int) -> str:
    """Return the name of a rank's file."""
    return f"states-{rank}-of-{world}.safetensors"


def saved_ranks(names: Iterable[str]) -> int:
    """Return how many ranks wrote a checkpoint, from the names of its files.

    Raises:
        DamagedError: it has no states, or those of several runs.
    """
    worlds = set()
    for name in names:
        match = re.fullmatch(r"states-[0-9]+-of-([0-9]{1,6})\.safetensors", name)
        if match is not None:
            worlds.add(int(match[1]))
    if len(worlds) != 1:
        raise DamagedError(f"{COMPLETE} lists the states of {len(worlds)} runs")
    return worlds.pop()


def write_states(path: Path, states: dict[str, Any]) -> None:
    """Write a rank's states: nested dicts and lists of numbers, texts and tensors."""
    write_nested(path, states)


def read_states(path: Path) -> dict[str, Any]:
    """Return a rank's states, on the CPU.

    Raises:
        DamagedError: the file cannot be read as such.
    """
    try:
        states = read_nested(path)
    except InputError as error:
        raise DamagedError(f"{path.name} is damaged") from error
    if not (isinstance(states, dict) and states.keys() >= {"optimizer", "schedule", "random"}):
        raise DamagedError(f"{path.name} is damaged")
    return states


MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter, in its shape, beside the number of its steps."""


@dataclass(frozen=True)
class Adapter:
    """A trained parameter of a model."""

    name: str
    """Its name."""
    is_of_experts: bool
    """Whether ranks that share experts have parts of it."""


def adapters_of(model: nn.Module) -> list[Adapter]:
    """Return the trained parameters of a model, or of a stage, in its order."""
    adapters = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            wrapper_path, _, _, _ = name.rsplit(".", 3)  # without lora_A.default.weight
            wrapper = model.get_submodule(wrapper_path)
            # PEFT's wrapper of a parameter, not of a linear layer
            is_of_experts = hasattr(wrapper, "parameter_name")
            adapters.append(Adapter(name, is_of_experts))
    return adapters


def names_in(optimizer: Any, model: nn.Module) -> list[str]:
    """Return the names of an optimizer's parameters, as it counts them."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    names = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names.append(name_of[id(parameter)])
    return names


def states_of_split(
    folder: Path, model: nn.Module, ranks: Ranks, all_adapters: Sequence[Adapter]
) -> dict[str, Any]:
    """Return the states with which this rank goes on, whatever split of ranks wrote them: those
    that it wrote itself, or the optimizer's by name.

    Args:
        folder: the checkpoint.
        model: this rank's model with adapters.
        ranks: the ranks.
        all_adapters: the adapters of all stages.

    Returns:
        "optimizer", "schedule" and "random". "optimizer" is an optimizer's state dict if this rank
        wrote it, else "named", the state of each adapter by name, and "options".

    Raises:
        DamagedError: a file cannot be read, or lacks an adapter.
    """
    own = [adapter.name for adapter in adapters_of(model)]
    world_before = saved_ranks(sealed_sums(folder))
    without_stages = _as_counted(all_adapters, world_before)  # files of such runs have no names
    if world_before == ranks.world:
        states = read_states(folder / states_name(ranks.rank, world_before))
        names = states.pop(NAMES, without_stages)
        if sorted(names) == sorted(own):  # of the same split
            return states

    # name of an adapter -> its state on each earlier rank that had it, or a part of it
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in own}
    for rank_before in range(world_before):
        states = read_states(folder / states_name(rank_before, world_before))
        state_of = states["optimizer"]["state"]  # by number
        for number, name in enumerate(states.pop(NAMES, without_stages)):
            if name in parts and number in state_of:
                parts[name].append(state_of[number])
        # Schedule and random numbers are those of one earlier rank.
        if rank_before == ranks.rank % world_before:
            result = states
    named = {}
    for name, of_ranks in parts.items():
        if not of_ranks:
            raise DamagedError(f"no states-*.safetensors has {name}")
        named[name] = _joined(model, name, of_ranks)
    options = result["optimizer"]["param_groups"][0]  # taken for all groups
    return result | {"optimizer": {"named": named, "options": options}}


def numbered(states: dict[str, Any], optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's states as `load_state_dict` takes them; `states` is the entry
    "optimizer" of what `states_of_split` returns."""
    if "named" not in states:  # of the same split: numbered already
        return states
    own = optimizer.state_dict()
    options = dict(states["options"])
    del options["params"]  # the numbers of its parameters are those of now
    groups = [group | options for group in own["param_groups"]]
    by_number = {}
    for number, name in enumerate(names_in(optimizer, model)):
        by_number[number] = states["named"][name]
    return {"state": by_number, "param_groups": groups}


def require_states(kept: dict[str, Any], optimizer: Any) -> None:
    """Raise DamagedError if the states of a checkpoint are not those of an optimizer's parameters,
    or of its schedule: kernels would read memory that is not theirs."""
    own = optimizer.state_dict()
    found = kept["optimizer"]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if sorted(found["state"]) != list(range(len(parameters))):
        raise DamagedError(f"they are of {len(found['state'])} adapters, not {len(parameters)}")
    for number, parameter in enumerate(parameters):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        shapes = {name: tuple(each.shape) for name, each in found["state"][number].items()}
        if shapes != {"step": (), **dict.fromkeys(MOMENTS, tuple(local.shape))}:
            raise DamagedError(f"those of adapter {number} have the shapes {shapes}")
    # as many groups as the optimizer has: the numbers in them are computed with
    pairs = [*zip(own["param_groups"], found["param_groups"])]
    numbers = [(name, group[name]) for _, group in pairs for name in ("lr", "eps", "weight_decay")]
    numbers += [(name, kept["schedule"][name]) for name in ("last_epoch", "_step_count")]
    for name, value in numbers:
        if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
            raise DamagedError(f"{name}={value!r:.60} is no number")


def _as_counted(adapters: Sequence[Adapter], ranks: int) -> list[str]:
    """Return the names of a model's adapters as the optimizer of a run without stages counts them:
    on several ranks, those of experts apart from the others."""
    if ranks == 1:
        return [adapter.name for adapter in adapters]
    # The kind of the first adapter comes first.
    names_of_kind: dict[bool, list[str]] = {}
    for adapter in adapters:
        names_of_kind.setdefault(adapter.is_of_experts, []).append(adapter.name)
    return [name for names in names_of_kind.values() for name in names]


def _joined(model: nn.Module, name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the optimizer's state of this rank's part of an adapter, from those of all ranks that
    wrote one."""
    wrapper_path, factor, _, _ = name.rsplit(".", 3)  # ...experts, lora_A, default, weight
    wrapper: Any = model.get_submodule(wrapper_path)
    parameter = model.get_parameter(name)
    if not hasattr(wrapper, "parameter_name"):  # of a linear layer: whole on every rank
        return parts[0]
    ranks = 1
    place = 0
    if isinstance(parameter, DTensor):
        ranks = parameter.device_mesh.size()
        place = parameter.device_mesh.get_local_rank()
    num_experts = wrapper.num_experts * ranks  # the wrapper counts this rank's own

    def own_part(values: list[Any]) -> Any:
        """Return this rank's part of a state of which `values` are the parts; numbers are equal."""
        if not isinstance(values[0], Tensor) or not values[0].dim():
            return values[0]
        # parts of lora_A follow each other in the rows, those of lora_B in the columns
        experts_dim = 1 if factor == "lora_B" else 0
        joined = torch.cat(values, experts_dim)
        whole = whole_factor(factor, joined, num_experts, len(values))
        return factor_part(factor, whole, num_experts, ranks, place).contiguous()

    return {key: own_part([part[key] for part in parts]) for key in parts[0]}
