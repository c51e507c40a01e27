"""Profiles: file, cluster, fits, and simulation. No torch, no clock."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from moesaic.errors import InputError
from moesaic.planner.movement import movements_of
from moesaic.planner.profile import (
    ClusterProfile,
    Errors,
    HostCosts,
    LinkCosts,
    MachineInfo,
    Products,
    Versions,
    read_profile,
)
from moesaic.planner.profile_fit import Sample, fit_host, fit_link
from moesaic.planner.profile_simulate import (
    FEATURES,
    RANKS_APART,
    costs_vector,
    host_features,
    profiled_simulator,
)
from moesaic.planner.simulate import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.task import Op

LAYER = Workload(tokens=64, num_experts=8, top_k=2, dim=16, hidden=32, matrices=2, dtype="fp32")
GRID = Grid(world=4, ep=4, ranks_per_node=2)
PROFILE = ClusterProfile(
    date="2026-01-01", machine=MachineInfo.here(), versions=Versions.here(), nodes=2, ranks_per_node=2,
    inside=LinkCosts(one_sender=50e6, all_senders=25e6), outside=LinkCosts(one_sender=25e6, all_senders=12.5e6),
    host=HostCosts(layer=1e-3, task=1e-4, wait=1e-4, message=2e-5, transport_byte=1e-9, sharing=2.0),
    products=Products(rows=(1.0, 100.0), fp32=(1e9, 1e10)), errors=Errors(host_median=0.05),
)  # fmt: skip


PLAIN = Plan()


def compiled(plan: Plan = PLAIN) -> Compiled:
    return compile_plan(plan, GRID)


def seconds(profile: ClusterProfile, plan: Plan = PLAIN, **options: float) -> float:
    compiled_plan = compiled(plan)
    return profiled_simulator(profile, **options).run(compiled_plan.forward, LAYER, compiled_plan.grid).seconds


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == PROFILE
    assert [each.name for each in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machine": {"processor": "Z80"}}, ["another machine", "processor", "Z80", "any_machine=True"]),
        ({"versions": {"torch": "0.1"}}, ["another version", "torch", "0.1", "any_machine=True"]),
        ({"format": 99}, ["format=99", "moesaic profile"]),
        ({"nodse": 2}, ["unknown field nodse", "nodes"]),
        ({"host": {"task": -1.0}}, ["profile.host.task=-1.0"]),
        ({"outside": {}}, ["profile.outside.all_senders", "several nodes"]),
        ({"products": {"rows": [1.0], "fp32": [1.0, 2.0]}}, ["2 rates for 1"]),
    ],
)
def test_an_invalid_profile_is_refused_in_one_line(tmp_path: Path, change: dict, words: list[str]) -> None:
    path = tmp_path / "p.json"
    PROFILE.write(path)
    table = json.loads(path.read_text())
    for name, value in change.items():
        known = isinstance(value, dict) and name != "outside" and name != "products"
        table[name] = {**table[name], **value} if known else value
    path.write_text(json.dumps(table))
    with pytest.raises(InputError) as refused:
        read_profile(path)
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in [*words, str(path)])


def test_a_profile_of_another_machine_can_be_accepted_explicitly(tmp_path: Path) -> None:
    other = replace(PROFILE, machine=MachineInfo(processor="Z80", cores=1, system="CP/M"))
    other.write(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json", any_machine=True) == other


def test_reading_another_file_as_a_profile_says_how_to_write_one(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(InputError, match=r"is not a profile.*moesaic profile --out p.json"):
        read_profile(tmp_path / "p.json")


def test_shared_links_are_distinguished_from_separate_ones() -> None:
    inside, outside = PROFILE.to_cluster().links
    assert (inside.devices, inside.shared, inside.gbps) == (2, True, (0.4,))
    assert (outside.devices, outside.shared, outside.gbps) == (2, False, (0.2,))
    own = replace(PROFILE, outside=LinkCosts(one_sender=25e6, all_senders=24e6)).to_cluster().links[1]
    assert (own.devices, own.gbps) == (1, (pytest.approx(0.192),))


def test_the_cluster_computes_as_fast_as_ranks_do_that_share_cores() -> None:
    spec = PROFILE.to_cluster(nodes=4)
    assert (spec.nodes, spec.devices_per_node) == (4, 2)
    assert spec.device.tflops.fp32 == pytest.approx(0.005)
    assert spec.device.gemm_share == (0.1, 1.0)
    assert spec.host.task_us == pytest.approx(200.0)
    one = replace(PROFILE, nodes=1, outside=LinkCosts())
    with pytest.raises(InputError, match=r"nodes=2: the profile was measured on one node"):
        one.to_cluster(nodes=2)


def samples(noise: float = 0.0, outlier: float = 1.0) -> tuple[list[Sample], HostCosts]:
    draw = np.random.default_rng(0)
    true = HostCosts(
        layer=2e-3,
        task=1e-4,
        wait=1.5e-4,
        message=2e-5,
        transfer=3e-4,
        byte=2e-10,
        weight_byte=1e-10,
        transport_byte=2e-9,
        copy=5e-5,
        combine=4e-4,
        gradient=6e-4,
        sharing=2.0,
    )
    timed_samples = []
    for number in range(60):
        counts = {
            "layer": 1, "task": draw.integers(16, 160), "wait": draw.integers(2, 18), "message": draw.integers(10, 300),
            "transfer": draw.integers(4, 40),
            "byte": draw.integers(0, 4e6), "weight_byte": draw.integers(0, 3e7), "transport_byte": draw.integers(0, 2e6),
            "copy": draw.integers(0, 60), "combine": draw.integers(1, 12), "gradient": draw.integers(1, 5),
        }  # fmt: skip
        features = np.array([counts[name] for name in FEATURES], dtype=float)
        exact = float(features @ costs_vector(true)) * (outlier if number in (3, 11, 19) else 1.0)
        times = tuple(exact * float(np.exp(draw.normal(0, noise))) for _ in range(5))
        timed_samples.append(Sample(features, times))
    return timed_samples, true


def test_host_costs_are_recovered_and_checked_on_samples_that_the_fit_has_not_seen() -> None:
    timed_samples, true = samples()
    host_fit = fit_host(timed_samples, 2.0)
    assert costs_vector(host_fit.costs) == pytest.approx(costs_vector(true), rel=1e-3)
    assert host_fit.costs.sharing == 2.0
    assert host_fit.worst_error < 1e-3
    assert host_fit.r2 > 0.999
    rough = fit_host(samples(noise=0.05)[0], 2.0)
    assert 0.001 < rough.median_error < 0.1


def test_a_few_disturbed_samples_hardly_move_the_host_costs() -> None:
    timed_samples, true = samples(outlier=0.3)
    assert fit_host(timed_samples, 1.0).costs.task == pytest.approx(true.task, rel=0.05)


def test_unused_features_cost_nothing() -> None:
    """A single rank sends no messages."""
    timed_samples, true = samples()
    place = FEATURES.index("message")
    silent = []
    for sample in timed_samples:
        features = sample.features.copy()
        features[place] = 0.0
        silent.append(Sample(features, (float(features @ costs_vector(true)),) * 3))
    costs = fit_host(silent, 1.0).costs
    assert costs.message == 0
    assert costs.task == pytest.approx(true.task, rel=1e-3)


def test_noise_is_not_fitted() -> None:
    with pytest.raises(InputError, match=r"repeats vary by .* more --repeats"):
        fit_host(samples(noise=0.6)[0], 1.0)
    timed_samples, _ = samples()
    draw = np.random.default_rng(1)
    shuffled = [replace(sample, seconds=(float(draw.uniform(1e-3, 1e-1)),) * 3) for sample in timed_samples]
    with pytest.raises(InputError, match=r"R2=.* do not explain the times"):
        fit_host(shuffled, 1.0)
    with pytest.raises(InputError, match="10 samples"):
        fit_host(timed_samples[:10], 1.0)


SIZES = (2e3, 8e3, 32e3, 128e3, 512e3)


def test_a_link_has_a_rate_a_shortest_time_and_a_credit() -> None:
    times = [[max(3e-4, size / 25e6 - 7e-4)] * 5 for size in SIZES]
    link, error = fit_link(SIZES, times, "a link")
    assert link.bytes_per_second == pytest.approx(25e6)
    assert link.latency == pytest.approx(3e-4)
    assert link.credit == pytest.approx(7e-4)
    assert error < 1e-6
    bent = [*times[:3], [2 * times[3][0]] * 5, times[4]]
    assert fit_link(SIZES, bent, "a link")[1] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("sizes", "times", "words"),
    [
        (SIZES[:3], [[1.0]] * 3, "a link: 3 sizes"),
        (SIZES, [[1e-3]] * 5, "take no longer"),
        (SIZES, [[1e-3], [1e-3], [2e-3], [8e-3], [2e-2, 4e-2, 6e-2]], "vary by 50%"),
        (SIZES, [[0.0]] * 5, "a time is missing"),
    ],
)
def test_invalid_link_times_are_refused(sizes: tuple[float, ...], times: list[list[float]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fit_link(sizes, times, "a link")


NO_NUMBERS = [float("nan"), float("inf"), -1.0]


@pytest.mark.parametrize("number", NO_NUMBERS)
@pytest.mark.parametrize(
    ("section", "name"), [("products", "fp32"), ("products", "rows"), ("errors", "host_worst"), ("codecs", "int8")]
)
def test_a_file_with_a_number_that_cannot_be_measured_is_refused(
    tmp_path: Path, section: str, name: str, number: float
) -> None:
    table = json.loads(json.dumps(asdict(PROFILE)))
    table[section][name] = [number, *table[section][name][1:]] if section == "products" else number
    path = tmp_path / "p.json"
    path.write_text(json.dumps(table))
    with pytest.raises(InputError, match=rf"p\.json.*profile\.{section}\.{name}={number}: must be a finite number"):
        read_profile(path, any_machine=True)


FREE = replace(PROFILE, host=HostCosts())
"""Host without costs."""


@pytest.mark.parametrize("plan", [Plan(), Plan(chunks=2, all_to_all="hier2d"), Plan(all_to_all="naive")])
def test_without_costs_of_the_host_nothing_is_later_than_where_ranks_wait_for_each_other(plan: Plan) -> None:
    """Links are equally busy, since the same bytes cross them."""
    compiled_plan, spec = compiled(plan), FREE.to_cluster()
    quick = replace(spec, device=replace(spec.device, memory_gigabytes_per_second=1e9))
    plain = Simulator(quick).run(compiled_plan.forward, LAYER, compiled_plan.grid)
    eager = profiled_simulator(FREE).run(compiled_plan.forward, LAYER, compiled_plan.grid)
    assert 0.999 * plain.limit <= eager.seconds <= 1.001 * plain.seconds
    assert max(eager.link_seconds.values()) == pytest.approx(max(plain.link_seconds.values()))


def test_host_costs_apply_per_task_and_grow_with_shared_cores() -> None:
    compiled_plan = compiled()
    fast = LinkCosts(one_sender=1e15, all_senders=1e15)
    alone = replace(FREE, inside=fast, outside=fast, host=HostCosts(task=1e-3))
    shared = replace(alone, host=HostCosts(task=1e-3, sharing=2.0))
    count = len(compiled_plan.forward.tasks)
    assert seconds(alone, virtual_flops=1e30) == pytest.approx(1e-3 * count, rel=1e-3)
    assert seconds(shared, virtual_flops=1e30) == pytest.approx(2e-3 * count, rel=1e-3)


def test_virtual_accelerators_take_exactly_their_time() -> None:
    fast = LinkCosts(one_sender=1e15, all_senders=1e15)
    rows, matrices = 64 * 2, 2
    flops = 2 * rows * LAYER.dim * LAYER.hidden * matrices
    profile = replace(FREE, inside=fast, outside=fast)
    assert seconds(profile, virtual_flops=1e6) == pytest.approx(flops / 1e6, rel=1e-6)


def test_a_layer_is_its_two_programs_and_what_is_around_them() -> None:
    """At most, since a rank starts the backward pass as soon as it has ended its forward pass."""
    compiled_plan = compiled()
    simulator = profiled_simulator(PROFILE)
    parts = [
        simulator.run(each, LAYER, compiled_plan.grid).seconds
        for each in (compiled_plan.forward, compiled_plan.backward)
    ]
    layer = simulator.layer_seconds(compiled_plan.forward, compiled_plan.backward, LAYER, compiled_plan.grid)
    assert 0.8 * (sum(parts) + 2.0 * 1e-3) < layer <= sum(parts) + 2.0 * 1e-3 + 1e-12
    passes = simulator.passes(compiled_plan.forward, compiled_plan.backward, LAYER, compiled_plan.grid)
    assert layer == pytest.approx(1e-3 + sum(each.seconds for each in passes))


def test_one_rank_stands_for_all_where_there_are_many() -> None:
    many = replace(PROFILE, nodes=RANKS_APART)
    compiled_plan = compile_plan(PLAIN, Grid(world=2 * RANKS_APART, ep=2 * RANKS_APART, ranks_per_node=2))
    layer = replace(LAYER, num_experts=2 * RANKS_APART)
    simulator = profiled_simulator(many)
    assert simulator.volumes(compiled_plan.forward, layer, compiled_plan.grid).num_actors == 1
    few = profiled_simulator(PROFILE).volumes(compiled().forward, LAYER, GRID)
    assert few.num_actors == 4
    alone = simulator.run(compiled_plan.forward, layer, compiled_plan.grid).seconds
    assert alone >= PROFILE.host.task * PROFILE.host.sharing * len(compiled_plan.forward.tasks)


def test_messages_and_bytes_are_those_that_ranks_send() -> None:
    """A linear dispatch on four ranks, by rank: rows and routing weights for each of three peers."""
    compiled_plan = compiled()
    volumes = profiled_simulator(PROFILE).volumes(compiled_plan.forward, LAYER, compiled_plan.grid)
    movements = movements_of(compiled_plan.forward, volumes)
    total = host_features(compiled_plan.forward, volumes, movements).sum(axis=0).mean(axis=0)
    moves = sum(1 for moved in movements if moved)
    assert moves == 3
    assert total[FEATURES.index("message")] == 2 * 6, "routing weights travel with their rows"
    copies = LAYER.tokens * LAYER.top_k * 3 / 4
    sent = 2 * copies * LAYER.dim * 4 + copies * 4
    assert total[FEATURES.index("transport_byte")] == pytest.approx(2 * sent)
    assert total[FEATURES.index("transfer")] == moves, "with a message of its own or in another one's"
    assert total[FEATURES.index("wait")] == 2
    assert total[FEATURES.index("combine")] == sum(task.op is Op.COMBINE for task in compiled_plan.forward.tasks) == 1
    assert total[FEATURES.index("gradient")] == 0, "the backward pass has them"


def test_idle_links_let_the_first_bytes_through_at_once() -> None:
    credited = replace(FREE, outside=replace(FREE.outside, credit_seconds=1e-4))
    saved = seconds(FREE) - seconds(credited)
    assert 0 < saved <= 3e-4
