"""One engine step as one device program: model, cache update, sampling and state update.

The host sends a few integers; everything else is on the device already and is donated from step to step. A step samples
within its own program, unless a sequence in it has a grammar: then a second program does (`sample_deferred`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from verax import ops
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.models import CausalLM, RecurrentLayer
from verax.models.causal_lm import AttentionFn, ReplayableLayer, final_hidden_states, predicted_hidden_states
from verax.ops import sampling
from verax.ops.attention import join_heads, own_results, spread_queries
from verax.ops.paged import num_up_to
from verax.sampling_fields import MAX_LOGPROBS
from verax.text.engine.blocks import CacheGroup
from verax.text.step.slots import Slots

Cache = tuple[tuple[ops.Pages, ops.Pages] | Any, ...]
"""Key and value pages of each layer, or the recurrent state of each slot, as `CausalLMConfig.new_state` makes it.

In a model with a prediction head, its layers' pages follow, and last its newest hidden state of each slot, `[S, D]`.
"""

PROMPT_LOGPROB_CHUNK = 32
"""Prompt positions scored at a time: the scores of a whole prompt over a vocabulary would not fit."""


SAMPLED, DEFERRED = 1, 2
"""Last number of a row of a step's input: sample after its tokens, or leave that to the second program. 0: neither."""


NOT_FINITE = -2
"""Token of a row whose hidden state is not finite, in a step's output. Any token could come of such scores."""


class Logprobs(NamedTuple):
    """Log-probability of the chosen token, nats, then the best `MAX_LOGPROBS`; zeros in rows that request none."""

    values: Float[Array, "B n"]
    ids: Int[Array, "B n"]
    ranks: Int[Array, "B"]


def sample_deferred(
    slots: Slots, logits: Float[Array, "B V"], rows: Int[Array, "B 4"], mask: Int[Array, "B w"]
) -> tuple[Slots, Int[Array, "B"], Logprobs]:
    """Sampling as a program of its own, after a step with `DEFERRED` rows: slots, tokens and log-probabilities.

    The tokens that a grammar allows depend on the previous token, which the host reads while the step runs.
    """
    history, tokens, logprobs = sample(slots, logits, rows, mask)
    return slots._replace(tokens=history), jnp.where(jnp.isnan(logits).any(-1), NOT_FINITE, tokens), logprobs


def sample(
    slots: Slots, logits: Float[Array, "B V"], rows: Int[Array, "B 4"], mask: Int[Array, "B w"] | None = None
) -> tuple[Int[Array, "S L"], Int[Array, "B"], Logprobs]:
    """Sample the rows that are to be sampled, as `draw` does.

    Result: the slots' tokens with the new ones, the new ones, and their log-probabilities under the model itself.
    """
    history, tokens = draw(slots, logits, rows, mask)
    slot = jnp.where(rows[:, 3] == SAMPLED, rows[:, 0], slots.tokens.shape[0] - 1)
    # The log-probabilities of the model itself, before penalties and temperature, as vLLM reports them.
    return history, tokens, score(logits, tokens, slots.params.int("num_logprobs")[slot] >= 0)


def draw(
    slots: Slots, logits: Float[Array, "B V"], rows: Int[Array, "B 4"], mask: Int[Array, "B w"] | None = None
) -> tuple[Int[Array, "S L"], Int[Array, "B"]]:
    """Draw a token for each row that is to be sampled; the slots' tokens with the new ones, and the new ones.

    `rows`: (slot, start, count, `SAMPLED` or not) of each row. `mask`: a bit for each token that a grammar allows; all
    ones in rows without one.
    """
    wanted, padding_slot = rows[:, 3] == SAMPLED, slots.tokens.shape[0] - 1
    # Rows that are not sampled take the parameters of greedy decoding, which skip every other part.
    slot, lengths = jnp.where(wanted, rows[:, 0], padding_slot), rows[:, 1] + rows[:, 2]
    tokens = sampling.sample(logits, slots.tokens, slot, lengths, slots.params.sampling, mask)
    return slots.tokens.at[slot, lengths].set(tokens, mode="drop"), tokens


def score(logits: Float[Array, "B V"], tokens: Int[Array, "B"], wanted: Bool[Array, "B"]) -> Logprobs:
    """Log-probabilities of the tokens and of the likeliest ones; zeros in rows that are not `wanted`."""
    num_top = min(MAX_LOGPROBS, logits.shape[-1])
    return Logprobs(*sampling.token_logprobs(logits, tokens, wanted, num_top=num_top))


def no_logprobs(rows: int, vocab_size: int) -> Logprobs:
    """Log-probabilities of rows that request none."""
    n = 1 + min(MAX_LOGPROBS, vocab_size)
    return Logprobs(jnp.zeros((rows, n), jnp.float32), jnp.zeros((rows, n), jnp.int32), jnp.zeros(rows, jnp.int32))


class StepShape(NamedTuple):
    """Shape that a step is compiled for: `rows` sequences, `tokens` in all.

    A decode step has one token in each row, or the same number of several, one after the other, each read after it was
    sampled. A step that verifies drafts (`verify`) has the newest token and the drafts of each row, and samples after
    each.
    """

    rows: int
    tokens: int
    decode: bool
    verify: bool = False
    adapters: bool = False
    """True if sequences may have adapters."""
    drafts: int = 0
    """Most drafts of a row that a step which verifies makes itself, by the model's prediction head."""

    @property
    def decode_steps(self) -> int:
        """Tokens of each row that a decode step computes one after the other; 1 in other steps."""
        return self.tokens // self.rows if self.decode else 1

    @property
    def host_drafts(self) -> int:
        """Numbers of the packed input that are drafts."""
        return self.tokens if self.verify and not self.drafts else 0

    @property
    def num_sampled(self) -> int:
        """Rows of the step's output."""
        return self.tokens if self.verify or self.decode else self.rows

    def num_updates(self, block_size: int) -> int:
        """Most blocks that such a step's tables can grow by: a row may start one, and fill one every block_size."""
        if self.decode:
            return self.rows * -(-self.decode_steps // block_size)
        return self.rows + self.tokens // block_size

    # The packed input, declared here alone: rows, then new blocks, then the drafts of a step that verifies.

    def input_size(self, block_size: int, num_tables: int) -> int:
        """Length of the packed input, int32."""
        return 5 * self.rows + 3 * num_tables * self.num_updates(block_size) + self.host_drafts

    def split(self, packed: Any, num_tables: int) -> tuple[Any, Any, Any]:
        """Parts of a packed input, views of it on the host.

        Result: rows of (slot, start, count, sample, skipped), `[B, 5]`; (slot, index, block) of each new block by cache
        group, `[G, n, 3]`; and for each token of a step that verifies the host's drafts a draft, or -1 for a token
        that its slot has, `[T]`: None for other steps. `skipped` tokens of the row were not read by the prediction
        head.
        """
        rows, rest, drafts = packed[: 5 * self.rows].reshape(self.rows, 5), packed[5 * self.rows :], None
        if self.host_drafts:
            rest, drafts = rest[: -self.tokens], rest[-self.tokens :]
        return rows, rest.reshape(num_tables, -1, 3), drafts

    def padding(self, block_size: int, num_tables: int, slot: int) -> Int[np.ndarray, "n"]:
        """Packed input in which every row and every new block goes to the padding slot, and no token is a draft."""
        packed = np.zeros(self.input_size(block_size, num_tables), np.int32)
        rows, updates, drafts = self.split(packed, num_tables)
        rows[:, 0] = updates[..., 0] = slot
        if drafts is not None:
            drafts[:] = -1
        return packed


class StepOutput(NamedTuple):
    """Results of a step for the host."""

    tokens: Int[Array, "B"]
    """Sampled token of each row, or of each token in decode steps and steps that verify drafts.

    Steps that make the drafts themselves have -1 after the first draft of a row that does not hold. `NOT_FINITE` in the
    place of others.
    """
    logprobs: Logprobs | None
    """None in decode steps of several tokens."""
    prompt_logprobs: Logprobs | None
    """Score of the token that follows each token of the step. None in decode steps and steps that verify."""
    logits: Float[Array, "B V"] | None
    """Scores that `sample_deferred` samples from. None without structured output."""
    projected: tuple[Any, ...] = ()
    """Inputs of each recurrent layer in a step that verifies drafts, for `make_replay`. Empty in other steps."""


StepFunction = Callable[[tuple[Array, ...], Slots, Cache, Int[Array, "n"]], tuple[Slots, Cache, StepOutput]]


def make_step(
    build: Callable[..., CausalLM],
    shape: StepShape,
    block_size: int,
    groups: tuple[CacheGroup, ...],
    *,
    structured_outputs: bool,
    prediction_head: bool = False,
) -> StepFunction:
    """The step function of one shape.

    While tracing, `build(weights, adapters)` makes the model of its flat weights; `adapters` `[T]` are the slots of the
    tokens' adapters (-1 for none), or None.

    With `structured_outputs` its output has the scores too, which rows that are `DEFERRED` are sampled from later.

    With `prediction_head`, every step but a decode step runs the model's head of multi-token prediction over its
    tokens, each with the token that follows it. So the next step that verifies begins with the head's hidden state of
    the newest token, and makes its drafts by applying the head repeatedly. The head has entries of its own in the pages
    of the sequence, without gaps: tokens that only decode steps have computed (`skipped`) have none.

    A block of the host is a page of `ops`: the entries of a sequence's block table are the page numbers of its tokens.

    A step that verifies drafts leaves the states of recurrent layers unchanged: `make_replay` continues them.

    A decode step of several tokens computes `count` of each row and has no log-probabilities: `decode_steps` of them
    take the host no more time than one.

    Raises:
        InvalidParameterError: while tracing, if a layer attends to another window than its configuration has.
        UnsupportedModelError: while tracing a step that verifies, if a recurrent layer is not a `ReplayableLayer`.
    """

    def step(
        weights: tuple[Array, ...], slots: Slots, cache: Cache, packed: Int[Array, "n"]
    ) -> tuple[Slots, Cache, StepOutput]:
        rows, updates, drafts = shape.split(packed, len(groups))
        slots = slots._replace(page_tables=with_new_blocks(slots.page_tables, updates))
        if shape.decode_steps == 1:
            return run(weights, slots, cache, rows, drafts)
        padding = jnp.asarray([slots.tokens.shape[0] - 1, 0, 0, 0, 0])

        def body(i: Int[Array, ""], carry: tuple[Slots, Cache, Array]) -> tuple[Slots, Cache, Array]:
            slots, cache, tokens = carry
            one = rows.at[:, 1].add(i).at[:, 2].set(1)
            slots, cache, output = run(weights, slots, cache, jnp.where((i < rows[:, 2])[:, None], one, padding), None)
            return slots, cache, tokens.at[:, i].set(output.tokens)

        tokens = jnp.zeros((shape.rows, shape.decode_steps), jnp.int32)
        slots, cache, tokens = lax.fori_loop(0, jnp.max(rows[:, 2]), body, (slots, cache, tokens))
        return slots, cache, StepOutput(tokens.reshape(-1), None, None, None)

    def run(
        weights: tuple[Array, ...],
        slots: Slots,
        cache: Cache,
        rows: Int[Array, "B 5"],
        drafts: Int[Array, "T"] | None,
    ) -> tuple[Slots, Cache, StepOutput]:
        rows, skipped = rows[:, :4], rows[:, 4]
        slot, start, count = rows[:, 0], rows[:, 1], rows[:, 2]
        page_tables = slots.page_tables

        if shape.decode:
            starts = jnp.arange(shape.rows + 1, dtype=jnp.int32)
            owner, position, valid = starts[:-1], start, count > 0
        else:
            starts, owner, place = _packed_tokens(count, shape.tokens)
            position, valid = start[owner] + place, jnp.arange(shape.tokens) < starts[-1]
            position = jnp.where(valid, position, 0)
        tables = [table[slot] for table in page_tables]
        layer_cache = list(cache)

        attend_to = partial(paged_attention, layer_cache, groups, block_size, tables)
        ragged = {} if shape.decode else {"owner": owner, "starts": starts}
        attend = attend_to(start, count, position, valid, **ragged)
        # A sequence's first tokens start from zeros. Rows of padding have a slot past the end.
        state_slots = ops.StateSlots(slot, fresh=start == 0)
        projected = list[Any]()

        def run_recurrent(layer: int, x: Float[Array, "T D"], recurrence: RecurrentLayer) -> Float[Array, "T D"]:
            state = layer_cache[layer]
            if shape.decode:
                out, layer_cache[layer] = recurrence(x[:, None], state, None, state_slots)
            elif shape.verify:
                projected.append(_replayable(recurrence).project(x[None]))
                out, _ = _replayable(recurrence).advance(projected[-1], state, starts, state_slots)
            else:
                out, layer_cache[layer] = recurrence(x[None], state, starts, state_slots)
            return out.reshape(x.shape)

        if drafts is not None:
            # Known tokens have a position past the end, where the update is dropped.
            at = jnp.where(drafts >= 0, position, slots.tokens.shape[1])
            slots = slots._replace(tokens=slots.tokens.at[slot[owner], at].set(drafts, mode="drop"))
        adapters = slots.params.int("adapter")[slot][owner] if shape.adapters else None
        model = build(weights, adapters)
        if shape.drafts:
            states: Any = layer_cache[-1]
            slots = _with_drafts(model, slots, states[slot], rows, skipped, shape.drafts, attend_to)
        text = slots.tokens[slot[owner], position]
        with ops.skip_padding((shape.tokens,), _num_used(valid)):
            hidden = final_hidden_states(model, text, position, attend, run_recurrent)
        # Decodes and verifications sample after each token; a mixed step may have as many rows as tokens, too.
        newest = hidden if shape.decode or shape.verify else hidden[jnp.maximum(starts[1:] - 1, 0)]
        with ops.skip_padding((len(newest),), _num_used(valid if shape.verify else count > 0)):
            logits = model.logits(newest)
        if shape.verify:
            wanted = jnp.where(valid, rows[owner, 3], 0)
            rows = jnp.stack([slot[owner], position, jnp.ones_like(position), wanted], axis=1)
        if shape.decode_steps > 1:
            (history, tokens), logprobs = draw(slots, logits, rows), None
        else:
            history, tokens, logprobs = sample(slots, logits, rows)
        if prediction_head and not shape.decode:
            last = starts[1:] - 1
            if shape.drafts:
                held = _num_held(text, tokens, position - start[owner], valid, owner, count)
                last = starts[:-1] + held
                tokens = jnp.where(position - start[owner] <= held[owner], tokens, -1)
            following = history[slot[owner], jnp.minimum(position + 1, history.shape[1] - 1)]
            at = jnp.maximum(position - skipped[owner], 0)
            read = attend_to(start - skipped, count, at, valid, **ragged)
            predicted = predicted_hidden_states(model, hidden, following, at, read)
            states = layer_cache[-1]
            layer_cache[-1] = states.at[slot].set(predicted[jnp.maximum(last, 0)], mode="drop")
        output = StepOutput(
            jnp.where(jnp.isfinite(newest).all(-1) | (tokens < 0), tokens, NOT_FINITE),
            logprobs,
            None if shape.decode or shape.verify else _prompt_logprobs(model, hidden, slots, slot[owner], position),
            logits if structured_outputs else None,
            tuple(projected),
        )
        return Slots(history, page_tables, slots.params), tuple(layer_cache), output

    return step


def paged_attention(
    layer_cache: list[Any],
    groups: tuple[CacheGroup, ...],
    block_size: int,
    tables: list[Int[Array, "B W"]],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    position: Int[Array, "T"],
    valid: Bool[Array, "T"],
    *,
    owner: Int[Array, "T"] | None = None,
    starts: Int[Array, "M"] | None = None,
) -> AttentionFn:
    """Attention over the pages of `layer_cache`, whose entries it replaces by those with the tokens' keys and values.

    Args:
        tables: block tables of the rows, for each of the groups.
        start: tokens of each row that the pages hold before these.
        count: tokens of each row.
        position: position of each token in its row's pages.
        valid: False for padding.
        owner: row of each token; None if each row has one token.
        starts: index of each row's first token, and the number of all; None if each row has one token.
    """
    group_of = {layer: group for group, record in enumerate(groups) for layer in record.layers}
    pages_by_row = [
        _visible_pages(table, start, group.window, block_size) for table, group in zip(tables, groups, strict=True)
    ]
    row = jnp.arange(len(start), dtype=jnp.int32) if owner is None else owner
    page = [jnp.where(valid, pages[row, position // block_size], 0) for pages in pages_by_row]
    offset, lengths, written = position % block_size, start + count, set[int]()

    def attend(
        layer: int, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], **options: Any
    ) -> Float[Array, "T N H"]:
        k_pages, v_pages = layer_cache[layer]
        group = group_of[layer]
        (K, H), joined = k.shape[1:], k_pages.shape[-1] // k.shape[-1]
        if layer not in written:
            joined_heads = join_heads(k, joined), join_heads(v, joined)
            k_pages, v_pages = ops.write_pages(k_pages, v_pages, *joined_heads, page[group], offset)
            layer_cache[layer] = (k_pages, v_pages)
            written.add(layer)
        kept, attended = groups[group].window, options.get("window")
        if kept is not None and attended != kept:
            raise InvalidParameterError(
                f"model: layer {layer} attends to a window of {attended}, but its configuration's sliding_windows "
                f"has {kept}"
            )
        if joined > 1:
            q = spread_queries(q, K, joined)
            options = {**options, "scale": H**-0.5 if options.get("scale") is None else options["scale"]}
        arguments = q, k_pages, v_pages, pages_by_row[group], lengths
        if starts is None:
            out = ops.paged_decode_attention(*arguments, **options)
        else:
            out = ops.paged_attention(*arguments, starts, **options)
        return out if joined == 1 else own_results(out, K, joined)

    return attend


def _with_drafts(
    model: CausalLM,
    slots: Slots,
    hidden: Float[Array, "B D"],
    rows: Int[Array, "B 4"],
    skipped: Int[Array, "B"],
    num_drafts: int,
    attend_to: Callable[..., AttentionFn],
) -> Slots:
    """Slots with drafts after the newest token of each row, sampled as the model samples, from the prediction head.

    `hidden`: hidden states of the head at the newest tokens.
    """
    slot, start, count = rows[:, 0], rows[:, 1], rows[:, 2]
    for i in range(1, num_drafts + 1):
        wanted = i < count
        sampled = jnp.stack([slot, start, jnp.full_like(count, i), SAMPLED * wanted], axis=1)
        history, tokens = draw(slots, model.logits(hidden), sampled)
        slots = slots._replace(tokens=history)
        if i < num_drafts:
            at = jnp.maximum(start - skipped + i - 1, 0)
            attend = attend_to(at, jnp.ones_like(count), at, i + 1 < count)
            hidden = predicted_hidden_states(model, hidden, tokens, at, attend)
    return slots


def _num_held(
    text: Int[Array, "T"],
    sampled: Int[Array, "T"],
    place: Int[Array, "T"],
    valid: Bool[Array, "T"],
    owner: Int[Array, "T"],
    count: Int[Array, "B"],
) -> Int[Array, "B"]:
    """Number of drafts of each row that equal what was sampled in their place, up to the first that does not.

    `place`: index of each token in its row; the first is the newest token, the others are drafts.
    """
    differs = valid & (place > 0) & (text != jnp.roll(sampled, 1))
    first = count.at[owner].min(jnp.where(differs, place, count[owner]))
    return jnp.maximum(first - 1, 0)


def make_replay(build: Callable[..., CausalLM], shape: StepShape) -> Callable[..., Cache]:
    """The function that continues recurrent states with the tokens of a step that verifies which hold.

    It takes flat weights, the cache, the step's `StepOutput.projected`, and (slot, count, kept) of each row of the step
    `[3 B]`: of its `count` tokens the first `kept` hold.
    """

    def replay(weights: tuple[Array, ...], cache: Cache, projected: tuple[Any, ...], packed: Int[Array, "n"]) -> Cache:
        slot, count, kept = packed.reshape(shape.rows, 3).T
        starts, owner, place = _packed_tokens(kept, shape.tokens)
        step_starts, _, _ = _packed_tokens(count, shape.tokens)
        source = jnp.minimum(step_starts[owner] + place, shape.tokens - 1)
        slots = ops.StateSlots(slot, fresh=jnp.zeros(shape.rows, bool))
        layer_cache, of_layers = list(cache), iter(projected)

        # The model calls its recurrent layers with their weights. Nothing uses other results, so they are not computed.
        def run_recurrent(layer: int, x: Float[Array, "T D"], recurrence: RecurrentLayer) -> Float[Array, "T D"]:
            inputs = jax.tree.map(lambda array: array[:, source], next(of_layers))
            _, layer_cache[layer] = _replayable(recurrence).advance(inputs, cache[layer], starts, slots)
            return x

        def attend(_: int, q: Float[Array, "T N H"], *__: Any, **___: Any) -> Float[Array, "T N H"]:
            return q

        tokens = jnp.zeros(shape.tokens, jnp.int32)
        final_hidden_states(build(weights, None), tokens, tokens, attend, run_recurrent)
        return tuple(layer_cache)

    return replay


def _packed_tokens(count: Int[Array, "B"], num_tokens: int) -> tuple[Int[Array, "M"], Int[Array, "T"], Int[Array, "T"]]:
    """Offsets of packed rows of `count` tokens each, `[B + 1]`, and the row of each token and its place in it."""
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count)])
    at = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.minimum(num_up_to(starts, at) - 1, len(count) - 1).astype(jnp.int32)
    return starts, owner, at - starts[owner]


def _num_used(valid: Bool[Array, "T"]) -> Int[Array, ""]:
    """Number of the first rows, after which there is only padding."""
    return jnp.max(jnp.where(valid, jnp.arange(1, 1 + len(valid), dtype=jnp.int32), 0))


def _replayable(recurrence: RecurrentLayer) -> ReplayableLayer:
    if not (hasattr(recurrence, "project") and hasattr(recurrence, "advance")):
        raise UnsupportedModelError(
            f"speculative_config: {type(recurrence).__name__} cannot go back to the state before a draft that did not "
            "hold: it lacks project and advance (verax.models.causal_lm.ReplayableLayer); leave speculative_config out"
        )
    return cast(ReplayableLayer, recurrence)


def with_new_blocks(
    tables: tuple[Int[Array, "S W"], ...], updates: Int[Array, "G n 3"]
) -> tuple[Int[Array, "S W"], ...]:
    """Page tables after the (slot, index, block) triples of each cache group."""
    triples = [updates[group] for group in range(len(tables))]
    return tuple(table.at[new[:, 0], new[:, 1]].set(new[:, 2]) for table, new in zip(tables, triples, strict=True))


def _visible_pages(
    pages: Int[Array, "B W"], start: Int[Array, "B"], window: int | None, block_size: int
) -> Int[Array, "B W"]:
    """Page 0 in the place of pages before the window of a row's first query, which others may own by now."""
    if window is None:
        return pages
    first = jnp.maximum(start - window + 1, 0) // block_size
    return jnp.where(jnp.arange(pages.shape[1]) < first[:, None], 0, pages)


def _prompt_logprobs(
    model: CausalLM, hidden: Float[Array, "T D"], slots: Slots, slot: Int[Array, "T"], position: Int[Array, "T"]
) -> Logprobs:
    T = hidden.shape[0]
    following = slots.tokens[slot, jnp.minimum(position + 1, slots.tokens.shape[1] - 1)]
    wanted = slots.params.int("num_prompt_logprobs")[slot] >= 0
    size = min(PROMPT_LOGPROB_CHUNK, T)
    chunks = T // size  # token buckets are multiples of the chunk

    def scored() -> Logprobs:
        # Not lax.map: no graph of CUDA's holds its slices, and the host would wait until the device has chosen.
        def body(chunk: Int[Array, ""], parts: Logprobs) -> Logprobs:
            rows = chunk * size + jnp.arange(size)
            part = score(model.logits(hidden[rows]), following[rows], wanted[rows])
            own = lambda new: jnp.arange(chunks).reshape(-1, *[1] * new.ndim) == chunk
            return Logprobs(*(jnp.where(own(new), new, old) for old, new in zip(parts, part, strict=True)))

        none = no_logprobs(T, model.config.vocab_size)
        start = Logprobs(*(x.reshape(chunks, size, *x.shape[1:]) for x in none))
        return Logprobs(*(x.reshape(T, *x.shape[2:]) for x in lax.fori_loop(0, chunks, body, start)))

    return lax.cond(jnp.any(wanted), scored, lambda: no_logprobs(T, model.config.vocab_size))
