"""Denoising stage of a segment: from noise, prefix and conditions to latents."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from verax.video.calls import PipelineParts, RunState, SegmentSchedule, StageCall
from verax.video.denoise import Carry, Conditions, Denoiser, Tables, padded_rows
from verax.video.outputs import Reporter, Step
from verax.video.programs import ProgramCall, floats
from verax.video.request import ResolvedRequest
from verax.video.teacache import steps_running_blocks, teacache_for

__all__ = ["DenoiseSegment", "Span"]


@dataclass(frozen=True)
class Span:
    """Iterations of a segment that one transformer computes.

    Attributes:
        denoiser: programs of the transformer.
        guidance_scale: scale of guidance with this transformer.
        begin, end: first iteration, and the one after the last.
        context: call that makes the transformer's cross-attention keys.
        loop: call of the loop over iterations.
    """

    denoiser: Denoiser
    guidance_scale: float
    begin: int
    end: int
    context: ProgramCall
    loop: ProgramCall


@dataclass(frozen=True)
class DenoiseSegment(StageCall):
    """Denoise the latents of a segment, unless the file of finished segments has them.

    Attributes:
        latents: latent frames of the segment.
        prefix: how many of them are given at the beginning.
        last: latent frames after them that are given: the last image.
    """

    latents: int
    prefix: int
    last: int
    name = "denoise"

    @property
    def schedule(self) -> SegmentSchedule:
        """Iterations of the segment."""
        return self.parts.conditioning.schedule(
            self.request, self.parts.rules, latents=self.latents, prefix=self.prefix, last=self.last
        )

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Calls of each span: context and loop."""
        return tuple(call for span in self.spans(self.schedule) for call in (span.context, span.loop))

    def spans(self, schedule: SegmentSchedule) -> list[Span]:
        """Spans of the transformers. Compiles their context programs, whose results the loop takes."""
        request, parts = self.request, self.parts
        sample = floats(*parts.geometry.shape(self.latents + self.last, request.height, request.width))
        found = []
        for index, begin, end in parts.transformers.spans(schedule.timesteps):
            denoiser, scale = parts.transformers.denoisers[index], request.guidance_scales[index]
            context = denoiser.context_call(_text_states(request, parts), _image_states(request, parts))
            image_condition = parts.conditioning.image_condition(request, parts)
            conditions = self._conditions(context.results(), image_condition, scale)
            loop = denoiser.call(sample, schedule.tables, conditions, request)
            found.append(Span(denoiser, scale, begin, end, context, loop))
        return found

    def run(self, state: RunState, reporter: Reporter) -> None:
        """Fill in `segment_latents`, and add them to the clip and to the file of finished segments."""
        finished = state.finished.get(self.segment)
        if finished is None:
            latents = self._denoise(state, reporter)
            state.finished.add(np.asarray(latents))
        else:
            latents = jnp.asarray(finished)
        overlap = self.parts.geometry.latents(self.request.overlap_history)
        state.segment_latents = latents
        state.latents.append(latents[:, overlap:] if self.segment else latents)

    def _denoise(self, state: RunState, reporter: Reporter) -> Float32[Array, "1 F h w C"]:
        request = self.request
        schedule = self.schedule
        spans = self.spans(schedule)

        # 1. The first sample: noise, and the given latents in their places.
        sample = self._noise()
        if self.prefix:
            assert state.prefix_latents is not None
            sample = jnp.concatenate([state.prefix_latents, sample[:, self.prefix :]], axis=1)
        if self.last:
            assert state.last_latents is not None
            sample = jnp.concatenate([sample, state.last_latents], axis=1)

        # 2. Iterations that skip the transformer's blocks.
        total = len(schedule.timesteps)
        tables = self._with_teacache(schedule, spans) if request.cache else schedule.tables
        computed = int(tables.run_blocks[:total].sum())

        # 3. The loop, span by span, with the weights of one transformer at a time. Time begins when the first are read.
        carry: Carry = spans[0].denoiser.start(sample, guided=request.guided, cached=request.cache is not None)
        note = f", {computed} of {total} steps computed" if computed < total else ""
        with contextlib.ExitStack() as held:
            held.enter_context(spans[0].denoiser.transformer.weights())
            with reporter.stage(self.name, total, self.segment, note) as step:
                for span in spans:
                    carry = self._run_span(span, carry, tables, state, step, every_step=reporter.every_step)
                    held.close()
        state.iterations, state.computed = state.iterations + total, state.computed + computed
        return carry.solver.sample[:, : self.latents] if self.last else carry.solver.sample

    def _run_span(
        self, span: Span, carry: Carry, tables: Tables, state: RunState, step: Step, *, every_step: bool
    ) -> Carry:
        """State after the iterations of a span: one program call, or one for each iteration if it is to be reported."""
        request, parts = self.request, self.parts
        text = state.texts[min(self.segment, len(state.texts) - 1)]
        image = _or_zeros(state.image_states, _image_states(request, parts))
        image_condition = _or_zeros(state.image_condition, parts.conditioning.image_condition(request, parts))
        each = 1 if every_step else span.end - span.begin
        with span.denoiser.transformer.weights():
            conditions = self._conditions(span.context(text, image), image_condition, span.guidance_scale)
            with span.loop.opened() as loop:
                for begin in range(span.begin, span.end, each):
                    # Numbers as arrays: arguments of the program.
                    carry = loop(carry, tables, conditions, np.int32(begin), np.int32(begin + each))
                    step(begin + each, latents=jax.block_until_ready(carry.solver.sample))
        return carry

    def _conditions(self, context: Any, image_condition: Any, guidance_scale: float) -> Conditions:
        """Conditions of arrays, or of the shapes of arrays."""
        request = self.request
        noisy = request.addnoise_condition > 0 and self.prefix > 0
        return Conditions(
            context=context,
            image_condition=image_condition,
            fps=self._fps,
            guidance_scale=np.array(guidance_scale, np.float32),
            prefix_mask=np.arange(self.latents + self.last) < self.prefix if noisy else None,
            added_noise=np.array(request.addnoise_condition, np.int32),
            key=jax.random.fold_in(jax.random.key(request.seed + 1), self.segment),
        )

    @property
    def _fps(self) -> np.ndarray | None:
        return np.array([self.request.fps], np.int32) if self.parts.config.inject_sample_info else None

    def _noise(self) -> Float32[Array, "1 F h w C"]:
        request, parts = self.request, self.parts
        if request.latents is not None and self.segment == 0:
            return jnp.asarray(request.latents, jnp.float32).transpose(0, 2, 3, 4, 1)
        shape = parts.geometry.shape(self.latents, request.height, request.width)
        return parts.stages.noise(request.seed, self.segment, shape)

    def _with_teacache(self, schedule: SegmentSchedule, spans: list[Span]) -> Tables:
        """Tables with the iterations that TeaCache computes; each transformer begins with computed ones."""
        request, parts = self.request, self.parts
        cache = teacache_for(
            width=parts.config.dim,
            image_to_video=parts.conditioning.takes_image,
            pixels=request.height * request.width,
        )
        chosen = []
        for span in spans:
            timesteps = schedule.timesteps[span.begin : span.end]
            embedded = span.denoiser.embed_time(timesteps, self._fps)
            chosen.append(
                steps_running_blocks(timesteps, lambda _, found=embedded: found, request.cache_threshold, cache)
            )
        return schedule.tables._replace(run_blocks=padded_rows(np.concatenate(chosen)))


def _text_states(request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct:
    tokens = parts.settings.text_tokens if request.prompt_embeds is None else request.prompt_embeds.shape[1]
    return floats(request.rows, tokens, parts.geometry.text_width)


def _image_states(request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct | None:
    if parts.stages.image_encoder is None:
        return None
    config = parts.stages.image_encoder.config
    return floats(request.rows, 1 + config.num_patches, config.hidden_size)


def _or_zeros(array: Array | None, shape: jax.ShapeDtypeStruct | None) -> Array | None:
    """Array, or zeros of a shape in the place of an array that the request does not have."""
    return jnp.zeros(shape.shape, shape.dtype) if array is None and shape is not None else array
