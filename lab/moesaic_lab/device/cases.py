"""The cases of `moesaic bench device`: shapes, and inputs from which any linear router makes the
choices of the case.

A token's first features are its logits, and the router's matrix is the identity on them. Every
layer in the comparison runs its own unchanged router, and all route identically. Balanced: token t
chooses `top_k` consecutive experts from `top_k * t` on, modulo their number. Zipf 0.7: the logit of
expert i is -0.7 ln i plus unit normal noise. The fullest expert then has 2.3 (of 8 experts), 7.7
(32) and 6.5 (64) times the mean load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from moesaic.layer import MoE
from moesaic.routing.routers import SoftmaxTopK

Routed = Literal["balanced", "zipf"]
ZIPF_EXPONENT = 0.7
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ACTIVATIONS = ("gelu", "swiglu")


@dataclass(frozen=True, kw_only=True)
class DeviceShape:
    """The sizes of one layer and its number of tokens."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int

    @property
    def name(self) -> str:
        """The shape's name in claims."""
        return f"t{self.tokens}_d{self.dim}_h{self.hidden}_e{self.experts}_k{self.top_k}"


SHAPES = (
    DeviceShape(tokens=2048, dim=512, hidden=1024, experts=8, top_k=2),
    DeviceShape(tokens=2048, dim=512, hidden=1024, experts=32, top_k=2),
    DeviceShape(tokens=4096, dim=512, hidden=256, experts=64, top_k=8),
)


@dataclass(frozen=True, kw_only=True)
class DeviceCase:
    """One case: a layer's shape, dtype and activation, and its routing."""

    shape: DeviceShape
    dtype: str
    activation: str
    routed: Routed

    @property
    def name(self) -> str:
        """The case's name in progress messages."""
        return f"{self.shape.name} {self.dtype} {self.activation} {self.routed}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of activations and weights; routers compute in float32."""
        return DTYPES[self.dtype]

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return the tokens, which require a gradient, and the gradient of the output, both
        (tokens, dim)."""
        shape = self.shape
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape.tokens, shape.dim, generator=generator)
        logits = torch.randn(shape.tokens, shape.experts, generator=generator)
        if self.routed == "zipf":
            logits -= ZIPF_EXPONENT * torch.arange(1, shape.experts + 1).log()
        else:
            first = shape.top_k * torch.arange(shape.tokens).unsqueeze(1)
            chosen = (first + torch.arange(shape.top_k)) % shape.experts  # (tokens, top_k)
            # small noise, so that the 2.0 added to the chosen experts' logits decides
            logits = (0.1 * logits).scatter_add(1, chosen, torch.full(chosen.shape, 2.0))
        x[:, : shape.experts] = logits
        dy = torch.randn(shape.tokens, shape.dim, generator=generator)
        return x.to(self.torch_dtype).requires_grad_(), dy.to(self.torch_dtype)

    def layer(self) -> MoE:
        """Return our layer with default options and a router matrix that returns the logits in the
        inputs."""
        shape = self.shape
        torch.manual_seed(0)
        layer = MoE(shape.dim, shape.hidden, shape.experts, shape.top_k, experts=self.activation)
        assert isinstance(layer.router, SoftmaxTopK)
        with torch.no_grad():
            layer.router.weight.copy_(torch.eye(shape.experts, shape.dim))
        return layer.to(self.torch_dtype)


def cases(shapes: tuple[DeviceShape, ...] = SHAPES) -> list[DeviceCase]:
    """Return all combinations of shape, dtype, activation and routing."""
    return [
        DeviceCase(shape=shape, dtype=dtype, activation=activation, routed=routed)
        for shape in shapes
        for dtype in DTYPES
        for activation in ACTIVATIONS
        for routed in ("balanced", "zipf")
    ]


def step(module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Run forward and backward, with the input's gradient, after clearing all gradients as a
    training step does."""
    x.grad = None
    for parameter in module.parameters():
        parameter.grad = None
    module(x).backward(dy)


def peak_growth_bytes(call: Callable[[], object]) -> int:
    """Return the peak bytes of tensors during a call, minus those alive before it.

    Memory that libraries allocate without torch, such as packed operands of a matrix product, is
    not counted for any method.

    Args:
        call: the function to watch. Its result counts, as it is freed only after the call.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    del kept
    results = profiler.profiler
    assert results is not None
    memory = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        if event.device_type() == torch._C._autograd.DeviceType.CPU:
            alive += event.nbytes()  # negative when memory is freed
            peak = max(peak, alive)
    return peak
