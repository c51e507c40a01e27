"""`moesaic bench layer`: ways to run one MoE layer, in turn on an emulated cluster, with virtual compute."""
