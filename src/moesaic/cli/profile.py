"""`moesaic profile`: measures the machine that it runs on, for the simulator and the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.errors import InputError, in_one_line

if TYPE_CHECKING:
    from moesaic.planner.profile import ClusterProfile

DESCRIPTION = (
    "Measure the links, host costs and matrix products of this machine (CPUs only). Start it like a training run: torchrun "
    "--nproc-per-node 4 -m moesaic profile --out profile.json, or moesaic testbed run --nodes 2 --ranks-per-node 2 -- "
    "python -m moesaic profile --out profile.json. Nothing else should run on the machine at the same time."
)
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of `moesaic profile`."""

    out: str = "profile.json"
    """File to write; an existing one is replaced."""
    repeats: int = 5
    """How often each measurement is repeated; a noisy machine may need more."""
    dtypes: str = "fp32"
    """Dtypes in which matrix products of experts are measured: fp32, bf16 or "fp32,bf16"."""
    transport: str = "auto"
    """Transport between the ranks; use the same as --mesh.transport of the training."""
    still: bool = False
    """Bind each rank to one core and use the batch scheduling policy, as moesaic bench model does and training does not."""

    accept: bool = False
    """Write the profile even if its own check fails."""

    def __post_init__(self) -> None:
        if self.repeats < 3:
            raise InputError(f"--repeats {self.repeats}: give at least 3, to measure their spread")
        for name in self.dtypes.split(","):
            if name not in DTYPES:
                raise InputError(f"--dtypes {self.dtypes}: choose from {', '.join(DTYPES)}, separated by a comma")
        if not self.out.endswith(".json"):
            raise InputError(f"--out {self.out}: name a file that ends in .json")


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(ProfileOptions, arguments, prog="moesaic profile", description=DESCRIPTION)
    import torch
    import torch.distributed as dist

    from moesaic.comm.mesh import Mesh
    from moesaic.measure.profile import layer_errors, measure, profile_of
    from moesaic.measure.together import hold_still
    from moesaic.train.launch import launch

    torch.set_num_threads(1)
    started = launch()
    if options.still:
        hold_still(dist.get_rank() if dist.is_initialized() else 0)
    console = Console(stderr=True, quiet=not started.is_first)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        grid = Mesh.create(device_type="cpu").grid
        measured = measure(
            grid.ranks_per_node or grid.world,
            options.repeats,
            tuple(options.dtypes.split(",")),
            lambda what, share: bar.update(task, description=what, completed=share),
            options.transport,
        )
    try:
        profile = profile_of(measured)
        failed = failings(profile, layer_errors(profile, measured))
        if failed and not options.accept:
            raise InputError(
                f"the profile fails its own check ({'; '.join(failed)}), so {options.out} is not written: measure while "
                "nothing else runs, give more --repeats, or write it anyway with --accept"
            )
    except InputError:  # raised on every rank; only the first rank prints it
        if started.is_first:
            raise
        return 2
    if started.is_first:
        profile.write(Path(options.out))
        console.print(table(profile, layer_errors(profile, measured)))
        console.print(in_one_line(f"wrote {options.out}"), markup=False)
    started.leave()
    return 0


def failings(profile: ClusterProfile, layers: Sequence[float]) -> list[str]:
    """Return the checks that a profile fails, in words: medians above `LIMITS`, and collectives that fit no line.

    Args:
        profile: the profile.
        layers: errors of the predicted times of whole layers, as shares.
    """
    ordered = sorted(layers)
    medians = {
        "processor time of plans": profile.errors.host_median,
        "whole layers": max(profile.errors.layers_median, ordered[len(ordered) // 2] if ordered else 0.0),
    }
    failed = [
        f"{name} {medians[name]:.0%} off, at most {limit:.0%}"
        for name, limit in LIMITS.items()
        if medians[name] > limit
    ]
    return failed + [line.trouble for line in profile.collectives.values() if line.trouble]


LIMITS = {"processor time of plans": 0.25, "whole layers": 0.5}
"""Largest median errors on held-out measurements; a profile with larger ones predicts nothing."""


def table(profile: ClusterProfile, layers: Sequence[float]) -> Table:
    """Return a profile as a table.

    Args:
        profile: the profile.
        layers: errors of the predicted times of whole layers, as shares.
    """
    figures = Table(
        "what", "value", title=f"{profile.nodes} x {profile.ranks_per_node} ranks, {profile.machine.processor}"
    )
    for name, link in (("inside nodes", profile.inside), ("between nodes", profile.outside)):
        if link.all_senders:
            figures.add_row(f"{name}: one sender", f"{link.one_sender / 1e6:.1f} MB/s")
            figures.add_row(f"{name}: each of all senders", f"{link.all_senders / 1e6:.1f} MB/s")
            figures.add_row(f"{name}: latency", f"{1e6 * link.latency_seconds:.0f} us")
    for name, line in profile.collectives.items():
        rate = f"{1e-6 / line.beta:.1f} MB/s" if line.beta else "no bytes seen"
        figures.add_row(f"{name}", f"{1e6 * line.alpha:.0f} us + {rate}, r2 {line.r2:.3f}, worst {line.worst:.0%}")
    for cost in fields(profile.host):
        value = getattr(profile.host, cost.name)
        text = (
            f"{value:.2f}"
            if cost.name == "sharing"
            else f"{1e9 * value:.3g} ns"
            if "byte" in cost.name
            else f"{1e6 * value:.1f} us"
        )
        figures.add_row(f"host: {cost.name}", text)
    for name in DTYPES:
        rates = getattr(profile.products, name)
        if rates:
            figures.add_row(f"products, {name}, most", f"{max(rates) / 1e9:.1f} GFLOP/s")
    figures.add_row("copies", f"{profile.copy_bytes_per_second / 1e9:.1f} GB/s")
    figures.add_row(
        "check: held-out plans, processor time",
        f"{profile.errors.host_median:.1%} (worst {profile.errors.host_worst:.1%})",
    )
    figures.add_row("check: held-out sizes, links", f"worst {profile.errors.links_worst:.1%}")
    ordered = sorted(abs(error) for error in layers)
    if ordered:
        figures.add_row("check: whole layers, wall time", f"{ordered[len(ordered) // 2]:.1%} (worst {ordered[-1]:.1%})")
    return figures
