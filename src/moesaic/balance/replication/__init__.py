"""Policies that replicate experts: which ranks compute copies of an expert that is not theirs, call by call."""
