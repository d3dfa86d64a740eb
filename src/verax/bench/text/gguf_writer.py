"""A checkpoint as a GGUF file that llama.cpp can run, for a benchmark of token ids; a server needs a vocabulary too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from verax.checkpoint import Checkpoint
from verax.checkpoint.formats.gguf import ROPE_DIVISORS, interleaved, rotated, tensor_name
from verax.errors import CheckpointError, UnsupportedModelError
from verax.files import read_json
from verax.models import causal_lm

__all__ = ["write_gguf"]


FAMILIES = ("qwen3", "qwen2", "llama")
"""Values of config.json's `model_type` whose models can be written."""

PRE_TOKENIZER = "qwen2"
"""Cuts of texts before merges apply. Prompts of benchmarks are ids, which are not cut."""


def write_gguf(opened: Checkpoint, path: Path, kind: str, *, vocabulary: Path | None = None) -> Path:
    """Write the weights as llama.cpp's converter does: matrices of type `kind`, everything else float32.

    A tied output head is the embeddings, quantised like the rest (llama.cpp's own tool keeps more bits for it).

    Args:
        opened: an unquantised checkpoint of a Qwen3, Qwen2 or Llama.
        path: of the new file.
        kind: `F32`, `BF16`, `Q8_0` or `Q4_0`.
        vocabulary: a `tokenizer.json` of byte-level BPE; None for a file without a vocabulary.

    Raises:
        CheckpointError: if the checkpoint is quantised already, or has rows that blocks of 32 do not divide.
        UnsupportedModelError: for another family.
    """
    if opened.packed:
        raise CheckpointError(f"{opened.folder}: it is quantised; to become a GGUF file it must not be")
    config, sizes = opened.config, causal_lm(opened.config)[1]
    family = config["model_type"]
    if family not in FAMILIES:
        raise UnsupportedModelError(f"a {family} cannot be written to a GGUF file; {', '.join(FAMILIES)} can")
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(sizes.num_hidden_layers)
    writer.add_context_length(sizes.max_position_embeddings)
    writer.add_embedding_length(sizes.hidden_size)
    writer.add_feed_forward_length(sizes.intermediate_size)
    writer.add_head_count(sizes.num_attention_heads)
    writer.add_head_count_kv(sizes.num_key_value_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    writer.add_rope_dimension_count(sizes.head_dim)
    writer.add_layer_norm_rms_eps(sizes.rms_norm_eps)
    writer.add_rope_freq_base(sizes.rotary.theta)
    writer.add_vocab_size(sizes.vocab_size)
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _vocabulary(writer, vocabulary, config, sizes.vocab_size)

    heads = {"model_type": family, "num_attention_heads": sizes.num_attention_heads}
    heads["num_key_value_heads"] = sizes.num_key_value_heads
    unused = "lm_head.weight" if sizes.tie_word_embeddings else None
    names = [name for name in opened.names() if name != unused and not name.endswith("rotary_emb.inv_freq")]
    extra = _scaling(writer, sizes)
    types = {name: gguf.GGMLQuantizationType[kind if len(opened.shape(name)) == 2 else "F32"] for name in names}
    for name, divisors in extra.items():
        writer.add_tensor_info(name, divisors.shape, divisors.dtype, divisors.nbytes)
    for name in names:
        shape, quantized = opened.shape(name), types[name]
        try:
            stored = gguf.quant_shape_to_byte_shape(shape, quantized)
        except ValueError as error:
            raise CheckpointError(
                f"{opened.folder}: {name} of shape {list(shape)} cannot be {kind}: {error}"
            ) from error
        writer.add_tensor_info(tensor_name(name), stored, np.dtype(np.uint8), int(np.prod(stored)), quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for divisors in extra.values():
        writer.write_tensor_data(divisors)
    for name in names:
        weight = np.asarray(opened.read(name), np.float32)
        count = rotated(name, heads)
        weight = weight if count is None else interleaved(weight, count)
        writer.write_tensor_data(gguf.quantize(np.ascontiguousarray(weight), types[name]).view(np.uint8))
        opened.release(name)
    writer.close()
    return path


def _vocabulary(writer: gguf.GGUFWriter, path: Path, config: Mapping[str, Any], vocab_size: int) -> None:
    """Write the tokens and merges of a `tokenizer.json`; ids without a token get a name of their own."""
    read = read_json(path)
    model, added = read["model"], read["added_tokens"]
    if model["type"] != "BPE":
        raise UnsupportedModelError(f"{path}: a tokenizer of type {model['type']} cannot be written to a GGUF file")
    texts = {number: text for text, number in model["vocab"].items()} | {one["id"]: one["content"] for one in added}
    control = {one["id"] for one in added if one["special"]}
    ids = range(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list([texts.get(number, f"<unused {number}>") for number in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if number in control else gguf.TokenType.NORMAL for number in ids])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) else ends
    writer.add_eos_token_id(end or 0)
    writer.add_add_bos_token(False)


def _scaling(writer: gguf.GGUFWriter, sizes: Any) -> dict[str, np.ndarray]:
    """Say how rotary frequencies are scaled; the tensors that this takes."""
    kind, numbers = sizes.rotary.kind, dict(sizes.rotary.scaling)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(numbers["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(int(numbers["original_max_position_embeddings"]))
    elif kind == "llama3":
        plain = type(sizes.rotary)(sizes.rotary.theta)
        divisors = plain.frequencies(sizes.head_dim)[0] / sizes.rotary.frequencies(sizes.head_dim)[0]
        return {ROPE_DIVISORS: divisors}
    elif kind != "default":
        raise UnsupportedModelError(f"rope_type {kind!r} cannot be written to a GGUF file")
    return {}
