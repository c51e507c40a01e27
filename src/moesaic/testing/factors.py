"""Finds the factor by which a quantity is wrong, and explains it as a product of mesh sizes.

A wrong factor is the commonest silent bug of parallel training: no shape is wrong, no error is raised, and an optimizer such
as AdamW hides it. One mesh rarely identifies the axis, since several axes have the same size. Therefore the factor is measured
on further meshes, chosen so that the remaining explanations predict different factors, until one explanation remains.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import TypeVar

import torch
from torch import Tensor

from moesaic.program.grid import Grid

S = TypeVar("S")
CallSizes = Mapping[str, int]
"""The sizes of which a factor may be a product, by name: the axes of the mesh, top_k, chunks."""
Factors = Mapping[str, float | None]
"""Quantity -> the factor by which all its values are off: 1 if it is right, None if no single factor fits."""

AXES = ("ep", "etp", "tp", "dp", "edp")
MOST_RUNS = 8
"""Largest number of further meshes on which a factor is measured."""
MOST_NAMED = 3
"""Largest number of explanations that are reported if no mesh distinguishes them."""
MISSING = "missing altogether"
CLOSE = 1e-4
"""Largest relative difference between two factors that count as equal."""


@dataclass(frozen=True)
class Product:
    """A product of sizes over a product of sizes, or a number that depends on none."""

    over: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    number: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sizes in this product."""
        return (*self.over, *self.under)

    def value(self, sizes: CallSizes) -> float:
        """Return the product for given sizes."""
        return self.number * math.prod(sizes[n] for n in self.over) / math.prod(sizes[n] for n in self.under)

    def __str__(self) -> str:
        if not self.names:
            return f"{self.number:.4g}"
        return ("*".join(self.over) or "1") + "".join(f"/{name}" for name in self.under)


@dataclass(frozen=True)
class Cause:
    """A wrong factor and its explanations."""

    factor: float
    """The factor on the first mesh."""
    sizes: CallSizes
    """The sizes of the first mesh."""
    products: tuple[Product, ...]
    """The simplest explanation, then others that no mesh distinguished from it; empty if there is none."""
    runs: int
    """Number of meshes on which the factor was measured."""

    def __str__(self) -> str:
        return self.times + (f": {self.reason}" if self.reason else "")

    @property
    def times(self) -> str:
        """Text for the size of the error, to follow "they are"."""
        if abs(self.factor) < CLOSE:
            return MISSING
        if self.factor < 0:
            return f"{self.factor:.4g} times what they should be, which is the wrong sign"
        large = self.factor > 1
        return f"{self.factor if large else 1 / self.factor:.2f} times too {'large' if large else 'small'}"

    @property
    def reason(self) -> str:
        """Text for the explanation; empty if the factor is zero or negative and needs none."""
        if self.factor < CLOSE:
            return ""
        if not self.products:
            return "is not a product of the sizes of the mesh"
        return "looks like " + ", or like ".join(map(self._reason, self.products))

    def _reason(self, product: Product) -> str:
        if not product.names:
            return f"the same factor on every mesh ({self.runs} tried), so no axis"
        parts = [f"a missing division by {self._with_sizes(product.over)}"] if product.over else []
        parts += [f"one division too many by {self._with_sizes(product.under)}"] if product.under else []
        return " and ".join(parts)

    def _with_sizes(self, names: Sequence[str]) -> str:
        return " * ".join(f"{name} (={self.sizes[name]})" for name in names)


def axes_of(grid: Grid) -> dict[str, int]:
    """Return the sizes of a mesh's axes, by name."""
    return {name: int(getattr(grid, name)) for name in AXES}


def fit(actual: Tensor, parts: Sequence[Tensor], tolerance: float) -> list[float] | None:
    """Return the factors f with `actual` = sum of f[i] * parts[i]; None if no factors fit, or they are not unique.

    Args:
        actual: (n,) the measured values.
        parts: (n,) each; the values should be their plain sum.
        tolerance: largest residual that is accepted, relative to the largest value.
    """
    columns = torch.stack([part.double() for part in parts], 1)
    lengths = columns.norm(dim=0)
    if not len(actual) or float(lengths.min()) == 0 or not bool(actual.isfinite().all()):
        return None
    scaled = columns / lengths
    if int(torch.linalg.matrix_rank(scaled, rtol=1e-9)) < len(parts):
        return None
    factors = torch.linalg.lstsq(scaled, actual.double().unsqueeze(1)).solution.squeeze(1) / lengths
    residual = float((columns @ factors - actual.double()).abs().max())
    largest = max(float(columns.sum(1).abs().max()), float(actual.abs().max()))
    return factors.tolist() if residual <= tolerance * largest else None


def is_right(factor: float | None) -> bool:
    """Whether a factor is 1."""
    return factor is not None and abs(factor - 1) <= CLOSE


def products(names: Sequence[str]) -> Iterator[Product]:
    """Yield products of up to three sizes, simplest first, without those that equal an earlier one on every mesh."""
    seen = set()
    for count in (1, 2, 3):
        for num_under in range(count + 1):
            for over in combinations_with_replacement(names, count - num_under):
                for under in combinations_with_replacement(names, num_under):
                    key = _on_every_mesh(over, under)
                    if not set(over) & set(under) and key not in seen:
                        seen.add(key)
                        yield Product(over, under)


def _on_every_mesh(over: Sequence[str], under: Sequence[str]) -> frozenset[tuple[str, int]]:
    """Return the power of each size in a product, with dp replaced by edp * ep * etp / tp."""
    powers = Counter(over)
    powers.subtract(under)
    of_dp = powers.pop("dp", 0)
    for name, sign in (("edp", 1), ("ep", 1), ("etp", 1), ("tp", -1)):
        powers[name] += sign * of_dp
    return frozenset((name, power) for name, power in powers.items() if power)


def explain(
    first: S, others: Sequence[S], sizes_of: Callable[[S], CallSizes], measure: Callable[[S], Factors]
) -> tuple[Factors, dict[str, Cause]]:
    """Explain the wrong factors of a setting. Return all its factors, and a cause for each factor that is not 1.

    Args:
        first: a setting, such as a mesh, on which something is wrong.
        others: further settings on which the factors may be measured.
        sizes_of: returns a setting's sizes, with the same names for every setting.
        measure: runs a setting and returns its factors. Settings on which it raises are skipped, except the first.
    """
    factors, runs, remaining = measure(first), 1, list(others)
    sizes = sizes_of(first)
    wrong = {what: factor for what, factor in factors.items() if factor is not None and not is_right(factor)}
    candidates_of = {what: _candidates(factor, sizes) for what, factor in wrong.items()}
    while remaining and runs <= MOST_RUNS:
        setting = max(remaining, key=lambda other: _num_distinguished(candidates_of, sizes_of(other)))
        remaining.remove(setting)
        if runs > 1 and not _num_distinguished(candidates_of, sizes_of(setting)):
            break
        try:
            measured = measure(setting)
        except Exception:  # a layer need not fit every mesh
            continue
        runs += 1
        for what, candidates in candidates_of.items():
            if what in measured:
                candidates_of[what] = _agreeing(candidates, measured[what], sizes_of(setting))
    causes = {}
    for what, candidates in candidates_of.items():
        explanations = [c for c in candidates if runs > 1 or c.names]  # constants need two runs
        simplest = [c for c in explanations if len(c.names) <= max(len(explanations[0].names), 1)]
        causes[what] = Cause(wrong[what], sizes, tuple(simplest[:MOST_NAMED]), runs)
    return factors, causes


def _candidates(factor: float, sizes: CallSizes) -> list[Product]:
    """Return the products that equal a factor on one setting, simplest first.

    If the factor is a whole number or the inverse of one, that constant comes after the single sizes.
    """
    if factor < CLOSE:
        return []
    matching = [product for product in products(list(sizes)) if _same(product.value(sizes), factor)]
    single = [product for product in matching if len(product.names) == 1]
    ratio = factor if factor > 1 else 1 / factor
    constant = [Product(number=factor)] if abs(ratio - round(ratio)) <= CLOSE else []
    return [*single, *constant, *matching[len(single) :]]


def _num_distinguished(candidates_of: Mapping[str, Sequence[Product]], sizes: CallSizes) -> int:
    """Return how many candidates predict another factor on a setting than the simplest candidate of the same quantity."""
    return sum(not _agree(candidates[0], c, sizes) for candidates in candidates_of.values() for c in candidates[1:])


def _agreeing(candidates: Sequence[Product], factor: float | None, sizes: CallSizes) -> list[Product]:
    return [c for c in candidates if factor is not None and _same(c.value(sizes), factor)]


def _agree(first: Product, second: Product, sizes: CallSizes) -> bool:
    return _same(first.value(sizes), second.value(sizes))


def _same(first: float, second: float) -> bool:
    return abs(first - second) <= CLOSE * max(abs(first), abs(second))
