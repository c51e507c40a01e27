"""How auxiliary losses reach the parameters: injected into the backward pass, or collected and
added to the task's loss.

Injection needs no code of the caller: `y` carries the gradient of the loss. The loss need not be
returned through blocks, pipeline stages or compiled graphs, and can be neither forgotten nor added
twice, the two commonest bugs of auxiliary losses. But injection cannot see by what factor the
caller multiplies the task's loss. A loss that is not collected has the weight that
`set_loss_scale` set last, once it has been called. Otherwise it has 1/n in each of the first n
backward passes of an optimizer step, and 0 in later ones, where n is the number of backward passes
of the previous step, and 1 in the first step.

The weights of one step therefore never add up to more than 1. A backward pass belongs to a new step
if a trainable parameter of the layer has changed since the previous pass, or if existing gradients
have been cleared. A layer without trainable parameters injects nothing.

A backward pass through several calls of a layer injects the losses of each with the weight of the
pass. That is right for a layer that one forward pass calls several times, since each call is a
layer of the model. It is too much if the caller averages the losses of several forward passes and
propagates them together: a warning then asks for `set_loss_scale`. So does one where a gradient
scaler steps the optimizer (`gradient_scalers.py`).

An optimizer step is what lies between two changes of the parameters. A share is a further factor on
the gradient of one loss. Parameters are wrapped if a library such as FSDP2 shows the layer others
within a backward pass than outside. torch numbers backward passes by graph tasks, -1 outside.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from moesaic.comm.transport import TURN
from moesaic.errors import InputError
from moesaic.kernels.operator import operator

if TYPE_CHECKING:
    from moesaic.routing.gradient_scalers import FirstStep


def _objects_in_graphs() -> tuple[type, Callable[[type], None] | None]:
    """Return the base class and the registration of objects that custom operators of compiled
    graphs take; None if none."""
    try:
        from torch._custom_class_base import CustomClassBase  # type: ignore[import-not-found]
        from torch._library.opaque_object import register_custom_class  # type: ignore[attr-defined]
    except ImportError:  # the names before torch 2.14
        try:
            from torch._library.opaque_object import register_opaque_type
            from torch._opaque_base import OpaqueBase
        except ImportError:
            return object, None
        return OpaqueBase, partial(register_opaque_type, typ="reference")
    return CustomClassBase, partial(register_custom_class, typ="symbolic")


Base, _register = _objects_in_graphs()
TAKES_OBJECTS = _register is not None
"""Whether custom operators of a compiled graph take objects; if not, losses are injected between
two graphs."""


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """Set the factor on the auxiliary losses of all MoE layers in `model`, for all backward passes
    until the next call.

    If the main loss of a micro-batch is multiplied by its share of the step, the auxiliary losses
    need the same factor: `set_loss_scale(model, share)`, times `scaler.get_scale()` under a
    gradient scaler.

    Args:
        model: the model that contains the layers.
        scale: the factor, which is read in the backward pass.
    """
    for module in model.modules():
        if isinstance(module, InjectsLosses):
            module.loss_scale.fill_(scale)
            module.loss_scale_is_set = True


def collect_losses(model: nn.Module) -> list[Tensor]:
    """Return the auxiliary losses of all calls since the last backward pass, times their
    coefficients, to add to a loss.

    Use `loss = task_loss(model(x)) + sum(collect_losses(model))`, then scale, divide and propagate
    the loss as usual. This works under gradient accumulation, a gradient scaler, DDP, FSDP2 and
    non-reentrant checkpoints. Collected losses are not injected, and are not returned again. On a
    mesh all ranks must collect.

    Args:
        model: the model that contains the layers; its forward pass has run in training mode, with
            gradients.

    Returns:
        one differentiable () tensor per call of a layer with losses. Calls whose result has been
        freed have none. Calls inside a reentrant checkpoint have none either: their losses exist
        only in the backward pass, and are injected there.

    Raises:
        InputError: if the last call of a layer was compiled, since its graph injects the losses
            itself.
    """
    layers = [module for module in model.modules() if isinstance(module, InjectsLosses)]
    return [loss for layer in layers for loss in layer.take_losses()]


BESIDE = (
    "moesaic: one backward pass went through several forward passes of a MoE layer, and the "
    "auxiliary losses of each have the whole weight of the pass: call set_loss_scale(model, "
    "factor) with the factor of each forward pass's loss (1 if they are added, 1 / n if n are "
    "averaged), or add collect_losses(model) to each loss"
)
"""The warning if losses of several forward passes are propagated together."""


def _leads(node: Any, target: Any) -> bool:
    """Return whether the backward pass goes from one node of an autograd graph to another."""
    seen = set[Any]()
    to_visit = [node]
    while to_visit:
        current = to_visit.pop()
        if current is target:
            return True
        for following, _ in current.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                to_visit.append(following)
    return False


class BackwardPasses(Base):  # type: ignore[misc, valid-type]
    """A counter of the backward passes of a layer in each optimizer step; see the module's
    docstring.

    Under wrappers such as FSDP2, a layer's parameters within a pass are not those that the
    optimizer changes. Therefore the counter watches the parameters that the layer has at the end of
    a pass.
    """

    def __init__(self, layer: InjectsLosses) -> None:
        self._layer = weakref.ref(layer)
        self._task = -1
        """torch's number of the current backward pass."""
        self._passes_of_step = 0
        """Passes of the current step so far."""
        self._expected_passes = 1
        """Passes of the previous step."""
        self._pass_parameters: list[nn.Parameter] = []
        """The layer's parameters within the current pass."""
        self._watched: list[nn.Parameter] = []
        """Those whose changes and gradients show a new step."""
        self._versions: list[int] = []
        """Their versions at the last look."""
        self._is_wrapped = False
        """Whether the layer's parameters within a pass were others than after it."""
        self._had_gradient = False
        """Whether a watched parameter had a gradient at the end of the last pass."""
        self._has_warned = False
        """Whether the warning `BESIDE` was given."""
        self._nodes: list[Any] = []
        """The nodes that have injected losses in the current pass."""
        self._most_nodes = 1
        """The most such nodes for which the graph was searched."""
        self._first_step: FirstStep | None = None
        """Watches for a gradient scaler, from the first loss that nobody scales."""

    def weight(self, like: Tensor, is_half: bool) -> Tensor:
        """Return the weight of a loss that is injected in this backward pass, () float32 on the
        device of `like`.

        Args:
            like: the gradient to which the loss is added.
            is_half: whether the forward pass was in float16, where losses are usually scaled.

        Raises:
            InputError: in float16, if the loss scale was never set.
        """
        layer = self._layer()
        assert layer is not None, "the layer of a backward pass is gone"
        if layer.loss_scale_is_set:
            return layer.loss_scale.to(like.device, copy=True)
        if is_half:
            raise InputError(
                "an auxiliary loss would be injected into a float16 backward pass, whose scale "
                "the layer cannot know: add collect_losses(model) to your loss before "
                "scaler.scale, or call set_loss_scale(model, scaler.get_scale() / n) before each "
                "backward, n the number of micro-batches"
            )
        task = torch._C._current_graph_task_id()
        if task != self._task:  # the first loss of this pass
            self._task = task
            self._begin(_trainable(layer))
            self._await_scaler()
        # 0 without trainable parameters, and in passes beyond the number of the previous step
        weight = 0.0
        if self._pass_parameters and self._passes_of_step <= self._expected_passes:
            weight = 1 / self._expected_passes
        return torch.full((), weight, device=like.device)

    def _await_scaler(self) -> None:
        """Let the next optimizer step say whether a gradient scaler takes it."""
        if self._first_step is None:
            from moesaic.routing.gradient_scalers import FirstStep  # when it is used

            self._first_step = FirstStep()
        self._first_step.await_for(self)

    def trained(self) -> list[nn.Parameter]:
        """Return the layer's parameters that an optimizer steps."""
        return self._watched

    def note(self, node: Any) -> None:
        """Note that a node of the graph injects a loss in this backward pass; warn if it does so
        beside another call's."""
        layer = self._layer()
        if self._has_warned or layer is None or layer.loss_scale_is_set:
            return
        if not self._pass_parameters:  # a layer that does not train injects nothing
            return
        self._nodes.append(node)
        if len(self._nodes) <= self._most_nodes:
            return
        # the graph is searched once for each number of nodes, and not in every pass
        self._most_nodes = len(self._nodes)
        # the calls of one forward pass follow one another, those of another pass lie beside them
        if not any(_leads(other, node) for other in self._nodes[:-1]):
            self._has_warned = True
            warnings.warn(BESIDE, stacklevel=2)

    def _begin(self, parameters: list[nn.Parameter]) -> None:
        """Count a backward pass that has just reached the layer, whose trainable parameters are
        `parameters`."""
        if self._is_new_step(parameters):
            # as many as the step before had, and 1 in the first step
            self._expected_passes = max(self._passes_of_step, 1)
            self._passes_of_step = 0
        # a wrapper's parameters are not watched
        if not self._is_wrapped and not _are_same(parameters, self._watched):
            self._watched = parameters
        self._versions = _versions(self._watched)
        self._pass_parameters = parameters
        self._passes_of_step += 1
        self._nodes = []
        Variable._execution_engine.queue_callback(self._end)  # called at the end of the pass

    def _is_new_step(self, parameters: list[nn.Parameter]) -> bool:
        """Return whether gradients were cleared or parameters stepped since the last look."""
        # the layer has other parameters than before, and not those of a wrapper
        if not self._is_wrapped and not _are_same(parameters, self._watched):
            return True
        # a parameter was changed in place
        if _versions(self._watched) != self._versions:
            return True
        # gradients were cleared if there are none, unless a wrapper holds them elsewhere within a
        # pass: then only if there were some after the last one
        is_clear = all(parameter.grad is None for parameter in self._watched)
        return is_clear and (self._had_gradient or not self._is_wrapped)

    def _end(self) -> None:
        """Record the layer's parameters and gradients at the end of a backward pass."""
        self._nodes = []
        layer = self._layer()
        parameters = [] if layer is None else _trainable(layer)
        if not _are_same(parameters, self._pass_parameters):
            # within the pass the layer had others, those of a wrapper
            self._is_wrapped = True
            if not _are_same(parameters, self._watched):
                self._watched = parameters
                self._versions = _versions(parameters)
        self._had_gradient = any(parameter.grad is not None for parameter in self._watched)


if _register is not None:
    _register(BackwardPasses)

    @operator("injected_weight")
    def injected_weight(like: Tensor, passes: BackwardPasses, is_half: bool) -> Tensor:
        """Return `passes.weight(like, is_half)`, as an operator for compiled backward passes, in
        which the graph's node stands for all calls in the graph."""
        weight = passes.weight(like, is_half)
        passes.note(torch._C._current_autograd_node())
        return weight

    @torch.library.register_fake(injected_weight.overload)
    def _(like: Tensor, passes: BackwardPasses, is_half: bool) -> Tensor:
        return like.new_empty((), dtype=torch.float32)


class Injection:
    """A loss to be injected into a backward pass. Only the autograd graph of `y` keeps this object
    alive.

    Args:
        layer: the layer that injects the loss; the graph keeps the layer alive until the backward
            pass.
        loss: (), differentiable.
        share: a further factor on the gradient of the loss, besides the loss's weight.
        is_half: as for `BackwardPasses.weight`.
    """

    def __init__(self, layer: InjectsLosses, loss: Tensor, share: float, is_half: bool) -> None:
        self.layer = layer
        self.share = share
        self.is_half = is_half
        self.loss: Tensor | None = loss
        """The loss; None once it has been collected or injected."""
        self.turn = TURN.get()
        """The micro-batch to which the loss belongs, if several are in flight."""
        self.is_collected = False
        """Whether the caller propagates the loss."""

    def collect(self) -> Tensor | None:
        """Return the loss for the caller to propagate, and never inject it; None if it was
        collected or injected before."""
        loss = self.loss
        self.loss = None
        if loss is None:
            return None
        self.is_collected = True
        collected: Tensor = _ScaledGradient.apply(loss, self.share)
        return collected


class InjectLoss(torch.autograd.Function):
    """Identity on `y` that starts the backward pass of an `Injection`'s loss, unless the loss was
    collected."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, injection: Injection) -> Tensor:
        ctx.injection = injection
        ctx.loss_dtype = loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Pass the gradient on, and give the loss its weight once."""
        injection = ctx.injection
        if injection.is_collected:
            return grad_y, None, None
        injection.loss = None
        # the loss's weight is its gradient
        weight = injection.layer.passes.weight(grad_y, injection.is_half).to(ctx.loss_dtype)
        injection.layer.passes.note(ctx)
        if injection.share != 1:
            weight = weight * injection.share
        return grad_y, weight, None


class InjectLossCompiled(torch.autograd.Function):
    """`InjectLoss` for compiled graphs, in which losses cannot be collected."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        loss: Tensor,
        scale: Tensor | None,
        passes: BackwardPasses,
        share: float,
        is_half: bool,
    ) -> Tensor:
        """Return `y` itself; backward adds the loss's gradient.

        Args:
            scale: what `set_loss_scale` set; None for the weight of the pass.
            passes: counts the layer's backward passes.
            loss, share, is_half: as for `Injection`.
        """
        # not saved for backward: the scale may be set again between forward and backward
        ctx.scale = scale
        ctx.passes = passes
        ctx.share = share
        ctx.is_half = is_half
        ctx.loss_dtype = loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        weight = ctx.scale
        if weight is None:
            weight = injected_weight(grad_y, ctx.passes, ctx.is_half)
        d_loss = weight.to(ctx.loss_dtype) * ctx.share
        return grad_y, d_loss, None, None, None, None


class _ScaledGradient(torch.autograd.Function):
    """Identity that multiplies the gradient by `share`."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, share: float) -> Tensor:
        ctx.share = share
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.share, None


class InjectsLosses(nn.Module):
    """A module that injects losses, weighed by `set_loss_scale` or by the number of backward
    passes.

    Neither the scale nor the counts are buffers, so deferred initialisation, checkpoints, wrappers
    and changes of dtype cannot leave them undefined. A copy of the module starts with new counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss_scale = torch.ones((), dtype=torch.float32, device="cpu")
        """() float32: the scale that `set_loss_scale` set last."""
        self.loss_scale_is_set = False
        """Whether `set_loss_scale` has been called."""
        self.passes = BackwardPasses(self)
        """Counts the layer's backward passes."""
        self._injections: list[weakref.ref[Injection]] = []
        """The injections that may still be collected."""
        self._was_compiled = False
        """Whether the last call was compiled."""

    def inject_loss(self, y: Tensor, loss: Tensor, share: float, is_half: bool) -> Tensor:
        """Return `y` with the loss attached: a backward pass through the result also propagates the
        loss.

        Args:
            y: any shape, on the path to the main loss.
            loss: (), differentiable.
            share: a further factor on the gradient of the loss, besides the loss's weight.
            is_half: whether `y` was computed in float16.
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

    def _inject_between_graphs(
        self, y: Tensor, loss: Tensor, share: float, is_half: bool
    ) -> Tensor:
        """Inject a loss by code that is not compiled, between two compiled graphs."""
        return self._inject_now(y, loss, share, is_half)

    if not TAKES_OBJECTS:  # the decorator imports torch's compiler, which takes seconds
        _inject_between_graphs = torch.compiler.disable(_inject_between_graphs)

    def _inject_now(self, y: Tensor, loss: Tensor, share: float, is_half: bool) -> Tensor:
        """Inject a loss outside of compiled graphs, and remember it while it waits for its backward
        pass."""
        injection = Injection(self, loss, share, is_half)
        self._was_compiled = False
        if injection.turn is not None and not is_half:
            # for `interleaved.py`, which sets the loss scale of these layers
            injection.turn.injecting[id(self)] = self
        is_recomputed = torch._C._current_graph_task_id() != -1  # by a checkpoint, in backward
        if not is_recomputed:
            waiting = [each for each in self._living_injections() if each.loss is not None]
            self._injections = [weakref.ref(each) for each in (*waiting, injection)]
        injected: Tensor = InjectLoss.apply(y, loss, injection)
        return injected

    def take_losses(self) -> list[Tensor]:
        """Return this layer's part of `collect_losses`."""
        if self._was_compiled:
            raise InputError(
                f"collect_losses: the last call of a {type(self).__name__} was compiled, and its "
                "graph injects the losses: call set_loss_scale(model, share), or wrap the "
                "layer's forward in torch.compiler.disable"
            )
        turn = TURN.get()  # the micro-batch that runs, if several are in flight
        mine = []
        others = []
        for injection in self._living_injections():
            if turn is None or injection.turn is turn:
                mine.append(injection)
            else:
                others.append(injection)
        self._injections = [weakref.ref(injection) for injection in others]
        losses = [injection.collect() for injection in mine]
        return [loss for loss in losses if loss is not None]

    def _living_injections(self) -> list[Injection]:
        """Return the injections that a graph still keeps alive."""
        injections = [reference() for reference in self._injections]
        return [injection for injection in injections if injection is not None]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this module alone: counts and graphs."""
        state = dict(self.__dict__)
        del state["passes"]
        del state["_injections"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.passes = BackwardPasses(self)
        self._injections = []


def _trainable(layer: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a layer that have gradients."""
    found = []
    for module in layer.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found.append(parameter)
    return found


def _are_same(some: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
    """Return whether both lists hold the same objects, in the same order."""
    return len(some) == len(others) and all(one is other for one, other in zip(some, others))


def _versions(parameters: list[nn.Parameter]) -> list[int]:
    """Return each parameter's version, which counts its in-place changes."""
    return [parameter._version for parameter in parameters]
