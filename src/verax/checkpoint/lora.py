"""LoRA (Hu et al., 2021, arXiv:2106.09685): PEFT's adapters of language models, and files for Wan and SkyReels-V2.

A module with weight W `[out, in]` gets matrices A `[r, in]` and B `[out, r]`, which add `alpha / r * B A` to W; with
rank-stabilised scaling (arXiv:2312.03732) it is `alpha / sqrt(r)`. The modules that the file has matrices for are the
adapted ones.

- Adapters in PEFT's format (`PeftModel.save_pretrained`) are read, merged into a base, and written:
  https://huggingface.co/docs/peft/developer_guides/checkpoint.
- Files for video models are added to the weights while these are loaded. Most differ in names only: diffusers and PEFT
  name the matrices `lora_A` and `lora_B`, kohya `lora_down` and `lora_up`. Either may have an `alpha`; without one,
  alpha is r. B may have a bias. LyCORIS' LoHa and LoKr combine more matrices (arXiv:2309.14859). A file may also have
  whole differences: `diff` of a weight, `diff_b` of a bias, `diff_m` of a modulation.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.typing import DTypeLike

from verax.checkpoint.checkpoint import Checkpoint, DerivedFile, config_of_floats, fingerprint
from verax.checkpoint.formats.pth import PthFile
from verax.checkpoint.formats.safetensors import NewTensor, SafetensorsFile, write_shards
from verax.checkpoint.save import save
from verax.checkpoint.video.parts import PARTS, WRAPPERS
from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import Finite, read_value
from verax.files import JsonObject, atomic_path, read_json, write_json

_log = logging.getLogger("verax.checkpoint")

CONFIG = "adapter_config.json"
SAFETENSORS, _PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_DIFFUSERS = "pytorch_lora_weights.safetensors"
"""Name of the file that diffusers' `save_lora_weights` writes into a folder."""

MAX_RANK = 1 << 14
"""Largest rank of a file: full rank in the widest published models."""

Rank = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK, description=f"a whole number of 1 to {MAX_RANK}")]

PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<role>[AB])(\.[^.]+)?\.weight")
"""Key of a matrix. Between role and `weight` files of PEFT's first versions have the adapter's name."""

_COPY = ".base_layer.weight"
"""End of the key of a copy of the base's own weight, which PEFT writes where an output head is adapted."""

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
    """True if the base stores the adapted weights as `[in, out]`, as GPT-2 does. A and B are not transposed."""
    pairs: Mapping[str, Pair]
    """Matrices by module of the base, such as `model.layers.0.self_attn.q_proj`."""
    file: SafetensorsFile | PthFile
    settings: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> Adapter:
        """Open an adapter's folder."""
        folder = Path(folder).expanduser()
        if not (folder / CONFIG).is_file():
            raise CheckpointError(f"{folder / CONFIG}: no such file; a PEFT adapter is a folder with it")
        settings = read_json(folder / CONFIG)
        _check_settings(settings, folder / CONFIG)
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
        """A `[r, in]` and the scaled B `[out, r]` of a module, copies in float32."""
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


def _check_settings(settings: Mapping[str, Any], where: Path) -> None:
    kind = read_value(settings, "peft_type", str, "LORA")
    if kind != "LORA":
        raise UnsupportedModelError(f"{where}: peft_type {kind!r} is not supported, only 'LORA'")
    for name, what in _REFUSED.items():
        if settings.get(name):
            raise UnsupportedModelError(f"{where}: {name} is not supported ({what}); only plain LoRA is")
    if (bias := read_value(settings, "bias", str, "none")) != "none":
        raise UnsupportedModelError(f"{where}: bias {bias!r} is not supported, only 'none'")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGED):
        raise UnsupportedModelError(
            f"{where}: init_lora_weights {start!r} is not supported: it changes the base's weights; PEFT "
            "converts such an adapter, see save_pretrained(path_initial_model_for_weight_conversion=...)"
        )


def _pairs(file: SafetensorsFile | PthFile, settings: Mapping[str, Any]) -> dict[str, Pair]:
    """Matrices by module."""
    matrices: dict[str, dict[str, str]] = {}
    unknown = []
    adapted = {match["module"] for key in file.tensors if (match := _KEY.fullmatch(key)) is not None}
    for key in file.tensors:
        if key.endswith(_COPY) and key.removesuffix(_COPY) in adapted:
            continue
        match = _KEY.fullmatch(key)
        if match is None or not key.startswith(PREFIX):
            unknown.append(key)
            continue
        keys = matrices.setdefault(match["module"].removeprefix(PREFIX), {})
        if (other := keys.setdefault(match["role"], key)) != key:
            raise CheckpointError(f"{file.path}: {other} and {key} are of two adapters; save each in its own folder")
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
    """Value of the first pattern that a module's name ends with, as PEFT matches (`get_pattern_key`)."""
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
    tied: Mapping[str, str] = MappingProxyType({}),
    dtype: DTypeLike | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a checkpoint whose weights have an adapter's changes added, in float32 and rounded once; return its folder.

    Quantised weights become floats. Keys and tokenizer files are the base's. An output head that is the embeddings in
    the base and changed by the adapter is written as a weight of its own.

    Args:
        aliases: pairs of a pattern of keys and its replacement in another layout, from which adapters may have their
            names: the `key_aliases` of the model's class.
        tied: keys of weights that a base may have once, by the keys that it may lack: its `tied_weights`.
        dtype: dtype of the written floats; if None, each weight keeps its dtype, and quantised ones become bfloat16.
        progress: called with (weights done, weights in all).
    """
    if opened.metadata:
        raise CheckpointError(f"{opened.folder}: a GGUF file cannot be written back; merge into the model's folder")
    changed, sources = _modules_by_weight(opened, adapter, tuple(aliases), tied)
    counter = count(1)

    def done() -> None:
        number = next(counter)
        if progress is not None:
            progress(number, len(sources))

    weights = {key: _merged(opened, name, adapter, changed.get(key), done) for key, name in sources.items()}
    merged = jnp.dtype(dtype or QUANTIZED_DTYPE).name if dtype is not None or opened.packed else None
    config = config_of_floats(opened.config, merged)
    if not changed.keys().isdisjoint(tied):
        for level in (config, config.get("text_config")):
            if isinstance(level, dict):
                level["tie_word_embeddings"] = False
    generation = dict(opened.generation_config) or None
    return save(weights, folder, config=config, generation_config=generation, tokenizer_from=opened.folder, dtype=dtype)


def _merged(opened: Checkpoint, name: str, adapter: Adapter, module: str | None, done: Callable[[], None]) -> NewTensor:
    """A weight with an adapter's change, which is computed when it is written."""

    def read() -> np.ndarray:
        stored: Any = opened.read(name)
        weight = stored if isinstance(stored, np.ndarray) else np.asarray(stored.dequantize(jnp.float32))
        if module is None:
            return weight
        down, up = adapter.read(module)
        change = up @ down
        return weight.astype(np.float32) + (change.T if adapter.fan_in_fan_out else change)

    def release() -> None:
        opened.release(name)
        done()

    dtype = jnp.dtype(QUANTIZED_DTYPE) if name in opened.packed else opened.info(name).dtype
    return NewTensor(dtype, opened.shape(name), read, release)


_LEVEL = "language_model."
"""Part of a name by which a language model stands next to a vision tower."""


def _modules_by_weight(
    opened: Checkpoint, adapter: Adapter, aliases: tuple[tuple[str, str], ...], tied: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The adapter's modules by the keys of the weights that they change, and the base's weights by the written keys."""
    sources = {key: key for key in opened.names()}
    keys = {key: key for key in sources if key.endswith(".weight")}
    for pattern, replacement in aliases:
        keys = {**{re.sub(pattern, replacement, key): key for key in keys.values()}, **keys}
    # With a vision tower, files and modules of transformers have the level of the language model in different places.
    keys = {**{key.replace(_LEVEL, "", 1): key for key in keys.values()}, **keys}
    for head, embeddings in tied.items():
        if head not in keys and embeddings in keys and head.removesuffix(".weight") in adapter.pairs:
            sources[head], keys[head] = keys[embeddings], head
    modules, missing, wrong = dict[str, str](), list[str](), list[str]()
    for module, pair in adapter.pairs.items():
        name = f"{module}.weight"
        others = (re.sub(pattern, replacement, name) for pattern, replacement in aliases)
        key = next((keys[alias] for alias in (name, *others, name.replace(_LEVEL, "", 1)) if alias in keys), None)
        size = (pair.size_in, pair.size_out) if adapter.fan_in_fan_out else (pair.size_out, pair.size_in)
        if key is None:
            missing.append(module)
        elif (shape := opened.shape(sources[key])) != size:
            wrong.append(f"{module} (adapter {list(size)}, base {list(shape)})")
        else:
            modules[key] = module
    if missing:
        raise adapter.fault(missing, f"{opened.folder} has no weights of")
    if wrong:
        raise adapter.fault(wrong, f"another base than {opened.folder}, by the shapes of")
    return modules, sources


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

    `pairs`: A `[r, in]` and B `[out, r]` without the scale, by module of the base. `modules`: all modules of the base
    that have a weight, to tell the adapted ones from others.
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
    tensors = {
        f"{PREFIX}{module}.lora_{role}.weight": NewTensor(matrix.dtype, matrix.shape, lambda matrix=matrix: matrix)
        for module, matrices in pairs.items()
        for role, matrix in zip("AB", matrices, strict=True)
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder) as partial:
        partial.mkdir()
        write_json(partial / CONFIG, settings)
        for _ in write_shards(partial, SAFETENSORS.removesuffix(".safetensors"), tensors):
            pass
    return folder


def _targets(adapted: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Names for `target_modules`: the last parts of modules' names, or whole ones where others have the same part.

    PEFT adapts every module whose name ends with one of them.
    """
    adapted = set(adapted)
    others = {module.split(".")[-1] for module in modules if module not in adapted}
    return sorted({last if (last := module.split(".")[-1]) not in others else module for module in adapted})


_KEY_IN_FILE = re.compile(
    r"(?P<module>.+?)[._]"
    r"(?:lora[._](?:linear_layer\.)?(?P<lora>A|B|down|up|mid)|hada_(?P<hada>w[12]_[ab]|t[12])|"
    r"lokr_(?P<lokr>w[12](?:_[ab])?|t2)|(?P<diff>diff(?:_[bm])?|[wb]_norm)|(?P<alpha>alpha))"
    r"(?:\.(?!weight$|bias$)\w+)?(?:\.(?P<ending>weight|bias))?"
)
"""Key of a file. Between role and ending some files have the adapter's name."""

_PARAMETERS = {"diff_b": "bias", "b_norm": "bias", "diff_m": "modulation"}
"""Parameter of a module that a difference is added to, where it is not the weight."""

_ALPHAS = ("lora_alpha", "network_alpha", "alpha")
"""Names of alpha in a file's header. Not kohya's `ss_network_alpha`, which stays where converters have applied it."""

_UNSUPPORTED = re.compile(
    r"dora_scale|magnitude_vector|oft_|boft_|\.[ab][12]\.weight$|on_input$|set_weight|reshape_weight"
)
"""Keys of methods that are not implemented: DoRA, OFT, BOFT, GLoRA, IA3, and ComfyUI's replacements of weights."""

_PREFIXES = re.compile(
    r"^((base_model|model|diffusion_model|transformer|pipe|dit|unet|lora_unet|lora_transformer|lycoris)[._]+)+"
)
"""Prefixes of names by PEFT, ComfyUI, diffusers, DiffSynth, kohya and LyCORIS."""

_OF_IMAGES = re.compile(r"(^|_)(img_emb|image_embedder|[kv]_img|norm_[kq]_img|add_[kv]_proj|norm_added_[kq])(_|$)")
"""Modules, in names by `_plain`, that a transformer with an image encoder alone has."""


class _Key(NamedTuple):
    """Key of a file: the module that it names, and its part in a change of one of the module's parameters.

    `method`: `lora`, `hada` (LyCORIS' LoHa), `lokr` (its LoKr), `diff` (a difference), `bias` (B's bias), or `alpha`.
    """

    module: str
    parameter: str
    method: str
    role: str


def _parse(key: str) -> _Key | None:
    match = _KEY_IN_FILE.fullmatch(key)
    if match is None or (match["ending"] == "bias" and match["lora"] not in ("B", "up")):
        return None
    method = next(name for name in ("lora", "hada", "lokr", "diff", "alpha") if match[name])
    role, parameter = match[method], _PARAMETERS.get(match[method], match["ending"] or "weight")
    if method == "lora":
        method, role = ("bias", "diff") if parameter == "bias" else (method, {"A": "down", "B": "up"}.get(role, role))
    module = _PREFIXES.sub("", WRAPPERS.sub("", match["module"]))
    return _Key(module, parameter, method, "diff" if method == "diff" else role)


def _plain(name: str) -> str:
    """Name of a parameter that all files share: without prefixes and wrappers, and with underscores for dots."""
    return re.sub(r"[._]+", "_", _PREFIXES.sub("", WRAPPERS.sub("", name)))


@dataclass
class _Change:
    """Change of one weight by one file.

    Attributes:
        method: method of its keys, see `_Key`.
        keys: keys of the file by their roles.
        alpha: numerator of the factor on the product; the rank if None.
        root: True if alpha is divided by the square root of the rank, as in rank-stabilised LoRA (arXiv:2312.03732).
        pair: the matrices whose factor counts, for the bias of B; None for the change's own.
    """

    file: SafetensorsFile
    scale: float
    method: str
    root: bool = False
    keys: dict[str, str] = field(default_factory=dict)
    alpha: float | None = None
    pair: _Change | None = None

    @property
    def factor(self) -> float:
        """Factor on the product: alpha / rank. The rank of LoKr is its second factor's, else its first's, else none."""
        if self.pair is not None:
            return self.pair.factor
        inner = next((self.keys[role] for role in ("down", "w2_b", "w1_b") if role in self.keys), None)
        if self.alpha is None or inner is None:
            return 1.0
        rank = self.file.tensors[inner].shape[0]
        return self.alpha / (math.sqrt(rank) if self.root else rank)

    def read(self, shape: tuple[int, ...]) -> np.ndarray:
        """Difference that is added to the weight, float32 of `shape`."""
        arrays = {role: self.file.read(key).astype(np.float32) for role, key in self.keys.items()}
        difference = np.float32(self.scale * self.factor) * _difference(np, self.method, arrays).reshape(shape)
        if not np.isfinite(difference).all():
            raise CheckpointError(f"{self.file.path}: {', '.join(self.keys.values())} have numbers that are not finite")
        return difference

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that the tensors are floats, and give a difference of the weight's shape."""
        for key in self.keys.values():  # integers mean something with scales only, and none are read here
            if not jnp.issubdtype(dtype := self.file.tensors[key].dtype, jnp.floating):
                raise CheckpointError(f"{self.file.path}: {key} has dtype {dtype}, expected floats")
        shapes = {role: self.file.tensors[key].shape for role, key in self.keys.items()}
        arrays = ", ".join(f"{self.keys[role]} {list(size)}" for role, size in shapes.items()) or name
        zeros = {role: jax.ShapeDtypeStruct(size, np.float32) for role, size in shapes.items()}
        try:
            got = jax.eval_shape(partial(_difference, jnp, self.method), zeros).shape
        except KeyError as error:
            keys = ", ".join(self.keys.values())
            raise CheckpointError(f"{self.file.path}: {keys} lacks its other matrix, {error.args[0]}") from error
        except (TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"{self.file.path}: {arrays} do not fit each other, as a change of {name} of shape {list(shape)}"
            ) from error
        same = got == shape if len(got) == len(shape) else got[:1] == shape[:1] or self.method == "diff"
        if not same or math.prod(got) != math.prod(shape):
            raise CheckpointError(
                f"{self.file.path}: {arrays} cannot change {name}: they are for a weight of shape {list(got)}, "
                f"and this transformer's has shape {list(shape)}; the file was made for a model of another size"
            )


def _difference(xp: Any, method: str, arrays: Mapping[str, Any]) -> Any:
    """Difference of a weight by its factors, without the scale, `[out, in k]`; `xp` is `numpy` or `jax.numpy`.

    LoHa (FedPara, arXiv:2108.06098) multiplies two products by elements, LoKr (arXiv:2212.10650) is the Kronecker
    product of two matrices, each of which may be a product itself.
    """

    def product(left: Any, right: Any, core: Any) -> Any:
        """`left @ right`; with Tucker's core `[r, r, *k]` the sum over both ranks, for a convolution."""
        left, right = left.reshape(left.shape[0], -1), right.reshape(right.shape[0], -1)
        if core is None:
            return left @ right
        return xp.einsum("pi,ij...,jr->pr...", left, core, right).reshape(left.shape[0], -1)

    def factor(i: int) -> Any:
        if f"w{i}" in arrays:
            return arrays[f"w{i}"].reshape(arrays[f"w{i}"].shape[0], -1)
        left, core = arrays[f"w{i}_a"], arrays.get(f"t{i}")
        return product(left if core is None else left.T, arrays[f"w{i}_b"], core)

    if method == "lora":
        return product(arrays["up"], arrays["down"], arrays.get("mid"))
    if method == "hada":
        one, two = factor(1), factor(2)
        if one.shape != two.shape:
            raise ValueError(f"products of shapes {one.shape} and {two.shape}")
        return one * two
    return xp.kron(factor(1), factor(2)) if method == "lokr" else arrays["diff"]


def _changed(name: str, checkpoint: Checkpoint, changes: Sequence[_Change]) -> DerivedFile:
    """A weight with changes added, in float32: rounding is left to the loading, so that it happens once."""

    def read() -> np.ndarray:
        stored: Any = checkpoint.read(name)
        total = (stored if isinstance(stored, np.ndarray) else np.asarray(stored.dequantize())).astype(np.float32)
        for change in changes:
            total += change.read(total.shape)
        return total

    def release() -> None:
        checkpoint.release(name)
        for change in changes:
            for key in change.keys.values():
                change.file.release(key)

    info = checkpoint.info(name)._replace(dtype=np.dtype(np.float32), shape=checkpoint.shape(name))
    return DerivedFile(checkpoint.place(name)[0], name, info, read, release)


def with_lora(checkpoint: Checkpoint, files: Mapping[Path, float]) -> Checkpoint:
    """A transformer's checkpoint with LoRA files, whose changes are added to the weights when these are read.

    Keys of modules for an image encoder are left out, with a warning, where the transformer attends to none: files made
    from Wan2.1's image to video have them, LightX2V's for Wan2.2's among these (ModelTC/LightX2V#1246).

    `checkpoint`: checkpoint of a transformer by the original's names, from `VideoFolder.checkpoint`. `files`: LoRA
    files (safetensors), or folders of PEFT or diffusers, each with a factor on its changes. The changes of all files
    are added.

    Raises:
        CheckpointError: if a key of a file has no weight, with the nearest names, or another shape.
        UnsupportedModelError: for a method that is not implemented, such as DoRA.
    """
    names = PARTS["transformer"].names(checkpoint.config)
    aliases = {alias: name for name in checkpoint.names() for alias in (name, *(names.forward(name) or ()))}
    targets = {_plain(alias): name for alias, name in aliases.items()}
    has_images = any(map(_OF_IMAGES.search, targets))
    changes: dict[str, list[_Change]] = {}
    for path, scale in files.items():
        path = _file_of(path)
        by_weight, unmatched = _read_changes(path, scale, targets)
        for (name, _), change in by_weight.items():
            change.check(name, checkpoint.shape(name))
            changes.setdefault(name, []).append(change)
        if by_weight and not has_images and (left_out := [key for key in unmatched if _OF_IMAGES.search(_plain(key))]):
            _warn_of_images(path, len(left_out))
            unmatched = [key for key in unmatched if key not in left_out]
        if unmatched:
            raise _unmatched_error(path, unmatched, aliases)
    return checkpoint.with_files({name: _changed(name, checkpoint, some) for name, some in changes.items()})


@cache  # once for a file, which is opened for each transformer, and again when their weights are read
def _warn_of_images(path: Path, keys: int) -> None:
    _log.warning("%s: %d keys are for an image encoder, which this model does not have: they are left out", path, keys)


def lora_fingerprint(path: Path) -> str:
    """Digest of a LoRA file or of PEFT's folder: of its matrices (`checkpoint.fingerprint`) and of its settings."""
    file = SafetensorsFile(_file_of(path))
    weights = fingerprint(Checkpoint(file.path, {}, {}, dict.fromkeys(file.tensors, file)))
    settings = json.dumps(_settings(file), sort_keys=True)
    return hashlib.sha256(f"{weights} {settings}".encode()).hexdigest()[:16]


def _file_of(path: Path) -> Path:
    """File of the matrices: a path itself, or in a folder of PEFT or of diffusers."""
    if not path.is_dir():
        return path
    return path / (_DIFFUSERS if (path / _DIFFUSERS).is_file() else SAFETENSORS)


def _read_changes(
    path: Path, scale: float, targets: Mapping[str, str]
) -> tuple[dict[tuple[str, str], _Change], list[str]]:
    """Changes of a LoRA file, by the original's name of the weight and by method, and keys that have no weight."""
    file = SafetensorsFile(path)
    settings = _settings(file)
    patterns = read_value(settings, "alpha_pattern", dict[str, Finite], {})
    alpha, root = read_value(settings, "lora_alpha", Finite, None), read_value(settings, "use_rslora", bool, False)
    changes: dict[tuple[str, str], _Change] = {}
    alphas: dict[str, tuple[str, float]] = {}
    unmatched: list[str] = []
    for name in file.tensors:
        if _UNSUPPORTED.search(name):
            raise UnsupportedModelError(f"{path}: {name} is of a method that is not supported; LoRA, LoHa and LoKr are")
        key = _parse(name)
        target = key and targets.get(_plain(f"{key.module}.{key.parameter}"))
        if target is None and key is not None and key.role == "diff":
            target = targets.get(_plain(key.module))  # a parameter that is not the weight of a module
        if key is None or target is None:
            unmatched.append(name)
            continue
        if key.method == "alpha":
            if math.prod(shape := file.tensors[name].shape) != 1:
                raise CheckpointError(f"{path}: {name} has shape {list(shape)}, expected one number")
            alphas[target] = name, float(file.read(name).astype(np.float32).reshape(-1)[0])
            continue
        change = changes.setdefault((target, key.method), _Change(file, scale, key.method, root))
        if key.role in change.keys:
            raise CheckpointError(f"{path}: {change.keys[key.role]} and {name} are both for {target}")
        change.keys[key.role] = name
        if key.role == "down":
            change.alpha = _of_pattern(patterns, key.module, alpha)
    for (target, method), change in changes.items():
        if method == "bias":
            change.pair = changes.get((f"{target.removesuffix('bias')}weight", "lora"))
        elif target in alphas and method != "diff":
            change.alpha = alphas[target][1]
    if not (changes or alphas or unmatched):
        raise CheckpointError(f"{path}: it has no tensors")
    scaled = {target for target, method in changes if method not in ("bias", "diff")}
    if unused := [name for target, (name, _) in alphas.items() if target not in scaled]:
        raise CheckpointError(f"{path}: {', '.join(unused[:10])} lacks the matrices that it scales")
    return changes, unmatched


def _unmatched_error(path: Path, keys: Sequence[str], names: Iterable[str]) -> CheckpointError:
    """Error of keys that have no weight, with the modules of the transformer whose names are nearest."""
    modules = sorted({re.sub(r"\.(weight|bias)$", "", name) for name in names})
    stated = []
    for name in keys[:3]:
        key = _parse(name)
        near = difflib.get_close_matches(key.module if key else name, modules, n=3, cutoff=0.0)
        stated.append(f"{name} (nearest: {', '.join(near)})")
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return CheckpointError(
        f"{path}: no weight of the transformer for {', '.join(stated)}{more}; expected a LoRA for this model, by the "
        "names of diffusers, PEFT, kohya, DiffSynth, ComfyUI or LyCORIS"
    )


def _settings(file: SafetensorsFile) -> JsonObject:
    """Settings of the adapter: the header's, else those of PEFT's adapter_config.json next to the file; else empty.

    Newer versions of diffusers write all settings into the header, and cut from their names is `transformer.`. Others
    write alpha alone, for all modules without an alpha of their own (sgl-project/sglang#36082).
    """
    header = {name.removeprefix("transformer."): text for name, text in file.metadata.items()}
    try:
        said = json.loads(header.get("lora_adapter_metadata", "{}")).items()
        content = {name.removeprefix("transformer."): value for name, value in said}
        if (alpha := next((header[name] for name in _ALPHAS if name in header), None)) is not None:
            content.setdefault("lora_alpha", float(alpha))
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{file.path}: its lora_adapter_metadata is not a JSON object, or its alpha not a number"
        ) from error
    config = file.path.parent / CONFIG
    if file.path.name == SAFETENSORS and config.is_file():
        content = {**read_json(config), **content}
    content.pop("lora_bias", None)  # unlike `Adapter`, the biases of B are read
    settings = JsonObject(content, file.path)
    _check_settings(settings, file.path)
    return settings
