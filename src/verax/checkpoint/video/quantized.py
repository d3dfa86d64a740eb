"""Quantised files of video models: 8-bit floats and integers with scales, and GGUF files of Wan and UMT5.

- ComfyUI's `X.scale_weight`, diffusers' and LightX2V's `X.weight_scale` multiply `X.weight` of 8-bit floats
  (float8_e4m3fn, float8_e5m2) or integers: one number for the whole weight, one for each row, or one for each block of
  128 x 128. Floats may come without scales. Matrices of float8_e4m3fn and int8 can stay so in memory; the other type,
  and tensors that are not matrices, become floats. ComfyUI's rotated weights (`convrot`) are refused.
- GGUF files as ComfyUI-GGUF writes them (`general.architecture` wan; the names of the original or of diffusers) and
  stable-diffusion.cpp (no metadata; names as in the file that was converted). UMT5 has llama.cpp's names, or the names
  of transformers. The format has four axes at most, so that the kernel of the patch embedding `[D, C, 1, 2, 2]` may be
  stored as `[D * C, 1, 2, 2]` or, with its shape in the metadata, in any other.

Sources: city96/ComfyUI-GGUF, `loader.py` and `tools/convert.py`; leejet/stable-diffusion.cpp, `model.cpp`;
ModelTC/LightX2V, `tools/convert`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from verax.checkpoint.checkpoint import DerivedFile, TensorFile
from verax.checkpoint.formats.gguf import DTYPES, SplitGGUF, block_entry
from verax.checkpoint.formats.quantized import QuantizedEntry, describe_scaled
from verax.checkpoint.formats.safetensors import SafetensorsFile, TensorInfo
from verax.errors import CheckpointError, UnsupportedModelError
from verax.ops.block_quantized import BLOCK_KINDS
from verax.ops.quantized import GROUP_SIZES

BLOCK = (128, 128)
"""Rows and inputs of a block with a scale, in the published files that have such blocks."""

_SCALE = re.compile(r"(^|\.)(scale_weight|weight_scale)$")
_LEFT_OUT = re.compile(r"(^|\.)(scaled_fp8|comfy_quant|scale_input|input_scale)$")
_MARKER, _HEADER = re.compile(r"(^|\.)comfy_quant$"), "_quantization_metadata"
"""Tensor of a layer, and entry of the header, with ComfyUI's settings of quantised layers as JSON."""

_ROTATED = re.compile(rb'"convrot":\s*true')
"""Sign of ComfyUI's integers of a weight that was rotated along its inputs, in a `comfy_quant` tensor or the header."""

_KEPT = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8))
"""Dtypes of 8 bits that stay so in memory."""

ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("transformer", "transformer_2"), ("wan",)),
    "text_encoder": ("t5encoder", "t5"),
}
"""`general.architecture` of the GGUF files of each part."""


class Stored(NamedTuple):
    """A quantised matrix: its description, and the files of its arrays by the keys that this has."""

    entry: QuantizedEntry
    files: dict[str, TensorFile]


Describe = Callable[[str], Stored]
"""Function from a name to the quantised matrix under that name."""


def open_quantized(
    files: Mapping[str, TensorFile], *, rounds_inputs: bool = False
) -> tuple[dict[str, TensorFile], dict[str, Describe]]:
    """Files by key, in which quantised tensors are floats; and descriptions of the matrices that can stay quantised.

    Scales of inputs are left out: these are not quantised here, or by scales of their own. `rounds_inputs`: True if
    weights of integers round their inputs, as where such files are published.

    Raises:
        CheckpointError: for scales that fit no weight.
        UnsupportedModelError: for rotated weights.
    """
    _check_rotations(files)
    plain = {key: file for key, file in files.items() if not _LEFT_OUT.search(key)}
    scales = {_SCALE.sub(r"\1weight", key): (key, plain.pop(key)) for key in [*plain] if _SCALE.search(key)}
    kept: dict[str, Describe] = {}
    for name, (key, scale_file) in scales.items():
        if name not in plain:
            raise CheckpointError(f"{scale_file.path}: {key} has no {name} with it")
    for name, file in plain.items():
        info = file.tensors[name]
        if isinstance(file, GGUFPart):
            if name in file.blocks:
                kept[name] = partial(_describe_blocks, file, name)
        elif name in scales:
            key, scale_file = scales[name]
            grid = _grid(scale_file.tensors[key].shape, info.shape)
            if info.dtype.itemsize != 1 or grid is None:
                raise CheckpointError(
                    f"{scale_file.path}: {key} of {math.prod(scale_file.tensors[key].shape)} numbers cannot scale "
                    f"{name} of dtype {info.dtype} and shape {list(info.shape)}: expected 8-bit floats or integers, "
                    "and one scale, one for each row, or one for each block of 128 x 128"
                )
            groups = info.dtype == _KEPT[0] and info.shape[-1] % GROUP_SIZES[0] == 0
            if info.dtype in _KEPT and len(info.shape) == 2 and (grid[1] == 1 or groups):
                kept[name] = partial(_describe_scaled, file, name, scale_file, key, rounds_inputs)
            read = partial(_expanded, file, name, scale_file, key, grid)
            floats = info._replace(dtype=np.dtype(np.float32))
            plain[name] = DerivedFile(file.path, name, floats, read, partial(file.release, name))
        elif info.dtype == _KEPT[0] and len(info.shape) == 2:
            kept[name] = partial(_describe_scaled, file, name, None, "", False)
    return plain, kept


def _check_rotations(files: Mapping[str, TensorFile]) -> None:
    """Refuse rotated weights: their integers and scales alone stand for another weight."""
    described = [(file.path, key, file.read(key).tobytes()) for key, file in files.items() if _MARKER.search(key)]
    for file in {id(file): file for file in files.values()}.values():
        if isinstance(file, SafetensorsFile):
            described.append((file.path, _HEADER, file.metadata.get(_HEADER, "").encode()))
    for path, name, text in described:
        if _ROTATED.search(text):
            raise UnsupportedModelError(
                f"{path}: {name} has convrot: rotated weights are not supported; take a file of bfloat16, fp8 or GGUF"
            )


def _grid(scales: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of scales that multiplies a weight of this shape, in blocks; None if they do not fit it."""
    count = math.prod(scales)
    if not shape or count in (1, shape[0]):
        return (count, *(1 for _ in shape[1:])) if shape else None
    blocks = tuple(-(-size // block) for size, block in zip(shape, BLOCK, strict=False))
    return blocks if len(shape) == 2 and scales == blocks else None


def _expanded(file: TensorFile, name: str, scale_file: TensorFile, key: str, grid: tuple[int, ...]) -> np.ndarray:
    """A weight in float32, multiplied by its scales."""
    weight, scales = file.read(name).astype(np.float32), scale_file.read(key).astype(np.float32).reshape(grid)
    for axis, size in enumerate(weight.shape[:2]):
        if 1 < scales.shape[axis] < size:
            scales = np.repeat(scales, BLOCK[axis], axis)[(slice(None),) * axis + (slice(size),)]
    return weight * scales


def _alias(file: TensorFile, key: str, name: str) -> DerivedFile:
    """A file's tensor under another name."""
    return DerivedFile(file.path, name, file.tensors[key], partial(file.read, key), partial(file.release, key))


def _describe_scaled(
    file: TensorFile, key: str, scale_file: TensorFile | None, scale: str, rounds_inputs: bool, name: str
) -> Stored:
    files: dict[str, TensorFile] = {name: _alias(file, key, name)}
    if scale_file is not None:
        files[f"{name}_scale"] = _alias(scale_file, scale, f"{name}_scale")
    tensors = {key: one.tensors[key] for key, one in files.items()}
    return Stored(describe_scaled(tensors, tuple(files), BLOCK, file.path, rounds_inputs=rounds_inputs), files)


def _describe_blocks(file: GGUFPart, key: str, name: str) -> Stored:
    info = file.tensors[key]
    rows = DerivedFile(file.path, name, info, partial(file.read_rows, key), partial(file.release, key))
    return Stored(block_entry(file.path, name, file.blocks[key], (info.shape[0], info.shape[1])), {name: rows})


class GGUFPart(SplitGGUF):
    """Tensors of a part of a video model, by their names in the GGUF file."""

    def __init__(self, path: Path, name: str):
        """Open the file of a part, one of `ARCHITECTURES`, or the first file of several.

        Raises:
            UnsupportedModelError: for a file of another model.
        """
        super().__init__(path)
        expected, given = ARCHITECTURES.get(name, ()), self.metadata.get("general.architecture")
        if not expected or given not in (None, *expected):
            wanted = f"expected {' or '.join(map(repr, expected))}" if expected else "only safetensors are supported"
            raise UnsupportedModelError(
                f"{path}: general.architecture {given!r} is not a {name.replace('_', ' ')} of a video model; {wanted}"
            )
        floats = np.dtype(np.float32)
        self.tensors: dict[str, Any] = {
            key: TensorInfo(DTYPES.get(tensor.kind, floats), self._shape(key), tensor.start, tensor.end)
            for key, (_, tensor) in self._places.items()
        }
        self.blocks = {
            key: tensor.kind
            for key, (_, tensor) in self._places.items()
            if tensor.kind in BLOCK_KINDS and len(tensor.shape) == 2 and self.tensors[key].shape == tensor.shape
        }
        """Types of the matrices of blocks that `ops.linear` multiplies."""

    def _shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor before it was fitted to the format."""
        stored = self._places[key][1].shape
        original = self.metadata.get(f"comfy.gguf.orig_shape.{key}")
        bias = self._places.get(f"{key.removesuffix('weight')}bias")
        if original is None and key.endswith("patch_embedding.weight") and len(stored) == 4 and bias is not None:
            rows = bias[1].shape[0]
            original = (rows, stored[0] // rows, *stored[1:])
        if original is None:
            return stored
        if math.prod(original) != math.prod(stored):
            raise self.fault(f"{key} of shape {list(stored)} cannot be of shape {list(original)}")
        return tuple(original)

    def read(self, name: str) -> np.ndarray:
        """A tensor as floats, a view where the file has the same numbers."""
        rows, kind, shape = self.read_rows(name), self.kind(name), self.tensors[name].shape
        if kind in DTYPES:
            return rows.view(DTYPES[kind]).reshape(shape)
        width = self._places[name][1].shape[-1]
        blocks = rows.reshape(math.prod(self._places[name][1].shape) // width, -1)
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(shape)


def wan_config(shapes: Mapping[str, tuple[int, ...]], where: Path) -> dict[str, Any]:
    """config.json of a Wan transformer that was published without one, in the original layout.

    `shapes`: shapes of its weights, by the original's names. All published models have heads of 128.
    """
    try:
        dim, channels = shapes["patch_embedding.weight"][:2]
        sizes = {
            "dim": dim,
            "num_heads": dim // 128,
            "in_dim": channels,
            "out_dim": shapes["head.head.weight"][0] // math.prod(shapes["patch_embedding.weight"][2:]),
            "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
            "freq_dim": shapes["time_embedding.0.weight"][1],
            "text_dim": shapes["text_embedding.0.weight"][1],
        }
    except (KeyError, IndexError) as error:
        raise CheckpointError(f"{where}: not a Wan transformer, and no config.json with it: {error} missing") from error

    def count(blocks: str) -> int:
        return 1 + max(
            (int(match[1]) for name in shapes if (match := re.match(rf"{blocks}\.(\d+)\.", name))), default=-1
        )

    layers, control_layers = count("blocks"), count("vace_blocks")
    kind = "i2v" if channels > sizes["out_dim"] else "ti2v" if channels == 48 else "t2v"
    image, positions = shapes.get("img_emb.proj.1.weight"), shapes.get("img_emb.emb_pos")
    config = {"_class_name": "WanModel", "model_type": kind, **sizes, "num_layers": layers}
    if kind == "i2v":
        config["image_dim"] = None if image is None else image[1]
    if positions is not None:
        config |= {"model_type": "flf2v", "pos_embed_seq_len": positions[1]}
    if control_layers and (control := shapes.get("vace_patch_embedding.weight")):
        # At even distances in all published models: every second layer of 30, every fifth of 40.
        every = [*range(0, layers, layers // control_layers or 1)]
        config |= {"_class_name": "VaceWanModel", "model_type": "vace", "vace_layers": every, "vace_in_dim": control[1]}
    if "fps_embedding.weight" in shapes or re.search(r"(?i)skyreels", str(where)):
        config["inject_sample_info"] = "fps_embedding.weight" in shapes
    return config


def umt5_config(file: GGUFPart) -> dict[str, Any]:
    """Settings of config.json that a GGUF file of UMT5 has in its metadata, and the size of its vocabulary."""
    metadata = file.metadata
    names = {
        "d_model": "embedding_length",
        "d_ff": "feed_forward_length",
        "num_layers": "block_count",
        "num_heads": "attention.head_count",
        "d_kv": "attention.key_length",
        "relative_attention_num_buckets": "attention.relative_buckets_count",
        "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    }
    given = {ours: metadata.get(f"{metadata.get('general.architecture')}.{theirs}") for ours, theirs in names.items()}
    if (table := file.tensors.get("token_embd.weight")) is not None:
        given["vocab_size"] = table.shape[0]
    return {name: value for name, value in given.items() if value is not None}


_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Types of tokens (`llama_token_type`)."""


def umt5_tokenizer(metadata: Mapping[str, Any], where: Path) -> tokenizers.Tokenizer:
    """Tokenizer of a GGUF file's metadata: SentencePiece's unigrams, as transformers' `T5Tokenizer` has them.

    Raises:
        CheckpointError: for a file without such metadata, as stable-diffusion.cpp writes.
    """
    given: list[Any] = [metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type")]
    if metadata.get("tokenizer.ggml.model") != "t5" or not all(given) or len(set(map(len, given))) > 1:
        raise CheckpointError(f"{where}: it has no tokenizer of UMT5 in its metadata, and no tokenizer.json is with it")
    tokens, scores, kinds = given
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", kinds.index(_UNKNOWN) if _UNKNOWN in kinds else 2)
    end = tokens[metadata.get("tokenizer.ggml.eos_token_id", 1)]
    pieces = list(zip(tokens, map(float, scores), strict=True))
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=_BYTE in kinds))
    if charsmap := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        backend.normalizer = normalizers.Precompiled(np.asarray(charsmap).astype(np.uint8).tobytes())
    spaces = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always", split=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    ids = [(end, backend.token_to_id(end))]
    backend.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=ids)
    return backend
