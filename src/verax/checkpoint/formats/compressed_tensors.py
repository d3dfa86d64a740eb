"""compressed-tensors: the layouts that vLLM's library of that name publishes; `checkpoint.save` writes two of them.

A weight `X.weight` of shape `[F, D]` is stored as

- **pack-quantized**: `X.weight_packed` int32 `[F, D * bits / 32]`, input i of a row at bits `bits * i` and up of the
  row, stored with an offset of half the range; `X.weight_scale` `[F, groups]`; `X.weight_shape` = (F, D). Asymmetric
  ones have `X.weight_zero_point` int32 `[F * bits / 32, groups]`, packed in the same way along F. With activation
  order, `X.weight_g_idx` `[D]` has the group of each input;
- **int-quantized**: `X.weight` int8 `[F, D]`, `X.weight_scale` and perhaps `X.weight_zero_point` `[F, 1]`; or one scale
  for the whole weight. Where the configuration wants inputs in 8-bit integers, with a scale for each token that is
  found at run time (W8A8), the weight rounds them. By scales of another kind they are not rounded: products are more
  precise then;
- **float-quantized**, **mxfp8-quantized** and **mxfp4-pack-quantized**, which `quantized` describes.

Source: vllm-project/compressed-tensors, `compressors/pack_quantized` and `compressors/naive_quantized`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from verax.checkpoint.formats.quantized import (
    GROUPS,
    QuantizedEntry,
    describe_float8,
    describe_mxfp4,
    divides,
    fits,
    fitting_group,
    lay_out,
    order_of,
    sharing,
    unfitting,
    unpack,
)
from verax.checkpoint.formats.safetensors import TensorInfo
from verax.errors import CheckpointError
from verax.fields import Size, read_value
from verax.ops.quantized import BITS, Precision, QuantizedWeight

METHOD = "compressed-tensors"

_VALUES = ("weight_packed", "weight")
_PARTS = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


def _from_packed(
    shape: tuple[int, int],
    bits: int,
    groups: int,
    rounds_inputs: bool,
    *,
    weight_scale: np.ndarray,
    weight: np.ndarray | None = None,
    weight_packed: np.ndarray | None = None,
    weight_shape: np.ndarray | None = None,
    weight_zero_point: np.ndarray | None = None,
    weight_g_idx: np.ndarray | None = None,
) -> QuantizedWeight:
    F, D = shape
    integers: Any = weight if weight_packed is None else unpack(weight_packed, bits)[:, :D]
    zeros = weight_zero_point
    if zeros is not None:
        zeros = zeros.reshape(F, -1) if zeros.dtype == np.int8 else unpack(zeros.T, bits)[:, :F].T
    order = order_of(weight_g_idx, groups)
    integers = integers if order is None else integers[:, order]
    scales = np.broadcast_to(weight_scale.reshape(-1, groups), (F, groups))
    laid_out = lay_out(integers, scales, bits, D // groups, zeros=zeros, order=order)
    return replace(laid_out, rounds_inputs=rounds_inputs and laid_out.is_plain)


def find_compressed(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], read: Callable[[str], np.ndarray], where: object
) -> dict[str, QuantizedEntry]:
    """The quantised weights among a checkpoint's tensors, by their plain key."""
    _check_transforms(config, where)
    block = _block(config)
    weights: dict[str, QuantizedEntry] = {}
    for key, scale in tensors.items():
        stem, _, last = key.rpartition(".")
        if last == "weight_global_scale":
            raise CheckpointError(f"{where}: {key}: NVFP4 is not supported; MXFP4, 8-bit floats and integers are")
        if last != "weight_scale":
            continue
        values = next((f"{stem}.{name}" for name in _VALUES if f"{stem}.{name}" in tensors), None)
        if values is None:
            raise CheckpointError(f"{where}: {key} has neither {stem}.weight_packed nor {stem}.weight with it")
        packed = values.endswith("_packed")
        if tensors[values].dtype.kind not in "iu":
            weights[values] = describe_float8(tensors, (values, key), block, where)
        elif packed and scale.dtype == np.uint8:
            weights[f"{stem}.weight"] = describe_mxfp4(tensors, (values, key), where)
        else:
            group = _group_of(config, stem, where)
            weights[f"{stem}.weight"] = _describe_packed(tensors, values, read, where, group)
    return weights


def _check_transforms(config: Mapping[str, Any], where: object) -> None:
    """Refuse rotations of activations (SpinQuant, QuIP), whose inverse the weights have in them."""
    transforms = read_value(config, "transform_config", dict[str, Any], None) or {}
    for group in read_value(transforms, "config_groups", dict[str, dict[str, Any]], {}).values():
        for one in read_value(group, "apply", list[dict[str, Any]], []):
            location = read_value(one, "location", str, "")
            if not location.startswith("weight_"):  # the weights of a file are rotated already
                raise CheckpointError(
                    f"{where}: transform_config: rotations of activations (location {location!r}) are not supported; a "
                    "checkpoint without them is"
                )


_DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True}
"""Values of compressed-tensors for what `input_activations` leaves out."""

TOKEN_INT8 = {**_DEFAULTS, "strategy": "token", "dynamic": True}
"""`input_activations` of W8A8: 8-bit integers, with a scale for each token that is found at run time."""


def _group_of(config: Mapping[str, Any], module: str, where: object) -> dict[str, Any]:
    """Group of a configuration that a linear layer is in: one that names it, or else one of all linear layers."""
    found: dict[str, Any] = {}
    for group in read_value(config, "config_groups", dict[str, dict[str, Any]], {}).values():
        for target in read_value(group, "targets", list[str], []):
            try:
                named = re.match(target[3:], module) if target.startswith("re:") else target == module
            except re.error as error:
                raise CheckpointError(f"{where}: targets: {target!r} is not a regular expression: {error}") from error
            if named:
                return group
            if target == "Linear":
                found = found or group
    return found


def _rounds_inputs(group: Mapping[str, Any]) -> bool:
    """True if the inputs of a group's layers are `TOKEN_INT8`."""
    inputs = _DEFAULTS | (read_value(group, "input_activations", dict[str, Any], None) or {})
    return all(inputs.get(name) == value for name, value in TOKEN_INT8.items())


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Outputs and inputs of a block with a scale, where a configuration has such blocks."""
    for group in read_value(config, "config_groups", dict[str, dict[str, Any]], {}).values():
        weights = read_value(group, "weights", dict[str, Any], {})
        if weights.get("block_structure") is not None:
            return read_value(weights, "block_structure", tuple[Size, Size])
    return None


def _describe_packed(
    tensors: Mapping[str, TensorInfo],
    values: str,
    read: Callable[[str], np.ndarray],
    where: object,
    group: Mapping[str, Any],
) -> QuantizedEntry:
    stem, _, last = values.rpartition(".")
    scales, shape, zeros, g_idx = (f"{stem}.{part}" for part in _PARTS)
    keys = (values, *(key for key in (scales, shape, zeros, g_idx) if key in tensors))
    if last == "weight_packed" and shape not in tensors:
        raise CheckpointError(f"{where}: {values} has no {shape} with it")
    stored, scale = tensors[values], tensors[scales]
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    scheme = read_value(group, "weights", dict[str, Any], {})
    sizes = [read_value(scheme, "group_size", int, 0)]
    if len(stored.shape) == 2 and groups > 0:
        F, columns = stored.shape
        D = columns
        options = [8] if stored.dtype == np.int8 else []
        if last == "weight_packed":
            # Rows are packed to whole words: their number shows the precision.
            D = int(read(shape)[1]) if tensors[shape].shape == (2,) else 0
            options = [bits for bits in BITS if stored.dtype == np.int32 and columns == -(-D * bits // 32)]
        for bits in options:
            shapes = [(F, groups), *([(F,), (), (1,), (1, 1)] if groups == 1 else [])]
            whole = divides(groups, D, sizes) and scale.shape in shapes
            zero = tensors.get(zeros)
            words = (-(-F * bits // 32), groups)
            points = [(np.dtype(np.int32), words), *((np.dtype(np.int8), size) for size in shapes[:2])]
            whole = whole and (zero is None or (zero.dtype, zero.shape) in points)
            whole = whole and (g_idx not in tensors or tensors[g_idx].shape == (D,))
            if whole and fits(D // groups, D, bits):
                rounds = bits == 8 and groups == 1 and _rounds_inputs(group)
                convert = partial(_from_packed, (F, D), bits, groups, rounds)
                kind = f"int{bits} by {sharing(groups, D)}{', inputs by tokens' if rounds else ''}"
                precision = Precision(bits, fitting_group(D // groups, D, bits), rounds_inputs=rounds)
                return QuantizedEntry(where, keys, (F, D), kind, convert, precision=precision)
    raise unfitting(tensors, keys, f"4 and 8 bits with {GROUPS}", where)


def entries(key: str, weight: QuantizedWeight) -> dict[str, np.ndarray]:
    """The arrays that stand for the weight `key` in a file: int-quantized if it rounds inputs, else pack-quantized."""
    if weight.rounds_inputs:
        return {key: np.asarray(weight.values), f"{key}_scale": np.asarray(weight.scales)}
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
    """config.json's `quantization_config` for a model whose linear layers are all quantised alike."""
    kinds = {(weight.bits, weight.group_size, weight.rounds_inputs) for weight in weights}
    if len(kinds) != 1:
        raise CheckpointError(f"weights of several precisions cannot be saved together: {sorted(map(str, kinds))}")
    ((bits, group_size, rounds_inputs),) = kinds
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
        "format": "int-quantized" if rounds_inputs else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": scheme,
                "input_activations": TOKEN_INT8 if rounds_inputs else None,
            }
        },
        "ignore": list(ignore),
    }
