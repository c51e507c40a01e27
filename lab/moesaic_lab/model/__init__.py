"""Predicted times of layers beside measured ones."""
