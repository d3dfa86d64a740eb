"""Qwen3.5 and Qwen3-Next (dense) against transformers: random weights saved by it, loaded by verax from disk."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen3_5")

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
from verax.checkpoint import Checkpoint
from verax.text.engine.sampling_params import SamplingParams

SIZES = dict(
    vocab_size=301,
    hidden_size=96,
    intermediate_size=152,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=40,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=20,
    linear_value_head_dim=28,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    eos_token_id=1,
)
FAMILIES = {
    "qwen3_5": ("Qwen3_5Text", "Qwen3_5", dict(tie_word_embeddings=True)),
    "qwen3_5-untied": (
        "Qwen3_5Text",
        "Qwen3_5",
        dict(
            num_hidden_layers=6,
            layer_types=["full_attention", "linear_attention", "linear_attention"] * 2,
            attention_bias=True,
            linear_conv_kernel_dim=3,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        ),
    ),
    "qwen3_next": ("Qwen3Next", "Qwen3Next", dict(num_experts=0, tie_word_embeddings=True)),
    "qwen3_next-untied": ("Qwen3Next", "Qwen3Next", dict(mlp_only_layers=[0, 1, 2, 3], linear_num_value_heads=2)),
}


def spread(model):
    """Weights of real spread; decays from a few tokens to thousands, so that states matter over a whole text."""
    torch.manual_seed(0)
    for key, weight in model.named_parameters():
        if key.endswith("A_log"):
            weight.data.normal_(mean=-3.0, std=2.0)
        elif weight.ndim > 1:
            weight.data.normal_(std=1.5 * weight[0].numel() ** -0.5)
        else:
            ones = key.endswith("linear_attn.norm.weight")
            weight.data.normal_(mean=1.0 if ones else 0.0, std=0.3)
    return model.eval()


def reference(family, folder, dtype=None):
    """A transformers model, saved to `folder`."""
    config, model, options = FAMILIES[family]
    config = getattr(transformers, f"{config}Config")(**{**SIZES, **options})
    return save_reference(spread(getattr(transformers, f"{model}ForCausalLM")(config)), folder, dtype)


TOKENS = np.random.default_rng(0).integers(2, SIZES["vocab_size"], (2, 131))


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_are_those_of_transformers(family, tmp_path):
    theirs = reference(family, tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert relative(logits(tmp_path, TOKENS), expected) < 2e-5


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_128_greedy_tokens_are_those_of_transformers(family, tmp_path):
    theirs = reference(family, tmp_path)
    prompts = [TOKENS[0, :37].tolist(), TOKENS[1, :5].tolist()]
    expected = continuations(theirs, prompts, 128)
    greedy = SamplingParams(max_tokens=128, **GREEDY)
    outputs = engine(tmp_path).generate(prompts, greedy, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(family, tmp_path):
    reference(family, tmp_path, torch.bfloat16)
    ours, theirs = bfloat16_errors(tmp_path, TOKENS)
    assert ours <= 1.1 * theirs


def test_a_checkpoint_with_a_vision_tower_answers_texts(tmp_path):
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=96)
    config = transformers.Qwen3_5Config(
        text_config=SIZES, vision_config={**vision, "num_position_embeddings": 16}, tie_word_embeddings=True
    )
    theirs = spread(transformers.Qwen3_5ForConditionalGeneration(config))
    theirs.save_pretrained(tmp_path)
    opened = Checkpoint.open(tmp_path)
    assert {"model.visual.pos_embed.weight", "model.language_model.norm.weight"} <= set(opened.names())
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert relative(logits(tmp_path, TOKENS), expected) < 2e-5


def test_int8_weights_answer_nearly_as_the_model_does(tmp_path):
    theirs = reference("qwen3_next", tmp_path)
    prompt = TOKENS[0, :70].tolist()
    errors = logprob_errors(engine(tmp_path, quantization="int8"), theirs, prompt)
    assert np.sqrt(np.mean(np.square(errors))) < 0.1
