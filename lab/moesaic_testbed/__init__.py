"""An emulated cluster on one Linux machine: real processes, real bytes, really slow links. See
docs/testbed.md."""

from moesaic_testbed.bed import Bed, Change
from moesaic_testbed.cluster import Cluster, Launcher, RankError, cluster, refusal
from moesaic_testbed.messages import Carried

__all__ = ["Bed", "Carried", "Change", "Cluster", "Launcher", "RankError", "cluster", "refusal"]
