"""Reinforcement learning by TRL's GRPO, with a reward for digits: python examples/hf/grpo.py [NAME]

The model generates by transformers itself, so its experts run on Moesaic's kernels in generation
and in training.
"""

from datasets import Dataset
from small import load, settings, show
from trl import GRPOConfig, GRPOTrainer


def digits(completions: list[str], **_: object) -> list[float]:
    """Return the share of digits in each completion."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]


model, tokenizer = load("olmoe")
data = Dataset.from_dict({"prompt": [f"twice {count} is " for count in range(32)]})
given = GRPOConfig(
    **settings("runs/grpo", steps=3), num_generations=4, max_completion_length=8, bf16=False
)
trainer = GRPOTrainer(
    model=model, reward_funcs=digits, args=given, train_dataset=data, processing_class=tokenizer
)
trainer.train()
show(trainer.state.log_history)
