"""Recipe of the built-in encoder: tokenizer, sizes, data, schedule and export.

A small encoder learns close vectors for sentences of one meaning by a contrastive loss. Its pairs of phrasings come
from `paraphrases`, with near misses that differ in one fact. A batch depends on the seed and its step only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from recipes import byte_level_bpe, padded_rows, save_tokenizer
from recipes.encoder.paraphrases import pairs
from verax import models, ops
from verax.checkpoint import save
from verax.embed.modules import normalized, pool
from verax.nn import Sentences
from verax.train.loop import Schedule, train
from verax.train.loss import rounded_gradient_linear

PAD, BEGIN, END = SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]")
VOCAB_SIZE = 3072
TRAINING_PAIRS = 20_000


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """Byte-level BPE of at most `VOCAB_SIZE` tokens, from the first training sentences of the seed.

    In lower case, between [CLS] and [SEP] as in BERT; every digit is a separate token.
    """
    sentences = (sentence for _, pair in islice(pairs(seed), TRAINING_PAIRS) for sentence in pair)
    cut = [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(individual_digits=True)]
    lower_case = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer = byte_level_bpe(sentences, VOCAB_SIZE, SPECIAL_TOKENS, cut, lower_case)
    numbered = [(token, tokenizer.token_to_id(token)) for token in (BEGIN, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A {END}", special_tokens=numbered)
    return tokenizer


CONTEXT = 128

CONFIG: dict[str, Any] = {
    "architectures": ["LamModel"],
    "model_type": "lam",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": CONTEXT,
    "num_positions": 24,
    "type_vocab_size": 1,
    "lam_config": {"rule": "gated", "coupling_interval": 64},
    "torch_dtype": "bfloat16",
    "pad_token_id": 0,
}
"""Entries of config.json except for the size of the vocabulary, which the tokenizer decides."""

SCHEDULE = Schedule(steps=400, peak_learning_rate=3e-3, warmup_steps=40, weight_decay=0.01)

PAIRS = 64
"""Pairs in a batch, and so candidates for each sentence. About half of them are near misses of another."""

LENGTH = 32
"""Tokens of a training sentence; the longest have 29."""

TEMPERATURE = 0.05


def train_builtin(output: Path, *, steps: int | None = None, seed: int = 0, **run: Any) -> Path:
    """Train the built-in encoder and export it as a Hugging Face folder, `output / "model"`, which is returned.

    `output` also receives the training state, the log and the loss plot. Arguments as in
    `recipes.text.recipe.train_builtin`.
    """
    tokenizer = train_tokenizer(seed)
    graph, params = initial(seed, tokenizer.get_vocab_size())
    trained = train(
        lambda params, batch: pair_loss(nnx.merge(graph, params), batch),
        params,
        lambda start: batches(tokenizer, seed, start),
        SCHEDULE.of(steps),
        output,
        settings={"seed": seed},
        save_every=40,
        loss_unit="nats per pair",
        **run,
    )
    return export(nnx.merge(graph, trained), tokenizer, output / "model")


def batches(tokenizer: Tokenizer, seed: int, start: int) -> Iterator[dict[str, Int32[np.ndarray, "B ..."]]]:
    """Batches from a step on: `PAIRS` first phrasings, then the second phrasings in the same order.

    Each has `tokens [B, LENGTH]` and `lengths [B]`.
    """
    for step in count(start):
        drawn = [pair for _, pair in islice(pairs(f"{seed}/{step}"), PAIRS)]
        sentences = [*(pair.first for pair in drawn), *(pair.second for pair in drawn)]
        tokens, lengths = padded_rows(tokenizer, sentences, LENGTH)
        yield {"tokens": tokens, "lengths": lengths}


def initial(seed: int, vocab_size: int) -> tuple[nnx.GraphDef[Any], nnx.State]:
    """Initial weights of a seed."""
    architecture, config = models.encoder({**CONFIG, "vocab_size": vocab_size})
    make: Any = architecture  # of its own configuration
    return nnx.split(make(config, rngs=nnx.Rngs(seed)))


def contrastive_loss(first: Float[Array, "B D"], second: Float[Array, "B D"], temperature: float) -> Float[Array, ""]:
    """InfoNCE (van den Oord et al., 2018, arXiv:1807.03748) over a batch of pairs, in both directions, in nats.

    Row i of `first` is classified among all rows of `second`, with row i as the label, and vice versa. Vectors have
    length 1.
    """
    scores = jnp.einsum("id,jd->ij", first, second, precision=jax.lax.Precision.HIGHEST) / temperature
    logprobs = jnp.diagonal(jax.nn.log_softmax(scores, axis=1)) + jnp.diagonal(jax.nn.log_softmax(scores, axis=0))
    return -jnp.mean(logprobs) / 2


def pair_loss(model: nnx.Module, batch: dict[str, Array]) -> Float[Array, ""]:
    """Contrastive loss, in nats, of a batch of first phrasings, then second ones. Products are in bfloat16."""
    graph, params = nnx.split(model)
    encode: Any = nnx.merge(graph, jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))
    with ops.use_implementations(linear=rounded_gradient_linear):
        hidden = encode(batch["tokens"], batch["lengths"])
    sentences = Sentences.padded(batch["lengths"], hidden.shape[1])
    first, second = jnp.split(normalized(pool(hidden, sentences, "mean")), 2)
    return contrastive_loss(first, second, TEMPERATURE)


def export(model: Any, tokenizer: Tokenizer, folder: Path) -> Path:
    """Save the model in bfloat16, and the tokenizer, as a Hugging Face folder."""
    save(model, folder, config={**CONFIG, "vocab_size": tokenizer.get_vocab_size()}, dtype=jnp.bfloat16)
    special = {"cls_token": BEGIN, "sep_token": END, "pad_token": PAD}
    save_tokenizer(tokenizer, folder, **special, model_max_length=CONTEXT)
    return folder
