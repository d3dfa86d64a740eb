"""Checkpoints: configuration and weights by name, of a Hugging Face folder or of one GGUF file."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

import numpy as np

from verax.checkpoint.formats import compressed_tensors, quantized
from verax.checkpoint.formats.pth import PthFile
from verax.checkpoint.formats.quantized import QuantizedEntry
from verax.checkpoint.formats.safetensors import MappedFile, SafetensorsFile, TensorInfo
from verax.checkpoint.resolve import resolve
from verax.errors import CheckpointError
from verax.fields import read_value
from verax.files import read_json
from verax.ops.block_quantized import BlockQuantizedWeight
from verax.ops.quantized import QuantizedWeight

INDEX = "model.safetensors.index.json"
"""Name of the index, which maps each weight to its file if there are several."""

PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
"""Names of what older checkpoints have in the place of safetensors files: torch's archives."""

_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")

_IGNORED = re.compile(r"\.(input|activation|output|[qkv]|kv)_(scale|zero_point)$")
"""Scales of activations and of a cache, which a checkpoint does not quantise here."""


_SCHEMES = ("quantization_config", "compression_config")
"""Keys of config.json, or of its `text_config`, for how weights are quantised."""


def config_of_floats(config: Mapping[str, Any], dtype: str | None = None) -> dict[str, Any]:
    """config.json of the same model whose weights are floats, of the `dtype` if one is given."""
    changed: dict[str, Any] = {}
    if isinstance(text := config.get("text_config"), dict):
        changed["text_config"] = config_of_floats(text)
    if dtype is not None:
        changed["torch_dtype"] = dtype
    left_out = _SCHEMES if dtype is None else (*_SCHEMES, "dtype")  # as newer versions of transformers call it
    return {key: value for key, value in {**config, **changed}.items() if key not in left_out}


def _quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How weights are quantised, by config.json or a file of AutoGPTQ's, AWQ's or ModelOpt's; None if they are not."""
    if isinstance(mlx := config.get("quantization"), dict):  # next to which newer files have the same as any other's
        return {"quant_method": "MLX", **mlx}
    for one in (config, read_value(config, "text_config", dict, {})):
        for key in _SCHEMES:
            if (scheme := read_value(one, key, dict, None)) is not None:
                return scheme
    if (folder / "quantize_config.json").is_file():
        return {"quant_method": "gptq", **read_json(folder / "quantize_config.json")}
    if (path := folder / "quant_config.json").is_file():
        return {"quant_method": "awq", **read_json(path)}
    if (path := folder / "hf_quant_config.json").is_file():
        return {"quant_method": "modelopt", **read_value(read_json(path), "quantization", dict)}
    return None


_METHODS: dict[str, Callable[..., dict[str, QuantizedEntry]]] = {
    compressed_tensors.METHOD: compressed_tensors.find_compressed,
    "gptq": quantized.find_gptq,
    "awq": quantized.find_awq,
    "auto-round": quantized.find_auto_round,
    "fp8": quantized.find_float8,
    "fbgemm_fp8": quantized.find_float8,
    "modelopt": quantized.find_modelopt,
    "mxfp4": quantized.find_mxfp4,
}
"""Functions that find the quantised weights among a checkpoint's tensors, by `quant_method` of its scheme."""


def _find_quantized(
    tensors: Mapping[str, TensorInfo], scheme: Mapping[str, Any], read: Callable[[str], np.ndarray], folder: Path
) -> dict[str, QuantizedEntry]:
    """The quantised weights among a checkpoint's tensors, by their plain key."""
    method = scheme.get("quant_method")
    find = _METHODS.get(method) if isinstance(method, str) else None
    if find is None:
        message = (
            f"{folder}: it is quantised by {method!r}, which is not supported: {', '.join(_METHODS)} are, and so are "
            "unquantised checkpoints with quantization='int8', 'w8a8' or 'int4'"
        )
        if not any(info.dtype.kind in "iub" for info in tensors.values()):  # as merging of QLoRA adapters leaves them
            message += "; all its weights are floats, which load without quantization_config in config.json"
        raise CheckpointError(message)
    return find(tensors, scheme, read, folder)


class DerivedFile:
    """File of one weight that is computed from other arrays when it is read.

    `path`: file of the first of these arrays. `tensors`: dtype, shape and place of the weight, by its key.
    """

    def __init__(
        self, path: Path, name: str, info: TensorInfo, read: Callable[[], np.ndarray], release: Callable[[], None]
    ):
        self.path, self.tensors = path, {name: info}
        self._read, self._release = read, release

    def kind(self, name: str) -> str:
        """Name of the dtype."""
        return str(self.tensors[name].dtype)

    def places(self, name: str) -> list[tuple[Path, int, int]]:
        """File of the first array, and the bytes of all of them after its first byte."""
        return [(self.path, self.tensors[name].start, self.tensors[name].end)]

    def read(self, name: str) -> np.ndarray:
        """Compute the weight."""
        return self._read()

    def release(self, name: str) -> None:
        """Drop the pages of the arrays from memory."""
        self._release()


F = TypeVar("F", bound=MappedFile)

TensorFile = MappedFile | DerivedFile
"""A file of weights by key."""


class Checkpoint:
    """An open checkpoint. Weights are mapped, not read. A quantised weight has the key that it would have as floats."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        files: Mapping[str, TensorFile],
        *,
        packed: Mapping[str, QuantizedEntry] = MappingProxyType({}),
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.folder = folder
        """Folder of the checkpoint; the file itself if it is a GGUF file."""
        self.config = config
        self.generation_config = generation_config
        self.metadata = metadata
        """Metadata of a GGUF file, with its tokenizer; empty for a folder."""
        self._files = files
        self.packed = packed
        self._parts = {key for entry in packed.values() for key in entry.keys}
        scheme = _quantization(folder, config)
        if scheme is not None:
            tensors = {name: file.tensors[name] for name, file in files.items()}
            self.packed = _find_quantized(tensors, scheme, self.read_raw, folder)
            self._parts = {key for entry in self.packed.values() for key in entry.keys}
            self._parts |= {key for key in files if _IGNORED.search(key)}

    @classmethod
    def open(cls, model: str | Path, *, revision: str | None = None) -> Checkpoint:
        """Open a folder, a hub id, or a GGUF file.

        Raises:
            CheckpointError: naming the file that is missing or damaged.
            UnsupportedModelError: for a GGUF file of an architecture that verax does not have.
        """
        folder = resolve(model, revision=revision)
        if folder.is_file():
            from verax.checkpoint.formats.gguf import GGUFWeights

            file = GGUFWeights(folder)
            files = dict.fromkeys(file.tensors, file)
            return cls(folder, file.config, file.generation_config(), files, packed=file.packed, metadata=file.metadata)
        has_config = (folder / "config.json").is_file()
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{folder}: adapter_config.json: there is a LoRA adapter next to config.json, and nothing says whether "
                "the weights have it in them; move it into a folder of its own, or remove it if they have"
                if has_config
                else f"{folder}: this is a LoRA adapter; open its base model, with enable_lora and a LoRARequest, or "
                "write both as one model by verax convert --lora"
            )
        if not has_config:
            path = folder / "config.json"
            raise CheckpointError(
                f"{path}: no such file; a checkpoint folder has config.json and weights, or one GGUF file, which is "
                "not fetched from the hub: download it, and give its path"
            )
        generation_config = read_json(folder / "generation_config.json", optional=True)
        return cls(folder, read_json(folder / "config.json"), generation_config, _open_files(folder))

    def with_files(self, files: Mapping[str, TensorFile]) -> Checkpoint:
        """This checkpoint with the weights of some keys from other files, which are not quantised."""
        replaced = {key for name in files if name in self.packed for key in self.packed[name].keys}
        every = {**{key: file for key, file in self._files.items() if key not in replaced}, **files}
        packed = {name: entry for name, entry in self.packed.items() if name not in files}
        return Checkpoint(
            self.folder, self.config, self.generation_config, every, packed=packed, metadata=self.metadata
        )

    def names(self) -> list[str]:
        """Every weight's key."""
        return [*(name for name in self._files if name not in self._parts and name not in self.packed), *self.packed]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight."""
        return self.packed[name].shape if name in self.packed else self.info(name).shape

    def kind(self, name: str) -> str:
        """Storage of a weight: the name of its dtype or of its quantisation."""
        return self.packed[name].kind if name in self.packed else self._file(name).kind(name)

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of an unquantised weight."""
        return self._file(name).tensors[name]

    def read(self, name: str) -> np.ndarray | QuantizedWeight | BlockQuantizedWeight:
        """A read-only view of a weight, mapped from its file; a copy if it is quantised."""
        return self.packed[name].read(self.read_raw) if name in self.packed else self.read_raw(name)

    def read_raw(self, key: str) -> np.ndarray:
        """A read-only view of an array, by its key in the file."""
        return self._file(key).read(key)

    def release(self, name: str) -> None:
        """Give the memory of a weight's pages back."""
        for key in self._keys(name):
            self._file(key).release(key)

    def place(self, name: str) -> tuple[Path, int]:
        """The file that holds a weight, and the byte at which it begins."""
        path, start, _ = self.places(name)[0]
        return path, start

    def places(self, name: str) -> list[tuple[Path, int, int]]:
        """File, first byte and end of each array, or piece of one, that makes up a weight."""
        return [place for key in self._keys(name) for place in self._file(key).places(key)]

    def size(self, name: str) -> int:
        """Bytes of a weight in its file."""
        return sum(end - start for _, start, end in self.places(name))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(map(self.size, self.names()))

    def _keys(self, name: str) -> tuple[str, ...]:
        return self.packed[name].keys if name in self.packed else (name,)

    def _file(self, name: str) -> TensorFile:
        try:
            return self._files[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: it has no weight {name}") from None


def open_stem(folder: Path, stem: str) -> dict[str, SafetensorsFile]:
    """File of each weight, by key: `stem.safetensors`, else the files of its index, else all numbered ones.

    Nothing if the folder has none of these.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        opened = SafetensorsFile(single)
        return dict.fromkeys(opened.tensors, opened)
    if index.is_file():
        return _open_indexed(index, SafetensorsFile)
    shards = [(path, match) for path in sorted(folder.glob("*.safetensors")) if (match := _SHARD.fullmatch(path.name))]
    shards = [(path, match) for path, match in shards if match["stem"] == stem]
    for path, match in shards:
        names = [f"{stem}-{i:05}-of-{match['count']}.safetensors" for i in range(1, int(match["count"]) + 1)]
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(f"{folder}: {', '.join(absent[:10])} missing, which {path.name} is one of a set with")
    return open_together([path for path, _ in shards])


def open_together(paths: Iterable[Path]) -> dict[str, SafetensorsFile]:
    """File of each weight, by key, among several files without an index."""
    files: dict[str, SafetensorsFile] = {}
    for path in paths:
        opened = SafetensorsFile(path)
        for name in opened.tensors:
            if name in files:
                raise CheckpointError(
                    f"{path}: {name} is in {files[name].path.name} too, and no index says which counts"
                )
            files[name] = opened
    return files


def _open_files(folder: Path) -> Mapping[str, TensorFile]:
    """File of each weight, by key. As in transformers, one file precedes an index, and either precedes other names."""
    if (folder / "model.safetensors").is_file() or (folder / INDEX).is_file():
        return open_stem(folder, "model")
    if paths := sorted(folder.glob("[!.]*.safetensors")):  # macOS puts ._NAME next to each file on other file systems
        return open_together(paths)
    if (folder / PICKLED).is_file():
        opened = PthFile(folder / PICKLED)
        return dict.fromkeys(opened.tensors, opened)
    if (folder / PICKLED_INDEX).is_file():
        return _open_indexed(folder / PICKLED_INDEX, PthFile)
    others = sorted(path.name for kind in ("bin", "pth", "pt") for path in folder.glob(f"*.{kind}"))
    only = f"; {', '.join(others[:3])} cannot be read" if others else ""
    raise CheckpointError(f"{folder}: no safetensors files, {PICKLED} or {PICKLED_INDEX}{only}")


def _open_indexed(index: Path, kind: type[F]) -> dict[str, F]:
    folder = index.parent
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: expected a weight_map from keys to file names")
    absent = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
    if absent:
        raise CheckpointError(f"{folder}: {', '.join(absent)} missing, which {index.name} names")
    opened = {name: kind(folder / name) for name in sorted(set(weight_map.values()))}
    for key, name in weight_map.items():
        if key not in opened[name].tensors:
            raise CheckpointError(f"{folder / name}: {key} missing, which {index.name} says is there")
    return {key: opened[name] for key, name in weight_map.items()}


SAMPLES = 4
"""Places of a weight at which bytes are read."""

SAMPLE = 1024
"""Bytes that are read at a place. Training changes weights everywhere, so that some of these change too."""


def fingerprint(opened: Checkpoint) -> str:
    """Digest of every weight's name, storage and shape, and of bytes at even distances in it.

    It reads 4 KiB of each weight and takes milliseconds, where a digest of all bytes would read the files a second
    time: hosts that divide a model read different parts of it, so that nothing of all bytes is at hand. Other training,
    another revision and another quantisation are noticed; a change of a few numbers between the samples is not. How
    weights are spread over files makes no difference.

    Returns:
        Hexadecimal digits.
    """
    digest = hashlib.sha256()
    files: dict[Path, BinaryIO] = {}
    with contextlib.ExitStack() as stack:
        for name in sorted(opened.names()):
            digest.update(f"{name} {opened.kind(name)} {opened.shape(name)} {opened.size(name)}\n".encode())
            for path, start, end in opened.places(name):
                if path not in files:
                    files[path] = stack.enter_context(path.open("rb", buffering=0))
                last = max(end - SAMPLE, start)
                for i in range(SAMPLES):
                    files[path].seek(start + (last - start) * i // (SAMPLES - 1))
                    digest.update(files[path].read(min(SAMPLE, end - start)))
    return digest.hexdigest()[:16]
