"""Sampling parameters of a request: vLLM's names and meanings, checked at construction.

`verax.sampling_fields` declares the parameters; here are the form of the answer and a checkpoint's recommendations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.fields import Size, read_value
from verax.files import JsonObject
from verax.options import documented, option, options_of
from verax.sampling_fields import SamplingFields
from verax.text.features.structured_outputs import StructuredOutputs

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
