"""Sampling parameters: the one table from which everything else that names them derives.

A row gives a parameter's type, default, range and meaning. From it derive the check of `SamplingParams`, the columns of
the device's parameters (`FLOATS` and `INTS`, also as the enums of a C++ header that the build writes), the fields of
the HTTP API and the flags of the command line. A new parameter is a row here and its use in `ops.sampling` and
native/sample_run.h.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from verax.errors import InvalidParameterError
from verax.options import check_options, documented, is_real, is_whole, option, options_of

MAX_LOGPROBS = 20
"""Best tokens that a step reports: OpenAI's limit on `top_logprobs`."""

MAX_LOGIT_BIAS = 300
"""Entries of `logit_bias` that a slot holds on the device: OpenAI's limit."""

MAX_STOP_TOKEN_IDS = 64
"""Stop tokens that a slot can hold back for `min_tokens`."""

_SAMPLING = "Sampling"

_float_column = partial(option, column="float32", panel=_SAMPLING)
_int_column = partial(option, column="int32", panel=_SAMPLING)


@documented
@dataclass(frozen=True, slots=True)
class SamplingFields:
    """Sampling parameters that do not need a library; `SamplingParams` adds the form of the answer."""

    n: int = option(
        1, "Continuations of each prompt, each with a seed of its own.", low=1, high=128, flags=("-n", "--n")
    )
    temperature: float = _float_column(
        1.0,
        "Divides the scores: 0 always takes the best token.",
        low=0.0,
        flags=("--temperature", "-t"),
        off=0.0,
        recommended=True,
    )
    top_p: float = _float_column(
        1.0,
        "Keep the likeliest tokens that together have this probability; 0 is greedy.",
        low=0.0,
        high=1.0,
        recommended=True,
    )
    top_k: int = _int_column(
        0, "Keep this many of the likeliest tokens: 0 or -1 for all.", low=-1, high=2**31 - 1, recommended=True
    )
    min_p: float = _float_column(
        0.0, "Keep tokens at least this fraction as likely as the likeliest.", low=0.0, high=1.0, recommended=True
    )
    presence_penalty: float = _float_column(
        0.0, "Subtracted from the score of a token that was generated before.", low=-2.0, high=2.0, recommended=True
    )
    frequency_penalty: float = _float_column(
        0.0, "Subtracted for each time that a token was generated before.", low=-2.0, high=2.0, recommended=True
    )
    repetition_penalty: float = _float_column(
        1.0,
        "Divides the positive scores, and multiplies the negative ones, of tokens in prompt or answer.",
        low=0.0,
        above=True,
        recommended=True,
    )
    seed: int | None = option(
        None, "Makes the tokens repeatable; drawn from the engine's seed if None.", low=0, high=2**63 - 1
    )
    max_tokens: int | None = option(
        16, "Most tokens to generate. None: as many as the context holds.", low=1, high=2**31 - 1, panel=_SAMPLING
    )
    min_tokens: int = option(
        0, "No end of text, stop token or stop string before this many tokens.", low=0, high=2**31 - 1
    )
    stop: str | Sequence[str] | None = option(
        None, "End the answer at this text; can be repeated. A tuple after construction.", panel=_SAMPLING
    )
    stop_token_ids: Sequence[int] | None = option(None, "Tokens that end the answer; a tuple after construction.")
    ignore_eos: bool = option(False, "Continue after the model's end of text.", panel=_SAMPLING)
    logprobs: int | None = option(
        None, "Report the log-probability of each token, and of this many of the best.", low=0, high=MAX_LOGPROBS
    )
    prompt_logprobs: int | None = option(
        None,
        "Report the log-probability of each token of the prompt, and of this many of the best.",
        low=0,
        high=MAX_LOGPROBS,
    )
    logit_bias: Mapping[int, float] | None = option(
        None, "Added to the scores of these tokens; read-only after construction."
    )
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.")
    include_stop_str_in_output: bool = option(False, "Keep the stop string or stop token in the text.")

    def __post_init__(self) -> None:
        check_options(self)
        self._set("top_k", max(self.top_k, 0))
        if self.top_p == 0:  # the best token alone, as OpenAI's API takes it
            self._set("temperature", 0.0)
            self._set("top_p", 1.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens: expected at most max_tokens, which is {self.max_tokens}, got {self.min_tokens}"
            )
        self._set("stop", self._checked_stop())
        self._set("stop_token_ids", self._checked_stop_tokens())
        self._set("logit_bias", self._checked_bias())

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    @property
    def greedy(self) -> bool:
        """True if the best token is always taken."""
        return self.temperature == 0

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop, "texts")
        wrong = [text for text in stop if not isinstance(text, str) or not text]
        if wrong:
            raise InvalidParameterError(f"stop: expected texts that are not empty, got {wrong[0]!r}")
        return stop

    def _checked_stop_tokens(self) -> tuple[int, ...]:
        ids = _as_tuple("stop_token_ids", self.stop_token_ids, "token ids")
        wrong = [i for i in ids if not (is_whole(i) and i >= 0)]
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
            if not (is_whole(token) and token >= 0 and is_real(value) and -100 <= value <= 100):
                raise InvalidParameterError(
                    f"logit_bias: expected token id and a bias of -100 to 100, got {token!r}: {value!r}"
                )
        return MappingProxyType({int(token): float(value) for token, value in bias.items()})


def _as_tuple(name: str, given: Any, what: str) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise InvalidParameterError(f"{name}: expected a list of {what}, got {given!r}")
    return tuple(given)


FROM_SEQUENCE = ("num_prompt", "seed_high", "seed_low", "min_length", "num_bias")
"""Further integers of a slot, which the engine computes from a sequence and its parameters."""


def _columns(dtype: str) -> tuple[str, ...]:
    return tuple(name for name, declared in options_of(SamplingFields).items() if declared.column == dtype)


FLOATS = _columns("float32")

INTS = (*_columns("int32"), *FROM_SEQUENCE)

OFF: Mapping[str, float] = {
    name: declared.default if declared.off is None else declared.off
    for name, declared in options_of(SamplingFields).items()
    if declared.column is not None
} | dict.fromkeys(FROM_SEQUENCE, 0)
"""Value of each column in a row of greedy decoding without extras."""


def cpp_header() -> str:
    """C++ header with the columns' order, which the build of the native library writes as sample_fields.h."""
    lines = ["// Generated from sampling_fields.py by ops/cpu/build.py.", "#pragma once", "", "namespace verax {", ""]
    for enum, columns, count in (("SampleFloat", FLOATS, "FLOATS"), ("SampleInt", INTS, "INTS")):
        names = ", ".join([*(name.upper() for name in columns), f"NUM_SAMPLE_{count}"])
        lines += [f"enum {enum} {{ {names} }};"]
    return "\n".join([*lines, "", "}  // namespace verax", ""])
