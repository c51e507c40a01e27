"""The arbiter and its parts: for each call, the choice among the programs and tables that a plan
may run."""
