"""Cost of fewer bits: perplexity on text, exact sums, and the distance of the logits from those in float32."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from verax import builtin, checkpoint, ops, progress
from verax.errors import CheckpointError, InvalidParameterError
from verax.loading import load_causal_lm
from verax.machine import fingerprint
from verax.models import CausalLM
from verax.ops.pages import page_bytes
from verax.text.llm import LLM
from verax.text.sampling_params import SamplingParams
from verax.text.tokenizer import Tokenizer
from verax.train.text.arithmetic import addition_exam, leading_number
from verax.train.text.data import documents

__all__ = ["REFERENCE", "VARIANTS", "bench_quality"]


class Variant(NamedTuple):
    """Precision of a model: dtype, bits and group size of quantised weights, dtype of the key/value cache."""

    dtype: str
    quantization: tuple[int, int | None] | None = None
    kv_cache_dtype: str = "auto"


REFERENCE = "float32"

VARIANTS: dict[str, Variant] = {
    REFERENCE: Variant("float32"),
    "bfloat16": Variant("bfloat16"),
    "bfloat16, int8 cache": Variant("bfloat16", None, "int8"),
    "int8": Variant("bfloat16", (8, None)),
    "int8, int8 cache": Variant("bfloat16", (8, None), "int8"),
    "int4-32": Variant("bfloat16", (4, 32)),
    "int4-64": Variant("bfloat16", (4, 64)),
    "int4-128": Variant("bfloat16", (4, 128)),
    "int4-32, int8 cache": Variant("bfloat16", (4, 32), "int8"),
}
"""Variants by name; the number after int4 is that of inputs that share a scale."""

PAGE = 16
"""Tokens of a page: the engine's block size."""

BATCH_TOKENS, BATCH_ROWS = 1024, 64
"""Tokens and texts of a batch; the last batch is padded."""

LOGIT_ROWS = 64
"""Positions whose logits are compared at a time: two times 64 rows of a vocabulary of 150,000 are 80 MB."""


@dataclass(frozen=True)
class Batch:
    """Texts one after the other, padded: `tokens [BATCH_TOKENS]`, `lengths [BATCH_ROWS]`."""

    tokens: np.ndarray
    lengths: np.ndarray


def bench_quality(
    model: str | None = None,
    *,
    text: str | None = None,
    variants: Sequence[str] = tuple(VARIANTS),
    tokens: int = 16384,
    window: int = 512,
    additions: int | None = None,
) -> dict[str, Any]:
    """Measure a model in several precisions against itself in float32; a report as JSON holds it.

    Args:
        model: a checkpoint; the built-in model if None.
        text: what perplexity is measured on, cut into windows; if None, held-out documents of the built-in model's own
            generator, each by itself.
        variants: names out of `VARIANTS`. One whose groups do not divide the model's layers is left out, with the
            reason.
        tokens: of text, at most.
        window: most tokens of context.
        additions: held-out sums asked for; if None, all of them of the built-in model and 200 of others.

    Raises:
        InvalidParameterError: for an unknown variant, or a text of fewer than two tokens.
        CheckpointError: if the model is quantised already: there is nothing to compare it with.
    """
    if unknown := [name for name in variants if name not in VARIANTS]:
        raise InvalidParameterError(f"variants: expected {'; '.join(VARIANTS)}, got {unknown[0]!r}")
    opened = checkpoint.Checkpoint.open(builtin.text_model() if model is None else model)
    if opened.packed:
        raise CheckpointError(f"{opened.folder}: it is quantised already; give the checkpoint that it was made from")
    tokenizer = Tokenizer.from_folder(opened.folder)
    pieces = _pieces(tokenizer, text, min(window, BATCH_TOKENS))
    batches = list(_batches(pieces, tokens))
    scored = sum(int(np.maximum(batch.lengths - 1, 0).sum()) for batch in batches)
    if not scored:
        raise InvalidParameterError("text: it has fewer than two tokens, so none to predict")
    exam = list(addition_exam("held_out"))
    wanted = additions if additions is not None else len(exam) if model is None else 200
    exam = [exam[i] for i in np.linspace(0, len(exam) - 1, min(wanted, len(exam))).astype(int)]

    reference = load_causal_lm(opened, dtype="float32")
    hidden = [np.asarray(_hidden(*_split(reference), batch, jnp.float32)) for batch in batches]
    results: dict[str, dict[str, Any]] = {}
    with progress.bar("measuring") as report:
        for done, name in enumerate(variants):
            report(done, len(variants), name)
            variant, begin = VARIANTS[name], time.perf_counter()
            try:
                module = (
                    reference
                    if name == REFERENCE
                    else load_causal_lm(opened, dtype=variant.dtype, quantization=variant.quantization)
                )
            except InvalidParameterError as error:
                results[name] = {"left_out": str(error)}
                continue
            results[name] = {
                **_distance(reference, module, variant, batches, hidden),
                "additions_exact": _additions(module, tokenizer, variant, exam),
                **_sizes(module, variant),
                "seconds": time.perf_counter() - begin,
            }
    return {
        "kind": "quality",
        "machine": fingerprint(),
        "settings": {
            "model": model or "built-in",
            "text": "held-out documents of the built-in model's generator" if text is None else "given",
            "scored_tokens": scored,
            "window": window,
            "additions": len(exam),
            "variants": list(variants),
        },
        "variants": results,
    }


def _pieces(tokenizer: Tokenizer, text: str | None, window: int) -> Iterator[list[int]]:
    """Texts as token ids, cut into windows."""
    texts = (document.text for document in documents("quality", split="held_out")) if text is None else [text]
    for each in texts:
        ids = tokenizer.encode(each, add_special_tokens=False)
        yield from (ids[i : i + window] for i in range(0, len(ids), window))


def _batches(pieces: Iterator[list[int]], most: int) -> Iterator[Batch]:
    """Pieces gathered into batches, until `most` tokens are taken."""
    taken, held = 0, []

    def batch() -> Batch:
        tokens, lengths = np.zeros(BATCH_TOKENS, np.int32), np.zeros(BATCH_ROWS, np.int32)
        flat = [token for piece in held for token in piece]
        tokens[: len(flat)] = flat
        lengths[: len(held)] = [len(piece) for piece in held]
        return Batch(tokens, lengths)

    for piece in pieces:
        piece = piece[: most - taken]
        if not piece:
            break
        if len(held) == BATCH_ROWS or sum(map(len, held)) + len(piece) > BATCH_TOKENS:
            yield batch()
            held = []
        held.append(piece)
        taken += len(piece)
    if held:
        yield batch()


def _split(model: CausalLM) -> tuple[nnx.GraphDef[Any], nnx.State]:
    return nnx.split(model)


def _hidden(graph: nnx.GraphDef[Any], state: nnx.State, batch: Batch, cache_dtype: Any) -> Float[Array, "T D"]:
    """Final hidden states of a batch through the engine's own cache and attention, all texts as one mixed step."""
    return _forward(state, batch.tokens, batch.lengths, graph, jnp.dtype(cache_dtype).name)


def _forward_step(
    state: nnx.State, tokens: Int[Array, "T"], lengths: Int[Array, "B"], graph: nnx.GraphDef[Any], cache_dtype: str
) -> Float[Array, "T D"]:
    model = nnx.merge(graph, state)
    config, T, B = model.config, tokens.shape[0], lengths.shape[0]
    width = T // PAGE
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths)])
    at = jnp.arange(T)
    owner = jnp.clip(jnp.searchsorted(starts, at, side="right") - 1, 0, B - 1)
    valid = at < starts[-1]
    position = jnp.where(valid, at - starts[owner], 0)
    # Page 0 is padding's; a text's pages lie together.
    first = 1 + jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum((lengths + PAGE - 1) // PAGE)])[:-1]
    num_pages = 1 + T // PAGE + B
    table = jnp.minimum(first[:, None] + jnp.arange(width), num_pages - 1).astype(jnp.int32)
    page = jnp.where(valid, first[owner] + position // PAGE, 0)

    def attend(
        layer: int, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], **options: Any
    ) -> Float[Array, "T N H"]:
        shape = (num_pages, config.num_key_value_heads, PAGE, config.head_dim)
        pages = (ops.write_pages(ops.new_pages(shape, cache_dtype), x, page, position % PAGE) for x in (k, v))
        return ops.paged_attention(q, *pages, table, lengths, starts, **options)

    return model(tokens, position, attend)


_forward = jax.jit(_forward_step, static_argnums=(3, 4))


def _compare_step(
    theirs: nnx.State,
    ours: nnx.State,
    their_hidden: Float[Array, "T D"],
    our_hidden: Float[Array, "T D"],
    following: Int[Array, "T"],
    graphs: tuple[nnx.GraphDef[Any], nnx.GraphDef[Any]],
) -> tuple[Float[Array, "T"], Float[Array, "T"], Float[Array, "T"]]:
    """Nats of the next token, KL divergence from the reference, and 1 where both have the same best token, each [T]."""
    reference, model = nnx.merge(graphs[0], theirs), nnx.merge(graphs[1], ours)

    def rows(
        x: tuple[Float[Array, "t D"], Float[Array, "t D"], Int[Array, "t"]],
    ) -> tuple[Float[Array, "t"], Float[Array, "t"], Float[Array, "t"]]:
        p, q = jax.nn.log_softmax(reference.logits(x[0])), jax.nn.log_softmax(model.logits(x[1]))
        nats = -jnp.take_along_axis(q, x[2][:, None], axis=-1)[:, 0]
        return nats, jnp.sum(jnp.exp(p) * (p - q), axis=-1), (p.argmax(-1) == q.argmax(-1)).astype(jnp.float32)

    parts = (x.reshape(-1, LOGIT_ROWS, *x.shape[1:]) for x in (their_hidden, our_hidden, following))
    nats, divergence, agrees = jax.lax.map(rows, tuple(parts))
    return nats.reshape(-1), divergence.reshape(-1), agrees.reshape(-1)


_compare = jax.jit(_compare_step, static_argnums=5)


def _distance(
    reference: CausalLM,
    model: CausalLM,
    variant: Variant,
    batches: Sequence[Batch],
    hidden: Sequence[np.ndarray],
) -> dict[str, float]:
    (their_graph, theirs), (graph, ours) = _split(reference), _split(model)
    sums = np.zeros(4)
    for batch, their_hidden in zip(batches, hidden, strict=True):
        our_hidden = _hidden(graph, ours, batch, _cache_dtype(variant))
        following = np.roll(batch.tokens, -1)
        scores = _compare(theirs, ours, their_hidden, our_hidden, following, (their_graph, graph))
        counted = np.zeros(BATCH_TOKENS, bool)
        for end, length in zip(np.cumsum(batch.lengths), batch.lengths, strict=True):
            counted[end - length : max(end - 1, 0)] = True
        sums += [*(np.asarray(score, np.float64)[counted].sum() for score in scores), counted.sum()]
    nats, divergence, agreement = sums[:3] / sums[3]
    return {
        "nats_per_token": float(nats),
        "perplexity": float(np.exp(nats)),
        "kl_divergence": float(divergence),
        "top1_agreement": float(agreement),
    }


def _cache_dtype(variant: Variant) -> str:
    return variant.dtype if variant.kv_cache_dtype == "auto" else variant.kv_cache_dtype


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
        "weights_mb": sum(leaf.nbytes for leaf in jax.tree.leaves(_split(model)[1])) / 1e6,
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
