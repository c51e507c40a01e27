"""What chooses, call by call, among the programs and tables that a plan may run."""
