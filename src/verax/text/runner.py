"""Device state and compiled steps: turns a schedule into one device call, and hands the result back without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as List
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from verax import ops
from verax._buckets import at_least, powers
from verax._compat import compiler_options
from verax.models import Qwen3Config, Qwen3ForCausalLM
from verax.ops.pages import page_bytes
from verax.text.scheduler import Schedule
from verax.text.slots import admit, new_slots, pack_admission
from verax.text.step import PROMPT_LOGPROB_CHUNK, Cache, StepOutput, StepShape, make_step

__all__ = ["ModelRunner", "PendingStep", "RunnerConfig", "block_bytes", "state_bytes"]


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes that the compiled programs depend on."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache_dtype: DTypeLike

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)


@dataclass
class PendingStep:
    """A step on its way: its schedule, and arrays that will be ready later."""

    schedule: Schedule
    output: StepOutput
    token_offsets: tuple[int, ...]
    """Where each chunk's tokens begin in the step's ragged batch."""


class ModelRunner:
    """Owns the weights, the cache and the slots on the device. The one place where programs are dispatched."""

    def __init__(self, model: Qwen3ForCausalLM, config: RunnerConfig, *, eos_token_ids: List[int] = ()):
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        graph, state = nnx.split(model)
        # Flattened once: a step passes a flat tuple of arrays, and the module exists only while tracing.
        leaves, treedef = jax.tree.flatten(state)
        self._weights = tuple(leaves)
        table = 0 if model.lm_head is None else model.model.embed_tokens.weight[...].nbytes
        self.weight_bytes = sum(weight.nbytes for weight in leaves) - table
        """Bytes of weights that a decode step reads: all but an embedding table that is no output head."""
        self._build = lambda weights: nnx.merge(graph, jax.tree.unflatten(treedef, weights))
        self._cache = new_cache(model.config, config)
        self.cache_bytes = sum(array.nbytes for array in jax.tree.leaves(self._cache))
        """Bytes of the key/value cache."""
        self._slots = new_slots(config.max_num_seqs, config.max_model_len, config.table_width)
        self._options = compiler_options()
        self._admit: Any = jax.jit(admit, donate_argnums=0, compiler_options=self._options)
        self.decode_rows = powers(1, config.max_num_seqs, 2)
        # Rows cost a pass over the vocabulary each, tokens a pass through the layers: few sizes of either will do.
        self.mixed_rows = powers(min(8, config.max_num_seqs), config.max_num_seqs, 8)
        self.mixed_tokens = [
            -(-size // PROMPT_LOGPROB_CHUNK) * PROMPT_LOGPROB_CHUNK
            for size in powers(min(32, config.max_num_batched_tokens), config.max_num_batched_tokens, 4)
        ]
        self._steps = {shape: self._compile_later(shape) for shape in self.shapes}

    @property
    def shapes(self) -> list[StepShape]:
        """Every step that this runner can be asked for: the buckets."""
        decode = [StepShape(rows, rows, True) for rows in self.decode_rows]
        mixed = [StepShape(rows, tokens, False) for tokens in self.mixed_tokens for rows in self.mixed_rows]
        return [*decode, *(shape for shape in mixed if shape.rows <= shape.tokens or shape.rows == self.mixed_rows[0])]

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compile every bucket and run it once on padding; seconds taken. Nothing compiles after this."""
        begin = time.perf_counter()
        shapes = self.shapes
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
        # Slot 0 is nobody's yet: whoever gets it writes all of it.
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
        """A schedule as a step's input, the bucket that it runs in, and where each chunk's tokens begin."""
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
        plain = all(c.count == 1 and c.sequence.request.params.prompt_logprobs is None for c in schedule.chunks)
        if plain:
            return StepShape(size := at_least(self.decode_rows, rows), size, True)
        tokens = at_least(self.mixed_tokens, tokens)
        return min(s for s in self.shapes if not s.decode and s.rows >= rows and s.tokens >= tokens)

    def _padding(self, shape: StepShape) -> np.ndarray:
        """A step's input in which every row and every block update goes nowhere."""
        packed = np.zeros(shape.input_size(self.config.block_size), np.int32)
        packed[0 : 4 * shape.rows : 4] = self.config.max_num_seqs
        packed[4 * shape.rows :: 3] = self.config.max_num_seqs
        return packed

    def _arguments(self, shape: StepShape) -> tuple[Any, ...]:
        return self._weights, self._slots, self._cache, self._padding(shape)

    def _compile_later(self, shape: StepShape) -> Any:
        step = make_step(self._build, shape, self.config.block_size)
        step.__name__ = f"{'decode' if shape.decode else 'mixed'}_{shape.rows}x{shape.tokens}"
        return jax.jit(step, donate_argnums=(1, 2), compiler_options=self._options)

    def _dispatch(self, shape: StepShape, packed: np.ndarray) -> StepOutput:
        self._slots, self._cache, output = self._steps[shape](self._weights, self._slots, self._cache, packed)
        return output

    def compile_with_implementations(
        self, shape: StepShape, **implementations: str | Callable[..., Any]
    ) -> Callable[[np.ndarray], StepOutput]:
        """Step on this runner's state, compiled with the given implementations of operations, to measure."""
        with ops.use_implementations(**implementations):
            step = self._compile_later(shape).lower(*self._arguments(shape)).compile()

        def run(packed: np.ndarray) -> StepOutput:
            self._slots, self._cache, output = step(self._weights, self._slots, self._cache, packed)
            return output

        return run

    def num_compiled(self) -> int:
        """Programs compiled so far: after `warm_up` this stays as it is."""
        return self._admit._cache_size() + sum(step._cache_size() for step in self._steps.values())


def new_cache(model: Qwen3Config, config: RunnerConfig) -> Cache:
    """Zeroed pages (what is masked out is multiplied too, so it must be finite), or a recurrent state for each slot."""
    shape = (config.num_blocks, model.num_key_value_heads, config.block_size, model.head_dim)
    states = [model.new_state(layer, config.max_num_seqs) for layer in range(model.num_hidden_layers)]
    new = ops.new_pages
    return tuple(
        (new(shape, config.cache_dtype), new(shape, config.cache_dtype)) if state is None else state for state in states
    )


def block_bytes(model: Qwen3Config, block_size: int, dtype: DTypeLike) -> int:
    """Bytes of one block over all layers that attend, keys and values."""
    attending = sum(state is None for state in _states(model))
    page = (model.num_key_value_heads, block_size, model.head_dim)
    return 2 * attending * page_bytes(page, dtype)


def state_bytes(model: Qwen3Config) -> int:
    """Bytes of one sequence's recurrent state over all layers; 0 for a model that only attends."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(_states(model)))


def _states(model: Qwen3Config) -> list[Any]:
    """By layer: the shapes of one sequence's state, or None."""
    return jax.eval_shape(lambda: [model.new_state(layer, 1) for layer in range(model.num_hidden_layers)])
