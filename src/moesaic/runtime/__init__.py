"""What happens around a running layer: the tape that replays routing, and expert telemetry."""
