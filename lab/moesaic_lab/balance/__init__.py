"""`moesaic bench balance`: answers to skewed routing, in turn on an emulated cluster, with virtual compute."""
