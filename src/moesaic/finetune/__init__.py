"""`moesaic finetune`: adapters for a model of transformers, over experts in NF4 that several ranks
share."""
