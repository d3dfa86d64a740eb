"""Mixtures of experts against transformers: random weights saved by it, loaded by verax from disk."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen3_5_moe")

from tests.support.causal_lm import (
    GREEDY,
    bfloat16_errors,
    continuations,
    engine,
    logits,
    logprob_errors,
    relative,
    save_reference,
)
from verax import checkpoint
from verax.checkpoint import Checkpoint
from verax.text.engine.sampling_params import SamplingParams

SIZES = dict(
    vocab_size=301,
    hidden_size=96,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=24,
    moe_intermediate_size=40,
    num_experts=8,
    num_experts_per_tok=3,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    eos_token_id=1,
)
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=20,
    linear_value_head_dim=28,
    shared_expert_intermediate_size=56,
)
FAMILIES = {
    "qwen3_moe": ("Qwen3Moe", "Qwen3Moe", dict(norm_topk_prob=True)),
    "qwen3_moe-in-part": (
        "Qwen3Moe",
        "Qwen3Moe",
        dict(intermediate_size=152, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=False, num_experts=7),
    ),
    "qwen3_next": ("Qwen3Next", "Qwen3Next", dict(**DELTA, intermediate_size=152, mlp_only_layers=[1])),
    "qwen3_5_moe": ("Qwen3_5MoeText", "Qwen3_5Moe", DELTA),
}


def spread(model):
    """Weights of real spread; routers that choose clearly, so that rounding seldom changes the choice."""
    torch.manual_seed(0)
    for key, weight in model.named_parameters():
        if key.endswith("A_log"):
            weight.data.normal_(mean=-3.0, std=2.0)
        elif key.endswith("mlp.gate.weight"):
            weight.data.normal_(std=4 * weight.shape[1] ** -0.5)
        elif weight.ndim > 1:
            weight.data.normal_(std=1.5 * weight.shape[-1] ** -0.5)
        else:
            plain = model.config.model_type == "qwen3_moe" or key.endswith("linear_attn.norm.weight")
            weight.data.normal_(mean=1.0 if plain else 0.0, std=0.3)
    return model.eval()


def reference(family, folder, dtype=None, **changes):
    """A transformers model, saved to `folder`."""
    config, model, options = FAMILIES[family]
    config = getattr(transformers, f"{config}Config")(**{**SIZES, **options, **changes})
    return save_reference(spread(getattr(transformers, f"{model}ForCausalLM")(config)), folder, dtype)


TOKENS = np.random.default_rng(0).integers(2, SIZES["vocab_size"], (2, 131))


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_are_those_of_transformers(family, tmp_path):
    theirs = reference(family, tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert relative(logits(tmp_path, TOKENS), expected) < 2e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_64_greedy_tokens_are_those_of_transformers(family, tmp_path):
    theirs = reference(family, tmp_path)
    prompts = [TOKENS[0, :37].tolist(), TOKENS[1, :5].tolist()]
    expected = continuations(theirs, prompts, 64)
    greedy = SamplingParams(max_tokens=64, **GREEDY)
    outputs = engine(tmp_path).generate(prompts, greedy, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(family, tmp_path):
    # Every expert is chosen: rounding turns choices among some of them over, on either side, and such a position then
    # differs as a whole.
    reference(family, tmp_path, torch.bfloat16, num_experts_per_tok=SIZES["num_experts"])
    ours, theirs = bfloat16_errors(tmp_path, TOKENS)
    assert ours <= 1.1 * theirs


def test_a_checkpoint_with_a_vision_tower_answers_texts_in_both_layouts_of_experts(tmp_path):
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=96)
    config = transformers.Qwen3_5MoeConfig(
        text_config={**SIZES, **DELTA},
        vision_config={**vision, "num_position_embeddings": 16},
        tie_word_embeddings=True,
    )
    theirs = spread(transformers.Qwen3_5MoeForConditionalGeneration(config))
    theirs.save_pretrained(tmp_path / "single")
    arrays = {name: weight.numpy() for name, weight in theirs.state_dict().items()}
    checkpoint.save(arrays, tmp_path / "stacked", config=json.loads(theirs.config.to_json_string()))
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    layer = "model.language_model.layers.0.mlp.experts"
    for layout, key in (("single", f"{layer}.7.up_proj.weight"), ("stacked", f"{layer}.gate_up_proj")):
        assert key in Checkpoint.open(tmp_path / layout).names()
        assert relative(logits(tmp_path / layout, TOKENS), expected) < 2e-5


def test_int8_weights_answer_nearly_as_the_model_does(tmp_path):
    theirs = reference("qwen3_moe", tmp_path)
    prompt = TOKENS[0, :70].tolist()
    errors = logprob_errors(engine(tmp_path, quantization="int8"), theirs, prompt)
    assert np.median(np.abs(errors)) < 0.1
