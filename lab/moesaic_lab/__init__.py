"""The laboratory: what measures Moesaic, and what puts its figures beside published ones."""
