"""Quantised weights of a folder of safetensors files, by the method that config.json names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from verax.checkpoint.formats.awq import find_awq
from verax.checkpoint.formats.compressed_tensors import METHOD, find_packed
from verax.checkpoint.formats.float8 import find_float8
from verax.checkpoint.formats.gptq import find_gptq
from verax.errors import CheckpointError

if TYPE_CHECKING:
    from verax.checkpoint.formats.safetensors import TensorInfo

__all__ = ["METHODS", "find_quantized"]

METHODS: dict[str, Callable[..., tuple[dict[str, Any], set[str]]]] = {
    METHOD: find_packed,
    "gptq": find_gptq,
    "awq": find_awq,
    "fp8": find_float8,
    "fbgemm_fp8": find_float8,
}
"""Functions that find the quantised weights, by `quant_method` of config.json's `quantization_config`."""


def find_quantized(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    read: Callable[[str], np.ndarray],
    where: object,
) -> tuple[dict[str, Any], set[str]]:
    """The quantised weights among a checkpoint's tensors, by their plain key; and all keys that make them up.

    Args:
        tensors: dtype and shape of each array by its key.
        config: `quantization_config` of config.json.
        read: reads an array.
        where: name of the checkpoint for messages.

    Raises:
        CheckpointError: for a method, a layout or a precision that verax cannot compute with, naming it.
    """
    method = config.get("quant_method")
    find = METHODS.get(method) if isinstance(method, str) else None
    if find is None:
        raise CheckpointError(
            f"{where}: it is quantised by {method!r}, which is not supported: {', '.join(METHODS)} are, and so are "
            "unquantised checkpoints with quantization='int8' or 'int4'"
        )
    return find(tensors, config, read, where)
