"""Lines of the input: requests, and what is wrong with a line; lines of the output that count as failed."""

import json

import msgspec
import pytest

from verax.batch.requests import URLS, AnswerLine, LineResponse, RequestLine, read_request

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "abc"}}


@pytest.mark.parametrize("url", URLS)
def test_a_request_has_its_body_as_it_stands(url):
    body = b'{"x": 123456789012345678901234567890,  "y": 1e400}'
    text = b'{"custom_id": "a", "method": "POST", "url": "%b", "body": %b, "more": 1}\n' % (url.encode(), body)
    request = read_request(text, 3)
    assert isinstance(request, RequestLine)
    assert (request.number, request.custom_id, request.url) == (3, "a", url)
    assert bytes(request.body) == body


@pytest.mark.parametrize(
    ("text", "code", "param", "message"),
    [
        (b"{", "invalid_json_line", None, "line 7: it is not valid JSON"),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None, "line 7: it is not valid JSON"),
        (b"[" * 100_000, "invalid_json_line", None, "line 7: expected a JSON object"),
        (b"[1]", "invalid_json_line", None, "line 7: expected a JSON object with custom_id, method, url and body"),
        ({"url": None}, "invalid_request", "url", "line 7: url: it is missing"),
        ({"method": "GET"}, "invalid_request", "method", "line 7: method: invalid enum value 'GET'"),
        ({"url": "/v1/nothing"}, "invalid_request", "url", "expected one of /v1/chat/completions, "),
        ({"body": "text"}, "invalid_request", "body", "line 7: body: expected a JSON object"),
        ({"body": {"stream": True}}, "invalid_request", "body.stream", "line 7: body.stream: "),
    ],
)
def test_a_wrong_line_is_named_with_its_number_and_its_field(text, code, param, message):
    if isinstance(text, dict):
        text = json.dumps({**GOOD, **text}).encode()
    answer = read_request(text, 7)
    assert isinstance(answer, AnswerLine)
    assert answer.failed
    assert answer.error is not None
    assert (answer.error.code, answer.error.param, answer.error.line) == (code, param, 7)
    assert message in answer.error.message


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_field_is_named_beside_the_id_of_the_line(field):
    answer = read_request(json.dumps({name: value for name, value in GOOD.items() if name != field}).encode(), 1)
    assert isinstance(answer, AnswerLine)
    assert answer.error is not None
    assert answer.error.message == f"line 1: {field}: it is missing"
    assert answer.custom_id == (None if field == "custom_id" else "a")


def test_an_id_that_is_no_text_is_an_error():
    answer = read_request(json.dumps({**GOOD, "custom_id": 5}).encode(), 1)
    assert isinstance(answer, AnswerLine)
    assert answer.custom_id is None
    assert answer.error is not None
    assert answer.error.param == "custom_id"


def test_a_stream_that_is_switched_off_is_none():
    assert isinstance(read_request(json.dumps({**GOOD, "body": {"stream": False}}).encode(), 1), RequestLine)


@pytest.mark.parametrize(
    ("status", "body", "failed"),
    [
        (200, b'{"usage": {}}', False),
        (200, b'{"error": null}', False),
        (400, b"{}", True),
        (200, b'{"error": {"code": "server_error", "message": "a clip that failed"}}', True),
    ],
)
def test_an_answer_failed_if_its_status_or_its_body_is_an_error(status, body, failed):
    assert AnswerLine.of("a", LineResponse(status, "id", msgspec.Raw(body))).failed is failed
