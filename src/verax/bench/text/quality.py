"""Cost of fewer bits: perplexity on text, and the distance of the logits from the logits in float32.

Hidden states go through the engine's own cache and attention (`_hidden_states`): a window of text is a prompt with
pages of its own. So the error of a quantised cache is measured with everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from verax import builtin, checkpoint, ops, progress
from verax.bench.harness import Benchmark
from verax.bench.results import optional, slug, table
from verax.bench.settings import QualitySettings, check_names
from verax.errors import InvalidParameterError
from verax.files import model_name
from verax.loading import DEQUANTIZE, load_causal_lm
from verax.models import CausalLM
from verax.text.step.sizes import block_bytes
from verax.text.tokens.tokenizer import Tokenizer

PAGE = 16
"""Tokens of a page: the engine's block size."""

LOGIT_ROWS = 64
"""Positions whose logits are compared at a time: two times 64 rows of a vocabulary of 150,000 are 80 MB. A window is
padded to a multiple of them."""

END_OF_TEXT = "<|endoftext|>"


class Variant(NamedTuple):
    """Precision of a model: dtype, quantisation as `load_causal_lm` takes it, dtype of the key/value cache."""

    dtype: str
    quantization: str | tuple[int, int | None] | None = None
    cache_dtype: str = "bfloat16"


REFERENCE, STORED = "float32", "as stored"

VARIANTS: dict[str, Variant] = {
    REFERENCE: Variant("float32", None, "float32"),
    STORED: Variant("bfloat16"),
    "bfloat16": Variant("bfloat16"),
    "bfloat16, int8 cache": Variant("bfloat16", None, "int8"),
    "bfloat16, fp8 cache": Variant("bfloat16", None, "float8_e4m3fn"),
    "int8": Variant("bfloat16", (8, None)),
    "w8a8": Variant("bfloat16", "w8a8"),
    "int8, int8 cache": Variant("bfloat16", (8, None), "int8"),
    **{f"int4-{size}": Variant("bfloat16", (4, size)) for size in (32, 64, 128)},
    "int4-32, int8 cache": Variant("bfloat16", (4, 32), "int8"),
}
"""Variants by name; the number after int4 is the number of inputs that share a scale."""


def bench_quality(settings: QualitySettings, *, window: int = 512) -> dict[str, Any]:
    """Measure a model in several precisions against itself in float32.

    A quantised checkpoint in float32 has its dequantised weights; the weights as stored are one more variant. Without a
    text, documents that the built-in model was not trained on are measured, each by itself. A variant whose groups do
    not divide the model's layers is left out.
    """
    model, variants, texts = settings.model, settings.variants, held_out_texts()
    if settings.text is not None:
        try:
            texts = [settings.text.read_text(encoding="utf-8-sig")]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidParameterError(f"text: {settings.text} cannot be read: {error}") from error
    check_names("variants", variants, VARIANTS)
    benchmark = Benchmark("text")
    opened = checkpoint.Checkpoint.open(builtin.text_model() if model is None else model)
    if not variants:
        variants = [name for name in VARIANTS if name != STORED or opened.packed]
    elif STORED in variants and not opened.packed:
        raise InvalidParameterError(f"variants: {STORED!r} is for a quantised checkpoint; {opened.folder} is not one")
    windows = list(_windows(Tokenizer.from_checkpoint(opened), texts, window, settings.tokens))
    scored = sum(len(ids) - 1 for ids in windows)
    if not scored:
        raise InvalidParameterError("text: it has fewer than two tokens, so none to predict")
    width = -(-max(map(len, windows)) // LOGIT_ROWS) * LOGIT_ROWS
    padded = [(np.pad(np.asarray(ids, np.int32), (0, width - len(ids))), len(ids)) for ids in windows]
    reference = _load(opened, REFERENCE)
    hidden = [np.asarray(_hidden_states(reference, *one, "float32")) for one in padded]
    rows: dict[str, dict[str, Any]] = {}
    with progress.bar("measuring") as report:
        for done, name in enumerate(variants):
            report(done, len(variants), name)
            variant = VARIANTS[name]
            try:
                module = reference if name == REFERENCE else _load(opened, name)
            except InvalidParameterError as error:
                rows[name] = {"left_out": f"left out: {error}"}
                continue
            scores = np.zeros(3)
            for (tokens, length), theirs in zip(padded, hidden, strict=True):
                ours = _hidden_states(module, tokens, length, variant.cache_dtype)
                compared = _compare(reference, module, theirs, ours, np.roll(tokens, -1))
                scores += np.asarray(compared, np.float64)[:, : length - 1].sum(axis=1)
            nats, divergence, agreement = (float(score) for score in scores / scored)
            rows[name] = {
                "nats_per_token": nats,
                "perplexity": float(np.exp(nats)),
                "kl_divergence": divergence,
                "top1_agreement": agreement,
                "weights_mb": sum(leaf.nbytes for leaf in jax.tree.leaves(module)) / 1e6,
                "cache_bytes_per_token": block_bytes(module.config, 1, variant.cache_dtype),
            }
            del module
    columns = {
        "precision": lambda row: row[0],
        "perplexity": lambda row: row[1].get("left_out") or f"{row[1]['perplexity']:.4f}",
        "KL, nats": optional("kl_divergence", "{:.2g}".format),
        "same best token": optional("top1_agreement", "{:.2%}".format),
        "weights, MB": optional("weights_mb", "{:.1f}".format),
        "cache, bytes a token": optional("cache_bytes_per_token", str),
    }
    asked = {
        "model": model_name(model) if model else "built-in",
        "text": "documents that the built-in model was not trained on" if settings.text is None else "given",
        "scored_tokens": scored,
        "window": window,
        "variants": list(variants),
    }
    return benchmark.result(
        slug("quality", Path(asked["model"]).name),
        title=f"Quality: {asked['model']}",
        intro=f"{scored:,} tokens of text ({asked['text']}; contexts of up to {window}). "
        "KL divergence and the share of equal best tokens are against float32. The number after int4: "
        "inputs that share a scale; int8 weights have one a row, an int8 or fp8 cache one a token and head.",
        settings=asked,
        tables=[table(rows.items(), columns)],
        variants=rows,
    )


def held_out_texts() -> list[str]:
    """Documents of the built-in model's kind that it was not trained on, each with its end."""
    text = (resources.files("verax.bench.text") / "held_out.txt").read_text(encoding="utf-8")
    return [document + END_OF_TEXT for document in text.split(END_OF_TEXT) if document]


def _load(opened: checkpoint.Checkpoint, name: str) -> CausalLM:
    """A variant of the checkpoint; by way of floats if it is quantised, unless the weights as stored are wanted."""
    variant = VARIANTS[name]
    if not opened.packed or name == STORED:
        return load_causal_lm(opened, dtype=variant.dtype, quantization=variant.quantization)
    return load_causal_lm(opened, dtype=variant.dtype, quantization=variant.quantization or DEQUANTIZE, requantize=True)


def _windows(tokenizer: Tokenizer, texts: Iterable[str], window: int, num_tokens: int) -> Iterator[list[int]]:
    """Token ids of texts, cut into windows, each after the beginning token if there is one; `num_tokens` in all."""
    begin = [token for token in tokenizer.encode("") if token not in tokenizer.eos_token_ids]
    size = window - len(begin)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for at in range(0, len(ids), size):
            if num_tokens <= 0:
                return
            yield [*begin, *ids[at : at + size]][:num_tokens]
            num_tokens -= len(begin) + len(ids[at : at + size])


@partial(jax.jit, static_argnums=3)
def _hidden_states(
    model: CausalLM, tokens: Int[Array, "T"], length: Int[Array, ""], cache_dtype: str
) -> Float[Array, "T D"]:
    """Final hidden states of a window of `length` tokens, with padding after them."""
    position = jnp.arange(tokens.shape[0])
    blocks = 1 + len(position) // PAGE
    page = jnp.where(position < length, 1 + position // PAGE, 0)  # page 0 is padding's
    table_of_pages = 1 + jnp.arange(blocks - 1)[None]
    starts = jnp.stack([jnp.zeros_like(length), length])

    def attend(
        layer: int,
        q: Float[Array, "1 T N H"],
        k: Float[Array, "1 T K H"],
        v: Float[Array, "1 T K H"],
        **options: Any,
    ) -> Float[Array, "1 T N H"]:
        (q,), (k,), (v,) = q, k, v
        shape = (blocks, k.shape[1], PAGE, k.shape[2])
        empty = (ops.new_pages(shape, cache_dtype) for _ in range(2))
        pages = ops.write_pages(*empty, k, v, page, position % PAGE)
        return ops.paged_attention(q, *pages, table_of_pages, length[None], starts, **options)[None]

    # A batch of one, which recurrent layers take.
    return model(tokens[None], position[None], attend)[0]


@jax.jit
def _compare(
    reference: CausalLM,
    model: CausalLM,
    their_hidden: Float[Array, "T D"],
    our_hidden: Float[Array, "T D"],
    following: Int[Array, "T"],
) -> Float[Array, "3 T"]:
    """Nats of the next token, KL divergence from the reference, and 1 where both have the same best token."""

    def rows(x: tuple[Float[Array, "t D"], Float[Array, "t D"], Int[Array, "t"]]) -> Float[Array, "3 t"]:
        p, q = jax.nn.log_softmax(reference.logits(x[0])), jax.nn.log_softmax(model.logits(x[1]))
        nats = -jnp.take_along_axis(q, x[2][:, None], axis=-1)[:, 0]
        return jnp.stack([nats, jnp.sum(jnp.exp(p) * (p - q), axis=-1), p.argmax(-1) == q.argmax(-1)])

    parts = tuple(x.reshape(-1, LOGIT_ROWS, *x.shape[1:]) for x in (their_hidden, our_hidden, following))
    return jnp.moveaxis(jax.lax.map(rows, parts), 1, 0).reshape(3, -1)
