import json

import msgspec
import pytest

from verax.batch.lines import bad_line
from verax.batch.requests import AnswerLine, LineResponse, RequestLine, read_request, request_lines, write_answers
from verax.batch.results import ResultFile
from verax.errors import InvalidParameterError

pa = pytest.importorskip("pyarrow", reason="needs the extra `ray`: make test-ray installs it")
pq = pytest.importorskip("pyarrow.parquet")

BODY = {"prompt": "abc", "max_tokens": 2}


def table(tmp_path, rows):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("body", [BODY, json.dumps(BODY)], ids=["struct", "text"])
def test_rows_are_the_requests_of_lines(tmp_path, body):
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body, "more": 1}
    with request_lines(table(tmp_path, [row, {**row, "custom_id": None}])) as lines:
        first, second = (read_request(line, number) for number, line in enumerate(lines, start=1))
    assert isinstance(first, RequestLine)
    assert json.loads(bytes(first.body)) == BODY
    assert isinstance(second, AnswerLine)
    assert second.error.param == "custom_id"


def test_a_body_that_is_no_json_is_an_error_of_its_row(tmp_path):
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": "{"}
    with request_lines(table(tmp_path, [row])) as lines:
        (line,) = lines
    assert read_request(line, 1).error.code == "invalid_json_line"


def test_a_file_that_is_not_parquet_is_refused(tmp_path):
    (tmp_path / "in.parquet").write_text("no")
    with pytest.raises(InvalidParameterError, match=r"^input: .*in\.parquet: it is not a Parquet file"):
        request_lines(tmp_path / "in.parquet")


def test_answers_become_rows(tmp_path):
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
