"""Models built on the layer: what the trainer trains."""
