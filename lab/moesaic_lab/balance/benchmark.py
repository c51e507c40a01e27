"""`moesaic bench balance`: answers to skewed routing, in turn on an emulated cluster, and simulated on larger ones."""

from __future__ import annotations

from moesaic_lab.balance.claims import claims
from moesaic_lab.balance.config import BalanceBenchConfig, read_config
from moesaic_lab.balance.pictures import panels
from moesaic_lab.balance.rows import NOTES, all_rows, tables
from moesaic_lab.balance.run import BalanceCell, run
from moesaic_lab.balance.simulated import Forecast, simulate
from moesaic_lab.benchmark import Told, emulated

Both = tuple[list[BalanceCell], list[Forecast]]
"""What was measured, and what was simulated."""


def measure(config: BalanceBenchConfig, told: Told) -> Both:
    """Measure on one bed after the other, then simulate."""
    cells = run(config, told)
    if not config.simulates:
        return cells, []
    assert config.simulated is not None
    return cells, simulate(config.simulated, config.seed, told)


BENCHMARK = emulated(
    name="balance",
    description="Measure answers to skewed routing in turn on an emulated cluster, with virtual compute.",
    notes=NOTES, read_config=read_config, run=measure, needs_cluster=lambda config: bool(config.cases()),
    rows=lambda both: all_rows(*both),
    claims=lambda both: claims(*both), columns=lambda both: tables(*both), panels=lambda both: panels(*both),
    title="One MoE layer under skewed routing, virtual compute", panels_in_a_row=3,
)  # fmt: skip
