"""Sizes of the engine's cache and context, and the list of step shapes that they lead to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from verax import ops
from verax._buckets import powers
from verax.errors import InvalidParameterError
from verax.models import DTYPES, CausalLMConfig
from verax.models.causal_lm import has_recurrent_layers, layer_heads, prediction_layers, sliding_windows, state_axes
from verax.ops.attention import heads_to_join
from verax.ops.cpu import library
from verax.ops.paged import is_quantized, page_bytes
from verax.text.engine.blocks import CacheGroup, CachePlan
from verax.text.engine.engine_config import EngineConfig
from verax.text.step.slots import admission_size
from verax.text.step.step import PROMPT_LOGPROB_CHUNK, StepShape

CACHE_DTYPES: dict[str, DTypeLike] = {**DTYPES, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""Dtypes of a cache by vLLM's names; `"int8"` and `"fp8"` have a scale for each token and head."""

DEVICE_FRACTION = 0.9
"""Part of an accelerator's memory that weights and cache may fill: the rest is for activations (vLLM's default)."""

HOST_FRACTION = 0.25
"""Part of the free host memory that a cache takes on a CPU, where other programs live too."""

MIN_BATCHED_TOKENS = {"cpu": 512}
"""A prompt chunk on a CPU: long enough for full matmul speed, short enough that decodes in its step hardly wait."""

DEFAULT_BATCHED_TOKENS = 2048

DEFAULT_NUM_SEQS = 256

MOST_VERIFIED = {"cpu": 32}
"""Most tokens of a step that verifies drafts: more rows of a product cost more than their drafts gain, and each has a
row of scores over the vocabulary."""

DEFAULT_MOST_VERIFIED = 256

MOST_PREDICTING, DEFAULT_MOST_PREDICTING = {"cpu": 4}, 64
"""Most sequences of a step whose drafts the model's prediction head makes, by platform and elsewhere."""

MOST_DECODED = 1024
"""Most tokens of a step that decodes several of each sequence: a new request waits for the steps that are on their
way."""


class Repeats(NamedTuple):
    """Limits of a step that decodes several tokens of each sequence, where `num_scheduler_steps` is not given."""

    steps: int
    """Tokens of a sequence."""
    weights: int
    """Bytes of weights that the step reads, counted each time. A device that reads gigabytes for a token takes longer
    than the host, and a new request would wait in vain."""
    tokens: int
    """Tokens of all sequences."""


# On an H100 the host takes 1.8 ms for a step of four sequences of Qwen3-0.6B, and 5 ms for one of 256; the device takes
# 1.3, and from 3, and reads 6 GB in 1.8. Two cores take 6 ms for a token of one sequence of SmolLM2-135M in four bits,
# and the host holds one of them for 1.3.
REPEATS = {"gpu": Repeats(8, 10_000_000_000, MOST_DECODED), "cpu": Repeats(4, 1_000_000_000, 16)}
"""By platform; elsewhere a step decodes one token."""

LEAST_ADMITTED = 1024
"""Tokens that the smallest program which fills a slot takes; each further one takes eight times as many."""

STATE_FRACTION = 0.5
"""Part of the cache's memory that recurrent states take at most, where `max_num_seqs` is not given."""

KEPT_FRACTION, MOST_KEPT = 0.125, 32
"""Part of the cache's memory that the states of cached prefixes take at most, and most of these states."""

CopyName = Literal["keep_state", "restore_state"]
"""Names of the programs that copy a recurrent state from a slot to a row for cached prefixes, and back."""


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes that the compiled programs depend on."""

    groups: tuple[CacheGroup, ...]
    """Layers and blocks of the cache: one group, or more if some layers attend to a sliding window."""
    block_size: int
    max_model_len: int
    """Longest sequence, tokens."""
    max_num_seqs: int
    """Slots for running sequences."""
    max_num_batched_tokens: int
    cache_dtype: DTypeLike
    structured_outputs: bool = False
    """Steps give the scores, and sampling has programs of its own, for sequences with a grammar."""
    verify_tokens: tuple[int, ...] = ()
    """Numbers of tokens that steps which verify drafts are compiled for; none without speculative decoding."""
    most_predicted: int = 0
    """Most drafts of a sequence that a step makes itself by the model's prediction head; 0 if it makes none."""
    most_predicting: int = 0
    """Most sequences of a step that makes drafts."""
    adapters: bool = False
    """Steps have programs of their own for sequences with an adapter."""
    padding_takes_time: bool = False
    """Steps with prompts are made to fill one of `mixed_tokens`, and large ones are not run at the start."""
    joined_heads: int = 1
    """Heads of keys and values that lie side by side in a page, as one (`ops.attention.join_heads`)."""
    num_kept_states: int = 0
    """Rows for recurrent states that cached prefixes left."""
    decode_steps: int = 1
    """Tokens of a sequence that a decode step computes at most, one after the other."""
    most_decoded: int = MOST_DECODED
    """Tokens of all sequences that a step computes at most, if it computes several of each."""

    @property
    def copies(self) -> Sequence[CopyName]:
        """Programs that copy states, if there are rows for them."""
        return ("keep_state", "restore_state") if self.num_kept_states else ()

    @property
    def prompt_sizes(self) -> Sequence[int]:
        """Numbers of tokens that steps with prompts are to fill; none if padding takes no time."""
        return self.mixed_tokens if self.padding_takes_time else ()

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def slot_sizes(self) -> tuple[int, int, int, int]:
        """Slots, tokens and blocks of the longest sequence, and page tables: the arguments of `new_slots`."""
        return self.max_num_seqs, self.max_model_len, self.table_width, len(self.groups)

    @cached_property
    def admit_tokens(self) -> list[int]:
        """Numbers of tokens that programs which fill a slot are compiled for."""
        return powers(min(LEAST_ADMITTED, self.max_model_len), self.max_model_len, 8)

    @cached_property
    def decode_rows(self) -> list[int]:
        """Numbers of sequences that decode steps are compiled for."""
        return powers(1, self.max_num_seqs, 2)

    @cached_property
    def repeated(self) -> list[StepShape]:
        """Shapes of the decode steps of several tokens, the ones of fewest sequences first."""
        if self.decode_steps == 1:
            return []
        rows, most = powers(1, self.max_num_seqs, 4), min(self.decode_steps, self.max_num_batched_tokens)
        steps = {size: min(most, self.most_decoded // size) for size in rows}
        return [StepShape(size, size * count, True) for size, count in steps.items() if count > 1]

    # Rows cost a pass over the vocabulary each, tokens a pass through the layers: few sizes of either are enough.
    @cached_property
    def mixed_rows(self) -> list[int]:
        """Numbers of sequences that mixed steps are compiled for."""
        return powers(min(8, self.max_num_seqs), self.max_num_seqs, 8)

    @cached_property
    def mixed_tokens(self) -> list[int]:
        """Numbers of tokens that mixed steps are compiled for: multiples of `PROMPT_LOGPROB_CHUNK`."""
        return [
            -(-size // PROMPT_LOGPROB_CHUNK) * PROMPT_LOGPROB_CHUNK
            for size in powers(min(32, self.max_num_batched_tokens), self.max_num_batched_tokens, 4)
        ]

    @cached_property
    def shapes(self) -> list[StepShape]:
        """Every step shape that a schedule can need: the buckets."""
        decode = [StepShape(rows, rows, True) for rows in self.decode_rows]
        mixed = [StepShape(rows, tokens, False) for tokens in self.mixed_tokens for rows in self.mixed_rows]
        mixed = [shape for shape in mixed if shape.rows <= shape.tokens or shape.rows == self.mixed_rows[0]]
        verify = [StepShape(min(size, self.max_num_seqs), size, False, verify=True) for size in self.verify_tokens]
        if self.most_predicted:
            verify = [
                StepShape(rows, rows * (1 + drafts), False, verify=True, drafts=drafts)
                for drafts in powers(1, self.most_predicted, 2)
                for rows in powers(1, self.most_predicting, 2)
            ]
        plain = [*decode, *mixed, *verify]
        return [*plain, *(shape._replace(adapters=True) for shape in plain if self.adapters), *self.repeated]

    @cached_property
    def sampling_rows(self) -> list[int]:
        """Numbers of rows of every step, for which structured output compiles sampling by itself."""
        # Steps that make drafts themselves, or decode several tokens, have no sequence with a grammar.
        return sorted(
            {shape.num_sampled for shape in self.shapes if not shape.drafts and shape.decode_steps == 1}
            if self.structured_outputs
            else ()
        )


def plan_sizes(
    model: CausalLMConfig,
    dtype: DTypeLike,
    config: EngineConfig,
    *,
    draft: CausalLMConfig | None = None,
    free: int | None = None,
    weights: int = 1,
) -> RunnerConfig:
    """Sizes that fit into the memory of each device.

    A context that is not given is cut to what the cache can hold of one sequence. The cache is blocks and, in models
    with recurrent layers, a state for each of `max_num_seqs` sequences and for some cached prefixes.

    Args:
        config: the engine's options. Its devices divide the heads of keys and values.
        draft: configuration of a draft model, whose keys and values lie in blocks of the group without a window.
        free: bytes for cache and slots on each device if no option says how many for the cache; what is free if None.
        weights: bytes of the model's weights on each device.
    """
    longest, block_size = model.max_position_embeddings, config.block_size
    if config.max_model_len is not None and config.max_model_len > longest:
        raise InvalidParameterError(
            f"max_model_len: {config.max_model_len} is more than the model's {longest} positions"
        )
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else jnp.dtype(CACHE_DTYPES[config.kv_cache_dtype])
    memory = config.kv_cache_memory or free or cache_memory(config.tensor_parallel_size * config.data_parallel_size)
    devices = config.tensor_parallel_size
    per_state = state_bytes(model, devices)
    max_num_seqs = config.max_num_seqs
    if max_num_seqs is None:
        fitting = int(memory * STATE_FRACTION) // per_state if per_state else DEFAULT_NUM_SEQS
        max_num_seqs = max(1, min(DEFAULT_NUM_SEQS, fitting, config.max_num_batched_tokens or DEFAULT_NUM_SEQS))
    batched = config.max_num_batched_tokens or max(
        max_num_seqs, MIN_BATCHED_TOKENS.get(ops.target().platform, DEFAULT_BATCHED_TOKENS)
    )
    if batched < max_num_seqs:
        raise InvalidParameterError(
            f"max_num_batched_tokens: {batched} is less than max_num_seqs ({max_num_seqs}), and each running sequence "
            "needs a token a step"
        )
    kept = min(MOST_KEPT, int(memory * KEPT_FRACTION) // per_state) if per_state else 0
    kept = 0 if config.enable_prefix_caching is False else kept
    if config.enable_prefix_caching and per_state and not kept:
        raise InvalidParameterError(
            f"enable_prefix_caching: an eighth of the cache's memory ({memory / 2**20:.0f} MiB) holds no recurrent "
            f"state of {per_state / 2**20:.1f} MiB; give more kv_cache_memory, or leave the prefix cache off"
        )
    states = (max_num_seqs + kept) * per_state
    layers = _layers_by_window(model, config.max_model_len or longest)
    sizes = tuple(
        block_bytes(model, block_size, cache_dtype, group) // devices
        + (0 if draft is None or window is not None else block_bytes(draft, block_size, cache_dtype) // devices)
        for window, group in layers.items()
    )
    plan = CachePlan(tuple(layers), sizes, block_size, batched)

    def slots(num_tokens: int) -> int:
        """Bytes of the slots of such a context, which lie in the memory that is free too."""
        row = 4 * admission_size(num_tokens, block_size, len(layers))
        return (max_num_seqs + 1) * row if config.kv_cache_memory is None else 0

    affordable = plan.longest(memory - states, longest, slots)
    context = config.max_model_len or min(longest, max(affordable, 1) * block_size)
    needed = -(-context // block_size)
    if affordable < max(needed, 1):
        extra = f" in addition to {max_num_seqs + kept} recurrent states ({states / 2**20:.0f} MiB)" if states else ""
        fewer = " or max_num_seqs" if states else ""
        wanted = plan.bytes_for(context) + slots(context)
        raise InvalidParameterError(
            f"kv_cache_memory: {memory / 2**20:.0f} MiB hold {max(affordable, 0) * block_size} tokens{extra}, but "
            f"a context of {context} needs {wanted / 2**20:.0f} MiB; give more, or a smaller max_model_len{fewer}"
        )
    num_blocks = plan.num_blocks(memory - states - slots(context), context, max_num_seqs)
    groups = tuple(map(CacheGroup, layers.values(), layers, num_blocks))
    return RunnerConfig(
        groups,
        block_size,
        context,
        max_num_seqs,
        batched,
        cache_dtype,
        structured_outputs=config.structured_outputs,
        **_draft_sizes(config, max_num_seqs, batched),
        adapters=config.enable_lora,
        padding_takes_time=_padding_takes_time(),
        joined_heads=_joined_heads(model, cache_dtype, devices),
        num_kept_states=kept,
        **_decode_steps(config, weights),
    )


def _padding_takes_time() -> bool:
    """True for CPUs whose kernels do not leave padding out (`ops.skip_padding`)."""
    return ops.target().platform == "cpu" and not (library.available() and ops.target().num_devices == 1)


def _decode_steps(config: EngineConfig, weights: int) -> dict[str, Any]:
    """Fields of `RunnerConfig` about steps of several tokens: drafts take their place."""
    if config.speculation is not None:
        return {}
    if config.num_scheduler_steps is not None:
        return {"decode_steps": config.num_scheduler_steps}
    limits = REPEATS.get(ops.target().platform, Repeats(1, weights, MOST_DECODED))
    return {"decode_steps": max(1, min(limits.steps, limits.weights // weights)), "most_decoded": limits.tokens}


def _joined_heads(model: CausalLMConfig, cache_dtype: DTypeLike, devices: int) -> int:
    """Heads of keys and values that lie side by side in a page: as many as fill a TPU's register, elsewhere 1.

    XLA:TPU would put the number of the page last in the layout of smaller heads, and a page in as many places as it has
    numbers. Quantised heads stay apart, because each has scales of its own.
    """
    shapes = {layer_heads(model, layer) for layer, state in enumerate(layer_states(model, 1)) if state is None}
    joined = min((heads_to_join(size) for _, size in shapes), default=1)
    fills = all(heads % (devices * joined) == 0 for heads, _ in shapes)
    return joined if fills and ops.target().platform == "tpu" and not is_quantized(cache_dtype) else 1


def block_bytes(model: CausalLMConfig, block_size: int, dtype: DTypeLike, layers: Iterable[int] | None = None) -> int:
    """Bytes of the keys and values of one block over some layers; over all that attend if None."""
    if layers is None:
        layers = (layer for layer, state in enumerate(layer_states(model, 1)) if state is None)
    pages = ((heads, block_size, size) for heads, size in (layer_heads(model, layer) for layer in layers))
    return 2 * sum(page_bytes(page, dtype) for page in pages)


def state_bytes(model: CausalLMConfig, devices: int = 1) -> int:
    """Bytes that each device has of one sequence's recurrent state over all layers; 0 for a model that only attends."""
    total = 0
    for layer, state in enumerate(layer_states(model, 1)):
        whole = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(state))
        total += whole if state_axes(model, layer) is None else whole // devices
    return total


def layer_states(model: CausalLMConfig, num_seqs: int) -> list[Any]:
    """Shapes of each layer's recurrent state of `num_seqs` sequences; None for a layer that attends.

    Layers of a prediction head are the last ones, and attend.
    """
    layers, head = range(model.num_hidden_layers), [None] * prediction_layers(model)
    if not has_recurrent_layers(model):
        return [None for _ in layers] + head
    return jax.eval_shape(lambda: [model.new_state(layer, num_seqs) for layer in layers]) + head


def _layers_by_window(model: CausalLMConfig, max_model_len: int) -> dict[int | None, tuple[int, ...]]:
    """Layers that attend, by their sliding window, those without one first. A window of the whole context is none."""
    layers: dict[int | None, tuple[int, ...]] = {}
    for layer, (state, window) in enumerate(zip(layer_states(model, 1), sliding_windows(model), strict=True)):
        if state is None:
            kind = None if window is None or window >= max_model_len else window
            layers[kind] = (*layers.get(kind, ()), layer)
    return dict(sorted(layers.items(), key=lambda item: item[0] or 0))


def _draft_sizes(config: EngineConfig, max_num_seqs: int, max_num_batched_tokens: int) -> dict[str, Any]:
    """Fields of `RunnerConfig` about steps that verify drafts."""
    if (speculation := config.speculation) is None:
        return {}
    drafts, platform = speculation.num_speculative_tokens, ops.target().platform
    if config.uses_prediction_head:
        wanted = speculation.disable_by_batch_size or MOST_PREDICTING.get(platform, DEFAULT_MOST_PREDICTING)
        rows = min(wanted, max_num_seqs, max(1, max_num_batched_tokens // (1 + drafts)))
        return {"most_predicted": drafts, "most_predicting": rows}
    largest = MOST_VERIFIED.get(platform, DEFAULT_MOST_VERIFIED)
    longest = min(max_num_seqs * (1 + drafts), largest, max_num_batched_tokens)
    return {"verify_tokens": tuple(powers(2, max(2, longest), 2))}


def cache_memory(devices: int = 1) -> int:
    """Bytes that a cache may take on each of the target's devices, in addition to what lies in its memory already.

    Caches are of one size, so the device with the least free memory decides.

    `devices`: devices of all replicas. The devices of a CPU share its memory too.
    """
    memory = ops.target().least_memory(devices)
    if memory is None:
        raise InvalidParameterError(
            "kv_cache_memory: this device does not report how much memory it has; give a size in bytes"
        )
    if ops.target().platform == "cpu":
        return int(memory.free * HOST_FRACTION) // devices
    return int(memory.total * DEVICE_FRACTION) - (memory.total - memory.free)
