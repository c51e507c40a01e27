"""The program of one MoE layer: pure data. Built from a plan, rewritten by passes, then executed,
simulated or drawn."""
