"""llama.cpp as a baseline, and checkpoints as GGUF files that it can run. Needs `pip install 'verax[llama-cpp]'`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from verax._optional import require_optional
from verax.bench.text.workload import Workload
from verax.checkpoint import Checkpoint
from verax.checkpoint.formats.gguf_config import ROPE_DIVISORS, interleaved, rotated, tensor_name
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError, VeraxError
from verax.files import read_json
from verax.machine import num_cores
from verax.models import causal_lm

__all__ = ["LlamaCpp", "gguf_file", "llama_cpp_sides", "write_gguf"]

GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
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

_BATCH_TOKENS, _MOST_SEQUENCES, _LOG_ERROR = 512, 256, 4
"""llama.cpp's own physical batch, which a call takes while prompts are read, its limit on sequences in a context
(LLAMA_MAX_SEQ), and its level of errors."""


class Row(NamedTuple):
    """A token to run through the model; `last` is True if a token is to be drawn after it."""

    sequence: int
    token: int
    position: int
    last: bool


class LlamaCpp:
    """A GGUF file in llama.cpp on all cores, through its C interface."""

    def __init__(self, path: Path, *, context: int, batch: int, sequences: int = 1):
        """Load the file, and make room for `context` tokens in all, `batch` in one call, and for `sequences`.

        Raises:
            MissingDependencyError: if llama-cpp-python is not installed.
            VeraxError: if llama.cpp cannot load the file; the message ends with its log.
        """
        self._c = llama_cpp = require_optional("llama_cpp", "llama-cpp")
        self._errors: list[str] = []
        # ctypes keeps no reference to a callback: this one does.
        self._log = llama_cpp.llama_log_callback(self._hear)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise self._fault(f"cannot load {path}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = options.n_ubatch = batch
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = num_cores()
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise self._fault(f"cannot make a context of {context} tokens")
        self._batch = llama_cpp.llama_batch_init(batch, 0, 1)
        self._batch_size = batch

    def close(self) -> None:
        """Free the model; it cannot be used afterwards."""
        self._c.llama_batch_free(self._batch)
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._model)

    def generate(self, workload: Workload) -> list[list[int]]:
        """New tokens of each prompt; a sequence leaves the batch when it has its tokens."""
        c, prompts = self._c, workload.prompts
        c.llama_memory_clear(c.llama_get_memory(self._context), False)
        answers: list[list[int]] = [[] for _ in prompts]
        rows = [Row(i, token, at, at + 1 == len(p)) for i, p in enumerate(prompts) for at, token in enumerate(p)]
        batches = [rows[begin : begin + self._batch_size] for begin in range(0, len(rows), self._batch_size)]
        sampler = self._sampler(workload.temperature)
        while batches:
            rows = batches.pop(0)
            self._decode(rows)
            for n, row in enumerate(rows):
                if row.last:
                    answers[row.sequence].append(c.llama_sampler_sample(sampler, self._context, n))
            going = [i for i, answer in enumerate(answers) if len(answer) < workload.max_tokens[i]]
            if not batches and going:
                batches = [[Row(i, answers[i][-1], len(prompts[i]) + len(answers[i]) - 1, True) for i in going]]
        c.llama_sampler_free(sampler)
        return answers

    def _decode(self, rows: Sequence[Row]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for n, row in enumerate(rows):
            batch.token[n], batch.pos[n], batch.logits[n] = row.token, row.position, row.last
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, row.sequence
        if code := self._c.llama_decode(self._context, batch):
            raise self._fault(f"llama_decode returned {code}")

    def _sampler(self, temperature: float) -> Any:
        """Greedy, or a draw from all tokens: top-k and the like are off, as on our side."""
        c = self._c
        chain = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
        draws = [c.llama_sampler_init_temp(temperature), c.llama_sampler_init_dist(0)] if temperature else []
        for sampler in draws or [c.llama_sampler_init_greedy()]:
            c.llama_sampler_chain_add(chain, sampler)
        return chain

    def versions(self) -> dict[str, Any]:
        """Version, features and threads of the library."""
        build = self._c.llama_print_system_info().decode().split(":", 1)[-1]
        features = " ".join(part.split("=")[0].strip() for part in build.split("|") if part.strip())
        numbers = {"llama_cpp_python": self._c.__version__, "llama_cpp_threads": num_cores()}
        return numbers | {"llama_cpp_build": features}

    def _hear(self, level: int, text: bytes, user_data: object) -> None:
        if level == _LOG_ERROR:
            self._errors.append(text.decode(errors="replace").strip())

    def _fault(self, what: str) -> VeraxError:
        return VeraxError(f"llama.cpp: {what}: {'; '.join(self._errors[-3:]) or 'it gives no reason'}")


def llama_cpp_sides(
    opened: Checkpoint, precision: str, workload: Workload, stack: contextlib.ExitStack
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Side that runs all prompts of a workload in one batch, with one `llama_decode` a step; versions.

    The model is closed with the stack, and so is a file of `precision`, a name out of `GGUF_TYPES`, that is written.
    """
    require_optional("llama_cpp", "llama-cpp")  # before a file is written for it
    count = len(workload.prompts)
    if count > _MOST_SEQUENCES:
        raise InvalidParameterError(f"requests: llama.cpp takes at most {_MOST_SEQUENCES} sequences at once")
    kind, path = gguf_file(opened, precision, stack)
    model = LlamaCpp(path, context=count * workload.longest, batch=max(_BATCH_TOKENS, count), sequences=count)
    stack.callback(model.close)
    name = f"llama.cpp {'as stored' if opened.metadata else kind}"
    return {name: partial(model.generate, workload)}, model.versions()


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
        UnsupportedModelError: for another family.
    """
    if opened.packed:
        raise CheckpointError(f"{opened.folder}: it is quantised; to become a GGUF file it must not be")
    config, sizes = opened.config, causal_lm(opened.config)[1]
    family = config["model_type"]
    if family not in FAMILIES:
        raise UnsupportedModelError(f"a {family} cannot be written to a GGUF file; {', '.join(FAMILIES)} can")
    writer = gguf.GGUFWriter(path, family, use_temp_file=True)
    for key, name in KEYS.items():
        getattr(writer, f"add_{key}")(getattr(sizes, name))
    writer.add_rope_freq_base(sizes.rotary.theta)
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _vocabulary(writer, vocabulary, config, sizes.vocab_size)

    for name, divisors in _scaling(writer, sizes).items():
        writer.add_tensor(name, divisors)
    heads = {"model_type": family}
    heads |= {name: getattr(sizes, name) for name in ("num_attention_heads", "num_key_value_heads")}
    unused = "lm_head.weight" if sizes.tie_word_embeddings else None
    for name in opened.names():
        if name == unused or name.endswith("rotary_emb.inv_freq"):
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


def _scaling(writer: gguf.GGUFWriter, sizes: Any) -> dict[str, np.ndarray]:
    """Write how rotary frequencies are scaled; the tensors that this takes, by name."""
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
