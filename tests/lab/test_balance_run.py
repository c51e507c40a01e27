"""The balance benchmark: its file, its ranks in one process, its simulated clusters, the command; a
small run on a bed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from balance_cells import cell
from torch import Tensor

from moesaic.cli.main import main
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.experts import PlainExperts
from moesaic.planner.cluster import read_cluster
from moesaic.program.compile import compile_plan
from moesaic.traces.trace import Trace
from moesaic_lab.balance import ranks
from moesaic_lab.balance.cells import cell_of, rows_of, summed_up
from moesaic_lab.balance.claims import claims
from moesaic_lab.balance.config import (
    COMMITTED,
    BalancePlace,
    Recorded,
    SharesOfForced,
    Skewed,
    SkewedCase,
    read_config,
)
from moesaic_lab.balance.loads import Skew, made_up
from moesaic_lab.balance.methods import (
    NETMOE,
    OURS,
    OURS_PLACED,
    PLACED,
    PLAIN,
    SMART,
    methods,
    placed_by,
)
from moesaic_lab.balance.ranks import BalanceFound, BalanceJob, Decided
from moesaic_lab.balance.shares import (
    MADE_UP,
    RECORDED,
    SLOW,
    WHOLE,
    LoadCase,
    calls_of,
    loads_on,
    names_of,
    shares_of_forced,
)
from moesaic_lab.balance.simulated import BEST, Larger
from moesaic_lab.bounds import Message, link_limit
from moesaic_lab.recorder import Recorder
from moesaic_testbed import refusal

PLACE = BalancePlace(
    name="small",
    dim=8,
    hidden=4,
    experts_per_rank=2,
    samples_per_rank=2,
    sample_tokens=8,
    gflops=1e3,
)


def job_of(max_vio: float = 1.0, place: BalancePlace = PLACE) -> BalanceJob:
    skew = Skew(
        ranks=4,
        num_experts=8,
        top_k=2,
        samples=8,
        sample_tokens=8,
        max_vio=max_vio,
        calls=2,
        persistence=0.5,
        seed=3,
    )
    case = SkewedCase(place=place, label="small-1", max_vio=max_vio, routes=made_up(skew))
    return BalanceJob(case=case, methods=methods(place.grid))


# The ranks


def test_all_methods_compute_what_the_plain_layer_does() -> None:
    job = job_of()
    plans = {name: compile_plan(method.plan, PLACE.grid) for name, method in job.methods.items()}

    def rank(transport: AbstractTransport) -> dict[str, list[Tensor]]:
        found = {}
        for name in job.methods:
            subject = ranks.Subject(job, name, plans[name], transport, PlainExperts)
            y, trip = subject.forward(1)
            if trip is not None:
                y = trip.take_home(y.unflatten(0, (2, -1))).flatten(0, 1)
            y.backward(subject.dy)
            assert subject.x.grad is not None
            found[name] = [y.detach(), subject.x.grad]
        return found

    for of_rank in run_ranks(4, rank):
        assert len(of_rank) == 15
        for name, values in of_rank.items():
            for mine, plain in zip(values, of_rank[PLAIN]):
                assert float(plain.abs().max()) > 0.01
                torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6, msg=name)


def test_a_layer_whose_weights_stand_elsewhere_is_found_out() -> None:
    job = job_of()

    def rank(transport: AbstractTransport) -> list[Tensor]:
        found = []
        for name in (PLAIN, PLACED):
            subject = ranks.Subject(
                job, name, compile_plan(job.methods[name].plan, PLACE.grid), transport, PlainExperts
            )
            if name == PLACED:  # as if experts had been placed and nobody had told the router
                subject.layer.router.tell(
                    torch.from_numpy(job.case.routes.experts[0].reshape(4, -1, 2)[transport.rank])
                )  # type: ignore[operator]
                found.append(subject.layer(subject.x).detach())
            else:
                found.append(subject.forward(0)[0].detach())
        return found

    assert any(ranks.difference(*values) > 0.1 for values in run_ranks(4, rank))
    assert ranks.difference(torch.ones(3), torch.ones(3) * 2) == 0.5
    assert ranks.difference(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


def test_steps_go_through_the_calls_and_count_decisions() -> None:
    job = job_of(2.0)
    other = job_of(1.0)
    experts = np.concatenate([each.case.routes.experts[:1] for each in (job, other)])
    job = replace(job, case=replace(job.case, routes=replace(job.case.routes, experts=experts)))

    def rank(transport: AbstractTransport) -> dict[str, tuple[int, Decided]]:
        found = {}
        for name in ("shadow", "least loaded", OURS):
            subject = ranks.Subject(
                job, name, compile_plan(job.methods[name].plan, PLACE.grid), transport, PlainExperts
            )
            subject.step()
            subject.start_over()
            for _ in range(4):
                subject.step()
            found[name] = subject.steps, subject.decisions(2)
        return found

    of_ranks = run_ranks(4, rank)
    for name in ("shadow", "least loaded", OURS):
        steps, decided = of_ranks[0][name]
        assert steps == 4
        assert len(decided.seconds) == 4
        assert (
            len(decided.options)
            == len(decided.replicated_experts)
            == len(decided.replicated_copies)
            == 2
        )
        assert all(
            found[name][1].replicated_copies == decided.replicated_copies for found in of_ranks
        )
    loads = [
        job.case.routes.counts(call, 4, 8).sum(axis=0).reshape(4, 2).sum(axis=1)
        for call in range(2)
    ]
    excess = tuple(int((load - 32).clip(min=0).sum()) for load in loads)
    assert excess[0] > excess[1]
    assert of_ranks[0]["least loaded"][1].replicated_copies == excess
    assert of_ranks[0]["least loaded"][1].options == ("least_loaded",) * 2


def test_the_arbiter_keeps_bytes_off_a_slow_link_that_it_is_told_of() -> None:
    (case,) = read_config().narrowed(only=("4x2-slow-link",)).cases()
    place = case.place
    case = replace(case, routes=made_up(replace(case.place.skew(0.0, 0), calls=1)))
    rates = [place.bed.inter_bytes_per_second(node) for node in range(4)]
    assert rates == [40e6, 40e6, 40e6, 10e6]
    assert place.costs.node_links == (), "the other policies are not told"
    assert place.profiled_costs.node_links == (1, 1, 1, 0.25)
    told = replace(case, place=replace(place, slow_link=""))
    compiled = {
        name: compile_plan(methods(place.grid)[name].plan, place.grid) for name in (PLAIN, OURS)
    }

    def rank(transport: AbstractTransport) -> list[tuple[Tensor, list[Message]]]:
        found = []
        for name, each in ((PLAIN, case), (OURS, told), (OURS, case)):
            recorder = Recorder(transport)
            job = BalanceJob(case=each, methods=methods(place.grid))
            subject = ranks.Subject(job, name, compiled[name], recorder, PlainExperts)
            y, _ = subject.forward(0)
            y.backward(subject.dy)
            sent = [
                (m.source, m.target, float(m.num_bytes))
                for each in recorder.ranges
                for m in each.messages
            ]
            found.append((y.detach(), sent))
        return found

    found = run_ranks(8, rank)
    on_link = []
    seconds = []
    for way in range(3):
        messages = [message for of_rank in found for message in of_rank[way][1]]
        on_link.append(
            sum(size for a, b, size in messages if a // 2 != b // 2 and 3 in (a // 2, b // 2))
        )
        seconds.append(link_limit(messages, place.bed).seconds)
        for of_rank in found:
            torch.testing.assert_close(of_rank[way][0], of_rank[0][0], rtol=1e-4, atol=1e-6)
    plain, untold, heard = on_link
    assert heard < 0.85 * untold <= plain, on_link
    assert seconds[2] < 0.85 * seconds[1] <= seconds[0], (
        "the slow link is the one that takes longest"
    )


def test_methods_near_ours_are_timed_more_often() -> None:
    every = methods(PLACE.grid)
    seconds = {
        PLAIN: (2.0,),
        "shadow": (1.05,),
        "spill": (1.02,),
        "smart + shadow": (1.0,),
        OURS: (1.0,),
    }
    assert ranks.near_ours(seconds, every, balanced=False) == [OURS, "spill", "shadow"]
    assert ranks.near_ours(seconds, every, balanced=True) == [OURS, "spill", "shadow", PLAIN]
    assert (
        ranks.near_ours({PLAIN: (3.0,), "spill": (2.0,), OURS: (1.0,)}, every, balanced=False) == []
    )


def test_cells_sum_up_what_ranks_found() -> None:
    job = replace(job_of(), methods={name: methods(PLACE.grid)[name] for name in (PLAIN, OURS)})

    def found(
        end: float, peak: int, decided: float, sent: list[tuple[int, int, float]]
    ) -> BalanceFound:
        back = [(target, source, size) for source, target, size in sent]
        return BalanceFound(
            spans={PLAIN: [(0.0, 2.0), (5.0, 6.0)], OURS: [(0.5, end), (5.0, 5.5)]},
            pairs={OURS: [(9.0, 10.0)], PLAIN: [(9.0, 12.0)]},
            sent={name: [sent, back] for name in (PLAIN, OURS)},
            peak_bytes=dict.fromkeys((PLAIN, OURS), peak),
            error=dict.fromkeys((PLAIN, OURS), 1e-7 * peak),
            decided={
                OURS: Decided(
                    seconds=(decided,),
                    options=("alone",),
                    replicated_experts=(0,),
                    replicated_copies=(0,),
                )
            },
            charged={PLAIN: 0.1 * peak, OURS: 0.1},
        )

    none: list[tuple[int, int, float]] = []
    sent = ([(0, 2, 12.5e6)], [(1, 0, 1e6)], none, none)
    made = summed_up(
        job,
        [
            found(e, p, d, m)
            for e, p, d, m in zip((1, 1.5, 1, 1), (3, 5, 1, 1), (0.1, 0.4, 0.2, 0.3), sent)
        ],
    )
    assert made.timings[OURS].seconds == (1.0, 0.5)
    assert made.near[PLAIN] == (2.0, 1.0, 3.0)
    assert made.ratio(PLAIN, OURS).repeats == 3
    assert made.peak_bytes[OURS] == 5
    assert made.error[OURS] == pytest.approx(5e-7)
    assert made.charged[PLAIN] == pytest.approx(0.5)
    assert made.decided[OURS].seconds == (0.4,)
    assert made.bound(OURS) == pytest.approx(2.0)  # 12.5 MB there at 100 Mbit/s, and then back
    assert made.across[OURS] == (25_000_000, 2)
    assert made.best_single() == PLAIN
    assert made.max_vio == pytest.approx((1.0, 1.0), abs=0.05)


# Larger clusters


def test_methods_that_do_the_same_take_the_same_and_others_differ_where_they_should() -> None:
    layer = replace(SharesOfForced(), top_k=2).layer(8)
    larger = Larger(layer, read_cluster("dgx-h100", nodes=1))
    tokens = 8192
    skew = Skew(
        ranks=8,
        num_experts=32,
        top_k=2,
        samples=32,
        sample_tokens=2048,
        max_vio=2.0,
        calls=2,
        locality=0.0,
        seed=1,
    )
    routes = made_up(skew)
    even = np.full((8, 32), 2 * tokens // 32)
    loads = [routes.counts(call, 8, 32) for call in range(2)]

    def took(calls: list[np.ndarray]) -> dict[str, tuple[float, int]]:
        names = [name for name in methods(larger.grid) if name != NETMOE]
        found = {name: larger.seconds(name, calls, calls[0].sum(0), tokens)[-1] for name in names}
        return {name: (seconds, replicated) for name, (seconds, _, replicated) in found.items()}

    balanced = took([even, even])
    skewed = took(loads)
    assert balanced["spill"] == balanced[PLAIN] == balanced["least loaded"]
    assert balanced["spill"][1] == 0
    assert balanced["ZeRO-3 (r = 0)"][0] != balanced[PLAIN][0]
    assert skewed[PLAIN][0] > 2 * balanced[PLAIN][0]
    assert skewed["least loaded"][0] < 0.7 * skewed[PLAIN][0]
    assert skewed["least loaded"][1] > 0
    assert skewed[PLACED][0] < 0.9 * skewed[PLAIN][0]
    assert skewed[OURS][0] < skewed[PLAIN][0]


@pytest.mark.parametrize(("cluster", "nodes"), [("dgx-h100", 4), ("100gbe", 8)])
def test_our_choice_on_several_nodes_is_as_fast_as_the_best_single_technique(
    cluster: str, nodes: int
) -> None:
    config = SharesOfForced()
    larger = Larger(config.layer(32), read_cluster(cluster, nodes=nodes))
    tokens = config.tokens(config.ratio)
    case = LoadCase(cluster, 32, config.ratio, RECORDED, 5)
    trace = Trace.open(COMMITTED.parent / config.trace)
    calls = calls_of(config, trace, case, 2 * tokens, 0)[2]
    names = (PLAIN, "shadow", "spill", "EPLB", SMART, OURS)
    took = {name: larger.seconds(name, calls, calls[0].sum(0), tokens)[0][0] for name in names}
    assert took[OURS] <= 1.03 * min(took.values())


def test_shares_of_forced_balance_are_of_the_calls_after_the_first(tmp_path: Path) -> None:
    config = SharesOfForced(
        clusters=("dgx-h100",), ranks=(8,), layers=(5,), max_vio=(0.0,), ratios=(1.0,), hidden=64
    )
    found = shares_of_forced(config, COMMITTED.parent, 0, str, tmp_path)
    kinds = {(RECORDED, 0.14), (MADE_UP, 0.14), (SLOW, 0.14), (RECORDED, 1.0)}
    assert {(each.load, each.ratio) for each in found} == kinds
    again = shares_of_forced(config, COMMITTED.parent, 0, pytest.fail, tmp_path)
    assert again == found, "what is there is not made again"
    (tmp_path / "shares-dgx-h100-8-0.14-made_up-0.json").unlink()
    told: list[str] = []
    remade = shares_of_forced(config, COMMITTED.parent, 0, told.append, tmp_path)
    assert [replace(each, decision_seconds=0.0) for each in remade] == [
        replace(each, decision_seconds=0.0) for each in found
    ]
    assert told == ["dgx-h100, 8 ranks, weights 0.14 of the rows, made up 0"], (
        "one load is made again by itself"
    )
    slow = {each.method: each for each in found if each.load == SLOW}
    assert slow[PLAIN].of_forced < 0.95
    assert slow[OURS].of_forced >= 0.99 * slow[PLAIN].of_forced
    even = {each.method: each for each in found if each.load == MADE_UP}
    assert even[PLAIN].of_forced == pytest.approx(1.0, abs=0.01)
    assert {each.step for each in found if each.load == RECORDED} == {10}
    real = {each.method: each for each in found if each.load == RECORDED and each.ratio == 0.14}
    assert real[PLAIN].of_forced < 0.9
    assert real[OURS_PLACED].of_forced >= real[OURS].of_forced > 0.9 * real[PLAIN].of_forced
    assert real[OURS].decision_seconds > 0
    assert {name for name, each in real.items() if each.moving_seconds} == {
        PLACED,
        OURS_PLACED,
        [*BEST][1],
    }
    for best, ours in BEST.items():
        assert real[best].of_forced >= max(0.99 * real[ours].of_forced, real[PLAIN].of_forced)


def test_moving_experts_takes_what_the_fullest_link_needs_for_their_weights_and_state() -> None:
    spec = read_cluster("100gbe", nodes=2)
    larger = Larger(SharesOfForced(experts_per_rank=2).layer(8), spec)
    card, port = spec.links[:2]
    assert (card.devices, port.devices) == (1, 4)
    of_expert = 3 * 2048 * 1024 * 14  # three matrices; bfloat16 weight, float32 copy, two moments
    even = np.full(16, 100)
    hot = np.full(16, 100)
    hot[[0, 1]] = 300, 200
    assert larger.moving_seconds(PLAIN, hot, 14) == larger.moving_seconds(OURS, hot, 14) == 0, (
        "experts stay"
    )
    assert larger.moving_seconds(PLACED, even, 14) == 0, "no place is busier than others"
    slot = placed_by(hot, larger.grid)
    moves = [(a // 2, b // 2) for a, b in enumerate(slot.tolist()) if a // 2 != b // 2]
    assert moves
    on_link: dict[tuple[str, int], float] = {}
    for a, b in moves:
        for link in (card, port) if a // 4 != b // 4 else (card,):
            for end in (
                (f"{link.name} out", a // link.devices),
                (f"{link.name} in", b // link.devices),
            ):
                on_link[end] = on_link.get(end, 0.0) + of_expert * 8e-9 / link.gbps[0]
    for name in (PLACED, OURS_PLACED, "best option, experts placed"):
        assert larger.moving_seconds(name, hot, 14) == pytest.approx(
            max(on_link.values()), rel=0.02
        )


def test_on_many_ranks_every_method_is_simulated_under_fewer_loads() -> None:
    config = SharesOfForced()
    few, many = ([*loads_on(config, ranks)] for ranks in (WHOLE, 2 * WHOLE))
    assert set(few) - set(many) == {(RECORDED, 5), (RECORDED, 17), (SLOW, 0.0)}
    assert set(names_of(WHOLE)) - set(names_of(2 * WHOLE)) == set(BEST)


def test_made_up_loads_change_from_call_to_call_about_as_much_as_recorded_ones() -> None:
    config = read_config().shares
    trace = Trace.open(COMMITTED.parent / "laer_e16k4.npz")
    assert config is not None
    loads: dict[str, list[list[np.ndarray]]] = {}
    for load, which in loads_on(config, 32):
        case = LoadCase("dgx-h100", 32, config.ratio, load, which)
        loads.setdefault(load, []).append(
            calls_of(config, trace, case, 4096, 0)[2] if load != SLOW else []
        )

    def changed(calls: list[np.ndarray]) -> float:
        """Return the share of the copies that another rank computes in the second call."""
        before, after = (counts.sum(0).reshape(32, -1).sum(1) for counts in calls)
        return 0.5 * float(np.abs(before - after).sum() / before.sum())

    trace_loads = [
        trace.samples(layer, step).sum(0) for layer in config.layers for step in trace.steps
    ]
    steps = len(trace.steps)
    every = [
        0.5 * np.abs(a / a.sum() - b / b.sum()).sum()
        for first in range(0, len(trace_loads), steps)
        for a, b in pairwise(trace_loads[first : first + steps])
    ]
    assert 0.04 < float(np.median(every)) < 0.08
    assert max(map(changed, loads[RECORDED])) < 0.15
    assert max(map(changed, loads[MADE_UP])) < max(every) < 0.3


# The file and the command


def test_the_committed_file_covers_what_the_claims_need() -> None:
    config = read_config().narrowed()
    labels = {case.label: case for case in config.cases()}
    assert {"2x2-0", "2x2-0.5", "2x2-1", "2x2-2", "4x2-0", "4x2-2", "4x2-4", "trace"} <= set(labels)
    assert all(place.repeats >= 8 and place.pairs >= 30 for place in config.cells)
    assert {"laer-4x2-5", "laer-4x2-11", "laer-4x2-17"} <= set(labels)
    assert labels["laer-4x2-5"].max_vio is None
    assert config.shares is not None
    assert 64 in config.shares.ranks
    assert set(config.shares.ratios) == {0.05, 0.14, 0.5, 1.0, 5.0}
    assert not config.narrowed(only=("memory",)).has("shares")
    costs = labels["4x2-2"].place.costs
    assert (costs.intra_gbps, costs.intra_ranks, costs.inter_gbps, costs.inter_ranks) == (
        0.5,
        2,
        0.04,
        2,
    )
    assert costs.tflops == pytest.approx(1e-4)
    assert (costs.inter_latency_us, costs.expert_us, costs.part_us) == (500, 2500, 2000)
    assert (costs.element_bytes, costs.matrices) == (4, 2)


def test_a_part_can_be_asked_for() -> None:
    config = read_config()
    assert [case.label for case in replace(config, only=("4x2-2", "trace")).cases()] == [
        "4x2-2",
        "trace",
    ]
    assert len(replace(config, only=("2x2",)).cases()) == 4
    simulated = replace(config, only=("shares",))
    assert (simulated.cases(), simulated.has("shares")) == ([], True)
    assert not replace(config, only=("2x2",)).has("shares")
    few = config.narrowed(repeats=3)
    assert {place.repeats for place in few.cells} == {3}


def test_a_trace_of_another_shape_is_refused() -> None:
    config = read_config()
    trace = next(place for place in config.cells if isinstance(place, Recorded))
    other = replace(config, cells=(replace(trace, experts_per_rank=4),))
    with pytest.raises(
        InputError,
        match="trace: the trace has 8 experts, top_k=2, 8 samples of 64 tokens; the layer",
    ):
        other.cases()


def test_a_machine_without_rights_can_still_simulate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moesaic_testbed.refusal", lambda: "tc is missing: install iproute2")
    config = tmp_path / "small.toml"
    (tmp_path / "loads.npz").symlink_to(COMMITTED.parent / "laer_e16k4.npz")
    shares = (
        'clusters = ["dgx-h100"]\nranks = [8]\ntrace = "loads.npz"\nlayers = [5]\nmax_vio = '
        "[2.0]\nratios = []"
    )
    config.write_text(f"[[skewed]]\n[shares]\n{shares}\nhidden = 64\n")
    assert main(["bench", "balance", "--config", str(config)]) == 2
    assert "tc is missing" in capsys.readouterr().err
    keep = tmp_path / "kept"
    flags = ["--config", str(config), "--json", "-", "--keep", str(keep)]
    assert main(["bench", "balance", "--only", "shares", *flags]) == 0
    output = capsys.readouterr()
    assert "s  dgx-h100, 8 ranks, weights 0.14 of the rows, made up 2\n" in output.err
    told = json.loads(output.out)
    assert told["seconds"] >= 0
    assert re.fullmatch(r"[0-9a-f]{10,}\+?", told["commit"])
    assert {row["part"] for row in told["rows"]} == {"shares"}
    results = tmp_path / "found.json"
    results.write_text(json.dumps(told))
    monkeypatch.setattr("moesaic_lab.balance.shares.Larger", None)
    flags = ["--config", str(config), "--json", str(results), "--keep", str(keep)]
    assert main(["bench", "balance", "--only", "shares", *flags]) == 0
    again = json.loads(results.read_text())
    assert again["rows"] == told["rows"], "kept, and not simulated again"
    assert "seconds" not in again, "a part of a run says nothing about the whole"
    capsys.readouterr()
    results.write_text("[]")
    assert main(["bench", "balance", "--only", "shares", *flags]) == 2
    assert "not a file of results: name another" in capsys.readouterr().err
    assert (
        next(
            c["value"] for c in told["claims"] if c["name"] == "balance.simulated_slow_rank_speedup"
        )
        >= 1
    )


def test_the_rows_of_beds_that_are_not_run_stay_and_claims_rest_on_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "small.toml"
    results = tmp_path / "found.json"
    config.write_text("[[skewed]]\nmax_vio = [0.0, 1.0]\n")
    methods_of = {PLAIN: 3.0, "shadow": 2.0, OURS: 1.0}
    flags = ["--config", str(config), "--json", str(results)]
    monkeypatch.setattr("moesaic_lab.balance.benchmark.require_cluster", lambda: None)
    told = {}
    for load, ours in ((1.0, 1.0), (0.0, 1.6)):
        (case,) = read_config(config).narrowed(only=(f"bed-{load:g}",)).cases()
        near = {OURS: [ours] * 40, "shadow": [2.0] * 40}
        made = cell(
            load, methods_of | {OURS: ours}, near=near, decided={OURS: [0.001, 0.003, 0.002]}
        )
        made = replace(made, job=replace(made.job, case=case))
        monkeypatch.setattr("moesaic_lab.balance.benchmark.run", lambda *_, made=made: [made])
        assert main(["bench", "balance", *flags, "--only", f"bed-{load:g}"]) in (0, 1)
        told[load] = json.loads(results.read_text())
    rows = told[0.0]["rows"]
    assert [row["case"] for row in rows] == ["bed-0"] * 3 + ["bed-1"] * 3, (
        "in the order of the configuration"
    )
    assert rows[3:] == told[1.0]["rows"]
    worst = {
        load: {each["name"]: each["value"] for each in found["claims"]}
        for load, found in told.items()
    }
    assert worst[1.0]["balance.over_best_single"] == 0.5
    assert worst[0.0]["balance.over_best_single"] == 0.8
    assert worst[0.0]["balance.decision_share"] == 0.002


def test_rows_of_a_case_give_back_its_cell() -> None:
    near = {OURS: [1.0, 1.5] * 20, PLAIN: [2.0] * 40}
    made = cell(
        1.0, {PLAIN: [3.0, 2.0, 4.0], OURS: 1.0}, near=near, decided={OURS: [0.001, 0.003, 0.002]}
    )
    again = cell_of(json.loads(json.dumps(rows_of(made))), made.job.case)
    assert rows_of(again) == rows_of(made)
    assert again.timings == made.timings
    assert again.near == {name: tuple(each) for name, each in near.items()}


SMALL = """
[[skewed]]
name = "small"
dim = 8
hidden = 4
experts_per_rank = 2
samples_per_rank = 2
sample_tokens = 8
max_vio = [0.0, 1.0]
calls = 2
gflops = 1.0
repeats = 2
pairs = 1
"""


@pytest.mark.random
def test_a_small_run_on_a_bed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = refusal()
    if missing:
        pytest.skip(missing)
    config, results, picture = (
        tmp_path / name for name in ("small.toml", "found.json", "found.svg")
    )
    config.write_text(SMALL)
    keep = tmp_path / "kept"
    flags = ["--config", str(config), "--keep", str(keep), "--picture", str(picture)]
    assert main(["bench", "balance", *flags, "--json", str(results)]) == 0
    told = json.loads(results.read_text())
    output = capsys.readouterr()
    assert "s  small-0 is measured\n" in output.err
    (keep / "small-1.json").unlink()
    assert main(["bench", "balance", *flags, "--json", "-"]) == 0
    of_kept = [row for row in told["rows"] if row["case"] == "small-0"]
    again = capsys.readouterr()
    assert json.loads(again.out)["rows"][: len(of_kept)] == of_kept, "taken from the folder"
    assert "s  small-0 is measured\n" not in again.err, "a claim may still name the case"
    assert "s  small-1 is measured\n" in again.err
    rows = told["rows"]
    assert [row["method"] for row in rows] == 2 * list(methods(Skewed().grid, budget=1))
    assert {row["compute"] for row in rows} == {"virtual compute"}
    assert all(
        0 < row["low_seconds"] <= row["median_seconds"] <= row["high_seconds"] for row in rows
    )
    assert all(row["error"] < 1e-4 and row["peak_bytes"] > 0 for row in rows)
    even, skewed = (
        {row["method"]: row for row in rows if row["case"] == f"small-{load}"} for load in (0, 1)
    )
    assert skewed[PLAIN]["computing_seconds"] == pytest.approx(
        2 * even[PLAIN]["computing_seconds"], rel=0.05
    )
    assert skewed["least loaded"]["computing_seconds"] == pytest.approx(
        even[PLAIN]["computing_seconds"], rel=0.05
    )
    assert skewed["least loaded"]["peak_bytes"] < skewed[PLAIN]["peak_bytes"]
    assert even[SMART]["across_bytes"] == even[PLAIN]["across_bytes"] > 0
    assert {claim["name"] for claim in told["claims"]} == {claim.name for claim in claims([])}
    assert picture.read_text().count("<svg") == 1
    assert "virtual compute" in output.out
