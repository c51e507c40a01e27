"""Preference training by TRL's DPO: python examples/hf/dpo.py [NAME]

The reference model is a copy, so its experts run on Moesaic's kernels too.
"""

from copy import deepcopy

from datasets import Dataset
from small import load, settings, show
from trl import DPOConfig, DPOTrainer

model, tokenizer = load("olmoe")
counts = range(32)
data = Dataset.from_dict(
    {
        "prompt": [f"twice {count} is " for count in counts],
        "chosen": [f"{count * 2}." for count in counts],
        "rejected": [f"{count * 2 + 1}." for count in counts],
    }
)
given = DPOConfig(**settings("runs/dpo"), max_length=64, bf16=False)
trainer = DPOTrainer(
    model=model,
    ref_model=deepcopy(model),
    args=given,
    train_dataset=data,
    processing_class=tokenizer,
)
trainer.train()
show(trainer.state.log_history)
