"""The commands `moesaic bench` and `moesaic reproduce`."""
