"""Converts checkpoints between the formats of Hugging Face, torchtitan, Megatron-Core and Moesaic,
and upcycles dense ones.

`moesaic.convert` is in `convert.py`, and `load_model`, which loads quantized ones for fine-tuning,
in `load.py`; docs/convert.md and docs/transformers.md document them.
"""
