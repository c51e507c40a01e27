"""`DistributedConfig(ep_implementation="moesaic")`: transformers' expert parallelism with Moesaic's programs and plans.

transformers shards the stacked experts over its ep mesh and gives each experts module an implementation, which dispatches
tokens and combines results. This implementation interprets Moesaic's compiled programs, with all features of a plan:
overlapping chunks, hierarchical all-to-alls, multicast, replication of overloaded experts.

Gradients are those of transformers' own all-to-all: an expert's is the sum over all tokens that reach the expert; those of a
token and of its routing weights are complete.
"""

from __future__ import annotations

import os
from functools import partial, wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import (
    AllToAllEP,
    EPImplementation,
    EPImplementationInterface,
    MoEParamShard,
)

from moesaic.chosen import ChosenExperts
from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.program.compile import Compiled
from moesaic.program.plan import Plan
from moesaic.transformers.experts import Matrices, family_experts, gate_of, refusal, warn


class MoesaicEP(EPImplementation):
    """Runs one experts module over an ep mesh. All ranks of the mesh construct and call it together.

    Moesaic's programs cannot run experts with a gate or norm that only their model family has. Those run with transformers'
    all-to-all, and a warning says so.

    Args:
        experts: the experts module, with this rank's part of the parameters.
        ep_mesh: the ranks over which experts are spread.
        tp_mesh: the ranks that hold the same tokens, neighbours within `ep_mesh`.
        plan: the plan to run; None to choose it during training, as `MoE.parallelize(..., "auto")` does.

    Raises:
        InputError: the plan does not fit the mesh, or ranks differ in plan or model. Raised on every rank.
    """

    def __init__(
        self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, *, plan: Plan | Compiled | None = None
    ) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        reason = refusal(experts)
        if reason is None and gate_of(experts) is None:
            reason = "has its own gate or norm, which Moesaic's programs cannot run on other ranks"
        self.instead: AllToAllEP | None = None
        if reason is not None:
            warn(f"{type(experts).__name__} {reason}: transformers' own all_to_all sends its tokens")
            self.instead = AllToAllEP(experts, ep_mesh, tp_mesh)
            return
        tp = tp_mesh.size() if ep_mesh.size() % tp_mesh.size() == 0 else 1
        mesh = Mesh.from_device_mesh(ep_mesh, tp=tp)
        hidden = Matrices.of(experts).down.shape[2]
        spread = family_experts(experts, self.num_local_experts * ep_mesh.size())
        self.run = ChosenExperts(spread, hidden, experts.parameters, mesh, plan)
        experts._moesaic = self  # where `use_plan` finds it

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts of all ranks on this rank's tokens.

        Args:
            hidden_states: (tokens, dim); any number of tokens, including none.
            top_k_index: (tokens, K) indices into the experts of all ranks.
            top_k_weights: (tokens, K) routing weights.

        Returns:
            (tokens, dim): each token's weighted sum of expert outputs.
        """
        if self.instead is not None:
            rows: Tensor = self.instead(hidden_states, top_k_index, top_k_weights)
            return rows
        return self.run(hidden_states, top_k_index.long(), top_k_weights)


def register_plan(name: str, plan: Plan | Compiled) -> None:
    """Register a plan under a name for `DistributedConfig(ep_implementation=name)`.

    Call it on all ranks before the model is loaded.

    Args:
        name: a name of your choice.
        plan: the plan with which the experts run.

    Raises:
        InputError: transformers uses the name for another implementation, or `plan` is not a plan.
    """
    registry: Any = EPImplementationInterface()
    if name in registry and not isinstance(registry[name], partial):
        raise InputError(f"ep_implementation={name!r} is taken: choose another name for the plan")
    if not isinstance(plan, Plan | Compiled):
        raise InputError(f"register_plan: a plan is a moesaic.Plan, not {type(plan).__name__}: write Plan(...)")
    EPImplementationInterface.register(name, partial(MoesaicEP, plan=plan))


def use_plan(model: nn.Module, plan: Plan | Compiled) -> None:
    """Run all experts of a model with another plan from the next call on. Moves no weights and sends nothing.

    All ranks call it between steps, with the same plan.

    Args:
        model: a model loaded with `ep_implementation="moesaic"` or a name from `register_plan`.
        plan: the new plan.

    Raises:
        InputError: no experts of the model run with Moesaic's programs, or the plan does not fit their mesh.
    """
    attached = [getattr(module, "_moesaic", None) for module in model.modules()]
    implementations = [mark for mark in attached if isinstance(mark, MoesaicEP)]
    if not implementations:
        raise InputError(
            'use_plan: no experts of this model run on Moesaic: load it with ep_implementation="moesaic" and ep_size > 1'
        )
    for implementation in implementations:
        implementation.run.use_plan(plan)


def fill_in_fsdp_size() -> None:
    """Patch `DistributedConfig` to fill in `fsdp_size` if the implementation is one of Moesaic's and the user gave none.

    transformers would take 1 and then refuse the mesh. The value filled in gives every tensor-parallel group its own batch.
    """
    resolve = DistributedConfig._resolve_parallelism

    @wraps(resolve)
    def resolved(config: Any) -> None:
        is_given = config.fsdp_size is not None
        resolve(config)
        registry: Any = EPImplementationInterface()
        chosen = registry.get(config.ep_implementation)
        if is_given or config.ep_size == 1 or getattr(chosen, "func", chosen) is not MoesaicEP:
            return
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        config.fsdp_size = max(world // (config.tp_size * config.pp_size * config.dp_replicate_size), 1)
        if config.fsdp_size * config.tp_size % config.ep_size:
            raise InputError(
                f"ep_size={config.ep_size} does not divide the processes that share a model, {world} of them: start "
                f"torchrun --nproc-per-node {config.ep_size}, or choose an ep_size that divides them"
            )

    DistributedConfig._resolve_parallelism = resolved


def refuse_uneven_experts() -> None:
    """Patch transformers' loading to raise a clear error if ep_size does not divide the number of a model's experts."""
    shard = MoEParamShard.shard_param

    @wraps(shard)
    def sharded(style: Any, module: nn.Module, name: str, mesh: DeviceMesh) -> None:
        stacked = module._parameters.get(name)
        if style.shards_expert_dim and stacked is not None and len(stacked) % mesh.size():
            raise InputError(
                f"ep_size={mesh.size()} does not divide the {len(stacked)} experts of {type(module).__name__}: "
                f"choose a divisor of {len(stacked)}"
            )
        shard(style, module, name, mesh)

    MoEParamShard.shard_param = sharded
