"""Draws docs/images/timeline.svg: when each task of one MoE layer runs, forward and backward,
according to the simulator.

python -m moesaic_lab.timeline_picture
"""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO

import matplotlib
from matplotlib.figure import Figure

from moesaic.planner.cluster import read_cluster
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.timeline import LANES, Timeline
from moesaic_lab.claims import ROOT
from moesaic_lab.pictures import COLOURS

PICTURE = ROOT / "docs" / "images" / "timeline.svg"
PLAN = Plan(schedule="s1", all_to_all="hier2d", chunks=4, order="optsche")
GRID = Grid(world=8, ep=8, ranks_per_node=4)
LAYER = Workload(tokens=4096, num_experts=32, top_k=2, dim=1024, hidden=4096)
CLUSTER = "100gbe"
NO_CHUNK = "#9aa1ac"
"""Colour of tasks that work on no chunk or on several."""
LETTER = 0.0085
"""Share of the width that a letter takes; the name of a task is left out if it does not fit."""


def timelines() -> dict[str, Timeline]:
    """Simulate the forward and backward program of the layer."""
    cluster = read_cluster(CLUSTER)
    compiled = compile_plan(PLAN, GRID)
    programs = {"forward": compiled.forward, "backward": compiled.backward}
    simulator = Simulator(cluster)
    return {
        name: simulator.run(program, LAYER, GRID).timeline for name, program in programs.items()
    }


def title(name: str, timeline: Timeline) -> str:
    """Return the title of a program's timeline: its time, and the share of communication that is
    hidden."""
    hidden = f"{timeline.overlap:.0%} of the communication behind computation"
    return f"{name}: {1e3 * timeline.makespan:.2f} ms, {hidden}"


def picture(by_name: Mapping[str, Timeline]) -> str:
    """Return timelines as SVG, one below the other with the same time axis: a row per lane, a bar
    per task."""
    until = 1e3 * max(timeline.makespan for timeline in by_name.values())  # milliseconds, as below
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moesaic"}):
        figure = Figure(figsize=(9, 2.2 * len(by_name)), layout="constrained")
        all_axes = figure.subplots(len(by_name), 1, squeeze=False).flatten()
        for axes, (name, timeline) in zip(all_axes, by_name.items()):
            lanes = [lane for lane in LANES if timeline.on(lane)]
            for span in timeline.spans:
                start = 1e3 * span.start
                length = 1e3 * (span.end - span.start)
                colour = NO_CHUNK if span.chunk is None else COLOURS[span.chunk % len(COLOURS)]
                row = lanes.index(span.lane)
                axes.barh(
                    row,
                    length,
                    left=start,
                    height=0.8,
                    color=colour,
                    edgecolor="white",
                    linewidth=0.5,
                )
                if length > LETTER * until * len(span.task):
                    axes.text(
                        start + length / 2,
                        row,
                        span.task,
                        ha="center",
                        va="center",
                        fontsize=6,
                        color="white",
                    )
            axes.set(
                xlim=(0, until),
                yticks=range(len(lanes)),
                yticklabels=[lane.value for lane in lanes],
            )
            axes.invert_yaxis()
            axes.tick_params(labelsize=7)
            axes.set_title(title(name, timeline), fontsize=9, loc="left")
        axes.set_xlabel(
            f"ms on {CLUSTER}, simulated; a colour per chunk, grey for no one chunk", fontsize=8
        )
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


if __name__ == "__main__":
    PICTURE.write_text(picture(timelines()), encoding="utf-8")
