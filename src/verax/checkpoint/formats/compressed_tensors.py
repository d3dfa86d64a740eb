"""Quantised weights in files, as the compressed-tensors library lays them out: what vLLM and transformers read.

Layouts of a weight `X.weight` of shape `[F, D]`, with a scale a row or a group of inputs:

- pack-quantized: `X.weight_packed` int32 `[F, D * bits / 32]`, input i of a row at bits `bits * i` and up of the row,
  stored with an offset of half the range; `X.weight_scale` `[F, groups]`; `X.weight_shape` = (F, D). Asymmetric ones
  have `X.weight_zero_point` int32 `[F * bits / 32, groups]`, packed in the same way along F. With activation order,
  `X.weight_g_idx` `[D]` has the group of each input;
- int-quantized: `X.weight` int8 `[F, D]`, `X.weight_scale` and perhaps `X.weight_zero_point` `[F, 1]`;
- float-quantized, and mxfp8-quantized: `float8.py`; mxfp4-pack-quantized: `mxfp4.py`.

https://github.com/vllm-project/compressed-tensors, `compressors/pack_quantized` and `compressors/naive_quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verax.checkpoint.formats.float8 import describe_float8, describe_mxfp4, is_ignored
from verax.checkpoint.formats.integers import GROUPS, fits, lay_out, order_of, unfitting, unpack
from verax.errors import CheckpointError
from verax.fields import Size, read_value
from verax.ops.quantized import BITS, QuantizedWeight

if TYPE_CHECKING:
    from verax.checkpoint.formats.safetensors import TensorInfo

__all__ = ["METHOD", "PackedWeight", "entries", "find_packed", "quantization_config"]

METHOD = "compressed-tensors"

_VALUES = ("weight_packed", "weight")
_PARTS = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


class PackedWeight(NamedTuple):
    """Place of a weight of integers: the keys of its arrays, and their meaning."""

    where: object
    keys: tuple[str, ...]
    """Keys of values and scales, then of zero points and of each input's group where the file has them."""
    shape: tuple[int, int]
    bits: int
    groups: int

    @property
    def kind(self) -> str:
        """Bits, and what shares a scale."""
        return f"int{self.bits} by {'rows' if self.groups == 1 else self.shape[1] // self.groups}"

    def read(self, read_raw: Callable[[str], np.ndarray]) -> QuantizedWeight:
        """Copy it out of its file, exactly: integers and scales unchanged, in our order.

        Raises:
            CheckpointError: if its groups are not all of one size.
        """
        F, D = self.shape
        arrays = {key.rpartition(".")[2]: read_raw(key) for key in self.keys}
        packed, zeros = arrays.get("weight_packed"), arrays.get("weight_zero_point")
        integers = arrays["weight"] if packed is None else unpack(packed, self.bits)[:, :D]
        if zeros is not None:
            zeros = zeros.reshape(F, -1) if zeros.dtype == np.int8 else unpack(zeros.T, self.bits)[:, :F].T
        order = None
        if "weight_g_idx" in arrays:
            order = order_of(arrays["weight_g_idx"], self.groups, self.keys[-1], self.where)
            integers = integers if order is None else integers[:, order]
        scales = arrays["weight_scale"].reshape(F, -1)
        return lay_out(integers, scales, self.bits, D // self.groups, zeros=zeros, order=order)


def find_packed(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    read: Callable[[str], np.ndarray],
    where: object,
) -> tuple[dict[str, Any], set[str]]:
    """The quantised weights among a checkpoint's tensors, by their plain key; and all keys that make them up.

    Raises:
        CheckpointError: for a layout or a precision that verax cannot compute with, naming it.
    """
    block = _block(config)
    weights: dict[str, Any] = {}
    parts = {key for key in tensors if is_ignored(key)}
    for key, scale in tensors.items():
        stem, _, last = key.rpartition(".")
        if last == "weight_global_scale":
            raise CheckpointError(f"{where}: {key}: NVFP4 is not supported; MXFP4, 8-bit floats and integers are")
        if last != "weight_scale":
            continue
        values = next((f"{stem}.{name}" for name in _VALUES if f"{stem}.{name}" in tensors), None)
        if values is None:
            raise CheckpointError(f"{where}: {key} has neither {stem}.weight_packed nor {stem}.weight with it")
        others = [f"{stem}.{part}" for part in _PARTS if f"{stem}.{part}" in tensors]
        packed = values.endswith("_packed")
        if tensors[values].dtype.kind not in "iu":
            weights[values] = describe_float8(tensors, (values, key), block, where)
        elif packed and scale.dtype == np.uint8:
            weights[f"{stem}.weight"] = describe_mxfp4(tensors, (values, key), where)
        else:
            weights[f"{stem}.weight"] = _describe(tensors, values, set(others), read, where)
        parts.update((values, *others))
    return weights, parts


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Outputs and inputs of a block with a scale, where a configuration has such blocks."""
    for group in read_value(config, "config_groups", dict[str, dict[str, Any]], {}).values():
        weights = read_value(group, "weights", dict[str, Any], {})
        if weights.get("block_structure") is not None:
            return read_value(weights, "block_structure", tuple[Size, Size])
    return None


def _describe(
    tensors: Mapping[str, TensorInfo], values: str, parts: set[str], read: Callable[[str], np.ndarray], where: object
) -> PackedWeight:
    stem, _, last = values.rpartition(".")
    scales, shape, zeros, g_idx = (f"{stem}.{part}" for part in _PARTS)
    keys = (values, scales, *(key for key in (zeros, g_idx) if key in parts))
    if last == "weight_packed" and shape not in parts:
        raise CheckpointError(f"{where}: {values} has no {shape} with it")
    stored, scale = tensors[values], tensors[scales]
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    if len(stored.shape) == 2 and groups > 0:
        F, columns = stored.shape
        D = columns
        options = [8] if stored.dtype == np.int8 else []
        if last == "weight_packed":
            # Rows are packed to whole words: their number shows the precision.
            D = int(read(shape)[1]) if tensors[shape].shape == (2,) else 0
            options = [bits for bits in BITS if stored.dtype == np.int32 and columns == -(-D * bits // 32)]
        for bits in options:
            whole = D % groups == 0 and scale.shape in ((F, groups), (F,))
            zero = tensors.get(zeros)
            words = (-(-F * bits // 32), groups)
            whole = whole and (zero is None or (zero.dtype, zero.shape) in _zero_points(F, groups, words))
            whole = whole and (g_idx not in parts or tensors[g_idx].shape == (D,))
            if whole and fits(D // groups, D, bits):
                return PackedWeight(where, keys, (F, D), bits, groups)
    raise unfitting(tensors, keys, f"4 and 8 bits with {GROUPS}", where)


def _zero_points(F: int, groups: int, words: tuple[int, int]) -> list[tuple[Any, tuple[int, ...]]]:
    """Dtypes and shapes that zero points may have: packed, or one number each."""
    return [(np.int32, words), (np.int8, (F, groups)), (np.int8, (F,))]


def entries(key: str, weight: QuantizedWeight) -> dict[str, np.ndarray]:
    """The arrays that stand for the weight `key` in a file, pack-quantized."""
    F, D = weight.size_out, weight.size_in
    codes = (np.asarray(weight.integers()).astype(np.int16) + (1 << (weight.bits - 1))).astype(np.uint8)
    if weight.bits == 4:
        codes = np.pad(codes, ((0, 0), (0, -D % 8)))
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        codes = np.pad(codes, ((0, 0), (0, -D % 4)))
    return {
        f"{key}_packed": np.ascontiguousarray(codes).view(np.int32),
        f"{key}_scale": np.asarray(weight.row_scales()),
        f"{key}_shape": np.asarray([F, D], np.int64),
    }


def quantization_config(weights: Iterable[QuantizedWeight], ignore: Sequence[str] = ()) -> dict[str, Any]:
    """config.json's `quantization_config` for a model whose linear layers are all quantised alike.

    Args:
        weights: the quantised weights.
        ignore: paths of the layers that are not.

    Raises:
        CheckpointError: if they are not quantised alike.
    """
    kinds = {(weight.bits, weight.group_size) for weight in weights}
    if len(kinds) != 1:
        raise CheckpointError(f"weights of several precisions cannot be saved together: {sorted(map(str, kinds))}")
    ((bits, group_size),) = kinds
    scheme = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
    }
    return {
        "quant_method": METHOD,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
        "ignore": list(ignore),
    }
