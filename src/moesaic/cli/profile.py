"""`moesaic profile`: measures the machine that it runs on, for the simulator and the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.configfile import as_toml
from moesaic.errors import InputError, in_one_line
from moesaic.files import require_writable, write

if TYPE_CHECKING:
    from moesaic.measure.profile import Profile

DESCRIPTION = (
    "Measure the links, host costs and matrix products of this machine (CPUs only), and describe "
    "it as a cluster, which moesaic plan and train read. Start it like a training run: torchrun "
    "--nproc-per-node 4 -m moesaic profile --out cluster.toml, or moesaic testbed run --nodes 2 "
    "--ranks-per-node 2 -- python -m moesaic profile. Nothing else should run on the machine at "
    "the same time."
)
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of `moesaic profile`."""

    out: str = "cluster.toml"
    """File to write; an existing one is replaced."""
    repeats: int = 5
    """How often each measurement is repeated; a noisy machine may need more."""
    dtypes: str = "fp32"
    """Dtypes in which matrix products of experts are measured: fp32, bf16 or "fp32,bf16"."""
    transport: str = "auto"
    """Transport between the ranks; use the same as --mesh.transport of the training."""
    accept: bool = False
    """Write the profile even if its own check fails."""

    def __post_init__(self) -> None:
        if self.repeats < 3:
            raise InputError(f"--repeats {self.repeats}: give at least 3, to measure their spread")
        for name in self.dtypes.split(","):
            if name not in DTYPES:
                raise InputError(
                    f"--dtypes {self.dtypes}: choose from {', '.join(DTYPES)}, separated by a comma"
                )
        if not self.out.endswith(".toml"):
            raise InputError(f"--out {self.out}: name a file that ends in .toml")


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(ProfileOptions, arguments, prog="moesaic profile", description=DESCRIPTION)
    require_writable(options.out, "--out")
    import torch

    from moesaic.comm.mesh import Mesh
    from moesaic.measure.profile import measure
    from moesaic.train.launch import launch

    torch.set_num_threads(1)
    started = launch()  # this process as one of the ranks
    console = Console(stderr=True, quiet=not started.is_first)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=1.0)
            shown: set[str] = set()

            def show(what: str, share: float) -> None:
                """Show what is measured, and the share that is done; without a terminal, which
                shows no bar, in a line for each thing."""
                bar.update(task, description=what, completed=share)
                if not console.is_terminal and what not in shown:
                    shown.add(what)
                    console.print(f"measuring: {what} ({share:.0%} done)")

            grid = Mesh.create(device_type="cpu").grid
            ranks_per_node = grid.ranks_per_node or grid.world
            dtypes = tuple(options.dtypes.split(","))
            profile = measure(ranks_per_node, options.repeats, dtypes, show, options.transport)
        if profile.troubles and not options.accept:
            raise InputError(
                f"the profile fails its own check ({'; '.join(profile.troubles)}), so "
                f"{options.out} is not written: measure while nothing else runs, give more "
                "--repeats, or write it anyway with --accept"
            )
    except InputError:  # raised on every rank; only the first rank prints it
        if started.is_first:
            raise
        return 2
    if started.is_first:
        _write(profile, Path(options.out))
        console.print(table(profile))
        console.print(in_one_line(f"wrote {options.out}"), markup=False)
    started.leave()
    return 0


def _write(profile: Profile, path: Path) -> None:
    """Write the profile as a cluster file."""
    try:
        write(path, as_toml(profile.cluster), typed=True)
    except OSError as error:
        raise InputError(
            f"profile {path}: cannot be written ({error.strerror or error})"
        ) from error


def table(profile: Profile) -> Table:
    """Return a profile as a table."""
    from moesaic.kernels.codecs import missing_codecs

    cluster = profile.cluster
    figures = Table("what", "value", title=f"{cluster.name}: {cluster.description}")
    for link in cluster.links:
        whose = f"{link.devices} ranks together" if link.devices > 1 else "each rank"
        # a profile has one rate for all links of a kind; 1 gbps is 125 MB/s
        megabytes_per_second = link.gbps[0] * 125
        figures.add_row(f"{link.name}, {whose}", f"{megabytes_per_second:.1f} MB/s")
    # straight lines: seconds = alpha + beta * bytes
    for line in cluster.collectives:
        rate = f"{1e-6 / line.beta:.1f} MB/s" if line.beta else "no bytes seen"
        figures.add_row(
            line.what,
            f"{1e6 * line.alpha:.0f} us + {rate}, r2 {line.r2:.3f}, worst {line.worst:.0%}",
        )
    for what in ("layer", "task", "message"):
        microseconds = getattr(cluster.host, f"{what}_us")
        figures.add_row(f"host: {what}", f"{microseconds:.0f} us")
    device = cluster.device
    for name in DTYPES:
        tflops = getattr(device.tflops, name)
        if tflops:
            figures.add_row(f"products, {name}, most", f"{1e3 * tflops:.1f} GFLOP/s")
    figures.add_row("copies", f"{device.memory_gigabytes_per_second:.1f} GB/s")
    for codec in device.codecs:
        figures.add_row(f"codec {codec.name}", f"{codec.gigabytes_per_second:.2f} GB/s")
    for name in missing_codecs():
        figures.add_row(f"codec {name}", "not installed here")
    worst = float(abs(profile.errors).max())
    figures.add_row(
        "check: held-out layers, wall time", f"{profile.median_error:.1%} off (worst {worst:.1%})"
    )
    return figures
