"""Language models with MoE layers, for `moesaic train`."""
