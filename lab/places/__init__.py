"""The same smoke test in every place where somebody may meet Moesaic: `python3 -m places`, from
this folder's parent.

A machine that builds Moesaic has settings, caches and versions that a stranger's has not. So each
place starts from a fresh clone, an empty environment and variables of its own. Needs the standard
library alone, since it runs before any set-up.
"""
