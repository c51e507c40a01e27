"""Your own MoE layer, over every small mesh, in one process: ranks to write it against, and the comparison.

Nothing here knows Moesaic's layer. Yours needs collectives that work between ranks of one process: those of `Rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesaic.comm.collectives import all_gather, all_reduce_sum
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.wire import AbstractWire, Transfer
from moesaic.program.grid import Axis, Grid

Shard = Callable[[str, dict[str, Tensor], "Rank"], Tensor]
"""(name of a rank's parameter, the reference's gradients by name, the rank) -> what its gradient must be."""


@dataclass(frozen=True)
class Rank:
    """One of the ranks of a mesh, as your layer sees it. All ranks of a group call a collective together."""

    mesh: Mesh

    @property
    def grid(self) -> Grid:
        """The mesh: `grid.dp`, `grid.ep`, `grid.coordinate(rank, "ep")`."""
        return self.mesh.grid

    @property
    def number(self) -> int:
        """This rank."""
        return self.mesh.rank

    def group(self, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from this one on `axes` only, ascending."""
        return self.grid.group(self.number, axes)

    def all_reduce(self, tensor: Tensor, *axes: Axis) -> Tensor:
        """Return the sum over a group; not differentiable."""
        return all_reduce_sum(self.mesh.wire, self.group(*axes), tensor)

    def all_gather(self, tensor: Tensor, *axes: Axis) -> list[Tensor]:
        """Return every rank's tensor of a group, all of one shape; not differentiable."""
        return all_gather(self.mesh.wire, self.group(*axes), tensor)

    def all_to_all(self, parts: Sequence[Tensor], *axes: Axis) -> list[Tensor]:
        """Send part i to the i-th rank of a group and return what its ranks sent here; not differentiable.

        Args:
            parts: one per rank of the group, (rows, ...); rows may differ, the rest may not.
            axes: of the group.
        """
        peers, wire = self.group(*axes), self.mesh.wire
        assert len(parts) == len(peers), f"{len(parts)} parts for the {len(peers)} ranks of {axes}"
        counts = self.all_gather(torch.tensor([len(part) for part in parts]), *axes)
        place = peers.index(self.number)
        received = [part.new_empty(int(row[place]), *part.shape[1:]) for part, row in zip(parts, counts)]
        received[place] = parts[place].detach().clone()
        sends = {
            peer: part.detach().contiguous() for peer, part in zip(peers, parts) if peer != self.number and len(part)
        }
        receives = {peer: buffer for peer, buffer in zip(peers, received) if peer != self.number and len(buffer)}
        wire.wait(wire.issue(Transfer(self.number, wire.take_tags(1), sends, receives)))
        return received


def small_meshes(max_ranks: int = 4, axes: Sequence[Axis] = ("tp", "ep", "etp")) -> list[Grid]:
    """Return every mesh of 1, 2, 4, ... ranks up to `max_ranks` whose sizes are powers of two.

    Args:
        max_ranks: of the largest mesh.
        axes: which of tp, ep and etp may be larger than 1.
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
    """Compare a layer on a mesh with the plain one: outputs, input gradients, and every parameter's gradient.

    The loss is the mean over data-parallel groups of sum(y * dy). Every rank runs backward on its own group's sum; then
    `finish` does what training does with gradients before the optimizer steps, and they are compared with the reference's.

    Args:
        make_layer: makes a rank's layer, in float64, holding the same weights as the reference; it maps (tokens, dim) to
            the same shape.
        reference: the plain layer, in float64.
        grid: the mesh.
        dim: width of a token.
        shard: says what the gradient of a rank's parameter must be, from the reference's gradients.
        finish: reduces gradients over the ranks, as your training loop does.
        tokens: of the data-parallel groups in turn, repeated as needed; one without any belongs among them.
        tolerance: on errors relative to the largest expected value.
        seed: of tokens and cotangents, and of the order in which ranks run.

    Raises:
        AssertionError: naming what is wrong, on which mesh and rank, and by which factor if it is one.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [tokens[group % len(tokens)] for group in range(grid.dp)]
    xs, dys = ([torch.randn(n, dim, generator=generator, dtype=torch.float64) for n in counts] for _ in range(2))
    leaf = torch.cat(xs).requires_grad_()
    reference.zero_grad()
    whole = reference(leaf)
    ((whole * torch.cat(dys)).sum() / grid.dp).backward()
    assert leaf.grad is not None
    right_y, right_dx = whole.detach().split(counts), (leaf.grad * grid.dp).split(counts)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in reference.named_parameters()}
    gradients = zeros | {name: p.grad.clone() for name, p in reference.named_parameters() if p.grad is not None}

    def run(wire: AbstractWire) -> None:
        rank = Rank(Mesh(grid, wire))
        group = grid.coordinate(rank.number, "dp")
        layer, x = make_layer(rank), xs[group].clone().requires_grad_()
        y = layer(x)
        (y * dys[group]).sum().backward()
        finish(layer, rank)
        where = f"on tp={grid.tp} ep={grid.ep} etp={grid.etp} of {grid.world} ranks, rank {rank.number}"
        _check("output", where, y.detach(), right_y[group], tolerance)
        _check("gradient of the input", where, x.grad, right_dx[group], tolerance)
        for name, parameter in layer.named_parameters():
            _check(f"gradient of {name}", where, parameter.grad, shard(name, gradients, rank), tolerance)

    run_ranks(grid.world, run, seed=seed)


def _check(what: str, where: str, actual: Tensor | None, right: Tensor, tolerance: float) -> None:
    actual = torch.zeros_like(right) if actual is None else actual
    assert actual.shape == right.shape, f"{what} {where}: shape {tuple(actual.shape)}, expected {tuple(right.shape)}"
    if not right.numel():
        return
    scale = max(float(right.abs().max()), 1e-6)
    error = float((actual - right).abs().max()) / scale
    assert error <= tolerance, f"{what} {where}: relative error {error:.1e}{_factor(actual, right, tolerance)}"


def _factor(actual: Tensor, right: Tensor, tolerance: float) -> str:
    """Say by which factor all values are off, where it is one."""
    square = float((right * right).sum())
    factor = float((actual * right).sum()) / square if square else 0.0
    off = float((actual - factor * right).abs().max())
    return (
        f": it is {factor:.4g} times what it should be"
        if off <= tolerance * max(float(right.abs().max()), 1e-6)
        else ""
    )
