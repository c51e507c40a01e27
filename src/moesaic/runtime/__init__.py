"""Running layers: programs, messages, expert parallelism, routing replay for checkpointing, and
expert telemetry."""
