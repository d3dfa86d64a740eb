"""Bodies of answers, as the description of the API has them. Answers themselves are made of dictionaries.

A field without a default is in every answer. Tests compare answers with these Structs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "AnthropicErrorAnswer",
    "ChatCompletion",
    "DetokenizedText",
    "EmbeddingList",
    "ErrorAnswer",
    "Health",
    "InputTokens",
    "MessageObject",
    "MessageTokens",
    "ModelList",
    "ModelObject",
    "Ranking",
    "ResponseObject",
    "TextCompletion",
    "TokenIds",
    "VideoDeleted",
    "VideoList",
    "VideoObject",
]

Size = Annotated[int, Meta(ge=0)]


class ErrorObject(msgspec.Struct, kw_only=True):
    """Error: `param` is the field that was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """Body of every error but those of Anthropic's API."""

    error: ErrorObject


class AnthropicErrorObject(msgspec.Struct, kw_only=True):
    """Error of Anthropic's API."""

    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct, kw_only=True):
    """Body of every error of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


class Health(msgspec.Struct, kw_only=True):
    """State of a server that takes requests."""

    status: Literal["ok"]


class TokenUsage(msgspec.Struct, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: Size
    completion_tokens: Size
    total_tokens: Size
    prompt_tokens_details: dict[Literal["cached_tokens"], Size]
    completion_tokens_details: dict[Literal["reasoning_tokens"], Size]


class TopLogprob(msgspec.Struct, kw_only=True):
    """Token at a place, its log-probability in nats, and its bytes."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class TokenLogprob(TopLogprob, kw_only=True):
    """Token of an answer, and the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of an answer."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(msgspec.Struct, kw_only=True):
    """Function that an answer calls, and its arguments as JSON text."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct, kw_only=True):
    """Tool call of an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    """Message of the assistant."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


class Choice(msgspec.Struct, kw_only=True):
    """One of several answers."""

    index: Size
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    """Stop string or stop token that ended it."""
    token_ids: list[Size] | None = None


class ChatChoice(Choice, kw_only=True):
    """One of several answers to a chat."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class PromptLogprob(msgspec.Struct, kw_only=True):
    """Log-probability of a token of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Generated(msgspec.Struct, kw_only=True):
    """Fields that chats and completions share."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: TokenUsage
    timings: dict[str, float | None] | None = None


class ChatCompletion(Generated, kw_only=True):
    """Whole answer of `/v1/chat/completions`. A stream has OpenAI's `chat.completion.chunk`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[Size] | None = None


class CompletionLogprobLists(msgspec.Struct, kw_only=True):
    """Log-probabilities of a completion: the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Size]


class TextChoice(Choice, kw_only=True):
    """One of several completions."""

    text: str
    logprobs: CompletionLogprobLists | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[Size] | None = None


class TextCompletion(Generated, kw_only=True):
    """Whole answer of `/v1/completions`. The events of a stream have the same fields."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class InputTokens(msgspec.Struct, kw_only=True):
    """Number of tokens of a chat, or of a response's input."""

    object: Literal["response.input_tokens"]
    input_tokens: Size


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts of a response."""

    input_tokens: Size
    input_tokens_details: dict[str, Size]
    output_tokens: Size
    output_tokens_details: dict[str, Size]
    total_tokens: Size


class ResponseObject(msgspec.Struct, kw_only=True):
    """Whole answer of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    """OpenAI's items: `message`, `reasoning` and `function_call`."""
    incomplete_details: dict[str, str] | None
    error: None
    usage: ResponseUsage
    metadata: dict[str, str]


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts of a message."""

    input_tokens: Size
    cache_creation_input_tokens: Size
    cache_read_input_tokens: Size
    output_tokens: Size


class MessageObject(msgspec.Struct, kw_only=True):
    """Whole answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Anthropic's blocks: `text`, `thinking` and `tool_use`."""
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(msgspec.Struct, kw_only=True):
    """Number of a message's tokens."""

    input_tokens: Size


class EmbeddingObject(msgspec.Struct, kw_only=True):
    """Vector of a text: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: Size
    embedding: list[float] | str


class TextUsage(msgspec.Struct, kw_only=True):
    """Token counts of texts that are only read."""

    prompt_tokens: Size
    total_tokens: Size


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Vectors, in the order of the texts."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: TextUsage


class RankedText(msgspec.Struct, kw_only=True):
    """Text of a document."""

    text: str


class RankedResult(msgspec.Struct, kw_only=True):
    """Document of a ranking: its number in the request, its score, and its text if that was asked for."""

    index: Size
    relevance_score: float
    document: RankedText | None = None


class Ranking(msgspec.Struct, kw_only=True):
    """Documents, the best first."""

    id: str
    model: str
    usage: TextUsage
    results: list[RankedResult]


class ModelObject(msgspec.Struct, kw_only=True):
    """Model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    """Longest sequence in tokens, of a text model."""


class ModelList(msgspec.Struct, kw_only=True):
    """Models that are served."""

    object: Literal["list"]
    data: list[ModelObject]


class TokenIds(msgspec.Struct, kw_only=True):
    """Token ids of a text or a chat."""

    count: Size
    max_model_len: int
    tokens: list[Size]
    token_strs: list[str | None] | None = None


class DetokenizedText(msgspec.Struct, kw_only=True):
    """Text of token ids."""

    prompt: str


class VideoError(msgspec.Struct, kw_only=True):
    """Reason why a clip failed."""

    code: str
    message: str


class VideoObject(msgspec.Struct, kw_only=True):
    """State of a clip, and the settings by which it can be made again."""

    id: str
    object: Literal["video"]
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: Annotated[int, Meta(ge=0, le=100)]
    model: str
    prompt: str
    seconds: str
    size: str
    created_at: int
    completed_at: int | None
    expires_at: int | None
    error: VideoError | None
    remixed_from_video_id: None
    num_frames: Size
    fps: Size
    num_inference_steps: Size
    guidance_scale: float
    flow_shift: float
    negative_prompt: str | None
    seed: Size


class VideoList(msgspec.Struct, kw_only=True):
    """Page of clips."""

    object: Literal["list"]
    data: list[VideoObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(msgspec.Struct, kw_only=True):
    """Clip that was removed or cancelled."""

    id: str
    object: Literal["video.deleted"]
    deleted: bool
