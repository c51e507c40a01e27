"""Compare every operator of forward and backward passes with the same operator in float64, and name
those that are wrong.

Each operator of torch is run again on float64 copies of its inputs, in dense memory. Its results,
and what it writes into (`out=`, in place), may differ by a few roundings of its inputs and results
only. So an operator is held to its own inputs: errors of earlier ones do not add up, and the first
wrong one is named, with the line that called it. New memory is filled with NaN, so that results
which nobody writes show.

The cases are layers with every kind of expert and every activation on the kernels that a CPU runs,
all routers, and all codecs, in the dtypes that people train in.
"""

from __future__ import annotations

import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import moesaic
from moesaic import Capacity, GatedExperts, LoadBalance, MoE, PlainExperts, ZLoss, set_loss_scale
from moesaic.codecs import CODECS
from moesaic.errors import InputError
from moesaic.experts import EXPERTS
from moesaic.kernels import pick
from moesaic.kernels.activation import ACTIVATIONS
from moesaic.kernels.codecs import codec_named, missing_codecs
from moesaic.routing.routers import ROUTERS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes that people train in."""
ALLOWED = 8
"""The largest error of an operator, in the unit of `Difference.error`."""
ON_CPU = ("cpu", "other")
"""The keys of `KERNELS` that run on a CPU."""
PACKAGE = Path(moesaic.__file__).parent
aten = torch.ops.aten
UNDEFINED = {aten._embedding_bag_forward_only, aten._embedding_bag}
"""Operators of whose results only the first is defined."""


@dataclass(kw_only=True)
class Difference:
    """An operator whose result differs from float64's by more than its dtype allows."""

    operator: str
    dtype: str
    line: str
    """The innermost line of Moesaic that ran it."""
    error: float
    """The largest error; infinite for NaN, infinities and numbers that are no floats. Its unit is
    the spacing of the dtype at the largest number of the result, plus what one such spacing in
    every number of the inputs changes in the exact result."""
    times: int = 1
    """How often it differed."""


@dataclass(kw_only=True)
class Comparison:
    """What `AgainstFloat64` has found."""

    differences: dict[tuple[str, str, str], Difference] = field(default_factory=dict)
    compared: Counter[str] = field(default_factory=Counter)
    """How often each operator was compared."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How often operators could not be compared, since they have no float64."""


class AgainstFloat64(TorchDispatchMode):
    """The context manager in which every operator is compared; see the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Comparison()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and compare it."""
        kwargs = kwargs or {}
        if func.namespace == "moesaic":  # its own operators are compared inside
            with self:
                return func.function(*args, **kwargs)
        if func.overloadpacket.__name__ in (
            "empty",
            "empty_like",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
        ):
            made = func(*args, **kwargs)
            return made.fill_(torch.nan) if made.is_floating_point() else made
        exact = self._exact(func, args, kwargs)
        result = func(*args, **kwargs)
        for mine, true, moved in (
            zip(_results(func, args, kwargs, result), *exact, strict=True) if exact else ()
        ):
            self._compare(func, mine, true, moved)
        return result

    def _exact(
        self, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Any]] | None:
        """Return an operator's results in float64, and those for rounded inputs; None if there is
        nothing to compare."""
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if (
            is_random
            or _is_view(func)
            or not any(_is_low(leaf) for leaf in tree_leaves((args, kwargs)))
        ):
            return None
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype.is_floating_point:
            kwargs = kwargs | {"dtype": torch.float64}
        try:
            exact = (
                _in_float64(func, args, kwargs, rounded=False),
                _in_float64(func, args, kwargs, rounded=True),
            )
        except (NotImplementedError, RuntimeError):
            self.found.skipped[str(func)] += 1
            return None
        self.found.compared[str(func)] += 1
        return exact

    def _compare(self, func: Any, mine: Any, true: Any, moved: Any) -> None:
        if not isinstance(mine, Tensor) or not mine.numel():
            return
        error = error_of(mine, true, moved)
        if error <= ALLOWED:
            return
        key = str(func), str(mine.dtype).removeprefix("torch."), _line()
        earlier = self.found.differences.get(key)
        if earlier is None:
            self.found.differences[key] = Difference(
                operator=key[0], dtype=key[1], line=key[2], error=error
            )
        else:
            earlier.error, earlier.times = max(earlier.error, error), earlier.times + 1


def error_of(mine: Tensor, true: Tensor, moved: Tensor) -> float:
    """Return the error of a result as `Difference.error` gives it.

    Args:
        mine: the result.
        true: the result in float64; in the dtype of `mine` if that is no float.
        moved: `true` for inputs that were rounded.
    """
    if not mine.is_floating_point():
        return 0.0 if torch.equal(mine, true) else torch.inf
    numbers = torch.finfo(mine.dtype)
    # what overflows is infinite in both
    rounded = true.to(mine.dtype).double()
    values = mine.double()
    error = (
        (values - rounded)
        .abs()
        .masked_fill((values == rounded) | (values.isnan() & rounded.isnan()), 0.0)
    )
    largest = max(_largest(rounded), numbers.smallest_normal)
    return float(error.nan_to_num(torch.inf, torch.inf).max()) / (
        numbers.eps * largest + _largest(moved - true)
    )


def _largest(values: Tensor) -> float:
    """Return the largest magnitude among the finite values."""
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _in_float64(func: Any, args: Any, kwargs: dict[str, Any], *, rounded: bool) -> list[Any]:
    """Return the results of an operator on float64 copies of its inputs, on request with each
    number changed by a spacing."""
    copies: dict[int, Tensor] = {}  # one per tensor: an operator may write into one of its inputs
    generator = torch.Generator().manual_seed(0)

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = copy = tensor.to(
                torch.float64 if _is_low(tensor) else tensor.dtype, copy=True
            )
            if rounded and _is_low(tensor):
                signs = torch.randint(0, 2, tensor.shape, generator=generator).mul_(2).sub_(1)
                copy.mul_(1 + torch.finfo(tensor.dtype).eps * signs)
        return copies[id(tensor)]

    args, kwargs = tree_map_only(Tensor, copied, (args, kwargs))
    return _results(func, args, kwargs, IN_FLOAT64.get(func, func)(*args, **kwargs))


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """Compute `_grouped_mm`: groups of rows by (E, K, N), or groups of the size that two matrices
    share."""
    ends = offs.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends], ends)]
    if b.dim() == 3:
        return torch.cat([a[span] @ matrix for span, matrix in zip(spans, b)])
    return torch.stack([a[:, span] @ b[span] for span in spans])


IN_FLOAT64: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: _grouped_mm}
"""Operators that torch has not in float64, in operators that it has."""


def _results(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Any]:
    """Return what an operator returned and what it wrote into, without undefined results."""
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tree_leaves(
                args[number] if number < len(args) else kwargs.get(argument.name)
            )
    if written:
        return written
    returned: list[Any] = tree_leaves(result)
    return returned[:1] if func.overloadpacket in UNDEFINED else returned


def _is_view(func: Any) -> bool:
    """Return whether an operator only returns views of its inputs."""
    infos = [each.alias_info for each in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _line() -> str:
    """Return the innermost line of Moesaic in the call stack."""
    for frame in reversed(traceback.extract_stack()):
        if Path(frame.filename).is_relative_to(PACKAGE):
            return f"{Path(frame.filename).relative_to(PACKAGE)}:{frame.lineno}"
    return ""


DIM = 24
HIDDEN = 32
NUM_EXPERTS = 8
TOKENS = 40


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pass whose operators are compared."""

    name: str
    run: Callable[[], object]


def cases() -> Iterator[Case]:
    """Yield the cases; see the module's docstring. Biases and training alternate, where both of
    each would be twice as many."""
    kinds: dict[str, Any] = {"clamped_swiglu": EXPERTS["clamped_swiglu"]}
    for activation in ACTIVATIONS:  # the other names of EXPERTS are some of these
        kinds[f"gated {activation}"] = partial(GatedExperts, activation=activation)
        kinds[f"plain {activation}"] = partial(PlainExperts, activation=activation)
    for nth, dtype in enumerate(DTYPES):
        for number, ((kind, make), kernel) in enumerate(itertools.product(kinds.items(), ON_CPU)):
            bias = bool((number + number // 2 + nth) % 2)
            name = (
                f"experts {kind}{' with biases' if bias else ''}, kernel {pick.KERNELS[kernel]}, "
                f"{dtype}"
            )
            yield Case(
                name=name, run=partial(run_layer, dtype, kernel, experts=partial(make, bias=bias))
            )
        for weight, kernel in itertools.product(("before", "after"), ON_CPU):
            options: dict[str, Any] = {
                "apply_weight": weight,
                "capacity": Capacity.fixed(0.75),
                "shared_hidden": HIDDEN,
            }
            name = f"weights {weight} the experts, kernel {pick.KERNELS[kernel]}, {dtype}"
            yield Case(name=name, run=partial(run_layer, dtype, kernel, **options))
        for (number, router), scale in itertools.product(enumerate(ROUTERS), (1.0, 300.0)):
            train = (number + (scale > 1) + nth) % 2 == 0
            name = (
                f"router {router}, weights times {scale:g}, "
                f"{'training' if train else 'evaluation'}, {dtype}"
            )
            yield Case(
                name=name,
                run=partial(run_layer, dtype, "cpu", router=router, scale=scale, train=train),
            )
        for codec in (name for name in CODECS if name not in missing_codecs()):
            yield Case(name=f"codec {codec}, {dtype}", run=partial(run_codec, codec, dtype))


def run_layer(
    dtype: str, kernel: str, *, scale: float = 1.0, train: bool = True, **options: Any
) -> None:
    """Run a layer forward and, in training, backward.

    Args:
        dtype: the key in `DTYPES` of parameters and tokens.
        kernel: the key in `KERNELS` of the expert stage.
        scale: a factor of the router's matrices.
        train: whether to train or to evaluate.
        options: arguments of `MoE`.
    """
    losses = (LoadBalance(0.01), ZLoss(0.001))
    fitting = (k for k in (2, 1) if _fits(options.get("router", "softmax"), k))
    layer = (
        MoE(DIM, HIDDEN, NUM_EXPERTS, next(fitting), losses=losses, **options)
        .to(DTYPES[dtype])
        .train(train)
    )
    set_loss_scale(layer, 1.0)
    with torch.no_grad():
        for matrix in layer.router.parameters():
            matrix.mul_(scale)
    x = torch.randn(2, TOKENS // 2, DIM, dtype=DTYPES[dtype], requires_grad=train)
    ids = torch.arange(TOKENS).view(2, -1)
    with (
        mock.patch.dict(pick.KERNELS, cpu=pick.KERNELS[kernel]),
        nullcontext() if train else torch.no_grad(),
    ):
        y = layer(x, token_ids=ids)
        if train:
            y.backward(torch.randn_like(y))


def _fits(router: str, top_k: int) -> bool:
    try:
        ROUTERS[router](DIM, NUM_EXPERTS).check(top_k)
    except InputError:
        return False
    return True


def run_codec(name: str, dtype: str) -> None:
    """Encode and decode rows of very different sizes, a row of zeros and rows that are not
    finite."""
    rows = (torch.randn(20, 200) * 10.0 ** torch.linspace(-6, 4, 20)[:, None]).to(DTYPES[dtype])
    rows[3] = 0.0
    rows[5, 7] = torch.nan
    rows[11, 130] = torch.inf
    codec = codec_named(name)
    codec.decode(codec.encode(rows), 20, 200, rows.dtype)


def compare(case: Case) -> Comparison:
    """Run a case, from a fixed seed, and return what was found."""
    torch.manual_seed(0)
    with AgainstFloat64() as mode:
        case.run()
    return mode.found
