"""From scores over the vocabulary to a token: penalties, truncation, one draw. No sort, no V random numbers.

Truncation (top-k, top-p, min-p) is a threshold on the score. It is found by bisection over the bits of float32, which
is exact after 31 passes, and the token is drawn by inverting the cumulative distribution at one uniform number. The
order is vLLM's: penalties and bias, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from verax.ops._dispatch import Example, boolean, float32, int32, operation
from verax.sampling_fields import FLOATS, INTS, OFF


class SamplingArrays(NamedTuple):
    """Sampling parameters of each slot. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    floats: Float[Array, "S f"]
    """Columns `sampling_fields.FLOATS`."""
    ints: Int[Array, "S i"]
    """Columns `sampling_fields.INTS`."""
    bias_ids: Int[Array, "S b"]
    """Tokens of the bias; ids outside the vocabulary are ignored."""
    bias_values: Float[Array, "S b"]
    banned: Int[Array, "S e"]
    """Tokens that are not sampled before `min_length`; ids outside the vocabulary are ignored."""

    def float(self, name: str) -> Float[Array, "S"]:
        """One float parameter by name."""
        return self.floats[:, FLOATS.index(name)]

    def int(self, name: str) -> Int[Array, "S"]:
        """One integer parameter by name."""
        return self.ints[:, INTS.index(name)]

    def rows(self, slots: Int[Array, "B"]) -> SamplingArrays:
        """The parameters of a batch's slots."""
        return SamplingArrays(*(field[slots] for field in self))


def uniform(seed: UInt[Array, "B 2"], position: Int[Array, "B"]) -> Float[Array, "B"]:
    """One number in [0, 1) for each row, a function of its seed (two 32-bit words) and position alone."""

    def one(words: UInt[Array, "2"], at: Int[Array, ""]) -> Float[Array, ""]:
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), at)
        return jax.random.uniform(key, dtype=jnp.float32)

    return jax.vmap(one)(seed, position)


def penalize(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B L"],
    num_prompt: Int[Array, "B"],
    num_tokens: Int[Array, "B"],
    *,
    presence_penalty: Float[Array, "B"],
    frequency_penalty: Float[Array, "B"],
    repetition_penalty: Float[Array, "B"],
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
    factor = jnp.where(seen > 0, repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency_penalty[:, None] * counts - presence_penalty[:, None] * (counts > 0)


def adjust(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B L"],
    lengths: Int[Array, "B"],
    params: SamplingArrays,
    mask: Int[Array, "B w"] | None = None,
) -> Float[Array, "B V"]:
    """Scores with penalties and bias; minus infinity where a token is held back or a grammar forbids it.

    The arguments are as in `sample`, but with a row of each for each row of the batch.
    """
    penalties = {name: params.float(name) for name in _PENALTIES}
    penalized = lax.cond(
        jnp.any(_is_penalized(params)),
        lambda: penalize(logits, tokens, params.int("num_prompt"), lengths, **penalties),
        lambda: logits,
    )
    rows = jnp.arange(logits.shape[0])[:, None]
    biased = penalized.at[rows, params.bias_ids].add(params.bias_values, mode="drop", wrap_negative_indices=False)
    early = lengths < params.int("min_length")
    bans = jnp.where(early, -jnp.inf, 0.0)[:, None]
    held = biased.at[rows, params.banned].add(bans, mode="drop", wrap_negative_indices=False)
    if mask is None:
        return held
    # Where a grammar allows nothing but the end, `min_tokens` gives way.
    possible = jnp.any(_allowed(mask, logits.shape[1]) & (held > -jnp.inf), axis=-1, keepdims=True)
    return _masked(jnp.where(possible, held, biased), mask)


_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def _is_penalized(params: SamplingArrays) -> Bool[Array, "B"]:
    return jnp.any(jnp.stack([params.float(name) != OFF[name] for name in _PENALTIES]), axis=0)


def _is_adjusted(params: SamplingArrays, lengths: Int[Array, "B"]) -> Bool[Array, "B"]:
    """True for rows in which `adjust` does more than a grammar's mask does."""
    return _is_penalized(params) | (params.int("num_bias") > 0) | (lengths < params.int("min_length"))


def _masked(logits: Float[Array, "B V"], mask: Int[Array, "B w"] | None) -> Float[Array, "B V"]:
    """Scores, minus infinity where a grammar forbids a token."""
    return logits if mask is None else jnp.where(_allowed(mask, logits.shape[1]), logits, -jnp.inf)


def _allowed(mask: Int[Array, "B w"], vocab_size: int) -> Bool[Array, "B V"]:
    """True for each token whose bit is set: bit j of word i is for token 32 i + j."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size] != 0


@operation
def sample(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "S L"],
    slots: Int[Array, "B"],
    lengths: Int[Array, "B"],
    params: SamplingArrays,
    mask: Int[Array, "B w"] | None = None,
) -> Int[Array, "B"]:
    """Draw one token a row. Ties at a truncation threshold are all kept.

    This implementation sorts; it is the oracle of the one that runs.

    `lengths`: tokens of each row so far, which with its seed decide the draw. `mask`: a bit for each token that a
    grammar allows; all ones in rows without one.
    """
    rows = params.rows(slots)
    return _draw_sorted(adjust(logits, tokens[slots], lengths, rows, mask), rows, _uniform(rows, lengths))


sample.examples = [
    Example(
        (
            *(float32(4, 151936), int32(5, 512), int32(4), int32(4)),
            SamplingArrays(float32(5, len(FLOATS)), int32(5, len(INTS)), int32(5, 300), float32(5, 300), int32(5, 80)),
        )
    )
]


@sample.implementation("bisect")
def _sample_bisect(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "S L"],
    slots: Int[Array, "B"],
    lengths: Int[Array, "B"],
    params: SamplingArrays,
    mask: Int[Array, "B w"] | None = None,
) -> Int[Array, "B"]:
    rows = params.rows(slots)
    u = _uniform(rows, lengths)
    # Both branches end in a token. If the choice gave scores, XLA would copy them where nothing is adjusted.
    return lax.cond(
        jnp.any(_is_adjusted(rows, lengths)),
        lambda: _draw(adjust(logits, tokens[slots], lengths, rows, mask), rows, u),
        lambda: _draw(_masked(logits, mask), rows, u),
    )


def _uniform(params: SamplingArrays, lengths: Int[Array, "B"]) -> Float[Array, "B"]:
    seed = jnp.stack([params.int("seed_high"), params.int("seed_low")], axis=1)
    return uniform(lax.bitcast_convert_type(seed, jnp.uint32), lengths)


def _draw_sorted(logits: Float[Array, "B V"], params: SamplingArrays, u: Float[Array, "B"]) -> Int[Array, "B"]:
    greedy = jnp.argmax(logits, axis=-1)
    temperature, top_p, top_k = params.float("temperature"), params.float("top_p"), params.int("top_k")
    scores = _scores(logits, temperature)
    V = scores.shape[-1]
    scores = _cut(scores, _min_p_threshold(params.float("min_p")))
    descending = -jnp.sort(-scores, axis=-1)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    scores = jnp.where(scores >= jnp.take_along_axis(descending, k[:, None] - 1, axis=-1), scores, -jnp.inf)
    descending = -jnp.sort(-scores, axis=-1)
    weights = jnp.exp(descending)
    enough = jnp.cumsum(weights, axis=-1) >= top_p[:, None] * weights.sum(-1, keepdims=True)
    last = jnp.argmax(enough.at[:, -1].set(True), axis=-1)
    threshold = jnp.take_along_axis(descending, last[:, None], axis=-1)
    scores = jnp.where((scores >= threshold) | (top_p >= 1)[:, None], scores, -jnp.inf)
    weights = jnp.exp(scores)
    cumulative = jnp.cumsum(weights, axis=-1)
    drawn = jnp.sum(cumulative <= u[:, None] * cumulative[:, -1:], axis=-1)
    return jnp.where(temperature > 0, jnp.minimum(drawn, _last_positive(weights)), greedy).astype(jnp.int32)


def _draw(logits: Float[Array, "B V"], params: SamplingArrays, u: Float[Array, "B"]) -> Int[Array, "B"]:
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    temperature = params.float("temperature")

    def draw() -> Int[Array, "B"]:
        scores = _scores(logits, temperature)
        truncated = (params.float("min_p") > 0) | (params.int("top_k") > 0) | (params.float("top_p") < 1)
        drawn = lax.cond(
            jnp.any(truncated),
            lambda: _invert_cdf(jnp.exp(_cut(scores, _threshold(scores, params))), u),
            lambda: _invert_cdf(jnp.exp(scores), u),
        )
        return jnp.where(temperature > 0, drawn, greedy)

    return lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)


def _scores(logits: Float[Array, "B V"], temperature: Float[Array, "B"]) -> Float[Array, "B V"]:
    """Logits divided by the temperature, or by 1 where it is 0; the largest score is 0."""
    # Not a difference of quotients, of which XLA rounds one and fuses the other: at a temperature of 1e-9, the largest
    # score would be hundreds.
    return (logits - logits.max(-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1.0)[:, None]


def _cut(scores: Float[Array, "B V"], threshold: Float[Array, "B"]) -> Float[Array, "B V"]:
    """Scores, minus infinity below the row's threshold."""
    return jnp.where(scores < threshold[:, None], -jnp.inf, scores)


def _min_p_threshold(min_p: Float[Array, "B"]) -> Float[Array, "B"]:
    """Score whose probability is `min_p` times the largest probability; minus infinity where `min_p` is 0."""
    return jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, jnp.finfo(jnp.float32).tiny)), -jnp.inf)


def _threshold(scores: Float[Array, "B V"], params: SamplingArrays) -> Float[Array, "B"]:
    """Least of the scores (maximum 0) that min-p, then top-k, then top-p keep."""
    top_k, top_p = params.int("top_k"), params.float("top_p")
    limits_k, limits_p = (top_k > 0) & (top_k < scores.shape[-1]), top_p < 1
    least = _min_p_threshold(params.float("min_p"))
    for limits, wanted, weighted in ((limits_k, top_k.astype(jnp.float32), False), (limits_p, top_p, True)):
        threshold = partial(_bisect, scores, least, jnp.where(limits, wanted, jnp.inf), weighted=weighted)
        # A choice of scores would copy them.
        searched = lax.cond(jnp.any(limits), threshold, lambda: jnp.full(top_p.shape, -jnp.inf, jnp.float32))
        least = jnp.maximum(least, searched)
    return least


def _bisect(
    scores: Float[Array, "B V"], least: Float[Array, "B"], wanted: Float[Array, "B"], *, weighted: bool
) -> Float[Array, "B"]:
    """Largest threshold whose row keeps enough, [B]; minus infinity where even all scores are not enough.

    Args:
        scores: scores of each row, of which the largest is 0.
        least: score below which nothing is kept, and nothing counts.
        wanted: tokens that are enough; if `weighted`, their share of the weight. Infinity keeps everything.
        weighted: tokens count with the exponential of their scores.
    """
    kept = _cut(scores, least)
    if not weighted:
        return _largest_threshold(kept, lambda above: jnp.sum(above, axis=-1) >= wanted)
    weights = jnp.exp(kept)
    needed = wanted * weights.sum(-1)
    return _largest_threshold(kept, lambda above: jnp.sum(jnp.where(above, weights, 0.0), axis=-1) >= needed)


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


@operation
def token_logprobs(
    logits: Float[Array, "B V"], chosen: Int[Array, "B"], wanted: Bool[Array, "B"], *, num_top: int
) -> tuple[Float[Array, "B n"], Int[Array, "B n"], Int[Array, "B"]]:
    """Log-probabilities of the chosen token and of the `num_top` best, their ids, and the chosen token's rank from 1.

    The chosen token comes first in each row. Rows that are not `wanted` are zeros.
    """
    return _logprobs(logits, chosen, wanted, num_top, lax.top_k)


token_logprobs.examples = [Example((float32(4, 151936), int32(4), boolean(4)), {"num_top": 20})]


def _logprobs(
    logits: Array, chosen: Array, wanted: Array, num_top: int, best_of: Callable[[Array, int], Sequence[Array]]
) -> tuple[Array, Array, Array]:
    """Results of `token_logprobs`, with a function to the best logits of each row and their places."""

    def scored() -> tuple[Array, Array, Array]:
        normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        own = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
        best, ids = best_of(logits, num_top)
        rank = 1 + jnp.sum(logits > own, axis=-1)
        values = jnp.concatenate([own, best], axis=-1) - normalizer
        ids = jnp.concatenate([chosen[:, None], ids], axis=-1).astype(jnp.int32)
        return (
            jnp.where(wanted[:, None], values, 0.0),
            jnp.where(wanted[:, None], ids, 0),
            jnp.where(wanted, rank, 0).astype(jnp.int32),
        )

    def zeros() -> tuple[Array, Array, Array]:
        shape = (logits.shape[0], 1 + num_top)
        return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape[:1], jnp.int32)

    return lax.cond(jnp.any(wanted), scored, zeros)


@token_logprobs.implementation("passes", platforms=("gpu",))
def _token_logprobs_by_passes(
    logits: Float[Array, "B V"], chosen: Int[Array, "B"], wanted: Bool[Array, "B"], *, num_top: int
) -> tuple[Float[Array, "B n"], Int[Array, "B n"], Int[Array, "B"]]:
    """A pass over the logits for each of the best. XLA:GPU sorts them for `top_k`, and CUDA's graphs do not hold its
    sort: the host would wait in each step until the device has chosen whether log-probabilities are wanted."""
    return _logprobs(logits, chosen, wanted, num_top, _best_by_passes)


def _best_by_passes(logits: Float[Array, "B V"], num_top: int) -> tuple[Float[Array, "B n"], Int[Array, "B n"]]:
    places, turns = jnp.arange(logits.shape[-1]), jnp.arange(num_top)

    def body(i: Int[Array, ""], carry: tuple[Array, ...]) -> tuple[Array, ...]:
        value, place, values, ids = carry
        left = (logits < value) | ((logits == value) & (places > place))
        rest = jnp.where(left, logits, -jnp.inf)
        # Tokens that are ruled out follow in the order of their ids.
        best = jnp.argmax(jnp.where(rest.max(-1, keepdims=True) > -jnp.inf, rest, left.astype(rest.dtype)), axis=-1)
        place = best[:, None]
        value = jnp.take_along_axis(logits, place, axis=-1)
        # A choice, since no graph holds a write at a place that depends on the turn.
        return value, place, jnp.where(turns == i, value, values), jnp.where(turns == i, place, ids)

    one, all_of = (logits.shape[0], 1), (logits.shape[0], num_top)
    before = jnp.full(one, jnp.inf, logits.dtype), jnp.full(one, -1, places.dtype)
    none = jnp.zeros(all_of, logits.dtype), jnp.zeros(all_of, places.dtype)
    *_, values, ids = lax.fori_loop(0, num_top, body, (*before, *none))
    return values, ids
