"""LoRA files (Hu et al., 2021, arXiv:2106.09685) for Wan and SkyReels-V2, added to the weights while these are loaded.

A pair of low-rank matrices A `[r, in]` and B `[out, r]` adds `scale * alpha / r * B A` to a weight. The formats in use
differ in their names only. Diffusers and PEFT name the matrices `lora_A` and `lora_B`, kohya `lora_down` and `lora_up`.
Either may have an `alpha`; without one, alpha is r. A file may also have whole differences: `diff` of a weight,
`diff_b` of a bias.
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
    """Change of one weight by one file.

    Attributes:
        file: the LoRA file.
        scale: the user's factor on the file.
        keys: keys of the file by their roles: `down` and `up`, or `diff`.
        alpha: numerator of the factor on the product; the rank if None.
        root: True if alpha is divided by the square root of the rank, as in rank-stabilised LoRA (arXiv:2312.03732).
    """

    file: SafetensorsFile
    scale: float
    keys: dict[str, str] = field(default_factory=dict)
    alpha: float | None = None
    root: bool = False

    def read(self, shape: tuple[int, ...]) -> np.ndarray:
        """Difference that is added to the weight, float32 of `shape`."""
        arrays = {role: self.file.read(key).astype(np.float32) for role, key in self.keys.items()}
        if "diff" in arrays:
            return np.float32(self.scale) * arrays["diff"].reshape(shape)
        rank = len(arrays["down"])
        factor = 1.0 if self.alpha is None else self.alpha / (math.sqrt(rank) if self.root else rank)
        product = arrays["up"].reshape(-1, rank) @ arrays["down"].reshape(rank, -1)
        return np.float32(self.scale * factor) * product.reshape(shape)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that the tensors give a difference of the weight's shape.

        Raises:
            CheckpointError: if a matrix is missing, or shapes do not fit.
        """
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
            arrays = ", ".join(f"{key} {list(self.file.tensors[key].shape)}" for key in self.keys.values())
            raise CheckpointError(f"{self.file.path}: {arrays} cannot change {name} of shape {list(shape)}")


class _Changed:
    """File of one weight of a checkpoint, with changes added."""

    def __init__(self, name: str, checkpoint: Checkpoint, changes: Sequence[_Change]):
        self.path = checkpoint.place(name)[0]
        self.tensors = {name: checkpoint.info(name)._replace(dtype=np.dtype(np.float32))}
        self._checkpoint = checkpoint
        self._changes = changes

    def kind(self, name: str) -> str:
        """Name of the dtype."""
        return str(self.tensors[name].dtype)

    def read(self, name: str) -> np.ndarray:
        """The changed weight in float32. Rounding is left to the loading, so that it happens once."""
        total = self._checkpoint.read_raw(name).astype(np.float32)
        for change in self._changes:
            total += change.read(total.shape)
        return total

    def release(self, name: str) -> None:
        """Drop the memory-mapped pages of the weight, and of its changes in the LoRA files."""
        self._checkpoint.release(name)
        for change in self._changes:
            for key in change.keys.values():
                change.file.release(key)


def with_lora(checkpoint: Checkpoint, files: Mapping[Path, float]) -> Checkpoint:
    """A transformer's checkpoint with LoRA files, whose changes are added to the weights when these are read.

    Args:
        checkpoint: checkpoint of a transformer by the original's names, from `VideoFolder.checkpoint`.
        files: LoRA files (safetensors), each with a factor on its changes; the changes of all files are added.

    Raises:
        CheckpointError: if a file is missing or damaged, has keys that fit no weight, has one matrix without the other,
            or has a shape that does not fit. The message has the keys.
    """
    targets = _targets(checkpoint)
    changes: dict[str, list[_Change]] = {}
    for path, scale in files.items():
        for name, change in _read(Path(path), scale, targets).items():
            change.check(name, checkpoint.shape(name))
            changes.setdefault(name, []).append(change)
    return checkpoint.with_files({name: _Changed(name, checkpoint, some) for name, some in changes.items()})


def _targets(checkpoint: Checkpoint) -> dict[str, str]:
    """Names of the checkpoint's weights, by every name that a LoRA file may use for them."""
    names = PARTS["transformer"].names(checkpoint.config)
    targets: dict[str, str] = {}
    for name in checkpoint.names():
        for one in (name, *(names.forward(name) or ())):
            targets[one] = name
            targets[_KOHYA + one.removesuffix(".weight").replace(".", "_") + ".weight"] = name
            if one.endswith(".bias"):
                targets[_KOHYA + one.removesuffix(".bias").replace(".", "_") + ".bias"] = name
    return targets


def _read(path: Path, scale: float, targets: Mapping[str, str]) -> dict[str, _Change]:
    """Changes of a LoRA file, by the original's names of the weights.

    Raises:
        CheckpointError: if the file is missing or damaged, or has keys that fit no weight.
    """
    file = SafetensorsFile(path)
    settings = _settings(path)
    changes: dict[str, _Change] = {}
    unmatched: list[str] = []
    for key in file.tensors:
        match = _PAIR.fullmatch(key) or _OTHER.fullmatch(key)
        module = _PREFIXES.sub("", match["module"]) if match else ""
        role = _ROLES.get(match["role"], match["role"]) if match else ""
        ending = ".bias" if role == "diff_b" else ".weight"
        # A parameter that is not the weight of a module, such as a block's modulation, has no `.weight` in its name.
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
    """Settings of the adapter from the file's header, where newer versions of diffusers write them; else empty.

    The prefix `transformer.` is cut from their names.

    Raises:
        CheckpointError: if they are not a JSON object.
    """
    with safe_open(path, "numpy") as file:
        text = (file.metadata() or {}).get("lora_adapter_metadata", "{}")
    try:
        return {name.removeprefix("transformer."): value for name, value in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: its lora_adapter_metadata is not a JSON object") from error


def _alpha(settings: Mapping[str, Any], module: str) -> float | None:
    """Alpha of a module by the adapter's settings: its own, or the common one; None without either."""
    pattern = settings.get("alpha_pattern") or {}
    own = [value for name, value in pattern.items() if module == name or module.endswith(f".{name}")]
    return own[0] if own else settings.get("lora_alpha")
