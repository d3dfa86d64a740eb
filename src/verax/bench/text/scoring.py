"""Hidden states of texts through the engine's own cache and attention, and what two models say of each next token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from verax import ops
from verax.models import CausalLM
from verax.text.tokens.tokenizer import Tokenizer

__all__ = [
    "BATCH_TOKENS",
    "Batch",
    "batches_of",
    "compare_next_tokens",
    "counted",
    "hidden_states",
    "pieces_of",
    "split",
]

PAGE = 16
"""Tokens of a page: the engine's block size."""

BATCH_TOKENS, BATCH_ROWS = 1024, 64
"""Tokens and texts of a batch; the last batch is padded."""

LOGIT_ROWS = 64
"""Positions whose logits are compared at a time: two times 64 rows of a vocabulary of 150,000 are 80 MB."""


@dataclass(frozen=True)
class Batch:
    """Texts one after the other, padded: `tokens [BATCH_TOKENS]`, `lengths [BATCH_ROWS]`."""

    tokens: np.ndarray
    lengths: np.ndarray


def pieces_of(tokenizer: Tokenizer, texts: Iterable[str], window: int) -> Iterator[list[int]]:
    """Token ids of texts, cut into windows, each behind the beginning token if the model has one."""
    begin = [token for token in tokenizer.encode("") if token not in tokenizer.eos_token_ids]
    size = window - len(begin)
    for each in texts:
        ids = tokenizer.encode(each, add_special_tokens=False)
        yield from ([*begin, *ids[i : i + size]] for i in range(0, len(ids), size))


def batches_of(pieces: Iterator[list[int]], most: int) -> Iterator[Batch]:
    """Pieces gathered into batches, until `most` tokens are taken."""
    taken, held = 0, []

    def batch() -> Batch:
        tokens, lengths = np.zeros(BATCH_TOKENS, np.int32), np.zeros(BATCH_ROWS, np.int32)
        flat = [token for piece in held for token in piece]
        tokens[: len(flat)] = flat
        lengths[: len(held)] = [len(piece) for piece in held]
        return Batch(tokens, lengths)

    for piece in pieces:
        piece = piece[: most - taken]
        if not piece:
            break
        if len(held) == BATCH_ROWS or sum(map(len, held)) + len(piece) > BATCH_TOKENS:
            yield batch()
            held = []
        held.append(piece)
        taken += len(piece)
    if held:
        yield batch()


def split(model: CausalLM) -> tuple[nnx.GraphDef[Any], nnx.State]:
    """Structure and weights of a model."""
    return nnx.split(model)


def hidden_states(model: CausalLM, batch: Batch, cache_dtype: Any) -> Float[Array, "T D"]:
    """Final hidden states of a batch through the engine's own cache and attention, all texts as one mixed step."""
    graph, state = split(model)
    return _forward(state, batch.tokens, batch.lengths, graph, jnp.dtype(cache_dtype).name)


def _forward_step(
    state: nnx.State, tokens: Int[Array, "T"], lengths: Int[Array, "B"], graph: nnx.GraphDef[Any], cache_dtype: str
) -> Float[Array, "T D"]:
    model = nnx.merge(graph, state)
    config, T, B = model.config, tokens.shape[0], lengths.shape[0]
    width = T // PAGE
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths)])
    at = jnp.arange(T)
    owner = jnp.clip(jnp.searchsorted(starts, at, side="right") - 1, 0, B - 1)
    valid = at < starts[-1]
    position = jnp.where(valid, at - starts[owner], 0)
    # Page 0 is padding's; a text's pages lie together.
    first = 1 + jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum((lengths + PAGE - 1) // PAGE)])[:-1]
    num_pages = 1 + T // PAGE + B
    table = jnp.minimum(first[:, None] + jnp.arange(width), num_pages - 1).astype(jnp.int32)
    page = jnp.where(valid, first[owner] + position // PAGE, 0)

    def attend(
        layer: int, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], **options: Any
    ) -> Float[Array, "T N H"]:
        shape = (num_pages, config.num_key_value_heads, PAGE, config.head_dim)
        pages = (ops.write_pages(ops.new_pages(shape, cache_dtype), x, page, position % PAGE) for x in (k, v))
        return ops.paged_attention(q, *pages, table, lengths, starts, **options)

    return model(tokens, position, attend)


_forward = jax.jit(_forward_step, static_argnums=(3, 4))


def _compare_step(
    theirs: nnx.State,
    ours: nnx.State,
    their_hidden: Float[Array, "T D"],
    our_hidden: Float[Array, "T D"],
    following: Int[Array, "T"],
    graphs: tuple[nnx.GraphDef[Any], nnx.GraphDef[Any]],
) -> tuple[Float[Array, "T"], Float[Array, "T"], Float[Array, "T"]]:
    """Nats of the next token, KL divergence from the reference, and 1 where both have the same best token, each [T]."""
    reference, model = nnx.merge(graphs[0], theirs), nnx.merge(graphs[1], ours)

    def rows(
        x: tuple[Float[Array, "t D"], Float[Array, "t D"], Int[Array, "t"]],
    ) -> tuple[Float[Array, "t"], Float[Array, "t"], Float[Array, "t"]]:
        p, q = jax.nn.log_softmax(reference.logits(x[0])), jax.nn.log_softmax(model.logits(x[1]))
        nats = -jnp.take_along_axis(q, x[2][:, None], axis=-1)[:, 0]
        return nats, jnp.sum(jnp.exp(p) * (p - q), axis=-1), (p.argmax(-1) == q.argmax(-1)).astype(jnp.float32)

    parts = (x.reshape(-1, LOGIT_ROWS, *x.shape[1:]) for x in (their_hidden, our_hidden, following))
    nats, divergence, agrees = jax.lax.map(rows, tuple(parts))
    return nats.reshape(-1), divergence.reshape(-1), agrees.reshape(-1)


_compare = jax.jit(_compare_step, static_argnums=5)


def counted(batch: Batch) -> Bool[np.ndarray, "T"]:
    """True where the token after a position belongs to the same text."""
    mask = np.zeros(BATCH_TOKENS, bool)
    for end, length in zip(np.cumsum(batch.lengths), batch.lengths, strict=True):
        mask[end - length : max(end - 1, 0)] = True
    return mask


def compare_next_tokens(
    reference: CausalLM, model: CausalLM, batch: Batch, their_hidden: np.ndarray, cache_dtype: str
) -> Float[np.ndarray, "3"]:
    """Sums over a batch's next tokens: their nats, KL divergences from the reference, and equal best tokens.

    Args:
        reference, model: the two models.
        batch: of texts.
        their_hidden: the reference's hidden states `[T, D]` of it.
        cache_dtype: of the model's key/value cache.
    """
    (their_graph, theirs), (graph, ours) = split(reference), split(model)
    our_hidden = hidden_states(model, batch, cache_dtype)
    following = np.roll(batch.tokens, -1)
    scores = _compare(theirs, ours, their_hidden, our_hidden, following, (their_graph, graph))
    mask = counted(batch)
    return np.array([np.asarray(score, np.float64)[mask].sum() for score in scores])
