"""Transports: what moves the bytes of a movement between ranks. They know no program and no schedule."""
