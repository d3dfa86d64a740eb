"""Modules of a sentence encoder after its transformer: a program, which sentence-transformers' modules.json lists.

Each module reads one named value, `token_embeddings [B, T, D]` or `sentence_embedding [S, D]`, and writes one. They run
in the order of the file. Without a modules.json there is one, the pooling: by the last token for a causal language
model, else by the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from verax.checkpoint import Checkpoint, lora, resolve
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.fields import Size, file_of, read_fields, read_value, require_fields
from verax.files import JsonObject, read_json
from verax.loading import load_model
from verax.models.bert import ACTIVATIONS
from verax.nn import LayerNorm, Linear, Sentences

TOKENS, SENTENCE, SCORES = "token_embeddings", "sentence_embedding", "scores"

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Poolings by the flags of older files, whose vectors are concatenated in this order."""

POOLINGS = tuple(_FLAGS.values())
"""Poolings over a sentence's tokens, special ones included.

The state of the first token, the largest number of each dimension, the mean, the sum divided by the root of the number
of tokens, the mean weighted by positions from 1 on, and the state of the last token."""


def pool(
    hidden: Float[Array, "B T D"], sentences: Sentences, pooling: str, skipped: int | Int[Array, ""] = 0
) -> Float[Array, "S D"]:
    """Pool hidden states into one vector a sentence, float32. Padding does not count.

    `pooling`: one of `POOLINGS`. `skipped`: number of first tokens, a prompt's, that do not count, except for the last
    token.
    """
    if pooling == "cls":
        return sentences.first(hidden, skipped).astype(jnp.float32)
    if pooling == "lasttoken":
        return sentences.last(hidden).astype(jnp.float32)
    if pooling == "max":
        return sentences.maximum(hidden, skipped)
    mean = sentences.mean(hidden, skipped, by_position=pooling == "weightedmean")
    if pooling == "mean_sqrt_len_tokens":
        return mean * jnp.sqrt(jnp.maximum(sentences.lengths - skipped, 1.0))[:, None]
    return mean


def normalized(vectors: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Vectors of length 1; zero stays zero."""
    squares = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))  # torch's normalize has 1e-12 for the length


def cut(vectors: Float32[np.ndarray, "n D"], dimensions: int, normalize: bool = True) -> Float32[np.ndarray, "n d"]:
    """First numbers of each vector, of length 1 again if `normalize` (Kusupati et al., 2022, arXiv:2205.13147)."""
    if dimensions == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dimensions]
    if not normalize:
        return kept.copy()  # not a view, which would hold the whole vectors in memory
    return kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def check_finite(results: Float32[np.ndarray, "n ..."]) -> None:
    """Raise for the first text whose numbers are not finite. Whoever stores vectors would not notice."""
    if not (finite := np.isfinite(results).all(axis=tuple(range(1, results.ndim)))).all():
        raise CheckpointError(f"the model gave no finite numbers for text {finite.argmin()}; check its weights")


PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")
"""Forms of vectors: sentence-transformers' `quantize_embeddings`."""


def check_precision(precision: str, shape: tuple[int, int] | None = None, ranges: Any = None) -> None:
    """Check the form of vectors; of a shape `[n, D]`, with the `ranges` that one vector needs for int8."""
    if precision not in PRECISIONS:
        raise InvalidParameterError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    if shape is None or not precision.endswith("int8"):
        return
    if ranges is None and shape[0] == 1:
        raise InvalidParameterError(
            f"ranges: {precision} of a single vector needs the smallest and the largest number of each dimension, "
            "[2, D], of representative vectors"
        )
    if ranges is not None and np.shape(ranges) != (2, shape[1]):
        raise InvalidParameterError(f"ranges: expected the shape (2, {shape[1]}), got {np.shape(ranges)}")
    if ranges is not None and not (np.isfinite(ranges).all() and np.less_equal(*ranges).all()):
        raise InvalidParameterError("ranges: expected the smallest, then the largest number of each dimension, finite")


def quantized(
    vectors: Float32[np.ndarray, "n D"], precision: str, ranges: Float[np.ndarray, "2 D"] | None = None
) -> np.ndarray:
    """Vectors in fewer bits, as sentence-transformers' `quantize_embeddings` makes them.

    `int8` and `uint8` divide the range of each dimension into 255 steps. `binary` and `ubinary` have a bit for each
    dimension, 1 above 0, in bytes from the highest bit on: `[n, ceil(D / 8)]`, int8 less 128, and uint8.

    `ranges`: smallest and largest number of each dimension; of these vectors if None.
    """
    if precision == "float32":
        return vectors
    check_finite(vectors)  # integers and bits would hide them
    if precision.endswith("binary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if ranges is None:
        if not len(vectors):
            return np.zeros(vectors.shape, np.dtype(precision))
        ranges = np.stack([vectors.min(axis=0), vectors.max(axis=0)])
    low, high = np.asarray(ranges, np.float32)
    steps = (high - low) / 255
    values = np.clip(np.floor((vectors - low) / np.where(steps == 0, 1, steps)), 0, 255)
    return values.astype(np.uint8) if precision == "uint8" else (values - 128).astype(np.int8)


_TORCH: dict[str, Callable[[Array], Array]] = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "Sigmoid": nnx.sigmoid,
    "ReLU": ACTIVATIONS["relu"],
    "GELU": ACTIVATIONS["gelu"],
    "SiLU": nnx.silu,
    "Softplus": nnx.softplus,
    "LeakyReLU": nnx.leaky_relu,
    "ELU": nnx.elu,
}
"""Functions by the last part of torch's name for them."""


def activation_function(name: str, where: str) -> Callable[[Array], Array]:
    """The function that a file of sentence-transformers names, such as `torch.nn.modules.activation.Tanh`."""
    module, _, function = name.rpartition(".")
    if not module.startswith("torch.nn.modules.") or function not in _TORCH:
        raise UnsupportedModelError(
            f"{where}: activation function {name!r} is not supported; torch.nn's {', '.join(_TORCH)} are"
        )
    return _TORCH[function]


class Pooling(nnx.Module):
    """Vectors of sentences by several poolings, one after the other."""

    def __init__(self, modes: Sequence[str], include_prompt: bool = True):
        self.modes = tuple(modes)
        self.include_prompt = include_prompt

    def __call__(
        self, hidden: Float[Array, "B T D"], sentences: Sentences, skipped: Int[Array, ""]
    ) -> Float[Array, "S D"]:
        """Pool the states of tokens; `skipped` first ones are a prompt's."""
        first = 0 if self.include_prompt else skipped
        return jnp.concatenate([pool(hidden, sentences, mode, first) for mode in self.modes], axis=-1)


@dataclass(frozen=True)
class DenseConfig:
    """Settings of a layer, under their names in its config.json."""

    in_features: Size
    out_features: Size
    activation: Callable[[Array], Array]
    bias: bool = True
    use_residual: bool = False

    @classmethod
    def from_file(cls, config: Mapping[str, Any]) -> DenseConfig:
        """Read the config.json of the layer's folder."""
        require_fields(config, ("in_features", "out_features"), "Dense layer")
        name = read_value(config, "activation_function", str, "torch.nn.modules.activation.Tanh")
        values = read_fields(config, cls, ("in_features", "out_features", "bias", "use_residual"))
        return cls(**values, activation=activation_function(name, file_of(config)))


class Dense(nnx.Module):
    """Linear layer and activation, to which the input may be added."""

    def __init__(self, config: DenseConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        sizes = config.in_features, config.out_features
        self.activation = config.activation
        self.use_residual = config.use_residual
        self.linear = Linear(*sizes, bias=config.bias, dtype=dtype, rngs=rngs)
        projects = config.use_residual and config.in_features != config.out_features
        self.residual = Linear(*sizes, dtype=dtype, rngs=rngs) if projects else None

    def __call__(self, x: Float[Array, "*B D"], sentences: Sentences, skipped: Int[Array, ""]) -> Float[Array, "*B F"]:
        """Map the last axis; float32."""
        y = self.activation(self.linear(x))
        if not self.use_residual:
            return y
        return y + (x if self.residual is None else self.residual(x))


class Norm(nnx.Module):
    """Layer normalisation with torch's epsilon."""

    def __init__(self, size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.norm = LayerNorm(size, eps=1e-5, dtype=dtype)

    def __call__(self, x: Float[Array, "*B D"], sentences: Sentences, skipped: Int[Array, ""]) -> Float[Array, "*B D"]:
        """Normalise the last axis."""
        return self.norm(x)


class Normalize(nnx.Module):
    """Vectors of length 1."""

    def __call__(self, x: Float[Array, "*B D"], sentences: Sentences, skipped: Int[Array, ""]) -> Float[Array, "*B D"]:
        """Normalise the last axis."""
        return normalized(x)


@dataclass(frozen=True)
class Entry:
    """A module that modules.json lists."""

    kind: str
    """Last part of its type."""
    folder: Path


_PACKAGE = "sentence_transformers."
_PYLATE_DENSE = "pylate.models.Dense.Dense"
_JINA_TRANSFORMER = "custom_st.Transformer"
"""jina-embeddings-v3's own code, which chooses the adapter of a task."""
_KINDS = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout", "MultiVectorMask", "SpladePooling")
_KINDS += ("LogitScore",)


def list_modules(folder: Path) -> list[Entry]:
    """Modules of a folder in the order of its modules.json, the transformer first; empty without such a file."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    entries = []
    for module in read_json(path, kind=list):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise CheckpointError(f"{path}: expected modules with a type and a path, got {module!r}")
        subfolder = read_value(JsonObject(module, path), "path", str, "")
        if "\0" in subfolder or Path(subfolder).is_absolute() or ".." in Path(subfolder).parts:
            raise CheckpointError(f"{path}: {subfolder!r} is not a path within the folder")
        kind = module["type"].rpartition(".")[2].replace("MLMTransformer", "Transformer")  # of older sparse encoders
        own = module["type"] in (_PYLATE_DENSE, _JINA_TRANSFORMER)
        if kind not in _KINDS or not (own or module["type"].startswith(_PACKAGE)):
            raise UnsupportedModelError(
                f"{path}: {module['type']} is not supported; {', '.join(_KINDS)} of {_PACKAGE.rstrip('.')} are"
            )
        entries.append(Entry(kind, folder / subfolder))
    if [entry.kind == "Transformer" for entry in entries] != [i == 0 for i in range(max(len(entries), 1))]:
        raise UnsupportedModelError(f"{path}: expected one Transformer, and it first")
    return entries


def open_folder(model: str | Path, revision: str | None) -> tuple[Path, Checkpoint]:
    """Folder of an encoder or a reranker, and the checkpoint of its transformer, which may be a folder in it."""
    folder = resolve(model, revision=revision)
    if folder.is_file():
        raise UnsupportedModelError(
            f"{folder}: encoders and rerankers are read from folders with config.json and weights"
        )
    entries = list_modules(folder)
    transformer = entries[0].folder if entries else folder
    if (adapter := transformer / lora.CONFIG).is_file():
        raise UnsupportedModelError(f"{adapter}: adapters of encoders are not supported; merge it into the weights")
    return folder, Checkpoint.open(transformer)


class Modules(nnx.Module):
    """The modules after a transformer, which make a vector of each sentence.

    `pooling`: names of the poolings, with `+` between several. `output`: name of the value that is the vector.
    """

    def __init__(self, steps: Sequence[tuple[str, str, nnx.Module]], width: int, output: str = SENTENCE):
        self.output = output
        self.names = tuple((source, target) for source, target, _ in steps)
        self.steps = nnx.List([module for *_, module in steps])
        self.width = width
        self.pooling = "+".join(mode for *_, step in steps if isinstance(step, Pooling) for mode in step.modes)

    @property
    def include_prompt(self) -> bool:
        """False if a pooling leaves the tokens of a prompt out."""
        return all(step.include_prompt for step in self.steps if isinstance(step, Pooling))

    def __call__(
        self, hidden: Float[Array, "B T D"], sentences: Sentences, skipped: Int[Array, ""]
    ) -> Float[Array, "S D"]:
        """Vectors of the sentences, float32; `skipped` is the number of a prompt's tokens."""
        values = {TOKENS: hidden}
        for (source, target), step in zip(self.names, self.steps, strict=True):
            values[target] = step(values[source], sentences, skipped)
        return values[self.output].astype(jnp.float32)


def load_modules(
    folder: Path,
    width: int,
    *,
    pooling: str | None = None,
    default: str = "mean",
    output: str = SENTENCE,
    dtype: DTypeLike,
) -> Modules:
    """Load the modules after a folder's transformer, and check that they fit each other.

    `pooling`: one of `POOLINGS`, in the place of the files' one. `default`: pooling of a folder without a modules.json.
    `output`: the value that they make, `SENTENCE` or `SCORES`.
    """
    if pooling is not None and pooling not in POOLINGS:
        raise InvalidParameterError(f"pooling: expected one of {', '.join(POOLINGS)}, got {pooling!r}")
    entries = [entry for entry in list_modules(folder)[1:] if entry.kind not in ("Dropout", "MultiVectorMask")]
    if not entries and not (folder / "modules.json").is_file():
        return Modules([(TOKENS, SENTENCE, Pooling([pooling or default]))], width)
    if any(entry.kind == "SpladePooling" for entry in entries):
        raise UnsupportedModelError(f"{folder / 'modules.json'}: SpladePooling: Encoder(..., output='sparse') reads it")
    widths = {TOKENS: width}
    steps: list[tuple[str, str, nnx.Module]] = []
    for entry in entries:
        config = read_json(entry.folder / "config.json", optional=entry.kind != "Pooling" or pooling is not None)
        source = read_value(config, "module_input_name", str, TOKENS if entry.kind == "Pooling" else SENTENCE)
        target = read_value(config, "module_output_name", str, source)
        if source not in widths:
            if entry.kind == "Normalize":
                continue  # as in sentence-transformers
            raise UnsupportedModelError(f"{entry.folder}: it reads {source}, which no module before it makes")
        if entry.kind == "Pooling":
            target = SENTENCE
            modes = [pooling] if pooling else _modes(config)
            module: nnx.Module = Pooling(modes, read_value(config, "include_prompt", bool, True))
            made = widths[source] * len(modes)
        elif entry.kind == "Normalize":
            module, made = Normalize(), widths[source]
        else:
            module, expected, made = _load(entry, config, dtype)
            if expected != widths[source]:
                raise CheckpointError(
                    f"{entry.folder}: it takes {expected} numbers, and {source} has {widths[source]} of them"
                )
        steps.append((source, target, module))
        widths[target] = made
    if output not in widths:
        hint = f"a {output}; output='tokens' gives a vector for each token" if output == SENTENCE else output
        raise UnsupportedModelError(f"{folder / 'modules.json'}: no module makes {hint}")
    source, target, last = steps[-1]
    if isinstance(last, Normalize) and source == target == SENTENCE:
        steps.pop()  # whoever asks for vectors says whether they are normalised
    return Modules(steps, widths[output], output)


def load_token_modules(folder: Path, width: int, *, dtype: DTypeLike) -> tuple[list[nnx.Module], int]:
    """Modules of token vectors: the ones after a folder's transformer that read states of tokens; and their width.

    A Dense layer without names of its input and output reads tokens, as in PyLate's folders.
    """
    steps: list[nnx.Module] = []
    for entry in list_modules(folder)[1:]:
        if entry.kind in ("Dropout", "MultiVectorMask"):
            continue
        if entry.kind == "Pooling":
            break  # a model of sentences: its token vectors are the states before they are pooled
        config = read_json(entry.folder / "config.json", optional=True)
        source = read_value(config, "module_input_name", str, TOKENS)
        if {source, read_value(config, "module_output_name", str, source)} != {TOKENS}:
            raise UnsupportedModelError(f"{entry.folder}: {entry.kind} of {source} is not supported in token vectors")
        if entry.kind == "Normalize":
            steps.append(Normalize())
            continue
        module, expected, size_out = _load(entry, config, dtype)
        if expected != width:
            raise CheckpointError(f"{entry.folder}: it takes {expected} numbers, and {source} has {width} of them")
        steps.append(module)
        width = size_out
    return steps, width


def _load(entry: Entry, config: JsonObject, dtype: DTypeLike) -> tuple[nnx.Module, int, int]:
    """A module with weights, and the sizes of its input and output."""
    opened = Checkpoint.open(entry.folder)
    if entry.kind == "LayerNorm":
        size = read_value(config, "dimension", Size)
        return load_model(opened, Norm, size, dtype=dtype), size, size
    dense = DenseConfig.from_file(config)
    return load_model(opened, Dense, dense, dtype=dtype), dense.in_features, dense.out_features


def _modes(config: JsonObject) -> list[str]:
    """Poolings of a configuration file; the mean if it names none."""
    # Newer files have names, older ones a flag for each.
    given: Any = config.get("pooling_mode")
    if given is None:
        unknown = [
            name for name, on in config.items() if name.startswith("pooling_mode_") and on and name not in _FLAGS
        ]
        given = [mode for flag, mode in _FLAGS.items() if read_value(config, flag, bool, False)] + unknown
    modes = [given] if isinstance(given, str) else given
    if not isinstance(modes, list) or not all(mode in POOLINGS for mode in modes if isinstance(mode, str)):
        raise UnsupportedModelError(
            f"{config.where}: pooling by {given!r} is not supported; {', '.join(POOLINGS)} are, and can be asked for "
            "with the option pooling"
        )
    if not all(isinstance(mode, str) for mode in modes):
        raise CheckpointError(f"{config.where}: pooling_mode: expected a text or texts, got {given!r}")
    return modes or ["mean"]
