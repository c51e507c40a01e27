"""Fits host costs to the processor time of whole layers, and link costs to timed movements. Noisy times are refused.

Some host costs are then adjusted to the wall-clock time of whole layers, which processor time alone does not determine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from moesaic.errors import InputError
from moesaic.planner.fit import MAX_SPREAD
from moesaic.planner.profile import ClusterProfile, HostCosts
from moesaic.planner.profile_simulate import FEATURES, Demand, ProfileTiming, profiled_simulator
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
from moesaic.program.task import Program

HELD_OUT = 4
"""Every `HELD_OUT`-th measurement is held out, and the fit is checked on these."""
MAX_UNSURE = 0.2
"""Largest spread of repeats over the root of their number, as a share of their median, at which host times are accepted."""
MIN_EXPLAINED = 0.8
"""Share of the variation of host times that counts must explain. Ranks that share cores vary by a tenth by themselves."""
USUAL_ERROR = 0.1
"""Errors above this share count by less than their square, since other programs sometimes run on the machine."""
LONG = 3.0
"""Movements that take at least this multiple of the shortest one's time are limited by the link, not by the host."""


@dataclass(frozen=True)
class Sample:
    """Measurements of one layer shape under one plan."""

    features: np.ndarray
    """(features,) demands of the forward and backward pass on the host."""
    seconds: tuple[float, ...]
    """Processor time of one rank, by repeat."""

    @property
    def median(self) -> float:
        """Median of the repeats."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Interquartile range of the repeats over their median."""
        low, high = np.percentile(self.seconds, [25, 75])
        return float((high - low) / self.median)


@dataclass(frozen=True, kw_only=True)
class HostFit:
    """Fitted costs and their errors."""

    costs: HostCosts
    median_error: float
    """Median error on held-out samples, as a share."""
    worst_error: float
    spread: float
    """Median over the samples of the spread of their repeats."""
    r2: float
    """Share of the variation of log time that the fit explains, held-out samples included; robust to outliers."""


def fit_host(samples: Sequence[Sample], sharing: float) -> HostFit:
    """Fit the cost of each feature, at least 0.

    Each sample has weight 1 / time, so short layers count as much as long ones. Large errors count by their size rather
    than their square (soft L1), as outliers should.

    Args:
        samples: of many plans and several shapes.
        sharing: passed through to the costs.

    Raises:
        InputError: if repeats vary too much, samples are too few, or costs do not explain the times.
    """
    if len(samples) < 2 * len(FEATURES):
        raise InputError(
            f"host costs: {len(samples)} samples for {len(FEATURES)} costs: measure at least twice as many"
        )
    times = np.array([sample.median for sample in samples])
    spread = float(np.median([sample.spread for sample in samples]))
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise InputError("host costs: a time is missing, not finite or not above 0: measure again")
    uncertainty = spread / len(samples[0].seconds) ** 0.5
    if uncertainty > MAX_UNSURE:
        raise InputError(
            f"host costs: repeats vary by {spread:.0%} of their median, which is uncertain by {uncertainty:.0%}, above "
            f"{MAX_UNSURE:.0%}: the machine is busy; measure again with more --repeats and nothing else running"
        )
    relative_features = np.stack([sample.features for sample in samples]) / times[:, None]
    is_fitted = np.arange(len(samples)) % HELD_OUT != HELD_OUT - 1
    is_used = relative_features.max(axis=0) > 0  # a single rank sends no messages, for example; unused features cost 0
    scaled = relative_features[:, is_used] / relative_features[:, is_used].max(axis=0)
    fitted = least_squares(
        lambda each: scaled[is_fitted] @ each - 1, np.full(scaled.shape[1], 0.1), bounds=(0, np.inf), loss="soft_l1",
        f_scale=USUAL_ERROR,
    )  # fmt: skip
    costs = np.zeros(len(FEATURES))
    costs[is_used] = fitted.x / relative_features[:, is_used].max(axis=0)
    errors = np.abs(relative_features @ costs - 1)
    r2 = _explained(np.log(times), np.log(np.maximum(relative_features @ costs * times, 1e-300)))
    if r2 < MIN_EXPLAINED:
        raise InputError(
            f"host costs: R2={r2:.2f}, below {MIN_EXPLAINED}: counts of tasks, messages and bytes do not explain the times "
            f"(worst error {errors.max():.0%}): measure again with more --repeats and nothing else running"
        )
    return HostFit(
        costs=HostCosts(**dict(zip(FEATURES, costs.tolist())), sharing=sharing),
        median_error=float(np.median(errors[~is_fitted])),
        worst_error=float(errors[~is_fitted].max()),
        spread=spread,
        r2=r2,
    )


def _explained(measured: np.ndarray, fitted: np.ndarray) -> float:
    """Return the share of the variation that a fit explains, from medians of absolute deviations, which ignore outliers."""
    total = float(np.median(np.abs(measured - np.median(measured))))
    return 1 - (float(np.median(np.abs(measured - fitted))) / total) ** 2 if total > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """t = max(latency, bytes / rate - credit): the host limits short movements, the link limits long ones."""

    latency: float
    """Seconds of the shortest movement."""
    bytes_per_second: float
    """Rate, from the additional time of longer movements."""
    credit: float
    """Seconds that long movements take less than their bytes at this rate."""

    def seconds(self, num_bytes: float) -> float:
        """Return the predicted time."""
        return max(self.latency, num_bytes / self.bytes_per_second - self.credit)


def fit_link(num_bytes: Sequence[float], seconds: Sequence[Sequence[float]], what: str) -> tuple[LinkFit, float]:
    """Fit a movement's shortest time and its rate. Return the fit, and its error on the held-out size.

    The rate is the slope between the longest movement and the shortest movement that takes `LONG` times the latency. A
    line through short movements would have the wrong slope, since a shaped link passes the first kilobytes at once. The
    shortest repeat counts, since only other programs make the same bytes take longer. The second largest size is held
    out.

    Raises:
        InputError: for fewer than 4 sizes, repeats of the longest movement that vary too much, or times that do not
            grow with size.
    """
    if len(num_bytes) < 4 or len(num_bytes) != len(seconds):
        raise InputError(f"{what}: {len(num_bytes)} sizes and {len(seconds)} sets of repeats: measure at least 4 sizes")
    shortest = [float(np.min(repeats)) for repeats in seconds]
    if not all(np.isfinite(time) and time > 0 for time in shortest):
        raise InputError(f"{what}: a time is missing, not finite or not above 0: measure again")
    low, median, high = np.percentile(seconds[-1], [25, 50, 75])
    spread = float((high - low) / median)
    if spread > MAX_SPREAD:
        raise InputError(
            f"{what}: repeats of the largest size vary by {spread:.0%} of their median, above {MAX_SPREAD:.0%}: the machine is "
            "busy; measure again with more --repeats"
        )
    held_out = len(num_bytes) - 2
    fitted = [index for index in range(len(num_bytes) - 1) if index != held_out]
    long_indices = [index for index in fitted if shortest[index] > LONG * shortest[0]] or fitted[-1:]
    slope = (shortest[-1] - shortest[long_indices[0]]) / (num_bytes[-1] - num_bytes[long_indices[0]])
    if not slope > 0:
        raise InputError(
            f"{what}: {num_bytes[-1]:.0f} bytes take no longer than {num_bytes[long_indices[0]]:.0f}: measure again"
        )
    credit = max(num_bytes[-1] * slope - shortest[-1], 0.0)
    link = LinkFit(latency=shortest[0], bytes_per_second=1 / slope, credit=credit)
    return link, abs(link.seconds(num_bytes[held_out]) / shortest[held_out] - 1)


@dataclass(frozen=True, kw_only=True)
class TimedLayer:
    """A layer and the measured wall-clock time of its forward and backward pass."""

    forward: Program
    backward: Program
    grid: Grid
    workload: Workload
    seconds: float
    virtual_flops: float
    """As in `ProfileTiming`."""


OF_HOST = ("layer", "wait", "transport_byte")
"""Costs that are adjusted to wall-clock times, since their processor time does not say how long they delay a rank. The
rank sleeps and is woken, other threads work for it, and the kernel moves its bytes while it does something else."""
LEAST = 1e-6
"""Starting value in seconds for a cost that was fitted to 0; a cost per byte starts at LEAST / 1e3."""
MOST_STEPS = 20
"""Largest number of steps of the search for costs; each step varies every cost."""
TRUST = 0.03
"""A cost that is e times its processor time weighs as much as a layer whose prediction is off by this share."""


def calibrate(profile: ClusterProfile, layers: Sequence[TimedLayer]) -> tuple[ClusterProfile, float]:
    """Adjust host costs so that predicted layer times match the measured ones. Return the profile and its median error.

    Every fourth layer is held out. If these are not predicted better than before, the profile is returned unchanged.

    Args:
        profile: fitted to processor time and movements.
        layers: of many plans, none of them with products on the host.

    Returns:
        the profile, and the median error on held-out layers, as a share.
    """
    is_held_out = np.arange(len(layers)) % HELD_OUT == HELD_OUT - 1
    host, start = profile.host, []
    for name in OF_HOST:
        start.append(max(getattr(host, name), LEAST / 1e3 if name.endswith("byte") else LEAST))

    def with_costs(logs: np.ndarray) -> ClusterProfile:
        return replace(profile, host=replace(host, **dict(zip(OF_HOST, (np.exp(logs) * start).tolist()))))

    demands = [_demands(profile, layer) for layer in layers]
    seconds = np.array([layer.seconds for layer in layers])

    def errors_of(candidate: ClusterProfile, selected: np.ndarray) -> np.ndarray:
        predicted = [_seconds(candidate, layers[index], demands[index]) for index in np.flatnonzero(selected).tolist()]
        return np.array(predicted) / seconds[selected] - 1

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([errors_of(with_costs(logs), ~is_held_out), TRUST * logs])

    before = float(np.median(np.abs(errors_of(profile, is_held_out)))) if is_held_out.any() else 0.0
    if is_held_out.sum() == 0 or (~is_held_out).sum() < 2 * len(start):
        return profile, before
    fitted = least_squares(
        errors, np.zeros(len(start)), loss="soft_l1", f_scale=2 * USUAL_ERROR, diff_step=2e-2, max_nfev=MOST_STEPS,
    )  # fmt: skip
    after = float(np.median(np.abs(errors_of(with_costs(fitted.x), is_held_out))))
    return (with_costs(fitted.x), after) if after < before else (profile, before)


def _demands(profile: ClusterProfile, layer: TimedLayer) -> list[Demand]:
    """Return the demands of both passes on the machine. No fitted cost changes them, so they are computed once for all
    trials."""
    simulator = profiled_simulator(profile, virtual_flops=layer.virtual_flops)
    timing = ProfileTiming(profile, simulator.cluster, layer.virtual_flops)
    passes = [
        (program, simulator.volumes(program, layer.workload, layer.grid)) for program in (layer.forward, layer.backward)
    ]
    return [timing.demand_of(program, volumes, layer.workload.dtype) for program, volumes in passes]


def _seconds(profile: ClusterProfile, layer: TimedLayer, demands: list[Demand]) -> float:
    timing = ProfileTiming(profile, profile.to_cluster(), layer.virtual_flops)
    return timing.around_seconds + sum(float(events.ends.max(initial=0.0)) for events in timing.laid_out(demands))
