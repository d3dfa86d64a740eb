"""Text generation: a workload on our engine and, in turn with it, on others with the same weights."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from flax import nnx

from verax import checkpoint
from verax.bench.harness import Benchmark, case_result, checkpoint_folder, time_sides, timed
from verax.bench.processes import STARTS
from verax.bench.results import rounds, sides_table, slug
from verax.bench.settings import TextSettings
from verax.bench.text.peers import TOKENS, peer_sides
from verax.bench.text.workload import USUAL, Workload, make_workload
from verax.errors import InvalidParameterError
from verax.files import model_name
from verax.loading import load_causal_lm
from verax.machine import peak_growth
from verax.models import causal_lm
from verax.plan.model import multiplied
from verax.shapes import SHAPES
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.llm import LLM
from verax.text.tokens.tokenizer import Tokenizer


def bench_text(settings: TextSettings, workload: Workload | None = None) -> dict[str, Any]:
    """Run a workload, by default the settings' own, on our engine and, interleaved, on others."""
    dtype, quantization, drafts = settings.dtype, settings.quantization, settings.speculative_config
    if "verax" in settings.against and quantization is None:
        raise InvalidParameterError("against: verax is our side unquantised; give quantization as well")
    name = settings.shapes or "qwen3"
    benchmark, (words, shapes) = Benchmark("text"), SHAPES[name]
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
        stored = sum(leaf.get_value().nbytes for path, leaf in leaves if "experts" in path and path[0] != "mtp")
        sized: dict[str, Any] = {"max_num_seqs": min(len(workload.prompts), 256), "max_model_len": workload.longest}
        llm = LLM.from_module(module, speculative_config=drafts, **sized)
        runner, undrafted, counted = llm.engine.runner, llm, "verax"
        if "verax" in settings.against:
            sides[f"verax {dtype}"] = partial(_generate, LLM.from_module(load(quantization=None), **sized), workload)
        if drafts is not None:  # with drafts there are fewer steps, which may read a prediction head too
            undrafted, counted = LLM.from_module(load(), **sized), "verax without drafts"
            sides[counted] = partial(_generate, undrafted, workload)
        sides["verax"] = partial(_generate, llm, workload)
        compiled = runner.num_compiled()
        samples = time_sides(sides, runs=settings.runs, warmup=settings.warmup, trace=settings.trace)
        steps, rows = workload.steps(runner.config.max_num_seqs), runner.config.max_num_seqs
        # A last token is not read. The head has a product only for a token that another is drawn after.
        positions = workload.prompt_tokens + workload.new_tokens - len(workload.prompts)
        products = 2 * ((dense + chosen) * positions + output * workload.new_tokens)
        # Experts that no row of a step chooses are not read: the mean over choices, in which all are equally likely.
        unread = stored * (1 - chosen / experts) ** rows if experts else 0.0
        moved = steps * (undrafted.engine.runner.weight_bytes - unread)
        work = benchmark.against_limit(samples[counted].median, bytes_moved=moved, flops=products, dtype=dtype)
        case = case_result("", "verax", samples, workload.counted_tokens)
        for side, numbers in (*starts.items(), (counted, work)):
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
        asked = dataclasses.asdict(settings) | {
            "model": model_name(settings.model) if settings.model else f"random weights, {words}",
            "shapes": None if settings.model else name,
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
    tables = [sides_table(measured["cases"], "tokens/s", note=f"{STARTS} {TOKENS}" if started else "")]
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
        + " The limit is for the weights and their products, attention left out"
        + (", at bfloat16's rate, which products of 8-bit integers exceed." if precision == "w8a8" else "."),
        "tables": tables,
        "notes": notes,
    }
