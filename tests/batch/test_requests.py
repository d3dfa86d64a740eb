"""Requests of OpenAI's batch files: lines, rows of Parquet, and answers of an application in this process."""

import json

import msgspec
import pytest

from verax.batch.lines import bad_line
from verax.batch.requests import URLS, AnswerLine, LineResponse, RequestLine, read_request, request_lines, write_answers
from verax.batch.results import ResultFile
from verax.errors import InvalidParameterError

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
        ({"custom_id": 5}, "invalid_request", "custom_id", "line 7: custom_id: "),
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


BODY = {"prompt": "abc", "max_tokens": 2}


@pytest.fixture
def pq():
    return pytest.importorskip("pyarrow.parquet", reason="needs the extra `ray`: make test-ray installs it")


@pytest.mark.parametrize("body", [BODY, json.dumps(BODY)], ids=["struct", "text"])
def test_rows_are_the_requests_of_lines(pq, tmp_path, body):
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body, "more": 1}
    import pyarrow

    pq.write_table(pyarrow.Table.from_pylist([row, {**row, "custom_id": None}]), tmp_path / "in.parquet")
    with request_lines(tmp_path / "in.parquet") as lines:
        first, second = (read_request(line, number) for number, line in enumerate(lines, start=1))
    assert isinstance(first, RequestLine)
    assert json.loads(bytes(first.body)) == BODY
    assert isinstance(second, AnswerLine)
    assert second.error.param == "custom_id"


def test_a_file_that_is_not_parquet_is_refused(pq, tmp_path):
    (tmp_path / "in.parquet").write_text("no")
    with pytest.raises(InvalidParameterError, match=r"^input: .*in\.parquet: it is not a Parquet file"):
        request_lines(tmp_path / "in.parquet")


def test_answers_become_rows(pq, tmp_path):
    output = ResultFile.open(tmp_path / "out.parquet.jsonl", AnswerLine)
    output.write(AnswerLine.of("a", LineResponse(200, "req-1", msgspec.Raw(b'{"x": 1}'))))
    output.write(AnswerLine.failure(bad_line("invalid_request", "url: wrong", 2, "url"), "b"))
    output.file.close()
    write_answers(tmp_path / "out.parquet.jsonl", tmp_path / "out.parquet")
    first, second = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert (first["custom_id"], first["status_code"], json.loads(first["body"])) == ("a", 200, {"x": 1})
    assert first["error"] is None
    assert (second["custom_id"], second["status_code"]) == ("b", None)
    assert json.loads(second["error"])["param"] == "url"
