"""Fine-tuning of language models on a user's examples: all weights, or LoRA adapters."""

from verax.train.finetune.run import train_full, train_lora
from verax.train.settings import FinetuneSettings, LoraSettings

__all__ = ["FinetuneSettings", "LoraSettings", "train_full", "train_lora"]
