"""Device state and compiled steps: turn a schedule into one device call, without waiting for its result."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from verax import ops
from verax._buckets import at_least
from verax._compat import begin_copy_to_host, compiler_options, no_compilation_cache
from verax.errors import InvalidParameterError
from verax.models import CausalLM
from verax.nn import Embedding, is_tied_head
from verax.text.engine.scheduler import Schedule
from verax.text.features.grammar import mask_width
from verax.text.features.lora import AdaptedLayers, LoadedAdapter, write_adapter
from verax.text.hosts import Dispatch, Group, ProgramName
from verax.text.step.program import (
    AbstractModel,
    CompiledPrograms,
    JittedCall,
    Programs,
    StepProgram,
    admission_name,
    compile_program,
    jitted_programs,
    kept_of,
    new_cache,
    new_kept_states,
    new_programs,
    placed,
    sampling_name,
    sampling_program,
    step_name,
    step_program,
)
from verax.text.step.sizes import CopyName, RunnerConfig, layer_states
from verax.text.step.slots import Slots, admission_size, new_slots, pack_admission
from verax.text.step.step import DEFERRED, SAMPLED, Logprobs, StepOutput, StepShape


class DeviceAdapters:
    """Matrices of the adapters in use, and the program that replaces the matrices of one slot.

    `mesh`: devices that the model is divided over; None for JAX's default device. `group`: hosts that share the model;
    None for one host. Rank 0 sends what it writes.
    """

    def __init__(self, layers: AdaptedLayers, mesh: Mesh | None = None, group: Group | None = None):
        self.layers = layers
        self._group = group
        shardings = None if mesh is None else tuple(NamedSharding(mesh, spec) for spec in layers.partitions)
        self.arrays = placed(layers.new_arrays, shardings)
        """Matrices of all slots, which a step takes after the model's weights."""
        self._numbers: list[int | None] = [None] * layers.max_loras
        options = compiler_options(ops.target().platform)
        self._write: Any = jax.jit(write_adapter, donate_argnums=0, compiler_options=options, out_shardings=shardings)

    def place(self, adapter: LoadedAdapter, slot: int) -> None:
        """Write an adapter into a slot, unless it is there. Steps that were dispatched before see what was there."""
        if self._numbers[slot] != adapter.id:
            self._fill(adapter.matrices, slot)
            self._numbers[slot] = adapter.id

    def warm_up(self) -> None:
        """Compile the program, and run it with zeros."""
        self._fill({}, 0)

    def num_compiled(self) -> int:
        """Programs compiled so far; constant after `warm_up`."""
        return self._write._cache_size()

    def repeat(self, slot: np.ndarray, packed: np.ndarray) -> None:
        """Write what rank 0 has written into a slot, as its dispatch has it."""
        rows: list[np.ndarray] = []
        data, dtype, at = packed.view(np.uint8), np.dtype(self.layers.dtype), 0
        for shape in self._row_shapes():
            end = at + math.prod(shape) * dtype.itemsize
            rows.append(data[at:end].view(dtype).reshape(shape))
            at = end
        self.arrays = self._write(self.arrays, tuple(rows), slot[0])

    def _fill(self, matrices: Mapping[str, tuple[np.ndarray, np.ndarray]], slot: int) -> None:
        """Write matrices by layer, with zeros where there are none, and after matrices of a smaller rank."""
        rows = [np.zeros(shape, self.layers.dtype) for shape in self._row_shapes()]
        for path, down, up in zip(self.layers.shapes, rows[::2], rows[1::2], strict=True):
            if path in matrices:
                a, b = matrices[path]
                down[: len(a)], up[:, : len(a)] = a, b
        if self._group is not None and self._group.leads:
            self._group.send(Dispatch.of("adapt", np.asarray([slot], np.int32), _packed(rows)))
        self.arrays = self._write(self.arrays, tuple(rows), np.int32(slot))

    def _row_shapes(self) -> Iterator[tuple[int, int]]:
        """Shapes of what is written into a slot: for each layer the matrix down to the rank and the one up from it."""
        for size_out, size_in in self.layers.shapes.values():
            yield self.layers.max_rank, size_in
            yield size_out, self.layers.max_rank


def _packed(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Bytes of arrays as int32, filled up with zeros to a whole number."""
    data = np.concatenate([row.reshape(-1).view(np.uint8) for row in rows])
    return np.pad(data, (0, -len(data) % 4)).view(np.int32)


@dataclass
class PendingStep:
    """A dispatched step: its schedule, and arrays that will be ready later."""

    schedule: Schedule
    output: StepOutput
    token_offsets: tuple[int, ...]
    """Index of each chunk's first token in the step's tokens."""
    deferred: np.ndarray | None = None
    """Rows of the step's input if `sample` is still to be called, `[B, 4]`."""


class ModelRunner:
    """Weights, cache and slots on the device or the devices. The one place where programs are dispatched."""

    def __init__(
        self,
        model: CausalLM,
        config: RunnerConfig,
        *,
        eos_token_ids: abc.Sequence[int] = (),
        suppressed_token_ids: abc.Sequence[int] = (),
        adapters: DeviceAdapters | None = None,
        mesh: Mesh | None = None,
        compiled: CompiledPrograms | None = None,
        group: Group | None = None,
    ):
        """Put weights, cache and slots on the device.

        `mesh`: devices that weights and cache are divided over; None for JAX's default device. `compiled`: programs to
        load, of this model and these sizes; None to compile them.
        """
        self.config = config
        self.group = group
        """Hosts that share the model; None for one host."""
        self.mesh = mesh
        """Devices that weights and cache are divided over; None for JAX's default device."""
        self.eos_token_ids = tuple(eos_token_ids)
        self.suppressed_token_ids = tuple(suppressed_token_ids)
        """Tokens that the model must not answer with."""
        # Flattened once: a step passes a flat tuple of arrays, and the module exists only while tracing.
        self._weights = tuple(jax.tree.leaves(nnx.state(model)))
        self._places = tuple((weight.sharding, weight.committed) for weight in self._weights)
        self._weights_on_host: tuple[np.ndarray, ...] | None = None
        self._adapters = adapters
        self.abstract_model = replace(AbstractModel.from_module(model), adapted=adapters and adapters.layers)
        self.weight_bytes = weight_bytes(model)
        """Bytes of weights that a decode step reads: all but embedding tables that are not the output head."""
        shardings = self.program(config.shapes[0]).shardings
        _, on_slots, on_cache, _ = shardings or (None,) * 4
        model_config = model.config
        self._new_cache = lambda: placed(lambda: new_cache(model_config, config), on_cache)
        self._cache: Any = self._new_cache()
        on_states = None if on_cache is None else kept_of(model_config, on_cache)
        self._new_kept = lambda: placed(lambda: new_kept_states(model_config, config), on_states)
        self._kept: Any = self._new_kept()
        states = layer_states(model_config, 1)
        self._recurrent = [layer for layer, state in enumerate(states) if state is not None]
        self.cache_bytes = sum(array.nbytes for array in jax.tree.leaves((self._cache, self._kept)))
        """Bytes of the key/value cache and the recurrent states, on all devices."""
        self._slots = placed(lambda: new_slots(*config.slot_sizes), on_slots)
        model_and_sizes = self.abstract_model, config
        programs = jitted_programs(*model_and_sizes, mesh) if compiled is None else compiled.programs(*model_and_sizes)
        self._is_compiled = compiled is not None
        self._admits = {self._admission_size(num_tokens): program for num_tokens, program in programs.admits.items()}
        """Programs that fill a slot, by the length of their input."""
        self._steps, self._samplers = programs.steps, programs.samplers
        self._copies, self._replays = programs.copies, programs.replays
        self._paddings: dict[StepShape, np.ndarray] = {}
        self._projected: tuple[Any, ...] = ()
        """Inputs of the recurrent layers in the last step, if it verified drafts."""
        self._logits: jax.Array | None = None
        """Scores of the last step that a follower has repeated, until they are sampled from."""

    def check_awake(self) -> None:
        """Check that weights and cache are on the device."""
        if self._cache is None:
            raise InvalidParameterError("the engine sleeps: call wake_up() before requests")
        if not self._weights:
            raise InvalidParameterError("sleep(level=2) has dropped the weights: call update_weights() before requests")

    def replace_weights(self, weights: abc.Sequence[jax.Array]) -> None:
        """Take other weights, of the shapes, dtypes and places of those before: no program compiles again."""
        expected = [(weight.shape, weight.dtype) for weight in self.abstract_model.weights]
        assert [(weight.shape, weight.dtype) for weight in weights] == expected
        self._weights_on_host = None
        self._weights = tuple(map(_at, weights, self._places))

    def sleep(self, *, keep_weights: bool) -> None:
        """Drop the cache and the weights, of which the host may keep a copy. A sleeping runner changes nothing."""
        if self._cache is None:
            return
        # References are dropped, nothing is deleted: the arrays may belong to the caller's module.
        self._weights_on_host = tuple(map(np.asarray, self._weights)) if keep_weights and self._weights else None
        self._weights, self._cache, self._kept = (), None, None

    def wake_up(self) -> None:
        """Allocate the cache again, zeroed, and put weights of the host back on the device."""
        if self._cache is not None:
            return
        self._cache, self._kept = self._new_cache(), self._new_kept()
        if self._weights_on_host is not None:
            self._weights = tuple(map(_at, self._weights_on_host, self._places))
            self._weights_on_host = None

    def program(self, shape: StepShape) -> StepProgram:
        """The program of one step on this runner's state."""
        return step_program(self.abstract_model, self.config, shape, self.mesh)

    def sampling_program(self, rows: int) -> StepProgram:
        """The program that samples the rows of a step by itself."""
        return sampling_program(self.abstract_model, self.config, rows, self.mesh)

    def uncompiled(self) -> list[JittedCall]:
        """The programs of the steps and of their sampling with arguments, to compile; none if they were loaded."""
        own = Programs({}, self._steps, self._samplers, self._copies, self._replays)
        return [] if self._is_compiled else [*self._with_arguments(own).values(), *self._replays.values()]

    def warm_up(self) -> None:
        """Run every bucket on padding, once it is compiled. Nothing compiles after this.

        Where padding takes time, only small steps are run.
        """
        for shape in self.config.shapes:
            # The first run of a program takes only a few milliseconds more than the next.
            if not self.config.padding_takes_time or shape.tokens <= self.config.mixed_tokens[0]:
                jax.block_until_ready(self._run_padding(shape))
                if shape in self._replays:
                    self._replay(shape, self._replayed_rows(shape))
        # No sequence owns slot 0 yet, and the first to get it writes all of it.
        for size in self._admits:
            self._fill_slot(np.zeros(size, np.int32))
        for name in self._copies:
            self._copy_state(name, 0, 0)
        if self._adapters is not None:
            self._adapters.warm_up()

    def _with_arguments(self, programs: Programs) -> dict[str, JittedCall]:
        """Programs of the steps and of their sampling by name, each with its arguments."""
        steps = {step_name(shape): (step, self._arguments(shape)) for shape, step in programs.steps.items()}
        return (
            steps
            | {
                sampling_name(rows): (sampler, self.sampling_program(rows).arguments)
                for rows, sampler in programs.samplers.items()
            }
            | {
                name: (copy, (*self._copied(name)[::-1], np.zeros(2, np.int32)))
                for name, copy in programs.copies.items()
            }
        )

    def compiled_programs(self) -> Iterator[tuple[str, jax.stages.Compiled]]:
        """Every program by name, compiled again for `write_programs`.

        A program that XLA:CPU has read from the compilation cache cannot be written again: functions are missing in it.
        """
        new = new_programs(self.abstract_model, self.config, self.mesh)
        programs = self._with_arguments(new)
        for num_tokens, program in new.admits.items():
            empty = np.zeros(self._admission_size(num_tokens), np.int32)
            programs[admission_name(num_tokens)] = program, (self._slots, empty)
        with no_compilation_cache():
            for name, program in programs.items():
                yield name, compile_program(*program)

    def _admission_size(self, num_tokens: int) -> int:
        return admission_size(num_tokens, self.config.block_size, len(self.config.groups))

    def _run_padding(self, shape: StepShape) -> StepOutput:
        packed = self._padding(shape)
        pending = PendingStep(Schedule(), self._dispatch(shape, packed), ())
        if shape.num_sampled in self._samplers and pending.output.logits is not None:
            pending.deferred = self._sampled_rows(shape, packed)
            self.sample(pending, self.new_masks(pending))
        return pending.output

    def run(self, schedule: Schedule) -> PendingStep:
        """Dispatch a step. Returns at once; reading the result's arrays waits for it.

        If a sequence with a grammar is sampled, the sampling is left to `sample`, which must be called next.
        """
        if self.group is not None and not self.group.leads:
            raise InvalidParameterError(
                f"node_rank: rank {self.group.rank} repeats what rank 0 does, which takes the requests; call follow() "
                "here"
            )
        for sequence in schedule.admitted:
            adapter, slot = sequence.request.adapter, sequence.adapter_slot
            if self._adapters is not None and adapter is not None and slot is not None:
                self._adapters.place(adapter, slot)
            num_tokens = at_least(self.config.admit_tokens, len(sequence.tokens))
            self._fill_slot(
                pack_admission(
                    sequence, num_tokens, self.config.block_size, self.eos_token_ids, self.suppressed_token_ids
                )
            )
        for row, slot in schedule.restored:
            self._copy_state("restore_state", row, slot)
        packed, shape, offsets = self.pack(schedule)
        output = self._dispatch(shape, packed)
        for slot, row in schedule.kept:
            self._copy_state("keep_state", slot, row)
        if self.config.most_predicted:
            for chunk in schedule.chunks:
                chunk.sequence.num_skipped += shape.decode
                # The head has not read tokens that a second program samples.
                chunk.sequence.is_predicted = not shape.decode and not schedule.constrained
        pending = PendingStep(schedule, output._replace(logits=None), offsets)
        if schedule.constrained:
            pending.output = output
            pending.deferred = self._sampled_rows(shape, packed)
        else:
            begin_copy_to_host(output.tokens)
        return pending

    def replay(self, schedule: Schedule, kept: Sequence[int]) -> None:
        """Continue recurrent states with the tokens that hold of the last step, which verified drafts.

        Such a step leaves the states unchanged. `kept`: number of tokens that hold of each chunk. Without recurrent
        layers nothing is done.
        """
        if not self._replays:
            return
        shape = self.shape_for(schedule)._replace(adapters=False)
        if shape in self._replays:
            packed = self._replayed_rows(shape)
            for row, chunk, count in zip(packed.reshape(-1, 3), schedule.chunks, kept, strict=False):
                slot = chunk.sequence.slot  # None if the sequence has finished
                row[:] = self.config.max_num_seqs if slot is None else slot, chunk.count, count
            self._replay(shape, packed)

    def new_masks(self, pending: PendingStep) -> np.ndarray:
        """Masks that allow every token, for the rows of a step: int32 `[B, w]`, a bit for each token."""
        assert pending.deferred is not None
        return np.full((len(pending.deferred), mask_width(self.abstract_model.config.vocab_size)), -1, np.int32)

    def sample(self, pending: PendingStep, masks: np.ndarray) -> None:
        """Dispatch the sampling that `run` left out, among the tokens that the masks allow."""
        rows, output = pending.deferred, pending.output
        assert rows is not None
        rows[:, 3] = np.where(rows[:, 3] == DEFERRED, SAMPLED, 0)
        tokens, logprobs = self._sample(output.logits, rows, masks)
        pending.output = output._replace(tokens=tokens, logprobs=logprobs, logits=None)
        pending.deferred = None
        begin_copy_to_host(tokens)

    def read(self, tokens: jax.Array | np.ndarray) -> np.ndarray:
        """Tokens of a step on the host, `[B]`. Waits for it.

        Raises:
            HostsError: if another host is gone.
        """
        try:
            return np.asarray(tokens)
        except jax.errors.JaxRuntimeError as error:
            if self.group is None:
                raise
            raise self.group.failure(error) from error

    def repeat(self, dispatch: Dispatch) -> None:
        """Make the dispatch of another host's runner, in whose order all of them are made."""
        arrays = dispatch.unpack()
        if dispatch.program == "step":
            assert dispatch.shape is not None
            self._logits = self._dispatch(dispatch.shape, *arrays).logits
        elif dispatch.program == "sample":
            self._sample(self._logits, *arrays)
        elif dispatch.program == "replay":
            assert dispatch.shape is not None
            self._replay(dispatch.shape, *arrays)
        elif dispatch.program == "adapt":
            assert self._adapters is not None  # the ranks have compared their options
            self._adapters.repeat(*arrays)
        elif dispatch.program in ("keep_state", "restore_state"):
            self._copy_state(dispatch.program, *arrays[0].tolist())
        else:
            self._fill_slot(*arrays)

    def with_slots(self, call: Callable[[Slots], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Call a program on this runner's slots, which it may donate: it returns the new ones first, then the rest."""
        self._slots, *rest = call(self._slots)
        return tuple(rest)

    def pack(self, schedule: Schedule) -> tuple[np.ndarray, StepShape, tuple[int, ...]]:
        """A schedule as a step's input, its bucket, and the index of each chunk's first token."""
        shape = self.shape_for(schedule)
        packed = self._padding(shape)
        rows, updates, drafts = shape.split(packed, len(self.config.groups))
        offsets, token, update = [], 0, 0
        sampled = DEFERRED if schedule.constrained else SAMPLED
        for i, chunk in enumerate(schedule.chunks):
            sequence = chunk.sequence
            rows[i] = sequence.slot, chunk.start, chunk.count, sampled * (chunk.num_sampled > 0), sequence.num_skipped
            offsets.append(token)
            if chunk.drafts and drafts is not None:
                drafts[token + 1 : token + chunk.count] = chunk.drafts
            token += shape.decode_steps if shape.decode else chunk.count
            for j, blocks in enumerate(chunk.new_blocks, start=chunk.first_new_block):
                for group, block in enumerate(blocks):
                    updates[group, update] = chunk.sequence.slot, j, block
                update += 1
        return packed, shape, tuple(offsets)

    def shape_for(self, schedule: Schedule) -> StepShape:
        """The smallest bucket that holds the schedule."""
        rows, tokens = len(schedule.chunks), schedule.num_tokens
        if schedule.verify_tokens and self.config.most_predicted:
            drafts = max(1, *(len(chunk.drafts) for chunk in schedule.chunks))
            # Sequences keep the blocks of drafts that were wanted and are not made.
            blocks, size = sum(len(chunk.new_blocks) for chunk in schedule.chunks), self.config.block_size
            alike = (s for s in self.config.shapes if s.rows >= rows and s.drafts >= drafts)
            return next(s for s in alike if s.num_updates(size) >= blocks)
        if schedule.verify_tokens:
            size = at_least(self.config.verify_tokens, schedule.verify_tokens)
            adapted = schedule.adapted
            return next(s for s in self.config.shapes if s.verify and s.tokens == size and s.adapters == adapted)
        if any(chunk.num_sampled > 1 for chunk in schedule.chunks):
            return next(shape for shape in self.config.repeated if shape.rows >= rows)
        if schedule.only_decodes:
            return StepShape(size := at_least(self.config.decode_rows, rows), size, True, adapters=schedule.adapted)
        tokens = at_least(self.config.mixed_tokens, tokens)
        alike = (s for s in self.config.shapes if not (s.decode or s.verify) and s.adapters == schedule.adapted)
        return min(s for s in alike if s.rows >= rows and s.tokens >= tokens)

    def _padding(self, shape: StepShape) -> np.ndarray:
        """A step's input in which every row and every block update goes nowhere."""
        if shape not in self._paddings:
            sizes = self.config.block_size, len(self.config.groups), self.config.max_num_seqs
            self._paddings[shape] = shape.padding(*sizes)
        return self._paddings[shape].copy()

    def _replayed_rows(self, shape: StepShape) -> np.ndarray:
        """Input of `make_replay` in which every row is padding."""
        return np.tile(np.asarray([self.config.max_num_seqs, 0, 0], np.int32), shape.rows)

    def _sampled_rows(self, shape: StepShape, packed: np.ndarray) -> np.ndarray:
        """(slot, start, count, sample) of each row of the step's output. A copy: the device may still read `packed`."""
        rows = shape.split(packed, len(self.config.groups))[0][:, :4].copy()
        if not shape.verify:
            return rows
        padding = np.tile(np.asarray([self.config.max_num_seqs, 0, 0, 0], np.int32), (shape.tokens, 1))
        counts = rows[:, 2]
        tokens = padding[: counts.sum()]
        tokens[:] = np.repeat(rows, counts, axis=0)
        tokens[:, 1] += np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens[:, 2] = 1
        return padding

    def _arguments(self, shape: StepShape) -> tuple[Any, ...]:
        return self._weights_of(shape), self._slots, self._cache, self._padding(shape)

    def _weights_of(self, shape: StepShape) -> tuple[jax.Array, ...]:
        """Weights that a step takes: the model's, then the adapters'."""
        return self._weights + self._adapters.arrays if self._adapters and shape.adapters else self._weights

    def _dispatch(self, shape: StepShape, packed: np.ndarray) -> StepOutput:
        self.send("step", packed, shape=shape)
        weights = self._weights_of(shape)
        self._slots, self._cache, output = self._steps[shape](weights, self._slots, self._cache, packed)
        self._projected = output.projected
        return output._replace(projected=())

    def _replay(self, shape: StepShape, packed: np.ndarray) -> None:
        self.send("replay", packed, shape=shape)
        replay, _ = self._replays[shape]
        self._cache, self._projected = replay(self._weights, self._cache, self._projected, packed), ()

    def _sample(self, logits: jax.Array | None, rows: np.ndarray, masks: np.ndarray) -> tuple[jax.Array, Logprobs]:
        self.send("sample", rows, masks)
        self._slots, tokens, logprobs = self._samplers[len(rows)](self._slots, logits, rows, masks)
        return tokens, logprobs

    def _fill_slot(self, packed: np.ndarray) -> None:
        self.send("admit", packed)
        self._slots = self._admits[len(packed)](self._slots, packed)

    def _copied(self, name: str) -> tuple[Any, Any]:
        """Source and target of a program that copies states."""
        states = tuple(self._cache[layer] for layer in self._recurrent)
        return (states, self._kept) if name == "keep_state" else (self._kept, states)

    def _copy_state(self, name: CopyName, source: int, to: int) -> None:
        rows = np.asarray([source, to], np.int32)
        self.send(name, rows)
        sources, targets = self._copied(name)
        targets = self._copies[name](targets, sources, rows)
        if name == "keep_state":
            self._kept = targets
        else:
            new = dict(zip(self._recurrent, targets, strict=True))
            self._cache = tuple(new.get(layer, old) for layer, old in enumerate(self._cache))

    def send(self, program: ProgramName, *arrays: np.ndarray, shape: StepShape | None = None) -> None:
        """Send a dispatch to the followers, if there are any."""
        if self.group is not None and self.group.leads:
            self.group.send(Dispatch.of(program, *arrays, shape=shape))

    def num_compiled(self) -> int:
        """Programs compiled so far; constant after `warm_up`. Those that were loaded count as well."""
        replays = [program for program, _ in self._replays.values()]
        programs = [
            *self._admits.values(),
            *self._steps.values(),
            *self._samplers.values(),
            *self._copies.values(),
            *replays,
        ]
        adapters = 0 if self._adapters is None else self._adapters.num_compiled()
        # One that was compiled and has not run is not in the cache of its calls yet.
        own = len(programs) if self._is_compiled else sum(max(1, program._cache_size()) for program in programs)
        return own + adapters


def _at(array: Any, place: tuple[jax.sharding.Sharding, bool]) -> jax.Array:
    """Array at a place: a sharding, and whether it is committed to it, on which the choice of a program depends."""
    sharding, committed = place
    if committed:
        return jax.device_put(array, sharding)
    return array if isinstance(array, jax.Array) and not array.committed else jax.device_put(np.asarray(array))


def weight_bytes(model: CausalLM) -> int:
    """Bytes of weights that a decode step reads: all but embedding tables that are not the output head."""
    tables = (module for _, module in nnx.iter_modules(cast(nnx.Module, model)) if isinstance(module, Embedding))
    unread = sum(table.weight.get_value().nbytes for table in tables if not is_tied_head(model, table))
    weights = jax.tree.leaves(nnx.state(model), is_leaf=lambda value: isinstance(value, ops.PackedWeight))
    return sum(weight.nbytes for weight in weights) - unread
