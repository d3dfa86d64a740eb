"""Scheduler of device steps: decodes first, then chunks of prompts, within one token budget.

A schedule is one device step. Decoding never waits for a prompt. A prompt that is longer than the rest of the budget is
computed in chunks, over several steps. When blocks run out, the blocks of the sequence that arrived last are freed, and
it is computed again later (preemption by recompute).
"""

from __future__ import annotations

import itertools
import time
from collections import abc, deque
from dataclasses import dataclass, field, replace

from verax._buckets import cheapest_part
from verax.text.engine.blocks import BlockManager, Prefix
from verax.text.engine.request import Sequence, SequenceState
from verax.text.features.lora import AdapterSlots

STEP_OVERHEAD = 32
"""Tokens that take as long as the fixed part of a step, most of which reads the weights. Measured with Qwen3-0.6B in
bfloat16 on two cores with AVX2: steps of 32, 128 and 512 tokens take 0.53, 1.4 and 5.1 s."""


SEQUENCE_TOKENS = 128
"""Prompt tokens that an unfinished sequence counts as: about as many tokens as a usual answer has still to get."""


BY_STEP = -1


@dataclass(frozen=True)
class Chunk:
    """Tokens `start : start + count` of a sequence. A token is sampled after each of the last `num_sampled` of them.

    That is the last one or, in a decode step of several tokens, all.
    """

    sequence: Sequence
    start: int
    count: int
    num_sampled: int
    new_blocks: tuple[tuple[int, ...], ...]
    """Block of each cache group, for each new place in the sequence's block tables."""
    first_new_block: int
    """Index of the first of `new_blocks` in the tables."""
    drafts: tuple[int, ...] = ()
    """The chunk's tokens but the first, if they are only guessed: a token is sampled after each of its tokens.

    `BY_STEP` stands for a token that the step guesses itself.
    """


@dataclass
class Schedule:
    """One step: the chunks to compute, and the sequences that were admitted to a slot just before it."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    restored: list[tuple[int, int]] = field(default_factory=list)
    """Kept recurrent states, by row, that are copied into slots before the step: (row, slot)."""
    kept: list[tuple[int, int]] = field(default_factory=list)
    """Recurrent states of slots that are copied into rows after the step: (slot, row)."""
    verify_tokens: int = 0
    """Tokens of a step that verifies drafts, with those that got blocks and were dropped since; 0 for other steps."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def only_decodes(self) -> bool:
        """True if each chunk is a sequence's newest token, and no prompt is scored."""
        return all(
            chunk.count == 1
            and chunk.num_sampled
            and (chunk.start >= chunk.sequence.num_prompt or chunk.sequence.request.params.prompt_logprobs is None)
            for chunk in self.chunks
        )

    @property
    def constrained(self) -> bool:
        """True if a token is sampled for a sequence that has a grammar."""
        return any(chunk.num_sampled and chunk.sequence.matcher is not None for chunk in self.chunks)

    @property
    def adapted(self) -> bool:
        """True if one of the sequences has an adapter."""
        return any(chunk.sequence.adapter_slot is not None for chunk in self.chunks)


def work(num_waiting_tokens: int, num_seqs: int) -> int:
    """Work of an engine in tokens."""
    return num_waiting_tokens + SEQUENCE_TOKENS * num_seqs


class Scheduler:
    """Queues of waiting and running sequences.

    Args:
        prompt_sizes: numbers of tokens that steps with prompts are padded to, where padding takes time. A step is then
            made to fill one of them.
        decode_steps: tokens of each sequence that a step decodes, one after the other, if it does nothing else: by the
            most sequences of such a step, ascending. No more than `max_num_batched_tokens`.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_loras: int = 0,
        prompt_sizes: abc.Sequence[int] = (),
        decode_steps: abc.Mapping[int, int] | None = None,
    ):
        self.blocks = blocks
        self.adapters = AdapterSlots(max_loras)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prompt_sizes = prompt_sizes
        self.decode_steps = decode_steps or {}
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_waiting_tokens = 0
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._leaving: list[tuple[int, Prefix]] = []
        """Slots whose recurrent state is to be kept after the step that is being planned, with the prefixes."""

    @property
    def has_work(self) -> bool:
        """True if any sequence is unfinished."""
        return bool(self.waiting or self.running)

    @property
    def load(self) -> int:
        """Work of the unfinished sequences, in tokens."""
        return work(self.num_waiting_tokens, len(self.waiting) + len(self.running))

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence after the waiting ones."""
        self.waiting.append(sequence)
        self.num_waiting_tokens += sequence.num_prompt

    def schedule(self) -> Schedule:
        """Plan the next step, and advance `num_computed` and `num_pending` of its sequences as if it had run."""
        plan = Schedule()
        budget, steps = self.max_num_batched_tokens, self._num_decode_steps()
        # Decodes first. The order of `running` is the order of arrival: victims are taken from its end.
        for sequence in list(self.running):
            if sequence.state is SequenceState.RUNNING and sequence.num_to_compute == 1 and not sequence.exhausted:
                budget -= self._plan(plan, sequence, 1, steps) > 0
        budget = self._prompt_budget(len(plan.chunks), budget)
        for sequence in list(self.running):
            if budget > 0 and sequence.state is SequenceState.RUNNING and sequence.num_to_compute > 1:
                # Not yet planned in the loop above: its plan would have left 0 or 1 to compute.
                budget -= self._plan(plan, sequence, budget)
        # A sequence that this plan preempted is the first to wait, and is not admitted: the others took its blocks.
        self._admit(plan, budget)
        # States are restored before the step, so what this step leaves is found by the next plan at the earliest.
        for slot, prefix in self._leaving:
            if (row := self.blocks.keep_state(prefix)) is not None:
                plan.kept.append((slot, row))
        self._leaving.clear()
        return plan

    def reserve(self, plan: Schedule, num_drafts: abc.Mapping[Sequence, int]) -> list[Sequence]:
        """Give sequences the blocks for drafts that follow the one token which the plan computes of them.

        `num_computed` stays what it is without drafts: the number that holds is known after the step. Nobody is
        preempted for a guess.

        `num_drafts`: most drafts of each sequence.

        Result: the sequences with blocks for all of theirs.
        """
        reserved = []
        for i, chunk in enumerate(plan.chunks):
            sequence, length = chunk.sequence, chunk.start + 1 + num_drafts.get(chunk.sequence, 0)
            new = self.blocks.grow(sequence, length, first=chunk.start) if length > chunk.start + 1 else None
            if new is not None:
                plan.chunks[i] = replace(chunk, new_blocks=(*chunk.new_blocks, *new))
                reserved.append(sequence)
        if reserved:
            plan.verify_tokens = len(plan.chunks) + sum(num_drafts[sequence] for sequence in reserved)
        return reserved

    def finish(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence, and free its blocks and its slot."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self.num_waiting_tokens -= sequence.num_prompt
        sequence.state = SequenceState.FINISHED

    def _num_decode_steps(self) -> int:
        """Tokens of each sequence that the next step may decode: several if it decodes only, and nobody waits for it.

        What the host has to see, or to give, between two tokens is left to steps of one token.
        """
        steps = next((steps for rows, steps in self.decode_steps.items() if rows >= len(self.running)), 1)
        if steps == 1 or (self.waiting and self._free_slots):
            return 1
        alone = any(
            sequence.num_to_compute > 1
            or sequence.matcher is not None
            or sequence.adapter_id is not None
            or sequence.request.params.logprobs is not None
            for sequence in self.running
        )
        return 1 if alone else steps

    def _prompt_budget(self, num_decodes: int, budget: int) -> int:
        """Tokens of prompts that the step computes, at most: as many as take the least time in all.

        Each step that the prompts are divided over has the decodes, too.
        """
        if not self.prompt_sizes or budget == 0:
            return budget
        wanted = sum(s.num_to_compute for s in self.running if s.num_to_compute > 1)
        for sequence in itertools.islice(self.waiting, len(self._free_slots)):
            if wanted >= budget or (prefixes := self._find_room(sequence)) is None:
                break
            wanted += sequence.num_tokens - len(prefixes) * self.blocks.block_size
        if wanted <= 0:
            return budget
        sizes = [size - num_decodes for size in self.prompt_sizes if size > num_decodes]
        return cheapest_part(sizes, min(wanted, budget), STEP_OVERHEAD + num_decodes)

    def _admit(self, plan: Schedule, budget: int) -> None:
        while self.waiting and budget > 0 and self._free_slots:
            sequence = self.waiting[0]
            # The sequences after it wait too. Otherwise a stream of requests for the adapters in use could keep it out.
            if (prefixes := self._find_room(sequence)) is None:
                return
            adapter = sequence.adapter_id
            self.blocks.admit(sequence, prefixes)
            self.waiting.popleft()
            self.num_waiting_tokens -= sequence.num_prompt
            sequence.state = SequenceState.RUNNING
            sequence.slot = self._free_slots.pop()
            sequence.adapter_slot = None if adapter is None else self.adapters.acquire(adapter)
            self.running.append(sequence)
            plan.admitted.append(sequence)
            if prefixes and (row := self.blocks.state_to_restore(prefixes[-1])) is not None:
                plan.restored.append((row, sequence.slot))
            if sequence.request.num_cached_tokens is None:
                # A request that began with an answer so far may find its tokens too.
                sequence.request.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
                sequence.request.note(first_scheduled_time=time.perf_counter())
            budget -= self._plan(plan, sequence, budget)

    def _find_room(self, sequence: Sequence) -> list[Prefix] | None:
        """The cached prefixes of a waiting sequence that could be admitted now; None if it has to wait."""
        if sequence.num_pending:  # preempted with a token on its way; it is known after this step
            return None
        if sequence.adapter_id is not None and not self.adapters.has_room(sequence.adapter_id):
            return None
        # Room for one more token than the prompt: admitting what must be preempted at its first decode is waste.
        room = min(sequence.num_tokens + 1, sequence.num_prompt + sequence.request.max_tokens)
        return self.blocks.find_room(sequence, room, chunk=self.max_num_batched_tokens)

    def _plan(self, plan: Schedule, sequence: Sequence, most: int, steps: int = 1) -> int:
        """Add a chunk of at most `most` tokens, preempting later sequences for its blocks if needed.

        It ends where a recurrent state is to be kept. A newest token may have up to `steps - 1` others after it, if
        there are blocks for them. Return the number of tokens that are planned, 0 if the sequence itself was preempted.
        """
        start, table_length = sequence.num_computed, len(sequence.tables[0])
        known = sequence.num_tokens
        last = min(known + steps - 1, sequence.num_prompt + sequence.request.max_tokens - 1) if steps > 1 else known
        end = min([last, start + most + steps - 1, *sequence.state_borders[:1]])
        count = end - start
        new = self.blocks.grow(sequence, end)
        if new is None and steps > 1:
            count = 1  # nobody is preempted for the tokens after it
        while new is None and (new := self.blocks.grow(sequence, start + count)) is None:
            # A sequence that this step computes already keeps its blocks: its writes are on their way.
            planned = {chunk.sequence for chunk in plan.chunks}
            victim = next((s for s in reversed(self.running) if s not in planned), sequence)
            self._preempt(victim)
            if victim is sequence:
                return 0
        sequence.num_computed += count
        num_sampled = max(0, sequence.num_computed - known + 1)
        sequence.num_pending += num_sampled
        plan.chunks.append(Chunk(sequence, start, count, num_sampled, new, table_length))
        self.blocks.register(sequence)
        if (prefix := self.blocks.state_to_keep(sequence)) is not None:
            assert sequence.slot is not None
            self._leaving.append((sequence.slot, prefix))
        return count

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._give_back(victim)
        victim.state = SequenceState.WAITING
        self.num_preemptions += 1
        self.waiting.appendleft(victim)
        self.num_waiting_tokens += victim.num_prompt

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.blocks.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = sequence.adapter_slot = None
        sequence.num_skipped, sequence.is_predicted = 0, False
        if sequence.adapter_id is not None:
            self.adapters.release(sequence.adapter_id)
