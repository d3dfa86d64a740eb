"""Integer weights in files, as the compressed-tensors library lays them out: what vLLM and transformers read and write.

Two layouts of a weight `X.weight` of shape `[F, D]`, symmetric, with a scale a row or a group of inputs:

- pack-quantized: `X.weight_packed` int32 `[F, D * bits / 32]`, input i of a row at bits `bits * i` and up of the row,
  stored with an offset of half the range; `X.weight_scale` `[F, groups]`; `X.weight_shape` = (F, D).
- int-quantized: `X.weight` int8 `[F, D]` and `X.weight_scale` `[F, 1]`.

https://github.com/vllm-project/compressed-tensors, `compressors/pack_quantized` and `compressors/naive_quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from verax.errors import CheckpointError
from verax.ops.quantized import BITS, GROUP_SIZES, QuantizedWeight

if TYPE_CHECKING:
    from verax.checkpoint.formats.safetensors import TensorInfo

__all__ = ["PackedWeight", "entries", "find_packed", "quantization_config"]

METHOD = "compressed-tensors"

_VALUES = {"weight_packed": "pack-quantized", "weight": "int-quantized"}
_PARTS = ("weight_packed", "weight_scale", "weight_shape")
_UNSUPPORTED = {
    "weight_zero_point": "an asymmetric quantisation (zero points)",
    "weight_g_idx": "a quantisation in activation order (weight_g_idx)",
    "weight_global_scale": "a floating-point quantisation (weight_global_scale)",
}


class PackedWeight(NamedTuple):
    """Place of a quantised weight: the keys of its arrays, and their meaning."""

    values: str
    scales: str
    shape: tuple[int, int]
    bits: int
    group_size: int | None

    @property
    def kind(self) -> str:
        """Bits, and what shares a scale."""
        return f"int{self.bits} by {'rows' if self.group_size is None else self.group_size}"

    @property
    def keys(self) -> tuple[str, str]:
        """The keys that are read for it."""
        return self.values, self.scales

    def read(self, read_raw: Callable[[str], np.ndarray]) -> QuantizedWeight:
        """Copy it out of its file, exactly: integers and scales as they are, in our order."""
        stored = read_raw(self.values)
        if self.values.endswith("_packed"):
            bytes_ = np.ascontiguousarray(stored).view(np.uint8)
            if self.bits == 8:
                integers = (bytes_ ^ 0x80).view(np.int8)  # minus 128
            else:
                integers = np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(len(bytes_), -1).astype(np.int8) - 8
            integers = integers[:, : self.shape[1]]
        else:
            integers = stored.copy()
        scales = np.asarray(read_raw(self.scales), np.float32).reshape(self.shape[0], -1)
        if self.group_size is not None and np.array_equal(halved := scales.astype(np.float16), scales):
            scales = halved  # half the bytes to read
        return QuantizedWeight.from_integers(jnp.array(integers), jnp.array(scales), self.bits, self.group_size)


def find_packed(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    read: Callable[[str], np.ndarray],
    where: object,
) -> tuple[dict[str, PackedWeight], set[str]]:
    """The quantised weights among a checkpoint's tensors, by their plain key; and all keys that make them up.

    Raises:
        CheckpointError: for a method, a layout or a precision that verax cannot compute with, naming it.
    """
    method = config.get("quant_method")
    if method != METHOD:
        raise CheckpointError(
            f"{where}: it is quantised by {method!r}, which is not supported: {METHOD} is, and so are unquantised "
            "checkpoints with quantization='int8' or 'int4'"
        )
    found: dict[str, PackedWeight] = {}
    parts: set[str] = set()
    for key, scale in tensors.items():
        stem, _, last = key.rpartition(".")
        if last in _UNSUPPORTED:
            raise CheckpointError(f"{where}: {key}: {_UNSUPPORTED[last]} is not supported; symmetric integers are")
        if last != "weight_scale":
            continue
        values = next((f"{stem}.{name}" for name in _VALUES if f"{stem}.{name}" in tensors), None)
        if values is None:
            raise CheckpointError(f"{where}: {key} has neither {stem}.weight_packed nor {stem}.weight beside it")
        shape = f"{stem}.weight_shape"
        if values.endswith("_packed") and shape not in tensors:
            raise CheckpointError(f"{where}: {values} has no {shape} beside it")
        size_in = int(read(shape)[1]) if shape in tensors else tensors[values].shape[1]
        found[f"{stem}.weight"] = _describe(values, tensors[values], key, scale, size_in, where)
        parts |= {values, *(f"{stem}.{part}" for part in _PARTS if f"{stem}.{part}" in tensors)}
    return found, parts


def _describe(values: str, stored: TensorInfo, scales: str, scale: TensorInfo, D: int, where: object) -> PackedWeight:
    F, columns = stored.shape
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    if values.endswith("_packed"):
        # Rows are packed to whole words: their number tells the precision.
        options = [bits for bits in BITS if stored.dtype == np.int32 and columns == -(-D * bits // 32)]
    else:
        options = [8] if stored.dtype == np.int8 else []
    for bits in options:
        group = None if groups == 1 and bits == 8 else D // groups
        if D % groups == 0 and (group in GROUP_SIZES or (group is None and bits == 8)):
            return PackedWeight(values, scales, (F, D), bits, group)
    sizes = ", ".join(map(str, GROUP_SIZES))
    raise CheckpointError(
        f"{where}: {values} of dtype {stored.dtype} and shape {list(stored.shape)} with {groups} scales a row; "
        f"supported are 4 and 8 bits with a scale for {sizes} inputs, and 8 bits with one for a row"
    )


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
