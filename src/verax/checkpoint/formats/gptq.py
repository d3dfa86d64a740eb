"""GPTQ checkpoints (Frantar et al., 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel write them.

A weight `X.weight` of shape `[F, D]` in `bits` bits is

- `X.qweight` int32 `[D * bits / 32, F]`: output f of input d at bits `bits * d` and up of column f;
- `X.qzeros` int32 `[groups, F * bits / 32]`: zero points, side by side along F; version 1 of the layout stores them
  less one, version 2 (`checkpoint_format: gptq_v2`) as they are;
- `X.scales` `[groups, F]`, and `X.g_idx` int32 `[D]`, the group of each input, which act-order (`desc_act`) shuffles.

`W[f, d] = (code - zero[g_idx[d], f]) * scales[g_idx[d], f]`.

https://github.com/AutoGPTQ/AutoGPTQ, `nn_modules/qlinear/qlinear_cuda_old.py`; https://github.com/ModelCloud/GPTQModel,
`utils/model.py`, `convert_gptq_v1_to_v2_format_module`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verax.checkpoint.formats.integers import GROUPS, fits, lay_out, order_of, require_parts, unfitting, unpack
from verax.errors import CheckpointError
from verax.fields import read_value
from verax.ops.quantized import BITS, QuantizedWeight

if TYPE_CHECKING:
    from verax.checkpoint.formats.safetensors import TensorInfo

__all__ = ["GPTQWeight", "find_gptq"]

_VERSIONS = {"gptq": 1, "gptq_v2": 2}
_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
"""Ones in every code of a word."""


class GPTQWeight(NamedTuple):
    """A quantised weight of a file."""

    where: object
    keys: tuple[str, ...]
    """Keys of qweight, qzeros and scales, and of g_idx if the file has it."""
    shape: tuple[int, int]
    bits: int
    groups: int
    version: int

    @property
    def kind(self) -> str:
        """Method, bits, and inputs that share a scale."""
        return f"GPTQ int{self.bits} by {'rows' if self.groups == 1 else self.shape[1] // self.groups}"

    def read(self, read_raw: Callable[[str], np.ndarray]) -> QuantizedWeight:
        """Copy it out of its file, exactly.

        Raises:
            CheckpointError: if the groups are not all of one size.
        """
        qweight, qzeros, scales, *g_idx = (read_raw(key) for key in self.keys)
        integers = unpack(qweight.T, self.bits)
        zeros = np.ascontiguousarray(qzeros).view(np.uint32)
        if self.version == 1:
            zeros = zeros + _ONES[self.bits]  # with a carry between codes: the inverse of how they were taken off
        order = order_of(g_idx[0], self.groups, self.keys[-1], self.where) if g_idx else None
        return lay_out(
            integers if order is None else integers[:, order],
            scales.T,
            self.bits,
            self.shape[1] // self.groups,
            zeros=unpack(zeros, self.bits).T,
            order=order,
        )


def find_gptq(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    read: Callable[[str], np.ndarray],
    where: object,
) -> tuple[dict[str, GPTQWeight], set[str]]:
    """The quantised weights among a checkpoint's tensors, by their plain key; and all keys that make them up.

    Raises:
        CheckpointError: for a layout or a precision that verax cannot compute with, naming it.
    """
    layout = read_value(config, "checkpoint_format", str, None) or read_value(config, "format", str, "gptq")
    if layout not in _VERSIONS:
        raise CheckpointError(f"{where}: GPTQ weights in the layout {layout!r} are not supported: gptq and gptq_v2 are")
    if (bits := read_value(config, "bits", int, 4)) not in BITS:
        raise CheckpointError(f"{where}: GPTQ weights of {bits} bits are not supported: 4 and 8 are")
    found: dict[str, GPTQWeight] = {}
    parts: set[str] = set()
    for key in tensors:
        stem, _, last = key.rpartition(".")
        if last != "qweight":
            continue
        keys = require_parts(tensors, stem, where)
        if (g_idx := f"{stem}.g_idx") in tensors:
            keys = (*keys, g_idx)
        found[f"{stem}.weight"] = _describe(tensors, keys, _VERSIONS[layout], where)
        parts.update(keys)
    return found, parts


def _describe(tensors: Mapping[str, TensorInfo], keys: tuple[str, ...], version: int, where: object) -> GPTQWeight:
    (rows, F), (groups, words), scales = (tensors[key].shape for key in keys[:3])
    for bits in BITS:  # by the shapes: single layers may have other bits than the rest
        D = rows * 32 // bits
        whole = words * 32 == F * bits and scales == (groups, F) and groups > 0 and D % groups == 0
        if whole and all(tensors[key].shape == (D,) for key in keys[3:]) and fits(D // groups, D, bits):
            return GPTQWeight(where, keys, (F, D), bits, groups, version)
    raise unfitting(tensors, keys, f"4 or 8 bits with {GROUPS}", where)
