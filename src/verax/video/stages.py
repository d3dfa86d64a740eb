"""The stages of a run other than the loop over steps, each one program: encoders, VAE, what the transformer is told."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt8

from verax.models.clip import CLIPVisionModel
from verax.models.umt5 import UMT5EncoderModel
from verax.models.wan.model import WanContext, WanModel
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.video.programs import Component, Program, Weights

__all__ = ["Stages", "latents_at_once", "tile_at_once"]

MASK_CHANNELS = 4
"""Of an image-to-video condition: one for each frame that a latent stands for."""

PIXELS_AT_ONCE = 1 << 20
"""Pixels of frames that the VAE works on together. Its widest activations take some 400 bytes a pixel, so that this is
half a gigabyte; fewer make the machine wait for itself."""

PIXELS_OF_A_TILE = 1 << 22
"""Pixels of one latent's frames up to which they are decoded whole: 2 GB. A tile's halo is computed and thrown away."""


class Stages:
    """Programs over the models of a checkpoint. Results stay on the device."""

    def __init__(
        self,
        *,
        text_encoder: Component[UMT5EncoderModel],
        image_encoder: Component[CLIPVisionModel] | None,
        transformer: Component[WanModel],
        vae: Component[WanVae],
        decode_dtype: Any,
    ):
        """Make them.

        Args:
            text_encoder, image_encoder, transformer, vae: the models; `vae` with float32 weights.
            decode_dtype: of the VAE's weights when it decodes. It always encodes in float32: what a clip is conditioned
                on is worth more digits than what is looked at.
        """
        self.text_encoder, self.image_encoder = text_encoder, image_encoder
        self.transformer, self.vae = transformer, vae

        def context(weights: Weights, text: Array, image: Array | None) -> WanContext:
            return transformer.module(weights).encode_context(text, image)

        def time(weights: Weights, timesteps: Array, fps: Array | None) -> tuple[Array, Array]:
            fps = None if fps is None else jnp.broadcast_to(fps, timesteps.shape[:1])
            return transformer.module(weights).embed_time(timesteps, fps)

        def encode(weights: Weights, frames: Array, *, chunk: int) -> Array:
            return vae.module(weights).encode(_colours(frames), chunk=chunk)

        def condition(weights: Weights, image: Array, *, frames: int, chunk: int) -> Array:
            module = vae.module(weights)
            clip = jnp.zeros((1, frames, *image.shape[1:]), jnp.float32).at[:, 0].set(_colours(image))
            latents = module.encode(clip, chunk=chunk)
            mask = jnp.zeros((*latents.shape[:-1], MASK_CHANNELS), jnp.float32).at[:, 0].set(1.0)
            return jnp.concatenate([mask, latents], axis=-1)

        def decode(weights: Weights, latents: Array, *, chunk: int, tile: tuple[int, int] | None = None) -> Array:
            weights = tuple(weight.astype(decode_dtype) for weight in weights)
            return vae.module(weights).decode(latents, chunk=chunk, tile=tile)

        def finish(frames: Array) -> Array:
            return jnp.round((frames[0] + 1) * 127.5).astype(jnp.uint8)

        def noise(key: Array, *, shape: tuple[int, ...]) -> Array:
            return jax.random.normal(key, shape, jnp.float32)

        self.text_program = Program(lambda w, tokens, lengths: text_encoder.module(w)(tokens, lengths))
        self.image_program = None
        if image_encoder is not None:
            self.image_program = Program(lambda w, pixels: image_encoder.module(w)(pixels))
        self.context_program = Program(context)
        self.time_program = Program(time)
        self.encode_program = Program(encode, options=("chunk",))
        self.condition_program = Program(condition, options=("frames", "chunk"))
        self.decode_program = Program(decode, options=("chunk", "tile"))
        self._finish = Program(finish)
        self._noise = Program(noise, options=("shape",))

    def text(self, tokens: Int32[np.ndarray, "1 T"], lengths: Int32[np.ndarray, "1"]) -> Float32[Array, "1 T D"]:
        """A prompt's states."""
        with self.text_encoder.weights() as weights:
            return jax.block_until_ready(self.text_program(weights, tokens, lengths))

    def image(self, pixels: Float32[np.ndarray, "1 H W 3"]) -> Float32[Array, "1 P D"]:
        """An image's states, of pixels as the image encoder takes them."""
        assert self.image_encoder is not None
        assert self.image_program is not None
        with self.image_encoder.weights() as weights:
            return jax.block_until_ready(self.image_program(weights, pixels))

    def context(self, text: Float32[Array, "G T D"], image: Float32[Array, "G P I"] | None) -> WanContext:
        """What every layer's cross-attention sees of prompts and image."""
        with self.transformer.weights() as weights:
            return self.context_program(weights, text, image)

    def encode(self, frames: UInt8[np.ndarray, "1 T H W 3"] | Float[Array, "1 T H W 3"]) -> Float32[Array, "1 F h w C"]:
        """A clip's latents; of bytes, or of colours from -1 to 1."""
        with self.vae.weights() as weights:
            return self.encode_program(weights, frames, chunk=self.chunk(*frames.shape[2:4]))

    def condition(self, image: UInt8[np.ndarray, "1 H W 3"], frames: int) -> Float32[Array, "1 F h w E"]:
        """What an image-to-video transformer is shown of a clip's first frame.

        4 channels that are 1 in the first latent frame and 0 after it, then the latents of a clip of the image and
        grey: 0, half way between black and white.
        """
        with self.vae.weights() as weights:
            return self.condition_program(weights, image, frames=frames, chunk=self.chunk(*image.shape[1:3]))

    def decode(self, latents: Float32[Array, "1 F h w C"]) -> Float32[Array, "1 T H W 3"]:
        """A clip's colours, from -1 to 1."""
        pixels = self.vae.config.pixels_per_latent
        with self.vae.weights() as weights:
            at_once = self.decoding(latents.shape[2] * pixels, latents.shape[3] * pixels)
            return self.decode_program(weights, latents, **at_once)

    def finish(self, frames: Float32[Array, "1 T H W 3"]) -> UInt8[Array, "T H W 3"]:
        """Colours to bytes."""
        return self._finish(frames)

    def noise(self, seed: int, segment: int, shape: tuple[int, ...]) -> Float32[Array, "..."]:
        """A segment's noise: the same on every machine and whatever came before."""
        return self._noise(jax.random.fold_in(jax.random.key(seed), segment), shape=shape)

    def chunk(self, height: int, width: int) -> int:
        """Latents that the VAE takes together."""
        return latents_at_once(self.vae.config, height, width)

    def decoding(self, height: int, width: int) -> dict[str, Any]:
        """Options of `decode_program` for frames of this size in pixels: `chunk` and `tile`."""
        config = self.vae.config
        return {"chunk": self.chunk(height, width), "tile": tile_at_once(config, height, width)}


def latents_at_once(config: WanVaeConfig, height: int, width: int) -> int:
    """Latents that the VAE takes together, of a clip of this height and width in pixels."""
    return max(1, PIXELS_AT_ONCE // (config.frames_per_latent * height * width))


def tile_at_once(config: WanVaeConfig, height: int, width: int) -> tuple[int, int] | None:
    """Latents in height and width that are decoded together, of frames of this size in pixels; None is all.

    The longer side is halved until a tile and its halo fit.
    """
    scale = config.pixels_per_latent
    whole = height // scale, width // scale
    tile = whole

    def pixels() -> int:
        high, wide = (min(all_of_it, side + 2 * config.halo) for all_of_it, side in zip(whole, tile, strict=True))
        return config.frames_per_latent * high * wide * scale**2

    while pixels() > PIXELS_OF_A_TILE and max(tile) > config.halo:
        high, wide = tile
        tile = (high, -(-wide // 2)) if wide >= high else (-(-high // 2), wide)
    return None if tile == whole else tile


def _colours(frames: Array) -> Array:
    """Bytes 0 to 255 as -1 to 1; what is float already is that."""
    return frames.astype(jnp.float32) / 127.5 - 1 if frames.dtype == jnp.uint8 else frames
