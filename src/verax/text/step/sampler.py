"""The end of a step: from scores over the vocabulary to tokens, their log-probabilities and the slots that hold them.

A step samples within its own program. If a sequence in it has a grammar, a second program does (`make_sampling`): the
tokens that a grammar allows depend on the previous token, which the host reads while the first program runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from verax.ops import sampling
from verax.sampling_fields import MAX_LOGPROBS
from verax.text.step.slots import Slots

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
    # Rows that are not sampled take the parameters of greedy decoding, which skip every other part.
    slot, lengths = jnp.where(wanted, rows[:, 0], padding_slot), rows[:, 1] + rows[:, 2]
    tokens = sampling.sample(logits, slots.tokens, slot, lengths, slots.params.sampling, mask)
    history = slots.tokens.at[slot, lengths].set(tokens, mode="drop")
    # Of the model itself, before penalties and temperature, as vLLM reports them.
    return history, tokens, score(logits, tokens, slots.params.int("num_logprobs")[slot] >= 0)


def score(logits: Float[Array, "B V"], tokens: Int[Array, "B"], wanted: Bool[Array, "B"]) -> Logprobs:
    """Log-probabilities of the tokens and of the likeliest ones; zeros in rows that are not `wanted`."""
    num_top = min(MAX_LOGPROBS, logits.shape[-1])
    return Logprobs(*sampling.token_logprobs(logits, tokens, wanted, num_top=num_top))


def no_logprobs(rows: int, vocab_size: int) -> Logprobs:
    """Log-probabilities of rows that request none."""
    n = 1 + min(MAX_LOGPROBS, vocab_size)
    return Logprobs(jnp.zeros((rows, n), jnp.float32), jnp.zeros((rows, n), jnp.int32), jnp.zeros(rows, jnp.int32))
