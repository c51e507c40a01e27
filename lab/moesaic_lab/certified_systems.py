"""The systems whose expert parallelism `moesaic bench certificates` tests: for each, its experts
and its whole layer.

A `LayerSpec` gives the weights of all experts (`whole`), of which a rank owns a part (`own`): gate
w1, up w3, down w2, (experts, out, in) each. `run` gets tokens x, (tokens, dim), and of each token
the numbers of its experts and their routing weights (gates), (tokens, top_k) each. Gradients are
those of this rank's experts. `clip` returns the norm of all gradients before clipping.
"""

from __future__ import annotations

import contextlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moesaic import Mesh, MoE, average_gradients, clip_grad_norm_, collect_losses
from moesaic.routing.capacity import Capacity, Dropless
from moesaic.routing.losses import LoadBalance
from moesaic.testing.certify import AbstractMoELayer, AbstractRoutedExperts, LayerSpec, MoEWeights

TIMEOUT_SECONDS = 300.0


class _OnMesh(AbstractRoutedExperts, ABC):
    """One rank's experts of a system that needs a device mesh; only the mesh's ep axis is larger
    than 1."""

    def __init__(self, spec: LayerSpec) -> None:
        self.mesh = init_device_mesh(
            "cpu", (1, spec.group.size(), 1), mesh_dim_names=("copies", "ep", "tp")
        )
        self.place(spec.weights, spec.weights.owned(spec.group), self.mesh["ep"])

    @abstractmethod
    def place(self, whole: MoEWeights, own: MoEWeights, mesh: DeviceMesh) -> None:
        """Make the layer from all experts' weights (`whole`) or this rank's (`own`)."""


class TransformersExperts(_OnMesh):
    """The Mixtral experts of transformers under one of its implementations of experts and one of
    expert parallelism."""

    implementation = "transformers.distributed.expert_parallel:AllToAllEP"
    backend = "eager"

    def place(self, whole: MoEWeights, own: MoEWeights, mesh: DeviceMesh) -> None:
        """Make this rank's experts, and the implementation that exchanges their tokens."""
        transformers: Any = import_module("transformers")
        modeling: Any = import_module("transformers.models.mixtral.modeling_mixtral")
        _, hidden, dim = own.w1.shape
        config = transformers.MixtralConfig(
            hidden_size=dim,
            intermediate_size=hidden,
            num_local_experts=own.num_experts,
            experts_implementation=self.backend,
        )
        self.experts: Any = modeling.MixtralExperts(config)
        gate_up = torch.cat([own.w1, own.w3], 1)
        self.experts.gate_up_proj = nn.Parameter(gate_up)
        self.experts.down_proj = nn.Parameter(own.w2.clone())
        self.experts._is_expert_parallel = True
        module, _, name = self.implementation.partition(":")
        # The ranks that have the same tokens: all of ep, or only this one, as tp has one rank.
        sharing = mesh if self.shares_tokens else self.mesh["tp"]
        self.ep = getattr(import_module(module), name)(self.experts, mesh, sharing)

    def run(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Run the experts under the implementation."""
        y: Tensor = self.ep(x, experts, gates)
        return y

    def gradients(self) -> MoEWeights:
        """Split the gradient of the fused gate and up projection."""
        d_up = _gradient(self.experts.gate_up_proj)
        d_down = _gradient(self.experts.down_proj)
        w1, w3 = d_up.chunk(2, 1)
        return MoEWeights(w1, w3, d_down)


class TorchtitanExperts(_OnMesh):
    """torchtitan's all-to-all dispatcher around plain products, since its own experts multiply in
    bfloat16."""

    def place(self, whole: MoEWeights, own: MoEWeights, mesh: DeviceMesh) -> None:
        """Keep what the dispatcher needs, and this rank's weights."""
        module: Any = import_module("torchtitan.models.common.token_dispatcher")
        import_module("torchtitan.distributed.utils").set_spmd_backend("partial_dtensor")
        self._dispatcher_type = module.AllToAllTokenDispatcher
        self._num_experts = whole.num_experts
        self._mesh = mesh
        self.w1 = own.w1.clone().requires_grad_()
        self.w3 = own.w3.clone().requires_grad_()
        self.w2 = own.w2.clone().requires_grad_()

    def run(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Dispatch, multiply expert by expert, combine."""
        dispatcher = self._dispatcher_type(
            self._dispatcher_type.Config(num_experts=self._num_experts, top_k=experts.shape[1])
        )
        dispatcher.wire_meshes(ep_mesh=self._mesh)
        counts = torch.bincount(experts.flatten(), minlength=self._num_experts)
        rows, arrived, metadata = dispatcher.dispatch(x, gates, experts, counts)
        results = []
        for number, part in enumerate(rows.split(arrived.tolist())):  # the rows of an expert
            gate = part @ self.w1[number].T
            up = part @ self.w3[number].T
            results.append((F.silu(gate) * up) @ self.w2[number].T)
        y: Tensor = dispatcher.combine(torch.cat(results), metadata, x)
        return y

    def gradients(self) -> MoEWeights:
        """Return the gradients of the plain products' weights."""
        return _expert_gradients(self)


class DeepSpeedExperts(AbstractRoutedExperts):
    """DeepSpeed's MoE layer behind a gate that returns a given routing, with capacity for every
    token."""

    def __init__(self, spec: LayerSpec) -> None:
        own = spec.weights.owned(spec.group)
        group = spec.group
        with _deepspeed():
            sharded: Any = import_module("deepspeed.moe.sharded_moe")
            experts = import_module("deepspeed.moe.experts").Experts(
                _OneExpert(own), own.num_experts
            )
        # `Experts` has copied one expert; each copy gets the weights of its own.
        for number, expert in enumerate(experts.deepspeed_experts):
            for name in ("w1", "w3", "w2"):
                getattr(expert, name).data.copy_(getattr(own, name)[number])
        self.gate = _GivenGate(spec.weights.num_experts, group)
        self.layer = sharded.MOELayer(self.gate, experts, "ep", group.size(), own.num_experts)
        self.layer.ep_group = group

    def run(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Pass the routing to the gate and run the layer."""
        self.gate.experts = experts
        self.gate.gates = gates
        y: Tensor = self.layer(x, None)
        return y

    def gradients(self) -> MoEWeights:
        """Stack the gradients of the single experts."""
        experts = self.layer.experts.deepspeed_experts
        w1 = torch.stack([_gradient(expert.w1) for expert in experts])
        w3 = torch.stack([_gradient(expert.w3) for expert in experts])
        w2 = torch.stack([_gradient(expert.w2) for expert in experts])
        return MoEWeights(w1, w3, w2)


class MoesaicLayer(AbstractMoELayer):
    """Moesaic's layer, parallelized by `parallelize`."""

    has_capacity = True

    def __init__(self, spec: LayerSpec) -> None:
        capacity = (
            Dropless() if spec.capacity is None else Capacity.fixed(spec.capacity, scope="rank")
        )
        _, hidden, dim = spec.weights.w1.shape
        self.layer = MoE(
            dim,
            hidden,
            spec.weights.num_experts,
            spec.top_k,
            losses=LoadBalance(1.0),
            capacity=capacity,
            router_options={"normalize": "after" if spec.top_k > 1 else "before"},
        )
        w13 = torch.stack([spec.weights.w1, spec.weights.w3], 1)
        values = {"router.weight": spec.router, "experts.w13": w13, "experts.w2": spec.weights.w2}
        assert not self.layer.load_state_dict(values, strict=False).unexpected_keys
        self.mesh = Mesh.of(spec.group)
        self.layer.parallelize(self.mesh)

    def run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the layer and collect its loss."""
        y = self.layer(x)
        return y, torch.stack(collect_losses(self.layer)).sum()

    def gradients(self) -> MoEWeights:
        """Return this rank's gradients."""
        w1, w3 = _gradient(self.layer.experts.w13).unbind(1)
        w2 = _gradient(self.layer.experts.w2)
        router = _gradient(self.layer.router.weight)
        return MoEWeights(w1, w3, w2, router)

    def clip(self, max_norm: float, dense: nn.Parameter) -> float | None:
        """Average gradients over dp and clip them, as before an optimizer step; then undo the
        mean."""
        average_gradients(self.layer, self.mesh)
        # The expected gradients are sums over dp: their norm is dp times that of the means.
        dp = self.mesh.grid.dp
        module = nn.ModuleList([self.layer, nn.ParameterList([dense])])
        _gradient(dense).div_(dp)
        norm = float(clip_grad_norm_(module, max_norm / dp)) * dp
        for parameter in module.parameters():
            _gradient(parameter).mul_(dp)
        return norm


class TransformersLayer(AbstractMoELayer):
    """The router, experts and load-balancing loss of Mixtral in transformers, clipped as by its
    `Trainer`."""

    kind = TransformersExperts

    def __init__(self, spec: LayerSpec) -> None:
        modeling: Any = import_module("transformers.models.mixtral.modeling_mixtral")
        transformers: Any = import_module("transformers")
        self.top_k = spec.top_k
        self.experts = self.kind(spec)
        self.group = spec.group
        num_experts, dim = spec.router.shape
        config = transformers.MixtralConfig(
            hidden_size=dim, num_local_experts=num_experts, num_experts_per_tok=spec.top_k
        )
        self.router: Any = modeling.MixtralTopKRouter(config)
        self.router.weight.data.copy_(spec.router)
        self.loss: Any = modeling.load_balancing_loss_func

    @classmethod
    def normalizes(cls, top_k: int) -> bool:
        """Return True: Mixtral's router always normalizes routing weights."""
        return True

    def run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Route the tokens and run the experts."""
        logits, gates, experts = self.router(x)
        y = self.experts.run(x, experts, gates)
        return y, self.loss((logits,), len(self.router.weight), self.top_k)

    def gradients(self) -> MoEWeights:
        """Return this rank's gradients."""
        return replace(self.experts.gradients(), router=_gradient(self.router.weight))

    def clip(self, max_norm: float, dense: nn.Parameter) -> float | None:
        """Clip as `Trainer` does where parameters are on several meshes."""
        if not self.shares_tokens:
            _sum_gradient(self.router.weight, self.group)
        experts = self.experts.experts
        mesh = self.experts.mesh
        same = [self.router.weight, dense]
        split = [experts.gate_up_proj, experts.down_proj]
        parameters = _placed(same, split, mesh)
        trainer: Any = import_module("transformers").Trainer
        # without a trainer, of which the method reads nothing
        return float(trainer._mixed_mesh_grad_norm(None, nn.ParameterList(parameters), max_norm))


class TorchtitanLayer(AbstractMoELayer):
    """torchtitan's router and dispatcher. Its layer balances loads by a bias and has no auxiliary
    loss."""

    def __init__(self, spec: LayerSpec) -> None:
        self.experts = TorchtitanExperts(spec)
        self.group = spec.group
        moe: Any = import_module("torchtitan.models.common.moe")
        linear: Any = import_module("torchtitan.models.common.linear").Linear
        num_experts, dim = spec.router.shape
        self.router: Any = moe.TokenChoiceTopKRouter.Config(
            num_experts=num_experts,
            gate=linear.Config(in_features=dim, out_features=num_experts),
            top_k=spec.top_k,
            score_func="softmax",
            route_norm=spec.top_k > 1,
        ).build()
        self.router.gate.weight.data.copy_(spec.router)

    def run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Route a batch of one sequence and run the experts."""
        gates, experts, _ = self.router(x.unsqueeze(0))
        return self.experts.run(x, experts[0], gates[0]), None

    def gradients(self) -> MoEWeights:
        """Return this rank's gradients."""
        return replace(self.experts.gradients(), router=_gradient(self.router.gate.weight))

    def clip(self, max_norm: float, dense: nn.Parameter) -> float | None:
        """Clip as torchtitan does, with DTensors as in its models."""
        _sum_gradient(self.router.gate.weight, self.group)
        own = self.experts
        same = [self.router.gate.weight, dense]
        split = [own.w1, own.w3, own.w2]
        parameters = _placed(same, split, own.mesh)
        clip = import_module("torchtitan.distributed.utils").clip_grad_norm_
        return float(clip(parameters, max_norm, ep_enabled=True))


class DeepSpeedMoELayer(AbstractMoELayer):
    """DeepSpeed's gate, layer and experts, without noise; tokens are dropped only if a capacity is
    given."""

    has_capacity = True

    def __init__(self, spec: LayerSpec) -> None:
        self.inner = DeepSpeedExperts(spec)
        sharded: Any = import_module("deepspeed.moe.sharded_moe")
        num_experts, dim = spec.router.shape
        self.gate: Any = sharded.TopKGate(
            dim,
            num_experts,
            spec.top_k,
            capacity_factor=spec.capacity or 1.0,
            min_capacity=0,
            drop_tokens=spec.capacity is not None,
            top2_2nd_expert_sampling=False,
        )
        self.gate._set_ep_group(spec.group)
        self.gate.wg.weight.data.copy_(spec.router)
        self.inner.layer.gate = self.gate
        self.group = spec.group

    def run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the layer, which stores its loss in `l_aux`."""
        y: Tensor = self.inner.layer(x, None)
        return y, self.inner.layer.l_aux

    def gradients(self) -> MoEWeights:
        """Return this rank's gradients."""
        return replace(self.inner.gradients(), router=_gradient(self.gate.wg.weight))

    def clip(self, max_norm: float, dense: nn.Parameter) -> float | None:
        """Clip as DeepSpeed's engine does in float32 without ZeRO."""
        _sum_gradient(self.gate.wg.weight, self.group)
        clip = import_module("deepspeed.runtime.utils").clip_grad_norm_
        return float(clip([*self.inner.layer.parameters(), dense], max_norm))


class _OneExpert(nn.Module):
    def __init__(self, weights: MoEWeights) -> None:
        super().__init__()
        self.w1 = nn.Parameter(weights.w1[0].clone())
        self.w3 = nn.Parameter(weights.w3[0].clone())
        self.w2 = nn.Parameter(weights.w2[0].clone())

    def forward(self, rows: Tensor) -> Tensor:
        gate = F.linear(rows, self.w1)
        up = F.linear(rows, self.w3)
        return F.linear(F.silu(gate) * up, self.w2)


class _GivenGate(nn.Module):
    """A gate with DeepSpeed's interface that returns a given routing; its capacity suits the
    fullest expert of any rank."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.group = group
        self.experts = torch.empty(0)
        self.gates = torch.empty(0)

    def forward(self, x: Tensor, *rest: object) -> tuple[Any, ...]:
        """Return loss, capacity, number of experts; the expert, the place in its buffer and the
        weight of each copy, (top_k, tokens); and the copies per expert."""
        chosen_KT = self.experts.T.contiguous()
        chosen = chosen_KT.flatten()
        one_hot = F.one_hot(chosen, self.num_experts)
        counts = one_hot.sum(0)

        # A copy's place is the number of copies before it that chose the same expert.
        places = one_hot.cumsum(0) - 1
        places = places.gather(1, chosen.unsqueeze(1))
        places = places.view_as(chosen_KT)

        capacity = counts.max() if len(one_hot) else torch.zeros((), dtype=torch.int64)
        dist.all_reduce(capacity, op=dist.ReduceOp.MAX, group=self.group)
        return (
            x.new_zeros(()),
            capacity,
            self.num_experts,
            chosen_KT,
            places,
            self.gates.T,
            counts,
        )


@contextlib.contextmanager
def _deepspeed() -> Iterator[None]:
    """Initialize DeepSpeed on the existing process group, and hide its output within the
    context."""
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed: Any = import_module("deepspeed")
        # Compiling the shared-memory all-reduce for inference takes minutes, and nothing here uses
        # it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        yield


def _placed(
    same: Sequence[Tensor], split: Sequence[Tensor], mesh: DeviceMesh
) -> list[nn.Parameter]:
    """Return DTensors over these weights and gradients: those that are the same on all ranks, and
    those split over ep."""
    placed: list[tuple[Tensor, DeviceMesh, Placement]] = [
        (weight, mesh["copies"], Replicate()) for weight in same
    ]
    placed += [(weight, mesh["ep"], Shard(0)) for weight in split]
    parameters = []
    for weight, axis, placement in placed:
        parameter = nn.Parameter(DTensor.from_local(weight.detach(), axis, [placement]))
        parameter.grad = DTensor.from_local(_gradient(weight), axis, [placement])
        parameters.append(parameter)
    return parameters


def _sum_gradient(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Sum a gradient over the ranks instead of averaging it, as an expert's gradient is already a
    sum over all tokens."""
    parameter.grad = _gradient(parameter).clone()
    dist.all_reduce(parameter.grad, group=group)


def _expert_gradients(experts: Any) -> MoEWeights:
    """Return the gradients of w1, w3 and w2."""
    w1 = _gradient(experts.w1)
    w3 = _gradient(experts.w3)
    w2 = _gradient(experts.w2)
    return MoEWeights(w1, w3, w2)


def _gradient(parameter: Any) -> Tensor:
    """Return this rank's part of a gradient; zeros if there is none."""
    gradient = parameter.grad
    local: Tensor = parameter if gradient is None else gradient
    local = getattr(local, "_local_tensor", local)
    return torch.zeros_like(local) if gradient is None else local


@dataclass(frozen=True)
class CertifiedSystem:
    """A system whose expert parallelism is tested."""

    package: str
    """Package that provides the system and its version."""
    what: str
    """Description of the tested part."""
    make: type[AbstractRoutedExperts]
    """The experts on one rank."""
    layer: type[AbstractMoELayer]
    """The whole layer on one rank."""


BACKENDS = ("eager", "grouped_mm", "batched_mm")
"""The implementations of experts of transformers that a CPU runs."""
OF_TRANSFORMERS = "transformers.distributed.expert_parallel"
OF_MOESAIC = "moesaic.transformers.expert_parallel"
MODES: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "moesaic": (f"{OF_MOESAIC}:MoesaicEP", False, ("moesaic",)),
    "moesaic-shared": (f"{OF_MOESAIC}:MoesaicEP", True, ("moesaic",)),
    "transformers": (f"{OF_TRANSFORMERS}:AllToAllEP", False, BACKENDS),
    "transformers-all_reduce": (f"{OF_TRANSFORMERS}:AllReduceEP", True, BACKENDS),
    "transformers-auto": (f"{OF_TRANSFORMERS}:AutoEP", True, BACKENDS),
}
"""Name -> expert parallelism under transformers' Mixtral, whether all ranks share one batch,
implementations of experts."""


def _under_transformers() -> dict[str, CertifiedSystem]:
    """Return a system for each mode of expert parallelism with each implementation of experts."""
    systems = {}
    for name, (implementation, shares, backends) in MODES.items():
        for backend in backends:
            options = {
                "implementation": implementation,
                "backend": backend,
                "shares_tokens": shares,
            }
            experts = type("Experts", (TransformersExperts,), options)
            layer = type("Layer", (TransformersLayer,), {"kind": experts, "shares_tokens": shares})
            module, _, mode = implementation.partition(":")
            package = module.partition(".")[0]
            what = f"{mode} under Mixtral's {backend} experts"
            if shares:
                what += ", one batch for all ranks"
            needs_no_suffix = backend == "moesaic" or (name, backend) == ("transformers", "eager")
            systems[name if needs_no_suffix else f"{name}-{backend}"] = CertifiedSystem(
                package, what, experts, MoesaicLayer if name == "moesaic" else layer
            )
    return systems


SYSTEMS = {
    **_under_transformers(),
    "torchtitan": CertifiedSystem(
        "torchtitan",
        "AllToAllTokenDispatcher around plain products",
        TorchtitanExperts,
        TorchtitanLayer,
    ),
    "deepspeed": CertifiedSystem(
        "deepspeed",
        "MOELayer and Experts behind a gate with the given routing; for whole layers, TopKGate",
        DeepSpeedExperts,
        DeepSpeedMoELayer,
    ),
}
"""Tested systems by name. A new system takes two classes, for its experts and its whole layer, and
a line here."""
NEEDS_A_GPU = {
    "megatron-core": "its all-to-all dispatcher makes a CUDA stream when it is made",
    "transformers-sonicmoe": "its kernels are CUDA's",
}
"""Packages that cannot run here, with the reason."""
