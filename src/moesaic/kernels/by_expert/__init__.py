"""The expert stage on a CPU: one expert after the other, from gathering its tokens to adding up its results.

An expert's rows are gathered, multiplied, activated, multiplied again and added to their tokens while they are in the
processor's cache: no buffer of all rows is written but the pre-activations that backward keeps, and weight gradients go
straight to where they belong. All it needs beside torch's own products is scratch memory for one block of rows.
Deterministic: an expert has a token once at most, and experts are added up in a fixed order.
"""

from __future__ import annotations

from moesaic.kernels.by_expert.passes import backward, forward

__all__ = ["backward", "forward"]
