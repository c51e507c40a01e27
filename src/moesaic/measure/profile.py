"""`moesaic profile`: measures the machine that its ranks run on, and fits and checks a profile.

The profile is checked on held-out measurements. The measured times can be written to a file, so that another fit can
use the same times.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from moesaic.comm.mesh import open_transport
from moesaic.configfile import override, read_table
from moesaic.errors import InputError
from moesaic.files import write
from moesaic.measure.compute import codecs, copy_bytes_per_second, memory_gib, products
from moesaic.measure.host import Calibration, CalibrationStep, calibrations, host_steps, sharing
from moesaic.measure.links import TimedMovements, collectives, movements, partners
from moesaic.measure.together import hold_still, latest, start_together
from moesaic.planner.movement import movements_of
from moesaic.planner.profile import ClusterProfile, Errors, HostCosts, LinkCosts, MachineInfo, Versions
from moesaic.planner.profile_fit import Sample, TimedLayer, calibrate, fit_host, fit_link
from moesaic.planner.profile_simulate import FEATURES, host_features, layer_features, profiled_simulator
from moesaic.planner.simulate import Simulator

NO_TIME = 1e30
"""Operations per second of products that take no time, such as those of the calibration layers."""
REPEATS_OF_LAYERS = 3
"""Factor on the number of repeats for layers, since their time varies by a tenth when ranks share cores."""
Progress = Callable[[str, float], None]
"""Called with the current measurement's name and the share of all measurements that is done."""


@dataclass(frozen=True, kw_only=True)
class MeasuredMachine:
    """All measured times, equal on all ranks. The profile is fitted to them."""

    ranks_per_node: int
    world: int
    steps: list[tuple[Calibration, CalibrationStep]]
    sharing: tuple[float, ...]
    links: dict[str, TimedMovements]
    """Keys: "inside" and "outside" with all senders, "inside, one" and "outside, one" with one pair."""
    rest: ClusterProfile
    """Profile with products, codecs, copies, memory and collectives, but no links yet."""


def measure(
    ranks_per_node: int,
    repeats: int,
    dtypes: tuple[str, ...],
    progress: Progress,
    transport_name: str = "auto",
) -> MeasuredMachine:
    """Measure this machine. All ranks call it together.

    Args:
        ranks_per_node: ranks on each machine.
        repeats: repeats of every measurement.
        dtypes: dtypes of the products: fp32, bf16.
        progress: called on every rank.
        transport_name: transport of the messages.
    """
    transport = open_transport(name=transport_name)
    barrier = start_together(latest) if dist.is_initialized() else lambda: None
    progress("products, copies and codecs", 0.0)
    profile = ClusterProfile(
        products=products(dtypes, repeats, barrier),
        codecs=codecs(repeats, barrier),
        copy_bytes_per_second=copy_bytes_per_second(repeats, barrier),
        memory_gib=memory_gib(ranks_per_node),
    )
    progress("sharing of cores", 0.1)
    sharing_ratios = sharing(repeats, barrier)
    links: dict[str, TimedMovements] = {}
    for inside in (True, False):
        name, peers = (
            "inside" if inside else "outside",
            partners(transport.rank, transport.world, ranks_per_node, inside=inside),
        )
        if not peers:
            continue
        progress(f"messages {name} nodes", 0.12 if inside else 0.2)
        links[name] = movements(transport, peers, peers, repeats, barrier)
        target = 1 if inside else ranks_per_node  # rank 0 only sends, so a shared medium shows
        to, source = (target,) * (transport.rank == 0), (0,) * (transport.rank == target)
        links[f"{name}, one"] = movements(transport, to, source, repeats, barrier)
    progress("collectives", 0.28)
    lines = collectives(transport, ranks_per_node, repeats, barrier)
    layers = list(calibrations(transport.world, ranks_per_node))
    steps = host_steps(
        layers,
        transport,
        REPEATS_OF_LAYERS * repeats,
        barrier,
        lambda share: progress(f"{len(layers)} layers", 0.45 + 0.55 * share),
    )
    return MeasuredMachine(
        ranks_per_node=ranks_per_node, world=transport.world, steps=steps, sharing=sharing_ratios, links=links,
        rest=replace(profile, collectives=lines),
    )  # fmt: skip


def measure_still(
    ranks_per_node: int, repeats: int, dtypes: tuple[str, ...], transport_name: str = "auto"
) -> MeasuredMachine:
    """Measure on ranks that are each bound to one core, as in the cost model's benchmarks; see `hold_still`."""
    hold_still(dist.get_rank())
    return measure(ranks_per_node, repeats, dtypes, lambda what, share: None, transport_name)


def profile_of(measured: MeasuredMachine) -> ClusterProfile:
    """Fit a profile to the measured times, and check it on the held-out ones.

    Raises:
        InputError: if the times are too noisy.
    """
    sharing_ratio = statistics.median(measured.sharing)
    rough = _with_links(measured, HostCosts(sharing=sharing_ratio))[0]
    simulator = profiled_simulator(rough)
    samples = [Sample(_features(simulator, calibration), step.processor) for calibration, step in measured.steps]
    host = fit_host(samples, sharing_ratio)
    profile, link_error = _with_links(measured, host.costs)
    layers = [
        TimedLayer(
            forward=calibration.compiled.forward, backward=calibration.compiled.backward, grid=calibration.compiled.grid,
            workload=calibration.routed, seconds=statistics.median(step.wall), virtual_flops=NO_TIME,
        ) for calibration, step in measured.steps
    ]  # fmt: skip
    calibrated, layer_error = calibrate(profile, layers)
    return replace(
        calibrated,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        machine=MachineInfo.here(),
        versions=Versions.here(),
        errors=Errors(
            host_median=host.median_error,
            host_worst=host.worst_error,
            links_worst=link_error,
            spread=host.spread,
            layers_median=layer_error,
        ),
    )


def layer_errors(profile: ClusterProfile, measured: MeasuredMachine) -> tuple[float, ...]:
    """Return the errors of predicted times of the calibration layers, as shares. Three quarters of the layers were
    fitted to."""
    simulator = profiled_simulator(profile, virtual_flops=NO_TIME)
    errors = []
    for calibration, step in measured.steps:
        compiled = calibration.compiled
        predicted = simulator.layer_seconds(compiled.forward, compiled.backward, calibration.routed, compiled.grid)
        errors.append(predicted / statistics.median(step.wall) - 1)
    return tuple(errors)


def _features(simulator: Simulator, calibration: Calibration) -> np.ndarray:
    total = layer_features()
    for program in (calibration.compiled.forward, calibration.compiled.backward):
        volumes = simulator.volumes(program, calibration.routed, calibration.compiled.grid)
        total += host_features(program, volumes, movements_of(program, volumes)).mean(axis=1).sum(axis=0)
    assert total.shape == (len(FEATURES),)
    return total


def _with_links(measured: MeasuredMachine, host: HostCosts) -> tuple[ClusterProfile, float]:
    """Return a profile with these host costs and with fitted links, and the largest error on held-out sizes."""
    links: dict[str, LinkCosts] = {}
    worst = 0.0
    for name in ("inside", "outside"):
        all_senders = measured.links.get(name)
        if all_senders is None:
            continue
        one_fit, one_error = fit_link(*_timed(measured.links[f"{name}, one"]), f"one sender {name} nodes")
        all_fit, all_error = fit_link(*_timed(all_senders), f"all senders {name} nodes")
        links[name] = LinkCosts(
            latency_seconds=max(one_fit.latency - host.task - host.message - host.transfer, 0.0),
            credit_seconds=one_fit.credit,
            all_senders=all_fit.bytes_per_second,
            one_sender=one_fit.bytes_per_second,
        )
        worst = max(worst, one_error, all_error)
    nodes = measured.world // measured.ranks_per_node
    profile = replace(
        measured.rest,
        nodes=nodes,
        ranks_per_node=measured.ranks_per_node,
        host=host,
        inside=links.get("inside", LinkCosts()),
        outside=links.get("outside", LinkCosts()),
    )
    return profile, worst


def _timed(timed: TimedMovements) -> tuple[Sequence[float], Sequence[Sequence[float]]]:
    return timed.num_bytes, timed.seconds


def write_measured(measured: MeasuredMachine, path: Path) -> None:
    """Write all measured times. Calibration layers are written by name, from which the same version rebuilds them."""
    table = {
        "world": measured.world,
        "ranks_per_node": measured.ranks_per_node,
        "sharing": measured.sharing,
        "links": {name: asdict(timed) for name, timed in measured.links.items()},
        "rest": asdict(measured.rest),
        "steps": {calibration.name: asdict(step) for calibration, step in measured.steps},
    }
    write(path, json.dumps(table) + "\n", typed=True)


def read_measured(path: Path) -> MeasuredMachine:
    """Read a file that `write_measured` wrote.

    Raises:
        InputError: if the file is not such a file, or has other calibration layers than this version.
    """
    table = read_table(path)
    if "steps" not in table or "world" not in table:
        raise InputError(f"{path}: contains no measured times: measure again")
    layers = list(calibrations(table["world"], table["ranks_per_node"]))
    if [calibration.name for calibration in layers] != list(table["steps"]):
        raise InputError(f"{path}: has other calibration layers than this version: measure again")
    times_of_steps = [tuple(map(tuple, (step["processor"], step["wall"]))) for step in table["steps"].values()]
    return MeasuredMachine(
        ranks_per_node=table["ranks_per_node"],
        world=table["world"],
        steps=[(calibration, CalibrationStep(*times)) for calibration, times in zip(layers, times_of_steps)],
        sharing=tuple(table["sharing"]),
        links={
            name: TimedMovements(tuple(timed["num_bytes"]), tuple(map(tuple, timed["seconds"])), timed["messages"])
            for name, timed in table["links"].items()
        },
        rest=override(ClusterProfile(), table["rest"], source=str(path)),
    )
