"""Drafters of speculative decoding: prompt lookup, and a smaller model with the same vocabulary.

Prompt lookup (Saxena, 2023; vLLM's `ngram`) copies what followed the last tokens when they occurred before in the text:
https://github.com/apoorvumang/prompt-lookup-decoding

A draft model has weights and a cache of its own. Its cache has as many blocks as the model's, so that one block table
serves both, and it reads and extends the same texts with the same sampling parameters, seeds and positions: where the
two models agree, they draw the same token.
"""

from __future__ import annotations

import weakref
from collections import abc
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from verax._buckets import at_least, powers
from verax.models import CausalLM
from verax.text.engine.blocks import CacheGroup
from verax.text.engine.request import Sequence
from verax.text.engine.scheduler import Chunk, Schedule
from verax.text.hosts import Dispatch
from verax.text.step.program import AbstractModel, JittedCall, new_cache, placed, step_program
from verax.text.step.runner import ModelRunner, weight_bytes
from verax.text.step.sampler import SAMPLED
from verax.text.step.sizes import RunnerConfig
from verax.text.step.slots import Slots
from verax.text.step.step import StepShape, with_new_blocks

__all__ = ["DraftModel", "NgramDrafter", "NgramIndex"]

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

        Args:
            tokens: the text, which begins with the text of the call before.
            length: number of tokens to return.
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

    Args:
        smallest: fewest tokens that must occur again.
        largest: most tokens that are compared.
        num_drafts: most drafts of a sequence.
    """

    step_cost = 0.0
    """Time of drafting one token for all sequences, in steps of the model."""

    def __init__(self, smallest: int, largest: int, num_drafts: int):
        self._smallest = smallest
        self._largest = largest
        self._num_drafts = num_drafts
        self._indices: weakref.WeakKeyDictionary[Sequence, NgramIndex] = weakref.WeakKeyDictionary()

    def uncompiled(self) -> list[JittedCall]:
        """No programs: the host looks up."""
        return []

    def warm_up(self) -> None:
        """Run nothing."""

    def repeat(self, dispatch: Dispatch) -> None:
        """Refuse what no drafter of this kind sends."""
        raise AssertionError(f"{dispatch.program} was sent, and this host has no draft model")

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

    Args:
        model: the draft model.
        runner: the runner of the model that verifies.
        num_drafts: most drafts of a sequence.
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
        """Shapes of its steps."""
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
            table[i] = _slot(chunk), start, count, SAMPLED * sample
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
