"""Comparison of whole video pipelines: one clip made by diffusers' pipeline and by verax."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers, processors

from verax import progress
from verax._optional import require_optional
from verax.checkpoint.load import random_weights
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.parts import PARTS
from verax.compare.case import Inputs
from verax.compare.cases.text import transformers
from verax.compare.cases.video import RANDOM, build_part, diffusers, video_case
from verax.compare.comparison import not_finite
from verax.compare.report import VideoReport
from verax.compare.torch_side import torch
from verax.compare.videos import compare_clips
from verax.errors import InvalidParameterError
from verax.video.networks import PromptTokenizer
from verax.video.pipeline import VideoPipeline

MIN_PSNR = 60.0
"""dB, of the worst frame in float32. A difference of one level of 256 in every pixel would be 48 dB."""

PROMPT = "A red circle floats over a blue gradient"
LARGEST = (128, 192)
"""Height and width of a frame, where none are given and the model's own are not smaller."""
FRAMES, STEPS = 9, 4
"""Frames and steps of the clip, where none are given and the model's own are not fewer."""

NOTHING = Inputs()

WORDS = tuple(PROMPT.lower().split())
RANDOM_SETTINGS = dict(height=32, fps=8, guidance_scale=4.0)
RANDOM_WIDTHS = {"tiny": 48, "tiny-5b": 64}
RANDOM_PIPELINES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"_class_name": "SkyReelsV2ImageToVideoPipeline"},
    "tiny-5b": {"_class_name": "WanPipeline", "expand_timesteps": True},
}
"""Settings of model_index.json of the sizes of `RANDOM` that have all parts of a pipeline."""


def compare_pipelines(
    model: str | Path,
    *,
    prompt: str = PROMPT,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    num_inference_steps: int | None = None,
    seed: int = 0,
    dtype: str = "float32",
    inputs: Inputs = NOTHING,
    repeat: bool = True,
) -> VideoReport:
    """Make one clip with diffusers' pipeline and with verax, and compare their frames.

    Both begin with the same noise and the same states of the prompt, which verax's text encoder makes, so that the
    reference needs no memory for one. All else, from the picture and the noise to the frames, each side computes with
    weights, scheduler, image processor and VAE of its own. One side is in memory at a time. Sizes that are None are
    small, or the checkpoint's.

    Args:
        model: a folder of either published layout. diffusers' form is made of its parts.
        inputs: `latents` `[1, channels, F, H, W]` to begin with, and for image to video an `image` `[H, W, 3]`, uint8,
            instead of noise by `seed` and a gradient.
        repeat: make each clip a second time, to say whether a side is deterministic.

    Result: the report; its `failures` are empty if they count as equal.
    """
    opened = VideoFolder(model)
    kind = getattr(diffusers(), opened.pipeline, None)
    if kind is None:
        raise InvalidParameterError(f"{opened.path}: diffusers has no {opened.pipeline} to compare with")
    runs: dict[str, bool | None] = {}
    with progress.bar("comparing pipelines") as report:
        report(0, 2, "JAX")
        pipe = VideoPipeline(opened.path, dtype=dtype, reference="diffusers", show_progress=False)
        settings, geometry = pipe.settings, pipe.geometry
        tokenize = PromptTokenizer(opened.read_tokenizer())  # 512 rows, with which diffusers reckons
        options: dict[str, Any] = {
            "height": height or min(settings.height, LARGEST[0]),
            "width": width or min(settings.width, LARGEST[1]),
            "num_frames": num_frames or min(settings.num_frames, FRAMES),
            "num_inference_steps": num_inference_steps or min(settings.num_inference_steps, STEPS),
            "guidance_scale": settings.guidance_scale,
            "output_type": "np",
        }
        if settings.boundary_ratio is not None:
            second = settings.guidance_scale_2
            options["guidance_scale_2"] = settings.guidance_scale if second is None else second
        for name, text in (("prompt_embeds", prompt), ("negative_prompt_embeds", settings.negative_prompt)):
            tokens, lengths = tokenize([text])
            options[name] = np.array(pipe.stages.text_call(tokens.shape[1])(tokens, lengths), np.float32)
        latents = (options["num_frames"] - 1) // geometry.frames_per_latent + 1
        size = [options[side] // geometry.pixels_per_latent for side in ("height", "width")]
        shape = (1, geometry.channels, latents, *size)
        given, noise = inputs.arrays, np.random.default_rng(seed).standard_normal(shape, np.float32)
        options["latents"] = np.asarray(given.get("latents", noise), np.float32)
        picture = given.get("image", _picture(options["height"], options["width"]))
        image: dict[str, Any] = {"image": picture} if settings.kind == "i2v" else {}
        inputs.checked({"latents": shape} | ({"image": (None, None, 3)} if image else {}), texts=True)
        if picture.dtype != np.uint8:
            raise InvalidParameterError(f"inputs: image is uint8, from 0 to 255, not {picture.dtype}")
        ours, runs["verax"] = _twice(lambda: pipe(**options, **image).frames, "verax", repeat)
        shift, fps = settings.shift, settings.fps
        del pipe
        gc.collect()  # compiled programs refer back to the pipeline that holds them
        report(1, 2, "PyTorch")
        reference = kind(**_components(opened, dtype, shift))
        reference.set_progress_bar_config(disable=True)
        tensors = {name: torch().from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        pictures = {name: require_optional("PIL.Image").fromarray(x) for name, x in image.items()}
        if settings.kind == "df":
            tensors["fps"] = fps
        with torch().no_grad():
            theirs, runs["diffusers"] = _twice(
                lambda: np.asarray(reference(**tensors, **pictures).frames[0], np.float32), "diffusers", repeat
            )
    names = f"{opened.name}, {dtype}: diffusers", "verax"
    first, second = (np.round(frames * 255).astype(np.uint8) for frames in (theirs, ours))
    bound = MIN_PSNR if dtype == "float32" else None
    return VideoReport(compare_clips(theirs, ours), first, second, names, fps, bound, runs if repeat else {})


def _twice(run: Callable[[], np.ndarray], side: str, repeat: bool) -> tuple[np.ndarray, bool | None]:
    """The frames of a side, and whether a second run has the same; None without one."""
    frames = run()
    if problem := not_finite(frames):
        raise InvalidParameterError(f"the clip of {side} has {problem}")
    return frames, np.array_equal(frames, run()) if repeat else None


def _components(opened: VideoFolder, dtype: str, shift: float) -> dict[str, Any]:
    """Arguments of diffusers' pipeline, without a text encoder."""
    components: dict[str, Any] = {"tokenizer": None, "text_encoder": None}
    if opened.boundary_ratio is not None:
        components["boundary_ratio"] = opened.boundary_ratio
    if opened.expand_timesteps:
        components["expand_timesteps"] = True
    for part in PARTS:
        if part in opened and part != "text_encoder":
            components[part] = video_case(opened.path, part).reference(dtype).model
    components["scheduler"] = diffusers().UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    if "image_encoder" in components:
        side = opened.config("image_encoder").get("image_size", 224)
        sizes = opened.image_processor or {"size": {"shortest_edge": side}, "crop_size": side}
        components["image_processor"] = transformers().CLIPImageProcessor(**sizes)
    return components


def _picture(height: int, width: int) -> np.ndarray:
    """Gradients, another in each colour: uint8 `[H, W, 3]`."""
    y, x = np.mgrid[0 : 1 : 1j * height, 0 : 1 : 1j * width]
    return np.round(255 * np.stack([x, y, 1 - x * y], axis=-1)).astype(np.uint8)


def random_video(folder: Path, size: str = "tiny") -> Path:
    """Write a small model of random weights, of one of `RANDOM_PIPELINES`, in diffusers' layout; its folder."""
    for part, settings in RANDOM[size].items():
        (folder / part).mkdir(parents=True)
        abstract = nnx.eval_shape(partial(build_part, part, settings))
        save_file(random_weights(abstract), folder / part / f"{PARTS[part].stem}.safetensors")
        _write(folder / part / "config.json", settings)
    _write(folder / "model_index.json", dict(RANDOM_PIPELINES[size]))
    _write(folder / "scheduler" / "scheduler_config.json", {"flow_shift": 5.0})
    if "image_encoder" in RANDOM[size]:
        side = RANDOM[size]["image_encoder"]["image_size"]
        _write(
            folder / "image_processor" / "preprocessor_config.json",
            {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}},
        )
    _write(folder / "verax.json", {**RANDOM_SETTINGS, "width": RANDOM_WIDTHS[size]})
    vocabulary = {word: i for i, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    tokenizer: Any = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    return folder


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(fields), encoding="utf-8")
