"""What the tasks of a program cost on a machine. No torch."""
