"""`moesaic chaos`: kill, stop, disconnect and damage training runs by a seeded schedule, and check
that they recover."""
