"""`moesaic bench balance`: answers to skewed routing, in turn on an emulated cluster, and simulated on larger ones."""

from __future__ import annotations

from moesaic_lab.balance.claims import claims
from moesaic_lab.balance.config import BalanceBenchConfig, read_config
from moesaic_lab.balance.decisions import TimedDecision, decisions
from moesaic_lab.balance.pictures import panels
from moesaic_lab.balance.rows import NOTES, all_rows, tables
from moesaic_lab.balance.run import BalanceCell, run
from moesaic_lab.balance.shares import Share, shares_of_forced
from moesaic_lab.balance.simulated import Forecast, simulate
from moesaic_lab.benchmark import Told, emulated

Found = tuple[list[BalanceCell], list[Forecast], list[Share], list[TimedDecision]]
"""What was measured, what was simulated, the shares of forced balance, and decisions by themselves."""


def measure(config: BalanceBenchConfig, told: Told) -> Found:
    """Measure on one bed after the other, then simulate."""
    cells, forecasts, shares, decided = run(config, told), list[Forecast](), list[Share](), list[TimedDecision]()
    if config.simulates:
        assert config.simulated is not None
        forecasts = simulate(config.simulated, config.seed, told)
    if config.shares_forced:
        assert config.shares is not None
        decided = decisions()
        shares = shares_of_forced(config.shares, config.folder, config.seed, told)
    return cells, forecasts, shares, decided


BENCHMARK = emulated(
    name="balance",
    description="Measure answers to skewed routing in turn on an emulated cluster, with virtual compute.",
    notes=NOTES, read_config=read_config, run=measure, needs_cluster=lambda config: bool(config.cases()),
    rows=lambda found: all_rows(*found),
    claims=lambda found: claims(*found), columns=lambda found: tables(*found[:3]), panels=lambda found: panels(*found[:3]),
    title="One MoE layer under skewed routing, virtual compute", panels_in_a_row=3,
)  # fmt: skip
