"""Numerical faults in a training run: values that are not finite and their origin, loss spikes,
collapsed routers, drifting ranks.

Steps without faults send no extra messages: the loss and the gradient norm are identical on all
ranks, so each rank can tell whether the step is sound. Expensive checks (repeating a step under
hooks, checksums of all weights) run only after a failed step, or at evaluations and checkpoints,
where the run pauses anyway.

A tensor of the model is split into parts, and several ranks may hold copies of the same part. They
must have the same bits, or differ by rounding alone where ranks sum in different orders; ranks
whose copies differ by more have drifted.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic.errors import TrainingError
from moesaic.experts import AbstractExperts
from moesaic.initial_values import held
from moesaic.models.split import local_part
from moesaic.parallel import num_copies
from moesaic.routing.routing import Routing
from moesaic.runtime.telemetry import LoadStatistics
from moesaic.train.ranks import Ranks

RECENT = 64
FEWEST = 16
"""Number of recent losses that a loss is compared with, and the fewest that are needed."""
SPIKE = 8.0
"""A loss is a spike if it is this many robust standard deviations above the median of the recent
losses."""
CHECKED_AT_ONCE = 2**22
"""Elements of a tensor that are summed at once; each one takes 16 bytes meanwhile."""
COLLAPSED = 0.9
"""A router has collapsed if the layer's `top_k` busiest experts get this share of all copies."""

ROUNDING = 1e-3
"""Largest difference between copies of a tensor that counts as rounding, as a share of its largest
absolute value. Ranks may sum in different orders."""
Copied = tuple[str, tuple[int, ...]]
"""The name of a tensor and which part of it a rank holds: ranks with both in common have copies."""


class LossSpikeError(Exception):
    """Raised after a loss spike, to roll the run back to its last checkpoint."""


class Spikes:
    """Detects spikes of the loss."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=RECENT)
        """The recent losses that were no spikes, oldest first."""

    def usual(self, loss: float) -> float | None:
        """Return the median of the recent losses if `loss` is a spike; None otherwise.

        Args:
            loss: the loss of this step. It counts as recent from then on, unless it is a spike.
        """
        if len(self._losses) >= FEWEST:
            middle = median(self._losses)
            # the median distance, scaled to be the standard deviation of normal losses
            deviation = 1.4826 * median(abs(recent - middle) for recent in self._losses)
            # losses that hardly vary would make any change a spike
            least_deviation = 0.01 * abs(middle)
            if loss - middle > SPIKE * max(deviation, least_deviation):
                return middle
        self._losses.append(loss)
        return None


def wrong_numbers(loss: Tensor, norm: Tensor, step: int) -> str:
    """Return in words which number of a step is not finite; empty if none.

    Args:
        loss, norm: loss and gradient norm over all ranks, identical on all ranks.
        step: the step, counted from 1.
    """
    if math.isfinite(float(loss)) and math.isfinite(float(norm)):
        return ""
    what = "loss" if not math.isfinite(float(loss)) else "gradient norm"
    return f"the {what} of step {step} is not finite ({float(loss)}, gradient norm {float(norm)})"


def collapsed_routers(
    layers: Sequence[LoadStatistics], names: Sequence[str], top_k: int
) -> dict[str, str]:
    """Return a message for each layer with a router that sends nearly all tokens to the same
    `top_k` experts."""
    messages = {}
    for name, load in zip(names, layers):
        counts = sorted(load.tokens_per_expert, reverse=True)
        share = sum(counts[:top_k]) / max(sum(counts), 1)
        # with few experts or few copies, such a share may come about by chance
        is_telling = len(counts) >= 4 * top_k and sum(counts) >= 16 * len(counts)
        if is_telling and share >= COLLAPSED:
            messages[name] = (
                f"the router of {name} has collapsed: {top_k} of its {len(counts)} experts get "
                f"{share:.0%} of the tokens; raise model.moe.load_balance or model.moe.z_loss, or "
                "lower optimizer.lr"
            )
    return messages


def find_origin(model: nn.Module, ranks: Ranks, repeat: Callable[[], object]) -> str:
    """Return in words where a step's numbers first go wrong: the module, the expert and the rank.
    All ranks call it.

    Args:
        model: the model with the weights before the step.
        repeat: runs the step's forward and backward passes again.
    """
    own_weights = not_finite(model)
    own_faults = _first_faults(model, repeat, ranks.stage)
    reports = ranks.gathered((own_weights, own_faults))
    faulty_weights = _faulty_weights_in_words([weights for weights, _ in reports])
    if faulty_weights:
        return faulty_weights
    for direction, what in (
        ("forward", "what {} returns"),
        ("backward", "the gradient that reaches {}"),
    ):
        faults: dict[int, Fault] = {}
        for rank, (_, faults_of_rank) in enumerate(reports):
            if direction in faults_of_rank:
                faults[rank] = faults_of_rank[direction]
        if faults:
            first = min(faults.values())
            where = [rank for rank, fault in faults.items() if fault.module == first.module]
            return (
                f"{what.format(first.module)} is the first that is not finite, on "
                f"{in_words(where)}{first.detail}"
            )
    return "nothing was wrong when the step was repeated, so suspect the hardware of a rank"


def not_finite(model: nn.Module) -> list[tuple[str, list[int]]]:
    """Return the names of the parameters with values that are not finite in this rank's part, each
    with the numbers of the affected experts (if it belongs to experts)."""
    faulty = []
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        local = local_part(tensor)
        if bool(local.isfinite().all()):
            continue
        experts: list[int] = []
        module = model.get_submodule(name.rpartition(".")[0])
        # the first dimension of a stacked parameter is the experts', of which this rank has a range
        if isinstance(module, AbstractExperts) and tensor.shape[0] == module.num_experts:
            is_faulty = (~local.isfinite()).flatten(1).any(1)
            first_expert = held(tensor)[0].start
            experts = (is_faulty.nonzero().flatten() + first_expert).tolist()
        faulty.append((name, experts))
    return faulty


def weights_not_finite(model: nn.Module, ranks: Ranks) -> str:
    """Return in words which weights are not finite, and on which rank; empty if none. All ranks
    call it."""
    return _faulty_weights_in_words(ranks.gathered(not_finite(model)))


def _faulty_weights_in_words(by_rank: Sequence[Sequence[tuple[str, list[int]]]]) -> str:
    """Return in words the first weights that are not finite, from what `not_finite` returned on
    every rank; empty if all are."""
    faulty = []
    names = set()
    for rank, parameters in enumerate(by_rank):
        for name, experts in parameters:
            faulty.append((rank, name, experts))
            names.add(name)
    if not faulty:
        return ""
    rank, name, experts = faulty[0]
    which = f", expert {', '.join(map(str, experts[:4]))}" if experts else ""
    more = f" (and in {len(names) - 1} more parameters)" if len(names) > 1 else ""
    return f"weights of {name}{which} are not finite on rank {rank}{more}"


class Fault(NamedTuple):
    """The first values of a rank's pass that are not finite. Faults are ordered as activations or
    gradients flow."""

    stage: int
    """Number of the pipeline stage; negative in backward passes, which begin with the last one."""
    num_sound: int
    """How many modules' values were sound before."""
    module: str
    """Name of the module."""
    detail: str
    """What else is known, in words."""


def _first_faults(model: nn.Module, repeat: Callable[[], object], stage: int) -> dict[str, Fault]:
    """Repeat a step; return the first fault of this rank's "forward" and "backward" pass, where
    there is one."""
    num_checked: Counter[str] = Counter()
    faults: dict[str, Fault] = {}

    def check(
        direction: str, name: str, tensors: Sequence[Tensor], detail: Callable[[], str] = str
    ) -> None:
        """Note the first tensors of a pass that are not finite. `detail` returns what else is known
        about them; by default (`str()`) nothing."""
        # after the first fault of a pass, no others are looked for
        is_sound = direction in faults or all(bool(tensor.isfinite().all()) for tensor in tensors)
        if not is_sound:
            # backward passes begin with the last stage
            place = stage if direction == "forward" else -stage
            faults[direction] = Fault(place, num_checked[direction], name, detail())
        num_checked[direction] += 1

    def check_output(name: str, module: nn.Module, _: Any, output: Any) -> None:
        """Check a module's floating-point outputs now, and their gradients in the backward pass."""
        parts = output if isinstance(output, tuple) else (output,)
        tensors = [
            local_part(part)
            for part in parts
            if isinstance(part, Tensor) and part.is_floating_point()
        ]
        routings = [part for part in parts if isinstance(part, Routing)]  # one, of an MoE layer

        def detail() -> str:
            """Return which expert's rows are not finite."""
            return _expert_of(tensors[0].detach(), routings[0]) if routings else ""

        check("forward", name, [tensor.detach() for tensor in tensors], detail)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda gradient: check("backward", name, [local_part(gradient)])
                )

    hooks = [
        module.register_forward_hook(partial(check_output, name))
        for name, module in model.named_modules()
        if name
    ]
    try:
        repeat()
    finally:
        for hook in hooks:
            hook.remove()
    return faults


def _expert_of(y: Tensor, routing: Routing) -> str:
    """Return in words what the faulty rows of a layer's output have in common: the router, or the
    expert that got most of their tokens.

    Args:
        y: (..., dim), a row for each token.
        routing: has a token and an expert for each copy.
    """
    if not bool(routing.weight.isfinite().all()):
        return ", from its router on"
    is_wrong_token = ~y.reshape(-1, y.shape[-1]).isfinite().all(1)
    is_wrong_copy = is_wrong_token[routing.token]
    copies_by_expert = Counter(routing.expert[is_wrong_copy].tolist())
    if not copies_by_expert:
        return ""
    ((expert, _),) = copies_by_expert.most_common(1)
    return f", expert {expert}"


def require_same_weights(
    model: nn.Module, ranks: Ranks, step: int, advice: str, *, align: bool
) -> None:
    """Check that ranks with the same part of a tensor hold the same numbers. All ranks call it.

    Under some plans the ranks of a tensor-parallel group sum in different orders, so copies differ
    in their last bits.

    Args:
        model: a sharded or unsharded model; its persistent buffers are compared too.
        step: the current step, for the error message.
        advice: how to continue, for the error message.
        align: overwrite copies that differ only by rounding with those of the lowest rank.

    Raises:
        TrainingError: on all ranks, if copies differ by more than rounding; the message names the
            ranks and the tensor.
    """
    if ranks.mesh is None:
        return
    shared = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if num_copies(tensor, ranks.world) > 1
    }
    differing = _differing_copies(shared, ranks)
    if not differing:
        return

    own_parts: dict[Copied, Tensor] = {}
    for name, tensor in shared.items():
        own_parts[name, _shard_coordinates(tensor)] = local_part(tensor.detach())
    own_differing = {part: own_parts[part].cpu() for part in differing if part in own_parts}
    differing_of_ranks = ranks.gathered(own_differing)
    for part in differing:
        copies: dict[int, Tensor] = {}  # of this part, by rank
        for rank, tensors in enumerate(differing_of_ranks):
            if part in tensors:
                copies[rank] = tensors[part].double()
        usual = torch.stack(list(copies.values())).nanmedian(0).values
        differences = {rank: _difference(copy, usual) for rank, copy in copies.items()}
        is_rounding = max(differences.values()) <= ROUNDING * float(usual.abs().max())
        if not is_rounding:
            name, _ = part
            line = _drifted_in_words(differences, name)
            raise TrainingError(f"after step {step} {line}; {advice}")
        if align and part in own_parts:
            lowest_rank = min(copies)
            own_parts[part].copy_(copies[lowest_rank])


def _differing_copies(shared: Mapping[str, Tensor], ranks: Ranks) -> list[Copied]:
    """Return the parts of tensors whose copies differ in some bit, in the same order on all
    ranks.

    Args:
        shared: this rank's tensors that other ranks may have copies of, by name.
    """
    sums = [_checksum(local_part(tensor.detach())) for tensor in shared.values()]
    values = torch.stack(sums).tolist() if sums else []  # one transfer from the device for all
    own_sums: dict[Copied, tuple[int, int]] = {}
    for (name, tensor), (plain, weighted) in zip(shared.items(), values):
        own_sums[name, _shard_coordinates(tensor)] = (plain, weighted)

    sums_of_copies: dict[Copied, set[tuple[int, int]]] = {}
    for sums_of_rank in ranks.gathered(own_sums):
        for part, both_sums in sums_of_rank.items():
            sums_of_copies.setdefault(part, set()).add(both_sums)
    return [part for part, different in sums_of_copies.items() if len(different) > 1]


def _drifted_in_words(differences: Mapping[int, float], name: str) -> str:
    """Return which ranks' copies of a tensor are far from the usual numbers, and by how much.

    Args:
        differences: each copy's largest distance from the median of all copies, by rank.
        name: name of the tensor.
    """
    # of two copies, no one knows which is the wrong one
    drifted = sorted(differences)
    if len(differences) > 2:
        drifted = [rank for rank, difference in differences.items() if difference > 0]
    what = "disagrees with the other ranks" if len(drifted) == 1 else "disagree"
    return (
        f"{in_words(drifted)} {what} on {name}, by up to {max(differences.values()):.3g}: suspect "
        f"the memory or the processor of {in_words(drifted)}"
    )


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinite if only one of them has a NaN
    at some place."""
    is_same = (one == other) | (one.isnan() & other.isnan())
    # infinities stay, which `nan_to_num` would replace by a large number
    distance = (one - other).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(distance.masked_fill(is_same, 0.0).max())


def _shard_coordinates(tensor: Tensor) -> tuple[int, ...]:
    """Return which part of the full tensor this rank holds: its coordinates along the mesh axes
    that shard the tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinates = tensor.device_mesh.get_coordinate() or ()
    return tuple(
        coordinate
        for coordinate, placement in zip(coordinates, tensor.placements)
        if not placement.is_replicate()
    )


def _checksum(tensor: Tensor) -> Tensor:
    """Return two sums of a tensor's bits, (2,) int64 on its device: of the values, and of the
    values times their positions."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    # the tensor's values as integers of the same bits
    bits = tensor.contiguous().view(-1).view(integers[tensor.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(bits), CHECKED_AT_ONCE):
        chunk = bits[first : first + CHECKED_AT_ONCE]
        # from 1, so that the first value counts too
        places = torch.arange(first + 1, first + len(chunk) + 1, device=bits.device)
        sums += torch.stack([chunk.sum(dtype=torch.int64), (chunk * places).sum()])
    return sums


def in_words(ranks: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 1, 3"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
