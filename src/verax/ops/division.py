"""Division of a weight over the devices of a mesh: along which axis, in which units, and where each of its arrays lies.

A quantised weight is several arrays. They are divided as the weight that they stand for, so that each device holds a
smaller weight of the same kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Int

from verax.errors import InvalidParameterError
from verax.ops.block_quantized import BLOCK_KINDS, LANES, BlockQuantizedWeight
from verax.ops.packed import PackedWeight
from verax.ops.quantized import INT4_ROWS, QuantizedWeight

TENSOR_AXIS = "tensor"
"""Name of the mesh axis that divides layers."""


@dataclass(frozen=True)
class Division:
    """Division of one axis of a weight.

    Attributes:
        axis: 0 for the outputs of `[F, D]`, the entries of a bias, the tokens of an embedding, or the matrices of a
            stack; 1 for the inputs.
        unit: entries that stay together on one device, such as the rows of a head. Several numbers are the units of
            several matrices in one weight, one below the other and of as many units each, such as queries, keys and
            values.
        repeats: True if several devices may hold a unit where there are more devices than units.
        mesh_axes: axes of the mesh whose devices, all together, hold the parts.
    """

    axis: int = 0
    unit: int | tuple[int, ...] = 1
    repeats: bool = False
    mesh_axes: tuple[str, ...] = (TENSOR_AXIS,)

    @property
    def spec(self) -> PartitionSpec:
        """Partition of an array that has the weight's own axes."""
        return PartitionSpec(*[None] * self.axis, self.mesh_axes)

    @property
    def units(self) -> tuple[int, ...]:
        """Unit of each matrix of the weight."""
        return self.unit if isinstance(self.unit, tuple) else (self.unit,)

    def order(self, size: int, devices: int) -> Int[np.ndarray, "F"] | None:
        """Rows in the order in which the devices' parts follow each other, by number; None if it is their own order.

        A part of several matrices has its rows of each, one below the other as in the whole weight.

        `size`: number of rows, or of blocks of rows that are stored together. `devices`: number of devices, which
        divides the weight.
        """
        if len(self.units) == 1:
            return None
        ends = np.cumsum(self.units) * size // sum(self.units)
        matrices = np.split(np.arange(size), ends[:-1])
        return np.concatenate([rows.reshape(devices, -1) for rows in matrices], axis=1).reshape(-1)


def is_weight(value: Any) -> bool:
    """True for a quantised weight: a leaf of a model's state that is several arrays."""
    return isinstance(value, QuantizedWeight | BlockQuantizedWeight)


def partition(weight: Any, division: Division | None) -> Any:
    """Partition of each array of a weight, in a tree like the weight's; whole arrays without a division."""
    spec = PartitionSpec() if division is None else division.spec
    if not (is_weight(weight) or isinstance(weight, PackedWeight)):
        return spec
    specs = jax.tree.map(lambda _: spec, weight)
    if isinstance(weight, QuantizedWeight) and division is not None and len(weight.shape) == 2 and division.axis == 1:
        # Scales and zero points of whole rows are whole.
        whole = {"scales": PartitionSpec()} | ({} if weight.zeros is None else {"zeros": PartitionSpec()})
        return specs if weight.group_size is not None else replace(specs, **whole)
    if isinstance(weight, QuantizedWeight) and weight.order is not None and len(weight.shape) == 2:
        return replace(specs, order=PartitionSpec())  # of inputs, which are whole
    return specs


def check_division(name: str, weight: Any, division: Division, devices: int) -> None:
    """Check that each of several devices can hold a part of a weight."""
    if isinstance(weight, QuantizedWeight) and division.axis == 1 and weight.order is not None:
        raise InvalidParameterError(
            f"{name}: its columns are in an order of their own (act-order), which is not divided over devices; load it "
            "with quantization='dequantize'"
        )
    whole, units = weight.shape[division.axis], division.units
    for part_units in units:
        size, unit = whole * part_units // sum(units), math.lcm(part_units, _stored_unit(weight, division.axis))
        count, rest = divmod(size, unit)
        if rest or (count % devices and not (division.repeats and devices % count == 0)):
            part = f"{size} of its {whole}" if len(units) > 1 else f"{size}"
            together = f", {unit} of which stay together," if unit > 1 else ""
            raise InvalidParameterError(
                f"{name}: {part} {'inputs' if division.axis else 'rows'}{together} do not divide over {devices} devices"
            )


def _stored_unit(weight: Any, axis: int) -> int:
    """Entries of an axis that a quantised weight stores together."""
    if isinstance(weight, BlockQuantizedWeight):
        return BLOCK_KINDS[weight.kind].unit if axis else LANES
    if isinstance(weight, QuantizedWeight) and len(weight.shape) == 2:
        return (weight.group_size or 1) if axis else (INT4_ROWS if weight.bits == 4 else 1)
    return 1


def repeated(name: str, weight: Any, division: Division, times: int) -> Any:
    """Weight with each of its units repeated `times` times in a row: for devices that share a head."""
    if times == 1:
        return weight
    rows, stored, (unit,) = weight.shape[0], _stored_unit(weight, 0), division.units
    if unit % stored:
        raise InvalidParameterError(
            f"{name}: units of {unit} rows lie across blocks of {stored} and cannot be repeated; use fewer devices"
        )

    def repeat(array: Any) -> Any:
        units = np.asarray(array).reshape(rows // unit, -1, *array.shape[1:])
        return np.repeat(units, times, axis=0).reshape(-1, *array.shape[1:])

    if not is_weight(weight):
        return repeat(weight)
    kept = {"order": weight.order} if isinstance(weight, QuantizedWeight) else {}
    return replace(jax.tree.map(repeat, weight), size_out=rows * times, **kept)


def resized(weight: Any) -> Any:
    """Weight with the sizes of the arrays that it has, one device's part. Weights in one array are returned unchanged.

    The last rows of a weight that is not divided may be padding, so that its own sizes hold then.
    """
    if isinstance(weight, BlockQuantizedWeight):
        blocks, units, _, lanes = weight.words.shape
        size_in = min(weight.size_in, units * BLOCK_KINDS[weight.kind].unit)
        return replace(weight, size_out=min(weight.size_out, blocks * lanes), size_in=size_in)
    if isinstance(weight, QuantizedWeight) and weight.bits == 8:
        return replace(weight, size_out=weight.values.shape[-2], size_in=weight.values.shape[-1])
    if isinstance(weight, QuantizedWeight):
        blocks, eighths, _ = weight.values.shape[-3:]
        return replace(weight, size_out=min(weight.size_out, blocks * INT4_ROWS), size_in=eighths * 8)
    return weight
