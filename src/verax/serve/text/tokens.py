"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.routing import Route

from verax.errors import InvalidParameterError
from verax.serve.http.body import decode
from verax.serve.http.errors import field_error
from verax.serve.http.openapi import json_routes
from verax.serve.http.server import Server
from verax.serve.http.telemetry import RequestRecord
from verax.serve.text.chat import ChatMessage, ChatRequest, ToolDefinition, render_chat
from verax.serve.text.sampling import Count
from verax.text.tokens.tokenizer import Tokenizer


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `/tokenize`: a text, or the messages of a chat."""

    elsewhere: ClassVar = frozenset(
        ("chat_template", "documents", "enable_thinking", "reasoning_effort", "tool_choice", "truncate_prompt_tokens")
    )

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

    async def tokenize(request: TokenizeRequest, record: RequestRecord) -> dict[str, Any]:
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
        answer = {"count": len(tokens), "max_model_len": server.engine.max_model_len, "tokens": tokens}
        strings = {"token_strs": [tokenizer.token(token) for token in tokens]} if request.return_token_strs else {}
        return {**answer, **strings}

    async def detokenize(request: DetokenizeRequest, record: RequestRecord) -> dict[str, str]:
        server.text_model(request.model)
        size = server.engine.model_config.vocab_size
        for i, token in enumerate(request.tokens):
            if token >= size:
                raise field_error(f"tokens[{i}]", f"{token} is outside of the vocabulary of {size}")
        decode_all = partial(_tokenizer(server).decode, request.tokens, skip_special_tokens=False)
        return {"prompt": await asyncio.to_thread(decode_all)}

    return [
        *json_routes("/tokenize", TokenizeRequest, tokenize, summary="Token ids of a text or a chat."),
        *json_routes("/detokenize", DetokenizeRequest, detokenize, summary="The text of token ids."),
    ]


def _tokenizer(server: Server) -> Tokenizer:
    if server.engine.tokenizer is None:
        raise InvalidParameterError("prompt: this server has no tokenizer")
    return server.engine.tokenizer
