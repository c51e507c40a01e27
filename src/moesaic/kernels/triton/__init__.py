"""The layer's arithmetic as Triton kernels: Ampere, Ada and Hopper; bfloat16, float16 and float32. One op a file.

Every op has its readable oracle in the same file and its test under Triton's interpreter; `docs/kernels_gpu.md` explains
them. Importing this package imports Triton; `kernels/__init__.py` and the layer do not.
"""
