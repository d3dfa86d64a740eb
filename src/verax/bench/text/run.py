"""Text generation: workloads, our engine, and transformers and llama.cpp beside it on the same weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx

from verax import checkpoint, progress
from verax.bench.harness import Benchmark, product_weights
from verax.bench.results import model_name
from verax.bench.text.experts import unread_bytes, unused_weights
from verax.bench.text.workload import Workload
from verax.bench.timing import interleave
from verax.checkpoint.load import random_weights
from verax.errors import InvalidParameterError
from verax.loading import load_causal_lm
from verax.machine import peak_growth
from verax.models import causal_lm
from verax.shapes import SHAPES
from verax.text.engine.llm import DTYPES, LLM

if TYPE_CHECKING:
    from verax.bench.text.llama_cpp import LlamaCppSide

__all__ = ["BASELINES", "GGUF_TYPES", "bench_text", "checkpoint_folder"]

BASELINES = ("transformers", "llama.cpp", "verax")
"""Sides of a text benchmark beside ours; the last is our own, unquantised."""

GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""Type of llama.cpp's weights, by our `quantization` or else our `dtype`."""


def bench_text(
    model: str | None,
    make_workload: Callable[[int], Workload],
    *,
    runs: int,
    warmup: int,
    against: tuple[str, ...] = (),
    dtype: str = "bfloat16",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    max_num_seqs: int | None = None,
    decode_breakdown: bool = False,
    shapes: str = "qwen3",
    speculative_config: str | None = None,
) -> dict[str, Any]:
    """Run a workload on our engine and, interleaved, on others; a report as JSON holds it.

    Args:
        model: a checkpoint; random weights if None.
        make_workload: of a vocabulary size.
        runs: counted rounds. With `warmup` rounds before them.
        against: names out of `BASELINES`: Hugging Face's generate, prompt by prompt and in one batch; llama.cpp, all
            prompts in one batch; our engine with weights in `dtype`, where `quantization` is given.
        dtype: of all sides.
        quantization: of our side, and of llama.cpp's: Q8_0 for int8, Q4_0 for int4.
        kv_cache_dtype: of our side.
        max_num_seqs: sequences in a step; all prompts at once, up to 256, if None.
        decode_breakdown: measure the decode step's parts too.
        shapes: of random weights, a name out of `SHAPES`.
        speculative_config: drafts of our side (JSON); the same engine without drafts is a side of its own.
    """
    if shapes not in SHAPES:
        raise InvalidParameterError(f"shapes: expected one of {', '.join(SHAPES)}, got {shapes!r}")
    unknown = [name for name in against if name not in BASELINES]
    if unknown:
        raise InvalidParameterError(f"against: expected {' or '.join(BASELINES)}, got {unknown[0]!r}")
    if "verax" in against and quantization is None:
        raise InvalidParameterError("against: verax is our side unquantised; give quantization as well")
    benchmark = Benchmark("text")
    with checkpoint_folder(model, dtype, SHAPES[shapes][1]) as folder, contextlib.ExitStack() as closing:
        opened = checkpoint.Checkpoint.open(folder)
        sizes = causal_lm(opened.config)[1]
        workload = make_workload(sizes.vocab_size)
        begin = time.perf_counter()
        with peak_growth() as loading:
            module = load_causal_lm(opened, dtype=dtype, quantization=quantization)
        load_seconds = time.perf_counter() - begin
        sized = {
            "max_num_seqs": max_num_seqs or min(len(workload.prompts), 256),
            "max_model_len": workload.longest,
            "kv_cache_dtype": kv_cache_dtype,
        }
        llm = LLM.from_module(module, speculative_config=speculative_config, **sized)
        runner = llm.engine.runner
        sides: dict[str, Callable[[], object]] = {}
        versions: dict[str, Any] = {}
        if "transformers" in against:
            if opened.metadata:
                raise InvalidParameterError(f"against: {folder} is a GGUF file; transformers is compared on a folder")
            from verax.bench.text.transformers import TransformersSide

            theirs = TransformersSide(folder, dtype)
            versions |= theirs.versions()
            sides["transformers naive"] = lambda: theirs.naive(workload)
            if len(workload.prompts) > 1:
                sides["transformers batched"] = lambda: theirs.batched(workload)
        if "llama.cpp" in against:
            kind = "as it is" if opened.metadata else GGUF_TYPES[quantization or dtype]
            llama_cpp = closing.enter_context(_llama_cpp(opened, kind, workload))
            versions |= llama_cpp.versions()
            sides[f"llama.cpp {kind}"] = lambda: llama_cpp.batched(workload)
        if "verax" in against:
            sides[f"verax {dtype}"] = partial(
                _generate, LLM.from_module(load_causal_lm(opened, dtype=dtype), **sized), workload
            )
        if speculative_config is not None:
            sides["verax without drafts"] = partial(_generate_without_drafts, llm, workload)
        sides["verax"] = partial(_generate, llm, workload)
        compiled = runner.num_compiled()
        with progress.bar("measuring") as report:
            samples = interleave(sides, runs=runs, warmup=warmup, report=report)
        settings = {
            "model": model_name(model) if model else f"random weights, {SHAPES[shapes][0]}",
            "shapes": None if model else shapes,
            "dtype": dtype,
            "quantization": quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "speculative_config": None if speculative_config is None else json.loads(speculative_config),
            "workload": workload.name,
            "requests": len(workload.prompts),
            "prompt_tokens": workload.prompt_tokens,
            "new_tokens": workload.new_tokens,
            "temperature": workload.temperature,
            "runs": runs,
            "warmup": warmup,
            "max_num_seqs": runner.config.max_num_seqs,
        }
        steps = workload.steps(runner.config.max_num_seqs)
        timed = samples.get("verax without drafts", samples["verax"])  # with drafts there are fewer steps
        head = sizes.vocab_size * sizes.hidden_size  # of which only a token that another is drawn after needs a product
        layers = product_weights(opened, tables=None if module.config.tie_word_embeddings else "embed_tokens") - head
        positions = workload.prompt_tokens + workload.new_tokens - len(workload.prompts)  # a last token is not read
        products = (layers - unused_weights(opened, sizes)) * positions + head * workload.new_tokens
        moved = runner.weight_bytes - unread_bytes(module, runner.config.max_num_seqs)
        result = benchmark.result(
            settings,
            versions,
            start_up={
                "load_s": load_seconds,
                "weights_gb": runner.weight_bytes / 1e9,
                "load_peak_gb": (loading() or 0) / 1e9 or None,
                "compile_s": llm.compile_seconds,
                "kv_cache": llm.kv_cache,
                "programs": len(runner.config.shapes),
                "compiled_during_runs": runner.num_compiled() - compiled,
            },
            sides={name: side.to_dict(workload.counted_tokens) for name, side in samples.items()},
            ratios={
                f"verax / {name}": samples["verax"].ratio_to(side) for name, side in samples.items() if name != "verax"
            },
            work={
                "steps": steps,
                **benchmark.against_limit(
                    timed.median,
                    bytes_moved=steps * moved,
                    flops=2 * products,
                    dtype=dtype,
                ),
            },
        )
        if llm.spec_decode is not None:
            result["spec_decode"] = {
                **dataclasses.asdict(llm.spec_decode),
                "acceptance_rate": llm.spec_decode.acceptance_rate,
            }
        if decode_breakdown:
            from verax.bench.text.decode_breakdown import break_down_decode_step

            result["decode_breakdown"] = break_down_decode_step(
                llm, rows=len(workload.prompts), length=workload.longest
            )
        return result


def _generate(llm: LLM, workload: Workload) -> object:
    # Each run reads its prompts anew: what the prefix cache kept of the run before would be a gift.
    llm.engine.scheduler.blocks.reset_prefix_cache()
    outputs = llm.generate([list(prompt) for prompt in workload.prompts], workload.params(), use_tqdm=False)
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == workload.new_tokens
    return outputs


def _generate_without_drafts(llm: LLM, workload: Workload) -> object:
    speculator, llm.engine.speculator = llm.engine.speculator, None
    try:
        return _generate(llm, workload)
    finally:
        llm.engine.speculator = speculator


@contextlib.contextmanager
def _llama_cpp(opened: checkpoint.Checkpoint, kind: str, workload: Workload) -> Iterator[LlamaCppSide]:
    """llama.cpp with a GGUF file itself, or else the weights as `kind` in a file that is gone afterwards."""
    from verax.bench.text.gguf_writer import write_gguf
    from verax.bench.text.llama_cpp import LlamaCppSide, import_llama_cpp

    import_llama_cpp()  # before a file is written for it
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as name:
        path = opened.folder if opened.metadata else write_gguf(opened, Path(name) / f"{kind}.gguf", kind)
        side = LlamaCppSide(path, workload)
        try:
            yield side
        finally:
            side.close()


@contextlib.contextmanager
def checkpoint_folder(model: str | None, dtype: str, config: dict[str, Any]) -> Iterator[Path]:
    """The checkpoint's folder; random weights of real spread in a folder that is gone afterwards, if there is none.

    Args:
        model: a checkpoint, or None.
        dtype: of the weights in an engine.
        config: config.json of the random weights.

    Raises:
        InvalidParameterError: for an unknown dtype.
    """
    if dtype not in DTYPES:
        raise InvalidParameterError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if model is not None:
        yield checkpoint.resolve(model)
        return
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as name:
        architecture, sizes = causal_lm(config)
        weights = random_weights(nnx.eval_shape(lambda: architecture(sizes, rngs=nnx.Rngs(0))), jnp.bfloat16)
        yield checkpoint.save(weights, name, config=config)
