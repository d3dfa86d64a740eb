"""Layers that adapters can change, and the arrays on the device that hold the adapters' matrices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax.errors import UnsupportedModelError
from verax.models import CausalLM
from verax.nn import Linear, LowRank
from verax.nn.parallel import divisions
from verax.ops.division import Division

__all__ = ["AdaptedLayers", "Matrices", "write_adapter"]

Matrices = tuple[Array, ...]
"""Two arrays for each layer: `down [S r, D]` and `up [F, S r]`, with S slots of rank r."""

PROBED_TOKENS = 7
"""Tokens of the pass that finds the layers: a prime number, so that no other axis is taken for them."""


@dataclass(frozen=True)
class AdaptedLayers:
    """The linear layers that every token passes in the order of the batch, and the sizes of adapters beside them."""

    shapes: Mapping[str, tuple[int, int]] = field(hash=False)
    """Outputs and inputs of each layer, by its path in the model."""
    names: Mapping[str, str] = field(hash=False)
    """Path of each layer by each of its names in published checkpoints, the path itself among them."""
    max_loras: int
    """Slots, S."""
    max_rank: int
    """Rank of every slot, r. Matrices of a smaller rank are filled up with zeros."""
    dtype: DTypeLike
    divisions: Mapping[str, Division] = field(default_factory=dict, hash=False)
    """Division of a layer's weight over devices, by path; of those that are divided."""
    repeats: int = 1
    """Times that the model has each unit of a layer whose division repeats; adapters have it once."""
    devices: int = 1
    """Devices that the layers are divided over."""

    @classmethod
    def of(
        cls,
        build: Callable[[tuple[Any, ...]], CausalLM],
        weights: tuple[jax.ShapeDtypeStruct, ...],
        *,
        max_loras: int,
        max_rank: int,
        repeats: int = 1,
        devices: int = 1,
    ) -> AdaptedLayers:
        """The layers of a model that is made of flat weights; its forward pass is traced once.

        Raises:
            UnsupportedModelError: if no `nn.Linear` is called with all tokens.
        """
        shapes: dict[str, tuple[int, int]] = {}
        found: dict[str, Any] = {}

        def probe(weights: tuple[Array, ...], tokens: Int[Array, "B T"]) -> Array:
            model = build(weights)
            for path, layer in _linear_layers(model):
                F, D = layer.weight.get_value().shape
                layer.low_rank = _Probe.of(F, D, lambda path=path, size=(F, D): shapes.__setitem__(path, size))
            found.update(divisions=divisions(model))
            found.update(dtype=model.dtype, aliases=model.key_aliases, name=type(model).__name__)
            return model(tokens)

        jax.eval_shape(probe, weights, jax.ShapeDtypeStruct((1, PROBED_TOKENS), jnp.int32))
        if not shapes:
            raise UnsupportedModelError(
                f"enable_lora: {found['name']} has no verax.nn.Linear that its tokens pass; adapters go beside these"
            )
        return cls(
            shapes=shapes,
            divisions={path: of for path in shapes if (of := found["divisions"].get(f"{path}.weight")) is not None},
            names={name: path for path in shapes for name in _names(path, found["aliases"])},
            repeats=repeats,
            devices=devices,
            max_loras=max_loras,
            max_rank=max_rank,
            dtype=found["dtype"],
        )

    def times(self, path: str) -> int:
        """Times that the model has each unit of a layer's outputs."""
        division = self.divisions.get(path)
        return self.repeats if division is not None and division.repeats else 1

    def order(self, path: str) -> Int[np.ndarray, "F"] | None:
        """Rows of a layer's `up` as the devices hold them, by number; None if these are in the order of the file."""
        division = self.divisions.get(path)
        return None if division is None else division.order(self.shapes[path][0], self.devices)

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arrays."""
        R = self.max_loras * self.max_rank
        pairs = [((R, size_in), (size_out, R)) for size_out, size_in in self.shapes.values()]
        return tuple(jax.ShapeDtypeStruct(shape, self.dtype) for pair in pairs for shape in pair)

    @property
    def partitions(self) -> tuple[PartitionSpec, ...]:
        """Partition of the arrays over devices: `up` by the outputs of its layer, or `down` by the inputs."""
        pairs = [(self.divisions.get(path), axis) for path in self.shapes for axis in (1, 0)]
        return tuple(PartitionSpec() if of is None or of.axis != axis else of.spec for of, axis in pairs)

    def new_arrays(self) -> Matrices:
        """Zeroed arrays: slots without an adapter."""
        return tuple(jnp.zeros(each.shape, each.dtype) for each in self.arrays)

    def attach(self, model: CausalLM, arrays: Matrices, slots: Int[Array, "T"]) -> None:
        """Add each token's adapter to the layers of a model, which is being traced.

        Args:
            model: the model.
            arrays: matrices of all slots.
            slots: slot of each token's adapter; -1 for none.
        """
        owner = jnp.arange(self.max_loras * self.max_rank, dtype=jnp.int32) // self.max_rank
        chosen = owner[None] == slots[:, None]
        layers = dict(_linear_layers(model))
        for path, down, up in zip(self.shapes, arrays[::2], arrays[1::2], strict=True):
            layers[path].low_rank = LowRank(down, up, chosen)


@dataclass(frozen=True)
class _Probe(LowRank):
    """Adapter that changes nothing, and reports that its layer was called with all tokens."""

    report: Callable[[], None] = field(default=lambda: None)

    @classmethod
    def of(cls, size_out: int, size_in: int, report: Callable[[], None]) -> _Probe:
        return cls(jnp.zeros((1, size_in)), jnp.zeros((size_out, 1)), jnp.zeros((0, 1), bool), report)

    def change(self, reduced: Float[Array, "*B R"]) -> Float[Array, "*B F"]:
        if math.prod(reduced.shape[:-1]) == PROBED_TOKENS:
            self.report()
        return jnp.zeros((*reduced.shape[:-1], self.up.shape[0]))


def write_adapter(arrays: Matrices, rows: Matrices, slot: Int[Array, ""]) -> Matrices:
    """Fill one slot with an adapter's matrices, `[r, D]` and `[F, r]` for each layer. Donate `arrays`."""
    written = []
    for i, (array, matrix) in enumerate(zip(arrays, rows, strict=True)):
        start = [jnp.zeros_like(slot)] * 2
        start[i % 2] = slot * matrix.shape[i % 2]
        written.append(jax.lax.dynamic_update_slice(array, matrix, start))
    return tuple(written)


def _linear_layers(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    """Linear layers of a model by path."""
    for path, module in nnx.iter_modules(cast(nnx.Module, model)):
        if isinstance(module, Linear):
            yield ".".join(map(str, path)), module


def _names(path: str, aliases: tuple[tuple[str, str], ...]) -> list[str]:
    """Names of a layer in published checkpoints."""
    key = f"{path}.weight"
    return [name.removesuffix(".weight") for name in (*(re.sub(*pair, key) for pair in aliases), key)]
