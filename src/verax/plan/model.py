"""Models to plan: a folder with config.json alone, a GGUF file, a hub id, a built-in model, or shapes by name.

Their weights are counted by part and precision: bytes, whole and on each of several devices, and products.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from verax import builtin, ops
from verax.checkpoint import Checkpoint, resolve
from verax.checkpoint.checkpoint import config_of_floats
from verax.checkpoint.video.folder import is_video_folder
from verax.errors import CheckpointError, UnsupportedModelError
from verax.files import read_json
from verax.loading import DEQUANTIZE
from verax.models import causal_lm
from verax.models.wan.model import WAN_CONFIGS
from verax.nn import packed_copy
from verax.nn.parallel import check_divisions, divisions
from verax.ops.division import TENSOR_AXIS, partition
from verax.plan.devices import Device
from verax.shapes import MINILM_L6, MODERNBERT_BASE, SHAPES

_BUILTIN = {
    "text-builtin": builtin.text_model,
    "encoder-builtin": builtin.encoder,
    "video-builtin": builtin.video_model,
}

_ENCODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "minilm": ("all-MiniLM-L6-v2 shapes", MINILM_L6),
    "modernbert": ("gte-modernbert-base shapes", MODERNBERT_BASE),
}

NAMES = (*SHAPES, *_ENCODERS, *WAN_CONFIGS, *_BUILTIN)
"""Names of shapes that come with the package."""


class Described(NamedTuple):
    """A model by its configuration.

    `config`: contents of config.json; of a video model, the folder, or a name out of `WAN_CONFIGS`. `opened`: the
    checkpoint, if it is a GGUF file, whose weights have formats of their own.
    """

    name: str
    kind: str
    config: Any
    opened: Checkpoint | None = None


def describe(model: str, *, quantization: str | None = None) -> Described:
    """Find a model's configuration. No weights are read, and none need be there.

    `model`: a folder, a GGUF file, a hub id (of which config.json is fetched), or one of `NAMES`. `quantization`:
    `"dequantize"` to plan the floats of a folder whose weights are quantised.
    """
    if model in WAN_CONFIGS:
        return Described(f"Wan {model} shapes", "video", model)
    if model in SHAPES or model in _ENCODERS:
        name, config = SHAPES.get(model) or _ENCODERS[model]
        return Described(name, _kind(config), dict(config))
    try:
        folder = _BUILTIN[model]() if model in _BUILTIN else resolve(model, weights=False)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or one of {', '.join(NAMES)}") from error
    if folder.is_file():
        opened = Checkpoint.open(folder)
        return Described(folder.name, "text", opened.config, opened)
    if is_video_folder(folder):
        return Described(folder.resolve().name, "video", folder)
    config = read_json(folder / "config.json")
    if config != config_of_floats(config) and quantization != DEQUANTIZE:
        raise UnsupportedModelError(
            f"{folder}: its weights are quantised, in formats that config.json alone does not decide; plan its floats "
            f"with --quantization {DEQUANTIZE}, or the model that it was made of with --quantization int8, w8a8 or int4"
        )
    return Described(model if model in _BUILTIN else folder.resolve().name, _kind(config), config)


def _kind(config: Mapping[str, Any]) -> str:
    try:
        causal_lm(config)
    except UnsupportedModelError:
        return "embedding"
    return "text"


# The first pattern that matches a key decides.
_PARTS = (
    ("prediction head", r"^mtp\."),
    ("norms", r"(?i)norm[^.]*\.\w+$"),
    ("experts", r"\.experts\.|\.mlp\.gate\.|shared_expert_gate\."),
    ("recurrent layers", r"\blinear_attn\."),
    ("attention", r"attn|attention"),
    (
        "feed-forward",
        r"\bmlp\b|\bffn\b|\bfeed_forward\b|\bintermediate\b|\boutput\.dense\b|DenseReluDense|shared_expert",
    ),
    ("embedding", r"embed|\bshared\."),
    ("head", r"\blm_head\b|(^|\.)head\."),
)


class Part(NamedTuple):
    """Weights of one part of a model in one precision.

    `precision`: name of the dtype, `"int8"` or `"int4"`, or the name of a block format.
    """

    part: str
    precision: str
    weights: int
    nbytes: int
    per_device: int


def tensor_mesh(devices: int) -> AbstractMesh:
    """Mesh of abstract devices for tensor parallelism."""
    return AbstractMesh((devices,), (TENSOR_AXIS,))


def packed_shapes(model: Any, device: Device, *, few_rows: bool = False) -> Any:
    """A module of shapes with the packed weights that an engine makes on one device, see `nn.packed_copy`.

    A packed weight may have more rows than the weight that it stands for.
    """
    with ops.use_target(device.platform, device.kind, device.memory):
        return nnx.eval_shape(partial(packed_copy, few_rows=few_rows), model)


def parts_of(model: Any, devices: int = 1) -> list[Part]:
    """Parts of a module of shapes, the largest first. Weights are divided as the layers declare it."""
    check_divisions(model, devices, argument="tensor_parallel_size")
    mesh, divided = tensor_mesh(devices), divisions(model)
    totals: dict[tuple[str, str], list[int]] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        key, weight = ".".join(map(str, path)), leaf.get_value()
        arrays = jax.tree.leaves(weight)
        specs = jax.tree.leaves(partition(weight, divided.get(key)))
        held = sharded_bytes(arrays, [NamedSharding(mesh, spec) for spec in specs])
        row = (math.prod(weight.shape), sum(map(nbytes_of, arrays)), held)
        total = totals.setdefault((_part_of(model, key), _precision(weight)), [0, 0, 0])
        total[:] = (a + b for a, b in zip(total, row, strict=True))
    parts = [Part(*names, *numbers) for names, numbers in totals.items()]
    return sorted(parts, key=lambda part: -part.nbytes)


def _part_of(model: Any, key: str) -> str:
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if tied and key.endswith("embed_tokens.weight"):
        return "embedding and head"
    return next((name for name, pattern in _PARTS if re.search(pattern, key)), "other")


def multiplied(model: Any) -> tuple[int, int, float, int]:
    """Count the weights of a language model, a module of shapes, that a step multiplies.

    Result: weights of the matrices that each token is multiplied by; of all experts; of the experts that one token
    passes; and of the output head, which sampled tokens alone are multiplied by.
    """
    every = experts = head = 0
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        key, shape = ".".join(map(str, path)), leaf.get_value().shape
        part = _part_of(model, key)
        if len(shape) < 2 or part in ("embedding", "prediction head"):
            continue
        if part in ("head", "embedding and head"):
            head += math.prod(shape)
        elif ".experts." in key:
            experts += math.prod(shape)
        else:
            every += math.prod(shape)
    config = getattr(model.config, "experts", None)
    share = config.num_experts_per_tok / config.num_experts if config is not None else 1.0
    return every, experts, share * experts, head


def rounds_inputs(model: Any) -> bool:
    """True if layers of a module of shapes multiply their weights by inputs of 8 bits: products of integers (W8A8)."""
    return any(getattr(leaf.get_value(), "rounds_inputs", False) for _, leaf in nnx.to_flat_state(nnx.state(model)))


def sharded_bytes(arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> int:
    """Bytes of arrays, or of their shapes, that one device holds."""
    shapes = [sharding.shard_shape(array.shape) for array, sharding in zip(arrays, shardings, strict=True)]
    return sum(math.prod(shape) * array.dtype.itemsize for shape, array in zip(shapes, arrays, strict=True))


def nbytes_of(array: Any) -> int:
    """Bytes of an array, or of its shape and dtype."""
    return math.prod(array.shape) * array.dtype.itemsize


def _precision(weight: Any) -> str:
    if isinstance(weight, ops.QuantizedWeight):
        return f"int{weight.bits}"
    return weight.kind if isinstance(weight, ops.BlockQuantizedWeight) else weight.dtype.name
