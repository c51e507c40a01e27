"""The training benchmark: its arithmetic by hand, its configuration, its parts on loopback, and a
tiny run on a bed."""

from __future__ import annotations

import json

import pytest
import torch

from moesaic.cli.main import main
from moesaic.comm.loopback import run_ranks
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic_lab.recorder import Recorder
from moesaic_lab.train.benchmark import (
    TrainResults,
    cell_of,
    claims,
    flexible,
    measurement_rows,
    panels,
    ratio,
    tables,
)
from moesaic_lab.train.config import COMMITTED, Candidate, Layouts, TrainCase, read_config
from moesaic_lab.train.layout import Experts, by_expert, by_source, measure, ordered
from moesaic_lab.train.ranks import MeasuredSystem, TrainFound, near_ones
from moesaic_lab.train.step import sum_node_first
from moesaic_lab.train.systems import make_batch, make_model
from moesaic_testbed import Bed, refusal

BED = Bed(nodes=2, ranks_per_node=1, inter="8mbit")
"""A megabyte per second."""


def measured(
    name, kind, seconds, sent, *, exchange="receive-first", lossless=True, spent=None, rank=0
):
    spans = [(100 * i + rank, 100 * i + s) for i, s in enumerate(seconds)]
    return MeasuredSystem(
        name=name,
        kind=kind,
        exchange=exchange,
        is_lossless=lossless,
        errors={"loss": 1e-7, "dense gradient": 2e-6},
        sent=sent,
        spans=spans,
        phases={"forward": [1.0] * len(seconds), "reduce": []},
        exchanging=spent or [],
    )


def two_ranks(repeats=12, plain_seconds=2.0):
    """Return what two ranks found; ours takes a second, of which rank 1 comes late by 0.5."""
    found = []
    for rank in (0, 1):
        other = 1 - rank
        systems = [
            measured("ours: linear", "ours", [1.5] * repeats, [(rank, other, 4e5)]),
            measured("ours: best", "ours", [1.0] * repeats, [(rank, other, 2e5)]),
            measured("ours: coded", "ours", [0.5] * repeats, [(rank, other, 1e5)], lossless=False),
            measured(
                "plain, rf",
                "plain",
                [plain_seconds] * repeats,
                [(rank, other, 5e5)],
                spent=[0.5 + rank] * repeats,
            ),
            measured(
                "plain, torch",
                "plain",
                [4.0] * repeats,
                [],
                exchange="torch's",
                spent=[1.0] * repeats,
            ),
            measured("ds, rf", "deepspeed", [5.0] * repeats, [(rank, other, 1e6)]),
            measured(
                "ds, torch",
                "deepspeed",
                [8.0] * repeats,
                [],
                exchange="torch's",
                spent=[1.0] * repeats,
            ),
        ]
        found.append(
            TrainFound(systems=systems, best="ours: best", most_over_mean_load=2.0, items=1000)
        )
    return found


def test_a_cell_joins_the_ranks():
    cell = cell_of(TrainCase(), BED, two_ranks())
    of_name = {outcome.name: outcome for outcome in cell.outcomes}
    assert of_name["plain, rf"].communication_share == pytest.approx((0.5 + 1.5) / 2 / 2.0)
    assert of_name["plain, rf"].inter_bytes == 1e6
    assert of_name["plain, rf"].limit.seconds == pytest.approx(0.5)
    assert of_name["ds, torch"].inter_bytes == of_name["ds, rf"].inter_bytes == 2e6
    assert of_name["ds, torch"].communication_share is None
    assert of_name["ours: best"].phases == {"forward": 1.0}
    assert of_name["ours: best"].worst_error == 2e-6
    assert cell.find("ours").name == "ours: best"
    assert cell.find("plain", "torch's").timing.median == 4.0
    assert cell.find("else") is None


def swept(top_k, **options):
    return cell_of(
        TrainCase(name=f"demo top {top_k}", top_k=top_k, in_sweep=True), BED, two_ranks(**options)
    )


def claim_of(cells):
    return claims(TrainResults(cells=cells, layout=[]))[0]


def test_claims_are_paired_ratios_of_the_best_lossless_plan():
    cells = [
        swept(top_k, plain_seconds=seconds) for top_k, seconds in ((None, 4.0), (4, 2.0), (8, 1.25))
    ]
    beside = cell_of(TrainCase(name="demo beside DeepSpeed"), BED, two_ranks())
    of_name = {
        claim.name: claim for claim in claims(TrainResults(cells=[*cells, beside], layout=[]))
    }
    assert of_name["train.step_over_torch_ep"].value == 0.5
    assert [of_name[f"train.top{k}.step_over_torch_ep"].value for k in (2, 4, 8)] == [
        0.25,
        0.5,
        0.8,
    ]
    assert of_name["train.step_over_torch_ep"].holds
    assert of_name["train.step_over_torch_ep_own_exchange"].value == 0.25
    assert of_name["train.step_over_deepspeed"].value == 0.2
    assert of_name["train.coded_step_over_torch_ep"].value == 0.25
    assert of_name["train.inference_over_torch_ep"].value is None
    assert of_name["train.flexible_layout_speedup"].reason == "the layouts were left out"
    assert all(claim.value is not None or claim.reason for claim in of_name.values())


def test_few_pairs_carry_no_claim():
    others = [swept(4), swept(8)]
    assert claim_of([swept(None, repeats=7), *others]).reason == "7 pairs, 8 are needed"
    assert "0.95 on 12 pairs" in claim_of([swept(None, plain_seconds=1.05), *others]).reason
    assert claim_of(others).reason == "its cases were not all run"
    near = {"repeats": 30, "plain_seconds": 1.05}
    claim = claim_of([swept(None, **near), swept(4, **near), swept(8)])
    assert claim.value == pytest.approx(1 / 1.05)
    assert claim.holds is False


def test_near_systems_are_timed_more_often():
    seconds = {
        "ours": (1.0, 1.0),
        "alike": (1.05, 1.05),
        "a bit faster": (0.95, 0.95),
        "slow": (1.2, 1.2),
    }
    assert near_ones("ours", ["alike", "a bit faster", "slow"], seconds) == [
        "ours",
        "alike",
        "a bit faster",
    ]
    assert near_ones("ours", ["slow"], seconds) == []


def test_a_ratio_is_taken_over_the_rounds_in_which_both_ran():
    found = two_ranks(repeats=4)
    for of_rank in found:
        ours = of_rank.systems[1]
        plain = of_rank.systems[3]
        ours.spans.extend(
            [(1000.0 + i, 1003.0 + i) for i in range(6)]
        )  # thrice as slow where the plain layer was not run
        plain.spans.extend([(2000.0 + i, 2006.0 + i) for i in range(6)])
    cell = cell_of(TrainCase(), BED, found)
    ours = cell.outcomes[1]
    linear = cell.outcomes[0]
    _ = cell.outcomes[2]
    plain = cell.outcomes[3]
    assert (ratio(cell, ours, plain).repeats, ratio(cell, ours, linear).repeats) == (10, 4)
    assert ratio(cell, ours, linear).median == pytest.approx(1 / 1.5)
    assert ratio(cell, ours, plain).median == pytest.approx(0.5)


def test_rows_tables_and_panels_hold_every_system():
    results = TrainResults(cells=[cell_of(TrainCase(), BED, two_ranks())], layout=[])
    rows = {row["system"]: row for row in measurement_rows(results)}
    assert rows["ours: best"]["items_per_second"] == 1000
    assert rows["ours: best"]["over_plain"] == 0.5
    assert rows["ours: best"]["best"]
    assert rows["plain, rf"]["bound_seconds"] == pytest.approx(0.5)
    json.dumps(list(rows.values()))
    assert len(tables(results)[0].rows) == 7
    (panel,) = panels(results)
    assert {series.name for series in panel.series} >= {"ours, best lossless", "ds, rf"}
    assert (
        ratio(results.cells[0], results.cells[0].outcomes[0], results.cells[0].outcomes[1]).median
        == 1.5
    )


def test_the_dense_sum_crosses_between_nodes_once_per_node():
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    flat = torch.arange(10_001, dtype=torch.float32)

    def rank(transport):
        recorder = Recorder(transport)
        total = sum_node_first(recorder, grid, flat * (transport.rank + 1))
        crossing = [
            m.num_bytes
            for r in recorder.ranges
            for m in r.messages
            if grid.node_of(m.source) != grid.node_of(m.target)
        ]
        return total, sum(crossing)

    found = run_ranks(4, rank)
    for total, _ in found:
        torch.testing.assert_close(total, flat * 10)
    assert found[0][1] + found[1][1] == 4 * len(flat)


def test_models_and_batches_are_functions_of_the_seed():
    case = TrainCase(top_k=3, batch_size=4)
    one = make_model(case, 1)
    two = make_model(case, 1)
    layers = [module for module in one.modules() if isinstance(module, MoE)]
    assert {layer.top_k for layer in layers} == {3}
    assert all(not layer.losses for layer in layers)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    batch = make_batch(case, 0, 1, 4)
    assert batch.inputs.shape == (1, 256)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert not torch.equal(batch.inputs, make_batch(case, 0, 2, 4).inputs)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_both_layouts_compute_the_same(world):
    generator = torch.Generator().manual_seed(0)
    rows, w1, w2 = (torch.randn(*s, generator=generator) for s in ((48, 4), (3, 6, 4), (3, 4, 6)))
    found = by_source(rows, Experts(w1=w1, w2=w2), world)
    sorted_rows = ordered(rows, 3, world)
    torch.testing.assert_close(
        ordered(found, 3, world), by_expert(sorted_rows, Experts(w1=w1, w2=w2))
    )
    each = len(rows) // 3 // world
    first = [source * 3 * each + row for source in range(world) for row in range(each)]
    torch.testing.assert_close(sorted_rows[: world * each], rows[first])
    torch.testing.assert_close(found[:each], torch.relu(rows[:each] @ w1[0].T) @ w2[0].T)


def test_layouts_are_measured_for_every_world():
    rows = measure(Layouts(worlds=(1, 4), rows_per_expert=8, dim=4, hidden=4, repeats=2))
    assert [row["world"] for row in rows] == [1, 1, 1, 4, 4, 4]
    assert {row["repeats"] for row in rows} == {2}
    assert rows[0]["gflops_per_second"] * rows[0]["median_seconds"] == pytest.approx(
        4 * 2 * 8 * 4 * 4 / 1e9
    )
    results = TrainResults(cells=[], layout=rows)
    assert measurement_rows(results) == rows
    assert [series.x for series in panels(results)[0].series] == [(1.0, 4.0)] * 3
    assert flexible(rows) > 0


def test_the_committed_configuration():
    config = read_config(COMMITTED)
    assert config.candidates[0].plan.all_to_all == "linear"
    sweep = [case for case in config.cases if case.in_sweep]
    assert [(case.mode, case.top_k, case.peers) for case in sweep] == [
        ("training", top_k, ("plain",)) for top_k in (None, 4, 8)
    ]
    assert all(case.repeats >= 8 for case in config.cases)
    assert all(case.coded for case in sweep)
    assert {"demo top 8", "demo inference", "demo beside DeepSpeed"} <= {
        case.name for case in config.cases
    }
    assert [cell.worlds[-1] for cell in config.cells if isinstance(cell, Layouts)] == [256]
    assert config.candidates[0].label(4) == "ep 4 linear"
    assert (
        Candidate(etp=2, chunks=2, codec="bf16", order="early").label(4)
        == "ep 2 etp 2 linear, 2 chunks, early, bf16"
    )


@pytest.mark.slow
def test_a_tiny_run_on_a_bed(tmp_path, capsys):
    if missing := refusal():
        pytest.skip(missing)
    config = tmp_path / "tiny.toml"
    config.write_text(
        """
        [[candidate]]
        [[candidate]]
        all_to_all = "multicast"
        [[candidate]]
        codec = "bf16"
        [[case]]
        name = "demo"
        batch_size = 4
        repeats = 1
        trials = 1
        peers = ["plain"]
        [[case]]
        name = "answers"
        mode = "inference"
        coded = false
        batch_size = 4
        repeats = 1
        trials = 1
        peers = ["plain"]
        """
    )
    picture = tmp_path / "train.svg"
    assert (
        main(["bench", "train", "--config", str(config), "--json", "-", "--picture", str(picture)])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    rows = {(row["case"], row["system"]): row for row in found["rows"]}
    linear = rows["demo", "ours: ep 4 linear"]
    once = rows["demo", "ours: ep 4 multicast"]
    plain = rows["demo", "plain expert parallelism, receive-first"]
    assert once["inter_bytes"] < 0.9 * linear["inter_bytes"]
    assert plain["inter_bytes"] == pytest.approx(
        rows["demo", "plain expert parallelism, torch's"]["inter_bytes"], rel=0.02
    )
    assert plain["inter_bytes"] == pytest.approx(linear["inter_bytes"], rel=0.02)
    assert all(row["worst_error"] < 1e-4 for row in rows.values() if row["lossless"])
    assert all(
        1e-4 < row["worst_error"] < 0.1
        for row in rows.values()
        if not row["lossless"] and row["case"] == "demo"
    )
    coded = [case for case, system in rows if "bf16" in system]
    assert coded == ["demo"]
    assert 0 < plain["communication_share"] < 1
    assert found["claims"][0]["reason"] == "its cases were not all run"
    assert picture.read_text().count("<svg") == 1
