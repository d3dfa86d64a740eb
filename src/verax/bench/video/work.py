"""Work of `verax bench video` by stage: our module and program with random weights and inputs in real sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax.bench.settings import VideoSettings
from verax.checkpoint.load import random_weights
from verax.checkpoint.video.parts import UMT5, VAE_2_2, WAN, Renaming, wan_vae_names
from verax.errors import InvalidParameterError
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan.model import WAN_CONFIGS, WanConfig, WanModel
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.video.load import divided_component
from verax.video.networks import latents_at_once
from verax.video.programs import Component

__all__ = ["SIZES", "Work", "work"]

WORDS, PATCHES = 512, 257
"""Tokens of a prompt and of an image that condition the transformer, as in the published pipelines."""


@dataclass(frozen=True)
class Size:
    """Configurations of the models of one pipeline."""

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
    """One stage that all sides compute.

    Attributes:
        component: our model, with the weights when it is used.
        weights: weights by our names.
        table: our names to the other library's.
        inputs: inputs in our layout.
        function: traced function of the module, the inputs, and `attention` for the transformer.
        prepare: function of the module and the inputs that our side runs once for many calls; its result replaces them.
        config: configuration of our model, from which the other side makes its own.
    """

    stage: str
    component: Component[Any]
    weights: Mapping[str, np.ndarray]
    table: Renaming
    inputs: tuple[np.ndarray, ...]
    function: Callable[..., Any]
    prepare: Callable[..., Any] | None
    config: Any

    def run(self, weights: Any, *inputs: Any, **options: Any) -> Any:
        """Call `function` with weights in their place."""
        return self.function(self.component.module(weights), *inputs, **options)

    def prepared(self, weights: Any, *inputs: Any) -> Any:
        """Call `prepare`, if there is one, with weights in their place."""
        return inputs if self.prepare is None else self.prepare(self.component.module(weights), *inputs)

    @property
    def shapes(self) -> Any:
        """Shapes and dtypes of the inputs of `function`."""
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs]
        return jax.eval_shape(self.prepared, self.component.shapes, *shapes)


def work(stage: str, frames: int, settings: VideoSettings) -> Work:
    """Work of a stage for a clip: one forward pass of the transformer, decoding latents, or encoding 512 tokens.

    Args:
        stage: `transformer`, `vae` or `text`.
        frames: of the clip, 4n + 1.
        settings: the sizes, with sides that divide into tokens.

    Raises:
        InvalidParameterError: for a clip that does not divide.
    """
    height, width, dtype, layers = settings.height, settings.width, settings.dtype, settings.layers
    sizes = SIZES[settings.size]
    pixels = sizes.vae.pixels_per_latent
    token = pixels * sizes.transformer.patch
    if frames % 4 != 1 or height % token or width % token or min(frames, height, width) < 1:
        raise InvalidParameterError(
            f"frames, height, width: expected 4n + 1 frames and sides divisible by {token}, got {frames}, {height} x "
            f"{width}"
        )
    rng = np.random.default_rng(1)
    latents = 1, (frames + 3) // 4, height // pixels, width // pixels
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    some = {} if layers is None else {"num_layers": layers}
    if stage == "transformer":
        config = replace(sizes.transformer, **some)
        image = () if config.image_dim is None else (normal(1, PATCHES, config.image_dim),)
        inputs = normal(*latents, config.in_dim), np.asarray([500], np.int32), normal(1, WORDS, config.text_dim), *image
        return _work(stage, WanModel, config, dtype, WAN, inputs, _forward, _encode_context)
    if stage == "vae":
        chunk = latents_at_once(sizes.vae, height, width)
        decode = lambda model, latents: model.decode(latents, chunk=chunk)
        names = wan_vae_names(asdict(sizes.vae))
        return _work(stage, WanVae, sizes.vae, dtype, names, (normal(*latents, sizes.vae.z_dim),), decode, None)
    config = replace(sizes.text, **some)
    inputs = rng.integers(1, config.vocab_size, (1, WORDS), np.int32), np.asarray([WORDS], np.int32)
    encode = lambda model, tokens, lengths: model(tokens, lengths)
    return _work(stage, UMT5EncoderModel, config, dtype, UMT5, inputs, encode, None)


def _encode_context(model: WanModel, latents: Any, timesteps: Any, text: Any, image: Any = None) -> tuple[Any, ...]:
    return latents, timesteps, model.encode_context(text, image)


def _forward(model: WanModel, latents: Any, timesteps: Any, context: Any, *, attention: str = "auto") -> Any:
    return model(latents, timesteps, context, attention=attention)


def _work(
    stage: str,
    kind: Callable[..., nnx.Module],
    config: Any,
    dtype: str,
    names: Renaming,
    inputs: tuple[np.ndarray, ...],
    function: Callable[..., Any],
    prepare: Callable[..., Any] | None,
) -> Work:
    weights = random_weights(nnx.eval_shape(lambda: kind(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))), dtype)

    def load(abstract: nnx.Module) -> nnx.Module:
        graph, state = nnx.split(abstract)
        flat = nnx.to_flat_state(state)
        filled = [(path, leaf.replace(jnp.asarray(weights[".".join(map(str, path))]))) for path, leaf in flat]
        return nnx.merge(graph, nnx.from_flat_state(filled))

    component = divided_component(stage, cast(Any, kind), config, jnp.dtype(dtype), load, keep=None)
    return Work(stage, component, weights, names, inputs, function, prepare, config)
