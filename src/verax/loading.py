"""Checkpoints to models: one loader for language models, text encoders and the parts of video models.

A module's path is its key in the checkpoint. Where published layouts differ from that, the model's class declares it:

- `ignored_weights: tuple[str, ...]`: patterns of keys that a checkpoint may have and the model does not need;
- `key_aliases: tuple[tuple[str, str], ...]`: (pattern, replacement) pairs, which turn a key of the model into another
  layout's key;
- `tied_weights: Mapping[str, str]`: keys whose weights are another key's where `config.tie_word_embeddings` is set;
- `quantized_weights: str`: pattern of the keys of linear layers and embeddings that may be quantised; all others are
  floats then, whatever the checkpoint has. Without it, all linear layers may be;
- `stacked_weights`: (pattern, replacements) pairs of stacks that a checkpoint may have as single matrices, see
  `verax.checkpoint.load`;
- `transposed_weights: tuple[str, ...]`: patterns of stacks `[E, out, in]` that a checkpoint of floats has as one array
  `[E, in, out]`;

All of them are optional. A module whose `keeps_floats` is True gets floats, whatever the checkpoint has. How weights
are divided over a mesh is declared by the layers (`verax.nn.parallel`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from verax.checkpoint import Checkpoint, load_module
from verax.checkpoint.formats.quantized import QuantizedEntry
from verax.checkpoint.load import Placement, StackedKeys, is_transposed, stacked_keys
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.models import CausalLM, causal_lm
from verax.models.causal_lm import config_on_devices
from verax.nn import Embedding, Linear
from verax.nn.parallel import check_divisions, divided_weights, divisions
from verax.ops import quantize
from verax.ops.quantized import Precision

M = TypeVar("M")

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each weight."""

QUANTIZATIONS: dict[str, Precision] = {
    "int8": Precision(8),
    "w8a8": Precision(8, rounds_inputs=True),
    "int4": Precision(4, 32),
}
"""Precisions by the names that users give."""

HEAD = "lm_head.weight"
"""Weight of the output head, whose inputs are never rounded to 8 bits: logits would carry all of that error."""

DEQUANTIZE = "dequantize"
"""Name for no quantisation: weights that are quantised in the checkpoint become floats."""


def load_model(
    opened: Checkpoint,
    model_class: Callable[..., M],
    config: Any,
    *,
    dtype: DTypeLike,
    quantization: str | tuple[int, int | None] | None = None,
    quantize_head: bool = True,
    requantize: bool = False,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> M:
    """Make a model and fill it with a checkpoint's weights; the host holds one copy of them, and one weight more.

    Args:
        model_class: the model's class, called as `model_class(config, dtype=..., rngs=...)`.
        dtype: dtype of what is not quantised, except for variables that the model makes in a dtype of their own.
        quantization: `"int8"`, `"int4"`, or (bits, group size): quantise every linear layer while loading. `"w8a8"`: as
            int8, and layers round their inputs to 8-bit integers; the output head and experts do not.
            `"dequantize"`: make floats in `dtype` of those that are quantised already.
        quantize_head: quantise the output head too: a tied one becomes a quantised copy of the embeddings.
        requantize: quantise weights that are quantised already too, by way of floats.
        mesh: devices of an axis `tensor` to divide a language model over, as its layers declare it; the default device
            if None. Where there are more devices than key/value heads, the model gets each head several times.
        progress: called with (bytes done, bytes in all) after each weight.
    """
    precision, dequantize = _precision(quantization, None if requantize else opened)
    config = _untied(model_class, config, opened)
    repeats: Mapping[str, int] = {}
    if mesh is not None:
        repeats = repeated_units(cast(Any, model_class), config, mesh.size)
        config = config_on_devices(config, mesh.size)
        shapes = model_shapes(
            model_class, config, dtype=dtype, quantization=quantization, opened=None if requantize else opened
        )
        check_divisions(shapes, mesh.size, argument="tensor_parallel_size")
    abstract, tied = _abstract(model_class, config, dtype, precision if quantize_head else None)
    return load_weights(
        abstract,
        opened,
        tied_weights=tied,
        precision=precision,
        quantize_head=quantize_head,
        dequantize=dequantize or requantize,
        mesh=mesh,
        repeats=repeats,
        progress=progress,
    )


def model_shapes(
    model_class: Callable[..., M],
    config: Any,
    *,
    dtype: DTypeLike,
    quantization: str | tuple[int, int | None] | None = None,
    opened: Checkpoint | None = None,
) -> M:
    """The model that `load_model` would make, with shapes in the place of weights. No weight is read.

    `model_class`, `config`, `dtype`, `quantization`: as in `load_model`. `opened`: a checkpoint whose matrices are
    quantised, see `quantized_shapes`; None for a checkpoint of floats, which need not exist.
    """
    precision, dequantize = _precision(quantization, opened)
    model, tied = _abstract(model_class, config, dtype, precision)
    packed: Mapping[str, QuantizedEntry] = {}
    if opened is not None and not dequantize:
        aliases, *_ = _sources(model, opened, tied)
        names = (".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(cast(Any, model))))
        packed = {name: opened.packed[key] for name in names if (key := aliases.get(name, name)) in opened.packed}
    return quantized_shapes(model, packed, precision)


def quantized_shapes(
    model: M, packed: Mapping[str, QuantizedEntry] = MappingProxyType({}), precision: Precision | None = None
) -> M:
    """The model that `load_weights` would make of a model of shapes: the shapes of its weights, quantised.

    `packed`: weights that the checkpoint has quantised, by key. Where their header determines bits and groups alone,
    they have float32 scales and no zero points here, and stacks are floats. `precision`: precision to quantise to, in
    place of the checkpoint's.
    """
    graph, state = nnx.split(cast(Any, model))
    flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    precisions = _precisions(model, precision)
    kept = _kept(model, packed)

    @cache
    def quantized(shape: tuple[int, ...], dtype: Any, precision: Precision) -> Any:
        of_matrix = partial(quantize, **precision._asdict())
        return jax.eval_shape(jax.vmap(of_matrix) if len(shape) == 3 else of_matrix, jax.ShapeDtypeStruct(shape, dtype))

    def shapes(name: str, leaf: Any) -> Any:
        wanted, entry = precisions.get(name), packed[name] if name in kept else None
        if wanted is None and entry is not None:
            if entry.held is not None:
                return entry.held
            wanted = entry.precision
        return leaf.get_value() if wanted is None else quantized(leaf.shape, leaf.dtype, wanted)

    filled = [(path, leaf.replace(shapes(name, leaf))) for name, (path, leaf) in flat.items()]
    return nnx.merge(graph, nnx.from_flat_state(filled))


class _OneKey(nnx.Rngs):
    """Random keys for shapes: one key for all. Counting draws while tracing takes most of the time of a large model."""

    def __init__(self) -> None:
        super().__init__(0)

    def params(self) -> jax.Array:
        return jax.random.key(0)


def _precision(
    quantization: str | tuple[int, int | None] | None, opened: Checkpoint | None
) -> tuple[Precision | None, bool]:
    """Bits and group size of a quantisation, or None; and whether quantised weights become floats."""
    precision = Precision(*quantization) if isinstance(quantization, tuple) else QUANTIZATIONS.get(quantization or "")
    dequantize = quantization == DEQUANTIZE
    if quantization is not None and precision is None and not dequantize:
        names = ", ".join((*QUANTIZATIONS, DEQUANTIZE))
        raise InvalidParameterError(f"quantization: expected one of {names}, got {quantization!r}")
    if precision is not None and opened is not None and opened.packed:
        raise CheckpointError(
            f"{opened.folder}: it is quantised already; load it without quantization, or as floats with "
            f"quantization={DEQUANTIZE!r}"
        )
    return precision, dequantize


def _untied(model_class: Callable[..., Any], config: Any, opened: Checkpoint) -> Any:
    """A model's sizes without tied embeddings if the checkpoint has a head that differs from these, in spite of them.

    So do transformers since 5 and vLLM: fine-tuning and quantising make such heads.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return config
    present = set(opened.names())
    for pair in getattr(model_class, "tied_weights", {}).items():
        keys = [_find(key, present, model_class) for key in pair]
        if present.issuperset(keys):
            same = {*keys}.isdisjoint(opened.packed) and np.array_equal(*cast(Any, map(opened.read, keys)))
            for key in keys:
                opened.release(key)
            if not same:
                return replace(config, tie_word_embeddings=False)
    return config


def _find(key: str, present: Collection[str], model: Any) -> str:
    """Key that a checkpoint has for a model's own."""
    others = (re.sub(pattern, replacement, key) for pattern, replacement in getattr(model, "key_aliases", ()))
    return key if key in present else next((other for other in others if other in present), key)


def _abstract(
    model_class: Callable[..., M], config: Any, dtype: DTypeLike, precision: Precision | None
) -> tuple[M, Mapping[str, str]]:
    """A model of shapes, before any quantisation, and its tied weights. A head that is quantised is a copy."""
    tied = getattr(model_class, "tied_weights", {}) if getattr(config, "tie_word_embeddings", False) else {}
    if precision is not None and tied:
        config = replace(config, tie_word_embeddings=False)
    return nnx.eval_shape(lambda: model_class(config, dtype=jnp.dtype(dtype), rngs=_OneKey())), tied


def load_causal_lm(
    opened: Checkpoint, *, max_model_len: int | None = None, prediction_head: bool = False, **options: Any
) -> CausalLM:
    """Load the language model that a checkpoint's config.json describes.

    `max_model_len`: longest sequence that it serves, if less than the config's. `prediction_head`: load its head of
    multi-token prediction as well. `options`: `dtype`, and other keywords of `load_model`.
    """
    model_class, config = causal_lm(opened.config, prediction_head=prediction_head)
    if prediction_head:
        _check_prediction_head(opened)
    if max_model_len is not None and hasattr(config, "for_context"):
        config = config.for_context(max_model_len)
    return load_model(opened, model_class, config, **options)


def _check_prediction_head(opened: Checkpoint) -> None:
    """Check the keys of a head of multi-token prediction, before the first weight is read."""
    keys = {name for name in opened.names() if name.startswith("mtp.")}
    if "mtp.fc.weight" not in keys:
        raise CheckpointError(
            f"{opened.folder}: it has no weights of a head of multi-token prediction (mtp.fc.weight); many quantised "
            "copies leave them out"
        )
    if own := sorted(key for key in keys if not re.match(r"mtp\.(fc|norm|pre_fc_norm_\w+|layers\.0)\.", key)):
        raise UnsupportedModelError(
            f"{opened.folder}: {own[0]}: expected a head of multi-token prediction with one layer, and the model's own "
            "embeddings and output head"
        )


def divide_model(model: CausalLM, mesh: Mesh) -> CausalLM:
    """A language model in memory, its weights divided over devices as its layers declare it.

    `model`: the model, which is not changed. `mesh`: devices of an axis `tensor`. Where there are more devices than
    key/value heads, the result has each head several times.
    """
    module: Any = model
    repeats = repeated_units(type(module), model.config, mesh.size)
    config = config_on_devices(model.config, mesh.size)
    graph, state = nnx.split(module)
    if config != model.config:
        graph = nnx.graphdef(nnx.eval_shape(lambda: type(module)(config, dtype=model.dtype, rngs=_OneKey())))
    on_devices = nnx.merge(graph, state)
    check_divisions(on_devices, mesh.size, argument="tensor_parallel_size")
    declared, divided = divisions(on_devices), []
    for path, leaf in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        place = Placement(mesh, declared.get(name), repeats.get(name, 1)).place
        divided.append((path, leaf.replace(place(name, leaf.get_value()))))
    return nnx.merge(graph, nnx.from_flat_state(divided))


def repeated_units(model_class: Callable[..., CausalLM], config: Any, devices: int) -> dict[str, int]:
    """Times that a language model over devices has each unit of a weight, by the weight's name; of those it repeats.

    They are the heads that several devices share, each with a copy.
    """
    on_devices = config_on_devices(config, devices)
    if on_devices == config:
        return {}
    one, several = (_abstract(model_class, each, jnp.float32, None)[0] for each in (config, on_devices))
    rows, more = ({name: weight.shape[0] for name, weight, _ in divided_weights(model)} for model in (one, several))
    return {name: times for name in more if (times := more[name] // rows[name]) > 1}


def load_weights(
    abstract: M,
    opened: Checkpoint,
    *,
    tied_weights: Mapping[str, str] = MappingProxyType({}),
    precision: Precision | None = None,
    quantize_head: bool = True,
    dequantize: bool = False,
    mesh: Mesh | None = None,
    repeats: Mapping[str, int] = MappingProxyType({}),
    progress: Progress | None = None,
) -> M:
    """Fill a model that has shapes only (`nnx.eval_shape`); each weight gets its variable's dtype.

    Args:
        tied_weights: keys whose weights the checkpoint has under another key. If it has the first key too, that weight
            is ignored.
        precision: precision to quantise every linear layer to.
        quantize_head: quantise the output head too.
        dequantize: True to make floats of weights that are quantised in the checkpoint.
        repeats: times that the model has each unit of a weight, by its name, see `repeated_units`.
    """
    model: Any = abstract
    precisions = _precisions(model, precision)
    if not quantize_head:
        precisions.pop(HEAD, None)
    aliases, stacks, transposed = _sources(model, opened, tied_weights)
    kept = None if getattr(model, "quantized_weights", None) is None else _kept(model, opened.packed)
    floats = {*precisions, *_floats(model)}
    return load_module(
        model,
        opened,
        dtype=None,
        mesh=mesh,
        divisions=divisions(model),
        repeats=repeats,
        ignore=(*getattr(model, "ignored_weights", ()), *(rf"^{re.escape(key)}$" for key in tied_weights)),
        aliases=aliases,
        stacks=stacks,
        transposed=transposed,
        quantize=precisions.get,
        dequantize=lambda name: dequantize or name in floats or (kept is not None and name not in kept),
        progress=progress,
    )


def _kept(model: Any, packed: Mapping[str, Any]) -> set[str]:
    """Names of the weights that stay quantised as the checkpoint has them: all but `_floats`, or those declared."""
    declared = getattr(model, "quantized_weights", None)
    return set(packed) - _floats(model) if declared is None else set(packed) & _quantizable(model)


def _floats(model: Any) -> set[str]:
    """Names of the weights of modules that compute with floats only (`keeps_floats`), whatever the checkpoint has."""
    modules = (path for path, module in nnx.iter_modules(model) if getattr(module, "keeps_floats", False))
    return {".".join(map(str, (*path, "weight"))) for path in modules}


def _precisions(model: Any, precision: Precision | None) -> dict[str, Precision]:
    """Precision of each weight that is quantised while loading, by name; none without `precision`.

    Only layers of their own round their inputs: the head and stacks of experts do not.
    """
    if precision is None:
        return {}
    matrices = {".".join(map(str, path)): leaf.ndim == 2 for path, leaf in nnx.to_flat_state(nnx.state(model))}
    rounds = {name: precision.rounds_inputs and matrices[name] and name != HEAD for name in _quantizable(model)}
    return {name: precision._replace(rounds_inputs=rounded) for name, rounded in rounds.items()}


def _quantizable(model: Any) -> set[str]:
    """Names of the weights of linear layers and of stacks, or of the layers and embeddings that the model declares."""
    declared = getattr(model, "quantized_weights", None)
    kinds = Linear if declared is None else (Linear, Embedding)
    names = {
        ".".join(map(str, (*path, "weight"))) for path, module in nnx.iter_modules(model) if isinstance(module, kinds)
    }
    if declared is not None:
        return {name for name in names if re.search(declared, name)}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        name = ".".join(map(str, path))
        if stacked_keys(name, leaf.shape, getattr(model, "stacked_weights", ())) is not None:
            names.add(name)
    if not names:
        raise UnsupportedModelError(f"{type(model).__name__} has no verax.nn.Linear to quantise: load it unquantised")
    return names


def _sources(
    model: Any, opened: Checkpoint, tied_weights: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, StackedKeys], set[str]]:
    """The checkpoint's keys by the model's own, where the two differ.

    Result: keys of weights; keys of the matrices of those stacks that the checkpoint has so; and the stacks that it has
    transposed.
    """
    present, aliases, stacks = set(opened.names()), dict[str, str](), dict[str, StackedKeys]()
    transposed = set[str]()
    find = partial(_find, present=present, model=model)
    heads = {source: name for name, source in tied_weights.items()}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        name = ".".join(map(str, path))
        tied = tied_weights.get(name, name)
        if (source := find(tied)) not in present:  # safetensors' save_model keeps the first of equal weights by name
            source = find(heads.get(tied, tied))
        matrices = stacked_keys(name, leaf.shape, getattr(model, "stacked_weights", ()))
        if matrices is not None and source not in present:
            stacks[name] = [tuple(map(find, keys)) for keys in matrices]
        elif source != name:
            aliases[name] = source
        if name not in stacks and source not in opened.packed and is_transposed(model, name):
            transposed.add(name)
    return aliases, stacks, transposed
