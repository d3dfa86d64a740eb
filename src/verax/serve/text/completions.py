"""`/v1/completions`: OpenAI's completions of texts and token ids, whole and streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.errors import InvalidParameterError, StructuredOutputError
from verax.serve.http.body import read_body
from verax.serve.http.errors import ApiError, JsonResponse
from verax.serve.http.openapi import api_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import DONE, data_event, unless_disconnected
from verax.serve.http.telemetry import RequestRecord, record_of
from verax.serve.text.run import (
    SYSTEM_FINGERPRINT,
    Choice,
    CompletionLogprobs,
    Generated,
    PromptLogprobs,
    Size,
    Usage,
    merged,
    prompt_logprobs,
)
from verax.serve.text.sampling import Count, GenerationRequest, Refused, form_error, sampling_params
from verax.text.engine.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["CompletionRequest", "TextCompletion", "prompts_of", "routes"]


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


DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | list[str | int | list[Count]]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: int | None = None
    suffix: Refused = None
    add_special_tokens: bool | None = None


@dataclass
class _Sample:
    """One choice on its way."""

    logprobs: CompletionLogprobs | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    begun: bool = False


@dataclass
class _Part:
    """New part of one choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: dict[str, list[Any]] | None
    finish_reason: str | None
    stop_reason: int | str | None


def routes(server: Server) -> list[Route]:
    """Routes of completions."""

    async def complete(http: Request) -> Response:
        request = await read_body(http, CompletionRequest)
        run = CompletionRun(server, request, record_of(http))
        if request.stream:
            return server.stream(run.chunks())
        return JsonResponse(await unless_disconnected(http, run.whole()))

    return api_routes(
        "/completions",
        complete,
        body=CompletionRequest,
        answer=TextCompletion,
        streams=True,
        queued=True,
        summary="Complete prompts.",
    )


def prompts_of(given: str | Sequence[Any], most: int, name: str = "prompt") -> list[str | list[int]]:
    """Prompts of a request: a text, token ids, or a list of either.

    Raises:
        ApiError: 400 for an empty list, a mixed one, or more prompts than `most`.
    """
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) != 1:
        raise ApiError(
            400, f"{name}: expected texts, token ids or lists of token ids, not mixed, not empty", param=name
        )
    if kinds == {int}:
        return [list(given)]
    if len(given) > most:
        raise ApiError(400, f"{name}: expected at most {most} prompts, got {len(given)}", param=name)
    return list(given)


class CompletionRun:
    """Completions of all prompts of a request, queued in the engine. Choice `p * n + k` is sample k of prompt p."""

    def __init__(self, server: Server, request: CompletionRequest, record: RequestRecord):
        record.model = model = server.text_model(request.model)
        self._engine = server.engine
        self._request = request
        self._record = record
        if server.settings.log_prompts:
            record.prompt = request.prompt
        _check(request)
        prompts = prompts_of(request.prompt, server.settings.max_prompts)
        self._dropped = request.max_tokens == 0
        limit = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        echoed: dict[str, Any] = (
            {"prompt_logprobs": request.logprobs} if request.echo and request.prompt_logprobs is None else {}
        )
        params = sampling_params(server, request, max_tokens=max(limit, 1), logprobs=request.logprobs, **echoed)
        self._n = params.n
        self._usages = [Usage() for _ in prompts]
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._samples = [self._sample() for _ in range(len(prompts) * self._n)]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        special = request.add_special_tokens is not False
        # Each joins the queue here. If one finds it full, dropping the others takes them out again.
        adapter = server.adapters.get(model)
        self._streams = [
            self._engine.generate(prompt, params, add_special_tokens=special, lora_request=adapter)
            for prompt in prompts
        ]

    @property
    def usage(self) -> Usage:
        """Token counts of all prompts so far."""
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in self._usages),
            completion_tokens=sum(usage.completion_tokens for usage in self._usages),
            cached_tokens=sum(usage.cached_tokens for usage in self._usages),
        )

    async def parts(self) -> AsyncGenerator[_Part, None]:
        """New parts of all choices. Closing the generator aborts the requests."""
        try:
            async with aclosing(merged(self._streams)) as outputs:
                async for prompt, output in outputs:
                    self._note(prompt, output)
                    for sample in output.outputs:
                        if part := await self._part(prompt, sample, output):
                            yield part
        except (InvalidParameterError, StructuredOutputError) as error:
            raise form_error(error, self._request) from error
        finally:
            usage = self.usage
            self._record.prompt_tokens, self._record.completion_tokens = usage.prompt_tokens, usage.completion_tokens

    async def whole(self) -> dict[str, Any]:
        """Body of the answer."""
        found: list[list[_Part]] = [[] for _ in self._samples]
        async for part in self.parts():
            found[part.index].append(part)
        choices = [self._joined(parts) for parts in found]
        return {**self._head, "choices": choices, "usage": self.usage.body(), **self._timings()}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Events of a stream, the last one included."""
        options = self._request.stream_options
        last_usage = options is not None and bool(options.include_usage)
        each_usage = options is not None and bool(options.continuous_usage_stats)
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                body = {**self._head, "choices": [self._choice(part)]}
                if each_usage or last_usage:
                    body["usage"] = self.usage.body() if each_usage else None
                if part.finish_reason is not None:
                    body |= self._timings()
                yield data_event(body)
        if last_usage:
            yield data_event({**self._head, "choices": [], "usage": self.usage.body(), **self._timings()})
        yield DONE

    def _timings(self) -> dict[str, Any]:
        """Times of a single prompt. Several prompts are answered at once, so that their times have no sum."""
        return {"timings": self._usages[0].timings()} if len(self._usages) == 1 else {}

    def _sample(self) -> _Sample:
        wanted = self._request.logprobs
        return _Sample(None if wanted is None else CompletionLogprobs(wanted))

    def _note(self, prompt: int, output: RequestOutput) -> None:
        usage = self._usages[prompt]
        usage.add(output)
        if self._dropped:
            usage.completion_tokens = 0
        if usage.completion_tokens:
            self._record.first_token()
        self._outputs[prompt] = output

    async def _part(self, prompt: int, new: CompletionOutput, output: RequestOutput) -> _Part | None:
        """New part of a choice; None if no text is certain yet."""
        if new.finish_reason == "abort":
            raise ApiError(503, "the request was aborted: the server is shutting down", code="aborted")
        index = prompt * self._n + new.index
        sample = self._samples[index]
        if not sample.begun:
            sample.begun = True
            if self._request.echo:
                await self._echo(sample, output)
        if not self._dropped:
            sample.text += new.text
            sample.token_ids += new.token_ids
            if sample.logprobs is not None:
                sample.logprobs.add(new.token_ids, new.logprobs or [])
        if not sample.text and new.finish_reason is None:
            return None
        reason = "length" if self._dropped and new.finish_reason else new.finish_reason
        logprobs = None if sample.logprobs is None else sample.logprobs.take()
        part = _Part(index, sample.text, sample.token_ids, logprobs, reason, new.stop_reason)
        sample.text, sample.token_ids = "", []
        return part

    async def _echo(self, sample: _Sample, output: RequestOutput) -> None:
        """Begin a choice with its prompt."""
        tokenizer, ids = self._engine.tokenizer, output.prompt_token_ids
        if tokenizer is None:
            raise InvalidParameterError("echo: this engine has no tokenizer, so there is no text")
        sample.text = tokenizer.decode(ids, skip_special_tokens=False) if output.prompt is None else output.prompt
        if sample.logprobs is not None and output.prompt_logprobs is not None:
            sample.logprobs.add_first(tokenizer.decode(ids[:1], skip_special_tokens=False))
            known: list[dict[int, Logprob]] = [entry or {} for entry in output.prompt_logprobs[1:]]
            sample.logprobs.add(ids[1:], known)

    def _joined(self, parts: Sequence[_Part]) -> dict[str, Any]:
        last = parts[-1]
        lists = [part.logprobs for part in parts if part.logprobs is not None]
        joined = {name: [item for found in lists for item in found[name]] for name in lists[0]} if lists else None
        tokens = [token for part in parts for token in part.token_ids]
        text = "".join(part.text for part in parts)
        choice = self._choice(_Part(last.index, text, tokens, joined, last.finish_reason, last.stop_reason))
        output = self._outputs[last.index // self._n]
        if self._request.prompt_logprobs is not None and output is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _choice(self, part: _Part) -> dict[str, Any]:
        choice = {
            "index": part.index,
            "text": part.text,
            "logprobs": part.logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._request.return_token_ids:
            output = self._outputs[part.index // self._n]
            choice["token_ids"] = part.token_ids
            choice["prompt_token_ids"] = () if output is None else output.prompt_token_ids
        return choice


def _check(request: CompletionRequest) -> None:
    if request.suffix:
        raise ApiError(400, "suffix: it is not supported here", param="suffix")
    if request.best_of not in (None, request.n or 1):
        raise ApiError(400, "best_of: it must be n, as all answers are returned", param="best_of")
