"""Cost of fewer bits: perplexity on text, exact sums, and the distance of the logits from those in float32."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from recipes.text.arithmetic import addition_exam, leading_number
from recipes.text.data import documents
from verax import builtin, checkpoint, progress
from verax.bench.results import model_name
from verax.bench.text.llama_cpp_scores import llama_cpp_perplexity
from verax.bench.text.scoring import (
    BATCH_TOKENS,
    Batch,
    batches_of,
    compare_next_tokens,
    counted,
    hidden_states,
    pieces_of,
    split,
)
from verax.errors import InvalidParameterError
from verax.loading import DEQUANTIZE, load_causal_lm
from verax.machine import fingerprint
from verax.models import CausalLM
from verax.ops.paged import page_bytes
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step.sizes import CACHE_DTYPES
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["REFERENCE", "VARIANTS", "bench_quality"]


class Variant(NamedTuple):
    """Precision of a model: dtype, bits and group size of quantised weights, dtype of the key/value cache."""

    dtype: str
    quantization: tuple[int, int | None] | None = None
    kv_cache_dtype: str = "auto"


REFERENCE, STORED, LLAMA_CPP = "float32", "as stored", "llama.cpp"

VARIANTS: dict[str, Variant] = {
    REFERENCE: Variant("float32"),
    STORED: Variant("bfloat16"),
    "bfloat16": Variant("bfloat16"),
    "bfloat16, int8 cache": Variant("bfloat16", None, "int8"),
    "bfloat16, fp8 cache": Variant("bfloat16", None, "fp8"),
    "int8": Variant("bfloat16", (8, None)),
    "int8, int8 cache": Variant("bfloat16", (8, None), "int8"),
    "int4-32": Variant("bfloat16", (4, 32)),
    "int4-64": Variant("bfloat16", (4, 64)),
    "int4-128": Variant("bfloat16", (4, 128)),
    "int4-32, int8 cache": Variant("bfloat16", (4, 32), "int8"),
}
"""Variants by name; the number after int4 is that of inputs that share a scale."""


def bench_quality(
    model: str | None = None,
    *,
    text: str | None = None,
    variants: Sequence[str] | None = None,
    tokens: int = 16384,
    window: int = 512,
    additions: int | None = None,
    against: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure a model in several precisions against itself in float32; a report as JSON holds it.

    The float32 of a quantised checkpoint are its dequantised weights, and one more variant is what it has stored.

    Args:
        model: a checkpoint; the built-in model if None.
        text: what perplexity is measured on, cut into windows; if None, held-out documents of the built-in model's own
            generator, each by itself.
        variants: names out of `VARIANTS`; if None, all that the checkpoint has. One whose groups do not divide the
            model's layers is left out, with the reason.
        tokens: of text, at most.
        window: most tokens of context.
        additions: held-out sums asked for; if None, all of them of the built-in model and 200 of others.
        against: `("llama.cpp",)` for its perplexity on the same tokens too; the model is a GGUF file then.

    Raises:
        InvalidParameterError: for an unknown variant or side, or a text of fewer than two tokens.
        MissingDependencyError: if llama.cpp is asked for and not installed.
    """
    if unknown := [name for name in variants or () if name not in VARIANTS]:
        raise InvalidParameterError(f"variants: expected {'; '.join(VARIANTS)}, got {unknown[0]!r}")
    if unknown := [name for name in against if name != LLAMA_CPP]:
        raise InvalidParameterError(f"against: expected {LLAMA_CPP}, got {unknown[0]!r}")
    opened = checkpoint.Checkpoint.open(builtin.text_model() if model is None else model)
    if against and not opened.folder.is_file():
        raise InvalidParameterError(f"against: llama.cpp reads a GGUF file, and {opened.folder} is none")
    if variants is None:
        variants = [name for name in VARIANTS if name != STORED or opened.packed]
    elif STORED in variants and not opened.packed:
        raise InvalidParameterError(f"variants: {STORED!r} is for a quantised checkpoint, and {opened.folder} is none")
    tokenizer = Tokenizer.from_checkpoint(opened)
    texts = (document.text for document in documents("quality", split="held_out")) if text is None else [text]
    batches = list(batches_of(pieces_of(tokenizer, texts, min(window, BATCH_TOKENS)), tokens))
    scored = sum(int(counted(batch).sum()) for batch in batches)
    if not scored:
        raise InvalidParameterError("text: it has fewer than two tokens, so none to predict")
    exam = list(addition_exam("held_out"))
    wanted = additions if additions is not None else len(exam) if model is None else 200
    exam = [exam[i] for i in np.linspace(0, len(exam) - 1, min(wanted, len(exam))).astype(int)]

    reference = _load(opened, REFERENCE)
    hidden = [np.asarray(hidden_states(reference, batch, jnp.float32)) for batch in batches]
    results: dict[str, dict[str, Any]] = {}
    with progress.bar("measuring") as report:
        for done, name in enumerate(variants):
            report(done, len(variants), name)
            variant, begin = VARIANTS[name], time.perf_counter()
            try:
                module = reference if name == REFERENCE else _load(opened, name)
            except InvalidParameterError as error:
                results[name] = {"left_out": str(error)}
                continue
            results[name] = {
                **_distance(reference, module, variant, batches, hidden),
                "additions_exact": _additions(module, tokenizer, variant, exam),
                **_sizes(module, variant),
                "seconds": time.perf_counter() - begin,
            }
            del module
    del reference
    for name in against:
        results[name] = {**llama_cpp_perplexity(opened.folder, batches), "weights_mb": opened.nbytes / 1e6}
    return {
        "kind": "quality",
        "machine": fingerprint(),
        "settings": {
            "model": model_name(model) if model else "built-in",
            "text": "held-out documents of the built-in model's generator" if text is None else "given",
            "scored_tokens": scored,
            "window": window,
            "additions": len(exam),
            "variants": list(variants),
        },
        "variants": results,
    }


def _load(opened: checkpoint.Checkpoint, name: str) -> CausalLM:
    """A variant of the checkpoint, by way of floats if it is quantised, unless it is wanted as it is stored."""
    variant = VARIANTS[name]
    if not opened.packed or name == STORED:
        return load_causal_lm(opened, dtype=variant.dtype, quantization=variant.quantization)
    return load_causal_lm(opened, dtype=variant.dtype, quantization=variant.quantization or DEQUANTIZE, requantize=True)


def _distance(
    reference: CausalLM,
    model: CausalLM,
    variant: Variant,
    batches: Sequence[Batch],
    hidden: Sequence[np.ndarray],
) -> dict[str, float]:
    sums, count = np.zeros(3), sum(int(counted(batch).sum()) for batch in batches)
    for batch, their_hidden in zip(batches, hidden, strict=True):
        sums += compare_next_tokens(reference, model, batch, their_hidden, _cache_dtype(variant))
    nats, divergence, agreement = sums / count
    return {
        "nats_per_token": float(nats),
        "perplexity": float(np.exp(nats)),
        "kl_divergence": float(divergence),
        "top1_agreement": float(agreement),
    }


def _cache_dtype(variant: Variant) -> str:
    name = variant.dtype if variant.kv_cache_dtype == "auto" else variant.kv_cache_dtype
    return jnp.dtype(CACHE_DTYPES[name]).name


def _additions(model: CausalLM, tokenizer: Tokenizer, variant: Variant, exam: Sequence[Any]) -> float | None:
    """Share of sums that the engine completes with exactly the right number."""
    if not exam:
        return None
    llm = LLM.from_module(
        model,
        tokenizer=tokenizer,
        max_model_len=64,
        max_num_seqs=32,
        kv_cache_dtype=variant.kv_cache_dtype,
        use_tqdm=False,
    )
    prompts = [exchange.question for exchange in exam]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    right = [
        leading_number(output.outputs[0].text) == exchange.answer.strip()
        for output, exchange in zip(outputs, exam, strict=True)
    ]
    return float(np.mean(right))


def _sizes(model: CausalLM, variant: Variant) -> dict[str, float]:
    config = model.config
    token = (
        2
        * config.num_hidden_layers
        * page_bytes((config.num_key_value_heads, 1, config.head_dim), _cache_dtype(variant))
    )
    return {
        "weights_mb": sum(leaf.nbytes for leaf in jax.tree.leaves(split(model)[1])) / 1e6,
        "cache_bytes_per_token": token,
    }


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        InvalidParameterError: naming the file, if it cannot be read or is no UTF-8 text.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError(f"text: {file} cannot be read: {error}") from error
