"""Speculative decoding: whether to draft tokens, how many, and what came of them.

A step that verifies computes each sequence's newest token and its drafts, and samples the model's own token after each
of them, from the seed and the position as always. The drafts hold up to the first that differs from what was sampled.
An engine without drafts therefore gives the same tokens, at every temperature.

The number of drafts depends on what held before and on a cost model, never on a clock, so it is equal in every run.
"""

from __future__ import annotations

import weakref
from collections import abc
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.sharding import Mesh

from verax import checkpoint, ops, progress
from verax._buckets import at_least
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.loading import load_causal_lm
from verax.models import CausalLM
from verax.models.causal_lm import has_recurrent_layers, sliding_windows
from verax.nn import pack_linear_weights
from verax.text.engine.outputs import SpeculationTotals
from verax.text.engine.request import Sequence
from verax.text.engine.scheduler import Schedule, Scheduler
from verax.text.features.drafters import DraftModel, NgramDrafter
from verax.text.features.speculative_config import SpeculativeConfig
from verax.text.step.runner import ModelRunner
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["Acceptance", "Drafter", "Policy", "Speculator", "StepCost", "load_draft_model", "new_speculator"]

Drafter = NgramDrafter | DraftModel

WAITING = 0.1
"""Part of a step for which the device waits for the host between steps that verify: the host must read the tokens
first. 0.3 ms of scheduling and packing compared with steps of 5 to 40 ms on a CPU."""

PRIOR = 0.5
"""Share of drafts that are expected to hold, of a sequence that had none yet."""

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

    Args:
        cost: cost of a step.
        sizes: ascending numbers of tokens of steps that verify.
        num_drafts: most drafts of a sequence.
        draft_cost: cost of drafting one token for all sequences.
    """

    def __init__(self, cost: StepCost, sizes: abc.Sequence[int], num_drafts: int, draft_cost: float):
        self._cost = cost
        self._sizes = sizes
        self._num_drafts = num_drafts
        self._draft_cost = draft_cost
        self.largest = sizes[-1]
        """Most tokens of a step that verifies."""

    def choose(self, num_rows: int, rates: abc.Sequence[float], limits: abc.Sequence[int]) -> list[int]:
        """Number of drafts of each sequence that can have some, for the most tokens in a given time.

        A step gives a token for each row, and `rate ** i` more for the i-th draft, which counts only if those before it
        hold. All zeros if a step without drafts gives more.

        Args:
            num_rows: sequences of the step, those without drafts included.
            rates: share of drafts that held, of sequences that can have drafts.
            limits: most drafts of each of them.
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
            value = expected / (self._cost(padded) + WAITING + self._draft_cost * longest)
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
            acceptance.rate, acceptance.trying = PRIOR, True
        elif acceptance.rate > PRIOR:
            acceptance.rest = 0


class Speculator:
    """Choice and verification of drafts. `Engine` calls it.

    Args:
        drafter: guesses of next tokens.
        policy: number of drafts.
        num_drafts: most drafts of a sequence in a step.
    """

    def __init__(self, drafter: Drafter, policy: Policy, num_drafts: int):
        self.totals = SpeculationTotals(num_accepted_tokens_per_pos=[0] * num_drafts)
        self.drafter = drafter
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
        sequence.request.num_draft_tokens += drafted
        sequence.request.num_accepted_tokens += accepted
        self._policy.record(self._of(sequence), drafted, accepted, len(sequence.tokens))

    def _num_drafts_of(self, lengths: abc.Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Number of drafts of each sequence that is to have some, by the lengths of the sequences of the step."""
        if not 0 < len(lengths) < self._policy.largest:
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
            acceptance = self._acceptance[sequence] = Acceptance()
        return acceptance


def new_speculator(config: SpeculativeConfig, runner: ModelRunner, draft_model: CausalLM | None) -> Speculator:
    """The speculator that a configuration describes, for steps of `runner`.

    Args:
        config: options of speculative decoding.
        runner: the runner of the model that verifies.
        draft_model: the draft model, if the method has one.
    """
    count = config.num_speculative_tokens
    drafter: Drafter
    if draft_model is not None:
        drafter = DraftModel(draft_model, runner, count)
    else:
        assert config.prompt_lookup_min is not None
        assert config.prompt_lookup_max is not None
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max, count)
    quantized = any(not jnp.issubdtype(weight.dtype, jnp.floating) for weight in runner.abstract_model.weights)
    cost = StepCost.on(ops.target().platform, quantized=quantized)
    return Speculator(drafter, Policy(cost, runner.config.verify_tokens, count, drafter.step_cost), count)


def load_draft_model(
    config: SpeculativeConfig, model: CausalLM, tokenizer: Tokenizer | None, *, mesh: Mesh | None, use_tqdm: bool
) -> CausalLM:
    """The draft model of a configuration, in the dtype of the model that verifies, and over the same devices.

    Args:
        config: options of speculative decoding, with a model.
        model: the model that verifies.
        tokenizer: its tokenizer; None if prompts are token ids, and vocabularies are compared by size only.
        mesh: devices to divide it over; the default device if None.
        use_tqdm: a progress bar while loading, if stderr is a terminal.

    Raises:
        CheckpointError: if the checkpoint is missing, damaged, or does not fit its config.json.
        UnsupportedModelError: if verax has no such architecture, or it has recurrent layers; or if all layers of the
            model that verifies have sliding windows.
        InvalidParameterError: if the vocabularies differ, or if it does not divide over the devices.
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
