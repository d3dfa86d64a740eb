"""Writing a checkpoint as Hugging Face's libraries write it: config.json and safetensors, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from safetensors.numpy import save_file

from verax.checkpoint.checkpoint import INDEX

__all__ = ["save"]

SHARD_BYTES = 5 * 10**9
"""Largest file, as on the hub."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def save(
    model: nnx.Module | Mapping[str, ArrayLike],
    folder: str | Path,
    *,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_from: str | Path | None = None,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint folder that transformers, and `Checkpoint.open`, can read; the folder.

    Files are written under other names and renamed at the end, weights first and config.json last: whoever interrupts
    this finds the old checkpoint, or none.

    Args:
        model: a module, whose parameters' paths become keys, or arrays by key.
        folder: created if missing. Weight files of an earlier save are replaced; other files stay.
        config: contents of config.json.
        generation_config: contents of generation_config.json; none is written if None.
        tokenizer_from: a folder whose tokenizer files are copied.
        dtype: of the written weights; as they are if None.
        max_shard_bytes: a file is begun anew beyond this size.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = _named(model)
    shards = _shards(arrays, dtype, max_shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    partial = folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        for name, keys in zip(names, shards, strict=True):
            save_file({key: _host(arrays[key], dtype) for key in keys}, partial / name, metadata={"format": "pt"})
        others = {"generation_config.json": generation_config, INDEX: _index(names, shards, arrays, dtype)}
        written = [name for name, value in others.items() if value is not None]
        for name in written:
            _write_json(partial / name, others[name])
        _write_json(partial / "config.json", config)
        copied = _copy_tokenizer(tokenizer_from, partial)
        kept = {*names, *written}
        for stale in [*folder.glob("model*.safetensors"), folder / INDEX]:
            if stale.name not in kept:
                stale.unlink(missing_ok=True)
        for name in [*names, *written, *copied, "config.json"]:
            os.replace(partial / name, folder / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _named(model: nnx.Module | Mapping[str, ArrayLike]) -> dict[str, Any]:
    if isinstance(model, nnx.Module):
        return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    return dict(model)


def _host(array: Any, dtype: DTypeLike | None) -> np.ndarray:
    array = np.asarray(array)
    return np.ascontiguousarray(array if dtype is None else array.astype(jnp.dtype(dtype)))


def _size(array: Any, dtype: DTypeLike | None) -> int:
    return int(np.prod(array.shape)) * jnp.dtype(array.dtype if dtype is None else dtype).itemsize


def _shards(arrays: Mapping[str, Any], dtype: DTypeLike | None, limit: int) -> list[list[str]]:
    """Keys by file, in order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for key, array in arrays.items():
        size = _size(array, dtype)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    return shards


def _index(
    names: list[str], shards: list[list[str]], arrays: Mapping[str, Any], dtype: DTypeLike | None
) -> dict[str, Any] | None:
    if len(names) == 1:
        return None
    total = sum(_size(array, dtype) for array in arrays.values())
    weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_tokenizer(source: str | Path | None, target: Path) -> list[str]:
    if source is None:
        return []
    found: Iterable[str] = [name for name in _TOKENIZER_FILES if (Path(source) / name).is_file()]
    for name in found:
        shutil.copyfile(Path(source) / name, target / name)
    return list(found)
