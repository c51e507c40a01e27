"""Balancing at run time: calls that replicate experts or run in slices, and moves of samples and
experts."""
