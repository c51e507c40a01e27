"""The dense reference that every fast path is compared against. For tests; nothing in the library imports it."""
