"""A run: the stages of a request, one after the other, on the state of the run.

The memory plan and the run have the same list of stages (`stages_of`). A stage has the calls of programs that it makes,
described by shapes, and the function that makes them: the plan adds up the memory of the calls, and the run makes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from verax.errors import VeraxError
from verax.models.images import to_signed
from verax.models.video_model import Control, Pictures, VideoModel
from verax.video.caches import cached_steps, magnitude_ratio
from verax.video.denoise import Conditions, DenoisingState, enlarged, half_size_noise
from verax.video.networks import Denoiser, PromptStates, Stages
from verax.video.outputs import RunReporter, Step, StopRunError, VideoOutput, channels_first
from verax.video.programs import Component, ProgramCall, floats, random_key
from verax.video.request import ResolvedRequest
from verax.video.resume import FinishedSegments
from verax.video.schedule import (
    Schedule,
    padded_rows,
    segment_schedules,
    transformer_spans,
)


@dataclass(frozen=True)
class PipelineParts:
    """Networks, programs and rules that all stages of a pipeline share.

    `model`: family, settings and rules of the checkpoint.
    """

    model: VideoModel
    stages: Stages
    denoisers: tuple[Denoiser, ...]
    prompt_states: PromptStates

    @property
    def components(self) -> list[Component[Any]]:
        """All networks."""
        stages = self.stages
        decoder = None if stages.decoder is stages.vae else stages.decoder
        transformers = [denoiser.transformer for denoiser in self.denoisers]
        every = (stages.text_encoder, stages.image_encoder, stages.vae, decoder, *transformers)
        return [network for network in every if network is not None]

    def frame(self, image: np.ndarray, request: ResolvedRequest) -> np.ndarray:
        """User's image as a frame, uint8 `[height, width, 3]`."""
        return self.model.rules.resize[self.model.settings.kind](image, request.height, request.width)

    def shape(self, latents: int, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Shape `[1, F, h, w, C]` of `latents` latent frames of a request."""
        return self.model.geometry.shape(latents, request.height, request.width)


@dataclass
class GivenInputs:
    """Inputs of a segment at one size of its steps.

    Attributes:
        condition: result of `Conditioning.encode`, `[1, F, h, w, E]`; None if there is no image.
        prefix_latents: latents with which the next segment begins, `[1, F, h, w, C]`, or None.
        last_latents: latents with which the last segment ends, or None.
    """

    condition: Array | None = None
    prefix_latents: Array | None = None
    last_latents: Array | None = None


@dataclass
class RunState:
    """Results of the stages so far.

    Attributes:
        finished: finished segments, in the folder of the request if it has one.
        texts: states of each prompt, `[G, T, D]`: the prompt and, with guidance, the negative prompt.
        image_states: states of the image, `[G, P, I]`; None if there is no image.
        given: inputs of the next segment by height and width, see `given_at`.
        segment_latents: latents of the last segment that was denoised.
        latents: latents of each segment, without those that it shares with the segment before.
        undecoded: latents of the clip so far, if they are to be decoded together.
        colors: last `overlap_history` frames of the clip so far, float32 `[1, T, H, W, 3]` from -1 to 1. The next
            segment begins with them; they are of several segments if one adds fewer.
        frames: frames of the clip so far, in the request's output type.
        computed: iterations that ran the transformer's blocks.
        magnitudes: ratio of each row of guidance in each iteration, if MagCache's curve is measured; else None.
    """

    finished: FinishedSegments
    texts: list[Array] = field(default_factory=list)
    image_states: Array | None = None
    given: dict[tuple[int, int], GivenInputs] = field(default_factory=dict)
    segment_latents: Array | None = None
    latents: list[Array] = field(default_factory=list)
    undecoded: Array | None = None
    colors: Array | np.ndarray | None = None
    frames: list[np.ndarray] = field(default_factory=list)
    iterations: int = 0
    computed: int = 0
    magnitudes: list[np.ndarray] | None = None

    def given_at(self, request: ResolvedRequest) -> GivenInputs:
        """Inputs at the size of a request, which `ResolvedRequest.phases` has two of where steps differ in size."""
        return self.given.setdefault((request.height, request.width), GivenInputs())


class Stage(NamedTuple):
    """Stage of a run, of one segment or of the whole clip.

    Attributes:
        segment: segment, counted from 0; the first for stages of the whole clip.
        calls: function that returns the calls of programs that the stage makes, by shapes.
        run: function that makes the calls, and puts their results into the state.
    """

    name: str
    segment: int
    calls: Callable[[], Sequence[ProgramCall]]
    run: Callable[[RunState, RunReporter], None]


def stages_of(request: ResolvedRequest, parts: PipelineParts) -> list[Stage]:
    """Stages of a request, in their order. They hold shapes only: the memory plan and the run both take this list."""
    conditioning, geometry = parts.model.conditioning, parts.model.geometry
    sizes, has_frames = request.segments(geometry), request.output_type != "latent"

    # 1. The prompts.
    stages = [_encode_prompts(request, parts)]

    # 2. The image, for a transformer that attends to it.
    if parts.stages.image_encoder is not None and request.image is not None:
        stages.append(_encode_image(request, parts))

    # 3. The condition, or the latents with which the clip begins and ends.
    for phase in request.phases(geometry):
        if conditioning.encode is not None and (request.image is not None or request.controls):
            stages.append(_encode_condition(phase, parts))
        elif any(picture is not None for picture in (request.image, request.video, request.last_image)):
            stages.append(_encode_given(phase, parts, begins_clip=phase is request))

    for segment, latents in enumerate(sizes):
        # 4. A segment's latents.
        is_last = segment == len(sizes) - 1
        given = _given_latents(request, parts.model, segment)
        last = int(is_last and request.last_image is not None and conditioning.forcing)
        references = len(request.reference_images)
        denoising = _Denoising(request, parts, segment, references + latents, given, last, references)
        stages.append(Stage("denoise", segment, denoising.calls, denoising.run))

        # 5. Its frames, and the latents with which the next segment begins: segments share latents, or frames.
        shared = request.overlap_history if segment else request.continued_frames
        if parts.model.rules.decode_whole_clip:
            stages.append(_join(request, parts, segment))
            if has_frames and is_last:
                latest = latents - (geometry.latents(request.overlap_history) if segment else 0)
                stages.append(_decode_clip(request, parts, segment, geometry.latents(request.num_frames), latest))
            elif has_frames and request.callback is not None:
                stages.append(_decode(request, parts, segment, latents, shared, preview=True))
        else:
            if has_frames or not is_last:
                stages.append(_decode(request, parts, segment, latents, shared))
            if not is_last:
                stages.append(_encode_again(request, parts, segment))
    return stages


def _given_latents(request: ResolvedRequest, model: VideoModel, segment: int) -> int:
    """Latent frames with which a segment begins, and which are not denoised: of an image, or of an overlap."""
    if not model.conditioning.given_frames:
        return 0
    if segment or request.video is not None:
        return model.geometry.latents(request.overlap_history)
    return int(request.image is not None)


def run_request(
    request: ResolvedRequest,
    parts: PipelineParts,
    reporter: RunReporter,
    origin: Mapping[str, str | None],
    magnitudes: list[np.ndarray] | None = None,
) -> VideoOutput:
    """Run the stages of a request.

    Args:
        request: checked request, whose guidance is decided.
        origin: model and precision, on which finished segments depend too.
        magnitudes: list that gets the ratios of MagCache's curve, of all steps; None to measure nothing.

    Result: the clip, or the part of it that is there when the callback stops the run.
    """
    # 1. The segments that an earlier run finished.
    finished = FinishedSegments(request, request.segments(parts.model.geometry), origin)
    state = RunState(finished, magnitudes=magnitudes)

    # 2. The stages, until the callback stops them.
    complete, segment = True, 0
    try:
        for stage in stages_of(request, parts):
            segment = stage.segment
            stage.run(state, reporter)
    except StopRunError:
        complete = False
        # 3. The segments that are finished but not decoded, without the callback.
        if state.undecoded is not None and request.output_type != "latent":
            rest = _decode_clip(request, parts, segment, state.undecoded.shape[1], latest=1)
            rest.run(state, replace(reporter, callback=None))

    # 4. The clip: frames, or latents in diffusers' layout, as far as the run came.
    frames = np.concatenate(state.frames) if state.frames else np.zeros((0, request.height, request.width, 3), np.uint8)
    if request.output_type == "latent":
        frames = channels_first(np.concatenate(state.latents, axis=1)) if state.latents else np.zeros(0)
    return VideoOutput(
        frames=frames,
        fps=request.fps,
        seed=request.seed,
        complete=complete,
        steps=state.iterations,
        computed=state.computed,
        seconds=reporter.seconds,
    )


def _stage(
    name: str, segment: int, work: Callable[[RunState, Step], None], *calls: ProgramCall, total: int = 1
) -> Stage:
    """Stage that reports its `work` as `total` steps."""

    def run(state: RunState, reporter: RunReporter) -> None:
        with reporter.stage(name, total, segment) as step:
            work(state, step)

    return Stage(name, segment, lambda: calls, run)


def _encode_prompts(request: ResolvedRequest, parts: PipelineParts) -> Stage:
    """Encode the prompts of all segments, and the negative prompt: `texts`."""
    encode, prompts = parts.prompt_states, request.prompts[: len(request.segments(parts.model.geometry))]
    needed = prompts or (request.guided and request.negative_prompt_embeds is None)

    def run(state: RunState, step: Step) -> None:
        state.texts = [] if request.prompt_embeds is None else [jnp.asarray(request.prompt_embeds, jnp.float32)]
        for prompt in prompts:
            state.texts.append(encode(prompt))
            step(len(state.texts))
        if request.guided:
            states = request.negative_prompt_embeds
            negative = encode(request.negative_prompt) if states is None else jnp.asarray(states, jnp.float32)
            state.texts = [jnp.concatenate([text, negative]) for text in state.texts]

    return _stage("text", 0, run, *([encode.call] if needed else []), total=max(1, len(prompts)))


def _encode_image(request: ResolvedRequest, parts: PipelineParts) -> Stage:
    """Encode the first frame with the image encoder, for a transformer that attends to its states: `image_states`.

    With the last frame for a transformer that needs it.
    """
    call, clip_pixels = parts.stages.image_call(), parts.model.rules.clip_pixels

    def run(state: RunState, step: Step) -> None:
        assert clip_pixels is not None
        size, both = call.arguments[0].shape[1], parts.model.conditioning.needs_last_image
        pictures = [picture for picture in (request.image, request.last_image if both else None) if picture is not None]
        states = [call(clip_pixels(one, parts.frame(one, request), size)[None]) for one in pictures]
        joined = jax.block_until_ready(jnp.concatenate(states, axis=1))
        state.image_states = jnp.repeat(joined, request.rows, axis=0)

    return _stage("image", 0, run, call)


def _encode_condition(request: ResolvedRequest, parts: PipelineParts) -> Stage:
    """Encode the pictures of an image-to-video clip, or of a controlled one: `condition`."""
    size, references = (request.height, request.width), len(request.reference_images)

    def shape(*count: int, dtype: Any = jnp.uint8) -> Any:
        return jax.ShapeDtypeStruct((1, *count, *size, 3), dtype)

    shapes = Pictures(
        image=None if request.image is None else shape(),
        last_image=None if request.last_image is None else shape(),
        # Gray, half way between black and white, in the place of a control clip, which no byte is.
        video=shape(request.num_frames, dtype=jnp.float32 if request.video is None else jnp.uint8)
        if request.controls
        else None,
        mask=None if request.mask is None else shape(request.num_frames),
        references=shape(references, dtype=jnp.float32) if references else None,
    )
    call = parts.stages.condition_call(request.num_frames, *size, shapes)

    def run(state: RunState, step: Step) -> None:
        arrays: dict[str, Any] = {
            name: parts.frame(picture, request)[None]
            for name in ("image", "last_image")
            if (picture := getattr(request, name)) is not None
        }
        for name in ("video", "mask"):
            if (clip := getattr(request, name)) is not None:
                frames = [parts.frame(frame, request) for frame in clip[: request.num_frames]]
                arrays[name] = np.stack(frames)[None]
        if shapes.video is not None and request.video is None:
            arrays["video"] = np.zeros(shapes.video.shape, np.float32)
        if references and (fit := parts.model.rules.references) is not None:
            arrays["references"] = fit(request.reference_images, *size)[None]
        state.given_at(request).condition = jax.block_until_ready(call(Pictures(**arrays)))

    return _stage("encode", 0, run, call)


def _encode_given(request: ResolvedRequest, parts: PipelineParts, *, begins_clip: bool) -> Stage:
    """Encode the image or the end of the clip with which the first segment begins, and the last image.

    They become `prefix_latents` and `last_latents`. `begins_clip`: True if the user's clip is to begin the frames.
    """
    counts = (int(request.image is not None) + request.continued_frames, int(request.last_image is not None))
    prefix, last = (parts.stages.encode_call(count, request.height, request.width) for count in counts)

    def run(state: RunState, step: Step) -> None:
        given = state.given_at(request)
        if request.image is not None:
            given.prefix_latents = prefix(parts.frame(request.image, request)[None, None])
        if request.video is not None:
            clip = np.stack([parts.frame(frame, request) for frame in request.video])
            if begins_clip:
                state.frames.append(clip / np.float32(255) if request.output_type == "np" else clip)
                state.colors = to_signed(clip[None, -request.overlap_history :])
            given.prefix_latents = prefix(clip[None, -request.overlap_history :])
        if request.last_image is not None:
            given.last_latents = last(parts.frame(request.last_image, request)[None, None])
        jax.block_until_ready((given.prefix_latents, given.last_latents))

    calls = [call for call, count in zip((prefix, last), counts, strict=True) if count]
    return _stage("encode", 0, run, *calls)


class _Span(NamedTuple):
    """Iterations of a phase that one transformer computes.

    `transformer`: number of the transformer. `begin`, `end`: first iteration, and the one after the last.
    """

    transformer: int
    denoiser: Denoiser
    guidance_scale: float
    begin: int
    end: int
    context: ProgramCall
    loop: ProgramCall


class _Phase(NamedTuple):
    """Iterations of a segment at one size, the size of `request`, after `begin` others."""

    request: ResolvedRequest
    schedule: Schedule
    spans: list[_Span]
    begin: int

    @property
    def steps(self) -> int:
        """Number of iterations."""
        return len(self.schedule.timesteps)


@dataclass(frozen=True)
class _Denoising:
    """Denoising of a segment, unless its latents are among the finished segments.

    `given`: number of them at the beginning that are given, and are not denoised. `last`: latent frames after them that
    are given: the last image. `references`: number of them at the beginning that are reference pictures', which are
    denoised with the clip and are not part of it.
    """

    request: ResolvedRequest
    parts: PipelineParts
    segment: int
    latents: int
    given: int
    last: int
    references: int

    def calls(self) -> list[ProgramCall]:
        """Calls of each span: context and loop."""
        spans = [span for phase in self.phases() for span in phase.spans]
        return [call for span in spans for call in (span.context, span.loop)]

    def phases(self) -> list[_Phase]:
        """Iterations of the segment at half size, if it has some, and at full size."""
        request, model = self.request, self.parts.model
        schedules = segment_schedules(request, model, latents=self.latents, given=self.given, last=self.last)
        phases: list[_Phase] = []
        for sized, schedule in zip(request.phases(model.geometry), schedules, strict=True):
            begin = sum(phase.steps for phase in phases)
            phases.append(_Phase(sized, schedule, self._spans(sized, schedule), begin))
        return phases

    def _spans(self, request: ResolvedRequest, schedule: Schedule) -> list[_Span]:
        """Spans of the transformers. Compiles their context programs, whose results the loop takes."""
        parts = self.parts
        sample = floats(*parts.shape(self.latents + self.last, request))
        spans = []
        for index, begin, end in transformer_spans(schedule.timesteps, parts.model.settings.boundary_ratio):
            denoiser, scale = parts.denoisers[index], request.guidance_scales[index]
            control, image_condition = self._placed(_condition(request, parts))
            context = denoiser.context_call(_text_states(request, parts), _image_states(request, parts), control)
            conditions = self._conditions(context.results(), image_condition, scale)
            loop = denoiser.call(sample, schedule.tables, conditions, request)
            spans.append(_Span(index, denoiser, scale, begin, end, context, loop))
        return spans

    def run(self, state: RunState, reporter: RunReporter) -> None:
        """Fill in `segment_latents`, and add them to the clip and to the finished segments."""
        finished = state.finished.get(self.segment)
        if finished is None:
            latents = self._denoise(state, reporter)
            if not jnp.isfinite(latents).all():
                raise VeraxError(
                    "the denoised latents have numbers that are not finite, and their frames would be black: weights, "
                    "a LoRA file or given embeddings are damaged, or too large for the dtype; try dtype='float32'"
                )
            state.finished.add(latents)
        else:
            latents = jnp.asarray(finished)
        overlap = self.parts.model.geometry.latents(self.request.overlap_history)
        state.segment_latents = latents
        state.latents.append(latents[:, overlap:] if self.segment else latents)

    def _denoise(self, state: RunState, reporter: RunReporter) -> Float32[Array, "1 F h w C"]:
        request = self.request
        phases, noise = self.phases(), self._noise()

        # 1. Iterations that skip the transformer's blocks.
        if request.cache is not None and state.magnitudes is None:
            phases = [self._with_cache(phase) for phase in phases]
        total = sum(phase.steps for phase in phases)
        computed = sum(int(phase.schedule.tables.run_blocks[: phase.steps].sum()) for phase in phases)

        for span in (span for phase in phases for span in phase.spans):
            span.loop.results()  # compiles steps at half size and shorter segments, which the plan leaves out

        # 2. The loop, span by span, with the weights of one transformer at a time. Time begins when the first are read.
        note = f", {computed} of {total} steps computed" if computed < total else ""
        loop_state = None
        with contextlib.ExitStack() as held:
            held.enter_context(phases[0].spans[0].denoiser.transformer.weights())
            with reporter.stage("denoise", total, self.segment, note) as step:
                for phase in phases:
                    clean = None if loop_state is None else loop_state.solver.newest
                    loop_state = self._start(phase, state.given_at(phase.request), noise, clean)
                    for span in phase.spans:
                        loop_state = self._run_span(
                            phase, span, loop_state, state, step, every_step=reporter.every_step
                        )
                        held.close()
        assert loop_state is not None
        state.iterations, state.computed = state.iterations + total, state.computed + computed
        return loop_state.solver.sample[:, self.references : self.latents]

    def _with_cache(self, phase: _Phase) -> _Phase:
        """Phase whose table says which iterations skip the blocks; the first of each span does not."""
        tables, timesteps = phase.schedule
        run_blocks = cached_steps(
            self.request, self.parts.model, phase.spans, timesteps, self._fps, steps_before=phase.begin
        )
        return phase._replace(schedule=Schedule(tables._replace(run_blocks=padded_rows(run_blocks)), timesteps))

    def _start(self, phase: _Phase, given: GivenInputs, noise: Array, clean: Array | None) -> DenoisingState:
        """State before a phase: its noise, or the enlarged clean clip of the phase before with noise, and the given
        latents in their places."""
        _, _, h, w, _ = self.parts.shape(self.latents, phase.request)
        if clean is not None:
            sample = enlarged(clean[:, : self.latents], noise, phase.schedule.tables.solver.sigma[0])
        else:
            sample = noise if noise.shape[2:4] == (h, w) else half_size_noise(noise, h, w)
        if self.given:
            assert given.prefix_latents is not None
            sample = jnp.concatenate([given.prefix_latents, sample[:, self.given :]], axis=1)
        if self.last:
            assert given.last_latents is not None
            sample = jnp.concatenate([sample, given.last_latents], axis=1)
        cached = self.request.cache is not None
        return phase.spans[0].denoiser.start(sample, guided=self.request.guided, cached=cached)

    def _run_span(
        self, phase: _Phase, span: _Span, loop_state: DenoisingState, state: RunState, step: Step, *, every_step: bool
    ) -> DenoisingState:
        """State after the iterations of a span: one program call, or one for each iteration if it is to be reported."""
        text = state.texts[min(self.segment, len(state.texts) - 1)]
        image = _or_zeros(state.image_states, _image_states(self.request, self.parts))
        condition = _or_zeros(state.given_at(phase.request).condition, _condition(phase.request, self.parts))
        control, image_condition = self._placed(condition)
        count = 1 if every_step or state.magnitudes is not None else span.end - span.begin
        with span.denoiser.transformer.weights():
            context = span.context(text, image, control)
            conditions = self._conditions(context, image_condition, span.guidance_scale, phase.begin)
            with span.loop.opened() as loop:
                for begin in range(span.begin, span.end, count):
                    residual: Any = loop_state.residual
                    before = None if state.magnitudes is None else jnp.copy(residual)  # which the loop takes
                    end = begin + count
                    # Numbers as arrays: arguments of the program.
                    loop_state = loop(loop_state, phase.schedule.tables, conditions, np.int32(begin), np.int32(end))
                    if state.magnitudes is not None:
                        state.magnitudes.append(np.asarray(magnitude_ratio(loop_state.residual, before)))
                    solver, first = jax.block_until_ready(loop_state.solver), self.references
                    latents, clean = solver.sample[:, first:], solver.newest[:, first:]
                    step(phase.begin + end, latents=latents, clean=clean)
        return loop_state

    def _placed(self, condition: Any) -> tuple[Control | None, Any]:
        """Condition, or its shape, in its place: in the context (`Control`), or after the latents."""
        if not self.request.controls:
            return None, condition
        return Control(condition, np.array(self.request.conditioning_scale, np.float32)), None

    def _conditions(self, context: Any, image_condition: Any, guidance_scale: float, begin: int = 0) -> Conditions:
        """Conditions of arrays, or of the shapes of arrays, of a phase after `begin` iterations."""
        request = self.request
        key = jax.random.fold_in(random_key(request.seed + 1), self.segment)
        noisy = request.addnoise_condition > 0 and self.given > 0
        return Conditions(
            context=context,
            image_condition=image_condition,
            fps=self._fps,
            guidance_scale=np.array(guidance_scale, np.float32),
            prefix_mask=np.arange(self.latents + self.last) < self.given if noisy else None,
            added_noise=np.array(request.addnoise_condition, np.int32),
            key=jax.random.fold_in(key, begin) if begin else key,
        )

    @property
    def _fps(self) -> np.ndarray | None:
        return np.array([self.request.fps], np.int32) if self.parts.denoisers[0].transformer.config.takes_fps else None

    def _noise(self) -> Float32[Array, "1 F h w C"]:
        request = self.request
        if request.latents is not None and self.segment == 0:
            return jnp.asarray(request.latents, jnp.float32).transpose(0, 2, 3, 4, 1)
        return self.parts.stages.noise(request.seed, self.segment, self.parts.shape(self.latents, request))


def _decode(
    request: ResolvedRequest, parts: PipelineParts, segment: int, latents: int, shared: int, *, preview: bool = False
) -> Stage:
    """Decode a segment of `latents` latent frames: `colors`.

    All but the first `shared` frames, which are there already, are added to the clip. A preview is for the callback
    alone, where the frames of the clip are decoded together at the end. Decoded by itself, a segment has its first
    latent taken for a single frame: that frame and a few after it are among those that are left out.
    """
    call = parts.stages.decode_call(floats(*parts.shape(latents, request)))

    def run(state: RunState, step: Step) -> None:
        colors = call(state.segment_latents)[:, shared:]
        if preview:
            step(1, frames=np.asarray(parts.stages.finish(colors)))
        else:
            count, earlier = request.overlap_history, [] if state.colors is None else [state.colors]
            state.colors = jnp.concatenate([*earlier, colors[:, -count:]], axis=1)[:, -count:]
            step(1, frames=_add_frames(request, parts, state, colors))

    return _stage("decode", segment, run, call)


def _encode_again(request: ResolvedRequest, parts: PipelineParts, segment: int) -> Stage:
    """Encode the last frames of the clip so far as the first of the next segment, the first of them as a first frame.

    They become `prefix_latents`, of each size of the steps.
    """
    count = request.overlap_history
    phases = request.phases(parts.model.geometry)
    calls = [parts.stages.encode_call(count, phase.height, phase.width, jnp.float32) for phase in phases]

    def run(state: RunState, _: RunReporter) -> None:
        assert state.colors is not None
        for phase, call in zip(phases, calls, strict=True):
            sized = jax.image.resize(state.colors, (1, count, phase.height, phase.width, 3), "linear")
            state.given_at(phase).prefix_latents = call(sized)

    return Stage("encode again", segment, lambda: calls, run)


def _join(request: ResolvedRequest, parts: PipelineParts, segment: int) -> Stage:
    """Join the segments so far, which are decoded together at the end: `undecoded`.

    Their last latents begin the next segment: `prefix_latents`.
    """
    overlap = parts.model.geometry.latents(request.overlap_history)

    def run(state: RunState, _: RunReporter) -> None:
        state.undecoded = jnp.concatenate(state.latents, axis=1)
        state.given_at(request).prefix_latents = state.undecoded[:, -overlap:]

    return Stage("join", segment, list, run)


def _decode_clip(request: ResolvedRequest, parts: PipelineParts, segment: int, latents: int, latest: int) -> Stage:
    """Decode the joined latents of all segments, and add the frames to the clip.

    The callback gets the frames of the last `latest` of the `latents` latent frames.
    """
    call = parts.stages.decode_call(floats(*parts.shape(latents, request)))

    def run(state: RunState, step: Step) -> None:
        frames = _add_frames(request, parts, state, call(state.undecoded)[:, request.continued_frames :])
        state.undecoded = None
        step(1, frames=frames[-latest * parts.model.geometry.frames_per_latent :])

    return _stage("decode", segment, run, call)


def _text_states(request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct:
    tokens = parts.model.settings.text_tokens if request.prompt_embeds is None else request.prompt_embeds.shape[1]
    return floats(request.rows, tokens, parts.model.geometry.text_width)


def _image_states(request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct | None:
    if parts.stages.image_encoder is None:
        return None
    config, images = parts.stages.image_encoder.config, 1 + parts.model.conditioning.needs_last_image
    return floats(request.rows, images * (1 + config.num_patches), config.hidden_size)


def _condition(request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct | None:
    """Shape of the condition; None for models without one."""
    channels = parts.model.conditioning.channels
    latents = parts.model.geometry.latents(request.num_frames) + len(request.reference_images)
    *size, _ = parts.shape(latents, request)
    return floats(*size, channels) if channels else None


def _or_zeros(array: Array | None, shape: jax.ShapeDtypeStruct | None) -> Array | None:
    """Array, or zeros of a shape in the place of an array that the request does not have."""
    return jnp.zeros(shape.shape, shape.dtype) if array is None and shape is not None else array


def _add_frames(
    request: ResolvedRequest, parts: PipelineParts, state: RunState, colors: Float32[Array, "1 T H W 3"]
) -> np.ndarray:
    """Add frames to the clip in the request's output type; return them as bytes."""
    frames = np.asarray(parts.stages.finish(colors))
    state.frames.append(np.asarray(colors[0]) / 2 + 0.5 if request.output_type == "np" else frames)
    return frames
