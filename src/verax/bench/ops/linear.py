"""Products with a weight, by kind of weight and number of rows, in the shapes of a language model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from verax import ops
from verax.bench.case import Case
from verax.bench.ops.sides import operation_case, torch_tensor
from verax.checkpoint.load import HostMemory
from verax.errors import InvalidParameterError
from verax.ops.cpu import library

__all__ = ["WEIGHTS", "in_turn", "linear_cases", "quantized_as"]

WEIGHTS: dict[str, tuple[int, int | None] | str | None] = {
    "float32": None,
    "bfloat16": None,
    "int8": (8, None),
    "int8-32": (8, 32),
    "int8-128": (8, 128),
    "int4-32": (4, 32),
    "int4-128": (4, 128),
    "int4-128-zeros": (4, 128),
    "float8-128": (8, 128),
    **{kind: kind for kind in ops.BLOCK_KINDS},
}
"""Kinds of weight by name; of quantised ones, bits and inputs that share a scale, or the format of blocks. With zero
points, as AWQ has them, or of 8-bit floats, as FP8 checkpoints have them, where the name says so."""

PACKED = "packed"
"""The side of a packed weight, in which models have it where `ops.pack_weight` makes one."""

FEW_ROWS = 16
"""Rows below which a product is that of decode steps, whose models pack a weight only if these get no slower."""

COLD = 256 << 20
"""Bytes of weights that the calls of `linear` take in turn: no cache holds what the next one reads."""


def linear_cases(
    size_in: int, size_out: int, rows: Sequence[int], weights: Sequence[str], torch: Any
) -> Iterator[Case]:
    """Cases one by one: each kind of weight with each number of rows; with torch's side if it is given.

    Args:
        size_in, size_out: of the weight `[size_out, size_in]`.
        rows: of the input; one case each.
        weights: names out of `WEIGHTS`.
        torch: the module, or None.

    Raises:
        InvalidParameterError: if blocks of one of them do not divide `size_in`.
    """
    rng = np.random.default_rng(0)
    dense = jnp.asarray(rng.standard_normal((size_out, size_in), np.float32)).astype(jnp.bfloat16)
    for kind in weights:
        weight = quantized_as(dense, kind)
        held = [_as_loaded(weight) for _ in range(_num_copies(weight.nbytes))]
        packed = {few: _packed(held, few) for few in {count < FEW_ROWS for count in rows}}
        dtype = "float32" if kind == "float32" else "bfloat16"
        theirs = [] if torch is None else [torch_tensor(torch, dense, dtype)]
        theirs += [tensor.clone() for tensor in theirs for _ in range(1, _num_copies(tensor.nbytes))]
        for count in rows:
            x = jnp.asarray(rng.standard_normal((count, size_in), np.float32))
            sides = _implementations(x, held)
            chosen = ops.linear.select(x, weight).name
            if layouts := packed[count < FEW_ROWS]:
                chosen, sides[PACKED] = PACKED, _packed_side(x, layouts)
            if torch is not None:
                sides["torch"] = in_turn(partial(torch.nn.functional.linear, torch_tensor(torch, x, dtype)), theirs)
            products = 2 * count * size_out * size_in
            yield operation_case("linear", f"{kind}, {count} rows", dtype, weight.nbytes, products, chosen, sides)


def in_turn(run: Callable[[Any], object], weights: Sequence[Any]) -> Callable[[], object]:
    """A call with the next of the weights, round and round."""
    turn = itertools.cycle(weights)
    return lambda: run(next(turn))


def _as_loaded(weight: Any) -> Any:
    """A copy that lies in memory as a checkpoint's weights do."""
    memory = HostMemory()
    return jax.tree.map(lambda array: jax.device_put(memory.copy(array, np.dtype(array.dtype))), weight)


def _packed(weights: Sequence[Any], few_rows: bool) -> list[ops.PackedWeight]:
    """The weights as `ops.pack_weight` lays them out; none if it leaves them as they are."""
    pack = jax.jit(ops.pack_weight, static_argnames="few_rows")
    if not isinstance(jax.eval_shape(partial(pack, few_rows=few_rows), weights[0]), ops.PackedWeight):
        return []
    return [pack(weight, few_rows=few_rows) for weight in weights]


def _packed_side(x: jax.Array, weights: Sequence[ops.PackedWeight]) -> Callable[[], object]:
    run = partial(jax.jit(ops.linear), x)
    return in_turn(lambda weight: jax.block_until_ready(run(weight)), weights)


def _num_copies(nbytes: int) -> int:
    return math.ceil(COLD / nbytes)


def _implementations(x: jax.Array, weights: Sequence[Any]) -> dict[str, Callable[[], object]]:
    """Every implementation of the operation that can take this call here, by name."""
    sides: dict[str, Callable[[], object]] = {}
    for name, impl in ops.linear.implementations.items():
        forced = impl.is_reference or (name == "native" and impl.runs_on(ops.target()) and library.available())
        if forced or impl.supports(x, weights[0]):
            run = partial(jax.jit(impl.function), x)
            sides[name] = in_turn(lambda weight, run=run: jax.block_until_ready(run(weight)), weights)
    return sides


def quantized_as(dense: jax.Array, kind: str) -> Any:
    """A weight as a kind out of `WEIGHTS`."""
    scheme = WEIGHTS[kind]
    if scheme is None:
        return dense.astype(kind)
    if isinstance(scheme, str):
        return _random_blocks(scheme, *dense.shape)
    weight = jax.jit(ops.quantize, static_argnums=(1, 2))(dense, *scheme)
    if kind.endswith("zeros"):
        return replace(weight, zeros=jnp.ones(weight.scales.shape, jnp.int8))
    return replace(weight, values=dense.astype(jnp.float8_e4m3fn)) if kind.startswith("float8") else weight


def _random_blocks(kind: str, size_out: int, size_in: int) -> ops.BlockQuantizedWeight:
    """A weight of arbitrary blocks. Their bytes are below 64, so that every float16 number among them is finite."""
    size, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if size_in % size:
        raise InvalidParameterError(f"size_in: expected a multiple of {size} for {kind}, got {size_in}")
    shape = (size_out, size_in // size * size_bytes)
    return ops.BlockQuantizedWeight.from_blocks(kind, np.random.default_rng(0).integers(0, 64, shape, np.uint8))
