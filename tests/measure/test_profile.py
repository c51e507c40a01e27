"""`moesaic profile`: calibration layers, the fit of the host's costs, links, the file. One test
really measures."""

from __future__ import annotations

import functools
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from moesaic.cli.main import main
from moesaic.cli.profile import table
from moesaic.codecs import CODECS, is_coded
from moesaic.comm.mesh import open_transport
from moesaic.configfile import as_toml
from moesaic.errors import InputError
from moesaic.kernels.codecs import missing_codecs
from moesaic.measure import compute as measured_compute
from moesaic.measure import costs, host, links
from moesaic.measure.costs import NO_TIME, START, fit_layers
from moesaic.measure.host import Calibration, calibrations
from moesaic.measure.profile import Profile, links_of, measure, source_of_here
from moesaic.planner.cluster import ClusterSpec, CodecRate, Device, Host, Link, Tflops, read_cluster
from moesaic.planner.fit import Fit
from moesaic.planner.simulator import Simulator
from moesaic.program.task import Op
from worlds import on_ranks

COSTS = {"layer_us": 2000.0, "task_us": 80.0, "message_us": 30.0}
UNKNOWN = ClusterSpec(
    nodes=2,
    devices_per_node=2,
    device=Device(
        tflops=Tflops(fp32=0.02),
        memory_gib=8,
        memory_gigabytes_per_second=3,
        codecs=(CodecRate(name="int8", gigabytes_per_second=0.5),),
    ),
    links=(
        Link(name="inside", devices=2, gbps=(0.4,), carries="inside", shared=True),
        Link(name="outside", devices=2, gbps=(0.2,), carries="outside"),
    ),
    host=Host(runs_compute=True, messages="eager"),
    collectives=(Fit(alpha=1e-4, beta=1e-8, residuals=(0.1, -0.1), what="all_gather inside"),),
)
"""A cluster whose host has not been measured."""


@pytest.fixture(autouse=True, scope="module")
def _fewer_layers() -> Iterator[None]:
    """One shape of layers says what three do here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "SHAPES", host.SHAPES[:1])
        yield


def timed(spec: ClusterSpec) -> list[tuple[Calibration, float]]:
    """Return the calibration layers with the times that a cluster predicts."""
    computing = Simulator(spec)
    idle = Simulator(replace(spec, device=spec.device.with_flops(NO_TIME)))
    layers = []
    for calibration in calibrations(spec.world, spec.devices_per_node):
        compiled = calibration.compiled
        simulator = computing if calibration.computes else idle
        seconds = simulator.layer_seconds(
            compiled.forward, compiled.backward, calibration.routed, compiled.grid
        )
        layers.append((calibration, seconds))
    return layers


def test_calibrations_have_every_kind_of_task_and_differ() -> None:
    layers = list(calibrations(4, 2))
    kinds = {
        task.op
        for calibration in layers
        for task in (*calibration.compiled.forward.tasks, *calibration.compiled.backward.tasks)
    }
    assert {
        Op.MOVE,
        Op.HOP,
        Op.PACK,
        Op.UNPACK,
        Op.EXPERT,
        Op.EXPERT_GRAD,
        Op.TAKE,
        Op.JOIN,
        Op.PERMUTE,
    } <= kinds
    assert len(layers) >= 4 * len(START)
    assert len(
        {(calibration.compiled.digest, calibration.workload) for calibration in layers}
    ) == len(layers)
    assert {calibration.mesh.tp for calibration in layers} == {1, 2}


@pytest.mark.parametrize("world", [2, 8])
def test_every_chunk_of_a_calibration_has_rows_for_every_expert(world: int) -> None:
    """The simulator counts a message without rows, which is never sent: four chunks would seem to
    cost nothing."""
    for calibration in calibrations(world, 2):
        origins = calibration.mesh.tp if calibration.compiled.routes_slices else 1
        rows = (
            calibration.tokens
            * calibration.workload.top_k
            // (calibration.workload.num_experts * origins)
        )
        assert rows >= calibration.compiled.plan.chunks, calibration.name


def test_a_codec_that_is_not_installed_is_left_out_and_said(monkeypatch) -> None:
    """As after README's install line, which brings no zfpy."""
    monkeypatch.setitem(sys.modules, "zfpy", None)
    assert missing_codecs() == ["zfp"]
    rates = measured_compute.codecs(1, lambda: None)
    assert set(rates) == {name for name in CODECS if is_coded(name)} - {"zfp"}
    profile = replace(UNKNOWN, source=source_of_here())
    assert "; without the codec zfp, not installed here" in as_toml(profile)
    shown = io.StringIO()
    Console(file=shown).print(table(Profile(cluster=profile, errors=np.zeros(1))))
    assert re.search(r"codec zfp\W+not installed here", shown.getvalue())


def test_one_rank_and_odd_worlds_can_be_calibrated_too() -> None:
    assert {calibration.mesh.world for calibration in calibrations(1, 1)} == {1}
    assert {calibration.mesh.ep for calibration in calibrations(3, 3)} == {3}


@functools.cache
def fitted(contention: float) -> tuple[ClusterSpec, np.ndarray]:
    """Return what is found from the times of a cluster whose host has `COSTS`, and the errors."""
    device = replace(UNKNOWN.device, contention=contention)
    host_with_costs = replace(UNKNOWN.host, **COSTS)
    return fit_layers(UNKNOWN, timed(replace(UNKNOWN, device=device, host=host_with_costs)))


def test_layers_give_back_the_costs_of_the_host_that_timed_them() -> None:
    found, errors = fitted(UNKNOWN.device.contention)
    assert {name: getattr(found.host, name) for name in COSTS} == pytest.approx(COSTS, rel=0.05)
    assert np.abs(errors).max() < 0.01
    assert replace(found, host=UNKNOWN.host, device=UNKNOWN.device) == UNKNOWN
    assert Profile(cluster=found, errors=errors).troubles == []


@pytest.mark.parametrize("contention", [0.0, 0.8])
def test_layers_that_compute_give_back_the_contention(contention: float) -> None:
    found, _ = fitted(contention)
    assert found.device.contention == pytest.approx(contention, abs=0.1)


def test_a_host_without_costs_is_found_too() -> None:
    found, errors = fit_layers(UNKNOWN, timed(UNKNOWN))
    assert max(found.host.layer_us / START[0], found.host.task_us / START[1]) < 0.02
    assert np.abs(errors).max() < 0.1


def test_times_that_no_costs_explain_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MOST_STEPS", 3)
    draw = np.random.default_rng(0)
    layers = [
        (calibration, seconds * float(draw.uniform(0.1, 10)))
        for calibration, seconds in timed(UNKNOWN)
    ]
    profile = Profile(cluster=UNKNOWN, errors=fit_layers(UNKNOWN, layers)[1])
    assert profile.troubles == [f"whole layers {profile.median_error:.0%} off, at most 50%"]
    bent = replace(UNKNOWN, collectives=(Fit(r2=0.5, worst=0.5, what="all_gather inside"),))
    assert "all_gather inside" in Profile(cluster=bent, errors=np.zeros(1)).troubles[0]


def lines(**seconds_per_byte: float) -> dict[str, Fit]:
    named = {name.replace("_on_", " "): beta for name, beta in seconds_per_byte.items()}
    return {
        name: Fit(alpha=1e-4, beta=beta, what=name, residuals=(0.0,) * len(links.SIZES))
        for name, beta in named.items()
    }


def test_shared_links_are_distinguished_from_separate_ones() -> None:
    """Two ranks a node: of an all-to-all inside, half leaves a rank; of one between three nodes,
    two thirds."""
    measured = lines(
        all_to_all_on_inside=2e-8,
        send_on_inside=2e-8,
        all_to_all_on_outside=8e-8,
        send_on_outside=7e-8,
    )
    inside, outside = links_of(measured, 3, 2)
    assert (inside.devices, inside.shared, inside.gbps[0]) == (
        2,
        True,
        pytest.approx(2 * 8e-9 / 2 / 2e-8),
    )
    assert (outside.devices, outside.shared, outside.gbps[0]) == (
        2,
        False,
        pytest.approx(2 * 8e-9 * 2 / 3 / 8e-8),
    )
    assert (inside.carries, outside.carries) == ("inside", "outside")
    own = links_of(measured | lines(send_on_outside=12e-8), 3, 2)[1]
    assert (own.devices, own.gbps[0]) == (1, pytest.approx(8e-9 * 2 / 3 / 8e-8))
    assert links_of({}, 1, 1) == ()
    with pytest.raises(InputError, match="send outside: longer transfers take no longer"):
        links_of(measured | lines(send_on_outside=0.0), 3, 2)


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    measured = replace(
        UNKNOWN,
        name=path.name,  # a cluster without a name of its own has its file's
        host=replace(UNKNOWN.host, **COSTS),
        source='of "one" machine, é',
    )
    path.write_text(as_toml(measured), encoding="utf-8")
    assert read_cluster(str(path)) == measured
    assert read_cluster(str(path), nodes=2) == measured
    assert read_cluster(str(path), nodes=4) == replace(measured, nodes=4, collectives=()), (
        "measured on two nodes"
    )
    path.write_text(as_toml(measured).replace("alpha = 0.0001", "alpha = -1.0"), encoding="utf-8")
    with pytest.raises(InputError, match=r"cluster.toml.*all_gather inside: alpha=-1.0: must be"):
        read_cluster(str(path))


def test_one_rank_without_a_launcher_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHAPES", ((8, 8, 1),))
    monkeypatch.setattr(measured_compute, "ROWS", (1, 4))
    monkeypatch.setattr(measured_compute, "COPIED_ROWS", 64)
    monkeypatch.setattr(links, "SIZES", ())
    shares: list[float] = []
    profile = measure(1, 3, ("bf16",), lambda what, share: shares.append(share))
    device = profile.cluster.device
    assert shares == sorted(shares)
    assert (profile.cluster.links, profile.cluster.collectives) == ((), ())
    assert (
        min(
            device.tflops.fp32,
            device.tflops.bf16,
            device.memory_gigabytes_per_second,
            *device.gemm_share,
        )
        > 0
    )
    assert {each.name for each in device.codecs} >= {"int8"}
    assert device.contention == 0, "nothing was sent"
    assert profile.cluster.host.layer_us + profile.cluster.host.task_us > 0
    assert np.isfinite(profile.errors).all()


def one_computing_layer() -> int:
    """Time a layer whose ranks were started apart, each with random numbers of its own."""
    torch.manual_seed(dist.get_rank())
    layer = next(each for each in calibrations(2, 1) if each.computes)
    return len(host.timed([layer], open_transport(), 1, dist.barrier, lambda share: None))


def test_ranks_that_torchrun_starts_draw_the_same_weights() -> None:
    assert on_ranks(2, one_computing_layer) == [1, 1]


def test_without_a_terminal_each_part_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(ranks_per_node, repeats, dtypes, progress, transport):
        for what, share in (("links", 0.0), ("layers", 0.3), ("layers", 0.6)):
            progress(what, share)
        raise InputError("no more")

    monkeypatch.setattr("moesaic.measure.profile.measure", measured)
    assert main(["profile", "--out", str(tmp_path / "cluster.toml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("measuring")] == [
        "measuring: links (0% done)",
        "measuring: layers (30% done)",
    ]
