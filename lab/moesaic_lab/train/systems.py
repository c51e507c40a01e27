"""The systems that the training benchmark compares: one model, with MoE layers run by our plans or
by the layers of others.

All systems start from the same weights and get the same tokens. Auxiliary losses are off in all of
them, as their definitions differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.models.gpt import GPT
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.runtime.data_parallel import expert_parameters
from moesaic.train.presets import demo
from moesaic_lab.peers import absence
from moesaic_lab.peers.deepspeed import DeepSpeedLayer
from moesaic_lab.peers.exchange import AbstractExchange, ReceiveFirst, TorchExchange
from moesaic_lab.peers.plain import PlainExpertParallel
from moesaic_lab.recorder import Recorder
from moesaic_lab.train.config import Candidate, TrainBenchConfig, TrainCase
from moesaic_lab.train.step import GivenBatch, TimedStep

VOCAB_SIZE = 256
"""Size of the vocabulary; tokens are bytes, as in the demo."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One implementation of the model's MoE layers, with the step that runs it."""

    name: str
    """Unique name."""
    kind: str
    """"ours", "plain" or "deepspeed"."""
    exchange: str
    """"receive-first" or "torch's"."""
    step: TimedStep
    """The model and its step on this rank."""
    candidate: Candidate | None = None
    """Our plan; None for the layers of others."""

    @property
    def is_lossless(self) -> bool:
        """Whether the system computes the same results as the model in one process, up to
        rounding."""
        return self.candidate is None or self.candidate.plan.is_lossless


def make_model(case: TrainCase, seed: int) -> nn.Module:
    """Create the unsharded model of a case; the seed determines its weights."""
    torch.manual_seed(seed)
    config = demo().model
    moe = replace(config.moe, load_balance=0.0, top_k=case.top_k or config.moe.top_k)
    return GPT(replace(config, moe=moe), VOCAB_SIZE)


def make_batch(case: TrainCase, seed: int, rank: int, world: int) -> GivenBatch:
    """Return a rank's part of the batch: uniformly drawn bytes with the next byte as target."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    count = case.batch_size // world
    length = demo().model.seq_len
    tokens = torch.randint(VOCAB_SIZE, (count, length + 1), generator=generator)
    inputs = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].contiguous()
    return GivenBatch(inputs=inputs, targets=targets)


def make_systems(
    config: TrainBenchConfig, case: TrainCase, transport: AbstractTransport
) -> Iterator[System]:
    """Yield the systems of a case on this rank. All ranks build them together."""
    recorder = Recorder(transport)
    unsharded = make_model(case, config.seed)
    grid = Grid(world=case.world, ep=case.world, ranks_per_node=case.ranks_per_node)
    batch = make_batch(case, config.seed, transport.rank, case.world)

    for candidate in config.candidates:
        if not (case.coded or candidate.plan.is_lossless):
            continue
        model = copy.deepcopy(unsharded)
        _parallelize(model, candidate, case, recorder)
        step = TimedStep(model, list(expert_parameters(model)), batch, recorder, grid)
        label = f"ours: {candidate.label(case.world)}"
        yield System(
            name=label, kind="ours", exchange="receive-first", step=step, candidate=candidate
        )

    makers: dict[str, Callable[[MoE, AbstractExchange], nn.Module]] = {
        "plain": PlainExpertParallel,
        "deepspeed": DeepSpeedLayer,
    }
    for peer in case.peers:
        if peer == "deepspeed" and absence() is not None:
            continue
        group = dist.group.WORLD
        assert group is not None
        exchanges: dict[str, AbstractExchange] = {
            "receive-first": ReceiveFirst(transport),
            "torch's": TorchExchange(group),
        }
        for how, exchange in exchanges.items():
            model = copy.deepcopy(unsharded)
            replace_layers(model, lambda layer: makers[peer](layer, exchange))  # noqa: B023
            step = TimedStep(model, peer_experts(model), batch, recorder, grid, exchange)
            yield System(name=f"{NAMES[peer]}, {how}", kind=peer, exchange=how, step=step)


NAMES = {"plain": "plain expert parallelism", "deepspeed": "DeepSpeed"}
"""Names of the peers in tables."""


def replace_layers(model: nn.Module, make: Callable[[MoE], nn.Module]) -> None:
    """Replace every MoE layer of a model by the module that `make` returns for it."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, MoE):
                setattr(parent, name, make(child))


def peer_experts(model: nn.Module) -> list[nn.Parameter]:
    """Return the experts' parameters of layers of others. DeepSpeed marks its own with
    `allreduce = False`."""
    marked = [
        parameter for parameter in model.parameters() if not getattr(parameter, "allreduce", True)
    ]
    return marked or list(expert_parameters(model))


def _parallelize(
    model: nn.Module, candidate: Candidate, case: TrainCase, transport: AbstractTransport
) -> None:
    """Parallelize the MoE layers of a model. Experts stay plain tensors, so that all systems use
    the same optimizer."""
    world = case.world
    etp = candidate.etp
    grid = Grid(world=world, ep=world // etp, etp=etp, ranks_per_node=case.ranks_per_node)
    for module in list(model.modules()):
        if isinstance(module, MoE):
            compiled = compile_plan(candidate.plan, grid, bias=bool(module.experts.names[1]))
            module.parallelize(Mesh(grid, transport), compiled)
