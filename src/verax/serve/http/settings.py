"""Settings of the server: address, keys and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from verax.errors import InvalidParameterError

__all__ = ["ServerSettings"]


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server, checked when they are made.

    Raises:
        InvalidParameterError: for a value out of range, with its name.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """TCP port; 0 for a free one."""
    api_keys: tuple[str, ...] = ()
    """Keys that are accepted; without any, requests need none."""
    any_model_name: bool = False
    """Accept any model name in requests, for clients with a fixed one."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that requests may be for, beside the server's own address."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages, such as `https://example.com`, whose scripts may call the API."""
    max_body_bytes: int = 8 << 20
    max_video_body_bytes: int = 64 << 20
    """Limit of a request's body for `/v1/videos`, which takes pictures and clips."""
    max_n: int = 128
    """Answers to one prompt."""
    max_stop: int = 16
    """Stop strings of a request."""
    max_stop_length: int = 1024
    """Characters of a stop string: each token is compared with as many characters before it."""
    max_prompts: int = 256
    """Prompts of a request."""
    max_embedding_inputs: int = 2048
    """Texts of a request for embeddings (OpenAI's limit), and documents of one that ranks them."""
    max_queued_embedding_inputs: int = 8192
    """Texts of all requests for embeddings that may wait and run at once; as many documents of those that rank."""
    embedding_batch_size: int = 32
    """Texts that the encoder reads at once, and pairs that the reranker does."""
    max_queued_videos: int = 16
    """Clips that may wait to be made."""
    max_videos: int = 1000
    """Clips that are kept, made or not."""
    max_video_storage_bytes: int = 1 << 30
    """Bytes on disk of all clips together."""
    video_ttl: float = 3600.0
    """Seconds for which a finished clip is kept."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests have to finish, once the server is to end."""
    slow_client_timeout: float = 30.0
    """Seconds for which a client may leave its stream unread before the request is aborted, or take for its headers, or
    for its body beside a second for each `middleware.MIN_BODY_RATE` bytes."""
    ping_interval: float = 15.0
    """Seconds of silence after which a stream sends a comment, so that proxies keep it open."""
    log_format: str = "text"
    """Format of log lines: `"text"` or `"json"`."""
    log_prompts: bool = False
    """Write prompts into the log."""
    disable_page: bool = False
    """Serve the API alone."""
    reports: Path | None = None
    """Folder of the reports that the page shows."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidParameterError(f"port: expected 0 to 65535, got {self.port}")
        if self.log_format not in ("text", "json"):
            raise InvalidParameterError(f"log_format: expected text or json, got {self.log_format!r}")
        if not all(key.strip() and key.isascii() for key in self.api_keys):
            raise InvalidParameterError("api_keys: expected keys of ASCII characters that are not empty")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and not (math.isfinite(value) and value >= 0):
                raise InvalidParameterError(f"{field.name}: expected seconds, 0 or more, got {value}")
            if (field.name.startswith("max_") or field.name == "embedding_batch_size") and value < 1:
                raise InvalidParameterError(f"{field.name}: expected at least 1, got {value}")
        for name in ("ping_interval", "slow_client_timeout", "video_ttl"):
            if not getattr(self, name):
                raise InvalidParameterError(f"{name}: expected more than 0 seconds")
        if self.max_queued_embedding_inputs < self.max_embedding_inputs:
            raise InvalidParameterError(
                f"max_queued_embedding_inputs: expected at least max_embedding_inputs, which is "
                f"{self.max_embedding_inputs}, got {self.max_queued_embedding_inputs}"
            )
