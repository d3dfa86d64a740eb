"""Parameter names of the published video models in their two layouts: the original's, and diffusers' or transformers'.

Each network has a table (`Renaming`) of rules that rename in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CLIP", "UMT5", "WAN", "Renaming", "wan_vae_names"]

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
            if found := pattern.fullmatch(name):
                return tuple(_fill(other, found) for other in others)
        return None

    def backward(self, name: str) -> tuple[str, int] | None:
        """The original's name of the other's `name`, and its number among the original's parts; None without a rule."""
        for patterns, (original, _) in zip(self._others, self._rules, strict=True):
            for part, pattern in enumerate(patterns):
                if found := pattern.fullmatch(name):
                    return _fill(original, found), part
        return None


def _compile(beginning: str) -> re.Pattern[str]:
    pattern = re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d+)", re.escape(beginning))
    return re.compile(rf"{pattern}(?P<rest>(\..*)?)")


def _fill(beginning: str, found: re.Match[str]) -> str:
    return beginning.format_map(found.groupdict()) + found["rest"]


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
    ]
)
"""UMT5's encoder: names of Wan's `models_t5_umt5-xxl-enc-bf16.pth` and of transformers."""

_CONDITION = "condition_embedder"
_BLOCK = "blocks.{i}"
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

WAN = Renaming(
    [
        ("patch_embedding", "patch_embedding"),
        ("text_embedding.0", f"{_CONDITION}.text_embedder.linear_1"),
        ("text_embedding.2", f"{_CONDITION}.text_embedder.linear_2"),
        ("time_embedding.0", f"{_CONDITION}.time_embedder.linear_1"),
        ("time_embedding.2", f"{_CONDITION}.time_embedder.linear_2"),
        ("time_projection.1", f"{_CONDITION}.time_proj"),
        ("img_emb.proj.0", f"{_CONDITION}.image_embedder.norm1"),
        ("img_emb.proj.1", f"{_CONDITION}.image_embedder.ff.net.0.proj"),
        ("img_emb.proj.3", f"{_CONDITION}.image_embedder.ff.net.2"),
        ("img_emb.proj.4", f"{_CONDITION}.image_embedder.norm2"),
        ("fps_embedding", "fps_embedding"),
        ("fps_projection.0", "fps_projection.net.0.proj"),
        ("fps_projection.2", "fps_projection.net.2"),
        (f"{_BLOCK}.modulation", f"{_BLOCK}.scale_shift_table"),
        # The other two norms have no parameters, and diffusers numbers all three in the order of use.
        (f"{_BLOCK}.norm3", f"{_BLOCK}.norm2"),
        *((f"{_BLOCK}.self_attn.{ours}", f"{_BLOCK}.attn1.{theirs}") for ours, theirs in _PROJECTIONS),
        *((f"{_BLOCK}.cross_attn.{ours}", f"{_BLOCK}.attn2.{theirs}") for ours, theirs in _PROJECTIONS + _IMAGE),
        (f"{_BLOCK}.ffn.0", f"{_BLOCK}.ffn.net.0.proj"),
        (f"{_BLOCK}.ffn.2", f"{_BLOCK}.ffn.net.2"),
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
_SINGLE = {
    "conv1": "conv_in",
    "middle.1": "mid_block.attentions.0",
    "head.0": "norm_out",
    "head.2": "conv_out",
}


def wan_vae_names(settings: Mapping[str, Any]) -> Renaming:
    """Table of a VAE with these settings of diffusers' config.json; the published ones where they say nothing.

    The original of Wan 2.1 counts the decoder's layers through, diffusers within each resolution. Where the levels are
    residual, as in Wan 2.2, both count within each, and the original counts the resampling layer too.
    """
    sizes = settings.get("num_res_blocks", 2), len(settings.get("dim_mult") or (1, 2, 4, 4))
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
