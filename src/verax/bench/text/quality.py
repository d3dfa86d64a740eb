"""Cost of fewer bits: perplexity on text, and the distance of the logits from the logits in float32.

Hidden states go through the engine's own cache and attention (`_forward`): a batch of texts is one mixed step, in which
each text has pages of its own. So the error of a quantised cache is measured with everything else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from verax import builtin, checkpoint, ops, progress
from verax.bench.harness import Benchmark
from verax.bench.results import slug, table
from verax.bench.settings import QualitySettings, check_names
from verax.errors import InvalidParameterError
from verax.files import model_name
from verax.loading import DEQUANTIZE, load_causal_lm
from verax.models import CausalLM
from verax.ops.paged import page_bytes
from verax.text.step.sizes import CACHE_DTYPES
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["REFERENCE", "VARIANTS", "bench_quality", "held_out_texts"]

PAGE = 16
"""Tokens of a page: the engine's block size."""

BATCH_TOKENS, BATCH_ROWS = 1024, 64
"""Tokens and texts of a batch; the last batch is padded."""

LOGIT_ROWS = 64
"""Positions whose logits are compared at a time: two times 64 rows of a vocabulary of 150,000 are 80 MB."""

END_OF_TEXT = "<|endoftext|>"


class Variant(NamedTuple):
    """Precision of a model: dtype, bits and group size of quantised weights, dtype of the key/value cache."""

    dtype: str
    quantization: tuple[int, int | None] | None = None
    kv_cache_dtype: str = "auto"

    @property
    def cache_dtype(self) -> str:
        """Name of the cache's dtype."""
        name = self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        return jnp.dtype(CACHE_DTYPES[name]).name


REFERENCE, STORED = "float32", "as stored"

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
"""Variants by name; the number after int4 is the number of inputs that share a scale."""


def bench_quality(settings: QualitySettings, *, window: int = 512) -> dict[str, Any]:
    """Measure a model in several precisions against itself in float32.

    A quantised checkpoint in float32 has its dequantised weights; the weights as stored are one more variant. Without a
    text, documents that the built-in model was not trained on are measured, each by itself. A variant whose groups do
    not divide the model's layers is left out.

    Raises:
        InvalidParameterError: for an unknown variant, or a text of fewer than two tokens.
    """
    model, variants, text = settings.model, settings.variants, None
    if settings.text is not None:
        try:
            text = settings.text.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidParameterError(f"text: {settings.text} cannot be read: {error}") from error
    check_names("variants", variants, VARIANTS)
    benchmark = Benchmark("text")
    opened = checkpoint.Checkpoint.open(builtin.text_model() if model is None else model)
    if not variants:
        variants = [name for name in VARIANTS if name != STORED or opened.packed]
    elif STORED in variants and not opened.packed:
        raise InvalidParameterError(f"variants: {STORED!r} is for a quantised checkpoint; {opened.folder} is not one")
    tokenizer = Tokenizer.from_checkpoint(opened)
    texts = held_out_texts() if text is None else [text]
    batches = list(_batches(_pieces(tokenizer, texts, min(window, BATCH_TOKENS)), settings.tokens))
    scored = sum(int(batch.counted.sum()) for batch in batches)
    if not scored:
        raise InvalidParameterError("text: it has fewer than two tokens, so none to predict")
    reference = _load(opened, REFERENCE)
    hidden = [np.asarray(_hidden_states(reference, batch, "float32")) for batch in batches]
    rows: dict[str, dict[str, Any]] = {}
    with progress.bar("measuring") as report:
        for done, name in enumerate(variants):
            report(done, len(variants), name)
            variant, begin = VARIANTS[name], time.perf_counter()
            try:
                module = reference if name == REFERENCE else _load(opened, name)
            except InvalidParameterError as error:
                rows[name] = {"left_out": str(error)}
                continue
            scores = np.zeros(3)
            for batch, their_hidden in zip(batches, hidden, strict=True):
                scores += _compare_next_tokens(reference, module, batch, their_hidden, variant.cache_dtype)
            nats, divergence, agreement = (float(score) for score in scores / scored)
            config = module.config
            page = page_bytes((config.num_key_value_heads, 1, config.head_dim), variant.cache_dtype)
            rows[name] = {
                "nats_per_token": nats,
                "perplexity": float(np.exp(nats)),
                "kl_divergence": divergence,
                "top1_agreement": agreement,
                "weights_mb": sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.split(module)[1])) / 1e6,
                "cache_bytes_per_token": 2 * config.num_hidden_layers * page,
                "seconds": time.perf_counter() - begin,
            }
            del module
    asked = {
        "model": model_name(model) if model else "built-in",
        "text": "documents that the built-in model was not trained on" if text is None else "given",
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
        tables=[_table(rows)],
        variants=rows,
    )


def _table(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    def cell(key: str, form: str, scale: float = 1, unit: str = "") -> Any:
        return lambda row: "" if row[1].get(key) is None else f"{scale * row[1][key]:{form}}{unit}"

    left_out = lambda row: f"left out: {row[1]['left_out']}" if "left_out" in row[1] else ""
    columns = {
        "precision": lambda row: row[0],
        "perplexity": lambda row: left_out(row) or f"{row[1]['perplexity']:.4f}",
        "KL, nats": cell("kl_divergence", ".2g"),
        "same best token": cell("top1_agreement", ".2f", 100, "%"),
        "weights, MB": cell("weights_mb", ".1f"),
        "cache, bytes a token": cell("cache_bytes_per_token", "d"),
    }
    return table(rows.items(), columns)


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


@dataclass(frozen=True)
class _Batch:
    """Texts one after the other, padded: `tokens [BATCH_TOKENS]`, `lengths [BATCH_ROWS]`."""

    tokens: np.ndarray
    lengths: np.ndarray

    @property
    def counted(self) -> Bool[np.ndarray, "T"]:
        """True where the token after a position belongs to the same text."""
        mask = np.zeros(BATCH_TOKENS, bool)
        for end, length in zip(np.cumsum(self.lengths), self.lengths, strict=True):
            mask[end - length : max(end - 1, 0)] = True
        return mask


def _pieces(tokenizer: Tokenizer, texts: Iterable[str], window: int) -> Iterator[list[int]]:
    """Token ids of texts, cut into windows, each after the beginning token if the model has one."""
    begin = [token for token in tokenizer.encode("") if token not in tokenizer.eos_token_ids]
    size = window - len(begin)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        yield from ([*begin, *ids[i : i + size]] for i in range(0, len(ids), size))


def _batches(pieces: Iterator[list[int]], longest: int) -> Iterator[_Batch]:
    """Pieces gathered into batches, until `longest` tokens are taken."""
    taken, held = 0, []

    def batch() -> _Batch:
        tokens, lengths = np.zeros(BATCH_TOKENS, np.int32), np.zeros(BATCH_ROWS, np.int32)
        flat = [token for piece in held for token in piece]
        tokens[: len(flat)] = flat
        lengths[: len(held)] = [len(piece) for piece in held]
        return _Batch(tokens, lengths)

    for piece in pieces:
        piece = piece[: longest - taken]
        if not piece:
            break
        if len(held) == BATCH_ROWS or sum(map(len, held)) + len(piece) > BATCH_TOKENS:
            yield batch()
            held = []
        held.append(piece)
        taken += len(piece)
    if held:
        yield batch()


def _hidden_states(model: CausalLM, batch: _Batch, cache_dtype: str) -> Float[Array, "T D"]:
    graph, state = nnx.split(model)
    return _forward(state, batch.tokens, batch.lengths, graph, cache_dtype)


def _forward_step(
    state: nnx.State, tokens: Int[Array, "T"], lengths: Int[Array, "B"], graph: nnx.GraphDef[Any], cache_dtype: str
) -> Float[Array, "T D"]:
    """Final hidden states of a batch."""
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
    page_table = jnp.minimum(first[:, None] + jnp.arange(width), num_pages - 1).astype(jnp.int32)
    page = jnp.where(valid, first[owner] + position // PAGE, 0)

    def attend(
        layer: int, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], **options: Any
    ) -> Float[Array, "T N H"]:
        shape = (num_pages, config.num_key_value_heads, PAGE, config.head_dim)
        pages = (ops.write_pages(ops.new_pages(shape, cache_dtype), x, page, position % PAGE) for x in (k, v))
        return ops.paged_attention(q, *pages, page_table, lengths, starts, **options)

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


def _compare_next_tokens(
    reference: CausalLM, model: CausalLM, batch: _Batch, their_hidden: np.ndarray, cache_dtype: str
) -> Float[np.ndarray, "3"]:
    """Sums over a batch's next tokens: their nats, KL divergences from the reference, and equal best tokens.

    Args:
        reference, model: the two models.
        batch: of texts.
        their_hidden: hidden states `[T, D]` of the reference.
        cache_dtype: of the model's key/value cache.
    """
    (their_graph, theirs), (graph, ours) = nnx.split(reference), nnx.split(model)
    our_hidden = _hidden_states(model, batch, cache_dtype)
    scores = _compare(theirs, ours, their_hidden, our_hidden, np.roll(batch.tokens, -1), (their_graph, graph))
    return np.array([np.asarray(score, np.float64)[batch.counted].sum() for score in scores])
