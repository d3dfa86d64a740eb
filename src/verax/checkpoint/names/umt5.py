"""UMT5's encoder: the names of Wan's `models_t5_umt5-xxl-enc-bf16.pth` and those of transformers."""

from verax.checkpoint.names.table import Renaming

__all__ = ["TABLE"]

_LAYER = "encoder.block.{i}.layer"

TABLE = Renaming(
    [
        ("token_embedding", "shared"),
        ("token_embedding", "encoder.embed_tokens"),  # the same rows, which some files have twice
        ("blocks.{i}.norm1", f"{_LAYER}.0.layer_norm"),
        *((f"blocks.{{i}}.attn.{name}", f"{_LAYER}.0.SelfAttention.{name}") for name in "qkvo"),
        ("blocks.{i}.pos_embedding.embedding", f"{_LAYER}.0.SelfAttention.relative_attention_bias"),
        ("blocks.{i}.norm2", f"{_LAYER}.1.layer_norm"),
        ("blocks.{i}.ffn.gate.0", f"{_LAYER}.1.DenseReluDense.wi_0"),
        ("blocks.{i}.ffn.fc1", f"{_LAYER}.1.DenseReluDense.wi_1"),
        ("blocks.{i}.ffn.fc2", f"{_LAYER}.1.DenseReluDense.wo"),
        ("norm", "encoder.final_layer_norm"),
    ]
)
