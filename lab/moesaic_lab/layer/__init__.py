"""`moesaic bench layer`: plans of one MoE layer, timed in turn on an emulated cluster with virtual
compute."""
