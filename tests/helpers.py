"""Helpers that several tests share: routers and layers by name, runs of a layer and of the
reference, comparisons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moesaic import MoE
from moesaic.balance.expert_placement import AbstractExpertPlacer, ExpertLoad
from moesaic.errors import InputError
from moesaic.kernels.top_k import top_k_indices
from moesaic.routing.router import AbstractRouter, token_choice
from moesaic.routing.routers import ROUTERS
from moesaic.routing.routing import Choice, Routing, Scores
from moesaic.testing.reference import Reference, in_float64, reference


class GivenOrders(AbstractExpertPlacer):
    """An expert placer that returns a given list of orders, one per decision; after the last,
    experts keep their homes."""

    def __init__(self, orders: list[np.ndarray]) -> None:
        self._orders = iter(orders)

    def decide(self, load: ExpertLoad) -> np.ndarray:
        return next(self._orders, load.order)


def from_file(path: str, source: str) -> Callable[..., Any]:
    """Return the expression `source`, a function, as if it had been read from a file."""
    function: Callable[..., Any] = eval(compile(source, path, "eval"))
    return function


def refused(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return the text of the `InputError` that a call raises, which must be one line."""
    with pytest.raises(InputError) as refusal:
        function(*arguments, **options)
    text = str(refusal.value)
    assert "\n" not in text
    return text


def thinned(cases: Iterable[Any], every: int, start: int = 0) -> list[Any]:
    """Return cases for `parametrize`: `make test` runs one in `every` of them, `make test-random`
    runs the others.

    Args:
        cases: the values of one parameter, or tuples with the values of several parameters.
        every: the distance between two cases that `make test` runs.
        start: the index of the first case that `make test` runs.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.random if (n - start) % every else (),
        )
        for n, case in enumerate(cases)
    ]


def seed_ranges(count: int, quick: int) -> list[Any]:
    """Return two ranges of seeds: `make test` runs the first `quick` seeds, `make test-random` the
    others up to `count`."""
    return [range(quick), pytest.param(range(quick, count), marks=pytest.mark.random)]


def pairwise(
    *values: Iterable[Any],
    fits: Callable[..., bool] = lambda *_: True,
    empty: Callable[..., bool] = lambda *_: False,
) -> list[Any]:
    """Return combinations of the values of axes for `parametrize`.

    `make test` runs some in which every pair of values of two axes occurs that fit together; they
    are chosen greedily. `make test-random` runs up to as many others, evenly spread over the
    product.

    Args:
        values: the values of each parameter.
        fits: returns whether a combination of values is valid; others are left out.
        empty: returns whether a combination computes so little that no mistake would show. Pairs in
            such combinations must also be covered by other combinations.
    """
    axes = list(map(list, values))
    rows = [
        row
        for row in itertools.product(*map(range, map(len, axes)))
        if fits(*map(getitem, axes, row))
    ]
    met = {}
    for row in rows:
        pairs = itertools.combinations(enumerate(row), min(2, len(axes)))
        kind = empty(*map(getitem, axes, row))
        met[row] = {(kind, pair) for pair in pairs}
    missing = set().union(*met.values())
    chosen = set()
    while missing:
        row = max(rows, key=lambda row: len(met[row] & missing))
        chosen.add(row)
        missing -= met[row]
    others = [row for row in rows if row not in chosen]
    spread = others[:: -(-len(others) // len(chosen)) or 1] if chosen else []
    marked = [(row, ()) for row in rows if row in chosen] + [
        (row, pytest.mark.random) for row in spread
    ]
    return [pytest.param(*map(getitem, axes, row), marks=marks) for row, marks in marked]


def _trains(name: str, dim: int, num_experts: int, top_k: int) -> bool:
    """Return whether a router can be built with these sizes and can train with `top_k` experts per
    token."""
    try:
        ROUTERS[name](dim, num_experts).check(top_k)
    except InputError:
        return False
    return True


def fitting_top_k(name: str, num_experts: int) -> list[int]:
    """Return all values of top_k with which a router can train, ascending."""
    return [top_k for top_k in range(1, num_experts + 1) if _trains(name, 3, num_experts, top_k)]


TOP_K = {name: fitting_top_k(name, 4)[0] for name in ROUTERS if not _trains(name, 3, 4, 2)}
"""Experts per token of the routers that cannot train with two."""

DETERMINISTIC = [
    name for name in ROUTERS if ROUTERS[name](3, 4).draw(1, torch.device("cpu")) is None
]
"""Routers that draw no random numbers in training."""


NAN = float("nan")
INF = float("inf")
ODD_LOGITS: dict[str, list[float]] = {
    "NaN": [NAN] * 5,
    "NaN with the sign bit": [-NAN] * 5,
    "one NaN": [0.5, 2.0, NAN, 1.0, -1.0],
    "one NaN with the sign bit": [0.5, 2.0, -1.0, 1.0, -NAN],
    "NaN and infinities": [INF, -INF, NAN, 0.0, -NAN],
    "one infinity": [0.5, 2.0, 0.0, INF, -1.0],
    "two infinities": [INF, 2.0, 0.0, INF, -1.0],
    "all infinite": [INF] * 5,
    "one of minus infinity": [-INF, 2.0, 0.0, 1.0, -1.0],
    "one that is finite": [-INF, -INF, -INF, 1.0, -INF],
    "all minus infinity": [-INF] * 5,
    "both infinities": [-INF, INF, -INF, INF, -INF],
    "the largest floats": [-3.4e38, 3.4e38, 0.0, -0.0, 3.4e38],
    "ordinary": [0.3, -0.2, 0.1, 0.7, 0.0],
}
"""Rows of logits that every device must route identically. `torch.tensor` keeps the sign bit of
NaN."""


def ranked(row: list[float]) -> list[int]:
    """Return the experts from best to worst. NaN ranks above every number; of equal logits, the
    lower index comes first."""
    return sorted(
        range(len(row)),
        key=lambda e: (not math.isnan(row[e]), 0 if math.isnan(row[e]) else -row[e], e),
    )


def make_router(name: str, dim: int = 8, num_experts: int = 4) -> AbstractRouter:
    """Build a router whose parameters and buffers differ from their special initial values."""
    router = ROUTERS[name](dim, num_experts)
    for key, buffer in router.named_buffers():
        if key.endswith("bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, num_experts))
    for parameter in router.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5)
    return router


def make_layer(
    name: str = "softmax", dim: int = 8, hidden: int = 8, num_experts: int = 4, **options: object
) -> MoE:
    """Build a layer with the router `make_router(name)`."""
    options.setdefault("top_k", TOP_K.get(name, min(2, num_experts)))
    return MoE(dim, hidden, num_experts, router=lambda d, n: make_router(name, d, n), **options)


def ids_for(x: Tensor) -> Tensor:
    """Return token ids, of shape (...), for x of shape (..., dim)."""
    shape = x.shape[:-1]
    return (torch.arange(shape.numel()) * 7919 % 1000).view(shape)


class Run(NamedTuple):
    """The results of a layer's forward and backward pass."""

    y: Tensor
    dx: Tensor
    grads: dict[str, Tensor | None]
    routing: Routing


class ReferenceRun(NamedTuple):
    """The results of the reference's forward and backward pass."""

    result: Reference
    dx: Tensor
    grads: dict[str, Tensor | None]


def run(
    layer: MoE, x: Tensor, upstream: Tensor | None = None, *, seed: int = 0, **options: object
) -> Run:
    """Run a layer forward, and backward from `(y * upstream).sum()`, or from y.sum() without
    `upstream`."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    torch.manual_seed(seed)
    y, routing = layer(x, return_routing=True, **options)
    (y.sum() if upstream is None else (y * upstream).sum()).backward()
    return Run(y.detach(), x.grad, {n: p.grad for n, p in layer.named_parameters()}, routing)


def run_reference(
    layer: MoE, x: Tensor, upstream: Tensor, *, seed: int = 0, **options: object
) -> ReferenceRun:
    """Run the float64 reference of `layer` on x; in training, its auxiliary losses are added before
    the backward pass."""
    twin = in_float64(layer)
    x = x.detach().double().requires_grad_()
    torch.manual_seed(seed)
    result = reference(twin, x, **options)
    total = (result.y * upstream.double()).sum() + 0 * x.sum()
    if layer.training:
        total = total + layer.loss_scale.double() * result.loss
    total.backward()
    return ReferenceRun(result, x.grad, {n: p.grad for n, p in twin.named_parameters()})


def assert_close(
    actual: Tensor | None, expected: Tensor | None, tolerance: float, what: str
) -> None:
    """Compare tensors in float64, relative to the largest expected entry; None stands for zeros."""
    if actual is None or expected is None:
        for value in (actual, expected):
            assert value is None or not value.any(), f"{what}: one is None, the other is not zero"
        return
    assert actual.shape == expected.shape, (
        f"{what}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    )
    if actual.numel():
        scale = max(float(expected.double().abs().max()), 1e-2)
        error = float((actual.double() - expected.double()).abs().max()) / scale
        assert error <= tolerance, f"{what}: relative error {error:.2e}"


def assert_runs_agree(actual: Run, expected: ReferenceRun, tolerance: float) -> None:
    """Compare routing, losses, output and every gradient."""
    rows = sorted(zip(actual.routing.token.tolist(), actual.routing.expert.tolist()))
    assert rows == expected.result.rows
    assert actual.routing.requested.tolist() == expected.result.requested
    for name, value in expected.result.losses.items():
        assert_close(actual.routing.losses[name], value.detach(), tolerance, name)
    assert_close(actual.y, expected.result.y.detach(), tolerance, "y")
    assert_close(actual.dx, expected.dx, tolerance, "dx")
    assert actual.grads.keys() == expected.grads.keys()
    for name, grad in actual.grads.items():
        assert_close(grad, expected.grads[name], tolerance, f"gradient of {name}")


def agree(layer: MoE, x: Tensor, *, seed: int = 0, **options: object) -> Run:
    """Run the layer and the reference and compare them, with tolerance 1e-10 in float64 and 1e-5 in
    float32."""
    upstream = torch.randn(x.shape, dtype=torch.float64).to(x.dtype)
    # before `run`, which adds to the step's counts
    expected = run_reference(layer, x, upstream, seed=seed, **options)
    actual = run(layer, x, upstream, seed=seed, **options)
    assert_runs_agree(actual, expected, 1e-10 if x.dtype == torch.float64 else 1e-5)
    return actual


class Scripted(AbstractRouter):
    """A router whose logits are the first entries of each token, so a test can set them."""

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        logits = x_TD[:, : self.num_experts]
        return Scores(logits, logits.softmax(-1), logits.softmax(-1), logits.detach())

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        return token_choice(top_k_indices(scores.rank_by, top_k))

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        return scores.gates[choice.token, choice.expert]


def kinds_of_files(folder: Path) -> dict[str, str]:
    """Return what every file below a folder is by its first bytes, by path: "safetensors", "text",
    or those bytes."""
    return {
        path.relative_to(folder).as_posix(): _kind_of_file(path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def _kind_of_file(data: bytes) -> str:
    """Return what a file is; archives of torch.save begin with PK, and pickles with the
    byte 128."""
    if len(data) > 8 and 8 + int.from_bytes(data[:8], "little") <= len(data) and data[8:9] == b"{":
        return "safetensors"
    try:
        data.decode()
    except UnicodeDecodeError:
        return repr(data[:4])
    return "text" if not data.startswith(b"PK") else repr(data[:4])
