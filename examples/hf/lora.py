"""LoRA by PEFT, on attention and on every expert: python examples/hf/lora.py [NAME]

Families with biases or matrices as in gpt-oss take the same two names of parameters.
"""

from datasets import Dataset
from peft import LoraConfig
from small import TEXTS, load, settings, show
from trl import SFTConfig, SFTTrainer

model, tokenizer = load("qwen3_moe")
adapter = LoraConfig(
    r=4,
    target_modules=["q_proj", "v_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
data = Dataset.from_dict({"text": TEXTS})
given = SFTConfig(**settings("runs/lora"), max_length=128, bf16=False)
trainer = SFTTrainer(
    model=model, args=given, train_dataset=data, processing_class=tokenizer, peft_config=adapter
)
trainer.train()
trainer.model.print_trainable_parameters()
show(trainer.state.log_history)
