"""The section of the page about plans that changed while a run trained: what ran, what was tried, what was decided and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.report.summary import RunSummary
from moesaic.report.template import Section, Table
from moesaic.report.words import percent
from moesaic.train.metrics import read_metrics

SHOWN = 40
"""Decisions in the table, the last ones."""


@dataclass(frozen=True, kw_only=True)
class PlanLines:
    """What a run's plan table did."""

    running: str
    """The plan at the end, in words."""
    switches: int
    """Changes of plan."""
    explored_share: float
    """Steps under plans that were being tried, over all."""
    decisions: tuple[tuple[int, str, int, str], ...]
    """Step, reason, load in buckets, plan in words."""


def choices_of(lines: Sequence[dict[str, Any]]) -> PlanLines | None:
    """Return what the lines of a run's metrics say; None where no plan changed by itself."""
    found = [line["plan"] for line in lines if line.get("kind") == "train" and isinstance(line.get("plan"), dict)]
    if not found:
        return None
    last = found[-1]
    return PlanLines(
        running=str(last["running"]),
        switches=int(last["switches"]),
        explored_share=float(last["explored_share"]),
        decisions=tuple((step, why, bucket, plan) for each in found for step, why, bucket, plan in each["decisions"]),
    )


def plans_section(run: RunSummary) -> Section | None:
    """Return the section about a run; None where no plan changed by itself."""
    choices = choices_of(read_metrics(run.folder))
    if choices is None:
        return None
    told = (
        f"{choices.switches} changes of plan, {percent(choices.explored_share)} of the steps on trial; at the end "
        f"{choices.running} runs."
    )
    rows = [(str(step), why, str(bucket), plan) for step, why, bucket, plan in choices.decisions[-SHOWN:]]
    table = Table(("Step", "Why", "Load", "Plan from then on"), rows)
    return Section(title="Plans of", run=run.name, text=told, blocks=[table])
