"""How the bugs of `mutants.py` are planted: a change of a compiled program, or one function of the library replaced.

Each is a real mistake, made in one place; what it imitates stands with the mutant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic.comm.wire import AbstractWire, Ticket, Transfer
from moesaic.kernels.codecs import codec_named
from moesaic.layer import MoE
from moesaic.plan import Compiled, compile_plan
from moesaic.program.links import LINKS, Hier2D
from moesaic.program.links.link import Leg, Places, legs_of
from moesaic.program.task import Op, Program, State, Task
from moesaic.routing import route as route_module
from moesaic.routing.capacity import Capacity
from moesaic.runtime import compute, function, gradients, interpret, on_mesh, parcels, peers
from moesaic.runtime.tape import RoutingTape
from moesaic.runtime.visits import Visits, find_visits
from moesaic.testing.equivalence import Patch
from moesaic.train import norm as norm_module


def replaced(owner: object, name: str, value: object) -> Patch:
    """Replace an attribute of a module or class while the patch is entered."""
    return lambda: mock.patch.object(owner, name, value)


# Programs


def backward_scale_dropped(compiled: Compiled) -> Compiled:
    """The baseline's redundant copies are added up and never divided."""
    return replace(compiled, backward=_each_task(compiled.backward, lambda task: replace(task, power=0)))


def last_gather_reduced(compiled: Compiled) -> Compiled:
    """S2's last gather transposed to a reduce-scatter, though the gradient that comes in is the same on all ranks."""
    slots = tuple(
        replace(slot, state=(("tp", State.PARTIAL),)) if slot.name.startswith("z_full.") else slot
        for slot in compiled.backward.slots
    )
    return replace(compiled, backward=replace(compiled.backward, slots=slots))


def chunks_swapped(compiled: Compiled) -> Compiled:
    """The experts multiply one chunk's rows by the other chunk's routing weights."""
    other = {"g.0": "g.1", "g.1": "g.0"}
    forward = _each_task(
        compiled.forward,
        lambda t: replace(t, reads=tuple(other.get(name, name) for name in t.reads)) if t.op is Op.EXPERT else t,
    )
    moves = [task for task in forward.tasks if task.op is not Op.EXPERT and task.name not in _after_experts(forward)]
    rest = [task for task in forward.tasks if task not in moves]
    return replace(compiled, forward=replace(forward, tasks=(*moves, *rest)))


def gradients_coded(compiled: Compiled) -> Compiled:
    """Gradients go through the codec of the forward pass, though the plan says that they do not."""
    coded = compile_plan(replace(compiled.plan, backward_codec=compiled.plan.codec), compiled.grid)
    return replace(compiled, backward=coded.backward)


def edge_removed(compiled: Compiled) -> Compiled:
    """The experts run before the rows have been asked for."""
    tasks = sorted(compiled.forward.tasks, key=lambda task: task.op is not Op.EXPERT)
    return replace(compiled, forward=replace(compiled.forward, tasks=tuple(tasks)))


def partial_forgotten(compiled: Compiled) -> Compiled:
    """A pass forgets that the shards' results are partial sums."""
    slots = tuple(replace(slot, state=()) if slot.name == "out" else slot for slot in compiled.forward.slots)
    return replace(compiled, forward=replace(compiled.forward, slots=slots))


def _each_task(program: Program, change: Callable[[Task], Task]) -> Program:
    return replace(program, tasks=tuple(map(change, program.tasks)))


def _after_experts(program: Program) -> set[str]:
    """Return the tasks that depend on an expert."""
    late: set[str] = set()
    names = set()
    for task in program.tasks:
        if task.op is Op.EXPERT or late.intersection(task.reads):
            late.update(task.writes)
            names.add(task.name)
    return names


# Gradients


def gradients_then(change: Callable[[nn.Module, Any, dict[str, Tensor]], None]) -> Patch:
    """Average gradients as it should be, then spoil them; `change` also gets what they were before."""
    original = gradients.average_gradients

    def spoiled(module: nn.Module, mesh: Any) -> None:
        before = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        original(module, mesh)
        change(module, mesh, before)

    return replaced(gradients, "average_gradients", spoiled)


def experts_times_ep(module: nn.Module, mesh: Any, before: dict[str, Tensor]) -> None:
    """Expert gradients are ep times too large."""
    for parameter in gradients.expert_parameters(module):
        if parameter.grad is not None:
            parameter.grad *= mesh.grid.ep


def router_of_own_group(module: nn.Module, mesh: Any, before: dict[str, Tensor]) -> None:
    """The router's gradient is never reduced over the data-parallel groups."""
    for name, parameter in module.named_parameters():
        if name.startswith("router") and name in before:
            parameter.grad = before[name]


@contextmanager
def norm_without_experts() -> Iterator[None]:
    """The norm leaves the experts out."""
    original = norm_module.num_copies

    def copies(tensor: Tensor, world: int) -> float:
        return float("inf") if isinstance(tensor, DTensor) else original(tensor, world)

    with mock.patch.object(norm_module, "num_copies", copies):
        yield


@contextmanager
def norm_with_replicas() -> Iterator[None]:
    """Count every rank's copy of a replicated gradient."""
    with mock.patch.object(norm_module, "num_copies", return_value=1):
        yield


# The layer: losses, counts, routing


def loss_share(factor: Callable[[Any], float]) -> Patch:
    """Replace what a loss over all ranks' tokens is multiplied by."""
    return replaced(on_mesh.OnMesh, "loss_share", property(lambda self: factor(self.grid)))


def loss_never_used() -> AbstractContextManager[object]:
    """The auxiliary loss is computed and nobody uses it."""
    return mock.patch.object(MoE, "inject_loss", lambda self, y, *_: y)


def counting(also: Callable[[MoE, Any, bool], bool]) -> Patch:
    """Count a call's copies where `also` says so, besides where they belong."""
    original = MoE._route

    def wrapped(self: MoE, *args: Any) -> Any:
        routed = original(self, *args)
        replaying = self.tape is not None and self.tape.is_replaying
        if also(self, routed, replaying):
            self.step_counts += routed.routing.requested
        return routed

    return replaced(MoE, "_route", wrapped)


def padding_counts() -> AbstractContextManager[object]:
    """Padding is counted in the load that the router adapts to."""
    original = MoE._route

    def wrapped(self: MoE, *args: Any) -> Any:
        routed = original(self, *args)
        valid_T = args[2].reshape(-1)
        if self.training and len(routed.record.choice.token):
            padded = ~valid_T[routed.record.choice.token]
            self.step_counts += torch.bincount(routed.record.choice.expert[padded], minlength=self.num_experts)
        return routed

    return mock.patch.object(MoE, "_route", wrapped)


def bias_each_micro_batch() -> AbstractContextManager[object]:
    """The router adapts after every micro-batch."""
    original = MoE.forward

    def wrapped(self: MoE, *args: Any, **options: Any) -> Any:
        found = original(self, *args, **options)
        if self.training:
            self.finish_step()
        return found

    return mock.patch.object(MoE, "forward", wrapped)


def routes_again() -> AbstractContextManager[object]:
    """A recomputation routes again, with noise of its own."""
    original = RoutingTape.read
    return mock.patch.object(RoutingTape, "read", lambda tape, layer: original(tape, layer) and None)


def drops_per_rank() -> AbstractContextManager[object]:
    """A capacity that is global is applied to each rank's own tokens."""
    return mock.patch.object(Capacity, "spans_mesh", property(lambda self: False))


def counted_over_tp() -> AbstractContextManager[object]:
    """Counts are exchanged over the tensor group, whose ranks have the same tokens."""
    original = peers.Peers.__init__

    def wrapped(self: Any, wire: AbstractWire, grid: Any, *rest: Any) -> None:
        original(self, wire, grid, *rest)
        self.ranks = grid.group(wire.rank, ("tp",))
        self.number, self.place = len(self.ranks), self.ranks.index(wire.rank)

    return mock.patch.object(peers.Peers, "__init__", wrapped)


# Moving and computing


def last_shard_only(parts: Sequence[Tensor], places: np.ndarray, num_rows: int, sums: bool) -> Tensor:
    """Rows that several shards sent overwrite each other."""
    if not sums:
        return compute.placed(parts, places, num_rows, False)
    out = parts[0].new_zeros(num_rows, parts[0].shape[1])
    return out.index_copy_(0, compute.index_like(places, out), torch.cat([*parts]))


class StrideByColumns(Hier2D):
    """2DH with algorithm 2's printed index: it divides by the number of nodes where the ranks per node are meant."""

    def path(self, places: Places, source: int, target: int) -> tuple[Leg, ...]:
        number = places.ranks.index(target)
        nodes = len({places.node(rank) for rank in places.ranks})
        local, node = divmod(number, nodes)
        return legs_of(
            (0, source, places.rank(places.node(source), local)),
            (1, places.rank(places.node(source), local), places.rank(node, local)),
        )


@contextmanager
def stride_by_columns() -> Iterator[None]:
    """Plant `StrideByColumns`; legs are remembered, so what was found before is forgotten on both sides."""
    with mock.patch.dict(LINKS, {"hier2d": StrideByColumns()}):
        parcels._legs.cache_clear()
        try:
            yield
        finally:
            parcels._legs.cache_clear()


@contextmanager
def own_rows_coded() -> Iterator[None]:
    """Rows that stay on their rank go through the codec too."""
    original = parcels.pack

    def wrapped(task: Task, slots: Any, value: Tensor, call: Any) -> Any:
        packed, codec = original(task, slots, value, call), codec_named(task.codec or "none")
        if packed.own is not None and len(packed.own):
            packed.own = codec.decode(codec.encode(packed.own), len(packed.own), packed.dim, packed.dtype)
        return packed

    with mock.patch.object(interpret, "pack", wrapped):
        yield


@contextmanager
def visits_off_by_one() -> Iterator[None]:
    """Every copy is taken from the next token that visits the node."""
    original = find_visits

    def wrapped(*args: Any) -> Visits:
        found = original(*args)
        counts = found.counts.flatten()[found.counts.flatten() > 0]
        last = int(counts.min()) if len(counts) else 1
        return replace(
            found, copy_index=torch.where(found.copy_index + 1 < last, found.copy_index + 1, found.copy_index)
        )

    with mock.patch.object(on_mesh, "find_visits", wrapped):
        yield


def read_before_waiting() -> AbstractContextManager[object]:
    """A program's waits all come at its end."""

    def late(steps: Any, wire: AbstractWire) -> Any:
        open_tickets: list[Ticket] = []
        answer: Ticket | None = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                for ticket in open_tickets:
                    wire.wait(ticket)
                return end.value
            answer = wire.issue(request) if isinstance(request, Transfer) else None
            if isinstance(request, Ticket):
                open_tickets.append(request)

    return mock.patch.object(function, "drive", late)


def messages_swapped() -> AbstractContextManager[object]:
    """What two peers sent is taken for each other's where it has the same size."""

    def swapped(steps: Any, wire: AbstractWire) -> Any:
        answer = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = wire.issue(request) if isinstance(request, Transfer) else None
            if isinstance(request, Ticket):
                wire.wait(request)
                buffers = list(request.transfer.receives.values())
                if len(buffers) > 1 and buffers[0].shape == buffers[1].shape:
                    first, second = buffers[0].clone(), buffers[1].clone()
                    buffers[0].copy_(second)
                    buffers[1].copy_(first)

    return mock.patch.object(function, "drive", swapped)


def padding_routed() -> AbstractContextManager[object]:
    """Padding is routed like any token."""
    return mock.patch.object(route_module, "_alive", lambda choice, valid: choice.sent)


def bias_of_every_shard() -> AbstractContextManager[object]:
    """Every shard of an expert adds the whole output bias."""
    return mock.patch.object(compute, "_shards", return_value=1)
