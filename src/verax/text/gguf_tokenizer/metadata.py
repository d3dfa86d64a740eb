"""Tokenizer, special tokens and chat templates out of a file's metadata, whatever the kind of its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import processors

from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import Count, read_value
from verax.files import JsonObject
from verax.text.gguf_tokenizer import byte_level, sentencepiece
from verax.text.gguf_tokenizer.vocabulary import CONTROL, Vocabulary

__all__ = ["TokenizerParts", "read_gguf_tokenizer"]

_KINDS = {"gpt2": "byte-level BPE", "llama": "SentencePiece"}

_ENDS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a text in these families, whether or not the file names them: as in llama.cpp."""

_ROLES = ("bos", "eos", "eot", "eom", "unk", "unknown", "padding")
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids in SentencePiece vocabularies whose file does not name them: as in llama.cpp."""


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
        UnsupportedModelError: for a kind of tokenizer other than byte-level BPE and SentencePiece's BPE, or for rules
            of pre-tokenization that are not known.
    """
    metadata = JsonObject(metadata, where)

    def given(name: str, form: Any, default: Any = None) -> Any:
        return read_value(metadata, f"tokenizer.ggml.{name}", form, default)

    kind = given("model", str)
    if kind is None or kind in ("none", "no_vocab"):
        raise CheckpointError(f"{where}: it has no tokenizer; fetch a file that has one")
    if kind not in _KINDS:
        known = " and ".join(f"{name!r} ({form})" for name, form in _KINDS.items())
        raise UnsupportedModelError(
            f"{where}: tokenizer.ggml.model {kind!r} is not supported in GGUF files; {known} are. Use the model's "
            "Hugging Face folder, which has tokenizer.json"
        )
    is_sentencepiece = kind == "llama"
    rules = None if is_sentencepiece else _rules(given("pre", str, "default"), metadata, where)
    needed = {"tokens": list[str], **({"scores": list[float]} if is_sentencepiece else {"merges": list[str]})}
    lists = {name: given(name, form) for name, form in needed.items()}
    if missing := [name for name, values in lists.items() if values is None or (name == "tokens" and not values)]:
        raise CheckpointError(f"{where}: tokenizer.ggml.{missing[0]} is missing")
    tokens = lists["tokens"]
    types = given("token_type", list[int], [1] * len(tokens))
    for name, values in (("types", types), ("scores", lists.get("scores", tokens))):
        if len(values) != len(tokens):
            raise CheckpointError(f"{where}: its vocabulary is damaged: {len(values)} {name} for {len(tokens)} tokens")
    usual = _SENTENCEPIECE_IDS if is_sentencepiece else {}
    ids = {name: given(f"{name}_token_id", Count, usual.get(name)) for name in _ROLES}
    if wrong := [name for name, number in ids.items() if number is not None and number >= len(tokens)]:
        raise CheckpointError(f"{where}: tokenizer.ggml.{wrong[0]}_token_id {ids[wrong[0]]} is no token")
    vocabulary = Vocabulary(tokens, types)
    space_prefix = given("add_space_prefix", bool, True)
    try:
        if rules is None:
            backend = sentencepiece.build(vocabulary, lists["scores"], ids["unknown"], space_prefix=space_prefix)
        else:
            backend = byte_level.build(vocabulary, lists["merges"], rules)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{where}: its vocabulary is damaged: {error}") from error
    around = {
        "bos": given("add_bos_token", bool, is_sentencepiece or (rules is not None and rules.begin)),
        "eos": given("add_eos_token", bool, False),
    }
    _surround(backend, {name: ids[name] for name, wanted in around.items() if wanted}, tokens)
    ends = {ids["eos"], ids["eot"], ids["eom"]}
    ends |= {i for i, token in enumerate(tokens) if types[i] == CONTROL and token in _ENDS}
    variables = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return TokenizerParts(
        backend,
        special_tokens={name: tokens[ids[role]] for name, role in variables.items() if ids[role] is not None},
        eos_token_ids=frozenset(end for end in ends if end is not None),
        chat_templates=_chat_templates(metadata),
    )


def _rules(pre: str, metadata: Mapping[str, Any], where: object) -> byte_level.Rules:
    pre = byte_level.USUAL.get(metadata.get("general.architecture", ""), pre) if pre == "default" else pre
    if pre not in byte_level.RULES:
        raise UnsupportedModelError(
            f"{where}: tokenizer.ggml.pre {pre!r} is not supported in GGUF files; {', '.join(byte_level.RULES)} are. "
            "Use the model's Hugging Face folder, which has tokenizer.json"
        )
    return byte_level.RULES[pre]


def _surround(backend: tokenizers.Tokenizer, ids: Mapping[str, int | None], tokens: list[str]) -> None:
    """Put the beginning and the end token around a text, where the model expects them."""
    special = [(role, tokens[number], number) for role, number in ids.items() if number is not None]
    if special:
        backend.post_processor = processors.TemplateProcessing(
            single=[
                *(token for role, token, _ in special if role == "bos"),
                "$A",
                *(token for role, token, _ in special if role == "eos"),
            ],
            special_tokens=[(token, number) for _, token, number in special],
        )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The default template and named ones."""
    prefix = "tokenizer.chat_template"
    names = read_value(metadata, "tokenizer.chat_templates", list[str], [])
    named = {name: read_value(metadata, f"{prefix}.{name}", str, None) for name in names}
    return {name: text for name, text in {"default": read_value(metadata, prefix, str, None), **named}.items() if text}
