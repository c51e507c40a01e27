"""The memory that experts need per row, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Memory of experts, in numbers of the layer's dtype."""

    dim: int
    """Width of a token."""
    units: int
    """Rows into which one shard of an expert is packed when weights are sent: its hidden units."""
    unit_numbers: int
    """Numbers per packed row."""
    kept: int
    """Numbers per row that experts keep from forward to backward besides the row."""
    forward: int
    """Temporary numbers per row in the forward pass, besides input, result and what is kept."""
    backward: int
    """Temporary numbers per row in the backward pass, besides the input, its gradient, the result's gradient and what
    was kept."""
    element_bytes: int

    @classmethod
    def stacked(
        cls, dim: int, units: int, matrices: int, element_bytes: int, *, bias: bool = False
    ) -> ExpertSizes:
        """Return the sizes of built-in experts, which keep the results of all matrices that read the token.

        Args:
            dim: width of a token.
            units: hidden units of one shard of an expert.
            matrices: matrices per expert: 3 for SwiGLU, 2 for plain experts.
            element_bytes: bytes of a number.
            bias: whether experts have biases.
        """
        return cls(
            dim=dim, units=units, unit_numbers=matrices * dim + (matrices - 1) * bias, kept=(matrices - 1) * units,
            forward=units + dim, backward=matrices * units + 2 * dim, element_bytes=element_bytes,
        )  # fmt: skip
