"""Weights into a model: each parameter's path is its key, each array goes straight to its place."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from verax.checkpoint.checkpoint import Checkpoint
from verax.checkpoint.host_memory import HostMemory
from verax.errors import CheckpointError, InvalidParameterError
from verax.ops.quantized import INT4_ROWS, QuantizedWeight
from verax.ops.quantized import quantize as quantize_weight

__all__ = ["load_module"]

_quantize = jax.jit(quantize_weight, static_argnums=(1, 2))

M = TypeVar("M", bound=nnx.Module)
QUANTIZED_AT_ONCE = 1 << 22
"""Weights: rounding them takes some thirty bytes each, of which an output head of 150 million would make gigabytes."""

Rules = Sequence[tuple[str, PartitionSpec]]


def load_module(
    abstract: M,
    checkpoint: Checkpoint,
    *,
    dtype: DTypeLike | None,
    mesh: Mesh | None = None,
    rules: Rules = (),
    ignore: Iterable[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
    quantize: Callable[[str], tuple[int, int | None] | None] = lambda name: None,
    progress: Callable[[int, int], None] | None = None,
) -> M:
    """Fill a module that has shapes only (`nnx.eval_shape`) with a checkpoint's weights.

    Everything is checked before the first weight is read. Weights are then read one at a time and their pages given
    back, so the host holds one copy of what it places on itself, and of nothing else more than one weight.

    Args:
        abstract: the module; a variable's path, joined by dots, is its key in the checkpoint.
        checkpoint: where the weights are. Afterwards its files may change or go: the module has copies.
        dtype: of the loaded weights, whatever float type the file has; if None, each has its variable's own. Variables
            that are not floats keep their dtype, which must be the file's.
        mesh: devices to divide the weights over; the default device if None.
        rules: (pattern, partition) pairs; the first whose pattern is found in a key divides that weight over `mesh`,
            each device reading its part only. A weight without a rule is whole on every device.
        ignore: patterns of keys that the checkpoint may have and the module does not need.
        aliases: keys of the module whose weights the checkpoint has under another key.
        quantize: of a key, the bits and group size to quantise its weight to while loading, or None to leave it.
        progress: called with (bytes done, bytes in all) after each weight.

    Raises:
        CheckpointError: if weights are missing, unexpected, of another shape, not floats, or not divisible over the
            mesh; with their keys and files.
        InvalidParameterError: if a rule names an axis that the mesh lacks, or more dimensions than the weight has.
    """
    graph, state = nnx.split(abstract)
    flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    sources = {name: aliases.get(name, name) for name in flat}
    _check_keys(sources.values(), checkpoint, tuple(ignore))
    dtypes = {name: _fitting_dtype(sources[name], leaf, checkpoint, dtype) for name, (_, leaf) in flat.items()}
    places = {name: _sharding(name, leaf.shape, rules, mesh) for name, (_, leaf) in flat.items()}
    precisions = {name: quantize(name) for name in flat}
    if mesh is not None and (checkpoint.packed or any(precisions.values())):
        raise InvalidParameterError("mesh: quantised weights are not divided over devices yet")

    total = sum(map(checkpoint.size, sources.values()))
    done = 0
    loaded, memory = {}, HostMemory()
    # In the order of the files, which disks and the kernel's read-ahead like best.
    for name, source in sorted(sources.items(), key=lambda item: checkpoint.place(item[1])):
        weight = checkpoint.read(source)
        if isinstance(weight, np.ndarray):
            if (precision := precisions[name]) is not None:
                weight = _quantized(name, weight, dtypes[name], *precision, memory)
            else:
                weight = _place(weight, dtypes[name], places[name], memory)
        else:
            weight = jax.tree.map(lambda part: jax.device_put(memory.copy(part, part.dtype)), weight)
        loaded[name] = weight
        checkpoint.release(source)
        done += checkpoint.size(source)
        if progress is not None:
            progress(done, total)
    filled = nnx.from_flat_state([(path, leaf.replace(loaded[name])) for name, (path, leaf) in flat.items()])
    return nnx.merge(graph, filled)


def _quantized(
    name: str, view: np.ndarray, dtype: np.dtype[Any], bits: int, group_size: int | None, memory: HostMemory
) -> QuantizedWeight:
    """A mapped weight, rounded to `dtype` and quantised, some rows at a time: rows do not depend on each other."""
    F, D = view.shape
    rows = max(INT4_ROWS, QUANTIZED_AT_ONCE // D // INT4_ROWS * INT4_ROWS)
    unit = INT4_ROWS if bits == 4 else 1  # rows that lie in one place of the first axis
    whole: dict[str, np.ndarray] = {}
    for row in range(0, F, rows):
        try:
            piece = _quantize(view[row : row + rows].astype(dtype), bits, group_size)
        except InvalidParameterError as error:
            raise InvalidParameterError(f"{name}: {error}") from error
        for field, part in (("values", np.asarray(piece.values)), ("scales", np.asarray(piece.scales))):
            if row == 0:
                whole[field] = memory.empty((-(-F // unit), *part.shape[1:]), part.dtype)
            whole[field][row // unit :][: len(part)] = part
    arrays = {field: jax.device_put(array) for field, array in whole.items()}
    return QuantizedWeight(**arrays, size_out=F, size_in=D, group_size=group_size, bits=bits)


def _place(view: np.ndarray, dtype: np.dtype[Any], sharding: NamedSharding | None, memory: HostMemory) -> jax.Array:
    """Copy a mapped array to its device or devices.

    It must be a copy: a CPU device takes an aligned array that it is given for its own memory, whatever
    `device_put(may_alias=False)` says (jaxlib 0.10.2), and a view of the file would change with the file.
    """
    if sharding is not None:
        array = jax.make_array_from_callback(view.shape, sharding, lambda index: view[index].astype(dtype))
    else:
        array = jax.device_put(memory.copy(view, dtype))
    # One transfer at a time: this bounds the memory in use, not only that which is kept.
    return jax.block_until_ready(array)


def _sharding(name: str, shape: tuple[int, ...], rules: Rules, mesh: Mesh | None) -> NamedSharding | None:
    """Where a weight goes; None is the default device."""
    if mesh is None:
        return None
    spec = next((spec for pattern, spec in rules if re.search(pattern, name)), PartitionSpec())
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    if len(spec) > len(shape) or any(axis not in mesh.shape for entry in axes for axis in entry):
        raise InvalidParameterError(
            f"rules: {spec} does not fit {name} of shape {list(shape)} on a mesh of axes {dict(mesh.shape)}"
        )
    for size, entry in zip(shape, axes, strict=False):
        parts = math.prod(mesh.shape[axis] for axis in entry)
        if size % parts:
            raise CheckpointError(
                f"{name}: a dimension of {size} cannot be divided over {parts} devices (mesh axis {', '.join(entry)})"
            )
    return NamedSharding(mesh, spec)


def _check_keys(wanted: Iterable[str], checkpoint: Checkpoint, ignore: tuple[str, ...]) -> None:
    wanted, present = list(dict.fromkeys(wanted)), set(checkpoint.names())
    missing = [name for name in wanted if name not in present]
    unexpected = sorted(n for n in present - set(wanted) if not any(re.search(pattern, n) for pattern in ignore))
    if missing:
        where = _list(sorted({checkpoint.place(name)[0].name for name in present}), "files")
        # Often the same weights by another name, which the reader sees when both lists are there.
        more = f"; unexpected there: {_list(unexpected, 'weights')}" if unexpected else ""
        raise CheckpointError(
            f"{checkpoint.folder}: {_list(missing, 'weights')} missing from {where}, which config.json's model needs"
            + more
        )
    if unexpected:
        where = _list(sorted({checkpoint.place(name)[0].name for name in unexpected}), "files")
        raise CheckpointError(
            f"{checkpoint.folder}: {_list(unexpected, 'weights')} unexpected (in {where}): config.json's model has no "
            "use for that"
        )


def _fitting_dtype(name: str, leaf: Any, checkpoint: Checkpoint, dtype: DTypeLike | None) -> np.dtype[Any]:
    """The dtype to load a weight as, if what the file has can become what the model needs."""
    shape, file = checkpoint.shape(name), checkpoint.place(name)[0]
    if shape != leaf.shape:
        raise CheckpointError(f"{file}: {name} has shape {list(shape)}, config.json's model needs {list(leaf.shape)}")
    if name in checkpoint.packed:
        return jnp.dtype(leaf.dtype)
    info = checkpoint.info(name)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        if info.dtype != leaf.dtype:
            raise CheckpointError(f"{file}: {name} has dtype {info.dtype}, config.json's model needs {leaf.dtype}")
        return info.dtype
    if not jnp.issubdtype(info.dtype, jnp.floating):
        raise CheckpointError(f"{file}: {name} has dtype {info.dtype}, expected floats")
    return jnp.dtype(leaf.dtype if dtype is None else dtype)


def _list(names: list[str], what: str) -> str:
    if len(names) == 1:
        return names[0]
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{len(names)} {what} ({', '.join(names[:10])}{more})"
