"""`moesaic fuzz`: every reader and every command line on inputs that nobody meant for them."""
