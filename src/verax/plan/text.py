"""Plans of a language model (weights, cache and slots as the engine lays them out, steps, what fits), and of a sentence
encoder (weights, and a batch of sentences)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp

from verax import ops
from verax.errors import InvalidParameterError
from verax.loading import model_shapes
from verax.models import DTYPES, causal_lm, check_dtype, encoder
from verax.models.causal_lm import config_on_devices, layer_heads, sliding_windows
from verax.models.qwen3 import FULL, SLIDING
from verax.nn.parallel import fitting_sizes
from verax.ops._target import DeviceMemory
from verax.ops.paged import page_bytes
from verax.plan.devices import Device, program_row
from verax.plan.model import (
    Described,
    Part,
    multiplied,
    nbytes_of,
    packed_shapes,
    parts_of,
    rounds_inputs,
    sharded_bytes,
    tensor_mesh,
)
from verax.text.engine.engine_config import EngineConfig
from verax.text.step.program import cache_partitions, kept_of, named, new_cache, new_kept_states
from verax.text.step.sizes import RunnerConfig, cache_memory, layer_states, plan_sizes, state_bytes
from verax.text.step.slots import new_slots
from verax.text.step.step import PROMPT_LOGPROB_CHUNK

UNLIMITED = 1 << 60
"""Bytes of a cache that all sequences fit into at their full length."""

CONTEXT, PROMPT, SENTENCE = 4096, 512, 128
"""Tokens of a sequence, if `max_model_len` is not given; of the short prompt of each plan; and of a sentence, if
`max_length` is not given."""

FLOAT32_BYTES = 4

MOST_SEQS = 1 << 14
"""Largest batch that is looked for."""

STATE_PRODUCTS = 6
"""Operations of a delta rule for each number of a state and token: it is read, changed and read again."""


@dataclass(frozen=True)
class TextPlan:
    """A language model on devices, for one batch and one context.

    `shapes`: function from a number of devices to the model as they hold it, a module of shapes. `options`: options of
    the engine, with batch, context and devices.
    """

    shapes: Callable[[int], Any]
    options: EngineConfig
    dtype: Any
    device: Device

    @property
    def model(self) -> Any:
        """The model as the devices hold it, before a CPU packs its weights."""
        return self.shapes(self.options.tensor_parallel_size)

    @cached_property
    def parts(self) -> list[Part]:
        """Weights by part, as the devices hold them."""
        devices = self.options.tensor_parallel_size
        model = packed_shapes(self.model, self.device, few_rows=True) if devices == 1 else self.model
        return parts_of(model, devices)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on a device."""
        return sum(part.per_device for part in self.parts)

    def target(self, memory: DeviceMemory | None = None) -> AbstractContextManager[None]:
        """Context in which sizes and programs are the device's."""
        device = self.device
        return ops.use_target(device.platform, device.kind, memory or device.memory, self.options.tensor_parallel_size)

    def sizes(self, **changes: Any) -> RunnerConfig:
        """The engine's sizes, with blocks for all sequences at their full length, for the plan's options or others."""
        with self.target():
            options = replace(self.options, kv_cache_memory=UNLIMITED, **changes)
            return plan_sizes(self.model.config, self.dtype, options, weights=self.weight_bytes)

    def cache_bytes(self, **changes: Any) -> int:
        """Bytes of the cache on a device, recurrent states included. It takes the arguments of `sizes`."""
        config = self.model.config
        sizes = self.sizes(**changes)
        cache = jax.eval_shape(lambda: new_cache(config, sizes))
        kept = jax.eval_shape(lambda: new_kept_states(config, sizes))
        shardings = named(tensor_mesh(self.options.tensor_parallel_size), cache_partitions(config, cache))
        on_kept = kept_of(config, shardings) if kept else ()
        return sharded_bytes(jax.tree.leaves((cache, kept)), jax.tree.leaves((shardings, on_kept)))

    def slot_bytes(self) -> int:
        """Bytes of the engine's slots, which every device has whole."""
        return sum(map(nbytes_of, jax.tree.leaves(jax.eval_shape(lambda: new_slots(*self.sizes().slot_sizes)))))

    @cached_property
    def cache_room(self) -> int:
        """Most bytes that the engine gives its cache on a device next to weights and slots; 0 if they do not fit."""
        free = self.device.memory - self.weight_bytes
        with self.target(DeviceMemory(max(0, free), self.device.memory)):
            return max(0, cache_memory() - self.slot_bytes())

    def fits(self, **changes: Any) -> bool:
        """True if all sequences fit at their full length. It takes the arguments of `sizes`."""
        return self.cache_bytes(**changes) <= self.cache_room

    def row(self, name: str, seqs: int, steps: list[tuple[int, int]]) -> dict[str, Any]:
        """Work and least time of steps in sequence, for JSON.

        Weight matrices multiply each token, the head only the last one of a sequence, and each layer multiplies a query
        with the keys that it sees and with their values, or changes a state. In each step weights, states, and keys and
        values that are seen are read once. Steps are without drafts, so that a prediction head is left out.

        `seqs`: sequences of each step, all alike. `steps`: tokens of a sequence in the cache before each step, and
        tokens of the step.
        """
        config, devices = self.model.config, self.options.tensor_parallel_size
        every, experts, chosen, head = multiplied(self.model)
        heads = getattr(config, "num_attention_heads", config.num_key_value_heads)
        layers = [*zip(sliding_windows(config), layer_states(config, 1), strict=True)][: config.num_hidden_layers]
        attending = [layer for layer, (_, state) in enumerate(layers) if state is None]
        attending += getattr(config, "shared_layers", ())
        numbers = sum(leaf.size for _, state in layers for leaf in jax.tree.leaves(state) if leaf.ndim == 4)
        weights = Counter[str]()
        for part in parts_of(self.model, devices):  # without the rows that fill a CPU's panels
            weights[part.part] += part.per_device
        is_float32 = self.dtype == jnp.float32 and all(part.precision == "float32" for part in self.parts)
        dtype = "float32" if is_float32 else "bfloat16"
        flops, nbytes = defaultdict[str, float](float), 0
        rounded = "int8" if rounds_inputs(self.model) else dtype  # but for experts and the head
        for before, count in steps:
            # The engine's prompts have buckets of tokens, all multiples of this. Products of padding are counted.
            rows = seqs if count == 1 else seqs * -(-count // PROMPT_LOGPROB_CHUNK) * PROMPT_LOGPROB_CHUNK
            flops[rounded] += 2 * rows * every
            flops[dtype] += 2 * (rows * chosen + seqs * head) + STATE_PRODUCTS * seqs * count * numbers
            # The mean over choices in which each expert is as likely as the others.
            idle = (1 - chosen / experts) ** rows if experts else 0
            nbytes += weights.total() - weights["embedding"] - weights["prediction head"] - idle * weights["experts"]
            nbytes += 2 * seqs * state_bytes(config, devices)
            for layer in attending:
                window, (kv_heads, size) = layers[layer][0], layer_heads(config, layer)
                token = 2 * page_bytes((kv_heads // devices, 1, size), self.sizes().cache_dtype)
                keys = [min(at, window or at) for at in range(before + 1, before + count + 1)]
                cached = before if window is None else min(before, window - 1)
                flops[dtype] += 4 * heads * size * seqs * sum(keys)
                nbytes += token * seqs * (cached + count)
        return program_row(name, self.device, flops=flops, nbytes=nbytes, devices=devices)


def text_plan(
    model: Described,
    device: Device,
    *,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    max_num_seqs: int = 8,
    max_model_len: int | None = None,
    **options: Any,
) -> TextPlan:
    """A language model on devices, checked. Options have the names of `verax.LLM`.

    Args:
        dtype: `"bfloat16"` or `"float32"`.
        max_model_len: tokens of each sequence; 4096 or the model's positions, if these are fewer, if None.
        options: `tensor_parallel_size`, `kv_cache_dtype`, `max_num_batched_tokens` and `speculative_config`.
    """
    check_dtype(dtype)
    engine = EngineConfig(max_num_seqs=max_num_seqs, **options)
    if engine.speculation is not None and engine.speculation.method == "draft_model":
        raise InvalidParameterError("speculative_config: a plan has no draft model; plan it as a model of its own")
    architecture, config = causal_lm(model.config, prediction_head=engine.uses_prediction_head)

    @cache
    def shapes(devices: int) -> Any:
        """The model as the given number of devices hold it."""
        loading: Any = {"dtype": DTYPES[dtype], "quantization": quantization, "opened": model.opened}
        return model_shapes(architecture, config_on_devices(config, devices), **loading)

    longest = config.max_position_embeddings
    tokens = min(CONTEXT, longest) if max_model_len is None else max_model_len
    if not 2 <= tokens <= longest:
        raise InvalidParameterError(
            f"max_model_len: expected 2 to {longest} tokens, the model's positions, got {tokens}"
        )
    plan = TextPlan(shapes, replace(engine, max_model_len=tokens), DTYPES[dtype], device)
    _ = plan.parts  # an error names a weight that does not divide
    return plan


def plan_text(model: Described, device: Device, **options: Any) -> dict[str, Any]:
    """Plan of a language model, as JSON holds it. See `text_plan` for arguments and errors."""
    plan = text_plan(model, device, **options)
    asked, sizes, config = plan.options, plan.sizes(), plan.model.config
    seqs, tokens, budget = sizes.max_num_seqs, sizes.max_model_len, sizes.max_num_batched_tokens
    programs = [plan.row(f"decode step: {seqs} sequences of {tokens} tokens", seqs, [(tokens - 1, 1)])]
    for prompt in dict.fromkeys((min(PROMPT, tokens - 1), tokens - 1)):
        steps = [(before, min(budget, prompt - before)) for before in range(0, prompt, budget)]
        name = f"prefill: a prompt of {prompt} tokens" + (f" in {len(steps)} steps" if len(steps) > 1 else "")
        programs.append(plan.row(name, 1, steps))

    fits_on = lambda devices: replace(plan, options=replace(asked, tensor_parallel_size=devices)).fits()
    seconds = programs[0]["at_least_s"]
    return {
        "settings": {
            "dtype": jnp.dtype(plan.dtype).name,
            "quantization": options.get("quantization"),
            **{name: getattr(sizes, name) for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens")},
            **{name: getattr(asked, name) for name in ("kv_cache_dtype", "tensor_parallel_size")},
        },
        "devices": asked.tensor_parallel_size,
        "weights": [part._asdict() for part in plan.parts],
        "memory": {"weights": plan.weight_bytes, "cache": plan.cache_bytes(), "slots": plan.slot_bytes()},
        "cache_room": plan.cache_room,
        "programs": programs,
        "at_most": {"tokens/s of all sequences": seqs / seconds, "tokens/s of one": 1 / seconds},
        "fits": plan.fits(),
        "largest_batch": _largest(lambda n: plan.fits(max_num_seqs=n), 1, asked.max_num_batched_tokens or MOST_SEQS),
        "largest_context": _largest(lambda n: plan.fits(max_model_len=n), 2, config.max_position_embeddings),
        "fewest_devices": next(filter(fits_on, fitting_sizes(plan.shapes(1))), None),
    }


def plan_embed(
    model: Described, device: Device, *, dtype: str = "float32", batch_size: int = 8, max_length: int | None = None
) -> dict[str, Any]:
    """Plan of an encoder, as JSON holds it.

    `dtype`: `"float32"`, or `"bfloat16"` for weights and inputs of products. `max_length`: tokens of each sentence; 128
    if None.
    """
    check_dtype(dtype)
    architecture, config = encoder(model.config)
    longest = config.max_position_embeddings
    tokens = max_length or min(SENTENCE, longest)
    if not 0 < tokens <= longest:
        raise InvalidParameterError(f"max_length: expected 1 to {longest} tokens, got {tokens}")
    shapes: Any = model_shapes(architecture, config, dtype=DTYPES[dtype])
    parts = parts_of(packed_shapes(shapes, device))
    memory = {
        "weights": sum(part.nbytes for part in parts),
        "states": FLOAT32_BYTES * batch_size * tokens * config.hidden_size,
    }
    heads = config.num_attention_heads
    width = heads * getattr(config, "head_dim", config.hidden_size // heads)
    products = 2 * tokens * multiplied(shapes)[0] + 4 * width * _scores(config, tokens)
    read = sum(part.nbytes for part in parts_of(shapes) if part.part != "embedding")
    program = program_row(
        f"{batch_size} sentences of {tokens} tokens",
        device,
        flops={dtype: batch_size * products},
        nbytes=read + memory["states"],
    )
    return {
        "settings": {"dtype": dtype, "batch_size": batch_size, "max_length": tokens},
        "devices": 1,
        "weights": [part._asdict() for part in parts],
        "memory": memory,
        "programs": [program],
        "at_most": {"sentences/s": batch_size / program["at_least_s"]},
        "fits": sum(memory.values()) <= device.memory,
    }


def _scores(config: Any, tokens: int) -> int:
    """Pairs of a query and a key that it sees, over the layers that attend; recurrent layers are not counted."""
    kinds = getattr(config, "layer_types", None) or (FULL,) * config.num_hidden_layers
    local = getattr(config, "local_attention", 0) // 2
    reaches = getattr(config, "sliding_windows", None) or [local if kind == SLIDING else tokens for kind in kinds]
    seen = lambda reach: sum(min(tokens, at + reach + 1) - max(0, at - reach) for at in range(tokens))
    pairs = zip(kinds, reaches, strict=True)
    return sum(seen(tokens if reach is None else reach) for kind, reach in pairs if kind in (FULL, SLIDING))


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Largest number from `least` to `most` that fits, 0 if none does. What fits, fits for every smaller number."""
    count = bisect_left(range(least, most + 1), True, key=lambda number: not fits(number))
    return least + count - 1 if count else 0
