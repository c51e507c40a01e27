"""The name that `moesaic.initial_values` had before: import from there."""

from moesaic.initial_values import Draw, SeededDraw, draw_globally, draw_nothing

__all__ = ["Draw", "SeededDraw", "draw_globally", "draw_nothing"]
