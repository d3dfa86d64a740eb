"""Byte-level BPE: the rules of each `tokenizer.ggml.pre`.

They are those of the tokenizer.json that llama.cpp's converter recognised by that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from verax.text.tokens.gguf_tokenizer.vocabulary import Vocabulary

__all__ = ["RULES", "USUAL", "Rules", "build"]

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Rules(NamedTuple):
    """Pre-tokenization: the cuts of a text before merges apply."""

    patterns: tuple[str, ...]
    """Regular expressions, each of which cuts the pieces of the one before."""
    compose: bool = False
    """Unicode's NFC first."""
    whole_words: bool = False
    """A piece that is a token is taken as it is, whatever merges would make of it."""
    begin: bool = False
    """A beginning token goes before a text, where the file does not say."""


_QWEN2 = Rules((_WORDS % "",), compose=True)
_LLAMA3 = Rules((_WORDS % "{1,3}",), whole_words=True, begin=True)
_DIGITS = Rules((r"\p{N}", _GPT2))
RULES = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": Rules((_WORDS_WITH_MARKS,), compose=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt"), Rules((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
}
"""Rules by the name that a file has for them."""

USUAL = {"qwen2": "qwen2", "qwen3": "qwen2", "llama": "llama-bpe"}
"""Name by architecture, for files of early converters, which have no `tokenizer.ggml.pre`."""


def build(vocabulary: Vocabulary, merges: Sequence[str], rules: Rules) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary and its merges, each the two tokens that it joins with a space between."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary.numbers(), pairs, ignore_merges=rules.whole_words))
    if rules.compose:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in rules.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(vocabulary.added_tokens())
    return backend
