"""Sampling parameters of a request, and the form of its answer: vLLM's names and meanings, checked at construction.

`verax.sampling_fields` declares the parameters; here are a checkpoint's recommendations and `StructuredOutputs`, which
is checked without a grammar library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import partial
from typing import Any

import msgspec

from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.fields import Size, read_value
from verax.files import JsonObject
from verax.options import documented, option, options_of
from verax.sampling_fields import SamplingFields

_LACKING: Mapping[str, Any] = {
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "sequence_bias", "forced_eos_token_id"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "dola_layers"), None),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("penalty_alpha", "token_healing"), 0),
    **dict.fromkeys(("num_beams", "num_return_sequences", "guidance_scale", "encoder_repetition_penalty"), 1),
}
"""Settings of a generation_config.json that change what transformers generates and that verax lacks, and the value of
each that changes nothing, as None does."""

_LACKING_IN_DRAWS: Mapping[str, Any] = {
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "top_h", "mirostat", "xtc_probability"), 0),
    "typical_p": 1,
}
"""Settings that change drawn tokens alone, some of GGUF files, with their neutral values."""

CHAT_SAMPLING = {"temperature": 0.7, "top_p": 0.95}
"""Sampling of a conversation with a model that recommends none: at temperature 1 small models answer with noise."""


@documented
@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingFields):
    """Sampling parameters of one request; names and meanings are vLLM's.

    Raises:
        InvalidParameterError: for a value out of range; the message begins with the field's name.
    """

    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = option(
        None, "Form that the answer must have, such as a JSON schema. A `StructuredOutputs` after construction."
    )

    def __post_init__(self) -> None:
        SamplingFields.__post_init__(self)  # with slots, super() refers to another class
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputs.from_value(self.structured_outputs))
            if self.ignore_eos:
                raise InvalidParameterError("ignore_eos: structured_outputs ends an answer with its end of text")

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be pickled or copied.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return partial(SamplingParams, **{**values, "logit_bias": dict(self.logit_bias or {})}), ()

    @property
    def form(self) -> StructuredOutputs | None:
        """`structured_outputs` as a record."""
        assert self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputs)
        return self.structured_outputs

    @staticmethod
    def for_chat(config: Mapping[str, Any]) -> dict[str, float]:
        """Sampling that conversations in a terminal and on the page begin with, by parameter.

        It is empty where a generation_config.json recommends sampling. Its `do_sample` alone does too: transformers
        leaves values out that are its defaults.
        """
        named = ("do_sample", "temperature", "top_p", "top_k", "min_p")
        return {} if any(config.get(name) is not None for name in named) else dict(CHAT_SAMPLING)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """Parameters that a generation_config.json recommends, by transformers' names and meanings.

        `do_sample: false` is greedy, `stop_strings` are `stop`, and `max_new_tokens` is `max_tokens`.

        Raises:
            CheckpointError: for a value of the file that is out of range, with its name.
            UnsupportedModelError: for a setting that changes the answers and is not implemented.
        """
        recommended = [name for name, declared in options_of(cls).items() if declared.recommended]
        values = {name: config[name] for name in recommended if config.get(name) is not None}
        values["stop"] = config.get("stop_strings")
        config = JsonObject(config, getattr(config, "where", "generation_config.json"))
        if config.get("max_new_tokens") is not None:
            values["max_tokens"] = read_value(config, "max_new_tokens", Size)
        if not (draws := read_value(config, "do_sample", bool, True)):
            values["temperature"] = 0.0
        for name, inert in {**_LACKING, **(_LACKING_IN_DRAWS if draws else {})}.items():
            if (value := config.get(name)) not in (None, inert, [], {}):
                raise UnsupportedModelError(
                    f"{config.where}: {name}: {value!r} is not implemented: remove it there, or give SamplingParams "
                    "to `LLM.generate`"
                )
        try:
            return cls(**values)
        except InvalidParameterError as error:
            raise CheckpointError(f"{config.where}: {error}") from error


MAX_BYTES = 64 << 10
"""Longest schema, expression, grammar or list of choices. Compiling takes time and memory that grow with it."""

MAX_DEPTH = 32
"""Deepest nesting of a schema: the library's parser recurses."""

MAX_PROPERTIES = 500
"""Most properties of a schema in all: thousands of optional ones take seconds to compile."""

MAX_ALTERNATIVES = 1000
"""Most choices, and most `enum` values of a schema in all."""

MAX_MULTIPLE = 10_000
"""Largest product of a schema's `multipleOf`, without decimal point: the automaton has a state for each remainder."""

_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_PROPERTY_KEYS = ("properties", "patternProperties")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Form of an answer: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.

    Raises:
        InvalidParameterError: for none or several of them, or a value that is damaged or too large. The message begins
            with `structured_outputs:` and the field's name.
    """

    json: str | Mapping[str, Any] | None = None
    """JSON schema, a dictionary or its JSON text; text after construction."""
    regex: str | None = None
    """Regular expression, in the syntax of Rust's `regex`, that the whole answer matches."""
    choice: Sequence[str] | None = None
    """Texts of which the answer is one; a tuple after construction."""
    grammar: str | None = None
    """Context-free grammar in the notation of Lark or of llama.cpp (GBNF)."""
    json_object: bool = False
    """Any JSON object."""
    after: str | None = None
    """Text that the answer contains before the form applies, such as `"</think>"`; None to apply it from the start."""

    def __post_init__(self) -> None:
        if self.json_object is None:
            object.__setattr__(self, "json_object", False)
        if not isinstance(self.json_object, bool):
            raise _error("json_object", f"expected True or False, got {self.json_object!r}")
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidParameterError(
                f"structured_outputs: expected exactly one of {', '.join(_FORMS)}, got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _checked_schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choice(self.choice))
        for name in ("regex", "grammar", "after"):
            if (value := getattr(self, name)) is not None:
                _check_text(name, value)

    @property
    def form(self) -> str:
        """Name of the field that is given."""
        return next(name for name in _FORMS if getattr(self, name) not in (None, False))

    @classmethod
    def from_value(cls, value: StructuredOutputs | Mapping[str, Any]) -> StructuredOutputs:
        """The record itself, or one made of a dictionary of its fields.

        Raises:
            InvalidParameterError: for anything else, or an unknown field.
        """
        if isinstance(value, StructuredOutputs):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            raise InvalidParameterError(
                f"structured_outputs: expected StructuredOutputs, or a dictionary of its fields, got {value!r}"
            )
        if unknown := [name for name in value if name not in names]:
            raise InvalidParameterError(
                f"structured_outputs: no such field: {unknown[0]!r}; the fields are {', '.join(names)}"
            )
        return cls(**value)


def _checked_schema(given: Any) -> str:
    """The schema as JSON text."""
    if isinstance(given, str):
        _check_text("json", given)
        try:
            schema = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _error("json", f"it is not JSON text: {error}") from error
    else:
        schema = given
    if not isinstance(schema, Mapping):
        raise _error("json", f"expected a JSON schema, which is an object, got {type(schema).__name__}")
    try:
        text = msgspec.json.encode(dict(schema)).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _error("json", f"it cannot be written as JSON: {error}") from error
    _check_text("json", text)
    _check_schema(schema)
    return text


def _check_schema(schema: Mapping[str, Any]) -> None:
    """Refuse schemas that would take too long to compile. Nothing is read from outside of the schema."""
    if "x-guidance" in schema:
        raise _error("json", "x-guidance: options of the grammar library are not taken from a schema")
    properties = alternatives = 0
    multiples: set[int] = set()
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                properties += sum(len(value[key]) for key in _PROPERTY_KEYS if isinstance(value.get(key), Mapping))
                alternatives += len(value["enum"]) if isinstance(value.get("enum"), list) else 0
                multiples.add(_multiple(value.get("multipleOf")))
                below += value.values()
            elif isinstance(value, (list, tuple)):
                below += value
        level = below
        if not level:
            break
    else:
        raise _error("json", f"it is nested deeper than {MAX_DEPTH} levels")
    if properties > MAX_PROPERTIES:
        raise _error("json", f"expected at most {MAX_PROPERTIES} properties, got {properties}")
    if alternatives > MAX_ALTERNATIVES:
        raise _error("json", f"expected at most {MAX_ALTERNATIVES} enum values, got {alternatives}")
    if math.prod(multiples) > MAX_MULTIPLE:
        raise _error("json", f"multipleOf: expected values whose product is at most {MAX_MULTIPLE}")


def _multiple(value: Any) -> int:
    """Digits of a `multipleOf` as a whole number: 25 for 0.25."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return 1
    number = Decimal(repr(value)).normalize()
    exponent = int(number.as_tuple().exponent)
    return max(1, int(abs(number.scaleb(max(0, -exponent)))))


def _checked_choice(given: Any) -> tuple[str, ...]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise _error("choice", f"expected a list of texts, got {given!r}")
    choice = tuple(given)
    if not 1 <= len(choice) <= MAX_ALTERNATIVES:
        raise _error("choice", f"expected 1 to {MAX_ALTERNATIVES} texts, got {len(choice)}")
    for text in choice:
        _check_text("choice", text)
    if sum(len(text) for text in choice) > MAX_BYTES:
        raise _error("choice", f"expected at most {MAX_BYTES} characters in all")
    return choice


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise _error(name, f"expected a text that is not empty, got {text!r}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _error(name, f"it is not Unicode text: {error}") from error
    if size > MAX_BYTES:
        raise _error(name, f"expected at most {MAX_BYTES} bytes, got {size}")


def _error(name: str, what: str) -> InvalidParameterError:
    return InvalidParameterError(f"structured_outputs: {name}: {what}")
