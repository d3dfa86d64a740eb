"""Language models of GGUF files: their tensors by our keys, and their metadata as a config.json.

Names of tensors, order of their rows and config.json as metadata follow llama.cpp's converter
(`convert_hf_to_gguf.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from verax.errors import UnsupportedModelError
from verax.fields import MAX_DEPTH, MAX_SIZE

_MODEL_TYPES = {
    **{"qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama", "gemma3": "gemma3_text", "gemma2": "gemma2"},
    **{"smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2", "phi3": "phi3"},
    **{"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3moe": "qwen3_moe"},
    **{"gpt-oss": "gpt_oss", "gemma4": "gemma4_text", "qwen2moe": "qwen2_moe", "mistral3": "ministral3"},
    "qwen3vl": "qwen3",  # whose images are in a file of their own
    "qwen3next": "qwen3_5_moe_text",  # whose projections are apart in such files, as Qwen3.5's are
}
"""config.json's `model_type` by `general.architecture`, for those that are supported."""

_GEMMA, _HYBRID = ("gemma3", "gemma2"), ("qwen35", "qwen35moe", "qwen3next")


def is_zero_centered(architecture: str) -> bool:
    """True for a model whose norms multiply by 1 + weight, to which llama.cpp's converter adds the 1."""
    return architecture in (*_GEMMA, *_HYBRID)


ROPE_DIVISORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, `[H/2]`: the file's form of Llama 3.1's scaling."""

LONGROPE_FACTORS = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
"""Keys of config.json's `rope_scaling` by the names of the tensors that hold LongRoPE's divisors."""

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_NAMES = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
"""Names of a layer's stacks, whose keys are of single experts."""

_GEMMA4_NAMES = {
    **_NAMES,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA4_LAYER_NAMES = {
    **_GEMMA_LAYER_NAMES,
    **{f"ffn_{part}_exps": f"experts.{{}}.{part}_proj" for part in ("gate", "up", "gate_up", "down")},
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)},
    "ffn_gate_inp": "router.proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
}
_GEMMA4_KEYS = {
    "router.proj.scale": "router.scale",
    "experts.{}.down_proj.scale": "router.per_expert_scale",
    "layer_scalar.weight": "layer_scalar",
}
"""Keys that a name and the part of a tensor make together."""

_SHARED_EXPERT_NAMES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_HYBRID_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **_EXPERT_NAMES,
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
    "ffn_gate_inp": "mlp.gate",
    **_SHARED_EXPERT_NAMES,
}
_HYBRID_VECTORS = {"ssm_a": "A_log", "ssm_dt.bias": "dt_bias"}

_OWN_LAYER_NAMES = {
    **dict.fromkeys(_HYBRID, _HYBRID_LAYER_NAMES),
    "gemma4": _GEMMA4_LAYER_NAMES,
    "qwen3moe": {**_LAYER_NAMES, **_EXPERT_NAMES, "ffn_gate_inp": "mlp.gate"},
    "qwen2moe": {**_LAYER_NAMES, **_EXPERT_NAMES, **_SHARED_EXPERT_NAMES, "ffn_gate_inp": "mlp.gate"},
    "gpt-oss": {
        **_LAYER_NAMES,
        **_EXPERT_NAMES,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
    },
    **dict.fromkeys((*_GEMMA, "olmo2"), _GEMMA_LAYER_NAMES),
    "phi3": {**_LAYER_NAMES, "ffn_up": "mlp.gate_up_proj"},
}
_KEYS = {key: name for name, key in _NAMES.items()}
_LAYER_KEYS = {key: name for name, key in _LAYER_NAMES.items()}


def tensor_key(name: str, architecture: str | None) -> str:
    """The checkpoint's key of a tensor, such as `blk.3.attn_q.weight`; the name itself if our models lack it.

    The key of a stack of experts has `{}` for the number of the expert.

    `architecture` is the file's `general.architecture`.
    """
    if architecture in _HYBRID and name.endswith(tuple(_HYBRID_VECTORS)):
        _, layer, part = name.split(".", 2)
        return f"model.layers.{layer}.linear_attn.{_HYBRID_VECTORS[part]}"
    stem, _, kind = name.rpartition(".")
    whole = _GEMMA4_NAMES if architecture == "gemma4" else _NAMES
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    names = _OWN_LAYER_NAMES.get(architecture or "", _LAYER_NAMES)
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in names:
        return name
    if architecture == "gemma4":
        own = f"{names[part]}.{kind}"
        return f"model.layers.{layer}.{_GEMMA4_KEYS.get(own, own)}"
    key = f"model.layers.{layer}.{names[part]}.{kind}"
    if kind == "bias":  # of a whole stack
        key = re.sub(r"\.experts\.\{\}\.(\w+)\.bias$", r".experts.\1_bias", key)
    return key.removesuffix(".weight") if part == "attn_sinks" else key


def tensor_name(key: str) -> str:
    """The name of the tensor that holds the weight `key` of a Qwen3, Qwen2 or Llama: the inverse of `tensor_key`."""
    stem, _, kind = key.rpartition(".")
    if stem in _KEYS:
        return f"{_KEYS[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_KEYS[part]}.{kind}"


def rotated(key: str, config: Mapping[str, Any]) -> int | None:
    """The heads of a weight or bias whose rows are interleaved in the file; None if its rows are in our order.

    llama.cpp rotates neighbours in the heads of Llama, Ministral 3, SmolLM3 and Granite, where transformers rotates
    halves, so that its converter moves the rows of the query and key projections. In others it rotates halves.
    """
    if config["model_type"] not in ("llama", "ministral3", "smollm3", "granite"):
        return None
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = key.split(".")[-2]
    return config[heads[part]] if part in heads else None


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows `[heads * H, ...]` with each head's halves interleaved: as a Llama's file has them."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def restored(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleaved`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def read_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    divisors: Any = None,
    longrope: Mapping[str, list[float]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Contents of the equivalent config.json.

    `shapes`: shapes of the tensors, by their keys in a checkpoint. `divisors`: the file's `ROPE_DIVISORS`, if it has
    some. `longrope`: its `LONGROPE_FACTORS`, by config.json's keys.

    Raises:
        UnsupportedModelError: for an architecture or a feature that verax does not have; naming it.
        KeyError: with the metadata key that is missing.
    """
    if (own := metadata.get("general.type", "model")) != "model":  # an adapter has its base's architecture
        raise UnsupportedModelError(
            f"general.type {own!r}: this is not a model; name the model's own file, and of adapters PEFT's folder"
        )
    kind = metadata["general.architecture"]
    if not isinstance(kind, str) or kind not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"general.architecture {kind!r} is not supported; in GGUF files {', '.join(_MODEL_TYPES)} are"
        )

    def given(name: str, default: Any = None) -> Any:
        return metadata.get(f"{kind}.{name}", metadata.get(f"{kind}.{OLLAMA_NAMES.get(name)}", default))

    def needed(name: str) -> int:
        value, most = metadata[f"{kind}.{name}"], MAX_DEPTH if name == "block_count" else MAX_SIZE
        if isinstance(value, list) and value and value == value[:1] * len(value):
            value = value[0]  # a list by layer, of one number
        if not isinstance(value, int) or not 1 <= value <= most:
            raise UnsupportedModelError(
                f"{kind}.{name}: expected one number for all layers, 1 to {most}, got {value!r}"
            )
        return value - nextn if name == "block_count" else value

    nextn = next_token_layers(metadata)
    _check_settings(given, kind)
    if kind == "gemma4":
        return _gemma4(given, needed, shapes, divisors)
    heads, size = needed("attention.head_count"), needed("embedding_length")
    head_dim = given("attention.key_length", size // heads)
    partly = kind in ("phi3", *_HYBRID)
    for name in ("attention.value_length", *(() if partly else ("rope.dimension_count",)), *LOCAL_SIZES):
        if given(name, head_dim) != head_dim:
            raise UnsupportedModelError(f"{kind}.{name} {given(name)} is not supported; {head_dim} is")
    return {
        "model_type": _MODEL_TYPES[kind],
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "hidden_size": size,
        "intermediate_size": needed(("expert_" if kind in ("qwen35moe", "qwen3next") else "") + "feed_forward_length"),
        "num_hidden_layers": needed("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": needed("attention.head_count_kv") if given("attention.head_count_kv") else heads,
        "head_dim": head_dim,
        "rms_norm_eps": metadata[f"{kind}.attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": needed("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
        "rope_theta": given("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(given, kind, divisors),
        **(_gemma(given, kind, heads, size, head_dim) if kind in _GEMMA else {}),
        **(_granite(given, head_dim) if kind == "granite" else {}),
        **(_phi3(given, head_dim, longrope) if kind == "phi3" else {}),
        **(_hybrid(given, needed, head_dim) if kind in _HYBRID else {}),
        **(_experts(given, needed, kind, shapes) if kind in _MIXTURES else {}),
        **(_mistral3(given, kind, divisors) if kind == "mistral3" else {}),
        **(_olmo3(given, kind, divisors) if kind == "olmo2" and given("attention.sliding_window") else {}),
    }


def _gemma4(
    given: Callable[..., Any], needed: Callable[[str], int], shapes: Mapping[str, tuple[int, ...]], divisors: Any
) -> dict[str, Any]:
    """A Gemma 4's config.json. Sizes that differ by layer are lists; layers without a window have larger heads."""
    if (scaling := _rope_scaling(given, "gemma4", None)) is not None:
        raise UnsupportedModelError(f"gemma4.rope.scaling {scaling['rope_type']!r} is not supported")
    depth, pattern = needed("block_count"), given("attention.sliding_window_pattern")
    heads, widths = given("attention.head_count_kv"), given("feed_forward_length")
    heads = heads if isinstance(heads, list) else [heads] * depth
    widths = widths if isinstance(widths, list) else [widths] * depth
    if not isinstance(pattern, list) or {len(sizes) for sizes in (pattern, heads, widths)} != {depth}:
        raise UnsupportedModelError(
            "gemma4: attention.sliding_window_pattern, attention.head_count_kv and feed_forward_length: expected a "
            f"value for each of {depth} layers, got {pattern!r}, {heads!r} and {widths!r}"
        )
    shared = given("attention.shared_kv_layers", 0)
    wide = [widths[0]] * (depth - shared) + [2 * widths[0]] * shared
    if pattern[-1] or widths not in ([widths[0]] * depth, wide):
        raise UnsupportedModelError(
            "gemma4: a last layer with a window, and a feed_forward_length that differs between layers other than by "
            f"two for the last {shared}, are not supported"
        )
    full, windowed = ([i for i in range(depth) if bool(pattern[i]) == wanted] for wanted in (False, True))
    size, local = needed("attention.key_length"), needed("attention.key_length_swa")
    expected_sizes = {"attention.value_length": size, "rope.dimension_count": size}
    expected_sizes |= {"attention.value_length_swa": local, "rope.dimension_count_swa": local}
    for name, expected in expected_sizes.items():
        if given(name, expected) != expected:
            raise UnsupportedModelError(f"gemma4.{name} {given(name)} is not supported; {expected} is")
    whole: dict[str, Any] = {}
    if divisors is not None:
        turned = sum(divisor == 1 for divisor in divisors)
        if any(divisor != 1 for divisor in divisors[:turned]) or any(divisor < 1e29 for divisor in divisors[turned:]):
            raise UnsupportedModelError(f"gemma4: {ROPE_DIVISORS} is not ones, then 1e30 for what does not turn")
        whole = {"rope_type": "proportional", "partial_rotary_factor": int(turned) / len(divisors)}
    experts = {
        "num_experts": "expert_count",
        "top_k_experts": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    rows = shapes.get("model.embed_tokens_per_layer.weight", shapes["model.embed_tokens.weight"])[0]
    return {
        "model_type": "gemma4_text",
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "hidden_size": needed("embedding_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "num_hidden_layers": depth,
        "num_kv_shared_layers": shared,
        "num_attention_heads": needed("attention.head_count"),
        "num_key_value_heads": heads[windowed[0] if windowed else 0],
        "head_dim": local,
        "per_layer_config": {str(i): {"head_dim": size, "num_key_value_heads": heads[i]} for i in full},
        "attention_k_eq_v": f"model.layers.{full[0]}.self_attn.v_proj.weight" not in shapes,
        "rms_norm_eps": given("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": needed("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in pattern],
        "sliding_window": needed("attention.sliding_window"),
        "rope_parameters": {
            "full_attention": {"rope_theta": given("rope.freq_base", 10000.0), **whole},
            "sliding_attention": {"rope_theta": given("rope.freq_base_swa", 10000.0)},
        },
        "hidden_size_per_layer_input": given("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": rows,
        "final_logit_softcapping": given("final_logit_softcapping") or None,
        "enable_moe_block": given("expert_count", 0) > 0,
        **{ours: needed(theirs) for ours, theirs in experts.items() if given("expert_count", 0)},
    }


def _hybrid(given: Callable[..., Any], needed: Callable[[str], int], head_dim: int) -> dict[str, Any]:
    """Fields of a Qwen3.5's config.json alone: delta layers, and the rotated part of heads."""
    depth, interval = needed("block_count"), given("full_attention_interval", 4)
    recurrent = given("attention.recurrent_layers", [(i + 1) % interval != 0 for i in range(depth)])[:depth]
    value_heads = needed("ssm.time_step_rank")
    return {
        "layer_types": ["linear_attention" if is_delta else "full_attention" for is_delta in recurrent],
        "partial_rotary_factor": given("rope.dimension_count", head_dim) / head_dim,
        "linear_conv_kernel_dim": needed("ssm.conv_kernel"),
        "linear_key_head_dim": needed("ssm.state_size"),
        "linear_num_key_heads": needed("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": needed("ssm.inner_size") // value_heads,
    }


def grouped_by_key(x: np.ndarray, config: Mapping[str, Any], axis: int = 0) -> np.ndarray:
    """Value heads along an axis by the key head that they read, as ours are; in files they are dealt out in turn."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dealt = x.reshape(*x.shape[:axis], values // keys, keys, -1, *x.shape[axis + 1 :])
    return dealt.swapaxes(axis, axis + 1).reshape(x.shape)


def delta_rows(key: str, rows: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Rows of a weight of a hybrid's delta layer in our order; rows of other weights unchanged."""
    part = key.rpartition("linear_attn.")[2].removesuffix(".weight")
    if part in ("in_proj_qkv", "conv1d"):
        before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        return np.concatenate([rows[:before], grouped_by_key(rows[before:], config)])
    return grouped_by_key(rows, config) if part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias") else rows


_MIXTURES = ("qwen2moe", "qwen3moe", "qwen35moe", "qwen3next", "gpt-oss")


def _experts(
    given: Callable[..., Any], needed: Callable[[str], int], kind: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Fields about experts, and a gpt-oss's windows and rotation, which are half of what its metadata do not say."""
    width, sizes = needed("expert_feed_forward_length"), {"num_experts_per_tok": needed("expert_used_count")}
    if kind != "gpt-oss":
        sizes |= {"num_experts": needed("expert_count"), "moe_intermediate_size": width}
    if kind in ("qwen35moe", "qwen3next"):
        return sizes | {"shared_expert_intermediate_size": needed("expert_shared_feed_forward_length")}
    if kind == "qwen2moe":  # whose older files leave the width of the shared expert out
        shared = shapes["model.layers.0.mlp.shared_expert.gate_proj.weight"][0]
        bias = {"qkv_bias": "model.layers.0.self_attn.q_proj.bias" in shapes}
        return {**sizes, **bias, "norm_topk_prob": False, "shared_expert_intermediate_size": shared}
    if kind == "qwen3moe":
        return {**sizes, "norm_topk_prob": True, "intermediate_size": given("feed_forward_length", width)}
    base = given("rope.freq_base", 10000.0)
    if (local := given("rope.freq_base_swa", base)) != base:
        raise UnsupportedModelError(f"{kind}.rope.freq_base_swa {local} is not supported; {base} is")
    scaling = _rope_scaling(given, kind, None)
    return {
        **sizes,
        "num_local_experts": needed("expert_count"),
        "intermediate_size": width,
        "layer_types": _layer_types(given("attention.sliding_window_pattern", 2), needed("block_count")),
        "sliding_window": given("attention.sliding_window", 128),
        "rope_scaling": {"truncate": False, **(scaling or {"rope_type": "default"})},
    }


def _mistral3(given: Callable[..., Any], kind: str, divisors: Any) -> dict[str, Any]:
    """Rotation of a Ministral 3, whose queries grow, or of a Mistral Small 3, whose do not."""
    rope = _rope_scaling(given, kind, divisors) or {"rope_type": "default"}
    if every := given("rope.scaling.yarn_log_multiplier", 0):
        rope |= {"mscale": 1.0, "mscale_all_dim": every}
    beta = given("attention.temperature_scale", 0.0)
    if beta and not given("rope.scaling.original_context_length"):
        raise UnsupportedModelError(f"{kind}.attention.temperature_scale needs rope.scaling.original_context_length")
    return {"rope_parameters": {**rope, "rope_theta": given("rope.freq_base", 10000.0), "llama_4_scaling_beta": beta}}


def next_token_layers(metadata: Mapping[str, Any]) -> int:
    """Layers at the end of a hybrid's file that predict further tokens, as drafts; they are not read."""
    kind = metadata.get("general.architecture")
    count = metadata.get(f"{kind}.nextn_predict_layers", 0) if kind in _HYBRID else 0
    return count if isinstance(count, int) else 0


WINDOWS_READ = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"})

GEMMA_READ = WINDOWS_READ | {"final_logit_softcapping"}

HYBRID_READ = frozenset(
    {
        *("full_attention_interval", "attention.recurrent_layers", "ssm.conv_kernel", "ssm.state_size"),
        *("ssm.group_count", "ssm.time_step_rank", "ssm.inner_size", "expert_shared_feed_forward_length"),
        "nextn_predict_layers",
    }
)

EXPERTS_READ = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})

GRANITE_READ: Mapping[str, str] = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Keys of config.json by the file's; 0 stands for none."""

OWN_KEYS: Mapping[str, frozenset[str]] = {
    "gemma3": GEMMA_READ,
    "gemma2": GEMMA_READ | {"attn_logit_softcapping"},
    "olmo2": WINDOWS_READ,
    # A dense Granite 4's file has the width of its feed-forward part by this name too.
    "granite": frozenset({*GRANITE_READ, "expert_shared_feed_forward_length"}),
    "mistral3": frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
    "qwen2moe": EXPERTS_READ | {"expert_shared_feed_forward_length"},
    "qwen3moe": EXPERTS_READ,
    **dict.fromkeys(_HYBRID, HYBRID_READ | EXPERTS_READ),
    "gpt-oss": EXPERTS_READ | WINDOWS_READ,
    "gemma4": EXPERTS_READ | GEMMA_READ | {"attention.shared_kv_layers", "embedding_length_per_layer_input"},
    "phi3": frozenset({"attention.sliding_window", "rope.scaling.attn_factor"}),
}
"""Keys of single architectures that make the configuration."""

LOCAL_SIZES = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
"""Sizes of heads in layers with a window, which equal the sizes in the other layers."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"), (0,)),
    "attention.temperature_scale": (0,),
    **dict.fromkeys(("attention.sliding_window", "embedding_length_out"), (0,)),
    **dict.fromkeys(("nextn_predict_layers", "rope.scaling.yarn_log_multiplier"), (0,)),
    # llama.cpp itself saves Gemma 2's numbers with models of every architecture, which do not have them.
    **{"attn_logit_softcapping": (0, 50), "final_logit_softcapping": (0, 30)},
    **dict.fromkeys(("embedding_scale", "expert_count", "logit_scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    **{"deepstack_mapping": ([],), "expert_shared_feed_forward_length": (0,)},
    **{"attention.causal": (True,), "rope.scaling.yarn_ext_factor": (1, -1), "use_parallel_residual": (False,)},
}
"""Settings that are not implemented, and the values with which they change nothing."""

OLLAMA_NAMES: Mapping[str, str] = {
    "attention.temperature_scale": "rope.scaling_beta",
    "rope.freq_base": "rope.global.freq_base",
    "rope.freq_base_swa": "rope.local.freq_base",
    "rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
    "rope.scaling.yarn_beta_slow": "rope.scaling.beta_slow",
    "rope.scaling.yarn_ext_factor": "rope.scaling.extrapolation_factor",
    "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
}
"""Keys as ollama's converter writes them, by llama.cpp's."""

OLLAMA_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"norm_top_k_prob": (True,), "rope.scaling.mscale": (1,)}
"""Settings as `NEUTRAL`, which ollama's converter alone writes."""


def _check_settings(given: Callable[..., Any], kind: str) -> None:
    """Refuse the first setting that changes the result and is not implemented."""
    read = OWN_KEYS.get(kind, frozenset[str]())
    scale, size = given("attention.scale"), given("attention.key_length")
    if isinstance(scale, float) and size and math.isclose(scale, size**-0.5, rel_tol=1e-6):
        read = read | {"attention.scale"}  # the scale that models have without one
    if kind == "granite" and given("rope.scaling.finetuned", True) is not True:
        raise UnsupportedModelError(
            f"{kind}.rope.scaling.finetuned false is not supported: a Granite without positions"
        )
    for name, values in {**NEUTRAL, **OLLAMA_NEUTRAL}.items():
        value = given(name, values[0])
        unset = isinstance(value, list) and all(one == -1 for one in value)
        if name not in read and not unset and value not in values:
            raise UnsupportedModelError(f"{kind}.{name} {value} is not supported; {values[0]} is")


_WINDOW_PATTERN = {"gemma3": 6, "gemma2": 2}
"""Layers from one that sees everything to the next, where the file does not say."""

_WIDE_QUERIES = {("gemma3", 62), ("gemma2", 46)}
"""Models (of 27 billion weights) whose scores are scaled by width / heads and not by the head size, by their depth."""


def _gemma(given: Callable[..., Any], kind: str, heads: int, size: int, head_dim: int) -> dict[str, Any]:
    """Fields of a Gemma's config.json alone. llama.cpp knows by a model's depth what no metadata say."""
    depth, window = given("block_count"), given("attention.sliding_window", 4096 if kind == "gemma2" else None)
    types = _layer_types(given("attention.sliding_window_pattern", _WINDOW_PATTERN[kind]), depth)
    names = OWN_KEYS[kind] & {"attn_logit_softcapping", "final_logit_softcapping"}  # scores: of a Gemma 2 alone
    caps = {name: given(name) for name in sorted(names)}
    local = given("rope.freq_base_swa", 10000.0)
    if kind == "gemma2" and local != given("rope.freq_base", 10000.0):
        raise UnsupportedModelError(f"gemma2.rope.freq_base_swa {local} is not supported; rope.freq_base is")
    return {
        "layer_types": types if window else ["full_attention"] * depth,
        "sliding_window": window or None,
        "rope_local_base_freq": local,
        "query_pre_attn_scalar": size // heads if (kind, depth) in _WIDE_QUERIES else head_dim,
        **{name: cap or None for name, cap in caps.items() if cap is not None},
    }


def _granite(given: Callable[..., Any], head_dim: int) -> dict[str, Any]:
    """Multipliers of a Granite's config.json."""
    neutral = {"attention.scale": head_dim**-0.5}
    return {ours: given(theirs) or neutral.get(theirs, 1.0) for theirs, ours in GRANITE_READ.items()}


def _phi3(given: Callable[..., Any], head_dim: int, longrope: Mapping[str, list[float]]) -> dict[str, Any]:
    """Fields of a Phi-3's config.json alone. It has the window that transformers computes, and llama.cpp does not."""
    scaling = {"rope_type": "longrope", **longrope, "attention_factor": given("rope.scaling.attn_factor", 1.0)}
    return {
        "partial_rotary_factor": given("rope.dimension_count", head_dim) / head_dim,
        "sliding_window": given("attention.sliding_window") or None,
        "original_max_position_embeddings": given("rope.scaling.original_context_length", given("context_length")),
        "rope_scaling": {"factor": 1.0, **scaling} if longrope else _rope_scaling(given, "phi3", None),
    }


def _layer_types(pattern: Any, depth: int) -> list[str]:
    """`layer_types` of a number of layers from one that sees everything to the next, or of a list by layer."""
    if isinstance(pattern, int):
        pattern = [pattern == 0 or (i + 1) % pattern != 0 for i in range(depth)]
    if not isinstance(pattern, list):
        raise UnsupportedModelError(f"attention.sliding_window_pattern: expected a number or a list, got {pattern!r}")
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def _olmo3(given: Callable[..., Any], kind: str, divisors: Any) -> dict[str, Any]:
    """Fields of an OLMo 3's config.json: windows, and positions that are not scaled in layers with one."""
    base = given("rope.freq_base", 10000.0)
    return {
        "model_type": "olmo3",
        "layer_types": _layer_types(given("attention.sliding_window_pattern", 4), given("block_count")),
        "sliding_window": given("attention.sliding_window"),
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_theta": base, **(_rope_scaling(given, kind, divisors) or {})},
            "sliding_attention": {"rope_theta": given("rope.freq_base_swa", base)},
        },
    }


_SCALING = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _rope_scaling(given: Callable[..., Any], kind: str, divisors: Any) -> dict[str, Any] | None:
    """config.json's `rope_scaling`, by llama.cpp's rules: linear where no type is given, a factor of 0 for none."""
    form = given("rope.scaling.type", "linear")
    factor = given("rope.scaling.factor", given("rope.scale_linear", 0.0))
    if not isinstance(factor, int | float):
        raise UnsupportedModelError(f"{kind}.rope.scaling.factor: expected a number, got {factor!r}")
    factor = 1.0 if form == "none" else factor or 1.0
    if divisors is not None:
        if form not in ("none", "linear"):
            raise UnsupportedModelError(f"{kind}.rope.scaling.type {form!r} is not supported next to {ROPE_DIVISORS}")
        return {"rope_type": "divided", "divisors": [float(divisor) * factor for divisor in divisors]}
    if form in ("none", "linear") and factor == 1.0:
        return None
    numbers = {ours: given(f"rope.scaling.{theirs}") for theirs, ours in _SCALING.items()}
    scaling = {"rope_type": form, "factor": factor, **numbers}
    return {name: number for name, number in scaling.items() if number is not None}
