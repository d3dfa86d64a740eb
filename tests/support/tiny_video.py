"""Tiny video models in diffusers' layout. Every part has random weights, so that an error in any part is visible."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan.model import WanConfig, WanModel
from verax.models.wan.vae import WanVae, WanVaeConfig

SIZES: dict[str, Any] = dict(
    num_attention_heads=2,
    attention_head_dim=12,
    text_dim=16,
    freq_dim=256,
    ffn_dim=32,
    num_layers=2,
    patch_size=(1, 2, 2),
)
IMAGE = dict(in_channels=36, out_channels=16, image_dim=20, added_kv_proj_dim=24)
PLAIN = dict(in_channels=16, out_channels=16)
SKYREELS, WAN, VACE = "SkyReelsV2Transformer3DModel", "WanTransformer3DModel", "WanVACETransformer3DModel"
KINDS: dict[str, dict[str, Any]] = {
    "t2v": PLAIN,
    "i2v": IMAGE,
    "df": dict(**PLAIN, inject_sample_info=True),
    "t2v-a14b": PLAIN,
    "i2v-a14b": dict(in_channels=36, out_channels=16),
    "ti2v": dict(in_channels=24, out_channels=24),
    "flf2v": dict(**IMAGE, pos_embed_seq_len=10),
    "flf2v-skyreels": dict(**IMAGE, pos_embed_seq_len=10),
    **{kind: dict(**PLAIN, vace_layers=[0, 2], vace_in_channels=96, num_layers=3) for kind in ("vace", "vace-a14b")},
}
"""Transformers of each kind. Those of `-a14b` and ti2v are Wan 2.2's."""
BOUNDARY = 0.9
"""Where the second transformer of `-a14b` begins."""
WORDS = ("a", "red", "blue", "green", "circle", "square", "floats", "left", "right", "over", "gradient", "static")
PIPELINES = {kind: f"SkyReelsV2{name}Pipeline" for kind, name in (("t2v", ""), ("i2v", "ImageToVideo"))}
PIPELINES |= {"df": "SkyReelsV2DiffusionForcingPipeline", "t2v-a14b": "WanPipeline", "ti2v": "WanPipeline"}
PIPELINES |= {"flf2v-skyreels": PIPELINES["i2v"], "vace": "WanVACEPipeline", "vace-a14b": "WanVACEPipeline"}
PIPELINES |= dict.fromkeys(("i2v-a14b", "flf2v"), "WanImageToVideoPipeline")
VAE = dict(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True])
LARGE_VAE = dict(VAE, base_dim=4, decoder_base_dim=6, z_dim=24, is_residual=True, patch_size=2) | dict(
    in_channels=12, out_channels=12, scale_factor_spatial=16, latents_mean=[0.1] * 24, latents_std=[0.9, 1.2] * 12
)
TEXT = dict(vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu")
VISION = dict(
    hidden_size=20,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
    hidden_act="gelu",
)


def word_tokenizer() -> Tokenizer:
    """Tokenizer with one token per word; `</s>` ends a text, as in UMT5."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def video_folder(
    kind: str, folder: Path, *, heads: int = 2, text_heads: int = 4, image_heads: int = 2, **settings: Any
) -> Path:
    """A checkpoint of verax's own modules, made without torch.

    Args:
        kind: of `KINDS`.
        folder: where it is written.
        heads: heads of the transformer.
        text_heads: heads of the text encoder.
        image_heads: heads of the image encoder.
        settings: contents of verax.json.
    """
    transformer = {**SIZES, **KINDS[kind], "num_attention_heads": heads}
    if "added_kv_proj_dim" in transformer:
        transformer["added_kv_proj_dim"] = heads * SIZES["attention_head_dim"]
    parts: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "transformer": (WanModel, WanConfig, {"_class_name": transformer_class(kind), **transformer}),
        "vae": (WanVae, WanVaeConfig, {"_class_name": "AutoencoderKLWan", **(LARGE_VAE if kind == "ti2v" else VAE)}),
        "text_encoder": (UMT5EncoderModel, UMT5Config, {"model_type": "umt5", **TEXT, "num_heads": text_heads}),
    }
    if "image_dim" in KINDS[kind]:
        parts["image_encoder"] = (
            CLIPVisionModel,
            CLIPVisionConfig,
            {"model_type": "clip_vision_model", **VISION, "num_attention_heads": image_heads},
        )
    if kind.endswith("-a14b"):
        parts["transformer_2"] = parts["transformer"]
    rng = np.random.default_rng(0)
    for name, (model, config, fields) in parts.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(fields))
        made = partial(model, config.from_hf(fields))
        module = nnx.eval_shape(lambda made=made: made(rngs=nnx.Rngs(0)))
        weights = {
            ".".join(map(str, path)): _random(rng, leaf.shape) for path, leaf in nnx.to_flat_state(nnx.state(module))
        }
        stem = "model" if "encoder" in name else "diffusion_pytorch_model"
        save_file(weights, folder / name / f"{stem}.safetensors")
    for name, fields in (
        ("model_index.json", {"_class_name": PIPELINES[kind], **extras(kind)}),
        ("scheduler/scheduler_config.json", {"flow_shift": 5.0}),
        ("verax.json", settings),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(fields))
    (folder / "tokenizer").mkdir()
    word_tokenizer().save(str(folder / "tokenizer/tokenizer.json"))
    return folder


def transformer_class(kind: str) -> str:
    """Name of diffusers' class."""
    return VACE if kind.startswith("vace") else SKYREELS if kind in ("t2v", "i2v", "df", "flf2v-skyreels") else WAN


def extras(kind: str) -> dict[str, Any]:
    """Settings of model_index.json in addition to the parts."""
    if kind == "ti2v":
        return {"expand_timesteps": True}
    return {"boundary_ratio": BOUNDARY} if kind.endswith("-a14b") else {}


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    fan = np.prod(shape[1:]) if len(shape) > 1 else 9.0
    return (rng.normal(size=shape) * fan**-0.5 + (len(shape) == 1)).astype(np.float32)


def diffusers_pipeline(kind: str, folder: Path) -> Any:
    """A pipeline of diffusers, random, saved to `folder`; `kind` of `KINDS`."""
    diffusers, transformers = (import_module(name) for name in ("diffusers", "transformers"))
    torch = import_module("torch")
    torch.manual_seed(0)
    parts = {
        "tokenizer": transformers.PreTrainedTokenizerFast(
            tokenizer_object=word_tokenizer(), pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ),
        "text_encoder": transformers.UMT5EncoderModel(transformers.UMT5Config(**TEXT)),
        "transformer": getattr(diffusers, transformer_class(kind))(**{**SIZES, **KINDS[kind]}),
        "vae": diffusers.AutoencoderKLWan(**(LARGE_VAE if kind == "ti2v" else VAE)),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
    }
    if "image_dim" in KINDS[kind]:
        vision = transformers.CLIPVisionConfig(**VISION, projection_dim=8)
        encoder = "CLIPVisionModel" + ("" if PIPELINES[kind].startswith("Wan") else "WithProjection")
        parts["image_encoder"] = getattr(transformers, encoder)(vision)
        parts["image_processor"] = transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28)
    if kind.endswith("-a14b"):
        parts["transformer_2"] = getattr(diffusers, transformer_class(kind))(**{**SIZES, **KINDS[kind]})
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            _spread(part)
    made = getattr(diffusers, PIPELINES[kind])(**parts, **extras(kind))
    made.save_pretrained(folder)
    made.set_progress_bar_config(disable=True)
    return made


def _spread(module: Any) -> None:
    for name, weight in module.named_parameters():
        if weight.ndim > 1 and "scale_shift_table" not in name and "gamma" not in name:
            fan = 4 if "shared" in name else weight[0].numel()
            weight.data.normal_(std=fan**-0.5)
        else:
            weight.data.normal_(mean=float(name.endswith("weight") or "gamma" in name), std=0.2)
    module.eval().requires_grad_(False)
