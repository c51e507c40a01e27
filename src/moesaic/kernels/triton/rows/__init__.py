"""Triton kernels on rows (sort, sum, top-k), and helpers for launching kernels. The expert stage is
not part of it."""
