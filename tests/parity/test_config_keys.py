"""Every key of transformers' config classes is read, or refused, or on the list of those without effect here."""

import json

import pytest

transformers = pytest.importorskip("transformers")

from verax import models
from verax.errors import VeraxError
from verax.models.clip import CLIPVisionConfig
from verax.models.umt5 import UMT5Config

DECODERS = ("Qwen2", "Qwen3", "Llama", "Mistral", "Qwen3Moe", "Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next")
DECODERS += ("Gemma2", "Gemma3Text", "Qwen2Moe", "Phi3", "SmolLM3", "Olmo2", "Olmo3", "Granite", "GraniteMoeHybrid")
DECODERS += ("Ministral", "Ministral3", "GptOss", "Gemma4Text", "Gemma4UnifiedText", "Qwen3VLText")
ENCODERS = ("Bert", "Roberta", "XLMRoberta", "ModernBert", "DebertaV2", "Gte", "Electra", "Camembert")
VECTORS_ONLY = ("MPNet", "DistilBert", "NomicBert", "JinaEmbeddingsV3")
"""Encoders without a cross-encoder."""

# Loading, training, generation and other heads than the ones that are computed here.
# fmt: off
WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "dtype", "model_type", "transformers_version", "bos_token_id", "cls_token_id",
    "eos_token_id", "pad_token_id", "sep_token_id", "initializer_cutoff_factor", "initializer_factor",
    "initializer_range", "chunk_size_feed_forward", "deterministic_flash_attn", "output_attentions",
    "output_hidden_states", "output_router_logits", "pretraining_tp", "return_dict", "router_aux_loss_coef",
    "use_cache", "attention_dropout", "attention_probs_dropout_prob", "classifier_dropout", "dropout_rate",
    "embedding_dropout", "hidden_dropout_prob", "mlp_dropout", "id2label", "label2id", "problem_type", "decoder_bias",
    "sparse_pred_ignore_index", "sparse_prediction", "add_cross_attention", "is_encoder_decoder",
    "decoder_start_token_id", "num_decoder_layers", "scale_decoder_outputs", "projection_dim", "embd_pdrop",
    "resid_pdrop", "pooler_dropout", "cls_dropout", "legacy", "sinusoidal_pos_embds", "dropout", "qa_dropout",
    "seq_classif_dropout", "summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj",
}
FOLLOWS = {
    "_sliding_window_pattern": "layer_types", "dense_act_fn": "feed_forward_proj", "is_gated_act": "feed_forward_proj",
    "no_rope_layer_interval": "no_rope_layers",
}
DENSE_GRANITE = {
    "layer_types": ["attention"] * 2, "num_hidden_layers": 2, "num_local_experts": 0, "position_embedding_type": "rope",
}
WITHOUT_RECURRENCE = {
    "intermediate_size", "num_experts_per_tok", "time_step_limit", "mamba_n_heads", "mamba_n_groups", "mamba_d_state",
    "mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias",
}
UNREAD = {"GraniteMoeHybrid": WITHOUT_RECURRENCE, "Gemma3Text": {"attn_logit_softcapping"}}
# fmt: on
"""Keys that transformers writes next to those that they follow from, and keys that a family's class does not apply."""


NAMES = {
    "classifier_activation": "activation",
    "enable_moe_block": "top_k_experts",
    "hidden_activation": "activation",
    "is_decoder": "decoder",
    "moe_intermediate_size": "intermediate_size",
    "num_hidden_layers": "layers",
    "num_local_experts": "num_experts",
    "top_k_experts": "num_experts_per_tok",
    "use_sliding_window": "sliding_window",
}
"""Names in refusals of keys that are refused because of another, or by a shorter name."""


def others(value):
    """Values that differ from one of a config.json."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 + 1, value / 2]
    if isinstance(value, list):
        return [value[::-1], [*value, *value[:1]], [0]]
    return [{"x": 1}, 3, 0.5, True, "x", ["x"]]


def read(family):
    """Configuration that is computed for a config.json, or the message of its refusal."""
    special = {"UMT5": UMT5Config.from_hf, "CLIPVision": CLIPVisionConfig.from_hf}

    def parse(config):
        try:
            if family in special:
                return special[family](config)
            if family in ENCODERS:
                return models.encoder(config)[1], models.cross_encoder({**config, "id2label": {"0": "x"}})[1]
            if family in VECTORS_ONLY:
                return models.encoder(config)[1]
            return models.causal_lm(config)[1]
        except VeraxError as error:
            return str(error)

    return parse


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS, *VECTORS_ONLY, "UMT5", "CLIPVision"])
def test_a_change_of_any_key_changes_the_model_or_is_refused_by_name(family):
    hybrid = family == "GraniteMoeHybrid"
    described = getattr(transformers, f"{family}Config")(**DENSE_GRANITE if hybrid else {})
    config = json.loads(json.dumps(described.to_dict()))
    configs = [config]
    if "enable_moe_block" in config:  # without which nothing reads the experts
        experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
        configs.append({**config, **experts})
    if "use_sliding_window" in config:  # which layer_types goes before, and without which nothing reads the window
        windowed = {**config, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
        configs.append({key: value for key, value in windowed.items() if key != "layer_types"})
    without_head = (
        {"tie_word_embeddings", "is_decoder" if family == "UMT5" else ""} if family not in DECODERS else set()
    )
    parse = read(family)
    plain = [parse(config) for config in configs]
    assert not any(isinstance(sizes, str) for sizes in plain)
    unread = WITHOUT_EFFECT | without_head | UNREAD.get(family, set())
    for key in {key for key in config if FOLLOWS.get(key) not in config} - unread:
        results = [[parse({**sizes, key: value}) for value in others(sizes.get(key))] for sizes in configs]
        assert any(result != sizes for sizes, row in zip(plain, results, strict=True) for result in row), key
        refusals = [result for row in results for result in row if isinstance(result, str)]
        named = [key in refusal or NAMES.get(key, key) in refusal for refusal in refusals]
        assert all(named), (key, refusals)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("key", ["is_causal", "use_bidirectional_attention"])
def test_attention_in_both_directions_makes_no_language_model(family, key):
    config = {**getattr(transformers, f"{family}Config")().to_dict(), key: key != "is_causal"}
    with pytest.raises(VeraxError, match="that is an encoder, which generates no text"):
        models.causal_lm(config)
    assert not models.is_causal(config)
