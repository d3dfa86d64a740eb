"""Traces: what a collector gets of a server's requests, by OTLP over HTTP."""

import gzip
import zlib

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from tests.serve.conftest import serving
from tests.support.chat_run import running
from verax.errors import InvalidParameterError
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.text.engine.async_llm import AsyncLLM

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from verax.serve.http.telemetry import RequestTracer

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def collector():
    """URL of a collector, and the requests that it has got."""
    got = []

    async def export(request):
        unpack = {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(
            request.headers.get("content-encoding"), bytes
        )
        got.append(ExportTraceServiceRequest.FromString(unpack(await request.body())))
        return Response()

    with running(Starlette(routes=[Route("/v1/traces", export, methods=["POST"])])) as address:
        yield f"{address}/v1/traces", got


def test_a_collector_gets_a_span_of_each_request(served_llm, collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-server")
    url, got = collector
    tracer = RequestTracer.to_collector(url)
    server = Server(
        llm=AsyncLLM.from_llm(served_llm), served_names=("tiny",), settings=ServerSettings(port=0), tracer=tracer
    )
    with serving(server) as base:
        asked = {"prompt": "a secret", "max_tokens": 3, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "one"}
        usage = httpx.post(f"{base}/v1/completions", json=asked, headers=headers, timeout=60).json()["usage"]
        assert httpx.post(f"{base}/v1/completions", json={"prompt": 1}).status_code == 400
        assert httpx.get(f"{base}/health").status_code == 200
    # The end of the server sends what is left. Checks of its health have no spans.
    resources = [resource for request in got for resource in request.resource_spans]
    first, second = (span for resource in resources for part in resource.scope_spans for span in part.spans)
    names = {one.key: one.value.string_value for one in resources[0].resource.attributes}
    assert names["service.name"] == "my-server"
    values = {one.key: one.value for one in first.attributes}
    assert first.name == "POST /v1/completions"
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert values["http.response.status_code"].int_value == 200
    assert values["gen_ai.response.model"].string_value == "tiny"
    assert values["gen_ai.request.id"].string_value == "one"
    assert values["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert values["gen_ai.usage.output_tokens"].int_value == 3
    taken = (first.end_time_unix_nano - first.start_time_unix_nano) / 1e9
    assert 0 < values["gen_ai.latency.time_to_first_token"].double_value <= taken
    assert "secret" not in str(first)
    assert not second.parent_span_id
    assert {one.key: one.value.int_value for one in second.attributes}["http.response.status_code"] == 400


def test_what_is_not_a_url_is_refused():
    with pytest.raises(InvalidParameterError, match="otlp_traces_endpoint: expected a URL"):
        RequestTracer.to_collector("127.0.0.1:4318")
