"""The layer benchmark's ranks: what they choose, count and sum up; the command, and a small run on
a real bed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.main import main
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.bounds import program_messages
from moesaic_lab.layer import ranks
from moesaic_lab.layer.benchmark import claims, summed_up
from moesaic_lab.layer.cells import BEST, SINGLES, LayerJob
from moesaic_lab.layer.config import LayerPlace
from moesaic_lab.layer.ranks import CountedStep, LayerFound
from moesaic_lab.recorder import Recorder
from moesaic_testbed import refusal
from program.even import even_sizes

GRID = Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2)
PLACE = LayerPlace(
    nodes=2,
    ranks_per_node=2,
    intra="400mbit",
    dim=8,
    hidden=16,
    num_experts=4,
    tokens_per_rank=8,
    gflops=1e3,
)


def test_the_predicted_best_stays_unless_a_trial_beats_it_by_the_margin() -> None:
    assert ranks.choose({"s1": 1.0, "s3": 0.95}, "s1", 0.06) == "s1"
    assert ranks.choose({"s1": 1.0, "s3": 0.93}, "s1", 0.06) == "s3"
    assert ranks.choose({"s1": 1.0, "s2": 0.5, "s3": 0.6}, "s1", 0.06) == "s2"


def test_plans_that_are_far_behind_are_tried_once() -> None:
    assert ranks.contenders({"s1": (1.2, 0.1), "s2": (1.0, 9.0), "s3": (1.31,)}) == ["s1", "s2"]


def job_of(**options: Any) -> LayerJob:
    plans = {name: compile_plan(SINGLES[name], GRID) for name in ("baseline", "s1", "s2", "s3")}
    return LayerJob(section="schedules", label="", place=PLACE, grid=GRID, methods=plans, **options)


def test_methods_near_the_reference_are_timed_more_often() -> None:
    seconds = {"baseline": (2.0,) * 3, "s1": (1.0,) * 3, "s2": (1.05,) * 3, "s3": (0.95,) * 3}
    assert ranks.near_ones(job_of(), seconds, "s1") == ["s1", "s2", "s3"]
    assert ranks.near_ones(job_of(reference=BEST, compete=("s1", "s2")), seconds, "s3") == [
        "s3",
        "s1",
    ]
    assert ranks.near_ones(job_of(), seconds, "baseline") == []
    near_baseline = seconds | {"baseline": (0.96,) * 3}
    assert ranks.near_ones(job_of(reference=BEST, compete=("s1", "s2")), near_baseline, "s3") == [
        "s3",
        "s1",
    ]


@pytest.mark.parametrize("factor", [None, 2.0])
def test_a_rank_counts_what_its_program_says(factor: float | None) -> None:
    job = job_of(factor=factor)

    def rank(transport: AbstractTransport) -> dict[str, CountedStep]:
        recorder = Recorder(transport)
        runner = ranks.LayerRunner(job, recorder)
        return {name: ranks.count(runner, recorder, name) for name in job.methods}

    of_ranks = run_ranks(4, rank)
    for name, plan in job.methods.items():
        top_k = 2 if factor is None else 4
        sizes = even_sizes(
            GRID, redundant=plan.is_redundant, tokens=16, num_experts=4, top_k=top_k, units=8
        )
        for direction, program in (("forward", plan.forward), ("backward", plan.backward)):
            said = sorted(
                m for m in program_messages(program, sizes, dim=8, element_bytes=4, unit_columns=16)
            )
            sent = sorted(m for found in of_ranks for m in getattr(found[name], direction))
            if direction == "forward":  # and the counts, which all ranks tell each other
                assert len(sent) > len(said)
                for message in said:
                    sent.remove(message)
                assert sum(size for *_, size in sent) < 4 * 4 * 400
            else:
                assert sent == said
        rows = 32 * (2 if name == "baseline" else 1) * 2 * (1 if factor is None else 2)
        flops = 6 * rows * 2 * 8 * 16
        assert sum(found[name].charged for found in of_ranks) == pytest.approx(flops / 1e12)


def test_what_a_method_computes_besides_its_experts_is_charged() -> None:
    def rank(job: LayerJob, transport: AbstractTransport) -> dict[str, float]:
        recorder = Recorder(transport)
        runner = ranks.LayerRunner(job, recorder)
        return {name: ranks.count(runner, recorder, name).charged for name in job.methods}

    plain = run_ranks(4, partial(rank, job_of()))
    more = run_ranks(4, partial(rank, job_of(other_flops={"s1": 2e9})))
    for before, after in zip(plain, more):
        assert after["s1"] - before["s1"] == pytest.approx(2e9 / (1e9 * PLACE.gflops))
        assert after["s2"] == pytest.approx(before["s2"])


def test_a_switch_sends_nothing_and_makes_no_tensor() -> None:
    job = job_of(factor=1.0)
    for of_rank in run_ranks(4, partial(ranks.switch_costs, job)):
        assert list(of_rank) == list(job.methods)
        for switch in of_rank.values():
            assert (switch.messages, switch.allocated_bytes) == (0, 0)
            assert switch.first_seconds > switch.again_seconds > 0


def test_cells_sum_up_what_ranks_found() -> None:
    job = replace(job_of(same={"ted": "s1"}), methods={"s1": compile_plan(Plan(), GRID)})
    half = CountedStep(forward=[(0, 2, 25e6), (0, 1, 1e6)], backward=[(2, 0, 5e7)], charged=0.5)
    none = CountedStep(forward=[], backward=[], charged=1.5)
    found = [
        LayerFound(
            spans={"s1": [(0.0, 2.0), (5.0, 6.0)]},
            pairs={"s1": [(9.0, 12.0)]},
            best="s1",
            trial={"s1": 1.0},
            sent={"s1": (step.forward, step.backward)},
            charged={"s1": step.charged},
            switches={},
        )
        for step in (half, none, none, none)
    ]
    made = summed_up(job, found)
    assert made.timings["s1"].seconds == (2.0, 1.0)
    assert made.near["s1"] == (2.0, 1.0, 3.0)
    assert [limit.seconds for limit in made.limits["s1"]] == pytest.approx([1.0, 2.0])
    assert made.across["s1"] == (75_000_000, 2)
    assert made.charged["s1"] == 1.5
    assert made.bound("s1") == pytest.approx(3.0)
    assert made.ratio("ted", "s1").repeats == 3


# The command


SMALL = """
[[schedules]]
{place}
tp = [2]
etp = [2]
trial_plans = 1
trial_repeats = 1
[[adaptive_r]]
{place}
etp = 2
factors = [1.0]
[[orders]]
{place}
chunks = 2
codec = "int8"
"""
PLACES = (
    "nodes = 2\nranks_per_node = 2\ndim = 8\nhidden = 16\nnum_experts = 4\ntokens_per_rank = "
    "8\nrepeats = 2\npairs = 1"
)


@pytest.mark.random
def test_a_small_run_on_a_bed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = refusal()
    if missing:
        pytest.skip(missing)
    config, results, picture = (
        tmp_path / name for name in ("small.toml", "found.json", "found.svg")
    )
    config.write_text(SMALL.format(place=PLACES))
    assert (
        main(
            [
                "bench",
                "layer",
                "--config",
                str(config),
                "--json",
                str(results),
                "--picture",
                str(picture),
            ]
        )
        == 0
    )
    told = json.loads(results.read_text())
    rows = told["rows"]
    methods = [
        row["method"] for row in rows if row["part"] == "schedules" and "etp inside" in row["cell"]
    ]
    assert methods[:6] == ["baseline", "ted", "s1", "s2", "s2, saa", "s3"]
    measured = [row for row in rows if "compute" in row]
    assert {row["compute"] for row in measured} == {"virtual compute"}
    assert all(row["median_seconds"] > row["bound_seconds"] > 0 for row in measured)
    assert [row["method"] for row in rows if row["part"] == "adaptive_r"] == ["r=2", "r=1", "r=0"]
    switches = [row for row in rows if row["part"] == "switching"]
    assert {(row["messages"], row["allocated_bytes"]) for row in switches} == {(0, 0)}
    assert {row["method"] for row in rows if row["part"] == "orders"} == {
        "optsche",
        "fifo",
        "early",
    }
    assert {claim["name"] for claim in told["claims"]} == {claim.name for claim in claims([])}
    assert "Virtual compute" in told["notes"]
    assert picture.read_text().count("<svg") == 1
    assert "Schedules, virtual compute" in capsys.readouterr().out
