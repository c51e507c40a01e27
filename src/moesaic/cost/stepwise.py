"""What a system reads and writes beyond fused kernels where it runs something step by step, as eager PyTorch does.

Every operation of eager PyTorch is a kernel that reads its inputs and writes its result. The numbers here are counted in the
sources that are named, never fitted to a step: bytes per value of two bytes, less those that a step's model already counts for
one fused kernel (`cost/step.py`, `cost/compute.py`). Broadcast factors, such as the cosines of a rotation, count nothing. A
test counts the same operations one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Stepwise = Literal[
    "norms",
    "rotation",
    "float32_rotation",
    "complex_rotation",
    "sinks",
    "activation",
    "permutation",
    "first_bias",
    "last_bias",
    "loss",
]
"""What may run step by step."""
STEPWISE: tuple[Stepwise, ...] = get_args(Stepwise)
"""All of it."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What one thing costs step by step, beyond one fused kernel."""

    forward: float
    """Bytes per value."""
    backward: float
    """Bytes per value."""
    kernels: tuple[int, int]
    """Kernels of a pass, forward and backward."""
    per_expert: tuple[int, int] = (0, 0)
    """Kernels of a pass for each expert of a rank, where they loop over experts."""

    def seconds(self, values: float, memory: float, launch: float, experts: float = 0.0) -> tuple[float, float]:
        """Return the seconds of a forward and a backward pass: those of the bytes, or of launching so many kernels.

        Args:
            values: of a rank.
            memory: bytes per second.
            launch: seconds that the host takes for a kernel.
            experts: of a rank.
        """
        both = zip((self.forward, self.backward), self.kernels, self.per_expert)
        there, back = (
            max(each * values / memory, (kernels + experts * looped) * launch) if values else 0.0
            for each, kernels, looped in both
        )
        return there, back


COSTS: dict[Stepwise, Steps] = {
    # transformers' RMSNorm: cast 6, square 8, mean 4, product 8, cast 6, weights 4; its gradient 92; fused 4 and 8.
    "norms": Steps(forward=32, backward=84, kernels=(7, 15)),
    # transformers' apply_rotary_pos_emb: products 8, turned halves 6, sum 6; its gradient 28; fused 4 and 8.
    "rotation": Steps(forward=16, backward=20, kernels=(5, 9)),
    # Automodel's, on a float32 copy: casts 12, four products of halves 16, two sums of halves 12, joined 8; 52 back.
    "float32_rotation": Steps(forward=44, backward=44, kernels=(9, 12)),
    # Automodel's of DeepSeek: a float32 copy 6, the complex product 8, cast 6; the same back; nothing fused is counted.
    "complex_rotation": Steps(forward=20, backward=20, kernels=(3, 3)),
    # Automodel's FlexAttention: the result times a float32 factor per head 6, cast 6; 34 back.
    "sinks": Steps(forward=12, backward=34, kernels=(4, 7)),
    # transformers' act_fn(gate) * up: 4 and 6 of a hidden value; back 12, 6, and 8 to join halves; fused 6 and 12.
    "activation": Steps(forward=4, backward=14, kernels=(2, 5)),
    # transformers' grouped_mm_experts_forward: rows of tokens, sorted, weighted, sorted back 4 each, summed 2; back 34.
    "permutation": Steps(forward=12, backward=24, kernels=(9, 12)),
    # Automodel's GroupedExpertsDeepEP._apply_bias of the first product's results: sums 4, joined 4; back 2 and 4.
    "first_bias": Steps(forward=8, backward=6, kernels=(1, 1), per_expert=(1, 1)),
    # The same and Megatron's TEGroupedMLP._apply_bias of the last one's, whose weights are float32: products 4, sums 10,
    # joined 8, cast 6; back 6, 6, 12, 12 and 4.
    "last_bias": Steps(forward=28, backward=40, kernels=(2, 3), per_expert=(2, 6)),
    # PyTorch's cross entropy is counted by its bytes per logit (`StepModel.loss_bytes`).
    "loss": Steps(forward=0, backward=0, kernels=(0, 0)),
}
"""Per value of: a block's norms and those of queries and keys; queries and keys that are rotated; what attention gives; hidden
values of experts; copies of tokens; both halves of experts' first results; copies of tokens again."""
