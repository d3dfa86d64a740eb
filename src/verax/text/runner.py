"""Device state and compiled steps: turn a schedule into one device call, without waiting for its result."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from verax import ops
from verax._buckets import at_least
from verax._compat import compiler_options
from verax.models import CausalLM
from verax.nn import Embedding
from verax.text.program import AbstractModel, StepProgram, new_cache, step_program
from verax.text.scheduler import Schedule
from verax.text.sizes import RunnerConfig
from verax.text.slots import admit, new_slots, pack_admission
from verax.text.step import StepOutput, StepShape

__all__ = ["ModelRunner", "PendingStep"]


@dataclass
class PendingStep:
    """A dispatched step: its schedule, and arrays that will be ready later."""

    schedule: Schedule
    output: StepOutput
    token_offsets: tuple[int, ...]
    """Index of each chunk's first token in the step's ragged batch."""


class ModelRunner:
    """Weights, cache and slots on the device. The one place where programs are dispatched."""

    def __init__(self, model: CausalLM, config: RunnerConfig, *, eos_token_ids: abc.Sequence[int] = ()):
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        # Flattened once: a step passes a flat tuple of arrays, and the module exists only while tracing.
        self._weights = tuple(jax.tree.leaves(nnx.state(model)))
        self.abstract_model = AbstractModel.from_module(model)
        """The model without its weights."""
        self.weight_bytes = sum(weight.nbytes for weight in self._weights) - _table_bytes(model)
        """Bytes of weights that a decode step reads: all but embedding tables that are no output head."""
        self._cache = new_cache(model.config, config)
        self.cache_bytes = sum(array.nbytes for array in jax.tree.leaves(self._cache))
        """Bytes of the key/value cache and the recurrent states."""
        self._slots = new_slots(config.max_num_seqs, config.max_model_len, config.table_width)
        self._admit: Any = jax.jit(admit, donate_argnums=0, compiler_options=compiler_options(ops.target().platform))
        self._steps = {shape: self.program(shape).jit() for shape in config.shapes}

    def program(self, shape: StepShape) -> StepProgram:
        """The program of one step on this runner's state."""
        return step_program(self.abstract_model, self.config, shape)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compile every bucket and run it once on padding; seconds taken. Nothing compiles after this."""
        begin = time.perf_counter()
        shapes = self.config.shapes
        if progress is not None:
            progress(0, len(shapes))
        # XLA compiles outside of Python's lock, and one step uses one core to compile: two at a time fill two.
        with ThreadPoolExecutor(2) as pool:
            compiled = pool.map(lambda shape: self._steps[shape].lower(*self._arguments(shape)).compile(), shapes)
            for done, _ in enumerate(compiled, start=1):
                if progress is not None:
                    progress(done, len(shapes))
        for shape in shapes:
            jax.block_until_ready(self._dispatch(shape, self._padding(shape)))
        # No sequence owns slot 0 yet, and the first to get it writes all of it.
        width = sum(field.shape[1] for field in jax.tree.leaves(self._slots))
        self._slots = self._admit(self._slots, np.zeros(1 + width, np.int32))
        return time.perf_counter() - begin

    def admit(self, schedule: Schedule) -> None:
        """Fill the slots of sequences that the schedule admitted."""
        for sequence in schedule.admitted:
            packed = pack_admission(sequence, self.config.max_model_len, self.config.table_width, self.eos_token_ids)
            self._slots = self._admit(self._slots, packed)

    def run(self, schedule: Schedule) -> PendingStep:
        """Dispatch a step. Returns at once; reading the result's arrays waits for it."""
        self.admit(schedule)
        packed, shape, offsets = self.pack(schedule)
        output = self._dispatch(shape, packed)
        output.tokens.copy_to_host_async()
        return PendingStep(schedule, output, offsets)

    def pack(self, schedule: Schedule) -> tuple[np.ndarray, StepShape, tuple[int, ...]]:
        """A schedule as a step's input, its bucket, and the index of each chunk's first token."""
        shape = self.shape_for(schedule)
        packed = self._padding(shape)
        rows = packed[: 4 * shape.rows].reshape(shape.rows, 4)
        updates = packed[4 * shape.rows :].reshape(-1, 3)
        offsets, token, update = [], 0, 0
        for i, chunk in enumerate(schedule.chunks):
            rows[i] = chunk.sequence.slot, chunk.start, chunk.count, chunk.sample
            offsets.append(token)
            token += chunk.count
            for j, block in enumerate(chunk.new_blocks, start=chunk.first_new_block):
                updates[update] = chunk.sequence.slot, j, block
                update += 1
        return packed, shape, tuple(offsets)

    def shape_for(self, schedule: Schedule) -> StepShape:
        """The smallest bucket that holds the schedule."""
        rows, tokens = len(schedule.chunks), schedule.num_tokens
        # Only a mixed step scores prompts.
        decode = all(c.count == 1 and c.sequence.request.params.prompt_logprobs is None for c in schedule.chunks)
        if decode:
            return StepShape(size := at_least(self.config.decode_rows, rows), size, True)
        tokens = at_least(self.config.mixed_tokens, tokens)
        return min(s for s in self.config.shapes if not s.decode and s.rows >= rows and s.tokens >= tokens)

    def _padding(self, shape: StepShape) -> np.ndarray:
        """A step's input in which every row and every block update goes nowhere."""
        packed = np.zeros(shape.input_size(self.config.block_size), np.int32)
        packed[0 : 4 * shape.rows : 4] = self.config.max_num_seqs
        packed[4 * shape.rows :: 3] = self.config.max_num_seqs
        return packed

    def _arguments(self, shape: StepShape) -> tuple[Any, ...]:
        return self._weights, self._slots, self._cache, self._padding(shape)

    def _dispatch(self, shape: StepShape, packed: np.ndarray) -> StepOutput:
        self._slots, self._cache, output = self._steps[shape](self._weights, self._slots, self._cache, packed)
        return output

    def compile_with_implementations(
        self, shape: StepShape, **implementations: str | Callable[..., Any]
    ) -> Callable[[np.ndarray], StepOutput]:
        """A step on this runner's state, compiled with the named implementations of operations, for measurements."""
        with ops.use_implementations(**implementations):
            step = self.program(shape).jit().lower(*self._arguments(shape)).compile()

        def run(packed: np.ndarray) -> StepOutput:
            self._slots, self._cache, output = step(self._weights, self._slots, self._cache, packed)
            return output

        return run

    def num_compiled(self) -> int:
        """Programs compiled so far; constant after `warm_up`."""
        return self._admit._cache_size() + sum(step._cache_size() for step in self._steps.values())


def _table_bytes(model: CausalLM) -> int:
    """Bytes of embedding tables of which a step reads single rows: those that are not the output head."""
    tied, vocab_size = model.config.tie_word_embeddings, model.config.vocab_size
    tables = (
        module.weight[...] for _, module in nnx.iter_modules(cast(nnx.Module, model)) if isinstance(module, Embedding)
    )
    return sum(table.nbytes for table in tables if not (tied and table.shape[0] == vocab_size))
