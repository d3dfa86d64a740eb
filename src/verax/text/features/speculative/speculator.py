"""Drafts of the engine's steps: whether to make some, how many, and what came of them.

A step that verifies computes each sequence's newest token and its drafts, and samples the model's own token after each
of them, from the seed and the position as always. The drafts hold up to the first that differs from what was sampled.
The tokens are therefore those of an engine without drafts, at every temperature.
"""

from __future__ import annotations

import weakref
from collections import abc
from dataclasses import replace
from typing import Protocol

from verax.text.engine.scheduler import Schedule, Scheduler
from verax.text.engine.sequence import Sequence
from verax.text.engine.stats import SpeculationTotals
from verax.text.features.speculative.policy import Acceptance, Policy
from verax.text.hosts.dispatch import Dispatch
from verax.text.step.engine_programs import JittedCall

__all__ = ["Drafter", "Speculator"]


class Drafter(Protocol):
    """Guesses of next tokens."""

    @property
    def step_cost(self) -> float:
        """Time of drafting one token for all sequences, in steps of the model."""
        ...

    def uncompiled(self) -> abc.Sequence[JittedCall]:
        """Programs that it runs on the device, with arguments, to compile."""
        ...

    def warm_up(self) -> None:
        """Run its programs once they are compiled. Nothing compiles after this."""
        ...

    def repeat(self, dispatch: Dispatch) -> None:
        """Make the dispatch of another host's drafter."""
        ...

    def can_draft(self, sequence: Sequence) -> bool:
        """True if it has a guess behind the tokens that the host knows."""
        ...

    def draft(self, schedule: Schedule, num_drafts: abc.Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """At most so many tokens of each sequence, behind the tokens that the host knows: all of them."""
        ...


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
            tokens = made = drafts.get(sequence, [])
            if sequence.matcher is not None:
                tokens = made[: sequence.matcher.num_allowed(made)]
            if made and not tokens:  # refused before the model sees them
                self._policy.record(self._of(sequence), len(made), 0, len(sequence.tokens))
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
        found = self._acceptance.get(sequence)
        if found is None:
            found = self._acceptance[sequence] = Acceptance()
        return found
