"""A GGUF file as a checkpoint: config.json's contents from its metadata, weights by the keys of Hugging Face folders.

Matrices of the block types that `ops.linear` multiplies, the embeddings among them, stay as they are
(`BlockQuantizedWeight`). Other block types are dequantised while they are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from verax.checkpoint.formats.gguf.file import DTYPES, GGUFFile
from verax.checkpoint.formats.gguf.layout import (
    ROPE_DIVISORS,
    norm_offset,
    read_config,
    restored,
    rotated,
    tensor_key,
)
from verax.checkpoint.formats.safetensors import TensorInfo
from verax.errors import CheckpointError
from verax.ops.block_quantized import BLOCK_KINDS, BlockQuantizedWeight

__all__ = ["GGUFWeight", "GGUFWeights"]


class GGUFWeight(NamedTuple):
    """A matrix that stays quantised."""

    file: GGUFWeights
    key: str
    shape: tuple[int, int]

    @property
    def kind(self) -> str:
        """A name out of `BLOCK_KINDS`."""
        return self.file.kind(self.key)

    @property
    def keys(self) -> tuple[str]:
        """The keys that are read for it."""
        return (self.key,)

    def read(self, read_raw: object) -> BlockQuantizedWeight:
        """Copy it out of the file, exactly: integers and scales as they are, in our order."""
        return BlockQuantizedWeight.from_blocks(self.kind, self.file.rows(self.key))


class GGUFWeights:
    """The weights of a file, as `SafetensorsFile` has those of one."""

    def __init__(self, path: Path):
        """Open the file.

        Raises:
            CheckpointError: if it is damaged, has no language model, or tensors of a type that is not supported.
            UnsupportedModelError: for an architecture that verax does not have.
        """
        self.path = path
        self.file = GGUFFile(path)
        self.metadata = self.file.metadata
        self._architecture = str(self.metadata.get("general.architecture"))
        self._names = {
            tensor_key(name, self._architecture): name for name in self.file.tensors if name != ROPE_DIVISORS
        }
        shapes = {key: self.file.tensors[name].shape for key, name in self._names.items()}
        try:
            self.config = read_config(self.metadata, shapes, self._divisors())
        except KeyError as error:
            raise CheckpointError(f"{path}: {error.args[0]} is missing: this is no language model") from error
        self.tensors = {key: self._info(name) for key, name in self._names.items()}
        self.packed = {
            key: GGUFWeight(self, key, (tensor.shape[0], tensor.shape[1]))
            for key, tensor in ((key, self.file.tensors[name]) for key, name in self._names.items())
            if tensor.kind in BLOCK_KINDS and len(tensor.shape) == 2
        }

    def kind(self, key: str) -> str:
        """A tensor's type."""
        return self.file.tensors[self._names[key]].kind

    def read(self, key: str) -> np.ndarray:
        """A tensor as floats: a view where the file has them as they are here, else a copy."""
        tensor, rows = self.file.tensors[self._names[key]], self.rows(key)
        if tensor.kind in DTYPES:
            weight = rows.view(DTYPES[tensor.kind]).reshape(tensor.shape)
            offset = norm_offset(key, self._architecture)
            return weight - offset if offset else weight
        return gguf.dequantize(rows, gguf.GGMLQuantizationType[tensor.kind]).reshape(tensor.shape)

    def rows(self, key: str) -> np.ndarray:
        """The bytes of a tensor's rows, in our order: `uint8 [F, bytes of a row]`."""
        rows = self.file.read(self._names[key])
        heads = rotated(key, self.config)
        return rows if heads is None else restored(rows, heads)

    def release(self, key: str) -> None:
        """Drop a tensor's pages from memory."""
        self.file.release_pages(self.tensors[key].start, self.tensors[key].end)

    def generation_config(self) -> dict[str, float]:
        """The sampling that the file recommends, by generation_config.json's names."""
        names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        names["penalty_repeat"] = "repetition_penalty"
        given = {ours: self.metadata.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
        return {name: value for name, value in given.items() if value is not None}

    def _divisors(self) -> np.ndarray | None:
        return self.file.read(ROPE_DIVISORS).view(np.float32).ravel() if ROPE_DIVISORS in self.file.tensors else None

    def _info(self, name: str) -> TensorInfo:
        tensor = self.file.tensors[name]
        return TensorInfo(DTYPES.get(tensor.kind, np.dtype(np.float32)), tensor.shape, tensor.start, tensor.end)
