"""`moesaic show`: a schedule as a program, and what it moves on a mesh. No torch needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """What to show."""

    schedule: Literal["baseline", "ted", "s1", "s2", "s3"] = "s2"
    """Where tensor parallelism pauses around the layer; docs/programs.md describes each."""
    chunks: int = 1
    """Parts that each run of copies is cut into."""
    backward: bool = False
    """Show the derived backward program."""
    world: int = 8
    """Ranks of the mesh for the table of bytes."""
    ranks_per_node: int = 4
    """Consecutive ranks that share a node."""
    tp: int = 2
    """Tensor parallelism of the dense part."""
    ep: int = 2
    """Expert parallelism."""
    etp: int = 4
    """Expert-tensor parallelism."""
    innermost: Literal["etp", "ep"] = "etp"
    """Which of etp and ep has consecutive ranks."""
    tokens: int = 4096
    """Tokens per data-parallel group."""
    dim: int = 1024
    """Width of a token."""
    num_experts: int = 8
    """Experts of the layer; routing is taken as even."""
    top_k: int = 2
    """Experts per token."""
    element_bytes: int = 2
    """Bytes of an activation: 2 for bfloat16."""
    json: bool = False
    """Print the table of bytes as JSON, without the program."""

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "tokens", "dim", "num_experts", "top_k", "element_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.world % self.ranks_per_node:
            raise InputError(
                f"--ranks-per-node {self.ranks_per_node} does not divide --world {self.world}: choose a divisor of it"
            )


def run(arguments: Sequence[str]) -> int:
    """Show; returns the exit code."""
    from moesaic.program.build import SCHEDULES
    from moesaic.program.grid import Grid
    from moesaic.program.order.early import early
    from moesaic.program.passes.split_capacity import split_capacity
    from moesaic.program.text import to_text
    from moesaic.program.transpose import transpose
    from moesaic.program.volume import even_sizes, traffic

    description = "Print a schedule as a program, and the bytes that it moves on a mesh under even routing."
    options = parse(ShowOptions, arguments, prog="moesaic show", description=description)
    grid = Grid(world=options.world, tp=options.tp, ep=options.ep, etp=options.etp, innermost=options.innermost)
    if options.schedule == "ted" and not grid.shares_tp_and_etp:
        raise InputError(
            f"--schedule ted needs --tp and --etp over the same ranks, got {options.tp} and {options.etp} with "
            f"{options.innermost} innermost: choose equal ones with etp innermost, or s3"
        )
    program = split_capacity(SCHEDULES[options.schedule](), options.chunks)
    program = early(transpose(program) if options.backward else program)
    sizes = even_sizes(
        grid,
        options.schedule,
        tokens=options.tokens,
        num_experts=options.num_experts,
        top_k=options.top_k,
        num_chunks=options.chunks,
    )
    rows: list[dict[str, Any]] = []
    for moved in traffic(program, sizes, lambda rank: rank // options.ranks_per_node):
        inside, across = moved.num_bytes(options.dim, options.element_bytes)
        rows.append(
            {"task": moved.task, "collective": moved.collective, "inside_bytes": inside, "across_bytes": across}
        )
    if options.json:
        total = {key: sum(row[key] for row in rows) for key in ("inside_bytes", "across_bytes")}
        print(json.dumps({"program": program.name, "rows": rows, **total}, indent=2))
        return 0
    print(to_text(program))
    Console().print(_table(rows, options))
    return 0


def _table(rows: list[dict[str, Any]], options: ShowOptions) -> Table:
    title = (
        f"MB in all, {options.world // options.ranks_per_node} nodes of {options.ranks_per_node} ranks, even routing"
    )
    table = Table(title=title)
    for column in ("task", "collective", "inside nodes", "across nodes"):
        table.add_column(column, justify="right" if "nodes" in column else "left")
    keys = ("inside_bytes", "across_bytes")
    for row in rows:
        table.add_row(row["task"], row["collective"], *(f"{row[key] / 1e6:,.2f}" for key in keys))
    table.add_section()
    table.add_row("in all", "", *(f"{sum(row[key] for row in rows) / 1e6:,.2f}" for key in keys))
    return table
