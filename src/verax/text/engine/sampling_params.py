"""Sampling parameters of a request: vLLM's names and meanings, checked when they are made."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeGuard

from verax.errors import CheckpointError, InvalidParameterError
from verax.fields import read_value
from verax.text.features.structured_outputs import StructuredOutputs

__all__ = ["MAX_LOGIT_BIAS", "MAX_LOGPROBS", "MAX_STOP_TOKEN_IDS", "SamplingParams"]

MAX_LOGPROBS = 20
"""Best tokens that a step reports: OpenAI's limit on `top_logprobs`."""

MAX_LOGIT_BIAS = 300
"""Entries of `logit_bias` that a slot holds on the device: OpenAI's limit."""

MAX_STOP_TOKEN_IDS = 64
"""Stop tokens that a slot can hold back for `min_tokens`."""

_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; names and meanings are vLLM's.

    Raises:
        InvalidParameterError: for a value out of range; the message begins with the field's name.
    """

    n: int = 1
    """Continuations of the prompt, each with a seed of its own."""
    temperature: float = 1.0
    """Divides the scores; 0 is greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 (or -1) for all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    presence_penalty: float = 0.0
    """Subtracted from the score of a token that was generated before."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that a token was generated before."""
    repetition_penalty: float = 1.0
    """Divides the positive scores, and multiplies the negative ones, of tokens in prompt or answer."""
    seed: int | None = None
    """Makes the tokens repeatable; drawn from the engine's seed if None."""
    max_tokens: int | None = 16
    """Most tokens to generate; None for as many as the context holds."""
    min_tokens: int = 0
    """No end of text, stop token or stop string before this many tokens."""
    stop: str | Sequence[str] | None = None
    """Texts that end the answer; a tuple after construction."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the answer; a tuple after construction."""
    ignore_eos: bool = False
    """Go on after the model's end of text."""
    logprobs: int | None = None
    """Report the log-probability of each token, and of this many best."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the scores of these tokens; read-only after construction."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or stop token in the text."""
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    """Form that the answer must have: a JSON schema, say. A `StructuredOutputs` after construction."""

    def __post_init__(self) -> None:
        self._integer("n", 1, 128)
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._integer("top_k", -1, 2**31 - 1)
        self._set("top_k", max(self.top_k, 0))
        self._number("min_p", 0.0, 1.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 0.0, math.inf, open_low=True)
        self._integer("seed", 0, 2**63 - 1, optional=True)
        self._integer("max_tokens", 1, 2**31 - 1, optional=True)
        self._integer("min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens: expected at most max_tokens, which is {self.max_tokens}, got {self.min_tokens}"
            )
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        self._set("stop", self._checked_stop())
        self._set("stop_token_ids", self._checked_stop_tokens())
        self._set("logit_bias", self._checked_bias())
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputs.from_value(self.structured_outputs))
            if self.ignore_eos:
                raise InvalidParameterError("ignore_eos: structured_outputs ends an answer with its end of text")

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be pickled or copied.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _rebuild, ({**values, "logit_bias": dict(self.logit_bias or {})},)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop`, as the tuple that construction made of it."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """`stop_token_ids`, as the tuple that construction made of it."""
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    @property
    def form(self) -> StructuredOutputs | None:
        """`structured_outputs`, as the record that construction made of it."""
        assert self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputs)
        return self.structured_outputs

    @property
    def greedy(self) -> bool:
        """True if the best token is always taken."""
        return self.temperature == 0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """Parameters that a generation_config.json recommends. `do_sample: false` is greedy.

        Raises:
            CheckpointError: for a value of the file that is out of range, with its name.
        """
        values = {name: config[name] for name in _GENERATION_CONFIG if config.get(name) is not None}
        where = getattr(config, "where", "generation_config.json")
        if read_value(config, "do_sample", bool, True, where=where) is False:
            values["temperature"] = 0.0
        try:
            return cls(**values)
        except InvalidParameterError as error:
            raise CheckpointError(f"{where}: {error}") from error

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value: Any = getattr(self, name)
        if value is None and optional:
            return
        if not (_is_whole(value) and low <= value <= high):
            none = ", or None" if optional else ""
            raise InvalidParameterError(f"{name}: expected a whole number of {low} to {high}{none}, got {value!r}")
        self._set(name, int(value))

    def _number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value: Any = getattr(self, name)
        if not (_is_real(value) and low <= value <= high and not (open_low and value == low)):
            least = f"more than {low:g}" if open_low else f"at least {low:g}"
            most = "" if math.isinf(high) else f" and at most {high:g}"
            raise InvalidParameterError(f"{name}: expected a number of {least}{most}, got {value!r}")
        self._set(name, float(value))

    def _checked_stop(self) -> tuple[str, ...]:
        given: Any = self.stop
        stop = (given,) if isinstance(given, str) else _as_tuple("stop", given, "texts")
        wrong = [text for text in stop if not isinstance(text, str) or not text]
        if wrong:
            raise InvalidParameterError(f"stop: expected texts that are not empty, got {wrong[0]!r}")
        return stop

    def _checked_stop_tokens(self) -> tuple[int, ...]:
        ids = _as_tuple("stop_token_ids", self.stop_token_ids, "token ids")
        wrong = [i for i in ids if not (_is_whole(i) and i >= 0)]
        if wrong:
            raise InvalidParameterError(f"stop_token_ids: expected token ids, 0 or more, got {wrong[0]!r}")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameterError(f"stop_token_ids: expected at most {MAX_STOP_TOKEN_IDS}, got {len(ids)}")
        return tuple(int(i) for i in ids)

    def _checked_bias(self) -> Mapping[int, float]:
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise InvalidParameterError(f"logit_bias: expected a mapping from token id to bias, got {bias!r}")
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidParameterError(f"logit_bias: expected at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
        for token, value in bias.items():
            if not (_is_whole(token) and token >= 0 and _is_real(value) and -100 <= value <= 100):
                raise InvalidParameterError(
                    f"logit_bias: expected token id and a bias of -100 to 100, got {token!r}: {value!r}"
                )
        return MappingProxyType({int(token): float(value) for token, value in bias.items()})


def _rebuild(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _as_tuple(name: str, given: Any, what: str) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise InvalidParameterError(f"{name}: expected a list of {what}, got {given!r}")
    return tuple(given)


def _is_whole(value: object) -> TypeGuard[int]:
    """A whole number of any library; True and False are none."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def _is_real(value: object) -> TypeGuard[float]:
    """A finite number of any library that a float can hold; True and False are none."""
    if type(value) is float:
        return math.isfinite(value)
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
