"""Routing traces of the laboratory: synthetic ones, and readers of what published systems
recorded."""
