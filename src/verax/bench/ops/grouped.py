"""Products with the matrices of a mixture of experts, by kind of weight and number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from verax import ops
from verax.bench.case import Case
from verax.bench.ops.linear import in_turn, quantized_as
from verax.bench.ops.sides import operation_case, random, torch_tensor

__all__ = ["SIZES", "grouped_cases"]

SIZES = {"experts": 128, "chosen": 8, "size_in": 2048, "size_out": 1536}
"""Qwen3-30B-A3B's: experts of a layer, those of a token, and the gate and up projection of each."""

TOKENS = (1, 4, 8, 512)

CHOICES = 16
"""Random choices of experts that the calls take in turn: no cache holds what the next one reads."""


def grouped_cases(kinds: Sequence[str], torch: Any) -> Iterator[Case]:
    """Cases one by one: each kind of weight with each number of tokens; with torch's side if it is given.

    Args:
        kinds: names out of `verax.bench.ops.linear.WEIGHTS`.
        torch: the module, or None.
    """
    E, k, D, F = SIZES.values()
    rng = np.random.default_rng(0)
    dense = jnp.asarray(rng.standard_normal((F, D), np.float32), jnp.bfloat16)
    shift = jnp.arange(E)[:, None, None].astype(jnp.bfloat16) / E
    for kind in kinds:
        weights = jax.lax.map(lambda one, kind=kind: quantized_as(dense + one, kind), shift)
        dtype = "float32" if kind == "float32" else "bfloat16"
        theirs = None if torch is None else torch_tensor(torch, jax.lax.map(lambda one: dense + one, shift), dtype)
        for count in TOKENS:
            x = random((count, 1, D), "float32", 0)
            choices = [rng.permuted(np.tile(np.arange(E), (count, 1)), axis=1)[:, :k] for _ in range(CHOICES)]
            hit = np.mean([len(np.unique(choice)) for choice in choices])
            sides = _implementations(x, weights, [jnp.asarray(choice, jnp.int32) for choice in choices])
            if torch is not None:
                run = partial(_loop, torch, torch_tensor(torch, x[:, 0], dtype), theirs)
                sides["torch"] = in_turn(run, [torch.from_numpy(choice) for choice in choices])
            chosen = ops.grouped_linear.select(x, weights, jnp.asarray(choices[0], jnp.int32)).name
            moved, products = int(weights.nbytes / E * hit), 2 * count * k * D * F
            yield operation_case("grouped_linear", f"{kind}, {count} tokens", dtype, moved, products, chosen, sides)


def _implementations(x: jax.Array, weights: Any, choices: Sequence[jax.Array]) -> dict[str, Callable[[], object]]:
    """Implementations that take this call here, by name; the reference, which reads all experts, only if chosen."""
    found = ops.grouped_linear.supporting(x, weights, choices[0])
    sides: dict[str, Callable[[], object]] = {}
    for impl in found if found[0].is_reference else [impl for impl in found if not impl.is_reference]:
        run: Any = jax.jit(impl.function)
        sides[impl.name] = in_turn(lambda groups, run=run: jax.block_until_ready(run(x, weights, groups)), choices)
    return sides


def _loop(torch: Any, x: Any, weights: Any, choice: Any) -> Any:
    """Products as transformers has them: expert by expert, of those that are chosen."""
    y = torch.empty(*choice.shape, weights.shape[1], dtype=x.dtype)
    for expert in choice.unique():
        token, place = torch.where(choice == expert)
        y[token, place] = torch.nn.functional.linear(x[token], weights[expert])
    return y
