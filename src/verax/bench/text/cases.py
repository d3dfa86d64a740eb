"""Text generation: a workload on our engine and, in turn with it, on others with the same weights."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from verax import checkpoint, ops
from verax.bench.harness import Benchmark, case_result, checkpoint_folder, time_sides, timed
from verax.bench.results import rounds, sides_table, slug, table
from verax.bench.settings import TextSettings
from verax.bench.text.peers import STARTS, peer_sides
from verax.bench.text.workload import USUAL, Workload, make_workload
from verax.errors import InvalidParameterError
from verax.files import model_name
from verax.loading import load_causal_lm
from verax.machine import measure_bandwidth, peak_growth
from verax.models import causal_lm
from verax.ops.paged import QuantizedPages
from verax.plan.model import multiplied
from verax.shapes import SHAPES
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.llm import LLM
from verax.text.engine.request import RequestInput
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step.step import StepShape
from verax.text.tokens.tokenizer import Tokenizer


def bench_text(settings: TextSettings, workload: Workload | None = None) -> dict[str, Any]:
    """Run a workload, by default the settings' own, on our engine and, interleaved, on others."""
    dtype, quantization, drafts = settings.dtype, settings.quantization, settings.speculative_config
    if "verax" in settings.against and quantization is None:
        raise InvalidParameterError("against: verax is our side unquantised; give quantization as well")
    benchmark, (words, shapes) = Benchmark("text"), SHAPES[settings.shapes]
    with checkpoint_folder(settings.model, shapes) as folder, contextlib.ExitStack() as stack:
        opened = checkpoint.Checkpoint.open(folder)
        tokenizer = Tokenizer.from_checkpoint(opened) if settings.workload == "chat" and settings.model else None
        workload = workload or make_workload(settings, causal_lm(opened.config)[1].vocab_size, tokenizer)
        sides, versions, starts = peer_sides(settings, opened, workload, stack)
        head = drafts is not None and EngineConfig(speculative_config=drafts).uses_prediction_head
        load = partial(load_causal_lm, opened, dtype=dtype, quantization=quantization)
        with peak_growth() as loading:
            module, load_seconds = timed(partial(load, prediction_head=head))
        dense, experts, chosen, output = multiplied(module)
        leaves = nnx.to_flat_state(nnx.state(module))
        stored = sum(leaf.get_value().nbytes for path, leaf in leaves if "experts" in path)
        sized: dict[str, Any] = {"max_num_seqs": min(len(workload.prompts), 256), "max_model_len": workload.longest}
        llm = LLM.from_module(module, speculative_config=drafts, **sized)
        runner = llm.engine.runner
        if "verax" in settings.against:
            sides[f"verax {dtype}"] = partial(_generate, LLM.from_module(load(quantization=None), **sized), workload)
        if drafts is not None:
            sides["verax without drafts"] = partial(_generate, LLM.from_module(load(), **sized), workload)
        sides["verax"] = partial(_generate, llm, workload)
        compiled = runner.num_compiled()
        samples = time_sides(sides, runs=settings.runs, warmup=settings.warmup, trace=settings.trace)
        undrafted = samples.get("verax without drafts", samples["verax"])  # with drafts there are fewer steps
        steps, rows = workload.steps(runner.config.max_num_seqs), runner.config.max_num_seqs
        # A last token is not read. The head has a product only for a token that another is drawn after.
        positions = workload.prompt_tokens + workload.new_tokens - len(workload.prompts)
        products = 2 * ((dense + chosen) * positions + output * workload.new_tokens)
        # Experts that no row of a step chooses are not read: the mean over choices, in which all are equally likely.
        unread = stored * (1 - chosen / experts) ** rows if experts else 0.0
        moved = steps * (runner.weight_bytes - unread)
        work = benchmark.against_limit(undrafted.median, bytes_moved=moved, flops=products, dtype=dtype)
        case = case_result("", "verax", samples, workload.counted_tokens)
        for side, numbers in {**starts, "verax": work | starts.get("verax", {})}.items():
            case["sides"][side] |= numbers
        measured: dict[str, Any] = {
            "cases": [case],
            "work": {"steps": steps, **work},
            "start_up": {
                "load_s": load_seconds,
                "weights_gb": runner.weight_bytes / 1e9,
                "load_peak_gb": (loading() or 0) / 1e9 or None,
                "compile_s": llm.compile_seconds,
                "kv_cache": llm.kv_cache,
                "programs": len(runner.config.shapes),
                "compiled_during_runs": runner.num_compiled() - compiled,
            },
        }
        if llm.spec_decode is not None:
            rate = llm.spec_decode.acceptance_rate
            measured["spec_decode"] = {**dataclasses.asdict(llm.spec_decode), "acceptance_rate": rate}
        if settings.decode_breakdown:
            rows = len(workload.prompts)
            measured["decode_breakdown"] = _break_down_decode_step(llm, rows=rows, length=workload.longest)
        asked = dataclasses.asdict(settings) | {
            "model": model_name(settings.model) if settings.model else f"random weights, {words}",
            "shapes": None if settings.model else settings.shapes,
            "speculative_config": llm.config.speculation and dataclasses.asdict(llm.config.speculation),
            "workload": workload.name,
            "requests": len(workload.prompts),
            "prompt_tokens": workload.prompt_tokens,
            "new_tokens": workload.new_tokens,
            "temperature": workload.temperature,
            "max_num_seqs": runner.config.max_num_seqs,
        }
        return benchmark.result(settings=asked, versions=versions, **_page(asked, measured), **measured)


def _generate(llm: LLM, workload: Workload) -> object:
    # Each run reads its prompts again: what the prefix cache kept of the run before would be a gift.
    llm.engine.scheduler.blocks.reset_prefix_cache()
    outputs = llm.generate([list(prompt) for prompt in workload.prompts], workload.params(), use_tqdm=False)
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == workload.new_tokens
    return outputs


def _no_write(k_cache: ops.Pages, v_cache: ops.Pages, *keys_and_values: Any) -> tuple[ops.Pages, ...]:
    # One value is still written: XLA drops the products that make x if nothing reads it.
    pairs = zip((k_cache, v_cache), keys_and_values, strict=False)
    return tuple(
        cache._replace(values=_first_replaced(cache.values, x))
        if isinstance(cache, QuantizedPages)
        else _first_replaced(cache, x)
        for cache, x in pairs
    )


def _first_replaced(values: Array, x: Float[Array, "T K H"]) -> Array:
    # Not `.at[].set`: XLA scatters one bfloat16 at the price of the whole cache.
    one = x[:1, :1, :1].astype(values.dtype).reshape((1,) * values.ndim)
    return jax.lax.dynamic_update_slice(values, one, (0,) * values.ndim)


LADDER: tuple[tuple[str, dict[str, Callable[..., Any]]], ...] = (
    ("sampling beyond an argmax", {"sample": lambda logits, *state: jnp.argmax(logits, axis=-1).astype(jnp.int32)}),
    ("attention", {"paged_decode_attention": lambda q, *cache, **options: q}),
    ("cache writes", {"write_pages": _no_write}),
)
"""Parts of a decode step, in the order in which they are replaced by nothing."""


def _break_down_decode_step(llm: LLM, *, rows: int, length: int) -> dict[str, Any]:
    """Milliseconds of a decode step of `rows` sequences of about `length` tokens, by part; the bandwidth reached.

    What is left without attention, cache writes and sampling is weights: matmuls, norms and the like. The host's part
    (scheduling and packing) is not one of the parts: it runs while the device computes.
    """
    runner = llm.engine.runner
    rows = min(rows, runner.config.max_num_seqs)
    host_ms, packed, shape = _prepare(llm, rows, length)
    variants, skipped = {"whole step": runner.compile_with_implementations(shape)}, {}
    for part, choice in LADDER:
        skipped.update(choice)
        variants[f"without {part}"] = runner.compile_with_implementations(shape, **skipped)
    calls = {name: lambda step=step: jax.block_until_ready(step(packed)) for name, step in variants.items()}
    times = [1e3 * side.median for side in time_sides(calls, runs=15, warmup=2).values()]
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
    engine.scheduler.decode_steps = {}  # one token of each
    prompt_length = max(1, min(length, llm.max_model_len) - 40)
    params = SamplingParams(temperature=0.7, max_tokens=None, ignore_eos=True)
    prompts = rng.integers(3, engine.vocab_size, (rows, prompt_length)).tolist()
    requests = [engine.prepare(RequestInput(prompt, params)) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while any(sequence.num_to_compute != 1 for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.advance()
    (packed, shape, _), seconds = timed(lambda: engine.runner.pack(engine.scheduler.schedule()))
    for request in requests:
        engine.abort(request.request_id)
    return 1e3 * seconds, packed, shape


def _page(settings: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Name, title, intro, tables and notes of a result."""
    precision = settings["quantization"] or settings["dtype"]
    count, workload, start = settings["requests"], settings["workload"], measured["start_up"]
    drafts, shapes = settings["speculative_config"], settings["shapes"]
    grew = f" (memory grew by {start['load_peak_gb']:.2f} GB at most)" if start["load_peak_gb"] else ""
    notes = [
        f"Start-up: weights of {start['weights_gb']:.2f} GB in {start['load_s']:.1f} s{grew}, {start['programs']} "
        f"programs in {start['compile_s']:.1f} s; {start['compiled_during_runs']} compiled during the runs. Cache: "
        f"{start['kv_cache']}."
    ]
    if counts := measured.get("spec_decode"):
        notes.append(
            f"Drafts of at most {drafts['num_speculative_tokens']} tokens: {counts['num_accepted_tokens']} of "
            f"{counts['num_draft_tokens']} held ({counts['acceptance_rate']:.0%}), in {counts['num_drafts']} steps of "
            "a sequence, warm-up included."
        )
    started = "start_s" in measured["cases"][0]["sides"]["verax"]
    tables = [sides_table(measured["cases"], "tokens/s", note=STARTS if started else "")]
    if step := measured.get("decode_breakdown"):
        parts = {**step["parts_ms"], "host (while the device computes)": step["host_ms"]}
        note = (
            f"A step of {step['rows']} sequences of about {step['length']} tokens: {step['whole_ms']:.1f} ms, "
            f"{step['weight_gb_per_s']:.1f} GB/s of weights, {100 * step['fraction_of_bandwidth']:.0f}% of the "
            "measured bandwidth."
        )
        columns = {"part": lambda row: row[0], "ms": lambda row: f"{row[1]:.1f}"}
        tables.append(table(parts.items(), columns, title="Parts of a decode step", note=note))
    return {
        "name": slug(
            settings["model"] if shapes is None else "",
            workload,
            shapes if shapes not in (None, "qwen3") else "",
            precision,
            "drafts" if drafts else "",
            "" if count == USUAL[workload][0] else f"{count} prompt{'s' if count > 1 else ''}",
            f"{settings['prompt_tokens'] // count} tokens" if workload == "prompt" else "",
        ),
        "title": f"Text: {workload}, {settings['model']}, {precision}",
        "intro": f"{count} prompts ({settings['prompt_tokens']} tokens), {settings['new_tokens']} new tokens, "
        f"temperature {settings['temperature']}; {rounds(settings)}."
        + (" Tokens are the prompts'." if workload == "prompt" else "")
        + " The limit is for the weights and their products, attention left out.",
        "tables": tables,
        "notes": notes,
    }
