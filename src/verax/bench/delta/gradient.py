"""The exact gated delta rule forward and backward in `verax bench delta`, as a training step has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from verax import ops
from verax.bench.case import Case
from verax.bench.delta import gated
from verax.bench.delta.baselines import Baselines
from verax.bench.delta.case import jax_side, torch_side
from verax.bench.delta.flops import gated_rule_bytes

__all__ = ["gradient_case", "gradient_cases"]

NAMES = ("q", "k", "v", "g", "beta")
"""Inputs, and the order of their gradients."""

TOLERANCE = {"float32": 2e-2, "bfloat16": 0.1}
"""Against the recurrence in float32. Gradients of the decay are differences of large sums."""

SEGMENT = 64
"""Tokens whose states are held at a time for the expected gradients; those of a long sequence do not fit."""

BACKWARD = 3
"""Products of forward and backward over those of forward alone: each has two in its gradient."""

Arrays = Mapping[str, Any]


def gradient_cases(configurations: Mapping[str, tuple[int, int, int]], baselines: Baselines) -> Iterator[Case]:
    """The report's configurations; with a GPU, a long sequence in bfloat16 too."""
    for name, (B, n, C) in configurations.items():
        yield gradient_case(name, (B, n * C, gated.HEADS, gated.SIZE), "float32", baselines)
    if baselines.device == "cuda":
        yield gradient_case("Long", gated.GPU_SHAPE, "bfloat16", baselines)


def gradient_case(name: str, shape: tuple[int, int, int, int], dtype: str, baselines: Baselines | None) -> Case:
    """One batch of sequences, forward and backward, by the implementations that go by chunks.

    Arguments are those of `gated.gated_case`.
    """
    B, T, H, D = shape
    arrays, state = gated.gated_inputs(*shape, dtype), np.zeros((B, H, D, D), np.float32)
    # Gradients of the outputs.
    given = np.random.default_rng(1).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    ours, sides = gated.own_flops(shape), {}
    implementations = [impl for impl in gated.own_implementations(arrays, state) if impl in ("chunk", "native")]
    for impl in implementations:
        with ops.use_implementations(delta_recurrence=impl):
            side = jax_side(_gradients, state, arrays, given, flops=BACKWARD * ours[impl])
            sides[f"verax {impl}"] = replace(side, dtypes=(dtype,))
    if baselines is not None:
        *inputs, initial = gated.torch_inputs(baselines, {**arrays, "given": given}, state)
        for impl, run, flops in gated.their_implementations(baselines, shape):
            if impl.endswith("chunk"):
                call = _torch_gradients(baselines.torch, run)
                sides[impl] = torch_side(
                    baselines.torch, call, *inputs, initial, flops=BACKWARD * flops, dtypes=(dtype,), gradients=True
                )
    chosen = gated.chosen_implementation(arrays, state)
    return Case(
        "gradient",
        name,
        bytes_moved=BACKWARD * gated_rule_bytes(B * T, B, H, D, D, size=arrays["q"].itemsize),
        chosen=f"verax {chosen if chosen in implementations else implementations[-1]}",
        sides=sides,
        sizes={"batch": B, "tokens": T, "heads": H, "size": D},
        expected=_expected(state, arrays, given),
        tolerance=TOLERANCE[dtype],
    )


def _gradients(state: jax.Array, arrays: Arrays, given: jax.Array) -> tuple[jax.Array, ...]:
    def outputs(arrays: Arrays) -> jax.Array:
        return ops.gated_delta_rule(**arrays, initial_state=state)[0]

    found_outputs, pull = jax.vjp(outputs, arrays)
    (found,) = pull(given.astype(found_outputs.dtype))
    return tuple(found[name] for name in NAMES)


def _expected(state: np.ndarray, arrays: Arrays, given: np.ndarray) -> list[np.ndarray]:
    """Gradients of the recurrence token by token, in float32."""
    exact = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    B, T, H, D = given.shape
    size = math.gcd(T, SEGMENT)

    def segmented(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(B, T // size, size, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def segment(state: jax.Array, arrays: Arrays) -> tuple[jax.Array | None, jax.Array]:
        outputs, state_after = ops.gated_delta_rule(**arrays, initial_state=state, output_final_state=True)
        return state_after, outputs

    def outputs(arrays: Arrays) -> jax.Array:
        _, found = jax.lax.scan(segment, jnp.asarray(state), jax.tree.map(segmented, arrays))
        return jnp.moveaxis(found, 0, 1).reshape(B, T, H, D)

    with ops.use_implementations(delta_recurrence="reference"), jax.default_matmul_precision("highest"):
        found = jax.jit(lambda arrays, given: jax.vjp(outputs, arrays)[1](given)[0])(exact, given.astype(np.float32))
    return [np.asarray(found[name], np.float64) for name in NAMES]


def _torch_gradients(torch: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of five inputs, of the inputs, of the gradients of the outputs and of the initial state."""

    def run(*arguments: Any) -> Any:
        *inputs, given, state = arguments
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(forward(*leaves, state)[0], leaves, given)

    return run
