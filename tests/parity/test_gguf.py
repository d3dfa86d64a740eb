"""GGUF files against transformers: the logits of a model that has the dequantised weights."""

import gguf
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.parity.test_causal_lm import DELTA, GROWING_ROPE, LLAMA3_ROPE, LONG_OLMO, SIZES, TOKENS, spread
from tests.support import gguf as files
from tests.support.causal_lm import model_logits, relative, save_reference
from tests.support.tiny import tiny_checkpoint
from verax.checkpoint import Checkpoint
from verax.compare import compare_case
from verax.compare.cases.text import text_case
from verax.loading import load_causal_lm

LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
LONG_ROPE |= {"short_factor": [1 + 0.1 * i for i in range(12)], "long_factor": [1.5**i for i in range(12)]}
LLAMA = dict(tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True)
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}  # which the converter always writes
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=96)
WIDE = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64, tie_word_embeddings=True)
"""Rows of whole super-blocks."""
CASES = [
    ("Phi3", "F32", dict(rope_parameters=LONG_ROPE, original_max_position_embeddings=64)),
    ("Ministral3", "F32", dict(head_dim=32, rope_parameters={**GROWING_ROPE, **MSCALE})),
    ("Qwen3Next", "F32", {**DELTA, **EXPERTS}),
    ("Olmo3", "F32", dict(num_hidden_layers=4, sliding_window=24, rope_parameters=LONG_OLMO)),
    ("Llama", "Q5_1", LLAMA),
    ("Gemma3", "Q8_0", dict(num_hidden_layers=7, head_dim=32, query_pre_attn_scalar=32, sliding_window=24)),
    ("Qwen3", "Q4_K", WIDE),
]
"""Positions and a layout that the file has in another form, and types of blocks.

tests/checkpoint compares the weights of each type with gguf's own, and the sizes and weights of each family with its
folder, whose logits are compared in test_causal_lm.py.
"""


@pytest.mark.parametrize(("name", "kind", "options"), CASES)
def test_logits_match_the_dequantised_weights_in_transformers(name, kind, options, tmp_path):
    # Rows of whole blocks of 32.
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(
        **{**SIZES, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1, **options}
    )
    model = save_reference(spread(getattr(transformers, f"{name}ForCausalLM")(config)), tmp_path)
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
    rounded = 0.15 if name == "Gemma3" else 0.05
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
