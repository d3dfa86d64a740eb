"""Programs of the encoders and the VAE, and the calls of them that a run makes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt8

from verax.models.clip import CLIPVisionModel
from verax.models.umt5 import UMT5EncoderModel
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.video.mesh import REPLICATED, AnyMesh, layout
from verax.video.programs import Component, Program, ProgramCall, Weights, floats, shapes_of

__all__ = ["Stages", "latents_at_once", "tile_at_once"]

MASK_CHANNELS = 4
"""Mask channels of an image-to-video condition: one for each frame of a latent."""

PIXELS_AT_ONCE = 1 << 20
"""Pixels of frames that the VAE computes together. Its widest activations take some 400 bytes a pixel, so that this is
half a gigabyte; with fewer, the device idles between small operations."""

PIXELS_OF_A_TILE = 1 << 22
"""Pixels of one latent's frames up to which they are decoded whole: 2 GB. The halo of a tile is then dropped."""


class Stages:
    """Programs over the encoders and the VAE of a checkpoint. Results stay on the device.

    A method whose name ends in `_call` describes a call by its shapes; the method without the ending makes it.
    """

    def __init__(
        self,
        *,
        text_encoder: Component[UMT5EncoderModel],
        image_encoder: Component[CLIPVisionModel] | None,
        vae: Component[WanVae],
        decode_dtype: Any,
        mesh: AnyMesh | None = None,
    ):
        """Describe the programs; nothing is compiled.

        Args:
            text_encoder, image_encoder, vae: models; `vae` with float32 weights. The encoders may be divided over
                meshes of their own.
            decode_dtype: dtype of the VAE's weights when it decodes. It always encodes in float32: errors of the
                condition spread through the whole clip, those of decoding do not.
            mesh: devices of the VAE's programs, which have its weights and divide the frames to decode; None for the
                default device.
        """
        self.text_encoder, self.image_encoder, self.vae = text_encoder, image_encoder, vae
        self._devices = 1 if mesh is None else mesh.size
        axes = () if mesh is None else tuple(mesh.axis_names)

        def encode(weights: Weights, frames: Array, *, chunk: int) -> Array:
            return vae.module(weights).encode(_signed(frames), chunk=chunk)

        def condition(weights: Weights, image: Array, *, frames: int, chunk: int) -> Array:
            module = vae.module(weights)
            clip = jnp.zeros((1, frames, *image.shape[1:]), jnp.float32).at[:, 0].set(_signed(image))
            latents = module.encode(clip, chunk=chunk)
            mask = jnp.zeros((*latents.shape[:-1], MASK_CHANNELS), jnp.float32).at[:, 0].set(1.0)
            return jnp.concatenate([mask, latents], axis=-1)

        def decode(weights: Weights, latents: Array, *, chunk: int, tile: tuple[int, int] | None = None) -> Array:
            weights = tuple(weight.astype(decode_dtype) for weight in weights)
            return vae.module(weights).decode(latents, chunk=chunk, tile=tile, axes=axes)

        def finish(frames: Array) -> Array:
            return jnp.round((frames[0] + 1) * 127.5).astype(jnp.uint8)

        def noise(key: Array, *, shape: tuple[int, ...]) -> Array:
            return jax.random.normal(key, shape, jnp.float32)

        self.text_program = Program(
            lambda w, tokens, lengths: text_encoder.module(w)(tokens, lengths),
            layout=layout(text_encoder.mesh, text_encoder.partition, REPLICATED, REPLICATED),
        )
        self.image_program = None
        if image_encoder is not None:
            self.image_program = Program(
                lambda w, pixels: image_encoder.module(w)(pixels),
                layout=layout(image_encoder.mesh, image_encoder.partition, REPLICATED),
            )
        of_vae = layout(mesh, REPLICATED, REPLICATED)
        self.encode_program = Program(encode, options=("chunk",), layout=of_vae)
        self.condition_program = Program(condition, options=("frames", "chunk"), layout=of_vae)
        self.decode_program = Program(decode, options=("chunk", "tile"), layout=of_vae)
        self._finish = Program(finish, layout=layout(mesh, REPLICATED))
        self._noise = Program(noise, options=("shape",))

    def text_call(self, tokens: int) -> ProgramCall:
        """Call that encodes a prompt of this many tokens, padding included."""
        arguments = jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        return ProgramCall(self.text_program, self.text_encoder, arguments)

    def text(self, tokens: Int32[np.ndarray, "1 T"], lengths: Int32[np.ndarray, "1"]) -> Float32[Array, "1 T D"]:
        """States of a prompt."""
        return jax.block_until_ready(self.text_call(tokens.shape[1])(tokens, lengths))

    def image_call(self) -> ProgramCall:
        """Call of the image encoder on one image.

        Raises:
            AssertionError: if the checkpoint has no image encoder.
        """
        assert self.image_encoder is not None
        assert self.image_program is not None
        size = self.image_encoder.config.image_size
        return ProgramCall(self.image_program, self.image_encoder, (floats(1, size, size, 3),))

    def image(self, pixels: Float32[np.ndarray, "1 H W 3"]) -> Float32[Array, "1 P D"]:
        """States of an image, from the image encoder's pixels."""
        return jax.block_until_ready(self.image_call()(pixels))

    def encode_call(self, frames: int, height: int, width: int, dtype: Any = jnp.uint8) -> ProgramCall:
        """Call that encodes a clip of this many frames, height and width in pixels."""
        shape = jax.ShapeDtypeStruct((1, frames, height, width, 3), dtype)
        return ProgramCall(self.encode_program, self.vae, (shape,), {"chunk": self._chunk(height, width)})

    def encode(self, frames: UInt8[np.ndarray, "1 T H W 3"] | Float[Array, "1 T H W 3"]) -> Float32[Array, "1 F h w C"]:
        """Latents of a clip of bytes, or of floats from -1 to 1."""
        return self.encode_call(frames.shape[1], frames.shape[2], frames.shape[3], frames.dtype)(frames)

    def condition_call(self, frames: int, height: int, width: int) -> ProgramCall:
        """Call that makes the image condition of a clip of this many frames, height and width in pixels.

        It takes the first frame, uint8 `[1, H, W, 3]`, and returns float32 `[1, F, h, w, E]`: 4 mask channels, 1 in the
        first latent frame and 0 after it, then the latents of a clip of the image followed by gray (0, half way between
        black and white).
        """
        image = jax.ShapeDtypeStruct((1, height, width, 3), jnp.uint8)
        options = {"frames": frames, "chunk": self._chunk(height, width)}
        return ProgramCall(self.condition_program, self.vae, (image,), options)

    def decode_call(self, latents: Any) -> ProgramCall:
        """Call that decodes latents float32 `[1, F, h, w, C]`, which may be a shape."""
        pixels = self.vae.config.pixels_per_latent
        height, width = latents.shape[2] * pixels, latents.shape[3] * pixels
        tile = tile_at_once(self.vae.config, height, width, self._devices)
        options = {"chunk": self._chunk(height, width), "tile": tile}
        return ProgramCall(self.decode_program, self.vae, (shapes_of(latents),), options)

    def decode(self, latents: Float32[Array, "1 F h w C"]) -> Float32[Array, "1 T H W 3"]:
        """Frames of a clip, from -1 to 1."""
        return self.decode_call(latents)(latents)

    def finish(self, frames: Float32[Array, "1 T H W 3"]) -> UInt8[Array, "T H W 3"]:
        """Frames from -1 to 1 as bytes."""
        return self._finish(frames)

    def noise(self, seed: int, segment: int, shape: tuple[int, ...]) -> Float32[Array, "..."]:
        """Noise of a segment: the same on every machine and whatever came before."""
        return self._noise(jax.random.fold_in(jax.random.key(seed), segment), shape=shape)

    def _chunk(self, height: int, width: int) -> int:
        return latents_at_once(self.vae.config, height, width)


def latents_at_once(config: WanVaeConfig, height: int, width: int) -> int:
    """Number of latents that the VAE takes together, of a clip of this height and width in pixels."""
    return max(1, PIXELS_AT_ONCE // (config.frames_per_latent * height * width))


def tile_at_once(config: WanVaeConfig, height: int, width: int, devices: int = 1) -> tuple[int, int] | None:
    """Height and width in latents that a device decodes together, of frames of this size in pixels; None for all.

    Frames are cut into a tile for each device, of the sides that give the least pixels with the halo. Then the longer
    side is halved until a tile and its halo fit.
    """
    scale = config.pixels_per_latent
    whole = height // scale, width // scale

    def pixels(tile: tuple[int, int]) -> int:
        high, wide = (min(all_of_it, side + 2 * config.halo) for all_of_it, side in zip(whole, tile, strict=True))
        return config.frames_per_latent * high * wide * scale**2

    rows = [n for n in range(1, devices + 1) if devices % n == 0]
    tile = min(((-(-whole[0] // n), -(-whole[1] * n // devices)) for n in rows), key=pixels)
    if pixels(tile) == pixels(whole):
        tile = whole
    while pixels(tile) > PIXELS_OF_A_TILE and max(tile) > config.halo:
        high, wide = tile
        tile = (high, -(-wide // 2)) if wide >= high else (-(-high // 2), wide)
    return None if tile == whole else tile


def _signed(frames: Array) -> Array:
    """Bytes 0 to 255 as floats from -1 to 1; floats are returned as they are."""
    return frames.astype(jnp.float32) / 127.5 - 1 if frames.dtype == jnp.uint8 else frames
