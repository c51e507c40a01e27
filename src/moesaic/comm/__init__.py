"""Ranks and the communication between them: meshes, transports, collectives. This file imports without torch."""

from typing import Literal

TransportName = Literal["auto", "gloo", "nccl", "sockets"]
"""Which library sends messages: gloo or sockets between CPUs, nccl between GPUs. auto is gloo on CPUs and nccl on GPUs."""
