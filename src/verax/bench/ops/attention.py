"""Attention and sampling: whole sequences, the paged decode step, prompt chunks, writes to the cache, draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from verax import ops
from verax._compat import compiler_options
from verax.bench.harness import Case, implementations, operation_case, random, torch_tensor
from verax.ops.paged import QuantizedPages, page_bytes, quantize_tokens
from verax.ops.sampling import FLOATS, INTS, SamplingArrays, sample

__all__ = ["attention_cases", "paged_decode_case", "ragged_case", "sampling_case", "whole_sequence_case"]

PLAIN_LIMIT = 2**29
"""Scores that the reference may hold; it is left out of longer cases."""

PAGE = 16
"""Tokens of a page: the engine's block size."""


def attention_cases(torch: Any = None) -> Iterator[Case]:
    """Cases one by one, so that a case's arrays are freed before the next one's are made; with torch's side if given.

    Heads are Wan 1.3B's for whole sequences (12 of 128), Qwen3-0.6B's for the cache (16 over 8, of 128).
    """
    for dtype, length in (("bfloat16", 2048), ("float32", 2048), ("bfloat16", 8192)):
        yield whole_sequence_case(length, torch, dtype=dtype)
    for rows, length in ((4, 150), (4, 2048), (1, 8192), (16, 1024)):
        yield paged_decode_case(rows, length, torch)
    for rows, length in ((4, 2048), (1, 8192)):
        yield paged_decode_case(rows, length, cache_dtype="int8")
    for cached, tokens in ((0, 512), (3584, 512)):
        yield ragged_case([cached + tokens], [tokens])
    for tokens in (4, 512):
        yield _write(tokens)


def whole_sequence_case(
    length: int,
    torch: Any = None,
    *,
    dtype: str = "bfloat16",
    heads: int = 12,
    kv_heads: int | None = None,
    size: int = 128,
    window: int | None = None,
) -> Case:
    """Attention over a whole sequence: of all keys, or of a window before each query, which torch does not have."""
    kv_heads = heads if kv_heads is None else kv_heads
    q, k, v = (random((1, length, n, size), dtype, seed) for seed, n in enumerate((heads, kv_heads, kv_heads)))
    options = {"causal": window is not None, "window": window}
    sides = implementations(ops.attention, q, k, v, **options)
    if heads * length**2 > PLAIN_LIMIT:
        sides.pop("reference", None)
    if torch is not None and window is None:
        sides["torch"] = _torch_attention(torch, *(jnp.swapaxes(x, 1, 2) for x in (q, k, v)))
    over = "" if kv_heads == heads else f" over {kv_heads}"
    products = length**2 if window is None else int(np.minimum(np.arange(1, length + 1), window).sum())
    return operation_case(
        "attention",
        f"{dtype}, {length} tokens, {heads} heads{over} of {size}{'' if window is None else f', window {window}'}",
        dtype,
        q.nbytes + k.nbytes + v.nbytes + 4 * q.size,
        4 * heads * products * size,
        ops.attention.select(q, k, v, **options).name,
        sides,
    )


def paged_decode_case(
    rows: int,
    length: int,
    torch: Any = None,
    *,
    cache_dtype: str = "bfloat16",
    heads: int = 16,
    kv_heads: int = 8,
    size: int = 128,
) -> Case:
    """The paged decode step of `rows` sequences with `length` cached tokens each; with torch's side if it is given."""
    caches, table = _cache(rows, length, kv_heads, size)
    if cache_dtype == "int8":
        caches = QuantizedPages(*quantize_tokens(caches[0])), QuantizedPages(*quantize_tokens(caches[1]))
    q = random((rows, heads, size), "float32", 2)
    arguments = q, *caches, table, jnp.full(rows, length, jnp.int32)
    sides = implementations(ops.paged_decode_attention, *arguments)
    if rows * heads * length > PLAIN_LIMIT // 1024:
        sides.pop("reference", None)
    if torch is not None:  # over keys that lie together: it has no pages
        dense = (random((rows, kv_heads, length, size), "bfloat16", seed) for seed in (3, 4))
        sides["torch"] = _torch_attention(torch, q[:, :, None].astype(jnp.bfloat16), *dense, enable_gqa=True)
    keys = rows * length * size
    return operation_case(
        "paged_decode_attention",
        f"{cache_dtype}, {rows} rows, {length} cached, {heads} heads over {kv_heads} of {size}",
        "bfloat16",
        2 * rows * length * page_bytes((kv_heads, 1, size), cache_dtype) + 2 * q.nbytes,
        4 * heads * keys,
        ops.paged_decode_attention.select(*arguments).name,
        sides,
    )


def ragged_case(
    lengths: Sequence[int], counts: Sequence[int], *, heads: int = 16, kv_heads: int = 8, size: int = 128
) -> Case:
    """A mixed step: each sequence's cached tokens, the step's included (`lengths`), and its tokens in the step."""
    caches, table = _cache(len(lengths), max(lengths), kv_heads, size)
    tokens = sum(counts)
    q = random((tokens, heads, size), "float32", 2)
    starts = np.concatenate([[0], np.cumsum(counts)])
    arguments = q, *caches, table, *(jnp.asarray(x, jnp.int32) for x in (lengths, starts))
    sides = implementations(ops.paged_attention, *arguments)
    sides.pop("reference", None)  # holds the keys once for each token
    products = sum(
        count * (length - count) + count * (count + 1) // 2 for length, count in zip(lengths, counts, strict=True)
    )
    prompt = f"{counts[-1]} tokens after {lengths[-1] - counts[-1]}"
    decodes = f" next to {len(lengths) - 1} of {lengths[0]} cached" if len(lengths) > 1 else ""
    return operation_case(
        "paged_attention",
        f"bfloat16, {prompt}{decodes}, {heads} heads over {kv_heads} of {size}",
        "bfloat16",
        2 * 2 * kv_heads * sum(lengths) * size + 2 * q.nbytes,
        4 * heads * size * products,
        ops.paged_attention.select(*arguments).name,
        sides,
    )


def _write(tokens: int, *, kv_heads: int = 8, size: int = 128) -> Case:
    """Writes to a cache that is donated and comes back, as in the engine's step."""
    (cache, _), _ = _cache(1, 32768, kv_heads, size)
    x = random((tokens, kv_heads, size), "float32", 2)
    places = jnp.asarray(np.random.default_rng(5).permutation(32768)[:tokens], jnp.int32)
    arguments = x, places // PAGE, places % PAGE
    sides = {}
    for name, impl in ops.write_pages.implementations.items():
        if impl.supports(cache, *arguments):
            run: Any = jax.jit(
                impl.function, donate_argnums=0, compiler_options=compiler_options(ops.target().platform)
            )
            held = [jnp.copy(cache)]

            def write(run: Any = run, held: list[jax.Array] = held) -> None:
                held[0] = jax.block_until_ready(run(held[0], *arguments))

            sides[name] = write
    return operation_case(
        "write_pages",
        f"bfloat16, {tokens} tokens, {kv_heads} heads of {size}",
        "bfloat16",
        6 * x.size,
        0,
        ops.write_pages.select(cache, *arguments).name,
        sides,
    )


def _cache(rows: int, length: int, kv_heads: int, size: int) -> tuple[tuple[Any, Any], jax.Array]:
    """Pages of keys and values in a shuffled order, and the table that lists them."""
    width = math.ceil(length / PAGE)
    k, v = (random((1 + rows * width, kv_heads, PAGE, size), "bfloat16", seed) for seed in range(2))
    order = 1 + np.random.default_rng(2).permutation(rows * width)
    return (k, v), jnp.asarray(order.reshape(rows, width), jnp.int32)


def _torch_attention(torch: Any, *arrays: jax.Array, **options: Any) -> Callable[[], object]:
    """torch's `scaled_dot_product_attention` on `[B, N, T, H]`."""
    tensors = [torch_tensor(torch, x, str(arrays[-1].dtype)) for x in arrays]
    return lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


SPREAD = 3.0
"""Standard deviation of the scores: a share of 0.95 of the weight is then on some thousands of 151,936 tokens."""

OFF = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0}
"""Parameters that are not off at 0."""


def sampling_case(rows: int, *, vocab: int = 151936, top_k: int = 0, top_p: float = 1.0) -> Case:
    """A draw for each of `rows` sequences, with top-k and top-p unless they are off; the vocabulary is Qwen3's."""
    given = {**OFF, "top_p": top_p, "top_k": top_k}
    floats, ints = (np.tile([given.get(name, 0) for name in names], (rows, 1)) for names in (FLOATS, INTS))
    none = jnp.full((rows, 1), vocab, jnp.int32)
    bias = jnp.zeros((rows, 1), jnp.float32)
    params = SamplingArrays(jnp.asarray(floats, jnp.float32), jnp.asarray(ints, jnp.int32), none, bias, none)
    at = jnp.arange(rows, dtype=jnp.int32)
    logits = SPREAD * random((rows, vocab), "float32", 0)
    arguments = logits, jnp.zeros((rows, 1), jnp.int32), at, at, params
    limits = [f"top-{name} {value}" for name, value, off in (("k", top_k, 0), ("p", top_p, 1)) if value != off]
    return operation_case(
        "sample",
        ", ".join([f"{rows} rows of {vocab}", *limits]),
        "float32",
        logits.nbytes,
        0,
        sample.select(*arguments).name,
        implementations(sample, *arguments),
    )
