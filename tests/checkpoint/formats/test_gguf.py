"""GGUF files: weights exactly as llama.cpp dequantises them, configuration from metadata, clear refusals."""

import re
import struct
from dataclasses import replace

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests.support import gguf as files
from tests.support.published import llama_cpp_source
from tests.support.tiny import HYBRID, tiny_checkpoint
from verax import checkpoint, ops
from verax.checkpoint import Checkpoint, fingerprint
from verax.checkpoint.formats.gguf_config import (
    LOCAL_SIZES,
    NEUTRAL,
    OLLAMA_NAMES,
    OLLAMA_NEUTRAL,
    OWN_KEYS,
    read_config,
)
from verax.errors import CheckpointError, UnsupportedModelError, VeraxError
from verax.loading import load_causal_lm
from verax.models import causal_lm

UP, EMBEDDINGS, HEAD = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"
NAMES = {UP: "blk.1.ffn_up.weight", EMBEDDINGS: "token_embd.weight"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Rows of 256, for the K types."""
    return tiny_checkpoint(tmp_path_factory.mktemp("wide"), hidden_size=256, intermediate_size=256, head_dim=64)


def reference(path, key):
    """A tensor as the package's own reader and dequantisation give it."""
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == NAMES[key])
    shape = tuple(tensor.shape[::-1].tolist())
    return gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type).reshape(shape)


@pytest.mark.parametrize("kind", ops.BLOCK_KINDS)
def test_blocks_stay_quantised_and_are_exact(kind, wide, tmp_path):
    path = tmp_path / "a.gguf"
    files.write(wide, path, kind)
    opened = Checkpoint.open(path)
    assert opened.config["tie_word_embeddings"]  # one weight serves as embeddings and output head
    for key in (UP, EMBEDDINGS):
        weight = opened.read(key)
        assert isinstance(weight, ops.BlockQuantizedWeight)
        assert (weight.kind, opened.kind(key)) == (kind, kind)
        np.testing.assert_array_equal(weight.dequantize(), reference(path, key))


@pytest.mark.parametrize(
    "kind",
    [
        *("F32", "F16", "BF16", "Q2_K", "Q3_K", "MXFP4", "TQ1_0", "TQ2_0"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
    ],
)
def test_other_types_become_floats_exactly(kind, wide, tmp_path):
    path = tmp_path / "a.gguf"
    files.write(wide, path, kind)
    opened = Checkpoint.open(path)
    for key in (UP, EMBEDDINGS):
        weight = opened.read(key)
        assert isinstance(weight, np.ndarray)
        np.testing.assert_array_equal(np.asarray(weight, np.float32), reference(path, key))
    assert not opened.packed
    assert causal_lm(opened.config)[1].tie_word_embeddings


def test_tensors_of_several_types_are_in_one_file(wide, tmp_path):
    """As llama.cpp's quantize makes them: Q4_K layers, and an embedding, which is the head too, of more bits."""
    path = tmp_path / "a.gguf"
    files.write(wide, path, "Q4_K", kinds={EMBEDDINGS: "Q6_K", UP: "F16"})
    model = load_causal_lm(Checkpoint.open(path), dtype="float32")
    assert model.lm_head is None
    assert model.dtype == jnp.float32
    assert model.model.layers[1].mlp.down_proj.weight.get_value().kind == "Q4_K"
    np.testing.assert_array_equal(model.model.layers[1].mlp.up_proj.weight[...], reference(path, UP))
    embeddings = model.model.embed_tokens
    assert embeddings.weight.get_value().kind == "Q6_K"
    np.testing.assert_array_equal(embeddings(jnp.asarray([[5, 319]])), reference(path, EMBEDDINGS)[[[5, 319]]])


def test_blocks_are_not_saved_as_a_folder(folder, tmp_path):
    files.write(folder, tmp_path / "a.gguf", "Q8_0")
    opened = Checkpoint.open(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"weight: Q8_0 blocks .*quantization='dequantize'"):
        checkpoint.save(load_causal_lm(opened, dtype="float32"), tmp_path / "saved", config=opened.config)
    floats = load_causal_lm(opened, dtype="float32", quantization="dequantize")
    checkpoint.save(floats, tmp_path / "saved", config=opened.config)
    np.testing.assert_array_equal(Checkpoint.open(tmp_path / "saved").read(UP), reference(tmp_path / "a.gguf", UP))


PRETRAINED = {"original_max_position_embeddings": 128}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
GEMMA4 = dict(
    num_hidden_layers=3,
    layer_types=["sliding_attention", "full_attention", "full_attention"],
    sliding_window=24,
    global_head_dim=32,
    hidden_size_per_layer_input=12,
    vocab_size_per_layer_input=320,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
)
FAMILIES = {
    "qwen3": {},
    "qwen3_vl_text": {},
    "qwen2": {},
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 4.0}
    | {"final_logit_softcapping": 3.0},
    "smollm3": {"num_hidden_layers": 4},
    "phi3": {"sliding_window": 24, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 512},
    "granite": {"embedding_multiplier": 2.5, "attention_multiplier": 0.25, "residual_multiplier": 0.5}
    | {"logits_scaling": 3.0},
    "olmo2": {},
    "olmo3": {
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    }
    | {"rope_theta": 5e5},
    "gemma4_text": {**GEMMA4, "num_kv_shared_layers": 1, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0},
    "gemma4-experts": {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
    | {"moe_intermediate_size": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"hidden_size_per_layer_input": 0},
    "qwen3_5_text": {**HYBRID, "linear_num_value_heads": 6},
    "qwen3_5_moe_text": {**HYBRID, **EXPERTS, "moe_intermediate_size": 32, "intermediate_size": 32}
    | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 32},
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40, "attention_bias": True}
    | {"norm_topk_prob": False},
    "ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gpt_oss": {**EXPERTS, "intermediate_size": 64, "sliding_window": 24, "attention_bias": True}
    | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False, **PRETRAINED}}
    | {"max_position_embeddings": 512},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_float_weights_and_sizes_match_the_folder(family, tmp_path):
    """A Gemma's norms are 1 + weight in the file, which lacks the kinds of its layers."""
    changes, family = FAMILIES[family], family.replace("-experts", "_text")
    folder = tiny_checkpoint(tmp_path / "folder", family=family, **changes)
    files.write(folder, tmp_path / "a.gguf")
    opened, weights = Checkpoint.open(tmp_path / "a.gguf"), load_file(folder / "model.safetensors")
    shared = {key for key in weights if ".experts." not in key}
    assert {key for key in opened.names() if ".experts." not in key} == shared
    models = [load_causal_lm(Checkpoint.open(path), dtype="float32") for path in (tmp_path / "a.gguf", folder)]
    arrays = [dict(nnx.to_flat_state(nnx.state(model))) for model in models]
    for path in (path for path in arrays[0] if "experts" in path):
        np.testing.assert_array_equal(*(leaves[path].get_value() for leaves in arrays), err_msg=str(path))
    for key, weight in ((key, weights[key]) for key in shared):
        if key.endswith("A_log"):
            np.testing.assert_allclose(opened.read(key), weight, rtol=1e-6)
            continue
        zero_centered = ("gemma3_text", "gemma2", "qwen3_5_text", "qwen3_5_moe_text")
        rounded = family in zero_centered and "linear_attn" not in key and key.endswith("norm.weight")
        expected = weight + np.float32(1) - np.float32(1) if rounded else weight
        np.testing.assert_array_equal(opened.read(key), expected, err_msg=key)
    ours, theirs = (causal_lm(Checkpoint.open(path).config)[1] for path in (tmp_path / "a.gguf", folder))
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert replace(ours, rms_norm_eps=theirs.rms_norm_eps) == theirs


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "Q8_0"), *((family, "F32") for family in ("qwen2_moe", "gpt_oss", "gemma4_text", "qwen3_5_text"))],
)
def test_queries_keys_and_values_may_be_joined(family, kind, tmp_path):
    """Rows of a Llama's are interleaved, heads of a Gemma 4 differ by layer, a Qwen3.5 has gates among its queries."""
    changes = {**FAMILIES[family], **({"num_kv_shared_layers": 0} if family == "gemma4_text" else {})}
    folder = tiny_checkpoint(tmp_path / "folder", family=family, **changes)
    opened = []
    for name, fuse in (("apart", False), ("joined", True)):
        files.write(folder, tmp_path / f"{name}.gguf", kind, fuse=fuse)
        opened.append(Checkpoint.open(tmp_path / f"{name}.gguf"))
    names = [{tensor.name for tensor in gguf.GGUFReader(one.folder).tensors} for one in opened]
    assert len(names[1]) < len(names[0])
    apart, joined = opened
    assert joined.config == apart.config
    assert sorted(joined.names()) == sorted(apart.names())
    for key in apart.names():
        for one, other in zip(jax.tree.leaves(joined.read(key)), jax.tree.leaves(apart.read(key)), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=key)
    load_causal_lm(joined, dtype="float32")


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_layers_that_predict_further_tokens_are_not_read(family, tmp_path):
    folder = tiny_checkpoint(tmp_path / "folder", family=family, **FAMILIES[family])
    files.write(folder, tmp_path / "a.gguf")
    architecture = gguf.MODEL_ARCH_NAMES[files.ARCHITECTURES[family]]
    last = Checkpoint.open(folder).config["num_hidden_layers"] - 1
    counted = [(f"{architecture}.nextn_predict_layers", "add_uint32", 1)]
    files.write(folder, tmp_path / "b.gguf", metadata=counted)
    read, whole = Checkpoint.open(tmp_path / "b.gguf"), Checkpoint.open(tmp_path / "a.gguf")
    assert set(read.names()) == {key for key in whole.names() if not key.startswith(f"model.layers.{last}.")}
    assert read.config["num_hidden_layers"] == last
    assert read.config["layer_types"] == whole.config["layer_types"][:last]
    load_causal_lm(read, dtype="float32")


GEMMA = {
    "general.architecture": "gemma3",
    "gemma3.context_length": 64,
    "gemma3.embedding_length": 5376,
    "gemma3.block_count": 12,
    "gemma3.feed_forward_length": 96,
    "gemma3.attention.head_count": 32,
    "gemma3.attention.head_count_kv": 16,
    "gemma3.attention.key_length": 128,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": 8,
    "gemma3.rope.freq_base": 1e6,
}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    ("kind", "stored"), [("Q8_0", (8, 32)), ("Q4_0", (4, 32)), ("MXFP4", (8, 32)), ("Q5_0", None), ("IQ4_XS", None)]
)
def test_experts_are_held_exactly_as_integers_or_become_floats(family, kind, stored, tmp_path):
    sizes = dict(hidden_size=256, head_dim=64, num_hidden_layers=1, moe_intermediate_size=256, intermediate_size=256)
    folder = tiny_checkpoint(tmp_path / "folder", family=family, **{**FAMILIES[family], **sizes})
    is_expert = lambda key: "experts" in key
    kinds = {f"model.layers.0.mlp.experts.{part}_proj.weight": kind for part in ("gate", "up", "down")}
    blocks = files.write(folder, tmp_path / "a.gguf", kinds=kinds)
    model = load_causal_lm(Checkpoint.open(tmp_path / "a.gguf"), dtype="float32")
    stacks = {path[-1]: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model)) if is_expert(path)}
    known = gguf.GGMLQuantizationType[kind]
    gate, up, down = (gguf.dequantize(blocks[key], known) for key in kinds)
    both = np.stack([gate, up], axis=2).reshape(4, 512, 256) if family == "gpt_oss" else np.concatenate([gate, up], 1)
    for name, expected in (("gate_up_proj", both), ("down_proj", down)):
        stack = stacks[name]
        assert (None if stored is None else (stack.bits, stack.group_size)) == stored
        each = jax.vmap(lambda matrix: matrix.dequantize())(stack) if stored else stack
        np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize(("size", "kind", "packed"), [(32, "Q8_0", True), (48, "Q8_0", False), (32, "F16", False)])
def test_value_heads_of_a_hybrid_are_put_back_next_to_their_key_head(size, kind, packed, tmp_path):
    """Whole blocks of inputs change places; where a block has inputs of two heads, the weight becomes floats."""
    changes = {**HYBRID, "linear_num_value_heads": 6, "linear_value_head_dim": size}
    folder = tiny_checkpoint(tmp_path / "folder", family="qwen3_5_text", **changes)
    key = "model.layers.0.linear_attn.out_proj.weight"
    stored = files.write(folder, tmp_path / "a.gguf", kinds={key: kind}).get(key)
    weight = load_file(folder / "model.safetensors")[key]
    dealt = weight.reshape(-1, 2, 3, size).swapaxes(1, 2).reshape(weight.shape).astype(np.float16).astype(np.float32)
    if stored is not None:
        dealt = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
    expected = dealt.reshape(-1, 3, 2, size).swapaxes(1, 2).reshape(weight.shape)
    read = Checkpoint.open(tmp_path / "a.gguf").read(key)
    assert isinstance(read, ops.BlockQuantizedWeight) == packed
    np.testing.assert_array_equal(read.dequantize() if packed else read, expected)


def gemma(**changes):
    metadata = {**GEMMA, **{f"gemma3.{name.replace('__', '.')}": value for name, value in changes.items()}}
    return causal_lm(read_config(metadata, {EMBEDDINGS: (300, 5376)}))[1]


def test_what_no_metadata_say_of_a_gemma_is_as_llama_cpp_has_it():
    assert gemma().sliding_windows == (8, 8, 8, 8, 8, None) * 2
    assert (gemma().rotary.theta, gemma().local_rotary.theta, gemma().query_pre_attn_scalar) == (1e6, 1e4, 128)
    # 27 billion weights: scores are divided by the root of 5376 / 32.
    assert gemma(block_count=62).query_pre_attn_scalar == 168


@pytest.mark.parametrize("kind", ["adapter", "mmproj"])
def test_a_file_that_is_not_a_model_is_named_as_what_it_is(kind):
    with pytest.raises(UnsupportedModelError, match=f"general.type '{kind}'"):
        read_config({"general.architecture": "qwen3", "general.type": kind}, {})


def test_metadata_of_a_gemmas_layers_are_read():
    assert gemma(attention__sliding_window_pattern=3).sliding_windows == (8, 8, None) * 4
    assert gemma(attention__sliding_window_pattern=[True, False] * 6).sliding_windows == (8, None) * 6
    assert gemma(attention__sliding_window=0).sliding_windows == (None,) * 12
    assert gemma(rope__freq_base_swa=5e3).local_rotary.theta == 5e3
    linear = gemma(rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert (linear.rotary.kind, linear.local_rotary.kind) == ("linear", "default")
    with pytest.raises(UnsupportedModelError, match="sliding_window_pattern: expected a number or a list, got 'often'"):
        gemma(attention__sliding_window_pattern="often")


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
YARN_METADATA = [
    ("qwen3.rope.scaling.type", "add_string", "yarn"),
    ("qwen3.rope.scaling.factor", "add_float32", 4.0),
    ("qwen3.rope.scaling.original_context_length", "add_uint32", 64),
]


@pytest.mark.parametrize(
    ("family", "settings", "rope", "metadata"),
    [("llama", "rope_parameters", LLAMA3, ()), ("qwen3", "rope_scaling", YARN, YARN_METADATA)],
)
def test_scaled_rotary_frequencies_match_the_folder(family, settings, rope, metadata, tmp_path):
    rope = {**rope, "original_max_position_embeddings": 64}
    folder = tiny_checkpoint(tmp_path / "folder", family=family, **{settings: rope})
    files.write(folder, tmp_path / "a.gguf", metadata=metadata)
    ours, theirs = (causal_lm(Checkpoint.open(path).config)[1].rotary for path in (tmp_path / "a.gguf", folder))
    np.testing.assert_allclose(ours.frequencies(16)[0], theirs.frequencies(16)[0], rtol=1e-6)
    assert ours.frequencies(16)[1] == theirs.frequencies(16)[1]


LLAMA = {key.replace("gemma3", "llama"): value for key, value in GEMMA.items()} | {
    "general.architecture": "llama",
    "llama.attention.sliding_window": 0,
}


def rotary(divisors=None, **settings):
    """Frequencies of a Llama with rotary settings."""
    metadata = LLAMA | {f"llama.rope.{name.replace('__', '.')}": value for name, value in settings.items()}
    return causal_lm(read_config(metadata, {EMBEDDINGS: (300, 5376)}, divisors))[1].rotary.frequencies(128)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"scaling__type": "linear", "scaling__factor": 4.0},
        {"scaling__factor": 4.0},  # linear is llama.cpp's type where the file has none
        {"scale_linear": 4.0},  # the key of old files
        {"scaling__factor": 4.0, "scale_linear": 2.0},
        {"scaling__factor": 4.0, "scaling__finetuned": True},
    ],
)
def test_rotary_scaling_goes_by_old_names_and_defaults(settings):
    np.testing.assert_array_equal(rotary(**settings), rotary() / np.float32(4))


@pytest.mark.parametrize("settings", [{"scaling__type": "none"}, {"scaling__factor": 0.0}, {"scale_linear": 1.0}])
def test_a_factor_of_zero_or_one_or_the_type_none_scale_nothing(settings):
    np.testing.assert_array_equal(rotary(**settings), rotary())
    np.testing.assert_array_equal(rotary(**{"scaling__factor": 4.0, **settings, "scaling__type": "none"}), rotary())


def test_a_factor_next_to_divisors_divides_as_well():
    divisors = np.linspace(1, 8, 64)
    np.testing.assert_allclose(rotary(divisors, scale_linear=2.0), rotary(divisors) / 2, rtol=1e-6)
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.type 'yarn' is not supported next to rope_freqs"):
        rotary(divisors, scaling__type="yarn")


def test_yarn_stretches_the_file_s_own_context_where_it_names_none():
    named = rotary(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=64)
    np.testing.assert_array_equal(rotary(scaling__type="yarn", scaling__factor=4.0), named)
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.factor: expected a number, got 'often'"):
        rotary(scaling__factor="often")


@pytest.mark.parametrize("name", NEUTRAL | OLLAMA_NEUTRAL)
def test_settings_that_are_not_implemented_are_refused_by_name_unless_they_change_nothing(name):
    neutral = (NEUTRAL | OLLAMA_NEUTRAL)[name]
    for value in neutral:
        read_config(LLAMA | {f"llama.{name}": value}, {EMBEDDINGS: (300, 5376)})
    other = not neutral[0] if isinstance(neutral[0], bool) else 7
    with pytest.raises(UnsupportedModelError, match=rf"llama\.{re.escape(name)} {other} is not supported"):
        read_config(LLAMA | {f"llama.{name}": other}, {EMBEDDINGS: (300, 5376)})


def config_of(architecture, **settings):
    """config.json of an architecture, from the metadata of a Llama and settings of its own."""
    own = {key.replace("llama", architecture, 1): value for key, value in LLAMA.items()}
    own |= {f"{architecture}.{name.replace('__', '.')}": value for name, value in settings.items()}
    given = {name: value for name, value in own.items() if value is not None}
    return read_config({**given, "general.architecture": architecture}, {EMBEDDINGS: (300, 5376)})


@pytest.mark.parametrize("name", sorted(OLLAMA_NAMES))
def test_settings_in_ollama_s_words_are_read_as_in_llama_cpp_s(name):
    architecture = "gemma3" if "freq_base" in name else "mistral3"
    yarn = dict(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=64)
    changed = []
    for word in (name, OLLAMA_NAMES[name]):
        value = 1.0 if name.endswith("ext_factor") else 3.0
        changed.append(
            config_of(architecture, **yarn, **{name.replace(".", "__"): None, word.replace(".", "__"): value})
        )
    assert changed[0] == changed[1]
    if name == "rope.scaling.yarn_ext_factor":
        with pytest.raises(UnsupportedModelError, match=r"yarn_ext_factor 0\.5 is not supported; 1 is"):
            config_of(architecture, **yarn, rope__scaling__extrapolation_factor=0.5)
    else:
        assert changed[0] != config_of(architecture, **yarn)


@pytest.mark.parametrize(("architecture", "cap"), [("llama", 30.0), ("gemma3", 0.0)])
def test_what_llama_cpp_saves_with_every_architecture_changes_nothing(architecture, cap):
    saved = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": cap,
        "attention__scale": 128**-0.5,
        "deepstack_mapping": [-1] * 4,
        "rope__scaling__yarn_ext_factor": -1.0,
    }
    plain = causal_lm(config_of(architecture))[1]
    assert causal_lm(config_of(architecture, **saved))[1] == plain
    for name, value in (("attention__scale", 0.5), ("deepstack_mapping", [-1, 0])):
        with pytest.raises(UnsupportedModelError, match=f"{name.replace('__', '.')} .* is not supported"):
            config_of(architecture, **saved | {name: value})


def test_rotary_scaling_that_a_model_does_not_have_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"gemma2\.rope\.freq_base_swa 5000\.0 is not supported"):
        config_of("gemma2", rope__freq_base_swa=5e3)
    with pytest.raises(UnsupportedModelError, match=r"gemma4\.rope\.scaling 'yarn' is not supported"):
        config_of("gemma4", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    with pytest.raises(UnsupportedModelError, match="rope_type 'linear' is not supported; phi3 uses 'longrope'"):
        causal_lm(config_of("phi3", rope__scale_linear=4.0))


def test_windows_of_a_gpt_oss_are_those_of_the_file():
    sizes = dict(expert_count=4, expert_used_count=2, expert_feed_forward_length=64)
    types = lambda **more: config_of("gpt-oss", **sizes, block_count=4, **more)["layer_types"]
    assert types() == ["sliding_attention", "full_attention"] * 2
    assert types(attention__sliding_window_pattern=4) == ["sliding_attention"] * 3 + ["full_attention"]
    assert types(attention__sliding_window_pattern=[False, True] * 2) == ["full_attention", "sliding_attention"] * 2


READ = frozenset(
    {
        *("context_length", "embedding_length", "block_count", "feed_forward_length"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    }
)
"""Keys of every architecture that make the configuration, after the architecture's name."""

WITHOUT_EFFECT = frozenset(
    {
        *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.alpha"),
        *("pooling_type", "classifier.pooling_type", "classifier.output_labels"),
        *("expert_used_count", "expert_group_count", "expert_group_used_count", "rope.dimension_sections"),
        "n_deepstack_layers",
    }
)
"""Keys without effect on a language model of these architectures: the embeddings have the size of the vocabulary,
poolings and labels are of encoders, `rope.scaling.alpha` is of Hunyuan's models, and sections of the rotation and
deepstack layers are of images."""

SOURCES = {"gpt-oss": "openai-moe"}
"""Names of llama.cpp's files, where they differ from the architecture's."""


@pytest.mark.parametrize(
    "architecture",
    [
        *("qwen3", "qwen3vl", "qwen2", "llama", "gemma3", "gemma2", "smollm3", "granite", "olmo2", "phi3"),
        *("qwen3moe", "qwen2moe", "gpt-oss", "gemma4", "qwen35", "qwen35moe", "qwen3next", "mistral3"),
    ],
)
def test_each_key_that_llama_cpp_reads_is_read_or_without_effect_or_refused(architecture):
    arch, model, own = (
        llama_cpp_source(f"src/{name}.cpp").read_text(encoding="utf-8")
        for name in ("llama-arch", "llama-model", f"models/{SOURCES.get(architecture, architecture)}")
    )
    names = dict(re.findall(r'\{ (LLM_KV_\w+),\s+"%s\.([\w.]+)"', arch))
    shared = model.partition("::load_hparams(")[2].partition("load_arch_hparams(ml);")[0]
    # A decoder of sounds has sizes of its own.
    before, _, after = shared.partition("if (arch == LLM_ARCH_WAVTOKENIZER_DEC) {")
    code = before + after.partition("\n    }\n")[2] + own
    read_by_llama_cpp = {names[key] for key in re.findall(r"LLM_KV_\w+", code) if key in names}
    known = READ | WITHOUT_EFFECT | NEUTRAL.keys() | set(LOCAL_SIZES)
    known |= OWN_KEYS.get(architecture, set())
    assert len(read_by_llama_cpp) > 20
    assert read_by_llama_cpp <= known
    assert known <= set(names.values())


@pytest.mark.parametrize("split", [1, 5])
def test_a_split_file_is_opened_by_its_first_part(folder, tmp_path, split):
    files.write(folder, tmp_path / "whole.gguf", "Q8_0")
    parts_of = tmp_path / "parts"
    parts_of.mkdir()
    files.write(folder, parts_of / "model.gguf", "Q8_0", split=split)
    parts = sorted(parts_of.iterdir())
    assert len(parts) > 2
    whole, opened = Checkpoint.open(tmp_path / "whole.gguf"), Checkpoint.open(parts[0])
    assert (opened.config, sorted(opened.names())) == (whole.config, sorted(whole.names()))
    for name in whole.names():
        jax.tree.map(np.testing.assert_array_equal, opened.read(name), whole.read(name))
    assert fingerprint(opened) == fingerprint(whole)
    assert Checkpoint.open(parts_of).folder == parts[0]
    with pytest.raises(CheckpointError, match=rf"one of {len(parts)} parts; name the first one, {parts[0].name}"):
        Checkpoint.open(parts[1])
    parts[2].rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=parts[2].name):
        Checkpoint.open(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(CheckpointError, match=rf"{parts[2].name}: it is not part 3 of {len(parts)}"):
        Checkpoint.open(parts[0])


def test_a_file_of_dequantised_blocks_can_be_quantised_and_one_of_our_types_not_again(wide, folder, tmp_path):
    files.write(wide, tmp_path / "a.gguf", "Q2_K")
    model = load_causal_lm(Checkpoint.open(tmp_path / "a.gguf"), dtype="bfloat16", quantization="int8")
    assert model.model.layers[0].mlp.up_proj.weight.get_value().bits == 8
    files.write(folder, tmp_path / "b.gguf", "Q4_0")
    with pytest.raises(CheckpointError, match=r"quantised already.*dequantize"):
        load_causal_lm(Checkpoint.open(tmp_path / "b.gguf"), dtype="bfloat16", quantization="int8")


def test_a_folder_with_one_gguf_file_is_that_file(folder, tmp_path):
    files.write(folder, tmp_path / "a.gguf")
    assert Checkpoint.open(tmp_path).folder == tmp_path / "a.gguf"
    assert Checkpoint.open(str(tmp_path / "a.gguf")).folder == tmp_path / "a.gguf"
    files.write(folder, tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"several GGUF files; name one: a\.gguf, b\.gguf"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"c\.gguf: no such file"):
        Checkpoint.open(str(tmp_path / "c.gguf"))
    checkpoint.save({"a": jnp.zeros(3)}, tmp_path, config={})
    assert Checkpoint.open(tmp_path).folder == tmp_path


def test_recommended_sampling_is_read(folder, tmp_path):
    sampling = [("temp", "add_float32", 0.5), ("top_k", "add_int32", 20), ("penalty_repeat", "add_float32", 1.25)]
    metadata = [(f"general.sampling.{name}", *rest) for name, *rest in sampling]
    metadata.append(("tokenizer.ggml.suppress_tokens", "add_array", [7, 3]))
    files.write(folder, tmp_path / "a.gguf", metadata=metadata)
    recommended = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25, "suppress_tokens": [7, 3]}
    assert Checkpoint.open(tmp_path / "a.gguf").generation_config == recommended


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (("qwen3.attention.value_length_mla", "add_uint32", 5), None),
        (("qwen3.expert_count", "add_uint32", 8), r"qwen3\.expert_count 8 is not supported"),
        (("qwen3.rope.dimension_count", "add_uint32", 8), r"rope\.dimension_count 8 is not supported; 16 is"),
        (("qwen3.rope.scaling.type", "add_string", "longrope"), "rope_type 'longrope'"),
        (("qwen3.attention.head_count", "add_uint32", 0), r"attention\.head_count: expected one number .* got 0"),
        (("qwen3.block_count", "add_uint32", 1 << 31), r"block_count: expected one number .* 1 to 256, got 2147483648"),
        (("qwen3.attention.sliding_window", "add_uint32", 128), r"attention\.sliding_window 128 is not"),
    ],
)
def test_features_that_verax_lacks_are_refused_by_name(metadata, says, folder, tmp_path):
    files.write(folder, tmp_path / "a.gguf", metadata=[metadata])
    if says is None:
        causal_lm(Checkpoint.open(tmp_path / "a.gguf").config)
        return
    with pytest.raises(UnsupportedModelError, match=says):
        causal_lm(Checkpoint.open(tmp_path / "a.gguf").config)


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


HEADER = b"GGUF" + struct.pack("<I", 3)
TENSOR = string("x") + struct.pack("<IQIQ", 1, 64, 0, 0)
BROKEN = {
    "empty": (b"", "0 bytes"),
    "other": (b"PK\3\4" + bytes(40), "not a GGUF file"),
    "version": (b"GGUF" + struct.pack("<I", 1), "version 1 GGUF is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3), "big-endian GGUF is not supported"),
    "cut": (HEADER + bytes(5), "its header is malformed"),
    "keys that are not there": (HEADER + struct.pack("<QQ", 0, 1 << 60), "its header is malformed"),
    "long string": (HEADER + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 62), "its header is malformed"),
    "no text": (HEADER + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1) + b"\xff" + bytes(12), "malformed"),
    "unknown value": (HEADER + struct.pack("<QQ", 0, 1) + string("a") + struct.pack("<I", 13), "a value of type 13"),
    "alignment": (
        HEADER + struct.pack("<QQ", 0, 1) + string("general.alignment") + struct.pack("<II", 4, 0),
        "general.alignment 0, which is not a power of two",
    ),
    "key twice": (HEADER + struct.pack("<QQ", 0, 2) + 2 * (string("a") + struct.pack("<IB", 0, 1)), "a is there twice"),
    "long array": (HEADER + struct.pack("<QQ", 0, 1) + string("a") + struct.pack("<IIQ", 9, 4, 1 << 61), "malformed"),
    "part": (HEADER + struct.pack("<QQ", 0, 1) + string("split.count") + struct.pack("<IH", 2, 3), "one of 3 parts"),
    "tensor beyond the end": (HEADER + struct.pack("<QQ", 1, 0) + TENSOR, "x ends at byte 320, but the file has"),
    "unknown type": (
        HEADER + struct.pack("<QQ", 1, 0) + string("x") + struct.pack("<IQIQ", 1, 64, 9, 0),
        "x is of type Q8_1, which is not supported",
    ),
    "part of a block": (
        HEADER + struct.pack("<QQ", 1, 0) + string("x") + struct.pack("<IQIQ", 1, 48, 8, 0),
        r"x of shape \[48\] cannot be Q8_0, in blocks of 32",
    ),
    "experts in a vector": (
        HEADER
        + struct.pack("<QQ", 1, 1)
        + string("general.architecture")
        + struct.pack("<I", 8)
        + string("qwen3moe")
        + string("blk.0.ffn_up_exps.weight")
        + struct.pack("<IQIQ", 1, 4, 0, 0)
        + bytes(64),
        r"blk\.0\.ffn_up_exps\.weight of shape \[4\] has another form by its name",
    ),
    "encoder": (
        HEADER + struct.pack("<QQ", 0, 1) + string("general.architecture") + struct.pack("<I", 8) + string("bert"),
        "'bert' is not supported; in GGUF files qwen3, qwen2, llama, gemma3, gemma2",
    ),
    "no model": (HEADER + struct.pack("<QQ", 0, 0), r"general\.architecture is missing: this is not a language model"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damaged_and_foreign_files_are_refused_with_the_reason(case, tmp_path):
    content, says = BROKEN[case]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(VeraxError, match=says):
        Checkpoint.open(tmp_path / "a.gguf")
