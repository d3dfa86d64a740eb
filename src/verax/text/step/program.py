"""The compiled step as a record (function, abstract arguments, shardings), the programs of an engine, and their files.

A record is made without weights or devices. Programs compile when they are first called, and engines of equal models
share them. A start with a folder of compiled programs on the same kind of device loads them, and traces nothing.

What a folder has is the executable (`jax.experimental.serialize_executable`), not StableHLO (`jax.export`). Loading it
takes a sixth of the time of tracing, lowering and a warm compilation cache, exported StableHLO a third. And StableHLO
is compiled on a new machine. So a folder belongs to one kind of device, one jaxlib and one configuration.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import hashlib
import json
import os
import pickle
from collections import abc
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey
from jaxtyping import Array, Int

from verax import ops
from verax._compat import JAXLIB, compiler_options
from verax.errors import InvalidParameterError
from verax.files import atomic_path, write_json
from verax.machine import cpu_name
from verax.models import CausalLM, CausalLMConfig
from verax.models.causal_lm import has_recurrent_layers, layer_heads, prediction_layers, state_axes
from verax.nn.parallel import divisions
from verax.ops.cpu import library
from verax.ops.division import TENSOR_AXIS, is_weight, partition, resized
from verax.text.engine.blocks import CacheGroup
from verax.text.engine.engine_config import EngineConfig
from verax.text.features.grammar import mask_width
from verax.text.features.lora import AdaptedLayers
from verax.text.step.sizes import CopyName, RunnerConfig, layer_states
from verax.text.step.slots import admit, new_slots
from verax.text.step.step import Cache, StepOutput, StepShape, make_replay, make_step, sample_deferred

T = TypeVar("T")

CACHE_PARTITION = PartitionSpec(None, TENSOR_AXIS)
"""Partition of pages `[P, K, p, H]`, by head."""

WHOLE = PartitionSpec()

LOWERING_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
"""JAX's name for lowering, by a target's platform."""


def named(mesh: Mesh | AbstractMesh, partitions: Any) -> Any:
    """The sharding over a mesh of each partition in a tree."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partitions)


@dataclass(frozen=True)
class StepProgram:
    """One step, or the sampling of one, ready to be compiled or lowered.

    Attributes:
        function: `(weights, slots, cache, packed) -> (slots, cache, output)`, or `sample_deferred`.
        arguments: its arguments as `jax.ShapeDtypeStruct`s.
        partitions: a `PartitionSpec` for each array of `arguments`.
        results: the same for the results, or for whole parts of them.
        mesh: devices that the arrays are divided over; None for JAX's default device.
        donated: indices of the arguments whose buffers the results reuse.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    partitions: tuple[Any, ...]
    results: Any
    mesh: Mesh | AbstractMesh | None
    donated: tuple[int, ...] = (1, 2)

    @property
    def shardings(self) -> tuple[Any, ...] | None:
        """A `NamedSharding` for each array of `arguments`; None without a mesh."""
        return None if self.mesh is None else named(self.mesh, self.partitions)

    def jit(self) -> Any:
        """The step as `jax.jit` gives it, on JAX's default device or on the mesh.

        On a mesh each device runs the function on its own parts of the arrays (`jax.shard_map`). So native kernels,
        which XLA's partitioner could not divide, run there too; the layers call the collectives.
        """
        function, placed = self.function, dict[str, Any]()
        if self.mesh is not None:
            function = jax.shard_map(
                function, mesh=self.mesh, in_specs=self.partitions, out_specs=self.results, check_vma=False
            )
            function.__name__ = self.name
            placed = {"in_shardings": self.shardings, "out_shardings": named(self.mesh, self.results)}
        return jax.jit(
            function, donate_argnums=self.donated, compiler_options=compiler_options(ops.target().platform), **placed
        )

    def lower(self) -> jax.stages.Lowered:
        """The step lowered for `ops.target()`, which need not be attached."""
        traced = self.jit().trace(*self.arguments)
        return traced.lower(lowering_platforms=(LOWERING_PLATFORMS[ops.target().platform],))


@dataclass(frozen=True)
class AbstractModel:
    """A language model without its weights.

    Attributes:
        tree: structure of its state, to make one of flat weights.
        weights: shapes and dtypes of its weights, flat.
        partitions: partition of each weight over a mesh, as the layers declare it.
        adapted: layers that adapters can change; None if the engine takes no adapters.
    """

    config: CausalLMConfig
    graph: nnx.GraphDef[Any]
    tree: Any
    weights: tuple[jax.ShapeDtypeStruct, ...]
    partitions: tuple[PartitionSpec, ...]
    adapted: AdaptedLayers | None = None

    @classmethod
    def from_module(cls, model: CausalLM) -> AbstractModel:
        """The shapes of a module, whose weights may be shapes themselves (`nnx.eval_shape`)."""
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        divided = divisions(model)

        def of_weight(path: tuple[Any, ...], weight: Any) -> Any:
            key = ".".join(str(part.key) for part in path if isinstance(part, DictKey))
            return partition(weight, divided.get(key))

        return cls(
            config=model.config,
            graph=graph,
            tree=tree,
            weights=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves),
            partitions=tuple(jax.tree.leaves(jax.tree_util.tree_map_with_path(of_weight, state, is_leaf=is_weight))),
        )

    def build(self, weights: tuple[Array, ...], adapters: Int[Array, "T"] | None = None) -> CausalLM:
        """The model with these weights, or one device's part of it with parts of them.

        With the slot of each token's adapter, the adapters' matrices are the last weights.
        """
        count = len(self.weights)
        state = jax.tree.unflatten(self.tree, weights[:count])
        model = nnx.merge(self.graph, jax.tree.map(resized, state, is_leaf=is_weight))
        if adapters is not None and self.adapted is not None:
            self.adapted.attach(model, weights[count:], adapters)
        return model


def step_name(shape: StepShape) -> str:
    """Name of the program of a step."""
    kind = "decode" if shape.decode else "verify" if shape.verify else "mixed"
    return f"{kind}_{shape.rows}x{shape.tokens}{'_adapters' * shape.adapters}{'_mtp' * (shape.drafts > 0)}"


def admission_name(num_tokens: int) -> str:
    """Name of the program that fills the slot of a sequence of up to the given number of tokens."""
    return f"admit_{num_tokens}"


def sampling_name(rows: int) -> str:
    """Name of the program that samples the given number of rows."""
    return f"sample_{rows}"


def step_program(
    model: AbstractModel, sizes: RunnerConfig, shape: StepShape, mesh: Mesh | AbstractMesh | None = None
) -> StepProgram:
    """The program of one step, as `ModelRunner` compiles it.

    `shape`: shape of the step, one of `sizes.shapes`. `mesh`: devices of an axis `tensor` that weights (as the layers
    declare it) and cache (by heads) are divided over, abstract ones for shapes alone.

    Examples:
        >>> module = nnx.eval_shape(lambda: architecture(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        >>> with ops.use_target("cpu", memory=8 << 30):
        ...     sizes = plan_sizes(config, jnp.bfloat16, EngineConfig(max_num_seqs=8))
        ...     lowered = step_program(AbstractModel.from_module(module), sizes, sizes.shapes[0]).lower()
    """
    step = make_step(
        model.build,
        shape,
        sizes.block_size,
        sizes.groups,
        structured_outputs=sizes.structured_outputs,
        prediction_head=sizes.most_predicted > 0,
    )
    step.__name__ = name = step_name(shape)
    adapted = model.adapted if shape.adapters else None
    matrices, matrix_partitions = ((), ()) if adapted is None else (adapted.arrays, adapted.partitions)
    arguments = (
        model.weights + matrices,
        jax.eval_shape(lambda: new_slots(*sizes.slot_sizes)),
        jax.eval_shape(lambda: new_cache(model.config, sizes)),
        jax.ShapeDtypeStruct((shape.input_size(sizes.block_size, len(sizes.groups)),), jnp.int32),
    )
    cache = cache_partitions(model.config, arguments[2])
    partitions = ((*model.partitions, *matrix_partitions), _whole(arguments[1]), cache, WHOLE)
    projected = _projected_partitions(model.config) if shape.verify else ()
    output = cast(Any, StepOutput)(WHOLE, WHOLE, WHOLE, WHOLE, projected)
    return StepProgram(name, step, arguments, partitions, (WHOLE, cache, output), mesh)


def replay_program(model: AbstractModel, sizes: RunnerConfig, shape: StepShape, mesh: Mesh | None) -> StepProgram:
    """The program that continues recurrent states with what holds of a step that verifies, whose shape is given."""
    replay = make_replay(model.build, shape)
    replay.__name__ = name = f"replay_{shape.rows}x{shape.tokens}"
    step = step_program(model, sizes, shape, mesh)
    _, _, output = jax.eval_shape(step.jit(), *step.arguments)
    packed = jax.ShapeDtypeStruct((3 * shape.rows,), jnp.int32)
    partitions = (model.partitions, step.partitions[2], _projected_partitions(model.config), WHOLE)
    arguments = (model.weights, step.arguments[2], output.projected, packed)
    return StepProgram(name, replay, arguments, partitions, step.partitions[2], mesh, donated=(1,))


def _projected_partitions(config: CausalLMConfig) -> tuple[PartitionSpec, ...]:
    """Partition of the arrays of each recurrent layer in `StepOutput.projected`."""
    states = enumerate(layer_states(config, 1))
    divided = [state_axes(config, layer) is not None for layer, state in states if state is not None]
    return tuple(PartitionSpec(None, None, TENSOR_AXIS) if axes else WHOLE for axes in divided)


def sampling_program(model: AbstractModel, sizes: RunnerConfig, rows: int, mesh: Mesh | None = None) -> StepProgram:
    """The sampling of `rows` sequences of which some have a grammar. On a mesh, every device does all of it."""

    def function(*arguments: Any) -> Any:
        return sample_deferred(*arguments)

    function.__name__ = name = sampling_name(rows)
    vocab_size = model.config.vocab_size
    arguments = (
        jax.eval_shape(lambda: new_slots(*sizes.slot_sizes)),
        jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32),
        jax.ShapeDtypeStruct((rows, 4), jnp.int32),
        jax.ShapeDtypeStruct((rows, mask_width(vocab_size)), jnp.int32),
    )
    return StepProgram(name, function, arguments, _whole(arguments), WHOLE, mesh, donated=(0,))


def _whole(arrays: Any) -> Any:
    return jax.tree.map(lambda _: WHOLE, arrays)


def new_cache(model: CausalLMConfig, sizes: RunnerConfig) -> Cache:
    """Zeroed pages (what is masked out is multiplied too, so it must be finite), or a recurrent state for each slot."""
    num_blocks = {layer: group.num_blocks for group in sizes.groups for layer in group.layers}

    def new_pages(layer: int) -> ops.Pages:
        joined = sizes.joined_heads
        heads, size = layer_heads(model, layer)
        shape = (num_blocks[layer], heads // joined, sizes.block_size, joined * size)
        return ops.new_pages(shape, sizes.cache_dtype)

    layers = tuple(
        (new_pages(layer), new_pages(layer))
        if state is None
        else jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
        for layer, state in enumerate(layer_states(model, sizes.max_num_seqs))
    )
    if not prediction_layers(model):
        return layers
    return *layers, jnp.zeros((sizes.max_num_seqs + 1, cast(Any, model).hidden_size), jnp.float32)


def new_kept_states(model: CausalLMConfig, sizes: RunnerConfig) -> tuple[Any, ...]:
    """Zeroed rows for recurrent states that prefixes left, of each recurrent layer."""
    return tuple(
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
        for state in layer_states(model, sizes.num_kept_states)
        if state is not None and sizes.num_kept_states
    )


def kept_of(model: CausalLMConfig, cache: Any) -> tuple[Any, ...]:
    """Entries of the recurrent layers in a cache, or in a tuple with an entry for each layer."""
    return tuple(part for part, state in zip(cache, layer_states(model, 1), strict=False) if state is not None)


def copy_state(to: Any, source: Any, rows: Int[Array, "2"]) -> Any:
    """`to` with row `rows[1]` replaced by row `rows[0]` of `source`, in each array of a tree. Donate `to`."""

    def copied(to: Array, source: Array) -> Array:
        row = lax.dynamic_index_in_dim(source, rows[0])
        return lax.dynamic_update_index_in_dim(to, row, rows[1], 0)

    return jax.tree.map(copied, to, source)


def placed(make: Callable[[], T], shardings: Any) -> T:
    """The arrays that a function makes, each device making its part of them; on JAX's default device without shardings.

    `shardings`: sharding of each array, or None.
    """
    return make() if shardings is None else jax.jit(make, out_shardings=shardings)()


def cache_partitions(config: CausalLMConfig, cache: Cache) -> Any:
    """Partition of each array of a cache or of its shapes: pages by head, recurrent states as `state_axes` says."""

    def of_layer(layer: int, arrays: Any, state: Any) -> Any:
        if state is None:
            return jax.tree.map(lambda _: CACHE_PARTITION, arrays)
        axes = state_axes(config, layer)
        if axes is None:
            return _whole(arrays)
        return jax.tree.map(lambda axis: PartitionSpec(*[None] * axis, TENSOR_AXIS), axes)

    states = layer_states(config, 1)
    layers = tuple(of_layer(layer, *pair) for layer, pair in enumerate(zip(cache, states, strict=False)))
    return (*layers, WHOLE) if prediction_layers(config) else layers


JittedCall = tuple[Any, tuple[Any, ...]]
"""A program as `jax.jit` gives it, and its arguments, arrays or their shapes."""


class Programs(NamedTuple):
    """Programs of an engine, as `jax.jit` gives them or loaded."""

    admits: dict[int, Any]
    """Programs that fill a slot, by their number of tokens."""
    steps: dict[StepShape, Any]
    samplers: dict[int, Any]
    copies: dict[CopyName, Any]
    """Programs that keep the recurrent state of a slot, and restore it; none in models without."""
    replays: dict[StepShape, JittedCall]
    """Programs that continue recurrent states after a step that verifies, by its shape, with their arguments."""


def jitted_programs(model: AbstractModel, sizes: RunnerConfig, mesh: Mesh | None) -> Programs:
    """The programs of a model at these sizes, which engines of equal models share: the second one compiles nothing."""
    try:
        hash(model)
    except TypeError:  # a configuration from outside the package need not be hashable
        return new_programs(model, sizes, mesh)
    return _shared_programs(model, sizes, mesh, ops.tracing_context())


# Programs hold no weights, so the programs of the last few engines can be kept.
@functools.lru_cache(maxsize=4)
def _shared_programs(model: AbstractModel, sizes: RunnerConfig, mesh: Mesh | None, context: Hashable) -> Programs:
    return new_programs(model, sizes, mesh)


def new_programs(model: AbstractModel, sizes: RunnerConfig, mesh: Mesh | None) -> Programs:
    """Programs of a model at these sizes that nothing else shares. Each compiles when it is first called."""
    steps = {shape: step_program(model, sizes, shape, mesh) for shape in sizes.shapes}
    _, on_slots, _, _ = steps[sizes.shapes[0]].shardings or (None,) * 4
    options = compiler_options(ops.target().platform)
    verify = [shape for shape in sizes.shapes if shape.verify and not shape.adapters]
    replays = {
        shape: replay_program(model, sizes, shape, mesh) for shape in verify if has_recurrent_layers(model.config)
    }
    return Programs(
        # A function of its own: JAX shares what it has compiled among all that `jax.jit` makes of one function.
        admits={
            num_tokens: jax.jit(
                functools.partial(admit, num_tokens=num_tokens, block_size=sizes.block_size),
                donate_argnums=0,
                compiler_options=options,
                out_shardings=on_slots,
            )
            for num_tokens in sizes.admit_tokens
        },
        steps={shape: step.jit() for shape, step in steps.items()},
        samplers={rows: sampling_program(model, sizes, rows, mesh).jit() for rows in sizes.sampling_rows},
        copies={name: _copy_program(model, sizes, mesh, options) for name in sizes.copies},
        replays={shape: (replay.jit(), replay.arguments) for shape, replay in replays.items()},
    )


def _copy_program(model: AbstractModel, sizes: RunnerConfig, mesh: Mesh | None, options: Any) -> Any:
    partitions = cache_partitions(model.config, jax.eval_shape(lambda: new_cache(model.config, sizes)))
    states = kept_of(model.config, partitions)
    return jax.jit(
        lambda *arguments: copy_state(*arguments),  # a function of its own, as with `admit`
        donate_argnums=0,
        compiler_options=options,
        out_shardings=None if mesh is None else named(mesh, states),
    )


def compile_program(jitted: Any, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
    """Lower and compile a program for arguments, arrays or their shapes."""
    return jitted.lower(*arguments).compile()


def compile_all(programs: abc.Sequence[JittedCall], progress: Callable[[int, int], None]) -> None:
    """Compile programs, so that calls with such arguments compile nothing.

    `progress`: called with the number of compiled programs and of all, at first with 0.
    """
    progress(0, len(programs))
    # XLA compiles outside of Python's lock, and one step uses one core to compile: two at a time fill two. Each is
    # traced in a copy of this context, which has the choices of `use_implementations` and `use_target`.
    with ThreadPoolExecutor(2) as pool:
        compiled = [pool.submit(contextvars.copy_context().run, compile_program, *program) for program in programs]
        for done, result in enumerate(compiled, start=1):
            result.result()
            progress(done, len(programs))


MANIFEST = "programs.json"

CHOSEN_BY_MEMORY = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kept_states")
"""Sizes that an engine chooses by itself where no option names them; the folder's are taken then."""

SOURCES = ("models", "nn", "ops", "text")
"""Folders of the package whose code decides what the programs compute."""


@dataclass(frozen=True)
class CompiledPrograms:
    """Folder of compiled programs.

    `made_for`: what the programs depend on in addition to the sizes. `digests`: of the files, by name.
    """

    folder: Path
    made_for: Mapping[str, Any]
    sizes: RunnerConfig
    digests: Mapping[str, str]

    @classmethod
    def open(cls, folder: str | Path) -> CompiledPrograms:
        """Read what a folder was made for. No program is loaded."""
        path = Path(folder) / MANIFEST
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            return cls(path.parent, manifest["made_for"], _read_sizes(manifest["sizes"]), manifest["digests"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidParameterError(
                f"programs: {folder} has no {MANIFEST} that can be read ({error}); verax compile -o FOLDER makes one"
            ) from error

    def sizes_for(self, planned: RunnerConfig, config: EngineConfig) -> RunnerConfig:
        """Sizes of the folder for an engine that would have chosen `planned` by its options."""
        check_supported(config)
        if config.kv_cache_memory is not None and planned.groups != self.sizes.groups:
            raise InvalidParameterError(f"kv_cache_memory: the cache of {self.folder} has another size; leave it out")
        if config.enable_prefix_caching and planned.num_kept_states and not self.sizes.num_kept_states:
            raise InvalidParameterError(
                f"enable_prefix_caching: {self.folder} has no programs that keep recurrent states; compile with it, or "
                "leave it out"
            )
        for field in fields(RunnerConfig):
            if field.name == "groups" or (field.name in CHOSEN_BY_MEMORY and getattr(config, field.name, None) is None):
                continue
            compiled, wanted = _plain(getattr(self.sizes, field.name)), _plain(getattr(planned, field.name))
            if field.name == "structured_outputs" and wanted and not compiled:
                raise InvalidParameterError(
                    f"structured_outputs: {self.folder} has no programs for them; compile with --structured-outputs, "
                    "or leave them out (--no-structured-outputs of verax serve and verax batch)"
                )
            if compiled != wanted and field.name != "structured_outputs":
                raise InvalidParameterError(
                    f"{field.name}: the programs of {self.folder} were compiled for {compiled}, got {wanted}"
                )
        return dataclasses.replace(self.sizes, structured_outputs=planned.structured_outputs)

    def programs(self, model: AbstractModel, sizes: RunnerConfig) -> Programs:
        """The programs, ready to be called.

        Raises:
            InvalidParameterError: for another model, machine or version, naming the first difference; or if a file is
                missing or damaged.
        """
        self._compare(_made_for(model), self.made_for)
        return Programs(
            admits={num_tokens: self._load(admission_name(num_tokens)) for num_tokens in sizes.admit_tokens},
            steps={shape: self._load(step_name(shape)) for shape in sizes.shapes},
            samplers={rows: self._load(sampling_name(rows)) for rows in sizes.sampling_rows},
            copies={name: self._load(name) for name in sizes.copies},
            replays={},  # drafts are refused with a folder
        )

    def _load(self, name: str) -> Any:
        path = self.folder / f"{name}.bin"
        try:
            data = path.read_bytes()
            # Another file may be a program of the same arguments, and give other numbers.
            if _digest(data) != self.digests.get(name):
                raise ValueError("it is not the file that was written into this folder")
            executable, arguments, results = pickle.loads(data)
            # Without it, JAX takes all devices of the host for those of the program.
            device = jax.local_devices()[:1]
            trees = jax.tree.structure(arguments), jax.tree.structure(results)
            return serialize_executable.deserialize_and_load(executable, *trees, execution_devices=device)
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidParameterError(
                f"programs: {path} cannot be loaded ({error}); compile again with verax compile"
            ) from error

    def _compare(self, here: Any, there: Any, place: str = "") -> None:
        if isinstance(here, dict) and isinstance(there, dict):
            for key in dict.fromkeys((*here, *there)):
                self._compare(here.get(key), there.get(key), f"{place}.{key}" if place else key)
        elif here != there:
            raise InvalidParameterError(
                f"programs: {self.folder} was compiled for {place} {there}, but here it is {here}; compile again with "
                "verax compile"
            )


def check_supported(config: EngineConfig) -> None:
    """Check that a folder can hold all programs of an engine."""
    for name, used in (
        ("enable_lora", config.enable_lora),
        ("speculative_config", config.speculation is not None),
        ("tensor_parallel_size", config.tensor_parallel_size > 1),
        ("data_parallel_size", config.data_parallel_size > 1),
    ):
        if used:
            raise InvalidParameterError(
                f"{name}: programs are not written to a folder with it; leave it or programs out"
            )


def check_replaceable(folder: Path) -> None:
    """Check that a folder is new, empty, or holds programs alone: `write_programs` replaces it."""
    if not folder.exists():
        return
    if not folder.is_dir() or any(path.name != MANIFEST and path.suffix != ".bin" for path in folder.iterdir()):
        raise InvalidParameterError(
            f"programs: {folder} exists, and holds other things than programs; name another folder"
        )


def write_programs(
    programs: Iterable[tuple[str, jax.stages.Compiled]], folder: Path, model: AbstractModel, sizes: RunnerConfig
) -> list[Path]:
    """Write programs into a folder, which is replaced if it is there; their files.

    Raises:
        InvalidParameterError: if the folder holds anything else.
    """
    check_replaceable(folder)
    with atomic_path(folder) as partial:
        partial.mkdir(parents=True)
        digests = {}
        for name, compiled in programs:
            executable, arguments, results = serialize_executable.serialize(compiled)
            # Structures of trees have no form of their own in files; trees of numbers do.
            trees = [jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in (arguments, results)]
            data = pickle.dumps((executable, *trees))
            (partial / f"{name}.bin").write_bytes(data)
            digests[name] = _digest(data)
        manifest = {"made_for": _made_for(model), "sizes": _plain(dataclasses.asdict(sizes)), "digests": digests}
        write_json(partial / MANIFEST, manifest)
    return [folder / f"{name}.bin" for name in digests]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _made_for(model: AbstractModel) -> dict[str, Any]:
    """Everything but the sizes that the programs depend on, as JSON holds it."""
    target = ops.target()
    cpu = {"processor": cpu_name(), "kernels": library.level()} if target.platform == "cpu" else {}
    # The structure has what arrays of one shape stand for, such as the format of a GGUF file's blocks.
    weights = str(model.tree), [(weight.shape, weight.dtype.name) for weight in model.weights]
    if not dataclasses.is_dataclass(config := model.config):
        raise InvalidParameterError(
            f"programs: {type(config).__name__} is not a dataclass, so models cannot be compared"
        )
    return _plain(
        {
            "platform": target.platform,
            "device": target.device_kind,
            **cpu,
            "jax": jax.__version__,
            "jaxlib": JAXLIB,
            "verax": version("verax"),
            "model": {"class": type(config).__name__, **dataclasses.asdict(config)},
            "weights": _digest(repr(weights).encode()),
            "implementations": {name: row["runs"] for name, row in ops.chosen_implementations().items()},
            "source": _source_digest(),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "matmul_precision": jax.config.jax_default_matmul_precision,  # pyright: ignore[reportAttributeAccessIssue]
        }
    )


def _source_digest() -> str:
    """Digest of the code that the programs come from: another state of the same version may compute something else."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for folder in SOURCES:
        for path in sorted(p for p in (root / folder).rglob("*") if p.suffix in (".py", ".h", ".cc")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A value as JSON holds it: dtypes by their names."""

    def named(value: Any) -> Any:
        try:
            return dict(value) if isinstance(value, Mapping) else jnp.dtype(value).name
        except TypeError:
            return repr(value)

    return json.loads(json.dumps(value, default=named))


def _read_sizes(sizes: Mapping[str, Any]) -> RunnerConfig:
    groups = tuple(CacheGroup(tuple(g["layers"]), g["window"], g["num_blocks"]) for g in sizes["groups"])
    return RunnerConfig(
        **{
            **sizes,
            "groups": groups,
            "cache_dtype": jnp.dtype(sizes["cache_dtype"]),
            "verify_tokens": tuple(sizes["verify_tokens"]),
        }
    )
