"""Training: configuration, data, the loop, checkpoints and metrics of `moesaic train`."""
