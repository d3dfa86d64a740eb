"""One run, stage by stage: prompt, picture, what is given, the loop over steps, frames; segment by segment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, UInt8

from verax import progress
from verax.errors import InvalidParameterError
from verax.models.wan.model import WanConfig
from verax.video import images
from verax.video.denoise import Conditions, Denoiser, Tables, make_tables
from verax.video.forcing import ForcingSchedule, forcing_schedule
from verax.video.geometry import LatentGeometry
from verax.video.memory import StageMemory, plan_memory
from verax.video.outputs import VideoOutput, VideoProgress
from verax.video.request import VideoRequest
from verax.video.resume import FinishedSegments
from verax.video.settings import VideoSettings
from verax.video.sigmas import noise_levels
from verax.video.stages import Stages
from verax.video.teacache import steps_running_blocks, teacache_for

__all__ = ["Run"]

LABELS = {
    "text": "reading the prompt",
    "image": "looking at the picture",
    "encode": "encoding what is given",
    "denoise": "denoising",
    "decode": "decoding frames",
}
"""Of the bars."""

Text = Callable[[str], Float32[Array, "1 T D"]]
Step = Callable[..., None]


class _StoppedError(Exception):
    """The callback said so."""


class Run:
    """A request being served. Made for one call of `run`."""

    def __init__(
        self,
        request: VideoRequest,
        *,
        settings: VideoSettings,
        geometry: LatentGeometry,
        reference: str,
        stages: Stages,
        denoiser: Denoiser,
        text: Text,
        about: Mapping[str, str],
        show_progress: bool,
    ):
        """Take a checked request; `text` gives a prompt's states, `about` is what else a clip depends on."""
        self._request, self._settings, self._geometry, self._reference = request, settings, geometry, reference
        self._stages, self._denoiser, self._text = stages, denoiser, text
        self._show_progress, self._about = show_progress, about
        self._sizes = request.segments(geometry)
        self._segment = 0
        self._config: WanConfig = stages.transformer.config
        self._seconds: dict[str, float] = {}
        self._iterations = self._computed = 0
        self._latents: list[Array] = []
        self._undecoded: Array | None = None
        self._frames: list[np.ndarray] = []

    def run(self) -> VideoOutput:
        """The clip, or as much of it as there is when the callback stops it."""
        try:
            self._run_stages()
            complete = True
        except _StoppedError:
            complete = False
            self._request = replace(self._request, callback=None)  # it has said enough
            if self._undecoded is not None:
                self._decode(self._undecoded, skip=self._shared)
        request = self._request
        if request.output_type == "latent":
            frames = _diffusers_layout(np.concatenate(self._latents, axis=1)) if self._latents else np.zeros(0)
        else:
            empty = np.zeros((0, request.height, request.width, 3), np.uint8)
            frames = np.concatenate(self._frames) if self._frames else empty
        return VideoOutput(
            frames=frames,
            fps=request.fps,
            seed=request.seed,
            complete=complete,
            steps=self._iterations,
            computed=self._computed,
            seconds=self._seconds,
        )

    def _run_stages(self) -> None:
        request, stages = self._request, self._stages
        finished = FinishedSegments(request, self._sizes, self._about)
        texts = self._texts()
        picture = None if request.image is None else self._picture(request.image)
        states = self._image_states(picture)
        image_condition, prefix_latents, last_latents = self._encode(picture)
        for segment, size in enumerate(self._sizes):
            self._segment = segment
            last = segment == len(self._sizes) - 1
            found = finished.get(segment)
            if found is not None:
                latents = jnp.asarray(found)
            else:
                context = stages.context(texts[min(segment, len(texts) - 1)], states)
                latents = self._denoise(size, prefix_latents, last_latents if last else None, context, image_condition)
                finished.add(np.asarray(latents))
            fresh = latents[:, self._overlap :] if segment else latents
            self._latents.append(fresh)
            if self._reference == "diffusers":
                # As its pipelines do: segments share latents, and all are decoded as one clip.
                joined = jnp.concatenate(self._latents, axis=1)
                prefix_latents = joined[:, -self._overlap :]
                if request.output_type == "latent":
                    continue
                self._undecoded = joined
                if last:
                    self._decode(joined, skip=self._shared, latest=fresh.shape[1])
                elif request.callback is not None:
                    self._preview(latents, skip=request.overlap_history if segment else self._shared)
            elif not last or request.output_type != "latent":
                # Segments share frames: encoded anew, the first of them is a first frame, as in training.
                frames = self._decode(latents, skip=request.overlap_history if segment else self._shared)
                if not last:
                    prefix_latents = stages.encode(frames[:, -request.overlap_history :])

    def plan(self) -> list[StageMemory]:
        """The memory of each stage, see `plan_memory`; nothing runs."""
        request = self._request
        size = max(self._sizes)
        begins = request.image is not None or request.video is not None or len(self._sizes) > 1
        prefix = int(begins and self._settings.kind == "df")
        fps = np.array([request.fps], np.int32) if self._config.inject_sample_info else None
        tables, _ = self._tables(size, prefix, size + (request.last_image is not None), fps, planned=True)
        return plan_memory(
            request,
            tables,
            settings=self._settings,
            geometry=self._geometry,
            reference=self._reference,
            stages=self._stages,
            denoiser=self._denoiser,
        )

    @property
    def _overlap(self) -> int:
        """Latent frames that segments share."""
        return self._geometry.latents(self._request.overlap_history)

    @property
    def _shared(self) -> int:
        """Frames of the user's clip that the first segment begins with."""
        return self._request.overlap_history if self._request.video is not None else 0

    # Stages, in their order.

    def _texts(self) -> list[Float32[Array, "G T D"]]:
        """The states of each segment's prompt, with those of the negative prompt below."""
        request = self._request
        with self._stage("text", max(1, len(request.prompts))) as step:
            if request.prompt_embeds is not None:
                cond = [jnp.asarray(request.prompt_embeds, jnp.float32)]
            else:
                cond = []
                for prompt in request.prompts[: len(self._sizes)]:
                    cond.append(self._text(prompt))
                    step(len(cond))
            if not request.guided:
                return cond
            if request.negative_prompt_embeds is not None:
                uncond = jnp.asarray(request.negative_prompt_embeds, jnp.float32)
            else:
                uncond = self._text(request.negative_prompt)
        for one in cond:
            if one.shape != uncond.shape:
                raise InvalidParameterError(
                    f"prompt_embeds: {one.shape[1]} tokens, but the negative prompt has {uncond.shape[1]}"
                )
        return [jnp.concatenate([one, uncond]) for one in cond]

    def _picture(self, image: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "height width 3"]:
        """A user's picture, as a frame."""
        height, width = self._request.height, self._request.width
        if self._reference == "diffusers":
            return images.resize(image, height, width)
        method = "bicubic" if self._settings.kind == "df" else "lanczos"
        return images.resize(images.crop_to_aspect(image, height, width), height, width, method=method)

    def _image_states(self, picture: UInt8[np.ndarray, "H W 3"] | None) -> Float32[Array, "G P I"] | None:
        """What the image encoder says, for a transformer that listens."""
        encoder = self._stages.image_encoder
        if encoder is None:
            return None
        rows = 1 + self._request.guided
        if picture is None:
            return jnp.zeros((rows, 1 + encoder.config.num_patches, encoder.config.hidden_size), jnp.float32)
        with self._stage("image", 1):
            size = encoder.config.image_size
            if self._reference == "diffusers":
                pixels = images.clip_pixels_diffusers(self._request.image, size)
            else:
                pixels = images.clip_pixels_skyreels(images.to_signed(picture), size)
            return jnp.repeat(self._stages.image(pixels[None]), rows, axis=0)

    def _encode(self, picture: UInt8[np.ndarray, "H W 3"] | None) -> tuple[Array | None, Array | None, Array | None]:
        """Image to video: channels behind the latents. Forcing: latents that the clip begins and ends with."""
        request, stages = self._request, self._stages
        if self._settings.kind == "t2v":
            return None, None, None
        if self._settings.kind == "i2v" and picture is None:
            pixels = self._geometry.pixels_per_latent
            channels = self._config.in_dim - self._geometry.channels
            size = (1, self._sizes[0], request.height // pixels, request.width // pixels, channels)
            return jnp.zeros(size, jnp.float32), None, None
        if self._settings.kind == "i2v":
            assert picture is not None
            with self._stage("encode", 1):
                return jax.block_until_ready(stages.condition(picture[None], request.num_frames)), None, None
        prefix_latents = last_latents = None
        if picture is not None or request.video is not None or request.last_image is not None:
            with self._stage("encode", 1):
                if picture is not None:
                    prefix_latents = stages.encode(picture[None, None])
                if request.video is not None:
                    clip = np.stack([self._picture(frame) for frame in request.video])
                    self._frames.append(clip)
                    prefix_latents = stages.encode(clip[None, -request.overlap_history :])
                if request.last_image is not None:
                    last_latents = stages.encode(self._picture(request.last_image)[None, None])
                jax.block_until_ready((prefix_latents, last_latents))
        return None, prefix_latents, last_latents

    def _denoise(
        self,
        size: int,
        prefix_latents: Array | None,
        last_latents: Array | None,
        context: Any,
        image_condition: Array | None,
    ) -> Float32[Array, "1 F h w C"]:
        """A segment's latents."""
        request, stages = self._request, self._stages
        prefix = 0 if prefix_latents is None else prefix_latents.shape[1]
        sample = self._noise(size)
        if prefix_latents is not None:
            sample = jnp.concatenate([prefix_latents, sample[:, prefix:]], axis=1)
        if last_latents is not None:
            sample = jnp.concatenate([sample, last_latents], axis=1)
        fps = np.array([request.fps], np.int32) if self._config.inject_sample_info else None
        tables, iterations = self._tables(size, prefix, sample.shape[1], fps)
        noisy = request.addnoise_condition > 0 and prefix > 0
        conditions = Conditions(
            context=context,
            image_condition=image_condition,
            fps=fps,
            guidance_scale=np.array(request.guidance_scale, np.float32),
            prefix_mask=np.arange(sample.shape[1]) < prefix if noisy else None,
            added_noise=np.array(request.addnoise_condition, np.int32),
            key=jax.random.fold_in(jax.random.key(request.seed + 1), self._segment),
        )
        computed = int(tables.run_blocks[:iterations].sum())
        carry = self._denoiser.start(sample, guided=request.guided, cached=request.cache is not None)
        each = 1 if request.callback is not None or self._shows else iterations
        fewer = f", {computed} of {iterations} steps computed" if computed < iterations else ""
        with self._stage("denoise", iterations, fewer) as step, stages.transformer.weights() as weights:
            for begin in range(0, iterations, each):
                # Numbers as arrays: a program's arguments.
                bounds = np.int32(begin), np.int32(begin + each)
                carry = self._denoiser.program(weights, carry, tables, conditions, *bounds, **request.program_options)
                step(begin + each, latents=jax.block_until_ready(carry.solver.sample))
        self._iterations, self._computed = self._iterations + iterations, self._computed + computed
        return carry.solver.sample if last_latents is None else carry.solver.sample[:, :size]

    def _tables(self, size: int, prefix: int, frames: int, fps: Any, *, planned: bool = False) -> tuple[Tables, int]:
        """Tables of a segment's iterations, and how many there are; if `planned`, without the transformer's say."""
        request = self._request
        levels = noise_levels(request.num_inference_steps, request.shift, self._reference)
        forcing = None
        timesteps = levels.timesteps
        if self._settings.kind == "df":
            forcing = forcing_schedule(
                frames,
                levels.timesteps,
                ar_step=request.ar_step,
                causal_block_size=request.causal_block_size,
                prefix=prefix,
                fixed=self._reference != "diffusers",
            )
            forcing = _closed(forcing, size)
            timesteps = forcing.timesteps
            if request.addnoise_condition:
                timesteps = np.where(np.arange(frames) < prefix, np.int32(request.addnoise_condition), timesteps)
        run_blocks = self._run_blocks(timesteps, fps) if request.cache and not planned else None
        overwritten = self._settings.kind == "df" and self._reference == "diffusers"
        return make_tables(levels, forcing, run_blocks, overwritten=overwritten), len(timesteps)

    def _run_blocks(self, timesteps: np.ndarray, fps: Any) -> Bool[np.ndarray, "R"]:
        request, stages = self._request, self._stages
        cache = teacache_for(
            width=self._config.dim,
            image_to_video=self._settings.kind == "i2v",
            pixels=request.height * request.width,
        )
        with stages.transformer.weights() as weights:
            embedded = jax.tree.map(np.asarray, stages.time_program(weights, timesteps, fps))
        return steps_running_blocks(timesteps, lambda _: embedded, request.cache_threshold, cache)

    def _noise(self, size: int) -> Float32[Array, "1 F h w C"]:
        request, geometry = self._request, self._geometry
        if request.latents is not None and self._segment == 0:
            return jnp.asarray(request.latents, jnp.float32).transpose(0, 2, 3, 4, 1)
        pixels = geometry.pixels_per_latent
        shape = (1, size, request.height // pixels, request.width // pixels, geometry.channels)
        return self._stages.noise(request.seed, self._segment, shape)

    def _decode(self, latents: Array, *, skip: int, latest: int | None = None) -> Float32[Array, "1 T H W 3"]:
        """Frames, kept in the form that was asked for, without the first few, which are there already.

        The callback is told of those of the last `latest` latents; of all if None.
        """
        with self._stage("decode", 1) as step:
            colours = self._stages.decode(latents)
            fresh = np.asarray(self._stages.finish(colours[:, skip:]))
            if self._request.output_type == "np":
                kept = np.asarray(colours[0, skip:]) / 2 + 0.5
            else:
                kept = fresh
            self._frames.append(kept)
            self._undecoded = None
            step(1, frames=fresh if latest is None else fresh[-latest * self._geometry.frames_per_latent :])
        return colours

    def _preview(self, latents: Array, *, skip: int) -> None:
        """A segment's frames for the callback alone, where the clip's own are decoded at the end.

        Decoded by itself, a segment has its first latent taken for a single frame: that and a few after it are of those
        that are left out.
        """
        with self._stage("decode", 1) as step:
            step(1, frames=np.asarray(self._stages.finish(self._stages.decode(latents)[:, skip:])))

    # What is told on the way.

    @property
    def _shows(self) -> bool:
        return self._show_progress and progress.shown()

    @contextmanager
    def _stage(self, name: str, total: int, more: str = "") -> Iterator[Step]:
        """A stage: timed, with a bar, which says `more` too, and a function to call with how much is done."""
        begin = time.perf_counter()
        several = f" {self._segment + 1}/{len(self._sizes)}" if len(self._sizes) > 1 else ""
        reached = 0
        with progress.bar(LABELS[name] + several + more, enabled=self._show_progress) as report:

            def step(done: int, latents: Array | None = None, frames: np.ndarray | None = None) -> None:
                nonlocal reached
                reached = done
                seconds = time.perf_counter() - begin
                report(done, total, f"{seconds / done:.3g} s a step" if name == "denoise" else "")
                if self._request.callback is None:
                    return
                now = VideoProgress(
                    stage=name,
                    done=done,
                    total=total,
                    segment=self._segment,
                    segments=len(self._sizes),
                    seconds=seconds,
                    fps=self._request.fps,
                    latents=None if latents is None else _diffusers_layout(np.asarray(latents)),
                    frames=frames,
                )
                if self._request.callback(now) is False:
                    raise _StoppedError

            yield step
            if reached < total:
                step(total)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin


def _closed(schedule: ForcingSchedule, size: int) -> ForcingSchedule:
    """The iterations of a segment with frames behind its own: those are clean, and stay as they are."""
    timesteps, update = schedule.timesteps.copy(), schedule.update.copy()
    timesteps[:, size:], update[:, size:] = 0, False
    return schedule._replace(timesteps=timesteps, update=update)


def _diffusers_layout(latents: np.ndarray) -> np.ndarray:
    return latents.transpose(0, 4, 1, 2, 3)
