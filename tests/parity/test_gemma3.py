"""Gemma 3 and Gemma 2 against transformers: random weights saved by it, loaded by verax from disk."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.gemma3")

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
from verax.compare.cases.text import text_case
from verax.compare.run import compare_case
from verax.text.engine.sampling_params import SamplingParams

SIZES = dict(
    vocab_size=301,
    hidden_size=96,
    intermediate_size=152,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=24,
    query_pre_attn_scalar=30,
    sliding_window=20,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    bos_token_id=None,
    eos_token_id=1,
)
SLIDING, GLOBAL = "sliding_attention", "full_attention"
KINDS = [SLIDING, GLOBAL, SLIDING, SLIDING]
LONG = {GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, SLIDING: {"rope_type": "default"}}
FAMILIES = {
    "gemma3": ("Gemma3Text", "Gemma3", dict(layer_types=KINDS)),
    "gemma3-long": ("Gemma3Text", "Gemma3", dict(layer_types=KINDS[::-1], rope_parameters=LONG)),
    "gemma3-untied": (
        "Gemma3Text",
        "Gemma3",
        dict(num_hidden_layers=7, num_key_value_heads=1, attention_bias=True, tie_word_embeddings=False),
    ),
    "gemma2": ("Gemma2", "Gemma2", dict(attn_logit_softcapping=4.0, final_logit_softcapping=3.0)),
    "gemma2-published-caps": ("Gemma2", "Gemma2", dict(head_dim=40)),
}


def spread(model):
    """Weights of real spread, norms included."""
    torch.manual_seed(0)
    for _, weight in model.named_parameters():
        weight.data.normal_(std=1.5 * weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.3)
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
    assert relative(logits(tmp_path, TOKENS), expected) < 5e-6


@pytest.mark.parametrize("family", ["gemma3", "gemma2"])
def test_greedy_tokens_of_a_batch_are_those_of_transformers(family, tmp_path):
    """Three requests, two at a time; prompts and answers are longer than the window; the first prompt is cached."""
    theirs = reference(family, tmp_path)
    prompts = [TOKENS[0, :77].tolist(), TOKENS[1, :5].tolist(), TOKENS[0, :70].tolist()]
    expected = continuations(theirs, prompts, 90)
    llm = engine(tmp_path)
    llm.generate(prompts[:1], SamplingParams(max_tokens=1, **GREEDY), use_tqdm=False)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=90, **GREEDY), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert outputs[0].num_cached_tokens >= 64


@pytest.mark.parametrize(("options", "tolerance"), [({}, 2e-4), ({"kv_cache_dtype": "int8"}, 0.15)])
def test_logprobs_of_the_engine_are_close_to_those_of_transformers(options, tolerance, tmp_path):
    theirs = reference("gemma3", tmp_path)
    prompt = TOKENS[0].tolist()
    errors = logprob_errors(engine(tmp_path, **options), theirs, prompt)
    assert np.sqrt(np.mean(errors**2)) < tolerance


@pytest.mark.parametrize("family", ["gemma3", "gemma2"])
def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(family, tmp_path):
    reference(family, tmp_path, torch.bfloat16)
    ours, theirs = bfloat16_errors(tmp_path, TOKENS)
    assert ours <= 1.1 * theirs


@pytest.mark.parametrize("layout", ["language_model.model.", "model.language_model."])
def test_a_checkpoint_with_a_vision_tower_answers_texts(layout, tmp_path):
    """Keys as they are published, and as transformers 5 writes them."""
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    config = transformers.Gemma3Config(
        text_config={**SIZES, "layer_types": KINDS}, vision_config={**vision, "patch_size": 14}, mm_tokens_per_image=4
    )
    theirs = spread(transformers.Gemma3ForConditionalGeneration(config))
    theirs.save_pretrained(tmp_path)
    weights = {}
    for key, weight in load_file(tmp_path / "model.safetensors").items():
        text = key.replace("model.language_model.", "").replace("language_model.model.", "")
        weights[layout + text if "language_model" in key else key] = weight
    save_file(weights, tmp_path / "model.safetensors")
    assert any("vision_tower" in key for key in weights)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert relative(logits(tmp_path, TOKENS), expected) < 5e-6


def test_config_files_of_transformers_4_are_read_as_it_reads_them(tmp_path):
    """Rotary bases and windows by their old names, and sizes left out that are the defaults of its classes."""
    reference("gemma3", tmp_path)
    old = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_parameters", "layer_types", "hidden_activation"):
        del old[name]
    old |= {"sliding_window_pattern": 2, "rope_local_base_freq": 5e3, "rope_theta": 2e5}
    old["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(old))
    theirs = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert theirs.config.layer_types == [SLIDING, GLOBAL] * 2
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert relative(logits(tmp_path, TOKENS), expected) < 5e-6


@pytest.mark.parametrize("family", ["gemma3", "gemma2"])
def test_every_module_is_compared_by_name(family, tmp_path):
    reference(family, tmp_path)
    result = compare_case(text_case(tmp_path, tmp_path, tokens=40), dtype="float32")
    assert result.passed
    rows = {row.name for row in result.rows}
    assert {"model.embed_tokens", "model.layers.1.post_feedforward_layernorm", "model.norm"} <= rows
