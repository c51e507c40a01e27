"""How checkpoints are stored without pickles: tensors of all ranks, and states of nested values."""
