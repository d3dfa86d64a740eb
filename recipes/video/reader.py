"""Pre-training of the built-in video model's text encoder, before the transformer is trained.

Without it, the encoder learns the words for shape, colours and direction slowly: cross-attention is diffuse at first,
and the loss is mostly noise. After pre-training, each token's state encodes the whole caption, so
that attention finds it at any token. It takes a minute, and the transformer follows its prompts from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from recipes.video.latents import WORDS, labels, tokens, video_tokenizer
from recipes.video.shapes import scenes
from verax import ops
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.nn import Linear
from verax.train.loop import Schedule, train
from verax.train.loss import rounded_gradient_linear

TEXT_ENCODER = UMT5Config(
    vocab_size=video_tokenizer().get_vocab_size(), d_model=96, d_kv=32, d_ff=192, num_layers=2, num_heads=3
)

SCHEDULE = Schedule(steps=500, peak_learning_rate=3e-3, warmup_steps=50, weight_decay=0.0, beta2=0.99)

BATCH = 64

NEARNESS = 2.0
"""Standard deviation of the initial biases of relative positions. Heads that attend to one neighbour or another
distinguish the three colours of a caption. From biases near 0, no head learned that in 1,500 steps."""


class Reader(nnx.Module):
    """Text encoder, and a classification head for each of `WORDS`, used in training only."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.text_encoder = UMT5EncoderModel(TEXT_ENCODER, dtype=jnp.float32, rngs=rngs)
        width = TEXT_ENCODER.d_model
        self.heads = nnx.List(
            [Linear(width, len(words), bias=True, dtype=jnp.float32, rngs=rngs) for words in WORDS.values()]
        )


def train_reader(output: Path, *, steps: int | None = None, seed: int = 0, **run: Any) -> Reader:
    """Train the text encoder on captions alone, with state, log and plot in `output`.

    Arguments as in `vae.train_vae`.
    """
    graph, params = nnx.split(initial(seed))

    def loss(params: nnx.State, batch: dict[str, Array]) -> Float[Array, ""]:
        model = nnx.merge(graph, params)
        with ops.use_implementations(linear=rounded_gradient_linear, rms_norm="reference"):
            states = model.text_encoder(batch["tokens"], batch["lengths"])
        return reader_loss(model, states, batch["lengths"], batch["labels"])

    trained = train(
        loss,
        params,
        lambda start: batches(seed, start),
        SCHEDULE.of(steps),
        output,
        settings={"seed": seed},
        save_every=500,
        loss_unit="nats per caption",
        **run,
    )
    return nnx.merge(graph, trained)


def initial(seed: int) -> Reader:
    """Initial weights of a seed, with large position biases (`NEARNESS`)."""
    model = Reader(rngs=nnx.Rngs(seed))
    matrices_by_width(model, seed)
    for i, block in enumerate(model.text_encoder.blocks):
        # T5 does not divide scores by the root of the head size: its initial queries are smaller by that factor.
        block.attn.q.weight[...] *= TEXT_ENCODER.d_kv**-0.5
        bias = block.pos_embedding.embedding
        bias.weight[...] = NEARNESS * jax.random.normal(jax.random.key(seed + i), bias.weight.shape)
    return model


def batches(seed: int, start: int) -> Iterator[dict[str, np.ndarray]]:
    """Endless captions from step `start` on."""
    for step in count(start):
        drawn = scenes(seed, step * BATCH, BATCH)
        rows, lengths = tokens([scene.caption for scene in drawn])
        yield {"tokens": rows, "lengths": lengths, "labels": np.stack([labels(scene) for scene in drawn])}


def matrices_by_width(model: nnx.Module, seed: int) -> None:
    """Redraw the weights of all linear layers, with a variance that preserves the scale of their inputs."""
    key = jax.random.key(seed + 1)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            key, used = jax.random.split(key)
            weight = module.weight[...]
            module.weight[...] = weight.shape[1] ** -0.5 * jax.random.normal(used, weight.shape)


def reader_loss(
    model: Reader,
    states: Float[Array, "B S D"],
    lengths: Int[Array, "B"],
    labels: Int[Array, "B words"],
    has_text: Bool[Array, "B"] | None = None,
) -> Float[Array, ""]:
    """Cross-entropy of a caption's words given one token's state, in nats: a mean over tokens where `has_text`."""
    real = jnp.arange(states.shape[1]) < lengths[:, None]
    if has_text is not None:
        real &= has_text[:, None]
    nats = jnp.zeros(states.shape[:2], jnp.float32)
    for i, head in enumerate(model.heads):
        logprobs = jax.nn.log_softmax(head(states).astype(jnp.float32), axis=-1)
        nats -= jnp.take_along_axis(logprobs, labels[:, i, None, None], axis=-1)[..., 0]
    return jnp.sum(nats * real) / jnp.maximum(jnp.sum(real), 1)
