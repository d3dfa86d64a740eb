"""Parts of a SkyReels-V2 or Wan model: names of folders, files, weights and settings in its two published layouts.

The original layout is that of the repositories SkyworkAI/SkyReels-V2 and Wan-Video/Wan2.1. The other is diffusers'.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from verax.checkpoint.names import clip as names_clip
from verax.checkpoint.names import umt5 as names_umt5
from verax.checkpoint.names import wan as names_wan
from verax.checkpoint.names.table import Renaming
from verax.checkpoint.names.wan_vae import name_table

__all__ = [
    "PARTS",
    "Names",
    "Part",
    "diffusers_transformer",
    "original_transformer",
    "pipeline_name",
    "scheduler_settings",
]

Form = Callable[[np.ndarray], np.ndarray]
"""Rearrangement of a tensor, such as a transposition."""


class _Forms(NamedTuple):
    """Rearrangements of one tensor from diffusers' layout to the original's, and back."""

    to_original: Form
    to_diffusers: Form


_SAME = _Forms(lambda array: array, lambda array: array)


class Names:
    """Several tables of names as one; the first table that has a name is used."""

    def __init__(self, *tables: Renaming):
        self._tables = tables

    def forward(self, name: str) -> tuple[str, ...] | None:
        """Diffusers' names of the original's `name`; None if no table has it."""
        return next((found for table in self._tables if (found := table.forward(name)) is not None), None)

    def backward(self, name: str) -> tuple[str, int] | None:
        """Original's name of diffusers' `name`, and its index among the names for it; None if no table has it."""
        return next((found for table in self._tables if (found := table.backward(name)) is not None), None)


@dataclass(frozen=True)
class Part:
    """One part of a model.

    Attributes:
        what: description for messages.
        original: stem of its file in the original layout, under which `verax convert` writes it as safetensors.
        pattern: pattern of the names of its files in the original layout, repackaged ones included.
        names: function from its config.json to the names of its weights in both layouts.
        stem: stem of the names of its weight files in diffusers' layout.
        config: its config.json for a folder of the original layout that has none.
        dropped: pattern of keys that are ignored.
        forms: rearrangements of the tensors that differ between the layouts, by the original's names.
    """

    what: str
    original: str
    pattern: re.Pattern[str]
    names: Callable[[Mapping[str, Any]], Names]
    stem: str = "diffusion_pytorch_model"
    config: Mapping[str, Any] = field(default_factory=dict)
    dropped: re.Pattern[str] = re.compile(r"(?!)")
    forms: Mapping[str, _Forms] = field(default_factory=dict)

    def form(self, name: str) -> _Forms:
        """Rearrangements of a tensor, by the original's name; the identity for most."""
        return self.forms.get(name, _SAME)


_VAE = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
}

_UMT5_XXL = {
    "architectures": ["UMT5EncoderModel"],
    "model_type": "umt5",
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "num_heads": 64,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}

_VIT_H14 = {
    "architectures": ["CLIPVisionModelWithProjection"],
    "model_type": "clip_vision_model",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "projection_dim": 1024,
}

_CLIP_HEAD = Renaming([("visual.head", "visual_projection.weight")])
"""Name of the projection to CLIP's space. No video model uses it; it is kept in converted files for other programs."""

PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "transformer": Part(
            what="transformer",
            original="diffusion_pytorch_model",
            pattern=re.compile(r"(model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.safetensors"),
            names=lambda config: Names(names_wan.TABLE),
            dropped=re.compile(r"norm_added_q\.|norm_q_img\."),
        ),
        "vae": Part(
            what="video VAE",
            original="Wan2.1_VAE",
            pattern=re.compile(r"(?i).*vae.*\.(pth|safetensors)"),
            config=MappingProxyType(_VAE),
            names=lambda config: Names(
                name_table(config.get("num_res_blocks", 2), len(config.get("dim_mult", _VAE["dim_mult"])))
            ),
        ),
        "text_encoder": Part(
            what="text encoder",
            stem="model",
            original="models_t5_umt5-xxl-enc-bf16",
            pattern=re.compile(r"(?i).*(_t5_|umt5).*\.(pth|safetensors)"),
            config=MappingProxyType(_UMT5_XXL),
            names=lambda config: Names(names_umt5.TABLE),
            dropped=re.compile(r"^(decoder\.|lm_head\.|spiece_model$)"),
        ),
        "image_encoder": Part(
            what="image encoder",
            stem="model",
            original="models_clip_open-clip-xlm-roberta-large-vit-huge-14",
            pattern=re.compile(r"(?i).*clip.*\.(pth|safetensors)"),
            config=MappingProxyType(_VIT_H14),
            names=lambda config: Names(names_clip.TABLE, _CLIP_HEAD),
            dropped=re.compile(r"^(textual\.|text_model\.|text_projection\.|log_scale$|logit_scale$)|position_ids$"),
            forms=MappingProxyType(
                {
                    "visual.cls_embedding": _Forms(lambda a: a.reshape(1, 1, -1), lambda a: a.reshape(-1)),
                    "visual.pos_embedding": _Forms(lambda a: a[None], lambda a: a[0]),
                    "visual.head": _Forms(lambda a: a.T, lambda a: a.T),
                }
            ),
        ),
    }
)
"""Parts by the names of their folders in diffusers' layout."""

_SIZES = {"ffn_dim": "ffn_dim", "freq_dim": "freq_dim", "in_dim": "in_channels", "out_dim": "out_channels"} | {
    "num_heads": "num_attention_heads",
    "num_layers": "num_layers",
    "eps": "eps",
}
"""Settings of the transformer that both layouts have: diffusers' names by the original's."""

_UNSAID = MappingProxyType(
    {"patch_size": [1, 2, 2], "text_dim": 4096, "rope_max_seq_len": 1024, "cross_attn_norm": True}
    | {"qk_norm": "rms_norm_across_heads", "image_dim": 1280, "pos_embed_seq_len": None, "num_frame_per_block": 1}
)
"""Settings that only diffusers' config.json has, with their values in all published models."""

_SKYREELS, _WAN = "SkyReelsV2Transformer3DModel", "WanTransformer3DModel"
_ORIGINAL = "WanModel"


def original_transformer(config: Mapping[str, Any], pipeline: str) -> dict[str, Any]:
    """Transformer's config.json of the original layout, from that of either layout.

    Settings that the original layout lacks are kept by diffusers' names, where they differ from the published models'.

    Args:
        config: config.json of either layout.
        pipeline: name of diffusers' pipeline, which is kept under `pipeline`.
    """
    if config.get("_class_name", _ORIGINAL) == _ORIGINAL:
        return {**config, "pipeline": pipeline}
    image = config.get("image_dim") is not None
    skyreels = {"inject_sample_info": config.get("inject_sample_info", False)} if _is_skyreels(pipeline) else {}
    more = {name: config[name] for name, value in _UNSAID.items() if name in config and not _equal(config[name], value)}
    if not image:
        more.pop("image_dim", None)
    return {
        "_class_name": _ORIGINAL,
        "model_type": "i2v" if image else "t2v",
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        **{ours: config[theirs] for ours, theirs in _SIZES.items() if theirs in config},
        "text_len": 512,
        **skyreels,
        **more,
        "pipeline": pipeline,
    }


def diffusers_transformer(config: Mapping[str, Any], pipeline: str) -> dict[str, Any]:
    """Transformer's config.json of diffusers' layout, from that of either layout.

    Args:
        config: config.json of either layout.
        pipeline: name of diffusers' pipeline.
    """
    if config.get("_class_name", _ORIGINAL) != _ORIGINAL:
        return dict(config)
    image = config.get("model_type") == "i2v"
    unsaid = dict(_UNSAID)
    if not _is_skyreels(pipeline):
        del unsaid["num_frame_per_block"]
    more = {name: config.get(name, value) for name, value in unsaid.items()}
    more["qk_norm"] = _UNSAID["qk_norm"] if more["qk_norm"] is True else more["qk_norm"]
    return {
        "_class_name": _SKYREELS if _is_skyreels(pipeline) else _WAN,
        "attention_head_dim": config["dim"] // config["num_heads"],
        **{theirs: config[ours] for ours, theirs in _SIZES.items() if ours in config},
        **({"inject_sample_info": config["inject_sample_info"]} if "inject_sample_info" in config else {}),
        **more,
        "image_dim": more["image_dim"] if image else None,
        "added_kv_proj_dim": config["dim"] if image else None,
    }


def pipeline_name(config: Mapping[str, Any], folder: str) -> str:
    """Name of diffusers' pipeline for a folder of the original layout.

    SkyReels-V2's large models for diffusion forcing and for text alone have the same settings and names of weights.
    They differ in the folder's name only (`SkyReels-V2-DF-14B-540P`).
    """
    if "pipeline" in config:
        return config["pipeline"]
    family = "SkyReelsV2" if "inject_sample_info" in config else "Wan"
    if family == "SkyReelsV2" and (config["inject_sample_info"] or re.search(r"(?i)(^|\W|_)DF(\W|_|$)", folder)):
        return "SkyReelsV2DiffusionForcingPipeline"
    return family + ("ImageToVideoPipeline" if config.get("model_type") == "i2v" else "Pipeline")


def scheduler_settings(pipeline: str) -> dict[str, Any]:
    """Default scheduler_config.json for a folder that has none, with the shift that the authors recommend."""
    shift = 5.0 if "ImageToVideo" in pipeline or not _is_skyreels(pipeline) else 8.0
    return {
        "_class_name": "UniPCMultistepScheduler",
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": shift,
        "solver_order": 2,
    }


def _is_skyreels(pipeline: str) -> bool:
    return pipeline.startswith("SkyReels")


def _equal(one: Any, other: Any) -> bool:
    return (list(one) if isinstance(one, tuple) else one) == other
