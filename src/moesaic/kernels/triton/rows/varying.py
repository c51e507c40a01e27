"""The arguments of kernels that change with the number of tokens."""

VARYING = ("num_rows", "capacity", "tiles", "programs", "num_copies", "blocks", "num_tokens")
"""Triton compiles a kernel apart for integers that 16 divides, and for 1. These stand in masks and
sums only, where neither makes faster code, and one more token would compile a layer again."""
