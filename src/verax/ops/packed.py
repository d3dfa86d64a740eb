"""Weights laid out as a processor's product of many rows reads them: packed once, not in each call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.errors import InvalidParameterError
from verax.ops._dispatch import Example, float32, operation
from verax.ops.quantized import QuantizedWeight

PANEL_ROWS = 48
"""Rows of a weight that lie side by side, in the lanes of three registers (`GEMM_STRIP` in native/)."""

CELL_VALUES = {"float32": 1, "bfloat16": 2, "int8": 2}
"""Inputs of a row that an instruction multiplies in one lane, by dtype of the weight."""

ROUNDED_CELL_VALUES = 4
"""The same of 8-bit integers that are multiplied by 8-bit integers, where an instruction does that."""

OFFSET = 128
"""Number added to 8-bit integers, since the instruction multiplies bytes without a sign by bytes with one."""

W = TypeVar("W")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("cells", "scales"),
    meta_fields=("size_out", "size_in", "kind", "rounds_inputs"),
)
@dataclass(frozen=True)
class PackedWeight:
    """Weight `[F, D]` of a linear operation, which takes it in the place of an array. A pytree of one or two arrays.

    `cells[p, d, f, c]` is row `48 p + f`, input `d * values + c`, where values is 1 of float32, 2 of bfloat16 and of
    8-bit integers, and 4 of 8-bit integers that round their inputs, or 2 where only 16 bits are multiplied. A last
    panel that is not full ends with zeros. `from_weight` makes one, and `unpacked` gives back what went in.
    """

    cells: Any
    """float32, bfloat16, int8 or, of integers that round their inputs, uint8 `[panels, D / values, 48, values]`, which
    are the integers plus 128."""
    scales: Any
    """float32 `[F]` of 8-bit integers; None of floats."""
    size_out: int
    size_in: int
    kind: str
    """Dtype of the weight: float32, bfloat16 or int8."""
    rounds_inputs: bool = False
    """As of a `QuantizedWeight`. Inputs of other 8-bit integers keep 14 bits: a scale for each 768 inputs of a row."""

    @staticmethod
    def from_weight(
        weight: Float[Array, "F D"] | QuantizedWeight, rounded_cell_values: int = ROUNDED_CELL_VALUES
    ) -> PackedWeight:
        """Lay out a weight of float32 or bfloat16, or of 8-bit integers with a scale for each row. Runs under `jit`.

        Args:
            weight: weight `[F, D]`.
            rounded_cell_values: inputs of a cell of 8-bit integers that round their inputs.

        Raises:
            InvalidParameterError: for another weight, whose further scales or zero points would be left out, or inputs
                that are not whole cells.
        """
        scales, values, rounds = None, cast(Any, weight), False
        if isinstance(weight, QuantizedWeight):
            if not weight.is_plain or weight.bits != 8 or weight.group_size is not None:
                raise InvalidParameterError(
                    "weight: expected 8-bit integers with a scale for each row and nothing else"
                )
            values, rounds = weight.values, weight.rounds_inputs
            scales = weight.scales[:, 0].astype(jnp.float32)
        kind = str(values.dtype)
        if scales is None and kind not in ("float32", "bfloat16"):
            raise InvalidParameterError(f"weight: expected float32, bfloat16 or a QuantizedWeight, got {kind}")
        count = rounded_cell_values if rounds else CELL_VALUES[kind]
        if weight.shape[1] % count:
            raise InvalidParameterError(f"weight: expected inputs in cells of {count}, got {weight.shape[1]} of them")
        if rounds:
            values = (values.astype(jnp.int16) + OFFSET).astype(jnp.uint8)
        F, D = weight.shape
        values = jnp.pad(values, ((0, -F % PANEL_ROWS), (0, 0)))
        cells = values.reshape(-1, PANEL_ROWS, D // count, count).swapaxes(1, 2)
        return PackedWeight(cells, scales, F, D, kind, rounds)

    @property
    def shape(self) -> tuple[int, int]:
        """`(F, D)`, as of the array that this stands for."""
        return self.size_out, self.size_in

    @property
    def dtype(self) -> jnp.dtype[Any]:
        """Dtype of the weight."""
        return jnp.dtype(self.kind)

    @property
    def nbytes(self) -> int:
        """Bytes of what products read: all but the zeros at the end of a last panel that is not full."""
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.size_out * self.size_in * self.dtype.itemsize + scales

    def rows(self, indices: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Single rows in float32: embeddings out of a table that is an output head as well."""
        cells = self.cells[indices // PANEL_ROWS, :, indices % PANEL_ROWS]
        rows = cells.reshape(*indices.shape, self.size_in).astype(jnp.float32)
        if self.rounds_inputs:
            rows -= OFFSET
        return rows if self.scales is None else rows * self.scales[indices][..., None]

    def unpacked(self) -> Float[Array, "F D"] | QuantizedWeight:
        """Weight that was packed."""
        values = self.cells.swapaxes(1, 2).reshape(-1, self.size_in)[: self.size_out]
        if self.scales is None:
            return values
        if self.rounds_inputs:
            values = (values.astype(jnp.int16) - OFFSET).astype(jnp.int8)
        return QuantizedWeight(values, self.scales[:, None], *self.shape, None, 8, rounds_inputs=self.rounds_inputs)


@operation
def pack_weight(weight: W, *, few_rows: bool = False) -> W | PackedWeight:
    """Weight `[F, D]` in the layout in which `linear` multiplies many rows fastest on the target: here, unchanged.

    A packed weight gives the same bits as the unpacked one where both are multiplied by the same instruction, which
    adds the products in the order of D: everywhere but bfloat16 at the level amx. There, packed weights are multiplied
    by tiles, whose instruction adds 32 products among themselves first, and unpacked ones by tiles or by vectors, as
    the number of rows decides. Sums of tiles and of vectors differ by at most
    `(g(D + 1) + g(D / 32 + 18)) (|x| |W|^T + |bias|)`, where `g(n) = n u / (1 - n u)` and u is 2^-24, the unit roundoff
    of float32. 8-bit integers that do not round their inputs are the other exception: packed, they multiply x in
    integers of up to 21,845 with a scale for each 768 inputs; unpacked, x in 16 bits for each 1,024, and in bfloat16
    where rows are many.

    Args:
        weight: array, or weight of another kind, which may stay unpacked.
        few_rows: True if few rows (from one on) are multiplied as well. The weight then stays unpacked where the
            products of few rows would be slower.
    """
    return weight


pack_weight.examples = [Example((float32(1536, 384),))]
