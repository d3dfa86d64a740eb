"""Breakdown of a decode step's time: the step with one part after the other replaced by nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from verax import ops
from verax.bench.timing import interleave
from verax.machine import measure_bandwidth
from verax.ops.paged import QuantizedPages
from verax.text.engine.llm import LLM
from verax.text.engine.request import RequestInput
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step.step import StepShape

__all__ = ["break_down_decode_step"]

REPETITIONS = 15


def _no_attention(
    q: Float[Array, "B N H"],
    k_cache: ops.Pages,
    v_cache: ops.Pages,
    page_table: Int[Array, "B W"],
    kv_lengths: Int[Array, "B"],
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B N H"]:
    return q


def _no_write(
    cache: ops.Pages, x: Float[Array, "T K H"], pages: Int[Array, "T"], offsets: Int[Array, "T"]
) -> ops.Pages:
    # One value is still written: XLA drops the products that make x if nothing reads it.
    if isinstance(cache, QuantizedPages):
        return cache._replace(values=_first_replaced(cache.values, x))
    return _first_replaced(cache, x)


def _first_replaced(values: Array, x: Float[Array, "T K H"]) -> Array:
    # Not `.at[].set`: XLA scatters one bfloat16 at the price of the whole cache.
    one = x[:1, :1, :1].astype(values.dtype).reshape((1,) * values.ndim)
    return jax.lax.dynamic_update_slice(values, one, (0,) * values.ndim)


def _no_sampling(logits: Float[Array, "B V"], *state: Any) -> Int[Array, "B"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


LADDER: tuple[tuple[str, dict[str, Callable[..., Any]]], ...] = (
    ("sampling beyond an argmax", {"sample": _no_sampling}),
    ("attention", {"paged_decode_attention": _no_attention}),
    ("cache writes", {"write_pages": _no_write}),
)
"""Parts, in the order in which they are taken away."""


def break_down_decode_step(llm: LLM, *, rows: int, length: int) -> dict[str, Any]:
    """Milliseconds of a decode step of `rows` sequences of about `length` tokens, by part; the bandwidth reached.

    What is left when attention, cache writes and sampling are gone is weights: matmuls, norms and the like. The host's
    part (scheduling and packing) is beside it: it runs while the device computes.
    """
    runner = llm.engine.runner
    rows = min(rows, runner.config.max_num_seqs)
    host_ms, packed, shape = _prepare(llm, rows, length)
    variants, skipped = {"whole step": runner.compile_with_implementations(shape)}, {}
    for part, choice in LADDER:
        skipped.update(choice)
        variants[f"without {part}"] = runner.compile_with_implementations(shape, **skipped)
    samples = interleave(
        {name: (lambda step=step: jax.block_until_ready(step(packed))) for name, step in variants.items()},
        runs=REPETITIONS,
        warmup=2,
    )
    times = [1e3 * side.median for side in samples.values()]
    parts = {part: before - after for (part, _), before, after in zip(LADDER, times, times[1:], strict=False)}
    bandwidth = measure_bandwidth()
    reached = runner.weight_bytes / (times[0] / 1e3)
    return {
        "rows": rows,
        "length": length,
        "whole_ms": times[0],
        "parts_ms": {"weights (matmuls, norms, rotary)": times[-1], **parts},
        "host_ms": host_ms,
        "weight_gb": runner.weight_bytes / 1e9,
        "weight_gb_per_s": reached / 1e9,
        "fraction_of_bandwidth": reached / bandwidth,
    }


def _prepare(llm: LLM, rows: int, length: int) -> tuple[float, np.ndarray, StepShape]:
    """Real requests brought to `length` tokens; the host's milliseconds a step, and a step's input to repeat."""
    engine, rng = llm.engine, np.random.default_rng(0)
    prompt_length = max(1, min(length, llm.max_model_len) - 40)
    params = SamplingParams(temperature=0.7, max_tokens=None, ignore_eos=True)
    prompts = [rng.integers(3, engine.vocab_size, prompt_length).tolist() for _ in range(rows)]
    names = [engine.add_request(RequestInput(prompt, params)) for prompt in prompts]
    while any(sequence.num_to_compute != 1 for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.advance()
    begin = time.perf_counter()
    schedule = engine.scheduler.schedule()
    packed, shape, _ = engine.runner.pack(schedule)
    host_ms = 1e3 * (time.perf_counter() - begin)
    for name in names:
        engine.abort(name)
    return host_ms, packed, shape
