"""The compiled step as a record: function, abstract arguments and shardings, made without weights or devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey
from jaxtyping import Array, Int

from verax import ops
from verax._compat import compiler_options
from verax.checkpoint.load import partition
from verax.models import CausalLM, CausalLMConfig
from verax.text.grammar import mask_width
from verax.text.lora.layers import AdaptedLayers
from verax.text.sampler import make_sampling
from verax.text.sizes import RunnerConfig, layer_states
from verax.text.slots import Slots, new_slots
from verax.text.step import Cache, StepShape, make_step

__all__ = ["AbstractModel", "StepProgram", "cache_shardings", "new_cache", "sampling_program", "step_program"]

CACHE_PARTITION = PartitionSpec(None, "tensor")
"""Partition of pages `[P, K, p, H]`, by head, on a mesh whose axis `tensor` divides the heads."""

LOWERING_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
"""JAX's name for lowering, by a target's platform."""


@dataclass(frozen=True)
class StepProgram:
    """One step, or the sampling of one, ready to be compiled or lowered.

    Attributes:
        name: such as `"decode_8x8"`.
        function: `(weights, slots, cache, packed) -> (slots, cache, output)`, or what `make_sampling` gives.
        arguments: its arguments as `jax.ShapeDtypeStruct`s.
        shardings: a `NamedSharding` for each array of `arguments`; None without a mesh.
        donated: indices of the arguments whose buffers the results reuse.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    shardings: tuple[Any, ...] | None
    donated: tuple[int, ...] = (1, 2)

    def jit(self) -> Any:
        """The step as `jax.jit` gives it, on JAX's default device or on the mesh."""
        placed: dict[str, Any] = {} if self.shardings is None else {"in_shardings": self.shardings}
        return jax.jit(
            self.function,
            donate_argnums=self.donated,
            compiler_options=compiler_options(ops.target().platform),
            **placed,
        )

    def lower(self) -> jax.stages.Lowered:
        """The step lowered for `ops.target()`, which need not be attached."""
        traced = self.jit().trace(*self.arguments)
        return traced.lower(lowering_platforms=(LOWERING_PLATFORMS[ops.target().platform],))


@dataclass(frozen=True)
class AbstractModel:
    """A language model without its weights.

    Attributes:
        config: its configuration.
        graph: its structure.
        tree: structure of its state, to make one of flat weights.
        weights: shapes and dtypes of its weights, flat.
        partitions: partition of each weight over a mesh, by the model's rules.
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
        leaves, tree = jax.tree_util.tree_flatten_with_path(state)
        keys = (".".join(str(part.key) for part in path if isinstance(part, DictKey)) for path, _ in leaves)
        return cls(
            config=model.config,
            graph=graph,
            tree=tree,
            weights=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in leaves),
            partitions=tuple(partition(key, model.partition_rules) for key in keys),
        )

    def build(self, weights: tuple[Array, ...], adapters: Int[Array, "T"] | None = None) -> CausalLM:
        """The model with these weights. With the slot of each token's adapter, their matrices are the last weights."""
        count = len(self.weights)
        model = nnx.merge(self.graph, jax.tree.unflatten(self.tree, weights[:count]))
        if adapters is not None and self.adapted is not None:
            self.adapted.attach(model, weights[count:], adapters)
        return model


def step_program(
    model: AbstractModel, sizes: RunnerConfig, shape: StepShape, mesh: Mesh | AbstractMesh | None = None
) -> StepProgram:
    """The program of one step, as `ModelRunner` compiles it.

    Args:
        model: the model without its weights.
        sizes: sizes of cache and slots.
        shape: shape of the step, one of `sizes.shapes`.
        mesh: devices that weights (by the model's `partition_rules`) and cache (by heads) are divided over, abstract
            ones for shapes alone. Weights must not be quantised then.

    Examples:
        >>> module = nnx.eval_shape(lambda: architecture(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        >>> with ops.use_target("cpu", memory=8 << 30):
        ...     sizes = plan_sizes(config, jnp.bfloat16, EngineConfig(max_num_seqs=8))
        ...     lowered = step_program(AbstractModel.from_module(module), sizes, sizes.shapes[0]).lower()
    """
    step = make_step(model.build, shape, sizes.block_size, sizes.groups, structured_outputs=sizes.structured_outputs)
    kind = "decode" if shape.decode else "verify" if shape.verify else "mixed"
    step.__name__ = name = f"{kind}_{shape.rows}x{shape.tokens}{'_adapters' * shape.adapters}"
    matrices = model.adapted.arrays if shape.adapters and model.adapted is not None else ()
    arguments = (
        model.weights + matrices,
        _abstract_slots(sizes),
        jax.eval_shape(lambda: new_cache(model.config, sizes)),
        jax.ShapeDtypeStruct((shape.input_size(sizes.block_size, len(sizes.groups)),), jnp.int32),
    )
    return StepProgram(name, step, arguments, None if mesh is None else _shardings(model, arguments, mesh))


def sampling_program(model: AbstractModel, sizes: RunnerConfig, rows: int, mesh: Mesh | None = None) -> StepProgram:
    """The sampling of a step of `rows` sequences of which some have a grammar.

    Args:
        model: the model without its weights.
        sizes: sizes of the slots.
        rows: number of rows of the step.
        mesh: devices that the weights are divided over; scores and slots are whole on each.
    """
    function = make_sampling()
    function.__name__ = name = f"sample_{rows}"
    vocab_size = model.config.vocab_size
    arguments = (
        _abstract_slots(sizes),
        jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32),
        jax.ShapeDtypeStruct((rows, 4), jnp.int32),
        jax.ShapeDtypeStruct((rows, mask_width(vocab_size)), jnp.int32),
    )
    whole = None if mesh is None else jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), arguments)
    return StepProgram(name, function, arguments, whole, donated=(0,))


def _abstract_slots(sizes: RunnerConfig) -> Slots:
    return jax.eval_shape(
        lambda: new_slots(sizes.max_num_seqs, sizes.max_model_len, sizes.table_width, len(sizes.groups))
    )


def new_cache(model: CausalLMConfig, sizes: RunnerConfig) -> Cache:
    """Zeroed pages (what is masked out is multiplied too, so it must be finite), or a recurrent state for each slot."""
    num_blocks = {layer: group.num_blocks for group in sizes.groups for layer in group.layers}

    def new_pages(layer: int) -> ops.Pages:
        shape = (num_blocks[layer], model.num_key_value_heads, sizes.block_size, model.head_dim)
        return ops.new_pages(shape, sizes.cache_dtype)

    return tuple(
        (new_pages(layer), new_pages(layer))
        if state is None
        else jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
        for layer, state in enumerate(layer_states(model, sizes.max_num_seqs))
    )


def cache_shardings(config: CausalLMConfig, cache: Cache, mesh: Mesh | AbstractMesh) -> Any:
    """Shardings of a cache or of its shapes: pages by head if the heads divide; recurrent states are whole."""
    whole, by_head = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, CACHE_PARTITION)
    divided = "tensor" in mesh.shape and config.num_key_value_heads % mesh.shape["tensor"] == 0
    return tuple(
        jax.tree.map(lambda _, to=by_head if divided and state is None else whole: to, pages)
        for pages, state in zip(cache, layer_states(config, 1), strict=True)
    )


def _shardings(model: AbstractModel, arguments: tuple[Any, ...], mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
    """Shardings of a step's arguments: weights by rule, pages by head; the rest is whole on every device."""
    whole = NamedSharding(mesh, PartitionSpec())
    weights, slots, cache, _ = arguments
    partitions = (*model.partitions, *[PartitionSpec()] * (len(weights) - len(model.partitions)))
    return (
        tuple(NamedSharding(mesh, spec) for spec in partitions),
        jax.tree.map(lambda _: whole, slots),
        cache_shardings(model.config, cache, mesh),
        whole,
    )
