"""Recipe of the built-in video model's transformer and encoders: sizes, loss and schedule.

Flow matching (Lipman et al., 2022, arXiv:2210.02747; Liu et al., 2022, arXiv:2209.03003): from `(1 - s) x + s noise`
the model predicts `noise - x`. Text and image to video are one image-to-video model, with zeros as the image condition
for text alone. The loss of the text encoder's pre-training (`reader`) is kept as a second term.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from recipes.video.latents import Clips, normalized_picture, tokens
from recipes.video.reader import Reader, matrices_by_width, reader_loss
from recipes.video.vae import SIZE
from verax import ops
from verax._optional import require_optional
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.wan.model import WanConfig, WanModel
from verax.train.loop import Schedule, matrices, train
from verax.train.loss import rounded_gradient_linear

TRANSFORMER = WanConfig(
    dim=128, ffn_dim=512, num_heads=2, num_layers=4, in_dim=36, text_dim=96, image_dim=64, freq_dim=128
)
IMAGE_ENCODER = CLIPVisionConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=SIZE, patch_size=16
)


@dataclass(frozen=True)
class MuonSchedule(Schedule):
    """Schedule of Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon) for inner matrices.

    Its updates are as large as AdamW's (Liu et al., 2025, arXiv:2502.16982), which trains the rest.
    """

    muon_learning_rate: float = 4e-3
    """Peak learning rate of the matrices that Muon trains."""
    outer: tuple[str, ...] = ("embed", "head")
    """Parts of the names of matrices that AdamW trains all the same: embeddings and heads."""

    def update(self) -> Any:
        """Muon and AdamW."""
        return require_optional("optax.contrib").muon(
            self.rate(self.muon_learning_rate),
            adam_learning_rate=self.rate(self.peak_learning_rate),
            adam_b2=self.beta2,
            weight_decay=self.weight_decay,
            weight_decay_mask=matrices,
            muon_weight_dimension_numbers=self._orthogonal,
            consistent_rms=0.2,
        )

    def _orthogonal(self, params: Any) -> Any:
        """Axes of each leaf that are a matrix for Muon; None for a leaf that AdamW trains."""

        def one(path: Any, leaf: Array) -> Any:
            name = jax.tree_util.keystr(path)
            inner = leaf.ndim == 2 and not any(part in name for part in self.outer)
            return require_optional("optax.contrib").MuonDimensionNumbers() if inner else None

        return jax.tree_util.tree_map_with_path(one, params)


SCHEDULE = MuonSchedule(steps=11000, peak_learning_rate=2e-3, warmup_steps=100, weight_decay=0.01, beta2=0.99)

BATCH = 32
SHIFT = 3.0
"""Shift of the noise levels, as in sampling. Most levels are high, where position, motion and colours are decided."""

WITHOUT_TEXT = 0.1
"""Share of empty prompts, for guidance (Ho and Salimans, 2022, arXiv:2207.12598)."""

WITH_IMAGE = 0.5
"""Share of image-to-video clips."""

READER_WEIGHT = 0.05
"""Weight of the reader's loss."""

AVERAGE = 0.998


class Trainee(nnx.Module):
    """Modules that are trained together."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.transformer = WanModel(TRANSFORMER, dtype=jnp.float32, rngs=rngs)
        self.image_encoder = CLIPVisionModel(IMAGE_ENCODER, dtype=jnp.float32, rngs=rngs)
        self.reader = Reader(rngs=rngs)


def train_transformer(
    clips: Clips, reader: Reader, output: Path, *, steps: int | None = None, seed: int = 0, **run: Any
) -> Trainee:
    """Train transformer and encoders, with state, log and plot in `output`.

    `clips`: training data. `reader`: text encoder from `train_reader`. Other arguments as in `vae.train_vae`.
    """
    graph, params = initial(reader, seed)
    trained = train(
        lambda params, batch: loss(nnx.merge(graph, params), batch),
        params,
        lambda start: batches(clips, seed, start),
        SCHEDULE.of(steps),
        output,
        settings={"seed": seed},
        save_every=100,
        average=AVERAGE,
        counted="labels",
        loss_unit="squared error of the velocity, and terms",
        **run,
    )
    return nnx.merge(graph, trained)


def initial(reader: Reader, seed: int) -> tuple[nnx.GraphDef[Any], nnx.State]:
    """Initial weights: gates and head at zero (Peebles and Xie, 2022, arXiv:2212.09748), matrices scaled by width."""
    model = Trainee(rngs=nnx.Rngs(seed))
    matrices_by_width(model, seed)
    model.reader = reader
    head = model.transformer.head.head
    head.weight[...] = jnp.zeros_like(head.weight[...])
    projection = model.transformer.time_projection[1]
    projection.weight[...] = jnp.zeros_like(projection.weight[...])
    for block in model.transformer.blocks:
        block.modulation[...] = jnp.zeros_like(block.modulation[...])
        block.cross_attn.o.weight[...] *= (3 * TRANSFORMER.num_layers) ** -0.5
    return nnx.split(model)


def batches(clips: Clips, seed: int, start: int) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches from step `start` on, with the `seed` of the noise."""
    nothing, nothing_length = tokens([""])
    for step in count(start):
        rng = np.random.default_rng((seed, step))
        rows = rng.integers(len(clips.latents), size=BATCH)
        template = rng.integers(clips.tokens.shape[1], size=BATCH)
        no_text = rng.random(BATCH) < WITHOUT_TEXT
        yield {
            "latents": clips.latents[rows],
            "condition": clips.condition[rows],
            "first": clips.first[rows],
            "with_image": rng.random(BATCH) < WITH_IMAGE,
            "tokens": np.where(no_text[:, None], nothing, clips.tokens[rows, template]),
            "lengths": np.where(no_text, nothing_length, clips.lengths[rows, template]),
            "no_text": no_text,
            "labels": clips.labels[rows],
            "seed": np.asarray(step, np.uint32),
        }


def condition(latents: Float[Array, "B F h w Z"], with_image: Float[Array, "B"]) -> Float[Array, "B F h w E"]:
    """Image condition of the transformer: 4 channels that are 1 in the first latent frame, then the latents.

    It is all zeros for a clip without an image.
    """
    mask = jnp.zeros((*latents.shape[:-1], 4), jnp.float32).at[:, 0].set(1.0)
    channels = jnp.concatenate([mask, latents.astype(jnp.float32)], axis=-1)
    return channels * with_image[:, None, None, None, None]


def loss(model: Trainee, batch: dict[str, Array]) -> Float[Array, ""]:
    """Loss of a batch. Products are in bfloat16."""
    graph, params = nnx.split(model)
    model = nnx.merge(graph, jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))
    clean, with_image = batch["latents"].astype(jnp.float32), batch["with_image"].astype(jnp.float32)
    times, noises = jax.random.split(jax.random.key(batch["seed"]))
    noise = jax.random.normal(noises, clean.shape)
    # Stratified times, one in each of B equal parts of 0 to 1: less variance between batches.
    evenly = (jnp.arange(len(clean)) + jax.random.uniform(times, clean.shape[:1])) / len(clean)
    level = SHIFT * evenly / (1 + (SHIFT - 1) * evenly)
    noisy = clean + level[:, None, None, None, None] * (noise - clean)
    with ops.use_implementations(
        linear=rounded_gradient_linear, attention="reference", layer_norm="reference", rms_norm="reference"
    ):
        text = model.reader.text_encoder(batch["tokens"], batch["lengths"])
        image = model.image_encoder(normalized_picture(batch["first"])) * with_image[:, None, None]
        context = model.transformer.encode_context(text, image)
        inputs = jnp.concatenate([noisy, condition(batch["condition"], with_image)], axis=-1)
        velocity = model.transformer(inputs, 1000 * level, context, attention="standard")
        reading = reader_loss(model.reader, text, batch["lengths"], batch["labels"], ~batch["no_text"])
    return jnp.mean((velocity - (noise - clean)) ** 2) + READER_WEIGHT * reading
