"""Measurements of `moesaic profile` on this machine: links, host, products, and the layers that
check its fits."""
