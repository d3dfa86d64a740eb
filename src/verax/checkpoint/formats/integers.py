"""Integers, scales and zero points as quantisation libraries store them, turned into a `QuantizedWeight`.

What GPTQ, AWQ and compressed-tensors files have in common: codes of 4 or 8 bits in words of 32, lowest bits first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from verax.errors import CheckpointError
from verax.ops.quantized import GROUP_SIZES, QuantizedWeight

if TYPE_CHECKING:
    from verax.checkpoint.formats.safetensors import TensorInfo

__all__ = [
    "GROUPS",
    "fits",
    "fitting_group",
    "fitting_scales",
    "lay_out",
    "nibbles",
    "order_of",
    "spread",
    "unfitting",
    "unpack",
]

GROUPS = f"a scale for {', '.join(map(str, GROUP_SIZES))} inputs or a multiple of them, or one for a row"
"""Words for the groups that a weight may have."""

_from_integers = jax.jit(QuantizedWeight.from_integers, static_argnames=("bits", "group_size"))


def nibbles(stored: np.ndarray) -> np.ndarray:
    """Codes of 4 bits in bytes `[R, n]`, the first in the low bits: uint8 `[R, 2 n]`."""
    return np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(stored), -1)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Integers in words of 32 bits `[R, n]`, each stored plus half of their range: int8 `[R, 32 n / bits]`.

    Args:
        words: integers side by side in the last axis, the first in the lowest bits.
        bits: 4 or 8.
    """
    stored = np.ascontiguousarray(words).view(np.uint8)
    codes = nibbles(stored) if bits == 4 else stored
    return (codes - np.uint8(1 << (bits - 1))).view(np.int8)


def fits(size: int, size_in: int, bits: int) -> bool:
    """True if a `QuantizedWeight` can hold scales of `size` inputs each, of `size_in`."""
    return bool(_groups(size, size_in)) or (bits == 8 and size >= size_in)


def fitting_group(size: int, size_in: int, bits: int) -> int | None:
    """Group size for scales of `size` inputs each, where `fits`: None for a whole row.

    Groups of another size become several of a smaller one, with the same scale.
    """
    return None if bits == 8 and size >= size_in else max(_groups(size, size_in))


def _groups(size: int, size_in: int) -> list[int]:
    return [group for group in GROUP_SIZES if size_in % group == 0 and (size % group == 0 or size >= size_in)]


def spread(of_groups: np.ndarray, size: int, size_in: int, group: int | None) -> np.ndarray:
    """Numbers of groups of `size` inputs, `[R, n]`, for each group of `group` inputs."""
    if group is None or group == size:
        return of_groups
    return of_groups[:, np.arange(0, size_in, group) // size]


def fitting_scales(scales: np.ndarray, group: int | None) -> np.ndarray:
    """Scales of groups as float16 if that changes none, which halves the bytes to read; else as float32."""
    scales = np.asarray(scales, np.float32)
    if group is None:
        return scales
    with np.errstate(over="ignore"):
        halved = scales.astype(np.float16)
    return halved if np.array_equal(halved, scales) else scales


def order_of(g_idx: np.ndarray, groups: int, key: str, where: object) -> np.ndarray | None:
    """Inputs by group, from the group of each; None if they are so already.

    Raises:
        CheckpointError: if the groups are not all of one size.
    """
    # Zeros and minus ones: written without act-order, by a library that left the array as it was allocated.
    if groups == 1 or not (g_idx.any() and (g_idx + 1).any()):
        return None
    expected = np.arange(len(g_idx)) // (len(g_idx) // groups)
    if np.array_equal(g_idx, expected):
        return None
    order = np.argsort(g_idx, kind="stable")
    if not np.array_equal(g_idx[order], expected):
        raise CheckpointError(f"{where}: {key} does not give each of {groups} groups the same number of inputs")
    return order


def unfitting(tensors: Mapping[str, TensorInfo], keys: Sequence[str], supported: str, where: object) -> CheckpointError:
    """The error of a weight whose arrays do not go together, or not in a way that is supported."""
    arrays = ", ".join(f"{key} of dtype {tensors[key].dtype} and shape {list(tensors[key].shape)}" for key in keys)
    return CheckpointError(f"{where}: {arrays}; supported are {supported}")


def lay_out(
    integers: np.ndarray,
    scales: np.ndarray,
    bits: int,
    size: int,
    *,
    zeros: np.ndarray | None = None,
    order: np.ndarray | None = None,
) -> QuantizedWeight:
    """The weight of these integers, exactly.

    Args:
        integers: int8 `[F, D]`, of -8..7 with 4 bits.
        scales: `[F, n]`, one for `size` inputs each.
        bits: 4 or 8.
        size: inputs that share a scale; where it `fits`.
        zeros: int8 `[F, n]`, integers that stand for 0; where all are 0 the weight is symmetric.
        order: input that each column multiplies; None if it is the column's own.
    """
    size_in = integers.shape[1]
    group = fitting_group(size, size_in, bits)
    parts = [fitting_scales(spread(scales, size, size_in, group), group)]
    if zeros is not None and zeros.any():
        parts.append(spread(zeros, size, size_in, group))
    per_group, *rest = map(jnp.array, parts)
    return _from_integers(
        jnp.array(integers),
        per_group,
        bits=bits,
        group_size=group,
        zeros=rest[0] if rest else None,
        order=None if order is None else jnp.array(order),
    )
