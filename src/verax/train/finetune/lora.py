"""LoRA adapters that are trained (Hu et al., 2021, arXiv:2106.09685): which layers have one, their start, their place.

The layers and the low-rank products are the engine's, which later runs the adapter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from verax.checkpoint import Checkpoint
from verax.checkpoint.lora import save_adapter
from verax.errors import InvalidParameterError
from verax.models import CausalLM
from verax.text.features.lora import AdaptedLayers
from verax.text.step.program import AbstractModel
from verax.train.settings import ALL_LINEAR, LoraSettings

Matrices = Mapping[str, Mapping[str, Array]]
"""`lora_A [r, in]` and `lora_B [out, r]`, float32, by the layer's path."""


@dataclass(frozen=True)
class TrainedAdapter:
    """The layers of a model that an adapter changes, and the adapter's size."""

    abstract: AbstractModel
    layers: AdaptedLayers
    settings: LoraSettings

    @classmethod
    def of(cls, abstract: AbstractModel, settings: LoraSettings) -> TrainedAdapter:
        """The adapter of a model."""
        layers = AdaptedLayers.of(abstract.build, abstract.weights, max_loras=1, max_rank=settings.rank)
        chosen = _targeted(layers.shapes, settings.target_modules)
        return cls(abstract, replace(layers, shapes={path: layers.shapes[path] for path in chosen}), settings)

    @property
    def num_parameters(self) -> int:
        """Numbers that are trained."""
        return sum(self.settings.rank * (F + D) for F, D in self.layers.shapes.values())

    def initial(self, seed: int) -> Matrices:
        """A as PEFT draws it, uniform with a variance of a third of one over the inputs; B of zeros."""
        keys = jax.random.split(jax.random.key(seed), len(self.layers.shapes))
        rank, matrices = self.settings.rank, {}
        for key, (path, (F, D)) in zip(keys, self.layers.shapes.items(), strict=True):
            bound = D**-0.5
            matrices[path] = {
                "lora_A": jax.random.uniform(key, (rank, D), jnp.float32, -bound, bound),
                "lora_B": jnp.zeros((F, rank), jnp.float32),
            }
        return matrices

    def model(self, weights: tuple[Array, ...], matrices: Matrices, num_tokens: int) -> CausalLM:
        """The model with the adapter, in the base's dtype, for a pass of `num_tokens` in all."""
        model = self.abstract.build(weights)
        scale = self.settings.alpha / self.settings.rank
        pairs = [(matrices[path]["lora_A"], scale * matrices[path]["lora_B"]) for path in self.layers.shapes]
        arrays = tuple(matrix.astype(self.layers.dtype) for pair in pairs for matrix in pair)
        self.layers.attach(model, arrays, jnp.zeros(num_tokens, jnp.int32))
        return model

    def save(self, matrices: Matrices, folder: Path, opened: Checkpoint, base: str) -> Path:
        """Write the adapter as PEFT does, by the names that its base has in its checkpoint."""
        names = {path: name for name, path in self.layers.names.items() if path in self.layers.shapes}
        keys = {name.removesuffix(".weight") for name in opened.names() if name.endswith(".weight")}
        # Published keys of models with a vision tower, and the names of the modules in transformers 5.
        keys = {re.sub(r"^language_model\.model\.", "model.language_model.", key) for key in keys}
        names |= {path: name for name, path in self.layers.names.items() if path in names and name in keys}
        pairs = {names[p]: (np.asarray(m["lora_A"]), np.asarray(m["lora_B"])) for p, m in matrices.items()}
        settings = self.settings
        return save_adapter(folder, pairs, rank=settings.rank, alpha=settings.alpha, base=base, modules=keys)


def _targeted(shapes: Mapping[str, tuple[int, int]], targets: str) -> list[str]:
    """Paths of the layers that a user's text chooses, as PEFT matches names."""
    if targets == ALL_LINEAR:
        return list(shapes)
    names = [name.strip() for name in targets.split(",")]
    for name in names:
        if not any(_matches(path, name) for path in shapes):
            known = ", ".join(sorted({path.split(".")[-1] for path in shapes}))
            raise InvalidParameterError(
                f"target_modules: no linear layer is named {name!r}; expected {ALL_LINEAR}, or some of {known}"
            )
    return [path for path in shapes if any(_matches(path, name) for name in names)]


def _matches(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")
