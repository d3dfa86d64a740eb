"""Loading of a checkpoint's weights into a model: the path of a parameter is its key in the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from verax.checkpoint.checkpoint import Checkpoint
from verax.checkpoint.host_memory import HostMemory
from verax.checkpoint.placement import Placement
from verax.checkpoint.stacks import Stack, StackedKeys
from verax.errors import CheckpointError, InvalidParameterError
from verax.ops.division import Division
from verax.ops.quantized import INT4_ROWS, QuantizedWeight
from verax.ops.quantized import quantize as quantize_weight

__all__ = ["load_module"]

_quantize = jax.jit(quantize_weight, static_argnums=(1, 2))
_dequantize = jax.jit(lambda weight: weight.dequantize())

M = TypeVar("M", bound=nnx.Module)
QUANTIZED_AT_ONCE = 1 << 22
"""Number of weights that are quantised at a time.

Quantising takes some thirty bytes for each weight: gigabytes for an output head of 150 million weights at once."""


def load_module(
    abstract: M,
    checkpoint: Checkpoint,
    *,
    dtype: DTypeLike | None,
    mesh: Mesh | None = None,
    divisions: Mapping[str, Division] = MappingProxyType({}),
    repeats: int = 1,
    ignore: Iterable[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
    stacks: Mapping[str, StackedKeys] = MappingProxyType({}),
    quantize: Callable[[str], tuple[int, int | None] | None] = lambda name: None,
    dequantize: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> M:
    """Fill a module that has shapes only (`nnx.eval_shape`) with a checkpoint's weights; return the filled module.

    Keys, shapes and dtypes are checked before the first weight is read. Weights are read one at a time, and the pages
    of the file are released after each. The host holds at most one weight beside those that are placed on the host.

    Args:
        abstract: the module; a variable's path, joined by dots, is its key in the checkpoint.
        checkpoint: source of the weights. Its files may change afterwards: the module has copies.
        dtype: dtype of the loaded float weights, whatever float type the file has; if None, that of the module's
            variable. Variables that are not floats keep their dtype, and the file must have the same.
        mesh: devices to divide the weights over; the default device if None.
        divisions: division over the mesh of each divided weight, by key of the module. Each device reads its part
            only. A weight without a division is whole on every device.
        repeats: times that the module has each unit of a weight whose division repeats, which the checkpoint has once.
        ignore: patterns of keys that the checkpoint may have and the module does not need.
        aliases: keys of the checkpoint by keys of the module, where they differ.
        stacks: keys of the checkpoint's matrices by keys of the module's stacks `[E, F, D]`. Each is read into its
            place.
        quantize: function from a key to the bits and the group size with which its weight is quantised while loading,
            or to None for a weight that is not quantised.
        dequantize: True to load weights that are quantised in the checkpoint as floats.
        progress: called with (bytes done, bytes in all) after each weight.

    Raises:
        CheckpointError: if weights are missing, unexpected, of another shape, or not floats; with their keys and files.
        InvalidParameterError: if a weight cannot be divided over the mesh.
    """
    graph, state = nnx.split(abstract)
    flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    keys = {name: _keys(stacks[name]) if name in stacks else [aliases.get(name, name)] for name in flat}
    every = [key for found in keys.values() for key in found]
    _check_keys(every, checkpoint, tuple(ignore))
    places = {name: _placement(mesh, divisions.get(name), repeats) for name in flat}
    for name, (_, leaf) in flat.items():
        _check_shape(places[name].stored_shape(leaf.shape), stacks.get(name) or keys[name][0], checkpoint)
    dtypes = {name: _fitting_dtype(keys[name], leaf, checkpoint, dtype) for name, (_, leaf) in flat.items()}
    precisions = {name: quantize(name) for name in flat}

    total = sum(map(checkpoint.size, every))
    done = 0
    loaded, memory = {}, HostMemory()
    # In the order of the files: sequential reading is the fastest for disks and the kernel's read-ahead.
    for name in sorted(keys, key=lambda name: checkpoint.place(keys[name][0])):
        source, shape, precision = keys[name][0], flat[name][1].shape, precisions[name]
        if name in stacks or (precision is not None and len(shape) == 3):
            stack = Stack(checkpoint, shape, stacks.get(name) or source)
            loaded[name] = _place_stack(name, stack, dtypes[name], precision, places[name], dequantize, memory)
        else:
            weight = checkpoint.read(source)
            if dequantize and not isinstance(weight, np.ndarray):
                weight = np.asarray(_dequantize(weight))
            if not isinstance(weight, np.ndarray):
                loaded[name] = places[name].place(name, jax.tree.map(lambda x: memory.copy(x, x.dtype), weight))
            elif precision is not None:
                loaded[name] = places[name].place(name, _quantized(name, weight, dtypes[name], *precision, memory))
            else:
                loaded[name] = places[name].place_view(name, weight, dtypes[name], memory)
            checkpoint.release(source)
        done += sum(map(checkpoint.size, keys[name]))
        if progress is not None:
            progress(done, total)
    filled = nnx.from_flat_state([(path, leaf.replace(loaded[name])) for name, (path, leaf) in flat.items()])
    return nnx.merge(graph, filled)


def _placement(mesh: Mesh | None, division: Division | None, repeats: int) -> Placement:
    if mesh is None:
        return Placement()
    return Placement(mesh, division, repeats if division is not None and division.repeats else 1)


def _quantized(
    name: str, view: np.ndarray, dtype: np.dtype[Any], bits: int, group_size: int | None, memory: HostMemory
) -> QuantizedWeight:
    """A mapped weight `[F, D]`, rounded to `dtype` and quantised; its arrays are NumPy's.

    Some rows are quantised at a time: rows do not depend on each other.
    """
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
    return QuantizedWeight(whole["values"], whole["scales"], F, D, group_size, bits)


def _place_stack(
    name: str,
    stack: Stack,
    dtype: np.dtype[Any],
    precision: tuple[int, int | None] | None,
    placement: Placement,
    dequantize: bool,
    memory: HostMemory,
) -> jax.Array | QuantizedWeight:
    """Copy a stack to its device or devices, matrix by matrix; quantised if the file has it so, or by `precision`."""
    if placement.mesh is not None and precision is None and isinstance(stack.read(0), np.ndarray):
        return placement.place_stack(stack, dtype)
    whole: list[np.ndarray] = []
    structure = None
    for i in range(stack.shape[0]):
        matrix: Any = stack.read(i)
        if dequantize and not isinstance(matrix, np.ndarray):
            matrix = np.asarray(_dequantize(matrix))
        if precision is not None:
            matrix = _quantized(name, matrix, dtype, *precision, HostMemory())
        arrays, kind = jax.tree.flatten(matrix)
        if structure is None:
            floats = isinstance(matrix, np.ndarray)
            shapes = [((stack.shape[0], *array.shape), dtype if floats else array.dtype) for array in arrays]
            whole, structure = [memory.empty(*each) for each in shapes], kind
        elif kind != structure:
            raise CheckpointError(f"{name}: matrix {i} is not of the same precision as those before it")
        for into, array in zip(whole, arrays, strict=True):
            into[i] = array
        stack.release(i)
    return placement.place(name, jax.tree.unflatten(structure, whole))


def _check_keys(wanted: Iterable[str], checkpoint: Checkpoint, ignore: tuple[str, ...]) -> None:
    wanted, present = list(dict.fromkeys(wanted)), set(checkpoint.names())
    missing = [name for name in wanted if name not in present]
    unexpected = sorted(n for n in present - set(wanted) if not any(re.search(pattern, n) for pattern in ignore))
    unexpected = [name for name in unexpected if not _is_bias_of_zeros(name, checkpoint)]
    if missing:
        where = _list(sorted({checkpoint.place(name)[0].name for name in present}), "files")
        # Often the same weights by another name, which both lists together show.
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


def _is_bias_of_zeros(name: str, checkpoint: Checkpoint) -> bool:
    """True for a bias that a quantisation library wrote for a layer that has none."""
    layer, _, last = name.rpartition(".")
    return last == "bias" and f"{layer}.weight" in checkpoint.packed and not np.any(checkpoint.read_raw(name))


def _keys(stack: StackedKeys) -> list[str]:
    return [key for matrix in stack for key in matrix]


def _check_shape(expected: tuple[int, ...], source: str | StackedKeys, checkpoint: Checkpoint) -> None:
    """Check that the file's shape, or that of each of a stack's matrices, is that of the model's variable.

    Raises:
        CheckpointError: with file, key and both shapes.
    """
    if isinstance(source, str):
        pairs = [(source, expected)]
    else:
        # The matrices of one expert are of equal size.
        pairs = [(key, (expected[1] // len(keys), *expected[2:])) for keys in source for key in keys]
    for key, needed in pairs:
        if (shape := checkpoint.shape(key)) != needed:
            file = checkpoint.place(key)[0]
            raise CheckpointError(f"{file}: {key} has shape {list(shape)}, config.json's model needs {list(needed)}")


def _fitting_dtype(keys: Iterable[str], leaf: Any, checkpoint: Checkpoint, dtype: DTypeLike | None) -> np.dtype[Any]:
    """The dtype to load a weight as, which is that of all of its keys.

    Raises:
        CheckpointError: if the file's dtype does not fit the model's variable.
    """
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    for name in keys:
        if name in checkpoint.packed:
            return jnp.dtype(leaf.dtype)
        info, file = checkpoint.info(name), checkpoint.place(name)[0]
        if not floats and info.dtype != leaf.dtype:
            raise CheckpointError(f"{file}: {name} has dtype {info.dtype}, config.json's model needs {leaf.dtype}")
        if floats and not jnp.issubdtype(info.dtype, jnp.floating):
            raise CheckpointError(f"{file}: {name} has dtype {info.dtype}, expected floats")
    return jnp.dtype(leaf.dtype if dtype is None or not floats else dtype)


def _list(names: list[str], what: str) -> str:
    if len(names) == 1:
        return names[0]
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{len(names)} {what} ({', '.join(names[:10])}{more})"
