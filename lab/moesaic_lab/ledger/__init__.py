"""The ledger of errors: what others measured beside what the models of time and memory say, and what was fitted."""
