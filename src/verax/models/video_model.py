"""`VideoModel`: what the video engine asks of a family of models, and the records in which a family answers.

A family is a subclass of `VideoModel`, which `verax.models.register_video_model` adds under the class
name in the config.json of its transformer. The engine runs it from prompt and pictures to frames, plans its memory and
divides it over devices, and names no family. Diffusers' pipelines have the same seams: geometry of the latents,
conditioning, schedule, transformer, VAE.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Num
from msgspec import Meta

from verax import ops
from verax.errors import CheckpointError
from verax.fields import Epsilon, Finite, Positive, Size, file_of, read_fields
from verax.ops.attention import chunked_attention

AttentionFn = Callable[[Array, Array, Array], Array]
"""Queries `[B, T, N, H]`, keys and values `[B, S, N, H]` to float32 `[B, T, N, H]`, without a mask."""

ATTENTION: Mapping[str, AttentionFn] = {
    "auto": partial(ops.attention, causal=False),
    "standard": partial(ops.attention.reference, causal=False),
    "chunked": partial(chunked_attention, causal=False),
    "flash": partial(ops.attention.restricted("flash"), causal=False),
}
"""Attention by name.

- `auto`: the choice of `ops.attention`.
- `standard`: all scores written out; memory is `O(T S)`.
- `chunked`: all scores of 256 queries at a time.
- `flash`: an implementation of `ops.attention` that writes no scores; an error where there is none.
"""


@dataclass(frozen=True)
class LatentGeometry:
    """Sizes that turn frames and pixels into latents and tokens.

    Attributes:
        frames_per_latent: frames of a latent frame; the first latent frame is one frame.
        pixels_per_latent: height and width of a latent in pixels.
        pixels_per_token: height and width of a transformer's token in pixels.
        text_width: width of the text encoder's states.
    """

    frames_per_latent: int
    pixels_per_latent: int
    pixels_per_token: int
    channels: int
    text_width: int

    def latents(self, frames: int) -> int:
        """Number of latent frames of a number of frames."""
        return (frames - 1) // self.frames_per_latent + 1

    def shape(self, latents: int, height: int, width: int) -> tuple[int, int, int, int, int]:
        """Shape `[1, F, h, w, C]` of the latents of a clip, whose height and width are in pixels."""
        pixels = self.pixels_per_latent
        return 1, latents, height // pixels, width // pixels, self.channels


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """Kind and defaults of a checkpoint; the fields of its `verax.json`."""

    kind: str = "t2v"
    """Key of the family's conditionings."""
    height: Size = 544
    width: Size = 960
    num_frames: Size = 97
    """Frames of a clip, and of a segment of a longer one."""
    num_inference_steps: Size = 30
    guidance_scale: Finite = 6.0
    guidance_scale_2: Finite | None = None
    """Scale with the second of two transformers; `guidance_scale` if None."""
    boundary_ratio: Epsilon | None = None
    """Share of the noise levels from which the first of two transformers is used; None for one transformer."""
    shift: Positive = 8.0
    solver: Annotated[Literal["unipc", "dpm++", "euler", "lcm"], Meta(description="unipc, dpm++, euler or lcm")] = (
        "unipc"
    )
    fps: Size = 24
    negative_prompt: str = ""
    text_tokens: Size = 512
    """Tokens of a prompt's states, padding included: all of them are attended to."""
    needs_image: bool = True
    """True if an image-to-video model was trained for nothing else, so that every request must have an image."""

    def updated(self, own: Mapping[str, Any], kinds: Mapping[str, Any]) -> VideoSettings:
        """Settings with the fields of a checkpoint's `verax.json`, which are preferred to all others.

        `own`: contents of the file; empty without one.
        """
        known = [field.name for field in fields(VideoSettings)]
        for name, value in own.items():
            if name not in known:
                raise CheckpointError(
                    f"{file_of(own)}: {name} is {value!r}; expected an object with some of {', '.join(known)}"
                )
        if (kind := own.get("kind", self.kind)) not in tuple(kinds):
            raise CheckpointError(f"{file_of(own)}: kind: expected one of {', '.join(kinds)}, got {kind!r}")
        return replace(self, **read_fields(own, VideoSettings)) if own else self


class Pictures(NamedTuple):
    """Pictures of a request in the size of its frames, from -1 to 1, or as bytes; None for those that it does not have.

    `image`, `last_image`: first and last frame. `video`: control clip. `mask`: where it is to be replaced, black for
    its pixels and white for new ones. `references`: pictures of things and people that the clip shows.
    """

    image: Num[Array, "1 H W 3"] | None = None
    last_image: Num[Array, "1 H W 3"] | None = None
    video: Num[Array, "1 T H W 3"] | None = None
    mask: Num[Array, "1 T H W 3"] | None = None
    references: Num[Array, "1 R H W 3"] | None = None


ConditionEncoder = Callable[..., Float[Array, "1 F h w E"]]
"""`encode(vae, pictures, frames=, chunk=)`: condition of a clip of `frames` frames from its `Pictures`, from -1 to 1,
by a VAE that takes `chunk` latents at a time. References are latent frames before the clip's. Traced in a program."""


@dataclass(frozen=True)
class Conditioning:
    """Conditioning of a kind of model: how the pictures and clips of a request enter it. Text always does.

    Attributes:
        channels: channels of the condition that `encode` makes; they follow the latents in the transformer's input,
            and are zeros for a request without an image.
        encode: function that makes them from pictures; None if there are no channels.
        control_layers: layers that the condition is added to, each with a scale, where it does not follow the latents
            but enters the transformer's context (VACE). A request may then have a control clip, a mask and references.
        takes_last_image: True if a request may have a last frame.
        needs_last_image: True if every request must have one. The image encoder then sees both.
        given_frames: True if an image becomes the first latent frame, which is not denoised.
        forcing: True for diffusion forcing: each latent frame has a noise level of its own. A clip may then continue
            another one, end with a given image, and be longer than a segment.
    """

    channels: int = 0
    encode: ConditionEncoder | None = None
    control_layers: int = 0
    takes_last_image: bool = False
    needs_last_image: bool = False
    given_frames: bool = False
    forcing: bool = False

    @property
    def takes_image(self) -> bool:
        """True if a request may have an image."""
        return (self.encode is not None and not self.control_layers) or self.given_frames


Resize = Callable[[np.ndarray, int, int], np.ndarray]
"""`resize(image, height, width)`: an image uint8 `[H, W, 3]` as a frame uint8 `[height, width, 3]`."""

FrameSize = Callable[[tuple[int, int], tuple[int, int]], tuple[int, int]]
"""`frame_size(picture, usual)`: height and width of a clip that begins with a picture, or is controlled by one, of a
height and width; `usual` are a clip's without one. All in pixels."""

ClipPixels = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""`clip_pixels(image, frame, size)`: the image encoder's input float32 `[size, size, 3]`, of the user's image and the
frame that `Resize` made of it."""

References = Callable[[Sequence[np.ndarray], int, int], np.ndarray]
"""`references(images, height, width)`: images uint8 `[H, W, 3]` as float32 `[R, height, width, 3]` from -1 to 1."""

Sigmas = Callable[[int, float], np.ndarray]
"""`sigmas(steps, shift)`: noise level of each step, float64 `[N]`, falling from about 1; the clean clip has 0."""


def flow_sigmas(steps: int, shift: float, *, begin: float, end: float) -> Float[np.ndarray, "N"]:
    """Noise levels evenly spaced between `begin` and `end`, the last left out, and shifted towards noise.

    `shift`: 1 for even spacing; more spends more steps at high noise: sigma becomes `shift s / (1 + (shift - 1) s)`.
    `begin`, `end`: first and last sigma before shifting.
    """
    return shift_sigmas(np.linspace(begin, end, steps + 1)[:-1], shift)


def shift_sigmas(sigmas: Float[np.ndarray, "N"], shift: float) -> Float[np.ndarray, "N"]:
    """Noise levels shifted towards noise by `shift`: `shift s / (1 + (shift - 1) s)`."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


@dataclass(frozen=True)
class ReferenceRules:
    """Rules of a published pipeline, where pipelines of a family differ. Mappings have a value for each kind.

    Attributes:
        name: name of the reference, as `VideoPipeline(reference=...)` takes it.
        sigmas: noise levels, but for the solvers that `other_sigmas` has others for, by their names.
        frame_sizes: size of frames after the picture's. Frames of kinds that are not listed have the usual size, turned
            if the picture is upright and they are not.
        clip_pixels: input of the image encoder; None for families without one.
        references: reference pictures as frames, in the order of their latent frames; None for families without them.
        negative_prompts: negative prompt of a request without one; "" for kinds that are not listed.
        decode_whole_clip: True if the segments of a long clip share latents, and are decoded together at the end.
            False if they share frames: each segment is decoded, and its last frames are encoded again as the first
            frames of the next segment, as in training.
        causal_attention: True if attention is block-causal by default as soon as there are blocks.
        keep_partial_blocks: True if all given latents stay unchanged. False if only those that fill whole blocks do,
            and the others are taken for noise.
    """

    name: str
    sigmas: Sigmas
    resize: Mapping[str, Resize]
    frame_sizes: Mapping[str, FrameSize] = field(default_factory=dict)
    other_sigmas: Mapping[str, Sigmas] = field(default_factory=dict)
    clip_pixels: ClipPixels | None = None
    references: References | None = None
    negative_prompts: Mapping[str, str] = field(default_factory=dict)
    decode_whole_clip: bool = False
    causal_attention: bool = False
    keep_partial_blocks: bool = True


class TeaCache(NamedTuple):
    """Measure of the distance between steps by which TeaCache skips some, see `video.caches`.

    `polynomial`: coefficients, the highest power first. `kept`: number of first steps that always run.
    """

    polynomial: tuple[float, ...]
    kept: int


class Control(NamedTuple):
    """Condition that is added to layers of a transformer.

    `latents`: the result of `Conditioning.encode`. `scale`: scale of each of the `control_layers`.
    """

    latents: Float[Array, "1 F h w E"]
    scale: Float[Array | np.ndarray, "L"]


@runtime_checkable
class VideoTransformer(Protocol):
    """A transformer of latents, called in parts: what no step changes, the embedding of time, and the blocks between.

    Its `config` has `dim` (width of a token), `num_layers` (number of blocks), `num_heads` (heads of attention, which
    devices divide), `patch` (height and width of a token's patch of the latents), `takes_fps` (True if the frames per
    second are an input) and `control_layers` (layers of its `Control`, 0 without).
    """

    def encode_context(self, text: Float[Array, "B S E"], image: Float[Array, "B P I"] | None = None) -> Any:
        """Tree of arrays `[B, ...]` that all steps share, such as cross-attention keys, of states of text and image.

        Where the conditioning has `control_layers`, a third argument is the `Control` of the clip, which the tree has
        for each row.
        """
        ...

    def embed_time(self, timesteps: Num[Array, "B *F"], fps: Int[Array, "B"] | None = None) -> tuple[Array, Array]:
        """Embedding of time, and its projection that modulates the blocks; of all frames, or of each frame."""
        ...

    def embed_latents(self, latents: Float[Array, "B F hp wp C"]) -> Float[Array, "B F h w D"]:
        """Tokens: the residual stream before the blocks."""
        ...

    def run_blocks(
        self,
        x: Float[Array, "B F h w D"],
        e0: Array,
        context: Any,
        *,
        causal_block_size: int | None = None,
        attention: str = "auto",
        sequence: SequenceParallel | None = None,
    ) -> Float[Array, "B F h w D"]:
        """Residual stream after the blocks.

        `causal_block_size`: frames of a block: a frame sees its own block and earlier ones; None: all see all.
        `sequence`: division of the tokens over devices, of which `x` is one device's part; None: `x` has all tokens.
        """
        ...

    def unembed(self, x: Float[Array, "B F h w D"], e: Array) -> Float[Array, "B F hp wp O"]:
        """Velocity of each latent, from the residual stream and the embedding of time."""
        ...


@runtime_checkable
class VideoAutoencoder(Protocol):
    """A VAE, causal in time.

    Its `config` has `frames_per_latent` (frames of each latent after the first, which is one frame),
    `pixels_per_latent` (height and width of a latent in pixels) and `halo` (latents at each side of a tile that its
    pixels depend on).
    """

    def encode(self, frames: Float[Array, "B T H W C"], *, chunk: int | None = None) -> Float[Array, "B F h w Z"]:
        """Normalised latents of frames from -1 to 1, `chunk` latents at a time."""
        ...

    def decode(
        self,
        latents: Float[Array, "B F h w Z"],
        *,
        chunk: int | None = None,
        tile: tuple[int, int] | None = None,
        axes: tuple[str, ...] = (),
    ) -> Float[Array, "B T H W C"]:
        """Frames from -1 to 1 of normalised latents.

        `chunk`: latents at a time. `tile`: height and width in latents that are decoded at a time; None for all.
        `axes`: axes of the mesh whose devices divide the tiles, inside `jax.shard_map` over them.
        """
        ...


class Network(NamedTuple):
    """One network of a video model, whose instances are `module(config, dtype=..., rngs=...)`.

    Text encoders map tokens `[B, T]` and lengths `[B]` to states `[B, T, E]`. Image encoders map pixels `[B, H, W, 3]`
    to states `[B, 1 + P, I]`, and their configurations have `image_size`, `num_patches` and `hidden_size`.

    `module`: class, whose instances' paths are the keys of the checkpoint.
    """

    folder: str
    name: str
    module: type[Any]
    config: Any


class TinyDecoderKind(NamedTuple):
    """Small decoder of a family's latents that was published by itself.

    `stem`: stem of its published file. `module`: class, whose instances' paths are the file's keys. `config`: function
    from the shapes of a file's weights, and its path for errors, to the configuration, with the sizes of the latents.
    """

    stem: str
    module: type[Any]
    config: Callable[[Mapping[str, tuple[int, ...]], Path], Any]


@dataclass(frozen=True)
class VideoModel(abc.ABC):
    """A checkpoint of a family: its networks, and how they make a clip.

    Attributes:
        references: rules of the published pipelines that the family can follow.
        settings: kind and defaults of the checkpoint.
        rules: rules of the chosen reference.
        geometry: sizes of the latents.
        conditioning: conditioning of its kind.
        text_encoder, image_encoder, transformers, vae: networks. The second of two transformers takes over where noise
            is low (`settings.boundary_ratio`).
        tiny_decoder: small decoder of its latents; None if there is none.
        name: name of the checkpoint's folder or repository.
        folder: the checkpoint's folder; None for a model that is described only.
    """

    references: ClassVar[Mapping[str, ReferenceRules]]
    settings: VideoSettings
    rules: ReferenceRules
    geometry: LatentGeometry
    conditioning: Conditioning
    text_encoder: Network
    image_encoder: Network | None
    transformers: tuple[Network, ...]
    vae: Network
    tiny_decoder: TinyDecoderKind | None = None
    name: str = ""
    folder: Path | None = None

    @classmethod
    @abc.abstractmethod
    def from_folder(cls, folder: Any, *, kind: str | None = None, rules: ReferenceRules | None = None) -> VideoModel:
        """Read the settings of a checkpoint; no weights.

        Args:
            folder: open checkpoint (`checkpoint.video.folder.VideoFolder`).
            kind: kind of model; None to go by the folder.
            rules: one of `references`; None for the rules of the checkpoint's authors.

        Raises:
            CheckpointError: if a network's settings are missing or damaged.
            UnsupportedModelError: for settings that are not implemented, or networks that do not fit each other.
            InvalidParameterError: for an unknown kind, or one that does not fit the checkpoint.
        """

    def teacache(self, pixels: int) -> TeaCache | None:
        """Measure of TeaCache for frames of this many pixels; None for a family without coefficients."""
        return None

    def magcache(self, pixels: int, *, has_image: bool) -> Float[np.ndarray, "N G"] | None:
        """Published curve of MagCache for frames of this many pixels; None if there is none.

        `has_image`: True for a clip that begins with an image. Rows are steps; columns are the prompt and the negative
        prompt.
        """
        return None


@dataclass(frozen=True)
class SequenceParallel:
    """Division of each frame's tokens over an axis of a mesh; its methods run inside `jax.shard_map`.

    The method is Ulysses (Jacobs et al., 2023, arXiv:2309.14509): only self-attention needs the other devices. An
    all-to-all before it gives a device all tokens of some heads, and one after it gives the tokens back. Frames stay
    whole in number and order, and so do their times and the ranges of keys of block-causal attention.

    A device's part is a clip of one row of tokens, `[B, F, 1, s, D]`, in which all layers but self-attention and the
    rotary positions work unchanged. `s` is `height * width / n`, and the n devices of the axis divide the heads too.

    `height`, `width`: tokens of a whole frame.
    """

    axis: str
    height: int
    width: int

    def divide(self, latents: Float[Array, "B F hp wp C"]) -> Float[Array, "B F p sp C"]:
        """This device's part of the latents, as one row of patches of p x p."""
        B, F, hp, _, C = latents.shape
        p = hp // self.height
        grid = latents.reshape(B, F, self.height, p, self.width, p, C).transpose(0, 1, 3, 2, 4, 5, 6)
        return self._own(grid.reshape(B, F, p, -1, C), axis=3)

    def gather(self, latents: Float[Array, "B F p sp C"]) -> Float[Array, "B F hp wp C"]:
        """The latents of whole frames from all devices' parts: the inverse of `divide`."""
        B, F, p, _, C = latents.shape
        row = lax.all_gather(latents, self.axis, axis=3, tiled=True)
        grid = row.reshape(B, F, p, self.height, self.width, p, C).transpose(0, 1, 3, 2, 4, 5, 6)
        return grid.reshape(B, F, self.height * p, self.width * p, C)

    def rotary(self, table: Float[Array, "T H"]) -> Float[Array, "t H"]:
        """Rows of a rotary table of all tokens, in the order (frame, row, column), that are this device's."""
        frames = table.reshape(-1, self.height * self.width, table.shape[-1])
        return self._own(frames, axis=1).reshape(-1, table.shape[-1])

    def attention(self, attend: AttentionFn) -> AttentionFn:
        """`attend` among the tokens of all devices, each of which computes some of the heads."""

        def attend_all(
            q: Float[Array, "B t N H"], k: Float[Array, "B t N H"], v: Float[Array, "B t N H"]
        ) -> Float[Array, "B t N H"]:
            out = attend(*map(self._heads_for_tokens, (q, k, v)))
            # The output's projection rounds to the weights' dtype, which is the values', in any case.
            return self._tokens_for_heads(out.astype(v.dtype))

        return attend_all

    def _heads_for_tokens(self, x: Float[Array, "B t N H"]) -> Float[Array, "B T M H"]:
        B, _, N, H = x.shape
        n = lax.axis_size(self.axis)
        frames = x.reshape(B, -1, self.height * self.width // n, N, H)
        return lax.all_to_all(frames, self.axis, split_axis=3, concat_axis=2, tiled=True).reshape(B, -1, N // n, H)

    def _tokens_for_heads(self, x: Float[Array, "B T M H"]) -> Float[Array, "B t N H"]:
        B, _, M, H = x.shape
        frames = x.reshape(B, -1, self.height * self.width, M, H)
        own = lax.all_to_all(frames, self.axis, split_axis=2, concat_axis=3, tiled=True)
        return own.reshape(B, -1, M * lax.axis_size(self.axis), H)

    def _own(self, x: Array, axis: int) -> Array:
        size = x.shape[axis] // lax.axis_size(self.axis)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * size, size, axis)
