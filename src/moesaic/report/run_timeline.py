"""The timeline of a run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A line of metrics says how long each rank's programs computed and waited since the previous line,
not when: within the steps of a line, computing comes first here, then the waits for each rank.

In a Chrome trace an event has a kind, "ph": "X" is a span, "M" names a process. "pid" is the number
of its process, here a run, and "tid" that of its row, here a rank; "ts" and "dur" are in
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moesaic.report.summary import RunSummary, has_rank_times

DETAILS = ("loss", "tokens_per_second")
"""What a span says of its steps besides their number."""


def run_trace(runs: Sequence[RunSummary]) -> dict[str, Any]:
    """Return a Chrome trace of runs to be saved as JSON: a process for each run, a row for each
    rank, times in microseconds of training."""
    events = [event for number, run in enumerate(runs) for event in _events(run, number)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(run: RunSummary, number: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, whose process in the trace has a number."""
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": run.name}}
    begin = 0.0
    step_before = 0
    for line in run.lines:
        if line.get("kind") != "train" or not isinstance(line.get("seconds"), float):
            continue
        # lists by rank: "seconds", "compute", and "waited" for each other rank
        times = line["ranks"] if has_rank_times(line.get("ranks")) else None
        num_ranks = len(times["seconds"]) if times else 1  # the row of the run, without times
        steps = f"steps {step_before + 1} to {line['step']}"
        details: dict[str, Any] = {key: line[key] for key in DETAILS if key in line}
        for rank in range(num_ranks):
            # "seconds" of the line: training time up to it
            yield _span(steps, begin, line["seconds"] - begin, (number, rank), details)
            parts = _parts(times, rank) if times else []
            start = begin
            for name, seconds in parts:
                yield _span(name, start, seconds, (number, rank), {})
                start += seconds
        begin = line["seconds"]
        step_before = line["step"]


def _parts(times: dict[str, Any], rank: int) -> list[tuple[str, float]]:
    """Return what a rank did in the steps of a line, and for how many seconds."""
    parts = [("compute", times["compute"][rank])]
    for peer, seconds in enumerate(times["waited"][rank]):
        parts.append((f"wait for rank {peer}", seconds))
    return [(name, seconds) for name, seconds in parts if seconds > 0]


def _span(
    name: str, start: float, seconds: float, row: tuple[int, int], details: dict[str, Any]
) -> dict[str, Any]:
    """Return an event of some length in the row of a (run, rank); times are in seconds."""
    run, rank = row
    return {
        "ph": "X",
        "name": name,
        "ts": start * 1e6,
        "dur": max(seconds, 0.0) * 1e6,  # a line may have fewer seconds than the one before
        "pid": run,
        "tid": rank,
        "args": details,
    }
