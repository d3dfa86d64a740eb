"""Models that are on the device while they are used, and compiled programs that take their weights.

A `Component` is a model, and a `Program` a compiled function. A `ProgramCall` is one use of a program: it holds shapes,
from which its memory follows before the run, and the run calls it with arrays.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from verax import ops
from verax._compat import compiler_options, drop_jax_traces
from verax.machine import return_freed_memory
from verax.nn import pack_linear_weights, packed_copy
from verax.nn.parallel import divisions
from verax.ops._dispatch import drop_traces
from verax.ops.division import Division, is_weight, partition, resized
from verax.video.mesh import AnyMesh, Layout

M = TypeVar("M", bound=nnx.Module)

KEEP_LIMIT = 1 << 30
"""Bytes of weights up to which a model stays on the device between its uses."""

KEPT_PROGRAMS = 8
"""Compiled programs that are kept of a function. A clip takes at most eight of one: whole segments and the last of
a long clip, at two sizes, with two values of an option. A server whose clients ask for many sizes compiles an older one
again."""

Weights = tuple[Array, ...]
"""Arrays of a module in the order of its tree: an argument of programs, which merge them with the graph."""


class Component(Generic[M]):
    """A model: shapes from the start, weights from the first use to the last.

    `shapes`: shapes of the weights, whole.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], M],
        load: Callable[[M], M],
        *,
        keep: bool | None = None,
        offload: bool = False,
        held: Callable[[M], M] | None = None,
        pack: bool = False,
        mesh: AnyMesh | None = None,
    ):
        """Describe it.

        Args:
            make: function that returns the module, with any weights; traced for its shapes.
            held: function from the module of shapes to the one that `load` makes of it, of which weights are quantised;
                None if it makes none that differ.
            keep: True if weights stay on the device between uses; by their size (`KEEP_LIMIT`) if None.
            pack: True to pack the weights of linear layers on their way to the device (`nn.pack_linear_weights`), which
                takes as long as some five calls save.
            mesh: devices of the weights, each with its part of those that a module declares as divided
                (`nn.parallel.divisions`), and with all of the others; None for the default device.
        """
        self.name = name
        self._abstract = nnx.eval_shape(make)
        self._load = load
        self.mesh = mesh
        self._set_shapes(self._abstract)
        self.parameters = sum(math.prod(leaf.shape) for leaf in self.shapes)
        loaded = self._abstract if held is None else held(self._abstract)
        self._set_shapes(loaded)
        self.keep = not offload and (self.size <= KEEP_LIMIT if keep is None else keep)
        self._packs = pack
        if pack:
            self._set_shapes(nnx.eval_shape(packed_copy, loaded))
        self._offload = offload
        self._weights: Weights | None = None
        self._waiting: Weights | None = None
        self._uses = 0

    def _set_shapes(self, held: M) -> None:
        """Take the structure of a module of shapes, as the devices hold it."""
        self._graph, state = nnx.split(held)
        leaves, self._treedef = jax.tree.flatten(state)
        self.shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        declared = {} if self.mesh is None else divisions(held)
        # A quantised or packed weight is several arrays.
        self.partition = tuple(
            spec
            for path, leaf in nnx.to_flat_state(state)
            for spec in _specs(leaf.get_value(), declared.get(".".join(map(str, path))))
        )

    @property
    def size(self) -> int:
        """Bytes of the weights on one device."""
        return sum(
            math.prod(leaf.shape if self.mesh is None else NamedSharding(self.mesh, spec).shard_shape(leaf.shape))
            * leaf.dtype.itemsize
            for leaf, spec in zip(self.shapes, self.partition, strict=True)
        )

    @property
    def loaded(self) -> bool:
        """True if the weights are on the device."""
        return self._weights is not None

    @contextlib.contextmanager
    def weights(self) -> Iterator[Weights]:
        """Weights on the device, read if they are not there, and given back afterwards unless they are kept.

        Uses may be nested: the last one gives them back.
        """
        if self._weights is None and self._waiting is not None:
            self._weights = in_memory(self._waiting, "device")
        if self._weights is None:
            loaded = self._load(self._abstract)
            if self._packs:
                pack_linear_weights(loaded)
            # A flat tuple is what programs take: the module exists only while tracing.
            self._weights = tuple(jax.tree.leaves(nnx.state(loaded)))
            if self._offload:
                self._waiting = in_memory(self._weights, "pinned_host")
        self._uses += 1
        try:
            yield self._weights
        finally:
            self._uses -= 1
            if not self.keep and not self._uses:
                self._weights = None

    def unload(self) -> None:
        """Give the weights back, if they are not in use. The next use reads them again."""
        if not self._uses:
            self._weights = None

    def release(self) -> None:
        """Give the weights back, now and after each further use."""
        self.keep = False
        self.unload()

    @property
    def config(self) -> Any:
        """Configuration of the module."""
        return cast(Any, self._abstract).config

    def module(self, weights: Weights) -> M:
        """Module with these weights, for use inside a program."""
        state = jax.tree.unflatten(self._treedef, weights)
        if self.mesh is not None:  # a device's part of a quantised weight has other sizes than the whole
            state = jax.tree.map(lambda leaf: resized(leaf) if is_weight(leaf) else leaf, state, is_leaf=is_weight)
        return nnx.merge(self._graph, state)


def _specs(weight: Any, division: Division | None) -> list[PartitionSpec]:
    """Partition of each array of a weight."""
    specs = partition(weight, division)
    return [specs] * len(jax.tree.leaves(weight)) if isinstance(specs, PartitionSpec) else jax.tree.leaves(specs)


def in_memory(weights: Weights, kind: str) -> Weights:
    """Copies of arrays in another memory of their device: `device`, or `pinned_host`, its host's."""
    return tuple(jax.device_put(weight, weight.sharding.with_memory_kind(kind)) for weight in weights)


class Memory(NamedTuple):
    """Bytes that a program needs on one device, from XLA's memory analysis.

    `arguments`: arguments, weights included. `results`: results, less those that take the memory of arguments.
    """

    arguments: int
    results: int
    temporary: int

    @property
    def peak(self) -> int:
        """Sum of all."""
        return sum(self)


class Program:
    """Compiled function, one program for each set of shapes and options, of which the last used are kept.

    `function`: function of whole arrays, which divides them over the mesh of a layout.
    """

    def __init__(self, function: Callable[..., Any], *, donate: tuple[int, ...] = (), layout: Layout | None = None):
        """Describe it.

        `function`: function of arrays by position, and of hashable options by name, which are part of the program.
        `layout`: division of arguments and results over a mesh, each device of which runs the function on its shards;
        None for the default device.
        """
        self.function = function if layout is None else layout.divide(function)
        self._layout = layout
        self._options = {
            "donate_argnums": donate,
            "compiler_options": compiler_options(ops.target().platform),
            # Weights that a program passes over lie in memory all the same, and `memory` counts them.
            "keep_unused": True,
        }
        self._compiled: OrderedDict[Any, Any] = OrderedDict()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the program, compiled first if these shapes and options are new."""
        if self._layout is not None:
            arguments = self._layout.place(arguments)
        return self._get(arguments, options)(*arguments)

    @property
    def count(self) -> int:
        """Number of compiled programs."""
        return len(self._compiled)

    def results(self, *arguments: Any, **options: Any) -> Any:
        """Shapes of the results for these arguments, which may be shapes. Compiles the program."""
        return self._get(arguments, options).out_info

    def memory(self, *arguments: Any, **options: Any) -> Memory:
        """Memory of a call with these arguments, which may be shapes. Compiles the program."""
        analysis = self._get(arguments, options).memory_analysis()
        return Memory(
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            analysis.temp_size_in_bytes,
        )

    def _get(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (tree, shapes, tuple(sorted(options.items())))
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key][0]

        # JAX keeps traces and executables as long as the function lives, so each program has a function of its own.
        @functools.wraps(self.function)
        def function(*arrays: Any) -> Any:
            return self.function(*arrays, **options)

        placed = arguments if self._layout is None else self._layout.place(arguments)
        jitted = jax.jit(function, **self._options)
        compiled = jitted.lower(*placed).compile()
        self._compiled[key] = compiled, jitted
        if len(self._compiled) > KEPT_PROGRAMS:
            _, (_, oldest) = self._compiled.popitem(last=False)
            oldest.clear_cache()
            _release_memory()
        return compiled


@dataclass(frozen=True)
class ProgramCall:
    """Call of a program on a component's weights, described by shapes.

    `program`: program, whose first argument is the weights.
    """

    program: Program
    component: Component[Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments, without weights."""
        leaves = jax.tree.leaves(self.arguments)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def memory(self) -> Memory:
        """Memory of the call. Compiles the program, and reads no weights."""
        return self.program.memory(self.component.shapes, *self.arguments, **self.options)

    def results(self) -> Any:
        """Shapes of the results. Compiles the program, and reads no weights."""
        return self.program.results(self.component.shapes, *self.arguments, **self.options)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[..., Any]]:
        """Function of arrays that runs the program, while the weights stay on the device."""
        with self.component.weights() as weights:
            yield lambda *arrays: self.program(weights, *arrays, **self.options)

    def __call__(self, *arrays: Any) -> Any:
        """Run the program on arrays of the described shapes."""
        with self.opened() as run:
            return run(*arrays)


def _release_memory() -> None:
    """Free a program that was dropped, which refers to itself, with its traces, and give its memory to the system.

    Some megabytes for each size of a clip add up on a server.
    """
    drop_traces()
    drop_jax_traces()
    gc.collect()
    return_freed_memory()


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """Shape of a float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def shapes_of(tree: Any) -> Any:
    """Shapes and dtypes of the arrays of a tree."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def random_key(seed: int) -> Array:
    """Random key of a seed of 64 bits, both halves of which count; JAX's own key of a seed below `2**32`."""
    low, high = seed % 2**32, seed // 2**32 % 2**32
    key = jax.random.key(low)
    return jax.random.fold_in(key, high) if high else key
