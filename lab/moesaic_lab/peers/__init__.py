"""Other people's MoE layers, to be measured beside ours: the same weights, the same routing, another way to run."""
