"""Routing: gates, selection, capacity, losses. It decides which token goes to which expert; it
moves nothing."""
