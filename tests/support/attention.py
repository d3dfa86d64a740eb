"""Attention by its definition, in float64, and random paged problems."""

import jax
import jax.numpy as jnp
import numpy as np

from verax.ops.paged import QuantizedPages, quantize_tokens

quantized_tokens = jax.jit(quantize_tokens, static_argnames="dtype")


def float64(x):
    return np.asarray(x).astype(np.float64)


def exact_attention(q, k, v, visible, scale=None, soft_cap=None, sinks=None):
    """`q [T, N, H]` over `k`, `v` `[S, K, H]`, where `visible [T, S]`; 0 where a query sees nothing."""
    q, k, v = map(float64, (q, k, v))
    G = q.shape[1] // k.shape[1]
    scores = np.einsum("tnh,snh->nts", q, np.repeat(k, G, 1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(visible, scores, -np.inf)
    if sinks is not None:
        sinks = np.broadcast_to(float64(sinks)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, sinks], axis=-1)
        v = np.concatenate([v, np.zeros_like(v[:1])])
    weights = np.exp(scores - scores.max(-1, initial=-1e300, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    return np.einsum("nts,snh->tnh", weights / np.where(total > 0, total, 1), np.repeat(v, G, 1))


def paged_problem(
    seed, lengths, counts, *, N, K, H, p, num_pages=None, num_tokens=None, dtype=np.float32, table_width=None
):
    """Random pages in a shuffled order, with large finite values where no sequence should read.

    Problems of equal sizes need one program: of tokens, of pages, in the width of the table, in rows (padding rows
    have length and count 0).
    """
    rng = np.random.default_rng(seed)
    widths = [-(-length // p) for length in lengths]
    W = table_width or max([*widths, 1])
    P = num_pages or 4 + sum(widths)
    k, v = (rng.standard_normal((P, K, p, H)) * 3 for _ in range(2))
    k[0], v[0] = 1e4, -1e4
    order = iter(1 + rng.permutation(P - 1))
    table = np.zeros((len(lengths), W), np.int32)
    for row, width in enumerate(widths):
        table[row, :width] = [next(order) for _ in range(width)]
    T = num_tokens or sum(counts) + 2
    q = rng.standard_normal((T, N, H)) * 2
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    return arrays, jnp.asarray(table), jnp.asarray(lengths, jnp.int32), jnp.asarray(starts)


def without_pages_before_the_window(window, table, lengths, starts, p):
    """A page table that lists page 0 where no query of a sequence sees a key, as after their blocks were freed."""
    counts = np.diff(np.asarray(starts))
    first = np.maximum(np.asarray(lengths) - counts - window + 1, 0) // p
    return np.where(np.arange(table.shape[1]) < first[:, None], 0, np.asarray(table))


def with_nan_in_page_0(pages):
    """Pages whose first one turns what reads it into NaN."""

    def changed(x):
        if x.dtype.itemsize == 1:  # nothing writes NaN into values of quantised pages, their scales may be
            return x
        x = np.array(x)
        x[0] = np.nan
        return x

    return jax.tree.map(changed, pages)


def with_nan_where_no_query_sees(pages, table, lengths, starts, window=None):
    """Pages whose keys or values are NaN but for those that a query of the step sees."""
    table, lengths, counts = (np.asarray(x) for x in (table, lengths, np.diff(starts)))
    P, _, p, _ = pages.shape
    seen = np.zeros((P, p), bool)
    for row, length, count in zip(table, lengths, counts, strict=True):
        at = np.arange(0 if window is None else max(0, length - count - window + 1), length)
        seen[row[at // p], at % p] = True
    pick = {3: seen[:, None], 4: seen[:, None, :, None]}
    return jax.tree.map(lambda x: x if x.dtype == jnp.int8 else jnp.where(pick[x.ndim], x, jnp.nan), pages)


def quantized_problem(*args, cache_dtype="int8", **options):
    """`paged_problem` with int8 or float8 pages, as written by the reference, and the arrays that they stand for."""
    (q, *caches), *rest = paged_problem(*args, **options)
    pages = [QuantizedPages(*quantized_tokens(x, dtype=cache_dtype)) for x in caches]
    return (q, *pages), (q, *map(dequantized, pages)), *rest


def dequantized(pages):
    """Numbers that quantised pages stand for."""
    return np.asarray(pages.values).astype(np.float32) * np.asarray(pages.scales)[..., None]


def exact_paged_attention(arrays, table, lengths, starts, *, scale=None, window=None, soft_cap=None, sinks=None):
    """Expected result of `ops.paged_attention`, in float64."""
    q, *caches = (float64(x) for x in arrays)
    table, lengths, starts = (np.asarray(x) for x in (table, lengths, starts))
    out = np.zeros(q.shape)
    for b, length in enumerate(lengths):
        # [W, K, p, H] to [W p, K, H]
        k, v = (np.swapaxes(x[table[b]], 1, 2).reshape(-1, x.shape[1], x.shape[3])[:length] for x in caches)
        rows = slice(starts[b], starts[b + 1])
        positions = length - starts[b + 1] + np.arange(starts[b], starts[b + 1])
        distance = positions[:, None] - np.arange(length)
        visible = (distance >= 0) & (distance < (window or np.inf))
        out[rows] = exact_attention(q[rows], k, v, visible, scale, soft_cap, sinks)
    return out
