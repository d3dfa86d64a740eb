"""Tensor parallelism (Megatron-LM, Shoeybi et al., 2019, arXiv:1909.08053): layers divided over the devices of a mesh.

A module declares which of its weights are divided, in a property `divisions` from a parameter's name to a
`ops.division.Division`. Inside `jax.shard_map` over the mesh axis `tensor` it holds one device's part of each, and
calls the collective that its result needs. Elsewhere the collectives below change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from verax.errors import InvalidParameterError
from verax.ops.division import TENSOR_AXIS, Division, check_division

__all__ = [
    "check_divisions",
    "concatenate_parts",
    "divisions",
    "fitting_sizes",
    "num_parts",
    "own_part",
    "part_index",
    "sum_parts",
]

MOST_DEVICES = 64
"""Devices up to which sizes that fit a model are looked for."""


def num_parts() -> int:
    """Devices that layers are divided over where this is traced; 1 outside of a `shard_map` over the axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[TENSOR_AXIS] if TENSOR_AXIS in mesh.manual_axes else 1


def part_index() -> Int[Array, ""] | int:
    """Number of the device's part."""
    return jax.lax.axis_index(TENSOR_AXIS) if num_parts() > 1 else 0


def own_part(x: Float[Array, "*B F"]) -> Float[Array, "*B G"]:
    """The device's part of the last axis of an array that every device has whole."""
    size = x.shape[-1] // num_parts()
    return jax.lax.dynamic_slice_in_dim(x, part_index() * size, size, axis=-1) if num_parts() > 1 else x


def sum_parts(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Sum over the devices, on all of them."""
    return jax.lax.psum(x, TENSOR_AXIS) if num_parts() > 1 else x


def concatenate_parts(x: Float[Array, "*B F"]) -> Float[Array, "*B G"]:
    """The devices' parts of the last axis one behind the other, on all of them."""
    return jax.lax.all_gather(x, TENSOR_AXIS, axis=x.ndim - 1, tiled=True) if num_parts() > 1 else x


def divisions(model: Any) -> dict[str, Division]:
    """Divided weights of a model, by path."""
    found: dict[str, Division] = {}
    for path, module in nnx.iter_modules(model):
        declared: Mapping[str, Division] = getattr(module, "divisions", {})
        found.update({".".join(map(str, (*path, name))): division for name, division in declared.items()})
    return found


def check_divisions(model: Any, devices: int, *, argument: str) -> None:
    """Check that a model, or a model of shapes, divides over so many devices.

    Args:
        model: the model.
        devices: number of devices.
        argument: name of the argument that the number was given by.

    Raises:
        InvalidParameterError: naming the weight that does not divide, and the numbers of devices that do.
    """
    if devices == 1:
        return
    if not divisions(model):
        raise InvalidParameterError(
            f"{argument}: {type(model).__name__} declares no layer as divided (verax.nn.Linear(divided=...)); only 1 "
            "device runs it"
        )
    try:
        for name, weight, division in _divided(model):
            check_division(name, weight, division, devices)
    except InvalidParameterError as error:
        fitting = ", ".join(map(str, fitting_sizes(model)))
        raise InvalidParameterError(f"{argument}: {error}; numbers that this model divides over: {fitting}") from error


def fitting_sizes(model: Any) -> list[int]:
    """Numbers of devices that a model divides over, in ascending order; 1 for a model without divided layers."""
    weights = _divided(model)
    return [devices for devices in range(1, MOST_DEVICES + 1 if weights else 2) if _fit(weights, devices)]


def _fit(weights: list[tuple[str, Any, Division]], devices: int) -> bool:
    try:
        for weight in weights:
            check_division(*weight, devices)
    except InvalidParameterError:
        return False
    return True


def _divided(model: Any) -> list[tuple[str, Any, Division]]:
    """Name, weight and division of each divided weight."""
    declared = divisions(model)
    flat = ((".".join(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(nnx.state(model)))
    return [(name, leaf.get_value(), declared[name]) for name, leaf in flat if name in declared]
