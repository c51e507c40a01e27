"""The errors that a person can cause; commands print them as one line. Our own invariants are `assert`ed instead."""


class InputError(ValueError):
    """Bad input: says what is wrong, where, and what to write instead. Commands leave with exit code 2."""


class TrainingError(RuntimeError):
    """Training cannot go on (the loss is not finite, say). Commands leave with exit code 1."""
