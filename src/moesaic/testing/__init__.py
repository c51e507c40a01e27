"""The dense reference against which every fast path is compared. `moesaic check` and the tests use
it; the layer never does."""
