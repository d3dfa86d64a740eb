"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.errors import InvalidParameterError
from verax.serve.http.body import Size, decode, read_body
from verax.serve.http.errors import JsonResponse, field_error
from verax.serve.http.openapi import api_routes
from verax.serve.http.server import Server
from verax.serve.text.chat import ChatMessage, ChatRequest, ToolDefinition, render_chat
from verax.serve.text.sampling import Count
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["routes"]


class TokenIds(msgspec.Struct, kw_only=True):
    """Token ids of a text or a chat."""

    count: Size
    max_model_len: int
    tokens: list[Size]
    token_strs: list[str | None] | UnsetType = UNSET


class DetokenizedText(msgspec.Struct, kw_only=True):
    """Text of token ids."""

    prompt: str


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `/tokenize`: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Add what the model expects around a text: yes for a prompt, no for a chat, whose template has it."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `/detokenize`."""

    tokens: list[Count]
    model: str | None = None


_CHAT_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def routes(server: Server) -> list[Route]:
    """Routes of the tokenizer."""

    async def tokenize(http: Request) -> Response:
        request = await read_body(http, TokenizeRequest)
        server.text_model(request.model)
        tokenizer = _tokenizer(server)
        if (request.prompt is None) == (request.messages is None):
            raise field_error("prompt", "expected either prompt or messages")
        text, special = request.prompt, True
        if text is None:
            given = msgspec.to_builtins(request)
            chat = decode(ChatRequest, {name: given[name] for name in _CHAT_FIELDS})
            text, special = await render_chat(server, chat), False
        if request.add_special_tokens is not None:
            special = request.add_special_tokens
        tokens = await server.engine.encode(text, add_special_tokens=special)
        strings = [tokenizer.token(token) for token in tokens] if request.return_token_strs else UNSET
        length = server.engine.max_model_len
        return JsonResponse(TokenIds(count=len(tokens), max_model_len=length, tokens=tokens, token_strs=strings))

    async def detokenize(http: Request) -> Response:
        request = await read_body(http, DetokenizeRequest)
        server.text_model(request.model)
        size = server.engine.model_config.vocab_size
        for i, token in enumerate(request.tokens):
            if token >= size:
                raise field_error(f"tokens[{i}]", f"{token} is outside of the vocabulary of {size}")
        decode_all = partial(_tokenizer(server).decode, request.tokens, skip_special_tokens=False)
        return JsonResponse(DetokenizedText(prompt=await asyncio.to_thread(decode_all)))

    return [
        *api_routes(
            "/tokenize", tokenize, body=TokenizeRequest, answer=TokenIds, summary="Token ids of a text or a chat."
        ),
        *api_routes(
            "/detokenize",
            detokenize,
            body=DetokenizeRequest,
            answer=DetokenizedText,
            summary="The text of token ids.",
        ),
    ]


def _tokenizer(server: Server) -> Tokenizer:
    if server.engine.tokenizer is None:
        raise InvalidParameterError("prompt: this server has no tokenizer")
    return server.engine.tokenizer
