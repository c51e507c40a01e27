"""Compare the expert parallelism of several systems with dense experts, in situations in which some exchanges fail.

Each system gets tokens, experts and routing weights and returns weighted sums, on Gloo processes of this machine, in float32
(its own casts included). Gradients of tokens and routing weights must be complete on the token's rank. An expert's gradient
must be the sum over all tokens that reached it, and clipping must scale the router, the experts and a dense parameter by one
factor. transformers is tested under each of its implementations of experts and of expert parallelism. New memory holds NaN.
Versions are those that were installed. A system that is not installed, or cannot run without a GPU, is listed with the reason.

moesaic bench certificates --json benchmarks/results/certificates.json
"""

from __future__ import annotations

import contextlib
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moesaic import Mesh, MoE, average_gradients, clip_grad_norm_, collect_losses
from moesaic.errors import InputError
from moesaic.routing.capacity import Capacity, Dropless
from moesaic.routing.losses import LoadBalance
from moesaic.testing.certify import (
    CLIPPED,
    LAYER_SITUATIONS,
    SITUATIONS,
    AbstractMoELayer,
    AbstractRoutedExperts,
    LayerSpec,
    MoEWeights,
    certify,
)
from moesaic.testing.runner import on_ranks
from moesaic_lab.benchmark import Benchmark, PagedOptions, Told, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.tables import markdown_table, table

DESCRIPTION = "Hold the expert parallelism of Moesaic and of others against dense experts, situation by situation."
WORLDS = (2, 4)
TIMEOUT_SECONDS = 300.0
MARKS = ("<!-- tables: moesaic_lab/certificates.py -->", "<!-- end of tables -->")
SYSTEMS_ASKED = 3
"""Least number of other systems' packages that must have run."""


class _OnMesh(AbstractRoutedExperts, ABC):
    """One rank's experts of a system that needs a device mesh; only the mesh's ep axis is larger than 1."""

    def __init__(self, spec: LayerSpec) -> None:
        self.mesh = init_device_mesh(
            "cpu", (1, spec.group.size(), 1), mesh_dim_names=("copies", "ep", "tp")
        )
        self.place(spec.weights, spec.weights.owned(spec.group), self.mesh["ep"])

    @abstractmethod
    def place(self, whole: MoEWeights, own: MoEWeights, mesh: DeviceMesh) -> None:
        """Make the layer from all experts' weights (`whole`) or this rank's (`own`)."""


class TransformersExperts(_OnMesh):
    """The Mixtral experts of transformers under one of its implementations of experts and one of expert parallelism."""

    implementation = "transformers.distributed.expert_parallel:AllToAllEP"
    backend = "eager"

    def place(self, whole: MoEWeights, own: MoEWeights, mesh: DeviceMesh) -> None:
        """Make this rank's experts, and the implementation that exchanges their tokens."""
        transformers: Any = import_module("transformers")
        modeling: Any = import_module("transformers.models.mixtral.modeling_mixtral")
        _, hidden, dim = own.w1.shape
        config = transformers.MixtralConfig(
            hidden_size=dim, intermediate_size=hidden, num_local_experts=own.num_experts,
            experts_implementation=self.backend,
        )  # fmt: skip
        self.experts: Any = modeling.MixtralExperts(config)
        self.experts.gate_up_proj = nn.Parameter(torch.cat([own.w1, own.w3], 1))
        self.experts.down_proj = nn.Parameter(own.w2.clone())
        self.experts._is_expert_parallel = True
        module, _, name = self.implementation.partition(":")
        sharing = mesh if self.shares_tokens else self.mesh["tp"]
        self.ep = getattr(import_module(module), name)(self.experts, mesh, sharing)

    def run(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Run the experts under the implementation."""
        y: Tensor = self.ep(x, experts, gates)
        return y

    def gradients(self) -> MoEWeights:
        """Split the gradient of the fused gate and up projection."""
        d_up, d_down = _gradient(self.experts.gate_up_proj), _gradient(self.experts.down_proj)
        w1, w3 = d_up.chunk(2, 1)
        return MoEWeights(w1, w3, d_down)


class TorchtitanExperts(_OnMesh):
    """torchtitan's all-to-all dispatcher around plain products, since its own experts multiply in bfloat16."""

    def place(self, whole: MoEWeights, own: MoEWeights, mesh: DeviceMesh) -> None:
        """Keep what the dispatcher needs, and this rank's weights."""
        module: Any = import_module("torchtitan.models.common.token_dispatcher")
        import_module("torchtitan.distributed.utils").set_spmd_backend("partial_dtensor")
        self._dispatcher_type = module.AllToAllTokenDispatcher
        self._num_experts, self._mesh = whole.num_experts, mesh
        self.w1, self.w3, self.w2 = (
            each.clone().requires_grad_() for each in (own.w1, own.w3, own.w2)
        )

    def run(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Dispatch, multiply expert by expert, combine."""
        dispatcher = self._dispatcher_type(
            self._dispatcher_type.Config(num_experts=self._num_experts, top_k=experts.shape[1])
        )
        dispatcher.wire_meshes(ep_mesh=self._mesh)
        counts = torch.bincount(experts.flatten(), minlength=self._num_experts)
        rows, arrived, metadata = dispatcher.dispatch(x, gates, experts, counts)
        results = [
            (F.silu(part @ self.w1[number].T) * (part @ self.w3[number].T)) @ self.w2[number].T
            for number, part in enumerate(rows.split(arrived.tolist()))
        ]
        y: Tensor = dispatcher.combine(torch.cat(results), metadata, x)
        return y

    def gradients(self) -> MoEWeights:
        """Return the gradients of the plain products' weights."""
        return _expert_gradients(self)


class DeepSpeedExperts(AbstractRoutedExperts):
    """DeepSpeed's MoE layer behind a gate that returns a given routing, with capacity for every token."""

    def __init__(self, spec: LayerSpec) -> None:
        own, group = spec.weights.owned(spec.group), spec.group
        with _deepspeed():
            sharded: Any = import_module("deepspeed.moe.sharded_moe")
            experts = import_module("deepspeed.moe.experts").Experts(
                _OneExpert(own), own.num_experts
            )
        for number, expert in enumerate(experts.deepspeed_experts):
            for name in ("w1", "w3", "w2"):
                getattr(expert, name).data.copy_(getattr(own, name)[number])
        self.gate = _GivenGate(spec.weights.num_experts, group)
        self.layer = sharded.MOELayer(self.gate, experts, "ep", group.size(), own.num_experts)
        self.layer.ep_group = group

    def run(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Pass the routing to the gate and run the layer."""
        self.gate.experts, self.gate.gates = experts, gates
        y: Tensor = self.layer(x, None)
        return y

    def gradients(self) -> MoEWeights:
        """Stack the gradients of the single experts."""
        each = self.layer.experts.deepspeed_experts
        return MoEWeights(
            *(torch.stack([_gradient(getattr(e, n)) for e in each]) for n in ("w1", "w3", "w2"))
        )


class MoesaicLayer(AbstractMoELayer):
    """Moesaic's layer, parallelized by `parallelize`."""

    has_capacity = True

    def __init__(self, spec: LayerSpec) -> None:
        capacity = (
            Dropless() if spec.capacity is None else Capacity.fixed(spec.capacity, scope="rank")
        )
        _, hidden, dim = spec.weights.w1.shape
        self.layer = MoE(
            dim, hidden, spec.weights.num_experts, spec.top_k, losses=LoadBalance(1.0), capacity=capacity,
            router_options={"normalize": "after" if spec.top_k > 1 else "before"},
        )  # fmt: skip
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
        return MoEWeights(
            w1, w3, _gradient(self.layer.experts.w2), _gradient(self.layer.router.weight)
        )

    def clip(self, max_norm: float, dense: nn.Parameter) -> float | None:
        """Average gradients over dp and clip them, as before an optimizer step; then undo the mean."""
        average_gradients(self.layer, self.mesh)
        dp, module = self.mesh.grid.dp, nn.ModuleList([self.layer, nn.ParameterList([dense])])
        _gradient(dense).div_(dp)
        norm = float(clip_grad_norm_(module, max_norm / dp)) * dp
        for parameter in module.parameters():
            _gradient(parameter).mul_(dp)
        return norm


class TransformersLayer(AbstractMoELayer):
    """The router, experts and load-balancing loss of Mixtral in transformers, clipped as by its `Trainer`."""

    kind = TransformersExperts

    def __init__(self, spec: LayerSpec) -> None:
        modeling: Any = import_module("transformers.models.mixtral.modeling_mixtral")
        transformers: Any = import_module("transformers")
        self.top_k, self.experts, self.group = spec.top_k, self.kind(spec), spec.group
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
        return self.experts.run(x, experts, gates), self.loss(
            (logits,), len(self.router.weight), self.top_k
        )

    def gradients(self) -> MoEWeights:
        """Return this rank's gradients."""
        return replace(self.experts.gradients(), router=_gradient(self.router.weight))

    def clip(self, max_norm: float, dense: nn.Parameter) -> float | None:
        """Clip as `Trainer` does where parameters are on several meshes."""
        if not self.shares_tokens:
            _sum_gradient(self.router.weight, self.group)
        experts, mesh = self.experts.experts, self.experts.mesh
        parameters = _placed(
            [self.router.weight, dense], [experts.gate_up_proj, experts.down_proj], mesh
        )
        trainer: Any = import_module("transformers").Trainer
        return float(trainer._mixed_mesh_grad_norm(None, nn.ParameterList(parameters), max_norm))


class TorchtitanLayer(AbstractMoELayer):
    """torchtitan's router and dispatcher. Its layer balances loads by a bias and has no auxiliary loss."""

    def __init__(self, spec: LayerSpec) -> None:
        self.experts, self.group = TorchtitanExperts(spec), spec.group
        moe: Any = import_module("torchtitan.models.common.moe")
        linear: Any = import_module("torchtitan.models.common.linear").Linear
        num_experts, dim = spec.router.shape
        self.router: Any = moe.TokenChoiceTopKRouter.Config(
            num_experts=num_experts, gate=linear.Config(in_features=dim, out_features=num_experts), top_k=spec.top_k,
            score_func="softmax", route_norm=spec.top_k > 1,
        ).build()  # fmt: skip
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
        parameters = _placed([self.router.gate.weight, dense], [own.w1, own.w3, own.w2], own.mesh)
        clip = import_module("torchtitan.distributed.utils").clip_grad_norm_
        return float(clip(parameters, max_norm, ep_enabled=True))


class DeepSpeedMoELayer(AbstractMoELayer):
    """DeepSpeed's gate, layer and experts, without noise; tokens are dropped only if a capacity is given."""

    has_capacity = True

    def __init__(self, spec: LayerSpec) -> None:
        self.inner = DeepSpeedExperts(spec)
        sharded: Any = import_module("deepspeed.moe.sharded_moe")
        num_experts, dim = spec.router.shape
        self.gate: Any = sharded.TopKGate(
            dim, num_experts, spec.top_k, capacity_factor=spec.capacity or 1.0, min_capacity=0,
            drop_tokens=spec.capacity is not None, top2_2nd_expert_sampling=False,
        )  # fmt: skip
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
        self.w1, self.w3, self.w2 = (
            nn.Parameter(each[0].clone()) for each in (weights.w1, weights.w3, weights.w2)
        )

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(rows, self.w1)) * F.linear(rows, self.w3), self.w2)


class _GivenGate(nn.Module):
    """A gate with DeepSpeed's interface that returns a given routing; its capacity suits the fullest expert of any rank."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.num_experts, self.group = num_experts, group
        self.experts, self.gates = torch.empty(0), torch.empty(0)

    def forward(self, x: Tensor, *rest: object) -> tuple[Any, ...]:
        chosen_KT = self.experts.T.contiguous()
        one_hot = F.one_hot(chosen_KT.flatten(), self.num_experts)
        place = (
            (one_hot.cumsum(0) - 1).gather(1, chosen_KT.flatten().unsqueeze(1)).view_as(chosen_KT)
        )
        capacity = one_hot.sum(0).max() if len(one_hot) else torch.zeros((), dtype=torch.int64)
        dist.all_reduce(capacity, op=dist.ReduceOp.MAX, group=self.group)
        return (
            x.new_zeros(()),
            capacity,
            self.num_experts,
            chosen_KT,
            place,
            self.gates.T,
            one_hot.sum(0),
        )


@contextlib.contextmanager
def _deepspeed() -> Iterator[None]:
    """Initialize DeepSpeed on the existing process group, and hide its output within the context."""
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed: Any = import_module("deepspeed")
        # Compiling the shared-memory all-reduce for inference takes minutes, and nothing here uses it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        yield


def _placed(
    same: Sequence[Tensor], split: Sequence[Tensor], mesh: DeviceMesh
) -> list[nn.Parameter]:
    """Return DTensors over these weights and gradients: those that are the same on all ranks, and those split over ep."""
    placed: list[tuple[Tensor, DeviceMesh, Placement]] = [
        (weight, mesh["copies"], Replicate()) for weight in same
    ]
    placed += [(weight, mesh["ep"], Shard(0)) for weight in split]
    parameters = []
    for weight, of_weight, place in placed:
        parameter = nn.Parameter(DTensor.from_local(weight.detach(), of_weight, [place]))
        parameter.grad = DTensor.from_local(_gradient(weight), of_weight, [place])
        parameters.append(parameter)
    return parameters


def _sum_gradient(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Sum a gradient over the ranks instead of averaging it, as an expert's gradient is already a sum over all tokens."""
    parameter.grad = _gradient(parameter).clone()
    dist.all_reduce(parameter.grad, group=group)


def _expert_gradients(experts: Any) -> MoEWeights:
    return MoEWeights(*(_gradient(getattr(experts, name)) for name in ("w1", "w3", "w2")))


def _gradient(parameter: Any) -> Tensor:
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
OF_TRANSFORMERS, OF_MOESAIC = (
    "transformers.distributed.expert_parallel",
    "moesaic.transformers.expert_parallel",
)
MODES: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "moesaic": (f"{OF_MOESAIC}:MoesaicEP", False, ("moesaic",)),
    "moesaic-shared": (f"{OF_MOESAIC}:MoesaicEP", True, ("moesaic",)),
    "transformers": (f"{OF_TRANSFORMERS}:AllToAllEP", False, BACKENDS),
    "transformers-all_reduce": (f"{OF_TRANSFORMERS}:AllReduceEP", True, BACKENDS),
    "transformers-auto": (f"{OF_TRANSFORMERS}:AutoEP", True, BACKENDS),
}
"""Name -> expert parallelism under transformers' Mixtral, whether all ranks share one batch, implementations of experts."""


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
            of, _, mode = implementation.partition(":")
            plain = backend == "moesaic" or (name == "transformers" and backend == "eager")
            systems[name if plain else f"{name}-{backend}"] = CertifiedSystem(
                of.partition(".")[0], f"{mode} under Mixtral's {backend} experts{', one batch for all ranks' * shares}",
                experts, MoesaicLayer if name == "moesaic" else layer,
            )  # fmt: skip
    return systems


SYSTEMS = {
    **_under_transformers(),
    "torchtitan": CertifiedSystem(
        "torchtitan", "AllToAllTokenDispatcher around plain products", TorchtitanExperts, TorchtitanLayer
    ),
    "deepspeed": CertifiedSystem(
        "deepspeed", "MOELayer and Experts behind a gate with the given routing; for whole layers, TopKGate",
        DeepSpeedExperts, DeepSpeedMoELayer,
    ),
}  # fmt: skip
"""Tested systems by name. A new system takes two classes, for its experts and its whole layer, and a line here."""
NEEDS_A_GPU = {
    "megatron-core": "its all-to-all dispatcher makes a CUDA stream when it is made",
    "transformers-sonicmoe": "its kernels are CUDA's",
}
"""Packages that cannot run here, with the reason."""


@dataclass(frozen=True, kw_only=True)
class CertificateOptions(PagedOptions):
    """Options of `moesaic bench certificates`."""

    only: str | None = None
    """Test only these systems, separated by commas, with those whose names continue theirs; None for all."""


def measure(options: CertificateOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Return a row per system, number of ranks, situation and quantity, and one per system that cannot run."""
    names: list[str] = [] if options.only else list(SYSTEMS)
    for asked in options.only.split(",") if options.only else []:
        meant = [name for name in SYSTEMS if f"{name}-".startswith(f"{asked}-")]
        if not meant:
            raise InputError(f"only={asked}: choose among {', '.join(SYSTEMS)}")
        names += meant
    rows: list[dict[str, Any]] = []
    for name in names:
        system = SYSTEMS[name]
        head = {"system": name, "what": system.what, "version": None}
        with contextlib.suppress(PackageNotFoundError):
            head["version"] = version(system.package)
        if head["version"] is None:
            rows.append({**head, "failed": f"{system.package} is not installed"})
            continue
        for world in WORLDS:
            told(f"{name} {head['version']} on {world} ranks")
            rows += [{**head, "world": world, **each} for each in _certified(name, world)]
    if not options.only:
        told("planted faults")
        rows += import_module("moesaic_lab.planted.certified").planted_rows()
    return rows + [
        {"system": name, "version": None, "failed": f"needs a GPU: {why}"}
        for name, why in NEEDS_A_GPU.items()
    ]


def _certified(name: str, world: int) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = on_ranks(world, _rank, name, timeout_seconds=TIMEOUT_SECONDS)[
            0
        ]
    except Exception as error:
        return [{"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"}]
    return rows


def _rank(name: str) -> list[dict[str, Any]]:
    torch._dynamo.config.disable = (
        True  # some systems compile single functions, which says nothing about their exchange
    )
    rows = [asdict(each) | {"holds": each.holds()} for each in certify(SYSTEMS[name].make)]
    layers = certify(SYSTEMS[name].layer)
    return rows + [asdict(each) | {"holds": each.holds(), "is_layer": True} for each in layers]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return claims on the number of other systems that ran and on the worst error of ours."""
    ran = {SYSTEMS[row["system"]].package for row in rows if "quantity" in row}
    own = [
        row["error"] for row in rows if row["system"].startswith("moesaic") and "quantity" in row
    ]
    others, planted = len(ran - {"moesaic"}), [row["caught"] for row in rows if "fault" in row]
    caught = Claim(name="certify.planted_caught", value=sum(planted), target=len(planted), op=">=")
    return [
        *([caught] if planted else []),
        Claim(name="certificates.systems", value=others, target=SYSTEMS_ASKED, op=">="),
        Claim(name="certificates.moesaic_worst", value=max(own, default=None), target=1e-5),
    ]


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables and differences of docs/certificates.md from the rows of a result."""
    experts, layers = _parted(found)
    lines = [
        _markdown(_COLUMNS, _summary(experts, [each.name for each in SITUATIONS])),
        "",
        "The situations:",
        "",
    ]
    lines += [f"- **{each.name}**: {each.says}." for each in SITUATIONS]
    lines += ["", "The tested part of each system:", ""]
    measured = {row["system"] for row in found}
    lines += [f"- **{name}**: {each.what}." for name, each in SYSTEMS.items() if name in measured]
    lines += [
        "",
        "Whole layers:",
        "",
        _markdown(_LAYER_COLUMNS, _layer_summary(layers)),
        "",
        "The situations:",
        "",
    ]
    lines += [f"- **{each.name}**: {each.says}." for each in LAYER_SITUATIONS]
    wrong = [row for row in found if "quantity" in row and not row["holds"]]
    lines += (
        ["", "## Differences", ""] if wrong else ["", "No difference was found in these versions."]
    )
    said = (
        f"- {row['system']}{', whole layer' if 'is_layer' in row else ''} on {row['world']} ranks, {row['situation']}: "
        f"{_wrong(row)}"
        for row in wrong
    )
    return "\n".join([*lines, *dict.fromkeys(said)])


def _parted(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the rows of experts and the rows of whole layers, separately."""
    experts = [row for row in rows if "is_layer" not in row and "fault" not in row]
    return experts, [row for row in rows if "is_layer" in row]


def _markdown(columns: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [title for _, title in columns],
        *([str(row[key] or "") for key, _ in columns] for row in rows),
    ]
    return markdown_table(lines)


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return two tables, for experts and for whole layers, with the situations that each system passes."""
    experts, layers = _parted(rows)
    return [
        table(
            "experts beside dense ones",
            _summary(experts, [each.name for each in SITUATIONS]),
            _COLUMNS,
        ),
        table("whole layers beside dense ones", _layer_summary(layers), _LAYER_COLUMNS),
    ]


_COLUMNS = [
    ("system", "system"),
    ("version", "version"),
    *((each.name, each.name) for each in SITUATIONS),
]
_LAYER_COLUMNS = [
    ("system", "system"), *((each.name, each.name) for each in LAYER_SITUATIONS), ("over", "auxiliary loss is over"),
    ("clipping", "clipping"),
]  # fmt: skip
AUXILIARY = "auxiliary loss over "


def _summary(rows: Sequence[Mapping[str, Any]], situations: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per system with its result in each situation."""
    summary = []
    for name in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == name]
        cells = {
            each: _cell([row for row in own if row.get("situation") == each]) for each in situations
        }
        if not any("quantity" in row for row in own):
            cells = {each: own[0]["failed"] if each == situations[0] else "" for each in situations}
        summary.append({"system": name, "version": own[0]["version"], **cells})
    return summary


def _layer_summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per system whose whole layer was tested."""
    summary = _summary(rows, [each.name for each in LAYER_SITUATIONS])
    for row in summary:
        own = [each for each in rows if each["system"] == row["system"]]
        over = [each for each in own if each["quantity"].startswith(AUXILIARY) and each["holds"]]
        factors = sorted({f"{each['factor']:.3g}" for each in over})
        row["over"] = (
            f"{over[0]['quantity'].removeprefix(AUXILIARY)}, times {' or '.join(factors)}"
            if over
            else "has none"
        )
        row["clipping"] = (
            _cell([each for each in own if each["quantity"] in CLIPPED]) or "not compared"
        )
        row["capacity"] = row["capacity"] or "has none"
    return summary


def _cell(own: Sequence[Mapping[str, Any]]) -> str:
    wrong = dict.fromkeys(
        "fails" if row["failed"] else row["quantity"].partition(" over ")[0]
        for row in own
        if not row["holds"]
    )
    return (", ".join(wrong) or "passes") if own else ""


def _wrong(row: Mapping[str, Any]) -> str:
    if not row["failed"] and not math.isfinite(row["error"]):
        return f"{row['quantity'].partition(' over ')[0]} is not a number"
    by = f", {row['factor']:.4g} times what it should be" if row["factor"] is not None else ""
    return row["failed"] or f"{row['quantity']} wrong by {row['error']:.1e}{by}"


BENCHMARK = Benchmark(
    name="certificates", description=DESCRIPTION, options=CertificateOptions, notes=notes_of(__doc__),
    measure=measure, claims=claims, columns=tables, page=page, page_marks=MARKS,
    packages=("torch", *(system.package for system in SYSTEMS.values())),
)  # fmt: skip
