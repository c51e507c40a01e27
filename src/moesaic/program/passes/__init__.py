"""Passes: published techniques as functions from a program to a program, one per module."""
