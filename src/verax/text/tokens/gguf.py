"""Tokenizer of a GGUF file's metadata, with the ids that transformers gives for the model's tokenizer.json.

Byte-level BPE follows the rules that `tokenizer.ggml.pre` names: the rules of the tokenizer.json that llama.cpp's
converter recognised by that name.

SentencePiece (https://github.com/google/sentencepiece, bpe_model.cc) joins the two neighbours whose token has the best
score, the leftmost pair first. The tokenizers library ranks pairs of tokens instead. Every way to cut a token in two is
a pair here, ranked by the token's score, then by the longer left part. That is the order of the tokenizer.json files
that transformers' converter has made of such models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import Count, read_value
from verax.files import JsonObject

__all__ = ["TokenizerParts", "read_gguf_tokenizer"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


class Vocabulary(NamedTuple):
    """Tokens in the order of their ids, and the type of each."""

    tokens: Sequence[str]
    types: Sequence[int]

    def numbers(self) -> dict[str, int]:
        """Ids by token."""
        return {token: number for number, token in enumerate(self.tokens)}

    def controls(self) -> Iterator[tuple[int, str]]:
        """Ids and texts of control tokens, such as the end of a turn."""
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        return ((number, token) for number, (token, kind) in pairs if kind == CONTROL)

    def added_tokens(self) -> list[tokenizers.AddedToken]:
        """Tokens that are found in a text before anything else: control tokens, and those defined by users."""
        return [
            tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]


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
    """A piece that is a token is taken whole, whatever merges would make of it."""
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


def _byte_level_bpe(vocabulary: Vocabulary, merges: Sequence[str], rules: Rules) -> tokenizers.Tokenizer:
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


_SPACE = "\u2581"


def _sentencepiece_bpe(
    vocabulary: Vocabulary, scores: Sequence[float], unknown: int, *, space_prefix: bool
) -> tokenizers.Tokenizer:
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
    file = JsonObject(metadata, where)

    def get(name: str, form: Any, default: Any = None) -> Any:
        return read_value(file, f"tokenizer.ggml.{name}", form, default)

    def needed(name: str, form: Any) -> Any:
        if (value := get(name, form)) is None:
            raise CheckpointError(f"{where}: tokenizer.ggml.{name} is missing")
        return value

    kind, pre = get("model", str), get("pre", str, "default")
    if kind in (None, "none", "no_vocab"):
        raise CheckpointError(f"{where}: it has no tokenizer; fetch a file that has one")
    if kind not in _KINDS:
        raise _unsupported(where, "model", kind, [f"{name} ({form})" for name, form in _KINDS.items()])
    if pre == "default":
        pre = USUAL.get(str(metadata.get("general.architecture")), pre)
    if kind == "gpt2" and pre not in RULES:
        raise _unsupported(where, "pre", pre, RULES)
    rules = RULES[pre] if kind == "gpt2" else None
    tokens = needed("tokens", list[str])
    vocabulary = Vocabulary(tokens, get("token_type", list[int], [NORMAL] * len(tokens)))
    scores: list[float] = needed("scores", list[float]) if rules is None else []
    if not tokens:
        raise _damage(where, "it has no tokens")
    for values, name in ((vocabulary.types, "types"), *([(scores, "scores")] if rules is None else [])):
        if len(values) != len(tokens):
            raise _damage(where, f"{len(values)} {name} for {len(tokens)} tokens")
    usual = _SENTENCEPIECE_IDS if rules is None else {}
    ids: dict[str, int | None] = {role: get(f"{role}_token_id", Count, usual.get(role)) for role in _ROLES}
    for role, number in ids.items():
        if number is not None and number >= len(tokens):
            raise CheckpointError(f"{where}: tokenizer.ggml.{role}_token_id {number} is not a token")
    merges: list[str] = [] if rules is None else needed("merges", list[str])
    try:
        if rules is None:
            prefix = get("add_space_prefix", bool, True)
            backend = _sentencepiece_bpe(vocabulary, scores, ids["unknown"] or 0, space_prefix=prefix)
        else:
            backend = _byte_level_bpe(vocabulary, merges, rules)
    except Exception as error:  # the library raises bare Exception
        raise _damage(where, error) from error
    begins = get("add_bos_token", bool, rules is None or rules.begin)
    ends = get("add_eos_token", bool, False)
    _surround(backend, vocabulary, ids["bos"] if begins else None, ids["eos"] if ends else None)
    end_ids = {ids["eos"], ids["eot"], ids["eom"]}
    end_ids |= {number for number, token in vocabulary.controls() if token in _ENDS}
    variables = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return TokenizerParts(
        backend,
        special_tokens={name: tokens[number] for name, role in variables.items() if (number := ids[role]) is not None},
        eos_token_ids=frozenset(number for number in end_ids if number is not None),
        chat_templates=_chat_templates(file),
    )


def _damage(where: object, reason: object) -> CheckpointError:
    return CheckpointError(f"{where}: its vocabulary is damaged: {reason}")


def _unsupported(where: object, name: str, value: str, known: Iterable[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where}: tokenizer.ggml.{name} {value!r} is not supported in GGUF files; {', '.join(known)} are. Use the "
        "model's Hugging Face folder, which has tokenizer.json"
    )


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
