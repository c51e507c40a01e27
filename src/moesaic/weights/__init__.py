"""Checkpoints of other people's programs: converted into each other, checked, and dense ones made sparse.

`moesaic.convert` is in `convert.py`; docs/convert.md is its page.
"""
