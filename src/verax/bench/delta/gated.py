"""The exact gated delta rule in `verax bench delta`: whole sequences, and the decode step against memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from verax import ops
from verax.bench.case import Case
from verax.bench.delta.baselines import Baselines
from verax.bench.delta.case import jax_side, torch_side
from verax.bench.delta.flops import gated_rule_bytes, gated_rule_flops
from verax.ops.delta import DeltaInputs, delta_recurrence
from verax.ops.delta._chunk import CHUNK_SIZE, CHUNK_SIZES

__all__ = [
    "GPU_SHAPE",
    "HEADS",
    "SIZE",
    "chosen_implementation",
    "decode_cases",
    "exact_gated_rule",
    "gated_case",
    "gated_cases",
    "gated_inputs",
    "own_flops",
    "own_implementations",
    "their_implementations",
    "torch_inputs",
]

HEADS, SIZE = 12, 64
"""The report's heads, in the size that earlier measurements of the exact rule took."""

GPU_SHAPE = (4, 4096, 16, 128)
"""Batch, tokens, heads and their size of one case more on a GPU, in bfloat16."""

DECODE = (32, 32, 128)
"""Sequences, heads and their size: Qwen3-Next's, a state of 64 MiB."""

NATIVE_CHUNK = 16
"""Tokens that our CPU kernel takes at a time."""

BASELINE_CHUNK = 64
"""Tokens of the chunks of transformers and flash-linear-attention."""

TOLERANCE = {("cpu", "float32"): 1e-5, ("gpu", "float32"): 5e-3, ("tpu", "float32"): 5e-3}
"""Against float64, by platform and dtype: float32 products are TF32 in Triton, and bfloat16 on a TPU, by default."""

ROUNDED_TOLERANCE = 2e-2
"""The same in bfloat16."""

Arrays = Mapping[str, Any]


def gated_cases(configurations: Mapping[str, tuple[int, int, int]], baselines: Baselines) -> Iterator[Case]:
    """The report's configurations; with a GPU, a long sequence in bfloat16 too."""
    for name, (B, n, C) in configurations.items():
        yield gated_case(name, (B, n * C, HEADS, SIZE), "float32", baselines)
    if baselines.device == "cuda":
        yield gated_case("Long", GPU_SHAPE, "bfloat16", baselines)


def gated_case(name: str, shape: tuple[int, int, int, int], dtype: str, baselines: Baselines | None) -> Case:
    """One batch of sequences.

    Args:
        name: name of the case.
        shape: batch, tokens, heads and their size.
        dtype: dtype of the inputs and of the outputs.
        baselines: sides of others; None for ours alone.
    """
    B, T, H, D = shape
    arrays, state = gated_inputs(*shape, dtype), np.zeros((B, H, D, D), np.float32)
    ours = own_flops(shape)
    sides = {}
    for impl in own_implementations(arrays, state):
        with ops.use_implementations(delta_recurrence=impl):
            sides[f"verax {impl}"] = jax_side(_rule, state, arrays, flops=ours.get(impl, ours["reference"]))
    if baselines is not None:
        tensors = torch_inputs(baselines, arrays, state)
        for impl, run, flops in their_implementations(baselines, shape):
            sides[impl] = torch_side(baselines.torch, run, *tensors, flops=flops, dtypes=(dtype, "float32"))
    return Case(
        "gated",
        name,
        bytes_moved=gated_rule_bytes(B * T, B, H, D, D, size=arrays["q"].itemsize),
        chosen=f"verax {chosen_implementation(arrays, state)}",
        sides=sides,
        sizes={"batch": B, "tokens": T, "heads": H, "size": D},
        expected=exact_gated_rule(arrays, state),
        tolerance=TOLERANCE.get((jax.default_backend(), dtype), ROUNDED_TOLERANCE),
    )


def decode_cases(baselines: Baselines) -> Iterator[Case]:
    """One token of many sequences: their states are read and written, and that is all the time there should be.

    Our state is donated, as an engine's is: each call takes what the call before it left. The others make a new one.
    """
    B, H, D = DECODE
    arrays = gated_inputs(B, 1, H, D, "float32")
    state = np.random.default_rng(1).standard_normal((B, H, D, D), np.float32)
    flops = gated_rule_flops(B, H, D, D)
    sides = {}
    for impl in own_implementations(arrays, state):
        with ops.use_implementations(delta_recurrence=impl):
            sides[f"verax {impl}"] = jax_side(_rule, arrays, flops=flops, donated=state)
    tensors = torch_inputs(baselines, arrays, state)
    for impl, run, done in their_implementations(baselines, (B, 1, H, D)):
        if not impl.endswith("chunk"):
            sides[impl] = torch_side(baselines.torch, run, *tensors, flops=done)
    yield Case(
        "decode",
        "Step",
        bytes_moved=gated_rule_bytes(B, B, H, D, D),
        chosen=f"verax {chosen_implementation(arrays, state)}",
        sides=sides,
        sizes={"batch": B, "tokens": 1, "heads": H, "size": D},
        expected=exact_gated_rule(arrays, state),
        tolerance=TOLERANCE[jax.default_backend(), "float32"],
    )


def exact_gated_rule(arrays: Arrays, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs `S^T q K^-1/2` and final states in float64, by token: `S <- e^g (I - beta k k^T) S + beta k v^T`."""
    q, k, v, g, beta = (np.asarray(arrays[name], np.float64) for name in ("q", "k", "v", "g", "beta"))
    S, out = state.astype(np.float64), np.empty(v.shape)
    for t in range(q.shape[1]):
        S = S * np.exp(g[:, t])[..., None, None]
        found = (k[:, t, :, None] @ S)[..., 0, :]
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - found))[..., None, :]
        out[:, t] = (q[:, t, :, None] @ S)[..., 0, :] * q.shape[-1] ** -0.5
    return out, S


def _rule(state: jax.Array, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
    return ops.gated_delta_rule(**arrays, initial_state=state, output_final_state=True)


def own_implementations(arrays: Arrays, state: np.ndarray) -> list[str]:
    """Every implementation of ours that takes the call here."""
    supporting = delta_recurrence.supporting(_delta_inputs(arrays), jnp.asarray(state))
    return [impl.name for impl in reversed(supporting)]


def chosen_implementation(arrays: Arrays, state: np.ndarray) -> str:
    """Implementation of ours that the call runs here."""
    return delta_recurrence.select(_delta_inputs(arrays), jnp.asarray(state)).name


def _delta_inputs(arrays: Arrays) -> DeltaInputs:
    q, k, v, g, beta = (jnp.asarray(arrays[name], jnp.float32) for name in ("q", "k", "v", "g", "beta"))
    return DeltaInputs(q, k, k, v, beta, g)


def own_flops(shape: tuple[int, int, int, int]) -> dict[str, int]:
    """Operations of our implementations by name; those of `"reference"` are also those of all others."""
    B, T, H, D = shape
    chunk = CHUNK_SIZES.get(jax.default_backend(), CHUNK_SIZE)
    return {
        "native": gated_rule_flops(B * T, H, D, D, NATIVE_CHUNK, solved=True),
        "chunk": gated_rule_flops(B * T, H, D, D, chunk),
        "reference": gated_rule_flops(B * T, H, D, D),
    }


def their_implementations(
    baselines: Baselines, shape: tuple[int, int, int, int]
) -> Iterator[tuple[str, Callable[..., Any], int]]:
    """Name, implementation of one call, and its operations. Names of those that go by chunks end with `chunk`."""
    B, T, H, D = shape
    label = "fla" if baselines.device == "cuda" else "fla naive"
    implementations = {f"transformers {name}": impl for name, impl in baselines.transformers.items()}
    for name, impl in (implementations | {f"{label} {name}": impl for name, impl in baselines.fla.items()}).items():
        chunk = BASELINE_CHUNK if name.endswith("chunk") else None
        yield name, _call(impl), gated_rule_flops(B * T, H, D, D, chunk)


def _call(impl: Callable[..., Any]) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
        return impl(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)

    return run


def gated_inputs(B: int, T: int, H: int, D: int, dtype: str) -> dict[str, np.ndarray]:
    """Keys and queries of length one, gates as in trained models: no side has to normalise or to squash anything."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, H, D), np.float32) for _ in range(3))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    beta, g = rng.uniform(0, 1, (B, T, H)), -np.exp(rng.uniform(np.log(1e-3), np.log(1), (B, T, H)))
    return {name: x.astype(jnp.dtype(dtype)) for name, x in dict(q=q, k=k, v=v, g=g, beta=beta).items()}


def torch_inputs(baselines: Baselines, arrays: Arrays, state: np.ndarray) -> list[Any]:
    """q, k, v, g, beta and the state as tensors on the baselines' device."""
    dtype = getattr(baselines.torch, str(arrays["q"].dtype))
    tensors = [
        baselines.torch.from_numpy(np.asarray(x, np.float32)).to(baselines.device, dtype) for x in arrays.values()
    ]
    return [*tensors, baselines.torch.from_numpy(state).to(baselines.device)]
