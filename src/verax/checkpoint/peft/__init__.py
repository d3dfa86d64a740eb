"""LoRA adapters as PEFT saves them: a folder with adapter_config.json and the matrices of each adapted module."""

from verax.checkpoint.peft.adapter import CONFIG, Adapter, Pair
from verax.checkpoint.peft.merge import merge
from verax.checkpoint.peft.save import save_adapter

__all__ = ["CONFIG", "Adapter", "Pair", "merge", "save_adapter"]
