"""Ranks and what carries messages between them: meshes, transports, collectives. Nothing in this file needs torch."""

from typing import Literal

TransportName = Literal["auto", "gloo", "nccl", "sockets"]
"""What carries messages: gloo or sockets between CPUs, nccl between GPUs; auto is gloo on CPUs and nccl on GPUs."""
