"""Products with a weight, and with the matrices of a mixture of experts, by kind of weight and number of rows."""

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
from verax.bench.harness import Case, operation_case, random, torch_tensor
from verax.checkpoint.load import HostMemory
from verax.errors import InvalidParameterError
from verax.ops.cpu import library

__all__ = ["EXPERT_SIZES", "WEIGHTS", "grouped_cases", "linear_cases"]

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
"""Side of a packed weight: the layout in models where `ops.pack_weight` makes one."""

FEW_ROWS = 16
"""Rows below which a product is a decode step's; models pack a weight only if decode steps get no slower."""

COLD = 256 << 20
"""Bytes of weights that the calls of `linear` take in turn: no cache holds what the next one reads."""


EXPERT_SIZES = {"experts": 128, "chosen": 8, "size_in": 2048, "size_out": 1536}
"""Qwen3-30B-A3B's experts of a layer, and of a token, and the gate and up projection of each."""

TOKENS = (1, 4, 8, 512)

EXPERT_CHOICES = 16
"""Random choices of experts that the calls take in turn: no cache holds what the next one reads."""


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
        weight = _quantized_as(dense, kind)
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
                sides["torch"] = _in_turn(partial(torch.nn.functional.linear, torch_tensor(torch, x, dtype)), theirs)
            products = 2 * count * size_out * size_in
            yield operation_case("linear", f"{kind}, {count} rows", dtype, weight.nbytes, products, chosen, sides)


def _in_turn(run: Callable[[Any], object], weights: Sequence[Any]) -> Callable[[], object]:
    """A call with the next of the weights, round and round."""
    turn = itertools.cycle(weights)
    return lambda: run(next(turn))


def _as_loaded(weight: Any) -> Any:
    """A copy that lies in memory as a checkpoint's weights do."""
    memory = HostMemory()
    return jax.tree.map(lambda array: jax.device_put(memory.copy(array, np.dtype(array.dtype))), weight)


def _packed(weights: Sequence[Any], few_rows: bool) -> list[ops.PackedWeight]:
    """The weights as `ops.pack_weight` lays them out; none if it leaves them unchanged."""
    pack = jax.jit(ops.pack_weight, static_argnames="few_rows")
    if not isinstance(jax.eval_shape(partial(pack, few_rows=few_rows), weights[0]), ops.PackedWeight):
        return []
    return [pack(weight, few_rows=few_rows) for weight in weights]


def _packed_side(x: jax.Array, weights: Sequence[ops.PackedWeight]) -> Callable[[], object]:
    run = partial(jax.jit(ops.linear), x)
    return _in_turn(lambda weight: jax.block_until_ready(run(weight)), weights)


def _num_copies(nbytes: int) -> int:
    return math.ceil(COLD / nbytes)


def _implementations(x: jax.Array, weights: Sequence[Any]) -> dict[str, Callable[[], object]]:
    """Every implementation of the operation that can take this call here, by name."""
    sides: dict[str, Callable[[], object]] = {}
    for name, impl in ops.linear.implementations.items():
        forced = impl.is_reference or (name == "native" and impl.runs_on(ops.target()) and library.available())
        if forced or impl.supports(x, weights[0]):
            run = partial(jax.jit(impl.function), x)
            sides[name] = _in_turn(lambda weight, run=run: jax.block_until_ready(run(weight)), weights)
    return sides


def _quantized_as(dense: jax.Array, kind: str) -> Any:
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


def grouped_cases(kinds: Sequence[str], torch: Any) -> Iterator[Case]:
    """Cases one by one: each kind of weight with each number of tokens; with torch's side if it is given.

    Args:
        kinds: names out of `WEIGHTS`.
        torch: the module, or None.
    """
    E, k, D, F = EXPERT_SIZES.values()
    rng = np.random.default_rng(0)
    dense = jnp.asarray(rng.standard_normal((F, D), np.float32), jnp.bfloat16)
    shift = jnp.arange(E)[:, None, None].astype(jnp.bfloat16) / E
    for kind in kinds:
        weights = jax.lax.map(lambda one, kind=kind: _quantized_as(dense + one, kind), shift)
        dtype = "float32" if kind == "float32" else "bfloat16"
        theirs = None if torch is None else torch_tensor(torch, jax.lax.map(lambda one: dense + one, shift), dtype)
        for count in TOKENS:
            x = random((count, 1, D), "float32", 0)
            choices = [rng.permuted(np.tile(np.arange(E), (count, 1)), axis=1)[:, :k] for _ in range(EXPERT_CHOICES)]
            hit = np.mean([len(np.unique(choice)) for choice in choices])
            sides = _grouped_implementations(x, weights, [jnp.asarray(choice, jnp.int32) for choice in choices])
            if torch is not None:
                run = partial(_loop, torch, torch_tensor(torch, x[:, 0], dtype), theirs)
                sides["torch"] = _in_turn(run, [torch.from_numpy(choice) for choice in choices])
            chosen = ops.grouped_linear.select(x, weights, jnp.asarray(choices[0], jnp.int32)).name
            moved, products = int(weights.nbytes / E * hit), 2 * count * k * D * F
            yield operation_case("grouped_linear", f"{kind}, {count} tokens", dtype, moved, products, chosen, sides)


def _grouped_implementations(
    x: jax.Array, weights: Any, choices: Sequence[jax.Array]
) -> dict[str, Callable[[], object]]:
    """Implementations that take this call here, by name; the reference, which reads all experts, only if chosen."""
    supporting = ops.grouped_linear.supporting(x, weights, choices[0])
    sides: dict[str, Callable[[], object]] = {}
    for impl in supporting if supporting[0].is_reference else [i for i in supporting if not i.is_reference]:
        run: Any = jax.jit(impl.function)
        sides[impl.name] = _in_turn(lambda groups, run=run: jax.block_until_ready(run(x, weights, groups)), choices)
    return sides


def _loop(torch: Any, x: Any, weights: Any, choice: Any) -> Any:
    """Products expert by expert, as transformers computes them, of the chosen ones."""
    y = torch.empty(*choice.shape, weights.shape[1], dtype=x.dtype)
    for expert in choice.unique():
        token, place = torch.where(choice == expert)
        y[token, place] = torch.nn.functional.linear(x[token], weights[expert])
    return y
