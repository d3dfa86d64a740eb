"""Stand-ins for operations whose work depends on values or on an implementation: they register what each call needs.

A program is traced with them in the place of the operations, and nothing of it ever runs. `work.count` reads them:

- Attention, paged or not: the scores of the keys that a query sees and no others, whatever loop computes them.
- Grouped products: each row by the matrix of its group. Of E matrices a step reads those that some row chose.

All other operations are traced as their references, which are open to the count and multiply what the definition says.
So the delta rules count token by token. Two exceptions multiply in bfloat16 as accelerators do, where the reference
would be counted at the rate of float32: products with quantised weights, and convolutions.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jaxtyping import Array

from verax import ops
from verax.ops.paged import Pages

__all__ = ["REGISTERED", "CallWork", "PagedWork", "Span", "use_stand_ins"]


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence in a step.

    Attributes:
        before: tokens that the cache holds before the step.
        count: tokens of the step.
    """

    before: int
    count: int

    def scores(self, window: int | None) -> int:
        """Pairs of a query of the step and a key that it sees."""
        seen = range(self.before + 1, self.before + self.count + 1)
        return sum(seen) if window is None else sum(min(keys, window) for keys in seen)

    def cached(self, window: int | None) -> int:
        """Tokens of the cache that the step reads."""
        return self.before if window is None else min(self.before, window - 1)


@dataclass(frozen=True)
class PagedWork:
    """Work of attention over a cache, which depends on the lengths of the sequences.

    Attributes:
        flops_per_score: operations for one query and one key, over all heads: a product with the key, and one with the
            value.
        window: keys that a query sees, its own included; None for all.
        tokens: tokens that the cache holds: an operand's bytes over this are those of a token.
        dtype: dtype of the products' operands.
    """

    flops_per_score: int
    window: int | None
    tokens: int
    dtype: str


@dataclass(frozen=True)
class CallWork:
    """Work of a call that depends on shapes only.

    Attributes:
        flops: operations.
        dtype: dtype of the products' operands.
        share: share of the operands behind the first that is read.
    """

    flops: int
    dtype: str
    share: float = 1.0


REGISTERED = Primitive("verax_registered")
"""Call whose work is the parameter `work`. Its first operand is the input; those behind it may lie in memory."""

REGISTERED.def_abstract_eval(lambda *operands, shape, work: ShapedArray(shape, jnp.float32))


def use_stand_ins() -> AbstractContextManager[None]:
    """Trace with stand-ins and references, so that all work of a program can be counted. It acts while tracing."""
    as_chosen = () if ops.target().platform == "cpu" else ("conv2d", "conv3d")
    return ops.use_implementations(
        **{
            **{name: "reference" for name in ops.operations() if name not in as_chosen},
            "linear": _linear,
            "attention": _attention,
            "paged_attention": _paged_attention,
            "paged_decode_attention": _paged_decode_attention,
            "grouped_linear": _grouped_linear,
        }
    )


def _linear(x: Array, weight: Any, bias: Array | None = None) -> Array:
    quantized = isinstance(weight, ops.QuantizedWeight | ops.BlockQuantizedWeight)
    return ops.linear.implementations["dequantized" if quantized else "reference"].function(x, weight, bias)


def _attention(
    q: Array, k: Array, v: Array, *, causal: bool = True, window: int | None = None, **options: Any
) -> Array:
    B, T, N, H = q.shape
    S = k.shape[1]
    if causal:
        scores = Span(S - T, T).scores(window)
    elif window is None:
        scores = T * S
    else:
        scores = sum(min(S, at + window) - max(0, at - window + 1) for at in range(S - T, S))
    return REGISTERED.bind(q, k, v, shape=q.shape, work=CallWork(4 * B * N * H * scores, k.dtype.name))


def _paged_attention(
    q: Array, k_cache: Pages, v_cache: Pages, page_table: Array, kv_lengths: Array, query_starts: Array, **options: Any
) -> Array:
    return _paged_decode_attention(q, k_cache, v_cache, page_table, kv_lengths, **options)


def _paged_decode_attention(
    q: Array, k_cache: Pages, v_cache: Pages, page_table: Array, kv_lengths: Array, **options: Any
) -> Array:
    _, N, H = q.shape
    num_pages, _, size, _ = k_cache.shape
    dtype = "bfloat16" if isinstance(k_cache, ops.QuantizedPages) else k_cache.dtype.name
    work = PagedWork(4 * N * H, options.get("window"), num_pages * size, dtype)
    return REGISTERED.bind(q, *jax.tree.leaves((k_cache, v_cache)), shape=q.shape, work=work)


def _grouped_linear(x: Array, weights: Any, groups: Array) -> Array:
    E, F, D = weights.shape
    leading = jnp.broadcast_shapes(x.shape[:-1], groups.shape)
    rows, chosen = math.prod(leading), groups.shape[-1]  # a token's groups differ from each other
    # The mean over choices in which each group is as likely as the others.
    share = 1 - (1 - chosen / E) ** (rows // chosen)
    dtype = "bfloat16" if isinstance(weights, ops.QuantizedWeight) else weights.dtype.name
    work = CallWork(2 * rows * F * D, dtype, share)
    return REGISTERED.bind(x, *jax.tree.leaves(weights), shape=(*leading, F), work=work)
