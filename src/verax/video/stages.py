"""Stages of a run: each is described by shapes, from which its memory follows, and runs on the state of the run.

The memory plan and the run have the same list of stages (`run.stages_of`). A stage lists the calls of programs that it
makes. The plan adds up their memory, and the run makes them.
"""

from __future__ import annotations

import abc
import contextlib
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from verax.errors import InvalidParameterError
from verax.models.video_model import VideoModel
from verax.video.denoise import Conditions, DenoisingState
from verax.video.networks import Denoiser, PromptStates, Stages
from verax.video.outputs import RunReporter, Step
from verax.video.programs import Component, ProgramCall, floats
from verax.video.request import ResolvedRequest
from verax.video.resume import FinishedSegments
from verax.video.schedule import (
    Schedule,
    Tables,
    padded_rows,
    segment_schedule,
    steps_running_blocks,
    transformer_spans,
)

__all__ = [
    "DecodeClip",
    "DecodeSegment",
    "DenoiseSegment",
    "EncodeCondition",
    "EncodeGiven",
    "EncodeImage",
    "EncodeOverlap",
    "EncodePrompts",
    "JoinSegments",
    "PipelineParts",
    "PreviewSegment",
    "RunState",
    "Stage",
]


@dataclass(frozen=True)
class PipelineParts:
    """Networks, programs and rules that all stages of a pipeline share.

    Attributes:
        model: family, settings and rules of the checkpoint.
        stages: programs of encoders and VAE.
        denoisers: programs of each transformer.
        prompt_states: text encoder with the states of the last prompts.
    """

    model: VideoModel
    stages: Stages
    denoisers: tuple[Denoiser, ...]
    prompt_states: PromptStates

    @property
    def components(self) -> list[Component[Any]]:
        """All networks."""
        encoders = (self.stages.text_encoder, self.stages.image_encoder, self.stages.vae)
        transformers = [denoiser.transformer for denoiser in self.denoisers]
        return [network for network in (*encoders, *transformers) if network is not None]

    def frame(self, image: np.ndarray, request: ResolvedRequest) -> np.ndarray:
        """User's image as a frame, uint8 `[height, width, 3]`."""
        return self.model.rules.resize[self.model.settings.kind](image, request.height, request.width)


@dataclass
class RunState:
    """Results of the stages so far.

    Attributes:
        finished: finished segments, in the file of the request if it has one.
        texts: states of each prompt, `[G, T, D]`: the prompt and, with guidance, the negative prompt.
        image_states: states of the image, `[G, P, I]`; None if there is no image.
        image_condition: channels after the latents `[1, F, h, w, E]`; None if there is no image.
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
class Stage(abc.ABC):
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
    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Make the calls, and put their results into the state."""


@dataclass(frozen=True)
class EncodePrompts(Stage):
    """Encode the prompts of all segments, and the negative prompt."""

    name = "text"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Call of the text encoder, if there is a prompt to encode."""
        request = self.request
        needed = request.prompt is not None or (request.guided and request.negative_prompt_embeds is None)
        return (self.parts.prompt_states.call,) if needed else ()

    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Fill in `texts`."""
        request, encode = self.request, self.parts.prompt_states
        with reporter.stage(self.name, max(1, len(request.prompts)), self.segment) as step:
            if request.prompt_embeds is not None:
                cond = [jnp.asarray(request.prompt_embeds, jnp.float32)]
            else:
                cond = []
                for prompt in request.prompts[: len(request.segments(self.parts.model.geometry))]:
                    cond.append(encode(prompt))
                    step(len(cond))
            if not request.guided:
                state.texts = cond
                return
            if request.negative_prompt_embeds is not None:
                uncond = jnp.asarray(request.negative_prompt_embeds, jnp.float32)
            else:
                uncond = encode(request.negative_prompt)
        for states in cond:
            if states.shape != uncond.shape:
                raise InvalidParameterError(
                    f"prompt_embeds: {states.shape[1]} tokens, but the negative prompt has {uncond.shape[1]}"
                )
        state.texts = [jnp.concatenate([states, uncond]) for states in cond]


@dataclass(frozen=True)
class EncodeImage(Stage):
    """Encode the first frame with the image encoder, for a transformer that attends to its states."""

    name = "image"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Call of the image encoder."""
        return (self.parts.stages.image_call(),)

    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Fill in `image_states`."""
        request, parts = self.request, self.parts
        assert request.image is not None
        with reporter.stage(self.name, 1, self.segment):
            (call,) = self.calls
            (pixels_shape,) = call.arguments
            size = pixels_shape.shape[1]
            clip_pixels = parts.model.rules.clip_pixels
            assert clip_pixels is not None
            pixels = clip_pixels(request.image, parts.frame(request.image, request), size)
            states = jax.block_until_ready(call(pixels[None]))
            state.image_states = jnp.repeat(states, request.rows, axis=0)


@dataclass(frozen=True)
class EncodeCondition(Stage):
    """Encode the first frame of an image-to-video clip as channels after the latents."""

    name = "encode"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Call of `Stages.condition_call`."""
        request = self.request
        return (self.parts.stages.condition_call(request.num_frames, request.height, request.width),)

    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Fill in `image_condition`."""
        assert self.request.image is not None
        with reporter.stage(self.name, 1, self.segment):
            (call,) = self.calls
            image = self.parts.frame(self.request.image, self.request)
            state.image_condition = jax.block_until_ready(call(image[None]))


@dataclass(frozen=True)
class EncodeGiven(Stage):
    """Encode the image or the end of the clip with which the first segment begins, and the last image."""

    name = "encode"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Calls for the prefix, if there is one, and for the last image, if there is one."""
        request = self.request
        counts = [int(request.image is not None) + request.continued_frames, int(request.last_image is not None)]
        encode_call = self.parts.stages.encode_call
        return tuple(encode_call(count, request.height, request.width) for count in counts if count)

    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Fill in `prefix_latents` and `last_latents`; the user's clip begins the frames."""
        request, parts = self.request, self.parts
        calls = iter(self.calls)
        with reporter.stage(self.name, 1, self.segment):
            if request.image is not None:
                state.prefix_latents = next(calls)(parts.frame(request.image, request)[None, None])
            if request.video is not None:
                clip = np.stack([parts.frame(frame, request) for frame in request.video])
                state.frames.append(clip)
                state.prefix_latents = next(calls)(clip[None, -request.overlap_history :])
            if request.last_image is not None:
                state.last_latents = next(calls)(parts.frame(request.last_image, request)[None, None])
            jax.block_until_ready((state.prefix_latents, state.last_latents))


class _Span(NamedTuple):
    """Iterations of a segment that one transformer computes.

    Attributes:
        denoiser: programs of the transformer.
        guidance_scale: scale of guidance with this transformer.
        begin, end: first iteration, and the one after the last.
        context: call that makes the transformer's context.
        loop: call of the loop over iterations.
    """

    denoiser: Denoiser
    guidance_scale: float
    begin: int
    end: int
    context: ProgramCall
    loop: ProgramCall


@dataclass(frozen=True)
class DenoiseSegment(Stage):
    """Denoise the latents of a segment, unless the file of finished segments has them.

    Attributes:
        latents: latent frames of the segment.
        given: number of them at the beginning that are given, and are not denoised.
        last: latent frames after them that are given: the last image.
    """

    latents: int
    given: int
    last: int
    name = "denoise"

    @property
    def schedule(self) -> Schedule:
        """Iterations of the segment."""
        sizes = {"latents": self.latents, "given": self.given, "last": self.last}
        return segment_schedule(self.request, self.parts.model, **sizes)

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Calls of each span: context and loop."""
        return tuple(call for span in self.spans(self.schedule) for call in (span.context, span.loop))

    def spans(self, schedule: Schedule) -> list[_Span]:
        """Spans of the transformers. Compiles their context programs, whose results the loop takes."""
        request, parts = self.request, self.parts
        sample = floats(*parts.model.geometry.shape(self.latents + self.last, request.height, request.width))
        spans = []
        for index, begin, end in transformer_spans(schedule.timesteps, parts.model.settings.boundary_ratio):
            denoiser, scale = parts.denoisers[index], request.guidance_scales[index]
            context = denoiser.context_call(_text_states(request, parts), _image_states(request, parts))
            image_condition = _condition(request, parts)
            conditions = self._conditions(context.results(), image_condition, scale)
            loop = denoiser.call(sample, schedule.tables, conditions, request)
            spans.append(_Span(denoiser, scale, begin, end, context, loop))
        return spans

    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Fill in `segment_latents`, and add them to the clip and to the file of finished segments."""
        finished = state.finished.get(self.segment)
        if finished is None:
            latents = self._denoise(state, reporter)
            state.finished.add(latents)
        else:
            latents = jnp.asarray(finished)
        overlap = self.parts.model.geometry.latents(self.request.overlap_history)
        state.segment_latents = latents
        state.latents.append(latents[:, overlap:] if self.segment else latents)

    def _denoise(self, state: RunState, reporter: RunReporter) -> Float32[Array, "1 F h w C"]:
        request = self.request
        schedule = self.schedule
        spans = self.spans(schedule)

        # 1. The first sample: noise, and the given latents in their places.
        sample = self._noise()
        if self.given:
            assert state.prefix_latents is not None
            sample = jnp.concatenate([state.prefix_latents, sample[:, self.given :]], axis=1)
        if self.last:
            assert state.last_latents is not None
            sample = jnp.concatenate([sample, state.last_latents], axis=1)

        # 2. Iterations that skip the transformer's blocks.
        total = len(schedule.timesteps)
        tables = self._with_teacache(schedule, spans) if request.cache else schedule.tables
        computed = int(tables.run_blocks[:total].sum())

        # 3. The loop, span by span, with the weights of one transformer at a time. Time begins when the first are read.
        loop_state = spans[0].denoiser.start(sample, guided=request.guided, cached=request.cache is not None)
        note = f", {computed} of {total} steps computed" if computed < total else ""
        with contextlib.ExitStack() as held:
            held.enter_context(spans[0].denoiser.transformer.weights())
            with reporter.stage(self.name, total, self.segment, note) as step:
                for span in spans:
                    loop_state = self._run_span(span, loop_state, tables, state, step, every_step=reporter.every_step)
                    held.close()
        state.iterations, state.computed = state.iterations + total, state.computed + computed
        return loop_state.solver.sample[:, : self.latents] if self.last else loop_state.solver.sample

    def _run_span(
        self, span: _Span, loop_state: DenoisingState, tables: Tables, state: RunState, step: Step, *, every_step: bool
    ) -> DenoisingState:
        """State after the iterations of a span: one program call, or one for each iteration if it is to be reported."""
        request, parts = self.request, self.parts
        text = state.texts[min(self.segment, len(state.texts) - 1)]
        image = _or_zeros(state.image_states, _image_states(request, parts))
        image_condition = _or_zeros(state.image_condition, _condition(request, parts))
        count = 1 if every_step else span.end - span.begin
        with span.denoiser.transformer.weights():
            conditions = self._conditions(span.context(text, image), image_condition, span.guidance_scale)
            with span.loop.opened() as loop:
                for begin in range(span.begin, span.end, count):
                    # Numbers as arrays: arguments of the program.
                    loop_state = loop(loop_state, tables, conditions, np.int32(begin), np.int32(begin + count))
                    step(begin + count, latents=jax.block_until_ready(loop_state.solver.sample))
        return loop_state

    def _conditions(self, context: Any, image_condition: Any, guidance_scale: float) -> Conditions:
        """Conditions of arrays, or of the shapes of arrays."""
        request = self.request
        noisy = request.addnoise_condition > 0 and self.given > 0
        return Conditions(
            context=context,
            image_condition=image_condition,
            fps=self._fps,
            guidance_scale=np.array(guidance_scale, np.float32),
            prefix_mask=np.arange(self.latents + self.last) < self.given if noisy else None,
            added_noise=np.array(request.addnoise_condition, np.int32),
            key=jax.random.fold_in(jax.random.key(request.seed + 1), self.segment),
        )

    @property
    def _fps(self) -> np.ndarray | None:
        return np.array([self.request.fps], np.int32) if self.parts.denoisers[0].transformer.config.takes_fps else None

    def _noise(self) -> Float32[Array, "1 F h w C"]:
        request, parts = self.request, self.parts
        if request.latents is not None and self.segment == 0:
            return jnp.asarray(request.latents, jnp.float32).transpose(0, 2, 3, 4, 1)
        shape = parts.model.geometry.shape(self.latents, request.height, request.width)
        return parts.stages.noise(request.seed, self.segment, shape)

    def _with_teacache(self, schedule: Schedule, spans: list[_Span]) -> Tables:
        """Tables with the iterations that TeaCache computes; each transformer begins with computed ones."""
        request, parts = self.request, self.parts
        cache = parts.model.teacache(request.height * request.width)
        assert cache is not None
        chosen = []
        for span in spans:
            timesteps = schedule.timesteps[span.begin : span.end]
            embedded = span.denoiser.embed_time(timesteps, self._fps)
            chosen.append(
                steps_running_blocks(timesteps, lambda _, rows=embedded: rows, request.cache_threshold, cache)
            )
        return schedule.tables._replace(run_blocks=padded_rows(np.concatenate(chosen)))


@dataclass(frozen=True)
class DecodeSegment(Stage):
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

    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Fill in `colors`, and add to `frames`."""
        with reporter.stage(self.name, 1, self.segment) as step:
            (call,) = self.calls
            colors = call(state.segment_latents)
            fresh = _add_frames(self, state, colors[:, self.skip :])
            state.colors = colors
            step(1, frames=fresh)


@dataclass(frozen=True)
class EncodeOverlap(Stage):
    """Encode the last frames of a segment again, as the first of the next: the first of them is then a first frame."""

    name = "encode again"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Call of the encoder on the shared frames."""
        request = self.request
        frames = request.overlap_history, request.height, request.width
        return (self.parts.stages.encode_call(*frames, jnp.float32),)

    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Fill in `prefix_latents`."""
        assert state.colors is not None
        (call,) = self.calls
        state.prefix_latents = call(state.colors[:, -self.request.overlap_history :])


@dataclass(frozen=True)
class JoinSegments(Stage):
    """Join the segments so far, whose last latents begin the next segment; all are decoded together at the end."""

    name = "join"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """No calls."""
        return ()

    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Fill in `undecoded` and `prefix_latents`."""
        overlap = self.parts.model.geometry.latents(self.request.overlap_history)
        state.undecoded = jnp.concatenate(state.latents, axis=1)
        state.prefix_latents = state.undecoded[:, -overlap:]


@dataclass(frozen=True)
class PreviewSegment(DecodeSegment):
    """Decode a segment for the callback alone, where the frames of the clip are decoded at the end.

    Decoded by itself, a segment has its first latent taken for a single frame. That frame and a few after it are among
    those that are left out.
    """

    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Report the frames, and change nothing."""
        with reporter.stage(self.name, 1, self.segment) as step:
            (call,) = self.calls
            colors = call(state.segment_latents)
            step(1, frames=np.asarray(self.parts.stages.finish(colors[:, self.skip :])))


@dataclass(frozen=True)
class DecodeClip(Stage):
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

    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Add all frames of the clip, and clear `undecoded`."""
        with reporter.stage(self.name, 1, self.segment) as step:
            (call,) = self.calls
            colors = call(state.undecoded)
            fresh = _add_frames(self, state, colors[:, self.request.continued_frames :])
            state.undecoded = None
            step(1, frames=fresh[-self.latest * self.parts.model.geometry.frames_per_latent :])


def _text_states(request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct:
    tokens = parts.model.settings.text_tokens if request.prompt_embeds is None else request.prompt_embeds.shape[1]
    return floats(request.rows, tokens, parts.model.geometry.text_width)


def _image_states(request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct | None:
    if parts.stages.image_encoder is None:
        return None
    config = parts.stages.image_encoder.config
    return floats(request.rows, 1 + config.num_patches, config.hidden_size)


def _condition(request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct | None:
    """Shape of the channels after the latents; None for models without them."""
    channels, geometry = parts.model.conditioning.channels, parts.model.geometry
    *size, _ = geometry.shape(geometry.latents(request.num_frames), request.height, request.width)
    return floats(*size, channels) if channels else None


def _or_zeros(array: Array | None, shape: jax.ShapeDtypeStruct | None) -> Array | None:
    """Array, or zeros of a shape in the place of an array that the request does not have."""
    return jnp.zeros(shape.shape, shape.dtype) if array is None and shape is not None else array


def _decode_call(stage: Stage, latents: int) -> ProgramCall:
    request, parts = stage.request, stage.parts
    return parts.stages.decode_call(floats(*parts.model.geometry.shape(latents, request.height, request.width)))


def _add_frames(stage: Stage, state: RunState, colors: Float32[Array, "1 T H W 3"]) -> np.ndarray:
    """Add frames to the clip in the request's output type; the frames as bytes."""
    fresh = np.asarray(stage.parts.stages.finish(colors))
    as_floats = stage.request.output_type == "np"
    state.frames.append(np.asarray(colors[0]) / 2 + 0.5 if as_floats else fresh)
    return fresh
