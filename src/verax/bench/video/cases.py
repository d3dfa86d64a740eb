"""Work of `verax bench video` by stage: our module and program, random weights and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax.bench.video.cases import Work as CountedWork
from verax.checkpoint.load import random_weights
from verax.checkpoint.video.names import UMT5, WAN, Renaming, wan_vae_names
from verax.checkpoint.video.parts import VAE_2_2
from verax.errors import InvalidParameterError
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan.model import WAN_CONFIGS, WanConfig, WanModel
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.plan.work import count, trace
from verax.video.load import divided_component
from verax.video.networks import latents_at_once
from verax.video.programs import Component

__all__ = ["SIZES", "STAGES", "Size", "Work", "products", "work"]

STAGES = ("transformer", "vae", "text")

WORDS, PATCHES = 512, 257
"""Tokens of a prompt and of an image that condition the transformer, as in the published pipelines."""


@dataclass(frozen=True)
class Size:
    """The models of one pipeline."""

    transformer: WanConfig
    vae: WanVaeConfig = field(default_factory=WanVaeConfig)
    text: UMT5Config = field(default_factory=UMT5Config)


SIZES: Mapping[str, Size] = {
    "1.3b": Size(WAN_CONFIGS["i2v-1.3b"]),
    "14b": Size(WAN_CONFIGS["i2v-14b"]),
    "5b": Size(WAN_CONFIGS["ti2v-5b"], WanVaeConfig.from_hf(VAE_2_2)),
    "tiny": Size(
        WanConfig(dim=32, ffn_dim=64, num_heads=2, num_layers=2, in_dim=36, text_dim=32, image_dim=32),
        WanVaeConfig(base_dim=8, dim_mult=(1, 2, 2, 2), num_res_blocks=1),
        UMT5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2),
    ),
}
"""SkyReels-V2's two published sizes of image to video, Wan2.2's 5B of text and image, and one for tests."""


@dataclass(frozen=True)
class Work:
    """One stage that both sides compute.

    Attributes:
        component: our model, with the weights below when it is used.
        weights: by our names.
        table: our names to the other library's.
        inputs: NumPy arrays, in our layout.
        function: of the module, then of the inputs, then of `attention` for the transformer; traced.
        prepare: what our side computes once for many calls, as a function of the module and the inputs; its result
            takes the inputs' place.
        config: of our model, from which the other side makes its own.
    """

    stage: str
    component: Component[Any]
    weights: Mapping[str, np.ndarray]
    table: Renaming
    inputs: tuple[np.ndarray, ...]
    function: Callable[..., Any]
    prepare: Callable[..., Any] | None
    config: Any


def work(stage: str, size: str, *, frames: int, height: int, width: int, dtype: str, layers: int | None) -> Work:
    """The work of a stage for a clip.

    Args:
        stage: one of `STAGES`: one forward pass of the transformer, decoding a clip's latents, or encoding 512 tokens.
        size: one of `SIZES`.
        frames, height, width: of the clip: 4n + 1 frames, and sides that divide into tokens.
        dtype: of weights and inputs.
        layers: of transformer and text encoder, to fit a small machine; all of them if None.

    Raises:
        InvalidParameterError: for another name, or a clip that does not divide.
    """
    for name, value, known in (("stage", stage, STAGES), ("size", size, SIZES), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise InvalidParameterError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    sizes = SIZES[size]
    pixels = sizes.vae.pixels_per_latent
    token = pixels * sizes.transformer.patch
    if frames % 4 != 1 or height % token or width % token or min(frames, height, width) < 1:
        raise InvalidParameterError(
            f"frames, height, width: expected 4n + 1 frames and sides divisible by {token}, got {frames}, {height} x "
            f"{width}"
        )
    return {"transformer": _transformer, "vae": _vae, "text": _text}[stage](
        sizes, (frames + 3) // 4, height // pixels, width // pixels, jnp.dtype(dtype), layers
    )


DTYPES = ("bfloat16", "float32")


def _transformer(size: Size, F: int, h: int, w: int, dtype: Any, layers: int | None) -> Work:
    config = replace(size.transformer, num_layers=layers or size.transformer.num_layers)
    rng = np.random.default_rng(1)
    inputs = (
        _normal(rng, 1, F, h, w, config.in_dim),
        np.asarray([500], np.int32),
        _normal(rng, 1, WORDS, config.text_dim),
        *(() if config.image_dim is None else (_normal(rng, 1, PATCHES, config.image_dim),)),
    )

    def prepare(model: WanModel, latents: Any, timesteps: Any, text: Any, image: Any = None) -> tuple[Any, ...]:
        return latents, timesteps, model.encode_context(text, image)

    def forward(model: WanModel, latents: Any, timesteps: Any, context: Any, *, attention: str = "auto") -> Any:
        return model(latents, timesteps, context, attention=attention)

    return _made("transformer", WanModel, config, dtype, WAN, inputs, forward, prepare)


def _vae(size: Size, F: int, h: int, w: int, dtype: Any, layers: int | None) -> Work:
    config = size.vae
    inputs = (_normal(np.random.default_rng(1), 1, F, h, w, config.z_dim),)
    chunk = latents_at_once(config, config.pixels_per_latent * h, config.pixels_per_latent * w)

    def decode(model: WanVae, latents: Any) -> Any:
        return model.decode(latents, chunk=chunk)

    table = wan_vae_names(asdict(config))
    return _made("vae", WanVae, config, dtype, table, inputs, decode, None)


def _text(size: Size, F: int, h: int, w: int, dtype: Any, layers: int | None) -> Work:
    config = replace(size.text, num_layers=layers or size.text.num_layers)
    tokens = np.random.default_rng(1).integers(1, config.vocab_size, (1, WORDS), np.int32)

    def encode(model: UMT5EncoderModel, tokens: Any, lengths: Any) -> Any:
        return model(tokens, lengths)

    inputs = (tokens, np.asarray([WORDS], np.int32))
    return _made("text", UMT5EncoderModel, config, dtype, UMT5, inputs, encode, None)


def _made(
    stage: str,
    kind: Callable[..., nnx.Module],
    config: Any,
    dtype: Any,
    table: Renaming,
    inputs: tuple[np.ndarray, ...],
    function: Callable[..., Any],
    prepare: Callable[..., Any] | None,
) -> Work:
    def make() -> nnx.Module:
        return kind(config, dtype=dtype, rngs=nnx.Rngs(0))

    weights = random_weights(nnx.eval_shape(make), dtype)

    def load(abstract: nnx.Module) -> nnx.Module:
        graph, state = nnx.split(abstract)
        flat = nnx.to_flat_state(state)
        filled = [(path, leaf.replace(jnp.asarray(weights[".".join(map(str, path))]))) for path, leaf in flat]
        return nnx.merge(graph, nnx.from_flat_state(filled))

    component = divided_component(stage, cast(Any, kind), config, dtype, load, keep=None)
    return Work(stage, component, weights, table, inputs, function, prepare, config)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def products(work: Work) -> CountedWork:
    """Work of a call: operations of its products, loops counted turn by turn, and bytes that it has to move."""
    component = work.component
    shapes: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), work.inputs)

    def call(weights: Any, *inputs: Any) -> Any:
        module = component.module(weights)
        return work.function(module, *inputs)

    if work.prepare is not None:
        prepare = work.prepare
        shapes = jax.eval_shape(lambda w, *inputs: prepare(component.module(w), *inputs), component.shapes, *shapes)
    return count(trace(call, component.shapes, *shapes))
