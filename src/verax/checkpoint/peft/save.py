"""Writing of a LoRA adapter's folder as PEFT does (`PeftModel.save_pretrained`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from verax.checkpoint.peft.adapter import CONFIG, PREFIX, SAFETENSORS
from verax.files import atomic_path, write_json

__all__ = ["save_adapter"]


def save_adapter(
    folder: Path,
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    rank: int,
    alpha: float,
    base: str,
    modules: Iterable[str],
) -> Path:
    """Write adapter_model.safetensors and adapter_config.json; return the folder. One that exists is replaced.

    Args:
        folder: folder of the adapter.
        pairs: A `[r, in]` and B `[out, r]` without the scale, by module of the base.
        rank: rank of all pairs, r.
        alpha: numerator of the scale, which is `alpha / r`.
        base: hub id or path of the base.
        modules: all modules of the base that have a weight, by which the adapted ones are told from others.
    """
    settings = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": _targets(pairs, modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    tensors = {}
    for module, matrices in pairs.items():
        for role, matrix in zip("AB", matrices, strict=True):
            tensors[f"{PREFIX}{module}.lora_{role}.weight"] = np.ascontiguousarray(matrix)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder) as partial:
        partial.mkdir()
        write_json(partial / CONFIG, settings)
        save_file(tensors, partial / SAFETENSORS, metadata={"format": "pt"})
        (partial / SAFETENSORS).chmod((partial / CONFIG).stat().st_mode)  # the library's are their owner's only
    return folder


def _targets(adapted: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Names for `target_modules`: the last parts of modules' names, or whole ones where others have the same part.

    PEFT adapts every module whose name ends with one of them.
    """
    adapted = set(adapted)
    others = {module.split(".")[-1] for module in modules if module not in adapted}
    return sorted({last if (last := module.split(".")[-1]) not in others else module for module in adapted})
