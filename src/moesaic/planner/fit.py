"""Fits start-up cost and rate to measured times, with relative weights, and refuses to fit noise.

An ordinary fit over sizes from a kilobyte to a hundred megabytes has an R2 above 0.99, but is wrong
by up to 78 % below 256 KiB (measured on the emulated cluster), because only the largest times
count. With weights 1 / time, all sizes count equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.errors import InputError
from moesaic.planner.checks import check_not_negative

MIN_R2 = 0.9
"""Share of the variation of log time that a reliable line explains, unless it is near all times."""
MAX_WORST = 0.25
"""Largest error of a line that is reliable whatever it explains: times that hardly depend on size
leave nothing to explain."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """t = alpha + beta * bytes."""

    alpha: float = 0.0
    """Start-up cost in seconds."""
    beta: float = 0.0
    """Seconds per byte."""
    r2: float = 1.0
    """Share of the variation of log time that the line explains."""
    spread: float = 0.0
    """Largest interquartile range of one size's repeats, as a share of their median."""
    worst: float = 0.0
    """Largest error of the line, as a share of the median measured."""
    residuals: tuple[float, ...] = ()
    """By ascending size, the measured median over the line's value, minus 1."""
    what: str = "fit"
    """Name of the measurement, for messages."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "spread", "worst"):
            check_not_negative(f"{self.what}: {name}", getattr(self, name))

    def seconds(self, num_bytes: float) -> float:
        """Return the predicted time."""
        return self.alpha + self.beta * num_bytes

    @property
    def trouble(self) -> str:
        """Reason not to rely on the line; "" if it is reliable."""
        if self.r2 >= MIN_R2 or self.worst <= MAX_WORST:
            return ""
        return (
            f"{self.what}: the times do not lie on a line over size, one of them is "
            f"{self.worst:.0%} off, and r2 is {self.r2:.2f}: at most {MAX_WORST:.0%} or at least "
            f"{MIN_R2}"
        )


def fit(
    num_bytes: Sequence[float], seconds: Sequence[Sequence[float]], *, what: str = "fit"
) -> Fit:
    """Fit start-up cost and rate, both at least 0, to the medians of repeats. Each size has weight
    1 / time.

    Args:
        num_bytes: sizes, at least three different ones.
        seconds: repeats for each size.
        what: name of the measurement, for messages.

    Raises:
        InputError: for too few sizes or invalid times.
    """
    from scipy.optimize import nnls  # slow to import, and readers of a profile need only the class

    sizes = np.asarray(num_bytes, dtype=np.float64)
    if len(sizes) != len(seconds) or len(np.unique(sizes)) < 3:
        raise InputError(
            f"{what}: {len(sizes)} sizes and {len(seconds)} sets of repeats: measure at least "
            "3 sizes"
        )
    times = [np.asarray(repeats, dtype=np.float64) for repeats in seconds]
    for repeats in times:
        if not len(repeats) or not np.isfinite(repeats).all() or (repeats <= 0).any():
            raise InputError(f"{what}: a time is missing, not finite or not above 0: measure again")
    medians = np.array([np.median(repeats) for repeats in times])
    quartiles = [np.percentile(repeats, [25, 75]) for repeats in times]
    spread = max(float((high - low) / median) for (low, high), median in zip(quartiles, medians))

    # least squares of (alpha + beta * size) / time = 1; sizes are scaled to at most 1 meanwhile
    scale = sizes.max()
    design = np.stack([1 / medians, sizes / scale / medians], axis=1)
    (alpha, scaled_beta), _ = nnls(design, np.ones(len(sizes)))
    beta = scaled_beta / scale
    predicted = alpha + beta * sizes
    errors = np.abs(predicted / medians - 1)

    log_times = np.log(medians)
    log_predicted = np.log(np.maximum(predicted, 1e-300))  # a line may start at 0
    variation = float(((log_times - log_times.mean()) ** 2).sum())
    residual = float(((log_times - log_predicted) ** 2).sum())
    # if all times are equal, there is no variation to explain
    r2 = 1.0 if residual < 1e-12 else 0.0
    if variation > 0:
        r2 = 1 - residual / variation
    by_size = np.argsort(sizes)
    return Fit(
        alpha=float(alpha),
        beta=float(beta),
        r2=r2,
        spread=spread,
        worst=float(errors.max()),
        residuals=tuple((medians / predicted - 1)[by_size].tolist()),
        what=what,
    )
