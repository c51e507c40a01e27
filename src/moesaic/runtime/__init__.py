"""What happens around a running layer: the routing cache that replays routing, and expert telemetry."""
