"""The report in words and headline cards: numbers to short text. Returns plain text; the page escapes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moesaic.report.summary import RunSummary

NONE = "—"
"""Shown where a run has no such number."""


@dataclass(frozen=True)
class Card:
    """One headline number for every run, in their order."""

    title: str
    values: tuple[str, ...]
    note: str


def in_words(runs: Sequence[RunSummary]) -> list[str]:
    """Return sentences: how good each run is, the best first; how fast; how balanced; which ranks and links hold it up."""
    held_up = [f"{run.name}: {each}." for run in runs for each in run.stragglers]
    return [_quality(runs), _speed(runs), *[_balance(run) for run in runs if run.layers], *held_up]


def cards(runs: Sequence[RunSummary]) -> list[Card]:
    """Return the headline cards; those about experts only if a run has MoE layers."""
    found = [
        _card(runs, "Validation loss", lambda run: number(run.val_nats_per_byte.last, "{:.3f}"), "nats/byte, last"),
        _card(runs, "Best validation", lambda run: number(run.best_val, "{:.3f}"), "nats/byte, lowest"),
        _card(runs, "Trained for", lambda run: duration(run.training_seconds), "evaluation not counted"),
        _card(runs, "Tokens", lambda run: amount(run.total_tokens), _steps_note(runs)),
        _card(runs, "Throughput", lambda run: amount(run.tokens_per_second.median), "tokens/s, median"),
        _card(runs, "MFU", lambda run: percent(run.mfu.median), "of the matmul peak, median"),
    ]
    if any(run.layers for run in runs):
        found += [
            _card(
                runs, "MaxVio", lambda run: number(run.final_max_violation, "{:.2f}"), "mean over layers, at the end"
            ),
            _card(runs, "Dead · dropped", _dead_and_dropped, "experts at the end · share of copies"),
        ]
    return found


def number(value: float | None, form: str) -> str:
    """Return a number in a format, or a dash."""
    return NONE if value is None else form.format(value)


def percent(share: float | None) -> str:
    """Return a share as a percentage of two or three digits: 31 %, 3.1 %, 0.31 %."""
    if share is None:
        return NONE
    value = 100 * share
    digits = 0 if value >= 10 or value == 0 else 1 if value >= 1 else 2
    return f"{value:.{digits}f} %"


def amount(value: float | None) -> str:
    """Return a count of three digits: 812, 9.21 k, 2.05 M."""
    if value is None:
        return NONE
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            short = value / size
            return f"{short:.{2 if short < 10 else 1 if short < 100 else 0}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Return a time in the units a person would say: 48 s, 2 min 11 s, 5 h 03 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _card(runs: Sequence[RunSummary], title: str, text: Callable[[RunSummary], str], note: str) -> Card:
    return Card(title, tuple(text(run) for run in runs), note)


def _steps_note(runs: Sequence[RunSummary]) -> str:
    steps = {run.steps for run in runs}
    return f"in {steps.pop():,} steps" if len(steps) == 1 else f"in {min(steps):,} to {max(steps):,} steps"


def _dead_and_dropped(run: RunSummary) -> str:
    return f"{run.final_dead_experts} · {percent(run.dropped_share)}" if run.layers else NONE


def _quality(runs: Sequence[RunSummary]) -> str:
    ranked = sorted(
        ((run.val_nats_per_byte.last, run) for run in runs if run.val_nats_per_byte.last is not None),
        key=lambda pair: pair[0],
    )
    sentences = []
    if ranked:
        loss, best = ranked[0]
        others = [
            f"{other - loss:.3f} below {rival.name} ({other:.3f}"
            + (")" if rival.steps == best.steps else f" after {rival.steps:,} steps)")
            for other, rival in ranked[1:]
        ]
        behind = f", {_listed(others)}" if others else ""
        sentences.append(f"{best.name} reaches {loss:.3f} nats/byte after {best.steps:,} steps{behind}.")
    for run in runs:
        if run.val_nats_per_byte.last is None:
            loss_now = number(run.loss.last, "{:.3f}")
            sentences.append(
                f"{run.name} has no evaluation yet: its training loss is {loss_now} nats/token after {run.steps:,} steps."
            )
    return " ".join(sentences)


def _speed(runs: Sequence[RunSummary]) -> str:
    told = []
    for run in runs:
        text = f"{run.name} trained for {duration(run.training_seconds)}"
        if run.tokens_per_second.median is not None:
            text += f" at {run.tokens_per_second.median:,.0f} tokens/s"
        if run.mfu.median is not None:
            text += f" ({percent(run.mfu.median)} MFU)"
        told.append(text)
    return _listed(told) + "."


def _balance(run: RunSummary) -> str:
    dead, dropped = run.final_dead_experts, run.dropped_share
    who = (
        f"The MoE layer of {run.name} ends"
        if len(run.layers) == 1
        else f"The {len(run.layers)} MoE layers of {run.name} end"
    )
    dead_text = "no dead expert" if not dead else "1 dead expert" if dead == 1 else f"{dead} dead experts"
    dropped_text = "no copy was dropped" if not dropped else f"{percent(dropped)} of all copies were dropped"
    violation = number(run.final_max_violation, "{:.2f}")
    return f"{who} at a mean MaxVio of {violation} with {dead_text}; {dropped_text}."


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
