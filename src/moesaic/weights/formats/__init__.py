"""The formats of checkpoints, by the names that `moesaic convert` takes; each is one file of rules."""

from __future__ import annotations

from moesaic.weights.formats.format import AbstractFormat
from moesaic.weights.formats.hub import Hub, Moesaic
from moesaic.weights.formats.megatron import Megatron
from moesaic.weights.formats.torchtitan import Torchtitan

FORMATS: dict[str, AbstractFormat] = {
    "hf": Hub(),
    "moesaic": Moesaic(),
    "torchtitan": Torchtitan(),
    "megatron": Megatron(),
}
"""A new format is one entry here and a class of its own; conversions, tests and the table of docs/convert.md follow."""
