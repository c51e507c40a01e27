"""The section of the page about plans that changed while a run trained: what ran, what was tried, what was decided and why."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.report.summary import RunSummary
from moesaic.report.words import percent
from moesaic.train.metrics import read_metrics

SHOWN = 40
"""Decisions in the table, the last ones."""


@dataclass(frozen=True, kw_only=True)
class PlanChoices:
    """What a run's plan table did."""

    running: str
    """The plan at the end, in words."""
    switches: int
    """Changes of plan."""
    explored_share: float
    """Steps under plans that were being tried, over all."""
    decisions: tuple[tuple[int, str, int, str], ...]
    """Step, reason, load in buckets, plan in words."""


def choices_of(lines: Sequence[dict[str, Any]]) -> PlanChoices | None:
    """Return what the lines of a run's metrics say; None where no plan changed by itself."""
    found = [line["plan"] for line in lines if line.get("kind") == "train" and isinstance(line.get("plan"), dict)]
    if not found:
        return None
    last = found[-1]
    return PlanChoices(
        running=str(last["running"]),
        switches=int(last["switches"]),
        explored_share=float(last["explored_share"]),
        decisions=tuple((step, why, bucket, plan) for each in found for step, why, bucket, plan in each["decisions"]),
    )


def plans_section(run: RunSummary) -> str:
    """Return the section about a run as HTML; "" where no plan changed by itself."""
    choices = choices_of(read_metrics(run.folder))
    if choices is None:
        return ""
    told = (
        f"{choices.switches} changes of plan, {percent(choices.explored_share)} of the steps on trial; at the end "
        f"{choices.running} runs."
    )
    rows = "".join(
        f"<tr><th>{step}</th><td>{html.escape(why)}</td><td>{bucket}</td><td>{html.escape(plan)}</td></tr>"
        for step, why, bucket, plan in choices.decisions[-SHOWN:]
    )
    heads = "".join(f"<th>{head}</th>" for head in ("Step", "Why", "Load", "Plan from then on"))
    return (
        f"<section><h2>Plans of {html.escape(run.name)}</h2><p>{html.escape(told)}</p><div class='scroll'>"
        f"<table class='numbers'><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )
