"""Adapters merged into the weights of their base, which then is a model like any other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from verax.checkpoint.checkpoint import Checkpoint
from verax.checkpoint.peft.adapter import Adapter
from verax.checkpoint.save import save
from verax.errors import CheckpointError

__all__ = ["merge"]

QUANTIZED_DTYPE = "bfloat16"
"""Dtype of written weights that the base has quantised, if none is given."""


def merge(
    opened: Checkpoint,
    adapter: Adapter,
    folder: str | Path,
    *,
    aliases: Iterable[tuple[str, str]] = (),
    dtype: DTypeLike | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a checkpoint whose weights have an adapter's changes added, in float32 and rounded once; return its folder.

    Quantised weights become floats. Keys and tokenizer files are the base's.

    Args:
        opened: the base's checkpoint, a folder.
        adapter: the adapter.
        folder: folder to write.
        aliases: pairs of a pattern of keys and its replacement in another layout, from which adapters may have their
            names: the `key_aliases` of the model's class.
        dtype: dtype of the written floats; that of each weight in the base if None, bfloat16 for quantised ones.
        progress: called with (weights done, weights in all).

    Raises:
        CheckpointError: if the adapter has modules that the base lacks, or their shapes differ; if the base is a GGUF
            file.
    """
    if opened.metadata:
        raise CheckpointError(f"{opened.folder}: a GGUF file cannot be written back; merge into the model's folder")
    changed = _modules_by_weight(opened, adapter, tuple(aliases))
    names, read = opened.names(), set[str]()

    def report(name: str) -> None:
        read.add(name)
        if progress is not None:
            progress(len(read), len(names))

    weights: Any = {name: _Merged(opened, name, adapter, changed.get(name), report) for name in names}
    config = {name: value for name, value in opened.config.items() if name != "quantization_config"}
    if dtype is not None or opened.packed:
        config = {**config, "torch_dtype": jnp.dtype(dtype or QUANTIZED_DTYPE).name}
        config.pop("dtype", None)  # what newer versions of transformers call it
    generation = dict(opened.generation_config) or None
    return save(weights, folder, config=config, generation_config=generation, tokenizer_from=opened.folder, dtype=dtype)


class _Merged:
    """Weight with an adapter's change, which is read when it becomes an array, and not kept."""

    def __init__(
        self, opened: Checkpoint, name: str, adapter: Adapter, module: str | None, report: Callable[[str], None]
    ):
        self.shape = opened.shape(name)
        self.dtype = jnp.dtype(QUANTIZED_DTYPE) if name in opened.packed else opened.info(name).dtype
        self._opened, self._name, self._adapter, self._module = opened, name, adapter, module
        self._report = report

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        stored: Any = self._opened.read(self._name)
        weight = stored if isinstance(stored, np.ndarray) else np.asarray(stored.dequantize(jnp.float32))
        if self._module is not None:
            down, up = self._adapter.read(self._module)
            change = up @ down
            weight = weight.astype(np.float32) + (change.T if self._adapter.fan_in_fan_out else change)
        result = np.array(weight, dtype)  # a copy, whose source goes
        self._opened.release(self._name)
        self._report(self._name)
        return result


def _modules_by_weight(opened: Checkpoint, adapter: Adapter, aliases: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The adapter's modules by the keys of the weights that they change.

    Raises:
        CheckpointError: for modules without such a weight, or a weight of another shape.
    """
    keys = {key: key for key in opened.names() if key.endswith(".weight")}
    for pattern, replacement in aliases:
        keys = {**{re.sub(pattern, replacement, key): key for key in keys.values()}, **keys}
    found, missing, wrong = dict[str, str](), list[str](), list[str]()
    for module, pair in adapter.pairs.items():
        name = f"{module}.weight"
        others = (re.sub(pattern, replacement, name) for pattern, replacement in aliases)
        key = next((keys[each] for each in (name, *others) if each in keys), None)
        size = (pair.size_in, pair.size_out) if adapter.fan_in_fan_out else (pair.size_out, pair.size_in)
        if key is None:
            missing.append(module)
        elif opened.shape(key) != size:
            wrong.append(f"{module} (adapter {list(size)}, base {list(opened.shape(key))})")
        else:
            found[key] = module
    if missing:
        raise adapter.fault(missing, f"{opened.folder} has no weights of")
    if wrong:
        raise adapter.fault(wrong, f"another base than {opened.folder}, by the shapes of")
    return found
