"""Plain reference implementations of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.activation import hidden_rows
from moesaic.kernels.permute import Permutation
from moesaic.kernels.work import ExpertWork


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return the hidden rows of SwiGLU from its formula, in float64."""
    gate = gate.double()
    up = up.double()
    return gate / (1 + torch.exp(-gate)) * up


def expert_ffn_reference(work: ExpertWork) -> Tensor:
    """Run the experts row by row in float64, differentiable."""
    x = work.x.double()
    double = torch.float64
    token = torch.arange(len(x)) if work.dispatch is None else work.dispatch.token
    num_out = len(x) if work.dispatch is None else len(work.dispatch.starts)
    out = [torch.zeros(x.shape[1], dtype=double) for _ in range(num_out)]
    expert = 0
    for row, own_token in enumerate(token.tolist()):
        while row >= int(work.ends[expert]):
            expert += 1
        weight = torch.ones((), dtype=double) if work.gates is None else work.gates[row].double()
        expert_input = x[own_token] * (weight if work.gates_first else 1)
        pre = [matrix.double() @ expert_input for matrix in work.up[expert]]
        if work.up_bias is not None:
            pre = [part + bias.double() for part, bias in zip(pre, work.up_bias[expert])]
        result = work.down[expert].double() @ hidden_rows(pre, work.activation, work.clamp)
        if work.down_bias is not None:
            result = result + work.down_bias[expert].double()
        out[own_token] = out[own_token] + result * (1 if work.gates_first else weight)
    return torch.stack(out) if out else x.new_zeros(0, x.shape[1])


def grouped_matmul_reference(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix, in a loop over experts."""
    starts = [0, *ends.tolist()[:-1]]
    return torch.cat([x[a:b] @ w[e].T for e, (a, b) in enumerate(zip(starts, ends.tolist()))])


def unpermute_reference(rows: Tensor, permutation: Permutation) -> Tensor:
    """Sum each token's rows in float64, in a loop over rows."""
    out = torch.zeros(
        permutation.num_tokens, rows.shape[1], dtype=torch.float64, device=rows.device
    )
    for row, token in zip(rows, permutation.token.tolist()):
        out[token] += row
    return out
