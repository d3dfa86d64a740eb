"""`VideoPipeline`: text, images and clips in, frames out, by any registered family of video models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, UInt8

from verax import builtin, models, ops, progress
from verax._compat import enable_compilation_cache
from verax.checkpoint.checkpoint import fingerprint
from verax.checkpoint.lora import lora_fingerprint
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.parts import noise_of
from verax.errors import InvalidParameterError, RequestRefusedError
from verax.models.images import resize
from verax.options import is_real
from verax.video.caches import MagCurve, with_cache
from verax.video.images import Image
from verax.video.load import load_components, load_tiny_decoder, open_model
from verax.video.memory import StageMemory, format_bytes, free_memory, largest, out_of_memory_message, plan_memory
from verax.video.mesh import GUIDANCE, SEQUENCE, axis_size, check_request, clip_mesh
from verax.video.networks import Denoiser, PromptStates, PromptTokenizer, Stages
from verax.video.outputs import RunReporter, VideoOutput
from verax.video.recipes import with_recipe
from verax.video.request import ResolvedRequest, VideoRequest, make_request, resolve_request
from verax.video.run import PipelineParts, run_request, stages_of
from verax.video.schedule import request_levels

_log = logging.getLogger("verax.video")

Lora = str | Path | Sequence[str | Path] | Mapping[Any, float] | None
"""A LoRA file, several, or files with a factor for each. A name may end with its factor, `style.safetensors:0.5`."""


class VideoPipeline:
    """Text to video, image to video and diffusion forcing, by SkyReels-V2, Wan2.1, Wan2.2 or another registered family.

    Examples:
        >>> pipe = VideoPipeline.from_pretrained("SkyReels-V2-I2V-1.3B-540P")
        >>> clip = pipe("The cat turns its head.", image="cat.png")
        >>> clip.save("cat.mp4")

    Attributes:
        parts: networks, programs and rules.
        settings: kind and defaults of the checkpoint.
        geometry: sizes of the checkpoint's latents.
        mesh: devices that the transformer is divided over, of the axes `guidance` and `sequence`; None for one device.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "bfloat16",
        quantization: str | None = None,
        reference: str | None = None,
        kind: str | None = None,
        lora: Lora = None,
        lora_2: Lora = None,
        vae: str | None = None,
        keep_encoders: bool | None = None,
        offload: bool = False,
        guidance_parallel: bool = False,
        sequence_parallel: int = 1,
        devices: int | None = None,
        devices_for: VideoRequest | None = None,
        mesh: Mesh | None = None,
        shard_weights: bool = False,
        show_progress: bool = True,
    ):
        """Open a checkpoint. Weights are read when they are first used.

        Args:
            model: a folder in the original's or diffusers' layout, or the hub id of one; None is the built-in model.
            dtype: `"bfloat16"` or `"float32"`: dtype of weights and of the inputs of matmuls; the rest is float32.
            quantization: `"int8"` or `"fp8"`: 8-bit weights of the transformer and of UMT5, quantised while they are
                read, after LoRA and whatever the files have; `"dequantize"`: `dtype`, also where the files have
                quantised weights. None: what the files have, or float32 if that is the dtype.
            reference: rules where PyTorch's pipelines differ: `"skyreels"` or `"wan"` (the authors' own, less their
                slips; the default by the checkpoint), or `"diffusers"`.
            kind: `"t2v"`, `"i2v"`, `"flf2v"` (first and last frame), `"ti2v"` (either), `"df"` (diffusion forcing) or
                `"vace"`, where the folder does not determine it: the original's 14B models for text and for forcing
                differ in nothing but their folders' names.
            lora: a LoRA file (safetensors, by the names of any of the usual programs), several, or files with a factor
                for each. They change the transformer's weights as these are read.
            lora_2: files for the second of two transformers, where noise is low. If None, the files of `lora` are for
                both, but for those whose name says `high_noise` or `low_noise`, which are for the one that it says.
            vae: `"tiny=FILE"` to decode by TAEHV's tiny decoder, a safetensors or .pth file in its published layout;
                `"tiny"` for `taew2_1` or `taew2_2` in the checkpoint's folder. Clips are less sharp. The checkpoint's
                VAE still encodes images.
            keep_encoders: True if text and image encoder stay on the device between calls; if None, when they are
                small or all networks take at most half of its memory, until a clip does not fit next to them. Otherwise
                the 11 GB of UMT5-XXL are freed after the prompt is encoded.
            offload: True if weights are in the host's memory while they are not used. On a CPU only a warning.
            guidance_parallel: True to run prompt and negative prompt on two groups of devices.
            sequence_parallel: devices of a group, which divide the tokens of each frame and the heads of attention.
                Each device has all weights of the transformer, unless `shard_weights`, and of the VAE, which decodes a
                part of each frame. The text and image encoders are divided over all devices.
            devices: devices to divide clips over. If these two are left out, they are chosen so that the most devices
                are used, guidance first; otherwise it is their product.
            devices_for: a request whose size and guidance the choice is to fit; the checkpoint's defaults if None.
            mesh: devices in place of these options: of the axes `"guidance"`, of size 1 or 2, and `"sequence"`.
            shard_weights: True to divide the weights of the transformer's blocks over all of these devices, which
                gather them block by block in every step: less memory on each device, and more communication.
            show_progress: True for bars, if stderr is a terminal.

        Raises:
            CheckpointError: if the checkpoint is missing, damaged, or does not fit its configuration.
            UnsupportedModelError: if verax does not implement the model.
            InvalidParameterError: naming an argument that is out of range.
        """
        models.check_dtype(dtype)
        enable_compilation_cache()

        # 1. The checkpoint: family, settings and rules.
        folder = VideoFolder(builtin.video_model() if model is None else model)
        family = open_model(folder, kind=kind, reference=reference)
        settings, geometry = family.settings, family.geometry

        # 2. The devices that divide a clip.
        clip_devices: Any = clip_mesh(
            family.transformers[0].config,
            guidance_parallel=guidance_parallel,
            sequence_parallel=sequence_parallel,
            devices=devices,
            request=with_recipe(devices_for or VideoRequest()),
            settings=settings,
            geometry=geometry,
            mesh=mesh,
            shard_weights=shard_weights,
        )

        # 3. The networks and their programs. Nothing is read or compiled yet.
        if lora_2 is not None and len(family.transformers) == 1:
            raise InvalidParameterError("lora_2: this model has one transformer; give lora alone")
        factors = _factors("lora", lora)
        factors_2 = factors if lora_2 is None else _factors("lora_2", lora_2)
        if lora_2 is None and len(family.transformers) > 1:
            # Trainers write a file for each of the two, whose name says which.
            factors, factors_2 = (
                {path: factor for path, factor in factors.items() if noise_of(path.name) != other}
                for other in ("low", "high")
            )
        if offload and ops.target().platform == "cpu":
            _log.warning("offload: a CPU has one memory; nothing is moved")
            offload = False
        networks = load_components(
            folder,
            family,
            models.DTYPES[dtype],
            keep_encoders=keep_encoders,
            offload=offload,
            lora=(factors, factors_2),
            show_progress=show_progress,
            mesh=clip_devices,
            shard_weights=shard_weights,
            quantization=quantization,
        )
        encoders = (networks.text_encoder, networks.image_encoder) if keep_encoders is None else ()
        self._releasable = [encoder for encoder in encoders if encoder is not None]
        decoder = None
        if vae is not None:
            decoder = load_tiny_decoder(vae, folder, family, models.DTYPES[dtype], offload=offload, mesh=clip_devices)
        stages = Stages(
            text_encoder=networks.text_encoder,
            image_encoder=networks.image_encoder,
            vae=networks.vae,
            decoder=decoder,
            encode_condition=family.conditioning.encode,
            mesh=clip_devices,
        )
        tokenizer = PromptTokenizer(folder.read_tokenizer(), length=settings.text_tokens)
        self.parts = PipelineParts(
            model=family,
            stages=stages,
            denoisers=tuple(Denoiser(network, clip_devices) for network in networks.transformers),
            prompt_states=PromptStates(tokenizer, stages.text_call(settings.text_tokens)),
        )
        self.settings, self.geometry = settings, geometry
        self._picture = Previewer(stages, geometry.pixels_per_latent)
        self.mesh: Mesh | None = clip_devices
        self._show_progress = show_progress
        self._folder = folder
        self._origin = {
            **{"model": folder.name, "kind": settings.kind, "reference": family.rules.name, "dtype": dtype},
            **{"quantization": quantization, "vae": vae},
            **{
                name: ", ".join(f"{path.name}:{factor:g} ({lora_fingerprint(path)})" for path, factor in files.items())
                for name, files in (("lora", factors), ("lora_2", factors_2))
            },
        }

    @classmethod
    def from_pretrained(cls, model: str | Path | None = None, **options: Any) -> VideoPipeline:
        """Open a checkpoint, as `VideoPipeline(model, **options)` does; the name that users of diffusers look for."""
        return cls(model, **options)

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        image: Image | None = None,
        last_image: Image | None = None,
        video: Any = None,
        **options: Any,
    ) -> VideoOutput:
        """Make a clip: `pipe("The cat turns its head.", image="cat.png", num_frames=97)`.

        Args:
            prompt: description of the clip; a list has one for each segment of a long clip.
            image: first frame: a path, a PIL.Image, or an array `[H, W, 3]` (uint8, or floats from 0 to 1).
            last_image: last frame, likewise, for models that take one.
            video: clip to continue (diffusion forcing) or to be controlled by (VACE): a path, a list of images, or an
                array `[T, H, W, 3]`.
            options: other fields of `VideoRequest`, where they are described.

        Raises:
            InvalidParameterError: naming the argument that does not fit, and values that would; before device work.
            RequestRefusedError: if the free memory is too small, with changes to the request that would fit.
        """
        return self.generate(
            make_request(prompt, {"image": image, "last_image": last_image, "video": video, **options})
        )

    def generate(self, request: VideoRequest) -> VideoOutput:
        """Make the clip of a request.

        Raises:
            InvalidParameterError: naming the option that does not fit, and values that would; before device work.
            RequestRefusedError: if the free memory is too small, with changes to the request that would fit.
        """
        # 1. Check the request, and fill in what it leaves open.
        resolved = self._with_guidance(self.resolve(request))

        # 2. Refuse it before any work if it does not fit in the memory.
        self._check_memory(resolved)

        # 3. Run its stages.
        segments = len(resolved.segments(self.geometry))
        reporter = RunReporter(resolved.callback, resolved.fps, segments, self._show_progress, self._picture)
        origin = self._origin if resolved.resume is None else {**self._origin, "weights": self._weights}
        return run_request(resolved, self.parts, reporter, origin)

    def calibrate(self, request: VideoRequest) -> MagCurve:
        """Measure MagCache's curve of the checkpoint: run a request's steps, and compare each step's residual with the
        residual before. The curve is for requests of its number of steps (`MagCurve.save`, `cache_curve`).

        Raises:
            InvalidParameterError: naming the option that does not fit, such as more than one segment.
            RequestRefusedError: if the free memory is too small.
        """
        # The curve needs the residual that a cache keeps, and no decoded frames.
        unused = ("cache", "cache_threshold", "cache_max_skip_steps", "cache_retention_ratio", "cache_curve")
        request = replace(request, **dict.fromkeys(unused))
        plain = self.resolve(replace(request, output_type="latent"))
        several = len(plain.segments(self.geometry)) > 1
        unfit = {"ar_step": plain.ar_step, "half_size_steps": plain.half_size_steps, "num_frames": several}
        for name in filter(unfit.get, unfit):
            raise InvalidParameterError(f"{name}: a curve is of one segment, whose frames are at one step and one size")
        measured = self._with_guidance(replace(plain, cache="magcache", resume=None))
        self._check_memory(measured)
        magnitudes: list[np.ndarray] = []
        reporter = RunReporter(None, plain.fps, 1, self._show_progress, self._picture)
        run_request(measured, self.parts, reporter, self._origin, magnitudes)
        ratios = np.stack(magnitudes).astype(np.float64)
        ratios[0] = 1  # there is no step before
        return MagCurve.of(self.parts.model, ratios)

    def resolve(self, request: VideoRequest) -> ResolvedRequest:
        """Check a request, read its images, and fill in what it leaves open. No device work.

        Raises:
            InvalidParameterError: naming the option that does not fit, and values that would.
        """
        # Few sizes have tokens that devices can divide, and a picture has any size.
        is_divided = axis_size(self.mesh, SEQUENCE) > 1
        resolved = resolve_request(request, self.parts.model, follow_picture=not is_divided)
        check_request(self.mesh, resolved, self.geometry)
        request_levels(resolved, self.parts.model, resolved.shift)  # refuses those that no solver can take
        return with_cache(resolved, self.parts.model)

    def plan(self, request: VideoRequest) -> list[StageMemory]:
        """Memory of each stage of a request. Compiles its programs; reads no weights and runs nothing.

        Raises:
            InvalidParameterError: as `generate`.
        """
        return self._plan(self._with_guidance(self.resolve(request)))

    @property
    def stages(self) -> Stages:
        """Programs of the encoders and the VAE."""
        return self.parts.stages

    @property
    def denoiser(self) -> Denoiser:
        """Programs of the transformer; of the first, if there are several."""
        return self.parts.denoisers[0]

    @cached_property
    def _weights(self) -> str:
        """Digests of the transformers' weights in the folder, without LoRA."""
        networks = self.parts.model.transformers
        return " ".join(fingerprint(self._folder.checkpoint(network.folder)) for network in networks)

    def _check_memory(self, request: ResolvedRequest) -> None:
        """Raise RequestRefusedError if a request does not fit in the free memory."""
        free = free_memory(self.parts.components)
        if free is None:
            return

        def replan(change: Mapping[str, Any]) -> list[StageMemory] | None:
            try:
                return self._plan(self.resolve(replace(request, **change)))
            except InvalidParameterError:  # such as a clip of no more frames than its picture
                return None

        devices = axis_size(self.mesh, SEQUENCE)
        why = out_of_memory_message(request, self.geometry, self._plan(request), free, replan, devices=devices)
        if why is not None:
            raise RequestRefusedError(why)

    def _plan(self, request: ResolvedRequest) -> list[StageMemory]:
        components, stages = self.parts.components, stages_of(request, self.parts)
        with progress.bar("compiling", enabled=self._show_progress, count=False):
            plan, free = plan_memory(stages, components), free_memory(components)
            if free is None or largest(plan).peak <= free:
                return plan
            if any(one.keep for one in self._releasable):
                for encoder in self._releasable:
                    encoder.release()
                plan = plan_memory(stages, components)
            if largest(plan).peak > free and largest(plan := plan_memory(stages)).peak <= free:
                # It fits without the weights that an earlier clip left on the device, which are then read again.
                for one in components:
                    one.unload()
        return plan

    def _with_guidance(self, request: ResolvedRequest) -> ResolvedRequest:
        """Request with `guidance` decided: sequential only if that fits and batch does not."""
        if axis_size(self.mesh, GUIDANCE) > 1:
            return replace(request, guidance="batch")  # a device has one row, and no choice
        if request.guidance != "auto":
            return request
        batch, sequential = (replace(request, guidance=value) for value in ("batch", "sequential"))
        free = free_memory(self.parts.components)
        if free is None or not request.guided or (peak := largest(self._plan(batch)).peak) <= free:
            return batch
        if largest(self._plan(sequential)).peak > free:
            return batch
        _log.warning(
            "guidance: prompt and negative prompt one after the other: both together need %s, and %s are free",
            *(format_bytes(peak), format_bytes(free)),
        )
        return sequential


def _factors(name: str, lora: Lora) -> dict[Path, float]:
    """Factor of each file of an argument."""
    if isinstance(lora, Mapping):
        files = [(Path(path), factor) for path, factor in lora.items()]
    else:
        several = () if lora is None else (lora,) if isinstance(lora, str | Path) else lora
        files = [_with_factor(file) for file in several]
    for path, factor in files:
        if path == Path():  # an empty name, such as of a variable of a shell that is not set
            raise InvalidParameterError(f"{name}: expected the path of a LoRA file, got an empty text")
        if not is_real(factor):
            raise InvalidParameterError(f"{name}: expected a number as the factor of {path}, got {factor!r}")
    factors = {path: float(factor) for path, factor in files}
    if len(factors) < len(files):
        raise InvalidParameterError(f"{name}: expected each file once, got {', '.join(str(path) for path, _ in files)}")
    return factors


def _with_factor(file: str | Path) -> tuple[Path, float]:
    """Path and factor of FILE or FILE:FACTOR."""
    path, colon, factor = str(file).rpartition(":")
    try:
        return (Path(path), float(factor)) if colon else (Path(file), 1.0)
    except ValueError:
        return Path(file), 1.0  # a colon of the file's name


_PATCHES = 16
"""Rows and columns of latents in the image of random colours to which the map is fitted."""

_SIDE = 256
"""Longer side of a preview in pixels."""


class Previewer:
    """Callable that makes a picture of one latent frame: by the tiny decoder, or without one by a linear map.

    A latent stands for a square of pixels, and its channels give the square's mean colour almost linearly. ComfyUI has
    such factors for some models; here they are fitted, once, to an image of known colours. Nothing is compiled or
    fitted before the first picture.

    `pixels_per_latent`: height and width of a latent in pixels.
    """

    def __init__(self, stages: Stages, pixels_per_latent: int):
        self._stages, self._pixels = stages, pixels_per_latent
        self._factors: np.ndarray | None = None

    def __call__(self, latents: Float[np.ndarray, "1 1 h w C"]) -> UInt8[np.ndarray, "H W 3"]:
        """Picture of a latent frame, at its size or with a longer side of 256 pixels."""
        if self._stages.decoder is not self._stages.vae:
            return np.asarray(self._stages.finish(self._stages.decode_call(latents)(jnp.asarray(latents))))[0]
        if self._factors is None:
            self._factors = fit_colors(self._stages.encode, self._pixels)
        colors = np.clip(_with_ones(latents[0, 0]) @ self._factors, 0, 255).astype(np.uint8)
        height, width, _ = colors.shape
        scale = _SIDE / max(height, width)
        return resize(colors, max(1, round(height * scale)), max(1, round(width * scale)), method="bicubic")


def fit_colors(encode: Callable[[np.ndarray], object], pixels_per_latent: int) -> Float[np.ndarray, "C_and_1 3"]:
    """Linear map from a latent's channels and 1 to a colour from 0 to 255.

    `encode`: VAE's encoder: uint8 `[1, 1, H, W, 3]` to latents `[1, 1, h, w, C]`.
    """
    colors = np.random.default_rng(0).integers(0, 256, (_PATCHES // 4, _PATCHES // 4, 3), np.uint8)
    image = colors.repeat(4 * pixels_per_latent, axis=0).repeat(4 * pixels_per_latent, axis=1)
    latents = np.asarray(encode(image[None, None]), np.float32)[0, 0]
    known = colors.repeat(4, axis=0).repeat(4, axis=1).reshape(-1, 3)
    return np.linalg.lstsq(_with_ones(latents).reshape(len(known), -1), known, rcond=1e-3)[0]


def _with_ones(latents: np.ndarray) -> np.ndarray:
    """Latents with a constant as the last channel."""
    return np.concatenate([latents, np.ones((*latents.shape[:-1], 1), latents.dtype)], axis=-1)
