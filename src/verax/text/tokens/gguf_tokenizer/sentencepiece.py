"""SentencePiece's BPE: merges by score, bytes for characters without a token, spaces as U+2581.

SentencePiece (https://github.com/google/sentencepiece, bpe_model.cc) joins the two neighbours whose token has the best
score, the leftmost pair first. The tokenizers library ranks pairs of tokens instead. Every way to cut a token in two is
a pair here, ranked by the token's score, then by the longer left part. That is the order of the tokenizer.json files
that transformers' converter has made of such models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

from verax.text.tokens.gguf_tokenizer.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

__all__ = ["build"]

_SPACE = "\u2581"


def build(vocabulary: Vocabulary, scores: Sequence[float], unknown: int, *, space_prefix: bool) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary.

    Args:
        vocabulary: tokens and types.
        scores: of each token, the best ones first to be merged.
        unknown: id of the token for what has none, in vocabularies without bytes.
        space_prefix: whether a text, and what follows a special token, begins with a space of its own.
    """
    vocabulary = Vocabulary([_spelled(token) for token in vocabulary.tokens], vocabulary.types)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.numbers(),
            _merges(vocabulary, scores),
            unk_token=vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    nothing = tokenizers.AddedToken(vocabulary.tokens[unknown], special=True, normalized=False)
    backend.add_tokens([nothing, *vocabulary.added_tokens()])
    return backend


def _spelled(token: str) -> str:
    """Runs of spaces as SentencePiece spells them: llama.cpp's converter writes such tokens of users with spaces."""
    return _SPACE * len(token) if token and not token.strip(" ") else token


def _merges(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of tokens to merge, the first ones first.

    Tokens of users come before all others: SentencePiece finds them in a text before it merges anything.
    """
    joined = {
        token: math.inf if kind == USER_DEFINED else score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
        if kind not in (UNKNOWN, CONTROL, BYTE)
    }
    pairs = [
        (score, at, len(token) - at, token)
        for token, score in joined.items()
        for at in range(1, len(token))
        if token[:at] in joined and token[at:] in joined
    ]
    pairs.sort(reverse=True)
    return [(token[:at], token[at:]) for _, at, _, token in pairs]
