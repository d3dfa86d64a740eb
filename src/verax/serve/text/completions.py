"""`/v1/completions`: OpenAI's completions of texts and token ids, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from msgspec import Meta
from starlette.routing import Route

from verax.errors import InvalidParameterError
from verax.serve.http.errors import field_error
from verax.serve.http.server import Server
from verax.serve.http.sse import DONE, data_event
from verax.serve.http.telemetry import RequestRecord
from verax.serve.text.run import Run, RunAnswer, RunEvent, prompt_logprobs, text_routes, token_logprobs
from verax.serve.text.sampling import Count, GenerationRequest, Refused, sampling_params

__all__ = ["routes"]

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


def routes(server: Server) -> list[Route]:
    """Routes of completions."""

    async def start(request: CompletionRequest, record: RequestRecord) -> Run:
        return _run(server, request, record)

    return text_routes(server, "/completions", CompletionRequest, start, _Answer, summary="Complete prompts.")


def prompts_of(given: str | Sequence[Any], limit: int) -> list[str | list[int]]:
    """Prompts of a request: a text, token ids, or a list of either.

    Raises:
        ApiError: 400 for an empty list, a mixed one, or more prompts than `limit`.
    """
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) != 1:
        raise field_error("prompt", "expected texts, token ids or lists of token ids, not mixed, not empty")
    if kinds == {int}:
        return [list(given)]
    if len(given) > limit:
        raise field_error("prompt", f"expected at most {limit} prompts, got {len(given)}")
    return list(given)


def _run(server: Server, request: CompletionRequest, record: RequestRecord) -> Run:
    """Check a request and queue its prompts."""
    record.model = model = server.text_model(request.model)
    if server.settings.log_prompts:
        record.prompt = request.prompt
    if request.suffix:
        raise field_error("suffix", "it is not supported here")
    if request.best_of not in (None, request.n or 1):
        raise field_error("best_of", "it must be n, as all answers are returned")
    prompts = prompts_of(request.prompt, server.settings.max_prompts)
    limit = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    echoed: dict[str, Any] = (
        {"prompt_logprobs": request.logprobs} if request.echo and request.prompt_logprobs is None else {}
    )
    params = sampling_params(server, request, max_tokens=max(limit, 1), logprobs=request.logprobs, **echoed)
    return Run(
        server,
        request,
        record,
        model=model,
        prompts=prompts,
        params=params,
        add_special_tokens=request.add_special_tokens is not False,
        field="prompt",
        drop=limit == 0,
    )


class _Answer:
    """Completions on their way."""

    def __init__(self, run: Run, request: CompletionRequest):
        self._run = run
        self._request = request
        self._offsets: dict[int, int] = {}
        """Number of characters of the text so far, for each choice that has begun."""

    async def whole(self) -> dict[str, Any]:
        """The answer."""
        run, choices = self._run, []
        for answer in await run.answers():
            choice = self._choice(answer, answer.message.content)
            if self._request.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(run.outputs[answer.index // run.n])
            choices.append(choice)
        return {**run.head("cmpl", "text_completion"), "choices": choices, "usage": run.usage.body(), **run.timings()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Events of a stream, the last one included."""
        run = self._run
        head = run.head("cmpl", "text_completion")
        async with aclosing(run.events()) as events:
            async for event in events:
                choice = self._choice(event, event.delta.content)
                more = run.timings() if event.finish_reason is not None else {}
                yield data_event({**head, "choices": [choice], **run.chunk_usage(), **more})
        if (last := run.last_usage()) is not None:
            yield data_event({**head, **last})
        yield DONE

    def _choice(self, new: RunEvent | RunAnswer, text: str) -> dict[str, Any]:
        """Choice of new text, with its prompt first if that is echoed and the choice begins."""
        output = self._run.outputs[new.index // self._run.n]
        lists = None
        if self._request.logprobs is not None:
            # OpenAI's old form: four lists, and where each token begins in the text.
            lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if new.index not in self._offsets:
            self._offsets[new.index] = 0
            if self._request.echo:
                text = self._echo(new.index, lists) + text
        if lists is not None:
            self._add(lists, new.index, new.logprobs or [])
        choice = {
            "index": new.index,
            "text": text,
            "logprobs": lists,
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
        }
        if self._request.return_token_ids:
            ids = () if output is None else output.prompt_token_ids
            choice |= {"token_ids": new.token_ids, "prompt_token_ids": ids}
        return choice

    def _echo(self, index: int, lists: dict[str, list[Any]] | None) -> str:
        """Text of the prompt, whose log-probabilities are added to a choice's."""
        tokenizer, output = self._run.tokenizer, self._run.outputs[index // self._run.n]
        if tokenizer is None:
            raise InvalidParameterError("echo: this engine has no tokenizer, so it has no text")
        assert output is not None
        ids = output.prompt_token_ids
        if lists is not None and output.prompt_logprobs is not None:
            # The first token has no context.
            first = {"token": tokenizer.decode(ids[:1], skip_special_tokens=False), "logprob": None}
            known = [entry or {} for entry in output.prompt_logprobs[1:]]
            self._add(lists, index, [first, *token_logprobs(tokenizer, ids[1:], known, self._run.num_top or 0)])
        return tokenizer.decode(ids, skip_special_tokens=False) if output.prompt is None else output.prompt

    def _add(self, lists: dict[str, list[Any]], index: int, entries: Sequence[dict[str, Any]]) -> None:
        for entry in entries:
            best = entry.get("top_logprobs")
            lists["tokens"].append(entry["token"])
            lists["token_logprobs"].append(entry["logprob"])
            lists["top_logprobs"].append(best if best is None else {top["token"]: top["logprob"] for top in best})
            lists["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(entry["token"])
