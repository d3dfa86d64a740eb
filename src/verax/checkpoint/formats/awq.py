"""AWQ checkpoints (Lin et al., 2023, arXiv:2306.00978) in AutoAWQ's version `gemm`.

A weight `X.weight` of shape `[F, D]` is

- `X.qweight` int32 `[D, F / 8]`: bits 4i to 4i + 3 of word c hold output `8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]`;
- `X.qzeros` int32 `[groups, F / 8]`, zero points in the same order, and `X.scales` `[groups, F]`.

`W[f, d] = (code - zero[group, f]) * scales[group, f]`. https://github.com/casper-hansen/AutoAWQ,
`awq/modules/linear/gemm.py` and `awq/utils/packing_utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verax.checkpoint.formats.integers import GROUPS, fits, lay_out, require_parts, unfitting, unpack
from verax.errors import CheckpointError
from verax.fields import read_value
from verax.ops.quantized import QuantizedWeight

if TYPE_CHECKING:
    from verax.checkpoint.formats.safetensors import TensorInfo

__all__ = ["AWQWeight", "find_awq"]

BITS = 4
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place of each of eight outputs in its word."""


class AWQWeight(NamedTuple):
    """A quantised weight of a file."""

    keys: tuple[str, ...]
    """Keys of qweight, qzeros and scales."""
    shape: tuple[int, int]
    groups: int

    @property
    def kind(self) -> str:
        """Method, bits, and inputs that share a scale."""
        return f"AWQ int4 by {'rows' if self.groups == 1 else self.shape[1] // self.groups}"

    def read(self, read_raw: Callable[[str], np.ndarray]) -> QuantizedWeight:
        """Copy it out of its file, exactly."""
        qweight, qzeros, scales = (read_raw(key) for key in self.keys)
        return lay_out(_of_outputs(qweight), scales.T, BITS, self.shape[1] // self.groups, zeros=_of_outputs(qzeros))


def _of_outputs(words: np.ndarray) -> np.ndarray:
    """Integers `[F, n]` in words `[n, F / 8]`."""
    packed = unpack(words, BITS)
    return packed.reshape(len(packed), -1, len(_PLACES))[..., _PLACES].reshape(packed.shape).T


def find_awq(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    read: Callable[[str], np.ndarray],
    where: object,
) -> tuple[dict[str, AWQWeight], set[str]]:
    """The quantised weights among a checkpoint's tensors, by their plain key; and all keys that make them up.

    Raises:
        CheckpointError: for a layout or a precision that verax cannot compute with, naming it.
    """
    layout = read_value(config, "version", str, None) or read_value(config, "format", str, "gemm")
    if layout.lower() != "gemm":
        raise CheckpointError(f"{where}: AWQ weights in the version {layout!r} are not supported: gemm is")
    if (bits := read_value(config, "bits", int, None) or read_value(config, "w_bit", int, BITS)) != BITS:
        raise CheckpointError(f"{where}: AWQ weights of {bits} bits are not supported: {BITS} are")
    found: dict[str, AWQWeight] = {}
    parts: set[str] = set()
    for key in tensors:
        stem, _, last = key.rpartition(".")
        if last != "qweight":
            continue
        keys = require_parts(tensors, stem, where)
        (D, words), zeros, scales = (tensors[key].shape for key in keys)
        groups, F = scales
        whole = words * 32 // BITS == F and zeros == (groups, words) and groups > 0 and D % groups == 0
        if not whole or not fits(D // groups, D, BITS):
            raise unfitting(tensors, keys, f"4 bits with {GROUPS}", where)
        found[f"{stem}.weight"] = AWQWeight(keys, (F, D), groups)
        parts.update(keys)
    return found, parts
