"""CLIP's image encoder: the names of Wan's `models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth` and transformers'.

Transformers has `cls_embedding [1, 1, D]` and `pos_embedding [1, 1 + P, D]` without the leading ones.
"""

from verax.checkpoint.names.table import Renaming, Rule

__all__ = ["TABLE"]


def _rules(prefix: str) -> list[Rule]:
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
TABLE = Renaming([*_rules("vision_model."), *_rules("")])
