"""The benchmark of the cost model: predicted times of layers compared with measured ones."""
