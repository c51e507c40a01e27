"""The dense reference that every fast path is compared against. For `moesaic check` and tests; the layer never imports it."""
