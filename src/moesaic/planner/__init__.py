"""Predicts the costs of a program's tasks on a machine. Needs no torch."""
