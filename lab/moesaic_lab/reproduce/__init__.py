"""The simulator against the published figures of five papers: `moesaic reproduce`. Needs no torch."""
