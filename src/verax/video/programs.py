"""Models on the device while they are needed, and the compiled programs that take their weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
from flax import nnx
from jaxtyping import Array

from verax import ops
from verax._compat import compiler_options

__all__ = ["Component", "Memory", "Program"]

M = TypeVar("M", bound=nnx.Module)

KEPT = 1 << 30
"""Bytes of weights up to which a model stays on the device between its uses."""

Weights = tuple[Array, ...]


class Component(Generic[M]):
    """A model: shapes from the start, weights from the first use to the last."""

    def __init__(
        self,
        name: str,
        make: Callable[[], M],
        load: Callable[[M], M],
        *,
        keep: bool | None = None,
        offload: bool = False,
    ):
        """Describe it.

        Args:
            name: for people, as in "text encoder".
            make: gives the module, with any weights; traced for its shapes.
            load: fills a module that has shapes only with weights.
            keep: whether weights stay on the device between uses; by their size (`KEPT`) if None.
            offload: whether they wait in the host's memory instead, from their first use on.
        """
        self.name = name
        self._abstract = nnx.eval_shape(make)
        self._load = load
        self._graph, state = nnx.split(self._abstract)
        leaves, self._treedef = jax.tree.flatten(state)
        self.shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        self.keep = not offload and (self.size <= KEPT if keep is None else keep)
        self._offload = offload
        self._weights: Weights | None = None
        self._waiting: Weights | None = None

    @property
    def size(self) -> int:
        """Bytes of its weights."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.shapes)

    @property
    def loaded(self) -> bool:
        """Whether its weights are on the device."""
        return self._weights is not None

    @contextlib.contextmanager
    def weights(self) -> Iterator[Weights]:
        """Its weights, read if they are not there; given back afterwards unless they are to be kept."""
        if self._weights is None and self._waiting is not None:
            self._weights = in_memory(self._waiting, "device")
        if self._weights is None:
            # A flat tuple is what programs take: the module exists only while tracing.
            self._weights = tuple(jax.tree.leaves(nnx.state(self._load(self._abstract))))
            if self._offload:
                self._waiting = in_memory(self._weights, "pinned_host")
        try:
            yield self._weights
        finally:
            if not self.keep:
                self._weights = None

    @property
    def config(self) -> Any:
        """The module's configuration."""
        return cast(Any, self._abstract).config

    def module(self, weights: Weights) -> M:
        """The module of these weights; for use inside a program."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._treedef, weights))


def in_memory(weights: Weights, kind: str) -> Weights:
    """Copies of arrays in another memory of their device: `device`, or `pinned_host`, its host's."""
    return tuple(jax.device_put(weight, weight.sharding.with_memory_kind(kind)) for weight in weights)


class Memory(NamedTuple):
    """Bytes that a program needs, by XLA's own account."""

    arguments: int
    """What it is given, weights included."""
    results: int
    """What it gives, less what it writes over its arguments."""
    temporary: int
    """What it needs in between."""

    @property
    def peak(self) -> int:
        """All of it."""
        return sum(self)


class Program:
    """A function, compiled once for each set of shapes and options."""

    def __init__(self, function: Callable[..., Any], *, options: tuple[str, ...] = (), donate: tuple[int, ...] = ()):
        """Describe it.

        Args:
            function: of arrays by position and of `options` by name.
            options: names of arguments that are part of the program; hashable.
            donate: positions of arguments whose memory the results may take.
        """
        self._jit = jax.jit(
            function,
            static_argnames=options,
            donate_argnums=donate,
            compiler_options=compiler_options(ops.target().platform),
            keep_unused=True,  # weights that a program passes over lie in memory all the same, and `memory` counts them
        )
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run it, compiled now if it has not met these shapes and options."""
        return self._get(arguments, options)(*arguments)

    @property
    def count(self) -> int:
        """How many times it was compiled."""
        return len(self._compiled)

    def results(self, *arguments: Any, **options: Any) -> Any:
        """Shapes of what a call with these arguments, or with shapes in place of arrays, will give."""
        return self._get(arguments, options).out_info

    def memory(self, *arguments: Any, **options: Any) -> Memory:
        """What a call with these arguments, or with shapes in place of arrays, will need."""
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
        if key not in self._compiled:
            self._compiled[key] = self._jit.lower(*arguments, **options).compile()
        return self._compiled[key]
