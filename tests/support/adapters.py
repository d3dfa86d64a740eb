"""LoRA adapters with random matrices of real spread, in folders as PEFT saves them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
LINEAR = (*ATTENTION, *DELTA, "gate_proj", "up_proj", "down_proj", "gate_up_proj")


def linear_sizes(weights, targets=LINEAR):
    """Outputs and inputs of a checkpoint's modules with these names, of its weights by key."""
    modules = {key.removesuffix(".weight"): weight.shape for key, weight in weights.items() if key.endswith(".weight")}
    return {module: size for module, size in modules.items() if module.split(".")[-1] in targets}


def adapter_weights(sizes, *, seed=0, rank=4, ranks=None, spread=1.0):
    """A and B for each module, by PEFT's keys. A product of both is `spread` times as large as a weight of unit scale.

    Args:
        sizes: outputs and inputs by module.
        seed: seed of the random numbers.
        rank: rank of the modules that `ranks` does not have.
        ranks: rank by module.
        spread: size of the change relative to a weight that preserves the scale of its inputs, at `lora_alpha == r`.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for module, (size_out, size_in) in sizes.items():
        r = (ranks or {}).get(module, rank)
        a, b = rng.standard_normal((r, size_in)), rng.standard_normal((size_out, r))
        weights[f"base_model.model.{module}.lora_A.weight"] = (a * size_in**-0.5).astype(np.float32)
        weights[f"base_model.model.{module}.lora_B.weight"] = (spread * b * r**-0.5).astype(np.float32)
    return weights


def save_adapter(folder, weights, *, rank=4, **settings):
    """Write an adapter's folder; `settings` go to adapter_config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": "somebody/tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted({key.split(".")[-3] for key in weights}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def changed(weights, adapter, *, scale=1.0):
    """A checkpoint's weights with an adapter's changes added, float32."""
    result = dict(weights)
    for key in adapter:
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") + ".weight"
            change = adapter[key.replace("lora_A", "lora_B")] @ adapter[key]
            result[name] = weights[name] + np.float32(scale) * change
    return result


def tiny_adapter(model, folder, *, rank=3):
    """The request for a new adapter of all linear layers of a checkpoint's folder."""
    from verax import LoRARequest

    sizes = linear_sizes(load_file(model / "model.safetensors"))
    weights = adapter_weights(sizes, rank=rank, spread=0.5)
    return LoRARequest("adapter", 1, str(save_adapter(folder, weights, rank=rank)))
