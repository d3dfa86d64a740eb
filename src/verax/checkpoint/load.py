"""Loading of a checkpoint's weights into a model: the path of a parameter is its key in the checkpoint.

Many checkpoints have a stack `[E, F, D]`, such as a layer's experts, as single matrices. A model's class then declares
`stacked_weights`: pairs of a pattern of a stack's key, and the replacements that turn it into the keys of the matrices
whose rows make up each of the E, with `{}` for the number of the expert.

`Placement` copies a weight to one device, or each part of it to a device of a mesh; `random_weights` stands in for a
checkpoint in comparisons and measurements.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from verax.checkpoint.checkpoint import Checkpoint
from verax.errors import CheckpointError, InvalidParameterError
from verax.ops.division import Division, check_division, partition, repeated
from verax.ops.memory import HostMemory
from verax.ops.quantized import INT4_ROWS, Precision, QuantizedWeight
from verax.ops.quantized import quantize as quantize_weight

_quantize = jax.jit(quantize_weight, static_argnums=(1, 2, 3, 4))
_dequantize = jax.jit(lambda weight: weight.dequantize())

Patterns = Iterable[tuple[str, tuple[str, ...]]]
"""A model's `stacked_weights`."""

StackedKeys = Sequence[tuple[str, ...]]
"""Keys of a stack's matrices: for each of the E, the ones that are stacked by rows."""

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
    repeats: Mapping[str, int] = MappingProxyType({}),
    ignore: Iterable[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
    stacks: Mapping[str, StackedKeys] = MappingProxyType({}),
    transposed: Collection[str] = (),
    quantize: Callable[[str], Precision | None] = lambda name: None,
    dequantize: Callable[[str], bool] = lambda name: False,
    progress: Callable[[int, int], None] | None = None,
) -> M:
    """Fill a module that has shapes only (`nnx.eval_shape`) with a checkpoint's weights; return the filled module.

    Keys, shapes and dtypes are checked before the first weight is read. Weights are read one at a time, and the pages
    of the file are released after each. The host holds at most one weight more than those that are placed on it.

    Args:
        abstract: the module; a variable's path, joined by dots, is its key in the checkpoint.
        checkpoint: source of the weights. Its files may change afterwards: the module has copies.
        dtype: dtype of the loaded float weights, whatever float type the file has; if None, the dtype of the
            module's variable. Variables that are not floats keep their dtype, and the file must have the same.
        mesh: devices to divide the weights over; the default device if None.
        divisions: division over the mesh of each divided weight, by key of the module. Each device reads its part
            only. A weight without a division is whole on every device.
        repeats: times that the module has each unit of a weight that the checkpoint has once, by key of the module.
        ignore: patterns of keys that the checkpoint may have and the module does not need.
        aliases: keys of the checkpoint by keys of the module, where they differ.
        stacks: keys of the checkpoint's matrices by keys of the module's stacks `[E, F, D]`. Each is read into its
            place.
        transposed: keys of the module's stacks that the checkpoint has as `[E, D, F]`.
        quantize: function from a key to the precision to which its weight is quantised while loading, or to None for
            a weight that is not quantised.
        dequantize: function from a key to True if its weight becomes floats where the checkpoint has it quantised. A
            weight that is quantised afterwards must become floats first.
        progress: called with (bytes done, bytes in all) after each weight.

    Raises:
        CheckpointError: if weights are missing, unexpected, of another shape, or not floats; with their keys and files.
        InvalidParameterError: if a weight cannot be divided over the mesh.
    """
    graph, state = nnx.split(abstract)
    flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    keys = {name: [*chain(*stacks[name])] if name in stacks else [aliases.get(name, name)] for name in flat}
    every = [*chain(*keys.values())]
    _check_keys(every, checkpoint, tuple(ignore))
    places = {name: Placement(mesh, divisions.get(name), repeats.get(name, 1)) for name in flat}
    for name, (_, leaf) in flat.items():
        stored = *(rows // places[name].times for rows in leaf.shape[:1]), *leaf.shape[1:]  # a number has no rows
        if name in transposed:
            stored = stored[0], stored[2], stored[1]
        _check_shape(stored, stacks.get(name) or keys[name][0], checkpoint)
    dtypes = {name: _fitting_dtype(keys[name], leaf, checkpoint, dtype) for name, (_, leaf) in flat.items()}
    precisions = {name: quantize(name) for name in flat}

    total = sum(map(checkpoint.size, every))
    done = 0
    loaded, memory = {}, HostMemory()
    # In the order of the files: sequential reading is the fastest for disks and the kernel's read-ahead.
    for name in sorted(keys, key=lambda name: checkpoint.place(keys[name][0])):
        source, shape, precision = keys[name][0], flat[name][1].shape, precisions[name]
        expands = dequantize(name) and source in checkpoint.packed
        converted = (precision is not None or expands) and len(shape) == 3
        if name in stacks or name in transposed or converted:
            stack = Stack(checkpoint, shape, stacks.get(name) or source, transposed=name in transposed)
            loaded[name] = _place_stack(name, stack, dtypes[name], precision, places[name], dequantize(name), memory)
        else:
            weight = checkpoint.read(source)
            if dequantize(name) and not isinstance(weight, np.ndarray):
                weight = np.asarray(_dequantize(weight))
            if not isinstance(weight, np.ndarray):
                loaded[name] = places[name].place(name, jax.tree.map(lambda x: memory.copy(x, x.dtype), weight))
            elif precision is not None:
                loaded[name] = places[name].place(name, _quantized(name, weight, dtypes[name], precision, memory))
            else:
                loaded[name] = places[name].place_view(name, weight, dtypes[name], memory)
            checkpoint.release(source)
        done += sum(map(checkpoint.size, keys[name]))
        if progress is not None:
            progress(done, total)
    filled = nnx.from_flat_state([(path, leaf.replace(loaded[name])) for name, (path, leaf) in flat.items()])
    return nnx.merge(graph, filled)


def _quantized(
    name: str, view: np.ndarray, dtype: np.dtype[Any], precision: Precision, memory: HostMemory
) -> QuantizedWeight:
    """A mapped weight `[F, D]`, rounded to `dtype` and quantised; its arrays are NumPy's.

    Some rows are quantised at a time: rows do not depend on each other.
    """
    F, D = view.shape
    rows = max(INT4_ROWS, QUANTIZED_AT_ONCE // D // INT4_ROWS * INT4_ROWS)
    unit = INT4_ROWS if precision[0] == 4 else 1  # rows that lie in one place of the first axis
    piece, whole = None, dict[str, np.ndarray]()
    for row in range(0, F, rows):
        try:
            piece = _quantize(view[row : row + rows].astype(dtype), *precision)
        except InvalidParameterError as error:
            raise InvalidParameterError(f"{name}: {error}") from error
        for field, part in (("values", np.asarray(piece.values)), ("scales", np.asarray(piece.scales))):
            if row == 0:
                whole[field] = memory.empty((-(-F // unit), *part.shape[1:]), part.dtype)
            whole[field][row // unit :][: len(part)] = part
    assert piece is not None
    return replace(piece, **whole, size_out=F)


def _place_stack(
    name: str,
    stack: Stack,
    dtype: np.dtype[Any],
    precision: Precision | None,
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
            matrix = _quantized(name, matrix, dtype, precision, HostMemory())
        if isinstance(matrix, QuantizedWeight):
            matrix = replace(matrix, rounds_inputs=False)  # the kernel of `ops.grouped_linear` does not
        arrays, kind = jax.tree.flatten(matrix)
        if structure is None:
            floats = isinstance(matrix, np.ndarray)
            shapes = [((stack.shape[0], *array.shape), dtype if floats else array.dtype) for array in arrays]
            whole, structure = [memory.empty(*shape_and_dtype) for shape_and_dtype in shapes], kind
        elif kind != structure:
            raise CheckpointError(
                f"{name}: matrix {i} is not of the same precision as those before it; load it as floats with "
                "quantization='dequantize'"
            )
        for part, array in enumerate(arrays):
            if not isinstance(matrix, np.ndarray) and array.dtype != whole[part].dtype:
                # A matrix has scales in float16 if float16 holds them; a stack's dtype has to hold all its scales.
                wider = np.promote_types(array.dtype, whole[part].dtype)
                whole[part] = memory.copy(whole[part], wider)
            whole[part][i] = array
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


def _check_shape(expected: tuple[int, ...], source: str | StackedKeys, checkpoint: Checkpoint) -> None:
    """Check that the model's variable has the shape of the file's array, or of the matrices of its stack."""
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
    """Dtype to load a weight as. All of its keys have it."""
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    for name in keys:
        if name in checkpoint.packed:  # floats once they are dequantised
            continue
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


@dataclass(frozen=True)
class Placement:
    """Devices of a weight.

    Attributes:
        mesh: devices that hold the weight; the default device if None.
        division: division of the weight over the mesh; None for a weight that is whole on each device.
        times: times that each unit is there, for devices that share a unit.
    """

    mesh: Mesh | None = None
    division: Division | None = None
    times: int = 1

    def place_view(self, name: str, view: np.ndarray, dtype: np.dtype[Any], memory: HostMemory) -> jax.Array:
        """Copy a mapped array to its device, or each device's part to that device.

        A copy is needed: a CPU device uses an aligned array of the host as its own memory, in spite of
        `device_put(may_alias=False)` (jaxlib 0.10.2), and a view of the file changes with the file.
        """
        if self.mesh is None:
            array = jax.device_put(memory.copy(view, dtype))
        else:
            array = self._divided(name, view, dtype)
        # One transfer at a time: this bounds the memory in use, not only the memory that is kept.
        return jax.block_until_ready(array)

    def place(self, name: str, weight: Any) -> Any:
        """The arrays of a weight, none of which changes afterwards, on their device or devices."""
        if self.mesh is None:
            return jax.block_until_ready(jax.tree.map(jax.device_put, weight))
        return jax.block_until_ready(self._divided(name, weight))

    def place_stack(self, stack: Stack, dtype: np.dtype[Any]) -> jax.Array:
        """A stack of floats on the devices of the mesh, each of which reads its own part, matrix by matrix."""
        assert self.mesh is not None
        sharding = NamedSharding(self.mesh, partition(None, self.division))

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            experts, *part = index or (slice(None),)
            parts = []
            for i in range(*experts.indices(stack.shape[0])):
                parts.append(np.asarray(stack.read(i))[tuple(part)].astype(dtype))
                stack.release(i)
            return np.stack(parts)

        return jax.block_until_ready(jax.make_array_from_callback(stack.shape, sharding, read))

    def _divided(self, name: str, weight: Any, dtype: np.dtype[Any] | None = None) -> Any:
        assert self.mesh is not None
        mesh = self.mesh
        if self.division is not None:
            try:
                weight = repeated(name, weight, self.division, self.times)
                check_division(name, weight, self.division, mesh.size)
            except InvalidParameterError as error:  # of what only the weight itself shows, such as its act-order
                raise InvalidParameterError(f"tensor_parallel_size: {error}") from error

        def put(array: Any, spec: Any) -> jax.Array:
            host = np.asarray(array)
            divided = None if self.division is None or spec != self.division.spec else self.division
            order = None if divided is None else divided.order(len(host), mesh.size)

            def part(index: Any) -> np.ndarray:
                return np.array(host[index] if order is None else host[order[index[0]]], dtype or host.dtype)

            return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), part)

        return jax.tree.map(put, weight, partition(weight, self.division))


def stacked_keys(name: str, shape: tuple[int, ...], patterns: Patterns) -> StackedKeys | None:
    """Keys of the matrices of a stack of this shape; None for a weight whose name no pattern is found in."""
    for pattern, replacements in patterns:
        if re.search(pattern, name):
            keys = [re.sub(pattern, replacement, name) for replacement in replacements]
            return [tuple(key.format(i) for key in keys) for i in range(shape[0])]
    return None


def is_transposed(model: Any, name: str) -> bool:
    """True for a stack that checkpoints of floats have as `[E, in, out]`: its name has one of the model's patterns."""
    return any(re.search(pattern, name) for pattern in getattr(model, "transposed_weights", ()))


class Stack:
    """A stack in a checkpoint: one array, or single matrices.

    `shape`: `(E, F, D)`; `(E, ...)` of blocks, whose weights need not be matrices. `transposed`: True if the one array
    has each matrix as `[D, F]`.
    """

    def __init__(
        self, checkpoint: Checkpoint, shape: tuple[int, ...], keys: str | StackedKeys, *, transposed: bool = False
    ):
        self.shape = shape
        self._checkpoint = checkpoint
        self._keys = keys
        self._transposed = transposed

    @cached_property
    def _whole(self) -> Any:
        assert isinstance(self._keys, str)
        return self._checkpoint.read(self._keys)

    def read(self, i: int) -> np.ndarray | QuantizedWeight:
        """Matrix `[F, D]` of expert i: a view of the file if it lies there in one piece, else a copy."""
        if isinstance(self._keys, str):
            matrix = jax.tree.map(lambda array: array[i], self._whole)
            return matrix.T if self._transposed else matrix
        parts = [self._checkpoint.read(key) for key in self._keys[i]]
        floats = [part for part in parts if isinstance(part, np.ndarray)]
        quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
        if len(floats) == len(parts):
            return floats[0] if len(floats) == 1 else np.concatenate(floats)
        if len(quantized) < len(parts) or len({self._checkpoint.kind(key) for key in self._keys[i]}) > 1:
            kinds = ", ".join(f"{key}: {self._checkpoint.kind(key)}" for key in self._keys[i])
            raise CheckpointError(
                f"{self._checkpoint.folder}: one expert in two precisions ({kinds}); load it as floats with "
                "quantization='dequantize'"
            )
        return quantized[0] if len(quantized) == 1 else _concatenate(quantized)

    def release(self, i: int) -> None:
        """Give the memory of a matrix's pages back; of one array, after its last matrix."""
        if isinstance(self._keys, str):
            if i == self.shape[0] - 1:
                self._checkpoint.release(self._keys)
        else:
            for key in self._keys[i]:
                self._checkpoint.release(key)


def _concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    first, orders = parts[0], [part.order for part in parts]
    if any((order is None) != (first.order is None) for order in orders) or not all(
        first.order is None or np.array_equal(first.order, np.asarray(order)) for order in orders
    ):
        raise CheckpointError("the matrices of one expert take their inputs in several orders")
    zeros = None
    if any(part.zeros is not None for part in parts):
        points = [part.row_zeros() for part in parts]
        none = [jnp.zeros(part.row_scales().shape, jnp.int8) for part in parts]
        zeros = jnp.concatenate([zero if point is None else point for point, zero in zip(points, none, strict=True)])
    if first.bits == 4 and (zeros is not None or any(part.size_out % INT4_ROWS for part in parts[:-1])):
        integers = jnp.concatenate([part.integers() for part in parts])
        scales = jnp.concatenate([part.row_scales() for part in parts])
        return QuantizedWeight.from_integers(integers, scales, first.bits, first.group_size, zeros, first.order)
    values, scales = map(jnp.concatenate, zip(*((part.values, part.scales) for part in parts), strict=True))
    rows = sum(part.size_out for part in parts)
    return QuantizedWeight(
        values, scales, rows, first.size_in, first.group_size, first.bits, zeros=zeros, order=first.order
    )


def split_quantized(stack: QuantizedWeight, parts: int) -> Iterator[list[QuantizedWeight]]:
    """Matrices of a quantised stack, each cut into `parts` of equal rows."""
    for i in range(stack.shape[0]):
        matrix: QuantizedWeight = jax.tree.map(lambda array, i=i: array[i], stack)
        pairs = zip(jnp.split(matrix.integers(), parts), jnp.split(matrix.row_scales(), parts), strict=True)
        yield [QuantizedWeight.from_integers(*pair, matrix.bits, matrix.group_size) for pair in pairs]


DRAWN = 1_000_003
"""Most numbers that are drawn for an array. A larger array repeats them; the count is prime, so that rows differ."""

SPREAD = 0.3
"""Standard deviation of norms (around 1) and biases (around 0): one that is swapped or left out changes results."""


def random_weight(name: str, shape: Sequence[int], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Random weight, which depends on its name, its shape and the seed only.

    Matrices and kernels have the standard deviation `fan_in ** -0.5`, which keeps the scale of their inputs.

    `name`: key of the weight. Vectors whose names end with `bias` are around 0, all others around 1. `shape`: `[out,
    in, ...]`; `[E, out, in]` of a stack of experts.
    """
    count, summed = math.prod(shape), math.prod(shape[2:] if ".experts." in name else shape[1:])
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(min(count, DRAWN), np.float32)
    if summed > 1:
        values = noise * np.float32(summed**-0.5)
    else:
        values = np.float32(SPREAD) * noise + np.float32(not name.endswith("bias"))
    return np.resize(values.astype(dtype), shape)


def random_weights(abstract: nnx.Module, dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by key of a checkpoint, for a module of shapes; see `random_weight`."""
    weights: dict[str, np.ndarray] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(abstract)):
        name = ".".join(map(str, path))
        weight = random_weight(name, leaf.shape, dtype, seed)
        weights[name] = np.ascontiguousarray(weight.swapaxes(1, 2)) if is_transposed(abstract, name) else weight
    return weights
