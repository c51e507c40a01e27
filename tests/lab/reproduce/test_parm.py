"""Parm's sweep and its Algorithm 1, published and corrected."""

from __future__ import annotations

import pytest

from moesaic.planner.algorithm1 import Operations, corrected, operations
from moesaic.planner.fit import Fit
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
from moesaic_lab.reproduce import parm
from moesaic_lab.reproduce.end_to_end import WholeStep
from moesaic_lab.reproduce.parm import PLANS, ParmTimes, layers, mean_speedup, published, shares
from moesaic_lab.reproduce.parm import Testbed as Bed
from moesaic_lab.reproduce.records import Reproduction, read_book

BOOK = read_book()
LAYER = Workload(tokens=1000, num_experts=4, top_k=2, dim=10, hidden=8, matrices=2, dtype="fp32")


def rates(all_to_all: float, gather: float, overlapped: float) -> Operations:
    """Return operations without start-up."""
    lines = (Fit(beta=rate) for rate in (all_to_all, gather, overlapped))
    return Operations(**dict(zip(("all_to_all", "gather", "overlapped"), lines)))


def test_a_cell_of_the_sweep_has_162_layers() -> None:
    found = list(layers(32, 4, 2))
    assert sum(count for _, count in found) == 162
    assert len(found) == 90
    assert len({workload for workload, _ in found}) == 90
    assert {workload.num_experts for workload, _ in found} == {8}
    assert max(workload.dim for workload, _ in found) == 4 * 4096


def test_the_corrected_rule_is_the_closed_form() -> None:
    """Papers.md 1.5: y = s k f S D = 4 * 20,000; S1 costs 2 y / m + gather of S D, S2 y / m +
    overlapped of y / m."""
    m = 2
    s = 4
    y = 80_000.0
    sd = 10_000.0
    # of the overlapped rate, at which both cost the same if the others are 1
    level = (y / m + sd) / (y / m)
    assert corrected(rates(1.0, 1.0, level * 1.01), LAYER, m, s) == "s1"
    assert corrected(rates(1.0, 1.0, level * 0.99), LAYER, m, s) == "s2"


def test_the_published_rule_takes_the_overlapped_operation_of_all_of_y_and_the_width_twice() -> (
    None
):
    """Its y is E T M N_ESP with M in T already: 20,000 * 10 * s; at m = 4 it takes SAA of y, so S2
    must be m times cheaper."""
    m = 4
    sd = 10_000.0
    for s in (1, 4):
        y = 200_000.0 * s
        level = (y / m + sd) / y
        assert published(rates(1.0, 1.0, level * 1.01), LAYER, m, s) == "s1"
        assert published(rates(1.0, 1.0, level * 0.99), LAYER, m, s) == "s2"
        assert corrected(rates(1.0, 1.0, level * 1.01), LAYER, m, s) == "s2"


def test_operations_are_fitted_to_the_simulated_cluster() -> None:
    """Testbed A, one node: y / m elements of fp32 of which 7/8 leave, a ring over m; 664 us per
    message."""
    bed = Bed(BOOK, "a")
    found = operations(
        bed.runs.simulator, Grid(world=8, tp=4, ep=2, etp=4, ranks_per_node=8), bed.top_k
    )
    rate = BOOK.constant("parm.a.link") * 1e9 / 8
    assert found.all_to_all.beta == pytest.approx(4 * 7 / 8 / rate)
    assert found.all_to_all.alpha == pytest.approx(7 * 664e-6)
    assert found.gather.beta == pytest.approx(4 * 3 / 4 / rate)
    assert found.overlapped.beta > found.all_to_all.beta


def test_tensor_groups_of_two_make_the_schedules_about_twice_as_fast() -> None:
    """Papers.md 1.9: where computing or the all-to-all dominates, the ratio tends to m; gathers add
    to it."""
    bed = Bed(BOOK, "b")
    times = bed.cell(8, 2, 2, ("baseline", "s1"))
    assert sum(each.count for each in times) <= 162
    assert 1.8 < mean_speedup(times, "s1") < 3.2
    least, most = shares(times)
    assert 0 < least < most < 100


def test_means_count_equal_layers_as_often_as_the_sweep_does() -> None:
    times = [
        ParmTimes(LAYER, 3, {"baseline": 2.0, "s1": 1.0}, {"baseline": 0.5}),
        ParmTimes(LAYER, 1, {"baseline": 6.0, "s1": 1.0}, {"baseline": 0.6}),
    ]
    assert mean_speedup(times, "s1") == pytest.approx((3 * 2 + 6) / 4)
    assert shares(times) == pytest.approx((75.0, 90.0))


def test_layers_that_do_not_fit_into_memory_are_dropped() -> None:
    bed = Bed(BOOK, "b")
    sizes = [each.workload.tokens * each.workload.dim for each in bed.cell(8, 2, 4, ("baseline",))]
    all_sizes = [layer.tokens * layer.dim for layer, _ in layers(8, 4, bed.top_k)]
    assert max(sizes) < max(all_sizes)
    assert min(sizes) == min(all_sizes)


@pytest.fixture(scope="module")
def small() -> Reproduction:
    """The whole report over two layers of each of two cells."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BATCHES", (2,)), ("LENGTHS", (512,)), ("WIDTHS", (1024,))):
            patch.setattr(parm, name, value)
        patch.setattr(parm, "COLUMNS", (("a", 8), ("b", 32)))
        patch.setattr(parm, "SIZES", ((4, 4),))
        return parm.reproduce(read_book())


def test_the_report_sets_overlap_and_whole_steps_beside_the_table(small: Reproduction) -> None:
    found = {row.cell.name: row for row in small.rows}
    assert 0.9 < found["parm.saa.a"].ours < 1.3
    for bed in ("a", "b"):
        for model in ("bert", "gpt2"):
            plain, chosen = (
                found[f"parm.step.{model}.{bed}.{way}"] for way in ("baseline", "parm")
            )
            assert plain.role == chosen.role == "no prediction"  # the paper prints no batch
            assert 1 < plain.ours / chosen.ours < 6, (
                "attention and the output take the same under every schedule"
            )


def test_steps_leave_out_the_exchange_of_gradients() -> None:
    bed = Bed(read_book(), "a")
    grid = bed.grid(8, 4, 4)
    step = WholeStep("parm-gpt2", bed.cluster, grid, 2, 4)
    runs = bed.runs.run(PLANS["s1"], grid, step.model.layer)
    assert 0 < step.around_seconds(*runs, exchanges=False) < step.around_seconds(*runs)
