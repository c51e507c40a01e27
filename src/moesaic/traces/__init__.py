"""Routing traces: the experts that tokens chose, recorded in training or synthetic; their files and
statistics."""
