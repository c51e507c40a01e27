"""Ranks and the communication between them: meshes, transports, collectives. This file imports
without torch."""
