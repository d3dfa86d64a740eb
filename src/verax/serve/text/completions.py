"""`/v1/completions`: OpenAI's completions of texts and token ids, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from starlette.routing import Route

from verax.serve.http.errors import field_error
from verax.serve.http.server import Server
from verax.serve.http.sse import DONE, data_event
from verax.serve.http.telemetry import RequestRecord
from verax.serve.text.chat import CHAT_FIELDS
from verax.serve.text.run import Run, RunAnswer, RunEvent, prompt_logprobs, text_routes
from verax.serve.text.sampling import Count, GenerationRequest, Refused, sampling_params
from verax.text.engine.outputs import Logprob, RequestOutput
from verax.text.tokens.tokenizer import IncrementalDetokenizer, Tokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of `/v1/completions`."""

    elsewhere: ClassVar = CHAT_FIELDS

    prompt: str | list[str | int | list[Count]]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: int | None = None
    suffix: Refused = None


def routes(server: Server) -> list[Route]:
    """Routes of completions."""
    start = partial(_start, server)
    return text_routes(server, "/completions", CompletionRequest, start, _Answer, summary="Complete prompts.")


def prompts_of(given: str | Sequence[Any], limit: int) -> list[str | list[int]]:
    """Prompts of a request: a text, token ids, or a list of either."""
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


async def _start(server: Server, request: CompletionRequest, record: RequestRecord) -> Run:
    """Check a request and queue its prompts."""
    record.model = model = server.text_model(request.model)
    if server.settings.log_prompts:
        record.prompt = request.prompt
    if request.suffix:
        raise field_error("suffix", "it is not supported here")
    if request.best_of not in (None, request.n or 1):
        raise field_error("best_of", "it must be n, as all answers are returned")
    if server.engine.tokenizer is None and (request.echo or request.logprobs is not None):
        problem = "this engine has no tokenizer, so tokens have no text"
        raise field_error("echo" if request.echo else "logprobs", problem)
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


class CompletionLogprobs:
    """Log-probabilities of a growing text in OpenAI's old form: four lists, and where each token begins in the text.

    A token that is a part of a character begins where the character does, and one without text where the next begins.

    `num_top`: number of the likeliest tokens at each place; the token of the text comes in addition.
    `after`: tokens of the prompt. `skip_special_tokens`: special tokens are not in the text.
    """

    def __init__(
        self, num_top: int, tokenizer: Tokenizer, *, after: Sequence[int] = (), skip_special_tokens: bool = True
    ):
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._begin = 0
        self._text = IncrementalDetokenizer(tokenizer, after=after, skip_special_tokens=skip_special_tokens)
        self._lists = self._empty()

    def add_prompt(self, text: str, token_ids: Sequence[int], ranked: Sequence[Mapping[int, Logprob] | None]) -> None:
        """Add a prompt, which is all of the text so far. Its first token has no context, and `ranked` None for it."""
        shown = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
        for token, entry in zip(token_ids, ranked, strict=True):
            first = Logprob(0.0, None, self._tokenizer.decode([token], skip_special_tokens=False))
            self._add(token, {token: first} if entry is None else entry, self._begin)
            if entry is None:
                self._lists["token_logprobs"][-1] = self._lists["top_logprobs"][-1] = None
            before = len(shown.text)
            shown.append(token)
            # Special tokens around a text, and the space that some tokenizers put before it, are not in the text.
            for piece in (shown.text[before:], shown.text[before:].removeprefix(" ")):
                if text.startswith(piece, self._begin):
                    self._begin += len(piece)
                    break
        self._begin = len(text)

    def add(self, token_ids: Sequence[int], ranked: Sequence[Mapping[int, Logprob]]) -> None:
        """Add generated tokens, each with the log-probabilities at its place."""
        for token, entry in zip(token_ids, ranked, strict=True):
            self._add(token, entry, self._begin + len(self._text.text))
            self._text.append(token)

    def take(self, length: int | None = None) -> dict[str, list[Any]]:
        """The lists of what was added since the last call. `length` is the text's, once it has ended."""
        lists, self._lists = self._lists, self._empty()
        if length is not None:  # a stop string is cut off
            lists["text_offset"] = [min(offset, length) for offset in lists["text_offset"]]
        return lists

    @staticmethod
    def _empty() -> dict[str, list[Any]]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _add(self, token: int, entry: Mapping[int, Logprob], offset: int) -> None:
        own = entry[token]
        best = {key: other for key, other in entry.items() if other.rank and other.rank <= self._num_top}
        ranked = sorted(({token: own} | best).items(), key=lambda item: -item[1].logprob)
        name, top = own.decoded_token or "", {}
        for key, other in ranked:
            # Tokens can have the same text, such as parts of characters: the others are named by their ids.
            text = other.decoded_token or ""
            taken = text in top or (text == name and key != token)
            top[f"token_id:{key}" if taken else text] = other.logprob
        values = (name, own.logprob, top, offset)
        for values_so_far, value in zip(self._lists.values(), values, strict=True):
            values_so_far.append(value)


class _Answer:
    """Completions on their way."""

    def __init__(self, run: Run, request: CompletionRequest):
        self._run = run
        self._request = request
        self._lengths: dict[int, int] = {}
        """Number of characters of the text so far, for each choice that has begun."""
        self._logprobs: dict[int, CompletionLogprobs] = {}

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
        run, request = self._run, self._request
        output = run.outputs[new.index // run.n]
        if new.index not in self._lengths:
            self._lengths[new.index] = 0
            if request.logprobs is not None:
                assert run.tokenizer is not None
                before = () if output is None or request.add_special_tokens is False else output.prompt_token_ids
                self._logprobs[new.index] = CompletionLogprobs(
                    request.logprobs,
                    run.tokenizer,
                    after=before,  # as `Request.text_before`
                    skip_special_tokens=run.params.skip_special_tokens,
                )
            if request.echo:
                text = self._echo(new.index, output) + text
        self._lengths[new.index] += len(text)
        lists = None
        if (logprobs := self._logprobs.get(new.index)) is not None:
            logprobs.add(new.token_ids, new.ranked)
            lists = logprobs.take(self._lengths[new.index] if new.finish_reason is not None else None)
        choice = {
            "index": new.index,
            "text": text,
            "logprobs": lists,
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
        }
        if request.return_token_ids:
            ids = () if output is None else output.prompt_token_ids
            choice |= {"token_ids": new.token_ids, "prompt_token_ids": ids}
        return choice

    def _echo(self, index: int, output: RequestOutput | None) -> str:
        """Text of the prompt, whose log-probabilities are added to a choice's."""
        tokenizer = self._run.tokenizer
        assert tokenizer is not None
        assert output is not None
        ids = output.prompt_token_ids
        text = tokenizer.decode(ids, skip_special_tokens=False) if output.prompt is None else output.prompt
        if index in self._logprobs and output.prompt_logprobs is not None:
            self._logprobs[index].add_prompt(text, ids, output.prompt_logprobs)
        return text
