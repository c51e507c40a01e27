"""The communication benchmark: its configuration, its checks, its claims by hand, and a small run
on a real bed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from moesaic.cli.main import main
from moesaic_lab.bounds import Limit, crossing
from moesaic_lab.comm import ranks as comm_ranks
from moesaic_lab.comm.benchmark import CommCell, claims, panels, rows_of, tables
from moesaic_lab.comm.config import Sweep, read_config
from moesaic_lab.comm.programs import all_ep, dispatch
from moesaic_lab.measure import Timing
from moesaic_testbed import refusal


def cell(sweep: Sweep, size_kib: int = 4096, **seconds: list[float]) -> CommCell:
    """Return a cell with given times per method (underscores stand for spaces) and a bound of 1
    s."""
    times = {name.replace("_", " "): tuple(of) for name, of in seconds.items()}
    return CommCell(
        sweep=sweep,
        size_kib=size_kib,
        timings={name: Timing.of(of) for name, of in times.items()},
        limits={name: [Limit(seconds=1.0, link="node 0 out")] for name in times},
        across={name: (100 * (place + 1), place) for place, name in enumerate(times)},
    )


def found(cells: list[CommCell]) -> dict[str, float | None]:
    return {claim.name.removeprefix("comm."): claim.value for claim in claims(cells)}


# The configuration


def test_the_committed_configuration_measures_what_the_claims_rest_on():
    config = read_config()
    kinds = {(s.kind, s.shape, bool(s.per_message)) for s in config.cells}
    assert {
        ("exchange", shape, cost) for shape in ("2x2", "4x2", "4x4") for cost in (False, True)
    } <= kinds
    assert all(s.repeats >= 8 for s in config.cells)
    assert all(s.repeats >= 30 for s in config.cells if s.kind in ("limit", "lanes"))
    assert max(size for s in config.cells if s.shape == "2x2" for size in s.sizes_kib) == 32768
    assert (
        max(
            size
            for s in config.cells
            if s.kind == "exchange" and s.shape == "4x4"
            for size in s.sizes_kib
        )
        == 1024
    )


# What the ranks check


def test_what_must_arrive_is_written_down_by_hand():
    copies = np.array([[1, 2, 0, 1], [2, 0, 1, 1]])  # two ranks, two experts each
    rows = [torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])]
    assert comm_ranks.arriving(copies, rows, 0).tolist() == [0, 10, 11, 1, 2]
    assert comm_ranks.arriving(copies, rows, 1).tolist() == [12, 3, 13]
    # half of 1, 2, 2 and 0 rows
    assert comm_ranks.arriving(copies, rows, 0, (0, 2)).tolist() == [10, 1]
    assert comm_ranks.arriving(copies, rows, 0, (1, 2)).tolist() == [0, 11, 2]


def test_routing_is_top_k_different_experts_in_expert_order():
    sweep = Sweep(kind="dispatch", tokens=50, num_experts=16, top_k=8)
    token, expert = comm_ranks.route(sweep, 0, 3)
    assert expert.tolist() == sorted(expert.tolist())
    assert torch.bincount(token).tolist() == [8] * 50
    assert len(set(zip(token.tolist(), expert.tolist()))) == 400
    for one in range(16):
        mine = token[expert == one].tolist()
        assert mine == sorted(mine)
    other, _ = comm_ranks.route(sweep, 0, 2)
    assert other.tolist() != token.tolist()


def test_rows_tell_their_number_and_column():
    rows = comm_ranks.numbered(torch.tensor([0, 7, comm_ranks.CYCLE - 1]), 256)
    assert rows.dtype == torch.float32
    assert rows[1, 0] == 7
    assert rows[2, 255].item() == comm_ranks.CYCLE - 1 + 255 / 32
    assert len(torch.unique(rows[:, 0])) == 3


def test_wrong_rows_are_refused(monkeypatch):
    monkeypatch.setattr(comm_ranks.dist, "get_rank", lambda: 1)
    rows = torch.arange(6.0).view(3, 2)
    comm_ranks._compare("linear", {"h": rows}, {"h": rows.clone()})
    with pytest.raises(
        RuntimeError, match="linear: rank 1 did not get the rows that were sent to it, in slot h"
    ):
        comm_ranks._compare("linear", {"h": rows}, {"h": rows.flip(0)})


def test_a_dispatch_in_chunks_moves_all_rows_once():
    grid = all_ep(2, 2)
    copies = np.full((4, 8), 3)
    whole = dispatch(grid, copies, 6, None)
    parts = dispatch(grid, copies, 6, None, chunks=2)
    assert whole.program.outputs == ("h", "g")
    assert parts.program.outputs == ("h.0", "g.0", "h.1", "g.1")
    assert sum(size for *_, size in parts.messages(8)) == sum(
        size for *_, size in whole.messages(8)
    )
    assert not {task.op.value for task in parts.program.tasks} & {"expert", "combine"}


# Claims and rows


def test_a_share_is_claimed_at_the_worse_end_of_its_interval():
    limit = Sweep(kind="limit", repeats=30)
    steady = found([cell(limit, linear=[1.25] * 30)])
    assert steady["receive_first.link_share_2x2_4MiB"] == 0.8
    spread = found([cell(limit, linear=[1.25] * 15 + [1.0] * 15)])[
        "receive_first.link_share_2x2_4MiB"
    ]
    assert spread == 0.8
    assert found([cell(limit, linear=[1.0] * 29)])["receive_first.link_share_2x2_4MiB"] is None
    assert (
        found([cell(limit, 1024, linear=[1.0] * 30)])["receive_first.link_share_2x2_4MiB"] is None
    )


def test_pipelined_is_held_against_the_longer_of_its_lanes():
    lanes = Sweep(kind="lanes", intra="100mbit", repeats=30)
    one = cell(lanes, 1024, pipelined=[2.2] * 30, intra_alone=[2.0] * 30, inter_alone=[1.0] * 30)
    other = cell(lanes, 4096, pipelined=[3.0] * 30, intra_alone=[1.0] * 30, inter_alone=[2.5] * 30)
    assert found([one])["pipelined.over_longer_lane"] == pytest.approx(1.1)
    spread = cell(
        lanes,
        1024,
        pipelined=[2.0] * 14 + [3.0] * 16,
        intra_alone=[2.0] * 30,
        inter_alone=[1.0] * 30,
    )
    # its interval reaches from 1 to 1.5
    assert found([spread])["pipelined.over_longer_lane"] == 1.5
    assert found([one, other])["pipelined.over_longer_lane"] == pytest.approx((1.1 + 1.2) / 2)


def test_multicast_is_held_against_linear_and_its_bound():
    top8 = Sweep(kind="dispatch", top_k=8)
    here = cell(top8, multicast=[0.5, 1.5, 2.0], linear=[2.0, 3.0, 2.0])
    elsewhere = cell(replace(top8, nodes=4, top_k=2), multicast=[4.0] * 3, linear=[1.0] * 3)
    values = found([elsewhere, here])
    assert values["multicast.top8_time_over_linear"] == 0.5  # the median of 1/4, 1/2 and 1
    assert values["multicast.top8_bytes_over_linear"] == 0.5
    assert values["multicast.over_bound"] == (4.0 + 1.5) / 2
    assert found([elsewhere])["multicast.top8_time_over_linear"] is None


def test_small_messages_are_those_whose_charge_dominates():
    costly = Sweep(nodes=4, ranks_per_node=4, per_message=5000)
    cells = [
        cell(costly, 16, linear=[1.0] * 3, hier2d=[0.5] * 3),  # messages of 1 KiB
        # messages of 4 KiB: the charge is their own size
        cell(costly, 64, linear=[1.0] * 3, hier2d=[9.0] * 3),
        cell(replace(costly, per_message=16000), 64, linear=[1.0] * 3, hier2d=[0.7] * 3),
        cell(replace(costly, per_message=0), 16, linear=[1.0] * 3, hier2d=[9.0] * 3),
        cell(replace(costly, nodes=2), 16, linear=[1.0] * 3, hier2d=[9.0] * 3),
    ]
    assert found(cells)["hier2d.over_linear_small_messages"] == pytest.approx(0.6)


def test_what_was_not_measured_says_why():
    reasons = {claim.name: claim.reason for claim in claims([])}
    assert len(reasons) == 6
    assert all(reasons.values())
    short = claims([cell(Sweep(kind="limit"), linear=[1.0] * 8)])[0]
    assert (short.value, short.holds, short.reason) == (
        None,
        None,
        "8 repeats, a ratio under 1.10 needs 30",
    )


def test_a_row_holds_medians_bounds_and_what_crossed():
    rows = rows_of(cell(Sweep(), 64, hier1d=[4.0, 5.0, 6.0], linear=[2.0, 2.0, 2.0]))
    assert [row["method"] for row in rows] == ["hier1d", "linear"]
    first = rows[0]
    assert (first["median_seconds"], first["low_seconds"], first["high_seconds"]) == (5.0, 4.5, 5.5)
    assert (first["share_of_bound"], first["over_first"], first["repeats"]) == (0.2, 2.5, 3)
    assert (first["size_bytes"], first["across_bytes"], first["across_messages"]) == (65536, 100, 0)


def test_bytes_between_nodes_are_counted():
    assert crossing([(0, 1, 5.0), (0, 2, 7.0), (3, 1, 1.0)], Sweep().bed.node_of) == (8, 2)


def test_tables_and_panels_hold_every_method():
    cells = [
        cell(Sweep(), 16, linear=[1.0], torch=[2.0]),
        cell(Sweep(), 64, linear=[1.0], torch=[2.0]),
        cell(Sweep(kind="lanes"), 64, pipelined=[1.0], intra_alone=[0.5], inter_alone=[0.5]),
        cell(Sweep(kind="dispatch"), linear=[3.0], multicast=[1.0]),
    ]
    assert [(made.title, made.row_count) for made in tables(cells)] == [
        ("exchange on 2x2 200mbit", 4),
        ("lanes on 2x2 200mbit", 3),
        ("dispatch on 2x2 200mbit, top 8 of 16", 2),
    ]
    drawn = panels(cells)
    assert [len(panel.series) for panel in drawn] == [2, 3, 2]
    assert drawn[0].series[1].y == (2.0, 2.0)  # over the limit of 1 s
    assert drawn[0].series[0].bounds == (1.0, 1.0)
    assert drawn[1].series[1].y == (500.0,)  # ms


# The command


SMALL = """
dim = 8
[[exchange]]
sizes_kib = [1]
methods = ["linear", "hier1d", "hier2d", "hier3d", "naive", "pipelined", "sequential", "torch"]
repeats = 2
[[lanes]]
intra = "100mbit"
sizes_kib = [1]
repeats = 2
[[dispatch]]
tokens = 10
num_experts = 8
top_k = 3
chunks = [1, 2]
repeats = 2
"""


def test_a_small_run_on_a_bed(tmp_path, capsys):
    missing = refusal()
    if missing:
        pytest.skip(missing)
    config = tmp_path / "small.toml"
    config.write_text(SMALL)
    results = tmp_path / "found.json"
    picture = tmp_path / "found.svg"
    flags = ["--config", str(config), "--keep", str(tmp_path / "kept"), "--picture", str(picture)]
    assert main(["bench", "comm", *flags, "--json", str(results)]) == 0
    told = json.loads(results.read_text())
    rows = told["rows"]
    assert "hier2d" in capsys.readouterr().out
    assert main(["bench", "comm", *flags, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows, "taken from the folder"
    assert [row["method"] for row in rows if row["what"] == "exchange"] == [
        "linear",
        "hier1d",
        "hier2d",
        "hier3d",
        "naive",
        "pipelined",
        "sequential",
        "torch",
    ]
    assert [row["method"] for row in rows if row["what"] == "dispatch"] == [
        "linear",
        "multicast",
        "multicast/2",
    ]
    # half of four KiB
    assert {row["across_bytes"] for row in rows if row["what"] == "exchange"} == {2048}
    assert {row["bound_seconds"] for row in rows if row["method"] == "torch"} == {1024 / 25e6}
    assert all(row["median_seconds"] > row["bound_seconds"] for row in rows)
    sent = {row["method"]: row["across_bytes"] for row in rows if row["what"] == "dispatch"}
    assert sent["multicast"] < sent["linear"]
    assert {claim["name"] for claim in told["claims"]} == {claim.name for claim in claims([])}
    assert "emulated links" in told["notes"]
    assert picture.read_text().count("<svg") == 1
