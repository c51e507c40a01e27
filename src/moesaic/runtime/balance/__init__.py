"""Balancing, the acting half: calls that replicate experts, run in slices, or move samples or experts."""
