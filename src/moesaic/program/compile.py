"""Compiles a plan into a forward and a backward program: build, passes, transpose, lowering,
order.

A program is a list of tasks on named values, the slots (`task.py`). The schedule of the plan builds
the forward program, passes rewrite it for the plan's other choices, and its transpose is the
backward program. Lowering replaces each movement over ep by the rounds of messages (hops) of an
all-to-all algorithm. Last, tasks are put in the order in which they are issued.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial

import numpy as np

from moesaic.codecs import codec_spec
from moesaic.errors import InputError
from moesaic.program.build import SCHEDULES
from moesaic.program.call_memory import HeldBytes
from moesaic.program.expert_sizes import ExpertSizes
from moesaic.program.grid import Grid
from moesaic.program.joined_messages import side_by_side
from moesaic.program.layouts import LayoutIndex
from moesaic.program.order import ORDERS
from moesaic.program.passes.fuse_ep_etp import fuse_ep_etp
from moesaic.program.passes.gather_weights import gather_weights
from moesaic.program.passes.halve_reduce import halve_reduce
from moesaic.program.passes.multicast import multicast
from moesaic.program.passes.overlap_gather import overlap_gather
from moesaic.program.passes.relocate import relocate
from moesaic.program.passes.replicate import replicate
from moesaic.program.passes.route_all_to_all import compress, route_all_to_all
from moesaic.program.passes.split import split_capacity, split_peers
from moesaic.program.plan import Crossing, Order, Plan
from moesaic.program.replications import Replications
from moesaic.program.row_counts import MovedPieces
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Kind, Program, State
from moesaic.program.text import to_text
from moesaic.program.transpose import saved, transpose, up_to_experts
from moesaic.program.validate import validate, validate_schedule


@dataclass(frozen=True)
class Compiled:
    """A plan compiled for a mesh."""

    plan: Plan
    grid: Grid
    """The mesh, with etp factored into the visited and the gathered part if the plan gathers
    weights."""
    logical: Program
    """The forward program before lowering, from which the backward program is derived."""
    forward: Program
    backward: Program
    again: Program | None = None
    """The part of the forward program that recomputes a slice before its backward program; None
    without a memory budget."""

    @cached_property
    def is_multicast(self) -> bool:
        """Whether the plan sends tokens by multicast, so that the program needs the visits of
        tokens to nodes."""
        return self.plan.crossing is Crossing.MULTICAST

    @cached_property
    def routes_slices(self) -> bool:
        """Whether each of several ranks of a tensor-parallel group routes a slice of the tokens of
        the group."""
        return self.logical.routes_slices and self.grid.tp > 1

    @cached_property
    def is_redundant(self) -> bool:
        """Whether every rank of a tensor-parallel group sends all tokens of the group."""
        return self.logical.is_redundant

    @property
    def replicates(self) -> bool:
        """Whether copies may be computed on other ranks than the homes of their experts."""
        return self.plan.replicates

    @property
    def capacity_multiple(self) -> int:
        """The multiple to which a padded capacity is rounded up, so that its rows split evenly over
        tp, shards and chunks."""
        # A codec encodes blocks of rows, of which every chunk is to have whole ones.
        codecs = [codec_spec(self.plan.codec), codec_spec(self.plan.backward_codec)]
        rows_per_block = max(codec.rows_per_block for codec in codecs)
        chunks = self.plan.chunks
        return math.lcm(self.grid.tp, self.grid.etp * chunks, rows_per_block * chunks)

    @cached_property
    def digest(self) -> bytes:
        """Hash of 16 bytes that is equal on two ranks if and only if they run the same programs on
        the same mesh."""
        text = f"{self.grid}\n{to_text(self.forward)}\n{to_text(self.backward)}"
        # each call decides by these which rows run where
        text += f"{self.plan.replication} {self.plan.memory_budget}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def shapes(self, num_experts: int) -> LayoutIndex:
        """Return the pieces of every slot for a number of experts; the result is cached."""
        return self._index(num_experts)

    def sizes(
        self,
        copies: np.ndarray,
        tokens: np.ndarray,
        *,
        units: int,
        node_tokens: np.ndarray | None = None,
        replicated: Replications | None = None,
    ) -> CallSizes:
        """Return the rows of every slot and movement in a call of a layer; the arguments are those
        of `CallSizes`."""
        chunks = self.plan.chunks
        shapes = self.shapes(copies.shape[1])
        return CallSizes(
            self.grid,
            copies,
            tokens,
            num_chunks=chunks,
            node_tokens=node_tokens,
            units=units,
            replicated=replicated,
            shapes=shapes,
        )

    def held(self, num_experts: int, experts: ExpertSizes) -> HeldBytes:
        """Return the model of the bytes that calls of a layer hold; the result is cached."""
        return self._held(num_experts, experts)

    def under(self, plan: Plan) -> Compiled:
        """Return the programs of another plan for the same mesh and the same parameters of experts;
        the result is cached.

        Raises:
            InputError: as `compile_plan` does.
        """
        return self._under(plan)

    @cached_property
    def _under(self) -> Callable[[Plan], Compiled]:
        """The function behind `under`."""
        grid = replace(self.grid, etp_inner=1)
        has_bias = "b" in self.logical.inputs
        return cache(partial(compile_plan, grid=grid, bias=has_bias))

    @cached_property
    def _index(self) -> Callable[[int], LayoutIndex]:
        """The function behind `shapes`."""
        return cache(
            partial(LayoutIndex, self.grid, num_chunks=self.plan.chunks, replicates=self.replicates)
        )

    @cached_property
    def _held(self) -> Callable[[int, ExpertSizes], HeldBytes]:
        """The function behind `held`."""

        @cache
        def held_bytes(num_experts: int, experts: ExpertSizes) -> HeldBytes:
            mesh = MovedPieces(self.shapes(num_experts))
            return HeldBytes((self.forward, self.backward), mesh, experts)

        return held_bytes


def compile_plan(plan: Plan, grid: Grid, *, bias: bool = False) -> Compiled:
    """Compile a plan for a mesh.

    Args:
        bias: whether the experts also have parameters that all of their shards share.

    Raises:
        InputError: if the plan does not fit the mesh, or if two of its choices clash; the message
            names both.
    """
    _check_deepep(plan, grid)
    # What follows the transpose changes nothing before it, so plans that differ there share both
    # programs, cached under a plan with the defaults of these choices.
    default = Plan()
    is_link = plan.crossing is Crossing.LINK  # an algorithm for lowering, after the transpose
    plan_before_transpose = replace(
        plan,
        all_to_all=default.all_to_all if is_link else plan.all_to_all,
        order=default.order,
        overlap_gather=default.overlap_gather,
    )
    logical, grid = _logical(plan_before_transpose, grid, bias)
    forward, backward = _both_ways(logical)
    forward = _lowered(forward, plan, grid, plan.codec, is_forward=True)
    backward = _lowered(backward, plan, grid, plan.backward_codec, is_forward=False)
    again = None
    if plan.memory_budget is not None:
        again = up_to_experts(forward, saved(logical))
        validate(again)
    return Compiled(plan, grid, logical, forward=forward, backward=backward, again=again)


def _lowered(program: Program, plan: Plan, grid: Grid, codec: str, *, is_forward: bool) -> Program:
    """Return a program with the plan's all-to-all, codec and order; only a forward program must
    have an all-gather that `overlap_gather` can overlap."""
    if plan.overlap_gather:
        program = overlap_gather(program, grid, required=is_forward)
    program = route_all_to_all(program, plan.link, grid)
    program = compress(program, codec, grid)
    return _ordered(program, plan.order)


@lru_cache(maxsize=256)
def _ordered(program: Program, order: Order) -> Program:
    """Return a lowered program in the order of issue, validated. Meshes on which the same is sent
    share it."""
    program = side_by_side(ORDERS[order](program))
    validate(program)
    return program


def moving(compiled: Compiled) -> Compiled:
    """Return the same programs with every result delivered to the next home of its sample
    (`passes/relocate`).

    Args:
        compiled: a compiled plan without sample placement.

    Raises:
        InputError: if samples cannot move under the plan.
    """
    plan = compiled.plan
    if plan.crossing is Crossing.DEEPEP:
        raise InputError(
            "sample placement clashes with plan.all_to_all=deepep, whose kernels return "
            "results to the senders: choose linear"
        )
    if plan.memory_budget is not None:
        raise InputError(
            f"sample placement clashes with memory_budget={plan.memory_budget}, whose slices cut "
            "samples: leave memory_budget unset"
        )
    forward = relocate(compiled.forward)
    backward = relocate(compiled.backward)
    validate(forward)
    validate(backward)
    return replace(compiled, logical=relocate(compiled.logical), forward=forward, backward=backward)


def _check_deepep(plan: Plan, grid: Grid) -> None:
    """Raise InputError if a plan with DeepEP has another choice or a mesh that DeepEP does not
    support."""
    if plan.crossing is not Crossing.DEEPEP:
        return
    # Any order will do, since no program runs; all other choices must have their defaults.
    supported = Plan(all_to_all=plan.all_to_all, order=plan.order)
    for name, only_value in vars(supported).items():
        if getattr(plan, name) != only_value:
            raise InputError(
                f"plan.{name}={getattr(plan, name)} clashes with plan.all_to_all=deepep, which "
                f"moves whole tokens by its own kernels: leave it at {only_value}, or choose "
                "multicast"
            )
    if grid.tp > 1 or grid.etp > 1:
        raise InputError(
            f"plan.all_to_all=deepep needs mesh.tp=1 and mesh.etp=1, got {grid.tp} and "
            f"{grid.etp}: choose multicast"
        )


@lru_cache(maxsize=256)
def _logical(plan: Plan, grid: Grid, bias: bool) -> tuple[Program, Grid]:
    """Return the forward program after the passes that come before the transpose, and the grid, in
    which `gather_weights` splits etp into two axes."""
    program = SCHEDULES[plan.schedule](bias)
    validate_schedule(program)
    # Tokens that are identical over etp, as under TED: etp ranks are those of a tensor group.
    if program.slot("x").on("etp") is State.IDENTICAL and not grid.shares_tp_and_etp:
        raise InputError(
            f"plan.schedule={plan.schedule} needs mesh.tp and mesh.etp over the same ranks, got "
            f"{grid.tp} and {grid.etp} with {grid.innermost} innermost: choose equal ones with "
            "etp innermost, or the schedule s3"
        )
    fused = fuse_ep_etp(program) if plan.fuse else program
    if grid.tp > 1 and not plan.is_lossless and _rounds_apart(fused):
        raise InputError(
            f"a codec clashes with plan.schedule={plan.schedule}: each rank of a tensor group "
            "sends its own copy of a row, and only those that cross are rounded, so the copies "
            "would differ: choose s1, s2 or s3, or codec none"
        )
    program = multicast(program, grid) if plan.crossing is Crossing.MULTICAST else fused
    if plan.gather_weights is not None:
        program, grid = gather_weights(program, plan.gather_weights, grid)
    if plan.replicates:
        program = replicate(program, plan.chunks, grid)
    else:
        program = split_capacity(program, plan.chunks)
    return split_peers(program, plan.peer_groups, grid), grid


@lru_cache(maxsize=256)
def _both_ways(program: Program) -> tuple[Program, Program]:
    """Return a forward program and its transpose, with reductions halved. Meshes of other sizes
    share them."""
    return halve_reduce(program), halve_reduce(transpose(program))


def _rounds_apart(program: Program) -> bool:
    """Return whether ranks that must agree on a row each receive a copy of their own, which a codec
    would make differ: it rounds what crosses between ranks, and not what a rank keeps for
    itself."""
    if program.is_redundant:  # each rank of a tensor-parallel group gets its own results back
        return True
    for task in program.moves():
        received = program.slot(task.writes[0])
        # a codec encodes rows over ep alone
        if "ep" not in task.group or received.kind is not Kind.ROWS:
            continue
        # ranks that exchange with each other end with the same rows
        if any(received.on(axis) is State.IDENTICAL for axis in task.group):
            return True
    return False
