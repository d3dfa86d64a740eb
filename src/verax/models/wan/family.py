"""`WanVideoModel`: SkyReels-V2, Wan 2.1 and Wan 2.2 as a family of video models.

The family's networks, kinds of conditioning, published defaults, and the rules of three PyTorch pipelines: `SKYREELS`
follows SkyReels-V2's own code (SkyworkAI/SkyReels-V2), `WAN` Wan's own (Wan-Video/Wan2.1 and Wan2.2), both less their
slips, which `docs/video.md` lists, and `DIFFUSERS` the pipelines of diffusers. Its step caches have the coefficients
and curves that the authors of TeaCache and MagCache published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.files import read_json
from verax.models import images
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.video_model import (
    Conditioning,
    LatentGeometry,
    Network,
    Pictures,
    ReferenceRules,
    TeaCache,
    TinyDecoderKind,
    VideoModel,
    VideoSettings,
    flow_sigmas,
    shift_sigmas,
)
from verax.models.wan.model import SKYREELS as SKYREELS_TRANSFORMER
from verax.models.wan.model import WAN_CONFIGS, WanConfig, WanModel
from verax.models.wan.tiny_vae import TinyDecoder, TinyDecoderConfig
from verax.models.wan.vace import encode_control
from verax.models.wan.vae import WanVae, WanVaeConfig

MASK_CHANNELS = 4
"""Mask channels of an image-to-video condition: one for each frame of a latent."""


def encode_given_frames(vae: WanVae, pictures: Pictures, *, frames: int, chunk: int) -> Float[Array, "1 F h w E"]:
    """Channels of image to video: a mask, then the latents of a clip of the image and gray, and of a last image.

    Each latent has a mask channel for each of its 4 frames: 1 for a given frame, 0 for gray. The first latent is one
    frame, and has 4 equal channels. Gray is 0, half way between black and white.
    """
    image, last = pictures.image, pictures.last_image
    assert image is not None
    clip = jnp.zeros((1, frames, *image.shape[1:]), jnp.float32).at[:, 0].set(image)
    clip = clip if last is None else clip.at[:, -1].set(last)
    latents = vae.encode(clip, chunk=chunk)
    mask = jnp.zeros((*latents.shape[:-1], MASK_CHANNELS), jnp.float32).at[:, 0].set(1.0)
    mask = mask if last is None else mask.at[:, -1, :, :, -1].set(1.0)
    return jnp.concatenate([mask, latents], axis=-1)


KINDS: Mapping[str, Conditioning] = {
    "t2v": Conditioning(),
    "i2v": Conditioning(encode=encode_given_frames),
    "flf2v": Conditioning(encode=encode_given_frames, takes_last_image=True, needs_last_image=True),
    "ti2v": Conditioning(given_frames=True),
    "df": Conditioning(given_frames=True, forcing=True, takes_last_image=True),
    "vace": Conditioning(encode=encode_control),
}
"""Text to video, image to video, first and last frame to video, text and maybe an image to video (Wan2.2's 5B, as in
diffusers' `WanImageToVideoPipeline` with `expand_timesteps`), diffusion forcing, and VACE's control condition."""

ENGLISH = (
    "Bright tones, overexposed, static, blurred details, subtitles, style, works, paintings, images, static, overall "
    "gray, worst quality, low quality, JPEG compression residue, ugly, incomplete, extra fingers, poorly drawn hands, "
    "poorly drawn faces, deformed, disfigured, misshapen limbs, fused fingers, still picture, messy background, three "
    "legs, many people in the background, walking backwards"
)
CHINESE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)
"""Negative prompts: SkyReels-V2's English, and Wan's Chinese, which SkyReels-V2's diffusion forcing has too."""


def _crop_and_resize(image: np.ndarray, height: int, width: int, *, method: images.Filter) -> np.ndarray:
    return images.resize(images.crop_to_aspect(image, height, width), height, width, method=method)


_LANCZOS = partial(_crop_and_resize, method="lanczos")

SKYREELS = ReferenceRules(
    name="skyreels",
    # `FlowUniPCMultistepScheduler` keeps its largest sigma in float32.
    sigmas=partial(flow_sigmas, begin=float(np.float32(0.999)), end=0.0),
    resize={**dict.fromkeys(KINDS, _LANCZOS), "df": partial(_crop_and_resize, method="bicubic")},
    clip_pixels=lambda image, frame, size: images.clip_pixels_skyreels(images.to_signed(frame), size),
    references=images.fit_on_white,
    negative_prompts={"t2v": ENGLISH, "i2v": ENGLISH, **dict.fromkeys(("flf2v", "ti2v", "df", "vace"), CHINESE)},
)

WAN = replace(
    SKYREELS,
    name="wan",
    other_sigmas={"dpm++": partial(flow_sigmas, begin=1.0, end=0.0)},
    resize={
        **dict.fromkeys(KINDS, images.cover),
        **dict.fromkeys(("i2v", "flf2v"), images.interpolate),
        "vace": partial(images.cover, method="bicubic"),
    },
    frame_sizes={
        **dict.fromkeys(("i2v", "flf2v"), images.size_of_area),
        "ti2v": partial(images.size_nearest_to_shape, token=32),
        "vace": images.size_of_clip,
    },
    clip_pixels=lambda image, frame, size: images.clip_pixels_skyreels(images.to_signed(image), size),
    # Wan2.1's begin with "camera shake" and "scene cut".
    negative_prompts={
        **dict.fromkeys(KINDS, CHINESE),
        "i2v": f"镜头晃动，{CHINESE}",
        "flf2v": f"镜头切换，镜头晃动，{CHINESE}",
    },
)


def _flow_match_sigmas(steps: int, shift: float) -> Float[np.ndarray, "N"]:
    """Noise levels of diffusers' `FlowMatchEulerDiscreteScheduler`, which shifts the last one twice."""
    return shift_sigmas(np.linspace(1.0, shift_sigmas(np.array([0.001]), shift)[0], steps), shift)


def _dpm_sigmas(steps: int, shift: float) -> Float[np.ndarray, "N"]:
    """Noise levels of diffusers' `DPMSolverMultistepScheduler`, which are rounded otherwise than `flow_sigmas`."""
    return shift_sigmas((1 - np.linspace(1.0, 0.001, steps + 1))[:0:-1], shift)


DIFFUSERS = ReferenceRules(
    name="diffusers",
    # `UniPCMultistepScheduler` with `use_flow_sigmas`, from diffusers 0.37.
    sigmas=partial(flow_sigmas, begin=1.0, end=0.001),
    other_sigmas={**dict.fromkeys(("euler", "lcm"), _flow_match_sigmas), "dpm++": _dpm_sigmas},
    resize=dict.fromkeys(KINDS, images.resize),
    clip_pixels=lambda image, frame, size: images.clip_pixels_diffusers(image, size),
    # Each picture goes before those that are there, after a resize to whole latents.
    references=lambda pictures, height, width: images.fit_on_white(pictures[::-1], height, width, multiple=8),
    decode_whole_clip=True,
    # No released model was trained for block-causal attention.
    causal_attention=True,
    keep_partial_blocks=False,
)

_PIPELINES = {"DiffusionForcing": "df", "ImageToVideo": "i2v", "VACE": "vace"}
"""Kinds by a part of the name of diffusers' pipeline; the first that fits is used."""

_SIZES = {"540P": (544, 960, 97), "720P": (720, 1280, 121)}
"""Height and width in pixels, and frames, that SkyReels-V2's models are trained on."""

_WAN_2_2: Mapping[str, Mapping[str, Any]] = {
    "t2v": dict(height=720, width=1280, num_frames=81, fps=16, num_inference_steps=40)
    | dict(guidance_scale=4.0, guidance_scale_2=3.0),
    "i2v": dict(height=720, width=1280, num_frames=81, fps=16, num_inference_steps=40)
    | dict(guidance_scale=3.5, guidance_scale_2=3.5),
    "ti2v": dict(height=704, width=1280, num_frames=121, fps=24, num_inference_steps=50, guidance_scale=5.0),
}
"""Settings of Wan2.2's own commands (`wan/configs`), by kind of model: two with two transformers, and 5B."""

_WAN_2_1: Mapping[str, Any] = {"num_frames": 81, "fps": 16, "num_inference_steps": 50, "guidance_scale": 5.0}
"""Settings of Wan2.1's own command (`generate.py`), whatever the kind."""


def _wan_settings(kind: str, transformer: WanConfig, *, name: str = "", experts: bool = False) -> dict[str, Any]:
    """Settings of the commands of Wan2.1 and Wan2.2, with what their READMEs add for a size of model; without a shift.

    `name`: name of the checkpoint's folder. `experts`: True for a model with two transformers.
    """
    if kind in _WAN_2_2 and (experts or kind == "ti2v"):
        return dict(_WAN_2_2[kind])
    is_small = transformer.dim == WAN_CONFIGS["t2v-1.3b"].dim
    height, width = (480, 832) if is_small or "480P" in name.upper() else (720, 1280)
    settings = {**_WAN_2_1, "height": height, "width": width}
    if kind == "i2v":
        settings["num_inference_steps"] = 40
    elif kind == "t2v" and is_small:
        settings["guidance_scale"] = 6.0
    return settings


def named_settings(name: str) -> VideoSettings:
    """Settings of one of `WAN_CONFIGS`: SkyReels-V2's for the models that it alone has published, and else Wan's."""
    if name in ("i2v-1.3b", "df-1.3b", "df-14b"):
        return VideoSettings()
    experts = name.endswith("a14b")
    more = _wan_settings(name.partition("-")[0], WAN_CONFIGS[name], experts=experts)
    return VideoSettings(**more, boundary_ratio=0.875 if experts else None)


def _read_kind(folder: Any, kind: str | None) -> str:
    """Kind of a checkpoint; `kind` where it is given."""
    if kind is not None and kind not in KINDS:
        raise InvalidParameterError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if kind is not None:
        return kind
    kind = next((kind for part, kind in _PIPELINES.items() if part in folder.pipeline), "t2v")
    kind = "ti2v" if folder.expand_timesteps else kind
    return "flf2v" if kind == "i2v" and WanConfig.from_hf(folder.config("transformer")).image_positions else kind


def _is_skyreels(folder: Any, kind: str) -> bool:
    """True for a checkpoint of SkyReels-V2, False for one of Wan, who alone has published models of the other kinds."""
    if kind not in ("t2v", "i2v", "df"):
        return False
    has_its_class = folder.config("transformer").get("_class_name") == SKYREELS_TRANSFORMER
    return has_its_class or folder.pipeline.startswith("SkyReels") or kind == "df"


def read_settings(folder: Any, shift: float, *, kind: str | None, negative_prompts: Mapping[str, str]) -> VideoSettings:
    """Settings of a checkpoint.

    Args:
        folder: open checkpoint (`checkpoint.video.folder.VideoFolder`). The settings in its `verax.json`, if it has
            one, are preferred to all others.
        shift: shift of its scheduler. 1 counts as not given, as the published converter leaves it at that.
        kind: one of `KINDS`; None to go by the name of the checkpoint's pipeline.
        negative_prompts: negative prompt of each kind; "" for kinds that are not listed.
    """
    kind = _read_kind(folder, kind)
    boundary_ratio = folder.boundary_ratio
    height, width, frames = _SIZES["720P" if "720P" in folder.name.upper() else "540P"]
    settings = VideoSettings(
        kind=kind,
        height=height,
        width=width,
        num_frames=frames,
        shift=shift if shift != 1 else VideoSettings.shift,
        solver=folder.solver,
        # Wan2.2's commands have one negative prompt for all kinds.
        negative_prompt=negative_prompts.get("ti2v" if boundary_ratio is not None else kind, ""),
        boundary_ratio=boundary_ratio,
    )
    if not _is_skyreels(folder, kind):
        transformer, experts = WanConfig.from_hf(folder.config("transformer")), boundary_ratio is not None
        more = _wan_settings(kind, transformer, name=folder.name, experts=experts)
        settings = replace(settings, **more, shift=shift if shift != 1 else folder.recommended_shift)
    return settings.updated(folder.own_settings, KINDS)


def latent_geometry(transformer: WanConfig, vae: WanVaeConfig) -> LatentGeometry:
    """Sizes of the latents of a transformer and a VAE."""
    return LatentGeometry(
        frames_per_latent=vae.frames_per_latent,
        pixels_per_latent=vae.pixels_per_latent,
        pixels_per_token=vae.pixels_per_latent * transformer.patch,
        channels=vae.z_dim,
        text_width=transformer.text_dim,
    )


_SMALL = 2048
"""Width up to which a model counts as 1.3B (which is 1,536 wide; 14B is 5,120)."""

_TEACACHE: dict[str, tuple[float, ...]] = {
    "i2v-540": (2.57151496e05, -3.54229917e04, 1.40286849e03, -1.35890334e01, 1.32517977e-01),
    "i2v-720": (8.10705460e03, 2.13393892e03, -3.72934672e02, 1.66203073e01, -4.17769401e-02),
    "1.3b": (-5.21862437e04, 9.23041404e03, -5.28275948e02, 1.36987616e01, -4.99875664e-02),
    "14b": (-3.03318725e05, 4.90537029e04, -2.65530556e03, 5.87365115e01, -3.15583525e-01),
}
"""Coefficients of the authors' `use_ret_steps`, which compares time's projected embeddings and keeps 5 first steps."""


def teacache_for(*, width: int, image_to_video: bool, pixels: int) -> TeaCache:
    """Coefficients that the authors of TeaCache fitted to a model and a size of frame.

    Args:
        image_to_video: True if the model takes an image through channels of its own.
        pixels: pixels of a frame; up to 544 x 960 counts as 540P, more as 720P.
    """
    if image_to_video:
        row = "i2v-540" if pixels <= 544 * 960 else "i2v-720"
    else:
        row = "1.3b" if width <= _SMALL else "14b"
    return TeaCache(_TEACACHE[row], kept=5)


_CURVES = Path(__file__).with_name("magcache.json")
"""Magnitude ratios that MagCache's authors measured (Zehong-Ma/MagCache, `MagCache4Wan2.1` and `MagCache4Wan2.2`), of
each step and of the prompt and the negative prompt: 50 steps, 40 for image to video and Wan2.2's pairs."""


@cache
def _curves() -> dict[str, Float[np.ndarray, "N 2"]]:
    return {name: np.stack([curve["prompt"], curve["negative"]], axis=1) for name, curve in read_json(_CURVES).items()}


def magcache_for(
    kind: str, *, width: int, experts: bool, pixels: int, has_image: bool
) -> Float[np.ndarray, "N 2"] | None:
    """Curve of a kind and size of model; None if none was published, as for diffusion forcing and a small I2V.

    Args:
        kind: see `VideoSettings.kind`.
        width: width of a token.
        experts: True for two transformers, of high and of low noise.
        pixels: pixels of a frame; up to 480 x 832 counts as 480P, more as 720P.
        has_image: True for a clip that begins with an image.
    """
    size = "1.3b" if width <= _SMALL else "14b"
    if experts:
        name = f"{kind}-a14b"
    elif kind == "i2v":
        name = ("i2v-480p" if pixels <= 480 * 832 else "i2v-720p") if size == "14b" else ""
    elif kind == "ti2v":
        name = "ti2v-image" if has_image else "ti2v-text"
    else:
        # The authors use the curve of T2V's 14B for VACE's, which was made of it.
        name = "t2v-14b" if (kind, size) == ("vace", "14b") else f"{kind}-{size}"
    return _curves().get(name)


class WanVideoModel(VideoModel):
    """A checkpoint of SkyReels-V2, Wan 2.1 or Wan 2.2."""

    references = MappingProxyType({rules.name: rules for rules in (SKYREELS, WAN, DIFFUSERS)})

    @classmethod
    def from_folder(cls, folder: Any, *, kind: str | None = None, rules: ReferenceRules | None = None) -> WanVideoModel:
        """Read the settings of a checkpoint; no weights. See `VideoModel.from_folder`."""
        if rules is None:
            rules = SKYREELS if _is_skyreels(folder, _read_kind(folder, kind)) else WAN
        settings = read_settings(folder, folder.flow_shift, kind=kind, negative_prompts=rules.negative_prompts)
        transformer = WanConfig.from_hf(folder.config("transformer"))
        vae = WanVaeConfig.from_hf(folder.config("vae"))
        text = UMT5Config.from_hf(folder.config("text_encoder"))
        image = None
        if transformer.image_dim is not None:
            image = CLIPVisionConfig.from_hf(folder.config("image_encoder"))
            _same("image_dim", transformer.image_dim, "the image encoder's hidden_size", image.hidden_size)
            if transformer.image_positions is not None:
                states = 2 * (1 + image.num_patches)
                _same("positions of images", transformer.image_positions, "the image encoder's of two", states)
        _same("text_dim", transformer.text_dim, "the text encoder's d_model", text.d_model)
        _same("output channels", transformer.out_dim, "the VAE's z_dim", vae.z_dim)
        if image is not None or transformer.in_dim != vae.z_dim:
            channels = 2 * vae.z_dim + vae.frames_per_latent
            _same("input channels", transformer.in_dim, "what a clip's latents and condition have", channels)
        conditioning = replace(KINDS[settings.kind], channels=transformer.in_dim - vae.z_dim)
        if transformer.vace_layers:
            channels = 2 * vae.z_dim + vae.pixels_per_latent**2
            _same("vace_in_dim", transformer.vace_in_dim, "what a control clip's latents and mask have", channels)
            conditioning = replace(conditioning, channels=channels, control_layers=len(transformer.vace_layers))
        elif settings.kind == "i2v":  # an image encoder's states have no place for a second picture
            conditioning = replace(conditioning, takes_last_image=image is None)
        fits = (settings.kind == "vace") == bool(transformer.vace_layers)
        if not fits or conditioning.needs_last_image != (transformer.image_positions is not None):
            raise InvalidParameterError(
                f"kind: {settings.kind} does not fit this transformer: flf2v has positions of two images' states "
                "(pos_embed_seq_len), vace has vace_layers, and other kinds have neither"
            )
        if (conditioning.encode is not None) != (conditioning.channels > 0):
            raise InvalidParameterError(
                f"kind: {settings.kind} does not fit this transformer, which takes {transformer.in_dim} channels, "
                f"{vae.z_dim} of them the latents'"
            )
        transformers = (Network("transformer", "transformer", WanModel, transformer),)
        if settings.boundary_ratio is not None:
            if (second := WanConfig.from_hf(folder.config("transformer_2"))) != transformer:
                raise UnsupportedModelError(
                    f"the two transformers should be of one size, got {transformer} and {second}"
                )
            transformers = (
                Network("transformer", "high-noise transformer", WanModel, transformer),
                Network("transformer_2", "low-noise transformer", WanModel, transformer),
            )
        return cls(
            settings=settings,
            rules=rules,
            geometry=latent_geometry(transformer, vae),
            conditioning=conditioning,
            text_encoder=Network("text_encoder", "text encoder", UMT5EncoderModel, text),
            image_encoder=None if image is None else Network("image_encoder", "image encoder", CLIPVisionModel, image),
            transformers=transformers,
            vae=Network("vae", "video VAE", WanVae, vae),
            tiny_decoder=TinyDecoderKind(
                "taew2_2" if vae.pixels_per_latent == 16 else "taew2_1",
                TinyDecoder,
                partial(TinyDecoderConfig.from_shapes, vae=vae),
            ),
        )

    def teacache(self, pixels: int) -> TeaCache:
        """Coefficients for frames of this many pixels."""
        width = self.transformers[0].config.dim
        image_to_video = self.conditioning.takes_image and self.conditioning.channels > 0
        return teacache_for(width=width, image_to_video=image_to_video, pixels=pixels)

    def magcache(self, pixels: int, *, has_image: bool) -> Float[np.ndarray, "N G"] | None:
        """Curve that the authors of MagCache measured for this kind and size of model; None if they did not."""
        width, experts = self.transformers[0].config.dim, len(self.transformers) > 1
        return magcache_for(self.settings.kind, width=width, experts=experts, pixels=pixels, has_image=has_image)


def _same(ours: str, one: int, theirs: str, other: int) -> None:
    if one != other:
        raise UnsupportedModelError(f"the transformer's {ours}, {one}, should be {theirs}, {other}")
