"""torchtitan 0.3 with Moesaic's programs for its experts: torchrun --nproc-per-node 2
examples/recipes/with_torchtitan.py

A run of torchtitan names the override: --override.imports with_torchtitan.moesaic_experts. It
replaces what dispatches tokens, runs experts and combines results. Router, shared experts,
parameters, their names and initialisation stay torchtitan's. Here it is applied to torchtitan's
smallest Qwen3 with experts.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims
from tiny import batches
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torchtitan.config import (
    CompileConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
    apply_overrides,
    derive,
    override,
)
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.models.qwen3 import parallelize_qwen3, qwen3_configs
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.experts import BorrowedExperts, Clamp
from moesaic.given_routing import ChosenExperts
from moesaic.parallel import parameter_groups

KNOWN = {
    "inner_experts": (GroupedExperts.Config, GptOssGroupedExperts.Config),
    "token_dispatcher": (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config),
}


class MoesaicExperts(RoutedExperts):
    """torchtitan's routed experts, which Moesaic runs; they keep their parameters."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """The same fields."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        inner = config.inner_experts
        self.hidden = inner.hidden_dim
        self.with_bias = isinstance(inner, GptOssGroupedExperts.Config)
        clamp = Clamp(inner.swiglu_limit, alpha=1.702, offset=1.0) if self.with_bias else None
        experts = BorrowedExperts(
            inner.dim, inner.num_experts, read=self.weights, clamp=clamp, bias=self.with_bias
        )
        self.run = ChosenExperts(experts, self.hidden, self.parameters)

    def weights(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return this rank's part of the parameters as Moesaic's kernels take them, gate and up in
        one tensor."""
        parameters = dict(self.inner_experts.named_parameters(recurse=False)).items()
        of = {
            name: each.to_local() if isinstance(each, DTensor) else each
            for name, each in parameters
        }
        if not self.with_bias:
            return (torch.stack((of["w1_EFD"], of["w3_EFD"]), 1), of["w2_EDF"]), ()
        up, up_bias = (
            of[name].unflatten(1, (-1, 2)).transpose(1, 2)
            for name in ("mlp1_weight_EGD", "mlp1_bias_EG")
        )
        return (up, of["mlp2_weight_EDF"], up_bias), (of["mlp2_bias_ED"],)

    def parallelize(self, parallel_dims) -> None:
        """Let torchtitan shard the parameters, then spread the calls over its ep mesh."""
        super().parallelize(parallel_dims)
        if parallel_dims.ep_enabled:
            mesh = Mesh.of(parallel_dims.get_mesh("ep"))
            self.run = ChosenExperts(self.run.experts, self.hidden, self.parameters, mesh)
        elif self.with_bias and parallel_dims.tp_enabled:
            raise InputError(
                "experts with biases cannot be cut by tp: give --parallelism.expert_parallel_degree"
            )

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        # not needed: Moesaic counts and exchanges counts itself
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        x_TD, expert_TK, weight_TK = (
            each.flatten(0, 1) for each in (x_BLD, topk_expert_ids_BLK, topk_scores_BLK)
        )
        return self.run(x_TD, expert_TK, weight_TK).view_as(x_BLD)


@override(target=RoutedExperts.Config, description="Moesaic's programs")
def moesaic_experts(config: RoutedExperts.Config) -> MoesaicExperts.Config:
    for field, known in KNOWN.items():
        kind = type(getattr(config, field))
        if kind not in known:
            raise InputError(
                f"{field}={kind.__qualname__}: Moesaic knows "
                f"{' and '.join(k.__qualname__ for k in known)}"
            )
    return derive(config, MoesaicExperts.Config)


def small_qwen3() -> Qwen3Model.Config:
    """Return the configuration of torchtitan's Qwen3 for tests, made smaller."""
    config = qwen3_configs["debugmodel_moe"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        # flex has no backward pass on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.moe.routed_experts.inner_experts.hidden_dim = 32
    return config


def as_torchtitan_does(config: Qwen3Model.Config, world: int) -> Qwen3Model:
    """Return the model of a configuration, spread and initialised by torchtitan with `ep` and FSDP
    over all ranks."""
    # it looks for GPUs alone: leave this line out on them
    torchtitan.distributed.parallel_dims.device_type = "cpu"
    dims = torchtitan.distributed.parallel_dims.ParallelDims(
        dp_replicate=1,
        dp_shard=world,
        cp=1,
        tp=1,
        pp=1,
        ep=world,
        world_size=world,
        spmd_backend="partial_dtensor",
    )
    given = ParallelismConfig(expert_parallel_degree=world, spmd_backend="partial_dtensor")
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=world > 1)
    apply_overrides(OverrideConfig(imports=["with_torchtitan.moesaic_experts"]), config)
    with torch.device("meta"):
        model = config.build()
    training = TrainingConfig(mixed_precision_param="float32")
    plain = {"compile_config": CompileConfig(), "ac_config": None, "dump_folder": ""}
    model = parallelize_qwen3(
        model, parallel_dims=dims, training=training, parallelism=given, **plain
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo knows no other reduction
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    model = as_torchtitan_does(small_qwen3(), world)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.003)
    for tokens in batches(rank, world):
        logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / (
            tokens[:, 1:].numel() * world
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0:
            print(f"loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()
