"""Writing of a checkpoint in Hugging Face's format, config.json and safetensors; all files are written, or none."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from verax.checkpoint.checkpoint import INDEX
from verax.checkpoint.formats.compressed_tensors import entries, quantization_config
from verax.checkpoint.formats.safetensors import DTYPES, SHARD_BYTES, NewTensor, write_shards
from verax.checkpoint.load import is_transposed, split_quantized, stacked_keys
from verax.checkpoint.resolve import SENTENCE_FILES, TOKENIZER_FILES, module_files
from verax.errors import CheckpointError
from verax.files import write_json
from verax.ops.block_quantized import BlockQuantizedWeight
from verax.ops.quantized import QuantizedWeight

_CONFIG = "config.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX))
"""Pattern of the names of weight files that `save` writes, and that a later save replaces."""


def save(
    model: nnx.Module | Mapping[str, jax.Array | np.ndarray | NewTensor],
    folder: str | Path,
    *,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_from: str | Path | None = None,
    dtype: DTypeLike | None = None,
    stacked: bool = False,
    max_shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint folder that transformers and `Checkpoint.open` can read; return the folder.

    All files are written to a folder inside it first and then renamed, config.json last. An error leaves the old
    checkpoint as it was. A process that is killed between the renames leaves a folder without config.json.

    Args:
        model: a module, the paths of whose parameters become keys, or arrays by key. Quantised weights are written in
            the compressed-tensors layout.
        folder: folder of the checkpoint, created if missing. Weight files of an earlier save are replaced, others stay.
        generation_config: contents of generation_config.json; none is written if None.
        tokenizer_from: a folder whose tokenizer files are copied, and with them sentence-transformers' modules.
        dtype: dtype of the written float weights; their own if None.
        stacked: True to write a module's stacks of floats as one array each, as checkpoints of Gemma 4 have them; else
            they are single matrices where the module's class has keys for these (`stacked_weights`).
        max_shard_bytes: largest size of a file in bytes, unless a single weight is larger.

    Raises:
        CheckpointError: if `tokenizer_from` has no tokenizer files, a weight is in blocks of a GGUF file, or an array
            has a dtype that the format does not have.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        if tokenizer_from is not None:
            _copy_tokenizer(Path(tokenizer_from), partial)
        arrays, scheme = _named(model, stacked)
        tensors = {key: _tensor(key, value, dtype) for key, value in arrays.items()}
        for _ in write_shards(partial, "model", tensors, max_shard_bytes):
            pass
        if generation_config is not None:
            write_json(partial / "generation_config.json", generation_config)
        write_json(partial / _CONFIG, {**config, "quantization_config": scheme} if scheme else config)
        _swap(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _swap(partial: Path, folder: Path) -> None:
    """Move the files of `partial` into `folder`, and the files that they replace out of it; all of them, or none."""
    new = sorted(path.name for path in partial.iterdir() if path.name != _CONFIG)
    old = {name for name in os.listdir(folder) if name in new or _WEIGHTS.fullmatch(name)}
    replaced = folder / ".replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    replaced.mkdir()
    # A folder without config.json does not open: it is moved out first, and in last.
    moves = [(folder / _CONFIG, replaced / _CONFIG)] if (folder / _CONFIG).exists() else []
    moves += [(folder / name, replaced / name) for name in sorted(old)]
    moves += [(partial / name, folder / name) for name in (*new, _CONFIG)]
    try:
        for source, target in moves:
            os.replace(source, target)
    except BaseException:
        for source, target in reversed(moves):
            if not source.exists():  # it was moved
                os.replace(target, source)
        replaced.rmdir()  # only when empty: should a move back fail too, the old files are still there
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _named(model: nnx.Module | Mapping[str, Any], stacked: bool) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """Arrays by key, and the `quantization_config` for config.json; None without quantised weights."""
    if not isinstance(model, nnx.Module):
        return model, None
    values = {
        ".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    for key, value in values.items():
        if isinstance(value, BlockQuantizedWeight):
            raise CheckpointError(
                f"{key}: {value.kind} blocks are a GGUF file's and cannot be saved here; load them as floats, with "
                "quantization='dequantize'"
            )
        if isinstance(value, QuantizedWeight) and not value.is_plain:
            raise CheckpointError(f"{key}: only symmetric integers can be saved, in the order of the inputs")
    values = _unstacked(values, model, stacked)
    quantized = {key: value for key, value in values.items() if isinstance(value, QuantizedWeight)}
    if not quantized:
        return values, None
    arrays: dict[str, Any] = {}
    for key, value in values.items():
        arrays.update(entries(key, value) if key in quantized else {key: value})
    plain = [key for key, value in values.items() if key not in quantized and value.ndim == 2 and "embed" not in key]
    tied = [key for key in getattr(model, "tied_weights", ()) if key not in values]
    ignored = [key.removesuffix(".weight") for key in (*plain, *tied)]
    return arrays, quantization_config(quantized.values(), ignored)


def _unstacked(values: Mapping[str, Any], model: nnx.Module, stacked: bool) -> dict[str, Any]:
    """Values in which each stack is as checkpoints of the model have it: single matrices, or one transposed array."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        keys = stacked_keys(name, value.shape, getattr(model, "stacked_weights", ()))
        floats = not isinstance(value, QuantizedWeight)
        if keys is not None and floats and is_transposed(model, name):
            result[name] = np.ascontiguousarray(np.swapaxes(np.asarray(value), 1, 2))
        elif keys is None or (floats and stacked):
            result[name] = value
        elif not floats:
            for expert_keys, matrices in zip(keys, split_quantized(value, len(keys[0])), strict=True):
                result.update(zip(expert_keys, matrices, strict=True))
        else:
            for expert_keys, matrix in zip(keys, np.asarray(value), strict=True):
                result.update(zip(expert_keys, np.split(matrix, len(expert_keys)), strict=True))
    return result


def _tensor(key: str, value: Any, dtype: DTypeLike | None) -> NewTensor:
    """The tensor to write for an array, or for a tensor that is read when it is written."""
    if value.dtype not in DTYPES.values():
        raise CheckpointError(f"{key}: expected an array of {', '.join(map(str, DTYPES.values()))}, got {value.dtype}")
    floats = dtype is not None and jnp.issubdtype(value.dtype, jnp.floating)
    written = np.dtype(jnp.dtype(dtype) if floats else value.dtype)
    if isinstance(value, NewTensor):
        return value._replace(dtype=written)
    return NewTensor(written, value.shape, lambda: value)


def _copy_tokenizer(source: Path, target: Path) -> None:
    files, others = (
        {path for pattern in patterns for path in source.glob(pattern) if path.is_file()}
        for patterns in (TOKENIZER_FILES, (*SENTENCE_FILES, *module_files(source)))
    )
    if not files:
        raise CheckpointError(f"{source}: no tokenizer files here (tokenizer.json, tokenizer_config.json, ...) to copy")
    for path in sorted(files | others):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
