"""Text to token ids and back, by the checkpoint's own tokenizer.json; and back while tokens still arrive.

While tokens arrive, text that was returned never changes, and stop strings are found with their last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from verax.checkpoint import Checkpoint
from verax.checkpoint.resolve import read_tokenizer
from verax.errors import CheckpointError, InvalidParameterError, TemplateError, UnsupportedModelError
from verax.fields import Count, file_of, read_value
from verax.files import read_json
from verax.sampling_fields import MAX_LOGIT_BIAS
from verax.text.tokens import chat_template
from verax.text.tokens.gguf import RULES, read_gguf_tokenizer

_TokenIds = Annotated[Count | tuple[Count, ...], msgspec.Meta(description="a token id, or a list of them")]

_TOKEN_FIELDS = ("single_word", "lstrip", "rstrip", "normalized", "special")


_NOT_VARIABLES = frozenset(
    (
        *("chat_template", "chat_template_kwargs", "chat_template_content_format", "mm_processor_kwargs"),
        *("tokenization_kwargs", "tokenizer_kwargs", "truncation", "max_length"),
    )
)
"""Arguments of vLLM's and transformers' functions of this name that are not variables of templates."""

_HARMONY_ENDS = ("<|return|>", "<|call|>")
"""Tokens that end an answer in a vocabulary that has both, gpt-oss's, whichever of them its files name."""


class Tokenizer:
    """A fast tokenizer with the special tokens and the chat template of its checkpoint."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_templates: Mapping[str, str] | None = None,
        has_types: bool = True,
        cuts_beginning: bool = False,
        rows: int | None = None,
    ):
        self._backend = backend
        self._rows = rows
        self._has_types = has_types
        self._cuts_beginning = cuts_beginning
        self._special_tokens = dict(special_tokens or {})
        self._chat_templates = dict(chat_templates or {})
        self.eos_token_ids = eos_token_ids
        self.special_token_ids = frozenset(
            number for number, token in backend.get_added_tokens_decoder().items() if token.special
        )
        """Tokens that `decode` leaves out unless told otherwise."""
        self.byte_tokens = _byte_tokens(backend)
        """The byte of each token that stands for one, such as `<0x0A>`; empty without a byte-fallback decoder."""
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        """True if a text is the bytes of its tokens one after the other, as in GPT-2."""
        self._whole_texts: dict[int, str | None] = {}

    @classmethod
    def from_checkpoint(cls, opened: Checkpoint) -> Tokenizer:
        """The tokenizer of a folder, or of a GGUF file's metadata."""
        if not opened.metadata:
            return cls.from_folder(opened.folder)
        parts = read_gguf_tokenizer(opened.metadata, opened.folder)
        tokens, rows = parts.backend.get_vocab_size(), opened.config["vocab_size"]
        if tokens > rows:
            raise CheckpointError(f"{opened.folder}: its vocabulary has {tokens} tokens, its embeddings {rows} rows")
        return cls(
            parts.backend,
            special_tokens=parts.special_tokens,
            eos_token_ids=parts.eos_token_ids,
            chat_templates=parts.chat_templates,
        )

    @classmethod
    def from_folder(cls, folder: str | Path, *, encodes: bool = False, rows: int | None = None) -> Tokenizer:
        """Read tokenizer.json, and what tokenizer_config.json, generation_config.json and chat_template.jinja add.

        `encodes`: True for a sentence encoder, whose texts end as `add_eos_token` says. `rows`: rows of the model's
        embeddings, which may be fewer than the tokens; batches with a token beyond them are refused.
        """
        folder = Path(folder)
        backend = read_tokenizer(folder)
        config = read_json(folder / "tokenizer_config.json", optional=True)
        side = (backend.truncation or {}).get("direction", "right")
        side = read_value(config, "truncation_side", Literal["left", "right"], side)
        # Left there by training or fine-tuning; transformers turns them off in each call as well.
        backend.no_truncation()
        backend.no_padding()
        inputs = _configure(backend, config, folder)
        special_map = read_json(folder / "special_tokens_map.json", optional=True)
        named = {**special_map, **config} if "added_tokens_decoder" in config else {**config, **special_map}
        special = _special_tokens(named)
        _add_missing_tokens(backend, named, special, folder)
        ended = config.get("tokenizer_class") in _ENDED or config.get("auto_map")  # gte-Qwen2's own code
        if encodes and ended and read_value(config, "add_eos_token", bool, False):
            _append_end(backend, special.get("eos_token"))
        ends = {backend.token_to_id(special["eos_token"])} if "eos_token" in special else set()
        for name in ("config.json", "generation_config.json"):
            ends |= eos_token_ids(read_json(folder / name, optional=True))
        harmony = {backend.token_to_id(token) for token in _HARMONY_ENDS}
        ends |= set[int | None]() if None in harmony else harmony
        return cls(
            backend,
            special_tokens=special,
            eos_token_ids=frozenset(end for end in ends if end is not None),
            chat_templates=_chat_templates(folder, config),
            has_types="token_type_ids" in inputs,
            cuts_beginning=side == "left",
            rows=rows,
        )

    def with_chat_template(self, template: str) -> Tokenizer:
        """A copy of the tokenizer with this Jinja text as its only chat template."""
        return Tokenizer(
            self._backend,
            special_tokens=self._special_tokens,
            eos_token_ids=self.eos_token_ids,
            chat_templates={"default": template},
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        """The token that the tokenizer itself names as the end of a text; None if it names none."""
        token = self._special_tokens.get("eos_token")
        return None if token is None else self.token_id(token)

    @cached_property
    def max_token_length(self) -> int:
        """Characters of the longest token, as the vocabulary spells it."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def to_json(self, *, max_length: int | None = None) -> str:
        """Text of a tokenizer.json, with the tokens that were added to it; with a limit, it cuts texts as we do."""
        text = self._backend.to_str()
        if max_length is None:
            return text
        backend = tokenizers.Tokenizer.from_str(text)
        backend.enable_truncation(max_length, direction="left" if self._cuts_beginning else "right")
        return backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` for what the model expects around it (a beginning token, say)."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], *, max_length: int | None = None, add_special_tokens: bool = True
    ) -> list[tuple[list[int], int]]:
        """Token ids of each text, special ones included, and the number of tokens that were cut from its end.

        `max_length`: tokens that are kept of a text, special ones included; None for all. `add_special_tokens`: as in
        `encode`.
        """
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        special = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        return [(ids, left_out) for ids, _, left_out in self._cut(encodings, max_length, special, 1)]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, max_length: int
    ) -> list[tuple[list[int], list[int], int]]:
        """Token ids of each pair of texts, special ones included, their types, and the number of tokens left out.

        The longer text of a pair loses its end first (transformers' `longest_first`), or its beginning where
        `truncation_side` of tokenizer_config.json says so. Types are 0 where `model_input_names` lacks them.
        """
        special = self._backend.num_special_tokens_to_add(True)
        return self._cut(self._backend.encode_batch(list(pairs)), max_length, special, 2)

    def _cut(
        self, encodings: Sequence[tokenizers.Encoding], max_length: int | None, special: int, texts: int
    ) -> list[tuple[list[int], list[int], int]]:
        if max_length is not None and max_length < special + texts:
            raise InvalidParameterError(
                f"max_length: {max_length} tokens leave none for each text next to {special} special ones"
            )
        cuts = [_cut(encoded, max_length, special, self._cuts_beginning) for encoded in encodings]
        if self._rows is not None and (beyond := {i for ids, *_ in cuts for i in ids if i >= self._rows}):
            names = ", ".join(repr(self.token(token_id)) for token_id in sorted(beyond))
            raise InvalidParameterError(f"texts: the model has embeddings of {self._rows} tokens, none of {names}")
        return cuts if self._has_types else [(ids, [0] * len(ids), left_out) for ids, _, left_out in cuts]

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = (), skip_special_tokens: bool = True) -> str:
        """The text of token ids that follow `after`; bytes that are not UTF-8 become U+FFFD.

        At the beginning of a text, sentencepiece's decoders strip a space.
        """
        before = self.decoded_before(after, skip_special_tokens=skip_special_tokens)
        decode = partial(self._backend.decode, skip_special_tokens=skip_special_tokens)
        return decode([*before, *ids])[len(decode(before)) :] if before else decode(list(ids))

    def decoded_before(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[int]:
        """The last of some tokens: as many of those that have a text as the text of the next one may depend on."""
        if self.is_byte_level or not ids:
            return []
        special = self.special_token_ids if skip_special_tokens else ()
        decoded = (token for token in reversed(ids) if token not in special and self.token(token) is not None)
        before = list(islice(decoded, _WINDOW))[::-1]
        # Bytes that are not a whole character would be shown again, with those that follow.
        whole = not self._backend.decode(before, skip_special_tokens=skip_special_tokens).endswith(_UNDECIDED)
        return before if whole else []

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Special tokens by their roles, such as `mask_token`."""
        return self._special_tokens

    def with_special_token(self, token: str) -> Tokenizer:
        """The tokenizer, which from now on finds a token of its vocabulary in texts as it is spelled."""
        self._backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True)])
        return self

    def with_lower_case(self) -> Tokenizer:
        """The tokenizer, which from now on puts texts in lower case first, but for tokens that it finds in them."""
        given = self._backend.normalizer
        steps = [normalizers.Lowercase(), *([] if given is None else [given])]
        self._backend.normalizer = normalizers.Sequence(steps)
        return self

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None if there is none."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None if there is none."""
        return self._backend.token_to_id(token)

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja text of each chat template by its name, such as "default" and "tool_use"."""
        return self._chat_templates

    def whole_text(self, token_id: int) -> str | None:
        """Text that a token adds after whole characters, whatever its neighbours are; None if they matter."""
        if not self.is_byte_level:
            return None
        if token_id not in self._whole_texts:
            text = "" if self.token(token_id) is None else self.decode([token_id], skip_special_tokens=False)
            self._whole_texts[token_id] = None if "\ufffd" in text else text
        return self._whole_texts[token_id]

    @property
    def has_chat_template(self) -> bool:
        """True if conversations can be rendered."""
        return bool(self._chat_templates)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation of `{"role": ..., "content": ...}` messages, to be encoded without specials.

        With `continue_final_message` the prompt ends inside of the last message, and nothing announces an answer.

        Raises:
            InvalidParameterError: for messages that no template could render, and options of other libraries.
            TemplateError: without a template, or if it refuses the messages.
        """
        if not self._chat_templates:
            raise TemplateError(
                "this checkpoint has no chat template: give a prompt as text instead of messages, or save the model's "
                "template as chat_template.jinja next to tokenizer.json, or give --chat-template"
            )
        if wrong := sorted(_NOT_VARIABLES.intersection(variables)):
            raise InvalidParameterError(
                f"{wrong[0]}: it is not implemented; variables of the checkpoint's chat template are arguments "
                "themselves, such as enable_thinking=False"
            )
        listed = isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)
        if tools is not None and not listed:
            raise InvalidParameterError(
                'tools: expected a list of {"type": "function", "function": {"name": ..., "parameters": {...}}}, '
                f"got {tools!r:.100}"
            )
        name = "tool_use" if tools is not None and "tool_use" in self._chat_templates else "default"
        template = self._chat_templates.get(name)
        if template is None:
            raise TemplateError(
                f"this checkpoint has no default chat template, only {sorted(self._chat_templates)}: save the one to "
                "use as chat_template.jinja next to tokenizer.json"
            )
        variables = {
            **self._special_tokens,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **variables,
        }
        return chat_template.render(template, messages, continue_final_message=continue_final_message, **variables)


def eos_token_ids(*configs: Mapping[str, Any]) -> frozenset[int]:
    """Tokens that end a text. `configs`: contents of configuration files: config.json, generation_config.json.

    A model with a vision tower may have them in its `text_config`.
    """
    parts = (part for config in configs for part in (config, read_value(config, "text_config", dict, {})))
    listed = (read_value(part, "eos_token_id", _TokenIds, ()) for part in parts)
    return frozenset(token for ids in listed for token in ((ids,) if isinstance(ids, int) else ids))


def suppressed_token_ids(config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Tokens of the vocabulary that a generation_config.json keeps out of every answer."""
    listed = {token for token in read_value(config, "suppress_tokens", list[int], []) if 0 <= token < vocab_size}
    if len(listed) > MAX_LOGIT_BIAS:
        raise UnsupportedModelError(
            f"{file_of(config)}: suppress_tokens: expected at most {MAX_LOGIT_BIAS} tokens, got {len(listed)}"
        )
    return tuple(sorted(listed))


def _byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    numbers = {name: backend.token_to_id(name) for name in names}
    # A decoder without byte fallback shows such a token as it is spelt.
    return {
        number: names[name]
        for name, number in numbers.items()
        if number is not None and backend.decode([number], skip_special_tokens=False) != name
    }


def _special_tokens(named: Mapping[str, Any]) -> dict[str, str]:
    """Variables of chat templates: bos_token, eos_token, ... and the model's own ones, such as image_token."""
    extra = named.get("extra_special_tokens")
    values = {**named, **(extra if isinstance(extra, dict) else {})}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: text for key, text in contents.items() if key.endswith("_token") and isinstance(text, str)}


_BERT = ("BertTokenizer", "ElectraTokenizer", "MobileBertTokenizer", "ConvBertTokenizer", "LayoutLMTokenizer")
"""Classes whose settings in tokenizer_config.json replace tokenizer.json's, and whose inputs have types."""

_GPT = ("GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer")
"""Classes of byte-level BPE that put a space before a text if `add_prefix_space` says so."""


_BERT_NORMALIZED = (*_BERT, "DistilBertTokenizer", "MPNetTokenizer")
"""Classes that normalise as tokenizer_config.json says."""

_ENDED = ("LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast")
"""Classes that read `add_eos_token` up to transformers 4."""

_CLASS_OF = {**dict.fromkeys(("bert", "distilbert", "nomic_bert", "electra"), _BERT[0]), "mpnet": "MPNetTokenizer"}
"""Class of models whose files name none, by their `model_type`."""

_UNCHANGED = ("modernbert", "mistral", "ministral", "mistral3", "ministral3", "phi3", "olmo2", "olmo3", "granite")
_UNCHANGED += ("granitemoehybrid",)
"""Kinds of models whose tokenizer.json is taken unchanged, whichever class their files name."""


def _configure(backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """Apply what tokenizer_config.json changes in tokenizer.json, as transformers does; names of the model's inputs."""
    model_config = read_json(folder / "config.json", optional=True)
    model = read_value(model_config, "model_type", str, "")
    kind = read_value(config, "tokenizer_class", str, None)
    kind = kind or read_value(model_config, "tokenizer_class", str, _CLASS_OF.get(model, ""))
    kind = "" if model in _UNCHANGED else kind.removesuffix("Fast")
    names = ("input_ids", "attention_mask", *(("token_type_ids",) if kind in _BERT else ()))
    if kind in _BERT_NORMALIZED and isinstance(backend.normalizer, normalizers.BertNormalizer):
        backend.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=read_value(config, "tokenize_chinese_chars", bool, True),
            strip_accents=read_value(config, "strip_accents", bool, None),
            lowercase=read_value(config, "do_lower_case", bool, True),
        )
    prefix = read_value(config, "add_prefix_space", bool, None)
    legacy = read_value(config, "legacy", bool, False)
    before: Any = backend.pre_tokenizer
    parts: list[Any] = [before] if not isinstance(before, pre_tokenizers.Sequence) else [*cast(Any, before)]
    byte_level = [part for part in parts if isinstance(part, pre_tokenizers.ByteLevel)]
    if kind in _GPT and prefix is not None:
        for part in byte_level:
            part.add_prefix_space = prefix
    elif kind in ("XLMRobertaTokenizer", "CamembertTokenizer") and prefix is not None:
        for part in parts:
            if isinstance(part, pre_tokenizers.Metaspace):
                part.prepend_scheme = "always" if prefix else "never"
    elif kind == "LlamaTokenizer" and not byte_level:
        scheme = "never" if prefix is False else "always" if legacy else "first"
        backend.normalizer = None  # of older files, which put a space after each special token
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        strip = [] if prefix is False else [decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    if read_value(config, "fix_mistral_regex", bool, False) and _has_old_words(backend, model_config):
        words = pre_tokenizers.Split(tokenizers.Regex(RULES["tekken"].patterns[0]), "isolated")
        if isinstance(before, pre_tokenizers.Metaspace):
            parts = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        # The first of several parts cuts words.
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, *(parts[1:] or parts)])
    backend.encode_special_tokens = read_value(config, "split_special_tokens", bool, False)
    return read_value(config, "model_input_names", tuple[str, ...], names)


def _has_old_words(backend: tokenizers.Tokenizer, model_config: Mapping[str, Any]) -> bool:
    """True for a tokenizer of Mistral's whose words `fix_mistral_regex` corrects: of before transformers 5."""
    mistral = model_config.get("model_type") in ("mistral", "mistral3", "ministral")
    old = read_value(model_config, "transformers_version", str, "4.").startswith("4.")
    return mistral and old and backend.get_vocab_size() > 100_000 and backend.pre_tokenizer is not None


def _append_end(backend: tokenizers.Tokenizer, end: str | None) -> None:
    """Let a single text end with a token, after what tokenizer.json puts around it, as transformers 4 did.

    e5-mistral and gte-Qwen2 were trained so and are pooled there, but their tokenizer.json has no end.
    """
    around = backend.encode("").tokens
    if end is not None and around[-1:] != [end]:
        names = {name: backend.token_to_id(name) for name in (*around, end)}
        backend.post_processor = processors.TemplateProcessing(
            single=[*around, "$A", end], special_tokens=[*names.items()]
        )


def _cut(
    encoded: tokenizers.Encoding, max_length: int | None, special: int, beginning: bool
) -> tuple[list[int], list[int], int]:
    """Token ids and types of one or two texts with at most `max_length` tokens, and the number of tokens left out.

    As in the library's own truncation, a text of less than half of the room stays whole next to a longer one.
    """
    ids, types = encoded.ids, encoded.type_ids
    if max_length is None or len(ids) <= max_length:
        return ids, types, 0
    texts, room = encoded.sequence_ids, max_length - special  # 0, 1, and None for special tokens
    first, second = texts.count(0), texts.count(1)
    short = min(first, second, room // 2)
    left = [short, room - short] if first <= second else [room - short, short]
    kept: list[int] = []
    for place in reversed(range(len(texts))) if beginning else range(len(texts)):
        if (text := texts[place]) is not None:
            left[text] -= 1
        if text is None or left[text] >= 0:
            kept.append(place)
    kept.sort()
    return [ids[i] for i in kept], [types[i] for i in kept], first + second - room


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, named: Mapping[str, Any], special: Mapping[str, str], folder: Path
) -> None:
    """Tokens that only tokenizer_config.json or added_tokens.json knows, or knows to be special; as in transformers."""

    def added(token: Any, **flags: bool) -> tokenizers.AddedToken:
        token = token if isinstance(token, dict) else {"content": token}
        return tokenizers.AddedToken(
            token["content"], **{key: token[key] for key in _TOKEN_FIELDS if key in token} | flags
        )

    try:
        extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
        extra = list(extra.values()) if isinstance(extra, dict) else extra
        specials = [added(token, special=True) for token in [*(named.get(*item) for item in special.items()), *extra]]
        if "added_tokens_decoder" in named:
            listed = sorted((named["added_tokens_decoder"] or {}).items(), key=lambda item: int(item[0]))
            tokens = [added(token) for _, token in listed]
        else:
            names = {token.content for token in specials}
            numbers = read_json(folder / "added_tokens.json", optional=True)
            tokens = [
                added(token, special=token in names, normalized=token not in names)
                for token in sorted(numbers, key=numbers.__getitem__)
            ]
        known = {token.content for token in [*backend.get_added_tokens_decoder().values(), *tokens]}
        backend.add_tokens([*tokens, *(token for token in specials if token.content not in known)])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: its list of tokens, or added_tokens.json, is damaged: {error!r}"
        ) from error


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: those in files, else tokenizer_config.json's one, or its list of named ones.

    A model with a vision tower may have the template in its processor's chat_template.json alone.
    """
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / "chat_template.jinja", **{path.stem: path for path in more}}
    templates = {name: path.read_text(encoding="utf-8-sig") for name, path in files.items() if path.is_file()}
    if templates:
        return templates
    of_processor = read_json(folder / "chat_template.json", optional=True)
    given = config.get("chat_template") or read_value(of_processor, "chat_template", str, None)
    try:
        if isinstance(given, list):
            return {entry["name"]: entry["template"] for entry in given}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template: expected entries with name and template, got {given!r}"
        ) from error
    return {"default": given} if given else {}


_UNDECIDED = "\ufffd"
"""Character that the decoder gives for bytes that are not a whole character: an incomplete one, or invalid bytes."""

_WINDOW = 8
"""Number of tokens before a token that can change its text.

An incomplete character has at most 3 bytes, hence 3 tokens. As many tokens before them keep the end of the text right
if the window begins inside a character. A decoder that strips the leading space needs one token."""


class IncrementalDetokenizer:
    """Text of a growing list of tokens.

    The text of a token may depend on the tokens before it (leading spaces), and on those after it (a character of
    several tokens). Each new token is therefore decoded in a window of the last few, and undecided text is held back.
    Decoding all tokens at once gives the same text. The cost of a token does not grow with their number. A
    byte-level decoder needs no window after whole characters: each of its tokens is decoded once only. Undecided are

    - a last U+FFFD: the bytes may be the beginning of a character;
    - a run of byte tokens (`<0x0A>`): with one invalid byte, every byte of the run becomes U+FFFD, earlier ones too.

    A stop string in such a run is found when its last byte is added. A special token that is left out of the text ends
    it if its name is a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        after: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ):
        """Begin a text, or go on after the tokens `after`, as in `Tokenizer.decode`."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._window = tokenizer.decoded_before(after, skip_special_tokens=skip_special_tokens)
        """Last visible tokens: at most twice `_WINDOW`, and a whole run of byte tokens after them."""
        self._decided = len(self._decode())
        """Number of the window's characters that are in `text` or before it."""
        self._run = bytearray()
        """Bytes of the run of byte tokens at the end of the window."""
        self._count = 0
        self._exempt = 0
        """Number of characters of the first `min_tokens` tokens, in which no stop string counts."""
        self._shown = 0
        self._stopped = False
        self.text = ""
        """Decided text so far, cut at a stop string if one was found."""

    def append(self, token: int) -> str | None:
        """Add a token; return the stop string that the text now contains, if any.

        Raises:
            ValueError: if a stop string has ended the text already.
        """
        if self._stopped:
            raise ValueError("a text that has ended at a stop string takes no more tokens")
        self._count += 1
        if self._skip and token in self._tokenizer.special_token_ids:
            name = self._tokenizer.token(token) or ""
            stop = self._extend(self._decode()[self._decided :] + name, only_stop=True) if name in self._stop else None
        elif (text := None if self._window else self._tokenizer.whole_text(token)) is not None:
            stop = self._extend(text)
        else:
            stop = None if self._tokenizer.token(token) is None else self._append(token)
        if self._count == self._min_tokens:
            self._exempt = len(self.text) + len(self._run.decode(errors="ignore"))
        return stop

    def _append(self, token: int) -> str | None:
        self._window.append(token)
        byte = self._tokenizer.byte_tokens.get(token)
        if byte is not None:
            self._run.append(byte)
            return self._stop_in_run()
        self._run.clear()
        text = self._decode()
        decoded = _without_undecided(text)
        piece = decoded[self._decided :]
        self._decided = len(decoded)
        if self._tokenizer.is_byte_level and len(decoded) == len(text):
            self._window, self._decided = [], 0
        elif len(self._window) > 2 * _WINDOW:
            self._window = self._window[-_WINDOW:]
            self._decided = len(_without_undecided(self._decode()))
        return self._extend(piece)

    def delta(self) -> str:
        """Text that was not returned before and cannot be the beginning of a stop string."""
        safe = len(self.text) if self._stopped or not self._stop else len(self.text) - self._held_back()
        piece = self.text[self._shown : safe]
        self._shown = max(self._shown, safe)
        return piece

    def end(self) -> None:
        """Add the undecided text, after the last token. What was shown of the text stays."""
        if not self._stopped:
            decoded = self._decode()
            self.text += decoded[self._decided :]
            self._decided = len(decoded)

    def finish(self) -> str:
        """End the text; return the rest that `delta` has not returned, undecided text included."""
        self.end()
        piece = self.text[self._shown :]
        self._shown = len(self.text)
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip) if self._window else ""

    def _stop_in_run(self) -> str | None:
        """Stop string that the run of byte tokens completes, if any. Without one the run stays undecided."""
        if not self._stop or self._count <= self._min_tokens:
            return None
        try:
            spelled = self._run.decode()
        except UnicodeDecodeError:
            return None
        if not any(spelled.endswith(stop[-1]) for stop in self._stop):
            return None
        return self._extend(self._decode()[self._decided :], only_stop=True)

    def _extend(self, piece: str, *, only_stop: bool = False) -> str | None:
        """Add decided text; return the first stop string, if any. With `only_stop`, add nothing without one."""
        if not self._stop:
            self.text += piece
            return None
        text = self.text + piece
        stops: list[tuple[int, str]] = []
        if self._count > self._min_tokens:
            searched = max(len(self.text), self._exempt)
            for stop in self._stop:
                at = text.find(stop, max(0, searched - len(stop) + 1))
                if at >= 0:
                    stops.append((at, stop))
        if not stops:
            self.text = self.text if only_stop else text
            return None
        at, stop = min(stops)
        self.text = text[: at + len(stop) if self._include_stop else at]
        self._stopped = True
        return stop

    def _held_back(self) -> int:
        """Number of characters of the longest suffix of the text that is a prefix of a stop string."""
        held = 0
        for stop in self._stop:
            at = self.text.find(stop[0], max(0, len(self.text) - len(stop) + 1))
            while 0 <= at < len(self.text) - held:
                if stop.startswith(self.text[at:]):
                    held = len(self.text) - at
                at = self.text.find(stop[0], at + 1)
        return held


def _without_undecided(text: str) -> str:
    return text.removesuffix(_UNDECIDED)
