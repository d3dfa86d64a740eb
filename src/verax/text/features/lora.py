"""LoRA adapters: the request's choice, their loading, their slots, and the layers of a model that they change.

An adapter is read from its folder into host memory in the form in which a slot takes it. The arrays on the device have
a fixed number of slots; a slot is filled when a sequence needs its adapter.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax.checkpoint.lora import Adapter
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.models import CausalLM
from verax.nn import Linear, LowRank
from verax.nn.parallel import divisions
from verax.ops.division import Division, repeated


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, a number that stands for its weights, and its folder.

    The number decides what is shared: requests with equal numbers share the loaded adapter and cached prefixes. Other
    weights need another number.

    Raises:
        InvalidParameterError: for an empty name or path, or a number below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str]
    """Folder as PEFT saves it, with adapter_config.json and adapter_model.safetensors."""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidParameterError(f"lora_name: expected a name, got {self.lora_name!r}")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidParameterError(f"lora_int_id: expected a whole number of at least 1, got {number!r}")
        if not isinstance(self.lora_path, (str, os.PathLike)) or not os.fspath(self.lora_path):
            raise InvalidParameterError(f"lora_path: expected an adapter's folder, got {self.lora_path!r}")


class AdapterSlots:
    """Slots by number. One without a sequence keeps its adapter until another needs it: least recently used first."""

    def __init__(self, num_slots: int):
        self._slots: dict[int, int] = {}
        """Slot of each adapter that has one, by the adapter's number."""
        self._references: dict[int, int] = {}
        """Running sequences of each adapter in use."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Adapters that have a slot and no sequence, the one that was used longest ago first."""
        self._free = list(range(num_slots - 1, -1, -1))

    def has_room(self, adapter: int) -> bool:
        """True if a sequence of this adapter could run now."""
        return adapter in self._slots or bool(self._free or self._idle)

    def acquire(self, adapter: int) -> int:
        """Count one more sequence of an adapter that there is room for; its slot."""
        if adapter not in self._slots:
            if self._free:
                slot = self._free.pop()
            else:
                evicted, _ = self._idle.popitem(last=False)
                slot = self._slots.pop(evicted)
            self._slots[adapter] = slot
        self._idle.pop(adapter, None)
        self._references[adapter] = self._references.get(adapter, 0) + 1
        return self._slots[adapter]

    def release(self, adapter: int) -> None:
        """Count one sequence of an adapter less."""
        self._references[adapter] -= 1
        if not self._references[adapter]:
            del self._references[adapter]
            self._idle[adapter] = None


Matrices = tuple[Array, ...]
"""Two arrays for each layer: `down [S r, D]` and `up [F, S r]`, with S slots of rank r."""

PROBED_TOKENS = 7
"""Tokens of the pass that finds the layers: a prime number, so that no other axis is taken for them."""


@dataclass(frozen=True)
class AdaptedLayers:
    """The linear layers that every token passes in the order of the batch, and the sizes of adapters next to them."""

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
    repeats: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Times that the model has each unit of a weight, by its name, where adapters have it once."""
    devices: int = 1
    """Devices that the layers are divided over."""
    unused: tuple[str, ...] = ()
    """Patterns of weights of the checkpoint that the model does not compute with, such as a vision tower's."""

    @classmethod
    def of(
        cls,
        build: Callable[[tuple[Any, ...]], CausalLM],
        weights: tuple[jax.ShapeDtypeStruct, ...],
        *,
        max_loras: int,
        max_rank: int,
        repeats: Mapping[str, int] = MappingProxyType({}),
        devices: int = 1,
    ) -> AdaptedLayers:
        """The layers of a model that is made of flat weights; its forward pass is traced once."""
        shapes: dict[str, tuple[int, int]] = {}
        found: dict[str, Any] = {}

        def probe(weights: tuple[Array, ...], tokens: Int[Array, "B T"]) -> Array:
            model = build(weights)
            for path, layer in _linear_layers(model):
                F, D = layer.weight.get_value().shape
                layer.low_rank = _Probe.of(F, D, lambda path=path, size=(F, D): shapes.__setitem__(path, size))
            found.update(divisions=divisions(model))
            found.update(dtype=model.dtype, aliases=model.key_aliases, name=type(model).__name__)
            found.update(unused=tuple(model.ignored_weights))
            return model(tokens)

        jax.eval_shape(probe, weights, jax.ShapeDtypeStruct((1, PROBED_TOKENS), jnp.int32))
        if not shapes:
            raise UnsupportedModelError(
                f"enable_lora: {found['name']} has no verax.nn.Linear that its tokens pass, next to which adapters go"
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
            unused=found["unused"],
        )

    def is_unused(self, module: str) -> bool:
        """True for a module of the checkpoint that the model lacks, and that changes no answer to a text."""
        return any(re.search(pattern, f"{module}.weight") for pattern in self.unused)

    def times(self, path: str) -> int:
        """Times that the model has each unit of a layer's outputs."""
        return self.repeats.get(f"{path}.weight", 1)

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
        return tuple(jnp.zeros(array.shape, array.dtype) for array in self.arrays)

    def attach(self, model: CausalLM, arrays: Matrices, slots: Int[Array, "T"]) -> None:
        """Add each token's adapter to the layers of a model, which is being traced.

        `slots`: slot of each token's adapter; -1 for none.
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


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """Matrices of an adapter by layer, in the engine's dtype; the scale is part of B."""

    request: LoRARequest
    matrices: dict[str, tuple[np.ndarray, np.ndarray]]
    """A `[r, D]` and B `[F, r]`, by the layer's path in the model."""

    @property
    def id(self) -> int:
        """The number that stands for its weights."""
        return self.request.lora_int_id


class AdapterLoader:
    """Loaded adapters by number, the least recently used of which are forgotten. Any thread may load.

    `max_cpu_loras`: adapters that are kept. Requests hold theirs for themselves.
    """

    def __init__(self, layers: AdaptedLayers, max_cpu_loras: int):
        self._layers = layers
        self._max = max_cpu_loras
        self._loaded: OrderedDict[int, Future[LoadedAdapter]] = OrderedDict()
        """Adapters by number; one that is being read has no result yet."""
        self._paths: dict[int, Path] = {}
        """Folder of every adapter that was loaded, by number: what is cached goes by the number."""
        self._lock = threading.Lock()

    def load(self, request: LoRARequest) -> LoadedAdapter:
        """The adapter of a request, from its folder if it is not loaded."""
        if not isinstance(request, LoRARequest):
            raise InvalidParameterError(f"lora_request: expected a LoRARequest, got {request!r}")
        number, path = request.lora_int_id, Path(request.lora_path).expanduser().resolve()
        with self._lock:
            if (before := self._paths.get(number, path)) != path:
                raise InvalidParameterError(
                    f"lora_int_id: {number} stands for the adapter in {before} already; give {path} another number"
                )
            is_new, is_known = number not in self._loaded, number in self._paths
            adapter = self._loaded.setdefault(number, Future())
            self._loaded.move_to_end(number)
            self._paths[number] = path
            while len(self._loaded) > self._max:
                self._loaded.popitem(last=False)
        if is_new:  # read without the lock: a slow disk holds up the requests of this adapter only
            try:
                adapter.set_result(self._read(request))
            except BaseException as error:
                with self._lock:
                    if self._loaded.get(number) is adapter:
                        del self._loaded[number]
                    if not is_known:
                        self._paths.pop(number, None)
                adapter.set_exception(error)
        return adapter.result()

    def _read(self, request: LoRARequest) -> LoadedAdapter:
        adapter, layers = Adapter.open(Path(request.lora_path)), self._layers
        paths = {module: layers.names[module] for module in adapter.pairs if module in layers.names}
        missing = [module for module in adapter.pairs if module not in paths and not layers.is_unused(module)]
        if missing or not paths:
            missing = missing or adapter.pairs
            raise adapter.fault(missing, "the engine's model has no layers that adapters can change by the names of")
        wrong = []
        for module, path in paths.items():
            pair = adapter.pairs[module]
            size_out, size_in = layers.shapes[path]
            needed = size_out // layers.times(path), size_in
            if (size := (pair.size_out, pair.size_in)) != needed:
                wrong.append(f"{module} (adapter {list(size)}, model {list(needed)})")
        if wrong:
            raise adapter.fault(wrong, "it belongs to another base, by the shapes of")
        if adapter.rank > layers.max_rank:
            raise InvalidParameterError(
                f"max_lora_rank: {request.lora_path} has rank {adapter.rank}, but this engine was started for "
                f"{layers.max_rank}; pass LLM(..., max_lora_rank={adapter.rank})"
            )
        matrices = {}
        for module, path in paths.items():
            a, b = adapter.read(module)
            if (times := layers.times(path)) > 1:
                b = repeated(path, b, layers.divisions[path], times)
            if (order := layers.order(path)) is not None:
                b = b[order]
            matrices[path] = a.astype(layers.dtype), b.astype(layers.dtype)
        return LoadedAdapter(request, matrices)
