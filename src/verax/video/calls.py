"""Stages of a run: each is described by shapes, from which its memory follows, and runs on the state of the run.

The memory plan and the run have the same list of stages (`run.stages_of`). A stage lists the calls of programs
that it makes. The plan adds up their memory, and the run makes them.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from verax.errors import InvalidParameterError
from verax.models.wan.model import WanConfig
from verax.video.denoise import Tables
from verax.video.geometry import LatentGeometry
from verax.video.outputs import Reporter
from verax.video.programs import Component, ProgramCall, floats
from verax.video.prompt import PromptStates
from verax.video.request import ResolvedRequest
from verax.video.resume import FinishedSegments
from verax.video.rules import ReferenceRules
from verax.video.settings import VideoSettings
from verax.video.stages import Stages
from verax.video.transformers import TransformerSchedule

__all__ = [
    "Conditioning",
    "DecodeClip",
    "DecodeSegment",
    "EncodeImage",
    "EncodeOverlap",
    "EncodePrompts",
    "JoinSegments",
    "PipelineParts",
    "PreviewSegment",
    "RunState",
    "SegmentSchedule",
    "StageCall",
]


class SegmentSchedule(NamedTuple):
    """Iterations of a segment.

    Attributes:
        tables: tables of the denoising loop; all iterations run the transformer's blocks.
        timesteps: timesteps as the transformer sees them, of all frames or of each frame.
    """

    tables: Tables
    timesteps: Int32[np.ndarray, "R *F"]


class Conditioning(Protocol):
    """Conditioning of one kind of model."""

    takes_image: bool
    """True if the transformer has image channels behind the latents; it may also attend to an image's states."""

    def check(self, request: ResolvedRequest, settings: VideoSettings) -> None:
        """Raise InvalidParameterError for options that this kind of model does not have."""
        ...

    def stages(self, request: ResolvedRequest, parts: PipelineParts) -> list[StageCall]:
        """Stages that encode images and clips into latents."""
        ...

    def image_condition(self, request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct | None:
        """Shape of the channels behind the latents, float32 `[1, F, h, w, E]`, or None."""
        ...

    def prefix(self, request: ResolvedRequest, geometry: LatentGeometry, segment: int) -> int:
        """Number of latent frames with which a segment begins, and which are not denoised."""
        ...

    def schedule(
        self, request: ResolvedRequest, rules: ReferenceRules, *, latents: int, prefix: int, last: int
    ) -> SegmentSchedule:
        """Iterations of a segment.

        Args:
            request: checked request.
            rules: rules of the reference.
            latents: latent frames of the segment.
            prefix: how many of them are not denoised.
            last: latent frames after them, which are not denoised either.
        """
        ...


@dataclass(frozen=True)
class PipelineParts:
    """Models, programs and rules of a pipeline: all that its stages share.

    Attributes:
        settings: kind and defaults of the checkpoint.
        geometry: sizes of its latents.
        rules: rules of the reference.
        conditioning: strategy of its kind of model.
        stages: programs of encoders and VAE.
        transformers: programs of the transformers.
        prompt_states: text encoder with the states of the last prompts.
    """

    settings: VideoSettings
    geometry: LatentGeometry
    rules: ReferenceRules
    conditioning: Conditioning
    stages: Stages
    transformers: TransformerSchedule
    prompt_states: PromptStates

    @property
    def config(self) -> WanConfig:
        """Configuration of the transformers."""
        return self.transformers.denoisers[0].transformer.config

    @property
    def components(self) -> list[Component]:
        """All models."""
        encoders = (self.stages.text_encoder, self.stages.image_encoder, self.stages.vae)
        transformers = [denoiser.transformer for denoiser in self.transformers.denoisers]
        return [one for one in (*encoders, *transformers) if one is not None]

    def frame(self, image: np.ndarray, request: ResolvedRequest) -> np.ndarray:
        """User's image as a frame, uint8 `[height, width, 3]`."""
        return self.rules.resize[self.settings.kind](image, request.height, request.width)


@dataclass
class RunState:
    """Results of the stages so far.

    Attributes:
        finished: finished segments, in the file of the request if it has one.
        texts: states of each prompt, `[G, T, D]`: the prompt and, with guidance, the negative prompt.
        image_states: states of the image, `[G, P, I]`; None if there is no image.
        image_condition: channels behind the latents `[1, F, h, w, E]`; None if there is no image.
        prefix_latents: latents with which the next segment begins, `[1, F, h, w, C]`, or None.
        last_latents: latents with which the last segment ends, or None.
        segment_latents: latents of the last segment that was denoised.
        latents: latents of each segment, without those that it shares with the segment before.
        undecoded: latents of the clip so far, if they are to be decoded together.
        colors: frames of the last segment that was decoded, float32 `[1, T, H, W, 3]` from -1 to 1.
        frames: frames of the clip so far, in the request's output type.
        iterations: iterations so far.
        computed: iterations that ran the transformer's blocks.
    """

    finished: FinishedSegments
    texts: list[Array] = field(default_factory=list)
    image_states: Array | None = None
    image_condition: Array | None = None
    prefix_latents: Array | None = None
    last_latents: Array | None = None
    segment_latents: Array | None = None
    latents: list[Array] = field(default_factory=list)
    undecoded: Array | None = None
    colors: Array | None = None
    frames: list[np.ndarray] = field(default_factory=list)
    iterations: int = 0
    computed: int = 0


@dataclass(frozen=True)
class StageCall(abc.ABC):
    """Stage of a run, of one segment or of the whole clip.

    Attributes:
        request: request that is run.
        parts: parts of the pipeline.
        segment: segment, counted from 0; the first for stages of the whole clip.
    """

    request: ResolvedRequest
    parts: PipelineParts
    segment: int
    name: ClassVar[str]
    """Name in plans and progress."""

    @property
    @abc.abstractmethod
    def calls(self) -> tuple[ProgramCall, ...]:
        """Calls of programs that the stage makes, by shapes."""

    @abc.abstractmethod
    def run(self, state: RunState, reporter: Reporter) -> None:
        """Make the calls, and put their results into the state."""


@dataclass(frozen=True)
class EncodePrompts(StageCall):
    """Encode the prompts of all segments, and the negative prompt."""

    name = "text"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Call of the text encoder, if there is a prompt to encode."""
        request = self.request
        needed = request.prompt is not None or (request.guided and request.negative_prompt_embeds is None)
        return (self.parts.prompt_states.call,) if needed else ()

    def run(self, state: RunState, reporter: Reporter) -> None:
        """Fill in `texts`."""
        request, encode = self.request, self.parts.prompt_states
        with reporter.stage(self.name, max(1, len(request.prompts)), self.segment) as step:
            if request.prompt_embeds is not None:
                cond = [jnp.asarray(request.prompt_embeds, jnp.float32)]
            else:
                cond = []
                for prompt in request.prompts[: len(request.segments(self.parts.geometry))]:
                    cond.append(encode(prompt))
                    step(len(cond))
            if not request.guided:
                state.texts = cond
                return
            if request.negative_prompt_embeds is not None:
                uncond = jnp.asarray(request.negative_prompt_embeds, jnp.float32)
            else:
                uncond = encode(request.negative_prompt)
        for one in cond:
            if one.shape != uncond.shape:
                raise InvalidParameterError(
                    f"prompt_embeds: {one.shape[1]} tokens, but the negative prompt has {uncond.shape[1]}"
                )
        state.texts = [jnp.concatenate([one, uncond]) for one in cond]


@dataclass(frozen=True)
class EncodeImage(StageCall):
    """Encode the first frame with the image encoder, for a transformer that attends to its states."""

    name = "image"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Call of the image encoder."""
        return (self.parts.stages.image_call(),)

    def run(self, state: RunState, reporter: Reporter) -> None:
        """Fill in `image_states`."""
        request, parts = self.request, self.parts
        assert request.image is not None
        with reporter.stage(self.name, 1, self.segment):
            (call,) = self.calls
            (pixels_shape,) = call.arguments
            size = pixels_shape.shape[1]
            pixels = parts.rules.clip_pixels(request.image, parts.frame(request.image, request), size)
            states = jax.block_until_ready(call(pixels[None]))
            state.image_states = jnp.repeat(states, request.rows, axis=0)


@dataclass(frozen=True)
class DecodeSegment(StageCall):
    """Decode a segment, and add its frames to the clip, without those that it shares with what came before.

    Attributes:
        latents: latent frames of the segment.
    """

    latents: int
    name = "decode"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Call of the decoder on the segment."""
        return (_decode_call(self, self.latents),)

    @property
    def skip(self) -> int:
        """Frames at the beginning that are there already."""
        return self.request.overlap_history if self.segment else self.request.continued_frames

    def run(self, state: RunState, reporter: Reporter) -> None:
        """Fill in `colors`, and add to `frames`."""
        with reporter.stage(self.name, 1, self.segment) as step:
            (call,) = self.calls
            colors = call(state.segment_latents)
            fresh = _add_frames(self, state, colors[:, self.skip :])
            state.colors = colors
            step(1, frames=fresh)


@dataclass(frozen=True)
class EncodeOverlap(StageCall):
    """Encode the last frames of a segment anew, as the first of the next: the first of them is then a first frame."""

    name = "encode again"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Call of the encoder on the shared frames."""
        request = self.request
        frames = request.overlap_history, request.height, request.width
        return (self.parts.stages.encode_call(*frames, jnp.float32),)

    def run(self, state: RunState, reporter: Reporter) -> None:
        """Fill in `prefix_latents`."""
        assert state.colors is not None
        (call,) = self.calls
        state.prefix_latents = call(state.colors[:, -self.request.overlap_history :])


@dataclass(frozen=True)
class JoinSegments(StageCall):
    """Join the segments so far, whose last latents begin the next segment; all are decoded together at the end."""

    name = "join"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """No calls."""
        return ()

    def run(self, state: RunState, reporter: Reporter) -> None:
        """Fill in `undecoded` and `prefix_latents`."""
        overlap = self.parts.geometry.latents(self.request.overlap_history)
        state.undecoded = jnp.concatenate(state.latents, axis=1)
        state.prefix_latents = state.undecoded[:, -overlap:]


@dataclass(frozen=True)
class PreviewSegment(DecodeSegment):
    """Decode a segment for the callback alone, where the frames of the clip are decoded at the end.

    Decoded by itself, a segment has its first latent taken for a single frame. That frame and a few after it are among
    those that are left out.
    """

    def run(self, state: RunState, reporter: Reporter) -> None:
        """Report the frames, and change nothing."""
        with reporter.stage(self.name, 1, self.segment) as step:
            (call,) = self.calls
            colors = call(state.segment_latents)
            step(1, frames=np.asarray(self.parts.stages.finish(colors[:, self.skip :])))


@dataclass(frozen=True)
class DecodeClip(StageCall):
    """Decode the joined latents of all segments.

    Attributes:
        latents: latent frames of the clip.
        latest: latent frames of the last segment, whose frames the callback gets.
    """

    latents: int
    latest: int
    name = "decode"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Call of the decoder on the clip."""
        return (_decode_call(self, self.latents),)

    def run(self, state: RunState, reporter: Reporter) -> None:
        """Add all frames of the clip, and clear `undecoded`."""
        with reporter.stage(self.name, 1, self.segment) as step:
            (call,) = self.calls
            colors = call(state.undecoded)
            fresh = _add_frames(self, state, colors[:, self.request.continued_frames :])
            state.undecoded = None
            step(1, frames=fresh[-self.latest * self.parts.geometry.frames_per_latent :])


def _decode_call(stage: StageCall, latents: int) -> ProgramCall:
    request, parts = stage.request, stage.parts
    return parts.stages.decode_call(floats(*parts.geometry.shape(latents, request.height, request.width)))


def _add_frames(stage: StageCall, state: RunState, colors: Float32[Array, "1 T H W 3"]) -> np.ndarray:
    """Add frames to the clip in the request's output type; the frames as bytes."""
    fresh = np.asarray(stage.parts.stages.finish(colors))
    as_floats = stage.request.output_type == "np"
    state.frames.append(np.asarray(colors[0]) / 2 + 0.5 if as_floats else fresh)
    return fresh
