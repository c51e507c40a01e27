"""The first values of weights, drawn from torch's global generator or from a generator of each
tensor's own.

A tensor's own generator is seeded by the run's seed, the parameter's name and, for stacked experts,
the expert's number. Then no value depends on the mesh: a rank draws a whole tensor (or, of the
experts that it holds, a whole expert) and keeps its part. A *law* is the distribution of the
values, a *key* the seed of one generator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

Law = Callable[..., object]
"""Fills a tensor in place and takes `generator=`, such as `partial(nn.init.normal_, std=0.02)`."""


class Draw(Protocol):
    """A way to draw a parameter's first values."""

    def __call__(self, parameter: Tensor, law: Law, *, by_expert: bool = False) -> None:
        """Fill a parameter in place.

        Args:
            parameter: a tensor, or a DTensor of which this rank's part is filled.
            law: the distribution.
            by_expert: the first dimension counts experts.
        """
        ...


def draw_globally(parameter: Tensor, law: Law, *, by_expert: bool = False) -> None:
    """Draw as torch does, from its global generator; see `Draw`.

    Experts that are spread over a mesh get their values by number, from a seed that the host's
    global generator gives, since on CPUs torch would draw the same values for different experts.
    Ranks need the same `torch.manual_seed`.
    """
    if by_expert and is_dtensor(parameter):
        seed = torch.randint(2**62, (), device="cpu").item()
        _draw_held(parameter, law, seed, by_expert=True)
    else:
        law(parameter)


def draw_nothing(parameter: Tensor, law: Law, *, by_expert: bool = False) -> None:
    """Leave a parameter as it is, since it is about to be read from a file; see `Draw`."""


class SeededDraw:
    """Draws each parameter from its own generator, so that its values do not depend on the mesh;
    see `Draw`.

    Args:
        seed: the seed of the run.
        model: the model, or this rank's part of it under the full model's names.
    """

    def __init__(self, seed: int, model: nn.Module) -> None:
        self._seed = seed
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters()
        }

    def __call__(self, parameter: Tensor, law: Law, *, by_expert: bool = False) -> None:
        _draw_held(parameter, law, self._seed, self._names[parameter], by_expert=by_expert)


def key_of(*words: object) -> int:
    """Return a seed of 63 bits that depends on all words."""
    text = "\0".join(map(str, words))
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def held(tensor: Tensor) -> tuple[range, ...]:
    """Return which indices of each dimension this rank holds; all of them unless the tensor is a
    DTensor."""
    ranges = [range(size) for size in tensor.shape]
    if not is_dtensor(tensor):
        return tuple(ranges)

    placements = tensor.placements
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    # FSDP's axis comes first in the mesh, but splits what the other axes left; its placement
    # then has a split factor.
    axes = sorted(
        range(len(placements)), key=lambda axis: hasattr(placements[axis], "split_factor")
    )
    for axis in axes:
        dim = getattr(placements[axis], "dim", None)
        if dim is None:  # replicated over this axis
            continue
        # torch gives every rank as many indices, but the last ones fewer or none
        size = math.ceil(len(ranges[dim]) / tensor.device_mesh.size(axis))
        start = coordinate[axis] * size
        ranges[dim] = ranges[dim][start : start + size]
    return tuple(ranges)


def _draw_held(
    parameter: Tensor, law: Law, seed: object, name: str = "", *, by_expert: bool
) -> None:
    """Fill this rank's part of a parameter with the values that the whole parameter has there."""
    local = parameter.detach()
    local = local.to_local() if is_dtensor(local) else local
    if local.is_meta:
        return
    ranges = held(parameter)
    if not by_expert:
        _draw_part(local, ranges, parameter.shape, law, key_of(seed, name))
        return

    def draw_expert(row: Tensor, expert: int) -> None:
        """Fill this rank's part of one expert, given its number among all experts."""
        key = key_of(seed, name, expert)
        _draw_part(row, ranges[1:], parameter.shape[1:], law, key)

    # On a CPU torch draws on one thread, without Python's lock.
    num_threads = torch.get_num_threads() if local.device.type == "cpu" else 1
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(draw_expert, local, ranges[0]))  # the list raises a thread's exception


def _draw_part(
    part: Tensor, ranges: tuple[range, ...], shape: torch.Size, law: Law, key: int
) -> None:
    """Fill one rank's part of a tensor of a shape: the indices `ranges`. Numbers are drawn in
    float32, so that other dtypes round the same ones."""
    generator = torch.Generator(part.device).manual_seed(key)
    if part.shape == shape and part.dtype == torch.float32 and part.is_contiguous():
        law(part, generator=generator)
    elif part.numel():
        whole = torch.empty(shape, dtype=torch.float32, device=part.device)
        law(whole, generator=generator)
        own_slices = tuple(slice(indices.start, indices.stop) for indices in ranges)
        part.copy_(whole[own_slices])


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Return whether a tensor is a `DTensor`. A plain tensor does not trigger the import of torch's
    DTensor package (1 s)."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
