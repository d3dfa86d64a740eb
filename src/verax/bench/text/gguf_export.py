"""Checkpoints as GGUF files that llama.cpp can run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from verax.checkpoint import Checkpoint
from verax.checkpoint.formats.gguf_config import interleaved, rotated, tensor_name
from verax.errors import CheckpointError, UnsupportedModelError
from verax.files import read_json
from verax.models import causal_lm

GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "w8a8": "Q8_0", "int4": "Q4_0"}
"""Type of llama.cpp's weights, by our `quantization` or else our `dtype`."""

FAMILIES = ("qwen3", "qwen2", "llama")
"""Values of config.json's `model_type` that can be written."""

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    **dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), "head_dim"),
    "layer_norm_rms_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Keys of a GGUF file that are sizes of the model, with their names in our configurations."""

PRE_TOKENIZER = "qwen2"
"""Cuts of texts before merges apply. Prompts of benchmarks are ids, which are not cut."""


def gguf_file(
    opened: Checkpoint, precision: str, stack: contextlib.ExitStack | contextlib.AsyncExitStack, **options: Any
) -> tuple[str, Path]:
    """Type of a GGUF file's matrices, and its path: the opened file, or one of a folder's weights until the stack ends.

    `precision` is the quantisation or dtype of our engine, a name out of `GGUF_TYPES`; options are `write_gguf`'s.
    """
    kind = GGUF_TYPES[precision]
    if opened.metadata:
        return kind, opened.folder
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verax-bench-")))
    return kind, write_gguf(opened, folder / f"{kind}.gguf", kind, **options)


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
        UnsupportedModelError: for another family, or rotary frequencies that are scaled.
    """
    if opened.packed:
        raise CheckpointError(f"{opened.folder}: it is quantised; to become a GGUF file it must not be")
    config, sizes = opened.config, causal_lm(opened.config)[1]
    family = config["model_type"]
    if family not in FAMILIES:
        raise UnsupportedModelError(f"a {family} cannot be written to a GGUF file; {', '.join(FAMILIES)} can")
    if sizes.rotary.kind != "default":
        raise UnsupportedModelError(f"rope_type {sizes.rotary.kind!r} cannot be written to a GGUF file")
    writer = gguf.GGUFWriter(path, family, use_temp_file=True)
    for key, name in KEYS.items():
        getattr(writer, f"add_{key}")(getattr(sizes, name))
    writer.add_rope_freq_base(sizes.rotary.theta)
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _vocabulary(writer, vocabulary, config, sizes.vocab_size)
    heads = {"model_type": family}
    heads |= {name: getattr(sizes, name) for name in ("num_attention_heads", "num_key_value_heads")}
    unused = "lm_head.weight" if sizes.tie_word_embeddings else None
    for name in opened.names():
        if name == unused or name.endswith("rotary_emb.inv_freq") or name.startswith("mtp."):
            continue
        weight = np.asarray(opened.read(name), np.float32)
        count = rotated(name, heads)
        weight = np.ascontiguousarray(weight if count is None else interleaved(weight, count))
        quantized = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        try:
            stored = gguf.quantize(weight, quantized).view(np.uint8)
        except gguf.quants.QuantError as error:
            raise CheckpointError(
                f"{opened.folder}: {name} of shape {list(weight.shape)} cannot be {kind}: {error}"
            ) from error
        writer.add_tensor(tensor_name(name), stored, raw_dtype=quantized)
        opened.release(name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
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
    ids, end = range(vocab_size), config.get("eos_token_id")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list([texts.get(number, f"<unused {number}>") for number in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if number in control else gguf.TokenType.NORMAL for number in ids])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id((end[0] if isinstance(end, list) else end) or 0)
    writer.add_add_bos_token(False)
