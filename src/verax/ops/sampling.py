"""From scores over the vocabulary to a token: penalties, truncation, one draw. No sort, no V random numbers.

Truncation (top-k, top-p, min-p) is a threshold on the score. It is found by bisection over the bits of float32, which
is exact after 31 passes, and the token is drawn by inverting the cumulative distribution at one uniform number. The
order is vLLM's: penalties and bias, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from verax.ops._dispatch import operation
from verax.ops._example import Example, float32, int32

__all__ = ["SamplingArrays", "penalize", "sample", "token_logprobs", "uniform"]


class SamplingArrays(NamedTuple):
    """Sampling parameters of a batch. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]


def uniform(seed: UInt[Array, "B 2"], position: Int[Array, "B"]) -> Float[Array, "B"]:
    """One number in [0, 1) for each row, a function of its seed (two 32-bit words) and position alone."""

    def one(words: UInt[Array, "2"], at: Int[Array, ""]) -> Float[Array, ""]:
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), at)
        return jax.random.uniform(key)

    return jax.vmap(one)(seed, position)


def penalize(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B L"],
    num_prompt: Int[Array, "B"],
    num_tokens: Int[Array, "B"],
    *,
    presence: Float[Array, "B"],
    frequency: Float[Array, "B"],
    repetition: Float[Array, "B"],
) -> Float[Array, "B V"]:
    """Presence and frequency penalties on what was generated, repetition penalty on that and the prompt.

    `tokens[b, :num_tokens[b]]` is the row's text so far, of which `num_prompt[b]` tokens are the prompt. Repetition
    divides positive scores and multiplies negative ones (Keskar et al., 2019, arXiv:1909.05858).
    """
    B, V = logits.shape
    at = jnp.arange(tokens.shape[1])[None]
    rows = jnp.broadcast_to(jnp.arange(B)[:, None], tokens.shape)
    written, generated = at < num_tokens[:, None], (at >= num_prompt[:, None]) & (at < num_tokens[:, None])
    seen = jnp.zeros((B, V), jnp.float32).at[rows, tokens].max(written.astype(jnp.float32), mode="drop")
    counts = jnp.zeros((B, V), jnp.float32).at[rows, tokens].add(generated.astype(jnp.float32), mode="drop")
    factor = jnp.where(seen > 0, repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


@operation
def sample(logits: Float[Array, "B V"], params: SamplingArrays, u: Float[Array, "B"]) -> Int[Array, "B"]:
    """Draw one token a row with the uniform number `u` in [0, 1). Ties at a truncation threshold are all kept.

    This implementation sorts; it is the oracle of the one that runs.
    """
    greedy = jnp.argmax(logits, axis=-1)
    scores = logits / jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    V = scores.shape[-1]
    scores = jnp.where(_min_p_keeps(scores, params.min_p), scores, -jnp.inf)
    descending = -jnp.sort(-scores, axis=-1)
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, V), V)
    scores = jnp.where(scores >= jnp.take_along_axis(descending, k[:, None] - 1, axis=-1), scores, -jnp.inf)
    descending = -jnp.sort(-scores, axis=-1)
    weights = jnp.exp(descending - descending[:, :1])
    enough = jnp.cumsum(weights, axis=-1) >= params.top_p[:, None] * weights.sum(-1, keepdims=True)
    last = jnp.argmax(enough.at[:, -1].set(True), axis=-1)
    threshold = jnp.take_along_axis(descending, last[:, None], axis=-1)
    scores = jnp.where((scores >= threshold) | (params.top_p >= 1)[:, None], scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    cumulative = jnp.cumsum(weights, axis=-1)
    drawn = jnp.sum(cumulative <= u[:, None] * cumulative[:, -1:], axis=-1)
    return jnp.where(params.temperature > 0, jnp.minimum(drawn, _last_positive(weights)), greedy).astype(jnp.int32)


@sample.example
def _examples() -> list[Example]:
    return [Example((float32(4, 151936), SamplingArrays(float32(4), int32(4), float32(4), float32(4)), float32(4)))]


@sample.implementation("bisect")
def _sample_bisect(logits: Float[Array, "B V"], params: SamplingArrays, u: Float[Array, "B"]) -> Int[Array, "B"]:
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Int[Array, "B"]:
        scores = logits / jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]
        scores = scores - scores.max(-1, keepdims=True)
        truncated = (params.min_p > 0) | (params.top_k > 0) | (params.top_p < 1)
        scores = lax.cond(jnp.any(truncated), lambda: _truncate(scores, params), lambda: scores)
        return jnp.where(params.temperature > 0, _invert_cdf(jnp.exp(scores), u), greedy)

    return lax.cond(jnp.any(params.temperature > 0), draw, lambda: greedy)


def _min_p_keeps(scores: Float[Array, "B V"], min_p: Float[Array, "B"]) -> Bool[Array, "B V"]:
    """Mask of the tokens whose probability is at least `min_p` times the largest."""
    floor = scores.max(-1) + jnp.log(jnp.maximum(min_p, jnp.finfo(jnp.float32).tiny))
    return (scores >= floor[:, None]) | (min_p <= 0)[:, None]


def _truncate(scores: Float[Array, "B V"], params: SamplingArrays) -> Float[Array, "B V"]:
    """Scores (maximum 0) with what min-p, then top-k, then top-p cut set to minus infinity."""
    V = scores.shape[-1]
    scores = jnp.where(_min_p_keeps(scores, params.min_p), scores, -jnp.inf)
    limits_k = (params.top_k > 0) & (params.top_k < V)

    def top_k() -> Float[Array, "B V"]:
        threshold = _largest_threshold(
            scores, lambda kept: jnp.sum(kept, axis=-1) >= jnp.where(limits_k, params.top_k, V)
        )
        return jnp.where(scores >= threshold[:, None], scores, -jnp.inf)

    scores = lax.cond(jnp.any(limits_k), top_k, lambda: scores)

    def top_p() -> Float[Array, "B V"]:
        weights = jnp.exp(scores)
        needed = params.top_p * weights.sum(-1)
        threshold = _largest_threshold(scores, lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=-1) >= needed)
        return jnp.where((scores >= threshold[:, None]) | (params.top_p >= 1)[:, None], scores, -jnp.inf)

    return lax.cond(jnp.any(params.top_p < 1), top_p, lambda: scores)


def _largest_threshold(
    scores: Float[Array, "B V"], enough: Callable[[Bool[Array, "B V"]], Bool[Array, "B"]]
) -> Float[Array, "B"]:
    """Largest float32 t such that `scores >= t` is `enough`; minus infinity where even everything is not.

    Non-positive scores only: their bit patterns, read as integers, fall as the score rises, so t is found bit by bit.
    """

    def body(i: Int[Array, ""], bits: UInt[Array, "B"]) -> UInt[Array, "B"]:
        # The largest pattern that is *not* enough, built from the top bit; the answer is its successor.
        trial = bits | (jnp.uint32(1) << (30 - i).astype(jnp.uint32))
        threshold = -lax.bitcast_convert_type(trial - 1, jnp.float32)
        return jnp.where(enough(scores >= threshold[:, None]), bits, trial)

    bits = lax.fori_loop(0, 31, body, jnp.zeros(scores.shape[:1], jnp.uint32))
    infinity = jnp.uint32(0x7F800000)
    return -lax.bitcast_convert_type(jnp.minimum(bits, infinity), jnp.float32)


CDF_CHUNK = 512
"""Tokens of a chunk of the cumulative sum, which goes over chunks and then within one: about the root of 150,000."""


def _invert_cdf(weights: Float[Array, "B V"], u: Float[Array, "B"]) -> Int[Array, "B"]:
    """First token whose cumulative weight exceeds `u` times the total; never one of weight 0."""
    B, V = weights.shape
    size = min(CDF_CHUNK, V)
    chunks = jnp.pad(weights, ((0, 0), (0, -V % size))).reshape(B, -1, size)
    sums = chunks.sum(-1)
    cumulative = jnp.cumsum(sums, axis=-1)
    target = u * cumulative[:, -1]
    chosen = jnp.minimum(jnp.sum(cumulative <= target[:, None], axis=-1), _last_positive(sums))
    before = jnp.take_along_axis(cumulative - sums, chosen[:, None], axis=-1)
    inside = jnp.take_along_axis(chunks, chosen[:, None, None], axis=1)[:, 0]
    offset = jnp.sum(jnp.cumsum(inside, axis=-1) <= target[:, None] - before, axis=-1)
    return (chosen * size + jnp.minimum(offset, _last_positive(inside))).astype(jnp.int32)


def _last_positive(weights: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Index of the last weight above 0: rounding may push a draw past the end, and it must land on a possible token."""
    return weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)


def token_logprobs(
    logits: Float[Array, "B V"], chosen: Int[Array, "B"], num_top: int
) -> tuple[Float[Array, "B n"], Int[Array, "B n"], Int[Array, "B"]]:
    """Log-probabilities of the chosen token and of the `num_top` best, their ids, and the chosen token's rank from 1.

    The chosen token comes first in each row.
    """
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
    best, ids = lax.top_k(logits, num_top)
    rank = 1 + jnp.sum(logits > own, axis=-1)
    return (
        jnp.concatenate([own, best], axis=-1) - normalizer,
        jnp.concatenate([chosen[:, None], ids], axis=-1).astype(jnp.int32),
        rank.astype(jnp.int32),
    )
