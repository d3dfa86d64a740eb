"""Parameter names of Wan's and SkyReels-V2's transformer: the original checkpoints' and diffusers'."""

from __future__ import annotations

from verax.checkpoint.names.table import Renaming

__all__ = ["TABLE"]

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

TABLE = Renaming(
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
