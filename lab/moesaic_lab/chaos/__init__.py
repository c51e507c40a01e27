"""`moesaic chaos`: runs that are killed, stopped, cut off and damaged by a seeded schedule, and what came of them."""
