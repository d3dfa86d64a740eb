"""Weights of a model by part and precision: their bytes, whole and on each of several devices, and their products."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from verax import ops
from verax.nn import packed_copy
from verax.nn.parallel import check_divisions, divisions
from verax.ops.division import TENSOR_AXIS, partition
from verax.plan.devices import Device

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
