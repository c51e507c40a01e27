"""Converts checkpoints between the formats of Hugging Face, torchtitan, Megatron-Core and Moesaic, and upcycles dense ones.

`moesaic.convert` is in `convert.py`; docs/convert.md documents it.
"""
