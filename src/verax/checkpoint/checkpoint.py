"""A Hugging Face checkpoint folder: configuration, and weights by name over one or many safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from verax.checkpoint.resolve import resolve
from verax.checkpoint.safetensors_file import SafetensorsFile, TensorInfo
from verax.errors import CheckpointError

__all__ = ["Checkpoint"]

SINGLE = "model.safetensors"
"""The weights, if they are in one file."""

INDEX = "model.safetensors.index.json"
"""Which file has which weight, if they are in many."""


class Checkpoint:
    """An open checkpoint. Weights are mapped, not read."""

    def __init__(
        self, folder: Path, config: dict[str, Any], generation_config: dict[str, Any], files: dict[str, SafetensorsFile]
    ):
        self.folder = folder
        self.config = config
        self.generation_config = generation_config
        self._files = files

    @classmethod
    def open(cls, model: str | Path, *, revision: str | None = None) -> Checkpoint:
        """Open a folder, or a hub id.

        Raises:
            CheckpointError: naming the file that is missing or damaged.
        """
        folder = resolve(model, revision=revision)
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        return cls(folder, config, read_json(generation) if generation.is_file() else {}, _open_files(folder))

    def names(self) -> list[str]:
        """Every weight's key."""
        return list(self._files)

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a weight."""
        return self._file(name).tensors[name]

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a weight, mapped from its file."""
        return self._file(name).read(name)

    def release(self, name: str) -> None:
        """Give the memory of a weight's pages back."""
        self._file(name).release(name)

    def path(self, name: str) -> Path:
        """The file that holds a weight."""
        return self._file(name).path

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(info.end - info.start for info in map(self.info, self._files))

    def _file(self, name: str) -> SafetensorsFile:
        try:
            return self._files[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: it has no weight {name}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: naming the file, if it is missing or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder has config.json and *.safetensors") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    """Each weight's file. As in transformers, one file goes before an index, and either before files of other names."""
    if (folder / SINGLE).is_file():
        single = SafetensorsFile(folder / SINGLE)
        return dict.fromkeys(single.tensors, single)
    if (folder / INDEX).is_file():
        return _open_indexed(folder)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = sorted(path.name for kind in ("bin", "pth", "pt") for path in folder.glob(f"*.{kind}"))
        only = f" ({', '.join(pickled[:3])} cannot be read)" if pickled else ""
        raise CheckpointError(
            f"{folder}: no safetensors files{only}; weights that are published as pytorch_model.bin alone have to be "
            "converted: transformers.AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
        )
    files: dict[str, SafetensorsFile] = {}
    for path in paths:
        opened = SafetensorsFile(path)
        for name in opened.tensors:
            if name in files:
                raise CheckpointError(
                    f"{path}: {name} is in {files[name].path.name} too, and no {INDEX} says which counts"
                )
            files[name] = opened
    return files


def _open_indexed(folder: Path) -> dict[str, SafetensorsFile]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: expected a weight_map from keys to file names")
    absent = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
    if absent:
        raise CheckpointError(f"{folder}: {', '.join(absent)} missing, which {INDEX} names")
    opened = {name: SafetensorsFile(folder / name) for name in sorted(set(weight_map.values()))}
    for key, name in weight_map.items():
        if key not in opened[name].tensors:
            raise CheckpointError(f"{folder / name}: {key} missing, which {INDEX} says is there")
    return {key: opened[name] for key, name in weight_map.items()}
