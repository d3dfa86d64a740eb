"""Plan of a language model: weights, cache and slots as the engine lays them out, work of its steps, what fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from verax import ops
from verax.errors import InvalidParameterError
from verax.loading import model_shapes
from verax.models import DTYPES, causal_lm, check_dtype
from verax.models.causal_lm import config_on_devices
from verax.models.qwen3_moe import Experts
from verax.nn import Embedding, Linear
from verax.nn.parallel import fitting_sizes
from verax.ops._target import DeviceMemory
from verax.plan.devices import Device
from verax.plan.model import Described
from verax.plan.parts import Part, packed_shapes, parts_of, sharded_bytes, tensor_mesh
from verax.plan.roofline import Bound, bound, described
from verax.plan.stand_ins import Span
from verax.plan.work import Work, count, trace
from verax.text.engine.engine_config import EngineConfig
from verax.text.step.program import AbstractModel, StepProgram, cache_partitions, named, new_cache, step_program
from verax.text.step.sizes import RunnerConfig, cache_memory, plan_sizes
from verax.text.step.step import PROMPT_LOGPROB_CHUNK, StepShape

__all__ = ["TextPlan", "plan_text", "text_plan"]

BOUNDLESS = 1 << 60
"""Bytes for a cache that all sequences fit into at their full length."""

CONTEXT = 4096
"""Tokens of a sequence, if no context is given."""

PROMPT = 512
"""Tokens of the prompt that every plan has, beside one of the whole context."""

MOST_SEQS = 1 << 14
"""Sequences up to which the largest batch is looked for."""

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class TextPlan:
    """A language model on devices, for one batch and one context.

    Attributes:
        shapes: function from a number of devices to the model as they hold it, a module of shapes.
        options: options of the engine, with batch and context.
        dtype: dtype of the weights.
        device: kind of device.
        devices: number of devices, over which the model is divided as its layers declare it.
    """

    shapes: Callable[[int], Any]
    options: EngineConfig
    dtype: Any
    device: Device
    devices: int

    @cached_property
    def model(self) -> Any:
        """The model as the devices hold it, with heads repeated where there are more devices than heads."""
        return self.shapes(self.devices)

    @property
    def config(self) -> Any:
        """Configuration of the model."""
        return self.model.config

    @property
    def num_seqs(self) -> int:
        """Sequences of a step."""
        return self.options.max_num_seqs or 1

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return self.options.max_model_len or self.config.max_position_embeddings

    @cached_property
    def parts(self) -> list[Part]:
        """Weights by part."""
        return parts_of(self.model, self.devices)

    @cached_property
    def abstract(self) -> AbstractModel:
        """The model as programs take it."""
        return AbstractModel.from_module(self.model)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on a device."""
        return sum(part.per_device for part in self.parts)

    def sizes(self, num_seqs: int | None = None, context: int | None = None) -> RunnerConfig:
        """The engine's sizes with blocks for all sequences at their full length, by default those of the plan."""
        options = self.options.with_options(
            {
                "max_num_seqs": num_seqs or self.num_seqs,
                "max_model_len": context or self.context,
                "kv_cache_memory": BOUNDLESS,
                "tensor_parallel_size": self.devices,
            }
        )
        with self.target():
            return plan_sizes(self.config, self.dtype, options)

    def cache_bytes(self, num_seqs: int | None = None, context: int | None = None) -> int:
        """Bytes of the cache on a device, recurrent states included."""
        cache = jax.eval_shape(lambda: new_cache(self.config, self.sizes(num_seqs, context)))
        shardings = named(tensor_mesh(self.devices), cache_partitions(self.config, cache))
        return sharded_bytes(jax.tree.leaves(cache), jax.tree.leaves(shardings))

    def whole_cache_bytes(self) -> int:
        """Bytes of the cache on all devices together, what several of them have counted once."""
        cache = jax.eval_shape(lambda: new_cache(self.config, self.sizes()))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    @cached_property
    def cache_room(self) -> int:
        """Bytes that the engine gives its cache on a device beside the weights, at most; 0 if they do not fit."""
        free = self.device.memory - self.weight_bytes
        with self.target(DeviceMemory(max(0, free), self.device.memory)):
            return max(0, cache_memory())

    @property
    def fits(self) -> bool:
        """True if all sequences fit at their full length."""
        return self.cache_bytes() <= self.cache_room

    def target(self, memory: DeviceMemory | None = None) -> AbstractContextManager[None]:
        """Context in which programs and sizes are those of the device."""
        device = self.device
        return ops.use_target(device.platform, device.kind, memory or device.memory, self.devices)

    def program(self, shape: StepShape, mesh: Mesh | None = None) -> StepProgram:
        """The engine's program of a step, with the shardings of its arguments; on abstract devices without a mesh."""
        return step_program(self.abstract, self.sizes(), shape, mesh or tensor_mesh(self.devices))

    def step(self, shape: StepShape, batches: Sequence[Sequence[Span]]) -> tuple[Work, Bound, list[float]]:
        """Work of steps of one shape, their least time, and the share of each argument on a device.

        Args:
            shape: shape of the steps.
            batches: sequences of each step.
        """
        works, shares = self._works(shape, batches)
        total = reduce(add, works)
        return total, self._bound(total, shape, shares, times=len(batches)), shares

    def bounds(self, shape: StepShape, batches: Sequence[Sequence[Span]]) -> list[Bound]:
        """Least time of each of several steps of one shape, which is traced once. Arguments are those of `step`."""
        works, shares = self._works(shape, batches)
        return [self._bound(work, shape, shares) for work in works]

    def _works(self, shape: StepShape, batches: Sequence[Sequence[Span]]) -> tuple[list[Work], list[float]]:
        with self.target():
            program = self.program(shape)
            traced = trace(program.function, *program.arguments)
        return [count(traced, spans) for spans in batches], _shares(program)

    def _bound(self, work: Work, shape: StepShape, shares: list[float], *, times: int = 1) -> Bound:
        return bound(work, self.device, self.devices, shares=shares, linked=times * self._linked(shape))

    def _linked(self, shape: StepShape) -> float:
        """Bytes that a device sends to others in a step: sums after products with divided inputs, lookups, scores.

        A ring sends 2 (N - 1) / N of an array that is added up, and (N - 1) / N of one that is put together.
        """
        if self.devices == 1:
            return 0.0
        others = (self.devices - 1) / self.devices
        width = self.config.hidden_size
        sums = sum(_num_sums(module) for _, module in nnx.iter_modules(self.model))
        added = sums * shape.tokens * width
        scores = shape.num_sampled * self.config.vocab_size
        return FLOAT32_BYTES * others * (2 * added + scores)


def _num_sums(module: Any) -> int:
    """Sums over devices of one number for each token and width of the model, at the end of a module."""
    if isinstance(module, Linear):
        return int(module.divided == "in")
    return int(isinstance(module, Embedding | Experts) and bool(module.divisions))


def _shares(program: StepProgram) -> list[float]:
    """Share of each array of a program's arguments that one device holds."""
    arrays, shardings = jax.tree.leaves(program.arguments), jax.tree.leaves(program.shardings)
    whole = [sharded_bytes([array], [sharding]) for array, sharding in zip(arrays, shardings, strict=True)]
    return [held / max(1, array.size * array.dtype.itemsize) for held, array in zip(whole, arrays, strict=True)]


def text_plan(
    model: Described,
    device: Device,
    *,
    devices: int = 1,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    max_num_seqs: int = 8,
    context: int | None = None,
) -> TextPlan:
    """A language model on devices, checked.

    Args:
        model: the model.
        device: kind of device.
        devices: number of devices.
        dtype: `"bfloat16"` or `"float32"`.
        quantization: as `verax.LLM` takes it.
        kv_cache_dtype: as `verax.LLM` takes it.
        max_num_seqs: sequences of a step.
        context: tokens of each sequence; 4096 or the model's positions, if these are fewer, if None.

    Raises:
        InvalidParameterError: for an option out of range, or weights that do not divide over the devices.
    """
    check_dtype(dtype)
    architecture, config = causal_lm(model.config)

    @cache
    def shapes(devices: int) -> Any:
        """The model as so many devices hold it."""
        options: Any = {"dtype": DTYPES[dtype], "quantization": quantization, "opened": model.opened}
        found = model_shapes(architecture, config_on_devices(config, devices), **options)
        return packed_shapes(found, device, few_rows=True) if devices == 1 else found

    longest = config.max_position_embeddings
    context = min(CONTEXT, longest) if context is None else context
    if not 2 <= context <= longest:
        raise InvalidParameterError(f"context: expected 2 to {longest} tokens, the model's positions, got {context}")
    options = EngineConfig(max_num_seqs=max_num_seqs, max_model_len=context, kv_cache_dtype=kv_cache_dtype)
    plan = TextPlan(shapes, options, DTYPES[dtype], device, devices)
    _ = plan.parts  # an error names a weight that does not divide
    return plan


def plan_text(model: Described, device: Device, *, quantization: str | None = None, **options: Any) -> dict[str, Any]:
    """Plan of a language model, as JSON holds it. Arguments and errors are those of `text_plan`."""
    plan = text_plan(model, device, quantization=quantization, **options)
    max_num_seqs, devices = plan.num_seqs, plan.devices
    sizes = plan.sizes()
    shape = StepShape(max_num_seqs, max_num_seqs, True)
    work, least, shares = plan.step(shape, [[Span(plan.context - 1, 1)] * max_num_seqs])
    decode = described(f"decode step: {max_num_seqs} sequences of {plan.context} tokens", work, least, shares)
    prompts = dict.fromkeys((min(PROMPT, plan.context - 1), plan.context - 1))
    return {
        "kind": model.kind,
        "model": model.name,
        "device": device.as_dict(),
        "settings": {
            "dtype": jnp.dtype(plan.dtype).name,
            "quantization": quantization,
            "kv_cache_dtype": plan.options.kv_cache_dtype,
            "max_num_seqs": max_num_seqs,
            "context": plan.context,
            "max_num_batched_tokens": sizes.max_num_batched_tokens,
            "devices": devices,
        },
        "weights": [part._asdict() for part in plan.parts],
        "memory": {
            "weights": plan.weight_bytes,
            "cache": plan.cache_bytes(),
            "slots": _slot_bytes(plan),
        },
        "cache_room": plan.cache_room,
        "programs": [decode, *(_prefill(plan, sizes, tokens) for tokens in prompts)],
        "at_most": {"tokens/s of all sequences": max_num_seqs / least.seconds, "tokens/s of one": 1 / least.seconds},
        "fits": plan.fits,
        "largest_batch": _largest(lambda n: plan.cache_bytes(num_seqs=n) <= plan.cache_room, 1, MOST_SEQS),
        "largest_context": _largest(
            lambda n: plan.cache_bytes(context=n) <= plan.cache_room, 2, plan.config.max_position_embeddings
        ),
        "fewest_devices": next((n for n in fitting_sizes(plan.shapes(1)) if replace(plan, devices=n).fits), None),
    }


def _prefill(plan: TextPlan, sizes: RunnerConfig, tokens: int) -> dict[str, Any]:
    """Work and least time of reading one prompt, in as many steps as the engine's token budget makes of it."""
    budget = sizes.max_num_batched_tokens
    steps: dict[int, list[list[Span]]] = {}
    for before in range(0, tokens, budget):
        span = Span(before, min(budget, tokens - before))
        # The engine's steps have buckets of tokens, all multiples of this. Work of padding is counted in products.
        padded = -(-span.count // PROMPT_LOGPROB_CHUNK) * PROMPT_LOGPROB_CHUNK
        steps.setdefault(padded, []).append([span])
    found = [plan.step(StepShape(1, size, False), batches) for size, batches in steps.items()]
    total = reduce(add, (work for work, _, _ in found))
    least = Bound(*map(sum, zip(*(least for _, least, _ in found), strict=True)))
    count = sum(map(len, steps.values()))
    name = f"prefill: a prompt of {tokens} tokens" + (f" in {count} steps" if count > 1 else "")
    return described(name, total, least, found[0][2])


def _slot_bytes(plan: TextPlan) -> int:
    """Bytes of the engine's slots, which every device has whole."""
    _, slots, _, _ = plan.program(StepShape(1, 1, True)).arguments
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots))


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Largest number from `least` to `most` that fits, 0 if none does. What fits, fits for every smaller number."""
    if not fits(least):
        return 0
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
