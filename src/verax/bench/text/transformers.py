"""Hugging Face transformers as a baseline of the text benchmark. Needs `pip install 'verax[parity]'`."""

from __future__ import annotations

from functools import partial
from typing import Any

from verax.bench.harness import Side, import_torch, torch_versions
from verax.bench.text.workload import Workload
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError

__all__ = ["transformers_sides"]


def transformers_sides(opened: Checkpoint, dtype: str, workload: Workload) -> dict[str, Side]:
    """Sides that run the checkpoint in PyTorch on the CPU or its GPU: prompt by prompt, and in one batch.

    Raises:
        InvalidParameterError: for a GGUF file.
        MissingDependencyError: without torch or transformers.
    """
    if opened.metadata:
        raise InvalidParameterError(
            f"against: {opened.folder} is a GGUF file; transformers is compared on a checkpoint folder"
        )
    torch, transformers = import_torch("transformers")
    versions = torch_versions(torch, transformers)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(opened.folder, dtype=getattr(torch, dtype))
    generate = partial(_generate, torch, loaded.to(versions["torch_device"]).eval(), workload.temperature)
    pairs = list(zip(workload.prompts, workload.max_tokens, strict=True))
    naive = lambda: sum(generate([prompt], count) for prompt, count in pairs)
    # The batch runs until the longest answer is done.
    batched = lambda: generate(list(workload.prompts), max(workload.max_tokens))
    sides = {"transformers naive": Side(naive, versions=versions)}
    return sides | ({"transformers batched": Side(batched, versions=versions)} if len(pairs) > 1 else {})


def _generate(torch: Any, model: Any, temperature: float, prompts: list[tuple[int, ...]], count: int) -> int:
    """Generate `count` tokens for each prompt, padded on the left; the number of all new tokens."""
    width = max(map(len, prompts))
    tokens = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    # top_k and top_p off: generate's own default would keep 50 tokens, which is other work than ours.
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        out = model.generate(
            tokens.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            **(sampling if temperature else {"do_sample": False}),
        )
    return int(out[:, width:].cpu().numel())
