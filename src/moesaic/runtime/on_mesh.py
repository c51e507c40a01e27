"""An MoE layer on a mesh: routing that agrees over the ranks, then the compiled programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.comm.collectives import all_gather, broadcast, share, share_of, slice_rows
from moesaic.comm.wire import AbstractWire
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, Weights, compute_dtype
from moesaic.plan import Compiled, Plan
from moesaic.program.grid import Grid
from moesaic.program.sizes import Sizes
from moesaic.routing.capacity import AbstractCapacity, Capacity
from moesaic.routing.losses import AbstractLoss
from moesaic.routing.peers import AbstractPeers
from moesaic.routing.route import Batch, Routed, RoutingRecord, route
from moesaic.routing.router import AbstractRouter
from moesaic.runtime.by_deepep import open_deepep, run_by_deepep
from moesaic.runtime.call import Call
from moesaic.runtime.fitting import fitting
from moesaic.runtime.function import Run, run_program
from moesaic.runtime.visits import Visits, find_visits


class OnMesh:
    """How one layer runs on a mesh under a plan. All ranks make it together.

    Args:
        grid: the mesh.
        wire: between its ranks.
        plan: the choices, compiled for this mesh or not yet.
        experts: of the layer, sharded already.
        weight_first: multiply by the routing weight before the expert.

    Raises:
        InputError: if the plan does not fit the mesh; on every rank, if they brought different plans.
    """

    def __init__(
        self, grid: Grid, wire: AbstractWire, plan: Plan | Compiled, experts: AbstractExperts, weight_first: bool
    ) -> None:
        plan = fitting(plan, grid, wire, experts)
        self.compiled = plan
        self.grid, self.wire, self.rank = self.compiled.grid, wire, wire.rank
        self.num_experts = experts.num_experts
        self._shapes = plan.shapes(experts.num_experts)
        self._weight_first = weight_first
        self._agreed = False
        self._tensor_group = grid.group(self.rank, ("tp",))
        self._place = grid.coordinate(self.rank, "tp")
        self._slices = plan.plan.schedule == "s1" and grid.tp > 1
        self.peers = _Peers(wire, grid, self._slices, self.compiled.digest)
        by_deepep = plan.plan.all_to_all == "deepep"
        if by_deepep and weight_first:
            raise InputError('apply_weight="before" clashes with plan.all_to_all=deepep: choose multicast')
        self._deepep = open_deepep(grid, self.rank, experts.num_experts) if by_deepep else None

    @property
    def loss_share(self) -> int:
        """What a loss over all ranks' tokens is multiplied by, since gradients are averaged over data-parallel groups."""
        return self.grid.dp

    def route(
        self,
        router: AbstractRouter,
        x_TD: Tensor,
        *,
        top_k: int,
        capacity: AbstractCapacity,
        losses: Sequence[AbstractLoss],
        batch: Batch,
        replay: RoutingRecord | None,
    ) -> Routed:
        """Route this rank's tokens: under S1 its slice of the tensor group's, else all of them; see `route`."""
        if replay is None:
            batch = replace(batch, noise=self._draw(router, x_TD))
        if not self._slices:
            return route(
                router,
                x_TD,
                top_k=top_k,
                capacity=capacity,
                losses=losses,
                batch=batch,
                replay=replay,
                peers=self.peers,
            )
        mine = share_of(len(x_TD), self._place, self.grid.tp)
        sliced = replace(
            batch,
            valid_T=None if batch.valid_T is None else batch.valid_T[mine],
            token_ids=None if batch.token_ids is None else batch.token_ids[mine],
            noise=None if batch.noise is None else batch.noise[mine],
            first_token=mine.start,
            sequence_length=max(len(x_TD) // batch.num_sequences, 1),
        )
        x_mine = slice_rows(self.wire, self._tensor_group, x_TD)
        with _shared_parameters(router, self.wire, self._tensor_group):
            return route(
                router,
                x_mine,
                top_k=top_k,
                capacity=capacity,
                losses=losses,
                batch=sliced,
                replay=replay,
                peers=self.peers,
            )

    def run_experts(self, experts: AbstractExperts, x_TD: Tensor, routed: Routed, padded_rows: int | None) -> Tensor:
        """Dispatch, run and combine: (tokens, dim) -> (tokens, dim).

        Args:
            experts: of the layer.
            x_TD: all tokens of the tensor group.
            routed: what `route` returned.
            padded_rows: what `padded_rows` returned.
        """
        if self._deepep is not None:
            return run_by_deepep(self._deepep, experts, x_TD, routed)
        routing = routed.routing
        order = routing.expert.argsort(stable=True)
        token, expert, gates = routing.token[order], routing.expert[order], routing.weight[order]
        indices, visits = {"index": token.unsqueeze(1)}, None
        if padded_rows is not None:
            gates, token = pad_copies(gates, token, expert, self.num_experts, padded_rows)
            indices = {"index": token.unsqueeze(1)}
        elif self.compiled.is_multicast:
            visits = self._visits(token, expert, routing.num_tokens)
            indices = {"visit_index": visits.visit_index, "copy_index": visits.copy_index}
        if padded_rows is None or not self._agreed:
            self._check_digests(routed)
        counts = self._counts(routed) if padded_rows is None else self._even_counts(routing.num_tokens, padded_rows)
        dtype = compute_dtype(x_TD)

        def run(x: Tensor, gate: Tensor | None, sharded: Weights, common: Weights) -> Tensor:
            assert gate is not None
            sizes = self._sizes(*counts, visits, experts.num_units(sharded))
            call = Call(self.rank, sizes, experts, 0, self._weight_first, padded_rows is not None)
            forward, backward = (len(p.tasks) for p in (self.compiled.forward, self.compiled.backward))
            call.first_tag = self.wire.take_tags(forward + backward)
            work = Run(self.compiled, self.wire, call, call.first_tag + forward, indices)
            cast = (tuple(weight.to(dtype) for weight in weights) for weights in (sharded, common))
            return run_program(work, x.to(dtype), gate, *cast)

        y: Tensor = experts(x_TD, gates.unsqueeze(1), run=run)
        return y.to(x_TD.dtype)

    def padded_rows(self, capacity: AbstractCapacity, num_tokens: int, top_k: int) -> int | None:
        """Return the rows that this rank's routing sends each expert under a padded capacity; None under others.

        Args:
            capacity: of the call.
            num_tokens: of the tensor group, equally many on all ranks.
            top_k: of the call.

        Raises:
            InputError: for a plan whose sizes depend on the routing, or tokens that do not split over tp.
        """
        if not isinstance(capacity, Capacity) or not capacity.is_padded:
            return None
        if self.compiled.is_multicast:
            raise InputError(
                "a padded capacity clashes with multicast, whose visits depend on the routing: choose another "
                "plan.all_to_all, or a capacity that is not padded"
            )
        if num_tokens % self.grid.tp:
            raise InputError(
                f"a padded capacity needs tokens that split over mesh.tp={self.grid.tp}, got {num_tokens}: pad the batch"
            )
        rows = capacity.fixed_rows(num_tokens // (self.grid.tp if self._slices else 1), top_k, self.num_experts)
        return -(-rows // self.compiled.capacity_multiple) * self.compiled.capacity_multiple

    def _draw(self, router: AbstractRouter, x_TD: Tensor) -> Tensor | None:
        """Draw the noise of all tokens of the tensor group, the same on each of its ranks."""
        if self.grid.tp == 1 or type(router).draw is AbstractRouter.draw:
            return router.draw(len(x_TD), x_TD.device)
        seed = torch.randint(2**62, (1,))
        seed = broadcast(self.wire, self._tensor_group, seed.to(x_TD.device), self._tensor_group[0])
        with torch.random.fork_rng([x_TD.device] if x_TD.is_cuda else []):
            torch.manual_seed(int(seed))
            return router.draw(len(x_TD), x_TD.device)

    def _counts(self, routed: Routed) -> tuple[np.ndarray, np.ndarray]:
        """Return what `Sizes` reads: copies (world, experts) and tokens (world,) of every rank."""
        record, grid = routed.record, self.grid
        assert record.by_rank is not None
        assert record.gathered is not None
        told = torch.cat([record.by_rank, record.gathered.tokens.unsqueeze(1)], dim=1).cpu().numpy()
        copies, tokens = told[:, :-1], told[:, -1]
        if self._slices:
            return copies, tokens
        copies, tokens = np.repeat(copies, grid.tp, axis=0), np.repeat(tokens, grid.tp)
        if self.compiled.plan.schedule == "baseline":
            return copies, tokens
        place = np.arange(grid.world) % grid.tp
        return _cut(copies, place[:, None], grid.tp), _cut(tokens, place, grid.tp)

    def _even_counts(self, num_tokens: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what `Sizes` reads where every rank sends each expert the same rows; nothing comes from the device."""
        grid = self.grid
        shared = self.compiled.plan.schedule != "baseline" and not self._slices
        tokens = num_tokens if self._slices or not shared else num_tokens // grid.tp
        copies = rows // grid.tp if shared else rows
        return np.full((grid.world, self.num_experts), copies), np.full(grid.world, tokens)

    def _check_digests(self, routed: Routed) -> None:
        """Make sure that all ranks run the same programs.

        Raises:
            InputError: on every rank, if they do not.
        """
        assert routed.record.gathered is not None
        digests = routed.record.gathered.digests.cpu()
        if bool((digests != digests[0]).any()):
            ranks = [rank for rank, row in zip(self.peers.ranks, digests) if bool((row != digests[0]).any())]
            raise InputError(
                f"ranks {ranks} run another plan or mesh than rank {self.peers.ranks[0]}: give every rank the same plan"
            )
        self._agreed = True

    def _sizes(self, copies: np.ndarray, tokens: np.ndarray, visits: Visits | None, units: int) -> Sizes:
        table = None
        if visits is not None:
            told = all_gather(self.wire, tuple(range(self.grid.world)), visits.counts)
            table = torch.stack(told).cpu().numpy()
        chunks = self.compiled.plan.chunks
        return Sizes(self.grid, copies, tokens, chunks, visits=table, units=units, shapes=self._shapes)

    def _visits(self, token: Tensor, expert: Tensor, num_tokens: int) -> Visits:
        """Find the visits of the copies that this rank sends."""
        if self.compiled.plan.schedule == "s2" and self.grid.tp > 1:
            counts_E = torch.bincount(expert, minlength=self.num_experts)
            start_E = counts_E.cumsum(0) - counts_E
            place = torch.arange(len(expert), device=expert.device) - start_E[expert]
            mine = share_of_each(counts_E, self._place, self.grid.tp)
            own = (place >= mine[0][expert]) & (place < mine[1][expert])
            token, expert = token[own], expert[own]
        return find_visits(token, expert, self.num_experts, num_tokens, self.compiled.plan.chunks, self.grid)


def share_of_each(counts: Tensor, index: int, count: int) -> tuple[Tensor, Tensor]:
    """Return where the `index`-th of `count` contiguous shares starts and ends, for each of several lengths."""
    return counts * index // count, counts * (index + 1) // count


class _Peers(AbstractPeers):
    """Ranks that route different tokens: one per data-parallel group, or all where tensor groups slice theirs."""

    def __init__(self, wire: AbstractWire, grid: Grid, slices: bool, digest: bytes) -> None:
        self._wire = wire
        self.ranks = tuple(range(grid.world)) if slices else grid.group(wire.rank, ("dp",))
        self.number, self.place = len(self.ranks), self.ranks.index(wire.rank)
        self.slices = grid.tp if slices else 1
        self.slice = grid.coordinate(wire.rank, "tp") if slices else 0
        self.digest = torch.from_numpy(np.frombuffer(digest, dtype=np.uint32).astype(np.float64))

    def gather(self, message: Tensor) -> Tensor:
        """Gather messages over the wire."""
        return torch.stack(all_gather(self._wire, self.ranks, message))


def pad_copies(gates: Tensor, token: Tensor, expert: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Give every expert the same number of rows; the empty ones have no token and weight 0.

    Args:
        gates: (copies,) differentiable, expert after expert.
        token: (copies,) int64.
        expert: (copies,) int64, at most `rows` copies each.
        num_experts: of the layer.
        rows: per expert.

    Returns:
        gates and tokens, (num_experts * rows,); the token of an empty row is -1.
    """
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=expert.device)
    counts_E = counts_E.scatter_add(0, expert, torch.ones_like(expert))
    start_E = counts_E.cumsum(0) - counts_E
    row = expert * rows + torch.arange(len(expert), device=expert.device) - start_E[expert]
    padded = gates.new_zeros(num_experts * rows).scatter(0, row, gates)
    return padded, torch.full_like(padded, -1, dtype=torch.int64).scatter(0, row, token)


@contextmanager
def _shared_parameters(module: nn.Module, wire: AbstractWire, group: tuple[int, ...]) -> Iterator[None]:
    """Let a module's parameters be used on different tokens by the ranks of a group: their gradients are summed."""
    held = [(part, name, value) for part in module.modules() for name, value in part._parameters.items()]
    try:
        for part, name, value in held:
            if value is not None and value.requires_grad and torch.is_grad_enabled():
                part._parameters[name] = share(wire, group, value)  # type: ignore[assignment]
        yield
    finally:
        for part, name, value in held:
            part._parameters[name] = value


def _cut(counts: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """Return the share that each rank of a tensor group has of its group's runs."""
    return counts * (place + 1) // size - counts * place // size
