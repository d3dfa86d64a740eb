"""Tokenizer of a GGUF file's metadata: byte-level BPE, with the ids that transformers gives.

The rules of each `tokenizer.ggml.pre` are those of the tokenizer.json that llama.cpp's converter recognised by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import Count, read_value
from verax.files import JsonObject

__all__ = ["TokenizerParts", "read_gguf_tokenizer"]

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class _Rules(NamedTuple):
    """Pre-tokenization: the cuts of a text before merges apply."""

    pattern: str
    compose: bool = False
    """Unicode's NFC first."""
    whole_words: bool = False
    """A piece that is a token is taken as it is, whatever merges would make of it."""
    begin: bool = False
    """A beginning token goes before a text, where the file does not say."""


_QWEN = _Rules(_WORDS % "", compose=True)
_LLAMA = _Rules(_WORDS % "{1,3}", whole_words=True, begin=True)
_RULES = {
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "gpt-2": _Rules(_GPT2),
}
_USUAL = {"qwen2": "qwen2", "qwen3": "qwen2", "llama": "llama-bpe"}
"""Pre-tokenizer by architecture, for files of early converters, which have no `tokenizer.ggml.pre`."""

_CONTROL, _USER_DEFINED = 3, 4
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
"""Control tokens that end a text in these families, whether or not the file names them: as in llama.cpp."""


class TokenizerParts(NamedTuple):
    """Parts that a `Tokenizer` is made of."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """Texts by the names that chat templates have for them, such as `eos_token`."""
    eos_token_ids: frozenset[int]
    chat_templates: dict[str, str]
    """Templates by name."""


def read_gguf_tokenizer(metadata: Mapping[str, Any], where: object) -> TokenizerParts:
    """Read the tokenizer, special tokens and chat templates of a file's metadata.

    Raises:
        CheckpointError: if the file has no vocabulary, or a damaged one.
        UnsupportedModelError: for a kind of tokenizer other than byte-level BPE, or rules that are not known.
    """
    metadata = JsonObject(metadata, where)

    def given(name: str, form: Any, default: Any = None) -> Any:
        return read_value(metadata, f"tokenizer.ggml.{name}", form, default)

    kind = given("model", str)
    if kind is None or kind in ("none", "no_vocab"):
        raise CheckpointError(f"{where}: it has no tokenizer; fetch a file that has one")
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"{where}: tokenizer.ggml.model {kind!r} is not supported in GGUF files; 'gpt2' (byte-level BPE) is. Use "
            "the model's Hugging Face folder, which has tokenizer.json"
        )
    pre = given("pre", str, "default")
    pre = _USUAL.get(metadata.get("general.architecture", ""), pre) if pre == "default" else pre
    if pre not in _RULES:
        raise UnsupportedModelError(
            f"{where}: tokenizer.ggml.pre {pre!r} is not supported in GGUF files; {', '.join(_RULES)} are. Use the "
            "model's Hugging Face folder, which has tokenizer.json"
        )
    rules, tokens, merges = _RULES[pre], given("tokens", list[str]), given("merges", list[str])
    if not tokens or merges is None:
        raise CheckpointError(f"{where}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing")
    types = given("token_type", list[int], [1] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"{where}: its vocabulary is damaged: {len(types)} types for {len(tokens)} tokens")
    names = ("bos", "eos", "eot", "eom", "unk", "unknown", "padding")
    ids = {name: given(f"{name}_token_id", Count) for name in names}
    if wrong := [name for name, number in ids.items() if number is not None and number >= len(tokens)]:
        raise CheckpointError(f"{where}: tokenizer.ggml.{wrong[0]}_token_id {ids[wrong[0]]} is no token")
    special = {name: tokens[number] for name, number in ids.items() if number is not None}
    try:
        backend = _backend(rules, tokens, types, merges)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{where}: its vocabulary is damaged: {error}") from error
    if given("add_bos_token", bool, rules.begin) and "bos" in special:
        backend.post_processor = processors.TemplateProcessing(
            single=[special["bos"], "$A"], special_tokens=[(special["bos"], ids["bos"])]
        )
    ends = {ids["eos"], ids["eot"], ids["eom"]}
    ends |= {i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _ENDS}
    variables = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return TokenizerParts(
        backend,
        special_tokens={name: special[key] for name, key in variables.items() if key in special},
        eos_token_ids=frozenset(end for end in ends if end is not None),
        chat_templates=_chat_templates(metadata),
    )


def _backend(rules: _Rules, tokens: list[str], types: list[int], merges: list[str]) -> tokenizers.Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=rules.whole_words))
    if rules.compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(rules.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return backend


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The default template and named ones."""
    prefix = "tokenizer.chat_template"
    names = read_value(metadata, "tokenizer.chat_templates", list[str], [])
    named = {name: read_value(metadata, f"{prefix}.{name}", str, None) for name in names}
    return {name: text for name, text in {"default": read_value(metadata, prefix, str, None), **named}.items() if text}
