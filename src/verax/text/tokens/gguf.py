"""Tokenizer of a GGUF file's metadata, with the ids that transformers gives for the model's tokenizer.json.

Byte-level BPE follows the rules that `tokenizer.ggml.pre` names: the rules of the tokenizer.json that llama.cpp's
converter recognised by that name. Gemma 4's BPE is of characters, with bytes for those that are no tokens, and BERT's
WordPiece takes the longest token that a word begins with.

SentencePiece (https://github.com/google/sentencepiece, bpe_model.cc) joins the two neighbours whose token has the best
score, the leftmost pair first. The tokenizers library ranks pairs of tokens instead. Every way to cut a token in two is
a pair here, ranked by the token's score, then by the longer left part. That is the order of the tokenizer.json files
that transformers' converter has made of such models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import read_value
from verax.files import JsonObject

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


_STRIP, _NEVER_STRIP = ("phi-3", "phi3"), frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Parts of the names of models whose special tokens take white space, and tokens that do not, as in llama.cpp."""


class Vocabulary(NamedTuple):
    """Tokens in the order of their ids, and the type of each.

    `strips`: True if special tokens take the white space on their right, as Phi-3's do.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    strips: bool = False

    def numbers(self) -> dict[str, int]:
        """Ids by token."""
        return {token: number for number, token in enumerate(self.tokens)}

    def added_tokens(self) -> list[tokenizers.AddedToken]:
        """Tokens that are found in a text before anything else: control tokens, and those defined by users."""
        return [
            tokenizers.AddedToken(
                token, special=kind == CONTROL, normalized=False, rstrip=self.strips and token not in _NEVER_STRIP
            )
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
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED % ('*', '+')}|{_CASED % ('+', '*')}|\p{{N}}{_REST}"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = rf"{_CASED % ('*', '+')}{_SUFFIX}|{_CASED % ('+', '*')}{_SUFFIX}|\p{{N}}{{1,3}}{_REST}"
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with a case, as deepseek-llm's tokenizer.json lists them."""
_SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
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
_SYMBOLS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
RULES = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": Rules((_WORDS % "",)),
    "seed-coder": Rules((_SEED_CODER,)),
    "minicpm5": Rules((r"\p{N}{1,3}", _WORDS % "+"), whole_words=True),
    "qwen35": Rules((_WORDS_WITH_MARKS,), compose=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Rules((_WORDS % "{1,3}",))),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), Rules((_GPT2,))),
    **dict.fromkeys(("mellum", "a.x-4.0", "trillion", "granite-docling"), Rules((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "deepseek-llm": Rules(("[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _SYMBOLS, r"\s+$", _IDEOGRAPHS, r"\p{N}")),
    "deepseek-coder": Rules(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")),
    "deepseek-v3": Rules((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    "falcon": Rules((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "tekken": Rules((_TEKKEN,), whole_words=True, begin=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Rules((_GPT4O,))),
}

USUAL = {
    "qwen2": ("qwen2", "<|im_start|>"),
    "qwen3": ("qwen2", "<|im_start|>"),
    "llama": ("llama-bpe", "<|begin_of_text|>"),
}
"""Name by architecture, for files without `tokenizer.ggml.pre`, and a token of the vocabulary that has these rules."""


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


def _character_bpe(vocabulary: Vocabulary, merges: Sequence[str], unknown: int) -> tokenizers.Tokenizer:
    """Tokenizer of Gemma 4: merges of characters, and bytes of those that are not tokens. Words are not cut apart."""
    pairs = [(merge[:at], merge[at + 1 :]) for merge in merges for at in [merge.index(" ", 1)]]
    unk = vocabulary.tokens[unknown]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.numbers(), pairs, unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[^\n]+|\n+"), behavior="isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens(vocabulary.added_tokens())
    return backend


def _word_piece(vocabulary: Vocabulary, unknown: int, *, lowercase: bool, strip_accents: bool) -> tokenizers.Tokenizer:
    """Tokenizer of a BERT. A file marks the tokens that begin a word, where vocab.txt marks the others."""
    spelled = [
        token if kind == CONTROL else token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}"
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    vocabulary = vocabulary._replace(tokens=spelled)
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary.numbers(), unk_token=spelled[unknown]))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_tokens(vocabulary.added_tokens())
    return backend


def _sentencepiece_bpe(
    vocabulary: Vocabulary, scores: Sequence[float], unknown: int, *, space_prefix: bool
) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary.

    Args:
        scores: of each token, the best ones first to be merged.
        unknown: id of the token for what has none, in vocabularies without bytes.
        space_prefix: whether a text, and what follows a special token, begins with a space of its own.
    """
    vocabulary = vocabulary._replace(tokens=[_spelled(token) for token in vocabulary.tokens])
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


_KINDS = {"gpt2": "byte-level BPE", "llama": "SentencePiece", "gemma4": "Gemma 4's BPE", "bert": "WordPiece"}

ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *(
            "<end_of_utterance>",
            "<eos>",
            "<turn|>",
            "<|tool_response>",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
            "[e~[",
        ),
    }
)
"""Tokens that end a text, whatever their type in the file and whether or not the file names them: llama.cpp's list."""

FILLS: Mapping[str, Sequence[str]] = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens around the parts of files, by role; where the file names none, it is the first of these texts."""

_FILL_ENDS = ("fim_pad", "fim_rep", "fim_sep")
"""Roles among them whose tokens end a text too."""

_PARTS_OF_MESSAGES = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Tokens of gpt-oss's answers, which stay in the text."""


def _typed(
    vocabulary: Vocabulary, named: Iterable[int | None], fills: Mapping[str, int | None]
) -> tuple[Vocabulary, frozenset[int]]:
    """The vocabulary, with types by llama.cpp's rules, and the ids of the tokens that end a text.

    `vocabulary`: tokens, and types as the file has them. `named`: ids that the file names as ends. `fills`: ids that
    the file names by the roles of `FILLS`.
    """
    ids, types = vocabulary.numbers(), list(vocabulary.types)
    ends = {ids[token] for token in ENDS if token in ids}
    normal = set[str]()
    if {"<|return|>", "<|call|>", "<|end|>"} <= ids.keys() or (
        {"<|flush|>", "<|end|>"} <= ids.keys() and ids.keys() & {"<|call|>", "<|calls|>"}
    ):
        normal.add("<|end|>")  # it ends a message, not the turn
    if ids.keys() & {"<|tool_response>", "<|plamo:eos|>", "<end_of_turn>"}:
        normal.add("</s>")  # a tag of HTML in Gemma's vocabularies
    ends -= {ids[token] for token in normal if token in ids}
    for number in ends:
        types[number] = CONTROL
    for role, texts in FILLS.items():
        number = fills[role]
        if number is None:
            number = next((ids[text] for text in texts if text in ids), None)
            if number is not None and types[number] == NORMAL:
                types[number] = CONTROL
        if number is not None and role in _FILL_ENDS:
            ends.add(number)
    for token in (*_PARTS_OF_MESSAGES, *(normal & {"<|end|>"})):
        if token in ids:
            types[ids[token]] = USER_DEFINED
    named_ends = (number for number in named if number is not None)
    return vocabulary._replace(types=types), frozenset(ends.union(named_ends))


_ROLES = ("bos", "eos", "eot", "eom", "unk", "unknown", "padding", "cls", "seperator", "mask")
_IDLE = ("padding", "cls", "seperator", "mask", *FILLS)
"""Roles whose id counts as not given if it is not a token, as any does that is `_NONE`."""

_NONE = 2**32 - 1
_USUAL_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "cls": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
}
"""Ids in vocabularies whose file does not name them: as in llama.cpp, which spells a separator like that."""


class TokenizerParts(NamedTuple):
    """Parts that a `Tokenizer` is made of."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """Texts by the names that chat templates have for them, such as `eos_token`."""
    eos_token_ids: frozenset[int]
    chat_templates: dict[str, str]


def read_gguf_tokenizer(metadata: Mapping[str, Any], where: object) -> TokenizerParts:
    """Read the tokenizer, special tokens and chat templates of a file's metadata."""
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
    if pre == "gemma4" and kind in ("gpt2", "llama"):  # ollama's converter writes the latter
        kind = "gemma4"
    if kind not in _KINDS:
        raise _unsupported(where, "model", kind, [f"{name} ({form})" for name, form in _KINDS.items()])
    tokens = needed("tokens", list[str])
    if pre == "default":
        known, mark = USUAL.get(str(metadata.get("general.architecture")), (pre, ""))
        pre = known if mark in tokens else pre
    if kind == "gpt2" and pre not in RULES:
        raise _unsupported(where, "pre", pre, RULES)
    rules = RULES[pre] if kind == "gpt2" else None
    name = str(metadata.get("general.name", "")).lower()
    types = get("token_type", list[int], [NORMAL] * len(tokens))
    vocabulary = Vocabulary(tokens, types, strips=any(part in name for part in _STRIP))
    scores: list[float] = needed("scores", list[float]) if kind == "llama" else []
    if not tokens:
        raise _damage(where, "it has no tokens")
    for values, name in ((vocabulary.types, "types"), *([(scores, "scores")] if kind == "llama" else [])):
        if len(values) != len(tokens):
            raise _damage(where, f"{len(values)} {name} for {len(tokens)} tokens")
    usual = {role: number for role, number in _USUAL_IDS.get(kind, {}).items() if number < len(tokens)}
    ids: dict[str, int | None] = {role: get(f"{role}_token_id", int, usual.get(role)) for role in (*_ROLES, *FILLS)}
    for role, number in ids.items():
        if number is not None and not 0 <= number < len(tokens):
            if number != _NONE and role not in _IDLE:
                raise CheckpointError(f"{where}: tokenizer.ggml.{role}_token_id {number} is not a token")
            ids[role] = usual.get(role)
    named = [ids["eos"], ids["eot"], ids["eom"], *get("eos_token_ids", list[int], [])]
    vocabulary, ends = _typed(vocabulary, named, ids)
    merges: list[str] = needed("merges", list[str]) if kind in ("gpt2", "gemma4") else []
    unknown = ids["unknown"] or 0
    try:
        if rules is not None:
            backend = _byte_level_bpe(vocabulary, merges, rules)
        elif kind == "gemma4":
            backend = _character_bpe(vocabulary, merges, unknown)
        elif kind == "bert":
            lowercase = get("normalizer.lowercase", bool, True)
            strip_accents = get("normalizer.strip_accents", bool, lowercase)
            backend = _word_piece(vocabulary, unknown, lowercase=lowercase, strip_accents=strip_accents)
        else:
            prefix = get("add_space_prefix", bool, True)
            backend = _sentencepiece_bpe(vocabulary, scores, unknown, space_prefix=prefix)
    except Exception as error:  # the library raises bare Exception
        raise _damage(where, error) from error
    # llama.cpp begins Gemma 4's texts whatever the file says.
    begins = kind == "gemma4" or get("add_bos_token", bool, rules is None or rules.begin)
    for role in ("bos", "eos"):
        if get(f"add_{role}_token", bool, False) and ids[role] is None:
            raise CheckpointError(f"{where}: tokenizer.ggml.add_{role}_token needs tokenizer.ggml.{role}_token_id")
    begin = ids["bos"] if begins else None
    end = ids["eos"] if get("add_eos_token", bool, False) else None
    if kind == "bert" and get("add_sep_token", bool, True) and ids["seperator"] is not None:
        end = ids["seperator"]  # of others, it is between a query and a document only
    _surround(backend, vocabulary, begin, end)
    variables = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return TokenizerParts(
        backend,
        special_tokens={name: tokens[number] for name, role in variables.items() if (number := ids[role]) is not None},
        eos_token_ids=ends,
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
    """The default template and named ones, whether `tokenizer.chat_templates` lists them or not."""
    prefix = "tokenizer.chat_template"
    keys = {
        "default": prefix,
        **{key.removeprefix(f"{prefix}."): key for key in metadata if key.startswith(f"{prefix}.")},
    }
    return {name: text for name, key in keys.items() if (text := read_value(metadata, key, str, None))}
