"""Pre-training of OLMoE by transformers' Trainer: python examples/hf/olmoe.py [NAME]

The family: softmax router over all experts, weights as they are.
examples/recipes/hf_trainer.py shows the same on several ranks.
"""

from small import pretrain

pretrain("olmoe")
