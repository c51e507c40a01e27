"""Triton kernels for Ampere, Ada and Hopper, in bfloat16, float16 and float32. One op per file.

The tests compare every op with an oracle in plain torch, under Triton's interpreter.
`docs/kernels_gpu.md` explains the kernels. Importing a module of this package imports Triton;
importing `moesaic.kernels` or the layer does not.
"""
