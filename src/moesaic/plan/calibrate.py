"""An arbiter whose model is held against simulations of the programs that it may run, made once.

A call cannot wait for a simulation; so each program is simulated beforehand under one skewed load, and what that says is
kept as a factor on the closed form.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.rates import machine_of
from moesaic.balance.replication.cost import CallLoad, ReplicationCosts
from moesaic.balance.selector.arbiter import Arbiter
from moesaic.balance.selector.options import ALONE
from moesaic.cost.call_sizes import copies_by_rank, sizes_of
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload, zipf_counts
from moesaic.plan.compile import Compiled

SKEW = 1.0
"""Exponent of the load under which programs are simulated: the busiest of 16 experts has 4.7 times the mean."""
BOUNDS = (0.5, 2.0)
"""Factors are held between these: a simulation of one load does not know better than that."""


def arbiter_for(simulator: Simulator, compiled: Compiled, layer: Workload, **settings: float) -> Arbiter:
    """Return an arbiter with a cluster's rates, its model held against simulations of the programs that it may run.

    Args:
        simulator: of the cluster.
        compiled: a plan with `replication="arbiter"`.
        layer: of the layers.
        settings: fields of `Arbiter`, such as `margin`.

    Raises:
        InputError: as `machine_of` does.
    """
    costs = ReplicationCosts(
        machine=machine_of(simulator.cluster, compiled.grid, layer),
        element_bytes=layer.element_bytes,
        matrices=layer.matrices,
    )
    grid, counts = compiled.grid, zipf_counts(compiled.grid.dp, layer, exponent=SKEW, seed=0)
    copies = copies_by_rank(compiled.forward, grid, counts)
    load = CallLoad(grid, copies, layer.num_experts, max(1, layer.hidden // grid.etp), layer.dim)
    arbitration = Arbiter(costs=costs, part_us=0.0, learn=False).start(
        compiled.plan, [each.plan for each in compiled.options]
    )
    factors = {}
    for option, replicated in arbitration.offers(load):
        program = compiled.options[option.choice.program]
        shapes, seconds = program.shapes(layer.num_experts), 0.0
        for each in (program.forward, program.backward):
            sizes = sizes_of(each, layer, program.grid, counts, replicated=replicated, shapes=shapes)
            seconds += simulator.run(each, layer, program.grid, sizes=sizes).seconds
        factors[option.name] = seconds / option.seconds
    held = {name: float(np.clip(each / factors[ALONE], *BOUNDS)) for name, each in factors.items()}
    return Arbiter(costs=costs, factors=held, **settings)  # type: ignore[arg-type]
