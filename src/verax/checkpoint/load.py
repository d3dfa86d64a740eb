"""Weights into a model: each parameter's path is its key, each array goes straight to its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from verax.checkpoint.checkpoint import Checkpoint
from verax.errors import CheckpointError

__all__ = ["load_module"]

M = TypeVar("M", bound=nnx.Module)
Rules = Sequence[tuple[str, PartitionSpec]]


def load_module(
    abstract: M,
    checkpoint: Checkpoint,
    *,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    rules: Rules = (),
    ignore: Iterable[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> M:
    """Fill a module that has shapes only (`nnx.eval_shape`) with a checkpoint's weights.

    Weights are read one at a time and their pages given back, so the host holds one copy of what it places on itself,
    and of nothing else more than one weight.

    Args:
        abstract: the module; a parameter's path, joined by dots, is its key in the checkpoint.
        checkpoint: where the weights are.
        dtype: of the loaded weights, whatever float type the file has.
        mesh: devices to divide the weights over; the default device if None.
        rules: (pattern, partition) pairs; the first whose pattern is found in a key divides that weight over `mesh`.
        ignore: patterns of keys that the checkpoint may have and the module does not need.
        progress: called with (bytes done, bytes in all) after each weight.

    Raises:
        CheckpointError: if weights are missing, unexpected, of another shape, or not floats; with their keys and files.
    """
    graph, state = nnx.split(abstract)
    wanted = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    _check_keys(wanted, checkpoint, tuple(ignore))
    total = sum(checkpoint.info(name).end - checkpoint.info(name).start for name in wanted)
    loaded, done = {}, 0
    for name, leaf in wanted.items():
        info = checkpoint.info(name)
        _check_fit(name, leaf, checkpoint)
        sharding = None if mesh is None else NamedSharding(mesh, _partition(name, rules, mesh, info.shape))
        loaded[name] = _place(checkpoint.read(name), jnp.dtype(dtype), sharding)
        checkpoint.release(name)
        done += info.end - info.start
        if progress is not None:
            progress(done, total)
    filled = nnx.from_flat_state(
        [(path, leaf.replace(loaded[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    )
    return nnx.merge(graph, filled)


def _place(view: np.ndarray, dtype: np.dtype[Any], sharding: NamedSharding | None) -> jax.Array:
    """Copy a mapped array to its device or devices: none of them keeps a view of the file."""
    if sharding is None:
        array = jnp.array(view, dtype=dtype, copy=True)
    else:
        array = jax.make_array_from_callback(view.shape, sharding, lambda index: np.array(view[index]).astype(dtype))
    # The pages are given back right after this, so the copy must be over; it also bounds the memory in use.
    return jax.block_until_ready(array)


def _partition(name: str, rules: Rules, mesh: Mesh, shape: tuple[int, ...]) -> PartitionSpec:
    spec = next((spec for pattern, spec in rules if re.search(pattern, name)), PartitionSpec())
    for size, axis in zip(shape, spec, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise CheckpointError(
                f"{name}: a dimension of {size} cannot be divided over {mesh.shape[axis]} devices (mesh axis {axis!r})"
            )
    return spec


def _check_keys(wanted: dict[str, Any], checkpoint: Checkpoint, ignore: tuple[str, ...]) -> None:
    present = set(checkpoint.names())
    missing = [name for name in wanted if name not in present]
    if missing:
        raise CheckpointError(f"{checkpoint.folder}: {_list(missing)} missing, which config.json's model needs")
    unexpected = sorted(n for n in present - set(wanted) if not any(re.search(pattern, n) for pattern in ignore))
    if unexpected:
        files = sorted({checkpoint.path(name).name for name in unexpected})
        raise CheckpointError(
            f"{checkpoint.folder}: {_list(unexpected)} unexpected (in {', '.join(files[:3])}): config.json's model has "
            "no such weight"
        )


def _check_fit(name: str, leaf: Any, checkpoint: Checkpoint) -> None:
    info = checkpoint.info(name)
    if info.shape != leaf.shape:
        raise CheckpointError(
            f"{checkpoint.path(name)}: {name} has shape {list(info.shape)}, the model needs {list(leaf.shape)}"
        )
    if not jnp.issubdtype(info.dtype, jnp.floating):
        raise CheckpointError(f"{checkpoint.path(name)}: {name} has dtype {info.dtype}, expected floats")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{len(names)} weights ({', '.join(names[:10])}{more})" if len(names) > 1 else names[0]
