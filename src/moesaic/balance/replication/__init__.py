"""Replication policies: for each call, which ranks help to compute the copies of other ranks'
experts."""
