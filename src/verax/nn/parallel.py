"""Tensor parallelism (Megatron-LM, Shoeybi et al., 2019, arXiv:1909.08053): layers divided over the devices of a mesh.

A module declares which of its weights are divided, in a property `divisions` from a parameter's name to a
`ops.division.Division`. Inside `jax.shard_map` over the mesh axis `tensor` it holds one device's part of each, and
calls the collective that its result needs. Elsewhere the collectives below change nothing.

Fully sharded data parallelism (Zhao et al., 2023, arXiv:2304.11277), for inference: `ShardedBlocks` have their weights
divided over devices, which gather them block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from verax.errors import InvalidParameterError
from verax.ops.division import TENSOR_AXIS, Division, check_division

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
    """Array with the last axis gathered from all devices, on each of them."""
    return jax.lax.all_gather(x, TENSOR_AXIS, axis=x.ndim - 1, tiled=True) if num_parts() > 1 else x


def divisions(model: Any) -> dict[str, Division]:
    """Divided weights of a model, by path."""
    by_path: dict[str, Division] = {}
    for path, module in nnx.iter_modules(model):
        declared: Mapping[str, Division] = getattr(module, "divisions", {})
        by_path.update({".".join(map(str, (*path, name))): division for name, division in declared.items()})
    return by_path


def check_divisions(model: Any, devices: int, *, argument: str) -> None:
    """Check that a model, or a model of shapes, divides over `devices` devices.

    `argument`: name of the argument that the number was given by.
    """
    if devices == 1:
        return
    if not divisions(model):
        raise InvalidParameterError(
            f"{argument}: {type(model).__name__} declares no layer as divided (verax.nn.Linear(divided=...)); only 1 "
            "device runs it"
        )
    try:
        for name, weight, division in divided_weights(model):
            check_division(name, weight, division, devices)
    except InvalidParameterError as error:
        fitting = ", ".join(map(str, fitting_sizes(model)))
        raise InvalidParameterError(f"{argument}: {error}; numbers that this model divides over: {fitting}") from error


def fitting_sizes(model: Any) -> list[int]:
    """Numbers of devices that a model divides over, in ascending order; 1 for a model without divided layers."""
    weights = divided_weights(model)
    return [devices for devices in range(1, MOST_DEVICES + 1 if weights else 2) if _fit(weights, devices)]


def _fit(weights: list[tuple[str, Any, Division]], devices: int) -> bool:
    try:
        for weight in weights:
            check_division(*weight, devices)
    except InvalidParameterError:
        return False
    return True


def divided_weights(model: Any) -> list[tuple[str, Any, Division]]:
    """Name, weight and division of each divided weight."""
    declared = divisions(model)
    flat = ((".".join(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(nnx.state(model)))
    return [(name, leaf.get_value(), declared[name]) for name, leaf in flat if name in declared]


M = TypeVar("M", bound=nnx.Module)

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`step(carry, block, inputs)` returns the next carry and the results of one block; inputs and results may be None."""

STACKED_BLOCKS = ((r"^blocks\.stack\.", ("blocks.{}.",)),)
"""The `stacked_weights` of a model whose `blocks` may be `ShardedBlocks`: checkpoints have a key for each block."""


class ShardedBlocks(nnx.Module):
    """Blocks of one kind: their weights stacked, `[L, ...]`, and each matrix divided over all devices of a mesh.

    Its programs run inside `jax.shard_map` over the mesh. A device holds its parts of all blocks, and the whole weights
    of one block while that runs. Biases, norms and other vectors are whole: they are few, and a collective for each
    would take longer than they save. So is a matrix of which no axis divides.
    """

    def __init__(self, blocks: Sequence[nnx.Module], mesh: Mesh | AbstractMesh):
        graphs, states = zip(*map(nnx.split, blocks), strict=True)
        self.stack = nnx.merge(graphs[0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
        self.mesh_axes = tuple(mesh.axis_names)
        # Kept, as inside of the `shard_map` the weights have the shapes of parts. In the order of the state's leaves.
        self.axes = tuple(_divided_axis(leaf.shape[1:], mesh.size) for leaf in jax.tree.leaves(nnx.state(self.stack)))

    @property
    def divisions(self) -> Mapping[str, Division]:
        """Division of each divided stack."""
        paths = (".".join(map(str, ("stack", *path))) for path, _ in nnx.to_flat_state(nnx.state(self.stack)))
        return {
            path: Division(axis=1 + axis, mesh_axes=self.mesh_axes)
            for path, axis in zip(paths, self.axes, strict=True)
            if axis is not None
        }

    def scan(self, step: Step, carry: Any, inputs: Any) -> tuple[Any, Any]:
        """Carry after all blocks, and their results; see `scan_blocks`."""
        graph, state = nnx.split(self.stack)
        stacks, tree = jax.tree.flatten(state)

        def whole(part: jax.Array, axis: int | None) -> jax.Array:
            return part if axis is None else jax.lax.all_gather(part, self.mesh_axes, axis=axis, tiled=True)

        def one(carry: Any, layer: tuple[jax.Array, list[jax.Array]]) -> tuple[Any, Any]:
            i, parts = layer
            weights = [whole(part, axis) for part, axis in zip(parts, self.axes, strict=True)]
            of_block = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, 1, keepdims=False), inputs)
            return step(carry, nnx.merge(graph, jax.tree.unflatten(tree, weights)), of_block)

        carry, results = jax.lax.scan(one, carry, (jnp.arange(len(stacks[0])), stacks))
        return carry, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), results)


def _divided_axis(shape: tuple[int, ...], devices: int) -> int | None:
    """Axis of a block's weight that is divided: the first that can be, since each device then reads whole rows only."""
    return next((axis for axis, size in enumerate(shape) if size % devices == 0), None) if len(shape) == 2 else None


def shard_blocks(model: M, mesh: Mesh | AbstractMesh) -> M:
    """The model with its list `blocks` as `ShardedBlocks`.

    For shapes (`nnx.eval_shape`), which a checkpoint then fills: of weights in memory, stacks are copies.
    """
    sharded: Any = model
    sharded.blocks = ShardedBlocks(sharded.blocks, mesh)
    return model


def scan_blocks(
    step: Step, blocks: Iterable[nnx.Module] | ShardedBlocks, carry: Any, inputs: Any = None
) -> tuple[Any, Any]:
    """Carry after the steps of all blocks, and the results of each: `jax.lax.scan` over blocks.

    Args:
        step: function of the carry, one block and its inputs.
        blocks: modules, traced one after the other; or `ShardedBlocks`, of which one is traced.
        inputs: inputs of each block, a tuple of trees; of `ShardedBlocks` one tree, whose arrays `[B, L, ...]` have the
            block in their second axis, so that the first may be divided over devices. Results are the same. None for
            no inputs.
    """
    if isinstance(blocks, ShardedBlocks):
        return blocks.scan(step, carry, inputs)
    modules, results = tuple(blocks), []
    for block, of_block in zip(modules, (None,) * len(modules) if inputs is None else inputs, strict=True):
        carry, result = step(carry, block, of_block)
        results.append(result)
    return carry, tuple(results)
