"""`VideoPipeline`: text, pictures and clips in, frames out, with the habits of the PyTorch pipelines."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32

from verax import builtin, models, progress
from verax._compat import enable_compilation_cache
from verax.checkpoint.video.folder import VideoFolder
from verax.errors import InvalidParameterError, RequestRefusedError
from verax.models.wan.model import WanConfig
from verax.models.wan.vae import WanVaeConfig
from verax.video import pictures
from verax.video.denoise import Denoiser
from verax.video.load import load_components
from verax.video.memory import StageMemory, amount, free_memory, largest, refusal
from verax.video.outputs import Callback, VideoOutput
from verax.video.prompt import PromptTokenizer
from verax.video.request import Grid, VideoRequest, make_request
from verax.video.resume import check_resume
from verax.video.run import Run
from verax.video.settings import read_settings
from verax.video.stages import Stages

__all__ = ["VideoPipeline"]

_log = logging.getLogger("verax.video")

Lora = str | Path | Sequence[str | Path] | Mapping[Any, float] | None
"""A LoRA file, several, or files with a factor for each."""

KEPT_PROMPTS = 16
"""Prompts whose states are kept, so that asking again needs no text encoder."""


class VideoPipeline:
    """SkyReels-V2 and Wan2.1: text to video, image to video, diffusion forcing.

    Example:
        >>> pipe = VideoPipeline.from_pretrained("SkyReels-V2-I2V-1.3B-540P")
        >>> clip = pipe("The cat turns its head.", image="cat.png")
        >>> clip.save("cat.mp4")
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: str = "bfloat16",
        reference: str | None = None,
        kind: str | None = None,
        lora: Lora = None,
        keep_encoders: bool | None = None,
        offload: bool = False,
        show_progress: bool = True,
    ):
        """Open a checkpoint's folder; see `from_pretrained`."""
        if dtype not in models.DTYPES:
            raise InvalidParameterError(f"dtype: expected one of {', '.join(models.DTYPES)}, got {dtype!r}")
        enable_compilation_cache()
        opened = VideoFolder(folder)
        self.reference = "skyreels" if reference is None else reference
        shift = opened.flow_shift
        self.settings = read_settings(opened, shift, kind=kind, reference=self.reference)
        self._show_progress = show_progress
        factors = _factors(lora)
        self._about = {
            **{"model": opened.name, "kind": self.settings.kind, "reference": self.reference, "dtype": dtype},
            "lora": ", ".join(f"{path.name}:{factor:g}" for path, factor in factors.items()),
        }
        if offload and jax.default_backend() == "cpu":
            _log.warning("offload: a CPU has one memory; nothing is moved")
            offload = False
        found = load_components(
            opened,
            models.DTYPES[dtype],
            keep_encoders=keep_encoders,
            offload=offload,
            lora=factors,
            show_progress=show_progress,
        )
        self.stages = Stages(**found._asdict(), decode_dtype=models.DTYPES[dtype])
        self.denoiser = Denoiser(found.transformer)
        transformer: WanConfig = found.transformer.config
        vae: WanVaeConfig = found.vae.config
        self.grid = Grid(
            frames_per_latent=vae.frames_per_latent,
            pixels_per_latent=vae.pixels_per_latent,
            pixels_per_token=vae.pixels_per_latent * transformer.patch,
            channels=vae.z_dim,
            text_width=transformer.text_dim,
        )
        if (self.settings.kind == "i2v") != (transformer.image_dim is not None):
            raise InvalidParameterError(
                f"kind: {self.settings.kind} does not fit this transformer, whose image_dim is {transformer.image_dim}"
            )
        self._tokenizer = PromptTokenizer.from_folder(opened.tokenizer, length=self.settings.text_tokens)
        self._states: dict[str, Float32[Array, "1 T D"]] = {}

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        dtype: str = "bfloat16",
        reference: str | None = None,
        kind: str | None = None,
        lora: Lora = None,
        keep_encoders: bool | None = None,
        offload: bool = False,
        show_progress: bool = True,
    ) -> VideoPipeline:
        """Open a checkpoint. Weights are read when they are first used.

        Args:
            model: a folder in the original's or diffusers' layout, or the hub id of one; None is the built-in model.
            dtype: `"bfloat16"`, or `"float32"`, of weights and of what is multiplied; all else is float32.
            reference: whose rules, where the two PyTorch pipelines differ: `"skyreels"` (the original's, and the
                default, less its slips) or `"diffusers"`.
            kind: `"t2v"`, `"i2v"` or `"df"` (diffusion forcing), where the folder does not say: the original's 14B
                models for text and for forcing differ in nothing but their folders' names.
            lora: a LoRA file (safetensors; diffusers', PEFT's or kohya's names), several, or files with a factor for
                each. They change the transformer's weights as these are read.
            keep_encoders: whether text and image encoder stay on the device between calls; if None, when they are
                small. UMT5-XXL is not: its 11 GB are given back after the prompt is read.
            offload: whether weights wait in the host's memory while they are not used. On a CPU nothing but a warning.
            show_progress: bars, if stderr is a terminal.

        Raises:
            CheckpointError: if the checkpoint is missing, damaged, or does not fit its configuration.
            UnsupportedModelError: if verax has no such model.
            InvalidParameterError: if an argument makes no sense, with its name.
        """
        return cls(
            builtin.video_model() if model is None else model,
            dtype=dtype,
            reference=reference,
            kind=kind,
            lora=lora,
            keep_encoders=keep_encoders,
            offload=offload,
            show_progress=show_progress,
        )

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        image: Any = None,
        last_image: Any = None,
        video: Any = None,
        negative_prompt: str | None = None,
        height: int | None = None,
        width: int | None = None,
        resolution: str | None = None,
        num_frames: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        shift: float | None = None,
        fps: int | None = None,
        seed: int = 42,
        latents: Any = None,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        output_type: str = "video",
        callback: Callback | None = None,
        cache: str | None = None,
        cache_threshold: float = 0.2,
        guidance: str = "auto",
        ar_step: int = 0,
        causal_block_size: int | None = None,
        causal_attention: bool | None = None,
        overlap_history: int | None = None,
        addnoise_condition: int = 0,
        base_num_frames: int | None = None,
        attention: str = "auto",
        resume: str | Path | None = None,
    ) -> VideoOutput:
        """Make a clip. What is None is as the checkpoint says (`settings`).

        Args:
            prompt: what is to be seen; a list has one for each segment of a long clip, the last for all that follow.
            image: the first frame: a path, a PIL.Image, or an array `[H, W, 3]` (uint8, or floats from 0 to 1).
            last_image: the last frame, likewise; diffusion forcing only.
            video: a clip to go on from: a path, a list of images, or an array `[T, H, W, 3]`; diffusion forcing only.
                The result begins with it, and `num_frames` counts from the first of its last `overlap_history` frames.
            negative_prompt: what is not to be seen; of no account where `guidance_scale` is 1 or less.
            height, width: of a frame, multiples of 16. If both are None and the picture is upright, so is the clip.
            resolution: `"540P"` (544 x 960) or `"720P"` (720 x 1280) in their place.
            num_frames: 4n + 1. More than `base_num_frames` are made in segments.
            num_inference_steps: of the solver.
            guidance_scale: how far to go from the negative prompt towards the prompt.
            shift: of the noise levels, see `sigmas.noise_levels`.
            fps: of the file, and what a model that asks is told.
            seed: of the noise. The same seed gives the same clip.
            latents: noise to begin with, `[1, 16, F, height / 8, width / 8]`; of the first segment.
            prompt_embeds, negative_prompt_embeds: states `[1, tokens, width]` in place of prompts.
            output_type: `"video"` (uint8), `"np"` (float32 from 0 to 1), or `"latent"`.
            callback: told of every step, see `VideoProgress`; the run ends if it returns False.
            cache: `"teacache"` to leave out the transformer's blocks in steps that change little.
            cache_threshold: see `teacache.computed_steps`.
            guidance: `"batch"` for prompt and negative prompt together, `"sequential"` for one after the other, in less
                memory; `"auto"` for the first that fits.
            ar_step: diffusion forcing: how many steps a block is behind the one before it; 0 for all together.
            causal_block_size: diffusion forcing: latent frames in a block; every segment must be whole blocks.
            causal_attention: whether a block sees earlier blocks only. No released model was trained for it; diffusers
                does it whenever there are blocks, and so does `reference="diffusers"`.
            overlap_history: frames that segments share, 4n + 1.
            addnoise_condition: diffusion forcing: timesteps of noise, of 1000, in which frames that are given are shown
                to the model: 20 hides seams.
            base_num_frames: frames of a segment.
            attention: an implementation of `wan_layers.ATTENTION`.
            resume: a .safetensors file in which finished segments are kept, and from which they are taken if it is
                there: the same request then goes on where it was ended, also with other prompts for later segments,
                or more frames.

        Raises:
            InvalidParameterError: naming the argument that does not fit, and what would; before any device work.
            RequestRefusedError: if the memory that is free does not hold it, with what it would hold.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        request = self._fitting(self._request(given))
        free = free_memory(self.stages)
        if free is not None:
            plan = self._plan(request)
            why = refusal(request, self.grid, plan, free, lambda change: self._plan(replace(request, **change)))
            if why is not None:
                raise RequestRefusedError(why)
        return self._run(request).serve()

    def plan(self, prompt: str | Sequence[str] | None = None, **options: Any) -> list[StageMemory]:
        """The memory that each stage of a request will need; compiles its programs, and runs and reads nothing.

        Args:
            prompt, options: as for the call.

        Raises:
            InvalidParameterError: as the call.
        """
        names = inspect.signature(type(self).__call__).parameters
        if unknown := set(options) - set(names):
            raise InvalidParameterError(f"{', '.join(sorted(unknown))}: not an option of a request")
        defaults = {name: parameter.default for name, parameter in names.items() if name != "self"}
        return self._plan(self._fitting(self._request({**defaults, "prompt": prompt, **options})))

    def _request(self, given: dict[str, Any]) -> VideoRequest:
        for name in ("image", "last_image"):
            if given[name] is not None:
                given[name] = pictures.read_image(given[name], name=name)
        if given["video"] is not None:
            given["video"] = pictures.read_clip(given["video"])[0]
        if given["resume"] is not None:
            check_resume(given["resume"])
        return make_request(self.settings, self.grid, self.reference, **given)

    def _run(self, request: VideoRequest) -> Run:
        return Run(
            request,
            settings=self.settings,
            grid=self.grid,
            reference=self.reference,
            stages=self.stages,
            denoiser=self.denoiser,
            text=self._text,
            about=self._about,
            show_progress=self._show_progress,
        )

    def _plan(self, request: VideoRequest) -> list[StageMemory]:
        with progress.bar("compiling", enabled=self._show_progress, count=False):
            return self._run(request).plan()

    def _fitting(self, request: VideoRequest) -> VideoRequest:
        """The request with its guidance decided: in turn only if that fits and both together do not."""
        if request.guidance != "auto":
            return request
        both, turns = (replace(request, guidance=how) for how in ("batch", "sequential"))
        free = free_memory(self.stages)
        if free is None or not request.guided or (needed := largest(self._plan(both)).peak) <= free:
            return both
        if largest(self._plan(turns)).peak > free:
            return both
        _log.warning(
            "guidance: prompt and negative prompt one after the other: both together need %s, and %s are free",
            *(amount(needed), amount(free)),
        )
        return turns

    def _text(self, prompt: str) -> Float32[Array, "1 T D"]:
        """A prompt's states, from the last few if it was among them."""
        states = self._states.pop(prompt, None)
        if states is None:
            tokens, lengths = self._tokenizer([prompt])
            states = self.stages.text(np.asarray(tokens), np.asarray(lengths))
        self._states[prompt] = states
        while len(self._states) > KEPT_PROMPTS:
            del self._states[next(iter(self._states))]
        return states


def _factors(lora: Lora) -> dict[Path, float]:
    """Files and their factors."""
    if isinstance(lora, Mapping):
        return {Path(path): float(factor) for path, factor in lora.items()}
    files = [] if lora is None else [lora] if isinstance(lora, str | Path) else lora
    return {Path(path): 1.0 for path in files}
