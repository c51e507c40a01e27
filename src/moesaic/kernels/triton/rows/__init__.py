"""Triton kernels on rows of tokens (order, sums, largest entries) and what launches kernels; nothing of the expert stage."""
