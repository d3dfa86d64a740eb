"""Parts of a SkyReels-V2 or Wan model in its two published layouts: names of folders, files, settings and parameters.

The original layout is the one of the repositories SkyworkAI/SkyReels-V2, Wan-Video/Wan2.1 and Wan-Video/Wan2.2, which
publish some parts without a config.json: their settings are here, by diffusers' names. The other layout is diffusers',
or transformers' for the encoders. Each network has a table (`Renaming`) of rules that rename in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from verax.errors import UnsupportedModelError
from verax.fields import Depth, Size, file_of, read_value
from verax.models.wan import model

Rule = tuple[str, str | tuple[str, ...]]


class Renaming:
    """A table of rules that rename parameters in both directions.

    A rule is a pair of dotted beginnings, the original's and the other's: `("blocks.{i}.ffn.0",
    "blocks.{i}.ffn.net.0.proj")`. `{i}` stands for one whole number, the same on both sides. What follows the beginning
    (`.weight`, `.bias`, or nothing) is kept. The first rule whose beginning fits a name at a dot is applied, and no
    other. A tuple on the other side names tensors whose rows, one below the other, are the original's one tensor.
    """

    def __init__(self, rules: Sequence[Rule]):
        self._rules = [(original, (other,) if isinstance(other, str) else other) for original, other in rules]
        self._originals = [_compile(original) for original, _ in self._rules]
        self._others = [[_compile(one) for one in others] for _, others in self._rules]

    def forward(self, name: str) -> tuple[str, ...] | None:
        """The other's names of the original's `name`, several if their rows together are it; None without a rule."""
        for pattern, (_, others) in zip(self._originals, self._rules, strict=True):
            if match := pattern.fullmatch(name):
                return tuple(_fill(other, match) for other in others)
        return None

    def backward(self, name: str) -> tuple[str, int] | None:
        """The original's name of the other's `name`, and its number among the original's parts; None without a rule."""
        for patterns, (original, _) in zip(self._others, self._rules, strict=True):
            for part, pattern in enumerate(patterns):
                if match := pattern.fullmatch(name):
                    return _fill(original, match), part
        return None


def _compile(beginning: str) -> re.Pattern[str]:
    pattern = re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d+)", re.escape(beginning))
    return re.compile(rf"{pattern}(?P<rest>(\..*)?)")


def _fill(beginning: str, match: re.Match[str]) -> str:
    return beginning.format_map(match.groupdict()) + match["rest"]


def _clip_rules(prefix: str) -> list[Rule]:
    layer = prefix + "encoder.layers.{i}"
    return [
        ("visual.cls_embedding", f"{prefix}embeddings.class_embedding"),
        ("visual.pos_embedding", f"{prefix}embeddings.position_embedding.weight"),
        ("visual.patch_embedding", f"{prefix}embeddings.patch_embedding"),
        ("visual.pre_norm", f"{prefix}pre_layrnorm"),
        ("visual.transformer.{i}.norm1", f"{layer}.layer_norm1"),
        ("visual.transformer.{i}.attn.to_qkv", tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv")),
        ("visual.transformer.{i}.attn.proj", f"{layer}.self_attn.out_proj"),
        ("visual.transformer.{i}.norm2", f"{layer}.layer_norm2"),
        ("visual.transformer.{i}.mlp.0", f"{layer}.mlp.fc1"),
        ("visual.transformer.{i}.mlp.2", f"{layer}.mlp.fc2"),
        ("visual.post_norm", f"{prefix}post_layernorm"),
    ]


# Published files have the prefix; transformers 5 saves a CLIPVisionModel without.
CLIP = Renaming(
    [
        *_clip_rules("vision_model."),
        *_clip_rules(""),
        # The projection to CLIP's space. No video model uses it; it is kept in converted files for other programs.
        ("visual.head", "visual_projection.weight"),
    ]
)
"""CLIP's image encoder: names of Wan's `models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth` and of transformers.

Transformers has `cls_embedding [1, 1, D]` and `pos_embedding [1, 1 + P, D]` without the leading ones.
"""

_UMT5_LAYER = "encoder.block.{i}.layer"

_UMT5_GGUF = {
    **{"norm1": "attn_norm", "pos_embedding.embedding": "attn_rel_b", "norm2": "ffn_norm"},
    **{f"attn.{name}": f"attn_{name}" for name in "qkvo"},
    **{"ffn.gate.0": "ffn_gate", "ffn.fc1": "ffn_up", "ffn.fc2": "ffn_down"},
}

UMT5 = Renaming(
    [
        ("token_embedding", "shared"),
        ("token_embedding", "encoder.embed_tokens"),  # the same rows, which some files have twice
        ("blocks.{i}.norm1", f"{_UMT5_LAYER}.0.layer_norm"),
        *((f"blocks.{{i}}.attn.{name}", f"{_UMT5_LAYER}.0.SelfAttention.{name}") for name in "qkvo"),
        ("blocks.{i}.pos_embedding.embedding", f"{_UMT5_LAYER}.0.SelfAttention.relative_attention_bias"),
        ("blocks.{i}.norm2", f"{_UMT5_LAYER}.1.layer_norm"),
        ("blocks.{i}.ffn.gate.0", f"{_UMT5_LAYER}.1.DenseReluDense.wi_0"),
        ("blocks.{i}.ffn.fc1", f"{_UMT5_LAYER}.1.DenseReluDense.wi_1"),
        ("blocks.{i}.ffn.fc2", f"{_UMT5_LAYER}.1.DenseReluDense.wo"),
        ("norm", "encoder.final_layer_norm"),
        ("token_embedding", "token_embd"),
        ("norm", "enc.output_norm"),
        *((f"blocks.{{i}}.{ours}", f"enc.blk.{{i}}.{theirs}") for ours, theirs in _UMT5_GGUF.items()),
    ]
)
"""UMT5's encoder: names of Wan's `models_t5_umt5-xxl-enc-bf16.pth` and of transformers; then of llama.cpp."""

_CONDITION = "condition_embedder"
_PROJECTIONS = (
    ("q", "to_q"),
    ("k", "to_k"),
    ("v", "to_v"),
    ("o", "to_out.0"),
    ("norm_q", "norm_q"),
    ("norm_k", "norm_k"),
)
_IMAGE = (
    ("k_img", "add_k_proj"),
    ("v_img", "add_v_proj"),
    ("norm_k_img", "norm_added_k"),
    ("norm_q_img", "norm_added_q"),
)


def _block_rules(block: str) -> list[Rule]:
    return [
        (f"{block}.modulation", f"{block}.scale_shift_table"),
        # The other two norms have no parameters, and diffusers numbers all three in the order of use.
        (f"{block}.norm3", f"{block}.norm2"),
        *((f"{block}.self_attn.{ours}", f"{block}.attn1.{theirs}") for ours, theirs in _PROJECTIONS),
        *((f"{block}.cross_attn.{ours}", f"{block}.attn2.{theirs}") for ours, theirs in _PROJECTIONS + _IMAGE),
        (f"{block}.ffn.0", f"{block}.ffn.net.0.proj"),
        (f"{block}.ffn.2", f"{block}.ffn.net.2"),
    ]


WAN = Renaming(
    [
        ("patch_embedding", "patch_embedding"),
        ("text_embedding.0", f"{_CONDITION}.text_embedder.linear_1"),
        ("text_embedding.2", f"{_CONDITION}.text_embedder.linear_2"),
        ("time_embedding.0", f"{_CONDITION}.time_embedder.linear_1"),
        ("time_embedding.2", f"{_CONDITION}.time_embedder.linear_2"),
        ("time_projection.1", f"{_CONDITION}.time_proj"),
        ("img_emb.emb_pos", f"{_CONDITION}.image_embedder.pos_embed"),
        ("img_emb.proj.0", f"{_CONDITION}.image_embedder.norm1"),
        ("img_emb.proj.1", f"{_CONDITION}.image_embedder.ff.net.0.proj"),
        ("img_emb.proj.3", f"{_CONDITION}.image_embedder.ff.net.2"),
        ("img_emb.proj.4", f"{_CONDITION}.image_embedder.norm2"),
        ("fps_embedding", "fps_embedding"),
        ("fps_projection.0", "fps_projection.net.0.proj"),
        ("fps_projection.2", "fps_projection.net.2"),
        *_block_rules("blocks.{i}"),
        ("vace_patch_embedding", "vace_patch_embedding"),
        *_block_rules("vace_blocks.{i}"),
        ("vace_blocks.{i}.before_proj", "vace_blocks.{i}.proj_in"),
        ("vace_blocks.{i}.after_proj", "vace_blocks.{i}.proj_out"),
        ("head.modulation", "scale_shift_table"),
        ("head.head", "proj_out"),
    ]
)
"""A norm of the image's queries, that nothing uses, is in some files: the model ignores it under `norm_q_img`."""

_VAE_BLOCK = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
_MIDDLE = {"middle.0": "mid_block.resnets.0", "middle.2": "mid_block.resnets.1"}
_SINGLE = {"conv1": "conv_in", "middle.1": "mid_block.attentions.0", "head.0": "norm_out", "head.2": "conv_out"}


def wan_vae_names(settings: Mapping[str, Any]) -> Renaming:
    """Table of a VAE with these settings of diffusers' config.json; the published ones where they say nothing.

    The original of Wan 2.1 counts the decoder's layers through, diffusers within each resolution. Where the levels are
    residual, as in Wan 2.2, both count within each, and the original counts the resampling layer too.
    """
    multiples = read_value(settings, "dim_mult", tuple[Size, ...], (1, 2, 4, 4))
    sizes = read_value(settings, "num_res_blocks", Depth, 2), len(multiples)
    blocks = _residual(*sizes) if settings.get("is_residual") else _plain(*sizes)
    rules = [("conv1", "quant_conv"), ("conv2", "post_quant_conv")]
    for part in ("encoder", "decoder"):
        rules += [(f"{part}.{ours}", f"{part}.{theirs}") for ours, theirs in _SINGLE.items()]
        blocks |= {f"{part}.{ours}": f"{part}.{theirs}" for ours, theirs in _MIDDLE.items()}
    for ours, theirs in blocks.items():
        rules += [(f"{ours}.{layer}", f"{theirs}.{name}") for layer, name in _VAE_BLOCK.items()]
        rules += [(f"{ours}.{layer}", f"{theirs}.{layer}") for layer in ("resample", "time_conv")]
    return Renaming(rules)


def _plain(num_res_blocks: int, levels: int) -> dict[str, str]:
    blocks = {"encoder.downsamples.{i}": "encoder.down_blocks.{i}"}
    layer = 0
    for level in range(levels):
        for block in range(num_res_blocks + 1):
            blocks[f"decoder.upsamples.{layer}"] = f"decoder.up_blocks.{level}.resnets.{block}"
            layer += 1
        if level < levels - 1:
            blocks[f"decoder.upsamples.{layer}"] = f"decoder.up_blocks.{level}.upsamplers.0"
            layer += 1
    return blocks


def _residual(num_res_blocks: int, levels: int) -> dict[str, str]:
    blocks = {}
    for level in range(levels):
        down, up = f"encoder.downsamples.{level}.downsamples", f"decoder.upsamples.{level}.upsamples"
        for ours, theirs, count, last in (
            (down, f"encoder.down_blocks.{level}", num_res_blocks, "downsampler"),
            (up, f"decoder.up_blocks.{level}", num_res_blocks + 1, "upsampler"),
        ):
            blocks |= {f"{ours}.{block}": f"{theirs}.resnets.{block}" for block in range(count)}
            blocks[f"{ours}.{count}"] = f"{theirs}.{last}"
    return blocks


VAE: Mapping[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
}
"""Settings of `Wan2.1_VAE.pth`."""

UMT5_XXL: Mapping[str, Any] = (
    {"architectures": ["UMT5EncoderModel"], "model_type": "umt5", "vocab_size": 256384, "d_model": 4096}
    | {"d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 64}
    | {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6}
    | {"feed_forward_proj": "gated-gelu", "is_encoder_decoder": True, "tie_word_embeddings": False}
    | {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
)

VIT_H14: Mapping[str, Any] = (
    {"architectures": ["CLIPVisionModelWithProjection"], "model_type": "clip_vision_model", "hidden_size": 1280}
    | {"intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16, "num_channels": 3}
    | {"image_size": 224, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "projection_dim": 1024}
)

# fmt: off
VAE_2_2: Mapping[str, Any] = {
    **VAE,
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
        0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
        -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
        0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
        0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}
# fmt: on
"""Settings of `Wan2.2_VAE.pth`, whose latents stand for 16 x 16 pixels of four frames."""


Form = Callable[[np.ndarray], np.ndarray]
"""Rearrangement of a tensor, such as a transposition."""


class _Forms(NamedTuple):
    """Rearrangements of one tensor from diffusers' layout to the original's, and back."""

    to_original: Form
    to_diffusers: Form


_SAME = _Forms(lambda array: array, lambda array: array)


@dataclass(frozen=True)
class Part:
    """One part of a model.

    Attributes:
        original: stem of its file in the original layout, under which `verax convert` writes it as safetensors.
        pattern: pattern of the names of its files in the original layout, repackaged ones included.
        names: function from its config.json to the names of its weights in both layouts.
        stem: stem of the names of its weight files in diffusers' layout.
        config: its config.json for a folder of the original layout that has none.
        forms: rearrangements of the tensors that differ between the layouts, by the original's names.
    """

    what: str
    original: str
    pattern: re.Pattern[str]
    names: Callable[[Mapping[str, Any]], Renaming]
    stem: str = "diffusion_pytorch_model"
    config: Mapping[str, Any] = field(default_factory=dict)
    dropped: re.Pattern[str] = re.compile(r"(?!)")
    forms: Mapping[str, _Forms] = field(default_factory=dict)

    def published(self, stem: str) -> dict[str, Any]:
        """Its config.json for a file of the original layout that has none, by the file's name."""
        return dict(VAE_2_2 if self.config is VAE and _SECOND.search(stem) else self.config)

    def original_stem(self, config: Mapping[str, Any]) -> str:
        """Stem of its file in the original layout, by its config.json."""
        return self.original.replace("2.1", "2.2") if config.get("is_residual") else self.original

    def form(self, name: str) -> _Forms:
        """Rearrangements of a tensor, by the original's name; the identity for most."""
        return self.forms.get(name, _SAME)


WRAPPERS = re.compile(r"(?:(?<=^)|(?<=[._]))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)[._]")
"""Names that PyTorch's wrappers (compiled, data-parallel, sharded) put before, and into, the names of parameters."""

_SECOND = re.compile(r"(?i)wan[_-]?2[._]2")
"""Sign of Wan 2.2 in the names of files."""

EXPERTS: Mapping[str, str] = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}
"""Folders of the two transformers of Wan 2.2 in the original layout."""

_NOISE = re.compile(r"(?i)(high|low)[-_.]?noise")


def noise_of(name: str) -> str | None:
    """Noise of the one of Wan 2.2's two transformers that a file is for: `high` or `low`, or None, by its name."""
    said = {match.lower() for match in _NOISE.findall(name)}
    return said.pop() if len(said) == 1 else None


_BOUNDARIES = {"t2v": 0.875, "i2v": 0.9}
"""Share of the noise levels from which the published originals use the first of their two transformers."""

_TRANSFORMER = Part(
    what="transformer",
    original="diffusion_pytorch_model",
    pattern=re.compile(r"(model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.safetensors"),
    names=lambda config: WAN,
    dropped=re.compile(r"norm_added_q\.|norm_q_img\."),
)

PARTS: Mapping[str, Part] = {
    "transformer": _TRANSFORMER,
    "transformer_2": replace(_TRANSFORMER, what="low-noise transformer"),
    "vae": Part(
        what="video VAE",
        original="Wan2.1_VAE",
        pattern=re.compile(r"(?i).*vae.*\.(pth|safetensors)"),
        config=VAE,
        names=wan_vae_names,
    ),
    "text_encoder": Part(
        what="text encoder",
        stem="model",
        original="models_t5_umt5-xxl-enc-bf16",
        pattern=re.compile(r"(?i).*(_t5_|umt5).*\.(pth|safetensors|gguf)"),
        config=UMT5_XXL,
        names=lambda config: UMT5,
        dropped=re.compile(r"^(decoder\.|lm_head\.|spiece_model$)"),
    ),
    "image_encoder": Part(
        what="image encoder",
        stem="model",
        original="models_clip_open-clip-xlm-roberta-large-vit-huge-14",
        pattern=re.compile(r"(?i).*clip.*\.(pth|safetensors)"),
        config=VIT_H14,
        names=lambda config: CLIP,
        dropped=re.compile(r"^(textual\.|text_model\.|text_projection\.|log_scale$|logit_scale$)|position_ids$"),
        forms={
            "visual.cls_embedding": _Forms(lambda a: a.reshape(1, 1, -1), lambda a: a.reshape(-1)),
            "visual.pos_embedding": _Forms(lambda a: a[None], lambda a: a[0]),
            "visual.head": _Forms(lambda a: a.T, lambda a: a.T),
        },
    ),
}
"""Parts by the names of their folders in diffusers' layout."""

PUBLISHED = (*model.ORIGINALS, model.SKYREELS, model.WAN, model.VACE)
"""Class names of the transformers whose two layouts are known here; others are read by the names in their files."""


def part_of(name: str, transformer: str) -> Part:
    """Part of a model.

    `name`: name of its folder in diffusers' layout. `transformer`: class name of the model's transformer, which says
    whether the published tables of names apply.
    """
    if transformer in PUBLISHED:
        return PARTS[name]
    stem = "model" if name.endswith("encoder") else Part.stem
    what = name.replace("_", " ")
    return Part(what=what, original=name, pattern=Part.dropped, names=lambda config: Renaming([]), stem=stem)


_SIZES = {"ffn_dim": "ffn_dim", "freq_dim": "freq_dim", "in_dim": "in_channels", "out_dim": "out_channels"} | {
    **{"vace_layers": "vace_layers", "vace_in_dim": "vace_in_channels"},
    "num_heads": "num_attention_heads",
    "num_layers": "num_layers",
    "eps": "eps",
}
"""Settings of the transformer that both layouts have: diffusers' names by the original's."""

_UNSAID = {"patch_size": [1, 2, 2], "text_dim": 4096, "rope_max_seq_len": 1024, "cross_attn_norm": True} | {
    "qk_norm": "rms_norm_across_heads",
    "image_dim": model.IMAGE_DIM,
    "pos_embed_seq_len": None,
    "num_frame_per_block": 1,
}
"""Settings that only diffusers' config.json has, with their values in all published models."""


def original_transformer(
    config: Mapping[str, Any], pipeline: str, *, boundary_ratio: float | None = None, expand_timesteps: bool = False
) -> dict[str, Any]:
    """Transformer's config.json of the original layout, from the config.json of either layout.

    Settings that the original layout lacks are kept by diffusers' names, where they differ from the published models'.

    Args:
        config: config.json of either layout.
        boundary_ratio: where the second transformer begins, which is kept too; None for a model with one.
        expand_timesteps: True for a model of text and image, whose frames have a time each.
    """
    if config.get("_class_name", model.ORIGINAL) in model.ORIGINALS:
        return {**config, "pipeline": pipeline}
    is_vace = config["_class_name"] == model.VACE
    in_channels = read_value(config, "in_channels", Size, 16)
    image = in_channels > read_value(config, "out_channels", Size, in_channels)
    ends = "flf2v" if config.get("pos_embed_seq_len") is not None else "i2v"
    skyreels = {"inject_sample_info": config.get("inject_sample_info", False)} if _is_skyreels(pipeline) else {}
    more = {name: config[name] for name, value in _UNSAID.items() if name in config and config[name] != value}
    if image:
        more |= {"image_dim": None} if config.get("image_dim") is None else {}
    else:
        more.pop("image_dim", None)
    if boundary_ratio is not None:
        more["boundary_ratio"] = boundary_ratio
    return {
        "_class_name": model.ORIGINAL_VACE if is_vace else model.ORIGINAL,
        "model_type": "vace" if is_vace else ends if image else "ti2v" if expand_timesteps else "t2v",
        "dim": read_value(config, "num_attention_heads", Size) * read_value(config, "attention_head_dim", Size),
        **{ours: config[theirs] for ours, theirs in _SIZES.items() if theirs in config},
        "text_len": 512,
        **skyreels,
        **more,
        "pipeline": pipeline,
    }


def diffusers_transformer(config: Mapping[str, Any], pipeline: str) -> dict[str, Any]:
    """Transformer's config.json of diffusers' layout, from the config.json of either layout.

    `config`: config.json of either layout.
    """
    if (name := config.get("_class_name", model.ORIGINAL)) not in model.ORIGINALS:
        return dict(config)
    image = has_image_states(config)
    unsaid = dict(_UNSAID)
    if not _is_skyreels(pipeline):
        del unsaid["num_frame_per_block"]
    more = {name: config.get(name, value) for name, value in unsaid.items()}
    if config.get("model_type") == "flf2v":
        more["pos_embed_seq_len"] = more["pos_embed_seq_len"] or model.FIRST_AND_LAST
    more["qk_norm"] = _UNSAID["qk_norm"] if more["qk_norm"] is True else more["qk_norm"]
    dim = read_value(config, "dim", Size)
    plain = model.SKYREELS if _is_skyreels(pipeline) else model.WAN
    return {
        "_class_name": model.VACE if name == model.ORIGINAL_VACE else plain,
        "attention_head_dim": dim // read_value(config, "num_heads", Size),
        **{theirs: config[ours] for ours, theirs in _SIZES.items() if ours in config},
        **({"inject_sample_info": config["inject_sample_info"]} if "inject_sample_info" in config else {}),
        **more,
        "image_dim": more["image_dim"] if image else None,
        "added_kv_proj_dim": dim if image else None,
    }


def has_image_states(config: Mapping[str, Any]) -> bool:
    """True if a transformer attends to an image encoder's states, by its config.json of either layout."""
    if config.get("_class_name", model.ORIGINAL) not in model.ORIGINALS:
        return config.get("image_dim") is not None
    return config.get("model_type") in ("i2v", "flf2v") and config.get("image_dim", _UNSAID["image_dim"]) is not None


def boundary_of(config: Mapping[str, Any]) -> float | None:
    """Share of the noise levels from which the first of two transformers is used, by its config.json of the original's.

    `verax convert` writes it there; published files have none.
    """
    return config.get("boundary_ratio", _BOUNDARIES.get(config.get("model_type", "t2v")))


def pipeline_name(config: Mapping[str, Any], folder: str) -> str:
    """Name of diffusers' pipeline for a folder of the original layout.

    SkyReels-V2's large models for diffusion forcing and for text alone have the same settings and names of weights.
    They differ in the folder's name only (`SkyReels-V2-DF-14B-540P`). Wan's models have no `inject_sample_info`;
    repackaged ones of SkyReels-V2 may lack it too.
    """
    if "pipeline" in config:
        return config["pipeline"]
    is_skyreels = "inject_sample_info" in config or "skyreels" in folder.lower()
    family = "SkyReelsV2" if is_skyreels else "Wan"
    forcing = config.get("inject_sample_info") or re.search(r"(?i)(^|\W|_)DF(\W|_|$)", folder)
    if is_skyreels and forcing:
        return "SkyReelsV2DiffusionForcingPipeline"
    if config.get("_class_name") == model.ORIGINAL_VACE:
        return "WanVACEPipeline"
    return family + ("ImageToVideoPipeline" if config.get("model_type") in ("i2v", "flf2v") else "Pipeline")


def recommended_shift(config: Mapping[str, Any], pipeline: str, folder: str, *, experts: bool = False) -> float:
    """Shift of the noise levels in the commands of a checkpoint's authors.

    Args:
        config: transformer's config.json of either layout.
        pipeline: name of diffusers' pipeline.
        folder: name of the folder, which alone says that Wan2.1's large model of an image is for 480P.
        experts: True for a model with two transformers.
    """
    if "VACE" in pipeline or config.get("model_type") == "flf2v" or config.get("pos_embed_seq_len") is not None:
        return 16.0
    is_image = "ImageToVideo" in pipeline
    if _is_skyreels(pipeline) or experts:
        return 5.0 if is_image else 8.0 if _is_skyreels(pipeline) else 12.0
    is_small = model.WanConfig.from_hf(config).dim == model.WAN_CONFIGS["t2v-1.3b"].dim
    if is_image:
        return 3.0 if is_small or "480P" in folder.upper() else 5.0
    return 8.0 if is_small else 5.0


def scheduler_settings(shift: float) -> dict[str, Any]:
    """Default scheduler_config.json for a folder that has none."""
    return {
        "_class_name": "UniPCMultistepScheduler",
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": shift,
        "solver_order": 2,
    }


_SOLVERS = {
    **dict.fromkeys(("UniPCMultistepScheduler", "FlowUniPCMultistepScheduler"), "unipc"),
    **dict.fromkeys(("DPMSolverMultistepScheduler", "FlowDPMSolverMultistepScheduler"), "dpm++"),
    "FlowMatchEulerDiscreteScheduler": "euler",
    "FlowMatchLCMScheduler": "lcm",
}
"""Solvers by the class names of diffusers' and Wan's schedulers."""

_ONLY: Mapping[str, Any] = {
    **{"num_train_timesteps": 1000, "prediction_type": "flow_prediction", "use_flow_sigmas": True, "solver_order": 2},
    **{"predict_x0": True, "lower_order_final": True, "disable_corrector": []},
    **{"final_sigmas_type": "zero", "shift_terminal": None, "scale_factors": None, "solver_p": None},
    **dict.fromkeys(("thresholding", "use_dynamic_shifting", "invert_sigmas", "stochastic_sampling"), False),
    **dict.fromkeys(("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"), False),
}
"""Settings of these schedulers that change their steps, with the values that are implemented."""


def scheduler_solver(config: Mapping[str, Any]) -> str:
    """Solver of a scheduler_config.json, by its class name; `unipc` where it has none.

    Raises:
        UnsupportedModelError: for another class, or a setting that is not implemented.
    """
    kind = read_value(config, "_class_name", str, "UniPCMultistepScheduler")
    if kind not in _SOLVERS:
        raise UnsupportedModelError(
            f"{file_of(config)}: _class_name {kind!r} is not supported; schedulers supported are {', '.join(_SOLVERS)}"
        )
    own: Mapping[str, Any] = {"solver_type": "bh2"}
    if _SOLVERS[kind] == "dpm++":
        own = {"solver_type": "midpoint", "algorithm_type": "dpmsolver++", "use_lu_lambdas": False}
    for name, value in {**_ONLY, **own}.items():
        if config.get(name) not in (None, value):
            raise UnsupportedModelError(
                f"{file_of(config)}: {name} {config[name]!r} is not supported; only {value!r} is"
            )
    return _SOLVERS[kind]


def _is_skyreels(pipeline: str) -> bool:
    return pipeline.startswith("SkyReels")
