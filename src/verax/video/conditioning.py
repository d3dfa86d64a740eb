"""Conditioning of a clip by kind of model: text alone, a first image, either of the two, or diffusion forcing with
prefix latents.

Each kind is a class with the methods of `calls.Conditioning`. `CONDITIONINGS` is the only place that tells kinds apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import numpy as np

from verax.errors import InvalidParameterError
from verax.video.calls import Conditioning, PipelineParts, RunState, SegmentSchedule, StageCall
from verax.video.denoise import make_tables
from verax.video.geometry import LatentGeometry
from verax.video.outputs import Reporter
from verax.video.programs import ProgramCall, floats
from verax.video.request import ResolvedRequest
from verax.video.rules import ReferenceRules
from verax.video.schedule import ForcingSchedule, forcing_schedule, noise_levels
from verax.video.settings import VideoSettings

__all__ = [
    "CONDITIONINGS",
    "ForcingConditioning",
    "ImageConditioning",
    "TextConditioning",
    "TextImageConditioning",
]


class TextConditioning:
    """Text to video: no image, all frames at one noise level."""

    takes_image = False

    def check(self, request: ResolvedRequest, settings: VideoSettings) -> None:
        """Raise InvalidParameterError for an image, or an option of diffusion forcing."""
        _check_no_forcing(request, settings)
        if request.image is not None:
            raise InvalidParameterError("image: this model is for text alone; use one for image to video or forcing")

    def stages(self, request: ResolvedRequest, parts: PipelineParts) -> list[StageCall]:
        """No stages."""
        return []

    def image_condition(self, request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct | None:
        """None."""
        return None

    def prefix(self, request: ResolvedRequest, geometry: LatentGeometry, segment: int) -> int:
        """0."""
        return 0

    def schedule(
        self, request: ResolvedRequest, rules: ReferenceRules, *, latents: int, prefix: int, last: int
    ) -> SegmentSchedule:
        """One iteration for each step."""
        levels = noise_levels(request.num_inference_steps, request.shift, rules.sigma_schedule)
        return SegmentSchedule(make_tables(levels), levels.timesteps)


class ImageConditioning(TextConditioning):
    """Image to video: the first frame as channels behind the latents, and as states of an image encoder.

    Wan2.2 has no image encoder.
    """

    takes_image = True

    def check(self, request: ResolvedRequest, settings: VideoSettings) -> None:
        """Raise InvalidParameterError for a missing image, or an option of diffusion forcing."""
        _check_no_forcing(request, settings)
        if settings.needs_image and request.image is None:
            raise InvalidParameterError("image: this model is for image to video, and needs the first frame")

    def stages(self, request: ResolvedRequest, parts: PipelineParts) -> list[StageCall]:
        """Image condition, if there is an image."""
        return [] if request.image is None else [EncodeCondition(request, parts, segment=0)]

    def image_condition(self, request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct | None:
        """Shape of mask and latents; zeros take their place if there is no image."""
        geometry = parts.geometry
        *size, C = geometry.shape(geometry.latents(request.num_frames), request.height, request.width)
        return floats(*size, parts.config.in_dim - C)


class TextImageConditioning(TextConditioning):
    """Text to video, or image to video by the same model (Wan2.2's 5B).

    The latents of an image are the first frame, whose time is 0 in every iteration, as in diffusers'
    `WanImageToVideoPipeline` with `expand_timesteps`.
    """

    def check(self, request: ResolvedRequest, settings: VideoSettings) -> None:
        """Raise InvalidParameterError for an option of diffusion forcing, or an image that would be the whole clip."""
        _check_no_forcing(request, settings)
        if request.image is not None and request.num_frames == 1:
            raise InvalidParameterError("num_frames: expected more than the one frame that the image is")

    def stages(self, request: ResolvedRequest, parts: PipelineParts) -> list[StageCall]:
        """Latents of the image, if there is one."""
        return [] if request.image is None else [EncodePrefix(request, parts, segment=0)]

    def prefix(self, request: ResolvedRequest, geometry: LatentGeometry, segment: int) -> int:
        """1 for an image."""
        return int(request.image is not None)

    def schedule(
        self, request: ResolvedRequest, rules: ReferenceRules, *, latents: int, prefix: int, last: int
    ) -> SegmentSchedule:
        """One iteration for each step, which the image's frame does not take."""
        if not prefix:
            return super().schedule(request, rules, latents=latents, prefix=prefix, last=last)
        levels = noise_levels(request.num_inference_steps, request.shift, rules.sigma_schedule)
        forcing = forcing_schedule(latents, levels.timesteps, prefix=prefix)
        return SegmentSchedule(make_tables(levels, forcing), forcing.timesteps)


class ForcingConditioning:
    """Diffusion forcing: prefix and last latents among the frames, each frame at a noise level of its own."""

    takes_image = False

    def check(self, request: ResolvedRequest, settings: VideoSettings) -> None:
        """Accept all options."""

    def stages(self, request: ResolvedRequest, parts: PipelineParts) -> list[StageCall]:
        """Prefix and last latents, if there are any."""
        begins = request.image is not None or request.video is not None
        return [EncodePrefix(request, parts, segment=0)] if begins or request.last_image is not None else []

    def image_condition(self, request: ResolvedRequest, parts: PipelineParts) -> jax.ShapeDtypeStruct | None:
        """None."""
        return None

    def prefix(self, request: ResolvedRequest, geometry: LatentGeometry, segment: int) -> int:
        """1 for an image, or the overlap with the user's clip or with the segment before."""
        if segment or request.video is not None:
            return geometry.latents(request.overlap_history)
        return int(request.image is not None)

    def schedule(
        self, request: ResolvedRequest, rules: ReferenceRules, *, latents: int, prefix: int, last: int
    ) -> SegmentSchedule:
        """Iterations in which each block takes its steps; prefix and last latents take none."""
        levels = noise_levels(request.num_inference_steps, request.shift, rules.sigma_schedule)
        frames = latents + last
        forcing = forcing_schedule(
            frames,
            levels.timesteps,
            ar_step=request.ar_step,
            causal_block_size=request.causal_block_size,
            prefix=prefix,
            keep_partial_blocks=rules.keep_partial_blocks,
        )
        forcing = _with_clean_end(forcing, latents)
        timesteps = forcing.timesteps
        if request.addnoise_condition:
            timesteps = np.where(np.arange(frames) < prefix, np.int32(request.addnoise_condition), timesteps)
        return SegmentSchedule(make_tables(levels, forcing, overwritten=rules.overwrite_first_sample), timesteps)


CONDITIONINGS: Mapping[str, Conditioning] = MappingProxyType(
    {
        "t2v": TextConditioning(),
        "i2v": ImageConditioning(),
        "ti2v": TextImageConditioning(),
        "df": ForcingConditioning(),
    }
)
"""Conditioning of each kind of model, see `settings.KINDS`."""


@dataclass(frozen=True)
class EncodeCondition(StageCall):
    """Encode the first frame of an image-to-video clip as channels behind the latents."""

    name = "encode"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Call of `Stages.condition_call`."""
        request = self.request
        return (self.parts.stages.condition_call(request.num_frames, request.height, request.width),)

    def run(self, state: RunState, reporter: Reporter) -> None:
        """Fill in `image_condition`."""
        assert self.request.image is not None
        with reporter.stage(self.name, 1, self.segment):
            (call,) = self.calls
            image = self.parts.frame(self.request.image, self.request)
            state.image_condition = jax.block_until_ready(call(image[None]))


@dataclass(frozen=True)
class EncodePrefix(StageCall):
    """Encode the image or the end of the clip with which the first segment begins, and the last image."""

    name = "encode"

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """Calls for the prefix, if there is one, and for the last image, if there is one."""
        request = self.request
        counts = [int(request.image is not None) + request.continued_frames, int(request.last_image is not None)]
        encode_call = self.parts.stages.encode_call
        return tuple(encode_call(count, request.height, request.width) for count in counts if count)

    def run(self, state: RunState, reporter: Reporter) -> None:
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


def _check_no_forcing(request: ResolvedRequest, settings: VideoSettings) -> None:
    only = f"needs a model for diffusion forcing (SkyReels-V2-DF); this one is {settings.kind}"
    used = {
        "last_image": request.last_image is not None,
        "video": request.video is not None,
        "ar_step": request.ar_step > 0,
        "causal_block_size": request.causal_block_size > 1,
        "addnoise_condition": request.addnoise_condition > 0,
    }
    for name, is_used in used.items():
        if is_used:
            raise InvalidParameterError(f"{name}: {only}")
    if request.num_frames > request.base_num_frames:
        raise InvalidParameterError(f"num_frames: longer than base_num_frames, {request.base_num_frames}, {only}")


def _with_clean_end(schedule: ForcingSchedule, latents: int) -> ForcingSchedule:
    """Schedule in which the frames after the first `latents` are clean, and stay as they are."""
    timesteps, update = schedule.timesteps.copy(), schedule.update.copy()
    timesteps[:, latents:], update[:, latents:] = 0, False
    return schedule._replace(timesteps=timesteps, update=update)
