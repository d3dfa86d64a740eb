"""OpenTelemetry traces: a span for each request, sent to a collector."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from verax._optional import require_optional
from verax.errors import InvalidParameterError
from verax.serve.http.record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["RequestTracer"]


class RequestTracer:
    """Tracer of requests. A span goes on with the trace of the header `traceparent`, if the client sends one.

    The attributes have the names of OpenTelemetry's conventions for HTTP and generative models. Prompts and answers are
    not part of a span.

    Args:
        exporter: receiver of the spans. They are sent in batches, from a thread of their own.
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

        Args:
            endpoint: URL such as `http://127.0.0.1:4318/v1/traces`.

        Raises:
            InvalidParameterError: if it is no such URL.
            MissingDependencyError: without the packages of the extra `otel`.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidParameterError(
                f"otlp_traces_endpoint: expected a URL such as http://127.0.0.1:4318/v1/traces, got {endpoint!r}"
            )
        exporters = require_optional("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        return cls(exporters.OTLPSpanExporter(endpoint=endpoint))

    def record(self, scope: Scope, record: RequestRecord, status: int) -> None:
        """Make the span of a request that has just ended.

        Args:
            scope: of the request.
            record: its times and tokens.
            status: HTTP status of the answer.
        """
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
