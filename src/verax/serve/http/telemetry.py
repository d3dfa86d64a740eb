"""Reports of a server on its requests: their records, the log's lines, and OpenTelemetry's spans."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from verax._optional import require_optional
from verax.errors import InvalidParameterError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

RECORD = "verax.record"
"""Key of a scope."""


@dataclass
class RequestRecord:
    """Facts of one request for its log line."""

    request_id: str
    begin: float = field(default_factory=time.perf_counter)
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft: float | None = None
    """Seconds from the request's arrival to the first token."""
    prompt: Any = None
    """Prompt or messages, set only if the server is to log them."""

    def first_token(self) -> None:
        """Note that the first token is here, unless it was before."""
        if self.ttft is None:
            self.ttft = time.perf_counter() - self.begin


def record_of(scope: Scope) -> RequestRecord:
    """Record of the request of a scope, which the outermost middleware has put there."""
    return scope[RECORD]


ACCESS = "verax.serve.access"
"""Logger of the requests. Its records have the attribute `fields`."""

_PLAIN = re.compile(r"[!-~]+")


class TextFormatter(logging.Formatter):
    """Time, level and message; of a request, `name=value` for each field."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as text. What a client sent is quoted: it cannot begin a line of its own."""
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        if fields is not None:
            return f"{moment} {' '.join(f'{name}={_shown(value)}' for name, value in fields.items())}"
        text = f"{moment} {record.levelname}: {record.getMessage()}"
        return text if record.exc_info is None else f"{text}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """A JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as one line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        line: dict[str, Any] = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logs(format: str) -> None:
    """Send the logs of the server and its engines to standard error. `format`: `"text"` or `"json"`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    for name, level in {"verax": logging.INFO, "uvicorn": logging.WARNING}.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class RequestTracer:
    """Tracer of requests. A span continues the trace of the header `traceparent`, if the client sends one.

    The attributes have the names of OpenTelemetry's conventions for HTTP and generative models. Prompts and answers are
    not part of a span.

    `exporter`: receiver of the spans. They are sent in batches, from a thread of their own.
    """

    def __init__(self, exporter: SpanExporter):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "verax")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("verax.serve", version("verax"))
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, endpoint: str) -> RequestTracer:
        """Tracer that sends to a collector by OTLP over HTTP.

        `endpoint`: URL such as `http://127.0.0.1:4318/v1/traces`.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidParameterError(
                f"otlp_traces_endpoint: expected a URL such as http://127.0.0.1:4318/v1/traces, got {endpoint!r}"
            )
        exporters = require_optional("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        return cls(exporters.OTLPSpanExporter(endpoint=endpoint))

    def record(self, scope: Scope, record: RequestRecord, status: int) -> None:
        """Make the span of a request that has just ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end, seconds = time.time_ns(), time.perf_counter() - record.begin
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes: dict[str, Any] = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "http.response.status_code": status,
            "gen_ai.request.id": record.request_id,
            "gen_ai.response.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.latency.time_to_first_token": record.ttft,
        }
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=end - round(seconds * 1e9),
        )
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context of the running server. At its end the last spans are sent."""
        try:
            yield
        finally:
            await asyncio.to_thread(self._provider.shutdown)
