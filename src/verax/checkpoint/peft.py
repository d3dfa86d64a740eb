"""LoRA adapters in PEFT's format (`PeftModel.save_pretrained`): read, merged into a base, and written.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. A module with weight W `[out, in]` gets matrices A
`[r, in]` and B `[out, r]`, which add `alpha / r * B A` to W; with rank-stabilised scaling (arXiv:2312.03732) it is
`alpha / sqrt(r)`. The modules that the file has matrices for are the adapted ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import msgspec
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from verax.checkpoint.checkpoint import Checkpoint
from verax.checkpoint.formats.pth import PthFile
from verax.checkpoint.formats.safetensors import SafetensorsFile
from verax.checkpoint.save import save
from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import Finite, read_value
from verax.files import atomic_path, read_json, write_json

__all__ = ["CONFIG", "PREFIX", "Adapter", "Pair", "merge", "save_adapter"]

CONFIG = "adapter_config.json"
SAFETENSORS, _PICKLED = "adapter_model.safetensors", "adapter_model.bin"

MAX_RANK = 1 << 14
"""Largest rank of a file: full rank in the widest published models."""

Rank = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK, description=f"a whole number of 1 to {MAX_RANK}")]

PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<role>[AB])(\.[^.]+)?\.weight")
"""Key of a matrix. Between role and `weight` files of PEFT's first versions have the adapter's name."""

_REFUSED = {
    "use_dora": "DoRA scales the whole weight",
    "modules_to_save": "whole modules are trained copies",
    "trainable_token_indices": "rows of the embedding are trained",
    "lora_bias": "the matrices have biases",
    "layer_replication": "layers of the base are repeated",
    "target_parameters": "parameters that are not the weight of a module are adapted",
    "alora_invocation_tokens": "activated LoRA begins in the middle of a prompt",
    "arrow_config": "a router chooses among adapters",
    "use_qalora": "QALoRA pools the inputs",
    "use_bdlora": "the matrices are block-diagonal",
    "kasa_config": "KaSA changes the base's weights",
    "monteclora_config": "the matrices are sampled",
}
"""Settings that change what is computed, each with what it does."""

_BASE_CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which training starts from other weights than the base's."""


@dataclass(frozen=True)
class Pair:
    """Matrices of one module: their keys in the file, sizes, and the factor on their product."""

    down: str
    """Key of A `[r, in]`."""
    up: str
    """Key of B `[out, r]`."""
    size_out: int
    size_in: int
    rank: int
    scale: float


@dataclass(frozen=True)
class Adapter:
    """An open adapter: settings and matrices by module, checked against each other. Matrices are mapped, not read."""

    folder: Path
    base: str | None
    """The base model as the training named it: a hub id or a path."""
    fan_in_fan_out: bool
    """True if the base stores the adapted weights as `[in, out]`, as GPT-2 does. A and B are as ever."""
    pairs: Mapping[str, Pair]
    """Matrices by module of the base, such as `model.layers.0.self_attn.q_proj`."""
    file: SafetensorsFile | PthFile
    settings: Mapping[str, Any]
    """Contents of adapter_config.json."""

    @classmethod
    def open(cls, folder: str | Path) -> Adapter:
        """Open an adapter's folder.

        Raises:
            CheckpointError: if a file is missing, damaged, or disagrees with the settings.
            UnsupportedModelError: for what is not plain LoRA; with the setting's name.
        """
        folder = Path(folder).expanduser()
        if not (folder / CONFIG).is_file():
            raise CheckpointError(f"{folder / CONFIG}: no such file; a PEFT adapter is a folder with it")
        settings = read_json(folder / CONFIG)
        _check_settings(settings, folder)
        if (folder / SAFETENSORS).is_file() or not (folder / _PICKLED).is_file():
            file: SafetensorsFile | PthFile = SafetensorsFile(folder / SAFETENSORS)
        else:
            file = PthFile(folder / _PICKLED)
        return cls(
            folder=folder,
            base=read_value(settings, "base_model_name_or_path", str, None),
            fan_in_fan_out=read_value(settings, "fan_in_fan_out", bool, False),
            pairs=_pairs(file, settings),
            file=file,
            settings=settings,
        )

    @property
    def rank(self) -> int:
        """Largest rank of a module."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def num_parameters(self) -> int:
        """Numbers in all matrices."""
        return sum(pair.rank * (pair.size_in + pair.size_out) for pair in self.pairs.values())

    def read(self, module: str) -> tuple[np.ndarray, np.ndarray]:
        """A `[r, in]` and the scaled B `[out, r]` of a module, copies in float32.

        Raises:
            CheckpointError: if a number is not finite: a batch computes all of its adapters for every token.
        """
        pair = self.pairs[module]
        matrices = []
        for key in (pair.down, pair.up):
            matrix = self.file.read(key).astype(np.float32)
            if not np.isfinite(matrix).all():
                raise CheckpointError(f"{self.file.path}: {key} has numbers that are not finite")
            self.file.release(key)
            matrices.append(matrix)
        return matrices[0], np.float32(pair.scale) * matrices[1]

    def fault(self, modules: Iterable[str], what: str) -> CheckpointError:
        """The error of an adapter that does not fit its base, naming the modules."""
        modules = sorted(modules)
        more = f" and {len(modules) - 5} more" if len(modules) > 5 else ""
        base = f"; it was trained for {self.base}" if self.base else ""
        return CheckpointError(f"{self.folder}: {what} {', '.join(modules[:5])}{more}{base}")


def _check_settings(settings: Mapping[str, Any], folder: Path) -> None:
    kind = read_value(settings, "peft_type", str, "LORA")
    if kind != "LORA":
        raise UnsupportedModelError(f"{folder / CONFIG}: peft_type {kind!r} is not supported, only 'LORA'")
    for name, what in _REFUSED.items():
        if settings.get(name):
            raise UnsupportedModelError(f"{folder / CONFIG}: {name} is not supported ({what}); only plain LoRA is")
    if (bias := read_value(settings, "bias", str, "none")) != "none":
        raise UnsupportedModelError(f"{folder / CONFIG}: bias {bias!r} is not supported, only 'none'")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGED):
        raise UnsupportedModelError(
            f"{folder / CONFIG}: init_lora_weights {start!r} is not supported: it changes the base's weights; PEFT "
            "converts such an adapter, see save_pretrained(path_initial_model_for_weight_conversion=...)"
        )


def _pairs(file: SafetensorsFile | PthFile, settings: Mapping[str, Any]) -> dict[str, Pair]:
    """Matrices by module.

    Raises:
        CheckpointError: for a key that is not a matrix, a matrix without the other, or shapes that contradict the
            settings.
    """
    matrices: dict[str, dict[str, str]] = {}
    unknown = []
    for key in file.tensors:
        match = _KEY.fullmatch(key)
        if match is None or not key.startswith(PREFIX):
            unknown.append(key)
        else:
            matrices.setdefault(match["module"].removeprefix(PREFIX), {})[match["role"]] = key
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise CheckpointError(
            f"{file.path}: {', '.join(sorted(unknown)[:5])}{more} cannot be used; expected lora_A and lora_B of linear "
            f"modules, whose keys begin with {PREFIX}"
        )
    if not matrices:
        raise CheckpointError(f"{file.path}: it has no matrices; expected lora_A and lora_B of linear modules")
    rooted = read_value(settings, "use_rslora", bool, False)
    rank, alpha = read_value(settings, "r", Rank, 8), read_value(settings, "lora_alpha", Finite, 8)
    ranks = read_value(settings, "rank_pattern", dict[str, Rank], {})
    alphas = read_value(settings, "alpha_pattern", dict[str, Finite], {})
    pairs = {}
    for module, keys in matrices.items():
        if len(keys) < 2:
            raise CheckpointError(f"{file.path}: {', '.join(keys.values())} lacks its other matrix")
        down, up = (file.tensors[keys[role]] for role in "AB")
        expected = _of_pattern(ranks, module, rank)
        for key, info in ((keys["A"], down), (keys["B"], up)):
            if not np.issubdtype(info.dtype, np.floating) and info.dtype.name != "bfloat16":
                raise CheckpointError(f"{file.path}: {key} has dtype {info.dtype}, expected floats")
        if len(down.shape) != 2 or len(up.shape) != 2 or not down.shape[0] == up.shape[1] == expected:
            raise CheckpointError(
                f"{file.path}: {keys['A']} {list(down.shape)} and {keys['B']} {list(up.shape)} are not the matrices of "
                f"rank {expected} that {CONFIG} says; expected [{expected}, in] and [out, {expected}]"
            )
        scale = _of_pattern(alphas, module, alpha) / (math.sqrt(expected) if rooted else expected)
        pairs[module] = Pair(keys["A"], keys["B"], up.shape[0], down.shape[1], expected, scale)
    return pairs


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Value of the first pattern that a module's name ends with, as PEFT matches (`get_pattern_key`).

    Raises:
        CheckpointError: for a pattern that is not a regular expression.
    """
    try:
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
    except re.error as error:
        raise CheckpointError(f"{CONFIG}: a pattern of rank_pattern or alpha_pattern is malformed: {error}") from error


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
        dtype: dtype of the written floats; if None, each weight keeps its dtype, and quantised ones become bfloat16.
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
    modules, missing, wrong = dict[str, str](), list[str](), list[str]()
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
            modules[key] = module
    if missing:
        raise adapter.fault(missing, f"{opened.folder} has no weights of")
    if wrong:
        raise adapter.fault(wrong, f"another base than {opened.folder}, by the shapes of")
    return modules


def save_adapter(
    folder: Path,
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    rank: int,
    alpha: float,
    base: str,
    modules: Iterable[str],
) -> Path:
    """Write adapter_model.safetensors and adapter_config.json; return the folder. One that exists is replaced.

    Args:
        folder: folder of the adapter.
        pairs: A `[r, in]` and B `[out, r]` without the scale, by module of the base.
        rank: rank of all pairs, r.
        alpha: numerator of the scale, which is `alpha / r`.
        base: hub id or path of the base.
        modules: all modules of the base that have a weight, to tell the adapted ones from others.
    """
    settings = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": _targets(pairs, modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    tensors = {}
    for module, matrices in pairs.items():
        for role, matrix in zip("AB", matrices, strict=True):
            tensors[f"{PREFIX}{module}.lora_{role}.weight"] = np.ascontiguousarray(matrix)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder) as partial:
        partial.mkdir()
        write_json(partial / CONFIG, settings)
        save_file(tensors, partial / SAFETENSORS, metadata={"format": "pt"})
        (partial / SAFETENSORS).chmod((partial / CONFIG).stat().st_mode)  # the library's are their owner's only
    return folder


def _targets(adapted: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Names for `target_modules`: the last parts of modules' names, or whole ones where others have the same part.

    PEFT adapts every module whose name ends with one of them.
    """
    adapted = set(adapted)
    others = {module.split(".")[-1] for module in modules if module not in adapted}
    return sorted({last if (last := module.split(".")[-1]) not in others else module for module in adapted})
