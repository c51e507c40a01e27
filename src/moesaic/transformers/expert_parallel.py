"""`DistributedConfig(ep_implementation="moesaic")`: transformers' expert parallelism with Moesaic's
programs and plans.

transformers shards the stacked experts over its ep mesh and gives each experts module an
implementation, which dispatches tokens and combines results. This implementation interprets
Moesaic's compiled programs, with all features of a plan: overlapping chunks, hierarchical
all-to-alls, multicast, replication of overloaded experts. An ep mesh (transformers' word) has the
ranks over which experts are spread; within it, the ranks of a tp mesh hold the same tokens.

Gradients are those of transformers' own all-to-all: an expert's is the sum over all tokens that
reach the expert; those of a token and of its routing weights are complete.
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import (
    AllToAllEP,
    EPImplementation,
    EPImplementationInterface,
)

from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts
from moesaic.given_routing import ChosenExperts
from moesaic.program.compile import Compiled
from moesaic.program.plan import Plan
from moesaic.transformers.experts_backend import family_experts, gate_of, refusal, warn
from moesaic.transformers.lora import (
    FamilyFrozenExperts,
    adopt_at_first_call,
    hidden_of,
    is_four_bit,
    is_frozen,
)


class MoesaicEP(EPImplementation):
    """Runs one experts module over an ep mesh. All ranks of the mesh construct and call it
    together.

    Moesaic's programs cannot run experts with a gate or norm that only their model family has.
    Those run with transformers' all-to-all, and a warning says so.

    Args:
        experts: the experts module, with this rank's part of the parameters.
        ep_mesh: the ranks over which experts are spread.
        tp_mesh: the ranks that hold the same tokens, neighbours within `ep_mesh`.
        plan: the plan to run; None to choose it during training, as `MoE.parallelize(..., "auto")`
            does.

    Raises:
        InputError: the plan does not fit the mesh, or ranks differ in plan or model. Raised on
            every rank.
    """

    def __init__(
        self,
        experts: nn.Module,
        ep_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
        *,
        plan: Plan | Compiled | None = None,
    ) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        reason = None if is_four_bit(experts) else refusal(experts)
        if reason is None and gate_of(experts) is None:
            reason = "has its own gate or norm, which Moesaic's programs cannot run on other ranks"
        self.instead: AllToAllEP | None = None
        """transformers' own implementation, which runs experts that Moesaic's programs cannot."""
        if reason is not None:
            warn(
                f"{type(experts).__name__} {reason}: transformers' own all_to_all sends its tokens"
            )
            self.instead = AllToAllEP(experts, ep_mesh, tp_mesh)
            return

        # an ep mesh that is not made of whole tp meshes runs as if each rank had its own tokens
        tp = tp_mesh.size() if ep_mesh.size() % tp_mesh.size() == 0 else 1
        mesh = Mesh.from_device_mesh(ep_mesh, tp=tp)
        self._experts = weakref.ref(experts)  # weak, since the experts hold this object
        # computes the experts of all ranks on this rank's tokens, by a plan
        self.run = ChosenExperts(
            self._spread(experts),
            hidden=hidden_of(experts),
            parameters=experts.parameters,
            mesh=mesh,
            plan=plan,
        )
        experts._moesaic = self  # where `use_plan` finds it
        adopt_at_first_call(experts)

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

    def exchange(self) -> None:
        """Let the next calls run the experts with the adapters that these have now. All ranks call
        it together."""
        experts = self._experts()
        assert experts is not None
        self.run.exchange(self._spread(experts))

    def _spread(self, experts: nn.Module) -> AbstractExperts:
        """Return an experts module of transformers as Moesaic's experts of all ranks of ep."""
        num_experts = self.num_local_experts * self.ep_mesh.size()
        if is_frozen(experts):
            return FamilyFrozenExperts(experts, num_experts)
        return family_experts(experts, num_experts)


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
    # a partial is what an earlier call registered below
    if name in registry and not isinstance(registry[name], partial):
        raise InputError(f"ep_implementation={name!r} is taken: choose another name for the plan")
    if not isinstance(plan, Plan | Compiled):
        raise InputError(
            f"register_plan: a plan is a moesaic.Plan, not {type(plan).__name__}: write Plan(...)"
        )
    EPImplementationInterface.register(name, partial(MoesaicEP, plan=plan))


def use_plan(model: nn.Module, plan: Plan | Compiled) -> None:
    """Run all experts of a model with another plan from the next call on. Moves no weights and
    sends nothing.

    All ranks call it between steps, with the same plan.

    Args:
        model: a model loaded with `ep_implementation="moesaic"` or a name from `register_plan`.
        plan: the new plan.

    Raises:
        InputError: no experts of the model run with Moesaic's programs, or the plan does not fit
            their mesh.
    """
    attached = [getattr(module, "_moesaic", None) for module in model.modules()]
    implementations = [each for each in attached if isinstance(each, MoesaicEP)]
    if not implementations:
        raise InputError(
            "use_plan: no experts of this model run on Moesaic: load it with "
            'ep_implementation="moesaic" and ep_size > 1'
        )
    for implementation in implementations:
        implementation.run.use_plan(plan)


def distributed_config(
    ep_size: int, *, ep_implementation: str = "moesaic", **options: Any
) -> DistributedConfig:
    """Return the configuration that spreads a model's experts over ranks, for
    `from_pretrained(distributed_config=...)`.

    Unlike `DistributedConfig` itself it sets `fsdp_size` if none is given, so that every
    tensor-parallel group has its own batch.

    Args:
        ep_size: ranks over which experts are spread.
        ep_implementation: "moesaic", or a name from `register_plan`.
        options: further fields of `DistributedConfig`.

    Raises:
        InputError: ep_size does not divide the processes that share a model.
    """
    if options.get("fsdp_size") is None and ep_size > 1:
        if dist.is_initialized():
            world = dist.get_world_size()
        else:
            world = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun's
        tp = options.get("tp_size") or 1
        pp = options.get("pp_size") or 1
        replicas = options.get("dp_replicate_size") or 1
        fsdp = max(world // (tp * pp * replicas), 1)  # all ranks that the other sizes leave
        if fsdp * tp % ep_size:
            raise InputError(
                f"ep_size={ep_size} does not divide the processes that share a model, {world} of "
                f"them: start torchrun --nproc-per-node {ep_size}, or choose an ep_size that "
                "divides them"
            )
        options["fsdp_size"] = fsdp
    return DistributedConfig(ep_size=ep_size, ep_implementation=ep_implementation, **options)
