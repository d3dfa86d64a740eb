"""Text part: nano-vllm's mix, short prompts and two prompts to read, of one model in one precision."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from verax.bench.accelerator.row import Measured, Row
from verax.bench.text.run import bench_text, checkpoint_folder
from verax.bench.text.workload import Workload, nano_vllm, prompt, short_prompts
from verax.errors import VeraxError
from verax.plan.stand_ins import Span
from verax.shapes import QWEN3_0_6B, SHAPES

__all__ = ["attention_work", "measure_text"]

TINY: Mapping[str, Any] = {
    **QWEN3_0_6B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Model of a rehearsal."""

Make = Callable[[int], Workload]

WORKLOADS: Mapping[str, Make] = {
    "nano-vllm's mix": nano_vllm,
    "4 x 100 tokens": short_prompts,
    "prompt of 512": lambda vocab_size: prompt(vocab_size, tokens=512),
    "prompt of 4096": lambda vocab_size: prompt(vocab_size, tokens=4096),
}

TINY_WORKLOADS: Mapping[str, Make] = {
    "nano-vllm's mix": lambda vocab_size: nano_vllm(vocab_size, requests=4, scale=0.01),
    "4 x 100 tokens": lambda vocab_size: short_prompts(vocab_size, requests=2, max_tokens=3),
    "prompt of 512": lambda vocab_size: prompt(vocab_size, tokens=16),
    "prompt of 4096": lambda vocab_size: prompt(vocab_size, tokens=32),
}

TARGETS: Mapping[tuple[str, str | None, str], float] = {
    ("qwen3", None, "nano-vllm's mix"): 24_000.0,
    ("qwen3", None, "4 x 100 tokens"): 3_000.0,
}
"""Tokens per second on one H200, by shapes, quantisation and workload."""

AGAINST_TRANSFORMERS = {("qwen3", None, "4 x 100 tokens"), ("qwen3", None, "prompt of 512")}
"""Cases beside transformers, which takes the better part of an hour for nano-vllm's mix."""


def measure_text(shapes: str, quantization: str | None, *, rehearse: bool) -> Iterator[Measured]:
    """Tokens per second of each workload, with random weights and an engine of its own for each.

    Args:
        shapes: a name out of `SHAPES`.
        quantization: `"int8"` or `"int4"`; bfloat16 if None.
        rehearse: a tiny model and tiny workloads in the same places.
    """
    name, config = SHAPES[shapes]
    if rehearse:
        name, config = f"tiny, in the place of {name}", dict(TINY)
    with checkpoint_folder(None, "bfloat16", config) as folder:
        for case, make in (TINY_WORKLOADS if rehearse else WORKLOADS).items():
            gc.collect()  # an engine has cycles, and the next one sizes its cache by what is free
            jax.clear_caches()
            key = shapes, quantization, case
            beside = key in AGAINST_TRANSFORMERS and _transformers_runs_here()
            try:
                result = bench_text(
                    str(folder),
                    make,
                    runs=1 if rehearse else 3,
                    warmup=0 if rehearse else 1,
                    against=("transformers",) if beside else (),
                    quantization=quantization,
                )
            except (VeraxError, RuntimeError, MemoryError) as error:  # a cache that does not fit, say: the next may run
                yield Measured([Row(case, error=f"{type(error).__name__}: {error}")])
                continue
            result["settings"] |= {"model": f"random weights, {name}", "shapes": shapes}
            yield Measured([_row(case, result, make(config["vocab_size"]), config, TARGETS.get(key))], result)


def _row(case: str, result: dict[str, Any], workload: Workload, config: Mapping[str, Any], target: Any) -> Row:
    side, work = result["sides"]["verax"], result["work"]
    flops, cached = attention_work(workload, config)
    return Row(
        case,
        value=side["rate"],
        unit="tokens/s",
        target=target,
        seconds=side["median_s"],
        flops=work["flops"] + flops,
        bytes_moved=work["bytes_moved"] + cached,
        beside={name.removeprefix("verax / "): ratio for name, ratio in result["ratios"].items()},
    )


def attention_work(workload: Workload, config: Mapping[str, Any]) -> tuple[int, int]:
    """Work of attention that `bench_text` leaves out, for a model whose layers all see all keys.

    Args:
        workload: the prompts and the numbers of new tokens.
        config: config.json of the model.

    Returns:
        Operations of the scores and of the sums of values; bytes of the cache in bfloat16 that new tokens read.
    """
    layers, size = config["num_hidden_layers"], config["head_dim"]
    pairs = list(zip(map(len, workload.prompts), workload.max_tokens, strict=True))
    scores = sum(Span(0, tokens + new - 1).scores(None) for tokens, new in pairs)
    read = sum(Span(tokens, new - 1).scores(None) for tokens, new in pairs)
    return (
        4 * config["num_attention_heads"] * size * layers * scores,
        2 * 2 * config["num_key_value_heads"] * size * layers * read,
    )


def _transformers_runs_here() -> bool:
    """True if transformers is installed, and torch on the platform that JAX runs on."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return {"cpu": True, "gpu": torch.cuda.is_available()}.get(jax.default_backend(), False)
