"""torchtitan with Moesaic's layer in place of its own: torchrun --nproc-per-node 2 examples/recipes/with_torchtitan.py

A run of torchtitan names the override: --override.imports with_torchtitan.moesaic_moe. Here it is applied to a small model.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from tiny import DIM, VOCAB, batches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchtitan.config import OverrideConfig, apply_overrides, derive, override
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.protocols.module import Module

import moesaic
from moesaic.parallel import parallelize_model, parameter_groups


class MoesaicMoE(Module):
    """Moesaic's layer, made from the configuration of torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        """The same fields."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        experts, router = config.routed_experts.inner_experts, config.router
        sizes = experts.dim, experts.hidden_dim, experts.num_experts, router.top_k
        self.layer = moesaic.MoE(*sizes, router=router.score_func)
        self.load_balance_coeff = None  # Moesaic's layer balances by its own loss or router

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def parallelize(self, parallel_dims) -> None:
        """Spread the experts; torchtitan calls it with its meshes."""
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            self.layer.parallelize(mesh, "auto")


@override(target=MoE.Config, exact=True, description="Moesaic's MoE layer")
def moesaic_moe(config: MoE.Config) -> MoesaicMoE.Config:
    return derive(config, MoesaicMoE.Config)


class TwoBlocks(Module):
    """A torchtitan model: MoE layers with residuals, an embedding before and a head behind."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layers: list[MoE.Config]

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(layer.build() for layer in config.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = x + layer(nn.functional.layer_norm(x, (DIM,)))
        return cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def titan_layer() -> MoE.Config:
    """Return the configuration of torchtitan's layer."""
    experts = GroupedExperts.Config(dim=DIM, hidden_dim=32, num_experts=8)
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=8, top_k=2)
    gate = Linear.Config(in_features=DIM, out_features=8)
    router = TokenChoiceTopKRouter.Config(num_experts=8, gate=gate, top_k=2, score_func="softmax")
    routed = RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher)
    return MoE.Config(num_experts=8, routed_experts=routed, router=router)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    config = TwoBlocks.Config(layers=[titan_layer(), titan_layer()])
    apply_overrides(OverrideConfig(imports=["with_torchtitan.moesaic_moe"]), config)
    model = config.build()
    mesh = parallelize_model(model, dist.group.WORLD, "auto")
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.01)
    for tokens in batches(mesh.rank, mesh.grid.dp):
        loss = model(tokens)
        loss.backward()
        moesaic.average_gradients(model, mesh)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if mesh.rank == 0:
            print(f"loss {loss.item() / mesh.grid.dp:.6f}")
    dist.destroy_process_group()
