"""A run: the stages of a request, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from verax.models.video_model import VideoModel
from verax.video.outputs import RunReporter, StopRunError, VideoOutput, channels_first
from verax.video.request import ResolvedRequest
from verax.video.resume import FinishedSegments
from verax.video.stages import (
    DecodeClip,
    DecodeSegment,
    DenoiseSegment,
    EncodeCondition,
    EncodeGiven,
    EncodeImage,
    EncodeOverlap,
    EncodePrompts,
    JoinSegments,
    PipelineParts,
    PreviewSegment,
    RunState,
    Stage,
)

__all__ = ["run_request", "stages_of"]


def stages_of(request: ResolvedRequest, parts: PipelineParts) -> list[Stage]:
    """Stages of a request, in their order. They hold shapes only: the memory plan and the run both take this list."""
    sizes = request.segments(parts.model.geometry)

    # 1. The prompts.
    stages: list[Stage] = [EncodePrompts(request, parts, segment=0)]

    # 2. The image, for a transformer that attends to it.
    if parts.stages.image_encoder is not None and request.image is not None:
        stages.append(EncodeImage(request, parts, segment=0))

    # 3. The image condition, or the latents with which the clip begins and ends.
    conditioning = parts.model.conditioning
    if conditioning.encode is not None and request.image is not None:
        stages.append(EncodeCondition(request, parts, segment=0))
    elif any(picture is not None for picture in (request.image, request.video, request.last_image)):
        stages.append(EncodeGiven(request, parts, segment=0))

    for segment, latents in enumerate(sizes):
        # 4. A segment's latents.
        is_last = segment == len(sizes) - 1
        given = _given_latents(request, parts.model, segment)
        last = int(is_last and request.last_image is not None)
        stages.append(DenoiseSegment(request, parts, segment, latents=latents, given=given, last=last))

        # 5. Its frames, and the latents with which the next segment begins.
        stages += (_joined if parts.model.rules.decode_whole_clip else _decoded)(request, parts, segment, sizes)
    return stages


def _given_latents(request: ResolvedRequest, model: VideoModel, segment: int) -> int:
    """Latent frames with which a segment begins, and which are not denoised: of an image, or of an overlap."""
    if not model.conditioning.given_frames:
        return 0
    if segment or request.video is not None:
        return model.geometry.latents(request.overlap_history)
    return int(request.image is not None)


def _decoded(request: ResolvedRequest, parts: PipelineParts, segment: int, sizes: list[int]) -> list[Stage]:
    """Stages after a segment where segments share frames."""
    decode = DecodeSegment(request, parts, segment, latents=sizes[segment])
    if segment < len(sizes) - 1:
        return [decode, EncodeOverlap(request, parts, segment)]
    return [] if request.output_type == "latent" else [decode]


def _joined(request: ResolvedRequest, parts: PipelineParts, segment: int, sizes: list[int]) -> list[Stage]:
    """Stages after a segment where segments share latents."""
    join = JoinSegments(request, parts, segment)
    if request.output_type == "latent":
        return [join]
    if segment < len(sizes) - 1:
        preview = PreviewSegment(request, parts, segment, latents=sizes[segment])
        return [join] if request.callback is None else [join, preview]
    latest = sizes[segment] - (parts.model.geometry.latents(request.overlap_history) if segment else 0)
    return [
        join,
        DecodeClip(request, parts, segment, latents=parts.model.geometry.latents(request.num_frames), latest=latest),
    ]


def run_request(
    request: ResolvedRequest, parts: PipelineParts, reporter: RunReporter, origin: Mapping[str, str]
) -> VideoOutput:
    """Run the stages of a request.

    Args:
        request: checked request, whose guidance is decided.
        parts: parts of the pipeline.
        reporter: receiver of the progress.
        origin: model and precision, on which the file of finished segments depends too.

    Returns:
        The clip, or the part of it that is there when the callback stops the run.

    Raises:
        InvalidParameterError: if the file of finished segments is of another clip.
    """
    # 1. The segments that an earlier run finished.
    state = RunState(FinishedSegments(request, request.segments(parts.model.geometry), origin))

    # 2. The stages, until the callback stops them.
    complete = True
    stage = None
    try:
        for stage in stages_of(request, parts):
            stage.run(state, reporter)
    except StopRunError:
        complete = False
        # 3. The segments that are finished but not decoded, without the callback.
        if stage is not None and state.undecoded is not None and request.output_type != "latent":
            rest = DecodeClip(request, parts, stage.segment, latents=state.undecoded.shape[1], latest=1)
            rest.run(state, replace(reporter, callback=None))

    # 4. The clip.
    return VideoOutput(
        frames=_frames(request, state),
        fps=request.fps,
        seed=request.seed,
        complete=complete,
        steps=state.iterations,
        computed=state.computed,
        seconds=reporter.seconds,
    )


def _frames(request: ResolvedRequest, state: RunState) -> np.ndarray:
    """Frames, or latents in diffusers' layout, as far as the run came."""
    if request.output_type == "latent":
        return channels_first(np.concatenate(state.latents, axis=1)) if state.latents else np.zeros(0)
    empty = np.zeros((0, request.height, request.width, 3), np.uint8)
    return np.concatenate(state.frames) if state.frames else empty
