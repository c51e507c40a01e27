"""Memory of one layer at the sizes of Tutel's Table 5: measured for few tokens, where it takes
seconds, else by a formula.

Peak of all tensors in a training step of one layer, weights and gradients included: width 4,096,
hidden 4,096, top-2, 2 experts, float32, GELU; Tutel's figures from its Table 5. Sizes that were not
measured are by the formula of docs/kernels.md.

Tutel (Hwang et al. 2023), Table 5: model width = hidden width = 4,096, top-2, 2 experts per GPU,
float32. The figure is the peak of a training step of one layer: weights and their gradients, input,
output, both their gradients, and all intermediates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moesaic.layer import MoE
from moesaic.program.expert_sizes import block_limit
from moesaic_lab.claims import Claim
from moesaic_lab.device.cases import peak_growth_bytes, step
from moesaic_lab.reproduce.records import read_book

Row = dict[str, Any]
"""Tutel's figure and ours for a number of tokens."""
TUTEL_GIB = {
    tokens: read_book().value(f"tutel.memory.{tokens}") for tokens in (4096, 8192, 16384, 32768)
}
"""Tutel's figures in GiB, by number of tokens."""


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a layer with GELU experts on a CPU."""

    dim: int = 4096
    hidden: int = 4096
    experts: int = 2
    top_k: int = 2
    item: int = 4
    """Bytes per number."""

    def peak_bytes(self, tokens: int) -> int:
        """Return the peak bytes of a training step by the formula.

        It counts weights and gradients, four tensors of all tokens (x, y and their gradients), the
        pre-activations, and the scratch memory of one block of rows, since blocks run one after
        another. It omits the routing, which takes some bytes per token and expert.
        """
        weights = 2 * self.experts * self.dim * self.hidden  # an up and a down matrix per expert
        block_rows = block_limit((2 * self.hidden + 2 * self.dim) * self.item)
        # hidden, its gradient; rows, weighted, their gradient, a bag
        scratch = block_rows * (2 * self.hidden + 4 * self.dim)
        token_tensors = 4 * tokens * self.dim
        pre_activations = tokens * self.top_k * self.hidden
        weights_and_gradients = 2 * weights
        return (weights_and_gradients + token_tensors + pre_activations + scratch) * self.item


def measured_bytes(tokens: int, sizes: LayerSizes = LayerSizes()) -> int:
    """Measure the peak bytes of a training step by PyTorch's profiler, the weights and the input
    included."""
    torch.manual_seed(0)
    layer = MoE(sizes.dim, sizes.hidden, sizes.experts, sizes.top_k, experts="gelu")
    x = torch.randn(tokens, sizes.dim, requires_grad=True)
    dy = torch.randn(tokens, sizes.dim)
    before = sum(tensor.nbytes for tensor in (*layer.parameters(), x, dy))
    return before + peak_growth_bytes(lambda: step(layer, x, dy))


def rows(measured_up_to: int) -> list[Row]:
    """Return a row per number of tokens in Tutel's table.

    Args:
        measured_up_to: largest number of tokens to measure; for more tokens only the formula is
            evaluated.
    """
    table_rows = []
    for tokens, tutel in TUTEL_GIB.items():
        measured = None
        if tokens <= measured_up_to:
            measured = measured_bytes(tokens) / 2**30
        formula = LayerSizes().peak_bytes(tokens) / 2**30
        table_rows.append(
            {"tokens": tokens, "measured_gib": measured, "formula_gib": formula, "tutel_gib": tutel}
        )
    return table_rows


def claims(measured_rows: list[Row]) -> list[Claim]:
    """Return a claim per number of tokens, on the measured memory or, if it was not measured, on
    the formula's."""
    all_claims = []
    for row in measured_rows:
        is_measured = row["measured_gib"] is not None
        value = row["measured_gib"] if is_measured else row["formula_gib"]
        name = f"memory.table5.{row['tokens']}_tokens" + ("" if is_measured else ".by_formula")
        all_claims.append(Claim(name=name, value=value, unit="GiB", target=row["tutel_gib"]))
    return all_claims
