"""Tokenizer, special tokens and chat templates out of a file's metadata, whatever the kind of its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import processors

from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import Count, read_value
from verax.files import JsonObject
from verax.text.tokens.gguf_tokenizer import byte_level, sentencepiece
from verax.text.tokens.gguf_tokenizer.vocabulary import NORMAL, Vocabulary

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
    file = _Metadata(metadata, where)
    is_sentencepiece = file.kind() == "llama"
    rules = None if is_sentencepiece else _rules(file)
    vocabulary = file.vocabulary()
    ids = file.ids(vocabulary, _SENTENCEPIECE_IDS if is_sentencepiece else {})
    scores = file.scores(vocabulary) if is_sentencepiece else []
    merges: list[str] = [] if is_sentencepiece else file.needed("merges", list[str])
    try:
        if rules is None:
            prefix = file.get("add_space_prefix", bool, True)
            backend = sentencepiece.build(vocabulary, scores, ids["unknown"] or 0, space_prefix=prefix)
        else:
            backend = byte_level.build(vocabulary, merges, rules)
    except Exception as error:  # the library raises bare Exception
        raise file.damage(error) from error
    begins = file.get("add_bos_token", bool, rules is None or rules.begin)
    ends = file.get("add_eos_token", bool, False)
    _surround(backend, vocabulary, ids["bos"] if begins else None, ids["eos"] if ends else None)
    end_ids = {ids["eos"], ids["eot"], ids["eom"]}
    end_ids |= {number for number, token in vocabulary.controls() if token in _ENDS}
    variables = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return TokenizerParts(
        backend,
        special_tokens={
            name: vocabulary.tokens[number] for name, role in variables.items() if (number := ids[role]) is not None
        },
        eos_token_ids=frozenset(number for number in end_ids if number is not None),
        chat_templates=_chat_templates(metadata),
    )


class _Metadata:
    """Values of a file's tokenizer, by their names after `tokenizer.ggml.`."""

    def __init__(self, metadata: JsonObject, where: object):
        self._values = metadata
        self.where = where
        self.architecture = str(metadata.get("general.architecture"))

    def get(self, name: str, form: Any, default: Any = None) -> Any:
        return read_value(self._values, f"tokenizer.ggml.{name}", form, default)

    def needed(self, name: str, form: Any) -> Any:
        value = self.get(name, form)
        if value is None:
            raise CheckpointError(f"{self.where}: tokenizer.ggml.{name} is missing")
        return value

    def damage(self, reason: object) -> CheckpointError:
        return CheckpointError(f"{self.where}: its vocabulary is damaged: {reason}")

    def kind(self) -> str:
        kind = self.get("model", str)
        if kind is None or kind in ("none", "no_vocab"):
            raise CheckpointError(f"{self.where}: it has no tokenizer; fetch a file that has one")
        if kind not in _KINDS:
            known = " and ".join(f"{name!r} ({form})" for name, form in _KINDS.items())
            raise UnsupportedModelError(
                f"{self.where}: tokenizer.ggml.model {kind!r} is not supported in GGUF files; {known} are. Use the "
                "model's Hugging Face folder, which has tokenizer.json"
            )
        return kind

    def vocabulary(self) -> Vocabulary:
        tokens = self.needed("tokens", list[str])
        if not tokens:
            raise self.damage("it has no tokens")
        types = self.get("token_type", list[int], [NORMAL] * len(tokens))
        if len(types) != len(tokens):
            raise self.damage(f"{len(types)} types for {len(tokens)} tokens")
        return Vocabulary(tokens, types)

    def scores(self, vocabulary: Vocabulary) -> list[float]:
        scores = self.needed("scores", list[float])
        if len(scores) != len(vocabulary.tokens):
            raise self.damage(f"{len(scores)} scores for {len(vocabulary.tokens)} tokens")
        return scores

    def ids(self, vocabulary: Vocabulary, usual: Mapping[str, int]) -> dict[str, int | None]:
        """Ids by their roles; `usual` ones where the file has none."""
        ids = {role: self.get(f"{role}_token_id", Count, usual.get(role)) for role in _ROLES}
        for role, number in ids.items():
            if number is not None and number >= len(vocabulary.tokens):
                raise CheckpointError(f"{self.where}: tokenizer.ggml.{role}_token_id {number} is no token")
        return ids


def _rules(file: _Metadata) -> byte_level.Rules:
    pre = file.get("pre", str, "default")
    pre = byte_level.USUAL.get(file.architecture, pre) if pre == "default" else pre
    if pre not in byte_level.RULES:
        raise UnsupportedModelError(
            f"{file.where}: tokenizer.ggml.pre {pre!r} is not supported in GGUF files; {', '.join(byte_level.RULES)} "
            "are. Use the model's Hugging Face folder, which has tokenizer.json"
        )
    return byte_level.RULES[pre]


def _surround(backend: tokenizers.Tokenizer, vocabulary: Vocabulary, begin: int | None, end: int | None) -> None:
    """Put the beginning and the end token around a text, where the model expects them."""
    before, after = ([] if number is None else [vocabulary.tokens[number]] for number in (begin, end))
    if before or after:
        special = [(vocabulary.tokens[number], number) for number in (begin, end) if number is not None]
        backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=special)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The default template and named ones."""
    prefix = "tokenizer.chat_template"
    names = read_value(metadata, "tokenizer.chat_templates", list[str], [])
    named = {name: read_value(metadata, f"{prefix}.{name}", str, None) for name in names}
    return {name: text for name, text in {"default": read_value(metadata, prefix, str, None), **named}.items() if text}
