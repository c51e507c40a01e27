"""Measured comparisons: what `moesaic bench` runs."""
