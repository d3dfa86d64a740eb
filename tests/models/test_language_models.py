"""Configurations of language models that are read or refused. tests/parity/test_config_keys.py changes every key."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.tiny import HYBRID, tiny_config
from verax.errors import CheckpointError, UnsupportedModelError
from verax.models import causal_lm

SLIDING, GLOBAL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
SHARED = {**MOE, **HYBRID, "shared_expert_intermediate_size": 40}
GEMMA = {"num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 16}
BASE = {
    "qwen3_moe": MOE,
    "qwen3_next": {**HYBRID, "num_experts": 0},
    "qwen3_5_text": HYBRID,
    "gemma3_text": GEMMA,
    "gemma2": GEMMA,
}


def config(family="qwen3", **changes):
    return tiny_config(family, **{**BASE.get(family, {}), **changes})


def read(family="qwen3", **changes):
    return causal_lm(config(family, **changes))[1]


def test_decays_stay_float32_in_bfloat16_models():
    architecture, sizes = causal_lm(config("qwen3_5_text"))
    abstract = nnx.eval_shape(lambda: architecture(sizes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    layer = nnx.state(abstract.model.layers[0].linear_attn)
    wide = {path for path, leaf in nnx.to_flat_state(layer) if leaf.dtype == jnp.float32}
    assert wide == {("A_log",), ("dt_bias",), ("norm", "weight")}


USED = {"use_sliding_window": True, "sliding_window": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("qwen3", {"sliding_window": 8}, (None, None)),
        ("qwen3", USED, (None, None)),  # the first 28 layers see everything
        ("qwen3", {**USED, "max_window_layers": 1}, (None, 8)),
        ("qwen3", {**USED, "layer_types": [SLIDING, GLOBAL]}, (8, None)),
        ("mistral", {"sliding_window": 8}, (8, 8)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("qwen3_moe", {**USED, "max_window_layers": 2}, (8, 8)),
    ],
)
def test_sliding_windows_are_read_by_layer(family, changes, windows):
    assert read(family, **changes).sliding_windows == windows


def test_the_text_part_of_a_config_with_a_vision_tower_is_read():
    text = config("qwen3_5_text")
    outer = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    assert causal_lm(outer)[1] == causal_lm({**text, "tie_word_embeddings": False})[1]
    # The width of dense layers is needed only where there are some.
    text = config("qwen3_5_moe_text", **SHARED)
    del text["intermediate_size"]
    assert causal_lm({**outer, "model_type": "qwen3_5_moe", "text_config": text})[1].experts.num_experts == 4


def test_sizes_that_a_short_file_leaves_out_are_gemma_3s_published_ones():
    """gemma-3-4b's config.json has these values and no others for its language model."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    sizes = causal_lm({"model_type": "gemma3", "text_config": text, "vision_config": {}})[1]
    heads = (sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim)
    assert (sizes.vocab_size, *heads) == (262208, 8, 4, 256)
    assert (sizes.query_pre_attn_scalar, sizes.max_position_embeddings) == (256, 131072)
    assert sizes.sliding_windows == (1024, 1024, 1024, 1024, 1024, None) * 5 + (1024,) * 4
    assert (sizes.rotary.theta, sizes.rotary.kind, dict(sizes.rotary.scaling)["factor"]) == (1e6, "linear", 8)
    assert (sizes.local_rotary.theta, sizes.local_rotary.kind) == (1e4, "default")
    assert sizes.tie_word_embeddings
    assert sizes.attn_logit_softcapping is None


def test_spellings_of_rotary_settings_agree():
    old = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = read(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    linear = {"type": "linear", "factor": 2.0}
    both = read(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, rope_scaling=linear)
    assert old.rotary == new.rotary == both.rotary
    dynamic = read(rope_theta=5e5, rope_scaling={"type": "dynamic", "factor": 2.0})  # of longer texts only
    np.testing.assert_array_equal(dynamic.rotary.frequencies(16)[0], read(rope_theta=5e5).rotary.frequencies(16)[0])
    by_kind = {GLOBAL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e5}, SLIDING: {"rope_theta": 7e3}}
    sizes = read("gemma3_text", rope_parameters=by_kind)
    assert (sizes.rotary.theta, sizes.rotary.kind, sizes.local_rotary.theta) == (3e5, "linear", 7e3)


@pytest.mark.parametrize(("given", "longest"), [(64, 256), (200, 256), (512, 512)])
def test_a_context_is_as_long_as_yarn_makes_it(given, longest):
    """Qwen's cards add YaRN and leave max_position_embeddings, which other files have after scaling."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(max_position_embeddings=given, rope_scaling=yarn).max_position_embeddings == longest


def test_settings_for_all_layers_are_of_olmo_3_s_layers_without_a_window():
    """transformers 5.0 to 5.10 wrote them so; the models were trained without YaRN in windows."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 3e5}
    by_kind = {GLOBAL: yarn, SLIDING: {"rope_theta": 3e5}}
    assert read("olmo3", rope_parameters=yarn) == read("olmo3", rope_parameters=by_kind)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {}, "model_type 'gpt2'; language models supported are qwen3, qwen2, llama"),
        ("olmo", {}, "of which olmo[23], olmo[23], .* have the nearest names; verax.register_causal_lm adds others"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear' is not supported; phi3 uses"),
        ("phi3", {"rope_scaling": {"type": "su", "factor": 2.0}}, "needs short_factor and long_factor"),
        ("smollm3", {"layer_types": [SLIDING, GLOBAL]}, "no sliding_window is in use"),
        ("granitemoehybrid", {"layer_types": ["attention"] * 2}, "num_local_experts 8"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"], "num_local_experts": 0}, "layers of type mamba"),
        ("mistral3", {"text_config": {"model_type": "mistral4"}}, "text_config of model_type 'mistral4'"),
        ("gpt_oss", {**MOE, "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("qwen3", {"layer_types": [GLOBAL, "chunked_attention"]}, "layers of type chunked_attention"),
        ("qwen3", {"use_sliding_window": True}, "lacks sliding_window"),
        ("llama", {**USED, "max_window_layers": 0}, "llama with layers of type sliding_attention"),
        ("mistral", {"sliding_window": 8, "layer_types": [SLIDING, GLOBAL]}, "mistral with layers of type full_att"),
        ("qwen3_moe", {**USED, "layer_types": [SLIDING, GLOBAL]}, "qwen3_moe with layers of type full_attention"),
        ("qwen3_vl_text", {**USED, "layer_types": [GLOBAL, SLIDING]}, "qwen3_vl_text with layers of type sliding_att"),
        ("qwen3", {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rope_type 'mrope'"),
        ("qwen3", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("smollm3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("gemma3_text", {"rope_parameters": {SLIDING: {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor 0.5 is"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "expected settings by kind of layer"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN}, "rope_parameters differ"),
        (
            "qwen3",
            {"rope_parameters": {GLOBAL: {"rope_theta": 1e6}}},
            "rotary settings by kind of layer .full_attention",
        ),
        ("gpt_oss", {**MOE, "per_layer_config": {"0": {"sliding_window": 8}}}, "per_layer_config is not supported"),
        ("gemma3_text", {"sliding_window": None}, "no sliding_window is in use"),
        ("gemma3_text", {"head_dim": 15}, "head_dim 15"),
        ("qwen3_5_text", {"layer_types": [LINEAR, SLIDING, GLOBAL]}, "sliding_attention"),
        ("qwen3_next", {"num_experts": 8}, "lacks num_experts_per_tok"),
        ("qwen3_moe", {"layer_types": [LINEAR] * 2}, "layers of type linear_attention"),
        ("qwen3_5_moe_text", HYBRID, "lacks num_experts, num_experts_per_tok, moe_intermediate_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(family, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(family, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"layer_types": [GLOBAL]}, "layer_types has 1 entries for 2 layers"),
        ("gemma3_text", {"sliding_window": -1}, "sliding_window: expected a whole number"),
        ("gemma3_text", {"final_logit_softcapping": 0}, "final_logit_softcapping: expected a number above 0"),
        ("gemma3_text", {"rope_local_base_freq": "high"}, "rope_theta: expected a number above 1"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [2]}}, "1 rotary factors do not"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 2 layers"),
        ("gpt_oss", {**MOE, "swiglu_limit": 0}, "swiglu_limit: expected a number above 0"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than num_experts 4"),
        ("qwen3_moe", {"num_experts": "many"}, "num_experts: expected a whole number"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_values_that_no_model_has_are_refused_by_name(family, changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(family, **changes)


@pytest.mark.parametrize(("family", "key"), [("qwen3", "hidden_size"), ("qwen3_5_text", "linear_key_head_dim")])
def test_a_missing_size_is_named(family, key):
    file = config(family)
    del file[key]
    with pytest.raises(UnsupportedModelError, match=f"lacks {key}"):
        causal_lm(file)
