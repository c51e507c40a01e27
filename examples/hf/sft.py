"""Supervised fine-tuning by TRL: python examples/hf/sft.py [NAME]"""

from datasets import Dataset
from small import TEXTS, load, settings, show
from trl import SFTConfig, SFTTrainer

model, tokenizer = load("qwen3_moe")
data = Dataset.from_dict({"text": TEXTS})
given = SFTConfig(**settings("runs/sft"), max_length=128, bf16=False)
trainer = SFTTrainer(model=model, args=given, train_dataset=data, processing_class=tokenizer)
trainer.train()
show(trainer.state.log_history)
