"""Checkpoints to models: one loader for language models, text encoders and the parts of video models.

A module's path is its key in the checkpoint. Where published layouts differ from that, the model's class declares it:

- `ignored_weights: tuple[str, ...]`: patterns of keys that a checkpoint may have and the model does not need;
- `key_aliases: tuple[tuple[str, str], ...]`: (pattern, replacement) pairs, which turn a key of the model into another
  layout's key;
- `tied_weights: Mapping[str, str]`: keys whose weights are another key's where `config.tie_word_embeddings` is set;
- `stacked_weights`: (pattern, replacements) pairs of stacks that a checkpoint may have as single matrices, see
  `verax.checkpoint.stacks`;
- `partition_rules`: (pattern, partition) pairs, which divide the weights over a mesh.

All of them are optional.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from verax.checkpoint import Checkpoint, load_module
from verax.checkpoint.stacks import StackedKeys, stacked_keys
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.models import CausalLM, causal_lm
from verax.nn import Linear

__all__ = ["DEQUANTIZE", "QUANTIZATIONS", "load_causal_lm", "load_model", "load_weights"]

M = TypeVar("M")

Precision = tuple[int, int | None]
"""Bits, and inputs that share a scale (None: a whole row)."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each weight."""

QUANTIZATIONS: dict[str, Precision] = {"int8": (8, None), "int4": (4, 32)}
"""Precisions by the names that users give."""

DEQUANTIZE = "dequantize"
"""Name that stands for none of them: weights that are quantised in the checkpoint become floats."""


def load_model(
    opened: Checkpoint,
    model_class: Callable[..., M],
    config: Any,
    *,
    dtype: DTypeLike,
    quantization: str | Precision | None = None,
    requantize: bool = False,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> M:
    """Make a model and fill it with a checkpoint's weights; the host holds one copy of them, and one weight more.

    Args:
        opened: the checkpoint.
        model_class: the model's class, called as `model_class(config, dtype=..., rngs=...)`.
        config: the model's configuration.
        dtype: dtype of what is not quantised, except for variables that the model makes in a dtype of their own.
        quantization: `"int8"`, `"int4"`, or (bits, group size): quantise every linear layer while loading. The output
            head is one of them: a tied one becomes a quantised copy of the embeddings. `"dequantize"`: make floats in
            `dtype` of those that are quantised already.
        requantize: quantise weights that are quantised already too, by way of floats.
        mesh: devices to divide the weights over by the model's partition rules; the default device if None.
        progress: called with (bytes done, bytes in all) after each weight.

    Raises:
        CheckpointError: if the weights do not fit the configuration, or are quantised already.
        InvalidParameterError: for an unknown quantisation, or groups that do not divide a layer.
        UnsupportedModelError: if the model has no linear layer to quantise.
    """
    precision = QUANTIZATIONS.get(quantization) if isinstance(quantization, str) else quantization
    dequantize = quantization == DEQUANTIZE
    if quantization is not None and precision is None and not dequantize:
        names = ", ".join((*QUANTIZATIONS, DEQUANTIZE))
        raise InvalidParameterError(f"quantization: expected one of {names}, got {quantization!r}")
    tied = getattr(model_class, "tied_weights", {}) if getattr(config, "tie_word_embeddings", False) else {}
    if precision is not None:
        if opened.packed and not requantize:
            raise CheckpointError(
                f"{opened.folder}: it is quantised already; load it without quantization, or as floats with "
                f"quantization={DEQUANTIZE!r}"
            )
        if tied:
            config = replace(config, tie_word_embeddings=False)
    abstract = nnx.eval_shape(lambda: model_class(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    return load_weights(
        abstract,
        opened,
        tied_weights=tied,
        precision=precision,
        dequantize=dequantize or requantize,
        mesh=mesh,
        progress=progress,
    )


def load_causal_lm(
    opened: Checkpoint,
    *,
    dtype: DTypeLike,
    quantization: str | Precision | None = None,
    requantize: bool = False,
    progress: Progress | None = None,
) -> CausalLM:
    """Load the language model that a checkpoint's config.json describes.

    Args:
        opened: the checkpoint.
        dtype, quantization, requantize, progress: as in `load_model`.

    Raises:
        CheckpointError, InvalidParameterError: as in `load_model`.
        UnsupportedModelError: if verax has no such architecture, or it has no linear layer to quantise.
    """
    model_class, config = causal_lm(opened.config)
    return load_model(
        opened,
        model_class,
        config,
        dtype=dtype,
        quantization=quantization,
        requantize=requantize,
        progress=progress,
    )


def load_weights(
    abstract: M,
    opened: Checkpoint,
    *,
    tied_weights: Mapping[str, str] = MappingProxyType({}),
    precision: Precision | None = None,
    dequantize: bool = False,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> M:
    """Fill a model that has shapes only (`nnx.eval_shape`); each weight gets its variable's dtype.

    Args:
        abstract: the model.
        opened: the checkpoint.
        tied_weights: keys whose weights the checkpoint has under another key. If it has the first key too, that weight
            is ignored.
        precision: bits and group size to quantise every linear layer to.
        dequantize: True to make floats of weights that are quantised in the checkpoint.
        mesh, progress: as in `load_model`.

    Raises:
        CheckpointError: if the weights do not fit.
        InvalidParameterError: for groups that do not divide a layer.
        UnsupportedModelError: if the model has no linear layer to quantise.
    """
    model: Any = abstract
    linear = {
        ".".join(map(str, (*path, "weight"))) for path, module in nnx.iter_modules(model) if isinstance(module, Linear)
    }
    aliases, stacks, stacked = _sources(model, opened, tied_weights)
    linear |= stacked
    if precision is not None and not linear:
        raise UnsupportedModelError(f"{type(model).__name__} has no verax.nn.Linear to quantise: load it unquantised")
    return load_module(
        model,
        opened,
        dtype=None,
        mesh=mesh,
        rules=() if mesh is None else getattr(model, "partition_rules", ()),
        ignore=(*getattr(model, "ignored_weights", ()), *(rf"^{re.escape(key)}$" for key in tied_weights)),
        aliases=aliases,
        stacks=stacks,
        quantize=lambda name: precision if name in linear else None,
        dequantize=dequantize,
        progress=progress,
    )


def _sources(
    model: Any, opened: Checkpoint, tied_weights: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, StackedKeys], set[str]]:
    """The checkpoint's keys by the model's own, where the two differ.

    Returns:
        Keys of weights; keys of the matrices of those stacks that the checkpoint has so; names of all stacks.
    """
    present, aliases, stacks = set(opened.names()), dict[str, str](), dict[str, StackedKeys]()
    stacked = set[str]()

    def find(key: str) -> str:
        others = (re.sub(pattern, replacement, key) for pattern, replacement in getattr(model, "key_aliases", ()))
        return key if key in present else next((other for other in others if other in present), key)

    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        name = ".".join(map(str, path))
        source = find(tied_weights.get(name, name))
        matrices = stacked_keys(name, leaf.shape, getattr(model, "stacked_weights", ()))
        if matrices is not None:
            stacked.add(name)
        if matrices is not None and source not in present:
            stacks[name] = [tuple(map(find, keys)) for keys in matrices]
        elif source != name:
            aliases[name] = source
    return aliases, stacks, stacked
