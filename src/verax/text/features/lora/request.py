"""`LoRARequest`: the adapter that a request goes through, by vLLM's names."""

from __future__ import annotations

import os
from dataclasses import dataclass

from verax.errors import InvalidParameterError

__all__ = ["LoRARequest"]


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, a number that stands for its weights, and its folder.

    The number decides what is shared: requests with equal numbers share the loaded adapter and cached prefixes. Other
    weights need another number.

    Raises:
        InvalidParameterError: for an empty name or path, or a number below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str]
    """Folder as PEFT saves it, with adapter_config.json and adapter_model.safetensors."""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidParameterError(f"lora_name: expected a name, got {self.lora_name!r}")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidParameterError(f"lora_int_id: expected a whole number of at least 1, got {number!r}")
        if not isinstance(self.lora_path, (str, os.PathLike)) or not os.fspath(self.lora_path):
            raise InvalidParameterError(f"lora_path: expected an adapter's folder, got {self.lora_path!r}")
