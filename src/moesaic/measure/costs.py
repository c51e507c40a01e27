"""Fits what only whole layers show: the costs of the thread that issues tasks, and of computing
beside messages.

The simulator predicts the time of a layer from a cluster's numbers. The search varies the host's
costs per layer, task and message, and then the contention (how much products and messages slow each
other down), until predictions and measured times agree best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares, minimize_scalar

from moesaic.measure.host import Calibration
from moesaic.planner.cluster import ClusterSpec, Host
from moesaic.planner.movement import AbstractVolumes
from moesaic.planner.simulator import Simulator
from moesaic.planner.task_times import timed
from moesaic.program.task import Program

HELD_OUT = 4
"""Every `HELD_OUT`-th layer is held out, and the fit is checked on these."""
USUAL_ERROR = 0.1
"""Errors above this share count by less than their square, since other programs sometimes run on
the machine."""
START = (1000.0, 50.0, 50.0)
"""Microseconds per layer, task and message at which the search for them starts."""
MOST_STEPS = 8
"""Largest number of steps of the search; each step varies every cost."""
MOST_CONTENTION = 2.0
"""Largest contention that is tried: products and messages that overlap take three times as long."""
NO_TIME = 1e30
"""Operations per second of experts that compute nothing."""


def fit_layers(
    cluster: ClusterSpec, layers: Sequence[tuple[Calibration, float]]
) -> tuple[ClusterSpec, np.ndarray]:
    """Return a cluster whose host's costs and contention explain the times of layers best, and
    errors on held-out layers.

    Args:
        cluster: gives the links and the rates of products and copies.
        layers: layers, each with its measured seconds. Those whose experts compute nothing show the
            host's costs, the others the contention.

    Returns:
        the cluster, and (held-out layers,) errors of layers that compute nothing, as shares of the
        measured times.
    """
    idle_layers = [(layer, seconds) for layer, seconds in layers if not layer.computes]
    computing_layers = [(layer, seconds) for layer, seconds in layers if layer.computes]
    idle = _Timed(cluster, idle_layers)
    computing = _Timed(cluster, computing_layers)
    is_held_out = np.arange(len(idle.seconds)) % HELD_OUT == HELD_OUT - 1
    without_products = replace(cluster, device=cluster.device.with_flops(NO_TIME))

    def host(multiples: np.ndarray) -> Host:
        """Return the host whose costs are these multiples of `START`."""
        layer, task, message = (multiples * START).tolist()
        return replace(cluster.host, layer_us=layer, task_us=task, message_us=message)

    def errors(multiples: np.ndarray, is_chosen: np.ndarray) -> np.ndarray:
        """Return the errors of the chosen layers that compute nothing, with these costs."""
        return idle.errors(replace(without_products, host=host(multiples)), is_chosen)

    fitted = least_squares(
        errors,
        np.ones(len(START)),
        bounds=(0, np.inf),
        loss="soft_l1",
        f_scale=USUAL_ERROR,
        diff_step=2e-2,  # share of each cost by which it is varied for the derivatives
        max_nfev=MOST_STEPS,
        args=(~is_held_out,),
    )
    with_host = replace(cluster, host=host(fitted.x))

    def contended(contention: float) -> ClusterSpec:
        """Return the cluster with this contention."""
        return replace(with_host, device=replace(with_host.device, contention=contention))

    def error(contention: float) -> float:
        """Return the sum of the sizes of the errors of the layers that compute."""
        return float(np.abs(computing.errors(contended(contention))).sum())

    best = minimize_scalar(
        error, bounds=(0.0, MOST_CONTENTION), method="bounded", options={"xatol": 0.02}
    )
    found = with_host
    # The search does not try 0 itself: a rank without messages has no contention.
    if best.fun < error(0.0):
        found = contended(float(best.x))
    return found, errors(fitted.x, is_held_out)


class _Timed:
    """Layers with their measured seconds, and their messages, which do not depend on what is
    fitted."""

    def __init__(self, cluster: ClusterSpec, layers: Sequence[tuple[Calibration, float]]) -> None:
        simulator = Simulator(cluster)
        self.seconds = np.array([measured for _, measured in layers])
        """(layers,) measured."""
        self._passes: list[list[tuple[Program, AbstractVolumes]]] = []
        """Of each layer, the forward and the backward program with what they send and compute."""
        for calibration, _ in layers:
            compiled = calibration.compiled
            self._passes.append(
                [
                    (program, simulator.volumes(program, calibration.routed, compiled.grid))
                    for program in (compiled.forward, compiled.backward)
                ]
            )

    def errors(self, cluster: ClusterSpec, is_chosen: np.ndarray | None = None) -> np.ndarray:
        """Return the errors of the times that a cluster predicts, as shares, of all layers or of
        the chosen ones.

        Args:
            is_chosen: (layers,) bool; None for all.
        """
        if is_chosen is None:
            is_chosen = np.ones(len(self.seconds), dtype=bool)
        predicted = []
        for number in np.flatnonzero(is_chosen).tolist():
            seconds = [
                timed(cluster, program, volumes, volumes.layer.dtype).seconds
                for program, volumes in self._passes[number]
            ]
            predicted.append(sum(seconds))
        with_layer_cost = np.array(predicted) + cluster.host.layer_us * 1e-6
        return with_layer_cost / self.seconds[is_chosen] - 1
