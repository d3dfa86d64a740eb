"""Fields of requests that say how an answer is sampled, and their translation to `SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from verax.errors import InvalidParameterError, VeraxError
from verax.options import Option, options_of
from verax.sampling_fields import SamplingFields
from verax.serve.http.errors import ApiError, api_error, field_error
from verax.serve.http.server import Server
from verax.text.engine.sampling_params import SamplingParams

MAX_INT = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
Text = Annotated[str, Meta(min_length=1)]
Refused = Annotated[Any, Meta(description="Not supported: a value is refused.", extra_json_schema={"type": "null"})]
"""Field that is known, and refused with an error that names it."""

TokenKey = Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9]{1,9}$"})]
"""Token id as a key of a JSON object."""

Form = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "properties": {
                "json": {"type": ["object", "string", "null"]},
                "regex": {"type": ["string", "null"]},
                "choice": {"type": ["array", "null"], "items": {"type": "string"}},
                "grammar": {"type": ["string", "null"]},
                "json_object": {"type": ["boolean", "null"]},
            }
        }
    ),
]
"""Fields of `StructuredOutputs`, which checks them."""

FORM_ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""Other names of the forms of structured output: vLLM's old ones, and llama.cpp's."""

_INSTEAD = {
    "": (
        *("bad_words", "allowed_token_ids", "chat_template", "documents", "prompt_embeds", "truncate_prompt_tokens"),
        *("return_tokens_as_token_ids", "use_beam_search", "length_penalty", "num_beams", "no_repeat_ngram_size"),
        *("logits_processors", "custom_logit_processor", "vllm_xargs", "session_params"),
        *("dry_multiplier", "dynatemp_range", "mirostat", "xtc_probability", "typical_p", "typ_p", "tfs_z", "top_a"),
        *("top_n_sigma", "samplers", "modalities", "audio", "web_search_options", "enable_search", "verbosity"),
        *("prompt_mode", "safe_prompt", "transforms", "plugins", "include_reasoning", "separate_reasoning"),
        *(
            "stream_reasoning",
            "reasoning_format",
            "spaces_between_special_tokens",
            "cache_salt",
            "repetition_detection",
        ),
        *("adaptive_target", "smoothing_factor", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "guidance_scale"),
        *("negative_prompt", "encoder_repetition_penalty", "diversity_penalty", "ban_eos_token", "watermark"),
        *("max_time", "t_max_predict_ms", "custom_params", "return_hidden_states", "logprob_token_ids"),
    ),
    "tools": ("functions", "function_call"),
    "tool_choice none": ("parse_tool_calls",),
    "stop_token_ids": ("eos_token_id",),
    "chat_template_kwargs": ("enable_thinking", "thinking", "think"),
    "reasoning_effort": (
        *("reasoning", "thinking_token_budget", "thinking_budget", "thinking_budget_tokens", "max_thinking_tokens"),
        *("reasoning_budget", "reasoning_budget_tokens"),
    ),
    "structured_outputs": ("regex", "ebnf", "format", "guided_whitespace_pattern"),
    "repetition_penalty": ("repeat_penalty",),
    "max_tokens": ("max_new_tokens", "max_output_tokens", "max_length", "n_predict", "num_predict"),
    "min_tokens": ("min_new_tokens", "min_length"),
    "stop": ("stop_sequences", "stop_regex"),
    "include_stop_str_in_output": ("no_stop_trim",),
    "seed": ("random_seed",),
    "temperature 0": ("do_sample",),
    "logprobs": ("n_probs",),
    "model": ("lora", "lora_path", "adapter_id", "adapters"),
    "each parameter by its own field": ("options", "parameters", "generation_config", "extra_body", "sampling_params"),
}
REFUSED = {name: instead for instead, names in _INSTEAD.items() for name in names}
"""Fields of other servers that would change the answer and that this server does not have, and what to use instead."""

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("enable_thinking", "thinking", "think", "web_search_options"), ()),
    **dict.fromkeys(("length_penalty", "num_beams", "typical_p", "typ_p", "tfs_z", "repeat_penalty"), (1,)),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning", "do_sample"), (True,)),
    **{"parse_tool_calls": (True,), "adaptive_target": (-1,), "eos_token_id": (), "t_max_predict_ms": (-1, 0)},
    **{"spaces_between_special_tokens": (True,), "top_n_sigma": (-1, 0), "modalities": (["text"],)},
    **dict.fromkeys(_INSTEAD["reasoning_effort"][1:], (-1,)),
    **{"verbosity": ("medium",), "reasoning_format": ("auto", "deepseek")},
}
"""Values of refused fields that ask for what happens anyway; of the others it is false, zero and what is empty."""

_EMPTY = (False, "", [], {})


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    """A last chunk with the usage."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""


class JsonSchema(msgspec.Struct, kw_only=True):
    """JSON schema of an answer. The name has no meaning here."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Form of an answer: any text, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    """Schema, as llama.cpp's clients give it."""


OWN_FORM = ("seed", "stop", "stop_token_ids", "logit_bias", "max_tokens", "logprobs")
"""Sampling parameters whose fields have a form or a name of their own in the API."""

SAMPLING_OPTIONS = {name: declared for name, declared in options_of(SamplingFields).items() if name not in OWN_FORM}


def _field_type(declared: Option) -> Any:
    """Type of the field of a number or a truth value, with its range."""
    if declared.kind is bool:
        return bool | None
    limits: dict[str, Any] = {} if declared.low is None else {"gt" if declared.above else "ge": declared.low}
    if declared.high is not None:
        limits["le"] = declared.high
    number: Any = Annotated[declared.kind, Meta(**limits)]
    return number | None


if TYPE_CHECKING:

    class SamplingStruct(msgspec.Struct, kw_only=True):
        """Struct of `REFUSED` and of the sampling parameters that the API has by `SamplingFields`' names and ranges."""

        def __getattr__(self, name: str) -> Any: ...
else:
    SamplingStruct = msgspec.defstruct(
        "SamplingStruct",
        [
            *((name, _field_type(declared), None) for name, declared in SAMPLING_OPTIONS.items()),
            *((name, Refused, None) for name in REFUSED),
        ],
        kw_only=True,
        module=__name__,
    )


class GenerationRequest(SamplingStruct, kw_only=True):
    """Fields that chats and completions share: OpenAI's, then vLLM's. An absent one has the checkpoint's default."""

    model: str | None = None
    stop: Text | list[Text] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Makes the tokens repeatable, but for -1, which is a new seed each time."""
    logit_bias: dict[TokenKey, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    stop_token_ids: list[Count] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    """Add what the model expects around a text: yes for a prompt, no for a chat, whose template has it."""
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(extra_json_schema={"const": 0})] | None = None
    structured_outputs: Form | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    grammar: str | None = None


def sampling_params(
    server: Server,
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured_outputs: dict[str, Any] | None = None,
    after: str | None = None,
    **overrides: Any,
) -> SamplingParams:
    """Sampling parameters of a request.

    Args:
        max_tokens: largest number of tokens of an answer; None for all that the context holds.
        logprobs: number of the best tokens to report; None for no log-probabilities.
        structured_outputs: whole form that tools or reasoning demand, the one in `response_format` included.
        after: text that the answer has before the form that the request itself gives.
        overrides: further parameters, which replace the request's.
    """
    _check(server, request)
    values = {
        name: value
        for name in (*SAMPLING_OPTIONS, "stop", "stop_token_ids")
        if (value := getattr(request, name)) is not None
    }
    if request.seed not in (None, -1):
        values["seed"] = request.seed % 2**63
    if request.logit_bias is not None:
        values["logit_bias"] = {_token_id(key): value for key, value in request.logit_bias.items()}
    if (form := _form(request, structured_outputs)) is not None:
        begins = structured_outputs is not None or after is None
        values["structured_outputs"] = form if begins else {"after": after, **form}
    values |= {"max_tokens": max_tokens, "logprobs": logprobs, **overrides}
    try:
        return server.engine.default_sampling_params(**values)
    except InvalidParameterError as error:
        raise form_error(error, request) from error


def _check(server: Server, request: GenerationRequest) -> None:
    """Check a request against the server's limits, and its fields against each other."""
    for name, instead in REFUSED.items():
        value = getattr(request, name)
        if value is not None and value not in _WITHOUT_EFFECT.get(name, _EMPTY):
            raise field_error(name, f"it is not supported here{instead and f'; use {instead}'}")
    if request.priority:
        raise field_error("priority", "all requests have the same priority, 0")
    settings = server.settings
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    n, max_n = request.n or 1, min(settings.max_n, server.engine.max_num_seqs)
    if n > max_n:
        raise field_error("n", f"expected at most {max_n}, got {n}")
    if len(stop) > settings.max_stop:
        raise field_error("stop", f"expected at most {settings.max_stop}, got {len(stop)}")
    if (longest := max(map(len, stop), default=0)) > settings.max_stop_length:
        raise field_error("stop", f"expected at most {settings.max_stop_length} characters, got {longest}")
    if request.stream_options is not None and not request.stream:
        raise field_error("stream_options", "it is for streams; set stream to true")
    if request.prompt_logprobs is not None and request.stream:
        raise field_error("prompt_logprobs", "a stream has none; set stream to false")


def _form(request: GenerationRequest, other: dict[str, Any] | None) -> dict[str, Any] | None:
    """Form of the answer, from the one field that gives it.

    `other`: one form for `response_format` and tools together; None if there is none.
    """
    forms = _forms(request)
    if other is not None:
        forms.pop("response_format", None)
        forms = {"tool_choice" if getattr(request, "tools", None) else "response_format": other, **forms}
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise field_error(second, f"it cannot be combined with {first}")
    return next(iter(forms.values()), None)


def form_error(error: VeraxError, request: GenerationRequest) -> ApiError:
    """HTTP error of an error of the engine.

    An error of the answer's form names the request's own field, or "tools" if tools demand the form.
    """
    answer = api_error(error)
    if (answer.param or "").startswith("structured_outputs") and request.structured_outputs is None:
        answer.param = next(iter(_forms(request)), "tools")
        answer.message = f"{answer.param}: {answer.message.partition(': ')[2]}"
    return answer


def _forms(request: GenerationRequest) -> dict[str, dict[str, Any]]:
    """Form of the answer in each of the request's fields that give one."""
    forms: dict[str, dict[str, Any]] = {}
    if request.structured_outputs is not None:
        given = {name: value for name, value in request.structured_outputs.items() if value is not None}
        if "structural_tag" in given:
            raise field_error("structured_outputs.structural_tag", "it is not supported here; use tools")
        forms["structured_outputs"] = given
    for old, name in FORM_ALIASES.items():
        if (value := getattr(request, old)) is not None:
            forms[old] = {name: value}
    if (text := text_form(request)) is not None:
        forms["response_format"] = text
    return forms


def text_form(request: GenerationRequest) -> dict[str, Any] | None:
    """Form of an answer that is text and not a call, from `response_format`."""
    if (format := request.response_format) is None:
        return None
    if format.json_schema is not None and format.type != "json_schema":
        raise field_error("response_format.json_schema", f"it needs the type json_schema, got {format.type}")
    schema = format.schema if format.json_schema is None else format.json_schema.schema
    if format.type == "text" and schema is not None:
        raise field_error("response_format.schema", "it needs the type json_schema, got text")
    if format.type == "json_schema" and schema is None:
        raise field_error("response_format.json_schema", "it is missing")
    if format.type == "text":
        return None
    return {"json_object": True} if schema is None else {"json": schema}


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise field_error("logit_bias", f"expected token ids as keys, got {key[:50]!r}")
    return int(key)
