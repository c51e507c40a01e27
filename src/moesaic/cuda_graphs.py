"""CUDA graphs of a layer on one GPU: its kernels are recorded once, forward and backward, and then
started by one call each.

A graph holds fixed memory, and `torch.cuda.make_graphed_callables` leaves the consequences to its
caller. Here results and gradients are copied out of that memory, and what the graph does not fit is
refused. Auxiliary losses are results of the graph and are injected outside of it, so that
`set_loss_scale`, `collect_losses` and gradient accumulation work as they do without a graph.

*Static* tensors are those of the graph's fixed memory; the *leaves* are what the backward graph
computes gradients of: x, if it has a gradient, and the trained parameters.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.errors import InputError
from moesaic.experts.experts import compute_dtype
from moesaic.kernels.operator import on_device_of
from moesaic.layer import MoE
from moesaic.routing.injection import collect_losses
from moesaic.runtime.routing_cache import is_recomputing

WARM_UPS = 3
"""Calls before the capture. The first ones compile kernels and make caches, for which the host may
wait; the last may not."""
Results = Sequence[Tensor | None]
"""A forward graph's y and auxiliary losses, or a backward graph's gradients of the leaves; None for
a leaf without a gradient."""


class Replayable(Protocol):
    """Work that can be run again: a CUDA graph."""

    results: Results
    """Tensors that each replay overwrites."""

    def replay(self) -> None:
        """Run the work again, on what is now in the memory that it reads."""


class RecordedGraph:
    """A CUDA graph of a function's work.

    Args:
        run: the function; returns the results.
        pool: the memory pool of graphs that are replayed in turn.
    """

    def __init__(self, run: Callable[[], Results], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self.results = run()

    def replay(self) -> None:
        """Start the recorded kernels."""
        self._graph.replay()


def capture(
    layer: MoE, x: Tensor, *, mask: Tensor | None = None, token_ids: Tensor | None = None
) -> CapturedMoE:
    """Record a layer's forward and backward pass as CUDA graphs, and return a function of the same
    inputs that replays them.

    Use it in place of the layer: `moe = capture(layer, x)`, then `y = moe(x)`, or within a model
    `block.moe.forward = capture(block.moe, x)`. It pays where the host takes longer to start the
    kernels than the GPU to run them. The layer is on one GPU; capacity, router and losses are any
    that do not make the host wait. Capture between optimizer steps, after the layer was moved, cast
    and frozen, and after its hyperparameters were set: the graphs keep what they saw.

    Args:
        x: tokens of the shape, dtype and `requires_grad` of all further calls; the values do not
            matter.
        mask: as for the layer, if the further calls have one.
        token_ids: as for the layer, if the further calls have them.

    Raises:
        InputError: the layer or `x` is not on a GPU, the layer is on a mesh or has hooks, the call
            is inside an activation checkpoint or under autocast with its cache, or it makes the
            host wait.
    """
    reason = refusal(layer, x)
    if reason:
        raise InputError(f"MoE cannot be captured: {reason}")
    inputs = {"x": x, "mask": mask, "token_ids": token_ids}
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    captured: CapturedMoE = on_device_of(x, lambda: CapturedMoE(layer, given, CudaRecorder()))
    return captured


def refusal(layer: MoE, x: Tensor) -> str:
    """Return why a call cannot be captured and what to do instead, as far as that is known
    beforehand; "" if nothing is."""
    if layer.on_mesh is not None:
        return (
            "it is on a mesh, whose messages depend on the routing: capture a layer before "
            "parallelize, on one GPU"
        )
    for module in layer.modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return (
                "it has hooks, which would not run in a replay: register them on a module around it"
            )
    if layer.routing_cache is not None or is_recomputing():
        return (
            "it is inside an activation checkpoint, which would run it twice: capture the layer "
            "outside"
        )
    if torch.is_autocast_enabled(x.device.type) and torch.is_autocast_cache_enabled():
        return "autocast keeps its casts: write torch.autocast(..., cache_enabled=False)"
    if x.device.type != "cuda":
        return (
            f"x is on {x.device}, and CUDA graphs are of a GPU: call the layer itself, or move "
            "both to a GPU"
        )
    return ""


class CudaRecorder:
    """Warms up and records functions on the current GPU, each in the same memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run a function several times on a stream of its own.

        Raises:
            InputError: the last time, the host waited for the GPU.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS - 1):
                run()
            # now torch raises an error where the host would wait
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            except RuntimeError as error:
                if "synchronizing" not in str(error):  # torch's word where the host would wait
                    raise
                raise InputError(
                    f"MoE cannot be captured: the host waits for the GPU in {_place(error)}"
                ) from error
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, run: Callable[[], Results]) -> Replayable:
        """Record a function's work.

        Raises:
            InputError: the work cannot be in a graph.
        """
        try:
            return RecordedGraph(run, self._pool)
        except RuntimeError as error:
            if "captur" not in str(error):  # torch says capture, captured or capturing
                raise
            raise InputError(
                f"MoE cannot be captured: {str(error).splitlines()[0]}, in {_place(error)}"
            ) from error


def _place(error: Exception) -> str:
    """Return the last line of this library through which an exception came."""
    package = Path(__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if package in Path(frame.filename).parents
    ]
    if not frames:
        return "the capture"
    innermost = frames[-1]
    return f"{Path(innermost.filename).relative_to(package)}:{innermost.lineno}"


class CapturedMoE:
    """A layer's call as graphs; made by `capture`.

    A call in another mode than at the capture (training or evaluation, gradients on or off, another
    autocast dtype) runs the layer itself. One call's backward pass comes before the next call's
    forward pass.

    Args:
        inputs: by name, the tensors of its call.
        recorder: what warms up and records.
    """

    def __init__(self, layer: MoE, inputs: dict[str, Tensor], recorder: Any) -> None:
        self.layer = layer
        self._static = {
            name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for name, tensor in inputs.items()
        }
        """By name, the inputs that the graphs read."""
        layer.step_counts = layer.step_counts.to(inputs["x"].device)
        counts = layer.step_counts.clone()  # which warming up and capturing add to
        self._parameters = [
            parameter for parameter in layer.parameters() if parameter.requires_grad
        ]
        self._mode = _mode(layer, inputs["x"])
        """The mode of the capture; calls in others run the layer itself."""
        self._with_grad = torch.is_grad_enabled() and bool(self._leaves)
        """Whether calls have a backward pass."""

        recorder.warm_up(self._both)
        self._forward: Replayable = recorder.record(self._run)
        self._grads_in: Results = [
            torch.zeros_like(result) for result in self._forward.results if result is not None
        ]
        """Static: the gradients of the results, from which the backward graph computes."""
        self._backward: Replayable | None = None
        if self._with_grad:
            self._backward = recorder.record(self._gradients)

        layer.step_counts.copy_(counts)
        self._state = self._memory()
        """What `_memory` returned at the capture; the graphs are useless once it changes."""
        self._calls = 0
        """Number of replayed calls."""
        self._pending = 0
        """The number of the call whose activations the graph holds; 0 for none."""

    def __call__(
        self, x: Tensor, *, mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Tensor:
        """Run the layer: returns y of x's shape and dtype.

        Raises:
            InputError: an input is missing, or has another shape, dtype, device or `requires_grad`
                than at the capture; memory of the layer was replaced, or a parameter frozen or
                unfrozen; the call is inside an activation checkpoint.
        """
        given = {"x": x, "mask": mask, "token_ids": token_ids}
        if _mode(self.layer, x) != self._mode:
            # the class's, since the layer's own `forward` may be this object
            return type(self.layer).forward(self.layer, **given)  # type: ignore[arg-type, return-value]
        self._check({name: tensor for name, tensor in given.items() if tensor is not None})
        with torch.no_grad():
            for name, static in self._static.items():
                static.copy_(given[name])  # type: ignore[arg-type]
        if not self._with_grad:
            self._forward.replay()
            return _first(self._forward.results).clone()
        y, *losses = _Replay.apply(self, x, *self._parameters)
        is_half = compute_dtype(x.dtype, x.device) is torch.float16
        for loss in losses:  # share 1, since the loss is of this rank's tokens alone
            y = self.layer.inject_loss(y, loss, share=1, is_half=is_half)
        result: Tensor = y
        return result

    @property
    def _leaves(self) -> list[Tensor]:
        """The tensors whose gradients the graph computes."""
        x = self._static["x"]
        return [x, *self._parameters] if x.requires_grad else list(self._parameters)

    def _run(self) -> list[Tensor]:
        """Return the output and the losses of a call on the static inputs."""
        # the class's, since the layer's own `forward` may be this object
        y = type(self.layer).forward(self.layer, **self._static)  # type: ignore[arg-type]
        assert isinstance(y, Tensor)
        losses = collect_losses(self.layer) if self._with_grad else []
        return [y, *losses]

    def _gradients(self) -> list[Tensor | None]:
        """Return the gradients of the leaves."""
        return self._pulled_back(self._forward.results, self._grads_in)

    def _pulled_back(self, results: Results, grads: Results) -> list[Tensor | None]:
        """Return the gradients of the leaves from those of the results, `grads`."""
        outputs: list[Tensor] = []
        grads_in: list[Any] = []
        for result, grad in zip(results, grads):
            if result is not None and result.requires_grad:
                outputs.append(result)
                grads_in.append(grad)
        return list(torch.autograd.grad(outputs, self._leaves, grads_in, allow_unused=True))

    def _both(self) -> None:
        """Run the forward and the backward pass once, to warm up."""
        results = self._run()
        if self._with_grad:
            self._pulled_back(results, [torch.zeros_like(result) for result in results])

    def _memory(self) -> list[tuple[int, bool]]:
        """Return address and `requires_grad` of all tensors of the layer that the graphs read or
        write."""
        tensors = (*self.layer.parameters(), *self.layer.buffers(), self.layer.step_counts)
        return [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors]

    def _check(self, given: dict[str, Tensor]) -> None:
        """Refuse a call that does not fit the graphs."""
        if is_recomputing() or self.layer.routing_cache is not None:
            raise InputError(
                "a captured MoE was called inside an activation checkpoint: leave it outside"
            )
        described = _described(given)
        expected = _described(self._static)
        if described != expected:
            raise InputError(
                f"a captured MoE was called with {described}, captured with {expected}: call "
                "the layer itself"
            )
        if self._memory() != self._state:
            raise InputError(
                "a tensor of a captured MoE was replaced, frozen or unfrozen since: capture "
                "the layer again"
            )

    def replay_forward(self) -> tuple[int, list[Tensor]]:
        """Replay the forward pass; return the call's number, and copies of the output and the
        losses."""
        self._forward.replay()
        self._calls += 1
        self._pending = self._calls
        return self._calls, [
            result.detach().clone() for result in self._forward.results if result is not None
        ]

    def replay_backward(self, call: int, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Replay the backward pass of the last call; return copies of the gradients of x and of
        the parameters.

        Raises:
            InputError: the graph no longer holds that call's activations.
        """
        if call != self._pending or self._backward is None:
            raise InputError(
                "the backward pass of a captured MoE ran twice, or after a later call of it: a "
                "graph holds the activations of one call, so capture the layer once for each "
                "call that is open at the same time"
            )
        self._pending = 0
        for static, grad in zip(self._grads_in, grads):
            assert static is not None
            static.copy_(grad)
        self._backward.replay()
        results = [
            None if result is None else result.detach().clone() for result in self._backward.results
        ]
        # x is the first leaf only if it has a gradient
        return results if self._static["x"].requires_grad else [None, *results]


class _Replay(torch.autograd.Function):
    """A captured call as one operator of autograd, of x and the trained parameters."""

    @staticmethod
    def forward(
        ctx: Any, captured: CapturedMoE, x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.captured = captured
        ctx.call, results = captured.replay_forward()
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.captured.replay_backward(ctx.call, grads)


def _first(results: Results) -> Tensor:
    """Return the y of a forward graph's results."""
    y = results[0]
    assert y is not None
    return y


def _mode(layer: MoE, x: Tensor) -> tuple[Any, ...]:
    """Return what decides, besides its inputs, which work a call is: whether it trains, whether
    with gradients, and autocast's dtype."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return layer.training, torch.is_grad_enabled(), autocast


def _described(inputs: dict[str, Tensor]) -> str:
    """Return the properties of a call's inputs that its graphs fix."""
    described = []
    for name, tensor in inputs.items():
        gradient = " with gradient" if tensor.requires_grad else ""
        described.append(
            f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}{gradient}"
        )
    return ", ".join(described)
