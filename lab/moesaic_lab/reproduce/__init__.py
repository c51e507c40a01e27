"""`moesaic reproduce`: compare the simulator with the published figures of five papers. Needs no
torch."""
