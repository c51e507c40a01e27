"""How auxiliary losses reach the parameters: injected into backward, or collected and added to the task's loss.

Injection needs no handling: `y` carries the gradient of the loss, which need not be returned through blocks, pipeline stages or
compiled graphs, and cannot be forgotten or added twice (the two commonest bugs of auxiliary losses). What it cannot see is what
the caller multiplies the task's loss by. So a loss that nobody collects weighs

    what `set_loss_scale` said last, exactly, once somebody called it; else
    1/n in each of the first n backward passes of an optimizer step, and 0 in later ones: n is the number of backward passes
    of the step before, and 1 in the first step.

So the weights of one step never add up to more than 1. A backward pass belongs to a new step if a trainable parameter of the
layer has changed since the pass before, or if the gradients that were there have been cleared. A layer without a trainable
parameter injects nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from moesaic.errors import InputError

try:
    from torch._library.opaque_object import register_opaque_type
    from torch._opaque_base import OpaqueBase
except ImportError:  # pragma: no cover - a torch whose custom operators take no objects
    TAKES_OBJECTS, Base = False, object
else:
    TAKES_OBJECTS, Base = True, OpaqueBase
"""Whether a compiled graph can hand an object to an operator; where it cannot, a loss is injected between two graphs."""


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """Say what the auxiliary losses of all MoE layers in `model` weigh in the next backward passes, until it is said again.

    Where the main loss of a micro-batch is multiplied by its share of the step, the auxiliary losses want the same factor:
    `set_loss_scale(model, share)`, times `scaler.get_scale()` under a gradient scaler.

    Args:
        model: holds the layers.
        scale: the factor, read in backward.
    """
    for module in model.modules():
        if isinstance(module, InjectsLosses):
            module.loss_scale.fill_(scale)
            module.loss_scale_is_set = True


def collect_losses(model: nn.Module) -> list[Tensor]:
    """Return the auxiliary losses of all calls since the last backward pass, times their coefficients, to be added to a loss.

    `loss = task_loss(model(x)) + sum(collect_losses(model))`, then scaled, divided and propagated as ever: under gradient
    accumulation, a gradient scaler, DDP, FSDP2 and non-reentrant checkpoints. What was collected is not injected, and is not
    returned again. On a mesh all ranks collect.

    Args:
        model: holds the layers; its forward pass was run in training mode, with gradients.

    Returns:
        one () tensor per call of a layer that has losses, differentiable; none of calls whose result nobody holds any more,
        and none of calls inside a reentrant checkpoint, whose losses exist in backward only and are injected there.

    Raises:
        InputError: for a layer whose last call was compiled: its graph injects the losses itself.
    """
    layers = [module for module in model.modules() if isinstance(module, InjectsLosses)]
    return [loss for layer in layers for loss in layer.take_losses()]


class BackwardPasses(Base):  # type: ignore[misc, valid-type]
    """Counts the backward passes of a layer, step by step; see the module's docstring.

    Wrappers such as FSDP2 show a layer other parameters within a pass than those that the optimizer changes. So what is
    watched is what the layer has at the end of a pass.

    Args:
        layer: whose.
    """

    def __init__(self, layer: InjectsLosses) -> None:
        self._layer = weakref.ref(layer)
        self._task = -1
        self._done, self._of_step = 0, 1
        self._within: list[nn.Parameter] = []
        self._watched: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._is_wrapped = self._had_gradient = False

    def weight(self, like: Tensor, is_half: bool) -> Tensor:
        """Return what a loss weighs that is injected now, (), float32 on the device of `like`.

        Args:
            like: the gradient that is on its way.
            is_half: it was computed in float16, where losses are scaled.

        Raises:
            InputError: in float16, if nobody set the scale.
        """
        layer = self._layer()
        assert layer is not None, "the layer of a backward pass is gone"
        if layer.loss_scale_is_set:
            return layer.loss_scale.to(like.device, copy=True)
        if is_half:
            raise InputError(
                "an auxiliary loss would be injected into a float16 backward pass, whose scale the layer cannot know: add "
                "collect_losses(model) to your loss before scaler.scale, or call set_loss_scale(model, scaler.get_scale() / n) "
                "before each backward, n the number of micro-batches"
            )
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._begin(_trainable(layer))
        is_counted = bool(self._within) and self._done <= self._of_step
        return torch.full((), 1 / self._of_step if is_counted else 0.0, device=like.device)

    def _begin(self, within: list[nn.Parameter]) -> None:
        """Take note of a pass that has just reached the layer."""
        if self._is_new_step(within):
            self._of_step, self._done = max(self._done, 1), 0
        if not self._is_wrapped and not _same(within, self._watched):
            self._watched = within
        self._versions = _versions(self._watched)
        self._within, self._done = within, self._done + 1
        Variable._execution_engine.queue_callback(self._end)

    def _is_new_step(self, within: list[nn.Parameter]) -> bool:
        if not self._is_wrapped and not _same(within, self._watched):
            return True
        is_clear = all(parameter.grad is None for parameter in self._watched)
        return _versions(self._watched) != self._versions or (is_clear and (self._had_gradient or not self._is_wrapped))

    def _end(self) -> None:
        """Take note of what is there when a pass has ended."""
        layer = self._layer()
        after = [] if layer is None else _trainable(layer)
        if not _same(after, self._within):
            self._is_wrapped = True
            if not _same(after, self._watched):
                self._watched, self._versions = after, _versions(after)
        self._had_gradient = any(parameter.grad is not None for parameter in self._watched)


if TAKES_OBJECTS:
    register_opaque_type(BackwardPasses, typ="reference")

    @torch.library.custom_op("moesaic::injected_weight", mutates_args=())
    def injected_weight(like: Tensor, passes: BackwardPasses, is_half: bool) -> Tensor:
        """Return `passes.weight(like, is_half)`, out of a compiled backward pass."""
        return passes.weight(like, is_half)

    @injected_weight.register_fake
    def _(like: Tensor, passes: BackwardPasses, is_half: bool) -> Tensor:
        return like.new_empty((), dtype=torch.float32)


class Injection:
    """A loss on its way into a backward pass. The graph holds it: it goes when nobody can propagate through `y` any more.

    Args:
        layer: injects it; the graph keeps it until the backward pass.
        loss: (), differentiable.
        share: what its gradient is multiplied by besides.
        is_half: as for `BackwardPasses.weight`.
    """

    def __init__(self, layer: InjectsLosses, loss: Tensor, share: float, is_half: bool) -> None:
        self.layer, self.share, self.is_half = layer, share, is_half
        self.loss: Tensor | None = loss
        """None once it was collected, or was injected."""
        self.is_collected = False

    def collect(self) -> Tensor | None:
        """Return the loss, whose gradient is then the caller's part; None if it is gone."""
        loss, self.loss = self.loss, None
        if loss is None:
            return None
        self.is_collected = True
        collected: Tensor = _Shared.apply(loss, self.share)
        return collected


class InjectLoss(torch.autograd.Function):
    """Identity on `y`; in backward the gradient of an `Injection` is added on the way, unless it was collected."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, injection: Injection) -> Tensor:
        ctx.injection, ctx.loss_dtype = injection, loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None, None]:
        injection = ctx.injection
        if injection.is_collected:
            return grad_y, None, None
        injection.loss = None
        weight = injection.layer.passes.weight(grad_y, injection.is_half)
        return grad_y, weight.to(ctx.loss_dtype) * injection.share, None


class InjectLossCompiled(torch.autograd.Function):
    """`InjectLoss` within a compiled graph, where nothing can be collected."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, loss: Tensor, scale: Tensor | None, passes: BackwardPasses, share: float, is_half: bool
    ) -> Tensor:
        ctx.scale = scale  # not saved: it may be set anew between forward and backward
        ctx.passes, ctx.share, ctx.is_half, ctx.loss_dtype = passes, share, is_half, loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        weight = injected_weight(grad_y, ctx.passes, ctx.is_half) if ctx.scale is None else ctx.scale
        return grad_y, weight.to(ctx.loss_dtype) * ctx.share, None, None, None, None


class _Shared(torch.autograd.Function):
    """Identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, share: float) -> Tensor:
        ctx.share = share
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.share, None


class InjectsLosses(nn.Module):
    """A module that injects losses, whose weight follows `set_loss_scale` and the number of backward passes.

    Neither the scale nor the counts are buffers: no deferred initialisation, checkpoint, wrapper or change of dtype can leave
    them undefined. A copy counts anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss_scale = torch.ones((), dtype=torch.float32, device="cpu")
        """(), float32: what `set_loss_scale` said last."""
        self.loss_scale_is_set = False
        """Whether it was called."""
        self.passes = BackwardPasses(self)
        """Counts the layer's backward passes."""
        self._injections: list[weakref.ref[Injection]] = []
        self._was_compiled = False

    def inject_loss(self, y: Tensor, loss: Tensor, share: float, is_half: bool) -> Tensor:
        """Return `y`, carrying the gradient of the loss.

        Args:
            y: any shape, on the path to the main loss.
            loss: (), differentiable.
            share: what the gradient of the loss is multiplied by besides its weight.
            is_half: `y` was computed in float16.
        """
        if self.loss_scale.device != y.device:
            self.loss_scale = self.loss_scale.to(y.device)
        if not torch.compiler.is_compiling():
            return self._inject_now(y, loss, share, is_half)
        if not TAKES_OBJECTS:
            return self._inject_between_graphs(y, loss, share, is_half)
        self._was_compiled = True
        scale = self.loss_scale if self.loss_scale_is_set else None
        out: Tensor = InjectLossCompiled.apply(y, loss, scale, self.passes, share, is_half)
        return out

    def _inject_between_graphs(self, y: Tensor, loss: Tensor, share: float, is_half: bool) -> Tensor:
        return self._inject_now(y, loss, share, is_half)

    if not TAKES_OBJECTS:  # the decorator imports torch's compiler, which takes seconds
        _inject_between_graphs = torch.compiler.disable(_inject_between_graphs)

    def _inject_now(self, y: Tensor, loss: Tensor, share: float, is_half: bool) -> Tensor:
        injection = Injection(self, loss, share, is_half)
        self._was_compiled = False
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint computes again, for the backward pass that runs
            self._injections = [each for each in self._injections if (known := each()) and known.loss is not None]
            self._injections.append(weakref.ref(injection))
        injected: Tensor = InjectLoss.apply(y, loss, injection)
        return injected

    def take_losses(self) -> list[Tensor]:
        """Return what `collect_losses` returns of this layer."""
        if self._was_compiled:
            raise InputError(
                f"collect_losses: the last call of a {type(self).__name__} was compiled, and its graph injects the losses: "
                "call set_loss_scale(model, share), or wrap the layer's forward in torch.compiler.disable"
            )
        injections, self._injections = [each() for each in self._injections], []
        losses = [injection.collect() for injection in injections if injection is not None]
        return [loss for loss in losses if loss is not None]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("passes", "_injections")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.passes, self._injections = BackwardPasses(self), []


def _trainable(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def _same(some: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others))


def _versions(parameters: list[nn.Parameter]) -> list[int]:
    """Return how often each was changed in place."""
    return [parameter._version for parameter in parameters]
