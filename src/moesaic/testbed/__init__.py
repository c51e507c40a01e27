"""An emulated cluster on one Linux machine: real processes, real bytes, really slow links. See docs/testbed.md."""

from moesaic.testbed.bed import Bed, Change
from moesaic.testbed.cluster import Cluster, Launcher, RankError, cluster
from moesaic.testbed.messages import Carried
from moesaic.testbed.probe import refusal

__all__ = ["Bed", "Carried", "Change", "Cluster", "Launcher", "RankError", "cluster", "refusal"]
