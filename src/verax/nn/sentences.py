"""Sentences in rows of tokens: where each lies, and one state, the mean or the maximum of each."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from verax.ops.attention import MASKED


class Sentences(NamedTuple):
    """Places of S sentences in `[B, T]` tokens. Tokens of no sentence are padding; what they compute means nothing."""

    segments: Int[Array, "B T"]
    """Number of the sentence of each token; S for padding."""
    positions: Int[Array, "B T"]
    """Position of each token in its sentence. Positions of padding continue after a padded sentence, as in PyTorch, and
    are 0 after packed ones."""
    starts: Int[Array, "S"]
    """First token of each sentence, counted through all rows."""
    lengths: Int[Array, "S"]
    """Tokens of each sentence; 0 for one that is not there."""
    cu_seqlens: Int[Array, "S_and_1"] | None = None
    """Starts, and the end of the last sentence, as the recurrent operations take them; None unless packed."""
    hidden: Bool[Array, "B T"] | None = None
    """Tokens that no token sees, which see all others of their sentence: ColBERT's expansions of queries. None without
    them. Models that take them have `hides_tokens = True`."""

    def hiding(self, seen: Int[Array, "S"]) -> Sentences:
        """The sentences, of which only the first `seen` tokens are seen."""
        return self._replace(hidden=self.positions >= jnp.append(seen, 0)[self.segments])

    def hidden_bias(self) -> Float[Array, "B 1 1 T"] | None:
        """Numbers that hide tokens where they are added to scores; None if no token is hidden."""
        # Far above the score of another sentence: a token that sees no other token still sees its own sentence alone.
        return None if self.hidden is None else jnp.where(self.hidden, 0.1 * MASKED, 0.0)[:, None, None]

    @classmethod
    def padded(cls, lengths: Int[Array, "B"], size: int) -> Sentences:
        """One sentence in each row of `size` tokens, followed by padding."""
        at = jnp.arange(size)
        real = at < lengths[:, None]
        rows = jnp.arange(lengths.shape[0])
        segments = jnp.where(real, rows[:, None], lengths.shape[0])
        return cls(segments, jnp.broadcast_to(at, real.shape), rows * size, lengths)

    @classmethod
    def packed(cls, lengths: Int[Array, "S"], size: int) -> Sentences:
        """Sentences end to end in one row of `size` tokens, followed by padding."""
        ends = jnp.cumsum(lengths)
        starts, at = ends - lengths, jnp.arange(size)
        segments = jnp.sum(at[:, None] >= ends, axis=1)
        positions = at - jnp.append(starts, 0)[segments]
        positions = jnp.where(at < ends[-1], positions, 0)
        return cls(segments[None], positions[None], starts, lengths, jnp.append(starts, ends[-1]))

    def first(self, hidden: Float[Array, "B T D"], skipped: int | Int[Array, ""] = 0) -> Float[Array, "S D"]:
        """State of each sentence's first token after its `skipped` ones; of its first if it has no others, else 0."""
        return self._rows(hidden, self.starts + jnp.where(self.lengths > skipped, skipped, 0))

    def last(self, hidden: Float[Array, "B T D"]) -> Float[Array, "S D"]:
        """State of each sentence's last token; 0 for a sentence without tokens."""
        return self._rows(hidden, self.starts + self.lengths - 1)

    def maximum(self, hidden: Float[Array, "B T D"], skipped: int | Int[Array, ""] = 0) -> Float[Array, "S D"]:
        """Largest number of each dimension over each sentence's tokens, float32, without its `skipped` first ones.

        The maximum of nothing is zero.
        """
        largest = jax.ops.segment_max(_flat(hidden), self._owners(skipped), self.lengths.shape[0])
        return jnp.where((self.lengths > skipped)[:, None], largest, 0)

    def mean(
        self, hidden: Float[Array, "B T D"], skipped: int | Int[Array, ""] = 0, *, by_position: bool = False
    ) -> Float[Array, "S D"]:
        """Mean over each sentence's tokens, float32, without its `skipped` first ones; the mean of nothing is zero.

        With `by_position` a token's weight is its position, counted from 1.
        """
        states, owners, count = _flat(hidden), self._owners(skipped), self.lengths.shape[0]
        if not by_position:
            counts = jnp.maximum(self.lengths - skipped, 1).astype(jnp.float32)
            return jax.ops.segment_sum(states, owners, count) / counts[:, None]
        weights = (self.positions.reshape(-1) + 1).astype(jnp.float32)
        totals = jax.ops.segment_sum(states * weights[:, None], owners, count)
        return totals / jnp.maximum(jax.ops.segment_sum(weights, owners, count), 1)[:, None]

    def _rows(self, hidden: Float[Array, "B T D"], places: Int[Array, "S"]) -> Float[Array, "S D"]:
        """States of the tokens at these places, one of each sentence; 0 for a sentence without tokens."""
        states = hidden.reshape(-1, hidden.shape[-1]).at[places].get(mode="clip")
        return jnp.where((self.lengths > 0)[:, None], states, 0)

    def _owners(self, skipped: int | Int[Array, ""]) -> Int[Array, "tokens"]:
        """Number of the sentence of each token that counts; S for others."""
        # States are added up by number, not multiplied by 0 and 1: another sentence's may be infinite.
        return jnp.where(self.positions >= skipped, self.segments, self.lengths.shape[0]).reshape(-1)


def _flat(hidden: Float[Array, "B T D"]) -> Float[Array, "tokens D"]:
    return hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32)
