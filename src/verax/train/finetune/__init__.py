"""Fine-tuning of language models on a user's examples: all weights, or LoRA adapters."""

from verax.train.finetune.lora import LoraSettings
from verax.train.finetune.run import FinetuneSettings, train_full, train_lora

__all__ = ["FinetuneSettings", "LoraSettings", "train_full", "train_lora"]
