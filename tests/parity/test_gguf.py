"""GGUF files against transformers: the logits of a model that has the dequantised weights."""

import gguf
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.parity.test_causal_lm import DELTA, GROWING_ROPE, LLAMA3_ROPE, SIZES, TOKENS, spread
from tests.support import gguf as files
from tests.support.causal_lm import model_logits, relative
from tests.support.tiny import tiny_checkpoint, tiny_tokenizer
from verax.checkpoint import Checkpoint
from verax.compare import compare_case
from verax.compare.cases.text import text_case
from verax.loading import load_causal_lm

LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
LONG_ROPE |= {"short_factor": [1 + 0.1 * i for i in range(12)], "long_factor": [1.5**i for i in range(12)]}
LLAMA = dict(tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True)
PER_LAYER = dict(hidden_size_per_layer_input=32, vocab_size_per_layer_input=SIZES["vocab_size"])
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}  # which the converter always writes
SHARED = dict(shared_expert_intermediate_size=96)
FAMILIES = {
    "qwen3": ("Qwen3", dict(head_dim=32, tie_word_embeddings=True)),
    "qwen3-untied": ("Qwen3", dict(head_dim=32, tie_word_embeddings=False)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "llama": ("Llama", LLAMA),
    "gemma3": ("Gemma3", dict(num_hidden_layers=7, head_dim=32, query_pre_attn_scalar=32, sliding_window=24)),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=4)),
    "granite": ("Granite", dict(embedding_multiplier=2.5, attention_multiplier=0.3, logits_scaling=3.0)),
    "phi3": ("Phi3", dict(rope_parameters=LONG_ROPE, original_max_position_embeddings=64)),
    "olmo2": ("Olmo2", {}),
    "qwen3moe": ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)),
    "qwen2moe": ("Qwen2Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, **SHARED)),
    "mistral3": (
        "Ministral3",
        dict(head_dim=32, rope_parameters={**GROWING_ROPE, **MSCALE}),
    ),
    "gemma4": ("Gemma4", dict(num_hidden_layers=6, head_dim=32, global_head_dim=64, sliding_window=24, **PER_LAYER)),
    "qwen35": ("Qwen3_5", DELTA),
    "qwen3next": (
        "Qwen3Next",
        {**DELTA, **SHARED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "gpt-oss": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=32, sliding_window=24)),
    "olmo3": ("Olmo3", dict(num_hidden_layers=4, sliding_window=24)),
    "gemma2": ("Gemma2", dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=24)),
}
WIDE = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64, tie_word_embeddings=True)
"""Rows of whole super-blocks."""
CASES = [
    *((family, "F32") for family in FAMILIES),
    *(("qwen3", "Q8_0"), ("llama", "Q5_1"), ("gemma3", "Q8_0"), ("wide", "Q4_K"), ("wide", "IQ4_NL")),
]
"""Names and orders of each family; few types, since tests/checkpoint compares the weights of each with gguf's own."""


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_match_the_dequantised_weights_in_transformers(family, kind, tmp_path):
    name, options = ("Qwen3", WIDE) if family == "wide" else FAMILIES[family]
    # Rows of whole blocks of 32.
    config = getattr(transformers, f"{name}TextConfig" if name in ("Gemma3", "Gemma4", "Qwen3_5") else f"{name}Config")(
        **{**SIZES, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1, **options}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for key, weight in model.named_parameters():
        std = 1.5 * weight.shape[1] ** -0.5 if weight.ndim == 2 else 0.3
        weight.data.normal_(mean=float(weight.ndim == 1 and not key.endswith("bias")), std=std)
    if name in ("Qwen3_5", "Qwen3Next"):
        spread(model)  # whose decays are from a few tokens to thousands
    model.save_pretrained(tmp_path)
    tiny_tokenizer(tmp_path, vocab_size=SIZES["vocab_size"])
    stored = files.write(tmp_path, tmp_path / "a.gguf", kind)
    if kind != "F32":
        known = gguf.GGMLQuantizationType[kind]
        for key, weight in model.named_parameters():
            if weight.ndim == 2:
                blocks = stored[key] if kind in files.RANDOM else gguf.quantize(weight.data.numpy(), known)
                weight.data = torch.from_numpy(gguf.dequantize(blocks, known))
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    opened = Checkpoint.open(tmp_path / "a.gguf")
    ours = load_causal_lm(opened, dtype="float32")
    # The norm after each of a Gemma's layers makes more of what the rounding of inputs changes.
    rounded = 0.15 if "gemma" in family else 0.05
    for length in (30, TOKENS.shape[1]):  # rounded to integers of 8 bits, and to bfloat16
        few = model_logits(ours, TOKENS[:, :length])
        assert relative(few, expected[:, :length]) < (2e-5 if kind == "F32" else rounded)
    floats = load_causal_lm(opened, dtype="float32", quantization="dequantize")
    assert relative(model_logits(floats, TOKENS), expected) < 2e-5


def test_every_layer_of_a_quantised_file_matches_transformers_own_reader(tmp_path):
    pytest.importorskip("accelerate")
    folder = tiny_checkpoint(tmp_path / "folder", family="llama")
    files.write(folder, tmp_path / "a.gguf", "Q8_0")
    result = compare_case(text_case(tmp_path / "a.gguf", tmp_path / "scratch", tokens=9), dtype="float32")
    assert result.passed
    assert len(result.rows) > 20
