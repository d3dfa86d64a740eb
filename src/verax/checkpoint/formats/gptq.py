"""GPTQ and AWQ checkpoints, whose weights lie with the inputs along the first axis.

GPTQ (Frantar et al., 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel write it. A weight `X.weight` of shape `[F, D]`
in `bits` bits is

- `X.qweight` int32 `[D * bits / 32, F]`: output f of input d at bits `bits * d` and up of column f;
- `X.qzeros` int32 `[groups, F * bits / 32]`: zero points, side by side along F. Version 1 of the layout stores them
  less one, version 2 (`checkpoint_format: gptq_v2`) unchanged;
- `X.scales` `[groups, F]`, and `X.g_idx` int32 `[D]`, the group of each input, which act-order (`desc_act`) shuffles.

AWQ (Lin et al., 2023, arXiv:2306.00978) in AutoAWQ's version `gemm` has 4 bits and packs both along F:

- `X.qweight` int32 `[D, F / 8]`: bits 4i to 4i + 3 of word c hold output `8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]`;
- `X.qzeros` int32 `[groups, F / 8]`, zero points in the same order, and `X.scales` `[groups, F]`.

In both, `W[f, d] = (code - zero[group of d, f]) * scales[group of d, f]`.

https://github.com/AutoGPTQ/AutoGPTQ, `nn_modules/qlinear/qlinear_cuda_old.py`; https://github.com/ModelCloud/GPTQModel,
`utils/model.py`, `convert_gptq_v1_to_v2_format_module`; https://github.com/casper-hansen/AutoAWQ,
`awq/modules/linear/gemm.py` and `awq/utils/packing_utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verax.checkpoint.formats.integers import GROUPS, fits, lay_out, order_of, unfitting, unpack
from verax.errors import CheckpointError
from verax.fields import read_value
from verax.ops.quantized import BITS, QuantizedWeight

if TYPE_CHECKING:
    from verax.checkpoint.formats.safetensors import TensorInfo

__all__ = ["find_awq", "find_gptq"]

_AWQ, _AWQ_BITS = "awq", 4
_LAYOUTS = ("gptq", "gptq_v2")
_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
"""Ones in every code of a word."""

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place of each of eight outputs in its word of AWQ."""


class GPTQWeight(NamedTuple):
    """A quantised weight of a file."""

    where: object
    keys: tuple[str, ...]
    """Keys of qweight, qzeros and scales, and of g_idx if the file has it."""
    shape: tuple[int, int]
    bits: int
    groups: int
    layout: str
    """Layout: `gptq`, `gptq_v2` or `awq`."""

    @property
    def kind(self) -> str:
        """Method, bits, and inputs that share a scale."""
        method = "AWQ" if self.layout == _AWQ else "GPTQ"
        return f"{method} int{self.bits} by {'rows' if self.groups == 1 else self.shape[1] // self.groups}"

    def read(self, read_raw: Callable[[str], np.ndarray]) -> QuantizedWeight:
        """Copy it out of its file, exactly.

        Raises:
            CheckpointError: if the groups are not all of one size.
        """
        qweight, qzeros, scales, *g_idx = (read_raw(key) for key in self.keys)
        order = order_of(g_idx[0], self.groups, self.keys[-1], self.where) if g_idx else None
        if self.layout == _AWQ:
            integers, zeros = _in_order(qweight), _in_order(qzeros)
        else:
            words = np.ascontiguousarray(qzeros).view(np.uint32)
            if self.layout == "gptq":
                words = words + _ONES[self.bits]  # with a carry between codes: the inverse of how they were taken off
            integers, zeros = unpack(qweight.T, self.bits), unpack(words, self.bits).T
        integers = integers if order is None else integers[:, order]
        return lay_out(integers, scales.T, self.bits, self.shape[1] // self.groups, zeros=zeros, order=order)


def _in_order(words: np.ndarray) -> np.ndarray:
    """Integers `[F, n]` of AWQ's words `[n, F / 8]`."""
    packed = unpack(words, _AWQ_BITS)
    return packed.reshape(len(packed), -1, len(_PLACES))[..., _PLACES].reshape(packed.shape).T


def find_gptq(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], read: object, where: object
) -> tuple[dict[str, GPTQWeight], set[str]]:
    """GPTQ weights among a checkpoint's tensors, by their plain key; and all keys that make them up.

    Raises:
        CheckpointError: for a layout or a precision that verax cannot compute with, naming it.
    """
    layout = read_value(config, "checkpoint_format", str, None) or read_value(config, "format", str, "gptq")
    if layout not in _LAYOUTS:
        raise CheckpointError(f"{where}: GPTQ weights in the layout {layout!r} are not supported: gptq and gptq_v2 are")
    if (bits := read_value(config, "bits", int, 4)) not in BITS:
        raise CheckpointError(f"{where}: GPTQ weights of {bits} bits are not supported: 4 and 8 are")
    return _find(tensors, layout, where)


def find_awq(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], read: object, where: object
) -> tuple[dict[str, GPTQWeight], set[str]]:
    """AWQ weights among a checkpoint's tensors, by their plain key; and all keys that make them up.

    Raises:
        CheckpointError: for a layout or a precision that verax cannot compute with, naming it.
    """
    version = read_value(config, "version", str, None) or read_value(config, "format", str, "gemm")
    if version.lower() != "gemm":
        raise CheckpointError(f"{where}: AWQ weights in the version {version!r} are not supported: gemm is")
    bits = read_value(config, "bits", int, None) or read_value(config, "w_bit", int, _AWQ_BITS)
    if bits != _AWQ_BITS:
        raise CheckpointError(f"{where}: AWQ weights of {bits} bits are not supported: {_AWQ_BITS} are")
    return _find(tensors, _AWQ, where)


def _find(tensors: Mapping[str, TensorInfo], layout: str, where: object) -> tuple[dict[str, GPTQWeight], set[str]]:
    weights: dict[str, GPTQWeight] = {}
    parts: set[str] = set()
    for key in tensors:
        stem, _, last = key.rpartition(".")
        if last == "qweight":
            weight = _describe(tensors, stem, layout, where)
            weights[f"{stem}.weight"] = weight
            parts.update(weight.keys)
    return weights, parts


def _describe(tensors: Mapping[str, TensorInfo], stem: str, layout: str, where: object) -> GPTQWeight:
    """The weight of a module, from the dtypes and shapes of its arrays."""
    qweight, qzeros, scales = keys = f"{stem}.qweight", f"{stem}.qzeros", f"{stem}.scales"
    if missing := [key for key in keys if key not in tensors]:
        raise CheckpointError(f"{where}: {qweight} has no {' and no '.join(missing)} with it")
    words = all(tensors[key].dtype == np.int32 for key in (qweight, qzeros))
    if not words or tensors[scales].dtype.kind in "iub" or any(len(tensors[key].shape) != 2 for key in keys):
        raise unfitting(tensors, keys, "matrices, the first two of int32 and the last of floats", where)
    shape, zeros, (groups, F) = (tensors[key].shape for key in keys)
    if layout != _AWQ and f"{stem}.g_idx" in tensors:
        keys = (*keys, f"{stem}.g_idx")
    precisions = (_AWQ_BITS,) if layout == _AWQ else BITS
    for bits in precisions:  # by the shapes: single layers may have other bits than the rest
        per_word = 32 // bits
        D = shape[0] if layout == _AWQ else shape[0] * per_word
        packed = F // per_word if F % per_word == 0 else 0
        whole = shape[1] == (packed if layout == _AWQ else F) and zeros == (groups, packed)
        whole = whole and packed > 0 and groups > 0 and D % groups == 0
        if whole and all(tensors[key].shape == (D,) for key in keys[3:]) and fits(D // groups, D, bits):
            return GPTQWeight(where, keys, (F, D), bits, groups, layout)
    raise unfitting(tensors, keys, f"{' or '.join(map(str, precisions))} bits with {GROUPS}", where)
