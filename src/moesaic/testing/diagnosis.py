"""Diagnoses a failing case: which gradients are off by which factor, and which axis of the mesh explains the factor.

Router and input gradients are sums of the gradients of the outputs and of every auxiliary loss. A factor is fitted for each of
these parts. The case also runs on other meshes, to distinguish axes of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.program.compile import compile_plan
from moesaic.testing.cases import Case, fitting_top_k, looks_across_tokens
from moesaic.testing.equivalence import Errors, Pair, Ran, failures, pairs_of, relative
from moesaic.testing.expected import Parts, expect_parts
from moesaic.testing.factors import MISSING, CallSizes, Cause, Factors, axes_of, explain, fit, is_right

NAMES = {
    "output": "outputs",
    "evaluation": "outputs in evaluation",
    "input gradient": "input gradients",
    "router gradient": "router gradients",
    "expert gradient": "expert gradients",
    "shared gradient": "shared expert gradients",
    "auxiliary loss": "auxiliary loss values",
    "counts": "counts of copies",
    "gradient norm": "squares of the gradient norm",
    "router state": "router states",
    "tensor group agrees": "values of the ranks of a tensor group",
}
"""Quantity -> its name in the plural, for findings."""
LOSSES = "the auxiliary losses"
NO_FACTOR = "wrong by no single factor: values are missing, mixed up or of another shape"
ELSEWHERE = "wrong by no single factor: they are the right values in other places"
OTHER_SIZES = (
    (1, 1, 1),
    (2, 2, 1),
    (1, 2, 2),
    (2, 1, 2),
    (1, 3, 1),
    (3, 2, 1),
    (2, 3, 1),
    (4, 2, 1),
    (1, 4, 1),
    (1, 2, 1),
)
"""(tp, ep, etp) of further meshes on which a case is run, besides those made from its own sizes."""


@dataclass(frozen=True)
class Finding:
    """One quantity that is wrong with a case, and why."""

    what: str
    """Name of the quantity in the plural, such as "expert gradients"."""
    cause: Cause | None
    """None if no single factor explains the error."""
    hint: str = NO_FACTOR
    """Description of the error if there is no cause."""

    @property
    def factor(self) -> str:
        """The factor as a product, such as "ep" or "1/dp"; empty if nothing explains it."""
        if self.cause is None:
            return ""
        return str(self.cause.products[0]) if self.cause.products else "0" if self.cause.times == MISSING else ""

    def __str__(self) -> str:
        return f"{self.what} are {self.hint if self.cause is None else self.cause}"


@dataclass(frozen=True)
class Diagnosis:
    """The errors of a case and their explanations."""

    wrong: Errors
    """The errors that are too large; empty for a case that passes."""
    findings: tuple[Finding, ...]


def diagnose(case: Case, run: Callable[[Case], Ran], others: Sequence[Case] | None = None) -> Diagnosis:
    """Run a case, and similar cases on other meshes, and explain its errors.

    Args:
        case: the failing case.
        run: runs the case or a similar one, with the same bug.
        others: similar cases on other meshes; None for `relatives(case)`.
    """
    runs: list[Ran] = []

    def measure(other: Case) -> Factors:
        runs.append(run(other))
        return factors_of(runs[-1])

    factors, causes = explain(case, list(relatives(case)) if others is None else others, sizes_of, measure)
    wrong = failures(case, runs[0].errors)
    findings = (finding for quantity in wrong for finding in _findings(quantity, factors, causes, runs[0]))
    return Diagnosis(wrong, tuple(findings))


def sizes_of(case: Case) -> CallSizes:
    """Return the sizes of a case of which a wrong factor may be a product, by name."""
    return axes_of(case.grid) | {
        "top_k": case.top_k,
        "num_experts": case.num_experts,
        "chunks": case.plan.chunks,
        "micro_batches": len(case.lengths),
    }


def factors_of(ran: Ran) -> dict[str, float | None]:
    """Return the factor of every quantity of a case, and of each part of which a quantity is the sum.

    Quantities whose expected values are all zero are left out, since they have no factor.
    """
    tolerance = max(ran.case.tolerance, 1e-9)
    pairs = _by_quantity(ran)
    factors: dict[str, float | None] = {}
    for quantity, of_quantity in pairs.items():
        name = NAMES[quantity]
        _store_factors(factors, [name], _joined(of_quantity), tolerance)
        by_name: dict[str, list[Pair]] = {}
        for pair in of_quantity:
            by_name.setdefault(pair.name, []).append(pair)
        if quantity in ("expert gradient", "auxiliary loss", "counts"):
            for name_in_quantity, pairs_of_name in by_name.items():
                _store_factors(factors, [_part(quantity, name_in_quantity)], _joined(pairs_of_name), tolerance)
    if any(pairs.get(quantity) for quantity in ("router gradient", "input gradient")):
        parts = expect_parts(ran.case, ran.work)
        for quantity, sources in (("router gradient", _router_parts), ("input gradient", _input_parts)):
            if quantity in pairs:
                _split(factors, NAMES[quantity], pairs[quantity], sources(ran, parts), tolerance)
    factors |= _norm_factors(ran)
    return factors


def relatives(case: Case) -> Iterator[Case]:
    """Yield variants of a case with other meshes, and with other numbers of experts, choices, chunks and micro-batches."""
    tp, ep, etp = case.grid.tp, case.grid.ep, case.grid.etp
    own_sizes = ((tp, ep, etp), (1, ep, etp), (tp, 1, etp), (tp, ep, 1), (tp, 2 * ep, 1), (2 * tp, ep, etp))
    seen = {case}
    for sizes in dict.fromkeys((*own_sizes, *OTHER_SIZES)):
        for world in (4, 6, 8, 2, 3):
            other = _on_mesh(case, world, *sizes)
            if other is not None and other not in seen:
                seen.add(other)
                yield other
    others = [
        replace(case, top_k=case.top_k + (1 if case.top_k < case.num_experts else -1)),
        replace(case, num_experts=2 * case.num_experts),
        replace(case, lengths=case.lengths[:1] if len(case.lengths) > 1 else case.lengths * 2),
    ]
    if case.plan.chunks > 1:
        others.append(replace(case, plan=replace(case.plan, chunks=case.plan.chunks + 1)))
    yield from (other for other in others if _fits(other))


def _on_mesh(case: Case, world: int, tp: int, ep: int, etp: int) -> Case | None:
    """Return the case on another mesh, with the same numbers of nodes and of experts per rank; None if it does not fit."""
    nodes = case.grid.world // (case.grid.ranks_per_node or case.grid.world)
    if world % nodes:
        return None
    try:
        grid = replace(case.grid, world=world, tp=tp, ep=ep, etp=etp, etp_inner=1, ranks_per_node=world // nodes)
        other = replace(
            case,
            grid=grid,
            num_experts=max(case.num_experts // case.grid.ep, -(-case.top_k // ep)) * ep,
            lengths=tuple(tuple(row[i % len(row)] for i in range(grid.dp)) for row in case.lengths),
        )
        compile_plan(other.plan, grid)
    except InputError:
        return None
    return other if _fits(other) else None


def _fits(case: Case) -> bool:
    """Whether `draw_case` could draw this variant of a case that it drew."""
    grid = case.grid
    if looks_across_tokens(case.router) and (grid.dp > 1 or (case.plan.program.routes_slices and grid.tp > 1)):
        return False
    alone = grid.tp == 1 if case.placement != "none" else True
    modules = case.experts != "modules" or grid.etp == 1
    padded = not case.capacity.is_padded or all(length % grid.tp == 0 for row in case.lengths for length in row)
    moves = grid.ep > 1 or not case.experts_move
    return alone and modules and padded and moves and case.top_k in fitting_top_k(case.router, case.num_experts)


def _by_quantity(ran: Ran) -> dict[str, list[Pair]]:
    pairs: dict[str, list[Pair]] = {}
    for rank, result in enumerate(ran.results):
        for pair in pairs_of(ran.case, ran.work, ran.expected, rank, result):
            if pair.expected is None and pair.actual is None:
                continue
            pairs.setdefault(pair.quantity, []).append(pair)
    return pairs


def _joined(pairs: Sequence[Pair]) -> tuple[Tensor, list[Tensor]] | None:
    """Return all actual values (n,) and a list with all expected values (n,); None if a shape is wrong."""
    actual, expected = [], []
    for pair in pairs:
        like = pair.expected if pair.expected is not None else pair.actual
        assert like is not None
        values = [torch.zeros_like(like) if value is None else value for value in (pair.actual, pair.expected)]
        if values[0].shape != values[1].shape:
            return None
        actual.append(values[0].detach().double().flatten())
        expected.append(values[1].detach().double().flatten())
    return torch.cat(actual), [torch.cat(expected)]


def _store_factors(
    store: dict[str, float | None],
    names: Sequence[str],
    values: tuple[Tensor, list[Tensor]] | None,
    tolerance: float,
) -> bool:
    """Fit the factors of parts, store them in `store` under `names`, and return whether factors fit.

    Parts that are zero are left out, since their factors cannot be known.
    """
    if values is None:
        store.update(dict.fromkeys(names))
        return False
    actual, parts = values
    present = [(name, part) for name, part in zip(names, parts) if len(part) and float(part.abs().max()) > 0]
    factors = fit(actual, [part for _, part in present], tolerance) if present else None
    if factors is None and not present:
        return False
    known: list[float | None] = [None] * len(present) if factors is None else [*factors]
    store.update(zip((name for name, _ in present), known))
    return factors is not None


def _split(
    store: dict[str, float | None], name: str, pairs: Sequence[Pair], by_pair: list[dict[str, Tensor]], tolerance: float
) -> None:
    """Store in `store` the factors of a gradient's parts, with all auxiliary losses as one part or, if none fit, separately."""
    joined = _joined(pairs)
    if joined is None or sum(part.numel() for parts in by_pair for part in list(parts.values())[:1]) != len(joined[0]):
        return
    sources = list(dict.fromkeys(source for parts in by_pair for source in parts))
    columns = {source: torch.cat([parts[source].flatten() for parts in by_pair]) for source in sources}
    losses = [source for source in sources if not source.startswith("the ")]
    together = {source: columns[source] for source in sources if source not in losses}
    if losses:
        together[LOSSES] = torch.stack([columns[loss] for loss in losses]).sum(0)
    for parts in (together, columns):
        factors: dict[str, float | None] = {}
        names = [_of_source(name, source) for source in parts]
        if _store_factors(factors, names, (joined[0], list(parts.values())), tolerance):
            store.update(factors)
            return
    store.update(dict.fromkeys(names))


def _router_parts(ran: Ran, parts: Parts) -> list[dict[str, Tensor]]:
    """Return the parts of the router's gradients, in the order of `pairs_of`."""
    names = [name for name, whole in ran.expected.gradients.items() if name.startswith("router") and whole is not None]
    return [parts.router[name] for _ in ran.results for name in names]


def _input_parts(ran: Ran, parts: Parts) -> list[dict[str, Tensor]]:
    grid = ran.case.grid
    return [of_groups[grid.coordinate(rank, "dp")] for rank in range(grid.world) for of_groups in parts.inputs]


def _norm_factors(ran: Ran) -> dict[str, float | None]:
    """Return the factors of the squared norm, and of each of its two parts under the assumption that the other is right."""
    norm = ran.results[0].norm
    if norm is None:
        return {}
    gradients = ran.expected.gradients
    of_experts = sum(float(g.square().sum()) for n, g in gradients.items() if g is not None and n.startswith("experts"))
    name, excess = NAMES["gradient norm"], norm**2 - ran.expected.norm**2
    parts = {
        name: ran.expected.norm**2,
        _of_source(name, "the experts"): of_experts,
        _of_source(name, "all others"): ran.expected.norm**2 - of_experts,
    }
    return {part: (square + excess) / square for part, square in parts.items() if square > 0}


def _findings(quantity: str, factors: Factors, causes: dict[str, Cause], ran: Ran) -> list[Finding]:
    """Return the findings for a wrong quantity: one for the whole if it has a single factor, else one for each part."""
    whole = NAMES[quantity]
    if quantity == "gradient norm":  # take a part whose factor is explained
        candidates = [Finding(name, cause) for name, cause in causes.items() if name.startswith(whole)]
        return [finding for finding in candidates if finding.factor][:1] or [Finding(whole, None)]
    if factors.get(whole) is not None:
        return [Finding(whole, causes[whole])] if whole in causes else []
    pairs = [pair for pair in _by_quantity(ran).get(quantity, []) if _is_wrong(pair, ran.case.tolerance)]
    parts = [name for name in factors if name.startswith(f"{whole} ") and not is_right(factors[name])]
    if quantity in ("expert gradient", "auxiliary loss", "counts"):
        parts = list(dict.fromkeys(_part(quantity, pair.name) for pair in pairs))
    if parts and all(factors.get(name) is not None for name in parts):
        return [Finding(name, causes[name]) for name in parts if name in causes]
    return [Finding(whole, None, ELSEWHERE if _are_elsewhere(pairs) else NO_FACTOR)]


def _part(quantity: str, name: str) -> str:
    return {
        "expert gradient": f"gradients of {name}",
        "auxiliary loss": f"values of {name}",
        "counts": f"copies counted ({name})",
    }[quantity]


def _of_source(whole: str, source: str) -> str:
    return f"{whole} {'through' if source.startswith('the ') and 'input' in whole and source != LOSSES else 'from'} {source}"


def _is_wrong(pair: Pair, tolerance: float) -> bool:
    return not relative(pair.actual, pair.expected) <= tolerance


def _are_elsewhere(pairs: Sequence[Pair]) -> bool:
    """Whether the actual values are a permutation of the expected ones."""
    joined = _joined(pairs) if pairs else None
    if joined is None:
        return False
    actual, expected = joined[0].sort().values, joined[1][0].sort().values
    return bool(torch.allclose(actual, expected, rtol=1e-9, atol=1e-12))
