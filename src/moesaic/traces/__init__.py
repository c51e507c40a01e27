"""Routing traces: which experts tokens chose, as recorded in training or made up, in files and as loads."""
