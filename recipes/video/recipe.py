"""Recipe of the built-in video model: VAE, latents of drawn clips, transformer and encoders, export.

A miniature of SkyReels-V2's image-to-video model. It is also trained without first frames, so that it generates clips
from text alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from recipes import save_tokenizer
from recipes.video.latents import CLIP_MEAN, CLIP_STD, END, PAD, TEXT_TOKENS, UNKNOWN, clips, video_tokenizer
from recipes.video.reader import TEXT_ENCODER, train_reader
from recipes.video.transformer import IMAGE_ENCODER, SHIFT, TRANSFORMER, Trainee, train_transformer
from recipes.video.vae import FRAMES, SIZE, refine_decoder, train_vae
from verax.checkpoint.save import save
from verax.checkpoint.video.convert import convert
from verax.checkpoint.video.folder import SETTINGS, VideoFolder
from verax.checkpoint.video.parts import diffusers_transformer, scheduler_settings
from verax.files import write_json
from verax.models.wan.vae import WanVae
from verax.train.loop import STATE

CLIPS = 8192
"""Number of training clips, drawn once and kept as latents."""

PIPELINE = "SkyReelsV2ImageToVideoPipeline"


def train_builtin(
    output: Path,
    *,
    steps: int | None = None,
    clip_count: int = CLIPS,
    seed: int = 0,
    resume: bool = False,
    mesh: Mesh | None = None,
    show_progress: bool = True,
) -> Path:
    """Train the built-in video model and export it in diffusers' layout, `output / "model"`, which is returned.

    Training takes about two hours on two CPU cores. In `output`, `vae`, `reader`, `transformer` and `decoder` receive
    training states, logs and loss plots, and `latents` receives the transformer's training data.

    Args:
        output: folder, created if missing.
        steps: length of all schedules, for trials; the recipe's own if None.
        clip_count: number of the transformer's training clips.
        seed: seed of data, noise and initial weights.
        resume: continue from the states in `output`.
        mesh: devices to train on, from `loop.fully_sharded`; one if None. Latents are made on one device.
        show_progress: show progress bars on a terminal.
    """

    def part(name: str) -> dict[str, Any]:
        folder = output / name
        again = resume and any((folder / STATE).glob("[0-9]*"))
        same = {"steps": steps, "seed": seed, "mesh": mesh, "show_progress": show_progress}
        return {"output": folder, "resume": again, **same}

    vae = train_vae(**part("vae"))
    if not resume:
        shutil.rmtree(output / "latents", ignore_errors=True)  # another VAE's
    drawn = clips(vae, output / "latents", clip_count, seed=seed, show_progress=show_progress)
    reader = train_reader(**part("reader"))
    trained = train_transformer(drawn, reader, **part("transformer"))
    refined = refine_decoder(vae, **part("decoder"))
    return export(refined, trained, output / "model")


def export(vae: WanVae, trained: Trainee, folder: Path) -> Path:
    """Write a folder in diffusers' layout, replacing any earlier one, and return it.

    Transformer and encoders are bfloat16. The VAE is float16, for its three more bits of precision.
    """
    parts = folder.with_name(f".{folder.name}.parts")
    shutil.rmtree(parts, ignore_errors=True)
    try:
        _write_parts(vae, trained, parts)
        return convert(VideoFolder(parts), folder, "diffusers", force=True)
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def _write_parts(vae: WanVae, trained: Trainee, folder: Path) -> None:
    transformer = {"_class_name": "WanModel", "model_type": "i2v", **asdict(TRANSFORMER)}
    text = {"architectures": ["UMT5EncoderModel"], "model_type": "umt5", **asdict(TEXT_ENCODER)}
    text |= {"feed_forward_proj": "gated-gelu", "pad_token_id": 0, "tie_word_embeddings": False}
    text |= {"eos_token_id": video_tokenizer().token_to_id(END), "torch_dtype": "bfloat16"}
    image = {"architectures": ["CLIPVisionModelWithProjection"], "model_type": "clip_vision_model"}
    image |= {**asdict(IMAGE_ENCODER), "projection_dim": IMAGE_ENCODER.hidden_size, "torch_dtype": "bfloat16"}
    # Required by transformers' class; nothing here projects to CLIP's space.
    looks = {**_arrays(trained.image_encoder), "visual.head": jnp.eye(IMAGE_ENCODER.hidden_size)}
    save(trained.reader.text_encoder, folder / "text_encoder", config=text, dtype=jnp.bfloat16)
    save(looks, folder / "image_encoder", config=image, dtype=jnp.bfloat16)
    save(
        trained.transformer,
        folder / "transformer",
        config=diffusers_transformer(transformer, PIPELINE),
        dtype=jnp.bfloat16,
    )
    save(
        vae,
        folder / "vae",
        config={"_class_name": "AutoencoderKLWan", **asdict(vae.config), "attn_scales": [], "dropout": 0.0},
        dtype=jnp.float16,
    )
    for name in ("transformer", "vae"):
        (folder / name / "model.safetensors").rename(folder / name / "diffusion_pytorch_model.safetensors")
    special = {"eos_token": END, "pad_token": PAD, "unk_token": UNKNOWN}
    save_tokenizer(video_tokenizer(), folder / "tokenizer", **special, model_max_length=TEXT_TOKENS)
    for path, value in _SETTINGS.items():
        (folder / path).parent.mkdir(exist_ok=True)
        write_json(folder / path, value)


def _arrays(model: nnx.Module) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}


_SETTINGS: Mapping[str, Any] = {
    "model_index.json": {
        "_class_name": PIPELINE,
        "_diffusers_version": "0.35.0",
        "image_encoder": ["transformers", "CLIPVisionModelWithProjection"],
        "image_processor": ["transformers", "CLIPImageProcessor"],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "SkyReelsV2Transformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    },
    "scheduler/scheduler_config.json": scheduler_settings(SHIFT),
    "image_processor/preprocessor_config.json": {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": SIZE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": SIZE, "width": SIZE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(CLIP_MEAN),
        "image_std": list(CLIP_STD),
        "do_convert_rgb": True,
    },
    SETTINGS: {
        "height": SIZE,
        "width": SIZE,
        "num_frames": FRAMES,
        "num_inference_steps": 20,
        "guidance_scale": 5.0,
        "shift": SHIFT,
        "fps": 8,
        "negative_prompt": "",
        "text_tokens": TEXT_TOKENS,
        "needs_image": False,
    },
}
"""Contents of the settings files, by path in the folder."""
