"""GGUF files for tests, written with the gguf package's own writer, tensor names and quantisation."""

import json
import re

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_vl_text": gguf.MODEL_ARCH.QWEN3VL,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
}
SCALE_OFFSETS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),  # whose scale is in four places
}
"""Offsets of a block's float16 numbers; 0 for other types."""
RANDOM = {"Q2_K": 5e-3, "Q3_K": 2e-3, "Q4_K": 3e-4, "Q5_K": 1.5e-4, "Q6_K": 7e-5, "IQ4_NL": 1.3e-3, "IQ4_XS": 4e-5}
RANDOM |= dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), 1e-3)
"""Types that the package cannot quantise to, and the spread of float16 numbers that gives weights a spread of 0.1."""


def encode(weight, kind, seed=0):
    """A matrix as rows of blocks, `uint8 [F, bytes]`: quantised, or random blocks for the K types."""
    if kind not in RANDOM:
        known = gguf.GGMLQuantizationType[kind]
        return gguf.quantize(np.ascontiguousarray(weight, np.float32), known).view(np.uint8)
    return random_blocks(kind, *weight.shape, seed=seed)


def random_blocks(kind, rows, size_in, *, seed=0, scales=None):
    """Rows of blocks of random bits, `uint8 [rows, bytes]`: float16 numbers out of `scales`, or Gaussian ones."""
    size, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, size_in // size, size_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS.get(kind, (0,)):
        shape = (*blocks.shape[:2], 1)
        gaussian = rng.standard_normal(shape) * RANDOM.get(kind, 0.01)
        chosen = gaussian if scales is None else rng.choice(scales, shape)
        blocks[..., offset : offset + 2] = chosen.astype(np.float16).view(np.uint8)
    if kind == "IQ1_M":
        blocks[..., -1] &= 0x3F  # a scale that is finite
    return blocks.reshape(rows, -1)


def permuted(weight, heads):
    """Rows of a query or key matrix in GGUF's order, as in llama.cpp's `LlamaModel.permute`."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write(folder, path, kind="F32", *, kinds=None, pre="gpt-2", metadata=None, split=0, fuse=False):
    """Write a Hugging Face folder as a GGUF file, and return the stored blocks of each matrix by its key.

    `kinds` names other types by key; `metadata` adds (key, writer's method, value); `split` is the number of tensors in
    each part of a file that is split; `fuse` joins queries, keys and values, as the converter's `--fuse-qkv` does.
    """
    config = json.loads((folder / "config.json").read_text())
    family, layers = config["model_type"], config["num_hidden_layers"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]], split_max_tensors=split)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    double_wide = config.get("use_double_wide_mlp")
    if not double_wide:
        writer.add_feed_forward_length(config["intermediate_size"])
    if (experts := config.get("num_experts") or config.get("num_local_experts")) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if family == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
    writer.add_head_count(config["num_attention_heads"])
    if not config.get("num_global_key_value_heads"):
        kv_heads = config["num_key_value_heads"]
        # A dense Granite 4's converter writes a list by layer.
        writer.add_head_count_kv([kv_heads] * layers if family == "granite" else kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # a Gemma's is by kind of layer
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    if family == "phi3":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        scaling = {**rope, **(config.get("rope_scaling") or {})}
        fraction = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        writer.add_rope_dimension_count(int(head_dim * fraction))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_sliding_window(config.get("sliding_window") or 0)
        if "long_factor" in scaling:
            ratio = config["max_position_embeddings"] / config["original_max_position_embeddings"]
            attention = 1 + np.log(ratio) / np.log(config["original_max_position_embeddings"])
            writer.add_rope_scaling_attn_factors(attention**0.5)
            for name in ("short", "long"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.asarray(scaling[f"{name}_factor"], np.float32))
    if family == "olmo3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family == "ministral3" and "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if family == "granite":
        # As the converter writes it for a dense Granite 4.
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if is_hybrid := family.startswith(("qwen3_5", "qwen3_next")):
        add_delta(writer, config)
    if family == "gemma4_text":
        add_gemma4(writer, config)
    if is_gemma := family in ("gemma3_text", "gemma2"):
        writer.add_sliding_window(config["sliding_window"])
        if config.get("attn_logit_softcapping"):
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        if config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("head_dim") and family != "gemma4_text":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if pre is not None:
        add_tokenizer(writer, folder, pre)
    for key, method, value in metadata or ():
        getattr(writer, method)(key, value)
    stored, joined = {}, {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, config["head_dim"]))
    weights = load_file(folder / "model.safetensors")
    weights = with_stacks(apart(weights, config) if family == "qwen3_next" else weights, family)
    for key, weight in weights.items():
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if family == "gemma4_text" and key.endswith(("router.scale", "router.per_expert_scale")):
            part = "ffn_gate_inp" if key.endswith("router.scale") else "ffn_down_exps"
            name = f"blk.{key.split('.')[2]}.{part}.scale"
        if name is None and "linear_attn" not in key:
            continue
        weight = weight.astype(np.float32)
        if (is_gemma or is_hybrid) and key.endswith("norm.weight") and "linear_attn" not in key:
            weight = weight + 1
        if "linear_attn" in key:
            if family != "qwen3_next":
                weight = dealt_out(key, weight, config)
            elif key.endswith(("A_log", "conv1d.weight")):
                weight = -np.exp(weight) if key.endswith("A_log") else weight.reshape(len(weight), -1)
            name = name or names.get_name(key.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        if key.endswith("shared_expert_gate.weight"):
            weight = weight[0]
        if family in ("llama", "ministral3", "smollm3", "granite") and (part := key.split(".")[-2]) in heads:
            weight = permuted(weight, heads[part])
        if fuse and (match := re.fullmatch(r"(blk\.\d+\.attn_)([qkv])(\.\w+)", name)) is not None:
            parts = joined.setdefault(name := f"{match[1]}qkv{match[3]}", {})
            parts[match[2]] = weight
            if len(parts) < 3:
                continue
            weight = np.concatenate([parts[letter] for letter in "qkv"])
        is_matrix = weight.ndim > 1 and not key.endswith("bias")
        chosen = (kinds or {}).get(key, kind) if is_matrix else "F32"
        if chosen in ("F32", "F16"):
            writer.add_tensor(name, weight.astype({"F32": np.float32, "F16": np.float16}[chosen]))
        else:
            blocks = encode(weight.reshape(-1, weight.shape[-1]), chosen)
            stored[key] = blocks.reshape(*weight.shape[:-1], -1)
            writer.add_tensor(name, stored[key], raw_dtype=gguf.GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def add_delta(writer, config):
    """Metadata of delta layers, as in llama.cpp's `Qwen3NextModel`."""
    values = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
    architecture = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]]
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{architecture}.attention.recurrent_layers", recurrent)
    writer.add_rope_dimension_count(int(config["head_dim"] * config.get("partial_rotary_factor", 0.25)))
    if shared := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)


def apart(weights, config):
    """Weights with the projections of a delta layer apart, as in llama.cpp's `Qwen3NextModel`."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    result = dict(weights)
    for key in [key for key in weights if key.endswith("in_proj_qkvz.weight")]:
        fused = result.pop(key).astype(np.float32)
        rows = fused.reshape(keys, -1, fused.shape[-1])
        parts = np.split(rows, np.cumsum([size, size, values]), axis=1)
        *qkv, z = (part.reshape(-1, fused.shape[-1]) for part in parts)
        result[key.replace("qkvz", "qkv")] = np.concatenate(qkv)
        result[key.replace("qkvz", "z")] = np.ascontiguousarray(z)
    return result


def dealt_out(key, weight, config):
    """A weight of a delta layer in GGUF's order of value heads, as in llama.cpp's `_LinearAttentionVReorderBase`."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def reorder(x, axis=0):
        heads = x.reshape(*x.shape[:axis], keys, values // keys, -1, *x.shape[axis + 1 :])
        return np.ascontiguousarray(heads.swapaxes(axis, axis + 1).reshape(x.shape))

    if key.endswith("A_log"):
        return reorder(-np.exp(weight))
    if key.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        weight, before = weight.reshape(len(weight), -1), 2 * keys * config["linear_key_head_dim"]
        return np.concatenate([weight[:before], reorder(weight[before:])])
    if key.endswith("linear_attn.norm.weight"):
        return weight
    return reorder(weight, int(key.endswith("out_proj.weight")))


def add_gemma4(writer, config):
    """Metadata and divisors of a Gemma 4, as in llama.cpp's `Gemma4Model`."""
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    depth, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers", 0)
    by_layer = config.get("per_layer_config") or {"0": {"head_dim": config.get("global_head_dim")}}
    full = next(iter(by_layer.values()))["head_dim"]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    for method, size in (("", full), ("_swa", config["head_dim"])):
        for name in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{name}{method}")(size)
    if heads := config.get("num_global_key_value_heads"):
        writer.add_head_count_kv([config["num_key_value_heads"] if window else heads for window in windowed])
    if config.get("use_double_wide_mlp"):
        width = config["intermediate_size"]
        writer.add_feed_forward_length([width * (2 if i >= depth - shared else 1) for i in range(depth)])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    turned = int(full * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.asarray([1.0] * turned + [1e30] * (full // 2 - turned), np.float32))


def with_stacks(weights, family):
    """Weights with the gates, the inputs and the outputs of a layer's experts as a stack each, by converters' names."""
    result, single = {}, {}
    for key, weight in weights.items():
        stem, _, last = key.partition(".mlp.experts." if family != "gemma4_text" else ".experts.")
        if not last:
            result[f"{key}.weight" if key.endswith(("sinks", "layer_scalar")) else key] = weight
        elif family == "gemma4_text":
            result[f"{key}.weight"] = weight
        elif last[0].isdigit():
            number, _, name = last.partition(".")
            single.setdefault(f"{stem}.mlp.experts.{name}", {})[int(number)] = weight
        else:
            name, suffix = last.removesuffix("_bias"), "bias" if last.endswith("_bias") else "weight"
            if family == "gpt_oss":
                weight = weight if suffix == "bias" else weight.swapaxes(1, 2)
                halves = weight[:, ::2], weight[:, 1::2]
            else:
                halves = np.split(weight, 2, axis=1)
            parts = zip(("gate_proj", "up_proj"), halves, strict=True) if "gate_up" in name else [(name, weight)]
            result |= {f"{stem}.mlp.experts.{part}.{suffix}": np.ascontiguousarray(half) for part, half in parts}
    return result | {key: np.stack([of[i] for i in range(len(of))]) for key, of in single.items()}


def add_tokenizer(writer, folder, pre):
    """tokenizer.json and tokenizer_config.json as metadata."""
    model = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in model["added_tokens"]}
    tokens = {number: token for token, number in model["model"]["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    types = [
        gguf.TokenType.NORMAL
        if i not in added
        else (gguf.TokenType.CONTROL if added[i]["special"] else gguf.TokenType.USER_DEFINED)
        for i in range(len(tokens))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens[i] for i in range(len(tokens))])
    writer.add_token_types(types)
    merges = model["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    numbers = {token: number for number, token in tokens.items()}
    writer.add_eos_token_id(numbers[config["eos_token"]])
    if "bos_token" in config:
        writer.add_bos_token_id(numbers[config["bos_token"]])
    if "chat_template" in config:
        writer.add_chat_template(config["chat_template"])


def llama3_divisors(rope, head_dim):
    """Frequency factors of rope, as in llama.cpp's `LlamaModel.generate_extra_tensors`."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context, divisors = rope["original_max_position_embeddings"], []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength < context / high:
            divisors.append(1)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(divisors, np.float32)
