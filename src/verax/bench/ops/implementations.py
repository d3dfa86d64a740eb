"""Which implementation of each operation runs on this machine, at the shapes that a small language model has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from verax import ops
from verax.ops import sampling
from verax.ops.delta import DeltaInputs
from verax.ops.hierarchical import Perceptron, ResonanceFlux

__all__ = ["chosen_implementations"]


def _calls() -> dict[str, list[tuple[str, tuple[Any, ...], dict[str, Any]]]]:
    """(what, arguments) for each operation; arrays are shapes only."""

    def a(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def i(*shape: int) -> Any:
        return a(*shape, dtype=jnp.int32)

    def delta(tokens: int) -> DeltaInputs:
        keys = [a(1, tokens, 16, 128)] * 3
        return DeltaInputs(*keys, v=a(1, tokens, 32, 128), beta=a(1, tokens, 32), g=a(1, tokens, 32))

    cache = a(64, 8, 16, 128, dtype=jnp.bfloat16)
    weight = a(3072, 1024, dtype=jnp.bfloat16)
    heads = a(1, 64, 16, 128), a(1, 64, 8, 128), a(1, 64, 8, 128)
    state = a(1, 32, 128, 128)
    head, gate = a(1, 64, 12, 32), a(1, 64, 12)
    perceptrons = (Perceptron(a(16, size), a(16), a(1, 16), a(1)) for size in (65, 64))
    lam = (head, head, head, gate, (gate, gate), (gate, gate), ResonanceFlux(a(12, 32, 32), a(12), *perceptrons))
    how = sampling.SamplingArrays(a(4), i(4), a(4), a(4))
    return {
        "apply_rotary": [("", (a(4, 16, 128), a(4, 64), a(4, 64)), {})],
        "attention": [("", heads, {})],
        "conv2d": [("", (a(1, 32, 32, 96), a(96, 96, 3, 3)), {"padding": 1})],
        "conv3d": [("", (a(1, 4, 32, 32, 96), a(96, 96, 3, 3, 3)), {"padding": 1})],
        "delta_recurrence": [("1 token", (delta(1), state), {}), ("64 tokens", (delta(64), state), {})],
        "hierarchical_delta_rule": [("", lam, {})],
        "layer_norm": [("", (a(4, 1024), a(1024), a(1024), 1e-6), {})],
        "linear": [("1 row", (a(1, 1024), weight), {}), ("4 rows", (a(4, 1024), weight), {})],
        "multi_linear": [("4 rows", (a(4, 1024), [weight] * 3), {})],
        "local_delta_rule": [("", lam, {})],
        "paged_attention": [("", (a(32, 16, 128), cache, cache, i(4, 8), i(4), i(5)), {})],
        "paged_decode_attention": [("", (a(4, 16, 128), cache, cache, i(4, 8), i(4)), {})],
        "rms_norm": [("", (a(4, 1024), a(1024), 1e-6), {})],
        "sample": [("", (a(4, 151936), how, a(4)), {})],
        "short_convolution": [("", (a(1, 64, 8192), a(8192, 1, 4)), {})],
        "write_pages": [("", (cache, a(4, 8, 128), i(4), i(4)), {})],
    }


def chosen_implementations() -> dict[str, dict[str, Any]]:
    """Chosen implementation of each operation (by case, where it depends on the shape), and the others that exist."""
    calls, result = _calls(), {}
    for name, operation in ops.operations().items():
        chosen = [(case, operation.select(*args, **kwargs).name) for case, args, kwargs in calls[name]]
        shown = ", ".join(f"{impl} ({case})" if case else impl for case, impl in chosen)
        used = {impl for _, impl in chosen}
        result[name] = {
            "runs": shown,
            "others": [impl for impl in operation.implementations if impl not in used],
        }
    return result
