"""Shapes of published models: their config.json, as far as it decides shapes, without weights."""

from __future__ import annotations

from typing import Any

QWEN3_0_6B: dict[str, Any] = (
    {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024}
    | {"intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True}
    | {"attention_bias": False, "max_position_embeddings": 40960}
)
"""config.json of Qwen3-0.6B, as far as it decides shapes."""

QWEN3_8B: dict[str, Any] = {
    **QWEN3_0_6B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
"""config.json of Qwen3-8B, as far as it decides shapes."""

HYBRID: dict[str, Any] = (
    {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 32768}
    | {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 8}
    | {"num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
    | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 40960}
)
"""Three delta layers and one of attention, as wide as Qwen3.5-0.8B's 24; an eighth of its vocabulary."""

MOE: dict[str, Any] = (
    {**QWEN3_0_6B, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32768}
    | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128}
    | {"num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 4, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "tie_word_embeddings": False}
)
"""Four of Qwen3-30B-A3B's 48 layers, with a fifth of its vocabulary: 5.3 GB in bfloat16."""

MINILM_L6: dict[str, Any] = (
    {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 30522, "hidden_size": 384}
    | {"intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12, "hidden_act": "gelu"}
    | {"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "type_vocab_size": 2}
)
"""config.json of all-MiniLM-L6-v2, as far as it decides shapes."""

MODERNBERT_BASE: dict[str, Any] = (
    {"architectures": ["ModernBertModel"], "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768}
    | {"intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12}
    | {"max_position_embeddings": 8192, "local_attention": 128, "global_attn_every_n_layers": 3}
    | {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
)
"""config.json of gte-modernbert-base, as far as it decides shapes."""

SHAPES = {
    "qwen3": ("Qwen3-0.6B shapes", QWEN3_0_6B),
    "qwen3-8b": ("Qwen3-8B shapes", QWEN3_8B),
    "hybrid": ("4 layers of Qwen3.5-0.8B shapes", HYBRID),
    "moe": ("4 layers of Qwen3-30B-A3B shapes", MOE),
}
"""Language models by the names that commands take: in words, and as a config.json."""
