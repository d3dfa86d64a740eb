"""The end of a step: from scores over the vocabulary to tokens, their log-probabilities and the slots that hold them.

A step samples within its own program. If a sequence in it has a grammar, a second program does (`make_sampling`): the
tokens that a grammar allows depend on the token before, which the host reads while the first program runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from verax.ops import sampling
from verax.text.sampling_params import MAX_LOGPROBS
from verax.text.slots import SlotParams, Slots

__all__ = ["DEFERRED", "SAMPLED", "Logprobs", "make_sampling", "no_logprobs", "sample", "score"]

SAMPLED, DEFERRED = 1, 2
"""Last number of a row of a step's input: sample after its tokens, or leave that to the second program. 0: neither."""


class Logprobs(NamedTuple):
    """Log-probability of the chosen token, nats, then the best `MAX_LOGPROBS`; zeros in rows that request none."""

    values: Float[Array, "B n"]
    ids: Int[Array, "B n"]
    ranks: Int[Array, "B"]


SamplingFunction = Callable[
    [Slots, Float[Array, "B V"], Int[Array, "B 4"], Int[Array, "B w"]], tuple[Slots, Int[Array, "B"], Logprobs]
]


def make_sampling() -> SamplingFunction:
    """The second program of a step: slots, scores, rows of the step's input and masks to slots, tokens and logprobs."""

    def sampling_step(
        slots: Slots, logits: Float[Array, "B V"], rows: Int[Array, "B 4"], mask: Int[Array, "B w"]
    ) -> tuple[Slots, Int[Array, "B"], Logprobs]:
        history, tokens, logprobs = sample(slots, logits, rows, mask)
        return slots._replace(tokens=history), tokens, logprobs

    return sampling_step


def sample(
    slots: Slots, logits: Float[Array, "B V"], rows: Int[Array, "B 4"], mask: Int[Array, "B w"] | None = None
) -> tuple[Int[Array, "S L"], Int[Array, "B"], Logprobs]:
    """Sample the rows that are to be sampled.

    Args:
        slots: the slots of the rows.
        logits: scores of the next token.
        rows: (slot, start, count, `SAMPLED` or not) of each row.
        mask: a bit for each token that a grammar allows; all ones in rows without one.

    Returns:
        The slots' tokens with the new ones, the new ones, and their log-probabilities under the model itself.
    """
    wanted, padding_slot = rows[:, 3] == SAMPLED, slots.tokens.shape[0] - 1
    # Rows that are not sampled have the parameters of greedy decoding, for which every other part is skipped.
    slot, lengths = jnp.where(wanted, rows[:, 0], padding_slot), rows[:, 1] + rows[:, 2]
    params = slots.params.rows(slot)
    tokens = _next_tokens(logits, slots.tokens, slot, lengths, params, mask)
    history = slots.tokens.at[slot, lengths].set(tokens, mode="drop")
    return history, tokens, _logprobs(logits, tokens, params)


def _allowed(mask: Int[Array, "B w"], vocab_size: int) -> Bool[Array, "B V"]:
    """True for each token whose bit is set: bit j of word i is that of token 32 i + j."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size] != 0


def _next_tokens(
    logits: Float[Array, "B V"],
    history: Int[Array, "S L"],
    slot: Int[Array, "B"],
    lengths: Int[Array, "B"],
    params: SlotParams,
    mask: Int[Array, "B w"] | None,
) -> Int[Array, "B"]:
    """Sample one token a row. Parts that no row needs are skipped at run time."""
    penalties = {name: params.float(name) for name in ("presence", "frequency", "repetition")}
    penalized = (penalties["presence"] != 0) | (penalties["frequency"] != 0) | (penalties["repetition"] != 1)
    logits = lax.cond(
        jnp.any(penalized),
        lambda x: sampling.penalize(x, history[slot], params.int("num_prompt"), lengths, **penalties),
        lambda x: x,
        logits,
    )
    rows = jnp.arange(slot.shape[0])[:, None]
    logits = lax.cond(
        jnp.any(params.int("num_bias") > 0),
        lambda x: x.at[rows, params.bias_ids].add(params.bias_values, mode="drop"),
        lambda x: x,
        logits,
    )
    early = lengths < params.int("min_length")

    def hold_back(x: Float[Array, "B V"]) -> Float[Array, "B V"]:
        held = x.at[rows, params.banned].add(jnp.where(early, -jnp.inf, 0.0)[:, None], mode="drop")
        if mask is None:
            return held
        # Where a grammar allows nothing but the end, `min_tokens` gives way.
        possible = jnp.any(_allowed(mask, x.shape[1]) & (held > -jnp.inf), axis=-1, keepdims=True)
        return jnp.where(possible, held, x)

    logits = lax.cond(jnp.any(early), hold_back, lambda x: x, logits)
    if mask is not None:
        logits = jnp.where(_allowed(mask, logits.shape[1]), logits, -jnp.inf)
    seed = lax.bitcast_convert_type(jnp.stack([params.int("seed_high"), params.int("seed_low")], axis=1), jnp.uint32)
    how = sampling.SamplingArrays(
        params.float("temperature"), params.int("top_k"), params.float("top_p"), params.float("min_p")
    )
    return sampling.sample(logits, how, sampling.uniform(seed, lengths))


def _logprobs(logits: Float[Array, "B V"], tokens: Int[Array, "B"], params: SlotParams) -> Logprobs:
    """Log-probabilities under the model itself (before penalties and temperature), as vLLM reports them."""
    return lax.cond(
        jnp.any(params.int("num_logprobs") >= 0),
        lambda: score(logits, tokens),
        lambda: no_logprobs(tokens.shape[0], logits.shape[1]),
    )


def score(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Logprobs:
    """Log-probabilities of the tokens and of the likeliest ones."""
    return Logprobs(*sampling.token_logprobs(logits, tokens, min(MAX_LOGPROBS, logits.shape[-1])))


def no_logprobs(rows: int, vocab_size: int) -> Logprobs:
    """Log-probabilities of rows that request none."""
    n = 1 + min(MAX_LOGPROBS, vocab_size)
    return Logprobs(jnp.zeros((rows, n), jnp.float32), jnp.zeros((rows, n), jnp.int32), jnp.zeros(rows, jnp.int32))
