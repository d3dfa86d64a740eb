"""The exact gated delta rule in `verax bench delta`: whole sequences forward and backward, and the decode step.

Work is counted by formula. An addition and a multiplication are two operations; products are counted (matrices, and the
decay of a state), norms, sigmoids and other sums are not. A masked product counts whole, as every library computes it.
What an implementation does beyond the formula, to build an inverse or to pad, is its own loss. Letters: L tokens of all
sequences together, H heads, K and V sizes of keys and values, C tokens of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from verax import ops
from verax.bench.delta.baselines import Baselines, jax_side, torch_side
from verax.bench.harness import Case, Side
from verax.ops.delta import DeltaInputs, delta_recurrence
from verax.ops.delta._chunk import CHUNK_SIZE, CHUNK_SIZES

__all__ = ["decode_case", "gated_rule_bytes", "gated_rule_flops", "sequence_cases"]

HEADS, SIZE = 12, 64
"""The report's heads, in the size that earlier measurements of the exact rule took."""

GPU_SHAPE = (4, 4096, 16, 128)
"""Batch, tokens, heads and their size of one case more on a GPU, in bfloat16."""

DECODE = (32, 32, 128)
"""Sequences, heads and their size: Qwen3-Next's, a state of 64 MiB."""

NATIVE_CHUNK, BASELINE_CHUNK = 16, 64
"""Tokens that our CPU kernel takes at a time, and of the chunks of transformers and flash-linear-attention."""

TOLERANCE = {("cpu", "float32"): 1e-5, ("gpu", "float32"): 5e-3, ("tpu", "float32"): 5e-3}
"""Error against float64, by platform and dtype: by default float32 products are TF32 in Triton, bfloat16 on a TPU."""

ROUNDED_TOLERANCE = 2e-2
"""Error against float64 in bfloat16."""

INPUTS = ("q", "k", "v", "g", "beta")
"""Inputs, and the order of their gradients."""

GRADIENT_TOLERANCE = {"float32": 2e-2, "bfloat16": 0.1}
"""Error against the recurrence in float32. Gradients of the decay are differences of large sums."""

SEGMENT = 64
"""Tokens whose states are held at a time for the expected gradients; the states of a long sequence do not fit."""

BACKWARD = 3
"""Products of forward and backward over the products of forward alone: each has two in its gradient."""

Arrays = Mapping[str, Any]


def gated_rule_flops(L: int, H: int, K: int, V: int, C: int | None = None, *, solved: bool = False) -> int:
    """The gated delta rule token by token (C None), or with chunks of C.

    Token by token: the state decays (KV), is read twice (2KV each) and written (2KV). By chunks, a token has its rows
    of `k k^T`, `q k^T` and `T k` (2CK each), of `T v` and of the product with what is written (2CV each), its share of
    the inverse T (C^2/3), and three products with a state (2KV each). Where what is written is `solved` for by
    substitution, there is no T: CV in place of the share of T and of both products with it.
    """
    if C is None:
        return L * H * 7 * K * V
    inner = 4 * C * K + 3 * C * V if solved else 6 * C * K + 4 * C * V + C * C // 3
    return L * H * (inner + 6 * K * V)


def gated_rule_bytes(L: int, N: int, H: int, K: int, V: int, *, size: int = 4) -> int:
    """q, k, v, beta and g read, outputs written, the float32 states of N sequences read and written, each once."""
    return L * H * size * (2 * K + 2 * V + 2) + 2 * 4 * N * H * K * V


def sequence_cases(
    section: str, configurations: Mapping[str, tuple[int, int, int]], baselines: Baselines
) -> Iterator[Case]:
    """The report's configurations, forward (`gated`) or forward and backward (`gradient`).

    With a GPU there is a long sequence in bfloat16 too.
    """
    shapes = {name: (B, n * C, HEADS, SIZE) for name, (B, n, C) in configurations.items()}
    for name, shape in shapes.items():
        yield _sequence_case(section, name, shape, "float32", baselines)
    if baselines.device == "cuda":
        yield _sequence_case(section, "Long", GPU_SHAPE, "bfloat16", baselines)


def _sequence_case(section: str, name: str, shape: tuple[int, int, int, int], dtype: str, baselines: Baselines) -> Case:
    """Case of `shape`: batch, tokens, heads and their size; all implementations, or for gradients the chunked ones."""
    B, _, H, D = shape
    arrays, state = _inputs(*shape, dtype), np.zeros((B, H, D, D), np.float32)
    if section == "gated":
        tolerance = TOLERANCE.get((jax.default_backend(), dtype), ROUNDED_TOLERANCE)
        ours = lambda flops: jax_side(_rule, state, arrays, flops=flops)
        return _case("gated", name, arrays, state, baselines, ours, _exact(arrays, state), tolerance)
    # Gradients of the outputs.
    given = np.random.default_rng(1).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    ours = lambda flops: replace(jax_side(_gradients, state, arrays, given, flops=flops), dtypes=(dtype,))
    expected, tolerance = _expected_gradients(state, arrays, given), GRADIENT_TOLERANCE[dtype]
    return _case("gradient", name, arrays, state, baselines, ours, expected, tolerance, given)


def decode_case(baselines: Baselines) -> Case:
    """One token of many sequences: reading and writing their states should be all of the time.

    Our state is donated, as an engine's is: each call takes what the call before it left. The others make a new one.
    """
    B, H, D = DECODE
    arrays = _inputs(B, 1, H, D, "float32")
    state = np.random.default_rng(1).standard_normal((B, H, D, D), np.float32)
    ours = lambda flops: jax_side(_rule, arrays, flops=flops, donated=state)
    tolerance = TOLERANCE[jax.default_backend(), "float32"]
    return _case("decode", "Step", arrays, state, baselines, ours, _exact(arrays, state), tolerance)


def _case(
    section: str,
    name: str,
    arrays: Arrays,
    state: np.ndarray,
    baselines: Baselines,
    ours: Callable[[int], Side],
    expected: Sequence[np.ndarray],
    tolerance: float,
    given: np.ndarray | None = None,
) -> Case:
    """Case of all implementations, ours and others', that take the arrays.

    `ours` makes our side of its operations, where the chosen implementation is set. With `given`, gradients of the
    outputs, sides are the chunked implementations, forward and backward.
    """
    B, T, H, D = arrays["q"].shape
    times = 1 if given is None else BACKWARD
    count = lambda C=None, **options: times * gated_rule_flops(B * T, H, D, D, C, **options)
    q, k, v, g, beta = (jnp.asarray(arrays[key], jnp.float32) for key in INPUTS)
    inputs = DeltaInputs(q, k, k, v, beta, g), jnp.asarray(state)
    chunk = CHUNK_SIZES.get(jax.default_backend(), CHUNK_SIZE)
    flops = {"native": count(NATIVE_CHUNK, solved=True), "chunk": count(chunk)}
    sides = {}
    for impl in reversed(delta_recurrence.supporting(*inputs)):
        if given is None or impl.name in flops:
            with ops.use_implementations(delta_recurrence=impl.name):
                sides[f"verax {impl.name}"] = ours(count() if T == 1 else flops.get(impl.name, count()))
    chosen = f"verax {delta_recurrence.select(*inputs).name}"
    chosen = chosen if chosen in sides else list(sides)[-1]
    torch, dtype = baselines.torch, str(arrays["q"].dtype)
    tensor = lambda x, dtype: torch.from_numpy(np.asarray(x, np.float32)).to(baselines.device, dtype)
    tensors = [tensor(x, getattr(torch, dtype)) for x in arrays.values()]
    tensors.append(tensor(state, torch.float32))
    for key, impl in baselines.gated.items():
        chunked = key.endswith("chunk")
        if chunked if given is not None else T > 1 or not chunked:
            run = lambda q, k, v, g, beta, initial, impl=impl: impl(
                q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=True
            )
            options: dict[str, Any] = {"dtypes": (dtype, "float32")}
            if given is not None:
                options = {"dtypes": (dtype,), "gradients": True}
                run = _gradients_in_torch(torch, run, tensor(given, tensors[0].dtype))
            sides[key] = torch_side(torch, run, *tensors, flops=count(BASELINE_CHUNK if chunked else None), **options)
    moved = times * gated_rule_bytes(B * T, B, H, D, D, size=arrays["q"].itemsize)
    sizes = {"batch": B, "tokens": T, "heads": H, "size": D}
    return Case(section, name, moved, chosen, sides, sizes, expected, tolerance)


def _gradients_in_torch(torch: Any, rule: Callable[..., Any], given: Any) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        *inputs, initial = arguments
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(rule(*leaves, initial)[0], leaves, given)

    return run


def _gradients(state: jax.Array, arrays: Arrays, given: jax.Array) -> tuple[jax.Array, ...]:
    forward, pull = jax.vjp(lambda arrays: ops.gated_delta_rule(**arrays, initial_state=state)[0], arrays)
    (gradients,) = pull(given.astype(forward.dtype))
    return tuple(gradients[name] for name in INPUTS)


def _expected_gradients(state: np.ndarray, arrays: Arrays, given: np.ndarray) -> list[np.ndarray]:
    """Gradients of the recurrence token by token, in float32."""
    exact = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    B, T, H, D = given.shape
    size = math.gcd(T, SEGMENT)

    @jax.checkpoint
    def segment(state: jax.Array, arrays: Arrays) -> tuple[jax.Array | None, jax.Array]:
        outputs, state_after = _rule(state, arrays)
        return state_after, outputs

    def outputs(arrays: Arrays) -> jax.Array:
        segmented = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(B, T // size, size, *x.shape[2:]), 1, 0), arrays)
        _, segments = jax.lax.scan(segment, jnp.asarray(state), segmented)
        return jnp.moveaxis(segments, 0, 1).reshape(B, T, H, D)

    with ops.use_implementations(delta_recurrence="reference"), jax.default_matmul_precision("highest"):
        pull = jax.jit(lambda arrays, given: jax.vjp(outputs, arrays)[1](given)[0])
        gradients = pull(exact, given.astype(np.float32))
    return [np.asarray(gradients[name], np.float64) for name in INPUTS]


def _exact(arrays: Arrays, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs `S^T q K^-1/2` and final states in float64, by token: `S <- e^g (I - beta k k^T) S + beta k v^T`."""
    q, k, v, g, beta = (np.asarray(arrays[name], np.float64) for name in INPUTS)
    S, out = state.astype(np.float64), np.empty(v.shape)
    for t in range(q.shape[1]):
        S = S * np.exp(g[:, t])[..., None, None]
        read = (k[:, t, :, None] @ S)[..., 0, :]
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - read))[..., None, :]
        out[:, t] = (q[:, t, :, None] @ S)[..., 0, :] * q.shape[-1] ** -0.5
    return out, S


def _rule(state: jax.Array, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
    return ops.gated_delta_rule(**arrays, initial_state=state, output_final_state=True)


def _inputs(B: int, T: int, H: int, D: int, dtype: str) -> dict[str, np.ndarray]:
    """Keys and queries of length one, gates as in trained models: no side has to normalise or to squash anything."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, H, D), np.float32) for _ in range(3))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    beta, g = rng.uniform(0, 1, (B, T, H)), -np.exp(rng.uniform(np.log(1e-3), np.log(1), (B, T, H)))
    return {name: x.astype(jnp.dtype(dtype)) for name, x in dict(q=q, k=k, v=v, g=g, beta=beta).items()}
