"""The application: its layers, the routes of the server itself, its settings, replicas, adapters and traces."""

import asyncio
import gzip
import json
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.serve.conftest import Api, error_of, serving, text_of
from tests.support.adapters import adapter_weights, linear_sizes, save_adapter
from tests.support.chat_run import running
from tests.support.engine import as_replicas
from tests.support.tiny import random_weights, tiny_checkpoint, tiny_config
from tests.text.conftest import make_llm
from verax import LoRARequest
from verax.errors import InvalidParameterError
from verax.serve import app as app_module
from verax.serve.app import create_app
from verax.serve.http.metrics import HISTOGRAMS
from verax.serve.http.server import LazyModel, Server
from verax.serve.http.settings import ServerSettings
from verax.serve.http.telemetry import JsonFormatter, RequestTracer, TextFormatter
from verax.text.engine.async_llm import AsyncLLM


def echo_routes(server):
    """Routes that answer the length of a body, and fail."""

    async def echo(request):
        return PlainTextResponse(str(len(await request.body())))

    async def fail(request):
        raise RuntimeError("a secret")

    return [Route("/echo", echo, methods=["POST"]), Route("/fail", fail)]


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(app_module, "ROUTES", (*app_module.ROUTES, echo_routes))

    def make(server=None, **settings):
        server = server or Server(settings=ServerSettings(**settings))
        return TestClient(create_app(server), base_url="http://127.0.0.1", raise_server_exceptions=False)

    return make


def test_every_error_has_the_same_shape_an_id_and_no_secret(client):
    for path, status, kind in (
        ("/nothing", 404, "not_found_error"),
        ("/echo", 405, "invalid_request_error"),
        ("/fail", 500, "server_error"),
    ):
        response = client().get(path)
        assert error_of(response, status)["type"] == kind
        assert response.headers["x-request-id"]
        assert "secret" not in response.text


def test_a_sane_request_id_of_the_client_is_kept(client):
    c = client()
    assert c.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert c.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"


@pytest.mark.parametrize("name", ["Authorization", "X-Api-Key"])
def test_keys_are_asked_for_everywhere_but_at_health(client, name):
    c = client(api_keys=("k1", "k2"))
    assert c.get("/health").status_code == 200
    for path in ("/v1/models", "/models", "/nothing"):
        assert error_of(c.get(path), 401)["code"] == "invalid_api_key"
        assert c.get(path, headers={name: "Bearer k3" if name == "Authorization" else "k3"}).status_code == 401
    for key in ("k1", "k2"):
        value = f"Bearer {key}" if name == "Authorization" else key
        assert c.get("/v1/models", headers={name: value}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "169.254.1.1"])
def test_a_local_server_refuses_the_names_of_others(client, host):
    assert error_of(client().get("/v1/models", headers={"Host": host}), 403)["param"] == "host"


def test_hosts_can_be_added_and_a_public_server_takes_any(client):
    assert client(allowed_hosts=("box.lan",)).get("/models", headers={"Host": "box.lan:8000"}).status_code == 200
    assert client(host="0.0.0.0").get("/models", headers={"Host": "anything"}).status_code == 200


def test_only_allowed_pages_get_permission_before_a_request(client):
    settings = ServerSettings(allowed_origins=("https://good.example",), api_keys=("secret",))
    server = Server(settings=settings)
    c, path = client(server), "/v1/chat/completions"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    asked["Access-Control-Request-Private-Network"] = "true"
    allowed = c.options(path, headers={**asked, "Origin": "https://good.example"})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://good.example"
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert allowed.headers["access-control-allow-private-network"] == "true"
    for origin in ("https://evil.example", "https://good.example.evil.example", "http://good.example"):
        refused = c.options(path, headers={**asked, "Origin": origin})
        assert refused.status_code >= 400
        assert "access-control-allow-origin" not in refused.headers
    wrong_key = c.get("/v1/models", headers={"Origin": "https://good.example"})
    assert wrong_key.status_code == 401
    assert wrong_key.headers["access-control-allow-origin"] == "https://good.example"
    assert "retry-after" in wrong_key.headers["access-control-expose-headers"]
    server.draining = True
    ending = c.get("/v1/models", headers={"Origin": "https://good.example"})
    assert ending.status_code == 503
    assert ending.headers["access-control-allow-origin"] == "https://good.example"


def test_a_long_body_is_refused_by_its_length_and_while_it_is_read(client):
    c = client(max_body_bytes=10)
    assert c.post("/echo", content=b"x" * 10).text == "10"
    assert c.post("/echo", content=b"x" * 11).status_code == 413
    assert error_of(c.post("/echo", content=(b"x" * 6 for _ in range(2))), 413)["param"] == "body"


def test_a_log_line_has_the_facts_of_a_request_and_cannot_be_split(client, caplog):
    with caplog.at_level("INFO", logger="verax.serve.access"):
        client().get("/no%0athing", headers={"x-request-id": "r1"})
    (record,) = [record for record in caplog.records if record.name == "verax.serve.access"]
    line = json.loads(JsonFormatter().format(record))
    assert (line["method"], line["path"], line["status"], line["request_id"]) == ("GET", "/no\nthing", 404, "r1")
    text = TextFormatter().format(record)
    assert "status=404" in text
    assert "\n" not in text


def test_models_are_listed_under_each_name_and_found_by_it(api):
    listed = api.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny", "alias"]
    assert listed["data"][0]["max_model_len"] == 128
    assert api.get("/v1/models/alias").json()["id"] == "alias"
    assert api.get("/v1/models/no/such").json()["error"]["code"] == "model_not_found"


def test_a_path_names_the_model_too_and_answers_have_its_own_name(engine):
    path = "/models/tiny.gguf"
    api = Api(create_app(Server(llm=engine, served_names=("tiny", "alias"), root=path)))
    body = {"prompt": "a", "max_tokens": 1}
    assert api.ok("/v1/completions", {**body, "model": path})["model"] == "tiny"
    assert api.ok("/v1/completions", {**body, "model": "alias"})["model"] == "alias"
    assert api.get(f"/v1/models/{path}").json()["id"] == "tiny"
    assert api.refused("/v1/completions", {**body, "model": "/models"}, 404)["code"] == "model_not_found"


def test_models_of_other_kinds_are_listed_before_they_are_loaded():
    def fail():
        raise AssertionError

    api = Api(create_app(Server(encoder=LazyModel("e/mbed", fail), videos=LazyModel("v", fail))))
    assert [model["id"] for model in api.get("/v1/models").json()["data"]] == ["e/mbed", "v"]
    assert api.get("/v1/models/e/mbed").json()["object"] == "model"


def test_a_server_without_a_model_says_so():
    api = Api(create_app(Server()))
    for path, body in {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/completions": {"prompt": "a"},
        "/tokenize": {"prompt": "a"},
        "/v1/embeddings": {"input": "a cat"},
        "/v1/rerank": {"query": "a", "documents": ["a cat"]},
        "/v1/videos": {"prompt": "a circle"},
    }.items():
        assert api.refused(path, body, 404)["code"] == "model_not_found"
    assert api.get("/v1/videos").json()["data"] == []


def metrics(api, label):
    """Values of a server's metrics by name, and by the label of this name that some have."""
    families = text_string_to_metric_families(api.get("/metrics").text)
    return {(s.name, s.labels.get(label)): s.value for family in families for s in family.samples}


def test_requests_are_counted_and_timed(make_api):
    api = make_api()
    before = metrics(api, "finished_reason")
    api.ok("/v1/completions", {"prompt": "abc", "max_tokens": 5, "ignore_eos": True, "n": 2})
    after = metrics(api, "finished_reason")

    def grown(name, label=None):
        return after[name, label] - before[name, label]

    assert grown("vllm:generation_tokens_total") == 10
    assert grown("vllm:prompt_tokens_total") > 0
    assert grown("vllm:request_success_total", "length") == 2
    assert grown("vllm:iteration_tokens_total_sum") > 0
    for name in HISTOGRAMS.keys() - {"iteration_tokens_total"}:
        assert grown(f"vllm:{name}_count") == 1, name


def test_drafts_are_counted_under_vllms_names(adapted):
    body = {"model": "tiny", "prompt": "abc abc abc", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    adapted.ok("/v1/completions", {**body, "logit_bias": {"20": 50, "21": 50}})
    samples = metrics(adapted, "position")
    prefix = "vllm:spec_decode_num_"
    names = ("drafts", "draft_tokens", "accepted_tokens")
    drafts, drafted, accepted = (samples[f"{prefix}{name}_total", None] for name in names)
    assert 0 < drafts < drafted
    assert 0 < accepted <= drafted
    by_place = [samples[f"{prefix}accepted_tokens_per_pos_total", str(place)] for place in range(3)]
    assert sum(by_place) == accepted
    assert by_place == sorted(by_place, reverse=True)


ASKED = {"prompt": ["abc", "once upon a time", "a small fox", "the river"], "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def pair(new_llm):
    served = AsyncLLM.from_llm(as_replicas(new_llm(), new_llm()))
    yield served
    asyncio.run(served.shutdown())


def test_each_replica_has_metrics_of_its_own(make_api, pair):
    both = make_api(llm=pair)
    both.ok("/v1/completions", ASKED)
    samples = metrics(both, "engine")
    assert [samples["vllm:generation_tokens_total", replica] for replica in "01"] == [16, 16]


def test_a_server_whose_step_does_not_end_is_not_healthy(new_llm, monkeypatch):
    served, going, may_end = AsyncLLM.from_llm(new_llm()), threading.Event(), threading.Event()
    advance = served.llm.engine.advance

    def wait():
        going.set()
        assert may_end.wait(60)
        return advance()

    monkeypatch.setattr(served.llm.engine, "advance", wait)
    api = Api(create_app(Server(llm=served, served_names=("tiny",))))
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(api.ok, "/v1/completions", ASKED)
        try:
            assert going.wait(60)
            assert api.get("/health").status_code == 200
            with monkeypatch.context() as patience:
                patience.setattr(app_module, "LONGEST_STEP", 0.0)
                assert error_of(api.get("/health"), 503)["code"] == "engine_stuck"
        finally:
            may_end.set()
        assert answer.result()["choices"]
    assert api.get("/health").status_code == 200
    asyncio.run(served.shutdown())


def test_a_server_with_a_dead_replica_says_so_everywhere(make_api, pair):
    api = make_api(llm=pair)
    assert api.get("/health").status_code == 200

    def advance():
        raise ZeroDivisionError("planted")

    pair.llm.engines[1].advance = advance
    assert api.post("/v1/completions", ASKED).json()["error"]["code"] == "engine_dead"
    health = api.get("/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
    assert api.post("/v1/completions", {**ASKED, "prompt": "abc"}).json()["error"]["code"] == "engine_dead"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"port": 70_000}, "port: expected a whole number of 0 to 65535"),
        ({"api_keys": ("",)}, "api_keys: "),
        ({"video_sizes": ("64",)}, "video_sizes: expected WIDTHxHEIGHT"),
        *(({"api_keys": (key,)}, "api_keys: ") for key in ("schlüssel", "secret ", "sec\nret")),
        *(({"chat_template_kwargs": text}, "chat_template_kwargs: ") for text in ("{", "[1]", "")),
        *(({"allowed_hosts": (host,)}, "allowed_hosts: ") for host in ("a.b:80", "http://a.example", "[::1]", "*")),
        *(
            ({"allowed_origins": (origin,)}, "allowed_origins: ")
            for origin in ("*", "a.example", "https://a.example/", "https://A.example")
        ),
        ({"max_embedding_inputs": 10, "max_queued_embedding_inputs": 9}, "max_queued_embedding_inputs: .* 10, got 9"),
    ],
)
def test_a_setting_out_of_range_is_named(settings, says):
    with pytest.raises(InvalidParameterError, match=f"^{says}"):
        ServerSettings(**settings)


GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    sizes = linear_sizes(random_weights(tiny_config()))
    folder = save_adapter(tmp_path_factory.mktemp("adapters") / "fox", adapter_weights(sizes, spread=0.5))
    return LoRARequest("fox", 1, str(folder))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, adapter):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("served") / "tiny")
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}'
    llm = make_llm(folder, max_num_seqs=1, enable_lora=True, max_lora_rank=4, speculative_config=drafts)
    engine = AsyncLLM.from_llm(llm)
    yield Api(create_app(Server(llm=engine, served_names=("tiny", "alias"), adapters={"fox": adapter})))
    asyncio.run(engine.shutdown())


def test_adapters_are_listed_with_their_base(adapted, adapter):
    models = {model["id"]: model for model in adapted.get("/v1/models").json()["data"]}
    assert list(models) == ["tiny", "alias", "fox"]
    assert (models["fox"]["parent"], models["fox"]["root"]) == ("tiny", adapter.lora_path)
    assert models["tiny"]["parent"] is None
    assert adapted.get("/v1/models/fox").json() == models["fox"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc def", **GREEDY}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], **GREEDY}),
        ("/v1/responses", {"input": "abc", "temperature": 0, "max_output_tokens": 8}),
    ],
)
def test_the_model_of_a_request_chooses_the_adapter(adapted, path, body):
    texts = {}
    for name in ("tiny", "alias", "fox"):
        answer = adapted.ok(path, {"model": name, **body})
        assert answer["model"] == name
        texts[name] = text_of(answer)
    assert texts["tiny"] == texts["alias"] != texts["fox"]


def test_an_unknown_name_is_answered_with_those_that_are_served_unless_any_may_be_given(adapted, make_api):
    error = adapted.refused("/v1/completions", {"model": "wolf", "prompt": "abc"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "tiny, alias, fox" in error["message"]
    assert make_api(any_model_name=True).ok("/v1/completions", {"model": "wolf", **ASKED})["model"] == "wolf"


def test_an_adapter_cannot_have_the_models_name(adapter):
    with pytest.raises(InvalidParameterError, match="lora_modules: tiny is the model's own name"):
        Server(served_names=("tiny",), adapters={"tiny": adapter})


TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def collector():
    """URL of a collector by OTLP over HTTP, and the requests that it has got."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    got, service = [], pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

    async def export(request):
        unpack = {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(
            request.headers.get("content-encoding"), bytes
        )
        got.append(service.ExportTraceServiceRequest.FromString(unpack(await request.body())))
        return Response()

    with running(Starlette(routes=[Route("/v1/traces", export, methods=["POST"])])) as address:
        yield f"{address}/v1/traces", got


def test_a_collector_gets_a_span_of_each_request(served_llm, collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-server")
    url, got = collector
    tracer = RequestTracer.to_collector(url)
    llm = AsyncLLM.from_llm(served_llm)
    server = Server(llm=llm, served_names=("tiny",), settings=ServerSettings(port=0), tracer=tracer)
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


def test_a_collector_that_is_not_a_url_is_refused():
    with pytest.raises(InvalidParameterError, match="otlp_traces_endpoint: expected a URL"):
        RequestTracer.to_collector("127.0.0.1:4318")
