"""Hugging Face transformers as a baseline of the text benchmark. Needs `pip install 'verax[parity]'`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from verax.errors import MissingDependencyError
from verax.machine import num_cores

if TYPE_CHECKING:
    from verax.bench.text.workload import Workload

__all__ = ["TransformersSide"]


class TransformersSide:
    """The same checkpoint in PyTorch on the CPU or its GPU, with all cores."""

    def __init__(self, folder: Path, dtype: str):
        try:
            import torch
            import transformers
        except ImportError as error:
            raise MissingDependencyError(
                "comparing with transformers needs it and torch: pip install 'verax[parity]'"
            ) from error
        self._torch = torch
        self._versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(num_cores())
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model: Any = model.to(self._device).eval()

    def versions(self) -> dict[str, Any]:
        """Versions, threads and device of this side."""
        return {**self._versions, "torch_threads": self._torch.get_num_threads(), "torch_device": self._device}

    def naive(self, workload: Workload) -> int:
        """One prompt after the other."""
        pairs = zip(workload.prompts, workload.max_tokens, strict=True)
        return sum(self._generate([prompt], count, workload.temperature) for prompt, count in pairs)

    def batched(self, workload: Workload) -> int:
        """All prompts in one batch, padded on the left; it runs until the longest answer is done."""
        return self._generate(list(workload.prompts), max(workload.max_tokens), workload.temperature)

    def _generate(self, prompts: list[tuple[int, ...]], count: int, temperature: float) -> int:
        torch = self._torch
        width = max(map(len, prompts))
        tokens = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        # top_k and top_p off: generate's own default would keep 50 tokens, which is other work than ours.
        how = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        with torch.inference_mode():
            out = self._model.generate(
                tokens.to(self._device),
                attention_mask=mask.to(self._device),
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
                **how,
            )
        return int(out[:, width:].cpu().numel())
