"""Speculative decoding: drafters of tokens, whether to draft, how many, and what came of them.

A step that verifies computes each sequence's newest token and its drafts, and samples the model's own token after each
of them, from the seed and the position as always. The drafts hold up to the first that differs from what was sampled.
An engine without drafts therefore gives the same tokens, at every temperature.

Prompt lookup (Saxena, 2023; vLLM's `ngram`) copies what followed the last tokens when they occurred before in the text:
https://github.com/apoorvumang/prompt-lookup-decoding

A draft model has weights and a cache of its own. Its cache has as many blocks as the model's, so that one block table
serves both, and it reads and extends the same texts with the same sampling parameters, seeds and positions: where the
two models agree, they draw the same token.

The number of drafts depends on what held before and on a cost model, never on a clock, so it is equal in every run.
"""

from __future__ import annotations

import weakref
from collections import abc
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from verax import checkpoint, ops, progress
from verax._buckets import at_least, powers
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.loading import load_causal_lm
from verax.models import CausalLM
from verax.models.causal_lm import has_recurrent_layers, sliding_windows
from verax.nn import pack_linear_weights
from verax.text.engine.blocks import CacheGroup
from verax.text.engine.engine_config import SpeculativeConfig
from verax.text.engine.outputs import SpeculationTotals
from verax.text.engine.request import Sequence
from verax.text.engine.scheduler import BY_STEP, Chunk, Schedule, Scheduler
from verax.text.hosts import Dispatch
from verax.text.step.program import AbstractModel, JittedCall, new_cache, placed, step_program
from verax.text.step.runner import ModelRunner, weight_bytes
from verax.text.step.sizes import RunnerConfig
from verax.text.step.slots import Slots
from verax.text.step.step import SAMPLED, StepShape, with_new_blocks
from verax.text.tokens.tokenizer import Tokenizer

MOST_TRIED = 64
"""Earlier places that are compared, the latest first: in monotonous text nearly every token is one."""


class NgramIndex:
    """Places of each n-gram of a text that grows, as chains from the latest to the earliest, as in zlib's `deflate`."""

    def __init__(self, smallest: int, largest: int):
        self._smallest = smallest
        self._largest = largest
        self._latest: dict[tuple[int, ...], int] = {}
        """Index of the token after the latest place of each n-gram of the smallest size."""
        self._earlier: list[int] = []
        """For each token, the index of the token after the previous place of the n-gram before it; -1 for none."""

    def continuation(self, tokens: abc.Sequence[int], length: int) -> list[int]:
        """Tokens that followed the longest of the last n-grams at its latest place; empty if none occurred before.

        A continuation that reaches the end of the text repeats itself, so a period is continued.

        `tokens`: the text, which begins with the text of the call before.
        """
        self._extend(tokens)
        end, size, start = len(tokens), 0, -1
        at = self._latest.get(tuple(tokens[end - self._smallest :]), -1) if end > self._smallest else -1
        for _ in range(MOST_TRIED):
            if at < 0:
                break
            same = self._smallest
            while same < self._largest and same < at and tokens[at - 1 - same] == tokens[end - 1 - same]:
                same += 1
            if same > size:
                size, start = same, at
            if size == self._largest:
                break
            at = self._earlier[at]
        if start < 0:
            return []
        period = end - start
        known = list(tokens[start : start + length])
        return [known[i % period] for i in range(length)]

    def _extend(self, tokens: abc.Sequence[int]) -> None:
        """Add the n-grams before each token. The n-gram at the end is left out, because it would find itself."""
        for at in range(len(self._earlier), len(tokens)):
            if at < self._smallest:
                self._earlier.append(-1)
                continue
            gram = tuple(tokens[at - self._smallest : at])
            self._earlier.append(self._latest.get(gram, -1))
            self._latest[gram] = at


class NgramDrafter:
    """Drafter that copies from the sequence's own text, prompt and answer.

    `smallest`: fewest tokens that must occur again. `largest`: most tokens that are compared.
    """

    step_cost = 0.0
    """Time of drafting one token for all sequences, in steps of the model."""

    def __init__(self, smallest: int, largest: int, num_drafts: int):
        self._smallest = smallest
        self._largest = largest
        self._num_drafts = num_drafts
        self._indices: weakref.WeakKeyDictionary[Sequence, NgramIndex] = weakref.WeakKeyDictionary()

    def can_draft(self, sequence: Sequence) -> bool:
        """True if the end of the text that the host knows occurred before."""
        return bool(self._continuation(sequence, 1))

    def draft(self, schedule: Schedule, num_drafts: abc.Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Drafts that follow the newest tokens of sequences, the wanted number for each."""
        return {sequence: self._continuation(sequence, count) for sequence, count in num_drafts.items()}

    def _continuation(self, sequence: Sequence, length: int) -> list[int]:
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex(self._smallest, self._largest)
        return index.continuation(sequence.tokens, length)


NEWEST = 2
"""Most tokens of a sequence that the first of its drafts reads: the newest, and the last draft if all of them held."""


@dataclass
class _Progress:
    """Tokens of a sequence that the draft model's cache holds."""

    tables: list[list[int]]
    """The block tables that they lie in: after a preemption the sequence has others."""
    known: int
    """Tokens before the drafts."""
    drafts: list[int]
    """Drafts after them; the last was not read itself."""

    def num_valid(self, sequence: Sequence) -> int:
        """Number of tokens whose keys and values belong to the sequence's text."""
        if self.tables is not sequence.tables:
            return 0
        valid = self.known
        for draft, token in zip(self.drafts[:-1], sequence.tokens[valid:], strict=False):
            if draft != token:
                break
            valid += 1
        return valid


class DraftModel:
    """Drafter that samples from a model of its own, one token of each sequence in a step.

    `num_drafts`: most drafts of a sequence.
    """

    def __init__(self, model: CausalLM, runner: ModelRunner, num_drafts: int):
        self._runner = runner
        self._num_drafts = num_drafts
        self._longest = model.config.max_position_embeddings
        self._weights = tuple(jax.tree.leaves(nnx.state(model)))
        self._abstract = AbstractModel.from_module(model)
        self._config = _sizes(model, runner.config)
        self.step_cost = weight_bytes(model) / runner.weight_bytes
        """Bytes of its weights divided by the model's: a step takes as long as reading its weights."""
        self._progress: weakref.WeakKeyDictionary[Sequence, _Progress] = weakref.WeakKeyDictionary()
        # A sequence with drafts has two tokens at least in a step that verifies.
        largest = max(1, runner.config.verify_tokens[-1] // 2)
        self._rows = powers(1, 1 << (largest - 1).bit_length(), 2)
        decode = [StepShape(rows, rows, True) for rows in self._rows]
        newest = [StepShape(rows, NEWEST * rows, False) for rows in self._rows]
        prompts = [StepShape(1, tokens, False) for tokens in self._config.mixed_tokens]
        self.shapes = (*decode, *newest, *prompts)
        programs = [step_program(self._abstract, self._config, shape, runner.mesh) for shape in self.shapes]
        _, on_slots, on_cache, _ = programs[0].shardings or (None,) * 4
        self._cache = placed(lambda: new_cache(model.config, self._config), on_cache)
        self._steps: dict[StepShape, JittedCall] = {
            shape: (program.jit(), program.arguments) for shape, program in zip(self.shapes, programs, strict=True)
        }
        verify = [shape for shape in runner.config.shapes if shape.verify]
        self._num_updates = max(shape.num_updates(self._config.block_size) for shape in verify)
        self._extend_tables: Any = jax.jit(_with_new_blocks, donate_argnums=0, out_shardings=(on_slots,))

    def uncompiled(self) -> list[JittedCall]:
        """The programs of its steps with arguments, to compile."""
        return list(self._steps.values())

    def warm_up(self) -> None:
        """Run every step once on padding."""
        self._add_blocks([])
        for shape in self.shapes:
            jax.block_until_ready(self._run(shape, []))

    def can_draft(self, sequence: Sequence) -> bool:
        """True while the text is shorter than the draft model's own context."""
        return sequence.num_tokens + self._num_drafts <= self._longest

    def draft(self, schedule: Schedule, num_drafts: abc.Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Drafts that follow the newest tokens of sequences, the wanted number for each."""
        chunks = [chunk for chunk in schedule.chunks if chunk.sequence in num_drafts]
        self._add_blocks(chunks)
        begins = [self._read_text(chunk) for chunk in chunks]
        shape = StepShape(size := at_least(self._rows, len(chunks)), NEWEST * size, False)
        first = [(chunk, begin, chunk.start + 1 - begin, True) for chunk, begin in zip(chunks, begins, strict=True)]
        tokens = [self._run(shape, first)]
        rows = [list(range(len(chunks)))]
        for i in range(1, max(num_drafts.values())):
            rows.append([row for row, chunk in enumerate(chunks) if num_drafts[chunk.sequence] > i])
            shape = StepShape(size := at_least(self._rows, len(rows[i])), size, True)
            tokens.append(self._run(shape, [(chunks[row], chunks[row].start + i, 1, True) for row in rows[i]]))
        drafts: list[list[int]] = [[] for _ in chunks]
        for which, sampled in zip(rows, tokens, strict=True):
            for row, token in zip(which, self._runner.read(sampled).tolist(), strict=False):
                drafts[row].append(token)
        for chunk, tokens_of_row in zip(chunks, drafts, strict=True):
            self._progress[chunk.sequence] = _Progress(chunk.sequence.tables, chunk.start + 1, tokens_of_row)
        return {chunk.sequence: tokens_of_row for chunk, tokens_of_row in zip(chunks, drafts, strict=True)}

    def repeat(self, dispatch: Dispatch) -> None:
        """Make the dispatch of another host's draft model."""
        if dispatch.program == "draft":
            assert dispatch.shape is not None
            self._step(dispatch.shape, *dispatch.unpack())
        else:
            self._extend(*dispatch.unpack())

    def _read_text(self, chunk: Chunk) -> int:
        """Read the text of a sequence up to its newest tokens; the number of tokens that were read."""
        progress = self._progress.get(chunk.sequence)
        start = 0 if progress is None else progress.num_valid(chunk.sequence)
        sizes = self._config.mixed_tokens
        while (left := chunk.start + 1 - start) > NEWEST:
            count = min(left - 1, sizes[-1])
            self._run(StepShape(1, at_least(sizes, count), False), [(chunk, start, count, False)])
            start += count
        return start

    def _add_blocks(self, chunks: abc.Sequence[Chunk]) -> None:
        """Put the blocks that a plan gives to sequences into their tables: drafts are written before it is run."""
        groups = len(self._config.groups)
        updates = np.zeros((groups, self._num_updates, 3), np.int32)
        updates[:, :, 0] = self._config.max_num_seqs
        new = ((chunk, i, blocks) for chunk in chunks for i, blocks in enumerate(chunk.new_blocks))
        for at, (chunk, i, blocks) in enumerate(new):
            for group, block in enumerate(blocks):
                updates[group, at] = _slot(chunk), chunk.first_new_block + i, block
        self._extend(updates)

    def _run(self, shape: StepShape, rows: abc.Sequence[tuple[Chunk, int, int, bool]]) -> jax.Array:
        """Run one step over (chunk, start, count, sample) rows; the tokens that it samples."""
        groups = len(self._config.groups)
        packed = shape.padding(self._config.block_size, groups, self._config.max_num_seqs)
        table, _, _ = shape.split(packed, groups)
        for i, (chunk, start, count, sample) in enumerate(rows):
            table[i, :4] = _slot(chunk), start, count, SAMPLED * sample
        return self._step(shape, packed)

    def _extend(self, updates: np.ndarray) -> None:
        """Dispatch the (slot, index, block) triples of each cache group, `[G, n, 3]`, to the tables."""
        self._runner.send("extend", updates)
        self._runner.with_slots(lambda slots: self._extend_tables(slots, updates))

    def _step(self, shape: StepShape, packed: np.ndarray) -> jax.Array:
        """Dispatch one step with its packed input; the tokens that it samples."""
        self._runner.send("draft", packed, shape=shape)
        step, _ = self._steps[shape]
        self._cache, output = self._runner.with_slots(lambda slots: step(self._weights, slots, self._cache, packed))
        return output.tokens


def _slot(chunk: Chunk) -> int:
    slot = chunk.sequence.slot
    assert slot is not None, f"{chunk.sequence} is drafted for without a slot"
    return slot


def _with_new_blocks(slots: Slots, updates: Int[Array, "G n 3"]) -> tuple[Slots]:
    """Slots after the (slot, index, block) triples of each cache group."""
    return (slots._replace(page_tables=with_new_blocks(slots.page_tables, updates)),)


def _sizes(model: CausalLM, config: RunnerConfig) -> RunnerConfig:
    """Sizes of the draft model's steps: the model's, with all of its layers in the group without a window."""
    full = next(i for i, group in enumerate(config.groups) if group.window is None)
    layers = tuple(range(model.config.num_hidden_layers))
    groups = tuple(
        CacheGroup(layers if i == full else (), None, group.num_blocks) for i, group in enumerate(config.groups)
    )
    return replace(config, groups=groups, structured_outputs=False, verify_tokens=(), adapters=False, joined_heads=1)


HEAD_COST = 0.5
"""Time of a prediction head divided by its share of the bytes: it has no part in dispatch, sampling and the like, which
take as long as the weights in small models. Measured with the built-in model: 3 drafts take half a step."""


class HeadDrafter:
    """Drafter whose drafts the step that verifies them makes itself, by the model's prediction head.

    `model`: the model with its head.
    """

    def __init__(self, model: CausalLM):
        head, table = cast(Any, model).mtp, cast(Any, model).model.embed_tokens
        sizes = [weight.nbytes for weight in jax.tree.leaves(nnx.state(head))]
        whole = (weight_bytes(model) - sum(sizes)) / HEAD_COST
        self.fixed_cost = sum(sizes) / whole
        """Time for which the head reads the tokens of a step, in steps of the model."""
        output = cast(Any, model).lm_head or table
        self.step_cost = self.fixed_cost + sum(w.nbytes for w in jax.tree.leaves(nnx.state(output))) / whole

    def can_draft(self, sequence: Sequence) -> bool:
        """True without a grammar: it has to allow the drafts before the step."""
        return sequence.matcher is None

    def draft(self, schedule: Schedule, num_drafts: abc.Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Places of drafts, the wanted number for each sequence; none where the head has not read the newest token."""
        return {sequence: [BY_STEP] * count * sequence.is_predicted for sequence, count in num_drafts.items()}


Drafter = NgramDrafter | DraftModel | HeadDrafter

WAITING = 0.1
"""Part of a step for which the device waits for the host between steps that verify: the host must read the tokens
first. 0.3 ms of scheduling and packing compared with steps of 5 to 40 ms on a CPU."""

PRIOR, HEAD_PRIOR = 0.5, 0.8
"""Share of drafts that are expected to hold, of a sequence that had none yet; and where a prediction head makes them,
which is trained for the model."""

WEIGHT = 0.2
"""Weight of the newest draft in the share of drafts that held."""

FIRST_REST = 16
"""Tokens without drafts after the first drafts that were not worth it. Each further rest is twice as long."""

LONGEST_REST = 512


@dataclass(frozen=True)
class StepCost:
    """Time of a step by its number of tokens, in steps of one token.

    A step reads all weights once; products take no longer than that up to `free` tokens. After that `doubling` more
    tokens take as long as the weights.
    """

    free: int
    doubling: int

    def __call__(self, num_tokens: int) -> float:
        """Cost of a step of the given number of tokens."""
        return 1.0 + max(0, num_tokens - self.free) / self.doubling

    @classmethod
    def on(cls, platform: str, *, quantized: bool) -> StepCost:
        """Cost on a platform.

        On a CPU it is the cost of the linear operation by rows (`verax bench ops --only linear --rows 1,2,4,8,16,32`).
        bfloat16 takes as long with 8 rows as with one, 1.4 times as long with 16 and 2.4 times with 32; int4 takes 1.7
        times as long with 8. Accelerators compute some hundred rows while they read the weights.
        """
        if platform != "cpu":
            return cls(128, 128)
        return cls(4, 6) if quantized else cls(8, 18)


@dataclass
class Acceptance:
    """Share of a sequence's drafts that held, and its rest from drafts while too few do."""

    rate: float = PRIOR
    rest: int = 0
    """Tokens of the last rest; 0 if there was none since drafts held."""
    resumes_at: int = 0
    """Length of the sequence from which on drafts are made."""
    trying: bool = False
    """True for the first drafts after a rest."""


class Policy:
    """Choice of the number of drafts of each sequence.

    `sizes`: ascending numbers of tokens of steps that verify. `num_drafts`: most drafts of a sequence. `draft_cost`:
    time of the i-th drafts of all sequences, in steps of the model. `fixed_cost`: further time of a step with drafts.
    `prior`: share of drafts that are expected to hold at first.
    """

    def __init__(
        self,
        cost: StepCost,
        sizes: abc.Sequence[int],
        num_drafts: int,
        draft_cost: float,
        *,
        fixed_cost: float = 0.0,
        most_rows: int | None = None,
        prior: float = PRIOR,
    ):
        self._cost = cost
        self._sizes = sizes
        self._num_drafts = num_drafts
        self._draft_cost = draft_cost
        self._fixed_cost = fixed_cost
        self.largest = sizes[-1]
        self.most_rows = self.largest - 1 if most_rows is None else most_rows
        """Most sequences of a step with drafts."""
        self.prior = prior

    def choose(self, num_rows: int, rates: abc.Sequence[float], limits: abc.Sequence[int]) -> list[int]:
        """Number of drafts of each sequence that can have some, for the most tokens in a given time.

        A step gives a token for each row, and `rate ** i` more for the i-th draft, which counts only if those before it
        hold. All zeros if a step without drafts gives more.

        `rates`: share of drafts that held, of sequences that can have drafts.
        """
        gains = sorted(
            (-(rate**i), i, row)
            for row, (rate, limit) in enumerate(zip(rates, limits, strict=True))
            for i in range(1, min(limit, self._num_drafts) + 1)
        )
        best, number = num_rows / self._cost(num_rows), 0
        expected, longest = float(num_rows), 0
        for count, (gain, i, _) in enumerate(gains[: max(0, self.largest - num_rows)], start=1):
            expected, longest = expected - gain, max(longest, i)
            padded = at_least(self._sizes, num_rows + count)
            value = expected / (self._cost(padded) + WAITING + self._fixed_cost + self._draft_cost * longest)
            if value > best:
                best, number = value, count
        chosen = [0] * len(rates)
        for _, _, row in gains[:number]:
            chosen[row] += 1
        return chosen

    def record(self, acceptance: Acceptance, drafted: int, accepted: int, length: int) -> None:
        """Count drafts of a sequence, which has `length` tokens now, and let it rest if they are not worth it."""
        for _ in range(accepted):
            acceptance.rate += WEIGHT * (1 - acceptance.rate)
        if accepted < drafted:
            acceptance.rate -= WEIGHT * acceptance.rate
        in_vain = acceptance.trying and accepted == 0
        acceptance.trying = False
        if in_vain or not any(self.choose(1, [acceptance.rate], [self._num_drafts])):
            acceptance.rest = min(2 * acceptance.rest or FIRST_REST, LONGEST_REST)
            acceptance.resumes_at = length + acceptance.rest
            acceptance.rate, acceptance.trying = self.prior, True
        elif acceptance.rate > self.prior:
            acceptance.rest = 0


class Speculator:
    """Choice and verification of drafts. `Engine` calls it.

    `drafter`: guesses of next tokens. `num_drafts`: most drafts of a sequence in a step.
    """

    def __init__(self, drafter: Drafter, policy: Policy, num_drafts: int):
        self.totals = SpeculationTotals(num_accepted_tokens_per_pos=[0] * num_drafts)
        self.drafter = drafter
        self.draft_model = drafter if isinstance(drafter, DraftModel) else None
        self._policy = policy
        self._num_drafts = num_drafts
        self._acceptance: weakref.WeakKeyDictionary[Sequence, Acceptance] = weakref.WeakKeyDictionary()

    def wants_tokens(self, running: abc.Sequence[Sequence]) -> bool:
        """True if the next step may get drafts, for which the host must know the tokens that are on their way."""
        rows = [sequence for sequence in running if not sequence.exhausted]
        if any(sequence.num_to_compute > 1 for sequence in rows):
            return False
        return bool(self._num_drafts_of({sequence: sequence.num_tokens for sequence in rows}))

    def add_drafts(self, schedule: Schedule, scheduler: Scheduler) -> None:
        """Add drafts to a schedule whose sequences the host knows all tokens of, if it only decodes.

        A sequence that it admits has nothing on the device yet, so it waits for its drafts, and the others with it.
        """
        if not schedule.chunks or schedule.admitted or not schedule.only_decodes:
            return
        if schedule.constrained and isinstance(self.drafter, HeadDrafter):
            return  # its steps sample by themselves
        wanted = self._num_drafts_of({chunk.sequence: chunk.start + 1 for chunk in schedule.chunks})
        reserved = scheduler.reserve(schedule, wanted) if wanted else []
        if not reserved:
            return
        drafts = self.drafter.draft(schedule, {sequence: wanted[sequence] for sequence in reserved})
        for i, chunk in enumerate(schedule.chunks):
            sequence = chunk.sequence
            tokens = proposed = drafts.get(sequence, [])
            if sequence.matcher is not None:
                tokens = proposed[: sequence.matcher.num_allowed(proposed)]
            if proposed and not tokens:  # refused before the model sees them
                self._policy.record(self._of(sequence), len(proposed), 0, len(sequence.tokens))
            schedule.chunks[i] = replace(chunk, count=1 + len(tokens), drafts=tuple(tokens))

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Count the drafts of a sequence in one step, and those that held."""
        self.totals.num_drafts += 1
        self.totals.num_draft_tokens += drafted
        self.totals.num_accepted_tokens += accepted
        for place in range(accepted):
            self.totals.num_accepted_tokens_per_pos[place] += 1
        metrics = sequence.request.metrics
        sequence.request.note(
            num_draft_tokens=metrics.num_draft_tokens + drafted,
            num_accepted_tokens=metrics.num_accepted_tokens + accepted,
        )
        self._policy.record(self._of(sequence), drafted, accepted, len(sequence.tokens))

    def _num_drafts_of(self, lengths: abc.Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Number of drafts of each sequence that is to have some, by the lengths of the sequences of the step."""
        if not 0 < len(lengths) <= self._policy.most_rows:
            return {}
        limits = {sequence: limit for sequence, length in lengths.items() if (limit := self._limit(sequence, length))}
        if not limits:
            return {}
        rates = [self._of(sequence).rate for sequence in limits]
        chosen = self._policy.choose(len(lengths), rates, list(limits.values()))
        return {sequence: count for sequence, count in zip(limits, chosen, strict=True) if count}

    def _limit(self, sequence: Sequence, length: int) -> int:
        """Most drafts of a sequence: the step samples one token more than there are drafts."""
        room = sequence.request.max_tokens - (length - sequence.num_prompt) - 1
        if room < 1 or self._of(sequence).resumes_at > length or not self.drafter.can_draft(sequence):
            return 0
        return min(room, self._num_drafts)

    def _of(self, sequence: Sequence) -> Acceptance:
        acceptance = self._acceptance.get(sequence)
        if acceptance is None:
            acceptance = self._acceptance[sequence] = Acceptance(self._policy.prior)
        return acceptance


def new_speculator(
    config: SpeculativeConfig, runner: ModelRunner, draft_model: CausalLM | None, model: CausalLM | None = None
) -> Speculator:
    """The speculator that a configuration describes, for steps of `runner`.

    `draft_model`: its draft model if it has one. `model`: the model, for drafts by its prediction head.
    """
    count, sizes, options = config.num_speculative_tokens, runner.config, dict[str, Any]()
    drafter: Drafter
    if config.method == "mtp":
        assert model is not None
        drafter = HeadDrafter(model)
        options = {"fixed_cost": drafter.fixed_cost, "most_rows": sizes.most_predicting, "prior": HEAD_PRIOR}
    elif draft_model is not None:
        drafter = DraftModel(draft_model, runner, count)
    else:
        assert config.prompt_lookup_min is not None
        assert config.prompt_lookup_max is not None
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max, count)
    quantized = any(not jnp.issubdtype(weight.dtype, jnp.floating) for weight in runner.abstract_model.weights)
    cost = StepCost.on(ops.target().platform, quantized=quantized)
    tokens = sizes.verify_tokens or sorted({shape.tokens for shape in sizes.shapes if shape.verify})
    return Speculator(drafter, Policy(cost, tokens, count, drafter.step_cost, **options), count)


def load_draft_model(
    config: SpeculativeConfig, model: CausalLM, tokenizer: Tokenizer | None, *, mesh: Mesh | None, use_tqdm: bool
) -> CausalLM:
    """The draft model of a configuration, in the dtype of the model that verifies, and over the same devices.

    Without a tokenizer, vocabularies are compared by size only.
    """
    assert config.model is not None
    if all(window is not None for window in sliding_windows(model.config)):
        raise UnsupportedModelError(
            "speculative_config: all layers of this model have sliding windows, and a draft model needs blocks of the "
            'whole text; use the method "ngram"'
        )
    opened = checkpoint.Checkpoint.open(config.model)
    with progress.bar("loading the draft model", enabled=use_tqdm, count=False) as report:
        draft = load_causal_lm(opened, dtype=model.dtype, mesh=mesh, progress=report)
    if mesh is None:
        pack_linear_weights(draft, few_rows=True)
    if has_recurrent_layers(draft.config):
        raise UnsupportedModelError(
            f"speculative_config: model: {config.model} has recurrent layers, whose state cannot go back to "
            "before a draft that did not hold"
        )
    ours, theirs = model.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise InvalidParameterError(
            f"speculative_config: model: {config.model} has a vocabulary of {theirs} tokens, the model of {ours}; the "
            "two must have the same"
        )
    if tokenizer is not None:
        other = Tokenizer.from_checkpoint(opened)
        token = next((token for token in range(ours) if tokenizer.token(token) != other.token(token)), None)
        if token is not None:
            raise InvalidParameterError(
                f"speculative_config: model: token {token} of {config.model} is {other.token(token)!r}, of the model "
                f"{tokenizer.token(token)!r}; the two must have the same vocabulary"
            )
    return draft
