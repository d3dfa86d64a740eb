"""LoRA files (Hu et al., 2021, arXiv:2106.09685) for Wan and SkyReels-V2, added to weights as they are loaded.

A pair of thin matrices A `[r, in]` and B `[out, r]` changes a weight by `scale * alpha / r * B A`. The formats that are
in use differ in names only: diffusers' and PEFT's `lora_A`/`lora_B`, kohya's `lora_down`/`lora_up`, either with an
`alpha` beside it (left out, it is r), and whole differences (`diff` of a weight, `diff_b` of a bias).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from verax.checkpoint.checkpoint import Checkpoint
from verax.checkpoint.formats.safetensors import SafetensorsFile
from verax.checkpoint.video.parts import PARTS
from verax.errors import CheckpointError

__all__ = ["with_lora"]

_PAIR = re.compile(r"(?P<module>.+)\.(?P<role>lora_A|lora_B|lora_down|lora_up)(\.\w+)?\.weight")
_OTHER = re.compile(r"(?P<module>.+)\.(?P<role>alpha|diff|diff_b)")
_ROLES = {"lora_A": "down", "lora_B": "up", "lora_down": "down", "lora_up": "up"}
_PREFIXES = re.compile(r"^(base_model\.model\.|model\.|diffusion_model\.|transformer\.)+")
_KOHYA = "lora_unet_"
"""Kohya's prefix; the rest of the name has underscores for dots."""


@dataclass
class _Change:
    """What one file does to one weight: keys of the file by their roles, down and up or diff."""

    file: SafetensorsFile
    scale: float
    keys: dict[str, str] = field(default_factory=dict)
    alpha: float | None = None
    root: bool = False
    """Whether alpha is over the rank's root, as in rank-stabilised LoRA (arXiv:2312.03732)."""

    def read(self, shape: tuple[int, ...]) -> np.ndarray:
        """The difference, float32 of `shape`."""
        arrays = {role: self.file.read(key).astype(np.float32) for role, key in self.keys.items()}
        if "diff" in arrays:
            return np.float32(self.scale) * arrays["diff"].reshape(shape)
        rank = len(arrays["down"])
        factor = 1.0 if self.alpha is None else self.alpha / (math.sqrt(rank) if self.root else rank)
        product = arrays["up"].reshape(-1, rank) @ arrays["down"].reshape(rank, -1)
        return np.float32(self.scale * factor) * product.reshape(shape)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise an error unless the tensors make a difference of the weight's shape."""
        shapes = {role: self.file.tensors[key].shape for role, key in self.keys.items()}
        if "diff" in shapes:
            fits = math.prod(shapes["diff"]) == math.prod(shape)
        elif "up" in shapes and "down" in shapes:
            (F, *up), (rank, *down) = shapes["up"] or (0,), shapes["down"] or (0,)
            fits = math.prod(up) == rank and (F, F * math.prod(down)) == (shape[0], math.prod(shape))
        else:
            raise CheckpointError(
                f"{self.file.path}: {', '.join(self.keys.values()) or name} lacks its other matrix: expected lora_A "
                "and lora_B, or lora_down and lora_up"
            )
        if not fits:
            found = ", ".join(f"{key} {list(self.file.tensors[key].shape)}" for key in self.keys.values())
            raise CheckpointError(f"{self.file.path}: {found} cannot change {name} of shape {list(shape)}")


class _Changed:
    """One weight of a checkpoint with its changes."""

    def __init__(self, name: str, checkpoint: Checkpoint, changes: Sequence[_Change]):
        self.path = checkpoint.place(name)[0]
        self.tensors = {name: checkpoint.info(name)._replace(dtype=np.dtype(np.float32))}
        self._checkpoint = checkpoint
        self._changes = changes

    def kind(self, name: str) -> str:
        """The dtype."""
        return str(self.tensors[name].dtype)

    def read(self, name: str) -> np.ndarray:
        """The sum in float32: who loads it rounds it, once."""
        total = self._checkpoint.read_raw(name).astype(np.float32)
        for change in self._changes:
            total += change.read(total.shape)
        return total

    def release(self, name: str) -> None:
        """Drop the pages, also of the files that change it."""
        self._checkpoint.release(name)
        for change in self._changes:
            for key in change.keys.values():
                change.file.release(key)


def with_lora(checkpoint: Checkpoint, files: Mapping[Path, float]) -> Checkpoint:
    """A transformer's checkpoint whose weights are changed as they are read; `load_module` takes it as any other.

    Args:
        checkpoint: of a transformer, by the original's names, as `VideoFolder.checkpoint` gives it.
        files: LoRA files (safetensors), each with a factor on what it changes; all are added.

    Raises:
        CheckpointError: if a file is missing or damaged, has keys that fit no weight (with these), a matrix without the
            other, or a shape that does not fit.
    """
    targets = _targets(checkpoint)
    changes: dict[str, list[_Change]] = {}
    for path, scale in files.items():
        for name, change in _read(Path(path), scale, targets).items():
            change.check(name, checkpoint.shape(name))
            changes.setdefault(name, []).append(change)
    return checkpoint.with_files({name: _Changed(name, checkpoint, some) for name, some in changes.items()})


def _targets(checkpoint: Checkpoint) -> dict[str, str]:
    """The checkpoint's names, by all that a LoRA file may call them."""
    names = PARTS["transformer"].names(checkpoint.config)
    found: dict[str, str] = {}
    for name in checkpoint.names():
        for one in (name, *(names.forward(name) or ())):
            found[one] = name
            found[_KOHYA + one.removesuffix(".weight").replace(".", "_") + ".weight"] = name
            if one.endswith(".bias"):
                found[_KOHYA + one.removesuffix(".bias").replace(".", "_") + ".bias"] = name
    return found


def _read(path: Path, scale: float, targets: Mapping[str, str]) -> dict[str, _Change]:
    """What a file does, by the original's names of weights."""
    file = SafetensorsFile(path)
    settings = _settings(path)
    changes: dict[str, _Change] = {}
    unmatched: list[str] = []
    for key in file.tensors:
        found = _PAIR.fullmatch(key) or _OTHER.fullmatch(key)
        module = _PREFIXES.sub("", found["module"]) if found else ""
        role = _ROLES.get(found["role"], found["role"]) if found else ""
        ending = ".bias" if role == "diff_b" else ".weight"
        # A parameter that is no module's weight, such as a block's modulation, goes by its own name.
        target = targets.get(module + ending) or (targets.get(module) if role == "diff" else None)
        if target is None:
            unmatched.append(key)
            continue
        change = changes.setdefault(target, _Change(file, scale, root=bool(settings.get("use_rslora"))))
        if role == "alpha":
            change.alpha = float(file.read(key).astype(np.float32).reshape(-1)[0])
        else:
            change.keys["diff" if role == "diff_b" else role] = key
            if change.alpha is None and role == "down":
                change.alpha = _alpha(settings, module)
    if unmatched:
        more = f" and {len(unmatched) - 10} more" if len(unmatched) > 10 else ""
        raise CheckpointError(
            f"{path}: no weight of the transformer for {', '.join(unmatched[:10])}{more}; expected a LoRA for this "
            "model, by diffusers', PEFT's or kohya's names"
        )
    return changes


def _settings(path: Path) -> dict[str, Any]:
    """How diffusers says that the adapter was made, in newer files' header; without its `transformer.`."""
    with safe_open(path, "numpy") as file:
        text = (file.metadata() or {}).get("lora_adapter_metadata", "{}")
    try:
        return {name.removeprefix("transformer."): value for name, value in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: its lora_adapter_metadata is not a JSON object") from error


def _alpha(settings: Mapping[str, Any], module: str) -> float | None:
    pattern = settings.get("alpha_pattern") or {}
    own = [value for name, value in pattern.items() if module == name or module.endswith(f".{name}")]
    return own[0] if own else settings.get("lora_alpha")
