"""The laboratory: benchmarks of Moesaic, and comparisons of its figures with published ones."""
