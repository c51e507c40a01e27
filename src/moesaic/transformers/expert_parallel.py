"""`DistributedConfig(ep_implementation="moesaic")`: transformers' expert parallelism by Moesaic's programs and plans.

transformers shards each expert's parameters over its ep mesh and gives every experts module one implementation, which brings
tokens to experts and results back. Here that is the interpreter of the compiled programs, with whatever a plan asks for:
chunks that overlap, hierarchical all-to-alls, multicast, replication of what overloads a rank. A gradient is what
transformers' own exchange gives: of an expert the sum over all tokens that reach it, of a token or weight the whole.
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

from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.plan import Compiled, Plan
from moesaic.runtime.auto_plan import AutoPlan
from moesaic.runtime.balance.calls import calls_under
from moesaic.runtime.expert_parallel import ExpertParallel
from moesaic.transformers.experts import FamilyExperts, Matrices, gate_of, refusal, say


class MoesaicEP(EPImplementation):
    """One experts module on an ep mesh. All ranks of the mesh make it together, and call it together.

    Experts that Moesaic's programs cannot run, those with a gate or a norm that is the family's own, run over transformers'
    all-to-all, which a line says.

    Args:
        experts: the module, whose parameters are this rank's part of them.
        ep_mesh: the ranks over which experts are spread.
        tp_mesh: the ranks that hold the same tokens, neighbours within `ep_mesh`.
        plan: which of the equivalent ways it runs in; None to find it while training, as `MoE.parallelize(..., "auto")` does.

    Raises:
        InputError: on every rank, for a plan that does not fit the mesh, or ranks that differ in plan or model.
    """

    def __init__(
        self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, *, plan: Plan | Compiled | None = None
    ) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        reason = refusal(experts)
        if reason is None and gate_of(experts) is None:
            reason = "has a gate or a norm of its own, which programs do not take to other ranks"
        self.instead: AllToAllEP | None = None
        if reason is not None:
            say(f"{type(experts).__name__} {reason}: its tokens go by transformers' all_to_all")
            self.instead = AllToAllEP(experts, ep_mesh, tp_mesh)
            return
        tp = tp_mesh.size() if ep_mesh.size() % tp_mesh.size() == 0 else 1
        mesh = Mesh.from_device_mesh(ep_mesh, tp=tp)
        self.experts = FamilyExperts(experts, self.num_local_experts * ep_mesh.size())
        settings = {name: getattr(self.experts, name) for name in ("num_experts", "dim", "activation", "clamp", "bias")}
        named = {f"experts.{name}": value for name, value in settings.items()} | {"whether plan is auto": plan is None}
        calls = partial(calls_under, policy=None, num_experts=self.experts.num_experts, dim=self.experts.dim)
        self.on_mesh = ExpertParallel(
            mesh.grid, mesh.transport, plan or Plan(), self.experts, False, calls, settings=named
        )
        if plan is None:
            AutoPlan.of(mesh).join(self.on_mesh, self.experts, Matrices.of(experts).down.shape[2], experts.parameters)
        experts._moesaic = self  # where `use_plan` finds it

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts of all ranks on this rank's tokens.

        Args:
            hidden_states: (tokens, dim); any number of tokens, none too.
            top_k_index: (tokens, K) experts, of all ranks' numbering.
            top_k_weights: (tokens, K) routing weights.

        Returns:
            (tokens, dim): each token's weighted sum.
        """
        if self.instead is not None:
            rows: Tensor = self.instead(hidden_states, top_k_index, top_k_weights)
            return rows
        routed = self.on_mesh.route_chosen(hidden_states, top_k_index.long(), top_k_weights)
        return self.on_mesh.run_experts(self.experts, hidden_states, routed, None)


def register_plan(name: str, plan: Plan | Compiled) -> None:
    """Make a plan a name that `DistributedConfig(ep_implementation=name)` takes; on all ranks, before the model is loaded.

    Args:
        name: one of your own.
        plan: which of the equivalent ways the experts run in.

    Raises:
        InputError: for a name that transformers has for something else, or what is no plan.
    """
    known: Any = EPImplementationInterface()
    if name in known and not isinstance(known[name], partial):
        raise InputError(f"ep_implementation={name!r} is taken: choose another name for the plan")
    if not isinstance(plan, Plan | Compiled):
        raise InputError(f"register_plan: a plan is a moesaic.Plan, not {type(plan).__name__}: write Plan(...)")
    EPImplementationInterface.register(name, partial(MoesaicEP, plan=plan))


def use_plan(model: nn.Module, plan: Plan | Compiled) -> None:
    """Run all experts of a model under another plan from the next call on; no weight moves, and nothing is sent.

    All ranks call it, between steps, with the same plan.

    Args:
        model: loaded with `ep_implementation="moesaic"` or a name of `register_plan`.
        plan: which of the equivalent ways it runs in.

    Raises:
        InputError: if no experts of the model run by Moesaic's programs, or the plan does not fit their mesh.
    """
    noted = [getattr(module, "_moesaic", None) for module in model.modules()]
    found = [each for each in noted if isinstance(each, MoesaicEP)]
    if not found:
        raise InputError(
            'use_plan: no experts of this model run by Moesaic: load it with ep_implementation="moesaic" and ep_size > 1'
        )
    for implementation in found:
        implementation.on_mesh.use(plan, implementation.experts)
        implementation.on_mesh.auto = None


def complete_sizes() -> None:
    """Let `DistributedConfig(ep_size=N, ep_implementation="moesaic")` do without `fsdp_size`, which transformers takes as 1 and
    then refuses: every rank that tp leaves has a batch of its own. Only where the implementation is one of Moesaic's.
    """
    resolve = DistributedConfig._resolve_parallelism

    @wraps(resolve)
    def resolved(config: Any) -> None:
        is_said = config.fsdp_size is not None
        resolve(config)
        known: Any = EPImplementationInterface()
        chosen = known.get(config.ep_implementation)
        if is_said or config.ep_size == 1 or getattr(chosen, "func", chosen) is not MoesaicEP:
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
    """Let loading say what to write where ep_size does not divide a model's experts, which transformers leaves out."""
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
