"""Random requests that fit the description, and some that do not: none fails on the server, and the answers fit.

`make fuzz-server` sends thousands of them.
"""

import json
import os
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi import checks  # noqa: E402

from tests.support.chat_run import running  # noqa: E402

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
TIMEOUT = 300
"""Seconds for an answer. schemathesis waits for ten, which a loaded machine can exceed."""
TIMES = int(os.environ.get("VERAX_FUZZ_TIMES", "1"))
PATHS = [
    *("/v1/chat/completions", "/v1/chat/completions/input_tokens", "/v1/completions", "/v1/responses"),
    *("/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
    *("/v1/embeddings", "/v1/rerank", "/v1/videos"),
]
PLAIN = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
"""Prompts that are fine, for half of the bodies: else most are refused for their prompt."""
REQUIRED = {*PLAIN, "max_tokens", "tokens"}
FEW = 4
"""Most optional fields of a body. Of many, two contradict each other nearly always, and the rest is not looked at."""


@schemathesis.hook
def map_body(context, body):
    """Keep few optional fields of a random body."""
    if not isinstance(body, dict):
        return body
    choose = random.Random(json.dumps(body, sort_keys=True, default=str))
    optional = sorted(set(body) - REQUIRED)
    kept = REQUIRED.union(choose.sample(optional, k=min(choose.randint(0, FEW), len(optional))))
    plain = PLAIN if choose.random() < 0.5 else {}
    return {name: plain.get(name, value) for name, value in body.items() if name in kept}


@pytest.fixture(scope="module")
def described(make_api):
    with running(make_api(any_model_name=True).app) as address:
        yield schemathesis.openapi.from_url(f"{address}/openapi.json")


@pytest.mark.parametrize(("mode", "number"), [(GenerationMode.POSITIVE, 20), (GenerationMode.NEGATIVE, 10)])
@pytest.mark.parametrize("path", PATHS)
def test_no_request_fails_on_the_server(described, path, mode, number):
    @settings(
        max_examples=number * TIMES,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described[path]["POST"].as_strategy(generation_mode=mode))
    def send(case):
        case.call_and_validate(checks=CHECKS, timeout=TIMEOUT)

    send()
