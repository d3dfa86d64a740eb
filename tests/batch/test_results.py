"""The file of results, and the run that writes results in the order of the lines."""

import errno
import io
import json

import msgspec
import pytest

from verax.batch.lines import InputFile, InputLine, LineError, bad_line
from verax.batch.requests import AnswerLine, LineResponse
from verax.batch.results import LineRun, ResultFile
from verax.batch.work import VectorLine
from verax.errors import InvalidParameterError

GOOD = AnswerLine.of("good", LineResponse(200, "r1", msgspec.Raw(b'{"text": "a\\nb"}')))
REFUSED = AnswerLine.of("refused", LineResponse(400, "r2", msgspec.Raw(b'{"error": {}}')))
BROKEN = AnswerLine.failure(bad_line("invalid_json_line", "it is not JSON", 3))


@pytest.fixture
def path(tmp_path):
    output = ResultFile.open(tmp_path / "out.jsonl", AnswerLine)
    for answer in (GOOD, REFUSED, BROKEN):
        output.write(answer)
    output.file.close()
    return tmp_path / "out.jsonl"


@pytest.mark.parametrize("retry_errors", [False, True])
@pytest.mark.parametrize("kept", [1, 8, 60])
def test_a_line_that_was_cut_off_is_removed(path, kept, retry_errors):
    whole = path.read_bytes()
    path.write_bytes(whole + msgspec.json.encode(GOOD)[:kept])
    output = ResultFile.open(path, AnswerLine, retry_errors=retry_errors)
    assert output.answered == ({"good"} if retry_errors else {"good", "refused"})
    output.file.close()
    assert path.read_bytes() == (whole.splitlines(keepends=True)[0] if retry_errors else whole)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b'{"custom_id": "a", "method": "POST"}\n', "line 1"),
        (b"notes of mine", "its last line"),
        (b'{"id": 1', "its last line"),
        (b"\xff\n", "line 1"),
    ],
)
@pytest.mark.parametrize("retry_errors", [False, True])
def test_a_file_of_somebody_else_stays_unchanged(tmp_path, text, where, retry_errors):
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    with pytest.raises(InvalidParameterError, match=f"notes.txt: {where} is not a result of this command"):
        ResultFile.open(path, AnswerLine, retry_errors=retry_errors)
    assert path.read_bytes() == text


def test_nothing_follows_a_line_that_a_full_disk_cut_off():
    class FullDisk(io.BytesIO):
        def write(self, data):
            if self.tell():
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[:20])

    output = ResultFile(FullDisk(), AnswerLine)
    with pytest.raises(OSError, match="No space left"):
        output.write(GOOD)
    with pytest.raises(ValueError, match="closed file"):
        output.write(GOOD)


@pytest.mark.parametrize("retry_errors", [False, True])
def test_two_runs_do_not_write_to_one_file(path, retry_errors):
    pytest.importorskip("fcntl")
    first = ResultFile.open(path, AnswerLine, retry_errors=retry_errors)
    with pytest.raises(InvalidParameterError, match="another process is writing to it"):
        ResultFile.open(path, AnswerLine)
    first.file.close()
    ResultFile.open(path, AnswerLine).file.close()


def test_results_are_in_the_order_of_the_lines_with_an_error_for_each_wrong_one(tmp_path):
    def work(lines):
        return [
            VectorLine.failure(LineError("invalid_request", "wrong", None, None), "b")
            if line.custom_id == "b"
            else VectorLine(line.custom_id, msgspec.Raw(b"[1.0]"), None)
            for line in lines
        ]

    a, b, c = (json.dumps({"custom_id": name, "text": name}) for name in "abc")
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([a, "{no", b, "", a, c]))
    output = ResultFile.open(tmp_path / "out.jsonl", VectorLine)
    run = LineRun(InputFile(path, "text"), output, work, least=4, most=4)
    with output.file:
        run.run()
    assert run.complete
    assert (run.counts.done, run.counts.failed, run.counts.skipped) == (2, 3, 0)
    assert run.counts.bytes == path.stat().st_size
    results = [json.loads(text) for text in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [result["custom_id"] for result in results] == ["a", None, "b", "a", "c"]
    errors = [result["error"] and (result["error"]["code"], result["error"]["line"]) for result in results]
    expected = [("invalid_json_line", 2), ("invalid_request", None), ("duplicate_custom_id", 5)]
    assert errors == [None, *expected, None]


def read(path, text, field="text"):
    path.write_bytes(text)
    file = InputFile(path, field)
    return [file.read(line, number) for number, line in enumerate(file.lines(), start=1)]


def test_an_object_has_a_name_and_fields(tmp_path):
    lines = read(
        tmp_path / "in.jsonl", b'{"custom_id": "a", "text": "one", "more": 1}\n{"custom_id": 7}\n{"text": "x"}'
    )
    assert lines == [
        InputLine(1, "a", {"text": "one", "more": 1}),
        InputLine(2, "7", {}),
        InputLine(3, "3", {"text": "x"}),
    ]


def test_a_line_of_another_file_is_a_text(tmp_path):
    lines = read(tmp_path / "in.txt", '{"a": 1}\r\n  \u00fc \u2028 b\n'.encode(), "prompt")
    assert lines == [InputLine(1, "1", {"prompt": '{"a": 1}'}), InputLine(2, "2", {"prompt": "  \u00fc \u2028 b"})]


def test_a_file_of_other_lines_is_not_taken_for_texts(tmp_path):
    for name in ("in.json", "in.CSV", "in.jsonl.gz"):
        with pytest.raises(InvalidParameterError, match=r"is not read; expected a JSON object on each line \(.jsonl\)"):
            InputFile(tmp_path / name, "text")
    assert read(tmp_path / "in.NDJSON", b'{"text": "x"}') == [InputLine(1, "1", {"text": "x"})]


@pytest.mark.parametrize("name", ["in.parquet", "IN.PARQUET"])
def test_a_row_of_parquet_is_an_object(tmp_path, name):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"custom_id": "a", "text": "one", "seed": None}, {"custom_id": "b", "text": "two", "seed": 3}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    file = InputFile(tmp_path / name, "text")
    assert [file.read(line, 1).fields for line in file.lines()] == [{"text": "one"}, {"text": "two", "seed": 3}]
    assert file.size is None
    (first, _) = InputFile(file.path, "text", ("custom_id", "seed")).lines()
    assert json.loads(first) == {"custom_id": "a"}


@pytest.mark.parametrize(
    ("name", "text", "code", "message"),
    [
        ("in.jsonl", b"{no", "invalid_json_line", "line 1: it is not valid JSON"),
        ("in.jsonl", b'"a text"', "invalid_json_line", "line 1: expected a JSON object"),
        ("in.jsonl", b'{"text": "\xff"}', "invalid_line", "line 1: it is not UTF-8"),
        ("in.jsonl", b'{"text": "\\ud800"}', "invalid_json_line", "line 1: it is not valid JSON"),
        ("in.jsonl", b"[" * 5000, "invalid_json_line", "line 1: "),
        ("in.jsonl", b'{"custom_id": ["a"]}', "invalid_request", "custom_id: expected a text or a whole number"),
        ("in.jsonl", b'{"custom_id": ""}', "invalid_request", "custom_id: expected a text or a whole number"),
        ("in.txt", b"a\xff", "invalid_line", "line 1: it is not UTF-8"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(tmp_path, name, text, code, message):
    (error,) = read(tmp_path / name, text)
    assert (error.code, error.line) == (code, 1)
    assert message in error.message
