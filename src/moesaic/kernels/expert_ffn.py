"""The expert stage as one differentiable operation: dispatch, two or three grouped products,
combine.

Saved for backward are the input, the routing, the weights and the pre-activations, R * H numbers
per up matrix. Backward gathers the rows and computes the activations again (docs/kernels.md counts
the bytes). Both passes are custom ops with fake implementations: `torch.compile` and export see one
node each, whichever implementation `pick.py` chooses.

An op takes tensors and plain values only, so a call (`ExpertWork`, which explains the letters of
the shapes) is flattened into its tensors and its settings. "Up" and "down" are the matrices that
read the token and that write the result; `pre` are the pre-activations, the outputs of up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moesaic.kernels.activation import Clamp
from moesaic.kernels.operator import on_device_of, operator
from moesaic.kernels.pick import expert_kernel
from moesaic.kernels.work import Dispatch, ExpertWork, Gradients, Wanted


def expert_ffn(work: ExpertWork, out_dtype: torch.dtype | None = None) -> Tensor:
    """Run the experts, differentiable in x, gates and the weights.

    Args:
        work: the call.
        out_dtype: dtype of the result; None for that of `work.x`.

    Returns:
        (T, D), or (R, D) without `work.dispatch`.
    """
    tensors, settings = _flatten(work)
    dtype = work.x.dtype if out_dtype is None else out_dtype
    y: Tensor = _ExpertFfn.apply(settings, dtype, *tensors)
    return y


def run_experts(work: ExpertWork, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Run the experts without autograd; return the result, in the dtype of `work.x` unless another
    is given, and the pre-activations, (R, C H), for `expert_gradients`."""
    kernel = expert_kernel(work.x.device, work.kernel)
    dtype = work.x.dtype if out_dtype is None else out_dtype
    result: tuple[Tensor, Tensor] = on_device_of(work.x, kernel.forward, work, dtype)
    return result


def expert_gradients(
    work: ExpertWork, pre: Tensor, dy: Tensor, *, deferred_wgrad: bool = False
) -> Gradients:
    """Compute all gradients without autograd.

    Args:
        work: the call.
        pre: the pre-activations that `run_experts` returned.
        dy: gradient of the result.
        deferred_wgrad: whether some weight-gradient products may be left to `Gradients.finish`.
    """
    kernel = expert_kernel(work.x.device, work.kernel)
    wanted = Wanted(deferred_wgrad=deferred_wgrad)
    dy = dy.to(work.x.dtype).contiguous()
    gradients: Gradients = on_device_of(work.x, kernel.backward, work, pre, dy, wanted)
    return gradients


CALL_SCHEMA = (
    "Tensor x, Tensor? gates, Tensor? token, Tensor? by_token, Tensor? starts, "
    "Tensor ends, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, "
    "int per_token, bool has_unsent, str activation, float[] clamp, bool gates_first, str kernel"
)
"""The flattened schema of an `ExpertWork`: its tensors, then its settings. `per_token` is 0 if the
number of rows per token varies; `clamp` is empty for None."""


def _flatten(work: ExpertWork) -> tuple[list[Tensor | None], tuple[Any, ...]]:
    """Flatten a call into its tensors and its settings, both in the order of `CALL_SCHEMA`."""
    dispatch = work.dispatch
    indices: list[Tensor | None] = [None, None, None]  # token, by_token and starts
    per_token = 0
    has_unsent = False
    if dispatch is not None:
        indices = [dispatch.token, dispatch.by_token, dispatch.starts]
        per_token = dispatch.per_token or 0
        has_unsent = dispatch.has_unsent
    tensors = [
        work.x,
        work.gates,
        *indices,
        work.ends,
        work.up,
        work.up_bias,
        work.down,
        work.down_bias,
    ]
    clamp = [] if work.clamp is None else work.clamp.numbers
    settings = (per_token, has_unsent, work.activation, clamp, work.gates_first, work.kernel)
    return tensors, settings


def _unflatten(
    x: Tensor,
    gates: Tensor | None,
    token: Tensor | None,
    by_token: Tensor | None,
    starts: Tensor | None,
    ends: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    per_token: int,
    has_unsent: bool,
    activation: str,
    clamp: Sequence[float],
    gates_first: bool,
    kernel: str,
) -> ExpertWork:
    """Rebuild the call that `_flatten` flattened."""
    dispatch = None
    if token is not None:
        assert by_token is not None
        assert starts is not None
        dispatch = Dispatch(
            token=token,
            by_token=by_token,
            starts=starts,
            per_token=per_token or None,
            has_unsent=has_unsent,
        )
    return ExpertWork(
        x=x,
        dispatch=dispatch,
        gates=gates,
        gates_first=gates_first,
        ends=ends,
        up=up,
        up_bias=up_bias,
        down=down,
        down_bias=down_bias,
        activation=activation,
        clamp=Clamp(*clamp) if clamp else None,
        kernel=kernel,
    )


@operator("expert_forward", schema=f"({CALL_SCHEMA}, ScalarType out_dtype) -> (Tensor, Tensor)")
def expert_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the result of a call, in `out_dtype`, and its pre-activations."""
    *call, out_dtype = arguments
    work = _unflatten(*call)
    return expert_kernel(work.x.device, work.kernel).forward(work, out_dtype)


@torch.library.register_fake(expert_forward.overload)
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    *call, out_dtype = arguments
    work = _unflatten(*call)
    rows = work.x if work.dispatch is None else work.dispatch.token
    pre = work.x.new_empty(rows.shape[0], work.up.shape[1] * work.up.shape[2])
    return work.x.new_empty(work.x.shape, dtype=out_dtype), pre


@register_flop_formula(torch.ops.moesaic.expert_forward)
def _(x, gates, token, by_token, starts, ends, up, up_bias, down, *_, **__) -> int:  # type: ignore[no-untyped-def]
    """Count one product of all rows per matrix; the arguments are shapes."""
    num_ups = up[1]
    return (num_ups + 1) * _product_flops(x, token, down)


@operator(
    "expert_backward",
    schema=(
        f"({CALL_SCHEMA}, Tensor pre, Tensor dy, bool wants_x, bool wants_gates, bool "
        "wants_weights) -> Tensor[]"
    ),
    refuses_gradient=True,
)
def expert_backward(*arguments: Any) -> list[Tensor]:
    """Return the gradients of x, gates, up, up_bias, down and down_bias.

    Unwanted gradients of x and gates are empty tensors. Those of absent biases, and unwanted ones
    of parameters, are left out.
    """
    *call, pre, dy, wants_x, wants_gates, wants_weights = arguments
    work = _unflatten(*call)
    wanted = Wanted(x=wants_x, gates=wants_gates, weights=wants_weights)
    kernel = expert_kernel(work.x.device, work.kernel)
    gradients = kernel.backward(work, pre, dy.to(work.x.dtype).contiguous(), wanted)
    d_x = work.x.new_empty(0) if gradients.x is None else gradients.x
    d_gates = work.x.new_empty(0) if gradients.gates is None else gradients.gates
    return [d_x, d_gates, *gradients.weights]


@torch.library.register_fake(expert_backward.overload)
def _(*arguments: Any) -> list[Tensor]:
    """Return empty tensors of the shapes that `expert_backward` returns."""
    *call, _pre, _dy, wants_x, wants_gates, wants_weights = arguments
    work = _unflatten(*call)
    x = work.x
    gates = work.gates
    gradients = [x.new_empty(x.shape if wants_x else (0,))]
    if gates is not None and wants_gates:
        gradients.append(gates.new_empty(gates.shape))
    else:
        gradients.append(x.new_empty(0))
    if wants_weights:
        for weight in (work.up, work.up_bias, work.down, work.down_bias):
            if weight is not None:
                gradients.append(weight.new_empty(weight.shape))
    return gradients


@register_flop_formula(torch.ops.moesaic.expert_backward)
def _(x, gates, token, by_token, starts, ends, up, up_bias, down, *others, **__) -> int:  # type: ignore[no-untyped-def]
    """Count the products of all rows; the arguments are shapes.

    One product gives the hidden rows' gradient, one per matrix its wgrad, and one per up matrix its
    part of the rows' gradient.
    """
    *_, gates_first, _kernel, _pre, _dy, wants_x, wants_gates, wants_weights = others
    num_ups = up[1]
    products = 1
    if wants_weights:
        products += num_ups + 1
    # gates that multiply the rows need the rows' gradient for their own
    if wants_x or (wants_gates and gates is not None and gates_first):
        products += num_ups
    return products * _product_flops(x, token, down)


def _product_flops(x: Sequence[int], token: Sequence[int] | None, down: Sequence[int]) -> int:
    """Return the FLOPs of multiplying every row by its expert's matrix once; the arguments are
    shapes."""
    num_rows = x[0] if token is None else token[0]
    return 2 * num_rows * down[1] * down[2]


class _ExpertFfn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, settings: tuple[Any, ...], out_dtype: torch.dtype, *tensors: Tensor | None
    ) -> Tensor:
        y, pre = expert_forward(*tensors, *settings, out_dtype)
        ctx.settings = settings
        ctx.save_for_backward(*tensors, pre)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `forward`'s arguments that are wanted."""
        *tensors, pre = ctx.saved_tensors
        parameters = tensors[-4:]  # up, up_bias, down, down_bias; None for absent biases
        wants_x, wants_gates = ctx.needs_input_grad[2:4]  # after settings and out_dtype
        wants_weights = any(ctx.needs_input_grad[-4:])
        d_x, d_gates, *d_weights = expert_backward(
            *tensors, *ctx.settings, pre, dy, wants_x, wants_gates, wants_weights
        )

        # the computed gradients are those of the parameters that there are, in order
        computed = iter(d_weights)
        d_parameters: list[Tensor | None] = [None] * len(parameters)
        if wants_weights:
            for index, parameter in enumerate(parameters):
                if parameter is not None:
                    d_parameters[index] = next(computed)

        d_x = d_x if wants_x else None
        d_gates = d_gates if wants_gates else None
        # settings, out_dtype, x, gates, token, by_token, starts, ends, parameters
        return None, None, d_x, d_gates, None, None, None, None, *d_parameters
