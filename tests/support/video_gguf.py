"""GGUF files of Wan and UMT5 in the layouts of ComfyUI-GGUF, stable-diffusion.cpp and llama.cpp."""

import gguf
import numpy as np
from flax import nnx

from tests.support.gguf import encode
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan.model import WanConfig

WAN = WanConfig(dim=256, ffn_dim=512, num_heads=2, num_layers=2, text_dim=256, freq_dim=256)
UMT5 = UMT5Config(vocab_size=96, d_model=256, d_kv=64, d_ff=256, num_layers=2, num_heads=4)
WORDS = ("a", "red", "circle", "floats", "c", "i", "r", "l", "e", "s", "t", "o", "n", "ing")
TYPE = gguf.TokenType
PIECES = [("<pad>", 0.0, TYPE.CONTROL), ("</s>", 0.0, TYPE.CONTROL), ("<unk>", 0.0, TYPE.UNKNOWN)]
PIECES += [("\u2581", -3.0, TYPE.NORMAL), *((word, -5.0 - i, TYPE.NORMAL) for i, word in enumerate(WORDS))]
PIECES += [(f"\u2581{word}", -2.0 - i, TYPE.NORMAL) for i, word in enumerate(WORDS)]
PIECES += [(f"[PAD{i}]", -10000.0, TYPE.UNUSED) for i in range(96 - len(PIECES))]


def weights_of(kind, config):
    shapes = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: kind(config, dtype=np.float32, rngs=nnx.Rngs(0)))))
    draw = np.random.default_rng(0)
    named = {".".join(map(str, path)): leaf.shape for path, leaf in shapes}
    return {name: (0.1 * draw.standard_normal(shape)).astype(np.float32) for name, shape in named.items()}


def write_gguf(path, weights, kind, *, architecture, matrices, rename=lambda name: name, metadata=()):
    """Write a GGUF file, and return the floats that it stands for by name."""
    writer = gguf.GGUFWriter(path, architecture or "none")
    if architecture is None:  # as stable-diffusion.cpp writes
        writer.kv_data[0].pop("general.architecture")
    for method, *arguments in metadata:
        getattr(writer, method)(*arguments)
    stored = {}
    for name, weight in weights.items():
        type_of = gguf.GGMLQuantizationType[kind if matrices(name, weight) else "F32"]
        if type_of.name in ("F32", "F16", "BF16"):
            rows = gguf.quantize(weight, type_of)
        else:
            rows = encode(weight, kind) if kind not in ("Q2_K", "Q3_K") else encode(weight, kind, seed=len(stored))
        writer.add_tensor(rename(name), rows, raw_dtype=type_of)
        stored[name] = gguf.dequantize(rows.reshape(-1, rows.shape[-1]), type_of).reshape(weight.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def of_blocks(name, weight):
    return name.startswith("blocks.") and weight.ndim == 2


LLAMA_CPP = {
    "token_embedding": "token_embd",
    "norm": "enc.output_norm",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    "pos_embedding.embedding": "attn_rel_b",
    "ffn.gate.0": "ffn_gate",
    "ffn.fc1": "ffn_up",
    "ffn.fc2": "ffn_down",
    **{f"attn.{name}": f"attn_{name}" for name in "qkvo"},
}


def llama_cpps(name):
    stem = name.removesuffix(".weight")
    if not stem.startswith("blocks."):
        return f"{LLAMA_CPP[stem]}.weight"
    _, layer, rest = stem.split(".", 2)
    return f"enc.blk.{layer}.{LLAMA_CPP[rest]}.weight"


def is_umt5_matrix(name, weight):
    return weight.ndim == 2 and "pos_embedding" not in name


def write_umt5(path):
    """Write UMT5 as llama.cpp does, with its tokenizer, and return the floats that the file stands for by name."""
    tokens, scores, kinds = map(list, zip(*PIECES, strict=True))
    metadata = [("add_embedding_length", 256), ("add_block_count", 2), ("add_feed_forward_length", 256)]
    metadata += [("add_head_count", 4), ("add_key_length", 64), ("add_layer_norm_rms_eps", 1e-6)]
    metadata += [("add_relative_attn_buckets_count", 32), ("add_vocab_size", 96), ("add_context_length", 512)]
    metadata += [("add_tokenizer_model", "t5"), ("add_token_list", tokens), ("add_token_scores", scores)]
    metadata += [("add_token_types", kinds), ("add_add_space_prefix", True), ("add_eos_token_id", 1)]
    metadata += [("add_unk_token_id", 2), ("add_pad_token_id", 0)]
    options = {"architecture": "t5encoder", "matrices": is_umt5_matrix, "rename": llama_cpps, "metadata": metadata}
    return write_gguf(path, weights_of(UMT5EncoderModel, UMT5), "Q8_0", **options)
