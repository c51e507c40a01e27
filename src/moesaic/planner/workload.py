"""`Workload`: the sizes of an MoE layer and its tokens; and seeded routing counts, even or skewed,
to try plans on.

Routing is random in every real run, and a plan that is best under even counts may not be best under
skewed ones. Counts say how many copies each data-parallel group sends to each expert. Per-sample
counts also say which sample uses which expert, which sample placement (NetMoE) exploits.

A copy is a token at one of its experts. The MaxVio of loads is the largest load over the mean load,
minus 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError

import numpy as np

from moesaic.errors import InputError
from moesaic.files import read_text
from moesaic.planner.checks import check_above_zero, check_not_negative
from moesaic.planner.cluster import ELEMENT_BYTES, Dtype
from moesaic.traces.arrays import read_array


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One MoE layer and its tokens."""

    tokens: int
    """Tokens per data-parallel group."""
    num_experts: int
    """Experts of the layer."""
    top_k: int
    """Experts per token."""
    dim: int
    """Width of a token."""
    hidden: int
    """Inner width of one expert."""
    matrices: int = 3
    """Matrices per expert: 3 for SwiGLU, 2 for plain experts."""
    dtype: Dtype = "bf16"
    """Dtype of activations, weights and products."""
    products: Dtype | None = None
    """Dtype of products if their inputs are cast to narrower numbers; None: `dtype`."""
    frozen_bytes: float = 0.0
    """Bytes of a weight of experts that are not trained, its share of scales included; 0 if they
    are trained."""
    adapters: bool = False
    """Whether experts that are not trained have adapters of low rank."""
    capacity_factor: float = 1.0
    """Rows per expert over the mean load. All of them are sent and computed whether filled or not,
    as padding layers do."""
    groups: int = 1
    """Number of groups of consecutive experts; a token's experts are in `top_groups` of them."""
    top_groups: int = 1
    """Number of groups that contain a token's experts."""
    visits: tuple[tuple[int, float], ...] = ()
    """Known visits as (n, mean): the mean number of n nodes, or n ep ranks, on which a token has an
    expert, a token counted once per chunk. For other n the mean is estimated."""

    def __post_init__(self) -> None:
        sizes = (
            "tokens",
            "num_experts",
            "top_k",
            "dim",
            "hidden",
            "matrices",
            "groups",
            "top_groups",
        )
        for name in sizes:
            if not 1 <= getattr(self, name) < 2**31:
                raise InputError(
                    f"workload.{name}={getattr(self, name)}: must be at least 1, and below 2^31"
                )
        if self.top_k > self.num_experts:
            raise InputError(
                f"workload.top_k={self.top_k}: choose at most num_experts={self.num_experts}"
            )
        if (
            self.num_experts % self.groups
            or self.top_groups > self.groups
            or self.top_k > self.reachable
        ):
            raise InputError(
                f"workload.groups={self.groups}, top_groups={self.top_groups}: groups must divide "
                f"num_experts={self.num_experts}, and top_groups of them hold top_k={self.top_k} "
                "experts"
            )
        if self.dtype not in ELEMENT_BYTES:
            raise InputError(
                f"workload.dtype={self.dtype!r}: choose one of {', '.join(ELEMENT_BYTES)}"
            )
        if self.products not in (None, *ELEMENT_BYTES):
            raise InputError(
                f"workload.products={self.products!r}: choose one of {', '.join(ELEMENT_BYTES)}"
            )
        check_above_zero("workload.capacity_factor", self.capacity_factor)

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation or a weight."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight of an expert."""
        return self.frozen_bytes or self.element_bytes

    @property
    def backward_products(self) -> int:
        """Products of backward for each one of forward: for the rows' gradient, and the weights' if
        they are trained."""
        return 1 if self.frozen_bytes else 2

    @property
    def reachable(self) -> int:
        """Experts in the groups that a token uses."""
        return self.num_experts // self.groups * self.top_groups

    @property
    def copies(self) -> float:
        """Copies, padding included, that a data-parallel group sends to its experts."""
        return self.tokens * self.top_k * self.capacity_factor


def uniform_counts(groups: int, workload: Workload) -> np.ndarray:
    """Return even counts, (groups, num_experts) int64; a remainder goes to the first experts."""
    shares = np.full((groups, workload.num_experts), 1 / workload.num_experts)
    return _rounded(shares, workload)


def largest_max_vio(ep: int, workload: Workload) -> float:
    """Return the largest MaxVio over ranks: all copies go to one ep rank, or one copy of each token
    to each of its experts."""
    return min(ep, workload.num_experts / workload.top_k) - 1


def skewed_counts(groups: int, workload: Workload, *, ep: int, max_vio: float) -> np.ndarray:
    """Return counts in which the experts of the first ep rank get 1 + `max_vio` times their share,
    evenly, and the others the rest, evenly; equal in all groups.

    Args:
        groups: data-parallel groups.
        workload: of each group.
        ep: number of ep ranks, which have consecutive experts.
        max_vio: at most `largest_max_vio`.
    """
    shares = np.full(workload.num_experts, 1 + max_vio) / workload.num_experts
    num_hot = workload.num_experts // ep
    num_others = workload.num_experts - num_hot
    # with one ep rank there are no others, and nothing is assigned
    shares[num_hot:] = (1 - shares[:num_hot].sum()) / max(num_others, 1)
    return _rounded(np.tile(shares, (groups, 1)), workload)


def zipf_counts(groups: int, workload: Workload, *, exponent: float, seed: int) -> np.ndarray:
    """Return counts in which the i-th busiest expert's share is proportional to 1 / i^exponent,
    equal in all groups.

    Args:
        groups: data-parallel groups.
        workload: of each group.
        exponent: 0 is even; 1 gives the busiest of 16 experts 4.7 times the mean.
        seed: for the order of the experts.
    """
    check_not_negative("exponent", exponent)
    weights = 1.0 / np.arange(1, workload.num_experts + 1) ** exponent
    order = np.random.default_rng(seed).permutation(workload.num_experts)
    shares = (weights / weights.sum())[order]
    return _rounded(np.tile(shares, (groups, 1)), workload)


def dirichlet_counts(
    groups: int, workload: Workload, *, concentration: float, seed: int
) -> np.ndarray:
    """Return counts whose shares are drawn from a Dirichlet distribution for each group; their mean
    over groups is even.

    Args:
        groups: data-parallel groups, or samples of `workload.tokens` tokens, each of which prefers
            its own experts (NetMoE).
        workload: of each group.
        concentration: per expert. Large values are even, 1 is uniform over all shares, small values
            leave each group a few experts.
        seed: for the draw.
    """
    check_above_zero("concentration", concentration)
    concentrations = np.full(workload.num_experts, concentration)
    shares = np.random.default_rng(seed).dirichlet(concentrations, size=groups)
    return _rounded(shares, workload)


def read_counts(path: Path) -> np.ndarray:
    """Read recorded counts, (groups, num_experts) int64, from an .npy or .csv file.

    Raises:
        InputError: if the file is missing, of another type, or contains anything but whole numbers
            of at least 0.
    """
    if path.suffix not in (".npy", ".csv"):
        raise InputError(f"counts {path}: unknown kind of file, use .npy or .csv")
    try:
        if path.suffix == ".npy":
            table = read_array(path)
        else:
            table = np.loadtxt(read_text(path).splitlines(), delimiter=",", ndmin=2)
    except OSError as error:
        raise InputError(f"counts {path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, EOFError, TokenError, MemoryError, OverflowError) as error:
        raise InputError(
            f"counts {path}: does not parse ({' '.join(str(error).split())})"
        ) from error
    if not isinstance(table, np.ndarray) or table.dtype.kind not in "iuf":
        raise InputError(f"counts {path}: must be an array of numbers")
    are_counts = np.isfinite(table) & (table >= 0) & (table == np.floor(table))
    if table.ndim != 2 or not are_counts.all():
        raise InputError(
            f"counts {path}: must be a table of whole numbers of at least 0: a row per group, "
            "a column per expert"
        )
    return table.astype(np.int64)


def imbalance(counts: np.ndarray) -> float:
    """Return the load of the busiest expert over the mean load."""
    loads = counts.sum(axis=0)
    return float(loads.max() / loads.mean())


def _rounded(shares: np.ndarray, workload: Workload) -> np.ndarray:
    """Return whole counts near shares of the copies; each row sums to all copies (largest
    remainders)."""
    total = round(workload.copies)
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    for row_counts, row_exact in zip(counts, exact):  # rows of `counts`, which change
        missing = total - int(row_counts.sum())
        by_remainder = np.argsort(row_counts - row_exact, kind="stable")  # largest first
        row_counts[by_remainder[:missing]] += 1
    return counts
