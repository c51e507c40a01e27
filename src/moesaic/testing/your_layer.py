"""Tests your own MoE layer on every small mesh, with all ranks in one process.

Nothing here depends on Moesaic's layer. Your layer must use collectives that work between ranks of one process: those of
`Rank`. `assert_equivalent` compares the layer with its single-rank reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesaic.comm.collectives import all_gather, all_reduce_sum
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, Transfer
from moesaic.program.grid import Axis, Grid
from moesaic.testing.factors import Factors, axes_of, explain, fit

Shard = Callable[[str, dict[str, Tensor], "Rank"], Tensor]
"""(name of a parameter, the reference's gradients by name, the rank) -> the gradient that the rank's parameter must have."""


@dataclass(frozen=True)
class Rank:
    """One rank of a mesh, with its collectives. All ranks of a group must call a collective together."""

    mesh: Mesh

    @property
    def grid(self) -> Grid:
        """The mesh: `grid.dp`, `grid.ep`, `grid.coordinate(rank, "ep")`."""
        return self.mesh.grid

    @property
    def number(self) -> int:
        """This rank's number in the mesh."""
        return self.mesh.rank

    def group(self, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks, this one included, whose coordinates differ from this rank's on `axes` only, ascending."""
        return self.grid.group(self.number, axes)

    def all_reduce(self, tensor: Tensor, *axes: Axis) -> Tensor:
        """Return the sum of `tensor` over the group along `axes`; not differentiable."""
        return all_reduce_sum(self.mesh.transport, self.group(*axes), tensor)

    def all_gather(self, tensor: Tensor, *axes: Axis) -> list[Tensor]:
        """Return the tensors of all ranks of the group along `axes`, which must have one shape; not differentiable."""
        return all_gather(self.mesh.transport, self.group(*axes), tensor)

    def all_to_all(self, parts: Sequence[Tensor], *axes: Axis) -> list[Tensor]:
        """Send part i to the i-th rank of the group and return the parts that its ranks sent to this one; not differentiable.

        Args:
            parts: one tensor per rank of the group, (rows, ...). The number of rows may differ; other dimensions may not.
            axes: the axes along which the group lies.
        """
        peers, transport = self.group(*axes), self.mesh.transport
        assert len(parts) == len(peers), f"{len(parts)} parts for the {len(peers)} ranks of {axes}"
        counts = self.all_gather(torch.tensor([len(part) for part in parts]), *axes)
        place = peers.index(self.number)
        received = [part.new_empty(int(row[place]), *part.shape[1:]) for part, row in zip(parts, counts)]
        received[place] = parts[place].detach().clone()
        sends = {
            peer: part.detach().contiguous() for peer, part in zip(peers, parts) if peer != self.number and len(part)
        }
        receives = {peer: buffer for peer, buffer in zip(peers, received) if peer != self.number and len(buffer)}
        transport.wait(transport.issue(Transfer(self.number, transport.take_tags(1), sends, receives)))
        return received


def small_meshes(max_ranks: int = 4, axes: Sequence[Axis] = ("tp", "ep", "etp")) -> list[Grid]:
    """Return every mesh of 1, 2, 4, ... ranks up to `max_ranks` whose sizes are powers of two.

    Args:
        max_ranks: number of ranks of the largest mesh.
        axes: the axes, of tp, ep and etp, that may be larger than 1.
    """
    powers = [2**n for n in range(max_ranks.bit_length()) if 2**n <= max_ranks]

    def sizes(axis: Axis, world: int) -> list[int]:
        return [power for power in powers if world % power == 0 and (power == 1 or axis in axes)]

    return [
        Grid(world=world, tp=tp, ep=ep, etp=etp)
        for world in powers
        for tp in sizes("tp", world)
        for ep in sizes("ep", world)
        for etp in sizes("etp", world)
        if world % (ep * etp) == 0
    ]


def assert_equivalent(
    make_layer: Callable[[Rank], nn.Module],
    reference: nn.Module,
    grid: Grid,
    *,
    dim: int,
    shard: Shard,
    finish: Callable[[nn.Module, Rank], None],
    tokens: Sequence[int] = (5, 0, 3, 1),
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """Compare a layer on a mesh with a single-rank reference: outputs, input gradients, and every parameter's gradient.

    The loss is the mean over data-parallel groups of sum(y * dy). Every rank runs backward on its own group's sum. Then
    `finish` reduces the gradients as training does before the optimizer steps, and they are compared with the reference's.

    Args:
        make_layer: builds a rank's layer in float64 with the reference's weights. The layer maps (tokens, dim) to the same
            shape.
        reference: the single-rank layer, in float64.
        shard: returns the gradient that a rank's parameter must have, given the reference's gradients.
        finish: reduces a layer's gradients over the ranks, as your training loop does.
        tokens: number of tokens of each data-parallel group in turn, repeated as needed; should include a 0.
        tolerance: largest error that passes, relative to the largest expected value.
        seed: seed of the tokens, the cotangents and the order in which ranks run.

    Raises:
        AssertionError: a value is wrong. The message names it, its mesh and rank and, if one factor explains it, the factor.
    """

    def run(mesh: Grid) -> dict[str, list[Compared]]:
        return _compared(make_layer, reference, mesh, dim, shard, finish, tokens, seed)

    for what, values in run(grid).items():
        for value in values:
            wrong = value.wrong(tolerance)
            if wrong:
                raise AssertionError(f"{what} {value.where}: {wrong}{_looks_like(what, grid, run, tolerance)}")


@dataclass(frozen=True)
class Compared:
    """A value of one rank, with the value that it must have."""

    where: str
    actual: Tensor
    right: Tensor

    def wrong(self, tolerance: float) -> str:
        """Return a description of the error; empty if the value is right."""
        if self.actual.shape != self.right.shape:
            return f"shape {tuple(self.actual.shape)}, expected {tuple(self.right.shape)}"
        if not self.right.numel():
            return ""
        error = float((self.actual - self.right).abs().max()) / max(float(self.right.abs().max()), 1e-6)
        return "" if error <= tolerance else f"relative error {error:.1e}"


def _compared(
    make_layer: Callable[[Rank], nn.Module],
    reference: nn.Module,
    grid: Grid,
    dim: int,
    shard: Shard,
    finish: Callable[[nn.Module, Rank], None],
    tokens: Sequence[int],
    seed: int,
) -> dict[str, list[Compared]]:
    """Run both layers and return, by quantity, the values of all ranks that have it."""
    generator = torch.Generator().manual_seed(seed)
    counts = [tokens[group % len(tokens)] for group in range(grid.dp)]
    xs, dys = ([torch.randn(n, dim, generator=generator, dtype=torch.float64) for n in counts] for _ in range(2))
    leaf = torch.cat(xs).requires_grad_()
    reference.zero_grad()
    reference_y = reference(leaf)
    ((reference_y * torch.cat(dys)).sum() / grid.dp).backward()
    assert leaf.grad is not None
    expected_y, expected_dx = reference_y.detach().split(counts), (leaf.grad * grid.dp).split(counts)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in reference.named_parameters()}
    gradients = zeros | {name: p.grad.clone() for name, p in reference.named_parameters() if p.grad is not None}

    def run(transport: AbstractTransport) -> dict[str, Compared]:
        rank = Rank(Mesh(grid, transport))
        group = grid.coordinate(rank.number, "dp")
        layer, x = make_layer(rank), xs[group].clone().requires_grad_()
        y = layer(x)
        (y * dys[group]).sum().backward()
        finish(layer, rank)
        where = f"on tp={grid.tp} ep={grid.ep} etp={grid.etp} of {grid.world} ranks, rank {rank.number}"
        pairs = {"output": (y.detach(), expected_y[group]), "gradient of the input": (x.grad, expected_dx[group])}
        pairs |= {f"gradient of {n}": (p.grad, shard(n, gradients, rank)) for n, p in layer.named_parameters()}
        return {
            what: Compared(where, torch.zeros_like(right) if actual is None else actual, right)
            for what, (actual, right) in pairs.items()
        }

    by_rank = run_ranks(grid.world, run, seed=seed)
    names = dict.fromkeys(name for of_rank in by_rank for name in of_rank)
    return {name: [of_rank[name] for of_rank in by_rank if name in of_rank] for name in names}


def _looks_like(what: str, grid: Grid, run: Callable[[Grid], dict[str, list[Compared]]], tolerance: float) -> str:
    """Return by which factor a quantity is off. Runs of the layer on other meshes show which axis causes the factor."""

    def measure(mesh: Grid) -> Factors:
        values = run(mesh)[what]
        if any(value.actual.shape != value.right.shape for value in values):
            return {what: None}
        right = torch.cat([value.right.flatten() for value in values])
        if not len(right) or not float(right.abs().max()):
            return {}
        actual = torch.cat([value.actual.detach().flatten() for value in values])
        factor = fit(actual, [right], max(tolerance, 1e-9))
        return {what: None if factor is None else factor[0]}

    axes: list[Axis] = [axis for axis in ("tp", "ep", "etp") if grid.size(axis) > 1]  # the layer may not support others
    others = [mesh for mesh in small_meshes(max(grid.world, 4), axes) if mesh != grid]
    factors, causes = explain(grid, others, lambda mesh: axes_of(mesh), measure)
    if what in causes:
        reason = causes[what].reason
        return f": it is {causes[what].factor:.4g} times what it should be" + (f", which {reason}" if reason else "")
    return ": no single factor explains it" if factors.get(what, 0.0) is None else ""
