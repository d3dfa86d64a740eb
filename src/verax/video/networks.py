"""Programs over the networks of a checkpoint: text encoder, image encoder, VAE and transformer.

`Stages` has the programs of encoders and VAE, `Denoiser` the programs of one transformer, and `PromptStates` keeps the
states of the last prompts. A method whose name ends in `_call` describes a call by its shapes, from which the memory
plan follows before a run. Nothing is compiled before a call is planned or made.
"""

from __future__ import annotations

import html
import logging
import textwrap
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int, Real, UInt8

from verax._optional import require_optional
from verax.errors import CheckpointError
from verax.models.video_model import ConditionEncoder, Control, Pictures
from verax.video import solvers
from verax.video.denoise import Conditions, DenoisingState, denoise
from verax.video.mesh import BY_ROW, GUIDANCE, REPLICATED, SEQUENCE, AnyMesh, axis_size, layout
from verax.video.programs import Component, Program, ProgramCall, Weights, floats, random_key, shapes_of
from verax.video.request import ResolvedRequest
from verax.video.schedule import Tables

_log = logging.getLogger("verax.video")

PROMPT_TOKENS = 512
"""Tokens of every prompt, padding included: the transformer's cross-attention sees them all."""

KEPT_PROMPTS = 16
"""Prompts whose states are kept, so that a prompt that comes again needs no text encoder."""

PIXELS_AT_ONCE = 3 << 18
"""Pixels of frames that the VAE computes together. Decoding takes some thousand bytes for each, with half as many
again for what one chunk leaves to the next; with fewer, the device idles between small operations."""

PIXELS_OF_A_TILE = 1 << 22
"""Pixels of one latent's frames up to which they are decoded whole: 2 GB. The halo of a tile is then dropped."""


class Stages:
    """Programs over the encoders and the VAE of a checkpoint. Results stay on the device.

    A method whose name ends in `_call` describes a call by its shapes; the call is then made with arrays.
    """

    def __init__(
        self,
        *,
        text_encoder: Component[Any],
        image_encoder: Component[Any] | None,
        vae: Component[Any],
        decoder: Component[Any] | None = None,
        encode_condition: ConditionEncoder | None = None,
        mesh: AnyMesh | None = None,
    ):
        """Describe the programs; nothing is compiled.

        Args:
            text_encoder, image_encoder, vae: models. The encoders may be divided over meshes of their own.
            decoder: decoder of the latents in place of the VAE's; the VAE's if None.
            encode_condition: function of the condition; None for models without one.
            mesh: devices of the VAE's programs, which have its weights and divide the frames to decode; None for the
                default device.
        """
        self.text_encoder, self.image_encoder, self.vae = text_encoder, image_encoder, vae
        self.decoder = decoder = vae if decoder is None else decoder
        self._devices = 1 if mesh is None else mesh.size
        axes = () if mesh is None else tuple(mesh.axis_names)

        def encode(weights: Weights, frames: Array, *, chunk: int) -> Array:
            return vae.module(weights).encode(_signed(frames), chunk=chunk)

        def condition(weights: Weights, pictures: Pictures, *, frames: int, chunk: int) -> Array:
            assert encode_condition is not None
            return encode_condition(vae.module(weights), jax.tree.map(_signed, pictures), frames=frames, chunk=chunk)

        def decode(weights: Weights, latents: Array, *, chunk: int, tile: tuple[int, int] | None = None) -> Array:
            return decoder.module(weights).decode(latents, chunk=chunk, tile=tile, axes=axes)

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
        self.encode_program = Program(encode, layout=of_vae)
        self.condition_program = Program(condition, layout=of_vae)
        self.decode_program = Program(decode, layout=of_vae)
        self._finish = Program(finish, layout=layout(mesh, REPLICATED))
        self._noise = Program(noise)

    def text_call(self, tokens: int) -> ProgramCall:
        """Call that encodes a prompt of this many tokens, padding included."""
        arguments = jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        return ProgramCall(self.text_program, self.text_encoder, arguments)

    def image_call(self) -> ProgramCall:
        """Call of the image encoder on one image."""
        assert self.image_encoder is not None
        assert self.image_program is not None
        size = self.image_encoder.config.image_size
        return ProgramCall(self.image_program, self.image_encoder, (floats(1, size, size, 3),))

    def encode_call(self, frames: int, height: int, width: int, dtype: Any = jnp.uint8) -> ProgramCall:
        """Call that encodes a clip of this many frames, height and width in pixels."""
        shape = jax.ShapeDtypeStruct((1, frames, height, width, 3), dtype)
        return ProgramCall(self.encode_program, self.vae, (shape,), {"chunk": self._chunk(height, width)})

    def encode(self, frames: UInt8[np.ndarray, "1 T H W 3"] | Float[Array, "1 T H W 3"]) -> Float32[Array, "1 F h w C"]:
        """Latents of a clip of bytes, or of floats from -1 to 1."""
        return self.encode_call(frames.shape[1], frames.shape[2], frames.shape[3], frames.dtype)(frames)

    def condition_call(self, frames: int, height: int, width: int, pictures: Pictures) -> ProgramCall:
        """Call that makes the condition of a clip of this many frames, height and width in pixels.

        It takes pictures, given by shape, and returns float32 `[1, F, h, w, E]`.
        """
        options = {"frames": frames, "chunk": self._chunk(height, width)}
        return ProgramCall(self.condition_program, self.vae, (pictures,), options)

    def decode_call(self, latents: Any) -> ProgramCall:
        """Call that decodes latents float32 `[1, F, h, w, C]`, which may be a shape."""
        config = self.decoder.config
        height, width = latents.shape[2] * config.pixels_per_latent, latents.shape[3] * config.pixels_per_latent
        tile = tile_at_once(config, height, width, self._devices)
        options = {"chunk": latents_at_once(config, height, width), "tile": tile}
        return ProgramCall(self.decode_program, self.decoder, (shapes_of(latents),), options)

    def finish(self, frames: Float32[Array, "1 T H W 3"]) -> UInt8[Array, "T H W 3"]:
        """Frames from -1 to 1 as bytes."""
        return self._finish(frames)

    def noise(self, seed: int, segment: int, shape: tuple[int, ...]) -> Float32[Array, "..."]:
        """Noise of a segment: the same on every machine and whatever came before."""
        return self._noise(jax.random.fold_in(random_key(seed), segment), shape=shape)

    def _chunk(self, height: int, width: int) -> int:
        return latents_at_once(self.vae.config, height, width)


def latents_at_once(config: Any, height: int, width: int) -> int:
    """Number of latents that a VAE takes together, of a clip of this height and width in pixels."""
    return max(1, PIXELS_AT_ONCE // (config.frames_per_latent * height * width))


def tile_at_once(config: Any, height: int, width: int, devices: int = 1) -> tuple[int, int] | None:
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
    """Bytes 0 to 255 as floats from -1 to 1; floats are returned unchanged."""
    return frames.astype(jnp.float32) / 127.5 - 1 if frames.dtype == jnp.uint8 else frames


_RESIDUAL = PartitionSpec(GUIDANCE, None, None, SEQUENCE)
_STATE: Any = DenoisingState._make([REPLICATED, _RESIDUAL])
_CONDITIONS: Any = Conditions._make([BY_ROW] + [REPLICATED] * (len(Conditions._fields) - 1))


class Denoiser:
    """Programs over one transformer: context, embedding of time, and the loop over iterations.

    `context_program`: function of weights, text states `[G, T, D]`, image states `[G, P, I]` or None, and a `Control`
    or None.
    `time_program`: function of weights, timesteps `[R, *F]` and fps or None.
    """

    def __init__(self, transformer: Component[Any], mesh: AnyMesh | None = None):
        """Describe the programs; nothing is compiled.

        `transformer`: model, whose weights are whole on each device of the mesh, or divided over all of them. `mesh`:
        mesh of `video_mesh`.
        """
        self.transformer = transformer
        self.mesh = mesh

        def context(weights: Weights, text: Array, image: Array | None, control: Control | None) -> Any:
            more = () if control is None else (control,)
            return transformer.module(weights).encode_context(text, image, *more)

        def time(weights: Weights, timesteps: Array, fps: Array | None) -> Array:
            fps = None if fps is None else jnp.broadcast_to(fps, timesteps.shape[:1])
            return transformer.module(weights).embed_time(timesteps, fps)[1]

        def loop(weights: Weights, *arguments: Any, **options: Any) -> DenoisingState:
            return denoise(transformer.module(weights), *arguments, mesh=mesh, **options)

        whole, of_model = REPLICATED, transformer.partition
        self.context_program = Program(context, layout=layout(mesh, of_model, BY_ROW, BY_ROW, whole, results=BY_ROW))
        self.time_program = Program(time, layout=layout(mesh, of_model, whole, whole))
        self.program = Program(
            loop, donate=(1,), layout=layout(mesh, of_model, _STATE, whole, _CONDITIONS, whole, whole, results=_STATE)
        )

    def context_call(self, text: Any, image: Any, control: Any = None) -> ProgramCall:
        """Call that makes the transformer's context from states of text and image and a `Control`, given by shape."""
        return ProgramCall(self.context_program, self.transformer, (text, image, control))

    def call(self, latents: Any, tables: Tables, conditions: Conditions, request: ResolvedRequest) -> ProgramCall:
        """Call of the loop over iterations, given by the shapes of the first sample and of the conditions."""
        cached = request.cache is not None
        state = jax.eval_shape(lambda noise: self.start(noise, guided=request.guided, cached=cached), latents)
        arguments = (state, tables, shapes_of(conditions), np.int32(0), np.int32(0))
        return ProgramCall(self.program, self.transformer, arguments, request.program_options)

    def project_time(self, timesteps: Real[np.ndarray, "R *F"], fps: Any) -> np.ndarray:
        """Projection of the embedding of time of each row of timesteps, which modulates the blocks."""
        with self.transformer.weights() as weights:
            return np.asarray(self.time_program(weights, timesteps, fps))

    def start(self, noise: Float32[Array, "1 F h w C"], *, guided: bool, cached: bool) -> DenoisingState:
        """State before the first iteration."""
        _, F, h, w, _ = noise.shape
        config = self.transformer.config
        h, w = h // config.patch, w // config.patch
        sharding = None if self.mesh is None else NamedSharding(self.mesh, _RESIDUAL)
        if axis_size(self.mesh, SEQUENCE) > 1:
            h, w = 1, h * w
        size = (1 + guided, F, h, w, config.dim)
        return DenoisingState(solvers.start(noise), jnp.zeros(size, jnp.float32, device=sharding) if cached else None)


def clean(prompt: str) -> str:
    """Text with broken encodings mended, HTML entities resolved (twice), and each run of white space as one space."""
    return " ".join(html.unescape(html.unescape(require_optional("ftfy").fix_text(prompt))).split())


class PromptTokenizer:
    """A text encoder's tokenizer.json, giving ids of one length."""

    def __init__(self, backend: tokenizers.Tokenizer, *, length: int = PROMPT_TOKENS, pad_token: str = "<pad>"):
        """Take over a tokenizer; its truncation and padding are replaced."""
        pad = backend.token_to_id(pad_token)
        if pad is None:
            raise CheckpointError(f"the text encoder's tokenizer has no token {pad_token!r} to pad with")
        backend.enable_truncation(length)
        backend.enable_padding(length=length, pad_id=pad, pad_token=pad_token)
        self._backend = backend

    def __call__(self, prompts: Sequence[str]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
        """Ids of cleaned prompts, int32, padded on the right, and how many of each are not padding.

        A longer prompt loses its end, but not the token that marks the end; a warning says what is lost.
        """
        texts = [clean(prompt) for prompt in prompts]
        encodings = self._backend.encode_batch(texts)
        for text, encoding in zip(texts, encodings, strict=True):
            if encoding.overflowing:
                kept = max(end for _, end in encoding.offsets)
                lost = textwrap.shorten(text[kept:], 80)
                _log.warning("prompt: the model reads %d tokens of it, and not its end: %r", len(encoding), lost)
        tokens = np.array([encoding.ids for encoding in encodings], np.int32)
        return tokens, np.array([sum(encoding.attention_mask) for encoding in encodings], np.int32)


class PromptStates:
    """States of prompts by the text encoder, of which the last few are kept."""

    def __init__(self, tokenizer: PromptTokenizer, call: ProgramCall):
        """Take a tokenizer, and the call of the text encoder on its tokens `[1, T]` and lengths `[1]`."""
        self.call = call
        self._tokenizer = tokenizer
        self._states: dict[str, Float32[Array, "1 T D"]] = {}

    def __call__(self, prompt: str) -> Float32[Array, "1 T D"]:
        """States of a prompt."""
        states = self._states.pop(prompt, None)
        if states is None:
            tokens, lengths = self._tokenizer([prompt])
            states = jax.block_until_ready(self.call(tokens, lengths))
        self._states[prompt] = states
        while len(self._states) > KEPT_PROMPTS:
            del self._states[next(iter(self._states))]
        return states
