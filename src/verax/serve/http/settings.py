"""Settings of the server: address, keys and limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verax.errors import InvalidParameterError
from verax.options import check_options, documented, option

SIZE = r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}"
"""Regular expression of the size of a clip: `WIDTHxHEIGHT` in pixels."""

_HOST = re.compile(r"[^\s/:*\[\]]+|[0-9a-f.]*:[0-9a-f.:]*:[0-9a-f.:]*", re.IGNORECASE)
"""Name, or address of IPv4 or IPv6."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/A-Z]+|null")

_ACCESS = "Access"
_LIMITS = "Limits"


@documented
@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server, checked at construction."""

    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 for all.")
    port: int = option(8000, "Port to listen at; 0 for a free one.", low=0, high=65535)
    chat_template_kwargs: Mapping[str, Any] | str | None = option(
        None, 'Variables of the chat template where a request does not set them, as JSON: `{"enable_thinking": false}`.'
    )
    any_model_name: bool = option(False, "Accept any model name, for clients with a fixed one.")
    api_keys: tuple[str, ...] = option(
        (),
        "Key that requests need; can be repeated. Without any, requests need none.",
        flags=("--api-key",),
        envvar="VERAX_API_KEY",
        panel=_ACCESS,
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "Name that the server is called by, if not its address; can be repeated.", panel=_ACCESS
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origin of web pages whose scripts may call the server (CORS); can be repeated. Such as `https://example.com`.",
        panel=_ACCESS,
    )
    max_body_bytes: int = option(8 << 20, "Most bytes of a request's body.", low=1, panel=_LIMITS)
    max_video_body_bytes: int = option(
        64 << 20, "Most bytes of a body for /v1/videos, which takes pictures and clips.", low=1, panel=_LIMITS
    )
    max_n: int = option(128, "Most answers to one prompt.", low=1, panel=_LIMITS)
    max_stop: int = option(16, "Most stop strings of a request.", low=1, panel=_LIMITS)
    max_stop_length: int = option(
        1024,
        "Most characters of a stop string. Each token is compared with as many characters before it.",
        low=1,
        panel=_LIMITS,
    )
    max_prompts: int = option(256, "Most prompts of a request.", low=1, panel=_LIMITS)
    max_embedding_inputs: int = option(
        2048,
        "Most texts of a request for embeddings, or documents of a ranking. The default is OpenAI's limit.",
        low=1,
        panel=_LIMITS,
    )
    max_queued_embedding_inputs: int = option(
        8192,
        "Most texts that wait or run for embeddings, or documents for rankings; more get 429.",
        low=1,
        panel=_LIMITS,
    )
    embedding_batch_size: int = option(
        32, "Texts that the encoder or the reranker reads at once.", low=1, panel=_LIMITS
    )
    video_sizes: tuple[str, ...] = option(
        (),
        "Size that clips may have, WIDTHxHEIGHT; can be repeated. Each takes time to compile and memory. Without any, "
        "clips may have up to 4 times the pixels of the usual size.",
        panel=_LIMITS,
    )
    max_queued_videos: int = option(16, "Most clips that wait to be made; more get 429.", low=1, panel=_LIMITS)
    max_videos: int = option(1000, "Most clips that are kept; more get 429.", low=1, panel=_LIMITS)
    max_video_storage_bytes: int = option(
        1 << 30, "Most bytes on disk of all clips; more get 429.", low=1, panel=_LIMITS
    )
    video_ttl: float = option(3600.0, "Seconds for which a finished clip is kept.", low=0, above=True, panel=_LIMITS)
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests have to finish, once the server is to end.", low=0
    )
    slow_client_timeout: float = option(
        30.0,
        "Seconds for which a client may leave its stream unread, and that it has to send its headers. A body has them "
        "too, and a second for each `middleware.MIN_BODY_RATE` bytes.",
        low=0,
        above=True,
        panel=_LIMITS,
    )
    ping_interval: float = option(
        15.0,
        "Seconds of silence after which a stream sends a comment, so that proxies keep it open.",
        low=0,
        above=True,
    )
    log_format: str = option("text", "Format of log lines: text or json.", choices=("text", "json"))
    log_prompts: bool = option(False, "Write prompts into the log.")
    disable_page: bool = option(False, "Serve the API alone.")
    reports: Path | None = option(None, "Folder of reports of verax compare and verax bench, which the page shows.")

    def __post_init__(self) -> None:
        check_options(self)
        if isinstance(self.chat_template_kwargs, str):
            try:
                object.__setattr__(self, "chat_template_kwargs", json.loads(self.chat_template_kwargs))
            except (ValueError, RecursionError) as error:
                raise InvalidParameterError(f"chat_template_kwargs: it is not JSON: {error}") from error
        if not isinstance(self.chat_template_kwargs, Mapping | None):
            problem = f"expected an object of variables, got {self.chat_template_kwargs!r}"
            raise InvalidParameterError(f"chat_template_kwargs: {problem}")
        # A value that no request can have would lock everyone out.
        if not all(key and key.isascii() and key.isprintable() and key == key.strip() for key in self.api_keys):
            raise InvalidParameterError("api_keys: expected keys of ASCII characters, not empty, without spaces around")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                problem = f"expected a name or address without a port, such as example.com, got {host!r}"
                raise InvalidParameterError(f"allowed_hosts: {problem}")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                problem = f"expected an origin as browsers send it, such as https://example.com, got {origin!r}"
                raise InvalidParameterError(f"allowed_origins: {problem}")
        for size in self.video_sizes:
            if not re.fullmatch(SIZE, size):
                raise InvalidParameterError(f"video_sizes: expected WIDTHxHEIGHT such as 832x480, got {size!r}")
        if self.max_queued_embedding_inputs < self.max_embedding_inputs:
            raise InvalidParameterError(
                f"max_queued_embedding_inputs: expected at least max_embedding_inputs, which is "
                f"{self.max_embedding_inputs}, got {self.max_queued_embedding_inputs}"
            )

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """`chat_template_kwargs` as a mapping."""
        assert not isinstance(self.chat_template_kwargs, str)
        return self.chat_template_kwargs or {}
