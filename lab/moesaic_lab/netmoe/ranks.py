"""The ranks' part of NetMoE's comparison: consecutive MoE layers, with plain expert parallelism and
with sample placement.

Routing is prescribed, and a sample's routing must move with the sample. Every token therefore
encodes its number as the quotient of its first two columns, which layers that scale a token leave
unchanged. Experts are virtual and return their input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from moesaic.balance.run.moving import MovingMoE
from moesaic.balance.run.relocate import Following, Relocator, SampleTrip
from moesaic.balance.run.residual import Residual
from moesaic.balance.samples import AbstractPlacer
from moesaic.comm.mesh import Mesh, open_transport
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.program.compile import Compiled
from moesaic.program.grid import Grid
from moesaic.routing.routers import SoftmaxTopK
from moesaic.routing.routing import Scores
from moesaic_lab.across_ranks import sent, timed_still
from moesaic_lab.beds import Timed
from moesaic_lab.recorder import Recorder
from moesaic_lab.virtual import Accelerator, virtual_experts

Method = AbstractPlacer | None
"""A sample-placement policy; None for plain expert parallelism."""


@dataclass(frozen=True, kw_only=True)
class TravelJob:
    """Layers and methods to time."""

    grid: Grid
    compiled: Compiled
    """The compiled plan of all layers."""
    methods: Mapping[str, Method]
    """Methods by name, timed in turn."""
    plans: Mapping[str, Compiled] = field(default_factory=dict)
    """Compiled plans of the methods that use another plan for all layers."""
    experts: Tensor
    """(layers, samples * length, top_k) int64: the experts of every token."""
    length: int
    """Tokens of a sample."""
    dim: int
    hidden: int
    num_experts: int
    gflops: float
    """Rate of a rank's virtual accelerator, in 1e9 operations per second."""
    repeats: int


class TableRouter(SoftmaxTopK):
    """Routes every token by a table, at the number that the token encodes; routing weights are 1 /
    top_k.

    Args:
        table: (tokens, top_k) int64 expert ids.
    """

    def __init__(self, dim: int, num_experts: int, *, table: Tensor) -> None:
        super().__init__(dim, num_experts)
        self._table = table

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        """Return one logit for the experts that the table lists, and a lower one for the others."""
        number_T = (x_TD[:, 0] / x_TD[:, 1]).round().long()
        zeros_TE = x_TD.new_zeros(len(x_TD), self.num_experts)
        logits_TE = zeros_TE.scatter(1, self._table[number_T], 1.0)
        probs_TE = logits_TE.softmax(-1)
        return Scores(logits=logits_TE, probs=probs_TE, gates=probs_TE, rank_by=logits_TE)


class Stack:
    """The layers on a mesh, with this rank's samples."""

    def __init__(self, job: TravelJob, transport: AbstractTransport) -> None:
        self._job = job
        mesh = Mesh(job.grid, transport)
        experts = virtual_experts(Accelerator(flops_per_second=1e9 * job.gflops))
        top_k = job.experts.shape[2]
        self.factor = top_k + 1
        """Factor by which each layer multiplies its input."""
        self.layers = nn.ModuleList(
            MoE(
                job.dim,
                job.hidden,
                job.num_experts,
                top_k,
                router=partial(TableRouter, table=table),
                experts=experts,
                losses=(),
            )
            for table in job.experts
        )
        for layer in self.layers:
            assert isinstance(layer, MoE)
            layer.parallelize(mesh, job.compiled)
        self._relocators = {
            name: Relocator(mesh, placer)
            for name, placer in job.methods.items()
            if placer is not None
        }
        self.trips: dict[str, SampleTrip] = {}
        """The latest trip of each policy."""
        samples = job.experts.shape[1] // job.length // job.grid.world
        first_token = transport.rank * samples * job.length
        self.x = numbered(samples, job.length, job.dim, first=first_token).requires_grad_()

    def step(self, name: str) -> Tensor:
        """Run forward and backward by one method; return the output, (samples, length, dim)."""
        layers = [layer for layer in self.layers if isinstance(layer, MoE)]
        for layer in layers:
            layer.use_plan(self._job.plans.get(name, self._job.compiled))
        relocator = self._relocators.get(name)
        trip = None
        if relocator is not None:
            followings = [Following(layer.router, layer.top_k) for layer in layers]
            trip = relocator.start(followings, len(self.x), self.x.shape[1])
            self.trips[name] = trip
        x: Tensor = self.x
        for layer in layers:
            move = None if trip is None else trip.next()
            x = MovingMoE(layer)(x, move=move, residual=Residual(x))
        x.backward(torch.ones_like(x))
        self.x.grad = None
        self.layers.zero_grad()
        return x.detach()


def numbered(samples: int, length: int, dim: int, *, first: int) -> Tensor:
    """Return samples whose tokens encode their numbers, (samples, length, dim).

    Args:
        samples: number of samples of this rank.
        length: tokens per sample.
        dim: width of a token, at least 2.
        first: number of the first token.
    """
    x = torch.ones(samples, length, dim)
    x[..., 0] = torch.arange(first, first + samples * length).view(samples, length)
    return x


def check(stack: Stack, name: str) -> None:
    """Assert that a method computes the expected results, and that samples end on their home ranks.

    A virtual expert returns its rows without routing weights, so a layer with a residual returns
    (top_k + 1) times its input.
    """
    expected = stack.x.detach() * stack.factor ** len(stack.layers)
    assert torch.equal(stack.step(name), expected), (
        f"{name}: samples are not what or where they should be"
    )


def measure(job: TravelJob) -> Timed:
    """Check the methods of a job and time them in turn. All ranks call this together."""
    transport = open_transport(name="sockets")
    recorder = Recorder(transport)
    recorded = Stack(job, recorder)
    stack = Stack(job, transport)
    messages = {}
    for name in job.methods:
        recorder.ranges.clear()
        check(recorded, name)
        messages[name] = [sent(recorder)]
        check(stack, name)
    steps = {name: partial(stack.step, name) for name in job.methods}
    return Timed(spans=timed_still(steps, job.repeats), sent=messages)
