"""Adapters from their folders to host memory, in the form in which a slot takes them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verax.checkpoint.peft import Adapter
from verax.errors import InvalidParameterError
from verax.ops.division import repeated
from verax.text.features.lora.layers import AdaptedLayers
from verax.text.features.lora.request import LoRARequest

__all__ = ["AdapterLoader", "LoadedAdapter"]


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

    Args:
        layers: layers that adapters can change.
        max_cpu_loras: adapters that are kept. Requests hold theirs for themselves.
    """

    def __init__(self, layers: AdaptedLayers, max_cpu_loras: int):
        self._layers = layers
        self._max = max_cpu_loras
        self._loaded: OrderedDict[int, LoadedAdapter] = OrderedDict()
        self._paths: dict[int, Path] = {}
        """Folder of every adapter that was loaded, by number: what is cached goes by the number."""
        self._lock = threading.Lock()

    def load(self, request: LoRARequest) -> LoadedAdapter:
        """The adapter of a request, from its folder if it is not loaded.

        Raises:
            CheckpointError: if the adapter cannot be read or does not fit the model.
            UnsupportedModelError: if it is not plain LoRA.
            InvalidParameterError: if its rank is too large, or its number was another folder's.
        """
        if not isinstance(request, LoRARequest):
            raise InvalidParameterError(f"lora_request: expected a LoRARequest, got {request!r}")
        number, path = request.lora_int_id, Path(request.lora_path).expanduser().resolve()
        with self._lock:
            if (before := self._paths.get(number, path)) != path:
                raise InvalidParameterError(
                    f"lora_int_id: {number} stands for the adapter in {before} already; give {path} another number"
                )
            if number not in self._loaded:
                self._loaded[number] = self._read(request)
                self._paths[number] = path
            self._loaded.move_to_end(number)
            while len(self._loaded) > self._max:
                self._loaded.popitem(last=False)
            return self._loaded[number]

    def _read(self, request: LoRARequest) -> LoadedAdapter:
        adapter, layers = Adapter.open(Path(request.lora_path)), self._layers
        paths = {module: layers.names[module] for module in adapter.pairs if module in layers.names}
        if missing := adapter.pairs.keys() - paths.keys():
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
