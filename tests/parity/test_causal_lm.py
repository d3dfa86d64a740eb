"""Language models against transformers: random weights saved by it, loaded by verax from disk."""

import json
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen3_5_moe")
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
from verax import LLM, builtin, checkpoint, ops
from verax.checkpoint import Checkpoint
from verax.compare.cases.text import text_case
from verax.compare.run import compare_case
from verax.loading import load_causal_lm
from verax.models import language_config
from verax.text.engine.sampling_params import SamplingParams

SIZES = dict(
    vocab_size=301,
    hidden_size=96,
    intermediate_size=152,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=None,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
GROWING_ROPE = {**YARN_ROPE, "llama_4_scaling_beta": 0.5}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e6}
SLIDING, GLOBAL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
LONG_ROPE = {GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, SLIDING: {"rope_type": "default"}}
LONG_OLMO = {**LONG_ROPE, GLOBAL: {**YARN_ROPE, "rope_theta": 5e5}}
FACTORS = dict(short_factor=[1.0, 1.1, 1.3, 1.5, 1.6, 1.9], long_factor=[1.2, 2.0, 5.0, 9.0, 20.0, 40.0])
LONG_FACTORS = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **FACTORS}
GEMMA_LAYERS = [SLIDING, GLOBAL, SLIDING, SLIDING]

TIED, UNTIED, HEADS = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False), dict(head_dim=24)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=20, linear_value_head_dim=28)
DELTA |= dict(head_dim=40, num_hidden_layers=4)
EXPERTS = dict(moe_intermediate_size=40, num_experts=8, num_experts_per_tok=3, **HEADS)
OSS = dict(num_local_experts=8, num_experts_per_tok=3, sliding_window=20, hidden_size=96, intermediate_size=64, **HEADS)
OSS |= {"rope_parameters": {**YARN_ROPE, "truncate": False}}
GEMMA4 = dict(num_hidden_layers=4, layer_types=[SLIDING, GLOBAL, SLIDING, GLOBAL], sliding_window=20, head_dim=24)
GEMMA4 |= dict(global_head_dim=48, hidden_size_per_layer_input=20, vocab_size_per_layer_input=301)
GEMMA4 |= dict(final_logit_softcapping=3.0)
GEMMA4_UNIFIED = {key: value for key, value in GEMMA4.items() if not key.endswith("_per_layer_input")}
GEMMA4_UNIFIED |= dict(attention_k_eq_v=True, num_global_key_value_heads=1)
SHARED_KEYS = dict(num_hidden_layers=7, num_kv_shared_layers=3, use_double_wide_mlp=True)
SHARED_KEYS |= dict(layer_types=[SLIDING, SLIDING, GLOBAL, SLIDING, SLIDING, SLIDING, GLOBAL])
GEMMA4_EXPERTS = dict(enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=40)
GEMMA4_EXPERTS |= dict(attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0)
SHARED = dict(shared_expert_intermediate_size=56)
FOUR_LAYERS = dict(num_hidden_layers=4)
MULTIPLIERS = dict(embedding_multiplier=2.5, attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=3)
GRANITE4 = dict(layer_types=["attention"] * 2, num_local_experts=0, shared_intermediate_size=120, mamba_n_heads=6)
GRANITE4 |= MULTIPLIERS
GEMMA = dict(query_pre_attn_scalar=30, sliding_window=20, num_hidden_layers=4, **HEADS)


class Family(NamedTuple):
    """Classes of transformers by the beginnings of their names, and settings beyond `SIZES`."""

    config: str
    options: dict
    model: str = ""


FAMILIES = {
    "qwen3": Family("Qwen3", {**TIED, **HEADS, "rope_parameters": PLAIN_ROPE}),
    "qwen3-untied-wide-heads": Family("Qwen3", {**UNTIED, "head_dim": 40, "attention_bias": True}),
    "qwen3-yarn": Family("Qwen3", {**TIED, **HEADS, "rope_parameters": YARN_ROPE}),
    "qwen3-windows": Family(
        "Qwen3", {**TIED, **HEADS, "use_sliding_window": True, "sliding_window": 16, "layer_types": [SLIDING, GLOBAL]}
    ),
    "qwen2": Family("Qwen2", TIED),
    "qwen2-multi-head": Family("Qwen2", {**UNTIED, "num_key_value_heads": 6}),
    "qwen2-windows": Family(
        "Qwen2", {**TIED, "use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}
    ),
    "llama": Family("Llama", {**UNTIED, "rope_parameters": LLAMA3_ROPE}),
    "llama-biased": Family("Llama", {**TIED, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-linear": Family("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "mistral": Family("Mistral", {**HEADS, "sliding_window": 16}),
    "mistral-no-window": Family("Mistral", {**TIED, "sliding_window": None}),
    "qwen3_5": Family("Qwen3_5Text", {**DELTA, **TIED}, "Qwen3_5"),
    "qwen3_5-untied": Family(
        "Qwen3_5Text",
        {
            **DELTA,
            "num_hidden_layers": 6,
            "layer_types": [GLOBAL, LINEAR, LINEAR] * 2,
            "attention_bias": True,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5},
        },
        "Qwen3_5",
    ),
    "qwen3_next": Family("Qwen3Next", {**DELTA, **TIED, "num_experts": 0}),
    "qwen3_next-untied": Family("Qwen3Next", {**DELTA, "mlp_only_layers": [0, 1, 2, 3], "linear_num_value_heads": 2}),
    "qwen3_next-experts": Family("Qwen3Next", {**DELTA, **EXPERTS, **SHARED, "mlp_only_layers": [1]}),
    "qwen3_5_moe": Family("Qwen3_5MoeText", {**DELTA, **EXPERTS, **SHARED}, "Qwen3_5Moe"),
    "qwen3_moe": Family("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe-in-part": Family(
        "Qwen3Moe",
        {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False, "num_experts": 7}
        | {"num_hidden_layers": 4},
    ),
    "qwen2_moe": Family("Qwen2Moe", {**EXPERTS, **SHARED, "use_sliding_window": True, "sliding_window": 19}),
    "qwen2_moe-in-part": Family(
        "Qwen2Moe", {**EXPERTS, **SHARED, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 4}
    ),
    "phi3": Family("Phi3", {"sliding_window": 16}),
    "phi3-long": Family("Phi3", {"rope_parameters": LONG_FACTORS, "original_max_position_embeddings": 64}),
    "smollm3": Family("SmolLM3", FOUR_LAYERS),
    "smollm3-windows": Family(
        "SmolLM3",
        {**UNTIED, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 20, "attention_bias": True},
    ),
    "olmo2": Family("Olmo2", UNTIED),
    "olmo3": Family("Olmo3", {**FOUR_LAYERS, "sliding_window": 20}),
    "olmo3-long": Family("Olmo3", {"layer_types": [GLOBAL, SLIDING], "rope_parameters": LONG_OLMO}),
    "granite": Family("Granite", MULTIPLIERS),
    "granite-biased": Family("Granite", {**MULTIPLIERS, **TIED, "attention_bias": True, "mlp_bias": True}),
    "granite4": Family("GraniteMoeHybrid", {**GRANITE4, "position_embedding_type": "rope"}),
    "granite4-no-positions": Family("GraniteMoeHybrid", {**GRANITE4, **TIED}),
    "ministral": Family("Ministral", {**HEADS, "sliding_window": 16, "layer_types": [SLIDING, GLOBAL]}),
    "ministral3": Family("Ministral3", {**HEADS, **TIED, "rope_parameters": GROWING_ROPE}),
    "ministral3-windows": Family("Ministral3", {"head_dim": 40, "sliding_window": 16}),
    "gemma3": Family("Gemma3Text", {**GEMMA, "layer_types": GEMMA_LAYERS, "attn_logit_softcapping": 2.0}, "Gemma3"),
    "gemma3-long": Family(
        "Gemma3Text", {**GEMMA, "layer_types": GEMMA_LAYERS[::-1], "rope_parameters": LONG_ROPE}, "Gemma3"
    ),
    "gemma3-untied": Family(
        "Gemma3Text",
        {**GEMMA, **UNTIED, "num_hidden_layers": 7, "num_key_value_heads": 1, "attention_bias": True},
        "Gemma3",
    ),
    "gpt_oss": Family("GptOss", OSS),
    "gpt_oss-plain": Family(
        "GptOss",
        {**OSS, "layer_types": [GLOBAL, SLIDING], "attention_bias": False, "rope_parameters": PLAIN_ROPE}
        | {"tie_word_embeddings": True, "swiglu_limit": 0.5, "swiglu_alpha": 1.1, "num_experts_per_tok": 1},
    ),
    "gemma4": Family("Gemma4Text", GEMMA4, "Gemma4"),
    "gemma4-shared": Family("Gemma4Text", {**GEMMA4, **SHARED_KEYS, "num_key_value_heads": 1}, "Gemma4"),
    "gemma4-experts": Family("Gemma4Text", {**GEMMA4, **GEMMA4_EXPERTS}, "Gemma4"),
    "gemma4-unified": Family("Gemma4UnifiedText", GEMMA4_UNIFIED, "Gemma4Unified"),
    "gemma2": Family("Gemma2", {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}),
    "gemma2-published-caps": Family("Gemma2", {**GEMMA, "head_dim": 40}),
}
DENSE = ("phi3", "smollm3", "olmo2", "olmo3", "granite", "granite4", "ministral3", "qwen2_moe", "gpt_oss", "gemma4")
"""Families that are compared in all of the ways below; the others differ from one of them in a flag."""

ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "router.proj.weight")

TOKENS = np.random.default_rng(0).integers(2, SIZES["vocab_size"], (2, 131))


def spread(model):
    """Weights of real spread, biases and norms included.

    Routers choose clearly, so that rounding seldom changes the choice. Decays are from a few tokens to thousands, so
    that states matter over a whole text.
    """
    torch.manual_seed(0)
    # Norms multiply by 1 + weight.
    around_zero = model.config.model_type.startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next"))
    for key, weight in model.named_parameters():
        if key.endswith("A_log"):
            weight.data.normal_(mean=-3.0, std=2.0)
        elif weight.ndim > 1:
            weight.data.normal_(std=(4 if key.endswith(ROUTERS) else 1.5) * weight.shape[-1] ** -0.5)
        else:
            plain = key.endswith("linear_attn.norm.weight") if around_zero else not key.endswith("bias")
            weight.data.normal_(mean=float(plain), std=0.3)
    return model.eval()


def reference(name, folder, dtype=None, **changes):
    """A transformers model, saved to `folder`."""
    family = FAMILIES[name]
    config = getattr(transformers, f"{family.config}Config")(**{**SIZES, **family.options, **changes})
    model = getattr(transformers, f"{family.model or family.config}ForCausalLM")(config)
    return save_reference(spread(model), folder, dtype)


def bound(name):
    return 5e-6 if name.startswith("gemma") else 2e-5


def expected_logits(theirs):
    with torch.no_grad():
        return theirs(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_match_transformers(family, tmp_path):
    theirs = reference(family, tmp_path)
    assert relative(logits(tmp_path, TOKENS), expected_logits(theirs)) < bound(family)


# Attention, windows, recurrent layers, these with experts. tests/text compares the engine with each model by itself.
@pytest.mark.parametrize(
    ("family", "count"),
    [("qwen3", 64), ("mistral", 64), ("qwen3_5", 64), ("qwen3_5_moe", 32), *((family, 128) for family in DENSE)],
)
def test_greedy_tokens_match_transformers(family, count, tmp_path):
    theirs = reference(family, tmp_path)
    prompts = [TOKENS[0, :37].tolist(), TOKENS[1, :5].tolist()]
    expected = continuations(theirs, prompts, count)
    outputs = engine(tmp_path).generate(prompts, SamplingParams(max_tokens=count, **GREEDY), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("family", ["gemma3", "gemma2"])
def test_greedy_tokens_of_a_batch_match_transformers(family, tmp_path):
    """Three requests, two at a time; prompts and answers are longer than the window; the first prompt is cached."""
    theirs = reference(family, tmp_path)
    prompts = [TOKENS[0, :77].tolist(), TOKENS[1, :5].tolist(), TOKENS[0, :70].tolist()]
    expected = continuations(theirs, prompts, 40)
    llm = engine(tmp_path)
    llm.generate(prompts[:1], SamplingParams(max_tokens=1, **GREEDY), use_tqdm=False)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=40, **GREEDY), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert outputs[0].num_cached_tokens >= 64


@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen2", "llama", "qwen3_5", "qwen3_next", "qwen3_moe", "qwen3_5_moe", "gemma3", "gemma2", *DENSE],
)
def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(family, tmp_path):
    # Every expert is chosen: rounding turns choices among some of them over, on either side, and such a position then
    # differs as a whole.
    chosen = dict(num_experts_per_tok=EXPERTS["num_experts"]) if "moe" in family else {}
    reference(family, tmp_path, torch.bfloat16, **chosen)
    ours, theirs = bfloat16_errors(tmp_path, TOKENS)
    assert ours <= 0.8 * theirs  # measured: 0.44 to 0.64


def test_longrope_follows_the_longest_context_of_the_engine(tmp_path):
    """The factors of short contexts are transformers' where no sequence can be longer."""
    theirs = reference("phi3-long", tmp_path)
    close = [
        np.abs(logprob_errors(engine(tmp_path, max_model_len=context), theirs, TOKENS[0, :40].tolist())).max() < 2e-4
        for context in (64, 128)
    ]
    assert close == [True, False]


def root_mean_square(errors):
    return np.sqrt(np.mean(np.square(errors)))


@pytest.mark.parametrize(
    ("family", "length", "options", "size", "tolerance"),
    [
        ("qwen3", 70, {}, lambda errors: np.abs(errors).max(), 2e-4),
        ("gemma3", 131, {}, root_mean_square, 2e-4),
        ("gemma3", 131, {"kv_cache_dtype": "int8"}, root_mean_square, 0.15),
        ("qwen3_next", 70, {"quantization": "int8"}, root_mean_square, 0.1),
        ("phi3", 70, {"quantization": "int8"}, root_mean_square, 0.1),
        ("phi3-long", 70, {"max_model_len": 128}, root_mean_square, 2e-4),
        ("olmo3", 70, {"quantization": "int8"}, root_mean_square, 0.1),
        ("gemma4-shared", 70, {"quantization": "int8"}, root_mean_square, 0.15),
        ("gpt_oss", 70, {"quantization": "int8"}, lambda errors: np.median(np.abs(errors)), 0.1),
        ("qwen3_moe", 70, {"quantization": "int8"}, lambda errors: np.median(np.abs(errors)), 0.1),
    ],
    ids=lambda value: " ".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else None,
)
def test_logprobs_of_the_engine_are_close_to_transformers(family, length, options, size, tolerance, tmp_path):
    theirs = reference(family, tmp_path)
    errors = logprob_errors(engine(tmp_path, **options), theirs, TOKENS[0, :length].tolist())
    assert size(errors) < tolerance


def test_the_mxfp4_experts_of_a_published_gpt_oss_are_held_exactly(tmp_path):
    """Held as integers of 8 bits, and as floats where these are asked for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = reference("gpt_oss", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    rng = np.random.default_rng(0)
    for key, weight in theirs.named_parameters():
        if key.endswith(("gate_up_proj", "down_proj")):
            E, D, F = weight.shape
            blocks = rng.integers(0, 256, (E, F, D // 32, 16), dtype=np.uint8)
            scales = rng.integers(121, 126, (E, F, D // 32), dtype=np.uint8)
            parts = torch.from_numpy(blocks), torch.from_numpy(scales)
            weight.data = convert_moe_packed_tensors(*parts, dtype=torch.float32)
            del stored[key]
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(tmp_path).kind("model.layers.0.mlp.experts.down_proj") == "MXFP4"
    expected = expected_logits(theirs)
    assert relative(logits(tmp_path, TOKENS, quantization="dequantize"), expected) < 2e-5
    with ops.use_implementations(grouped_linear="reference"):  # rounds inputs to bfloat16 only
        assert relative(logits(tmp_path, TOKENS), expected) < 1e-2


TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
TOWER |= dict(image_size=28, patch_size=14)


def with_tower(kind, folder, text, **options):
    """A model of transformers with a tower for images, saved to `folder`."""
    config = getattr(transformers, f"{kind}Config")(text_config={**SIZES, **text}, **options)
    theirs = spread(getattr(transformers, f"{kind}ForConditionalGeneration")(config))
    theirs.save_pretrained(folder)
    return theirs


VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=96, num_position_embeddings=16
)


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_a_checkpoint_with_a_vision_tower_answers_texts(kind, tmp_path):
    """Stacks of experts are read from single matrices and from one array."""
    experts = {**EXPERTS, **SHARED, **HEADS} if kind == "Qwen3_5Moe" else {}
    options = dict(vision_config=VISION, tie_word_embeddings=True)
    theirs = with_tower(kind, tmp_path / "single", {**DELTA, **experts}, **options)
    arrays = {name: weight.numpy() for name, weight in theirs.state_dict().items()}
    checkpoint.save(arrays, tmp_path / "stacked", config=json.loads(theirs.config.to_json_string()))
    layer = "model.language_model.layers.0.mlp"
    names = {folder: Checkpoint.open(tmp_path / folder).names() for folder in ("single", "stacked")}
    assert "model.visual.pos_embed.weight" in names["single"]
    if experts:
        assert f"{layer}.experts.0.gate_proj.weight" in names["single"]
        assert f"{layer}.experts.gate_up_proj" in names["stacked"]
    for folder in names if experts else ["single"]:
        assert relative(logits(tmp_path / folder, TOKENS), expected_logits(theirs)) < 2e-5


AXES = dict(
    rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 4, 4], "mrope_interleaved": True}
)
VISION_LAYERS = {**VISION, "deepstack_visual_indexes": [0]}


def test_a_qwen3_vl_answers_texts(tmp_path):
    options = dict(vision_config=VISION_LAYERS, tie_word_embeddings=True)
    theirs = with_tower("Qwen3VL", tmp_path, {**HEADS, **TIED, **AXES}, **options)
    assert "model.visual.pos_embed.weight" in Checkpoint.open(tmp_path).names()
    assert relative(logits(tmp_path, TOKENS), expected_logits(theirs)) < 2e-5


@pytest.mark.parametrize("layout", ["language_model.model.", "model.language_model."])
def test_a_gemma_with_a_vision_tower_answers_texts(layout, tmp_path):
    """Published keys, and the keys that transformers 5 writes."""
    text = {**GEMMA, "layer_types": GEMMA_LAYERS}
    theirs = with_tower("Gemma3", tmp_path, text, vision_config=TOWER, mm_tokens_per_image=4)
    weights = {}
    for key, weight in load_file(tmp_path / "model.safetensors").items():
        name = key.replace("model.language_model.", "").replace("language_model.model.", "")
        weights[layout + name if "language_model" in key else key] = weight
    save_file(weights, tmp_path / "model.safetensors")
    assert any("vision_tower" in key for key in weights)
    assert relative(logits(tmp_path, TOKENS), expected_logits(theirs)) < 5e-6


def test_a_gemma_4_that_embeds_patches_and_sound_answers_texts(tmp_path):
    vision = dict(patch_size=4, pooling_kernel_size=1, mm_embed_dim=96, mm_posemb_size=8, output_proj_dims=96)
    text = {**GEMMA4_UNIFIED, "pad_token_id": 0}
    theirs = with_tower("Gemma4Unified", tmp_path, text, vision_config=vision, audio_config={"audio_embed_dim": 16})
    assert relative(logits(tmp_path, TOKENS), expected_logits(theirs)) < 5e-6


@pytest.mark.parametrize(("kind", "tied"), [("mistral", False), ("ministral3", True)])
def test_a_mistral_with_a_vision_tower_answers_texts(kind, tied, tmp_path):
    tie, tower = dict(tie_word_embeddings=tied), {**TOWER, "model_type": "pixtral"}
    text = {**HEADS, **tie, "model_type": kind, "rope_parameters": GROWING_ROPE}
    theirs = with_tower("Mistral3", tmp_path, text, vision_config=tower, **tie)
    assert relative(logits(tmp_path, TOKENS), expected_logits(theirs)) < 2e-5


@pytest.mark.parametrize(
    ("kind", "text", "options"),
    [
        ("Gemma3", {**GEMMA, "layer_types": GEMMA_LAYERS}, dict(vision_config=TOWER, mm_tokens_per_image=4)),
        ("Qwen3_5", DELTA, dict(vision_config=VISION, tie_word_embeddings=True)),
        ("Qwen3_5Moe", {**DELTA, **EXPERTS, **SHARED, **HEADS}, dict(vision_config=VISION, tie_word_embeddings=True)),
        ("Mistral3", {**HEADS, "model_type": "mistral"}, dict(vision_config={**TOWER, "model_type": "pixtral"})),
        ("Mistral3", {**HEADS, "model_type": "ministral3"}, dict(vision_config={**TOWER, "model_type": "pixtral"})),
        ("Qwen3VL", {**HEADS, **AXES}, dict(vision_config=VISION_LAYERS, tie_word_embeddings=True)),
    ],
)
def test_transformers_loads_the_language_model_of_a_checkpoint_with_a_vision_tower(kind, text, options, tmp_path):
    theirs = with_tower(kind, tmp_path / "whole", text, **options)
    opened = Checkpoint.open(tmp_path / "whole")
    model = load_causal_lm(opened, dtype="float32")
    checkpoint.save(model, tmp_path / "text", config=language_config(opened.config))
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.architectures == [type(again).__name__]
    assert relative(expected_logits(again.eval()), expected_logits(theirs)) < 2e-5
    assert relative(logits(tmp_path / "text", TOKENS), expected_logits(theirs)) < 2e-5


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
    assert relative(logits(tmp_path, TOKENS), expected_logits(theirs)) < 5e-6


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("gemma3", "post_feedforward_layernorm"),
        ("gemma2", "post_feedforward_layernorm"),
        ("phi3", "self_attn.qkv_proj"),
        ("olmo3", "self_attn.q_norm"),
        ("granite4", "shared_mlp.input_linear"),
        ("gemma4", "per_layer_input_gate"),
        ("gpt_oss", "self_attn.o_proj"),
    ],
)
def test_every_module_is_compared_by_name(family, module, tmp_path):
    reference(family, tmp_path)
    result = compare_case(text_case(tmp_path, tmp_path, tokens=40), dtype="float32")
    assert (result.passed, result.first) == (True, None), result.failures
    rows = {row.name for row in result.rows}
    assert {"model.embed_tokens", f"model.layers.1.{module}", "model.norm"} <= rows


def test_transformers_answers_as_the_built_in_model_does():
    """The built-in model is an ordinary Hugging Face folder."""
    messages = [{"role": "user", "content": "What is 47 + 38?"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin.text_model())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(builtin.text_model(), dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        tokens = theirs.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    ours = LLM(dtype="float32", max_num_seqs=1, max_model_len=64, use_tqdm=False)
    output = ours.chat(messages, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0]
    assert tuple(prompt["input_ids"][0].tolist()) == output.prompt_token_ids
    assert tuple(tokens.tolist()) == output.outputs[0].token_ids
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("47 + 38 = 85.", "stop")
