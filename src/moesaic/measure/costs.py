"""Fits the costs of the thread that issues tasks to the times of whole layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from moesaic.measure.host import Calibration
from moesaic.planner.cluster import ClusterSpec, Host
from moesaic.planner.simulate import Simulator
from moesaic.planner.timing import ProgramTiming

HELD_OUT = 4
"""Every `HELD_OUT`-th layer is held out, and the fit is checked on these."""
USUAL_ERROR = 0.1
"""Errors above this share count by less than their square, since other programs sometimes run on the machine."""
START = (1000.0, 50.0, 50.0)
"""Microseconds per layer, task and message at which the search for them starts."""
MOST_STEPS = 8
"""Largest number of steps of the search; each step varies every cost."""
NO_TIME = 1e30
"""Operations per second of experts that compute nothing."""


def fit_host(cluster: ClusterSpec, layers: Sequence[tuple[Calibration, float]]) -> tuple[ClusterSpec, np.ndarray]:
    """Return a cluster whose host's costs explain the times of layers best, and the errors on held-out layers.

    Args:
        cluster: gives the links and the rate of copies.
        layers: layers whose experts compute nothing, each with its measured seconds.

    Returns:
        the cluster, and (held-out layers,) errors, as shares of the measured times.
    """
    free = replace(cluster, device=cluster.device.with_flops(NO_TIME))
    simulator, seconds = Simulator(free), np.array([measured for _, measured in layers])
    passes = [
        [(each, simulator.volumes(each, calibration.routed, calibration.compiled.grid)) for each in (there, back)]
        for calibration, _ in layers
        for there, back in ((calibration.compiled.forward, calibration.compiled.backward),)
    ]
    held_out = np.arange(len(layers)) % HELD_OUT == HELD_OUT - 1

    def host(times: np.ndarray) -> Host:
        layer, task, message = (times * START).tolist()
        return replace(cluster.host, layer_us=layer, task_us=task, message_us=message)

    def errors(times: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        tried = host(times)
        timing, around = ProgramTiming(replace(free, host=tried)), tried.layer_us * 1e-6
        predicted = [
            around
            + sum(timing.run(program, volumes, volumes.layer.dtype).seconds for program, volumes in passes[number])
            for number in np.flatnonzero(chosen).tolist()
        ]
        return np.array(predicted) / seconds[chosen] - 1

    fitted = least_squares(
        errors, np.ones(len(START)), bounds=(0, np.inf), loss="soft_l1", f_scale=USUAL_ERROR, diff_step=2e-2,
        max_nfev=MOST_STEPS, args=(~held_out,),
    )  # fmt: skip
    return replace(cluster, host=host(fitted.x)), errors(fitted.x, held_out)
